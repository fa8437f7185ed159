"""``ckptstore bench``: how fast is my own store, and what holds it up?"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import typer
from rich.table import Table
from rich.text import Text

from ckptstore.cli._bench_works import Found, arrays, codec_speed, empty, make_state, round_of, small_requests
from ckptstore.cli._common import (
    Debug,
    Json,
    Options,
    Unsafe,
    Url,
    out,
    print_json,
    progress_bar,
    storage_options,
    warn,
)
from ckptstore.cli._format import clean, size, to_json
from ckptstore.errors import CkptStoreError, InvalidArgumentError
from ckptstore.pipeline import cores
from ckptstore.stores import open_store

MIB = 1024 * 1024
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1024, "MI": MIB, "GI": 1024**3}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]I?|)B?")
_WORKS = {
    "raw put": "the bytes alone, put",
    "raw get": "the bytes alone, get",
    "save": "save",
    "restore": "restore, in place",
    "second save": "second save, 1 % changed",
    "stall": "stall of a save in the background",
}
_VERBS = ("put", "get", "info", "list", "delete")

_Size = Annotated[str, typer.Option("--size", metavar="SIZE", help="Bytes of the state, e.g. 64MiB or 2GB.")]
_Rounds = Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Medians are of so many rounds.")]


def bench(
    url: Url,
    state_size: _Size = "256MiB",
    rounds: _Rounds = 3,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Measure your own store: saves, restores and small requests beside the bare store.

    Works below a fresh prefix bench-… of the URL, which is removed at the end, also after Ctrl-C; nothing else is
    touched. Needs up to twice the size of the state on the store. The state is made up, as training would leave it.

    Example: [cyan]ckptstore bench s3://my-bucket/scratch --size 1GiB[/cyan]
    """
    nbytes = parse_size(state_size)
    options: dict[str, Any] = {"storage_options": storage_options(option), "unsafe_single_writer": unsafe}
    with _place(url, options) as (place, where):
        state = make_state(nbytes)
        found = Found(sum(array.nbytes for array in arrays(state)))
        with open_store(f"{place}/small", **options) as store:
            small_requests(store, found)
        for number in range(1, rounds + 1):
            codec_speed(state, found)
            round_of(place, options, state, number, found, lambda work, n=number: progress_bar(f"{work}, round {n}"))  # type: ignore[misc]
    if json:
        print_json(to_json(_as_json(where, found, rounds)))
    else:
        _print(where, found, rounds)


def parse_size(text: str) -> int:
    """Bytes of ``256MiB``, ``2GB``, ``1000000``.

    Raises:
        InvalidArgumentError: it is no size, or less than 1 MiB.
    """
    match = _SIZE.fullmatch(text.strip().upper())
    nbytes = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if nbytes < MIB:
        raise InvalidArgumentError(f"--size {clean(text)!r}: give at least 1 MiB, as in 64MiB or 2GB")
    return nbytes


@contextmanager
def _place(url: str, options: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A fresh prefix below ``url`` and its full URL. What it holds is removed at the end, however that comes about."""
    place = f"{url.rstrip('/') or url}/bench-{uuid.uuid4().hex[:8]}"
    with open_store(place, **options) as store:  # a wrong URL or option shows now
        where = store.traits.url
        folder = Path(unquote(urlsplit(where).path)) if where.startswith("file://") else None
        missing = [parent for parent in folder.parents if not parent.exists()] if folder is not None else []
        try:
            if next(iter(store.list()), None) is not None:
                raise InvalidArgumentError(f"{where} is in use: run again")  # of 2**32 names
            yield place, where
        finally:
            _clear(store, folder, missing)


def _clear(store: Any, folder: Path | None, missing: list[Path]) -> None:
    try:
        if folder is None:
            empty(store)
            return
        shutil.rmtree(folder, ignore_errors=True)
        for parent in missing:  # those that it made, unless something else is in them by now
            parent.rmdir()
    except (CkptStoreError, OSError) as error:
        if folder is None or folder.exists():
            warn(f"{store.traits.url} could not be removed, delete it by hand: {error}")


def _speed(found: Found, work: str, nbytes: int) -> float:
    return nbytes / max(found.median(work), 1e-9)


def _limits(found: Found) -> dict[str, dict[str, float]]:
    """Seconds that a save and a restore would take if only the store's rate, the codec or the distance counted."""
    facts, small = found.facts, {verb: found.median(f"small {verb}") for verb in _VERBS}
    codec = found.bytes_state / _speed(found, "codec", facts["bytes codec"])
    stored = facts["bytes stored"]
    extra = {work: max(facts[f"requests {work}"] - facts["chunks"], 0) for work in ("save", "restore")}
    return {
        "save": {
            "store": stored / _speed(found, "raw put", found.bytes_state),
            "codec": codec,
            "latency": extra["save"] * small["put"],
        },
        "restore": {
            "store": stored / _speed(found, "raw get", found.bytes_state),
            "codec": codec / 2,  # decoding takes about half as long
            "latency": extra["restore"] * small["get"],
        },
    }


def _words(found: Found) -> list[str]:
    """What limits, in words."""
    said = []
    for work, parts in _limits(found).items():
        seconds = found.median(work)
        worst = max(parts, key=lambda part: parts[part])
        what = {
            "store": "the rate at which the store moves bytes: more cores would not help, fewer bytes would",
            "codec": "hashing and the codec: more cores would help, or codec='raw'",
            "latency": "the distance to the store, request after request: a larger state would hardly take longer",
        }[worst]
        share = ", ".join(f"{part} {_seconds(value)}" for part, value in parts.items())
        said.append(f"A {work} of {_seconds(seconds)} is limited by {what} (alone: {share}).")
    return said


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _as_json(url: str, found: Found, rounds: int) -> dict[str, Any]:
    facts = found.facts
    works = {
        work.replace(" ", "_"): {
            "seconds": round(found.median(work), 6),
            "seconds_all": [round(value, 6) for value in found.seconds[work]],
        }
        for work in _WORKS
        if work in found.seconds
    }
    works["save"] |= {
        "bytes_stored": facts["bytes stored"],
        "requests": facts["requests save"],
        "chunks": facts["chunks"],
    }
    works["restore"] |= {"requests": facts["requests restore"]}
    works["second_save"] |= {
        "bytes_changed": facts["bytes changed"],
        "bytes_sent": facts["bytes sent again"],
        "requests": facts["requests second save"],
    }
    return {
        "url": url,
        "bytes_state": found.bytes_state,
        "rounds": rounds,
        "cores": cores(),
        **works,
        "stall": works.get("stall") or {"seconds": None, "reason": found.stall},
        "codec_bytes_per_second": round(_speed(found, "codec", facts["bytes codec"])),
        "small_request_seconds": {verb: round(found.median(f"small {verb}"), 6) for verb in _VERBS},
        "limits": {
            work: {"by": max(parts, key=lambda part: parts[part]), **{k: round(v, 6) for k, v in parts.items()}}
            for work, parts in _limits(found).items()
        },
    }


def _print(url: str, found: Found, rounds: int) -> None:
    console = out()
    facts = found.facts
    head = f"{clean(url)}: {size(found.bytes_state)} of fp32 state, medians of {rounds} rounds, {cores()} cores"
    console.print(Text(head))
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("time", "spread", "speed", "requests"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("moved", no_wrap=True)
    moved = {
        "save": f"{size(facts['bytes stored'])} stored",
        "second save": f"{size(facts['bytes sent again'])} sent, {size(facts['bytes changed'])} changed",
    }
    for work, name in _WORKS.items():
        times = found.seconds.get(work)
        if times is None:
            table.add_row(name, "-", "", "", "", found.stall)
            continue
        speed = "" if work == "stall" else f"{size(_speed(found, work, found.bytes_state))}/s"
        requests = str(facts.get(f"requests {work}", ""))
        spread = f"{_seconds(min(times))}–{_seconds(max(times))}"
        table.add_row(name, _seconds(found.median(work)), spread, speed, requests, moved.get(work, ""))
    codec = _speed(found, "codec", facts["bytes codec"])
    table.add_row("digest and codec, in memory", "", "", f"{size(codec)}/s", "", "")
    console.print(table)
    small = ", ".join(f"{verb} {_seconds(found.median(f'small {verb}'))}" for verb in _VERBS)
    console.print(Text(f"One small request: {small}."))
    for line in _words(found):
        console.print(Text(line))
