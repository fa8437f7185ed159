"""Takes the measurements: a fresh process for each, rivals in turn, forwards and then backwards."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

import ckptstore
from benchmarks import ranks, sharded
from benchmarks.codec import ABOUT as CODECS_ABOUT
from benchmarks.process import Failure, run
from benchmarks.profiles import Group
from benchmarks.rivals import ALL, RANKS, Place, Rival
from benchmarks.rivals.base import FOLDER, S3
from benchmarks.samples import Job, Run, Sample, Trouble

ROOT = str(Path(__file__).resolve().parents[1])
AFTER_SAVE = ("restore", "restore cold", "partial")
PATIENCE = 300
"""Seconds for one measurement with all that belongs to it. A rival that hangs must not hang the others."""
NO_STATE = ("latest", "prune", "gc")


class Runner:
    """Adds the samples of groups to a ``Run``."""

    def __init__(self, result: Run, console: Console, folder: str | None = None) -> None:
        # For the fork server, which imports torch once for all the fresh processes.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["benchmarks.works", "benchmarks.ranks", "ckptstore.adapters.dcp", "torch._dynamo"]
        )
        self._result = result
        self._console = console
        self._folder = folder
        self._stack = ExitStack()
        self._roots: dict[str, Place] = {}
        self._facts: dict[tuple[str, int], dict[str, Any]] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, groups: list[Group]) -> None:
        """All rounds of all groups. A rival that fails is left out from then on, and the failure is recorded."""
        for number, group in enumerate(groups, 1):
            what = f"{', '.join(group.works)} · {group.where} · {group.state} {group.mib}"
            self._console.print(f"[dim]{number}/{len(groups)}[/] {what}: {len(group.rivals)} in {group.rounds} rounds")
            self._group(group, number * 1000)

    def _group(self, group: Group, first: int) -> None:
        """All rounds of one group; ``first`` keeps their numbers apart from those of other groups."""
        root = self._root(group.where)
        if group.works[0] not in NO_STATE and not all(self._know(state, group.mib) for state in group.states):
            return
        names = [name for name in group.rivals if self._is_available(group, name)]
        for turn in range(group.rounds + 1):
            for name in names[:] if turn % 2 else names[::-1]:
                taken, trouble = self._turn(group, name, root, first + turn)
                if trouble is not None:
                    self._give_up(group, name, trouble)
                    names.remove(name)
                elif turn:
                    self._result.samples += taken
            self._tidy(group.where)

    def _turn(self, group: Group, name: str, root: Place, turn: int) -> tuple[list[Sample], Trouble | None]:
        taken: list[Sample] = []
        for state in group.states:
            place = Place(root.path and f"{root.path}/{uuid.uuid4().hex}", root.options)
            for work in group.works:
                if group.where != "memory" and work not in NO_STATE and work not in kinds(group.state)[name].works:
                    continue
                expected = self._expected(state, group.mib, work)
                found = self._run(Job(work, state, group.mib, name, place, turn, expected))
                if isinstance(found, Failure):
                    self._console.print(f"{work} by {name}: {found.reason}\n{found.trace}", style="red", markup=False)
                    remove(place)
                    return taken, Trouble(work, group.where, state, name, found.reason, error=True)
                taken.append(found)
            remove(place)
        return taken, None

    def _give_up(self, group: Group, name: str, trouble: Trouble) -> None:
        """A rival that failed once has no rows: not those of rounds in which it seemed to work either."""
        self._result.troubles.append(trouble)
        of_group = (group.where, group.mib, name)
        self._result.samples = [
            s
            for s in self._result.samples
            if (s.where, s.mib, s.rival) != of_group or s.work not in group.works or s.state not in group.states
        ]

    def _run(self, job: Job) -> Any:
        """One measurement in a fresh process, on a disk that has nothing left to write."""
        os.sync()
        if sharded.split_name(job.state)[1]:
            return ranks.measure(self._context, job, PATIENCE)
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=run, args=(theirs, job))
        process.start()
        theirs.close()
        try:
            if not ours.poll(PATIENCE):
                process.kill()
                return Failure(f"not done after {PATIENCE} s", "")
            return ours.recv()
        except EOFError:
            process.join()
            return Failure(f"its process died with exit code {process.exitcode}", "")
        finally:
            process.join()

    def _know(self, state: str, mib: int) -> bool:
        key = (state, mib)
        if key not in self._facts:
            found = self._run(Job("facts", sharded.split_name(state)[0], mib, "", Place("")))
            if isinstance(found, Failure):
                self._console.print(found.trace, style="red", markup=False)
                self._result.troubles.append(Trouble("facts", "", state, "", found.reason, error=True))
                return False
            found["state"] = state
            self._facts[key] = found
            self._result.states.append(found)
        return True

    def _expected(self, state: str, mib: int, work: str) -> str:
        facts = self._facts.get((state, mib), {})
        return str(facts.get("digest of a part" if work == "partial" else "digest", ""))

    def _is_available(self, group: Group, name: str) -> bool:
        if group.where == "memory":
            self._result.rivals.setdefault(f"{name} (codec)", {"about": CODECS_ABOUT[name], "durable": False})
            reason = "not installed: zipnn" if name == "ZipNN" and find_spec("zipnn") is None else ""
        else:
            kind = kinds(group.state)[name]
            facts = {"about": kind.about, "durable": kind.durable, "limit": kind.limit}
            self._result.rivals.setdefault(name, facts)
            reason = kind.unavailable()
            if kind is ALL["ckptstore"] and "stall" in group.works and not hasattr(ckptstore.Repository, "save_async"):
                reason = "this ckptstore has no save_async"
        if reason:
            self._result.troubles.append(
                Trouble(", ".join(group.works), group.where, group.state, name, reason, error=False)
            )
        return not reason

    def _root(self, where: str) -> Place:
        if where not in self._roots:
            self._roots[where] = self._stack.enter_context(somewhere(where, self._folder))
        return self._roots[where]

    def _tidy(self, where: str) -> None:
        """SeaweedFS keeps deleted bytes until it is told to let go of them."""
        if where == S3:
            options = self._roots[where].options
            host, _, port = options["endpoint_url"].rpartition(":")
            with urllib.request.urlopen(f"{host}:{int(port) + 1}/vol/vacuum?garbageThreshold=0.01", timeout=120):
                pass


def kinds(state: str) -> Mapping[str, type[Rival]]:
    """The rivals that know such a state."""
    return RANKS if sharded.split_name(state)[1] else ALL


def remove(place: Place) -> None:
    """Make room for the next one."""
    if not place.path:
        return
    if not place.remote:
        shutil.rmtree(place.path, ignore_errors=True)
        return
    fs = place.client()
    if fs.exists(place.path):
        fs.rm(place.path, recursive=True)


@contextmanager
def somewhere(where: str, folder: str | None) -> Iterator[Place]:
    """A temporary folder, or a bucket on a server that is started for it."""
    if where != S3:
        with tempfile.TemporaryDirectory(prefix="ckptstore-bench-", dir=folder) as path:
            yield Place(path if where == FOLDER else "")
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


def machine() -> dict[str, Any]:
    """What it runs on."""
    import platform
    from importlib.metadata import version

    release = platform.freedesktop_os_release().get("PRETTY_NAME", "") if sys.platform == "linux" else ""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    disk = os.statvfs(tempfile.gettempdir())
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{round(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30)} GiB",
        "disk": f"{round(disk.f_blocks * disk.f_frsize / 2**30)} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}, {release}".rstrip(", "),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "ckptstore": version("ckptstore"),
        "load at the start": round(os.getloadavg()[0], 1),
    }
