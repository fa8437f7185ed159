"""``python -m benchmarks scale``: the commands of the operator in repositories of thousands of epochs.

The repository is real: manifests, indexes and the last epoch are what a save writes, and lie in a folder with the
whole stack of a store above it. Only the bodies of the other chunks are made up: files of the right name and size
that hold nothing (sparse), which none of these commands reads. Each command is run as a user runs it, by the program
``ckptstore`` in a process of its own; the kernel says what that took. CPU time is told beside the time that passed,
because others may use the machine too. On tmpfs (the default) no disk is measured, only us.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import ckptstore
from ckptstore import keys
from ckptstore.indexes import encode_index
from ckptstore.manifest import (
    ArrayEntry,
    ChunkRef,
    Manifest,
    RecordEntry,
    RecordIndex,
    Span,
    encode_manifest,
    writer_version,
)

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).resolve().parents[1] / "docs"
MARKS = "<!-- scale: begin -->\n", "<!-- scale: end -->"

CHUNK = 4096  # bytes of state in a chunk that is made up
STORED = 3000  # and what it takes on the store
SHARED = 10  # chunks that all epochs take over from the first one
DEBRIS_EVERY = 20  # epochs, until one more attempt has died without a commit
KEEP = "KeepLast(100) | KeepEvery(100)"
ARRAY_CHUNKS = 4
LIMIT_MIB = 512

COMMANDS: dict[str, list[str]] = {
    "ls": ["ls"],
    "plan": ["plan", "--keep", KEEP],
    "du": ["du"],
    "gc --dry-run": ["gc", "--dry-run"],
    "gc": ["gc", "--yes"],
    "prune --dry-run": ["prune", "--keep", KEEP, "--dry-run"],
    "prune": ["prune", "--keep", KEEP, "--yes"],
}
"""In this order: each finds the repository as it was built, but that ``prune`` comes after ``gc``."""


# As the command itself, which then says its peak of memory in KiB. (The kernel's ``ru_maxrss`` counts what the process
# was before it became another program, too.)
_PROGRAM = """
import sys
facts = sys.argv.pop(1)
sys.argv[0] = "ckptstore"
from ckptstore.cli import main
try:
    sys.exit(main())
finally:
    status = open("/proc/self/status").read()
    open(facts, "w").write(status.partition("VmHWM:")[2].split()[0])
"""


@dataclass(frozen=True)
class Row:
    """What one command took: seconds that passed, seconds of a core, and the most memory, in MiB."""

    command: str
    epochs: int
    chunks: int
    objects: int
    seconds: float
    cpu: float
    mib: float


# ---- building ----------------------------------------------------------------------------------------------


class Builder:
    """Writes a repository of ``epochs`` epochs, with so many chunks of its own each, and debris."""

    def __init__(self, root: Path, epochs: int, chunks: int) -> None:
        self._root = root
        self._epochs = epochs
        self._chunks = chunks
        self._first: tuple[ChunkRef, ...] = ()
        self.objects = 0

    def build(self) -> None:
        with ckptstore.open(self._root) as repo:
            self._id = repo.id
        for epoch in range(self._epochs - 1):
            self._epoch(epoch)
            if epoch % DEBRIS_EVERY == DEBRIS_EVERY - 1:
                self._refs(keys.new_attempt(), self._chunks)
        with ckptstore.open(self._root) as repo:  # a real one, because prune reads the newest in full
            repo.save(self._epochs - 1, {"model": {"w": np.arange(1000)}}, {"loss": 0.5})

    def _epoch(self, epoch: int) -> None:
        attempt = keys.new_attempt()
        half = self._chunks // 2
        own = {"model": self._refs(attempt, half), "optimizer": self._refs(attempt, self._chunks - half)}
        entries = tuple(self._record(attempt, name, self._first + refs) for name, refs in own.items())
        self._first = self._first or own["model"][:SHARED]
        manifest = Manifest(
            repository=self._id,
            epoch=epoch,
            generation=1,
            attempt=attempt,
            base=None,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            writer=writer_version(),
            metadata={"dict": [["loss", 1.0 / (epoch + 1)]]},
            records=entries,
            attempts=tuple(sorted({attempt, *(ref.attempt for ref in self._first)})),
            bytes_state=sum(entry.bytes_state for entry in entries),
            bytes_sent=self._chunks * STORED,
            bytes_reused=len(self._first) * CHUNK,
        )
        self._put(manifest.key, encode_manifest(manifest))

    def _record(self, attempt: str, name: str, refs: tuple[ChunkRef, ...]) -> RecordEntry:
        groups = [range(start, min(start + ARRAY_CHUNKS, len(refs))) for start in range(0, len(refs), ARRAY_CHUNKS)]
        arrays = tuple(
            ArrayEntry("numpy", "float32", (len(group) * CHUNK // 4,), tuple(Span(n, 0, CHUNK) for n in group))
            for group in groups
        )
        skeleton = {"dict": [[f"layer.{n}", {"array": n}] for n in range(len(arrays))]}
        index = RecordIndex(name=name, kind="state", skeleton=skeleton, arrays=arrays, chunks=refs)
        digest, raw_length, stored = encode_index(index)
        entry = RecordEntry(
            name=name,
            kind="state",
            attempt=attempt,
            digest=digest,
            raw_length=raw_length,
            stored_length=len(stored),
            arrays=len(arrays),
            chunks=len(refs),
            bytes_state=len(refs) * CHUNK,
            bytes_stored=len(refs) * STORED,
        )
        self._put(entry.key, stored)
        return entry

    def _refs(self, attempt: str, number: int) -> tuple[ChunkRef, ...]:
        refs = tuple(ChunkRef(attempt, os.urandom(32).hex(), CHUNK, STORED) for _ in range(number))
        (self._root / keys.chunks_prefix(attempt)).mkdir(parents=True, exist_ok=True)
        for ref in refs:
            handle = os.open(self._root / ref.key, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            os.truncate(handle, STORED)
            os.close(handle)
        self.objects += number
        return refs

    def _put(self, key: str, data: bytes) -> None:
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.objects += 1


# ---- measuring ---------------------------------------------------------------------------------------------


def measure(command: str, words: Sequence[str], root: Path) -> tuple[float, float, float]:
    """Seconds, CPU seconds and peak MiB of a command. It must succeed."""
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as said, tempfile.NamedTemporaryFile() as facts:
        argv = [sys.executable, "-c", _PROGRAM, facts.name, words[0], str(root), *words[1:]]
        process = subprocess.Popen(argv, stdout=said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            said.seek(0)
            text = said.read()[-2000:].decode(errors="replace")
            raise RuntimeError(f"ckptstore {command} ended with {process.returncode}: {text}")
        return seconds, used.ru_utime + used.ru_stime, int(facts.read()) / 1024


def run(sizes: Sequence[int], chunks: int, folder: Path, console: Console, only: Sequence[str] = ()) -> list[Row]:
    """Build a repository of each size, and measure each command there."""
    rows = []
    for epochs in sizes:
        root = Path(tempfile.mkdtemp(prefix="ckptstore-scale-", dir=folder))
        try:
            builder = Builder(root, epochs, chunks)
            begun = time.perf_counter()
            builder.build()
            took = time.perf_counter() - begun
            console.print(f"{epochs:,} epochs, {builder.objects:,} objects: built in {took:.0f} s")
            for command, words in COMMANDS.items():
                if only and command not in only:
                    continue
                seconds, cpu, mib = measure(command, words, root)
                row = Row(command, epochs, epochs * chunks, builder.objects, seconds, cpu, mib)
                console.print(f"  {command}: {seconds:.1f} s, {cpu:.1f} s of CPU, {mib:.0f} MiB")
                rows.append(row)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    return rows


# ---- telling -----------------------------------------------------------------------------------------------


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """The table: a row for each command, the columns of each size, and how CPU time grew from the first to the last."""
    sizes = sorted({row.epochs for row in rows})
    found = {(row.command, row.epochs): row for row in rows}
    table = [["command", *(f"{size:,} epochs" for size in sizes), "peak", "CPU time grows with epochs to the power of"]]
    for command in dict.fromkeys(row.command for row in rows):
        mine = [found[command, size] for size in sizes if (command, size) in found]
        cells = [f"{row.seconds:.1f} s ({row.cpu:.1f} s CPU)" for row in mine]
        table.append([f"`{command}`", *cells, f"{max(row.mib for row in mine):.0f} MiB", _power(mine)])
    return table


def _power(mine: Sequence[Row]) -> str:
    """Between the two largest sizes, where what a process costs to start counts least."""
    if len(mine) < 2:
        return "-"
    one, two = mine[-2:]
    return f"{np.log(two.cpu / one.cpu) / np.log(two.epochs / one.epochs):.2f}"


def show(rows: Sequence[Row], console: Console) -> None:
    """The table on the terminal."""
    head, *body = lines(rows)
    table = Table(*head, box=None)
    for line in body:
        table.add_row(*line)
    console.print(table)


def write_docs(result: dict[str, Any], path: Path) -> None:
    """Put the table between the marks of a document."""
    rows = [Row(**row) for row in result["rows"]]
    head, *body = lines(rows)
    most = max(rows, key=lambda row: row.objects)
    text = f"`{result['command']}` on {result['machine']}, {result['date']}; "
    text += f"the largest has {most.chunks:,} chunks of its own and {most.objects:,} objects:\n\n"
    text += "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *body))
    before, _, rest = path.read_text("utf-8").partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    path.write_text(f"{before}{MARKS[0]}{text}{mark}{after}", "utf-8")


def main(argv: list[str]) -> int:
    """Build, measure, print; with ``--docs`` write the table into docs/retention.md. 1 if a limit was passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=__doc__)
    parser.add_argument("--epochs", type=int, action="append", help="may be repeated (default: 1000, 3000, 10000)")
    parser.add_argument("--chunks-per-epoch", type=int, default=100, help="of its own (default: 100)")
    parser.add_argument("--only", action="append", default=[], choices=tuple(COMMANDS))
    parser.add_argument("--folder", type=Path, help="where to (default: /dev/shm, else that of temporary files)")
    parser.add_argument("--json", type=Path, default=RESULTS / "scale.json", help="the result")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/retention.md")
    given = parser.parse_args(argv)
    shm = Path("/dev/shm")
    folder = given.folder or (shm if shm.is_dir() else Path(tempfile.gettempdir()))
    console = Console() if sys.stdout.isatty() else Console(width=200)
    rows = run(given.epochs or [1000, 3000, 10_000], given.chunks_per_epoch, folder, console, given.only)
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks scale", *argv]),
        "machine": f"{os.cpu_count()} cores, {folder}",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "rows": [asdict(row) for row in rows],
    }
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    show(rows, console)
    if given.docs:
        write_docs(result, DOCS / "retention.md")
    over = [row for row in rows if row.mib > LIMIT_MIB]
    for row in over:
        console.print(f"{row.command} took {row.mib:.0f} MiB with {row.epochs:,} epochs: more than {LIMIT_MIB}")
    return int(bool(over))
