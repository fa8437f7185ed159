"""``report``: the page, the same as JSON, and what is refused."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

import ckptstore
from tests.cli.conftest import Run, chunks_of, flip


def test_the_page_and_the_json_say_the_same(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """One file with the answer at its top; a prune is offered as a command that can be run."""
    page = tmp_path / "report.html"
    result = run("report", state_repo, "-o", page, "--keep", "KeepLast(2) | KeepBest('loss')")
    assert result.code == 0
    assert "Epoch 3" in result.out
    text = page.read_text("utf-8")
    assert "<script" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "--keep" in html.unescape(text)
    found = run("report", state_repo, "-o", page, "--json").json  # both of one moment: ages are in it
    assert found["verdict"]["text"] in html.unescape(page.read_text("utf-8"))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_names_are_text_and_not_markup(run: Run, tmp_path: Path) -> None:
    """Records, metrics and reasons come from the store: whatever they hold is shown as it is."""
    bad = "<img src=x onerror=alert(1)>"
    with ckptstore.open(tmp_path / "r") as repo:
        repo.save(1, {"m": {bad: [1.0, 2.0]}}, {bad: 1.5, "loss": 2.0, "note": "</style><script>alert(2)</script>"})
        repo.pin(1, bad)
    assert run("report", tmp_path / "r", "-o", tmp_path / "report.html").code == 0
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "<img" not in text
    assert "<script" not in text
    assert html.escape(bad) in text


@pytest.mark.parametrize("values", [(1e308, -1e308, 0.0), (5e-324, 0.0, 5e-324), (5e-324, 1e308, 1.0)])
def test_curves_of_any_finite_values(run: Run, tmp_path: Path, values: tuple[float, ...]) -> None:
    """The largest and smallest numbers that there are have their places in the chart."""
    with ckptstore.open(tmp_path / "r") as repo:
        for epoch, value in enumerate(values):
            repo.save(epoch, {"m": 1}, {"loss": value})
    assert run("report", tmp_path / "r", "-o", tmp_path / "report.html").code == 0
    [curve] = re.findall(
        r'class="curve"[^>]* d="M([^"]*)"|d="M([^"]*)"[^>]* class="curve"',
        (tmp_path / "report.html").read_text("utf-8"),
    )[:1]
    places = [float(number) for number in re.findall(r"[^ ML]+", "".join(curve))]
    assert len(places) == 6
    assert all(0 <= place <= 1000 for place in places)
    assert {places[1], places[3], places[5]} >= {0.0, 100.0}


def test_where_the_page_goes(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """Through a link, which stays one: /dev/stdout is such a link. A full disk is an error that says so."""
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "link.html").symlink_to("page.html")
    assert run("report", state_repo, "-o", tmp_path / "link.html").code == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").read_text("utf-8").startswith("<!doctype html>")
    full = run("report", state_repo, "-o", "/dev/full")
    assert full.code == 5
    assert "/dev/full could not be written: No space left on device" in full.err


def test_damage_is_shown_and_no_error(run: Run, state_repo: Path) -> None:
    """A report on a damaged repository can be made; it says what is wrong."""
    flip(chunks_of(state_repo, 3)[0])
    found = run("report", state_repo, "--json", "--verify", "full")
    assert found.code == 0
    assert "damaged" in found.out


def test_what_was_set_aside_is_not_damaged(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """A newest epoch that somebody quarantined is told as that; what ``verify`` set aside stays damaged."""
    assert run("quarantine", state_repo, 3, "--reason", "it diverged").code == 0
    found = run("report", state_repo, "--json").json
    assert found["verdict"]["level"] == "warn"
    assert "1 newer one quarantined" in found["verdict"]["text"]
    assert [(e["damaged"], e["quarantined"]) for e in found["epochs"]] == [(None, None)] * 2 + [(None, "it diverged")]
    assert run("report", state_repo, "-o", tmp_path / "report.html").code == 0
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "kept, quarantined" in text  # on the time line
    assert "it diverged" in text
    assert "0 of 3" in text
    flip(chunks_of(state_repo, 2)[0])
    assert run("verify", state_repo, "--quarantine").code == 4
    assert run("report", state_repo, "--json").json["verdict"]["level"] == "bad"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), 1),
        (("-o", "{tmp}/no/such/folder.html"), 1),
        (("-o", "{tmp}"), 1),
        (("--json", "--verify", "much"), 1),
        (("--json", "--verify", "0%"), 1),
        (("--json", "--keep", "KeepAll()"), 1),
    ],
)
def test_what_makes_no_sense(run: Run, state_repo: Path, tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    """One line says what is wrong; nothing is written."""
    before = sorted(tmp_path.rglob("*"))
    result = run("report", state_repo, *(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert result.code == code
    assert result.err.startswith("error: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_no_repository(run: Run, tmp_path: Path) -> None:
    """Nothing is made where there is nothing."""
    assert run("report", tmp_path / "nothing", "--json").code == 3
    assert not (tmp_path / "nothing").exists()
