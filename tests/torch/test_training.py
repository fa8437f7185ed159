"""A real training run that is killed and resumed ends bit for bit as if nothing had happened."""

from __future__ import annotations

import copy
import importlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ckptstore

pytest.importorskip("torch.nn", reason="needs the extra `torch`")  # not "torch": that could be the folder of this file

torch: Any = importlib.import_module("torch")
trainer: Any = importlib.import_module("tests.torch.trainer")

SEED = 20240607


@dataclass(frozen=True)
class Life:
    """One process of a training run: what it told, and how it ended."""

    lines: list[str]
    code: int

    def steps(self, word: str) -> list[int]:
        return [int(line.split()[1]) for line in self.lines if line.split()[0] == word]


def begin(url: str, options: dict[str, Any], dtype: str, result: Path) -> subprocess.Popen[str]:
    """Start the trainer as a fresh process."""
    command = [sys.executable, str(Path(trainer.__file__)), url, json.dumps(options), dtype, str(result)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def live(process: subprocess.Popen[str], doomed: Callable[[str], bool] = lambda line: False) -> Life:
    """Follow a trainer to its end, or kill it right after the first line that is ``doomed``."""
    lines = []
    assert process.stdout is not None
    with process:
        try:
            for line in process.stdout:
                lines.append(line.strip())
                if doomed(lines[-1]):
                    process.send_signal(signal.SIGKILL)
                    doomed = lambda line: False  # noqa: E731
        except BaseException:
            process.kill()
            raise
    return Life(lines, process.returncode)


def nth(number: int, of: str) -> Callable[[str], bool]:
    """True for line number ``number`` among those that start with ``of``."""
    seen = 0

    def doomed(line: str) -> bool:
        nonlocal seen
        seen += line.startswith(of)
        return seen == number

    return doomed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Undisturbed runs by element type, under way while the other tests run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    runs = {dtype: begin(str(folder / dtype), {}, dtype, folder / f"{dtype}.pt") for dtype in ("float32", "bfloat16")}
    yield runs
    for process in runs.values():
        if process.returncode is None:  # no test has asked for it
            process.kill()
            process.communicate()


def expected(undisturbed: dict[str, subprocess.Popen[str]], dtype: str) -> Any:
    """The final state of the undisturbed run."""
    process = undisturbed[dtype]
    if process.returncode is None:
        assert live(process).code == 0
    return torch.load(list(process.args)[-1], weights_only=False)  # type: ignore[arg-type]


def differences(left: Any, right: Any, path: str = "state") -> list[str]:
    """Where two states are not the same, bit for bit, types included."""
    if type(left) is not type(right):
        return [f"{path}: {type(left).__name__} and {type(right).__name__}"]
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
        return [] if same and torch.equal(*bits) else [path]
    if isinstance(left, dict):
        if list(left) != list(right):
            return [f"{path}: keys {list(left)} and {list(right)}"]
        return [line for key in left for line in differences(left[key], right[key], f"{path}.{key}")]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{path}: {len(left)} and {len(right)} items"]
        items = enumerate(zip(left, right, strict=True))
        return [line for i, pair in items for line in differences(*pair, f"{path}.{i}")]
    return [] if repr(left) == repr(right) else [f"{path}: {left!r} and {right!r}"]


def killed_twice(url: str, options: dict[str, Any], dtype: str, result: Path, seed: int) -> list[Life]:
    """Train; kill it at a random moment, then at a random moment of a save; let it finish."""
    chance = random.Random(seed)  # a moment is a line that the trainer has told: it runs on until the signal arrives
    first = live(begin(url, options, dtype, result), nth(chance.randrange(60, 120), of=""))
    second = live(begin(url, options, dtype, result), nth(chance.randrange(3, 25), of="request put"))
    return [first, second, live(begin(url, options, dtype, result))]


def check_lives(lives: list[Life]) -> None:
    """The first two were killed, and each went on from the newest checkpoint that its predecessors had committed."""
    assert [life.code for life in lives] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    saving: list[int] = []
    for life in lives:
        (start,) = life.steps("start")
        # A save begins only when the one before it is durable; the last one may or may not have got through.
        assert start in ({saving[-1] - trainer.EVERY, saving[-1]} if saving else {0}), (start, saving)
        saving += life.steps("saving")
    assert lives[-1].steps("start") != [0]
    assert lives[-1].steps("step")[-1] == trainer.STEPS


@pytest.mark.kill
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_killed_run_ends_bit_identical(
    dtype: str, undisturbed: dict[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    """P1, P7: killed twice and resumed on a folder, a run ends as the undisturbed one; fp32 and bf16 parameters."""
    lives = killed_twice(str(tmp_path / "run"), {}, dtype, tmp_path / "end.pt", SEED)
    check_lives(lives)
    end = torch.load(tmp_path / "end.pt", weights_only=False)
    assert end["model"]["embed.weight"].dtype == getattr(torch, dtype)
    assert differences(end, expected(undisturbed, dtype)) == []
    assert end["progress"]["losses"][-1] < end["progress"]["losses"][0]


@pytest.mark.kill
@pytest.mark.s3
def test_a_killed_run_on_s3_ends_bit_identical(
    s3: Any, undisturbed: dict[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    """P1, P7: the same through a real S3 server, where a kill cuts connections."""
    url = s3.url()
    check_lives(killed_twice(url, s3.storage_options, "float32", tmp_path / "end.pt", SEED + 1))
    end = torch.load(tmp_path / "end.pt", weights_only=False)
    assert differences(end, expected(undisturbed, "float32")) == []
    with ckptstore.open(url, storage_options=s3.storage_options, create=False) as repository:
        newest = repository.latest(deep=True)
        assert newest is not None
        assert newest.epoch == trainer.STEPS
        assert differences(newest.load(), end) == []
        assert repository.verify().ok


@pytest.fixture
def run() -> Any:
    """A run after a few steps, in this process."""
    before = torch.get_rng_state()
    run = trainer.Run("float32")
    for _ in range(3):
        run.step()
    torch.set_rng_state(before)
    return run


def test_in_place_equals_load_state_dict(run: Any, tmp_path: Path) -> None:
    """`into=` restores model and optimizer in the memory they have, just as load_state_dict does with a copy."""
    repository = ckptstore.open(tmp_path / "run")
    saved = copy.deepcopy(run.state())
    checkpoint = repository.save(3, run.state())
    run.step()
    tensors = {id(p): p.data_ptr() for p in run.model.parameters()}
    moments = [slot["exp_avg"].data_ptr() for slot in run.optimizer.state.values()]
    assert differences(run.state(), saved) != []

    checkpoint.load("model", into=run.model.state_dict())
    assert differences(run.model.state_dict(), saved["model"]) == []
    assert {id(p): p.data_ptr() for p in run.model.parameters()} == tensors

    loaded = checkpoint.load("optimizer", into=run.optimizer.state_dict())
    run.optimizer.load_state_dict(loaded)  # the plain values, such as the learning rate: state_dict() copied them
    assert differences(run.optimizer.state_dict(), saved["optimizer"]) == []
    assert [slot["exp_avg"].data_ptr() for slot in run.optimizer.state.values()] == moments

    other = trainer.Run("float32")
    other.restore(checkpoint.load())
    run.restore({**checkpoint.load(), "model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()})
    for one in (run, other):
        torch.set_rng_state(saved["rng"]["torch"])
        one.step()
    assert differences(run.state(), other.state()) == []


def test_tied_weights_are_stored_once(run: Any, tmp_path: Path) -> None:
    """Embedding and output weights that are one tensor are one array on the store, and one tensor again when loaded."""
    state = run.model.state_dict()
    distinct = {tensor.data_ptr(): tensor.nbytes for tensor in state.values()}
    assert len(distinct) == len(state) - 1
    checkpoint = ckptstore.open(tmp_path / "run").save(1, {"model": state})
    record = checkpoint.records["model"]
    assert (record.arrays, record.bytes_state) == (len(distinct), sum(distinct.values()))
    loaded = checkpoint.load("model")
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()
    assert differences(loaded, copy.copy(state)) == []
