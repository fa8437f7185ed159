"""A data loader whose position can be saved."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ckptstore.errors import InvalidArgumentError
from ckptstore.preemption import GRACE


class ResumableLoader:
    """Batches of a dataset, an epoch each time it is iterated; with ``state_dict``, it goes on amid an epoch.

    The order depends on ``seed`` and the number of the epoch alone, and nothing is drawn from the global generators.
    Skipped samples are not fetched. In worker processes each sample is seeded by itself, so that random transforms are
    the same after a resume, with any number of workers.

    Args:
        dataset: with ``__len__`` and ``__getitem__``.
        batch_size: as for DataLoader.
        drop_last: as for DataLoader.
        shuffle: in an order of its own for each epoch, else in that of the dataset.
        seed: of the order, 0 to 2**31.
        rank, world_size: of several processes that share the batches, as DistributedSampler does.
        options: whatever else DataLoader takes: ``num_workers``, ``collate_fn``, ``pin_memory``, ...

    Attributes:
        epoch: the number of the epoch that is under way, or comes next.

    Raises:
        InvalidArgumentError: a dataset without a length, or numbers that make no sense.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise InvalidArgumentError("a dataset without a length: use StatefulDataLoader of torchdata")
        if batch_size < 1 or not 0 <= rank < world_size or not 0 <= seed <= 2**31:
            raise InvalidArgumentError(f"batch_size {batch_size}, rank {rank} of {world_size} or seed {seed} is wrong")
        self.epoch = 0
        self._dataset, self._options = dataset, dict(options)
        if options.get("num_workers"):
            self._options["worker_init_fn"] = _Patient(options.get("worker_init_fn"))
        self._batch_size, self._shuffle, self._drop_last = batch_size, shuffle, drop_last
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._samples = 0  # that were handed out in this epoch, by all ranks
        self._through = False  # this process has handed out the last batch, and nobody has asked for one more

    def __len__(self) -> int:
        """Batches of a whole epoch, for each rank."""
        mine = -(-len(self._dataset) // self._world_size)
        return mine // self._batch_size if self._drop_last else -(-mine // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        """What is left of the epoch, then the next one begins."""
        if self._through:  # whoever counts batches never asks for the one after the last
            self.set_epoch(self.epoch + 1)
        batches, epoch = self._batches(), self.epoch
        seed = self._mixed()
        generator = torch.Generator().manual_seed(seed)
        dataset = _Seeded(self._dataset, seed) if self._options.get("num_workers") else self._dataset
        loader = DataLoader(dataset, batch_sampler=batches, generator=generator, **self._options)
        for left, (batch, numbers) in enumerate(zip(loader, batches, strict=True), 1 - len(batches)):
            self._samples += len(numbers) * self._world_size
            self._through = left == 0
            yield batch
        if self.epoch == epoch:
            self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, from its first batch."""
        self.epoch, self._samples, self._through = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Where it is: behind the batch that it has handed out last."""
        size = len(self._dataset)
        state = {"epoch": self.epoch, "samples": self._samples, "seed": self._seed, "through": self._through}
        return {**state, "size": size, "shuffle": self._shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there. Batch size, ranks and workers may be others.

        Raises:
            InvalidArgumentError: amid an epoch, and the dataset has another length or is not shuffled alike.
        """
        here = {"size": len(self._dataset), "shuffle": self._shuffle}
        there = {key: state[key] for key in here}
        if state["samples"] and there != here:
            raise InvalidArgumentError(f"the data was {there} when the position amid an epoch was saved, and is {here}")
        self.epoch, self._samples, self._seed = state["epoch"], state["samples"], state["seed"]
        self._through = False  # what is left of that epoch is nothing, and then the next one begins

    def _mixed(self) -> int:
        return self._seed * 2**31 + self.epoch % 2**31

    def _batches(self) -> list[list[int]]:
        size, world = len(self._dataset), self._world_size
        generator = torch.Generator().manual_seed(self._mixed())
        order = torch.randperm(size, generator=generator) if self._shuffle else torch.arange(size)
        total = -(-size // world) * world  # as many for each rank
        order = order.repeat(-(-total // max(size, 1)))[:total]
        mine = order[self._samples :][self._rank :: world].split(self._batch_size)
        batches = [part.tolist() for part in mine if len(part)]
        return batches[:-1] if self._drop_last and batches and len(batches[-1]) < self._batch_size else batches


def next_epoch(state: Any) -> None:
    """If it is that of a ResumableLoader behind its last batch: change it to the beginning of the next epoch."""
    if isinstance(state, dict) and state.get("through") is True and {"epoch", "samples"} <= state.keys():
        state.update(epoch=state["epoch"] + 1, samples=0, through=False)


class _Patient:
    """In a worker: whoever tells a whole group of processes to end leaves it to the trainer, which has a step to end.

    A worker that dies of the first SIGTERM would end that step by an error, and with it the last save. It dies of the
    second one, or when the time is up; and when the trainer is gone, as all workers do.
    """

    def __init__(self, then: Any) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _told_to_end)
        if self._then is not None:
            self._then(worker)


def _told_to_end(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(4 * GRACE))  # one that is stuck does not keep the trainer from ending


class _Seeded(Dataset):  # type: ignore[misc]  # mypy does not look into torch
    """In a worker, whose generators nobody saves, what a sample draws depends on its number alone."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            words = np.random.SeedSequence([self._seed, index]).generate_state(4)
            random.seed(int(words[0]))
            np.random.seed(int(words[1]))
            torch.default_generator.manual_seed(int(words[2]) << 32 | int(words[3]))
        return self._dataset[index]
