"""A training run for ``test_story.py``: twenty epochs of the demo's language model, in a process of its own.

    python -m tests.cli.story_trainer URL WITNESS [POLICIES(json)]

It resumes from the newest epoch that has all of its records. For each epoch that was saved it adds a line to WITNESS:
the epoch, and digests of the state and of the model, made without ckptstore. A full disk ends it with exit code 5.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import ckptstore
from ckptstore.cli._demo_model import Shape, Trainer, fingerprint

EPOCHS = 20
NEED = ("model", "optimizer", "lr_scheduler", "data")


def main(url: str, witness: Path, policies: dict[str, str]) -> int:
    trainer = Trainer(Shape(epochs=EPOCHS, steps=2, batch=64, hidden=160))
    keep = {name: ckptstore.parse_policy(text) for name, text in policies.items()} or None
    with ckptstore.open(url, keep=keep) as repo, open(witness, "a") as told:
        newest = repo.latest(need=NEED)
        if newest is not None:
            trainer.load(newest.load())
        for epoch in range(1 if newest is None else newest.epoch + 1, EPOCHS + 1):
            loss = trainer.train_epoch()
            state = trainer.state()
            try:
                repo.save(epoch, state, {"loss": loss})
            except ckptstore.StoreFullError as error:
                print(error, file=sys.stderr)
                return 5
            line = {"epoch": epoch, "state": fingerprint(state), "model": fingerprint(state["model"])}
            told.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}))
