"""The demo's training run, a process of its own that may be killed at any moment.

It reads its configuration as JSON from stdin (an argument list would show secrets to everybody) and tells its
supervisor what it does as JSON lines on stdout. What an author adds to a training loop are the lines marked 1, 2, 3.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import ckptstore
from ckptstore.cli._demo_model import Shape, Trainer, fingerprint

CHUNK_SIZE = 1024 * 1024  # small, so that a kill finds a save half sent and not before or after its only chunk

Tell = Callable[..., None]


def train(config: dict[str, Any], tell: Tell) -> None:
    """Train to the last epoch, from wherever the repository says that an earlier process got."""
    trainer = Trainer(Shape(**config["shape"]))
    begun = time.perf_counter()

    repo = ckptstore.open(config["url"], **config["open"], chunk_size=CHUNK_SIZE)  # 1
    if ckpt := repo.latest(deep=True):
        trainer.load(ckpt.load())  # 2

    first, damaged = (ckpt.epoch + 1, {s.epoch for s in ckpt.skipped}) if ckpt else (1, set())
    tell("resumed", epoch=first - 1, seconds=time.perf_counter() - begun)
    for epoch in range(first, trainer.shape.epochs + 1):
        begun = time.perf_counter()
        loss = trainer.train_epoch()
        state = trainer.state()
        tell("save", epoch=epoch, loss=loss, seconds=time.perf_counter() - begun, fingerprint=fingerprint(state))
        begun = time.perf_counter()

        saved = repo.save(epoch, state, {"loss": loss}, replace=epoch in damaged, progress=_to(tell))  # 3

        report = saved.report
        assert report is not None
        tell(
            "saved",
            epoch=epoch,
            seconds=time.perf_counter() - begun,
            bytes_state=report.bytes_state,
            bytes_sent=report.bytes_sent,
            bytes_reused=report.bytes_reused,
            bytes_stored=sum(record.bytes_stored for record in saved.records.values()),
        )
    repo.close()


def _to(tell: Tell) -> Callable[[int, int], None]:
    return lambda done, total: tell("progress", done=done, total=total)


def _tell(event: str, **facts: Any) -> None:
    # One write a line: lines of several threads do not mix, and a kill cuts none that was begun before.
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Read the configuration, train, tell."""
    try:
        train(json.load(sys.stdin), _tell)
    except ckptstore.CkptStoreError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
