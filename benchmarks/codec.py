"""Ratio and speed of the codec, one thread, beside ZipNN, plain zstd and memcpy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import states
from benchmarks.process import WrongBytesError
from benchmarks.samples import Job, Sample
from ckptstore import codecs
from ckptstore.chunks import CHUNK_SIZE

RUNS = 3

# A codec by name: encodes one piece (bytes, width of an item), decodes it into a buffer.
Encode = Callable[[memoryview, int], Any]
Decode = Callable[[Any, memoryview, int], None]


def _ours(mode: str) -> tuple[Encode, Decode]:
    def decode(frame: Any, room: memoryview, width: int) -> None:
        codecs.decode(frame, room, len(room), "benchmark")

    return lambda data, width: codecs.encode(data, width, mode), decode


def _zipnn() -> tuple[Encode, Decode]:
    import zipnn

    tools = {
        width: zipnn.ZipNN(input_format="byte", bytearray_dtype={2: "bfloat16", 4: "float32"}[width], threads=1)
        for width in (2, 4)
    }

    def decode(frame: Any, room: memoryview, width: int) -> None:
        room[:] = tools[width].decompress(frame)

    # It may change what it is given: it gets a copy, inside the time as in its own examples.
    return lambda data, width: tools[width].compress(bytearray(data)), decode


def _zstd() -> tuple[Encode, Decode]:
    import zstandard

    packer, unpacker = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def decode(frame: Any, room: memoryview, width: int) -> None:
        room[:] = unpacker.decompress(frame)

    return lambda data, width: packer.compress(data), decode


def _memcpy() -> tuple[Encode, Decode]:
    room = np.zeros(CHUNK_SIZE, np.uint8)

    def encode(data: memoryview, width: int) -> Any:
        np.copyto(room[: len(data)], np.frombuffer(data, np.uint8))
        return data

    def decode(frame: Any, target: memoryview, width: int) -> None:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(frame, np.uint8))

    return encode, decode


CODECS: dict[str, Callable[[], tuple[Encode, Decode]]] = {
    "ckptstore": lambda: _ours("auto"),
    "ckptstore, codec max": lambda: _ours("max"),
    "ZipNN": _zipnn,
    "zstd -1": _zstd,
    "memcpy": _memcpy,
}

ABOUT = {
    "ckptstore": "`codecs.encode(..., 'auto')` of chunks of 32 MiB",
    "ckptstore, codec max": "the same with 'max'",
    "ZipNN": "`ZipNN(bytearray_dtype=..., threads=1)` of the same chunks",
    "zstd -1": "plain zstd of the same chunks",
    "memcpy": "a copy",
}


def speed(nbytes: int, work: Callable[..., object], *args: object) -> float:
    """MB/s of CPU time, the best of three: for scripts that try a codec out."""
    best = float("inf")
    for _ in range(RUNS):
        start = time.process_time()
        work(*args)
        best = min(best, time.process_time() - start)
    return nbytes / max(best, 1e-9) / 1e6


def codec(job: Job) -> Sample:
    """Encode and decode a state in one thread; the best of three, in CPU seconds."""
    state = states.build(job.state, job.mib)
    width = 2 if job.state == "dense-bf16" else 4
    chunks = [b"".join(piece.data for piece in part) for part in states.parts(state, CHUNK_SIZE)]
    encode, decode = CODECS[job.rival]()
    room = np.zeros(CHUNK_SIZE, np.uint8)
    put, get, stored = float("inf"), float("inf"), 0
    for _ in range(RUNS):
        took_put = took_get = 0.0
        stored = 0
        for chunk in chunks:
            target = room[: len(chunk)]
            start = time.process_time()
            frame = encode(memoryview(chunk), width)
            middle = time.process_time()
            decode(frame, target.data, width)
            took_get += time.process_time() - middle
            took_put += middle - start
            stored += len(frame)
            if not np.array_equal(target, np.frombuffer(chunk, np.uint8)):
                raise WrongBytesError(f"{job.rival} decoded other bytes than were encoded")
        put, get = min(put, took_put), min(get, took_get)
    nbytes = sum(map(len, chunks))
    return Sample(
        work=job.work, where="memory", state=job.state, mib=job.mib, rival=job.rival, round=job.round, durable=False,
        seconds=put, cpu=put, peak=0, nbytes=nbytes, stored=stored, facts={"decode": get, "ratio": nbytes / stored},
    )  # fmt: skip
