"""The exit of the interpreter, in real processes: it waits, with a bound, and loses nothing in silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ckptstore
from tests.background.helpers import SECONDS

ROOT = Path(__file__).parents[2]
LOST = 120

# These start no thread at exit, not even where ``threading`` itself would still wait for it (python/cpython#113964).
NO_THREADS = (3, 12, 0) <= sys.version_info < (3, 12, 3)
goes_on = pytest.mark.skipif(NO_THREADS, reason="Python 3.12.0 to 3.12.2 start no thread at exit")

# ``gate(match, act)`` gives a repository with epoch 1, where a put of such a key runs ``act``.
PRELUDE = """
import atexit, multiprocessing, os, sys, threading, time
import numpy as np
import ckptstore
from ckptstore import StoreFullError
from ckptstore.repository import Repository
from ckptstore.stores import open_store
from ckptstore.testing import Fault, FaultStore

folder = sys.argv[1]

def gate(match, act, **options):
    store = open_store(folder)
    Repository(store).save(1, {"model": 1})
    return Repository(FaultStore(store, [Fault("put", match, error=act, times=None)]), **options)

def slow():
    time.sleep(0.5)  # by then the interpreter is exiting

def hang():
    while True:
        time.sleep(3600)

def full():
    return StoreFullError("no space")

state = {"model": {"w": np.arange(200_000.0)}, "optim": {"step": 7}}
"""


def run(folder: Path, program: str, *, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. A hang is an error."""
    command = [sys.executable, "-c", PRELUDE + program, str(folder / "repo")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=environment, cwd=ROOT, check=False
    )


def epochs(folder: Path) -> list[int]:
    """The intact epochs, as a fresh process finds them."""
    with ckptstore.open(folder / "repo", create=False) as repo:
        assert repo.verify().ok
        return repo.epochs()


@goes_on
@pytest.mark.parametrize("match", ["chunks/", "records/", "manifests/", "leases/"])
@pytest.mark.parametrize(
    ("leave", "status"),
    [("", 0), ("sys.exit(0)", 0), ("sys.exit(3)", 3), ("raise ZeroDivisionError", 1), ("sys.exit('words')", 1)],
)
def test_a_pending_save_is_finished(tmp_path: Path, match: str, leave: str, status: int) -> None:
    """Wherever a save is when the program ends, and however that ends: it is finished, and the status is kept."""
    done = run(tmp_path, f"repo = gate({match!r}, slow)\nrepo.save_async(2, state)\nprint('end')\n{leave}")
    assert (done.stdout, done.returncode) == ("end\n", status)
    assert "ckptstore" not in done.stderr
    assert epochs(tmp_path) == [1, 2]
    with ckptstore.open(tmp_path / "repo") as repo:
        found = repo.checkpoint(2).load()
        assert (found["optim"], found["model"]["w"].sum()) == ({"step": 7}, sum(range(200_000)))


@pytest.mark.skipif(not NO_THREADS, reason="only where Python starts no thread at exit")
def test_where_python_starts_no_thread(tmp_path: Path) -> None:
    """Where a pending save cannot go on at exit, the epoch is lost, and that is said."""
    done = run(tmp_path, "gate('leases/', slow).save_async(2, state)")
    assert done.returncode == LOST
    assert "ckptstore: epoch 2 of file://" in done.stderr
    assert epochs(tmp_path) == [1]


@goes_on
def test_exit_handlers_still_run(tmp_path: Path) -> None:
    """After a save that was finished at exit everything else takes its course."""
    done = run(
        tmp_path,
        """
atexit.register(print, "handler")
worker = threading.Thread(target=lambda: (time.sleep(1), print("thread")))
worker.start()
gate("chunks/", slow).save_async(2, state)
""",
    )
    assert (sorted(done.stdout.split()), done.stderr, done.returncode) == (["handler", "thread"], "", 0)


@goes_on
@pytest.mark.parametrize("leave", ["", "sys.exit(0)", "sys.exit(3)", "raise ZeroDivisionError"])
def test_a_failed_save_is_loud(tmp_path: Path, leave: str) -> None:
    """A save that fails and that nobody asks about is named on stderr, and the status is not that of a success."""
    done = run(
        tmp_path,
        f"""
atexit.register(print, "handler")
gate("chunks/", full).save_async(2, state)
{leave}
""",
    )
    assert done.returncode == LOST
    assert done.stdout == "handler\n"  # all else takes its course
    lines = [line for line in done.stderr.splitlines() if line.startswith("ckptstore: ")]
    assert len(lines) == 1
    assert "epoch 2 of file://" in lines[0]
    assert str(tmp_path / "repo") in lines[0]
    assert "was lost: StoreFullError" in lines[0]
    assert "Exception ignored" not in done.stderr
    assert epochs(tmp_path) == [1]


@pytest.mark.parametrize("ask", ["handle.exception()", "repo.close()", "repo.save(3, state)", "handle.result()"])
def test_a_failure_that_was_heard_is_quiet(tmp_path: Path, ask: str) -> None:
    """Once the error has been raised anywhere, the exit has nothing to add."""
    done = run(
        tmp_path,
        f"""
repo = gate("chunks/", full)
handle = repo.save_async(2, state)
try:
    {ask}
except StoreFullError:
    print("heard")
""",
    )
    assert done.returncode == 0
    assert "was lost" not in done.stderr


@pytest.mark.parametrize("match", ["chunks/", "records/", "manifests/", "leases/"])
@pytest.mark.parametrize("leave", ["", "sys.exit(0)", "raise ZeroDivisionError"])
def test_a_store_that_never_answers(tmp_path: Path, match: str, leave: str) -> None:
    """The process ends within ``exit_timeout`` although a call of the store never returns, and says what is lost."""
    done = run(
        tmp_path,
        f"""
repo = gate({match!r}, hang, exit_timeout=0.5)
repo.save_async(2, state)
print("end")
{leave}
""",
    )
    assert (done.stdout, done.returncode) == ("end\n", LOST)
    assert "ckptstore: epoch 2 of file://" in done.stderr
    assert "was lost" in done.stderr
    assert ("ZeroDivisionError" in done.stderr) == ("Zero" in leave)
    assert epochs(tmp_path) == [1]


def test_a_closed_repository_is_not_waited_for_twice(tmp_path: Path) -> None:
    """``close`` gave up on a save: the exit says so at once, without waiting as long again."""
    done = run(
        tmp_path,
        """
repo = gate("chunks/", hang, exit_timeout=1.5)
repo.save_async(2, state)
try:
    repo.close()
except ckptstore.DeadlineError as error:
    print("closed")
import ckptstore.exiting as exiting
begun = time.monotonic()
leave = os._exit
os._exit = lambda status: leave(status if time.monotonic() - begun < 1.5 else 99)
""",
    )
    assert (done.stdout, done.returncode) == ("closed\n", LOST)


@goes_on
def test_pruning_that_never_ends(tmp_path: Path) -> None:
    """A save that is committed is not called lost; what hangs after it does not hold the process."""
    done = run(
        tmp_path,
        """
store = open_store(folder)
Repository(store).save(1, {"model": 1})
held = FaultStore(store, [Fault("delete", "manifests/", error=hang)])
repo = Repository(held, keep=ckptstore.KeepLast(1), exit_timeout=0.5)
repo.save_async(2, state).wait(until="committed")
""",
    )
    assert done.returncode == LOST
    assert "epoch 2" in done.stderr
    assert "is saved, but" in done.stderr
    assert "was lost" not in done.stderr
    assert epochs(tmp_path) == [1, 2]


@goes_on
def test_several_repositories(tmp_path: Path) -> None:
    """All are waited for at the same time, each lost epoch has a line, and what can be finished is."""
    done = run(
        tmp_path,
        """
root = folder
repos = []
for name, act in (("a", hang), ("b", slow), ("c", full)):
    folder = root + "/" + name
    repos.append(gate("chunks/", act, exit_timeout=5))
    repos[-1].save_async(2, state)
""",
    )
    assert done.returncode == LOST
    lines = sorted(line for line in done.stderr.splitlines() if line.startswith("ckptstore: "))
    assert [("/a was lost" in line, "/c was lost" in line) for line in lines] == [(True, False), (False, True)]
    with ckptstore.open(tmp_path / "repo" / "b") as repo:
        assert repo.epochs() == [1, 2]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing(tmp_path: Path, method: str) -> None:
    """A child of multiprocessing finishes its save too, and tells its parent when one was lost."""
    if method == "fork" and not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    module = tmp_path / "child.py"
    module.write_text(
        PRELUDE
        + f"""
def child(act, folder_of_child):
    global folder
    folder = folder_of_child
    gate("chunks/", act).save_async(2, state)

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    for name, act in (("good", slow), ("bad", full)):
        process = context.Process(target=child, args=(act, folder + "/" + name))
        process.start()
        process.join()
        print(name, process.exitcode)
"""
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(module), str(tmp_path / "repo")],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
        check=False,
    )
    assert done.stdout == f"good 0\nbad {LOST}\n", done.stderr
    assert done.stderr.count("was lost") == 1
    with ckptstore.open(tmp_path / "repo" / "good") as repo:
        assert repo.epochs() == [1, 2]


@goes_on
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork(tmp_path: Path) -> None:
    """A forked child neither waits for its parent's save nor speaks of it; it can save by itself."""
    done = run(
        tmp_path,
        """
go_on = threading.Event()
repo = gate("chunks/", lambda: (go_on.wait(), None)[1])
handle = repo.save_async(2, state)
pid = os.fork()
if pid == 0:
    try:
        handle.result()
    except ckptstore.TransactionError as error:
        assert "process" in str(error)
    go_on.set()
    repo.save_async(3, state).result()
    repo.save_async(4, state)
    sys.exit(5)
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status), handle.done())
go_on.set()
print(handle.result().epoch, repo.epochs())
""",
    )
    assert (done.stdout, done.returncode) == ("5 False\n2 [1, 2, 3, 4]\n", 0), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork_after_a_failure(tmp_path: Path) -> None:
    """A failure that the parent has not asked about yet is no business of a child."""
    done = run(
        tmp_path,
        """
repo = gate("chunks/", full)
handle = repo.save_async(2, state)
handle.wait()
pid = os.fork()
if pid == 0:
    sys.exit(0)
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status))
""",
    )
    assert (done.stdout, done.returncode) == ("0\n", LOST)
    assert done.stderr.count("ckptstore: epoch 2") == 1


def test_a_save_while_exiting(tmp_path: Path) -> None:
    """A background save that is asked for when the interpreter is already exiting is refused: it could not be kept."""
    done = run(
        tmp_path,
        """
repo = gate("nothing", slow)
def late():
    try:
        repo.save_async(2, state)
    except ckptstore.TransactionError as error:
        print("refused", "exiting" in str(error))
atexit.register(late)
""",
    )
    assert (done.stdout, done.returncode) == ("refused True\n", 0)
    assert epochs(tmp_path) == [1]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to a process there")
def test_ctrl_c_while_exiting(tmp_path: Path) -> None:
    """Ctrl-C at exit: the user does not want to wait. The epoch is lost, and that is said."""
    command = [sys.executable, "-c", PRELUDE + "gate('chunks/', hang).save_async(2, state)\nprint('end', flush=True)"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, str(tmp_path / "repo")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "end\n"
        for _ in range(100):  # the first may come before the exit has begun, and then ends the program
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            if process.poll() is not None:
                break
        _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == LOST
    assert "epoch 2" in said
    assert "was lost" in said
