"""The adapter for Accelerate: a loop that is killed twice ends bit for bit as one that nobody disturbed."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptstore import EpochExistsError, EpochNotFoundError, InvalidArgumentError, Repository
from ckptstore.stores import MemoryStore
from tests.adapters.lives import KILLED, Nursery, nursery

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the frameworks
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate: make test-adapters"),
]


@pytest.fixture(scope="module")
def lives() -> Iterator[Nursery]:
    with nursery("tests.adapters.accelerate_lives") as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(lives: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Any:
    code, found = lives.live("train", url=str(tmp_path_factory.mktemp("undisturbed")), options=None)
    assert code == 0, found
    return found


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def kit() -> Any:
    """The framework and the adapter, imported when the first test needs them."""
    import accelerate
    import torch

    from ckptstore.adapters import accelerate as ours

    torch.set_num_threads(1)
    return SimpleNamespace(framework=accelerate, torch=torch, ours=ours)


@pytest.mark.kill
@pytest.mark.parametrize("place", ["folder", "s3"])
def test_killed_twice_ends_bit_identical(
    place: str, lives: Nursery, undisturbed: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """P1: killed while a state is being sent, and again right after a commit: weights and moments are the same."""
    url, options = str(tmp_path / "repository"), None
    if place == "s3":
        bucket = request.getfixturevalue("s3")
        url, options = bucket.url(), bucket.storage_options
    where = {"url": url, "options": options}
    assert lives.live("train", **where, kill=["/chunks/", 7]) == (KILLED, "")
    assert lives.live("train", **where, kill=["manifests/0", 2]) == (KILLED, "")
    code, found = lives.live("train", **where)
    assert code == 0, found
    assert found[0] == undisturbed[0]
    assert set(found[1]) >= set(undisturbed[1])  # and what the last life has resumed from
    assert found[2]


def test_two_ranks(lives: Nursery, tmp_path: Path, port: int) -> None:
    """The random numbers of both ranks are in the epoch, and each goes on with its own."""
    found = {}
    for life, (place, epochs) in enumerate([("whole", 2), ("parts", 1), ("parts", 2)]):
        code, found[life] = lives.live("two_ranks", url=str(tmp_path / place), port=port, epochs=epochs)
        assert code == 0, found[life]
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= set(found[2][2])
    assert found[2] == found[0]


def test_what_fails_on_rank_zero_fails_everywhere(lives: Nursery, port: int) -> None:
    """No rank goes on as if it had been saved, and none waits for ever."""
    code, found = lives.live("rank_zero_fails", port=port)
    assert code == 0, found
    assert found[0].startswith("EpochExistsError: ")
    assert found[1] == f"TransactionError: rank 0 could not save: {found[0]}"


def test_there_and_back(kit: Any, tmp_path: Path) -> None:
    """The newest or a step, with its metadata, into what is registered; nothing is left in the scratch folder."""

    class Counter:
        value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    repo = Repository(MemoryStore())
    accelerator = kit.framework.Accelerator(cpu=True)
    layer, counter = accelerator.prepare(kit.torch.nn.Linear(2, 2)), Counter()
    accelerator.register_for_checkpointing(counter)
    states = kit.ours.AcceleratorStates(accelerator, repo, scratch=tmp_path)
    assert states.load_state() is None
    weights = {}
    for step in (1, 2):
        with kit.torch.no_grad():
            layer.weight += 1
        counter.value, weights[step] = step, layer.weight.detach().clone()
        states.save_state(step, {"loss": 1 / step})
    states.settle()
    assert repo.epochs() == [1, 2]
    again = kit.ours.AcceleratorStates(accelerator, repo, scratch=tmp_path)
    for chosen, wanted in ((None, 2), (1, 1), (None, 2)):
        ckpt = again.load_state(chosen)
        assert (ckpt.epoch, ckpt.metadata["loss"], counter.value) == (wanted, 1 / wanted, wanted)
        assert kit.torch.equal(layer.weight, weights[wanted])
    assert os.listdir(tmp_path) == []
    with pytest.raises(EpochNotFoundError):
        again.load_state(7)
    fresh = kit.ours.AcceleratorStates(accelerator, repo, scratch=tmp_path, background=False)
    with pytest.raises(EpochExistsError):
        fresh.save_state(1)
    assert os.listdir(tmp_path) == []


def test_naming_by_accelerate_is_refused(kit: Any, tmp_path: Path) -> None:
    """Then the state would be written elsewhere."""
    settings = kit.framework.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = kit.framework.Accelerator(cpu=True, project_config=settings)
    with pytest.raises(InvalidArgumentError, match="automatic_checkpoint_naming"):
        kit.ours.AcceleratorStates(accelerator, Repository(MemoryStore()))


def test_a_url_will_do(kit: Any, tmp_path: Path) -> None:
    """In the place of a repository, as with the adapters of other frameworks."""
    states = kit.ours.AcceleratorStates(kit.framework.Accelerator(cpu=True), str(tmp_path / "repository"))
    states.save_state(1)
    states.settle()
    assert states.repo.epochs() == [1]
