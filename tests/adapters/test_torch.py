"""A real training run of torch, in one TrainingState: killed and resumed it ends bit for bit as if nothing had been."""

from __future__ import annotations

import copy
import importlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import AccessError, CorruptionError, InvalidArgumentError, InvalidRecordError, RecordNotFoundError
from ckptstore.stores import MemoryStore
from ckptstore.testing import Fault, FaultStore
from tests.conftest import Bucket

pytest.importorskip("torch.nn", reason="needs torch: make test-adapters")

torch: Any = importlib.import_module("torch")
adapter: Any = importlib.import_module("ckptstore.adapters.torch")
nn: Any = torch.nn
TrainingState: Any = adapter.TrainingState
ResumableLoader: Any = adapter.ResumableLoader

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "torch_training.py"
SECONDS = 120


def same(left: Any, right: Any) -> bool:
    """Whether two states are the same, bit for bit, types included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        bits = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
        return bool(left.dtype == right.dtype and left.shape == right.shape and torch.equal(*bits))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray):
        return bool(left.dtype == right.dtype and left.tobytes() == right.tobytes())
    return repr(left) == repr(right)


@pytest.fixture(autouse=True)
def seeds() -> Iterator[None]:
    """What a test does to the global generators ends with it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[ckptstore.Repository]:
    with ckptstore.open(tmp_path / "run") as repository:
        yield repository


# ---- real processes -----------------------------------------------------------------------------------------


def begin(url: str, *options: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the example."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
    command = [sys.executable, str(EXAMPLE), url, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def follow(process: subprocess.Popen[str], doomed: str = "never", number: int = signal.SIGKILL) -> list[str]:
    """What a run says to its end, which a signal brings once it says ``doomed``."""
    lines: list[str] = []
    assert process.stdout is not None
    with process:
        try:
            for line in process.stdout:
                lines.append(line.strip())
                if lines[-1].startswith(doomed):
                    process.send_signal(number)
                    doomed = "never"
        except BaseException:
            process.kill()
            raise
    return lines


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    """What the run without any end of a process has come to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    result = folder / "result.pt"

    def get() -> Any:
        if not result.exists():
            process = begin(str(folder / "run"), "--result", str(result))
            follow(process)
            assert process.returncode == 0
        return torch.load(result)

    return get


@pytest.mark.kill
@pytest.mark.parametrize("where", ["folder", "s3"])
def test_a_killed_run_ends_bit_identical(
    where: str, undisturbed: Callable[[], Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """P1, P7: killed twice amid an epoch while saves are in flight: dropout, augmentation, order, moments, averages,
    gradient scaling and learning rate go on as if nothing had been."""
    env: dict[str, str] = {}
    url = str(tmp_path / "run")
    if where == "s3":
        bucket: Bucket = request.getfixturevalue("s3")
        url = bucket.url()
        options = bucket.storage_options
        env = {"AWS_ENDPOINT_URL": bucket.endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
        env |= {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
    result = tmp_path / "result.pt"
    dice = random.Random(11)
    starts = []
    for doom in (dice.randrange(12, 25), dice.randrange(32, 50), None):
        process = begin(url, "--result", str(result), env=env)
        lines = follow(process, f"step {doom} ")
        assert process.returncode == (0 if doom is None else -signal.SIGKILL)
        starts.append(int(lines[0].split()[1]))
    assert starts[0] == 0 < starts[1] < starts[2] < 60
    assert same(torch.load(result), undisturbed())


@pytest.mark.kill
def test_told_to_end_it_saves_the_last_step(undisturbed: Callable[[], Any], tmp_path: Path) -> None:
    """SIGTERM: it saves at the next border between two steps and dies of the signal; nothing was in vain."""
    url, result = str(tmp_path / "run"), tmp_path / "result.pt"
    process = begin(url, "--every", "1000")
    last = follow(process, "step 17 ", signal.SIGTERM)[-1]
    assert process.returncode == -signal.SIGTERM
    again = begin(url, "--result", str(result))
    assert follow(again)[0].split()[:2] == ["start", last.split()[1]]
    assert again.returncode == 0
    assert same(torch.load(result), undisturbed())


GROUP = """
import sys, time
import ckptstore, torch
from ckptstore.adapters.torch import ResumableLoader, TrainingState

repo = ckptstore.open(sys.argv[1])
state = TrainingState(model=torch.nn.Linear(3, 3))
with state.preemption(repo, grace=20) as border:
    for _ in ResumableLoader(range(10_000), num_workers=2):
        time.sleep(0.1)
        state.step += 1
        border(state.step)
        print("step", state.step, flush=True)
"""


@pytest.mark.kill
def test_told_to_end_with_all_its_workers(tmp_path: Path) -> None:
    """Slurm and others signal every process of a job: workers do not die before the step that needs them is saved."""
    command = [sys.executable, "-c", GROUP, str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "step 3\n":
                os.killpg(process.pid, signal.SIGTERM)
                break
        process.stdout.read()
        assert process.wait(SECONDS) == -signal.SIGTERM
    with ckptstore.open(tmp_path / "run") as repository:
        assert len(repository.epochs()) == 1


SLOW = """
import sys, time
import ckptstore, torch
from ckptstore.adapters.torch import TrainingState
from ckptstore.repository import Repository
from ckptstore.stores import open_store
from ckptstore.testing import Fault, FaultStore

folder, how = sys.argv[1:]
model = torch.nn.Linear(300, 300)
repo = Repository(FaultStore(open_store(folder), [Fault("put", "records/", error=lambda: time.sleep(3600))]))
state = TrainingState(model=model)
with state.preemption(repo, grace=2) as border:
    print("ready", flush=True)
    if how == "in flight":
        state.save_async(repo, 2)
    while True:
        state.step += 1
        time.sleep(3600 if how == "stuck" else 0.01)
        border(2)
"""


@pytest.mark.kill
@pytest.mark.parametrize("how", ["in flight", "at the border", "stuck"])
def test_what_takes_longer_than_the_grace_is_abandoned(tmp_path: Path, how: str) -> None:
    """P1, P6: on a store that hangs, or in a step that does, the process ends in time; the epoch before is latest."""
    with ckptstore.open(tmp_path / "run") as repository:
        TrainingState(model=nn.Linear(300, 300)).save(repository, 1)
    command = [sys.executable, "-c", SLOW, str(tmp_path / "run"), how]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        begun = time.monotonic()
        follow(process, "ready", signal.SIGTERM)
        assert process.returncode == -signal.SIGTERM
        assert time.monotonic() - begun < SECONDS
    with ckptstore.open(tmp_path / "run") as repository:
        assert repository.epochs() == [1]
        TrainingState(model=nn.Linear(300, 300)).restore(repository)


@pytest.mark.parametrize("failed", [2, 3])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_save_that_failed_before_does_not_cost_the_last_one(failed: int, on_error: Any) -> None:
    """P4: in the background a save fails, of another step or of this one; then SIGTERM comes: it is saved."""
    broken = [True]
    fault = Fault("put", "chunks/", error=lambda: AccessError("refused") if broken else None, times=None)
    store = FaultStore(MemoryStore(), [fault])
    repo = ckptstore.Repository(store, on_error=on_error)
    state, told = TrainingState(model=nn.Linear(3, 3), rng=False), []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        with state.preemption(repo, grace=20) as border:
            state.save_async(repo, failed).wait()
            broken.clear()
            os.kill(os.getpid(), signal.SIGTERM)
            while not told:
                time.sleep(0.01)
                border(3)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert repo.epochs() == [3]


# ---- what comes back, and where ------------------------------------------------------------------------------


class Run:
    """A small training in this process. ``opener`` makes the optimizer."""

    def __init__(self, seed: int = 0, make: Callable[[Any], Any] | None = None, dtype: Any = None) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)).to(dtype)
        self.optimizer = (make or torch.optim.AdamW)(self.model.parameters())
        self.state = TrainingState(model=self.model, optimizer=self.optimizer)

    def step(self) -> float:
        """One step: draws from all three global generators."""
        noise = float(np.random.normal()) + random.random()
        parameter = next(self.model.parameters())
        loss = (self.model(torch.randn(6, 8, dtype=parameter.dtype)) * noise).float().pow(2).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step(lambda: loss) if isinstance(self.optimizer, torch.optim.LBFGS) else self.optimizer.step()
        self.state.step += 1
        return float(loss.detach())


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw, learning rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "adafactor": torch.optim.Adafactor,
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2),
    "named": lambda p: torch.optim.AdamW([(f"p{n}", one) for n, one in enumerate(p)]),
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_goes_on_bit_for_bit(repo: ckptstore.Repository, name: str, steps: int) -> None:
    """P7: in a fresh run, and in the same one after more steps; optimizers that have not stepped have no state yet."""
    run = Run(make=OPTIMIZERS[name])
    for _ in range(steps):
        run.step()
    run.state.extra["table"] = np.arange(3)
    run.state.save(repo, 1)
    after = [run.step() for _ in range(3)]
    end = copy.deepcopy(run.state.records())
    for other in (Run(1, OPTIMIZERS[name]), run):
        assert other.state.restore(repo).epoch == 1
        assert other.state.step == steps
        assert [other.step() for _ in range(3)] == after
        assert same(other.state.records(), end)


def test_moments_of_another_type_stay_so(repo: ckptstore.Repository) -> None:
    """P7: torch casts the state of an optimizer to the type of the parameters. Here it keeps its own."""
    run = Run(dtype=torch.bfloat16)
    run.step()
    for slot in run.optimizer.state.values():
        slot["exp_avg"] = slot["exp_avg"].float() + 1e-6
    run.state.save(repo, 1)
    saved = copy.deepcopy(run.optimizer.state_dict())
    for other in (Run(1, dtype=torch.bfloat16), run):
        other.state.restore(repo)
        assert same(other.optimizer.state_dict(), saved)


def test_in_place(repo: ckptstore.Repository) -> None:
    """P6: parameters, buffers and moments keep their memory, whatever holds them; also strided ones."""
    run = Run()
    run.model.register_buffer("wide", torch.arange(24.0).reshape(4, 6).T)
    run.step()
    run.state.save(repo, 1)
    run.step()
    held = {
        **run.model.state_dict(),
        **{f"m{n}": slot["exp_avg"] for n, slot in enumerate(run.optimizer.state.values())},
    }
    places = {key: tensor.data_ptr() for key, tensor in held.items()}
    parameters = list(map(id, run.model.parameters()))
    run.model.wide.zero_()
    run.state.restore(repo)
    held = {
        **run.model.state_dict(),
        **{f"m{n}": slot["exp_avg"] for n, slot in enumerate(run.optimizer.state.values())},
    }
    assert {key: tensor.data_ptr() for key, tensor in held.items()} == places
    assert list(map(id, run.model.parameters())) == parameters
    assert torch.equal(run.model.wide, torch.arange(24.0).reshape(4, 6).T)
    assert run.model.wide.stride() == (1, 6)


class Scripted(nn.Module):  # type: ignore[misc]
    """A model with state that is no tensor, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.seen: Any = 0

    def forward(self, tokens: Any) -> Any:
        return self.head(self.embed(tokens))

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "history": torch.ones(self.seen)}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_extra_state_and_tied_weights(repo: ckptstore.Repository) -> None:
    """What a module adds to its state comes back too, of whatever size; tied weights stay tied."""
    model = Scripted()
    model.seen = 3
    saved = TrainingState(model=model).save(repo, 1)
    assert saved.records["model"].bytes_state == 5 * 4 * 4 + 3 * 4
    other = Scripted()
    other.seen = 3
    TrainingState(model=other).restore(repo)
    assert (other.seen, other.head.weight is other.embed.weight) == (3, True)
    assert torch.equal(other.head.weight, model.head.weight)


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def partly_compiled(model: Any) -> Any:
    model[0] = torch.compile(model[0], backend="eager")
    return model


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "group"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "compiled": compiled,
    "partly compiled": partly_compiled,
    "ddp": lambda model: nn.parallel.DistributedDataParallel(model),
    "compiled ddp": lambda model: compiled(nn.parallel.DistributedDataParallel(model)),
    "ddp of compiled": lambda model: nn.parallel.DistributedDataParallel(compiled(model)),
    "data parallel": lambda model: nn.DataParallel(model),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_leave_no_trace(repo: ckptstore.Repository, name: str) -> None:
    """Saved under clean names from any wrapper, restored into any other; the optimizer's parameters are known again."""

    def make(wrap: Callable[[Any], Any], seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        model.module = nn.Linear(4, 4)  # a name that looks like a wrapper's
        wrapped = wrap(model)
        return wrapped, TrainingState(model=wrapped, optimizer=torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9))

    model, state = make(WRAPPERS[name], 1)
    model(torch.ones(2, 3)).sum().backward()
    state.save(repo, 1)
    plain, other = make(lambda model: model, 2)
    keys = repo.checkpoint(1).load("model").keys()
    assert keys == plain.state_dict().keys()
    assert other.restore(repo)
    assert same(list(plain.state_dict().values()), list(model.state_dict().values()))
    other.save(repo, 2)
    wrapped, third = make(WRAPPERS[name], 3)
    third.restore(repo)
    assert same(wrapped.state_dict(), model.state_dict())


def test_onto_another_device(repo: ckptstore.Repository) -> None:
    """A checkpoint of one device is restored onto the one that the model is on now, generators included."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    run = Run()
    run.model.cuda()
    state = TrainingState(model=run.model)
    run.model(torch.ones(6, 8, device="cuda"))
    state.save(repo, 1)
    drawn = torch.rand(3, device="cuda")
    state.restore(repo)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    other = Run(1)
    TrainingState(model=other.model).restore(repo)
    assert same(dict(other.model.state_dict()), {k: v.cpu() for k, v in run.model.state_dict().items()})


def test_the_generators_of_devices(repo: ckptstore.Repository, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Each device that a model is on has a state of its own, by order: the numbers of the devices may be others."""
    held = {"cuda:3": torch.tensor([3], dtype=torch.uint8), "cuda:5": torch.tensor([5], dtype=torch.uint8)}
    module = types.SimpleNamespace(
        get_rng_state=lambda device: held[str(device)].clone(),
        set_rng_state=lambda state, device: held.__setitem__(str(device), state),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    parts = importlib.import_module("ckptstore.adapters.torch_parts")

    def on(*devices: str) -> Any:
        parameters = [types.SimpleNamespace(device=torch.device(device)) for device in devices]
        return parts.GlobalRandom("rng", [types.SimpleNamespace(parameters=lambda: parameters)])

    saved = on("cuda:3", "cpu", "cuda:5", "cuda:3").state()
    assert [int(state) for state in saved["devices"]] == [3, 5]
    on("cuda:0", "cuda:1").apply(saved)
    assert (int(held["cuda:0"]), int(held["cuda:1"])) == (3, 5)
    assert not caplog.records
    on("cuda:2").apply(saved)
    assert "saved of 2 devices, 1 are here" in caplog.text


def test_several_of_each_and_generators(repo: ckptstore.Repository) -> None:
    """Two models, two optimizers, generators of one's own: as many parts as you like, each a record."""
    parts = {
        "g": nn.Linear(2, 2),
        "d": nn.Linear(2, 2),
        "numpy": np.random.default_rng(5),
        "python": random.Random(6),
        "torch": torch.Generator().manual_seed(7),
    }
    parts |= {f"{name}_opt": torch.optim.Adam(parts[name].parameters()) for name in "gd"}
    state = TrainingState(**parts)
    state.save(repo, 1)
    assert set(repo.checkpoint(1).records) == {*parts, "rng", "progress"}

    def draw() -> list[float]:
        return [parts["numpy"].random(), parts["python"].gauss(0, 1), float(torch.rand(1, generator=parts["torch"]))]

    drawn = draw()
    assert draw() != drawn
    state.restore(repo)
    assert draw() == drawn


def test_save_async_takes_what_is_there_now(repo: ckptstore.Repository) -> None:
    """P7: training goes on at once, and does not reach the checkpoint."""
    run = Run()
    run.step()
    expected = copy.deepcopy(run.state.records())
    handle = run.state.save_async(repo, 1, {"loss": 0.5})
    run.step()
    run.state.extra["late"] = True
    assert handle.result().metadata == {"loss": 0.5}
    run.state.restore(repo)
    assert same(run.state.records(), expected)


# ---- what does not fit ----------------------------------------------------------------------------------------


def untouched(run: Run, restore: Callable[[], Any], kind: type[Exception] = InvalidRecordError) -> str:
    """The message of a restore that is refused, and changes nothing."""
    before = copy.deepcopy(run.state.records())
    with pytest.raises(kind) as caught:
        restore()
    assert same(run.state.records(), before)
    return str(caught.value)


def test_everything_that_does_not_fit_is_said_before_anything_is_changed(repo: ckptstore.Repository) -> None:
    """Missing, unexpected and misshapen parameters, other parts, other groups: in one error."""
    saved = Run()
    saved.step()
    saved.model.append(nn.Linear(4, 2))
    TrainingState(model=saved.model, optimizer=saved.optimizer, ema=nn.Linear(1, 1)).save(repo, 1)
    run = Run(1)
    run.model[0] = nn.Linear(8, 16, bias=False)
    run.model[3] = nn.Linear(16, 5)
    run.model.add_module("new", nn.Linear(1, 1))
    run.optimizer = torch.optim.AdamW(run.model.parameters())
    run.state = TrainingState(model=run.model, optimizer=run.optimizer)
    said = untouched(run, lambda: run.state.restore(repo))
    assert "ema: only in the checkpoint" in said
    assert "model.0.bias: only in the checkpoint" in said
    assert "model.4.weight: only in the checkpoint" in said
    assert "model.new.weight: unexpected here" in said
    assert "model.3.weight: float32 [4, 16] in the checkpoint, float32 [5, 16] here" in said
    assert "optimizer.param_groups.0: the parameters" in said
    said = untouched(run, lambda: run.state.restore(repo, strict=False))
    assert "model.3.weight" in said
    assert "new" not in said.split("optimizer")[0]


def test_not_strict(repo: ckptstore.Repository) -> None:
    """What only one side has stays as it is, and is told; the rest is restored."""
    saved = Run()
    saved.step()
    saved.model.append(nn.Linear(4, 2))
    TrainingState(model=saved.model, ema=nn.Linear(1, 1)).save(repo, 1)
    run = Run(1)
    run.model.add_module("new", nn.Linear(1, 1))
    new = copy.deepcopy(run.model.new.state_dict())
    state = TrainingState(model=run.model, schedule=torch.optim.lr_scheduler.StepLR(run.optimizer, 3))
    untouched(run, lambda: state.restore(repo), RecordNotFoundError)
    assert state.restore(repo, strict=False).epoch == 1
    assert [line.split(":")[0] for line in state.unrestored] == [
        "schedule",
        "ema",
        "model.4.weight",
        "model.4.bias",
        "model.new.weight",
        "model.new.bias",
    ]
    assert same(run.model.new.state_dict(), new)
    assert same(run.model[0].state_dict(), saved.model[0].state_dict())


def test_a_part_of_another_class(repo: ckptstore.Repository) -> None:
    """Most would take the state of another class without a word, or fail amid a restore that has changed others."""

    def state_of(optimizer: Any, scheduler: Any, generator: Any) -> Any:
        model = nn.Linear(2, 2)
        opened = optimizer(model.parameters(), lr=0.1)
        return TrainingState(model=model, optimizer=opened, scheduler=scheduler(opened, 3), generator=generator)

    schedulers = torch.optim.lr_scheduler
    saved = state_of(torch.optim.NAdam, schedulers.CosineAnnealingLR, np.random.Generator(np.random.PCG64(1)))
    saved.save(repo, 1)
    other = state_of(torch.optim.RAdam, schedulers.StepLR, np.random.Generator(np.random.Philox(1)))
    before = copy.deepcopy(other.records())
    with pytest.raises(InvalidRecordError, match="optimizer: a NAdam in the checkpoint, a RAdam here") as error:
        other.restore(repo)
    assert "scheduler: a CosineAnnealingLR" in str(error.value)
    assert "generator: a PCG64" in str(error.value)
    assert same(other.records(), before)
    other.restore(repo, strict=False)
    now = other.records()
    assert same([now[n] for n in ("optimizer", "scheduler")], [before[n] for n in ("optimizer", "scheduler")])
    assert same(now["model"], saved.records()["model"])
    assert len(other.unrestored) == 3


def test_an_optimizer_whose_parameters_changed_places(repo: ckptstore.Repository) -> None:
    """Moments are stored by number: in another order they would go to other parameters of the same shape."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    optimizer = torch.optim.Adam([model["a"].weight, model["b"].weight])
    TrainingState(model=model, optimizer=optimizer).save(repo, 1)
    turned = torch.optim.Adam([model["b"].weight, model["a"].weight])
    with pytest.raises(InvalidRecordError, match=r"\['model.a.weight', 'model.b.weight'\] in the checkpoint"):
        TrainingState(model=model, optimizer=turned).restore(repo)
    groups = torch.optim.Adam([{"params": [model["a"].weight]}, {"params": [model["b"].weight]}])
    with pytest.raises(InvalidRecordError, match="1 parameter groups in the checkpoint, 2 here"):
        TrainingState(model=model, optimizer=groups).restore(repo)


def test_what_sharded_tensors_cannot_do(repo: ckptstore.Repository, group: None) -> None:
    """A typed error that says what can: in the background, beside numbers of a whole save, without their model."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 4)
    TrainingState(model=model).save(repo, 1)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    state = TrainingState(model=model)
    with pytest.raises(InvalidRecordError, match=r"model\.\w+ is a DTensor: .*async_save"):
        state.save_async(repo, 2)
    with pytest.raises(InvalidRecordError, match="whole tensors"):
        state.restore(repo)
    other = nn.Linear(4, 4)
    torch.distributed.fsdp.fully_shard(other, mesh=mesh)
    with pytest.raises(InvalidRecordError, match="optimizer: no model of this state has all of its parameters"):
        TrainingState(model=model, optimizer=torch.optim.SGD(other.parameters())).save(repo, 2)
    assert repo.epochs() == [1]


def test_parts_that_cannot_be_saved() -> None:
    """Said when the state is made."""
    with pytest.raises(InvalidArgumentError, match="losses is a list without state_dict"):
        TrainingState(losses=[1.0])
    with pytest.raises(InvalidArgumentError, match="'progress' is taken"):
        TrainingState(progress=nn.Linear(1, 1))


# ---- which epoch ----------------------------------------------------------------------------------------------


def test_nothing_there(repo: ckptstore.Repository) -> None:
    """None, and nothing is changed."""
    run = Run()
    before = copy.deepcopy(run.state.records())
    assert run.state.restore(repo) is None
    assert same(run.state.records(), before)
    with pytest.raises(ckptstore.EpochNotFoundError):
        run.state.restore(repo, 7)


def three_epochs(repo: ckptstore.Repository) -> tuple[Run, list[Any]]:
    run = Run()
    states = []
    for epoch in (1, 2, 3):
        run.step()
        run.state.save(repo, epoch)
        states.append(copy.deepcopy(run.state.records()))
    return run, states


def damage(folder: Path, epoch: int) -> None:
    """Flip a byte of each chunk that only this epoch has sent."""
    attempt = sorted((folder / "attempts").iterdir(), key=lambda path: path.stat().st_mtime_ns)[epoch - 1]
    for path in attempt.glob("chunks/*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)


def test_steps_back_over_damage_and_saves_those_epochs_anew(tmp_path: Path) -> None:
    """P3: rotten bytes are found amid the load; the epoch before is restored whole, and 3 can be saved again."""
    with ckptstore.open(tmp_path / "run") as repo:
        _, states = three_epochs(repo)
    damage(tmp_path / "run", 3)
    with ckptstore.open(tmp_path / "run") as repo:
        run = Run(1)
        found = run.state.restore(repo)
        assert (found.epoch, [skipped.epoch for skipped in found.skipped]) == (2, [3])
        assert same(run.state.records(), states[1])
        run.step()
        run.state.save(repo, 3)
        assert same(run.state.records(), states[2])
        assert Run(1).state.restore(repo).epoch == 3
        with pytest.raises(ckptstore.EpochExistsError):
            run.state.save(repo, 2)
    with ckptstore.open(tmp_path / "run") as repo:
        damage(tmp_path / "run", 1)
        with pytest.raises(CorruptionError):
            run.state.restore(repo, 1)


def test_the_newest_that_can_be_resumed_from(tmp_path: Path) -> None:
    """``every``: epochs without the optimizer are passed by, and saved anew when the run comes to them again."""
    with ckptstore.open(tmp_path / "run", every={"optimizer": 2}) as repo:
        _, states = three_epochs(repo)
        run = Run(1)
        assert run.state.restore(repo).epoch == 2
        assert same(run.state.records(), states[1])
        run.step()
        run.state.save_async(repo, 3).result()
        assert same(run.state.records(), states[2])
        with pytest.raises(RecordNotFoundError, match=r"lacks \['optimizer', 'scaler'\].*strict=False"):
            TrainingState(model=run.model, optimizer=run.optimizer, scaler=torch.amp.GradScaler("cpu")).restore(repo)


def test_its_own_run(tmp_path: Path) -> None:
    """A repository with a ``run_id`` gives the newest epoch of that run; others by their number."""
    for number, name in enumerate(("one", "two"), 1):
        with ckptstore.open(tmp_path / "run", run_id=name) as repo:
            assert Run().state.restore(repo) is None
            Run(number).state.save(repo, number)
    with ckptstore.open(tmp_path / "run", run_id="one") as repo:
        run = Run()
        assert run.state.restore(repo).epoch == 1
        assert run.state.restore(repo, 2).epoch == 2


def test_the_random_numbers_of_another_rank(
    repo: ckptstore.Repository, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Ranks that all go on with those of rank 0 would drop the same units: they keep their own, and say so."""
    run = Run()
    run.state.save(repo, 1)
    monkeypatch.setattr("ckptstore.adapters.torch_parts.rank", lambda: 1)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    run.state.restore(repo)
    assert torch.equal(torch.get_rng_state(), before)
    assert "rank 0" in caplog.text


# ---- the loader -----------------------------------------------------------------------------------------------


class Noisy(torch.utils.data.Dataset):  # type: ignore[misc]
    """Samples with random numbers of all kinds."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.normal()), float(torch.rand(()))


def listed(batches: Any) -> list[Any]:
    return [[column.tolist() for column in batch] for batch in batches]


@pytest.mark.parametrize("position", [0, 1, 3, 6, 8])
def test_the_loader_goes_on_where_it_was(position: int) -> None:
    """Amid an epoch, at its last batch, and in the next one: the same batches as undisturbed."""
    loader = ResumableLoader(Noisy(), 4, seed=1)
    whole = [b[0] for _ in range(3) for b in listed(loader)]
    assert [sorted(i for b in whole[n : n + 6] for i in b) for n in (0, 6, 12)] == [list(range(23))] * 3
    assert whole[:6] != whole[6:12]
    first = ResumableLoader(Noisy(), 4, seed=1)
    endless = (batch for _ in range(3) for batch in first)
    taken = [batch[0].tolist() for batch in itertools.islice(endless, position)]
    second = ResumableLoader(Noisy(), 4, seed=9)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    rest = [b[0] for _ in range(4) for b in listed(second)]
    assert taken == whole[:position]
    assert rest[: 18 - position] == whole[position:]


def test_whoever_counts_batches_gets_every_epoch() -> None:
    """A loop that takes ``len(loader)`` batches, and never asks for one more: no epoch is empty, resumed or not."""
    loader = ResumableLoader(Noisy(), 4, seed=1)
    whole = [b[0] for _ in range(3) for b in listed(loader)]
    counted = ResumableLoader(Noisy(), 4, seed=1)
    epochs = [[batch[0].tolist() for _, batch in zip(range(6), counted, strict=False)] for _ in range(3)]
    assert [batch for epoch in epochs for batch in epoch] == whole
    state = counted.state_dict()
    assert (state["epoch"], state["through"]) == (2, True)
    again = ResumableLoader(Noisy(), 4)
    again.load_state_dict(state)
    assert listed(again) == []  # nothing is left of that epoch
    assert again.epoch == 3


def test_the_loader_and_the_global_generators() -> None:
    """Iterating draws nothing from them; in workers each sample draws its own, whatever the number of workers."""
    loader = ResumableLoader(list(range(9)), 2, seed=1)
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)
    one, two = ResumableLoader(Noisy(), 4, num_workers=1), ResumableLoader(Noisy(), 4, num_workers=2)
    all_of_it = listed(one)
    for _, batch in zip(range(2), two, strict=False):
        assert batch
    state = two.state_dict()
    assert state["samples"] == 8
    again = ResumableLoader(Noisy(), 4, num_workers=1)
    again.load_state_dict(state)
    assert listed(again) == all_of_it[2:]


@pytest.mark.parametrize("size", [1, 7, 24])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_the_batches(size: int, drop_last: bool) -> None:
    """As many for each; all samples are dealt; a position fits another number of ranks."""
    ranks = [ResumableLoader(range(size), 2, rank=r, world_size=3, drop_last=drop_last, seed=3) for r in range(3)]
    dealt = [[batch.tolist() for batch in loader] for loader in ranks]
    assert {len(batches) for batches in dealt} == {len(ranks[0])}
    if not drop_last:
        assert {n for batches in dealt for batch in batches for n in batch} == set(range(size))
    if size == 24:
        first = ResumableLoader(range(size), 2, rank=1, world_size=3, seed=3)
        next(iter(first))
        alone = ResumableLoader(range(size), 1)
        alone.load_state_dict(first.state_dict())
        taken = {n for batches in dealt for n in batches[0]}
        assert {int(n) for n in alone} == set(range(size)) - taken


def test_loaders_that_make_no_sense() -> None:
    """Refused, by the reason."""
    for wrong in ({"batch_size": 0}, {"rank": 2, "world_size": 2}, {"seed": -1}):
        with pytest.raises(InvalidArgumentError):
            ResumableLoader(range(3), **wrong)
    with pytest.raises(InvalidArgumentError, match="StatefulDataLoader"):
        ResumableLoader(iter([]))
    loader = ResumableLoader(range(8), 2)
    next(iter(loader))
    with pytest.raises(InvalidArgumentError, match="'size': 8"):
        ResumableLoader(range(9), 2).load_state_dict(loader.state_dict())
    loader.set_epoch(1)
    ResumableLoader(range(9), 2).load_state_dict(loader.state_dict())
    assert [int(n) for n in ResumableLoader(range(3), shuffle=False)] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_stateful_data_loader(repo: ckptstore.Repository) -> None:
    """The loader of torchdata: anything with ``state_dict`` and ``load_state_dict`` is a part."""
    pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata: make test-adapters")
    loaders: Any = importlib.import_module("torchdata.stateful_dataloader")

    def make() -> Any:
        return loaders.StatefulDataLoader(Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(5))

    loader = make()
    state = TrainingState(loader=loader)
    batches = iter(loader)
    next(batches), next(batches)
    state.save(repo, 1)
    rest = listed(batches)
    other = make()
    TrainingState(loader=other).restore(repo)
    assert listed(other) == rest


def test_a_url_is_no_repository() -> None:
    """Nobody would close it: the error says what to write."""
    state = adapter.TrainingState()
    acts: list[Callable[[], Any]] = [
        lambda: state.save("runs/a", 1),
        lambda: state.save_async("runs/a", 1),
        lambda: state.restore("runs/a"),
        lambda: state.preemption("runs/a").__enter__(),
    ]
    for act in acts:
        with pytest.raises(InvalidArgumentError, match=r"repo = ckptstore.open\('runs/a'\)"):
            act()
