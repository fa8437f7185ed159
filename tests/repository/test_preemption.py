"""SIGTERM, in real processes: the save in flight is finished, or abandoned so that the next adopts what was sent."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import InvalidArgumentError
from ckptstore.lease import read_leases
from ckptstore.stores import MemoryStore
from tests.repository.helpers import assert_no_debris, assert_same, make_state, open_repo

ROOT = Path(__file__).parents[2]
SECONDS = 60.0
KILLED = -signal.SIGTERM

PRELUDE = """
import ctypes, os, signal, sys, threading, time
import ckptstore
from ckptstore.repository import Repository
from ckptstore.stores import open_store
from ckptstore.testing import Fault, FaultStore
from tests.repository.helpers import CHUNK, make_state

folder, hold, grace = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole lines, whatever other threads say

def wait():
    say("ready")
    time.sleep(hold)

store = open_store(folder)
repo = Repository(FaultStore(store, [Fault("put", "records/", error=wait)]), chunk_size=CHUNK)
"""


@contextmanager
def running(folder: Path, program: str, hold: float = 0.5, grace: float = 20.0) -> Iterator[subprocess.Popen[str]]:
    """A process that has said that it is ready: the save of epoch 2 is in flight, where ``program`` makes one."""
    with ckptstore.open(folder, chunk_size=64 * 1024) as repo:
        repo.save(1, make_state(1))
    command = [sys.executable, "-c", PRELUDE + program, str(folder), str(hold), str(grace)]
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment, cwd=ROOT, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str], again: int = 0) -> tuple[list[str], float]:
    """Send SIGTERM (``again`` more often): what the process still says, and after how many seconds it has ended."""
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    for _ in range(again):
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=SECONDS)
    return said.split(), time.monotonic() - begun


def check(folder: Path, expected: list[int], *, adopted: bool = False) -> None:
    """These epochs and no other, all whole; ``adopted``: the next save of epoch 2 finds what was sent."""
    with ckptstore.open(folder, chunk_size=64 * 1024) as repo:
        assert repo.epochs() == expected
        assert repo.verify().ok
        for epoch in expected:
            assert_same(repo.checkpoint(epoch).load(), make_state(epoch))
        if adopted:
            assert [s.lease.state for s in read_leases(repo.store) if s.lease] == ["abandoned"]
            report = repo.save(2, make_state(2)).report
            assert report is not None
            assert report.chunks_sent == 0
        repo.gc(grace=0)
        assert_no_debris(repo.store)


SAVES = {
    "sync": "repo.save(2, make_state(2))",
    "background": "repo.save_async(2, make_state(2)); time.sleep(60)",
    "background, waited for": "repo.save_async(2, make_state(2)).result()",
    "block": """
with repo.begin(2) as txn:
    for name, state in make_state(2).items():
        txn.write(name, state)
""",
    "thread": """
thread = threading.Thread(target=lambda: repo.save(2, make_state(2)))
thread.start()
thread.join()
""",
}


@pytest.mark.parametrize("how", SAVES)
def test_the_save_in_flight_is_finished(tmp_path: Path, how: str) -> None:
    """P1: it is committed, then the process dies of the signal as it would have without us."""
    folder = tmp_path / "repo"
    with running(folder, f"ckptstore.on_preemption(repo, grace=grace)\n{SAVES[how]}\ntime.sleep(60)") as process:
        told(process, again=2)  # launchers forward what their children have got already
        assert process.returncode == KILLED
    check(folder, [1, 2])


@pytest.mark.parametrize("how", ["sync", "background", "block"])
def test_the_save_that_takes_too_long_is_abandoned(tmp_path: Path, how: str) -> None:
    """P1, P6: when the grace is over the process dies, the epoch before is latest, and the next save adopts."""
    folder = tmp_path / "repo"
    with running(folder, f"ckptstore.on_preemption(repo, grace=grace)\n{SAVES[how]}", hold=3600, grace=1) as process:
        _, seconds = told(process)
        assert process.returncode == KILLED
        assert 0.5 < seconds < SECONDS / 2
    check(folder, [1], adopted=True)


def test_nothing_in_flight(tmp_path: Path) -> None:
    """The process dies at once, whatever the grace."""
    folder = tmp_path / "repo"
    program = "ckptstore.on_preemption(repo, grace=3600)\nsay('ready')\ntime.sleep(3600)"
    with running(folder, program) as process:
        told(process)
        assert process.returncode == KILLED
    check(folder, [1])


HANDLER = """
def stop(number, frame):
    say("stop")
    {stop}

signal.signal(signal.SIGTERM, stop)
preemption = ckptstore.on_preemption(repo, grace=grace)
"""


def test_the_handler_of_before_is_called_after_the_save(tmp_path: Path) -> None:
    """It may go on: here the program saves a last epoch, and ends by itself."""
    folder = tmp_path / "repo"
    program = HANDLER.format(stop="stopped.append(number)").replace("def stop", "stopped = []\ndef stop", 1)
    program += """
repo.save(2, make_state(2))
say("saved", preemption.requested)
while not stopped:
    time.sleep(0.01)
repo.save(3, make_state(3))
preemption.close()
"""
    with running(folder, program) as process:
        said, _ = told(process)
        assert process.returncode == 0
    assert said == ["saved", "True", "stop"]
    check(folder, [1, 2, 3])


@pytest.mark.parametrize("how", ["sync", "background"])
def test_a_handler_that_raises(tmp_path: Path, how: str) -> None:
    """P1, P6: one that ends the program by SystemExit unwinds a save that is abandoned: nothing of it is removed."""
    folder = tmp_path / "repo"
    program = HANDLER.format(stop="hold = 0; sys.exit(7)") + SAVES[how]
    with running(folder, program, hold=2, grace=1) as process:
        said, _ = told(process)
        assert said == ["stop"]
        assert process.returncode == (7 if how == "sync" else 120)  # a save in the background that is lost is said
    check(folder, [1], adopted=True)


STEPS = """
preemption = ckptstore.on_preemption(repo, grace=grace, last_save=True)
say("ready")
while not preemption.due:
    time.sleep(0.01)
say("due", preemption.requested)
{save}
say("saved")
preemption.end()
say("on")
"""


@pytest.mark.parametrize("save", ["repo.save(2, make_state(2))", "repo.save_async(2, make_state(2))"])
def test_a_last_save_at_the_next_step(tmp_path: Path, save: str) -> None:
    """P1: the training comes to the end of its step, saves once more, also in the background, and then dies."""
    folder = tmp_path / "repo"
    with running(folder, STEPS.format(save=save)) as process:
        said, _ = told(process, again=1)
        assert [word for word in said if word != "ready"] == ["due", "True", "saved"]
        assert process.returncode == KILLED
    check(folder, [1, 2])


def test_a_last_save_after_the_one_in_flight(tmp_path: Path) -> None:
    """The save in flight is finished, then there is a last one. Handlers of before that go on are told twice, too."""
    folder = tmp_path / "repo"
    program = """
signal.signal(signal.SIGTERM, lambda number, frame: say("told"))
with ckptstore.on_preemption(repo, grace=grace, last_save=True) as preemption:
    preemption.end()  # nothing is due
    repo.save_async(2, make_state(2))
    for epoch in (3, 4):
        while not preemption.due:
            time.sleep(0.01)
        hold = 0
        repo.save(epoch, make_state(epoch))
        preemption.end()
        say("on", preemption.due, preemption.requested)
        if epoch == 3:
            os.kill(os.getpid(), signal.SIGTERM)
"""
    with running(folder, program) as process:
        said, _ = told(process)
        assert process.returncode == 0
    assert [word for word in said if word != "ready"] == ["told", "on", "False", "True"] * 2
    check(folder, [1, 2, 3, 4])


@pytest.mark.parametrize("save", ["time.sleep(3600)", "repo.save(2, make_state(2))", "del preemption; sys.exit()"])
def test_no_time_for_a_last_save(tmp_path: Path, save: str) -> None:
    """P1, P6: a step or a save that takes longer than the grace, or none at all: the epoch before is latest."""
    folder = tmp_path / "repo"
    with running(folder, STEPS.format(save=save), hold=3600, grace=1.5) as process:
        _, seconds = told(process)
        assert process.returncode in ((KILLED, 0) if "exit" in save else (KILLED,))
        assert seconds < SECONDS / 2
    check(folder, [1], adopted="repo" in save)


def test_leaving_the_block_does_not_wait_for_a_last_save(tmp_path: Path) -> None:
    """Who leaves without one, by an error for instance, gets the signal at once."""
    folder = tmp_path / "repo"
    program = """
say("ready")
with ckptstore.on_preemption(repo, grace=3600, last_save=True) as preemption:
    while not preemption.due:
        time.sleep(0.01)
time.sleep(3600)
"""
    with running(folder, program) as process:
        told(process)
        assert process.returncode == KILLED
    check(folder, [1])


@pytest.mark.parametrize("hold", [0.2, 3600.0])
def test_a_main_thread_that_never_comes_back(tmp_path: Path, hold: float) -> None:
    """P6: stuck in a call that heeds no signals: the save is finished or abandoned, and the process ends anyway."""
    folder = tmp_path / "repo"
    program = """
ckptstore.on_preemption(repo, grace=grace)
handle = repo.save_async(2, make_state(2))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
time.sleep(3600)
"""
    with running(folder, program, hold=hold, grace=1.5) as process:
        _, seconds = told(process)
        assert process.returncode == 128 + signal.SIGTERM
        assert seconds < SECONDS / 2
    check(folder, [1, 2] if hold < 1 else [1], adopted=hold > 1)


def test_somebody_elses_wakeup(tmp_path: Path) -> None:
    """asyncio has taken the wake-up call of signals: it keeps it, and all works as before."""
    folder = tmp_path / "repo"
    program = """
import asyncio

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: say("usr1"))
    with ckptstore.on_preemption(repo, grace=grace):
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.1)
        await asyncio.to_thread(repo.save, 2, make_state(2))
        await asyncio.sleep(60)

asyncio.run(main())
"""
    with ckptstore.open(folder) as repo:
        repo.save(1, make_state(1))
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + program, str(folder), "0.5", "20"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["usr1\n", "ready\n"]
        told(process)
        assert process.returncode == KILLED
    check(folder, [1, 2])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_is_on_its_own(tmp_path: Path) -> None:
    """A child that is told to end dies as ever, and its parent is not told."""
    folder = tmp_path / "repo"
    program = """
preemption = ckptstore.on_preemption(repo, grace=grace)
children = []
for _ in range(5):
    children.append(os.fork())
    if not children[-1]:
        time.sleep(3600)
time.sleep(0.2)
for child in children:
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
time.sleep(0.2)
assert not preemption.requested
repo.save(2, make_state(2))
preemption.close()
say(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.set_wakeup_fd(-1))
"""
    with running(folder, program, hold=0) as process:
        said, _ = process.communicate(timeout=SECONDS)
        assert (said.split(), process.returncode) == (["True", "-1"], 0)
    check(folder, [1, 2])


TRAINER = """
keep = ckptstore.on_preemption(repo, grace=grace)
repo = ckptstore.open(folder, chunk_size=CHUNK)
keep.close()
ckptstore.on_preemption(repo, grace=grace)
say("ready")
epoch = repo.epochs()[-1]
while True:
    epoch += 1
    if epoch % 2:
        repo.save(epoch, make_state(epoch))
    else:
        repo.save_async(epoch, make_state(epoch))
"""


def test_at_any_moment(tmp_path: Path) -> None:
    """P1: told to end at random moments of a run that saves all the time: it ends, and every epoch is whole."""
    dice = random.Random(int(os.environ.get("CKPTSTORE_KILL_SEED", "7")))
    folder = tmp_path / "repo"
    last = 1
    for _ in range(3):
        with running_on(folder, TRAINER, grace=dice.choice([0.0, 0.05, 5.0])) as process:
            time.sleep(dice.random() / 2)
            told(process, again=dice.randrange(2))
            assert process.returncode == KILLED
        with ckptstore.open(folder, chunk_size=64 * 1024) as repo:
            epochs = repo.epochs()
            assert epochs == list(range(1, len(epochs) + 1))
            assert len(epochs) >= last
            last = len(epochs)
            assert repo.verify().ok
            assert_same(repo.checkpoint(last).load(), make_state(last))
    assert last > 1


@contextmanager
def running_on(folder: Path, program: str, grace: float) -> Iterator[subprocess.Popen[str]]:
    """As ``running``, in a place where epochs may be."""
    if not folder.exists():
        with ckptstore.open(folder, chunk_size=64 * 1024) as repo:
            repo.save(1, make_state(1))
    command = [sys.executable, "-c", PRELUDE + program, str(folder), "0", str(grace)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


# ---- in this process ------------------------------------------------------------------------------------------


def test_handlers_are_put_back() -> None:
    """Leaving the block, and closing twice, leave everything as it was before; others' handlers stay."""
    repo = open_repo(MemoryStore())
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    threads = {*threading.enumerate()}
    with ckptstore.on_preemption(repo, signals=(signal.SIGTERM, signal.SIGUSR1)) as preemption:
        assert not preemption.requested
        assert signal.getsignal(signal.SIGTERM) != before[0]
        assert "memory" in repr(preemption)
    preemption.close()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    heard: list[int] = []
    with ckptstore.on_preemption(repo):
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, before[0])
    deadline = time.monotonic() + SECONDS
    while not {*threading.enumerate()} <= threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {*threading.enumerate()} <= threads
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(
    "call",
    [
        lambda repo: ckptstore.on_preemption(),
        lambda repo: ckptstore.on_preemption("folder"),  # type: ignore[arg-type]
        lambda repo: ckptstore.on_preemption(repo, grace=-1),
        lambda repo: ckptstore.on_preemption(repo, grace=float("nan")),
        lambda repo: ckptstore.on_preemption(repo, last_save=1),  # type: ignore[arg-type]
        lambda repo: ckptstore.on_preemption(repo, grace="30"),  # type: ignore[arg-type]
        lambda repo: ckptstore.on_preemption(repo, signals=(signal.SIGKILL,)),
        lambda repo: ckptstore.on_preemption(repo, signals=("TERM",)),  # type: ignore[arg-type]
        lambda repo: ckptstore.on_preemption(repo, signals=()),
    ],
)
def test_arguments_that_make_no_sense(call: Callable[[Any], object]) -> None:
    """Refused at once, and nothing is left behind."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(InvalidArgumentError):
        call(open_repo(MemoryStore()))
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_that_is_named_twice() -> None:
    """P6: our own handler is not taken for the one of before, which would be passed the signal for ever."""
    before = signal.getsignal(signal.SIGTERM)
    with ckptstore.on_preemption(open_repo(MemoryStore()), signals=(signal.SIGTERM, signal.SIGTERM)) as told:
        assert told._previous == {signal.SIGTERM: before}
    assert signal.getsignal(signal.SIGTERM) == before


def test_only_the_main_thread() -> None:
    """Python lets only the main thread handle signals: said in our words."""
    heard: list[BaseException] = []

    def elsewhere() -> None:
        try:
            ckptstore.on_preemption(open_repo(MemoryStore()))
        except InvalidArgumentError as error:
            heard.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(heard) == 1
