"""The benchmark harness: it measures, it compares what comes back, and its verdicts follow from its samples."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ckptstore.stores.reserve import SIZE

pytest.importorskip("torch.nn")

from rich.console import Console

from benchmarks import goals_dcp, plots, process, report, states, works
from benchmarks.claims import MISSED, REACHED, SHOWN, UNKNOWN
from benchmarks.goals import GOALS, claims
from benchmarks.losses import losses
from benchmarks.profiles import Group, dcp, full, only, quick, sized
from benchmarks.rivals import ALL, Place, Rival
from benchmarks.rivals.files import TorchSaveSynced
from benchmarks.runner import Runner
from benchmarks.samples import Job, Run, Sample, pairs, read
from benchmarks.tables import table, tables

ROOT = Path(__file__).parents[1]
MIB = 2**20
OURS = "ckptstore"


# ---- a made-up run ---------------------------------------------------------------------------------------------


def sample(work: str, rival: str, seconds: float, **more: Any) -> Iterator[Sample]:
    """Three rounds around ``seconds``."""
    values: dict[str, Any] = {"where": "folder", "state": "adam", "mib": 256, "durable": True, "nbytes": 256 * MIB}
    values |= {"peak": 0, "cpu": seconds, **more}
    for number, factor in enumerate((0.9, 1.0, 1.2), 1):
        yield Sample(work=work, rival=rival, round=number, seconds=seconds * factor, **values)


def facts_of_save(extra: int) -> dict[str, float]:
    """What a save tells of itself: ``extra`` requests beyond its chunks and records."""
    verbs = {f"verbs {verb}": 0.0 for verb in ("get", "info", "list", "delete")}
    return {"verbs": 13.0 + extra, "verbs put": 13.0, "chunks sent": 10.0, "chunks": 10.0, "records": 3.0, **verbs}


def made_up(bad: bool) -> Run:
    """A run in which every goal is well reached, or every promise is broken."""
    slow = 20.0 if bad else 0.5
    found: list[Sample] = []
    for state in ("adam", "dense-fp32", "random"):
        for where, clients in (("folder", ["plain file"]), ("s3", ["s3fs, 8 threads", "obstore, 8 threads"])):
            kind: dict[str, Any] = {"where": where, "state": state}
            for work in ("save", "restore"):
                facts = facts_of_save(40 if bad else 5) if work == "save" else {}
                found += sample(work, OURS, slow, peak=(300 if bad else 90) * MIB, facts=facts, **kind)
                found += sample(work, "ckptstore, codec raw", slow, **kind)
                for client in clients:
                    found += sample(work, client, 1.0, **kind)
    for name in ("torch.save + fsync", "torch DCP + fsync"):
        found += sample("restore", name, 3.0)
    for work in ("save", "restore"):
        found += sample(work, "torch DCP, FsspecWriter", 5.0, where="s3")
        found += sample(work, OURS, 9.0, state="dense-fp32", mib=4096, peak=(900 if bad else 100) * MIB, facts={})
        found += sample(work, OURS, 3.0 if bad else 1.5, state="small", mib=64, facts={})
        found += sample(work, OURS, 1.0, state="one", mib=64, facts={})
    found += sample("stall", OURS, slow, facts={"until durable": 1.0})
    found += sample("stall", "memcpy", 1.0, durable=False, facts={"until durable": 1.0})
    for state in ("dense-fp32", "dense-bf16"):
        coded: dict[str, Any] = {"where": "memory", "state": state, "durable": False, "facts": {"decode": 0.1}}
        found += sample("codec", OURS, 1.0 if bad else 0.2, stored=250 * MIB if bad else 160 * MIB, **coded)
        found += sample("codec", "ZipNN", 0.4, stored=160 * MIB, **coded)
    moved = {"sent": 5e6 if bad else 2e6, "changed": 2.1e6}
    found += sample("again", OURS, slow, state="lora", facts=moved)
    found += sample("again", "blake3", 1.0, state="lora", durable=False)
    for where in ("folder", "s3"):
        seen = {"verbs": 30.0 if bad else 3.0, "pages beyond the first": 9.0 if where == "s3" else 0.0}
        found += sample("latest", OURS, 0.1, where=where, state="epochs", mib=10_000, facts=seen)
    cost = 1.5 if bad else 1.01
    found += sample(
        "guards",
        OURS,
        cost,
        facts={"unguarded": 1.0, "ratio": cost, "ratio of CPU": cost, "low": 0.99, "high": 1.6, "pairs": 24},
    )
    rivals = {name: {"about": "made up", "durable": True, "limit": False} for name in {s.rival for s in found}}
    return Run("made-up", {"cores": 2}, "python -m benchmarks", 60, [], dict(sorted(rivals.items())), found, [])


# ---- goals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("goal", GOALS)
def test_a_goal_is_reached_or_not_by_its_samples(goal: int) -> None:
    """Good samples reach every claim of the goal; bad ones reach none that could be missed."""
    good, bad = (list(GOALS[goal](made_up(bad=bad))) for bad in (False, True))
    assert good
    assert {claim.verdict for claim in good} <= {REACHED, SHOWN, UNKNOWN}, good
    assert REACHED in {claim.verdict for claim in good}
    missed = [claim for claim in bad if claim.verdict == MISSED]
    reached = [claim.what for claim in good if claim.verdict == REACHED]
    assert [claim.what for claim in bad if claim.verdict == REACHED and goal != 8] == []
    assert len(missed) >= (len(reached) if goal != 8 else 2)


def made_up_dcp(seconds: float) -> Run:
    """A run of the profile ``dcp`` in which we take ``seconds``, and others one."""
    found: list[Sample] = []
    for group in dcp():
        for name in group.rivals:
            kind: dict[str, Any] = {"where": group.where, "state": group.state, "facts": {"until durable": 1.0}}
            for work in group.works:
                found += sample(work, name, seconds if name == OURS else 1.0, **kind)
    rivals = {name: {"about": "made up", "durable": True, "limit": False} for name in {s.rival for s in found}}
    return Run("dcp", {"cores": 2}, "python -m benchmarks dcp", 60, [], dict(sorted(rivals.items())), found, [])


@pytest.mark.parametrize("goal", goals_dcp.GOALS)
def test_a_goal_of_dcp_is_reached_or_not_by_its_samples(goal: int) -> None:
    """Three times as fast reaches all, a little slower none; a run of that profile has these goals and no others."""
    good, bad = ([c for c in claims(made_up_dcp(seconds)) if c.goal == goal] for seconds in (0.3, 1.1))
    assert {claim.verdict for claim in good} <= {REACHED, SHOWN}
    assert {claim.verdict for claim in bad} <= {MISSED, SHOWN}
    assert len([claim for claim in good if claim.verdict == REACHED]) == 4
    assert [claim.what for claim in good] == [claim.what for claim in bad]
    assert {claim.goal for claim in claims(made_up_dcp(1.0))} == set(goals_dcp.GOALS)


@pytest.mark.parametrize(("goals", "goal"), [(goals, goal) for goals in (GOALS, goals_dcp.GOALS) for goal in goals])
def test_nothing_is_reached_without_samples(goals: dict[int, Any], goal: int) -> None:
    """Every goal has claims in an empty run, and each of them is "not measured" with a reason."""
    found = list(goals[goal](Run("empty", {})))
    assert found
    assert {claim.verdict for claim in found} == {UNKNOWN}
    assert all(claim.detail for claim in found)


def test_the_verdict_is_that_of_pairs_within_a_round() -> None:
    """A slow moment that hits both rivals of a round does not decide; an unpaired sample does not count."""
    ours = list(sample("save", OURS, 0.6))
    theirs = [dataclasses.replace(s, seconds=1.0 * s.seconds / 0.6) for s in ours]
    ours[1], theirs[1] = (dataclasses.replace(s[1], seconds=s[1].seconds * 50) for s in (ours, theirs))
    assert pairs(ours, theirs) == pytest.approx([0.6] * 3)
    assert pairs(ours, theirs[:1]) == pytest.approx([0.6])


def test_a_rival_that_is_missing_is_named() -> None:
    """A goal that needs a rival which is not installed says so."""
    groups = [Group(("codec",), "memory", "random", 4, ("ckptstore", "nothing"), 1)]
    run = Run("x", {})
    assert groups[0].states == ("random",)
    run.troubles.append(_trouble("codec", "ZipNN", "not installed: zipnn"))
    run.samples += [s for s in made_up(bad=False).samples if s.work == "codec" and s.rival == OURS]
    found = [claim for claim in GOALS[6](run) if "ZipNN" in claim.what]
    assert {claim.verdict for claim in found} == {UNKNOWN}
    assert {claim.detail for claim in found} == {"ZipNN: not installed: zipnn"}


def _trouble(work: str, rival: str, reason: str) -> Any:
    from benchmarks.samples import Trouble

    return Trouble(work, "folder", "adam", rival, reason, error=False)


def test_losses_are_found_in_the_samples() -> None:
    """A slower row, a larger peak and a missed goal are each told; a run that is better everywhere has none of ours."""
    told = "\n".join(losses(made_up(bad=True)))
    assert "Save (folder), adam, 0.25 GiB: takes 20.0 times as long as plain file" in told
    assert "Goal 1 is not reached" in told
    assert "needs +315 MB of memory" in told
    assert not [line for line in losses(made_up(bad=False)) if line.startswith("Goal")]


# ---- tables and the page ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [False, True])
def test_durable_and_other_rows_never_share_a_table(bad: bool) -> None:
    """Each table holds rows of one durability, and says which; a mixture is refused."""
    run = made_up(bad)
    kinds = {name: {s.durable for s in run.select(work="stall", rival=name)} for name in (OURS, "memcpy")}
    assert kinds == {OURS: {True}, "memcpy": {False}}
    for durable in (True, False):
        for one in tables(run, durable=durable):
            assert one.durable == durable
            work = "codec" if one.title.startswith("Codec") else ""
            assert work or one.title.endswith(", durable" if durable else ", not durable")
    with pytest.raises(ValueError, match="never durable and other rows together"):
        table(run.select(work="stall"), run)


def test_the_page_is_made_from_the_json_alone(tmp_path: Path) -> None:
    """The same result file gives the same page and the same pictures, byte for byte."""
    run = made_up(bad=True)
    run.write(tmp_path / "result.json")
    made = []
    for name in ("a", "b"):
        again = read(tmp_path / "result.json")
        assert again == run
        report.write(again, tmp_path / name)
        made.append({path.name: path.read_bytes() for path in sorted((tmp_path / name).rglob("*")) if path.is_file()})
    assert made[0] == made[1]
    assert json.loads(made[0]["benchmarks.json"]) == json.loads((tmp_path / "result.json").read_text())
    page = made[0]["benchmarks.md"].decode()
    assert "## Where we lose" in page
    assert "**not reached**" in page
    assert page.index("## Durable") < page.index("## Not durable")
    if not plots.available():
        assert "(benchmarks/save-folder.svg)" in page


def test_a_run_of_dcp_is_a_part_of_the_page(tmp_path: Path) -> None:
    """Its tables and goals come with those of the other run, whichever of the two is written last."""
    for runs in ((made_up(bad=False), made_up_dcp(2.0)), (made_up_dcp(2.0), made_up(bad=False))):
        (tmp_path / "benchmarks.json").unlink(missing_ok=True)
        made_up(bad=True).write(tmp_path / "benchmarks.json")
        for run in runs:
            report.write(run, tmp_path)
        page = (tmp_path / "benchmarks.md").read_text()
        assert "**Save, S3, adam on 4 ranks, 0.25 GiB, durable**" in page
        assert "Goal 1 is not reached: save / that with FileSystemWriter + fsync, folder, adam on 1 rank" in page
        assert "**Save, folder, adam, 0.25 GiB, durable**" in page
        assert "0 not reached" in page


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    """A result that an older harness wrote is not read as if it meant the same."""
    (tmp_path / "old.json").write_text('{"version": 1}')
    with pytest.raises(ValueError, match="measure again"):
        read(tmp_path / "old.json")


# ---- measuring -------------------------------------------------------------------------------------------------


class Here(Runner):
    """Measures in this process, so that a rival of the test can take part."""

    def _run(self, job: Job) -> Any:
        sent: list[Any] = []

        class Pipe:
            send = staticmethod(sent.append)
            close = staticmethod(lambda: None)

        process.run(Pipe(), job)  # type: ignore[arg-type]
        return sent[0]


class Liar(TorchSaveSynced):
    """Gives back other bytes than were saved, from the second round on."""

    name = "liar"
    works: ClassVar[tuple[str, ...]] = ("save", "restore")
    restored = 0

    def restore(self, target: Any) -> Any:
        state = super().restore(target)
        Liar.restored += 1
        if Liar.restored > 2:
            states.tensors(state)[0].view(-1)[7] += 1
        return state


def test_other_bytes_are_an_error_and_give_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rival that restores other bytes is reported as failed, and its earlier rounds are not shown either."""
    liar: type[Rival] = Liar
    monkeypatch.setitem(ALL, "liar", liar)
    run = Run("x", {})
    with Here(run, Console(quiet=True)) as runner:
        runner.measure([Group(("save", "restore"), "folder", "random", 4, (OURS, "liar"), 2)])
    assert {s.rival for s in run.samples} == {OURS}
    assert len(run.samples) == 4
    assert [(t.rival, t.error) for t in run.troubles] == [("liar", True)]
    assert "restored other bytes than were saved" in run.troubles[0].reason


def test_a_measurement_measures(tmp_path: Path) -> None:
    """Time, bytes on the store, memory and requests of a save are those of the save."""
    found = works.save(Job("save", "random", 8, OURS, Place(str(tmp_path / "x"))))
    assert found.seconds > 0
    assert found.nbytes == 8 * MIB
    assert found.stored == sum(p.stat().st_size for p in (tmp_path / "x").rglob("*") if p.is_file())
    assert 8 * MIB <= found.stored - SIZE < 8.1 * MIB  # beside the reserve for full disks
    assert found.facts["verbs"] >= found.facts["chunks sent"] + found.facts["records"] + 1
    held: list[bytearray] = []
    # More than malloc ever keeps for later: memory that this process had before would not count.
    cost = process.measured(lambda: held.append(bytearray(b"x") * (128 * MIB)))
    assert 127 * MIB < cost.peak < 180 * MIB


def test_states_are_the_same_each_time() -> None:
    """A state is the same in every process, and no two chunks of a scaled state are equal."""
    first, second = (states.build("dense-fp32", 8) for _ in range(2))
    assert states.digest(first) == states.digest(second)
    assert states.size(first) == 8 * MIB
    chunks = {states.digest(part) for part in states.parts(first, MIB)}
    assert len(chunks) == 8
    assert states.change("lora", lora := states.build("lora", 8)) == pytest.approx(0.01 * states.size(lora), rel=0.02)


def test_profiles_touch_every_goal() -> None:
    """quick and full take all works that the goals read; a selection keeps what a work needs."""
    for groups in (quick(), full()):
        taken = {work for group in groups for work in group.works}
        assert taken >= {"save", "restore", "stall", "again", "codec", "latest"}
        assert {group.where for group in groups} == {"folder", "s3", "memory"}
    chosen = only(quick(), ["restore"], ["adam"], ["torch.save"], ["folder"])
    assert [(group.works, group.rivals) for group in chosen] == [(("save", "restore"), (OURS, "torch.save + fsync"))]
    assert {(group.rounds, group.mib) for group in sized(chosen, 1, 8)} == {(1, 8)}


def test_ranks_are_measured_together(tmp_path: Path) -> None:
    """Two ranks share a state, save it, and load the same bytes; the sample is of both together."""
    run = Run("dcp", {})
    state = "adam on 2 ranks"
    groups = [
        Group(("save", "restore", "stall"), "folder", state, 8, (OURS,), 1),
        Group(("save",), "folder", state, 8, ("FileSystemWriter + fsync",), 1),
    ]
    with Runner(run, Console(quiet=True), str(tmp_path)) as runner:
        runner.measure(groups)
    assert run.troubles == []
    assert [(s.work, s.rival) for s in run.samples] == [
        *((work, OURS) for work in ("save", "restore", "stall")),
        ("save", "FileSystemWriter + fsync"),
    ]
    scalars = sum(t.nbytes for t in states.tensors(states.build("adam", 8)) if not t.dim())
    assert {s.nbytes for s in run.samples} == {run.states[0]["nbytes"] + scalars}  # which each rank has
    stored = {s.rival: s.stored for s in run.samples if s.work == "save"}
    assert 0.5 < stored[OURS] / run.states[0]["nbytes"] < 1
    assert all(s.seconds > 0 and s.cpu > 0 for s in run.samples)


@pytest.mark.slow
def test_the_harness_runs_end_to_end(tmp_path: Path) -> None:
    """A tiny run from the command line: samples, a verdict for each goal, a result file, a page."""
    result = tmp_path / "tiny.json"
    tiny = ["--mib", "8", "--rounds", "1", "--state", "dense-fp32", "--state", "lora", "--state", "random"]
    places = ["--folder", str(tmp_path), "--json", str(result)]
    line = [sys.executable, "-m", "benchmarks", "quick", *tiny, *places]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = read(result)
    assert {(s.work, s.where) for s in run.samples} >= {
        ("save", "folder"), ("restore", "folder"), ("save", "s3"), ("restore", "s3"), ("again", "folder"),
        ("codec", "memory"),
    }  # fmt: skip
    assert {claim.goal for claim in claims(run)} == set(GOALS)
    assert [t for t in run.troubles if t.error] == []
    assert all(s.seconds > 0 for s in run.samples)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("ckptstore-bench-")] == []
    line = [sys.executable, "-m", "benchmarks", "report", str(result), "--docs", str(tmp_path / "docs")]
    subprocess.run(line, cwd=ROOT, capture_output=True, timeout=60, check=True)
    assert "## Goals" in (tmp_path / "docs" / "benchmarks.md").read_text()
