"""A trainer that saves in the background and is killed: says what it has begun and what is committed."""

from __future__ import annotations

import sys

import ckptstore
from tests.repository.helpers import CHUNK, make_state

ITEMS = 60_000


def main() -> None:
    with ckptstore.open(sys.argv[1], chunk_size=CHUNK, codec="raw") as repo:
        before = None
        epoch = (repo.epochs() or [0])[-1]
        while True:
            epoch += 1
            state = make_state(epoch, items=ITEMS)
            handle = repo.save_async(epoch, state)  # waits for the one before
            state["model"]["w"].fill(0)
            state["optim"]["step"] = -1
            if before is not None:
                sys.stdout.write(f"committed {before.result().epoch}\n")
            sys.stdout.write(f"begun {epoch}\n")
            sys.stdout.flush()
            before = handle


if __name__ == "__main__":
    main()
