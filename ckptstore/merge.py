"""Merge: the one index of a record that several ranks wrote in part.

What each rank has is laid over what the others have, path by path. Plain values and whole arrays that several ranks
have must be equal and are kept once; of sharded arrays the pieces are put together and must make the whole. Nothing is
read for it: content is compared by digests, and what cannot be proved equal by them is refused.
"""

from __future__ import annotations

import heapq
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ckptstore import garbage
from ckptstore.boxes import Box, Effort, gap, overlap
from ckptstore.chunks import DIGEST_FROM
from ckptstore.errors import InvalidRecordError
from ckptstore.manifest import ArrayEntry, BoxEntry, ChunkRef, RecordIndex, Span, format_for
from ckptstore.patches import parts_of_entry
from ckptstore.skeleton import PAIRS, ROWS, array_index, decode_leaf, join, pairs, rows, split

MAX_LISTED = 20

Numbers = dict[int, int]  # rank → number of an array there
_Nodes = list[tuple[int, Any]]  # rank and node, of all ranks that have something at a path


class _Piece(NamedTuple):
    """A box of an array as a rank has it: its bytes are the spans of that rank's chunks."""

    box: Box
    rank: int
    spans: tuple[Span, ...]
    digest: str


def merge_indexes(name: str, parts: Sequence[tuple[int, RecordIndex]]) -> RecordIndex:
    """The index of record ``name``, of which each of some ranks wrote a part.

    Args:
        parts: rank and index, as ``RecordWriter(part=True)`` wrote it; where several have the same, the first counts.

    Raises:
        InvalidRecordError: the parts do not fit together; the message lists paths and ranks.
    """
    if not parts:
        raise InvalidRecordError(f"no rank has written anything of record {name!r}")
    kinds = {index.kind for _, index in parts}
    if len(kinds) > 1:
        raise InvalidRecordError(f"record {name!r} is a file on some ranks and a state on others")
    kind = kinds.pop()
    with garbage.paused():
        trees = _Trees({rank: len(index.arrays) for rank, index in parts})
        if kind == "file":
            skeleton = trees.value("value", [(rank, index.skeleton) for rank, index in parts], name)
            trees.leaves.append((name, {rank: 0 for rank, _ in parts}, {}))
        else:
            skeleton = trees.merge([(rank, index.skeleton) for rank, index in parts], name, 0)
        arrays = _Arrays(parts, trees.problems)
        for number, (path, numbers) in enumerate(_tied(trees.leaves, arrays)):
            arrays.add(path, numbers, number)
    _refuse(name, trees.problems)
    merged = tuple(arrays.merged)
    chunks = tuple(arrays.chunks.values())
    return RecordIndex(format=format_for(merged), name=name, kind=kind, skeleton=skeleton, arrays=merged, chunks=chunks)


def _refuse(name: str, problems: list[str]) -> None:
    if problems:
        lines = problems[:MAX_LISTED]
        if len(problems) > MAX_LISTED:
            lines.append(f"... and {len(problems) - MAX_LISTED} more")
        raise InvalidRecordError(f"the ranks' parts of record {name!r} do not fit together:\n  " + "\n  ".join(lines))


# ---------------------------------------------------------------- what is where


class _Trees:
    """Lays the skeletons of the ranks over each other."""

    def __init__(self, counts: dict[int, int]) -> None:
        self._counts = counts
        self.problems: list[str] = []
        self.leaves: list[tuple[str, Numbers, dict[str, int]]] = []
        """Path of each array, its numbers, and the node that is to get its number in the merged record."""

    def merge(self, nodes: _Nodes, path: str, depth: int) -> Any:
        """The node of a path."""
        found = [(rank, *split(node, depth)) for rank, node in nodes]
        tag = found[0][1]
        for rank, other, _ in found:
            if other != tag:
                self._conflict(path, found[0][0], f"has {_a(tag)}", rank, _a(other))
                return None
        bodies = [(rank, body) for rank, _, body in found]
        if tag == "array":
            numbers = {rank: array_index(body, self._counts[rank]) for rank, body in bodies}
            self.leaves.append((path, numbers, {"array": 0}))
            return self.leaves[-1][2]
        if tag in PAIRS:
            return self._pairs(tag, nodes, path, depth)
        if tag in ROWS:
            merged = self._rows(bodies, path, depth)
            return merged if tag == "list" else {tag: merged}
        if tag == "items":
            return self._items(bodies, path, depth)
        return self.value(tag, nodes, path)

    def value(self, tag: str, nodes: _Nodes, path: str) -> Any:
        """A node without other nodes in it."""
        first, node = nodes[0]
        text = msgspec.json.encode(node)  # 1, 1.0 and True are equal, and are not the same
        for rank, other in nodes[1:]:
            if msgspec.json.encode(other) != text:
                self._conflict(path, first, f"has {_shown(tag, node)}", rank, _shown(tag, other))
                break
        return node

    def _rows(self, bodies: _Nodes, path: str, depth: int) -> list[Any]:
        lists = [(rank, rows(body)) for rank, body in bodies]
        first, length = lists[0][0], len(lists[0][1])
        for rank, items in lists:
            if len(items) != length:
                self._conflict(path, first, f"has {length} items", rank, f"{len(items)}")
                return []
        return [
            self.merge([(rank, items[number]) for rank, items in lists], join(path, number), depth + 1)
            for number in range(length)
        ]

    def _items(self, bodies: _Nodes, path: str, depth: int) -> list[Any]:
        children: dict[int, _Nodes] = {}
        for rank, body in bodies:
            for position, child in map(rows, rows(body)):
                children.setdefault(array_index(position, None), []).append((rank, child))
        missing = next(position for position in range(len(children) + 1) if position not in children)
        if missing < len(children):
            self.problems.append(f"{path}: no rank has item {missing}")
            return []
        return [self.merge(children[number], join(path, number), depth + 1) for number in range(len(children))]

    def _pairs(self, tag: str, nodes: _Nodes, path: str, depth: int) -> dict[str, Any]:
        keys: dict[bytes, tuple[Any, Any]] = {}  # JSON of a key → its node and itself
        children: dict[bytes, _Nodes] = {}
        orders = []
        for rank, node in nodes:
            found = pairs(tag, node[tag])
            entries = node[tag][1] if tag == "defaultdict" else node[tag]
            order = []
            for (key, child), entry in zip(found, entries, strict=True):
                text = msgspec.json.encode(entry[0])
                keys.setdefault(text, (entry[0], key))
                children.setdefault(text, []).append((rank, child))
                order.append(text)
            orders.append(order)
        self._distinct(keys, children, path)
        merged = [
            [keys[text][0], self.merge(children[text], join(path, keys[text][1]), depth + 1)] for text in _order(orders)
        ]
        made: dict[str, Any] = {tag: merged}
        if tag == "defaultdict":
            made[tag] = [self.value("value", [(rank, node[tag][0]) for rank, node in nodes], path), merged]
        noted = [(rank, node["metadata"]) for rank, node in nodes if "metadata" in node]
        if noted:
            made["metadata"] = self.merge(noted, join(path, "_metadata"), depth + 1)
        return made

    def _distinct(self, keys: dict[bytes, tuple[Any, Any]], children: dict[bytes, _Nodes], path: str) -> None:
        """A dictionary cannot hold both 1 and 1.0."""
        seen: dict[Any, bytes] = {}
        for text, (_, key) in keys.items():
            other = seen.setdefault(key, text)
            if other != text:
                one, two = children[other][0][0], children[text][0][0]
                self._conflict(path, one, f"has the key {other.decode()}", two, text.decode())

    def _conflict(self, path: str, rank: int, has: str, other: int, what: str) -> None:
        self.problems.append(f"{path}: rank {rank} {has}, rank {other} {what}")


def _a(tag: str) -> str:
    return f"an {tag}" if tag[0] in "aio" else f"a {tag}"


def _shown(tag: str, node: Any) -> str:
    try:
        return reprlib.repr(decode_leaf(tag, node if tag == "value" else node[tag]))
    except (InvalidRecordError, ValueError):
        return reprlib.repr(node)


def _order(orders: list[list[bytes]]) -> list[bytes]:
    """The keys of all ranks, each before those that it precedes on any rank, as far as the ranks agree."""
    if all(order == orders[0] for order in orders):
        return orders[0]
    first: dict[bytes, int] = {}
    following: dict[bytes, set[bytes]] = {}
    for order in orders:
        for number, key in enumerate(order):
            first.setdefault(key, len(first))
            following.setdefault(key, set()).update(order[number + 1 : number + 2])
    waits = dict.fromkeys(first, 0)
    for keys in following.values():
        for key in keys:
            waits[key] += 1
    ready = [(number, key) for key, number in first.items() if not waits[key]]
    heapq.heapify(ready)
    found = []
    while ready:
        _, key = heapq.heappop(ready)
        found.append(key)
        for other in following[key]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, (first[other], other))
    return found if len(found) == len(first) else list(first)


def _tied(leaves: list[tuple[str, Numbers, dict[str, int]]], arrays: _Arrays) -> Iterator[tuple[str, Numbers]]:
    """Each array of the merged record once, with its first path; the nodes of its leaves get its number.

    Leaves are the same array if a rank says so and none says that they are two.
    """
    groups = [arrays.present(numbers) for _, numbers, _ in leaves]
    owner = list(range(len(leaves)))  # the first leaf of its group
    members = {number: [number] for number in owner}
    at: dict[tuple[int, int], int] = {}
    for leaf, numbers in enumerate(groups):
        for place in list(numbers.items()):
            one, two = sorted((owner[at.setdefault(place, leaf)], owner[leaf]))
            a, b = groups[one], groups[two]
            if one != two and all(b.get(rank, number) == number for rank, number in a.items()):
                groups[one] = {**b, **a}
                for other in members[two]:
                    owner[other] = one
                members[one] += members.pop(two)
    for number, first in enumerate(sorted(members)):
        for leaf in members[first]:
            leaves[leaf][2]["array"] = number
        yield leaves[first][0], groups[first]


# ---------------------------------------------------------------- arrays


class _Arrays:
    """Puts the arrays of the merged record together."""

    def __init__(self, parts: Sequence[tuple[int, RecordIndex]], problems: list[str]) -> None:
        self._indexes = dict(parts)
        if len(self._indexes) != len(parts):
            raise InvalidRecordError("two parts are of one rank")
        self._problems = problems
        self._effort = Effort(sum(index.boxes for _, index in parts))
        self._numbers: dict[tuple[str, int], int] = {}
        self.merged: list[ArrayEntry] = []
        self.chunks: dict[tuple[str, int], ChunkRef] = {}

    def present(self, numbers: Numbers) -> Numbers:
        """Those ranks that have some of an array; all, if none has."""
        some = {rank: number for rank, number in numbers.items() if not self._is_absent(rank, number)}
        return some or numbers

    def _is_absent(self, rank: int, number: int) -> bool:
        entry = self._indexes[rank].arrays[number]
        return not entry.spans and 0 not in entry.shape

    def add(self, path: str, numbers: Numbers, number: int) -> None:
        """The next array: which one it is on each rank that has some of it."""
        assert number == len(self.merged)
        entries = [(rank, self._indexes[rank].arrays[at]) for rank, at in numbers.items()]
        first, entry = entries[0]
        self.merged.append(entry)  # in its place, if there is something wrong with it
        for rank, other in entries:
            here, there = _form(entry), _form(other)
            if here != there:
                self._problems.append(f"{path}: rank {first} has {here}, rank {rank} {there}")
                return
        pieces: dict[Box, _Piece] = {}
        for rank, other in entries:
            for piece in _pieces(rank, other):
                known = pieces.setdefault(piece.box, piece)
                if known is not piece and not self._equal(path, entry.shape, known, piece):
                    return
        if self._whole(path, entry.shape, list(pieces.values())):
            self.merged[-1] = self._entry(entry, [pieces[box] for box in sorted(pieces)])

    def _whole(self, path: str, shape: tuple[int, ...], pieces: list[_Piece]) -> bool:
        boxes = [piece.box for piece in pieces]
        try:
            pair = overlap(boxes, self._effort)
        except InvalidRecordError as error:
            self._problems.append(f"{path}: {error.message}")
            return False
        if pair is not None:
            one, two = (pieces[number] for number in pair)
            self._problems.append(
                f"{path}: the pieces {one.box} of rank {one.rank} and {two.box} of rank {two.rank} overlap"
            )
            return False
        missing = gap(shape, boxes)
        if missing is not None and missing.volume:
            self._problems.append(f"{path}: no rank has the elements {missing} of the shape {list(shape)}")
        return missing is None or not missing.volume

    def _equal(self, path: str, shape: tuple[int, ...], one: _Piece, two: _Piece) -> bool:
        """Whether two ranks have the same content; a problem if not."""
        here, there = (self._runs(piece) for piece in (one, two))
        digests = (self._digest(one), self._digest(two))
        if here == there or (digests[0] and digests[0] == digests[1]):
            return True
        where = "" if one.box.shape == shape else f" in the piece {one.box}"
        text = f"{path}: rank {one.rank} and rank {two.rank} have different content{where}"
        alike = [length for _, _, length, _ in here] == [length for _, _, length, _ in there]
        if not all(digests) and not (alike and all(entire for *_, entire in (*here, *there))):
            text = (
                f"{path}: rank {one.rank} and rank {two.rank} both have it{where}, and it cannot be proved that "
                "they have the same: save it on one of them, or with the same chunk_size on all"
            )
        self._problems.append(text)
        return False

    def _runs(self, piece: _Piece) -> list[tuple[str, int, int, bool]]:
        """The content of a piece: digest of each chunk, what of it, and whether that is all of it."""
        chunks = self._indexes[piece.rank].chunks
        return [
            (chunks[span.chunk].digest, span.offset, span.length, span.length == chunks[span.chunk].raw_length)
            for span in piece.spans
        ]

    def _digest(self, piece: _Piece) -> str:
        """The digest of all its bytes, if that is known."""
        runs = self._runs(piece)
        return runs[0][0] if len(runs) == 1 and runs[0][3] else piece.digest

    def _entry(self, entry: ArrayEntry, pieces: list[_Piece]) -> ArrayEntry:
        spans: list[Span] = []
        boxes = []
        for piece in pieces:
            mine = [self._span(piece.rank, span) for span in piece.spans]
            spans += mine
            # Smaller ones were only needed to compare the ranks.
            digest = piece.digest if sum(span.length for span in mine) >= DIGEST_FROM else ""
            boxes.append(BoxEntry(piece.box.offset, piece.box.shape, len(mine), digest))
        if len(boxes) <= 1:
            digest = boxes[0].digest if boxes else ""
            return ArrayEntry(entry.kind, entry.dtype, entry.shape, tuple(spans), digest)
        return ArrayEntry(entry.kind, entry.dtype, entry.shape, tuple(spans), "", tuple(boxes))

    def _span(self, rank: int, span: Span) -> Span:
        chunk = self._indexes[rank].chunks[span.chunk]
        key = (chunk.digest, chunk.raw_length)
        if key not in self._numbers:
            self._numbers[key] = len(self.chunks)
            self.chunks[key] = chunk
        return Span(self._numbers[key], span.offset, span.length)


@dataclass(frozen=True, slots=True)
class _Form:
    kind: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype} {list(self.shape)}"


def _form(entry: ArrayEntry) -> _Form:
    return _Form(entry.kind, entry.dtype, entry.shape)


def _pieces(rank: int, entry: ArrayEntry) -> Iterable[_Piece]:
    if not entry.spans:
        return
    digests = [box.digest for box in entry.boxes] or [entry.digest]
    for (box, spans), digest in zip(parts_of_entry(entry), digests, strict=True):
        yield _Piece(box, rank, spans, digest)
