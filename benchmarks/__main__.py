"""``python -m benchmarks``: measure side by side, judge the goals, and write the documents from a result."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmarks import plots, profiles, report, scale
from benchmarks.rivals import ALL, RANKS
from benchmarks.runner import Runner, machine
from benchmarks.samples import Run, read
from benchmarks.sharded import split_name
from benchmarks.states import ABOUT
from benchmarks.works import WORKS

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).resolve().parents[1] / "docs"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "profile",
        nargs="?",
        default="quick",
        help="quick (default), full, dcp (many ranks), report RESULT.json, or scale (see `scale --help`)",
    )
    parser.add_argument("result", nargs="?", type=Path, help="of report: the JSON file of a run")
    parser.add_argument("--only", action="append", default=[], metavar="WORK", help=f"one of {', '.join(WORKS)}")
    parser.add_argument("--state", action="append", default=[], help=f"one of {', '.join(ABOUT)}, epochs")
    parser.add_argument("--rival", action="append", default=[], help="a part of a name; ckptstore always takes part")
    parser.add_argument("--where", action="append", default=[], choices=("folder", "s3", "memory"))
    parser.add_argument("--rounds", type=int, help="how often each is measured, in place of the profile's number")
    parser.add_argument("--mib", type=int, help="size of the states, in place of the profile's")
    parser.add_argument("--folder", help="measure on this folder's disk (default: that of temporary files)")
    parser.add_argument("--json", type=Path, help="the result (default: benchmarks/results/PROFILE.json)")
    parser.add_argument("--docs", type=Path, default=DOCS, help="of report: the folder to write to (default: docs)")
    parser.add_argument("--list", action="store_true", help="list the rivals and leave")
    given = parser.parse_args(argv)
    if given.profile not in (*profiles.PROFILES, "report") or (given.profile == "report") != (given.result is not None):
        parser.error("choose quick, full, dcp, or report RESULT.json")
    if not {*given.only} <= {*WORKS} or not {split_name(name)[0] for name in given.state} <= {*ABOUT, "epochs"}:
        parser.error(f"--only is one of {', '.join(WORKS)}; --state one of {', '.join(ABOUT)}, epochs")
    if (given.rounds or 1) < 1 or (given.mib or 1) < 1:
        parser.error("--rounds and --mib are at least 1")
    return given


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write what was asked for. 1 if a measurement failed."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["scale"]:
        return scale.main(words[1:])
    given = arguments(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    if given.list:
        for kind in (*ALL.values(), *RANKS.values()):
            reason = kind.unavailable()
            console.print(f"{kind.name}: {reason or kind.about}", markup=False, highlight=False)
        return 0
    if given.profile == "report":
        try:
            run = read(given.result)
        except (OSError, ValueError, TypeError, KeyError) as error:
            console.print(f"{given.result} is no result of a run: {error}", markup=False, highlight=False)
            return 1
        reason = report.write(run, given.docs)
        console.print(f"wrote {given.docs / 'benchmarks.md'}" + (f"; no pictures: {reason}" if reason else ""))
        return 0
    return _measure(given, console, sys.argv[1:] if argv is None else argv)


def _measure(given: argparse.Namespace, console: Console, argv: list[str]) -> int:
    groups = profiles.only(profiles.PROFILES[given.profile](), given.only, given.state, given.rival, given.where)
    groups = profiles.sized(groups, given.rounds, given.mib)
    if not groups or any(all(name not in known for known in (*ALL, *RANKS)) for name in given.rival):
        console.print("nothing in this profile fits what was asked for: see --list, and the profile full")
        return 2
    result = Run(given.profile, machine(), shlex.join(["python", "-m", "benchmarks", *argv]))
    path = given.json or RESULTS / f"{given.profile}.json"
    begun = time.monotonic()
    try:
        with Runner(result, console, given.folder) as runner:
            runner.measure(groups)
    finally:  # what was measured until Ctrl-C is worth keeping
        result.seconds = round(time.monotonic() - begun, 1)
        result.write(path)
    if not plots.available():
        plots.draw(result, path.with_suffix(""), ("png", "svg"))
    report.show(result, console)
    console.print(f"{len(result.samples)} measurements in {result.seconds / 60:.1f} minutes; wrote {path}")
    return int(any(trouble.error for trouble in result.troubles))


if __name__ == "__main__":
    sys.exit(main())
