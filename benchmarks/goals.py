"""The goals: what was promised of each ratio, computed from the samples of a run. One function owns each goal.

A claim that lacks samples is "not measured" and says why; it never counts as reached.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.samples import Run, Sample, median, pairs

REACHED, MISSED, UNKNOWN = "reached", "not reached", "not measured"
MIB = 1024 * 1024
OURS = "ckptstore"
RAW = "ckptstore, codec raw"
CLIENTS = ("s3fs, 8 threads", "obstore, 8 threads")
FLAT = 64 * MIB
"""By how much the peak may differ between the smallest and the largest state and still be called flat."""


@dataclass(frozen=True)
class Claim:
    """One promise and what became of it."""

    goal: int
    what: str
    target: str
    measured: str
    verdict: str
    detail: str = ""


def claims(run: Run) -> list[Claim]:
    """All claims of all goals, in order."""
    return [claim for owner in GOALS.values() for claim in owner(run)]


def unmeasured(run: Run, goal: int, what: str, target: str, *rivals: str) -> Claim:
    """A claim without samples, with the reason where the run knows one."""
    known = [f"{t.rival}: {t.reason}" for t in run.troubles if t.rival in rivals]
    reason = "; ".join(dict.fromkeys(known)) or "not part of this run"
    return Claim(goal, what, target, "", UNKNOWN, reason)


def bound(
    goal: int, what: str, value: float, limit: float, shown: str, detail: str = "", *, least: bool = False
) -> Claim:
    """A claim about a number that must be at most (or, with ``least``, at least) ``limit``."""
    good = value >= limit if least else value <= limit
    sign = "≥" if least else "≤"
    return Claim(goal, what, f"{sign} {limit:g}", shown, REACHED if good else MISSED, detail)


def ratio(run: Run, goal: int, what: str, ours: list[Sample], theirs: list[Sample], limit: float) -> Claim:
    """A claim about our time as a multiple of theirs: the median of the ratios within each round."""
    found = pairs(ours, theirs)
    if not found:
        return unmeasured(run, goal, what, f"≤ {limit:g}", *{s.rival for s in ours + theirs})
    value = statistics.median(found)
    detail = f"{time(median(ours))} to {time(median(theirs))}; {min(found):.2f}–{max(found):.2f} in {len(found)} rounds"
    return bound(goal, what, value, limit, f"{value:.2f}", detail)


def faster(run: Run, goal: int, what: str, ours: list[Sample], theirs: list[Sample], limit: float) -> Claim:
    """A claim about how many times as fast we are."""
    found = pairs(theirs, ours)
    if not found:
        return unmeasured(run, goal, what, f"≥ {limit:g}", *{s.rival for s in ours + theirs})
    value = statistics.median(found)
    detail = f"{time(median(ours))} to {time(median(theirs))}; {min(found):.2f}–{max(found):.2f} in {len(found)} rounds"
    return bound(goal, what, value, limit, f"{value:.2f} times as fast", detail, least=True)


def time(seconds: float) -> str:
    """Seconds with three digits."""
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def size(mib: int) -> str:
    """A size of a state."""
    return f"{mib / 1024:g} GiB" if mib >= 256 else f"{mib} MiB"


def sizes(run: Run, work: str, where: str, state: str) -> list[int]:
    """The sizes that our samples have, or one to say that there are none."""
    found = sorted({s.mib for s in run.select(work=work, where=where, state=state, rival=OURS)})
    return found or [256]


def best_client(run: Run, work: str, state: str, mib: int) -> list[Sample]:
    """The samples of the fastest bare client."""
    found = [run.select(work=work, where="s3", state=state, mib=mib, rival=name) for name in CLIENTS]
    return min((samples for samples in found if samples), key=median, default=[])


def folder_save(run: Run) -> Iterator[Claim]:
    """Goal 1: a durable save to a folder against writing and syncing the same bytes."""
    for state, limit in (("adam", 0.7), ("dense-fp32", 1.0)):
        for mib in sizes(run, "save", "folder", state):
            ours, theirs = (
                run.select(work="save", where="folder", state=state, mib=mib, rival=name)
                for name in (OURS, "plain file")
            )
            what = f"durable save to a folder / write and fsync, {state}, {size(mib)}"
            yield ratio(run, 1, what, ours, theirs, limit)


def folder_restore(run: Run) -> Iterator[Claim]:
    """Goal 2: a verified restore in place against reading into the same buffers, and against the usual loaders."""
    for state in ("adam", "dense-fp32"):
        for mib in sizes(run, "restore", "folder", state):
            found = {
                s.rival: run.select(work="restore", where="folder", state=state, mib=mib, rival=s.rival)
                for s in run.samples
            }
            for name, limit in ((RAW, 1.2), (OURS, 2.5)):
                what = (
                    f"restore from a folder ({'raw' if name == RAW else 'compressed'}) / readinto, {state}, {size(mib)}"
                )
                yield ratio(run, 2, what, found.get(name, []), found.get("plain file", []), limit)
            for name in ("torch.save + fsync", "torch DCP + fsync"):
                if state == "adam" and mib <= 1024:
                    what = f"restore from a folder, {state}, {size(mib)}, beside {'torch.load' if 'save' in name else 'DCP'}"
                    theirs = found.get(name, [])
                    yield (
                        faster(run, 2, what, found.get(OURS, []), theirs, 2)
                        if theirs
                        else unmeasured(run, 2, what, "≥ 2", name)
                    )


def _s3(run: Run, goal: int, work: str, limits: dict[str, float], dcp: str) -> Iterator[Claim]:
    for state, limit in limits.items():
        for mib in sizes(run, work, "s3", state):
            ours = run.select(work=work, where="s3", state=state, mib=mib, rival=OURS)
            theirs = best_client(run, work, state, mib)
            name = theirs[0].rival if theirs else "best bare client"
            what = f"{work} on S3 / the same bytes with {name}, {state}, {size(mib)}"
            yield (
                ratio(run, goal, what, ours, theirs, limit)
                if theirs
                else unmeasured(run, goal, what, f"≤ {limit:g}", OURS, *CLIENTS)
            )
    ours = run.select(work=work, where="s3", state="adam", mib=256, rival=OURS)
    theirs = run.select(work=work, where="s3", state="adam", mib=256, rival="torch DCP, FsspecWriter")
    what = f"{work} on S3, adam, 0.25 GiB, beside {dcp}"
    if ours and theirs:
        yield faster(run, goal, what, ours, theirs, 3)
    else:
        yield unmeasured(run, goal, what, "≥ 3", OURS, "torch DCP, FsspecWriter")


def s3_save(run: Run) -> Iterator[Claim]:
    """Goal 3: a save to S3 against the best bare client that sends the same state uncompressed."""
    yield from _s3(run, 3, "save", {"adam": 0.8, "random": 1.1}, "DCP FsspecWriter")


def s3_restore(run: Run) -> Iterator[Claim]:
    """Goal 4: a restore from S3 against the best bare client."""
    yield from _s3(run, 4, "restore", {"adam": 0.9, "random": 1.15}, "DCP FsspecReader")


def async_stall(run: Run) -> Iterator[Claim]:
    """Goal 5: how long a save in the background holds up training, against one copy in memory."""
    for state in dict.fromkeys(s.state for s in run.select(work="stall")) or ["adam"]:
        for mib in sorted({s.mib for s in run.select(work="stall", state=state)}) or [256]:
            ours, theirs = (run.select(work="stall", state=state, mib=mib, rival=name) for name in (OURS, "memcpy"))
            what = f"stall of a save in the background / memcpy, {state}, {size(mib)}"
            yield ratio(run, 5, what, ours, theirs, 1.15) if ours else unmeasured(run, 5, what, "≤ 1.15", OURS)


def codec(run: Run) -> Iterator[Claim]:
    """Goal 6: the codec's ratio and speed on one core, and beside ZipNN."""
    for state, least in (("dense-fp32", 1.19), ("dense-bf16", 1.48)):
        ours = run.select(work="codec", state=state, rival=OURS)
        theirs = run.select(work="codec", state=state, rival="ZipNN")
        if not ours:
            yield unmeasured(run, 6, f"ratio and speed of the codec, {state}", f"≥ {least:g}", OURS)
            continue
        shrunk = ours[0].nbytes / ours[0].stored
        yield bound(6, f"ratio, {state}", shrunk, least, f"{shrunk:.3f}", least=True)
        speed = ours[0].nbytes / median(ours) / 1e9
        yield bound(6, f"GB/s a core, encoding {state}", speed, 0.8, f"{speed:.2f} GB/s", least=True)
        if not theirs:
            yield unmeasured(run, 6, f"the codec beside ZipNN, {state}", "faster, ratio within 2 %", "ZipNN")
            continue
        other = theirs[0].nbytes / theirs[0].stored
        detail = f"ratio {shrunk:.3f} to {other:.3f}"
        yield bound(
            6, f"ratio / ratio of ZipNN, {state}", shrunk / other, 0.98, f"{shrunk / other:.3f}", detail, least=True
        )
        yield faster(run, 6, f"encoding {state} beside ZipNN, one thread each", ours, theirs, 1)


def second_save(run: Run) -> Iterator[Claim]:
    """Goal 7: a second save after 1 % has changed: bytes sent, and time against hashing alone."""
    for where in ("folder", "s3"):
        for mib in sorted({s.mib for s in run.select(work="again", where=where, state="lora")}):
            ours = run.select(work="again", where=where, state="lora", mib=mib, rival=OURS)
            if ours:
                sent, changed = (statistics.median(s.facts[name] for s in ours) for name in ("sent", "changed"))
                detail = f"{sent / 1e6:.2f} MB sent, {changed / 1e6:.2f} MB changed"
                what = f"second save, bytes sent / bytes changed, {where}, lora, {size(mib)}"
                yield bound(7, what, sent / changed, 1.02, f"{sent / changed:.3f}", detail)
            what = f"second save / hashing alone, {where}, lora, {size(mib)}"
            theirs = run.select(work="again", where="folder", state="lora", mib=mib, rival="blake3")
            if where == "folder":
                yield ratio(run, 7, what, ours, theirs, 1.3)
    if not run.select(work="again", state="lora", rival=OURS):
        yield unmeasured(run, 7, "second save with 1 % changed", "≤ 1.02, ≤ 1.3", OURS)


def memory(run: Run) -> Iterator[Claim]:
    """Goal 8: peak memory above the state, and that it does not grow with it."""
    for where in ("folder", "s3"):
        for work in ("save", "restore"):
            found = run.select(work=work, where=where, state="dense-fp32", rival=OURS)
            what = f"peak memory above the state, {work}, {where}"
            by_size = {
                mib: median([s for s in found if s.mib == mib], "peak") for mib in sorted({s.mib for s in found})
            }
            if not by_size:
                yield unmeasured(run, 8, what, "≤ 256 MiB", OURS)
                continue
            detail = ", ".join(f"{peak / MIB:.0f} MiB at {size(mib)}" for mib, peak in by_size.items())
            worst = max(by_size.values()) / MIB
            yield bound(8, what + " (MiB)", worst, 256, f"{worst:.0f} MiB", detail)
            if len(by_size) > 1:
                grown = (by_size[max(by_size)] - by_size[min(by_size)]) / MIB
                yield bound(
                    8,
                    f"growth of that from {size(min(by_size))} to {size(max(by_size))}, {work}, {where} (MiB)",
                    grown,
                    FLAT / MIB,
                    f"{grown:+.0f} MiB",
                    detail,
                )
            else:
                yield unmeasured(run, 8, f"growth of that with the state, {work}, {where}", "flat")


def small_arrays(run: Run) -> Iterator[Claim]:
    """Goal 9: 100,000 small arrays against one array of the same bytes."""
    for work in ("save", "restore"):
        for mib in sizes(run, work, "folder", "small"):
            many, one = (
                run.select(work=work, where="folder", state=state, mib=mib, rival=OURS) for state in ("small", "one")
            )
            found = [(a.seconds, b.seconds) for a, b in zip(many, one, strict=False)]
            what = f"{work} of 100,000 arrays / of one, folder, {size(mib)}"
            if not found:
                yield unmeasured(run, 9, what, "≤ 2", OURS)
                continue
            value = median(many) / median(one)
            detail = f"{time(median(many))} to {time(median(one))}"
            claim = bound(9, what, value, 2, f"{value:.2f}", detail)
            yield claim if work == "save" else Claim(9, what, "(shown only)", claim.measured, "shown", detail)


def requests(run: Run) -> Iterator[Claim]:
    """Goal 10: requests of ``latest()`` among 10,000 epochs and of a save."""
    for where in ("folder", "s3"):
        found = run.select(work="latest", where=where)
        what = f"requests of latest() among 10,000 epochs, {where}"
        if not [s for s in found if s.mib == 10_000]:
            yield unmeasured(run, 10, what, "≤ 12", OURS)
            continue
        facts = found[0].facts
        total = facts["verbs"] + facts["pages beyond the first"]
        sent = f", {found[0].requests} HTTP requests" if found[0].requests is not None else ""
        detail = f"{time(median(found))}; {facts['verbs']:.0f} calls of the store{sent}"
        detail += "; an S3 listing has pages of 1000, so ten are for the names alone" if where == "s3" else ""
        yield bound(10, what, total, 12, f"{total:.0f}", detail)
    for where in ("folder", "s3"):
        found = [s for s in run.select(work="save", where=where, rival=OURS) if "chunks" in s.facts]
        what = f"requests of a save beyond chunks and records, {where}"
        if not found:
            yield unmeasured(run, 10, what, "≤ 5", OURS)
            continue
        extra = max(s.facts["verbs"] - s.facts["chunks sent"] - s.facts["records"] for s in found)
        facts = found[0].facts
        kinds = ", ".join(f"{facts[f'verbs {verb}']:.0f} {verb}" for verb in ("put", "get", "info", "list", "delete"))
        detail = f"{found[0].state}: {facts['verbs']:.0f} ({kinds}), {facts['chunks sent']:.0f} chunks, {facts['records']:.0f} records"
        yield bound(10, what, extra, 5, f"{extra:.0f}", detail)


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
}
