"""What a life of a Lightning run does; imported by the nursery alone."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import ckptstore
from ckptstore import KeepBest, KeepLast
from examples import lightning_training
from tests.adapters.lives import killer

warnings.simplefilter("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


def train(url: str, options: dict[str, Any] | None, kill: list[Any] | None = None, **more: Any) -> Any:
    """One life of the example; its digest, and the epochs that were kept."""
    watch = killer(*kill) if kill is not None else None
    keep = KeepLast(2) | KeepBest("val_loss", 1)
    with ckptstore.open(url, options, keep=keep, on_request=watch) as repo:
        return [lightning_training.train(repo, **more), repo.epochs(), repo.verify().ok]
