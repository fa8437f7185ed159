"""Preflight: will a save fit, and may we write there at all? Asked by people before a run, and by each save for itself.

To people it gives an estimate, by what the last save took. A save is refused only on proof: what it needs is measured,
by doing all of it but the writing, and more than the disk could hold if all were gone that may go. Measuring costs as
much as hashing and coding do in a save, so that is done only where the disk is too small by the estimate.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ckptstore import keys
from ckptstore.catalog import Catalog
from ckptstore.errors import AccessError, CkptStoreError, StoreError, StoreFullError
from ckptstore.known import Known
from ckptstore.manifest import Manifest
from ckptstore.pace import Pace
from ckptstore.reclaim import Holdings, Reclaim
from ckptstore.stores import probe_conditional_put
from ckptstore.stores.base import Body, Store
from ckptstore.stores.memory import MemoryStore
from ckptstore.stores.reserve import SIZE
from ckptstore.tree import FlatState
from ckptstore.writer import RecordWriter

OVERHEAD = 256 * 1024
"""Bytes that a save takes beside its chunks, at most as a rule: lease, indexes, manifest, folders."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """What a save of so many bytes meets at a place. Sizes are in bytes; None is what the system does not tell.

    Attributes:
        url: the place.
        ok: whether a save can be expected to work.
        reason: why, or why not.
        advice: what to do; empty where there is nothing to do.
        bytes_state: of the state, before the codec.
        bytes_needed: what the save is expected to take, if none of it is there already.
        bytes_least: the same, if as much of it is there already as was last time.
        bytes_stored: what the checkpoints there take now.
        bytes_peak: old and new together, without what may go beforehand.
        bytes_debris: left by saves that never ended, or belongs to one in progress.
        prunable: epochs that the policy drops, and what each gives back.
        deletable: epochs that could be deleted at need, and what each gives back if they go oldest first.
        free: bytes that can be written there.
        files: files that can be made there.
        quota: bytes left of the quota of this user or its group.
        quota_files: files left of it.
        writable: whether an object could be written, read back and deleted.
        conditional_put: whether a create-only put is honoured there.
    """

    url: str
    ok: bool
    reason: str
    advice: str
    bytes_state: int
    bytes_needed: int
    bytes_least: int
    bytes_stored: int
    bytes_peak: int
    bytes_debris: int
    prunable: dict[int, int] = field(default_factory=dict)
    deletable: dict[int, int] = field(default_factory=dict)
    free: int | None = None
    files: int | None = None
    quota: int | None = None
    quota_files: int | None = None
    writable: bool = True
    conditional_put: bool | None = None

    def raise_if_not_ok(self) -> None:
        """Raise what the save would: AccessError if nothing can be written there, StoreFullError if it will not fit."""
        if self.ok:
            return
        message = f"{self.url}: {self.reason}" + (f"; {self.advice}" if self.advice else "")
        if self.writable:
            raise StoreFullError(
                message, errno=errno.ENOSPC, needed=self.bytes_least, free=self.free, deletable=self.deletable
            )
        raise AccessError(message)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "NOT ok"
        advice = f". {self.advice[:1].upper()}{self.advice[1:]}" if self.advice else ""
        return f"{self.url}: {verdict}: {self.reason}{advice}"


def check_place(catalog: Catalog, nbytes: int, reclaim: Reclaim | None) -> Preflight:
    """Ask a place, by writing and removing two small objects, and judge a save of ``nbytes`` of state by it.

    Args:
        reclaim: what could be freed; None where there is no repository yet.

    Raises:
        StoreError, RepositoryNotFoundError: it could not be asked; what was refused is in the answer instead.
    """
    store = catalog.store
    writable, conditional, refusal = _probe(store)
    holdings = Holdings(catalog)
    prunable, deletable = {}, {}
    if reclaim is not None:
        prunable, deletable = (holdings.freed_by(some) for some in (reclaim.droppable(), reclaim.deletable()))
    stored, sent, there = _last_ratios(catalog)
    taken = round(nbytes * stored)
    needed, least = (OVERHEAD + some for some in (taken, min(taken, max(round(nbytes * sent), taken - there))))
    space = store.space()
    facts: dict[str, Any] = {
        "bytes_state": nbytes,
        "bytes_needed": needed,
        "bytes_least": least,
        "bytes_stored": holdings.stored - holdings.unreached,
        "bytes_peak": holdings.stored - holdings.unreached + needed - sum(prunable.values()),
        "bytes_debris": holdings.unreached,
        "prunable": prunable,
        "deletable": deletable,
        "writable": writable,
        "conditional_put": conditional,
    }
    room, files = None, None
    if space is not None:
        facts.update(free=space.free, files=space.files, quota=space.quota, quota_files=space.quota_files)
        room, files = space.room, space.room_for_files
    on_full = reclaim.on_full if reclaim is not None else "raise"
    ok, reason, advice = _judge(facts, room, files, on_full, refusal)
    return Preflight(url=store.traits.url, ok=ok, reason=reason, advice=advice, **facts)


def _probe(store: Store) -> tuple[bool, bool | None, str]:
    """Whether we may write, whether create-only puts are honoured, and what was refused."""
    try:
        return True, probe_conditional_put(store), ""
    except StoreFullError:
        return True, store.traits.conditional_put, ""
    except AccessError as error:
        return False, store.traits.conditional_put, error.message


def _last_ratios(catalog: Catalog) -> tuple[float, float, int]:
    """Bytes stored and bytes sent for each byte of state, as in the newest checkpoint (1 where there is none), and all
    that it stores: no save can reuse more.
    """
    for commit in reversed(catalog.committed()):
        try:
            manifest = catalog.manifest(commit)
        except CkptStoreError as error:
            if isinstance(error, StoreError):
                raise
            continue
        if manifest.bytes_state:
            stored = _stored(manifest)
            return stored / manifest.bytes_state, manifest.bytes_sent / manifest.bytes_state, stored
    return 1.0, 1.0, 0


def _stored(manifest: Manifest) -> int:
    return sum(entry.bytes_stored + entry.stored_length for entry in manifest.records)


def _judge(
    facts: Mapping[str, Any], room: int | None, files: int | None, on_full: str, refusal: str
) -> tuple[bool, str, str]:
    """The verdict: ok, reason, advice."""
    if refusal:
        what, _, advice = refusal.rpartition("; ")
        if not what:
            what, advice = refusal, "check credentials and permissions"
        return False, f"nothing can be written there ({what})", advice
    if facts["conditional_put"] is False:
        return (
            False,
            "the server ignores conditional puts, so two writers could overwrite each other's commit",
            "use another server, or unsafe_single_writer=True if there is only one writer",
        )
    if files is not None and files < 16:
        return False, f"only {files} files can be made there", "delete some, for example old checkpoints"
    needed, least = facts["bytes_needed"], facts["bytes_least"]
    if room is None:
        return True, f"it can be written to; {human(needed)} are needed, and it does not tell how much is free", ""
    pruned = sum(facts["prunable"].values()) if on_full != "raise" else 0
    deleted = sum(facts["deletable"].values())
    have = f"{human(room)} are free"
    if needed <= room:
        return True, f"{human(needed)} are needed and {have}", ""
    if least <= room:
        reason = f"{human(needed)} are needed, {human(least)} if as much can be reused as last time, and {have}"
        return True, reason, ""
    if least <= room + pruned:
        reason = f"{human(least)} are needed, {have}, and what the policy drops gives {human(pruned)} more"
        return True, reason, ""
    reason = f"{human(least)} are needed and {have}"
    if on_full == "oldest" and least <= room + deleted:
        return True, f"{reason}; the oldest epochs will be deleted for it", ""
    if least <= room + deleted:
        return False, reason, f'{what_may_go(facts["deletable"])}, or open it with on_full="oldest"'
    if deleted:
        return False, f"{reason}; deleting old epochs gives no more than {human(deleted)}", "use a larger disk"
    return False, reason, "free some space, or use a larger disk"


def what_may_go(deletable: Mapping[int, int]) -> str:
    """Advice: which epochs could be deleted, and what that gives."""
    shown = [f"{epoch} ({human(size)})" for epoch, size in sorted(deletable.items())]
    if len(shown) > 8:
        shown = [*shown[:7], f"and {len(shown) - 7} more"]
    total = f", {human(sum(deletable.values()))} in all" if len(deletable) > 1 else ""
    return f"delete epoch {', '.join(shown)}{total}"


def human(nbytes: float) -> str:
    """Bytes for a message: ``208 B``, ``7.0 KiB``, ``0.3 MiB``, ``1.5 GiB``."""
    if nbytes < 1024:
        return f"{int(nbytes)} B"
    if nbytes < 0.1 * 1024 * 1024:
        return f"{nbytes / 1024:.1f} KiB"
    for unit in ("MiB", "GiB"):
        nbytes /= 1024 if unit == "GiB" else 1024 * 1024
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"


class _Scales(MemoryStore):
    """Takes everything and keeps nothing but its size."""

    def __init__(self) -> None:
        super().__init__()
        self._weighing = threading.Lock()
        self.weight = 0

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        nbytes = memoryview(data).nbytes
        with self._weighing:
            self.weight += nbytes


def measure(catalog: Catalog, epoch: int, flats: Mapping[str, FlatState], *, chunk_size: int, codec: str) -> int:
    """Bytes of chunks and indexes that a save of this state sends at least: all is done but the writing.

    What the base holds counts as there. What a dead attempt has left does not: that is debris, and adopting it
    saves no more than it takes.
    """
    base = catalog.base(catalog.committed(), without=epoch)

    def chunks(attempt: str) -> dict[str, int]:
        return {info.key: info.size for info in catalog.store.list(keys.chunks_prefix(attempt))}

    known = Known(chunks)
    if base is not None:
        for entry in base.records:
            known.learn(catalog.index(entry))
    pace = Pace()
    pace.spare_room = True
    scales = _Scales()
    writer = RecordWriter(scales, keys.new_attempt(), known, chunk_size=chunk_size, codec=codec, pace=pace)
    try:
        for name, flat in flats.items():
            writer.write_state(name, flat)
        writer.settle()
    finally:
        writer.close()
    return scales.weight


def lacking(store: Store, needed: int, more: int) -> bool:
    """Whether so many bytes certainly do not fit, not even with ``more`` bytes given back."""
    space = store.space()
    return space is not None and space.ceiling is not None and needed > space.ceiling + more + SIZE
