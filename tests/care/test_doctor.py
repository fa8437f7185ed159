"""The doctor: finds what is wrong with a place, says what to do, goes on after each failure, and leaves nothing."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.doctor import Diagnosis, examine, examine_store
from ckptstore.doctor.patient import Patient
from ckptstore.errors import AccessError, DeadlineError, InvalidArgumentError, TransientError
from ckptstore.manifest import Marker, encode_signed
from ckptstore.stores import LocalStore, MemoryStore, ObjectInfo, RetryPolicy, RetryStore, Store, WatchStore
from ckptstore.stores.base import Body
from ckptstore.testing.faults import Fault, FaultStore
from tests import servers
from tests.conftest import Bucket
from tests.proxy import Proxy, Rule
from tests.proxy_faults import edit
from tests.proxy_wire import Reply

EVERYWHERE = ["list", "put", "get", "delete", "conditional puts", "clock", "reads after writes", "repository"]
IN_A_FOLDER = ["mount", "atomic create", "space", "files"]
QUICK = RetryPolicy(attempts=2, deadline=1.0, base=0.001, cap=0.01)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder: contents of files, None for folders."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def names(diagnosis: Diagnosis) -> list[str]:
    return [finding.name for finding in diagnosis.findings]


def verdict(diagnosis: Diagnosis, name: str) -> bool | None:
    finding = diagnosis.finding(name)
    assert finding is not None, names(diagnosis)
    assert finding.ok or finding.advice or finding.ok is None, finding  # what failed comes with advice
    return finding.ok


def failed(diagnosis: Diagnosis) -> set[str]:
    return {finding.name for finding in diagnosis.findings if finding.ok is False}


# ---- places --------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_not_there_afterwards(tmp_path: Path) -> None:
    """Nothing is wrong with it, and neither it nor its parents are left behind."""
    diagnosis = examine(str(tmp_path / "not" / "made" / "yet"))
    assert failed(diagnosis) == set()
    assert set(names(diagnosis)) >= {*EVERYWHERE, *IN_A_FOLDER, "latency", "throughput", "settings"}
    assert tree(tmp_path) == {}
    assert diagnosis.ok


def test_a_folder_with_a_repository_stays_as_it_is(tmp_path: Path) -> None:
    """Epochs, a save in progress and debris are told; no byte of them is touched."""
    with ckptstore.open(tmp_path) as repo:
        repo.save(3, {"model": {"w": np.arange(1000)}})
        with repo.begin(4) as txn:
            txn.write("model", {"w": np.ones(500_000)})
            before = {name: content for name, content in tree(tmp_path).items() if ".tmp-" not in name}
            diagnosis = examine(str(tmp_path), speed=False)
            during = diagnosis.finding("leases")
            assert during is not None
            assert during.ok is True
            assert f"epoch 4 by {os.uname().nodename}" in during.found
            assert verdict(diagnosis, "debris") is True
            after = tree(tmp_path)  # the save goes on beside it, and may have put more
            assert {name: content for name, content in before.items() if after.get(name, "gone") != content} == {}
            assert not (tmp_path / "probes").exists()
    found = diagnosis.finding("repository")
    assert found is not None
    assert (found.facts["epochs"], found.facts["newest"], found.facts["format"]) == (1, 3, 1)
    assert failed(diagnosis) == set()


def test_what_a_killed_save_left_is_told(tmp_path: Path) -> None:
    """A save that was killed leaves a lease and chunks: both are told, with the command that removes them."""
    with ckptstore.open(tmp_path) as repo:
        repo.save(1, {"model": {"w": np.arange(1000)}})
    code = """
import os, pathlib, signal, sys, time
import numpy as np
import ckptstore
txn = ckptstore.open(sys.argv[1]).begin(2)
txn.write("model", {"w": np.random.default_rng(1).random(300_000)})
def sent():
    chunks = pathlib.Path(sys.argv[1]).glob("attempts/*/chunks/*")
    return [path for path in chunks if ".tmp-" not in path.name and path.stat().st_size > 1_000_000]
while not sent():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    old = time.time() - 7200
    for path in (tmp_path / "leases").iterdir():
        os.utime(path, (old, old))
    before = tree(tmp_path)
    diagnosis = examine(str(tmp_path), speed=False)
    assert verdict(diagnosis, "leases") is None
    debris = diagnosis.finding("debris")
    assert debris is not None
    assert debris.ok is None
    assert debris.advice.startswith("ckptstore gc ")
    assert debris.facts["bytes"] > 1_000_000
    assert tree(tmp_path) == before


def test_memory() -> None:
    """A store without folders and buckets has just the checks that apply to it."""
    store = MemoryStore()
    diagnosis = examine_store(store)
    assert names(diagnosis) == [*EVERYWHERE, "latency", "throughput", "settings"]
    assert failed(diagnosis) == set()
    assert list(store.list()) == []


def test_a_place_that_holds_something_else(tmp_path: Path) -> None:
    """No repository can be made where foreign files are: a warning that names one."""
    (tmp_path / "thesis.txt").write_text("precious")
    diagnosis = examine(str(tmp_path), speed=False)
    assert verdict(diagnosis, "repository") is None
    assert "thesis.txt" in str(diagnosis.finding("repository"))
    assert tree(tmp_path) == {"thesis.txt": b"precious"}


def test_a_newer_format_and_a_damaged_marker(tmp_path: Path) -> None:
    """What this version cannot read is a failure of that check and of no other."""
    newer = encode_signed(Marker(format=99, repository="0" * 32, created="", writer="ckptstore 99"))
    for content, word in ((newer, "upgrade"), (b"\0" * 50, "mirror")):
        (tmp_path / "ckptstore.json").write_bytes(content)
        diagnosis = examine(str(tmp_path), speed=False)
        assert failed(diagnosis) == {"repository"}
        assert word in str(diagnosis.finding("repository"))


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with the options given."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        pytest.skip("mounting a tmpfs needs root on Linux")
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"tmpfs{len(mounted)}"
        folder.mkdir()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
        ).returncode:
            pytest.skip("mounting a tmpfs is not allowed here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_place(mount: Callable[[str], Path]) -> None:
    """Puts are refused and say so; listing, reading and all that needs no put is looked at all the same."""
    folder = mount("size=4m")
    with ckptstore.open(folder) as repo:
        repo.save(1, {"model": {"w": np.arange(10)}})
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    before = tree(folder)
    diagnosis = examine(str(folder))
    assert failed(diagnosis) == {"put"}
    assert (verdict(diagnosis, "list"), verdict(diagnosis, "get")) == (True, True)
    assert (verdict(diagnosis, "delete"), verdict(diagnosis, "conditional puts")) == (None, None)
    assert verdict(diagnosis, "repository") is True
    assert verdict(diagnosis, "speed") is None
    assert verdict(diagnosis, "mount") is None  # a tmpfs is gone after a restart
    assert tree(folder) == before
    assert not diagnosis.ok


def test_a_full_disk(mount: Callable[[str], Path]) -> None:
    """No room is told by the put and by the space; not even an empty folder stays."""
    folder = mount("size=1m")
    with pytest.raises(OSError, match="No space"), open(folder / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    diagnosis = examine(str(folder / "run"))
    assert {"put", "space"} <= failed(diagnosis)
    assert "free some" in str(diagnosis.finding("put"))
    assert verdict(diagnosis, "list") is True
    assert [path.name for path in folder.iterdir()] == ["filler"]


def test_no_inodes(mount: Callable[[str], Path]) -> None:
    """Few files that can still be made are a failure of their own."""
    folder = mount("size=4m,nr_inodes=12")
    diagnosis = examine(str(folder), speed=False)
    assert failed(diagnosis) == {"files"}
    assert list(folder.iterdir()) == []


def test_little_room_is_left_to_others(mount: Callable[[str], Path]) -> None:
    """The speed is measured only with what fits four times: a disk is not filled to measure it."""
    diagnosis = examine(str(mount("size=8m")))
    found = diagnosis.finding("throughput")
    assert found is not None
    assert {cell["size"] for cell in found.facts["cells"]} == {64 * 1024, 1024 * 1024}
    assert max(cell["size"] * cell["concurrency"] for cell in found.facts["cells"]) <= 2 * 1024 * 1024


def test_less_room_than_the_newest_epoch_takes(mount: Callable[[str], Path]) -> None:
    """There is room, but not for one more epoch like the last: a warning."""
    folder = mount("size=12m")
    with ckptstore.open(folder) as repo:
        repo.save(1, {"model": {"w": np.random.default_rng(0).bytes(7_000_000)}})
    diagnosis = examine(str(folder), speed=False)
    assert verdict(diagnosis, "space") is None
    assert "newest epoch" in str(diagnosis.finding("space"))


# ---- buckets -------------------------------------------------------------------------------------------------------


def left_in(bucket: Bucket) -> list[str]:
    """Names of all objects in a bucket."""
    import s3fs

    return list(s3fs.S3FileSystem(**bucket.storage_options, skip_instance_cache=True).find(bucket.name))


def call(bucket: Bucket, operation: str, name: str, **arguments: Any) -> Any:
    import s3fs

    fs = s3fs.S3FileSystem(**bucket.storage_options, skip_instance_cache=True)
    return fs.call_s3(operation, Bucket=name, **arguments)


def test_s3(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good bucket: what it lacks is the rule against unfinished uploads, and that is a warning with the command."""
    monkeypatch.setattr("ckptstore.doctor.speed.SIZES", (64 * 1024, 1024 * 1024))
    before = left_in(s3)
    diagnosis = examine(s3.url(), s3.storage_options)
    assert failed(diagnosis) == set()
    assert set(names(diagnosis)) >= {*EVERYWHERE, "old versions", "multipart leftovers", "throughput"}
    assert not set(names(diagnosis)) & set(IN_A_FOLDER)
    rules = diagnosis.finding("lifecycle rules")
    if rules is not None and rules.facts and rules.facts["abort_days"] is None:
        assert rules.ok is None
        assert f"--bucket {s3.name}" in rules.advice
        assert "AbortIncompleteMultipartUpload" in rules.advice
    assert left_in(s3) == before


def test_unfinished_uploads(s3: Bucket) -> None:
    """A multipart upload that nobody ended is found, below the prefix and nowhere else."""
    prefix = s3.prefix()
    begun = call(s3, "create_multipart_upload", s3.name, Key=f"{prefix}/half")
    try:
        found = examine(s3.url(prefix), s3.storage_options, speed=False).finding("multipart leftovers")
        other = examine(s3.url(), s3.storage_options, speed=False).finding("multipart leftovers")
    finally:
        call(s3, "abort_multipart_upload", s3.name, Key=f"{prefix}/half", UploadId=begun["UploadId"])
    assert found is not None
    assert (found.ok, found.facts["uploads"]) == (None, 1)
    assert f"{prefix}/half" in found.found
    assert "abort" in found.advice
    assert other is not None
    assert other.ok is True


def test_a_bucket_that_keeps_versions_and_expires_objects(s3: Bucket) -> None:
    """Old versions of what was tried out go too; a rule that deletes by age is a failure, a prune that frees nothing
    a warning."""
    name = f"{s3.name}-kept"
    call(s3, "create_bucket", name)
    call(s3, "put_bucket_versioning", name, VersioningConfiguration={"Status": "Enabled"})
    rule = {"ID": "clean", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 30}}
    call(s3, "put_bucket_lifecycle_configuration", name, LifecycleConfiguration={"Rules": [rule]})
    diagnosis = examine(f"s3://{name}/run", s3.storage_options, speed=False)
    assert failed(diagnosis) == {"lifecycle rules"}
    assert verdict(diagnosis, "old versions") is None
    reply = call(s3, "list_object_versions", name)
    assert [*reply.get("Versions", ()), *reply.get("DeleteMarkers", ())] == []


def test_a_locked_bucket_says_what_stays(s3: Bucket) -> None:
    """Where nothing can be deleted for good the speed is not measured, and what stays is told."""
    if s3.server is None:
        pytest.skip("not every server lets everybody make locked buckets")
    name = f"{s3.name}-locked"
    call(s3, "create_bucket", name, ObjectLockEnabledForBucket=True)
    retention = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
    lock = {"ObjectLockEnabled": "Enabled", "Rule": retention}
    call(s3, "put_object_lock_configuration", name, ObjectLockConfiguration=lock)
    diagnosis = examine(f"s3://{name}/run", s3.storage_options)
    assert failed(diagnosis) == set()
    assert "1 day" in str(diagnosis.finding("old versions"))
    assert verdict(diagnosis, "speed") is None
    assert "old versions of" in str(diagnosis.finding("left behind"))


def test_somebody_who_may_only_read(s3: Bucket) -> None:
    """Refusals are told by name, with the permission that is lacking; what needs none is looked at."""
    if s3.server is None:
        pytest.skip("only our own server knows the reader")
    reader = {**s3.storage_options, "key": servers.READER_KEY, "secret": servers.READER_SECRET}
    diagnosis = examine(s3.url(), reader)
    assert failed(diagnosis) == {"put", "delete"}
    assert "s3:PutObject" in str(diagnosis.finding("put"))
    assert (verdict(diagnosis, "list"), verdict(diagnosis, "get")) == (True, True)
    assert verdict(diagnosis, "repository") is True


def test_a_bucket_that_does_not_exist_is_not_made(s3: Bucket) -> None:
    """Some servers make a bucket for the first put: nothing is put where there is none."""
    name = f"{s3.name}-nowhere"
    diagnosis = examine(f"s3://{name}/run", s3.storage_options, retry=QUICK)
    assert failed(diagnosis) == {"list", "put", "get", "delete"}
    assert name not in {one["Name"] for one in call_list(s3)}


def call_list(bucket: Bucket) -> list[dict[str, Any]]:
    import s3fs

    fs = s3fs.S3FileSystem(**bucket.storage_options, skip_instance_cache=True)
    return list(fs.call_s3("list_buckets")["Buckets"])


def test_gcs(gcs: Bucket) -> None:
    """A bucket of Google Cloud Storage, and its settings as the JSON API tells them."""
    from gcsfs.core import GCSFileSystem

    url = gcs.url()
    diagnosis = examine(url, gcs.storage_options, speed=False)
    assert failed(diagnosis) == set()
    assert set(names(diagnosis)) >= {*EVERYWHERE, "old versions", "lifecycle rules"}
    assert "multipart leftovers" not in names(diagnosis)
    assert GCSFileSystem(**gcs.storage_options, skip_instance_cache=True).find(url.removeprefix("gs://")) == []


def test_a_server_that_ignores_conditions(s3_no_conditions: Bucket) -> None:
    """A failure; with the promise of a single writer a warning."""
    bucket = s3_no_conditions
    diagnosis = examine(bucket.url(), bucket.storage_options, speed=False)
    assert failed(diagnosis) == {"conditional puts"}
    promised = examine(bucket.url(), bucket.storage_options, speed=False, unsafe_single_writer=True)
    assert failed(promised) == set()
    assert verdict(promised, "conditional puts") is None
    assert left_in(bucket) == []


@pytest.mark.parametrize(("seconds", "ok"), [(0, True), (-60, None), (3000, False)])
def test_clocks_that_differ(s3: Bucket, seconds: int, ok: bool | None) -> None:
    """The stamps of the store are compared with this machine's clock."""

    def shifted(reply: Reply) -> Reply:
        name = next(name for name in reply.headers if name.lower() == "last-modified")
        stamp = parsedate_to_datetime(reply.headers[name]).timestamp() + seconds
        return dataclasses.replace(reply, headers={**reply.headers, name: formatdate(stamp, usegmt=True)})

    with Proxy(s3.endpoint) as proxy, proxy.play(Rule(edit(shifted), on="info", times=None)):
        options = {**s3.storage_options, "endpoint_url": proxy.endpoint}
        diagnosis = examine(s3.url(), options, speed=False)
    assert verdict(diagnosis, "clock") is ok
    found = diagnosis.finding("clock")
    assert found is not None
    assert found.facts["skew_seconds"] == pytest.approx(seconds, abs=3)
    assert failed(diagnosis) == (set() if ok is not False else {"clock"})


def test_a_store_that_does_not_answer(s3: Bucket) -> None:
    """After a few calls in vain it is not asked any more, so that the answer comes soon."""
    options = {**s3.storage_options, "endpoint_url": servers.unused_endpoint()}
    diagnosis = examine(s3.url(), options, retry=QUICK)
    assert {"list", "put", "get", "delete"} <= failed(diagnosis)
    assert verdict(diagnosis, "clock") is None
    assert "does not answer" in str(diagnosis.finding("repository"))
    assert all(finding.advice for finding in diagnosis.findings if finding.ok is False)


# ---- stores that do not keep their word ----------------------------------------------------------------------------


class Lying(MemoryStore):
    """Forgets the condition of puts, always or when two race; stamps with several clocks; shows what was before."""

    def __init__(self, *, ignores: bool = False, races: bool = False, clocks: float = 0.0, stale: bool = False) -> None:
        super().__init__()
        self._ignores, self._races, self._clocks, self._stale = ignores, races, clocks, stale
        self._puts = 0
        self._before: tuple[ObjectInfo, ...] = ()

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        self._puts += 1
        if if_absent and self._races and not any(info.key == key for info in super().list(key)):
            time.sleep(0.05)  # looks, then puts
            if_absent = False
        super().put(key, data, if_absent=if_absent and not self._ignores)

    def info(self, key: str) -> ObjectInfo:
        info = super().info(key)
        return dataclasses.replace(info, modified=info.modified + self._clocks * (self._puts % 2))

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        before, self._before = self._before, tuple(super().list(partial=partial))
        shown = before if self._stale else self._before
        return iter([info for info in shown if info.key.startswith(prefix)])


def test_conditions_that_are_ignored() -> None:
    """A store that takes the second create too."""
    store = Lying(ignores=True)
    assert failed(examine_store(store, speed=False)) == {"conditional puts"}
    assert failed(examine_store(store, speed=False, single_writer=True)) == set()
    assert list(store.list()) == []


def test_conditions_that_lose_a_race() -> None:
    """Honoured one after the other, and not when two create at once: that is not honoured."""
    diagnosis = examine_store(Lying(races=True), speed=False)
    assert failed(diagnosis) == {"conditional puts"}
    found = diagnosis.finding("conditional puts")
    assert found is not None
    assert max(found.facts["winners"]) > 1


@pytest.mark.parametrize(("spread", "ok"), [(0.0, True), (100.0, None), (1000.0, False)])
def test_a_store_with_several_clocks(spread: float, ok: bool | None) -> None:
    """Stamps that disagree among themselves are told, whatever this machine's clock says."""
    assert verdict(examine_store(Lying(clocks=spread), speed=False), "clock") is ok


def test_a_listing_that_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a listing shows too late is a failure that says what was seen, and how late."""
    monkeypatch.setattr("ckptstore.doctor.verbs._LATE_SECONDS", 0.3)
    store = Lying(stale=True)
    diagnosis = examine_store(store, speed=False)
    assert "reads after writes" in failed(diagnosis)
    found = diagnosis.finding("reads after writes")
    assert found is not None
    assert "a listing lacks what was just put (3 of 3 times, seen after 0." in found.found
    assert {"a listing shows what was before an overwrite", "a listing shows what was just deleted"} <= set(
        found.facts["stale"]
    )


# ---- a check that fails keeps no other from running ----------------------------------------------------------------


@pytest.mark.parametrize("verb", ["put", "get", "info", "list", "delete"])
@pytest.mark.parametrize(
    "error", [AccessError("not you; ask"), TransientError("a moment"), ValueError("a bug"), DeadlineError("too late")]
)
def test_every_check_runs_whatever_fails(verb: Any, error: Exception) -> None:
    """Whichever verb fails, and however: each check has its finding, and the failed verb's is one that failed."""
    inner = MemoryStore()
    store = RetryStore(FaultStore(inner, [Fault(verb, error=error, times=None)]), QUICK)
    diagnosis = examine_store(store)
    assert [name for name in EVERYWHERE if name not in names(diagnosis)] == []
    wanted = "clock" if verb == "info" else verb
    assert wanted in failed(diagnosis)
    assert not diagnosis.ok
    if verb != "delete":
        assert list(inner.list()) == []


def test_what_may_not_be_deleted_is_told() -> None:
    """Where deleting is refused as little as possible is put, and each key that stays is named."""
    inner = MemoryStore()
    store = FaultStore(inner, [Fault("delete", error=AccessError("append only"), times=None)])
    diagnosis = examine_store(store)
    left = diagnosis.finding("left behind")
    assert left is not None
    assert left.ok is False
    there = sorted(info.key for info in inner.list())
    assert list(left.facts["keys"]) == there
    assert 1 <= len(there) <= 5
    assert all(key.startswith("probes/") for key in there)
    assert verdict(diagnosis, "speed") is None


def test_nothing_but_probes_can_be_put() -> None:
    """The store under examination takes no name that a repository uses."""
    with Patient(MemoryStore()) as patient:
        for key in ("ckptstore.json", "manifests/000000000001-000001.json", "x"):
            with pytest.raises(InvalidArgumentError):
                patient.store.put(key, b"")
            with pytest.raises(InvalidArgumentError):
                patient.store.delete(key)


# ---- nothing stays, however it ends --------------------------------------------------------------------------------


class Counting(FaultStore):
    """Raises KeyboardInterrupt in call number ``at``, before or after it was done; counts the calls."""

    def __init__(self, inner: Store, at: int, when: Any) -> None:
        self.calls = 0
        self._counting = threading.Lock()

        def strike() -> BaseException | None:
            with self._counting:
                self.calls += 1
                return KeyboardInterrupt() if self.calls == at else None

        verbs: tuple[Any, ...] = ("put", "get", "info", "list", "delete")
        super().__init__(inner, [Fault(verb, when=when, error=strike, times=None) for verb in verbs])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_an_interrupt_at_any_call_leaves_nothing(
    kind: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before or after each call to the store, in its turn: it is passed on, and the place is as it was."""
    monkeypatch.setattr("ckptstore.doctor.patient._PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("ckptstore.doctor.speed.SIZES", (1024,))
    monkeypatch.setattr("ckptstore.doctor.speed.WIDTHS", (1, 2))
    (tmp_path / "there").mkdir()

    def place() -> Store:
        return MemoryStore() if kind == "memory" else LocalStore(tmp_path / "there" / "not")

    whole = Counting(place(), -1, when)
    examine_store(whole)
    assert whole.calls > 50
    for at in range(1, whole.calls - 2, 1 if kind == "memory" else 9):
        inner = place()
        with pytest.raises(KeyboardInterrupt):
            examine_store(Counting(inner, at, when))
        assert list(inner.list()) == [], at
        assert tree(tmp_path) == {"there": None}, at


def test_a_real_ctrl_c(tmp_path: Path) -> None:
    """SIGINT to the command while it measures: exit code 130, and neither file nor folder stays."""
    code = """
import os, signal, sys, threading
from ckptstore.doctor import speed
from ckptstore.cli import main
cell = speed._cell
def slowly(*arguments):
    threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGINT)).start()
    while True:
        cell(*arguments)
speed._cell = slowly
sys.exit(main(["doctor", sys.argv[1]]))
"""
    line = [sys.executable, "-c", code, str(tmp_path / "a" / "b"), "0.03"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "error: interrupted\n"
    assert tree(tmp_path) == {}


class Hanging(LocalStore):
    """A mount whose server has gone away."""

    gone = threading.Event()

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        self.gone.wait(60)
        super().put(key, data, if_absent=if_absent)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.gone.wait(60)
        return super().get(key, start, end)

    def delete(self, key: str) -> None:
        self.gone.wait(60)
        super().delete(key)

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        self.gone.wait(60)
        return super().list(prefix, partial=partial)


def test_a_mount_that_hangs(tmp_path: Path) -> None:
    """Each call has a limit, and after a few the others are not begun."""
    store = WatchStore(Hanging(tmp_path / "mount"), 0.1)
    try:
        diagnosis = examine_store(store, speed=False)
    finally:
        Hanging.gone.set()
    assert {"list", "put", "get", "delete"} <= failed(diagnosis)
    assert "does not answer" in str(diagnosis.finding("repository"))
    end = time.monotonic() + 10
    while store.hung and time.monotonic() < end:  # what was given up ends by itself, and publishes nothing
        time.sleep(0.01)
    assert store.hung == 0
    assert not [name for name, content in tree(tmp_path).items() if content is not None]
