"""How trainers name their files: which of them belong to one epoch, and what each of them is.

A layout is a pattern for a path below the folder. It knows nothing of what the files hold (``contents.py``) and not
whether they are finished (``watcher.py``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptstore.errors import InvalidArgumentError
from ckptstore.formats.dcp import METADATA
from ckptstore.manifest import check_epoch, check_record_name

MAX_DEPTH = 8
ONE = "checkpoint"  # the record of a file that is a whole checkpoint by itself
_SCRATCH = re.compile(r"(^|/)(\.|tmp[-_.])|(\.(tmp|temp|part|partial|incomplete|swp|lock)|~)(/|$)")
_FIELD = re.compile(r"\{(record|epoch)\}|(\*)")
_BAD = re.compile(r"[^A-Za-z0-9._-]|\.(?=\.)")


@dataclass(frozen=True, slots=True)
class EpochFiles:
    """The files of one epoch: paths below the folder (with ``/``) by record name."""

    epoch: int
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Layout:
    """The names that a trainer gives.

    Attributes:
        patterns: each for a path below the folder, with the groups ``epoch`` and perhaps ``record``; the first that
            fits counts.
        folders: which folders may hold such files.
        together: records that come together: where there is one of a set, all of it belongs to the epoch.
        always: records that every epoch has.
        names: record names for those in the files' names.
        varies: whether epochs may have other records than their neighbours.
        tree: whether the folder of an epoch is one checkpoint.
    """

    name: str
    patterns: tuple[re.Pattern[str], ...]
    folders: re.Pattern[str]
    together: tuple[frozenset[str], ...] = ()
    always: frozenset[str] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)
    varies: bool = False
    tree: bool = False

    def match(self, path: str) -> tuple[int, str] | None:
        """The epoch and record that a path is of."""
        for pattern in self.patterns:
            found = pattern.fullmatch(path)
            if found is not None and len(found["epoch"]) < 19:
                groups = found.groupdict()
                name = groups.get("record") or ONE
                return int(found["epoch"]), _record_name(self.names.get(name, name))
        return None

    def needs(self, records: Iterable[str]) -> frozenset[str]:
        """What an epoch with these records must have."""
        present = frozenset(records)
        return self.always.union(*(group for group in self.together if group & present))


# Recorders of burn: mpk, bin, json, each also with gzip; newer versions write burnpack. ``model-7.mpk.gz`` and so on
# lie in ``checkpoint/`` below the folder that the program names.
BURN = Layout(
    "burn",
    (re.compile(r"(?:checkpoint/)?(?P<record>[A-Za-z][\w-]*)-(?P<epoch>\d+)\.(?:(?:mpk|bin|json)(?:\.gz)?|bpk)"),),
    re.compile("checkpoint"),
    together=(frozenset({"model", "optimizer", "scheduler"}), frozenset({"policy", "learning-agent"})),
    names={"optim": "optimizer"},
)
HUGGING_FACE = Layout(
    "hf",
    (re.compile(r"checkpoint-(?P<epoch>\d+)/(?P<record>.+)", re.DOTALL),),
    re.compile(r"checkpoint-\d+(?:/.*)?", re.DOTALL),
    always=frozenset({"trainer_state.json"}),  # which the trainer writes after the rest
    tree=True,
)
# torch.distributed.checkpoint: ``step-100/.metadata`` is written last, and names the others.
_NUMBERED_FOLDER = r"(?:checkpoints?/)?(?:[A-Za-z][\w.-]*?[-_.=])?{}"
DCP = Layout(
    "dcp",
    (re.compile(_NUMBERED_FOLDER.format(r"(?P<epoch>\d+)") + r"/(?P<record>\.metadata|__\d+_\d+\.distcp)"),),
    re.compile("checkpoints?|" + _NUMBERED_FOLDER.format(r"\d+")),
    always=frozenset({"metadata"}),
    names={".metadata": "metadata"},
    varies=True,
    tree=True,
)
LIGHTNING = Layout(
    "lightning",
    (
        re.compile(r"(?:checkpoints/)?(?:[^/]*[-_])?step=(?P<epoch>\d+)(?:[-_][^/]*)?\.ckpt"),
        re.compile(r"(?:checkpoints/)?(?:[^/]*[-_])?epoch=(?P<epoch>\d+)(?:[-_][^/]*)?\.ckpt"),
    ),
    re.compile("checkpoints"),
)
NUMBERED = Layout(
    "numbered",
    (
        re.compile(
            r"(?:checkpoints?/)?(?:(?!of[-_.])(?P<record>[A-Za-z][\w.-]*?)[-_.=])??"
            r"(?:(?:epoch|step|iter|global_step)[-_.=]?)?(?P<epoch>(?<!-of-)\d+)"
            r"\.(?:pt|pth|ckpt|safetensors|npz|npy|bin|h5|hdf5|msgpack|pkl|tar)"
        ),
    ),
    re.compile("checkpoints?"),
)
LAYOUTS = (DCP, HUGGING_FACE, LIGHTNING, BURN, NUMBERED)
"""In the order in which they are tried: the first that fits any file is that of the folder."""


def layout_of(name: str | None, pattern: str | None) -> tuple[Layout, ...]:
    """The layouts to try.

    Raises:
        InvalidArgumentError: there is no layout of that name, or the pattern names no epoch.
    """
    if pattern is not None:
        if name is not None:
            raise InvalidArgumentError("give a layout or a pattern, not both")
        return (parse_pattern(pattern),)
    if name is None:
        return LAYOUTS
    found = tuple(layout for layout in LAYOUTS if layout.name == name)
    if not found:
        raise InvalidArgumentError(f"layout must be one of {tuple(layout.name for layout in LAYOUTS)}, not {name!r}")
    return found


def parse_pattern(text: str) -> Layout:
    """The layout that a pattern such as ``"{record}-{epoch}.mpk"`` or ``"step_{epoch}/{record}"`` describes.

    ``{record}`` and ``*`` stand for any text without ``/``; a ``{record}`` that is the whole last part, for a tree.

    Raises:
        InvalidArgumentError: it has no or two ``{epoch}``, two ``{record}``, or leads out of the folder.
    """
    parts = text.split("/")
    if text.count("{epoch}") != 1 or text.count("{record}") > 1 or {"", ".", ".."} & set(parts):
        raise InvalidArgumentError(
            f"pattern {text!r} must be a path below the folder with one {{epoch}} and at most one {{record}}, "
            'e.g. "{record}-{epoch}.mpk"'
        )
    tree = parts[-1] == "{record}" and len(parts) > 1
    whole = "/".join(_regex(part) for part in parts[:-1] + ([] if tree else parts[-1:]))
    if tree:
        whole += "/(?P<record>.+)"
    folders = ["/".join(_regex(part, named=False) for part in parts[:count]) for count in range(1, len(parts))]
    if tree:
        folders[-1] += "(?:/.*)?"
    return Layout(
        "pattern",
        (re.compile(whole, re.DOTALL),),
        re.compile("|".join(folders) if folders else "(?!)", re.DOTALL),
    )


def _regex(part: str, named: bool = True) -> str:
    texts = {"epoch": r"\d+", "record": r"[^/]+?"}
    out, last = "", 0
    for hit in _FIELD.finditer(part):
        out += re.escape(part[last : hit.start()])
        text = "[^/]*" if hit[2] else texts[hit[1]]
        out += f"(?P<{hit[1]}>{text})" if named and hit[1] else text
        last = hit.end()
    return out + re.escape(part[last:])


def find(folder: Path, layouts: Iterable[Layout]) -> tuple[Layout | None, list[EpochFiles]]:
    """The first layout that fits files in ``folder``, and the epochs that there are, ascending.

    Raises:
        OSError: the folder cannot be listed. One that does not exist is empty.
    """
    layouts = tuple(layouts)
    paths = sorted(_walk(folder, layouts))
    for layout in layouts:
        found: dict[int, dict[str, str]] = {}
        numbers: dict[tuple[int, str], int] = {}
        for path in paths:
            match = layout.match(path)
            if match is not None:
                files = found.setdefault(match[0], {})
                name = match[1]
                while name in files:
                    numbers[match] = numbers.get(match, 1) + 1
                    name = f"{match[1]}-{numbers[match]}"
                files[name] = path
        if found:
            return layout, [EpochFiles(epoch, files) for epoch, files in sorted(found.items())]
    return None, []


def of_folder(path: Path, epoch: int | None) -> EpochFiles:
    """A folder of torch's DCP as an epoch, under the number at the end of its name, if none is given.

    Raises:
        InvalidArgumentError: there is none.
        OSError: the folder cannot be listed.
    """
    names = sorted(name for name in os.listdir(path) if DCP.match(f"0/{name}") is not None)
    number = DCP.match(f"{path.name}/{METADATA}")
    if epoch is None and number is None:
        raise InvalidArgumentError(f"{path.name} has no number at its end: say which epoch it is")
    files = {_record_name(DCP.names.get(name, name)): f"{path.name}/{name}" for name in names}
    return EpochFiles(check_epoch(epoch) if epoch is not None else number[0] if number is not None else 0, files)


def of_file(path: Path, epoch: int | None, layouts: Iterable[Layout]) -> EpochFiles:
    """One file as an epoch, under the number in its name, if none is given.

    Raises:
        InvalidArgumentError: there is none.
    """
    match = next((found for found in (layout.match(path.name) for layout in layouts) if found is not None), None)
    if epoch is None and match is None:
        raise InvalidArgumentError(f"{path.name} has no number in its name: say which epoch it is")
    number = check_epoch(epoch) if epoch is not None else match[0] if match is not None else 0
    stem = _record_name(path.name.split(".")[0] or ONE)
    return EpochFiles(number, {match[1] if match is not None else stem: path.name})


def _walk(folder: Path, layouts: tuple[Layout, ...], below: str = "", depth: int = 0) -> Iterator[str]:
    """Paths of all that is no folder, or one that is not gone into, in the folders where a layout may have some."""
    try:
        entries = list(os.scandir(folder / below if below else folder))
    except (FileNotFoundError, NotADirectoryError):
        return  # not yet, or just deleted
    for entry in entries:
        path = below + entry.name
        if _SCRATCH.search(path if entry.name != METADATA else below):
            continue
        if not entry.is_dir(follow_symlinks=False) or depth == MAX_DEPTH:
            yield path  # what is no file belongs to its epoch all the same: that cannot be whole without it
        elif any(layout.folders.fullmatch(path) for layout in layouts):
            yield from _walk(folder, layouts, path + "/", depth + 1)


def _record_name(text: str) -> str:
    """``text`` as a record name."""
    parts = [_BAD.sub("_", part)[:80] for part in text.split("/") if part]
    parts = [part if part[:1].isalnum() or part[:1] == "_" else "_" + part for part in parts]
    return check_record_name("/".join(parts)[-255:].lstrip("/.-") or ONE)
