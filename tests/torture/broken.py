"""Deliberately broken orders: proof that the campaigns can fail. Nothing outside this file knows how to break anything.

Each is a mistake that real checkpoint code makes. ``python -m tests.torture --broken NAME`` puts one in force, in this
process and in those that it starts, and must end with exit code 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

from ckptstore import reader, sweep, transaction
from ckptstore.codecs import decode
from ckptstore.commit import Commit
from ckptstore.errors import ObjectExistsError, StoreError
from ckptstore.manifest import ChunkRef, Manifest
from ckptstore.stores import _posix, local
from ckptstore.stores.base import Body, Store
from ckptstore.writer import RecordWriter

PIECE = 512

_put = Commit._put


def manifest_first(stack: ExitStack) -> None:
    """The manifest goes first, and the chunks that it needs after it."""

    held: dict[str, list[tuple[str, bytes]]] = {}  # attempt → what it has not put yet

    class Held:
        def __init__(self, attempt: str) -> None:
            self.puts = held.setdefault(attempt, [])

        def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
            self.puts.append((key, bytes(data)))

    class LateWriter(RecordWriter):
        def __init__(self, store: Store, attempt: str, *arguments: Any, **options: Any) -> None:
            super().__init__(store, attempt, *arguments, **options)
            self._store = Held(attempt)  # type: ignore[assignment]

    def put(self: Commit, manifest: Manifest, data: bytes) -> None:
        _put(self, manifest, data)
        for key, body in held.pop(manifest.attempt):
            self._store.put(key, body, if_absent=True)

    stack.enter_context(patch.object(transaction, "RecordWriter", LateWriter))
    stack.enter_context(patch.object(Commit, "_put", put))


def prune_first(stack: ExitStack) -> None:
    """Older epochs are deleted before the new one is committed."""

    def put(self: Commit, manifest: Manifest, data: bytes) -> None:
        others = [commit for commit in self._catalog.committed() if commit.epoch != manifest.epoch]
        sweep.delete_commits(self._catalog, others[:-1], "it is old")
        _put(self, manifest, data)

    stack.enter_context(patch.object(Commit, "_put", put))


def plain_write(stack: ExitStack) -> None:
    """A file is written piece by piece under its final name, with no sync; create-only is a look before the write."""

    def put(self: local.LocalStore, key: str, data: Body, *, if_absent: bool = False) -> None:
        path = os.path.join(self.root, key)
        if if_absent and os.path.exists(path):
            raise ObjectExistsError(f"{key!r} is there", key=key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with self._mapped("put", key), open(path, "wb", buffering=0) as file:
            view = memoryview(data).cast("B")
            for at in range(0, len(view), PIECE):
                file.write(view[at : at + PIECE])

    stack.enter_context(patch.object(local.LocalStore, "put", put))


def lost_reply_is_success(stack: ExitStack) -> None:
    """When the answer to the commit is lost, it is taken for a good one."""

    def settle(self: Commit, manifest: Manifest, error: StoreError) -> None:
        """Nobody looks."""

    stack.enter_context(patch.object(Commit, "_settle", settle))


def overwrite(stack: ExitStack) -> None:
    """The manifest is put over whatever is there."""

    def put(self: Commit, manifest: Manifest, data: bytes) -> None:
        self._store.put(manifest.key, data)

    stack.enter_context(patch.object(Commit, "_put", put))


def blind_sweep(stack: ExitStack) -> None:
    """What is swept is not compared with what other checkpoints need."""
    stack.enter_context(patch.object(sweep, "_reach", lambda *anything: None))


def unchecked(stack: ExitStack) -> None:
    """What is loaded is decoded, and not compared with its digest."""

    def decode_chunk(frame: memoryview, chunk: ChunkRef, out: Any = None, room: Any = None) -> memoryview:
        return decode(frame, out, chunk.raw_length, chunk.key, lambda piece: None, room)

    stack.enter_context(patch.object(reader, "decode_chunk", decode_chunk))


def deaf(stack: ExitStack) -> None:
    """Errors of write, sync and close are not listened to."""

    def write_file(handle: int, body: memoryview) -> tuple[int, int]:
        facts = os.fstat(handle)
        with suppress(OSError):
            vars(_posix)["os"].write(handle, body)  # by that name: a campaign may have put another one there
            vars(_posix)["os"].fsync(handle)
        with suppress(OSError):
            os.close(handle)
        return facts.st_dev, facts.st_ino

    stack.enter_context(patch.object(_posix, "write_file", write_file))
    stack.enter_context(patch.object(local, "write_file", write_file))


ORDERS: dict[str, Callable[[ExitStack], None]] = {
    "manifest-first": manifest_first,
    "prune-first": prune_first,
    "plain-write": plain_write,
    "lost-reply": lost_reply_is_success,
    "overwrite": overwrite,
    "blind-sweep": blind_sweep,
    "unchecked": unchecked,
    "deaf": deaf,
}


@contextmanager
def broken_order(name: str | None) -> Iterator[None]:
    """Break this process as ``name`` says, until the block ends. None breaks nothing."""
    with ExitStack() as stack:
        if name is not None:
            ORDERS[name](stack)
        yield
