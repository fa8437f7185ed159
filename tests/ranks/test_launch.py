"""Which launch a process belongs to, by its environment; and what is refused."""

from __future__ import annotations

import pytest

from ckptstore import InvalidArgumentError
from ckptstore.launch import launch_of, rank_of

ELASTIC = {"TORCHELASTIC_RUN_ID": "4711", "TORCHELASTIC_RESTART_COUNT": "2", "GROUP_WORLD_SIZE": "1"}
SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3"}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"TORCHELASTIC_RUN_ID": "4712"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, False),
        ({"RANK": "5", "LOCAL_RANK": "5"}, True),
    ],
)
def test_torchrun_on_one_node(change: dict[str, str], same: bool) -> None:
    """Run id and restart count make the name; ranks of one launch have the same."""
    assert (launch_of(ELASTIC) == launch_of({**ELASTIC, **change})) == same


def test_torchrun_on_several_nodes() -> None:
    """Each agent counts restarts for itself: the count is no part of the name. The default run id is no name."""
    nodes = {**ELASTIC, "GROUP_WORLD_SIZE": "2"}
    assert launch_of(nodes) == launch_of({**nodes, "TORCHELASTIC_RESTART_COUNT": "0"})
    assert launch_of(nodes) != launch_of({**nodes, "TORCHELASTIC_RUN_ID": "other"})
    assert launch_of({**nodes, "TORCHELASTIC_RUN_ID": "none"}) is None
    assert launch_of({**ELASTIC, "TORCHELASTIC_RUN_ID": "none"}) is None


def test_slurm() -> None:
    """Job, step and requeue make the name; torchrun within a job adds its own."""
    names = {
        launch_of(SLURM),
        launch_of({**SLURM, "SLURM_JOB_ID": "78"}),
        launch_of({**SLURM, "SLURM_STEP_ID": "4"}),
        launch_of({**SLURM, "SLURM_RESTART_COUNT": "1"}),
        launch_of({**SLURM, "SLURM_CLUSTER_NAME": "b"}),
        launch_of({**SLURM, **ELASTIC}),
    }
    assert len(names) == 6
    assert None not in names
    assert launch_of({**SLURM, **ELASTIC, "TORCHELASTIC_RUN_ID": "none"}) == launch_of(SLURM)


def test_nothing_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the environment does not tell, the error says what to pass."""
    for name in (*ELASTIC, *SLURM):
        monkeypatch.delenv(name, raising=False)
    assert launch_of({}) is None
    with pytest.raises(InvalidArgumentError, match=r"group=.*--rdzv-id"):
        rank_of(0, 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "4711")
    found = rank_of(0, 2)
    assert found is not None
    assert "4711" in found.group


@pytest.mark.parametrize(
    ("rank", "size", "group"),
    [
        (0, None, "g"), (None, 2, "g"), (2, 2, "g"), (-1, 2, "g"), (True, 2, "g"), (0, 2.0, "g"), (0, 70_000, "g"),
        (0, 2, ""), (0, 2, "ä"), (0, 2, "x" * 257), (0, 2, 7), (None, None, "g"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(rank: object, size: object, group: object) -> None:
    """Ranks out of range, half of a pair, names that are none."""
    with pytest.raises(InvalidArgumentError):
        rank_of(rank, size, group)


def test_one_process_needs_no_group() -> None:
    """world_size=1 is an ordinary save, with or without a name."""
    assert rank_of(0, 1) is None
    assert rank_of(0, 1, "g") is None
    assert rank_of(None, None) is None
