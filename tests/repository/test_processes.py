"""Real processes: forked, spawned, paused and ending ones; and repositories that travel between them in a pickle."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import FencedError, InvalidArgumentError, KeepLast, RetryPolicy, TransactionError, keys
from ckptstore.pickling import public
from ckptstore.stores import MemoryStore
from tests.repository.helpers import assert_no_debris, assert_same, make_state, open_repo, tiny_state

ROOT = Path(__file__).parents[2]
SECONDS = 60.0
SECRET = "V3ry-S3cret"


S3, GCS = pytest.param("s3", marks=pytest.mark.s3), pytest.param("gcs", marks=pytest.mark.gcs)


@pytest.fixture
def place(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any] | None]:
    """URL and storage options of a new place."""
    if kind == "local":
        return str(tmp_path / "repo"), None
    bucket = request.getfixturevalue(kind)
    return bucket.url(), bucket.storage_options


def exit_codes(pids: list[int]) -> list[int]:
    """Wait for forked children. One that hangs is killed, and is -9."""
    end = time.monotonic() + SECONDS
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                if time.monotonic() > end:
                    os.kill(pid, signal.SIGKILL)
                    end += 1
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def fork(act: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        act()
        status = 0
    except BaseException:
        logging.getLogger(__name__).exception("in a child")
    finally:
        os._exit(status)


# ---- fork and spawn -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", S3, GCS])
def test_forked_children(place: tuple[str, Any]) -> None:
    """P6: a parent saves, each of four forked children loads and saves an epoch with its repository, the parent saves
    again: nobody hangs, and a named run is still one writer.
    """
    url, options = place
    with ckptstore.open(url, options, run_id="run") as repo:
        repo.save(1, make_state(1))

        def child(number: int) -> None:
            checkpoint = repo.latest()
            assert checkpoint is not None
            assert checkpoint.load("optim")["step"] in (1, *range(11, 15))
            repo.save(10 + number, make_state(10 + number))

        begun = time.monotonic()
        pids = [fork(lambda number=number: child(number)) for number in range(1, 5)]
        assert exit_codes(pids) == [0] * 4
        assert time.monotonic() - begun < SECONDS / 2
        repo.save(20, make_state(20))
        assert repo.epochs() == [1, 11, 12, 13, 14, 20]
        assert repo.verify().ok


def test_forked_amid_background_saves(tmp_path: Path) -> None:
    """P6: children forked while other threads save, list and load find no lock taken."""
    with ckptstore.open(tmp_path / "repo", run_id="run") as repo:
        repo.save(1, make_state(1))
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                latest = repo.latest()
                assert latest is not None
                latest.load()

        looker = threading.Thread(target=look)
        looker.start()
        pids = []
        for number in range(1, 9):
            handle = repo.save_async(number + 1, make_state(number))
            pids.append(fork(lambda number=number: repo.save(100 + number, tiny_state(number))))
            handle.result()
        stop.set()
        looker.join()
        assert exit_codes(pids) == [0] * 8
        assert repo.epochs() == [*range(1, 10), *range(101, 109)]
        assert repo.verify().ok


def test_a_transaction_of_the_parent(tmp_path: Path) -> None:
    """P6: a forked child cannot go on with a save that its parent began: it hears so, and does not wait for ever."""
    with ckptstore.open(tmp_path / "repo") as repo, repo.begin(1) as txn:
        txn.write("model", make_state(1)["model"])

        def child() -> None:
            for act in (lambda: txn.write("x", 1), txn.settle, txn.commit, txn.abort):
                with pytest.raises(TransactionError, match="process"):
                    act()
            with pytest.raises(ZeroDivisionError), txn:
                raise ZeroDivisionError

        assert exit_codes([fork(child)]) == [0]
    assert repo.epochs() == [1]


def spawned(data: bytes, epoch: int, options: dict[str, Any] | None) -> None:
    """What a spawned child does with a repository from a pickle."""
    repo = pickle.loads(data)
    if options is not None:
        repo = repo.with_credentials(options)
    with repo:
        checkpoint = repo.latest()
        assert checkpoint is not None
        checkpoint.load("optim")
        repo.save(epoch, make_state(epoch))
        repo.save_async(epoch + 100, make_state(epoch))


@pytest.mark.parametrize("kind", ["local", S3])
def test_spawned_children(place: tuple[str, Any]) -> None:
    """P6: the same with spawned children and a pickled repository; its secrets are given anew."""
    url, options = place
    secrets = {name: options[name] for name in ("key", "secret") if name in options} if options else None
    with ckptstore.open(url, options, run_id="run") as repo:
        repo.save(1, make_state(1))
        data = pickle.dumps(repo)
        context = multiprocessing.get_context("spawn")
        children = [context.Process(target=spawned, args=(data, epoch, secrets)) for epoch in (2, 3)]
        for process in children:
            process.start()
        for process in children:
            process.join(SECONDS)
        assert [process.exitcode for process in children] == [0, 0]
        repo.save(4, make_state(4))
        assert repo.epochs() == [1, 2, 3, 4, 102, 103]
        assert repo.verify().ok


# ---- pickles --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    """It is the same repository, opened the same way, wherever the other process stands; what it resumed from too."""
    monkeypatch.chdir(tmp_path)
    with ckptstore.open("repo", keep=KeepLast(1), chunk_size=64 * 1024, codec="raw", run_id="run") as repo:
        for epoch in (1, 2):
            repo.save(epoch, tiny_state(epoch))
        with ckptstore.open("repo", keep=KeepLast(1), run_id="run", retry=RetryPolicy(attempts=3)) as resumed:
            resumed.checkpoint(2).load()
            data = pickle.dumps(resumed, protocol)
        monkeypatch.chdir("/")
        with pickle.loads(data) as again:
            assert (again.id, again.url, again.run_id) == (repo.id, repo.url, "run")
            again.save(3, tiny_state(3))
            assert again.epochs() == [2, 3]
        checkpoint = pickle.loads(pickle.dumps(repo.checkpoint(3), protocol))
        assert checkpoint.epoch == 3
        assert_same(checkpoint.load(), tiny_state(3))


def test_a_pickle_asks_nothing_and_says_when_the_place_is_gone(tmp_path: Path) -> None:
    """Unpickling makes no request; the first call says what is wrong, and nothing is saved into the void."""
    with ckptstore.open(tmp_path / "repo", run_id="run") as repo:
        repo.save(1, tiny_state(1))
        data = pickle.dumps(repo)
    plain = ckptstore.open(tmp_path / "repo")  # before its first save
    (tmp_path / "repo").rename(tmp_path / "elsewhere")
    with pytest.raises(ckptstore.RepositoryNotFoundError):
        plain.save(2, tiny_state(2))
    with pickle.loads(data) as again:
        for act in (again.latest, again.epochs, lambda: again.save(2, tiny_state(2))):
            with pytest.raises(ckptstore.RepositoryNotFoundError):
                act()
    assert not (tmp_path / "repo").exists()


SECRETS = {
    "key": SECRET,
    "secret": SECRET,
    "token": SECRET,
    "username": SECRET,
    "password": SECRET,
    "endpoint_url": "http://127.0.0.1:9",
    "client_kwargs": {"region_name": "eu-west-7", "aws_secret_access_key": SECRET, "aws_session_token": SECRET},
    "config_kwargs": {"connect_timeout": 3, "s3": {"addressing_style": "path"}, "proxies": {"http": SECRET}},
    "s3_additional_kwargs": {"SSECustomerKey": SECRET},
    "session": object(),
    "invented_later": SECRET,
}


def test_what_travels() -> None:
    """Of storage options only what is known to be no secret; the names of the others are told."""
    kept, left = public(SECRETS)
    assert kept == {
        "endpoint_url": "http://127.0.0.1:9",
        "client_kwargs": {"region_name": "eu-west-7"},
        "config_kwargs": {"connect_timeout": 3, "s3": {"addressing_style": "path"}},
    }
    assert SECRET not in repr((kept, left))
    assert {"key", "secret", "token", "client_kwargs.aws_secret_access_key", "invented_later"} <= set(left)
    assert public({"endpoint_url": f"http://user:{SECRET}@host", "token": {"x": SECRET}})[0] == {}
    assert public({"token": "anon", "project": "p"})[0] == {"token": "anon", "project": "p"}


@pytest.mark.s3
def test_no_secrets_in_a_pickle(s3: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The pickle of a repository or checkpoint holds no secret; credentials come from the environment, or anew."""
    secrets = {"key": s3.storage_options["key"], "secret": s3.storage_options["secret"]}
    heard: list[Any] = []
    with ckptstore.open(s3.url(), s3.storage_options, on_request=heard.append) as repo:
        repo.save(1, tiny_state(1))
        pickles = [pickle.dumps(repo), pickle.dumps(repo.checkpoint(1))]
        for data in pickles:
            for secret in secrets.values():
                assert secret.encode() not in data
            assert s3.endpoint.encode() in data
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        with caplog.at_level("INFO", "ckptstore"), pickle.loads(pickles[0]) as poor:
            assert "key, secret stayed behind" in caplog.text
            with pytest.raises(ckptstore.AccessError):
                poor.latest()
            with poor.with_credentials(secrets) as rich:
                assert rich.latest().epoch == 1
                rich.save(2, tiny_state(2))
                for secret in secrets.values():
                    assert secret.encode() not in pickle.dumps(rich)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", secrets["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secrets["secret"])
        with pickle.loads(pickles[0]) as again:
            assert_same(again.checkpoint(2).load(), tiny_state(2))
        assert_same(pickle.loads(pickles[1]).load(), tiny_state(1))


def test_what_cannot_be_pickled() -> None:
    """A repository around a store of one's own says so."""
    repo = open_repo(MemoryStore())
    with pytest.raises(TypeError, match=r"ckptstore\.open"):
        pickle.dumps(repo)
    with pytest.raises(TypeError, match=r"ckptstore\.open"):
        pickle.dumps(repo.save(1, {"m": 1}))
    with ckptstore.open("memory://pickled") as opened, pytest.raises(InvalidArgumentError):
        opened.with_credentials("key=secret")  # type: ignore[arg-type]


# ---- paused ---------------------------------------------------------------------------------------------------

PAUSED = """
import os, sys
import numpy as np
import ckptstore
from ckptstore.repository import Repository
from ckptstore.stores import open_store
from ckptstore.testing import Fault, FaultStore
from tests.repository.helpers import make_state

folder, run, match, when = sys.argv[1:]

def told():
    print("there", flush=True)
    sys.stdin.readline()  # stopped here

store = FaultStore(open_store(folder), [Fault("put", match, when=when, error=told)])
with Repository(store, run_id=run, chunk_size=64 * 1024) as repo:
    try:
        repo.save(2, make_state(2))
        print("saved")
    except ckptstore.CkptStoreError as error:
        print(type(error).__name__)
    try:
        repo.save(9, make_state(9))
        print("saved")
    except ckptstore.CkptStoreError as error:
        print(type(error).__name__)
"""


@contextmanager
def paused(folder: Path, run: str, match: str, when: str = "before") -> Iterator[subprocess.Popen[str]]:
    """A process that saves epoch 2 and is stopped by SIGSTOP at a put."""
    command = [sys.executable, "-c", PAUSED, str(folder), run, match, when]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, cwd=ROOT, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            process.send_signal(signal.SIGSTOP)
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def resumed(process: subprocess.Popen[str]) -> list[str]:
    """Let it go on; what it says."""
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate("go\n", timeout=SECONDS)
    return said.split()


@pytest.mark.parametrize("match", ["chunks/", "records/", "manifests/"])
def test_a_paused_writer_that_was_swept(tmp_path: Path, match: str) -> None:
    """P1, P5: a process stopped amid its save until gc has taken it for dead: its commit is refused, unless all that it
    needs was written since. Then it saves anew.
    """
    folder = tmp_path / "repo"
    with ckptstore.open(folder) as repo:
        repo.save(1, make_state(1))
        with paused(folder, "", match) as process:
            time.sleep(0.1)
            swept = repo.gc(grace=0.05)
            assert [r.key for r in swept.removed if r.key.startswith(keys.LEASES)]
            first, second = resumed(process)
        assert second == "saved"
        assert first == "TransactionError" or match == "chunks/"
        assert repo.epochs() == ([1, 2, 9] if first == "saved" else [1, 9])
        assert repo.verify().ok
        repo.gc(grace=0)
        assert_no_debris(repo.store)


@pytest.mark.parametrize("match", ["chunks/", "manifests/0"])
def test_a_paused_writer_that_lost_its_run(tmp_path: Path, match: str) -> None:
    """P1: a process stopped amid its save until a successor of its run has saved: it is refused for good."""
    folder = tmp_path / "repo"
    with ckptstore.open(folder, run_id="run") as repo:
        repo.save(1, make_state(1))
        with paused(folder, "run", match) as process:
            with pytest.raises(FencedError):
                repo.save(3, make_state(3))  # the child is the newer writer
            with ckptstore.open(folder, run_id="run") as successor:
                successor.save(3, make_state(3))
                assert resumed(process) == ["FencedError", "FencedError"]
                assert successor.epochs() == [1, 3]
                successor.save(2, make_state(22))
                assert successor.verify().ok
                successor.gc(grace=0)
                for info in successor.store.list(keys.WRITERS):
                    successor.store.delete(info.key)
                assert_no_debris(successor.store)


def test_a_writer_paused_right_after_its_commit(tmp_path: Path) -> None:
    """P1: stopped between manifest and last look while gc runs without grace: what was committed stays, whole."""
    folder = tmp_path / "repo"
    with ckptstore.open(folder) as repo:
        repo.save(1, make_state(1))
        with paused(folder, "", "manifests/", "after") as process:
            time.sleep(0.1)
            repo.gc(grace=0)
            assert repo.epochs() == [1, 2]
            assert_same(repo.checkpoint(2).load(), make_state(2))
            assert resumed(process)[-1] == "saved"
        assert repo.verify().ok
        assert {1, 9} <= set(repo.epochs())


# ---- the end of a process -------------------------------------------------------------------------------------

AT_EXIT = """
import atexit, json, sys
import numpy as np
import ckptstore

url, options, leave, verb = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
state = {"model": {"w": np.arange(5_000_000.0)}, "optim": {"step": 7}}
repo = ckptstore.open(url, options, chunk_size=4 << 20, exit_timeout=30)
if verb == "atexit":
    repo.save(1, {"model": 1})
    atexit.register(lambda: (repo.save(2, state), repo.save(3, state), repo.prune(ckptstore.KeepLast(2)), repo.gc()))
    atexit.register(lambda: repo.save(4, repo.latest().load()))
else:
    repo.save_async(2, state)
exec(leave)
"""

LEAVE = {"pass": 0, "sys.exit(3)": 3, "1 / 0": 1}


@pytest.mark.parametrize(
    ("kind", "verb", "leave"),
    [
        ("local", "atexit", "pass"),
        ("local", "atexit", "1 / 0"),
        pytest.param("s3", "atexit", "sys.exit(3)", marks=pytest.mark.s3),
        pytest.param("s3", "async", "1 / 0", marks=pytest.mark.s3),
        pytest.param("s3", "async", "pass", marks=pytest.mark.s3),
        pytest.param("gcs", "atexit", "pass", marks=pytest.mark.gcs),
    ],
)
def test_saving_at_exit(place: tuple[str, Any], verb: str, leave: str) -> None:
    """P4: a save in an atexit hook, and one in the background when main returns at once: committed, on any store, and
    the exit status is that of the program; also where the host has a name and connections are new.
    """
    url, options = place
    if options is not None and "127.0.0.1" in options["endpoint_url"]:
        options = {**options, "endpoint_url": options["endpoint_url"].replace("127.0.0.1", "localhost")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AT_EXIT), url, json.dumps(options), leave, verb],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == LEAVE[leave], done.stderr
    assert ("ZeroDivisionError" in done.stderr) == (leave == "1 / 0")
    assert "ckptstore" not in done.stderr.replace(str(ROOT), "")
    with ckptstore.open(url, options, create=False) as repo:
        assert repo.epochs() == ([3, 4] if verb == "atexit" else [2])
        assert repo.verify().ok
        latest = repo.latest()
        assert latest is not None
        assert latest.load("optim") == {"step": 7} if verb == "async" else latest.load("model") == 1
