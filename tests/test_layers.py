"""Floors: imports only go down. See ``docs/design.md`` for the picture."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ckptstore"

ROOF = 4
ANNEX = 3.5  # shipped test kit: sees everything below the roof, and is seen by nobody
FLOORS: dict[float, set[str]] = {
    0: {
        "arrays", "boxes", "chunks", "compare", "dtypes", "errors", "events", "files", "foreign", "garbage",
        "indexes", "inplace", "jsonsize", "keys", "launch", "locks", "manifest", "merge", "outline", "parts", "patches",
        "patience", "placing", "planes", "policies", "refusals", "shards", "skeleton", "tree", "wording",
    },
    1: {"codecs", "formats", "pace", "pipeline", "pool", "staging", "stores", "throttle"},
    2: {"known", "writer", "reader"},
    3: {
        "background", "caring", "catalog", "checked", "checkpoint", "claim", "commit", "copies", "copying", "diff",
        "doctor", "exiting", "export", "failures", "fence", "flights", "foundation", "gathered", "gathering", "hold",
        "lease", "loading", "marks", "meeting", "member", "mirror", "opening", "options", "outputs", "pickling",
        "pins", "preemption", "preflight", "quarantine", "ranks", "reclaim", "remake", "removing", "repair",
        "replication", "report", "repository", "rescue", "resuming", "retention", "roll", "saving", "scrub", "spares",
        "spill", "sweep", "telling", "thinning", "tier", "tiers", "transaction", "usage", "verify", "watching",
    },
    ANNEX: {"testing"},
    ROOF: {"", "__main__", "adapters", "cli"},
}  # fmt: skip

# On the same floor a sibling may be imported, except of these: each stands alone.
ALONE = {"testing", "", "__main__", "adapters", "cli"}
READERS = {"ckptstore.formats.pytorch"}  # of files that only the framework itself can read
FRAMEWORKS = {
    "prometheus_client",
    "opentelemetry",
    "torch",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "keras",
    "lightning",
    "pytorch_lightning",
    "transformers",
    "accelerate",
}


def part_of(module: str) -> str:
    """``ckptstore.stores.local`` belongs to the part ``stores``; the package itself is the part ``""``."""
    return [*module.split("."), ""][1]


def floor_of(module: str) -> float | None:
    return next((floor for floor, parts in FLOORS.items() if part_of(module) in parts), None)


def modules(package: Path) -> dict[str, Path]:
    """Dotted name → file, of every module below ``package``."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """``(line, module)`` of everything a file imports, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = {f"{base}.{alias.name}" for alias in node.names}
            inner = names & known.keys()  # `from ckptstore import keys` imports the module ckptstore.keys
            yield from ((node.lineno, name) for name in sorted(inner))
            if inner != names:
                yield node.lineno, base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"}:
                yield node.lineno, str(node.args[0].value)


def problems(package: Path) -> list[str]:
    """Everything in ``package`` that breaks the rules, one line each."""
    known = modules(package)
    bad = [f"{name}: on no floor; add it to FLOORS" for name in known if floor_of(name) is None]
    graph: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for line, target in imports(path, known):
            reason = _refusal(name, target, package.name)
            if reason:
                bad.append(f"{path.relative_to(package.parent)}:{line}: imports {target}: {reason}")
            elif target in known:
                graph[name].add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        bad.append("cycle: " + " → ".join(reversed(error.args[1])))
    return bad


def _refusal(importer: str, target: str, package: str) -> str | None:
    """Why ``importer`` must not import ``target``, or None."""
    if target.startswith("."):
        return "write the full name"
    top = target.split(".")[0]
    if top in FRAMEWORKS:
        return None if part_of(importer) == "adapters" or importer in READERS else "only adapters know frameworks"
    if top != package:
        return None
    here, there = floor_of(importer), floor_of(target)
    if here is None or there is None or part_of(importer) == part_of(target):
        return None
    if (part_of(importer), part_of(target)) == ("__main__", "cli"):
        return None  # `python -m ckptstore` is the command
    if part_of(target) in ALONE and part_of(target) != "":
        return "nobody imports this part"
    if there > here:
        return f"floor {there:g} is above floor {here:g}"
    return None


def test_imports_go_down() -> None:
    """No module imports one above it, a framework, the CLI, an adapter or the test kit; there are no cycles."""
    assert problems(PACKAGE) == []


def test_adapters_are_small() -> None:
    """What an adapter needs and does not find belongs into the core."""
    sizes = {path.name: len(path.read_text("utf-8").splitlines()) for path in (PACKAGE / "adapters").glob("*.py")}
    assert {name: size for name, size in sizes.items() if size > 300} == {}


def test_every_floor_is_checked() -> None:
    """The check sees the package: floors 0 to 3 are all populated, by files that import each other."""
    known = modules(PACKAGE)
    assert {floor_of(name) for name in known} >= {0, 1, 2, 3}
    assert sum(1 for path in known.values() for _, target in imports(path, known) if target in known) > 20


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("keys", "from ckptstore.reader import fetch", "floor 2 is above floor 0"),
        ("keys", "from ckptstore import reader", "floor 2 is above floor 0"),
        ("keys", "import ckptstore.stores.base", "floor 1 is above floor 0"),
        ("stores/base", "def late():\n    from ckptstore import reader", "floor 2 is above floor 1"),
        ("reader", "import ckptstore", "floor 4 is above floor 2"),
        ("reader", "from ckptstore import open", "floor 4 is above floor 2"),
        ("reader", "from ckptstore.testing import StoreSuite", "nobody imports this part"),
        ("cli/__init__", "import ckptstore.adapters", "nobody imports this part"),
        ("__main__", "import ckptstore.adapters", "nobody imports this part"),
        ("reader", "import torch.nn", "only adapters know frameworks"),
        ("reader", "import importlib\nimportlib.import_module('jax')", "only adapters know frameworks"),
        ("reader", "from . import keys", "write the full name"),
        ("novelty", "", "on no floor"),
        ("keys", "from ckptstore import errors\nfrom ckptstore import keys", "cycle: "),
    ],
)
def test_the_check_bites(tmp_path: Path, module: str, source: str, expected: str) -> None:
    """Each way to break the rules is noticed."""
    package = tmp_path / "ckptstore"
    for name in ("__init__", "keys", "errors", "reader", "stores/__init__", "stores/base", "testing", "adapters"):
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert problems(package) == []
    (package / f"{module}.py").parent.mkdir(exist_ok=True)
    (package / f"{module}.py").write_text(source)
    assert [line for line in problems(package) if expected in line]


def test_downward_imports_are_allowed(tmp_path: Path) -> None:
    """The roof sees the package and its parts, the test kit all below the roof, siblings each other."""
    package = tmp_path / "ckptstore"
    sources = {
        "__init__": "from ckptstore.repository import open",
        "cli": "import ckptstore\nfrom ckptstore import open, keys",
        "adapters": "import torch\nimport ckptstore",
        "testing": "from ckptstore.repository import open",
        "repository": "from ckptstore import keys, lease",
        "lease": "from ckptstore.keys import x",
        "keys": "import os",
    }
    package.mkdir()
    for name, source in sources.items():
        (package / f"{name}.py").write_text(source)
    assert problems(package) == []
