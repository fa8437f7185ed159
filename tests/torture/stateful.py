"""Campaign ``stateful``: random steps of RepositoryMachine against a model, on a memory store and on a folder."""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections import Counter
from typing import Any, ClassVar

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from ckptstore import CkptStoreError
from ckptstore.stores.base import Store
from ckptstore.stores.local import LocalStore
from ckptstore.testing.machine import RepositoryMachine
from tests.torture.work import Work

STEPS_A_RUN = 50
RUNS = 40  # in a row; then the dice are thrown anew


def run(work: Work) -> None:
    """``size`` steps, three quarters of them on a memory store, whose clock can be set."""
    _steps(work, "memory", RepositoryMachine, round(0.75 * work.size))
    _steps(work, "folder", _on_a_folder(work), round(0.25 * work.size))


def _on_a_folder(work: Work) -> type[RepositoryMachine]:
    class FolderMachine(RepositoryMachine):
        def make_store(self) -> Store:
            self.folder = tempfile.mkdtemp(dir=work.folder)
            return LocalStore(self.folder)

        def teardown(self) -> None:
            super().teardown()
            shutil.rmtree(self.folder, ignore_errors=True)

    return FolderMachine


def _steps(work: Work, kind: str, base: type[RepositoryMachine], steps: int) -> None:
    done = turn = 0
    while done < steps and not work.tally.broken:  # one story, shrunk, is enough; shrinking takes minutes

        class Machine(base):  # type: ignore[misc, valid-type]
            counts: ClassVar[Counter[str]] = Counter()

        _run(work, f"{kind}/{turn}", Machine, min(RUNS, -(-(steps - done) // STEPS_A_RUN)))
        counts = Machine.counts
        work.count(
            attempts=counts["steps"], **{name: counts[name] for name in ("faults", "committed", "refused", "checked")}
        )
        work.done(counts["steps"])
        done += max(1, counts["steps"])
        turn += 1


def _run(work: Work, step: str, machine: Any, runs: int) -> None:
    phases = [Phase.generate] if work.broken else [Phase.generate, Phase.shrink]
    chosen = settings(
        max_examples=runs,
        stateful_step_count=STEPS_A_RUN,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    hypothesis.seed(work.dice(step).randrange(2**32))(machine)
    run: Any = run_state_machine_as_test  # typed in some releases of hypothesis only
    try:
        run(machine, settings=chosen)
    except (AssertionError, CkptStoreError):
        work.blame("lost", step, _story())
    except Exception:  # noqa: BLE001 (that is the question)
        work.blame("untyped", step, _story())


def _story() -> str:
    """The failure, and with it the shortest run of steps that hypothesis has found."""
    return traceback.format_exc()[-6000:]
