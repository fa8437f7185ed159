"""s3fs against obstore as what carries the bodies of objects: ``python benchmarks/transport.py``.

Both behind the same store, ``RemoteStore``, in the same process, on the same server and with the same bodies; they take
turns (first one begins, then the other). One server is real, SeaweedFS, and shares the cores with the client; the other
does nothing, so that what the client itself needs shows. CPU seconds are those of the client's process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.null_s3 import serving
from ckptstore.stores import RemoteStore
from tests import servers

SIZE = 32 << 20
THREADS = 8
GB = 1e9


@dataclass(frozen=True)
class Sample:
    """One measurement: so many bytes, in so many seconds and CPU seconds."""

    transport: str
    action: str
    nbytes: int
    seconds: float
    cpu: float


@contextmanager
def somewhere(where: str) -> Iterator[dict[str, Any]]:
    """The storage options of a server with a bucket ``bench``."""
    options: dict[str, Any] = {"key": servers.KEY, "secret": servers.SECRET}
    options["client_kwargs"] = {"region_name": "us-east-1"}
    if where == "null":
        with serving(SIZE) as endpoint:
            yield {**options, "endpoint_url": endpoint}
        return
    import s3fs

    server = servers.seaweedfs()
    try:
        options["endpoint_url"] = server.endpoint
        s3fs.S3FileSystem(**options, skip_instance_cache=True).call_s3("create_bucket", Bucket="bench")
        yield options
    finally:
        server.stop()


def measured(
    transport: str, action: str, work: Callable[[int], object], count: int, pool: ThreadPoolExecutor
) -> Sample:
    """``count`` calls of ``work`` in the threads of ``pool``."""
    wall, cpu = time.perf_counter(), time.process_time()
    list(pool.map(work, range(count)))
    return Sample(transport, action, count * SIZE, time.perf_counter() - wall, time.process_time() - cpu)


def turn(
    transport: str, options: dict[str, Any], body: bytes, count: int, pool: ThreadPoolExecutor, real: bool
) -> list[Sample]:
    """Put the objects, get them, look at one and remove them."""
    room = memoryview(bytearray(0))
    with RemoteStore("s3", "bench", uuid.uuid4().hex, storage_options=options, transport=transport) as store:
        store.put("warm/0", body[:100])
        store.get("warm/0", 0, 100)
        found = [
            measured(transport, "put", lambda n: store.put(f"a/{n}", body, if_absent=True), count, pool),
            measured(transport, "get", lambda n: store.fetch(f"a/{n}", 0, SIZE, room).nbytes, count, pool),
        ]
        if real:
            if store.get("a/0") != body:
                raise RuntimeError(f"{transport} did not return what it stored")
            list(pool.map(lambda n: store.delete(f"a/{n}"), range(count)))
    return found


def table(where: str, samples: list[Sample]) -> Table:
    """Medians, and obstore against s3fs as the median of the ratios within the rounds."""
    view = Table(title=where, title_justify="left")
    for column in ("", "s3fs MB/s", "obstore MB/s", "times as fast", "s3fs CPU s/GB", "obstore CPU s/GB"):
        view.add_column(column, justify="right" if column else "left", no_wrap=True)
    for action in ("put", "get"):
        s3fs, obstore = (
            [s for s in samples if s.action == action and s.transport == name] for name in ("fsspec", "obstore")
        )
        ratios = [slow.seconds / fast.seconds for slow, fast in zip(s3fs, obstore, strict=True)]
        speeds = [f"{statistics.median(s.nbytes / s.seconds / 1e6 for s in group):.0f}" for group in (s3fs, obstore)]
        costs = [f"{statistics.median(s.cpu / (s.nbytes / GB) for s in group):.2f}" for group in (s3fs, obstore)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        view.add_row(action, *speeds, ratio, *costs)
    return view


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", default="null,seaweedfs", help="null, seaweedfs, or both (default)")
    parser.add_argument("--rounds", type=int, default=7, help="how often each transport is measured (default 7)")
    parser.add_argument("--objects", type=int, default=16, help="objects of 32 MiB in each measurement (default 16)")
    given = parser.parse_args()
    body = os.urandom(1 << 20) * (SIZE >> 20)
    console = Console(width=120)
    console.print(f"{given.objects} objects of {SIZE >> 20} MiB, {THREADS} threads, {given.rounds} rounds", end=", ")
    console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for where in given.where.split(","):
        samples: list[Sample] = []
        with somewhere(where) as options, ThreadPoolExecutor(THREADS) as pool:
            for number in range(given.rounds + 1):
                for name in ("fsspec", "obstore") if number % 2 else ("obstore", "fsspec"):
                    found = turn(name, options, body, given.objects, pool, where != "null")
                    samples += found if number else []  # the first round warms up
        console.print(table(where, samples))


if __name__ == "__main__":
    main()
