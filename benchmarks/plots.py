"""Pictures of a run, as SVG for the documents and PNG beside the results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.claims import OURS, size
from benchmarks.samples import Run, Sample, median
from benchmarks.tables import PLACES, TITLES

WORKS = ("save", "restore", "partial", "again", "stall")
OUR_COLOUR, LIMIT_COLOUR, COLOUR = "#1b7f5c", "#b8b8b8", "#5b7fa6"


def available() -> str:
    """Why there can be no pictures; empty if there can."""
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed"
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "ckptstore", "font.size": 9, "svg.fonttype": "none"})
    return ""


def draw(run: Run, folder: Path, kinds: tuple[str, ...] = ("svg",)) -> list[Path]:
    """Draw all pictures into a folder; the files of the first kind, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, figure in _figures(run):
        for kind in kinds:
            # Without a date the same samples give the same file.
            figure.savefig(folder / f"{name}.{kind}", metadata={"Date": None} if kind == "svg" else None, dpi=110)
        made.append(folder / f"{name}.{kinds[0]}")
        _close(figure)
    return made


def _figures(run: Run) -> Iterator[tuple[str, Any]]:
    for where in ("folder", "s3"):
        for work in WORKS:
            found = [s for s in run.select(work=work, where=where) if s.durable]
            shown = next((s for s in found if s.state in ("adam", "lora")), None)
            if shown is not None:
                samples = [s for s in found if (s.state, s.mib) == (shown.state, shown.mib)]
                yield f"{work}-{where}", _bars(samples, run)
    sizes = [s for s in run.select(rival=OURS, state="dense-fp32") if s.work in ("save", "restore")]
    if len({s.mib for s in sizes}) > 1:
        yield "memory", _memory(sizes)


def _bars(samples: list[Sample], run: Run) -> Any:
    from matplotlib import pyplot

    names = list(dict.fromkeys(s.rival for s in samples))[::-1]
    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.32 * len(names)), layout="constrained")
    for at, name in enumerate(names):
        times = [s.seconds for s in samples if s.rival == name]
        middle = median([s for s in samples if s.rival == name])
        limit = run.rivals.get(name, {}).get("limit")
        colour = OUR_COLOUR if name.startswith(OURS) else LIMIT_COLOUR if limit else COLOUR
        axes.barh(at, middle, color=colour)
        axes.plot([min(times), max(times)], [at, at], color="black", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("seconds: median, smallest and largest")
    one = samples[0]
    axes.set_title(f"{TITLES[one.work]}, {PLACES[one.where]}, {one.state} {size(one.mib)}, durable", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _memory(samples: list[Sample]) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 2.6), layout="constrained")
    for work, where in dict.fromkeys((s.work, s.where) for s in samples):
        mine = [s for s in samples if (s.work, s.where) == (work, where)]
        mibs = sorted({s.mib for s in mine})
        peaks = [median([s for s in mine if s.mib == mib], "peak") / 2**20 for mib in mibs]
        axes.plot([mib / 1024 for mib in mibs], peaks, marker="o", label=f"{work}, {PLACES[where]}")
    axes.axhline(256, color="black", linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GiB of state")
    axes.set_ylabel("MiB above it")
    axes.set_title("Peak memory of ckptstore", loc="left")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _close(figure: Any) -> None:
    from matplotlib import pyplot

    pyplot.close(figure)
