"""What a life of a Hugging Face Trainer does; imported by the nursery alone."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import transformers

import ckptstore
from ckptstore import KeepBest, KeepLast
from examples import transformers_training
from tests.adapters.lives import killer

warnings.simplefilter("ignore")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def train(url: str, options: dict[str, Any] | None, output: str, kill: list[Any] | None = None, **more: Any) -> Any:
    """One life of the example; its digest, the epochs that were kept, and whether they are whole."""
    watch = killer(*kill) if kill is not None else None
    keep = KeepLast(2) | KeepBest("eval_loss", 1)
    with ckptstore.open(url, options, keep=keep, on_request=watch) as repo:
        return [transformers_training.train(repo, output, **more), repo.epochs(), repo.verify().ok]


def two_ranks(url: str, output: str, port: int, **more: Any) -> Any:
    """One life of two ranks, as a launcher would start them; the digests and records that each has seen."""
    pids = []
    for rank in (1, 0):
        pid = os.fork() if rank else 0
        if pid:
            pids.append(pid)
            continue
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in here.items()})
        with ckptstore.open(url) as repo:
            digest = transformers_training.train(repo, output, ddp_backend="gloo", **more)
            newest = repo.checkpoint(repo.epochs()[-1])
        torch.distributed.destroy_process_group()
        if rank:
            os._exit(0)
        for child in pids:
            assert os.waitpid(child, 0)[1] == 0
        return [digest, repo.epochs(), sorted(newest.records)]
    return None
