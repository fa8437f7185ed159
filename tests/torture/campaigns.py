"""The campaigns, how much of each a profile asks for, and one run of one."""

from __future__ import annotations

import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests import servers
from tests.conftest import Bucket, s3_bucket
from tests.torture import between, damage, kills, line, race, ranks, space, stateful, syscalls
from tests.torture.broken import broken_order
from tests.torture.report import Report
from tests.torture.work import Tally, Work

PROFILES = ("full", "ci")


@dataclass(frozen=True)
class Campaign:
    """What it does, and its size in each profile (0: all there is)."""

    what: str
    run: Callable[[Work], None]
    sizes: dict[str, int]
    steps: Callable[[int], int] = lambda size: size


CAMPAIGNS = {
    "kills": Campaign("SIGKILL of saving processes, on a folder and on S3", kills.run, {"full": 1000, "ci": 80}),
    "tiers": Campaign("SIGKILL between a fast tier and a slow one", between.run, {"full": 200, "ci": 16}),
    "ranks": Campaign("SIGKILL of ranks that save together, on a folder and on S3", ranks.run, {"full": 200, "ci": 12}),
    "stateful": Campaign("random steps against a model", stateful.run, {"full": 10_000, "ci": 1_000}),
    "race": Campaign(
        "16 processes save one epoch at once",
        race.run,
        {"full": 100, "ci": 10},
        lambda size: size + max(1, size // race.S3_SHARE),
    ),
    "syscalls": Campaign(
        "every system call of a local save fails with every error",
        syscalls.run,
        {"full": 0, "ci": 80},
    ),
    "enospc": Campaign(
        "a full disk at every k-th write, and file systems that are too small",
        space.run,
        {"full": 0, "ci": 40},
        lambda size: 2 * size,
    ),
    "proxy": Campaign("saves through a misbehaving proxy, an outage amid them", line.run, {"full": 200, "ci": 20}),
    "damage": Campaign(
        "every object, damaged in every way",
        damage.run,
        {"full": 0, "ci": 500},
        lambda size: 2 * (size or damage.number_of_cases()),
    ),
}


class Servers:
    """Real servers, started when they are first asked for. Use it as a context manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._s3: Bucket | None = None

    def s3(self) -> Bucket:
        """A bucket on SeaweedFS."""
        with self._lock:
            if self._s3 is None:
                server = servers.seaweedfs()
                self._s3 = s3_bucket(server.endpoint, servers.KEY, servers.SECRET, None, server)
            return self._s3

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._s3 is not None and self._s3.server is not None:
            self._s3.server.stop()


def torture(
    name: str, profile: str, scale: float, seed: int, servers: Servers, report: Report, broken: str | None
) -> Tally:
    """Run one campaign."""
    campaign = CAMPAIGNS[name]
    size = campaign.sizes[profile]
    size = max(1, round(scale * size)) if size else 0
    tally = Tally(name)
    folder = Path(tempfile.mkdtemp(prefix=f"ckptstore-{name}-"))
    try:
        with report.campaign(tally, campaign.what, campaign.steps(size)) as tell, broken_order(broken):
            work = Work(tally, size, seed, folder, servers.s3, broken, tell)
            try:
                campaign.run(work)
            except Exception:  # noqa: BLE001 (the other campaigns go on, and this one has not passed)
                work.blame("untyped", "?", traceback.format_exc()[-3000:])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tally
