"""What happens to tensors after ``save_async`` has returned never reaches the checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.background.helpers import Gate
from tests.repository.helpers import assert_same, open_repo

pytest.importorskip("torch.nn")  # a folder of the tests is called torch, and would be found by that name
import torch


def tensors() -> dict[str, Any]:
    torch.manual_seed(3)
    base = torch.randn(60, 70)
    half = torch.randn(50, dtype=torch.complex64)
    return {
        "plain": base.clone(),
        "transposed": base.t(),
        "strided": base[::2, 3::5],
        "expanded": torch.arange(3).expand(4, 3),
        "step": torch.tensor(5.0),
        "empty": torch.empty(0, 3),
        "bf16": torch.randn(1000).bfloat16(),
        "float8": torch.randn(100).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "conjugated": half.conj(),
        "imaginary": torch.randn(20, dtype=torch.complex128).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(30)),
        "tied": [base, base],
        "big": torch.randn(700_000),
    }


def test_tensors_do_not_leak() -> None:
    """The same for tensors: strided, lazily conjugated or negated, tied, of every width."""
    state = {"all": tensors()}
    expected = {"all": {key: _copied(value) for key, value in state["all"].items()}}
    with Gate("") as gate:
        gate.opened.set()
        repo = open_repo(gate.store)
        gate.opened.clear()
        handle = repo.save_async(1, state)
        with torch.no_grad():
            for value in [v for v in state["all"].values() if not isinstance(v, list)]:
                if all(value.stride()) and value.numel():
                    value.copy_(torch.zeros_like(value))
        gate.opened.set()
        found = handle.result().load()
    assert_same(found, expected)
    assert found["all"]["tied"][0] is found["all"]["tied"][1]


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.detach().resolve_conj().resolve_neg().clone().contiguous()


def test_training_of_a_real_model() -> None:
    """Model and optimizer that train on: what is loaded is the state of the moment of the call."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.ReLU(), torch.nn.Linear(40, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    with Gate() as gate:
        repo = open_repo(gate.store)
        for epoch in range(3):
            _train(model, optimizer)
            gate.opened.clear()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": {"number": epoch}}
            expected = copy.deepcopy(state)
            handle = repo.save_async(epoch, state)
            _train(model, optimizer)
            gate.opened.set()
            assert_same(handle.result().load(), expected)


def _train(model: Any, optimizer: Any) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
