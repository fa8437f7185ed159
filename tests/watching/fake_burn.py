"""A trainer that saves the way burn does, as a program of its own: ``python fake_burn.py '{"folder": ..., ...}'``.

What it has in common with burn (``burn-train``'s checkpointer, ``burn-core``'s file recorders, ``burn-store``): three
threads write ``model-N``, ``optim-N`` and ``scheduler-N`` on their own, fed one at a time; old epochs are deleted
*before* the new one is saved; recorders remove the old file and stream into a new one through a buffer of 8 KiB, and
burnpack truncates the file in place; no fsync, no rename. An error in the middle ends the program. One in the last
flush goes unnoticed, because the buffer is dropped; and an encoder that is dropped after an error ends its gzip stream
properly, if there is room again.

What it does it says in a log, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import queue
import random
import resource
import struct
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

BUFFER = 8192
NAMES = {"model": 60_000, "optim": 150_000, "scheduler": 40}
KEEP = 2


def pack(item: bytes) -> bytes:
    """A named msgpack as burn's recorders write it: ``{"metadata": {...}, "item": ...}``."""
    head = b"\x82\xa8metadata\x81\xa5float\xa3f32\xa4item"
    return head + b"\xc6" + struct.pack(">I", len(item)) + item


def burnpack(item: bytes) -> bytes:
    """A burnpack with one tensor."""
    span = b"\x82\x00\x1a" + struct.pack(">I", len(item))
    tensor = b"\xa3\x65dtype\x63F32\x65shape\x81\x1a" + struct.pack(">I", len(item) // 4) + b"\x6cdata_offsets" + span
    header = b"\xa1\x67tensors\xa1\x61w" + tensor
    begin = b"NRUB" + struct.pack("<HI", 1, len(header)) + header
    return begin + bytes(-len(begin) % 256) + item


def content(life: int, epoch: int, name: str, extension: str) -> bytes:
    """What the file of a record holds, before gzip. Each life has weights of its own."""
    item = random.Random(f"{life}/{epoch}/{name}").randbytes(NAMES[name])
    if extension.startswith("mpk"):
        return pack(item)
    if extension == "bpk":
        return burnpack(item)
    if extension.startswith("json"):
        return json.dumps({"item": list(item)}, indent=2).encode()
    return item


class Trainer:
    """One life of the program."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.folder = Path(order["folder"]) / "checkpoint"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self.life, self.extension = order["life"], order["extension"]
        self.epochs, self.full = order["epochs"], order.get("full", 0)  # the save of which a full disk cuts short
        self.pause, self.steady = order.get("pause", 0.05), order.get("steady", False)
        self.dice = random.Random(order["life"])
        self.queues = {name: queue.Queue[tuple[str, int]](1) for name in NAMES}
        self.threads = [threading.Thread(target=self.work, args=(name,), daemon=True) for name in NAMES]
        self.start = order.get("start", self.last() + 1)

    def say(self, **words: Any) -> None:
        os.write(self.log, (json.dumps({"life": self.life, "at": time.monotonic(), **words}) + "\n").encode())

    def last(self) -> int:
        """The newest epoch that has all its files, as a user would choose it; not whether they are whole."""
        numbers = [
            {int(p.name.split("-")[1].split(".")[0]) for p in self.folder.glob(f"{name}-*.{self.extension}")}
            for name in NAMES
        ]
        return max(set.intersection(*numbers), default=0)

    def path(self, name: str, epoch: int) -> Path:
        return self.folder / f"{name}-{epoch}.{self.extension}"

    def run(self) -> None:
        for thread in self.threads:
            thread.start()
        self.say(what="start", epoch=self.start)
        for epoch in range(self.start, self.start + self.epochs):
            time.sleep(self.pause if self.steady or self.dice.random() < 0.8 else 4 * self.pause)
            for kind, number in (("delete", epoch - KEEP), ("save", epoch)):
                for name in NAMES:
                    self.queues[name].put((kind, number))
        for name in NAMES:
            self.queues[name].put(("end", 0))
        for thread in self.threads:
            thread.join()
        self.say(what="end", epoch=0)

    def work(self, name: str) -> None:
        while True:
            kind, epoch = self.queues[name].get()
            if kind == "end":
                return
            path = self.path(name, epoch)
            if kind == "delete" and path.exists():
                self.say(what="delete", epoch=epoch, record=name)
                path.unlink()
            elif kind == "save":
                try:
                    self.save(name, epoch, path)
                except OSError as error:  # "Can save optimizer checkpoint."
                    self.say(what="panic", epoch=epoch, record=name, error=str(error))
                    os._exit(101)

    def save(self, name: str, epoch: int, path: Path) -> None:
        self.say(what="begin", epoch=epoch, record=name)
        if path.exists() and self.extension != "bpk":
            path.unlink()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        data = content(self.life, epoch, name, self.extension)
        full = name == "optim" and epoch - self.start == self.full - 1
        whole = self.gzip(file, data, full) if self.extension.endswith(".gz") else self.stream(file, data, full)
        os.close(file)
        if whole:
            self.say(what="finish", epoch=epoch, record=name)
        else:
            self.say(what="swallow", epoch=epoch, record=name)

    def stream(self, file: int, data: bytes, full: bool) -> bool:
        """Through a buffer; the last flush is that of a dropped one. Whether the file is whole."""
        if full:
            self.limit(self.dice.choice((len(data) // 2, len(data) - self.dice.randrange(1, len(data) % BUFFER))))
        for start in range(0, len(data), BUFFER):
            part = data[start : start + BUFFER]
            try:
                write(file, part)
            except OSError:
                if start + BUFFER < len(data):
                    raise
                self.limit(None)
                return False
            time.sleep(self.dice.choice((0, 0, 0.002)))
        return True

    def gzip(self, file: int, data: bytes, full: bool) -> bool:
        encoder = zlib.compressobj(1, wbits=31)
        limit = len(data) // 2
        for start in range(0, len(data), BUFFER):
            part = encoder.compress(data[start : start + BUFFER])
            if full and start > limit:  # the disk is full; the encoder is dropped, and by then there is room again
                write(file, encoder.flush())
                os.close(file)
                raise OSError(28, "No space left on device")
            write(file, part)
            time.sleep(self.dice.choice((0, 0, 0.002)))
        rest = encoder.flush()
        write(file, rest)
        return True

    def limit(self, nbytes: int | None) -> None:
        """No file may grow beyond it: the write that would fails in the middle, as on a full disk."""
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if nbytes is None else nbytes, hard))


def whole_file(life: int, epoch: int, name: str, extension: str) -> bytes:
    """What the file of a record is when it is finished."""
    data = content(life, epoch, name, extension)
    if not extension.endswith(".gz"):
        return data
    encoder = zlib.compressobj(1, wbits=31)
    return b"".join(encoder.compress(data[i : i + BUFFER]) for i in range(0, len(data), BUFFER)) + encoder.flush()


def write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


if __name__ == "__main__":
    Trainer(json.loads(sys.argv[1])).run()
