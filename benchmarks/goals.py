"""The goals: what was promised, computed from the samples of a run. One function owns each goal.

A claim that lacks samples is "not measured" and says why; it never counts as reached.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from benchmarks import goals_dcp
from benchmarks.claims import (
    MIB,
    OURS,
    SHOWN,
    Claim,
    Samples,
    at_least,
    at_most,
    beside,
    faster,
    ratio,
    size,
    time,
    unmeasured,
)
from benchmarks.samples import Run, median, pairs

RAW = "ckptstore, codec raw"
PLAIN = "plain file"
CLIENTS = ("s3fs, 8 threads", "obstore, 8 threads")
FSSPEC = "torch DCP, FsspecWriter"
LOADERS = {"torch.save + fsync": "torch.load", "torch DCP + fsync": "DCP load"}
FLAT = 64
"""By how many MiB the peak may differ between the smallest and the largest state and still be called flat."""
EPOCHS = 10_000
DENSE = ("adam", "dense-fp32", "dense-bf16", "random")
VERBS = ("put", "get", "info", "list", "delete")


def claims(run: Run) -> list[Claim]:
    """All claims of all goals, in order; a run of the profile ``dcp`` has goals of its own."""
    goals = goals_dcp.GOALS if run.profile == "dcp" else GOALS
    return [claim for owner in goals.values() for claim in owner(run)]


def folder_save(run: Run) -> Iterator[Claim]:
    """Goal 1: a durable save to a folder against writing and syncing the same bytes."""
    for state, limit in (("adam", 0.7), ("dense-fp32", 1.0)):
        what = f"durable save to a folder / write and fsync, {state}"
        found = list(beside(run, OURS, PLAIN, work="save", where="folder", state=state))
        for mib, ours, theirs in found:
            yield ratio(1, f"{what}, {size(mib)}", ours, theirs, limit)
        if not found:
            yield unmeasured(run, 1, what, f"≤ {limit:g}", "save", OURS, PLAIN)


def folder_restore(run: Run) -> Iterator[Claim]:
    """Goal 2: a verified restore in place against reading into the same buffers, and against the usual loaders."""
    for state in ("adam", "dense-fp32"):
        for name, kind, limit in ((RAW, "raw", 1.2), (OURS, "compressed", 2.5)):
            what = f"restore from a folder ({kind}) / readinto, {state}"
            found = list(beside(run, name, PLAIN, work="restore", where="folder", state=state))
            for mib, ours, theirs in found:
                yield ratio(2, f"{what}, {size(mib)}", ours, theirs, limit)
            if not found:
                yield unmeasured(run, 2, what, f"≤ {limit:g}", "restore", name, PLAIN)
    for name, loader in LOADERS.items():
        what = f"restore from a folder beside {loader}, adam"
        found = list(beside(run, OURS, name, work="restore", where="folder", state="adam"))
        for mib, ours, theirs in found:
            yield faster(2, f"{what}, {size(mib)}", ours, theirs, 2)
        if not found:
            yield unmeasured(run, 2, what, "≥ 2", "restore", OURS, name)


def s3_save(run: Run) -> Iterator[Claim]:
    """Goal 3: a save to S3 against the best bare client that sends the same state uncompressed."""
    yield from _s3(run, 3, "save", {"adam": 0.8, "random": 1.1}, "DCP FsspecWriter")


def s3_restore(run: Run) -> Iterator[Claim]:
    """Goal 4: a restore from S3 against the best bare client."""
    yield from _s3(run, 4, "restore", {"adam": 0.9, "random": 1.15}, "DCP FsspecReader")


def _s3(run: Run, goal: int, work: str, limits: dict[str, float], dcp: str) -> Iterator[Claim]:
    for state, limit in limits.items():
        by_size: dict[int, tuple[Samples, Samples]] = {}
        for name in CLIENTS:
            for mib, ours, theirs in beside(run, OURS, name, work=work, where="s3", state=state):
                if mib not in by_size or median(theirs) < median(by_size[mib][1]):
                    by_size[mib] = ours, theirs
        for mib, (ours, theirs) in by_size.items():
            what = f"{work} on S3 / the same bytes by the best bare client ({theirs[0].rival}), {state}, {size(mib)}"
            yield ratio(goal, what, ours, theirs, limit)
        if not by_size:
            what = f"{work} on S3 / the same bytes by the best bare client, {state}"
            yield unmeasured(run, goal, what, f"≤ {limit:g}", work, OURS, *CLIENTS)
    what = f"{work} on S3 beside {dcp}, adam"
    found = list(beside(run, OURS, FSSPEC, work=work, where="s3", state="adam"))
    for mib, ours, theirs in found:
        yield faster(goal, f"{what}, {size(mib)}", ours, theirs, 3)
    if not found:
        yield unmeasured(run, goal, what, "≥ 3", work, OURS, FSSPEC)


def async_stall(run: Run) -> Iterator[Claim]:
    """Goal 5: how long a save in the background holds up training, against one copy in memory."""
    what, found = "stall of a save in the background / memcpy", False
    for state in dict.fromkeys(s.state for s in run.select(work="stall")):
        for mib, ours, theirs in beside(run, OURS, "memcpy", work="stall", state=state):
            found = True
            yield ratio(5, f"{what}, {state}, {size(mib)}", ours, theirs, 1.15)
    if not found:
        yield unmeasured(run, 5, what, "≤ 1.15", "stall", OURS)


def codec(run: Run) -> Iterator[Claim]:
    """Goal 6: the codec's ratio and speed on one core, and beside ZipNN."""
    for state, least in (("dense-fp32", 1.19), ("dense-bf16", 1.48)):
        ours = run.select(work="codec", state=state, rival=OURS)
        if not ours:
            yield unmeasured(run, 6, f"ratio and speed of the codec, {state}", f"≥ {least:g}, ≥ 0.8", "codec", OURS)
            continue
        shrunk = ours[0].nbytes / ours[0].stored
        yield at_least(6, f"ratio, {state}", shrunk, least, f"{shrunk:.3f}")
        speed = ours[0].nbytes / median(ours) / 1e9
        yield at_least(6, f"GB/s a core, encoding {state}", speed, 0.8, f"{speed:.2f}")
        found = list(beside(run, OURS, "ZipNN", work="codec", state=state))
        for _, mine, theirs in found:
            other = theirs[0].nbytes / theirs[0].stored
            detail = f"ratio {shrunk:.3f} to {other:.3f}"
            yield at_least(6, f"ratio / ratio of ZipNN, {state}", shrunk / other, 0.98, f"{shrunk / other:.3f}", detail)
            yield faster(6, f"encoding {state} beside ZipNN, one thread each", mine, theirs, 1)
        if not found:
            yield unmeasured(run, 6, f"the codec beside ZipNN, {state}", "≥ 1, ratio ≥ 0.98", "codec", "ZipNN")


def second_save(run: Run) -> Iterator[Claim]:
    """Goal 7: a second save after 1 % has changed: bytes sent, and time against hashing alone."""
    mine = run.select(work="again", state="lora", rival=OURS)
    for where, mib in dict.fromkeys((s.where, s.mib) for s in mine):
        ours = [s for s in mine if (s.where, s.mib) == (where, mib)]
        sent, changed = (statistics.median(s.facts[name] for s in ours) for name in ("sent", "changed"))
        detail = f"{sent / 1e6:.2f} MB sent, {changed / 1e6:.2f} MB changed"
        what = f"second save, bytes sent / bytes changed, {where}, lora, {size(mib)}"
        yield at_most(7, what, sent / changed, 1.02, f"{sent / changed:.3f}", detail)
    if not mine:
        yield unmeasured(run, 7, "second save, bytes sent / bytes changed", "≤ 1.02", "again", OURS)
    found = list(beside(run, OURS, "blake3", work="again", where="folder", state="lora"))
    for mib, ours, theirs in found:
        yield ratio(7, f"second save / hashing alone, folder, lora, {size(mib)}", ours, theirs, 1.3)
    if not found:
        yield unmeasured(run, 7, "second save / hashing alone", "≤ 1.3", "again", OURS, "blake3")


def memory(run: Run) -> Iterator[Claim]:
    """Goal 8: peak memory above the state (the worst round), and that it does not grow with the state."""
    for where in ("folder", "s3"):
        for work in ("save", "restore"):
            found = [s for s in run.select(work=work, where=where, rival=OURS) if s.state in DENSE]
            peaks = {mib: max(s.peak for s in found if s.mib == mib) / MIB for mib in sorted({s.mib for s in found})}
            what = f"MiB at the peak above the state, {work}, {where}"
            if not peaks:
                yield unmeasured(run, 8, what, "≤ 256", work, OURS)
                continue
            detail = ", ".join(f"{peak:.0f} at {size(mib)}" for mib, peak in peaks.items())
            worst = max(peaks.values())
            yield at_most(8, what, worst, 256, f"{worst:.0f}", detail)
            what = f"MiB by which that grows with the state, {work}, {where}"
            if len(peaks) == 1:
                yield unmeasured(run, 8, what, f"≤ {FLAT}", work)
                continue
            grown = peaks[max(peaks)] - peaks[min(peaks)]
            yield at_most(8, what, grown, FLAT, f"{grown:+.0f}", detail)


def small_arrays(run: Run) -> Iterator[Claim]:
    """Goal 9: 100,000 small arrays against one array of the same bytes. The restore is shown, not promised."""
    for work in ("save", "restore"):
        many = run.select(work=work, where="folder", state="small", rival=OURS)
        what = f"{work} of 100,000 arrays / of one, folder"
        for mib in sorted({s.mib for s in many}):
            ours = [s for s in many if s.mib == mib]
            one = run.select(work=work, where="folder", state="one", mib=mib, rival=OURS)
            if pairs(ours, one):
                claim = ratio(9, f"{what}, {size(mib)}", ours, one, 2)
                shown = Claim(9, claim.what, "", claim.measured, SHOWN, claim.detail)
                yield claim if work == "save" else shown
        if not many:
            yield unmeasured(run, 9, what, "≤ 2" if work == "save" else "", work, OURS)


def requests(run: Run) -> Iterator[Claim]:
    """Goal 10: requests of ``latest()`` among 10,000 epochs, and of a save beyond its chunks and records."""
    for where in ("folder", "s3"):
        yield _latest(run, where)
    for where in ("folder", "s3"):
        found = [s for s in run.select(work="save", where=where, rival=OURS) if "chunks sent" in s.facts]
        what = f"requests of a save beyond chunks and records, {where}"
        if not found:
            yield unmeasured(run, 10, what, "≤ 5", "save", OURS)
            continue
        extra = {id(s): s.facts["verbs"] - s.facts["chunks sent"] - s.facts["records"] for s in found}
        worst = max(found, key=lambda s: extra[id(s)])
        kinds = ", ".join(f"{worst.facts[f'verbs {verb}']:.0f} {verb}" for verb in VERBS)
        moved = f"{worst.facts['chunks sent']:.0f} chunks, {worst.facts['records']:.0f} records"
        detail = f"{worst.state}: {worst.facts['verbs']:.0f} ({kinds}) for {moved}"
        yield at_most(10, what, extra[id(worst)], 5, f"{extra[id(worst)]:.0f}", detail)


def _latest(run: Run, where: str) -> Claim:
    found = run.select(work="latest", where=where, mib=EPOCHS)
    what = f"requests of latest() among 10,000 epochs, {where}"
    if not found:
        return unmeasured(run, 10, what, "≤ 12", "latest", OURS)
    one = found[0]
    total = one.facts["verbs"] + one.facts["pages beyond the first"]
    detail = f"{time(median(found))}; {one.facts['verbs']:.0f} calls of the store"
    if where == "s3":
        detail += f", of which one is a listing in {one.facts['pages beyond the first'] + 1:.0f} pages of 1000 names"
        detail += f"; {one.requests} HTTP requests" if one.requests is not None else ""
    return at_most(10, what, total, 12, f"{total:.0f}", detail)


def overhead(run: Run) -> Iterator[Claim]:
    """Goal 11: what retries, limits, watches and the looks at space and writers cost a save when nothing fails."""
    found = run.select(work="guards")
    for s in found:
        what = f"durable save with all guards / without any, {s.where}, {s.state}, {size(s.mib)}"
        detail = f"{time(s.seconds)} to {time(s.facts['unguarded'])}; "
        detail += f"half of {s.facts['pairs']:.0f} pairs within {s.facts['low']:.2f}–{s.facts['high']:.2f}"
        yield at_most(11, what, s.facts["ratio"], 1.03, f"{s.facts['ratio']:.3f}", detail)
        busy = s.facts["ratio of CPU"]
        yield at_most(11, f"the same, CPU time, {s.where}, {s.state}, {size(s.mib)}", busy, 1.03, f"{busy:.3f}")
    if not found:
        yield unmeasured(run, 11, "durable save with all guards / without any", "≤ 1.03", "guards", OURS)


GOALS: dict[int, Callable[[Run], Iterator[Claim]]] = {
    1: folder_save,
    2: folder_restore,
    3: s3_save,
    4: s3_restore,
    5: async_stall,
    6: codec,
    7: second_save,
    8: memory,
    9: small_arrays,
    10: requests,
    11: overhead,
}
