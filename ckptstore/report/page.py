"""The page: one file of HTML with its style in it. No script, no font, no picture; the network is asked for nothing."""

from __future__ import annotations

from importlib.resources import files

from ckptstore.manifest import writer_version
from ckptstore.report import sections, verdict
from ckptstore.report.facts import Facts
from ckptstore.report.markup import Html, esc, join, tag, time_tag

# Nothing may be loaded and nothing may run, whatever slipped in: the browser sees to that as well.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_LINKS = (
    *(("timeline", "Time line"), ("prune", "What can go"), ("health", "Health"), ("space", "Space")),
    *(("metrics", "Metrics"), ("records", "Records"), ("arrays", "Arrays"), ("pins", "Pins"), ("epochs", "Epochs")),
)


def page(facts: Facts) -> str:
    """The report as HTML."""
    damaged = facts.damaged
    parts: list[Html] = []
    if facts.rows:
        parts.append(sections.time_line(facts, damaged))
    parts += [verdict.prune(facts), verdict.health(facts, damaged), sections.space(facts)]
    if facts.rows:
        parts += [sections.metrics(facts), sections.records(facts), sections.arrays(facts)]
    parts.append(verdict.pins(facts))
    if facts.rows:
        parts.append(sections.epochs(facts, damaged))
    body = join(
        [
            tag("header", *_title(facts), verdict.headline(facts, damaged), _contents(parts)),
            tag("main", *parts),
            tag(
                "footer",
                tag("p", f"Made by {writer_version()}. Sizes are in units of 1024. Times are the store's, in UTC."),
            ),
        ],
        "\n",
    )
    return _document(f"{_name(facts)}: checkpoints", body)


def _title(facts: Facts) -> list[Html]:
    made = join(["made ", time_tag(facts.made), f" · repository {facts.repository[:8]}"])
    return [tag("h1", esc(_name(facts))), tag("p", tag("span", esc(facts.url, 500)), " · ", made, class_="where")]


def _name(facts: Facts) -> str:
    return facts.url.rstrip("/").rpartition("/")[2] or facts.url


def _contents(parts: list[Html]) -> Html:
    there = [(name, title) for name, title in _LINKS if any(f' id="{name}"' in part for part in parts)]
    return tag("nav", *(tag("a", title, href=f"#{name}") for name, title in there), aria_label="Contents")


def _document(title: str, body: Html) -> str:
    style = files("ckptstore.report").joinpath("style.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="robots" content="noindex">\n<link rel="icon" href="data:,">\n'
        f"<title>{esc(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
