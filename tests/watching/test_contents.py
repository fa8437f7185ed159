"""Whole or torn: every format that can prove it does, at every cut."""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ckptstore.files import FileSource
from ckptstore.watching.contents import Content, examine, shards
from tests.watching.fake_burn import burnpack, pack

STATE = {
    "meta": {"a": 1, "f": 1.5, "n": None, "s": "x" * 300, "neg": -5, "big": 2**40, "t": True},
    "rows": [float(i) for i in range(20_000)],
    "mixed": [1, 200, 70_000, "a", {"k": b"v"}] * 50,
    "bytes": random.Random(0).randbytes(200_000),
}
JSON = {"a": [1, {'b"]}': '\\\\"[{', "c": "é" * 1000}], "d": list(range(30_000)), "e": "\\" * 50_001 + "x"}


def look(path: Path, data: bytes) -> Content:
    path.write_bytes(data)
    with FileSource(path) as source:
        return examine(source)


def safetensors() -> bytes:
    header = json.dumps({"__metadata__": {"a": "b"}, "w": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}})
    return len(header).to_bytes(8, "little") + header.encode() + bytes(9)


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 5000)
        archive.writestr("archive/data/0", random.Random(1).randbytes(50_000))
    return out.getvalue()


def numpy_file() -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(5000.0))
    return out.getvalue()


PROVED: dict[str, Callable[[], bytes]] = {
    "model-1.mpk": lambda: msgspec.msgpack.encode(STATE),
    "model-1.mpk.gz": lambda: gzip.compress(msgspec.msgpack.encode(STATE), 1),
    "burn-1.mpk": lambda: pack(b"x" * 10_000),
    "model-1.json": lambda: json.dumps(JSON, ensure_ascii=False, indent=2).encode(),
    "model-1.json.gz": lambda: gzip.compress(json.dumps(JSON).encode()),
    "two-members.json.gz": lambda: gzip.compress(b'{"a": [1,') + gzip.compress(b"2]}"),
    "model-1.bpk": lambda: burnpack(bytes(10_000)),
    "model.safetensors": safetensors,
    "pytorch_model.bin": zipped,
    "w.npy": numpy_file,
}


@pytest.mark.parametrize("name", PROVED)
def test_a_file_is_whole_or_torn_at_every_cut(tmp_path: Path, name: str) -> None:
    """P3: whole as written; cut anywhere, or with something after its end, it is torn."""
    data = PROVED[name]()
    assert look(tmp_path / name, data).state == "whole"
    dice = random.Random(name)
    ends = {*range(1, 20), *range(len(data) - 20, len(data)), *(dice.randrange(1, len(data)) for _ in range(25))}
    for end in ends:
        found = look(tmp_path / name, data[:end])
        assert found.state == "torn", (end, len(data), found)
        assert found.why
    if not name.endswith(".bin"):
        assert look(tmp_path / name, data + b"x").state == "torn"
    assert look(tmp_path / name, b"").state == "torn"


@pytest.mark.parametrize(
    "name", ["model-1.mpk", "model-1.json", "model.safetensors", "model-1.bpk", "w.npy", "a.json.gz"]
)
def test_garbage_is_no_whole_file(tmp_path: Path, name: str) -> None:
    """P8: random bytes never prove anything, and never are an error of another kind."""
    dice = random.Random(name)
    good = PROVED.get(name, PROVED["model-1.json.gz"])()
    for _ in range(40):
        assert look(tmp_path / name, b"\xc1" + dice.randbytes(300)).state != "whole"
        spoilt = bytearray(good)
        for _ in range(3):
            spoilt[dice.randrange(min(60, len(good)))] = dice.randrange(256)
        look(tmp_path / name, bytes(spoilt))


def test_an_encoder_that_was_dropped(tmp_path: Path) -> None:
    """A gzip stream that ends properly over half a record: the record decides, not the checksum."""
    half = msgspec.msgpack.encode(STATE)[:100_000]
    assert look(tmp_path / "model-1.mpk.gz", gzip.compress(half)).state == "torn"
    found = look(tmp_path / "model-1.bin.gz", gzip.compress(half))
    assert (found.state, found.size) == ("unproven", 100_000)


def test_formats_that_prove_nothing(tmp_path: Path) -> None:
    """bincode, old pickles, a bare number: nobody can say."""
    for name, data in {"a.bin": b"abc" * 1000, "a.pt": b"\x80\x02abc", "a.json": b"12", "b.pt": b"xy"}.items():
        assert look(tmp_path / name, data).state == "unproven", name
    assert look(tmp_path / "a.json", b"null").state == "whole"
    assert look(tmp_path / "a.pt", b"PK").state == "torn"


def test_a_header_that_claims_the_world(tmp_path: Path) -> None:
    """P8: sizes in a file are not trusted."""
    assert look(tmp_path / "a.safetensors", b"\xff" * 8 + b"{}").state == "torn"
    assert look(tmp_path / "a.mpk", b"\xdd\xff\xff\xff\xff\xca").state == "torn"
    assert look(tmp_path / "a.mpk", b"\xc6\xff\xff\xff\xff").state == "torn"
    assert look(tmp_path / "a.bpk", b"NRUB\x01\x00\xff\xff\xff\xff\xa1").state == "torn"
    nested = b"NRUB\x01\x00" + (5000).to_bytes(4, "little") + b"\x81" * 5000
    assert look(tmp_path / "b.bpk", nested).state == "torn"


def _headed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def _burnpack(header: bytes) -> bytes:
    return b"NRUB\x01\x00" + len(header).to_bytes(4, "little") + header


def _zip_of(entries: int) -> bytes:
    entry = b"PK\x01\x02" + bytes(24) + (1).to_bytes(2, "little") + bytes(16) + b"a"
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFE, 0xFFFE, len(entry) * entries, 4, 0)
    return b"PK\x03\x04" + entry * entries + end


_INFINITE = b"\xfb" + struct.pack(">d", float("inf"))
BOMBS: dict[str, Callable[[], bytes]] = {
    "deep.safetensors": lambda: _headed(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "infinite.safetensors": lambda: _headed(b'{"a":{"data_offsets":[0,1e400]}}'),
    "wide.safetensors": lambda: _headed(b'{"a":[' + b"[]," * 8_000_000 + b"0]}"),
    "infinite.bpk": lambda: _burnpack(b"\xa1\x67tensors\xa1\x61a\xa1\x6cdata_offsets\x82\x00" + _INFINITE),
    "wide.bpk": lambda: _burnpack(b"\xa1\x67tensors\x9a\x00\x98\x96\x80" + b"\x80" * 10_000_000),
    "wide.pt": lambda: _zip_of(1_500_000),
}


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_header_that_is_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """P8: no error but torn, whatever is in a header, and little memory."""
    monkeypatch.setattr("ckptstore.watching.cbor.MAX_VALUES", 100_000)
    data = BOMBS[name]()
    (tmp_path / name).write_bytes(data)
    tracemalloc.start()
    try:
        with FileSource(tmp_path / name) as source:
            assert examine(source).state == "torn"
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data) + (64 << 20)
    finally:
        tracemalloc.stop()


def test_a_file_that_is_cut_while_it_is_looked_at(tmp_path: Path) -> None:
    """It is torn, and the watcher lives on."""
    path = tmp_path / "a.mpk"
    path.write_bytes(msgspec.msgpack.encode(STATE["rows"]))
    with FileSource(path) as source:
        path.write_bytes(b"\xdd")
        assert examine(source).state == "torn"


def test_shards(tmp_path: Path) -> None:
    """What an index names; nothing, where it is none."""
    path = tmp_path / "model.safetensors.index.json"
    for text, names in {
        '{"weight_map": {"a": "1.st", "b": "2.st", "c": "1.st"}}': {"1.st", "2.st"},
        "[]": set(),
        '{"weight_map": ' + "[" * 100_000: set(),
        '{"weight_map": {"a": 1e400}, "b": ' + "[" * 5000 + "]" * 5000 + "}": set(),
    }.items():
        path.write_text(text)
        with FileSource(path) as source:
            assert shards(source) == names
