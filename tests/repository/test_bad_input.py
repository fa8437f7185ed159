"""Bad input: each is a typed error that says what to do; nothing is written, nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import (
    AccessError,
    CkptStoreError,
    CorruptionError,
    EpochExistsError,
    EpochNotFoundError,
    FormatError,
    InvalidArgumentError,
    InvalidRecordError,
    NotFoundError,
    RecordNotFoundError,
    Repository,
    RepositoryNotFoundError,
    RetryPolicy,
    TransactionError,
    keys,
)
from ckptstore.manifest import digest_of
from ckptstore.stores import MemoryStore
from tests.repository.helpers import CHUNK, assert_same, contents, make_state, open_repo

QUICK = RetryPolicy(attempts=2, deadline=20, base=0.0, cap=0.0)
NO_TEXT: Any = 3


@pytest.fixture
def store() -> MemoryStore:
    """A repository with epoch 1."""
    made = MemoryStore()
    open_repo(made).save(1, make_state(1))
    return made


@pytest.fixture
def untouched(store: MemoryStore) -> Iterator[MemoryStore]:
    """The same; fails if the test leaves anything changed on it."""
    before = contents(store)
    yield store
    assert contents(store) == before


def signed(body: bytes) -> bytes:
    """A JSON object with a true digest of itself, as a newer version might write it."""
    rest = body[1:]
    return b'{"digest":"' + digest_of(rest).encode() + b'",' + rest


# ---- where --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/x",
        "s3:/bucket",
        "s3://",
        "memory://",
        "",
        "s3://user:pw@bucket/x",
        "s3://b/../c",
        "file://host/x",
        "a\0b",
    ],
)
def test_bad_url(url: str) -> None:
    """A URL that makes no sense is refused with the forms that do, and never repeats a password."""
    with pytest.raises(InvalidArgumentError) as caught:
        ckptstore.open(url)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(("scheme", "library"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_missing_library(scheme: str, library: str) -> None:
    """A library that is not installed is named, with what to install."""
    code = (
        "import sys, ckptstore\n"
        f"sys.modules[{library!r}] = None\n"
        f"try: ckptstore.open('{scheme}://bucket/x', storage_options={{'token': 'anon'}})\n"
        "except ckptstore.InvalidArgumentError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert library in result.stdout, result.stderr
    assert "install" in result.stdout


@pytest.mark.s3
def test_wrong_credentials(s3: Any) -> None:
    """Wrong credentials are AccessError from open, from save and from latest, never "no checkpoint"."""
    url = s3.url()
    ckptstore.open(url, storage_options=s3.storage_options).save(1, make_state(1))
    for wrong in ({"secret": "wrong"}, {"key": "nobody", "secret": "wrong"}):
        with pytest.raises(AccessError):
            ckptstore.open(url, storage_options={**s3.storage_options, **wrong}, retry=QUICK)
    assert ckptstore.open(url, storage_options=s3.storage_options).epochs() == [1]


@pytest.mark.s3
@pytest.mark.parametrize("create", [True, False])
def test_missing_bucket(s3: Any, create: bool) -> None:
    """A bucket that does not exist is RepositoryNotFoundError and is not made."""
    url = "s3://ckptstore-no-such-bucket/x"
    for _ in range(2):
        with pytest.raises(RepositoryNotFoundError, match="no-such-bucket"):
            ckptstore.open(url, storage_options=s3.storage_options, create=create, retry=QUICK)


@pytest.mark.parametrize("files", [{"notes.txt": b"x"}, {"photos/1.jpg": b"x"}, {"manifests/mine.json": b"{}"}])
def test_folder_that_holds_something_else(files: dict[str, bytes], tmp_path: Path) -> None:
    """A folder that holds something else is refused and left alone."""
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FormatError, match="something else"):
        ckptstore.open(tmp_path)
    with pytest.raises(RepositoryNotFoundError):
        ckptstore.open(tmp_path, create=False)
    assert sorted(tmp_path.rglob("*")) == before


def test_file_in_place_of_a_folder(tmp_path: Path) -> None:
    """A file where the folder should be is AccessError."""
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(AccessError):
        ckptstore.open(tmp_path / "file", retry=QUICK)
    assert (tmp_path / "file").read_bytes() == b"x"


def test_nothing_there(tmp_path: Path) -> None:
    """Opening what does not exist with create=False is RepositoryNotFoundError and makes nothing."""
    with pytest.raises(RepositoryNotFoundError, match="create=True"):
        ckptstore.open(tmp_path / "new", create=False)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder with a repository with epoch 1, on a file system mounted read-only."""
    folder = tmp_path / "mount"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    try:
        ckptstore.open(folder / "runs").save(1, make_state(1))
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_read_only_folder(read_only: Path) -> None:
    """A read-only folder can be read; a save, delete, prune, gc or a new repository there is AccessError."""
    repo = ckptstore.open(read_only / "runs")
    latest = repo.latest()
    assert latest is not None
    assert_same(latest.load(), make_state(1))
    assert repo.verify().ok
    assert repo.gc(dry_run=True).removed == []
    acts: list[Callable[[], object]] = [
        lambda: repo.save(2, make_state(2)),
        lambda: repo.delete(1),
        lambda: repo.gc(),
        lambda: ckptstore.open(read_only / "new"),
    ]
    for act in acts:
        with pytest.raises(AccessError):
            act()
    assert ckptstore.open(read_only / "runs").epochs() == [1]
    assert not (read_only / "new").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_folder_without_permission(tmp_path: Path) -> None:
    """A folder without write permission is AccessError, and what is in it can be read."""
    ckptstore.open(tmp_path / "runs").save(1, make_state(1))
    (tmp_path / "runs" / "leases").chmod(0o555)
    with pytest.raises(AccessError):
        ckptstore.open(tmp_path / "runs").save(2, make_state(2))
    assert ckptstore.open(tmp_path / "runs").epochs() == [1]


# ---- what is there ------------------------------------------------------------------------------------------


def test_newer_marker(untouched: MemoryStore) -> None:
    """A repository of a newer format is FormatError that says to upgrade, and is not written to."""
    old = untouched.get(keys.MARKER)
    untouched.put(keys.MARKER, signed(b'{"format":2,"repository":{"of":"another form"}}'))
    newer = contents(untouched)
    for create in (True, False):
        with pytest.raises(FormatError, match="upgrade"):
            open_repo(untouched, create=create)
    assert contents(untouched) == newer
    untouched.put(keys.MARKER, old)


def test_newer_manifest(untouched: MemoryStore) -> None:
    """A manifest of a newer format is FormatError from latest and from its epoch; older epochs still load."""
    newer = keys.manifest_key(2, 1)
    untouched.put(newer, signed(b'{"format":2,"epoch":2}'))
    before = contents(untouched)
    repo = open_repo(untouched)
    for read in (repo.latest, lambda: repo.checkpoint(2)):
        with pytest.raises(FormatError, match="upgrade") as caught:
            read()
        assert caught.value.key == newer
    assert_same(repo.checkpoint(1).load(), make_state(1))
    for remove in (lambda: repo.gc(grace=0), lambda: repo.prune(ckptstore.KeepLast(1)), lambda: repo.delete(1)):
        with pytest.raises(FormatError):
            remove()
        after = {key: data for key, data in contents(untouched).items() if not key.startswith("probes/")}
        assert after == before
    untouched.delete(newer)


def test_unknown_members_are_ignored(store: MemoryStore) -> None:
    """Members that this version does not know, in the same format, are ignored."""
    key = keys.manifest_key(1, 1)
    data = store.get(key)
    body = b"{" + data[data.index(b'",') + 2 : -1] + b',"novelty":[1,2]}'
    store.put(key, signed(body))
    assert_same(open_repo(store).checkpoint(1).load(), make_state(1))


def test_manifest_of_two_gibibytes(tmp_path: Path) -> None:
    """P8: a manifest of 2 GiB is damage that is stepped over, and is never read into memory."""
    repo = ckptstore.open(tmp_path, chunk_size=CHUNK)
    repo.save(1, make_state(1))
    with open(tmp_path / keys.manifest_key(2, 1), "wb") as file:
        file.truncate(2 << 30)
    tracemalloc.start()
    try:
        latest = ckptstore.open(tmp_path).latest(deep=True)
        with pytest.raises(CorruptionError):
            repo.checkpoint(2)
        assert not repo.verify().ok
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert latest is not None
    assert [skip.key for skip in latest.skipped] == [keys.manifest_key(2, 1)]
    assert_same(latest.load(), make_state(1))
    assert peak < 64 << 20


@pytest.mark.parametrize("size", [2 << 30])
def test_other_objects_of_two_gibibytes(size: int, tmp_path: Path) -> None:
    """P8: a marker, an index, a chunk or a lease of 2 GiB is damage, and is never read into memory."""
    ckptstore.open(tmp_path, chunk_size=CHUNK).save(1, make_state(1))
    (tmp_path / "leases").mkdir(exist_ok=True)
    (tmp_path / "leases" / ("0" * 32 + ".json")).touch()
    files = [p for p in tmp_path.rglob("*") if p.is_file() and "manifests" not in p.parts]
    assert len(files) >= 5
    tracemalloc.start()
    try:
        for path in files:
            length = path.stat().st_size
            data = path.read_bytes()
            os.truncate(path, size)
            repo = ckptstore.open(tmp_path)
            harmless = "reserve" in path.parts or path.parent.name in ("leases", tmp_path.name)
            assert repo.verify().ok == harmless
            repo.save(2, make_state(1))  # it neither builds on it nor fails by it
            assert repo.verify(2).ok
            assert_same(repo.checkpoint(2).load(), make_state(1))
            repo.delete(2)
            os.truncate(path, length)
            path.write_bytes(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_no_pickle(store: MemoryStore, tmp_path: Path) -> None:
    """P8: a pickle in place of any object is damage; it is not run."""
    flag = tmp_path / "ran"
    payload = b"cos\nsystem\n(S'touch " + str(flag).encode() + b"'\ntR."
    objects = contents(store)
    for key in objects:
        if key == keys.MARKER:
            continue
        store.put(key, payload)
        with pytest.raises(CorruptionError):
            open_repo(store).checkpoint(1).load()
        store.put(key, objects[key])
    assert not flag.exists()


# ---- what is asked ------------------------------------------------------------------------------------------

NAMES = [
    "..",
    "a/../b",
    "/abs",
    "a//b",
    "a\nb",
    "",
    "a b",
    "é",
    ".hidden",
    "-x",
    "a/",
    "x" * 256,
    "C:\\x",
    "~user",
    "a/.",
    "a\0",
]


@pytest.mark.parametrize("name", [*NAMES, NO_TEXT, None])
def test_bad_record_name(untouched: MemoryStore, name: Any, tmp_path: Path) -> None:
    """A record name that could leave its place is InvalidRecordError, before anything is written."""
    repo = open_repo(untouched)
    with pytest.raises(InvalidRecordError, match="record name"):
        repo.save(2, {"model": {"w": np.ones(3)}, name: {"w": np.ones(3)}})
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(InvalidRecordError), repo.begin(2) as txn:
        txn.write_file(name, tmp_path / "file")
    with pytest.raises(InvalidRecordError), repo.begin(2) as txn:
        txn.write(name, {})


@pytest.mark.parametrize("epoch", [-1, 2**63, 10**30, 1.0, "1", None, True, float("nan"), np.float64(1)])
def test_bad_epoch(untouched: MemoryStore, epoch: Any) -> None:
    """An epoch that is no int from 0 to 2**63 - 1 is InvalidArgumentError, from every call that takes one."""
    repo = open_repo(untouched)
    calls: list[Callable[[], object]] = [
        lambda: repo.save(epoch, make_state(1)),
        lambda: repo.begin(epoch),
        lambda: repo.checkpoint(epoch),
        lambda: repo.delete(epoch),
        *([] if epoch is None else [lambda: repo.verify(epoch)]),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="epoch"):
            call()


@pytest.mark.parametrize("epoch", [0, 2**63 - 1, np.int64(7), np.uint8(255)])
def test_good_epoch(epoch: Any) -> None:
    """The ends of the range and NumPy ints are epochs."""
    store = MemoryStore()
    repo = open_repo(store)
    repo.save(epoch, make_state(1))
    assert repo.epochs() == [int(epoch)]
    assert_same(open_repo(store).checkpoint(epoch).load(), make_state(1))


@pytest.mark.parametrize(
    "records", [{}, None, [], "model", {"model": lambda: 0}, {"model": {"a": open}}, {"model": np.array([object()])}]
)
def test_bad_records(untouched: MemoryStore, records: Any) -> None:
    """Records that are none, or hold what cannot be stored exactly, are InvalidRecordError before the first write."""
    with pytest.raises(InvalidRecordError):
        open_repo(untouched).save(2, records)


@pytest.mark.parametrize("metadata", [[1], "x", {1: 2}, {"w": np.ones(3)}, {"f": lambda: 0}, {"x": b"y" * 5000}])
def test_bad_metadata(untouched: MemoryStore, metadata: Any) -> None:
    """Metadata that cannot be stored exactly in a manifest is InvalidRecordError before the first write."""
    with pytest.raises(InvalidRecordError):
        open_repo(untouched).save(2, make_state(2), metadata=metadata)


def test_arrays_in_metadata_are_named(untouched: MemoryStore) -> None:
    """A loss that is still an array is the commonest one: the error says which value, and what to write."""
    with pytest.raises(InvalidRecordError, match=r"metadata\.train\.loss: store its \.item\(\)"):
        open_repo(untouched).save(2, make_state(2), {"epoch": 1, "train": {"loss": np.array(0.5)}})


def test_metadata_beyond_the_cap(store: MemoryStore) -> None:
    """Metadata larger than a manifest may be is InvalidRecordError; nothing is committed and nothing left behind."""
    before = contents(store)
    with pytest.raises(InvalidRecordError, match="metadata"):
        open_repo(store).save(2, make_state(2), metadata={"log": "x" * (17 << 20)})
    assert contents(store) == before


def test_unstorable_values_are_named_together(untouched: MemoryStore, tmp_path: Path) -> None:
    """Everything that cannot be stored is named by its path, all at once."""
    with open(tmp_path / "f", "w") as file, pytest.raises(InvalidRecordError) as caught:
        open_repo(untouched).save(
            2,
            {
                "model": {"w": np.ones(3), "hook": lambda: 0},
                "optim": {"state": [{"file": file}, {"x": np.array([None], dtype=object)}]},
            },
        )
    assert "model.hook" in str(caught.value)
    with open(tmp_path / "f", "w") as file, pytest.raises(InvalidRecordError) as caught:
        open_repo(untouched).save(
            2, {"optim": {"state": [{"file": file}, {"x": np.array([None], dtype=object)}], "f": file}}
        )
    for path in ("optim.state.0.file", "optim.state.1.x", "optim.f"):
        assert path in str(caught.value)


def test_existing_epoch(untouched: MemoryStore) -> None:
    """P5: an existing epoch is EpochExistsError that names replace=True; its content stays."""
    repo = open_repo(untouched)
    for _ in range(2):
        with pytest.raises(EpochExistsError, match="replace=True") as caught:
            repo.save(1, make_state(2))
        assert caught.value.epoch == 1
    assert_same(repo.checkpoint(1).load(), make_state(1))


def test_missing_epoch_and_record(untouched: MemoryStore, tmp_path: Path) -> None:
    """What does not exist is NotFoundError that lists what does."""
    repo = open_repo(untouched)
    for call in (lambda: repo.checkpoint(7), lambda: repo.delete(7), lambda: repo.verify(7)):
        with pytest.raises(EpochNotFoundError) as caught:
            call()
        assert caught.value.epoch == 7
    checkpoint = repo.checkpoint(1)
    with pytest.raises(RecordNotFoundError, match="model"):
        checkpoint.load("scaler")
    with pytest.raises(RecordNotFoundError):
        checkpoint.load("model", paths=["nothing.*"])
    with pytest.raises(InvalidArgumentError):
        checkpoint.read_file("model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_size": 1},
        {"chunk_size": 1 << 40},
        {"chunk_size": "1M"},
        {"codec": "gzip"},
        {"storage_options": {"a": 1}},
    ],
)
def test_bad_options(options: dict[str, Any], tmp_path: Path) -> None:
    """An option that makes no sense is InvalidArgumentError, and no folder is made."""
    with pytest.raises(InvalidArgumentError):
        ckptstore.open(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("grace", [-1, float("nan"), float("-inf")])
def test_bad_grace(untouched: MemoryStore, grace: float) -> None:
    """A grace that makes no sense is InvalidArgumentError."""
    with pytest.raises(InvalidArgumentError, match="grace"):
        open_repo(untouched).gc(grace=grace)


def test_prune_without_a_policy(untouched: MemoryStore) -> None:
    """P5: a prune without any policy is refused: it does not guess what to delete."""
    with pytest.raises(InvalidArgumentError, match="policy"):
        open_repo(untouched).prune()


# ---- transactions -------------------------------------------------------------------------------------------


def test_closed_transaction(store: MemoryStore, tmp_path: Path) -> None:
    """A transaction that was committed or aborted takes nothing more."""
    (tmp_path / "file").write_bytes(b"x")
    repo = open_repo(store)
    committed = repo.begin(2)
    committed.write("model", {"w": np.ones(3)})
    committed.commit()
    aborted = repo.begin(3)
    aborted.abort()
    before = contents(store)
    for txn in (committed, aborted):
        for call in (
            partial(txn.write, "optim", {}),
            partial(txn.write_file, "optim", tmp_path / "file"),
            txn.commit,
        ):
            with pytest.raises(TransactionError, match=r"committed|aborted"):
                call()
        txn.abort()  # harmless
    assert contents(store) == before
    assert repo.epochs() == [1, 2]


def test_empty_transaction(untouched: MemoryStore) -> None:
    """A transaction without records is not committed."""
    with pytest.raises(TransactionError, match="no records"), open_repo(untouched).begin(2):
        pass


def test_record_twice(untouched: MemoryStore) -> None:
    """A record can be written once in a transaction."""
    with pytest.raises(InvalidRecordError, match="already"), open_repo(untouched).begin(2) as txn:
        txn.write("model", {"w": np.ones(3)})
        txn.write("model", {"w": np.ones(3)})


def test_failure_that_the_caller_swallows(untouched: MemoryStore, tmp_path: Path) -> None:
    """P2: a write that failed cannot be passed over: leaving the block raises, and nothing is committed."""
    with pytest.raises(TransactionError, match="a write failed"), open_repo(untouched).begin(2) as txn:
        txn.write("model", {"w": np.ones(3)})
        with pytest.raises(NotFoundError):
            txn.write_file("optim", tmp_path / "missing")


def test_refused_record_can_be_written_in_another_form(store: MemoryStore) -> None:
    """P7: a record that was refused left nothing behind, so it can be written again in a form that can be stored."""
    with open_repo(store).begin(2) as txn:
        with pytest.raises(InvalidRecordError):
            txn.write("optim", {"f": lambda: 0, "step": 1})
        txn.write("optim", {"step": 1})
    assert open_repo(store).checkpoint(2).load() == {"optim": {"step": 1}}


def test_an_exception_aborts(untouched: MemoryStore) -> None:
    """P1: an exception in the block passes through, and nothing remains of the attempt."""
    for error in (ZeroDivisionError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), open_repo(untouched).begin(2) as txn:
            txn.write("model", make_state(2)["model"])
            raise error


class Meddling(MemoryStore):
    """Calls ``meddle`` once, in the first put of a chunk: amid a save, in another thread than the caller's."""

    meddle: Callable[[], None] | None = None

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        if "/chunks/" in key and self.meddle is not None:
            act, self.meddle = self.meddle, None
            act()
        super().put(key, data, if_absent=if_absent)


MUTATIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a new key": lambda state: state.update(new=1),
    "a deleted key": lambda state: state.pop("lr"),
    "another value": lambda state: state.update(lr=0.5),
    "another array": lambda state: state.update(w=np.zeros(3)),
    "another dtype": lambda state: state.update(w=state["w"].astype(np.float32)),
    "a longer list": lambda state: state["list"].append(3),
    "something unstorable": lambda state: state.update(lr=lambda: 0),
    "deep inside": lambda state: state["nested"]["deep"].clear(),
}


@pytest.mark.parametrize("how", MUTATIONS)
def test_structure_changes_during_a_save(how: str) -> None:
    """P2: a structure that another thread changes during the save is InvalidRecordError; nothing is committed."""
    store = Meddling()
    repo = open_repo(store)
    repo.save(1, make_state(1))
    before = contents(store)
    state = {
        "w": np.random.default_rng(1).standard_normal(50_000),
        "lr": 0.1,
        "list": [1, 2],
        "nested": {"deep": {"x": 1}},
    }
    store.meddle = lambda: MUTATIONS[how](state)  # type: ignore[assignment]
    with pytest.raises(InvalidRecordError):
        repo.save(2, {"first": {"x": 1}, "model": state})
    assert store.meddle is None
    assert contents(store) == before


def test_values_change_during_a_save() -> None:
    """P3: values that another thread changes during the save give a checkpoint that verifies."""
    store = Meddling()
    repo = open_repo(store)
    state = {"model": {"w": np.zeros(50_000)}}
    store.meddle = lambda: state["model"]["w"].fill(1.0)
    repo.save(1, state)
    assert repo.verify().ok
    loaded = repo.checkpoint(1).load()["model"]["w"]
    assert set(np.unique(loaded)) <= {0.0, 1.0}


@pytest.mark.parametrize("grow", [True, False])
def test_file_changes_during_a_save(grow: bool, tmp_path: Path) -> None:
    """P2: a file that changes while it is being saved is InvalidRecordError; nothing is committed."""
    path = tmp_path / "optim.bin"
    path.write_bytes(os.urandom(10 * CHUNK))
    store = Meddling()
    repo: Repository = open_repo(store)
    before = contents(store)

    def change() -> None:
        with open(path, "r+b") as file:
            file.truncate(12 * CHUNK if grow else 100)

    store.meddle = change
    with pytest.raises(InvalidRecordError), repo.begin(1) as txn:
        txn.write_file("optim", path)
    assert contents(store) == before


@pytest.mark.parametrize("what", ["missing", "a folder"])
def test_bad_file(untouched: MemoryStore, what: str, tmp_path: Path) -> None:
    """A file that is not there or cannot be read is a typed error."""
    path = tmp_path if what == "a folder" else tmp_path / "missing"
    with pytest.raises(CkptStoreError), open_repo(untouched).begin(2) as txn:
        txn.write_file("optim", path)


def test_read_file_to_a_bad_place(store: MemoryStore, tmp_path: Path) -> None:
    """A file record that cannot be written to its place is a typed error, and the place stays as it was."""
    (tmp_path / "in").write_bytes(b"x" * 100)
    repo = open_repo(store)
    with repo.begin(2) as txn:
        txn.write_file("optim", tmp_path / "in")
    with pytest.raises(AccessError):
        repo.checkpoint(2).read_file("optim", tmp_path / "missing" / "out")
    (tmp_path / "folder").mkdir()
    with pytest.raises(AccessError):
        repo.checkpoint(2).read_file("optim", tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "in"]


@pytest.mark.parametrize(
    "options",
    [
        {"url": None}, {"url": 3}, {"url": [3]}, {"retry": 3}, {"retry": "often"}, {"concurrency": "8"},
        {"concurrency": 1.5}, {"concurrency": True}, {"storage_options": [1]}, {"storage_options": "key"},
        {"on_event": 5}, {"create": "no"}, {"create": None}, {"unsafe_single_writer": "no"}, {"codec": ["raw"]},
        {"codec": np.array(["raw"])}, {"keep": 3}, {"chunk_size": "1M"}, {"background_cores": 0.5},
        {"exit_timeout": "x"}, {"exit_timeout": float("nan")}, {"transport": "carrier pigeon"},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_of_open(options: dict[str, Any], tmp_path: Path) -> None:
    """An argument of the wrong type is InvalidArgumentError that names it, and nothing is made."""
    arguments = {"url": str(tmp_path / "r"), **options}
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        ckptstore.open(**arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda repo: repo.save(2, {"m": 1}, replace="no"),
        lambda repo: repo.save(2, {"m": 1}, progress=5),
        lambda repo: repo.begin(2, replace="no"),
        lambda repo: repo.save_async(2, {"m": 1}, replace="no"),
        lambda repo: repo.save_async(2, {"m": 1}, progress="bar"),
        lambda repo: repo.save_async(2, {"m": 1}, when_busy=np.array(["wait"])),
        lambda repo: repo.checkpoint(1).load(paths=5),
        lambda repo: repo.checkpoint(1).load(paths=[5]),
        lambda repo: repo.checkpoint(1).load(progress=5),
        lambda repo: repo.gc(grace="x"),
        lambda repo: repo.verify(progress=5),
    ],
)
def test_arguments_of_methods(call: Any) -> None:
    """An argument of the wrong type is InvalidArgumentError, before anything is written or deleted."""
    store = MemoryStore()
    repo = open_repo(store)
    repo.save(1, {"m": {"x": 1}})
    before = contents(store)
    with pytest.raises(InvalidArgumentError):
        call(repo)
    assert contents(store) == before
