"""Hostile bytes behind right digests: whoever may write to the store can sign what he wants.

Every document that is read from a store (marker, manifest, record index, frame, lease) is mutated, signed again, and
put where a reader finds it. Whatever is done with such a repository ends well or with an error of ours, in bounded
memory, and never touches anything outside of its folder (P8).
"""

from __future__ import annotations

import json
import math
import os
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import CorruptionError, FormatError, InvalidRecordError, KeepLast, Repository, ShardedArray, keys
from ckptstore.checked import decode_checked
from ckptstore.codecs import decode, encode
from ckptstore.errors import CkptStoreError
from ckptstore.indexes import decode_index, encode_index
from ckptstore.jsonsize import decoded_size
from ckptstore.manifest import (
    MAX_OBJECTS,
    PER_ARRAY,
    PER_BOX,
    PER_CHUNK,
    ArrayEntry,
    BoxEntry,
    ChunkRef,
    RecordEntry,
    RecordIndex,
    Span,
    decode_lease,
    decode_manifest,
    decode_marker,
    digest_of,
)
from ckptstore.pins import decode_pin
from ckptstore.quarantine import decode_mark
from ckptstore.stores.local import LocalStore
from ckptstore.stores.memory import MemoryStore

MIB = 1024 * 1024

# What json.dumps would not write, put in place of a text of that name.
RAW = {
    "<digits>": b"9" * 5000,
    "<negative>": b"-" + b"9" * 400,
    "<2**63>": b"9223372036854775808",
    "<inf>": b"1e999",
    "<deep>": b"[" * 5000 + b"]" * 5000,
    "<deep dict>": b'{"dict":[["a",' * 900 + b"1" + b"]]}" * 900,
    "<surrogate>": b'"\\ud800"',
    "<nul>": b'"a\\u0000b"',
    "<twice>": b'{"array":0,"array":1}',
    "<comment>": b"1/**/",
    "<bad utf-8>": b'"\xff\xfe"',
}
ATOMS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(list(RAW)),
    st.sampled_from([None, True, False, -1, 0, 1, 2, 64, 2**31, 2**53, 2**63 - 1, 2**64, -(2**70), 0.5, -0.0]),
    st.sampled_from(
        ["", ".", "..", "../../evil", "/etc/evil", "a/../../evil", "a" * 32, "b" * 64, "x" * 300, "é", "\n"]
    ),
    st.sampled_from(["numpy", "torch", "bytes", "bytearray", "<f4", "float32", "|O", "<U999999999999", "|V2147483648"]),
    st.text(max_size=8),
)
TAGS = [
    "array",
    "tuple",
    "dict",
    "odict",
    "set",
    "int",
    "float",
    "complex",
    "bytes",
    "scalar",
    "size",
    "counter",
    "defaultdict",
]
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*TAGS, "metadata", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)


def state() -> dict[str, Any]:
    """Every kind of node, arrays that share a chunk and one that has its own."""
    return {
        "w": np.arange(60_000, dtype=np.float32),
        "b": [np.arange(6, dtype=np.int16), {"n": 2**80, "nan": float("nan")}, ({1, 2}, b"raw", 1 + 2j)],
        "step": 7,
        "s": in_pieces(np.arange(600.0).reshape(30, 20)),
    }


def in_pieces(array: Any) -> ShardedArray:
    """Rows 0 to 9, and the rest in two halves."""
    boxes = [(0, 10, 0, 20), (10, 30, 0, 7), (10, 30, 7, 20)]
    return ShardedArray(array.shape, array.dtype, [((a, c), array[a:b, c:d].copy()) for a, b, c, d in boxes])


def sound_repository() -> dict[str, bytes]:
    """All objects of a small repository with two epochs, a file, and a lease."""
    store = MemoryStore()
    with Repository(store, chunk_size=64 * 1024) as repo:
        for epoch in (1, 2):
            with repo.begin(epoch, {"loss": 0.5, "nested": {"a": [1, None]}}) as txn:
                txn.write("model", state())
                txn.write_file("notes", __file__)
        repo.pin(1, "the one in the paper")
        repo.quarantine(2, "to be looked at")
        repo.scrub(max_bytes=1)
        txn = repo.begin(3)
        objects = {info.key: store.get(info.key) for info in store.list()}
        txn.abort()
    return objects


SOUND = sound_repository()
MANIFEST = keys.manifest_key(2, 1)
LEASE = next(key for key in SOUND if key.startswith("leases/"))


def sign(body: bytes) -> bytes:
    """A JSON object with its right digest in front."""
    return b'{"digest":"' + digest_of(body[1:]).encode() + b'",' + body[1:]


def body_of(signed: bytes) -> bytes:
    return b"{" + signed[77:]


def dump(document: Any) -> bytes:
    data = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    for name, raw in RAW.items():
        data = data.replace(json.dumps(name).encode(), raw)
    return data


def places(node: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to everything in a document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield (*way, key)
        yield from places(child, (*way, key))


def mutate(draw: st.DrawFn, document: Any) -> Any:
    """Replace, drop or double one to three things in a JSON document."""
    for _ in range(draw(st.integers(1, 3))):
        if not isinstance(document, dict) or not document:
            break
        member = draw(st.sampled_from(list(document)))  # each as often as the others, however much is in it
        *way, last = draw(st.sampled_from([(member,), *((member, *way) for way in places(document[member]))]))
        holder = document
        for step in way:
            holder = holder[step]
        action = draw(st.sampled_from(["replace", "replace", "drop", "double", "wrap"]))
        if action == "replace":
            holder[last] = draw(VALUES)
        elif action == "wrap":
            holder[last] = [holder[last]]
        elif action == "drop":
            del holder[last]
        elif isinstance(holder, list):
            holder.append(holder[last])
        else:
            holder[draw(st.text(max_size=4))] = holder[last]
    return document


def flip(draw: Callable[..., Any], data: bytes) -> bytes:
    """Change, cut, insert or repeat some bytes."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(changed)))
        stop = min(len(changed), at + draw(st.integers(0, 8)))
        same = st.binary(min_size=stop - at, max_size=stop - at)
        changed[at:stop] = draw(same | st.binary(max_size=8) | st.just(bytes(changed[at:stop]) * 2))
    return bytes(changed)


@st.composite
def bodies(draw: st.DrawFn, body: bytes) -> bytes:
    """A JSON object like ``body``, with damage that a parser, or only its reader, can see."""
    if draw(st.integers(0, 3)) == 0:
        return flip(draw, body) or b"{"
    return dump(mutate(draw, json.loads(body)))


@st.composite
def repositories(draw: st.DrawFn) -> dict[str, bytes]:
    """All objects of a repository in which one document is hostile, and all digests are right."""
    objects = dict(SOUND)
    documents = {
        "marker": keys.MARKER,
        "manifest": MANIFEST,
        "lease": LEASE,
        "pin": keys.pin_key(1),
        "quarantine": keys.quarantine_key(2, 1),
        "checked": keys.CHECKED,
    }
    victim = draw(st.sampled_from([*documents, "index", "skeleton", "skeleton", "arrays", "boxes", "frame"]))
    if victim in documents:
        key = documents[victim]
        objects[key] = sign(draw(bodies(body_of(objects[key]))))
        return objects
    manifest = json.loads(body_of(objects[MANIFEST]))
    number = draw(st.integers(0, len(manifest["records"]) - 1))
    entry = manifest["records"][number]
    prefix = f"attempts/{entry['attempt']}"
    raw = zstandard.decompress(objects[f"{prefix}/records/{entry['digest']}"])
    if victim == "frame":
        chunk = draw(st.sampled_from(json.loads(raw)["chunks"]))
        key = f"attempts/{chunk[0]}/chunks/{chunk[1]}"
        objects[key] = seal(flip(draw, objects[key]))
        return objects
    if victim == "index":
        hostile = draw(bodies(raw))
    elif victim == "boxes":
        document = json.loads(raw)
        sharded = [array for array in document["arrays"] if array[5]]
        for array in sharded:
            array[2:6] = mutate(draw, dict(enumerate(array[2:6]))).values()
        hostile = dump(document)
    else:
        document = json.loads(raw)
        hostile = dump(document | mutate(draw, {victim: document[victim]}))
    objects |= place_index(manifest, number, hostile)
    return objects


def seal(frame: bytes) -> bytes:
    """A frame with the right checksum of its header."""
    return frame[:24] + zlib.crc32(frame[:24]).to_bytes(4, "little") + frame[28:]


def place_index(manifest: dict[str, Any], number: int, raw: bytes) -> dict[str, bytes]:
    """An index under its right digest, and the manifest that names it; counts are the true ones where there are any."""
    entry = manifest["records"][number]
    stored = zstandard.compress(raw)
    entry |= {"digest": digest_of(raw), "raw_length": len(raw), "stored_length": len(stored)}
    try:
        document = json.loads(raw)
        entry |= {"arrays": len(document["arrays"]), "chunks": len(document["chunks"])}
        entry["boxes"] = sum(len(array[5]) for array in document["arrays"])
        entry["bytes_state"] = sum(span[2] for array in document["arrays"] for span in array[3])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        pass
    key = f"attempts/{entry['attempt']}/records/{entry['digest']}"
    return {key: stored, MANIFEST: sign(json.dumps(manifest, separators=(",", ":")).encode())}


def uses(repo: Repository, folder: Path) -> Iterator[Callable[[], object]]:
    """Everything that a user does with a repository, reading first."""
    yield repo.epochs
    yield repo.latest
    yield lambda: repo.latest(deep=True)
    yield repo.verify
    for epoch in (1, 2):
        yield lambda epoch=epoch: repo.checkpoint(epoch).metadata  # type: ignore[misc]
        yield lambda epoch=epoch: repo.checkpoint(epoch).records  # type: ignore[misc]
        yield lambda epoch=epoch: repo.checkpoint(epoch).load()  # type: ignore[misc]
        for name in names_of(repo, epoch):
            yield lambda epoch=epoch, name=name: repo.checkpoint(epoch).load(name, paths=["b*"])  # type: ignore[misc]
            yield lambda epoch=epoch, name=name: repo.checkpoint(epoch).load(name, into=state())  # type: ignore[misc]
            yield lambda epoch=epoch, name=name: repo.checkpoint(epoch).file_name(name)  # type: ignore[misc]
            yield lambda epoch=epoch, name=name: repo.checkpoint(epoch).read_file(name, folder / "file")  # type: ignore[misc]
    yield lambda: repo.prune(KeepLast(1), dry_run=True)
    yield lambda: repo.gc(dry_run=True)
    yield repo.quarantined
    yield repo.holds
    yield lambda: repo.scrub(max_bytes=1)
    yield lambda: repo.verify(resume=True)
    yield lambda: repo.repair(dry_run=True)
    yield repo.repair
    yield lambda: hold(repo)
    yield lambda: repo.save(4, {"model": state()})
    yield lambda: repo.save(2, {"model": state()}, replace=True)
    yield lambda: repo.prune(KeepLast(1))
    yield lambda: repo.gc(grace=0)
    yield lambda: repo.delete(2)


def hold(repo: Repository) -> None:
    with repo.hold(1) as ckpt:
        ckpt.load()


def names_of(repo: Repository, epoch: int) -> list[str]:
    try:
        return list(repo.checkpoint(epoch).records)
    except CkptStoreError:
        return []


def use_all(store: Any, folder: Path) -> None:
    """Do all of it. Errors of ours are fine, any other passes."""
    try:
        repo = Repository(store, create=False, chunk_size=64 * 1024)
    except CkptStoreError:
        return
    for step in uses(repo, folder):
        try:
            step()
        except CkptStoreError:
            pass


@given(objects=repositories())
def test_hostile_repositories(objects: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    """P8: only errors of ours, whatever is in a document, and less than 64 MiB for documents of a few kilobytes."""
    store = MemoryStore()
    for key, data in objects.items():
        store.put(key, data)
    folder = tmp_path_factory.mktemp("out")
    tracemalloc.start()
    try:
        use_all(store, folder)
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()
    assert set(os.listdir(folder)) <= {"file"}


@given(objects=repositories())
def test_nothing_outside_of_the_folder(objects: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    """P8: on a disk, nothing beside the repository is made, changed or removed."""
    around = tmp_path_factory.mktemp("around")
    (around / "evil").write_bytes(b"bystander")
    (around / "out").mkdir()
    for key, data in objects.items():
        path = around / "a" / "repository" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    use_all(LocalStore(around / "a" / "repository"), around / "out")
    assert (around / "evil").read_bytes() == b"bystander"
    assert sorted(os.listdir(around)) == ["a", "evil", "out"]
    assert os.listdir(around / "a") == ["repository"]
    assert set(os.listdir(around / "out")) <= {"file"}


def test_the_fuzz_gets_behind_the_digests(tmp_path: Path) -> None:
    """The tools above sign well: the sound repository, and one with an index written anew, verify and load."""
    manifest = json.loads(body_of(SOUND[MANIFEST]))
    entry = manifest["records"][0]
    raw = zstandard.decompress(SOUND[f"attempts/{entry['attempt']}/records/{entry['digest']}"])
    document = json.loads(raw) | {"unknown": [1, {"x": 2}]}
    for objects in (SOUND, SOUND | place_index(manifest, 0, dump(document))):
        store = MemoryStore()
        for key, data in objects.items():
            store.put(key, data)
        with Repository(store, create=False) as repo:
            assert repo.verify().ok
            assert repo.checkpoint(2).load("model")["step"] == 7


DECODERS: list[Callable[[bytes], object]] = [
    decode_marker,
    lambda data: decode_manifest(data, MANIFEST),
    lambda data: decode_lease(data, LEASE),
    lambda data: decode_pin(data, keys.pin_key(1)),
    lambda data: decode_mark(data, keys.quarantine_key(2, 1)),
    decode_checked,
    lambda data: decode_index(data, entry_of(data)),
    lambda data: decode(data, None, 1000, "attempts/x/chunks/y"),
]


def entry_of(stored: bytes, raw: bytes = b"?", arrays: int = 0, chunks: int = 0, boxes: int = 0) -> RecordEntry:
    return RecordEntry(
        name="m",
        kind="state",
        attempt="a" * 32,
        digest=digest_of(raw),
        raw_length=len(raw),
        stored_length=len(stored),
        arrays=arrays,
        chunks=chunks,
        bytes_state=0,
        bytes_stored=0,
        boxes=boxes,
    )


@pytest.mark.parametrize("number", range(len(DECODERS)))
@given(data=st.binary(max_size=200) | st.binary(max_size=60).map(lambda rest: sign(b"{" + rest)))
def test_arbitrary_bytes(number: int, data: bytes) -> None:
    """P8: bytes of any kind are damage or of a newer version, to every decoder."""
    with pytest.raises((CorruptionError, FormatError)):
        DECODERS[number](data)


@given(data=st.data())
def test_mutated_frames(data: st.DataObject) -> None:
    """P8: a frame that was mutated and sealed again is damage, of a newer version, or as long as it should be."""
    raw = np.arange(500, dtype=np.float32).tobytes()
    frame = seal(flip(data.draw, encode(raw, data.draw(st.sampled_from([1, 2, 4, 8])))))
    try:
        assert len(decode(frame, None, len(raw), "k")) == len(raw)
    except (CorruptionError, FormatError):
        pass


# ---------------------------------------------------------------- bombs

PATTERNS = [
    b"[],", b"{},", b"[[]],", b'{"a":{}},', b'{"":0},', b"[0],", b"[300],", b'["ab"],', b'"a",', b"1.5,", b"300,",
    b'{"array":0},', '"é",'.encode(), '"\U0001f600",'.encode(),
]  # fmt: skip
BOMBS = [b"[],", b'{"":0},', b'"a",', b"300,"]


def index_of(pattern: bytes, total: int, member: bytes) -> bytes:
    """An index of about ``total`` bytes that is nothing but ``pattern`` in one of its members."""
    body = b"[" + pattern * (total // len(pattern)) + b"0]"
    rest = {b"arrays": b"[]", b"chunks": b"[]", b"skeleton": b"0"} | {member: body}
    return b'{"format":1,"name":"m","kind":"state",' + b",".join(b'"%s":%s' % pair for pair in rest.items()) + b"}"


def peak_of(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
    except (CorruptionError, FormatError):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("pattern", BOMBS, ids=repr)
def test_bombs(pattern: bytes) -> None:
    """P8: no index takes more than 64 MiB beyond twice its own length, however little of it is on the store."""
    raw = index_of(pattern, 50 * MIB, b"skeleton")
    stored = zstandard.compress(raw)
    peak = peak_of(lambda: decode_index(stored, entry_of(stored, raw)))
    assert peak <= MAX_OBJECTS + 2 * len(raw) + MIB, f"{peak / MIB:.0f} MiB"


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_the_measure_is_an_upper_bound(pattern: bytes) -> None:
    """What is measured beforehand is at least what decoding takes, whatever a document is full of."""
    raw = index_of(pattern, MIB, b"skeleton")
    assert peak_of(lambda: msgspec.json.decode(raw, type=RecordIndex)) <= decoded_size(raw) + 64 * 1024


@pytest.mark.parametrize("member", [b"arrays", b"chunks", b"unknown"])
@pytest.mark.parametrize("pattern", [b"[],", b'["","",[],[]],', b'["","",0,0],'])
def test_bombs_elsewhere(member: bytes, pattern: bytes) -> None:
    """P8: the same in lists of arrays and chunks, whatever number of them the manifest claims."""
    raw = index_of(pattern, 8 * MIB, member)
    stored = zstandard.compress(raw)
    counts = [(0, 0, 0), (500_000, 0, 0), (0, 100_000, 0), (0, 0, 800_000), (len(raw), 0, 0), (0, len(raw), 0)]
    for arrays, chunks, boxes in (*counts, (0, 0, len(raw)), (-1, -1, -1)):
        entry = entry_of(stored, raw, arrays, chunks, boxes)
        peak = peak_of(lambda entry=entry: decode_index(stored, entry))  # type: ignore[misc]
        counted = PER_ARRAY * min(max(arrays, 0), 500_000) + PER_CHUNK * min(max(chunks, 0), len(raw) // 100)
        counted += PER_BOX * min(max(boxes, 0), len(raw) // 10)
        assert peak <= MAX_OBJECTS + 2 * len(raw) + counted + MIB, f"{peak / MIB:.0f} MiB"


@pytest.mark.parametrize("pattern", BOMBS, ids=repr)
def test_bombs_in_a_manifest(pattern: bytes) -> None:
    """P8: a manifest of its largest length, full of empty lists, is damage and takes no memory."""
    body = body_of(SOUND[MANIFEST])
    bomb = b'{"bomb":[' + pattern * (15 * MIB // len(pattern)) + b"0]," + body[1:]
    metadata = body.replace(b'"metadata":', b'"metadata":[' + pattern * (15 * MIB // len(pattern)) + b'0],"x":', 1)
    for hostile in (sign(bomb), sign(metadata)):
        peak = peak_of(lambda hostile=hostile: decode_manifest(hostile, MANIFEST))  # type: ignore[misc]
        assert peak <= MAX_OBJECTS + 2 * len(hostile) + MIB, f"{peak / MIB:.0f} MiB"


@given(document=VALUES, texts=st.lists(st.text(alphabet='a[]{},:"\\é', max_size=12), max_size=4))
def test_the_measure_sees_structure_only(document: Any, texts: list[str]) -> None:
    """What is inside of texts is not taken for structure, whatever quotes and backslashes are in it."""
    plain = json.dumps([document, *("" for _ in texts)], ensure_ascii=False).encode("utf-8", "surrogatepass")
    full = json.dumps([document, *texts], ensure_ascii=False).encode("utf-8", "surrogatepass")
    wide = 4 if not full.isascii() or b"\\u" in full else 1
    assert 0 <= decoded_size(full) - decoded_size(plain) <= wide * len(full)


def boxes_of(boxes: list[tuple[Any, Any, Any]], **other: Any) -> tuple[bytes, RecordEntry]:
    """An index with one array of 4 × 6 bytes in a chunk, and the boxes that are said to make it up."""
    lengths = other.pop("lengths", [math.prod(shape) for _, shape, _ in boxes])
    version = other.pop("format", 2)
    array = {"kind": "numpy", "dtype": "uint8", "shape": (4, 6)} | other
    starts = [min(sum(lengths[:number]), 24 - length) for number, length in enumerate(lengths[:100])]
    spans = [(0, start, length) for start, length in zip(starts, lengths, strict=False)] or []
    spans += [(0, 0, length) for length in lengths[100:]]
    document = {
        "format": version,
        "name": "m",
        "kind": "state",
        "skeleton": {"array": 0},
        "arrays": [(array["kind"], array["dtype"], array["shape"], spans, "", boxes)],
        "chunks": [("a" * 32, "b" * 64, 24, 24)],
    }
    raw = json.dumps(document).encode()
    stored = zstandard.compress(raw)
    return stored, entry_of(stored, raw, 1, 1, len(boxes))


SOUND_BOXES: list[tuple[Any, Any, Any]] = [((0, 0), (2, 6), 1), ((2, 0), (2, 3), 1), ((2, 3), (2, 3), 1)]
BAD_BOXES: dict[str, tuple[list[tuple[Any, Any, Any]], dict[str, Any]]] = {
    "old format": (SOUND_BOXES, {"format": 1}),
    "gap": (SOUND_BOXES[:2], {}),
    "twice": ([*SOUND_BOXES[:2], SOUND_BOXES[1]], {}),
    "overlap": ([((0, 0), (3, 6), 1), ((2, 0), (1, 6), 1)], {}),
    "outside": ([((0, 0), (2, 6), 1), ((2, 1), (2, 6), 1)], {}),
    "beyond 64 bits": ([((2**64, 0), (2, 6), 1), ((2, 0), (2, 6), 1)], {"lengths": [12, 12]}),
    "negative": ([((0, 0), (2, 6), 1), ((-2, 0), (2, 6), 1)], {}),
    "negative size": ([((0, 0), (-2, -6), 1), ((2, 0), (2, 6), 1)], {}),
    "empty box": ([((0, 0), (4, 6), 1), ((0, 0), (0, 6), 0)], {"lengths": [24]}),
    "dimensions": ([((0,), (2, 6), 1), ((2, 0), (2, 6), 1)], {}),
    "no dimensions": ([((), (), 24)], {"lengths": [1] * 24}),
    "too few spans": ([((0, 0), (2, 6), 1), ((2, 0), (2, 6), 1)], {"lengths": [24]}),
    "too many spans": ([((0, 0), (2, 6), 1), ((2, 0), (2, 6), 1)], {"lengths": [12, 11, 1]}),
    "huge number of spans": ([((0, 0), (2, 6), 2**62), ((2, 0), (2, 6), 1)], {"lengths": [12, 12]}),
    "negative number of spans": ([((0, 0), (2, 6), 2), ((2, 0), (2, 6), -1)], {"lengths": [12]}),
    "bytes": ([((0, 0), (2, 6), 1), ((2, 0), (2, 6), 1)], {"lengths": [11, 13]}),
    "cut elements": (
        [((0, 0), (2, 3), 2), ((2, 0), (2, 3), 1)],
        {"dtype": "int16", "shape": (4, 3), "lengths": [11, 1, 12]},
    ),
    "kind": (SOUND_BOXES, {"kind": "bytes"}),
    "type": (SOUND_BOXES, {"dtype": "|O"}),
    "type without bytes": (SOUND_BOXES, {"dtype": "|V0"}),
    "shape": (SOUND_BOXES, {"shape": (4, 7)}),
    "negative shape": (SOUND_BOXES, {"shape": (-4, -6)}),
    "huge shape": ([((0,) * 65, (1,) * 65, 1)], {"shape": (1,) * 65}),
    "floats": ([((0.0, 0), (4, 6), 1)], {}),
    "short": ([((0, 0), (4, 6), ())], {}),
}


@pytest.mark.parametrize("case", BAD_BOXES)
def test_boxes_that_make_no_array(case: str) -> None:
    """P8: whatever is wrong with the boxes of an array is damage, and told when the index is decoded."""
    boxes, other = BAD_BOXES[case]
    stored, entry = boxes_of(boxes, **other)
    with pytest.raises((CorruptionError, FormatError)):
        decode_index(stored, entry)


def test_boxes_that_do() -> None:
    """The same without a fault is read, by a manifest that counts them; one that does not is damage."""
    stored, entry = boxes_of(SOUND_BOXES)
    assert decode_index(stored, entry).boxes == 3
    for boxes in (0, 2, 4, -1):
        with pytest.raises(CorruptionError):
            decode_index(stored, msgspec.structs.replace(entry, boxes=boxes))


def test_boxes_that_take_for_ever_to_compare() -> None:
    """P8: boxes that no order tells apart are damage after a bounded effort; those of a real grid are read."""
    crossed = [BoxEntry((i, 0), (1, 39_999), 1) for i in range(20_000)]
    crossed += [BoxEntry((0, i), (20_000, 1), 1) for i in range(20_000)]
    spans = (Span(0, 0, 39_999),) * 20_000 + (Span(0, 0, 20_000),) * 20_000
    hostile = ArrayEntry("numpy", "uint8", (20_000, 59_999), spans, "", tuple(crossed))
    with pytest.raises(CorruptionError, match="complicated"):
        decode_again((hostile,), 39_999)
    arrays = []
    for _ in range(40):
        boxes = tuple(BoxEntry((16 * i, 8 * j), (16, 8), 1) for i in range(32) for j in range(32))
        arrays.append(ArrayEntry("numpy", "uint8", (512, 256), (Span(0, 0, 128),) * 1024, "", boxes))
    assert decode_again(tuple(arrays), 128).boxes == 40 * 1024


def decode_again(arrays: tuple[ArrayEntry, ...], raw: int) -> RecordIndex:
    """An index of these arrays, all in one chunk, after it was encoded and decoded."""
    chunk = ChunkRef("a" * 32, "b" * 64, raw, raw)
    index = RecordIndex(format=2, name="m", kind="state", skeleton=0, arrays=arrays, chunks=(chunk,))
    digest, raw_length, stored = encode_index(index)
    entry = entry_of(stored, b"", len(arrays), 1, index.boxes)
    return decode_index(stored, msgspec.structs.replace(entry, digest=digest, raw_length=raw_length))


def test_a_newer_format_is_told() -> None:
    """An index of a format that is not known yet is no damage: the message says to upgrade."""
    stored, entry = boxes_of(SOUND_BOXES, format=3)
    with pytest.raises(FormatError, match="format 3, this version of ckptstore reads up to 2"):
        decode_index(stored, entry)


def test_large_indexes_are_read() -> None:
    """120,000 arrays in one record, a million numbers in a list, 20 MB of text: what people have is taken."""
    arrays = tuple(ArrayEntry("numpy", "float32", (0, number), ()) for number in range(120_000))
    leaves = {
        "dict": [[f"model.layers.{number}.self_attn.q_proj.weight", {"array": number}] for number in range(120_000)]
    }
    for skeleton, some in ((leaves, arrays), (list(range(1_280_000)), ()), ("{[,:" * 5_000_000, ())):
        index = RecordIndex(name="m", kind="state", skeleton=skeleton, arrays=some, chunks=())
        digest, raw_length, stored = encode_index(index)
        entry = entry_of(stored, b"", len(some))
        good = decode_index(stored, msgspec.structs.replace(entry, digest=digest, raw_length=raw_length))
        assert good.skeleton == skeleton
        assert good.arrays == some


@pytest.mark.parametrize("skeleton", [[[]] * 1_000_000, [0.5] * 3_000_000], ids=["lists", "floats"])
def test_what_no_reader_takes_is_refused(skeleton: Any) -> None:
    """P4: a save that reported success can be read: the writer has the reader's bounds."""
    index = RecordIndex(name="m", kind="state", skeleton=skeleton, arrays=(), chunks=())
    with pytest.raises(InvalidRecordError, match="put them into arrays"):
        encode_index(index)


def test_metadata_that_no_reader_takes() -> None:
    """P4: the same for metadata, before anything is written."""
    store = MemoryStore()
    repo = Repository(store)
    before = sorted(info.key for info in store.list())
    with pytest.raises(InvalidRecordError, match="too many values"):
        repo.save(1, {"m": {}}, {"many": [[]] * 1_000_000})
    assert sorted(info.key for info in store.list()) == before
