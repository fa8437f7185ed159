"""``ckptstore demo``: a real training run is killed, corrupted and pruned, and loses nothing."""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptstore.cli import _demo_checks as checks
from ckptstore.cli._common import Debug, Json, Options, Unsafe, print_json, storage_options
from ckptstore.cli._demo_model import Shape
from ckptstore.cli._demo_story import Story
from ckptstore.cli._demo_supervisor import DemoFailedError, Supervisor
from ckptstore.cli._format import to_json
from ckptstore.errors import InvalidArgumentError
from ckptstore.stores import open_store

_Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        show_default=False,
        help="Run below this folder or bucket, under a fresh prefix demo-…. Default: a temporary folder.",
    ),
]
_Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", min=0, show_default=False, help="Repeat a run. Default: random.")
]
_Keep = Annotated[bool, typer.Option("--keep", help="Keep the checkpoints that it made.")]


def _hidden(name: str, low: int) -> Any:
    return typer.Option(name, hidden=True, min=low)


def demo(
    url: _Url = None,
    seed: _Seed = None,
    keep: _Keep = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
    epochs: Annotated[int, _hidden("--epochs", 3)] = Shape.epochs,
    steps: Annotated[int, _hidden("--steps", 1)] = Shape.steps,
    hidden: Annotated[int, _hidden("--hidden", 8)] = Shape.hidden,
    kills: Annotated[int, _hidden("--kills", 0)] = 3,
) -> None:
    """Train a small language model, kill it in the middle of saves, flip a bit, prune: and lose nothing.

    It really trains (NumPy, Adam, real text), in a process that is killed with SIGKILL three times at random moments
    of a save. The exit code is 0 only if every promise held: after each kill all earlier epochs are whole, and the
    final state is bit for bit that of an undisturbed run. Takes about a minute and 500 MiB.

    Example: [cyan]ckptstore demo --url s3://my-bucket/scratch[/cyan]
    """
    if kills >= epochs:
        raise InvalidArgumentError("--kills must be less than --epochs")
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    shape = Shape(seed=chosen, epochs=epochs, steps=steps, hidden=hidden)
    options = {"storage_options": storage_options(option), "unsafe_single_writer": unsafe}
    report: dict[str, Any] = {"ok": False, "seed": chosen}
    # That epochs are skipped is the point here: the story tells of it, no warning need.
    logging.getLogger("ckptstore").setLevel(logging.DEBUG if debug else logging.ERROR)
    with _place(url, options, keep) as place:
        story = Story(shape, place, temporary=url is None, keep=keep, quiet=json)
        report["url"] = place
        begun = time.perf_counter()
        try:
            with story:
                _acts(_Stage(place, options, shape, kills), story, report)
            report.update(ok=True, seconds=round(time.perf_counter() - begun, 2))
            story.end(report["seconds"])
        except DemoFailedError as error:
            report["failed"] = str(error)
            raise DemoFailedError(f"the demo does not hold: {error} (seed {chosen})") from error
        finally:
            if json:
                print_json(to_json(report))


class _Stage:
    """The two runs, and the one source of chance."""

    def __init__(self, place: str, options: dict[str, Any], shape: Shape, kills: int) -> None:
        self.place, self.options, self.shape, self.kills = place, options, shape, kills
        self.rng = random.Random(shape.seed)

    def run(self, name: str, story: Story) -> Supervisor:
        return Supervisor(f"{self.place}/{name}", self.options, self.shape, story.notice)


def _acts(stage: _Stage, story: Story, report: dict[str, Any]) -> None:
    last = stage.shape.epochs
    reference, run = stage.run("undisturbed", story), stage.run("killed", story)

    story.act("The run as it should be, undisturbed")
    calm = reference.run()
    story.undisturbed(calm)
    report["undisturbed"] = {"seconds": calm.seconds, "losses": calm.losses, "saves": calm.saves}

    story.act(f"The same run, killed {stage.kills} times in the middle of a save")
    log = run.run(kills=stage.kills, rng=stage.rng)
    story.killed(log)
    report["killed"] = {"seconds": log.seconds, "kills": [vars(kill) for kill in log.kills], "too_late": log.too_late}

    story.act("Compared")
    same = [epoch for epoch in calm.fingerprints if calm.fingerprints[epoch] == log.fingerprints.get(epoch)]
    checks.require(len(same) == last, f"of {last} epochs only {same} came out as in the undisturbed run")
    compared = checks.compare(run, reference, last, calm.fingerprints[last])
    story.compared(compared)
    report["compared"] = {"epochs": len(same), **vars(compared), "bits_different": 0}

    story.act("One bit flipped on the store")
    flipped = checks.flip(run, stage.rng)
    story.flipped(flipped)
    checks.check_notices(run, flipped)
    story.noticed(flipped)
    again = run.run()
    checks.require(list(again.saves) == [last], f"the repair saved epochs {list(again.saves)}, not {last}")
    checks.compare(run, reference, last, calm.fingerprints[last])
    story.repaired(flipped)
    report["flipped"] = {**vars(flipped), "repaired": True}

    story.act("Pruned to two")
    pruned = checks.prune(run, 2)
    story.pruned(pruned)
    report["pruned"] = vars(pruned)
    report["lost"] = []


@contextmanager
def _place(url: str | None, options: dict[str, Any], keep: bool) -> Iterator[str]:
    """An empty place for the demo, removed afterwards."""
    if url is None:
        place = tempfile.mkdtemp(prefix="ckptstore-demo-")
    else:
        if url.lower().startswith("memory:"):
            raise InvalidArgumentError("memory:// ends with its process, and the demo kills processes: use a folder")
        place = f"{url.rstrip('/')}/demo-{uuid.uuid4().hex[:8]}"
    with open_store(place, **options) as store:  # a wrong URL or option shows now
        where = store.traits.url
        folder = checks.folder_of(where) if where.startswith("file://") else None
        missing = [] if folder is None else [parent for parent in folder.parents if not parent.exists()]
        try:
            yield place
        finally:
            if keep:
                pass
            elif folder is None:
                for info in list(store.list()):
                    store.delete(info.key)
            else:
                _remove(folder, missing)


def _remove(folder: Path, made: list[Path]) -> None:
    """Remove the demo's folder and, if nothing else is in them by now, the parents that it made."""
    shutil.rmtree(folder, ignore_errors=True)
    for parent in made:
        try:
            parent.rmdir()
        except OSError:
            return
