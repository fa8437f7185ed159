"""Save and restore of a real training state beside the usual ways, in one run: ``python benchmarks/save_restore.py``.

Every measurement runs in a fresh process; the methods take turns (forwards, then backwards), so that a
busy moment of the machine does not hit only one of them. Restores are read from the disk (page cache dropped)
and what they return is compared with what was saved.
"""

# ruff: noqa: E402  (it can be run from anywhere, so it must find the root before it imports)

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = ROOT  # for the fork server, which imports torch once for all the fresh processes

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.make_state import SIZES, cached
from benchmarks.measure import Sample, run, state_facts
from benchmarks.methods import LOCAL, REMOTE, Place

MB = 1e6
REFERENCE = "torch.save"
COLUMNS = ("", "time", "spread", "MB/s", "× torch", "CPU", "memory", "stored", "ratio")


def measure(context: Any, action: str, name: str, place: Place, state_file: str) -> Sample:
    """One measurement in a fresh process."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(theirs, action, name, place, state_file))
    process.start()
    theirs.close()
    try:
        sample: Sample = ours.recv()
    except EOFError:
        raise RuntimeError(f"{action} by {name} failed: see above") from None
    finally:
        process.join()
    return sample


def compare(where: str, root: Place, state_file: str, digest: str, rounds: int, console: Console) -> list[Sample]:
    """All methods in turn, ``rounds`` times, and one round before that does not count."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.measure"])
    names = list(REMOTE if root.remote else LOCAL)
    samples = []
    for turn in range(rounds + 1):
        for name in names if turn % 2 else reversed(names):
            place = Place(f"{root.path}/{uuid.uuid4().hex}", root.options)
            taken = [measure(context, "save", name, place, state_file)]
            if name != "memcpy":
                taken.append(measure(context, "restore", name, place, state_file))
                if taken[1].digest != digest:
                    raise RuntimeError(f"{name} on {where} did not restore what was saved")
            samples += taken if turn else []
            remove(place)
        console.print(f"[dim]{where}: round {turn} of {rounds}{'' if turn else ' (does not count)'}[/]")
    return samples


def remove(place: Place) -> None:
    """Make room for the next one."""
    if not place.remote:
        shutil.rmtree(place.path, ignore_errors=True)
        return
    fs = place.client()
    if fs.exists(place.path):
        fs.rm(place.path, recursive=True)


@contextmanager
def somewhere(where: str, folder: str | None) -> Iterator[Place]:
    """A temporary folder, or a bucket on a server that is started for it."""
    if where == "local":
        with tempfile.TemporaryDirectory(prefix="ckptstore-bench-", dir=folder) as path:
            yield Place(path)
        return
    import s3fs

    from tests import servers

    server = servers.seaweedfs()
    try:
        options: dict[str, Any] = {"key": servers.KEY, "secret": servers.SECRET, "endpoint_url": server.endpoint}
        options["client_kwargs"] = {"region_name": "us-east-1"}
        s3fs.S3FileSystem(**options, skip_instance_cache=True).call_s3("create_bucket", Bucket="bench")
        yield Place("bench", options)
    finally:
        server.stop()


def rows(samples: list[Sample], action: str, nbytes: int) -> Iterator[tuple[str, ...]]:
    """One row of text for each method. "× torch" is the median of the ratios within each round."""
    base = [s.seconds for s in samples if s.action == action and s.method.startswith(REFERENCE)]
    for name in dict.fromkeys(sample.method for sample in samples):
        mine = [sample for sample in samples if sample.method == name and sample.action == action]
        if not mine:
            continue
        times = [sample.seconds for sample in mine]
        median = statistics.median(times)
        pairs = [one / other for one, other in zip(times, base, strict=True)]
        stored = max(sample.stored for sample in samples if sample.method == name)
        yield (
            name,
            f"{median:.2f} s",
            f"{min(times):.2f}–{max(times):.2f}",
            f"{nbytes / median / MB:.0f}",
            f"{statistics.median(pairs):.2f}",
            f"{statistics.median(sample.cpu for sample in mine):.2f} s",
            f"+{statistics.median(sample.extra for sample in mine) / MB:.0f} MB",
            f"{stored / MB:.1f} MB" if stored else "",
            f"{nbytes / stored:.3f}" if stored else "",
        )


def table(where: str, action: str, samples: list[Sample], nbytes: int) -> Table:
    """For people."""
    view = Table(title=f"{action}, {where}", title_justify="left")
    for column in COLUMNS:
        view.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows(samples, action, nbytes):
        view.add_row(*row)
    return view


def markdown(where: str, action: str, samples: list[Sample], nbytes: int) -> str:
    """For docs/benchmarks.md."""
    lines = [f"**{action}, {where}**", "", f"| {' | '.join(COLUMNS)} |", f"| --- |{' ---: |' * (len(COLUMNS) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows(samples, action, nbytes)]
    return "\n".join(lines) + "\n"


def machine() -> dict[str, Any]:
    """What it ran on."""
    release = platform.freedesktop_os_release().get("PRETTY_NAME", "") if sys.platform == "linux" else ""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": f"{platform.system()} {platform.release()}, {release}".rstrip(", "),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", default="local,s3", help="local, s3, or both (default)")
    parser.add_argument("--size", default="full", choices=SIZES, help="small: 28 MB, full: 268 MB (default)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each method is measured (default 5)")
    parser.add_argument("--folder", help="measure on this folder's disk (default: that of temporary files)")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    found = parser.parse_args()
    if not set(found.where.split(",")) <= {"local", "s3"} or found.rounds < 1:
        parser.error("--where is local, s3 or local,s3; --rounds is at least 1")
    return found


def main() -> None:
    """Measure, print, and write what was asked for."""
    given = arguments()
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    state_file = str(cached(given.size))
    count, nbytes, digest = state_facts(state_file)
    facts = machine()
    head = f"AdamW state: {count} tensors, {nbytes / MB:.1f} MB. " + ", ".join(f"{k} {v}" for k, v in facts.items())
    console.print(head)
    taken, text = {}, [head + "\n"]
    for where in given.where.split(","):
        with somewhere(where, given.folder) as place:
            taken[where] = compare(where, place, state_file, digest, given.rounds, console)
        for action in ("save", "restore"):
            console.print(table(where, action, taken[where], nbytes))
            text.append(markdown(where, action, taken[where], nbytes))
    if given.markdown:
        given.markdown.write_text("\n".join(text))
    if given.json:
        samples = {where: [sample.as_dict() for sample in found] for where, found in taken.items()}
        given.json.write_text(json.dumps({"machine": facts, "bytes": nbytes, "samples": samples}, indent=1))


if __name__ == "__main__":
    main()
