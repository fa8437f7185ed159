"""LocalStore: durable, create-only, honest about errors, on real folders and real small file systems."""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptstore.errors import (
    AccessError,
    InvalidArgumentError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    StoreFullError,
    TransientError,
)
from ckptstore.keys import chunk_key, new_attempt, parse_partial_key, partial_key
from ckptstore.stores import _posix
from ckptstore.stores.local import LocalStore
from ckptstore.stores.local_errors import ERRORS

CHUNK = chunk_key("a" * 32, "b" * 64)


def files(root: Path) -> list[str]:
    """All files below a folder, relative, sorted."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir() or path.is_symlink())


def listed(store: LocalStore, prefix: str = "", *, partial: bool = False) -> list[str]:
    return sorted(entry.key for entry in store.list(prefix, partial=partial))


def fail(
    monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException, *, times: int = 10**9, done: bool = False
) -> None:
    """Let a function of ``os`` raise, after it did its work when ``done``."""
    real = getattr(os, name)
    left = [times]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if not left[0]:
            return real(*args, **kwargs)
        left[0] -= 1
        if done:
            real(*args, **kwargs)
        raise error

    monkeypatch.setattr(os, name, failing)


def run(code: str, *args: object, **options: Any) -> subprocess.Popen[str]:
    """A Python process that knows ``LocalStore``, ``os``, ``sys`` and its arguments as ``argv``."""
    preamble = "import os, signal, sys\nfrom ckptstore.stores.local import LocalStore\nargv = sys.argv[1:]\n"
    return subprocess.Popen(
        [sys.executable, "-c", preamble + code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        **options,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and output."""
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


# --- the order of things ---------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Records (function, file or folder) of the calls that make a put durable."""
    log: list[tuple[str, str]] = []

    def record(name: str, subject: Callable[..., str]) -> None:
        real = getattr(os, name)

        def recording(*args: Any, **kwargs: Any) -> Any:
            log.append((name, subject(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, recording)

    def named(path: str) -> str:
        return re.sub(r"\.tmp-[0-9a-f]{16}$", ".tmp", os.path.basename(path))

    record("fsync", lambda handle: named(os.readlink(f"/proc/self/fd/{handle}")))
    record("link", lambda source, target: f"{named(source)} -> {target}")
    record("replace", lambda source, target: f"{named(source)} -> {target}")
    record("unlink", named)
    record("write", lambda handle, _: named(os.readlink(f"/proc/self/fd/{handle}")))
    return log


def test_order_of_a_create_only_put(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    """Data is synced before the link, every new folder too, the entry after it, the scratch name goes last."""
    store = LocalStore(tmp_path / "new" / "root")
    store.put("x/y/key", b"body", if_absent=True)
    assert calls == [
        ("write", "key.tmp"),
        ("fsync", "key.tmp"),
        ("fsync", "x"),
        ("fsync", "root"),
        ("fsync", "new"),
        ("fsync", tmp_path.name),
        ("link", "key.tmp -> key"),
        ("fsync", "y"),
        ("unlink", "key.tmp"),
    ]


def test_order_of_an_overwriting_put(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    """An overwrite replaces in one step, and a folder that is known to be safe is not synced again."""
    store = LocalStore(tmp_path)
    store.put("x/key", b"1")
    calls.clear()
    store.put("x/key", b"2")
    assert calls == [("write", "key.tmp"), ("fsync", "key.tmp"), ("replace", "key.tmp -> key"), ("fsync", "x")]


def test_a_folder_made_by_others_is_synced(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    """Whoever made a folder, the first put into it sees that its parents hold it after a crash."""
    (tmp_path / "x" / "y").mkdir(parents=True)
    LocalStore(tmp_path).put("x/y/key", b"1")
    assert {("fsync", "y"), ("fsync", "x"), ("fsync", tmp_path.name)} <= set(calls)


@pytest.mark.parametrize("by_others", [False, True])
def test_a_folder_made_again_is_synced_again(tmp_path: Path, calls: list[tuple[str, str]], by_others: bool) -> None:
    """A folder that was removed, by us or by others, and made again is a new one."""
    store = LocalStore(tmp_path)
    store.put("x/key", b"1")
    (LocalStore(tmp_path) if by_others else store).delete("x/key")
    calls.clear()
    store.put("x/key", b"1")
    assert ("fsync", tmp_path.name) in calls


def test_a_delete_is_synced(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    """What was deleted does not come back after a crash, also when the first try lost its reply."""
    store = LocalStore(tmp_path)
    store.put("x/1", b"")
    store.put("x/2", b"")
    for _ in range(2):
        calls.clear()
        store.delete("x/1")
        assert calls == [("unlink", "1"), ("fsync", "x")]


def test_no_copy_of_the_body(tmp_path: Path) -> None:
    """A put does not double the memory of its body."""
    data = memoryview(bytearray(16 << 20))
    store = LocalStore(tmp_path)
    tracemalloc.start()
    try:
        store.put("big", data, if_absent=True)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- errors ----------------------------------------------------------------------------------------

BREAKING = [("put", "write"), ("put", "fsync"), ("put", "link"), ("put", "open")]
BREAKING += [("get", "pread"), ("get", "open"), ("info", "lstat"), ("list", "scandir"), ("delete", "unlink")]
ACTS: dict[str, Callable[[LocalStore], object]] = {
    "put": lambda store: store.put("a/new", b"body", if_absent=True),
    "get": lambda store: store.get("a/old"),
    "info": lambda store: store.info("a/old"),
    "list": lambda store: list(store.list()),
    "delete": lambda store: store.delete("a/old"),
}


MEANINGS: list[tuple[int, type[StoreError]]] = [
    *((code, TransientError) for code in (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN)),
    *((code, TransientError) for code in (errno.EBUSY, errno.ENETDOWN, errno.EHOSTDOWN, errno.EMFILE)),
    *((code, AccessError) for code in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)),
    *((code, StoreFullError) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
    *((code, StoreError) for code in (errno.EXDEV, errno.EINVAL)),
]


@pytest.mark.parametrize(
    ("verb", "function", "code", "kind"),
    [
        pytest.param(verb, function, code, kind, id=f"{verb}-{function}-{errno.errorcode[code]}")
        for verb, function in BREAKING
        for code, kind in MEANINGS
        if (function, code) != ("link", errno.EPERM)  # "no hard links here", see below
    ],
)
def test_errno_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, function: str, code: int, kind: type[StoreError]
) -> None:
    """Each errno has one meaning in every verb, is kept, and leaves neither scratch nor damage."""
    store = LocalStore(tmp_path)
    store.put("a/old", b"old")
    with monkeypatch.context() as patch:
        fail(patch, function, OSError(code, os.strerror(code)))
        with pytest.raises(StoreError) as caught:
            ACTS[verb](store)
    assert type(caught.value) is kind
    assert caught.value.errno == code
    assert os.strerror(code) in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert files(tmp_path) == ["a/old"]
    assert store.get("a/old") == b"old"


def test_every_errno_of_the_table_is_one_of_three() -> None:
    """The table speaks only of what may pass, what is refused and what is full."""
    assert set(ERRORS.values()) == {TransientError, AccessError, StoreFullError}


def test_error_at_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk that is only told at close, as NFS does, is a failed put."""
    store = LocalStore(tmp_path)
    with monkeypatch.context() as patch:
        fail(patch, "close", OSError(errno.EDQUOT, "quota"), times=1, done=True)
        with pytest.raises(StoreFullError) as caught:
            store.put("a", b"body", if_absent=True)
    assert caught.value.errno == errno.EDQUOT
    assert files(tmp_path) == []


def test_cleaning_up_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When even the scratch file cannot be removed, the first error is the one that is raised."""
    with monkeypatch.context() as patch:
        fail(patch, "fsync", OSError(errno.EIO, "first"))
        fail(patch, "unlink", OSError(errno.EROFS, "second"))
        with pytest.raises(TransientError, match="first"):
            LocalStore(tmp_path).put("a", b"body")
    assert listed(LocalStore(tmp_path)) == []


@pytest.mark.parametrize("function", ["write", "fsync", "link"])
def test_interrupt_removes_the_scratch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Ctrl-C passes through a put and leaves nothing."""
    fail(monkeypatch, function, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        LocalStore(tmp_path).put("a", b"body", if_absent=True)
    assert files(tmp_path) == []


def test_failure_after_the_link_is_transient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the new content can be seen only a transient error is honest, and a second put heals it."""
    store = LocalStore(tmp_path)
    store.put("other", b"")  # the root is known to be safe now: the next folder sync is the last step
    real = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EACCES, "denied")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(TransientError) as caught:
            store.put("a", b"body", if_absent=True)
    assert caught.value.errno == errno.EACCES
    store.put("a", b"body", if_absent=True)
    assert files(tmp_path) == ["a", "other"]


def test_folder_sync_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows no sync of folders is not an error."""
    real = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "invalid")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    LocalStore(tmp_path / "root").put("a/b", b"body")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Without hard links a rename that refuses to overwrite gives the same guarantee."""
    fail(monkeypatch, "link", OSError(code, os.strerror(code)))
    store = LocalStore(tmp_path)
    store.put("a", b"body", if_absent=True)
    assert store.traits.create_only == "rename"
    with pytest.raises(ObjectExistsError):
        store.put("a", b"other", if_absent=True)
    store.put("a", b"body", if_absent=True)
    assert store.get("a") == b"body"
    assert files(tmp_path) == ["a"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_neither_hard_links_nor_such_a_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A file system that cannot create without overwriting is named as such, before any byte; one writer may use it."""
    fail(monkeypatch, "link", OSError(code, os.strerror(code)))
    monkeypatch.setattr(_posix, "_libc", None)
    store = LocalStore(tmp_path)
    with pytest.raises(AccessError, match="neither hard links nor") as caught:
        store.put("a", b"body", if_absent=True)
    assert (caught.value.errno, caught.value.key) == (errno.EPERM, "a")
    assert files(tmp_path) == []
    alone = LocalStore(tmp_path, single_writer=True)
    alone.put("a", b"body", if_absent=True)
    with pytest.raises(ObjectExistsError):
        alone.put("a", b"other", if_absent=True)
    assert (alone.traits.create_only, alone.traits.conditional_put) == ("look", False)
    assert files(tmp_path) == ["a"]
    with pytest.raises(AccessError, match="neither hard links nor"):
        LocalStore(tmp_path).put("b", b"body", if_absent=True)


# --- lost replies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOENT])
@pytest.mark.parametrize(("function", "if_absent"), [("link", True), ("replace", False)])
def test_lost_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, if_absent: bool, code: int) -> None:
    """A link or rename that happened although the call failed, as on NFS, is a success."""
    store = LocalStore(tmp_path)
    fail(monkeypatch, function, OSError(code, os.strerror(code)), times=1, done=True)
    store.put("a", b"body", if_absent=if_absent)
    assert store.get("a") == b"body"
    assert files(tmp_path) == ["a"]


def test_scratch_name_sent_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scratch file that "exists" because NFS sent our own open twice does not stop the put."""
    store = LocalStore(tmp_path)
    real = os.open
    refused: list[str] = []

    def create(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        handle = real(path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_EXCL and not refused:
            refused.append(path)
            os.close(handle)
            raise FileExistsError(errno.EEXIST, "exists")
        return handle

    monkeypatch.setattr(os, "open", create)
    store.put("a", b"body", if_absent=True)
    assert refused
    assert listed(store) == ["a"]


def test_object_gone_while_it_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is deleted between "exists" and the look at its bytes is free."""
    store = LocalStore(tmp_path)
    fail(monkeypatch, "link", FileExistsError(errno.EEXIST, "exists"), times=3)
    store.put("a", b"body", if_absent=True)
    assert files(tmp_path) == ["a"]


def test_short_reads_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that reads and writes less than asked is asked again."""
    real_read, real_write = os.pread, os.write
    monkeypatch.setattr(os, "pread", lambda handle, count, at: real_read(handle, min(count, 7), at))
    monkeypatch.setattr(os, "write", lambda handle, data: real_write(handle, data[:10]))
    store = LocalStore(tmp_path)
    data = bytes(range(256))
    for _ in range(2):
        store.put("a", data, if_absent=True)
    assert store.get("a") == data
    assert store.get("a", 5, 200) == data[5:200]


def test_write_that_never_gets_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that takes nothing is an error, not an endless loop."""
    monkeypatch.setattr(os, "write", lambda handle, data: 0)
    with pytest.raises(TransientError):
        LocalStore(tmp_path).put("a", b"body")
    assert files(tmp_path) == []


# --- folders ---------------------------------------------------------------------------------------


def test_folder_made_by_another_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "Exists" is a success when a folder is there."""
    fail(monkeypatch, "mkdir", FileExistsError(errno.EEXIST, "exists"), times=2, done=True)
    LocalStore(tmp_path / "root").put("a/b", b"body")
    assert files(tmp_path) == ["root/a/b"]


def test_folder_removed_by_another_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that vanishes before the scratch file is in it is made again, but not for ever."""
    real = os.mkdir
    left = [5]

    def mkdir(path: str, mode: int = 0o777) -> None:
        real(path, mode)
        if left[0]:
            left[0] -= 1
            os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    store = LocalStore(tmp_path)
    store.put("a/b/c", b"body")
    assert files(tmp_path) == ["a/b/c"]
    left[0] = 10**9
    with pytest.raises(TransientError, match="vanishes"):
        store.put("x/y/z", b"body")


def test_file_in_place_of_a_folder(tmp_path: Path) -> None:
    """A file where a folder must be, or the other way round, is refused with advice and stays."""
    store = LocalStore(tmp_path)
    store.put("a", b"file")
    store.put("b/c", b"file")
    for key in ("a/b", "a/b/c", "b"):
        for if_absent in (True, False):
            with pytest.raises(AccessError, match="move it away"):
                store.put(key, b"body", if_absent=if_absent)
    assert files(tmp_path) == ["a", "b/c"]


def test_delete_removes_empty_folders(tmp_path: Path) -> None:
    """A delete takes the folders that it emptied, never the root, never what others put there."""
    root = tmp_path / "root"
    store = LocalStore(root)
    for key in ("a/b/c/1", "a/b/2", "x/y/3"):
        store.put(key, b"")
    (root / "x" / ".nfs0001").write_bytes(b"")
    store.delete("a/b/c/1")
    assert not (root / "a" / "b" / "c").exists()
    store.delete("a/b/2")
    assert not (root / "a").exists()
    store.delete("x/y/3")
    assert files(root) == ["x/.nfs0001"]
    os.unlink(root / "x" / ".nfs0001")
    store.delete("x/y/3")
    assert os.listdir(root) == []
    store.put("a/b/2", b"again")
    assert store.get("a/b/2") == b"again"


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOTEMPTY, errno.EEXIST, errno.EACCES])
def test_folder_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A folder that will not go is no reason for a delete to fail."""
    store = LocalStore(tmp_path)
    store.put("a/1", b"")
    fail(monkeypatch, "rmdir", OSError(code, os.strerror(code)))
    store.delete("a/1")
    assert listed(store) == []


def test_root_is_a_file(tmp_path: Path) -> None:
    """A root that is a file is a mistake in every verb, never an empty store."""
    (tmp_path / "root").write_bytes(b"precious")
    for act in ACTS.values():
        with pytest.raises(AccessError) as caught:
            act(LocalStore(tmp_path / "root"))
        assert caught.value.errno == errno.ENOTDIR
    with pytest.raises(AccessError):
        list(LocalStore(tmp_path / "root").list("a/b/"))
    assert (tmp_path / "root").read_bytes() == b"precious"


def test_missing_root(tmp_path: Path) -> None:
    """A missing root holds nothing, and only a put makes it."""
    store = LocalStore(tmp_path / "root")
    assert listed(store) == listed(store, "a/") == listed(store, partial=True) == []
    store.delete("a/1")
    for ask in (store.get, store.info):
        with pytest.raises(ObjectNotFoundError):
            ask("a/1")
    assert os.listdir(tmp_path) == []


# --- foreign things --------------------------------------------------------------------------------


def test_scratch_files(tmp_path: Path) -> None:
    """Scratch files show only with ``partial``, only where they are ours, and can be deleted."""
    store = LocalStore(tmp_path)
    store.put(CHUNK, b"body")
    scratch, foreign = partial_key(CHUNK), partial_key("data")
    (tmp_path / scratch).write_bytes(b"ha")
    (tmp_path / foreign).write_bytes(b"not ours")
    assert listed(store) == [CHUNK]
    assert listed(store, partial=True) == listed(store, "attempts/", partial=True) == [scratch]
    assert listed(store, "leases/", partial=True) == []
    assert parse_partial_key(scratch) == CHUNK
    (entry,) = store.list(partial=True)
    assert (entry.size, entry.modified) == (2, os.stat(tmp_path / scratch).st_mtime)
    store.delete(scratch)
    assert files(tmp_path) == sorted([CHUNK, foreign])
    with pytest.raises(InvalidArgumentError):
        store.put(scratch, b"never to be seen")


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    """Files that are no keys, links and pipes are neither listed nor touched, and hang nobody."""
    store = LocalStore(tmp_path)
    store.put("a/1", b"mine")
    for name in (".hidden", "a/read me.txt", "a/.nfs0001", "a/ü", "-x/1", "a b/1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"foreign")
    os.mkfifo(tmp_path / "a" / "pipe")
    os.symlink("1", tmp_path / "a" / "link")
    os.symlink(".", tmp_path / "loop")
    before = files(tmp_path)
    assert listed(store) == ["a/1"]
    with pytest.raises(ObjectNotFoundError):
        store.get("a/pipe")
    with pytest.raises(ObjectNotFoundError):
        store.info("a/pipe")
    for ask in (store.get, store.info):
        with pytest.raises(AccessError, match="symbolic link"):
            ask("a/link")
    assert files(tmp_path) == before
    store.delete("a/1")
    assert files(tmp_path) == [name for name in before if name != "a/1"]


def test_links_do_not_lead_out_of_the_root(tmp_path: Path) -> None:
    """A symbolic link in the way of a key is refused by every verb; the root itself may be one."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "old").write_bytes(b"precious")
    (tmp_path / "real").mkdir()
    os.symlink("real", tmp_path / "root")
    os.symlink("../outside", tmp_path / "real" / "a")
    store = LocalStore(tmp_path / "root")
    acts: dict[str, Callable[[LocalStore], object]] = {**ACTS, "list": lambda store: list(store.list("a/"))}
    for act in acts.values():
        with pytest.raises(AccessError, match="symbolic link") as caught:
            act(store)
        assert caught.value.errno == errno.ELOOP
    assert files(tmp_path / "outside") == ["old"]
    store.put("b/1", b"body")
    assert (tmp_path / "real" / "b" / "1").read_bytes() == b"body"


def test_files_that_vanish_during_a_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is deleted while a listing runs is left out, and the rest is there."""
    store = LocalStore(tmp_path)
    for key in ("a/1", "a/2", "b/1", "c/1"):
        store.put(key, b"x")
    real = os.scandir

    class Scan:
        def __init__(self, path: str) -> None:
            self.entries = list(real(path))
            if path.endswith("/a"):
                store.delete("a/2")
                store.delete("b/1")
                store.delete("c/1")

        def __iter__(self) -> Iterator[os.DirEntry[str]]:
            return iter(self.entries)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Scan)
    assert {"a/1"} <= set(listed(store)) <= {"a/1", "b/1", "c/1"}
    assert listed(store, "a/") == ["a/1"]


# --- permissions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("umask", "folder", "file_mode", "folder_mode"),
    [(0o002, 0o2775, 0o664, 0o2775), (0o022, 0o755, 0o644, 0o755), (0o077, 0o755, 0o600, 0o700)],
)
def test_modes_follow_the_umask(tmp_path: Path, umask: int, folder: int, file_mode: int, folder_mode: int) -> None:
    """Files and folders get the modes that the umask gives, setgid folders hand on their bit."""
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(folder)
    code = """
def refuse(mask): raise SystemExit("the umask is changed for all threads")
os.umask = refuse
store = LocalStore(argv[0])
store.put("a/b/1", b"1", if_absent=True)
store.put("a/b/2", b"2")
"""
    assert finish(run(code, root, umask=umask))[0] == 0
    assert {stat.S_IMODE(os.stat(root / "a" / "b" / name).st_mode) for name in "12"} == {file_mode}
    assert {stat.S_IMODE(os.stat(root / name).st_mode) for name in ("a", "a/b")} == {folder_mode}


def test_listing_that_is_not_allowed(tmp_path: Path) -> None:
    """A folder that may not be read is an error, not an empty one (real permissions)."""
    act = "os.setgroups([]); os.setgid(65534); os.setuid(65534)" if os.geteuid() == 0 else "pass"
    code = f"""
from ckptstore.errors import AccessError
os.chdir(argv[0])
{act}
for call in (lambda s: list(s.list()), lambda s: s.get("a/1"), lambda s: s.put("a/2", b""), lambda s: s.delete("a/1")):
    try:
        call(LocalStore("."))
    except AccessError as error:
        print(error.errno)
"""
    LocalStore(tmp_path).put("a/1", b"x")
    (tmp_path / "a").chmod(0)
    tmp_path.chmod(0o755)
    opened = [parent for parent in tmp_path.parents if not parent.stat().st_mode & stat.S_IXOTH]
    modes = {parent: stat.S_IMODE(parent.stat().st_mode) for parent in opened}
    try:
        for parent in opened:
            parent.chmod(modes[parent] | stat.S_IXOTH)
        _, output = finish(run(code, tmp_path))
    finally:
        for parent, mode in modes.items():
            parent.chmod(mode)
        (tmp_path / "a").chmod(0o755)
    assert output.split() == [str(errno.EACCES)] * 4


# --- small file systems ----------------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with the options given."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        pytest.skip("mounting a tmpfs needs root on Linux")
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"tmpfs{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip("mounting a tmpfs is not allowed here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_full_disk(mount: Callable[[str], Path]) -> None:
    """A full disk is its own error that counts the bytes; the space comes back and the old objects stay."""
    root = mount("size=4m")
    store = LocalStore(root)
    store.put("a/1", bytes(1 << 20))
    free = os.statvfs(root).f_bavail
    for if_absent in (True, False):
        with pytest.raises(StoreFullError) as caught:
            store.put("a/2", bytes(4 << 20), if_absent=if_absent)
        assert caught.value.errno == errno.ENOSPC
        assert f"{4 << 20} bytes are needed" in str(caught.value)
        assert f"{free * os.statvfs(root).f_frsize} are free" in str(caught.value)
        assert os.statvfs(root).f_bavail == free
    with pytest.raises(StoreFullError):
        store.put("a/1", bytes(4 << 20))
    assert store.get("a/1") == bytes(1 << 20)
    store.put("a/2", bytes(2 << 20), if_absent=True)
    assert files(root) == ["a/1", "a/2"]


def test_no_inodes_left(mount: Callable[[str], Path]) -> None:
    """A disk with free bytes but no inodes says so, for files and for folders."""
    root = mount("size=4m,nr_inodes=5")
    store = LocalStore(root)
    store.put("a/1", b"1")
    store.put("a/2", b"2")
    store.put("a/3", b"3")
    for key in ("a/4", "b/c/1"):
        with pytest.raises(StoreFullError, match="inodes") as caught:
            store.put(key, b"body")
        assert caught.value.errno == errno.ENOSPC
    assert files(root) == ["a/1", "a/2", "a/3"]


def test_read_only_disk(mount: Callable[[str], Path]) -> None:
    """A read-only mount refuses puts and deletes and reads as ever."""
    root = mount("size=1m")
    store = LocalStore(root)
    store.put("a/1", b"1")
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    refused: list[Callable[[], None]] = [
        lambda: store.put("a/2", b"2"),
        lambda: store.put("b/1", b""),
        lambda: store.delete("a/1"),
    ]
    for act in refused:
        with pytest.raises(AccessError) as caught:
            act()
        assert caught.value.errno == errno.EROFS
    assert store.get("a/1") == b"1"
    assert listed(store) == ["a/1"]


# --- real processes --------------------------------------------------------------------------------


def test_race_of_eight_processes(tmp_path: Path) -> None:
    """Of eight processes that create one key in new folders exactly one wins, and its body is there."""
    code = """
from ckptstore.errors import ObjectExistsError
store = LocalStore(argv[0])
print("ready", flush=True)
sys.stdin.readline()
try:
    store.put("manifests/race", argv[1].encode() * 100_000, if_absent=True)
    print("won")
except ObjectExistsError:
    print("lost")
"""
    racers = [run(code, tmp_path / "new" / "root", number) for number in range(8)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    results = [finish(racer)[1].strip() for racer in racers]
    assert sorted(results) == ["lost"] * 7 + ["won"]
    winner = str(results.index("won")).encode()
    store = LocalStore(tmp_path / "new" / "root")
    assert store.get("manifests/race") == winner * 100_000
    assert files(tmp_path) == ["new/root/manifests/race"]


@pytest.mark.kill
@pytest.mark.parametrize("moment", ["write", "fsync", "link", "unlink"])
def test_killed_in_a_put(tmp_path: Path, moment: str) -> None:
    """A kill at any point of a put leaves the object whole or absent, and the put can be made again."""
    code = f"""
def die(*args, **kwargs): os.kill(os.getpid(), signal.SIGKILL)
os.{moment} = die
LocalStore(argv[0]).put(argv[1], bytes(100_000), if_absent=True)
"""
    assert finish(run(code, tmp_path, CHUNK))[0] == -signal.SIGKILL
    store = LocalStore(tmp_path)
    assert listed(store) == ([CHUNK] if moment == "unlink" else [])
    (scratch,) = listed(store, partial=True)
    store.put(CHUNK, bytes(100_000), if_absent=True)
    store.delete(scratch)
    assert store.get(CHUNK) == bytes(100_000)
    assert files(tmp_path) == [CHUNK]
    with pytest.raises(ObjectExistsError):
        store.put(CHUNK, b"other", if_absent=True)


def test_attempts_do_not_fill_the_memory(tmp_path: Path) -> None:
    """What the store remembers of folders goes with the folders."""
    store = LocalStore(tmp_path)
    for _ in range(20):
        key = chunk_key(new_attempt(), "0" * 64)
        store.put(key, b"")
        store.delete(key)
    assert len(store._folders._settled) + len(store._folders._inside) <= 4
