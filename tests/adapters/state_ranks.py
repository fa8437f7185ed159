"""What the tests of a sharded TrainingState start: the jobs of ``dcp_ranks.py``, and these."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import torch
import torch.distributed as dist

import ckptstore
from ckptstore.adapters.torch import ResumableLoader, TrainingState
from ckptstore.testing import Fault
from tests.adapters.dcp_ranks import Net, attempt, case, different, faulty, main, step, training, whole

Run = tuple[TrainingState, Any, Any, Any]


def run(seed: int, model: Any = None, **parts: Any) -> Run:
    """A training with all that there is: FSDP2 unless a model is given, Adam, a schedule, a loader, generators."""
    model, optimizer = training(seed) if model is None else (model, torch.optim.AdamW(model.parameters(), amsgrad=True))
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    loader = ResumableLoader(list(range(40)), batch_size=4, shuffle=True, seed=3)
    own = torch.Generator().manual_seed(seed + 1)
    state = TrainingState(model=model, optimizer=optimizer, schedule=schedule, loader=loader, own=own, **parts)
    torch.manual_seed(seed * 100 + (dist.get_rank() if dist.is_initialized() else 0))
    return state, model, optimizer, schedule


def train(one: Run, repo: Any, last: int, every: int = 3) -> list[Any]:
    """Steps that draw from all generators; what was drawn and read, of this rank."""
    state, model, optimizer, schedule = one
    drawn = []
    batches = iter(state._parts["loader"].thing)
    while state.step < last:
        state.step += 1
        batch = next(batches).tolist()
        noise = float(torch.rand(())), float(torch.rand((), generator=state._parts["own"].thing))
        step(model, optimizer, state.step)
        schedule.step()
        state.extra["last"] = [state.step, batch]
        drawn.append([batch, noise, schedule.get_last_lr()])
        if state.step % every == 0:
            state.save(repo, state.step, {"loss": 0.5})
    return drawn


@case
def undisturbed(url: str, expected: str, last: int, options: dict[str, Any] | None = None) -> list[Any]:
    """All steps in one go."""
    one = run(seed=1)
    drawn = train(one, ckptstore.open(url, storage_options=options), last)
    keep(one, expected)
    return drawn


@case
def resumed(
    url: str,
    expected: str,
    last: int,
    epoch: int | None = None,
    onto: str | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """From a checkpoint to the last step, and what differs from the run that nobody disturbed."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckptstore").addHandler(handler)
    one = run(seed=9)
    found = one[0].restore(ckptstore.open(url, storage_options=options), epoch)
    assert found is not None
    begun = [found.epoch, one[0].step, one[0].extra["last"][0]]
    drawn = train(one, ckptstore.open(onto or url, storage_options=options), last)
    state = whole(one[1], one[2])
    wrong = different(state, torch.load(expected, weights_only=False)) if dist.get_rank() == 0 else []
    return {"begun": begun, "drawn": drawn, "wrong": wrong, "heard": heard}


def keep(one: Run, path: str) -> None:
    state = whole(one[1], one[2])
    if dist.get_rank() == 0:
        torch.save(state, path)


@case
def failing(url: str, epoch: int, doomed: int) -> Any:
    """The store of one rank refuses its chunks."""
    mine = dist.get_rank() == doomed
    fault = Fault("put", "chunks/", error=lambda: ckptstore.AccessError("403: this rank may not write"))
    one = run(seed=epoch)
    return attempt(lambda: one[0].save(faulty(url, [fault] if mine else []), epoch))


@case
def misfits(url: str) -> dict[str, Any]:
    """Another structure, strict and not."""
    repo = ckptstore.open(url)
    state, model, *_ = run(seed=7, more=torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)])))
    before = float(model.scale._local_tensor.sum())
    said = attempt(lambda: state.restore(repo, 3))
    assert float(model.scale._local_tensor.sum()) == before
    found = state.restore(repo, 3, strict=False)
    assert found is not None
    return {"strict": said, "unrestored": list(state.unrestored), "step": state.step}


@case
def told_to_end(url: str, victim: int) -> Any:
    """One rank is told to end: all of them save, and it ends."""
    one = run(seed=1)
    repo = ckptstore.open(url)
    with one[0].preemption(repo, grace=30) as border:
        for number in range(1, 6):
            step(one[1], one[2], number)
            one[0].step = number
            if number == 3 and dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGTERM)
            border(number)
            if repo.epochs():
                break
    return repo.epochs()


def alone(url: str, expected: str, epoch: int) -> list[str]:
    """In one process, without any group and without sharding: what differs."""
    state, model, optimizer, _ = run(9, Net())
    assert state.restore(ckptstore.open(url), epoch) is not None
    found: list[str] = different(whole(model, optimizer), torch.load(expected, weights_only=False))
    return found


if __name__ == "__main__":
    main()
