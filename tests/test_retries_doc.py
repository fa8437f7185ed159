"""docs/retries.md shows the tables that the code uses. ``python tests/test_retries_doc.py`` writes them anew."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ckptstore.stores import local_errors, remote_errors
from ckptstore.stores.retry import TREATMENTS, RetryPolicy

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "retries.md"
MARK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

# Where each limit is: module and name, or a field of RetryPolicy; what it limits; how to change it.
POLICY = "`RetryPolicy`"
FIXED = "fixed"
LIMITS: tuple[tuple[str, str, str, str], ...] = (
    ("RetryPolicy", "attempts", "attempts of one call", POLICY),
    ("RetryPolicy", "deadline", "seconds since the first attempt or the last progress of the store", POLICY),
    ("RetryPolicy", "base", "seconds, bound of the first wait", POLICY),
    ("RetryPolicy", "cap", "seconds, longest wait, `Retry-After` included", POLICY),
    ("RetryPolicy", "hang", "seconds, one call to a folder", POLICY),
    ("stores.local_errors", "FEW", "attempts after EIO and ENOENT", FIXED),
    ("stores.watch", "SLOWEST", "bytes per second: what a call to a folder may take besides `hang`", FIXED),
    ("stores.watch", "LISTING_SECONDS", "seconds, a listing of a folder whose entries keep coming", FIXED),
    ("stores.watch", "QUICK_SECONDS", "seconds, a call to a folder while another one hangs there", FIXED),
    ("stores.watch", "IDLE_SECONDS", "seconds until an idle thread ends", FIXED),
    ("stores.mounts", "LATE_SECONDS", "seconds that a network mount has to show what must be there", FIXED),
    ("stores.mounts", "SPENT_SECONDS", "seconds until a folder that was waited for in vain is waited for again", FIXED),
    (
        "stores.remote_backends",
        "CONNECT_SECONDS",
        "seconds to connect",
        "`config_kwargs={'connect_timeout': …}` (S3), `requests_timeout` (GCS)",
    ),
    (
        "stores.remote_backends",
        "READ_SECONDS",
        "seconds between two bytes of an answer; with the time to connect also between two of an upload (the stall)",
        "`config_kwargs={'read_timeout': …}` (S3), `requests_timeout` (GCS)",
    ),
    ("stores.remote", "TRICKLE", "bytes per second: what a request in all may take besides connect and read", FIXED),
    ("stores.remote_obstore", "SLOWEST", "bytes per second: a slower upload by obstore is left to s3fs", FIXED),
    ("stores.remote", "_FRESH_SECONDS", "seconds after which credentials may be read anew", FIXED),
    ("stores.remote", "_CLOSE_SECONDS", "seconds to close connections", FIXED),
    ("stores.retry", "QUIET_SECONDS", "seconds between two log lines of a level about retries", FIXED),
    ("patience", "GRACE_SECONDS", "seconds for calls under way when a save or load is given up", FIXED),
    ("patience", "TICK_SECONDS", "seconds, the longest wait in one piece, so that a Ctrl-C is always seen", FIXED),
    ("lease", "HEARTBEAT", "seconds between two renewals of a lease", FIXED),
    ("lease", "EXPIRY", "seconds, by the store's clock, after which a lease is dead", "`gc(grace=…)`"),
    ("lease", "LAPSE", "seconds without renewal after which a save proves all its objects before it commits", FIXED),
    ("lease", "JOIN_SECONDS", "seconds that the end of a save waits for a renewal under way", FIXED),
    ("options", "EXIT_TIMEOUT", "seconds that exit and `close` wait for a background save", "`open(exit_timeout=…)`"),
    ("options", "MAX_EXIT_TIMEOUT", "seconds, the longest `exit_timeout`", FIXED),
    ("preemption", "GRACE", "seconds from SIGTERM until it is passed on at the latest", "`on_preemption(grace=…)`"),
    ("preemption", "MAX_GRACE", "seconds, the longest `grace`", FIXED),
    ("preemption", "LAST_SECONDS", "seconds of the grace, at most a quarter, in which saves are abandoned", FIXED),
    ("preemption", "MOMENT_SECONDS", "seconds that the main thread has at least to end after that", FIXED),
    ("tiers", "OPEN_SECONDS", "seconds that `open` waits for lower tiers to answer", FIXED),
    ("replication", "FIRST_WAIT_SECONDS", "seconds between attempts at a tier that fails, doubled each time", FIXED),
    ("replication", "LONGEST_WAIT_SECONDS", "seconds between them at most", FIXED),
    ("launch", "TIMEOUT", "seconds that the ranks of one save wait for each other", "`begin(.., timeout=…)`"),
    ("events", "FLUSH_SECONDS", "seconds that `close` and exit wait for listeners to hear what was told", FIXED),
    ("scrub", "_SAVE_SECONDS", "seconds between two puts of its record while `scrub` reads", FIXED),
    ("doctor.speed", "SECONDS", "seconds after which `doctor` begins no more measurement", "`--no-speed`"),
    ("doctor.speed", "_CELL_SECONDS", "seconds after which a thread of a measurement puts no more", FIXED),
    ("doctor.verbs", "_LATE_SECONDS", "seconds that `doctor` waits for what a listing should show", FIXED),
    ("doctor.patient", "_PAUSE_SECONDS", "seconds between its looks for what came back after it was deleted", FIXED),
)  # fmt: skip


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    titles = head.split(" | ")
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def grouped(verdicts: dict[str, remote_errors.Verdict]) -> list[tuple[str, str, str, str]]:
    """A row for each verdict: class, error, names, advice."""
    groups: dict[remote_errors.Verdict, list[str]] = {}
    for name, verdict in verdicts.items():
        groups.setdefault(verdict, []).append(name)
    rows = [(v.failure, shown(v), ", ".join(names), v.advice.replace("|", "or")) for v, names in groups.items()]
    return sorted(rows, key=lambda row: list(TREATMENTS).index(row[0]))  # type: ignore[arg-type]


INTERNAL = {"Missing": "`ObjectNotFoundError` or `RepositoryNotFoundError`, whichever a look tells",
            "PreconditionRefused": "read back: a success or `ObjectExistsError`", "RangeRefused": "no bytes",
            "CredentialsExpired": "`AccessError`, if reading them anew does not help",
            "NotSupported": "`StoreError`; to the probe: no conditional puts"}  # fmt: skip


def shown(verdict: remote_errors.Verdict) -> str:
    return INTERNAL.get(verdict.kind.__name__, f"`{verdict.kind.__name__}`")


def classes() -> str:
    policy = RetryPolicy()
    rows = []
    for failure, each in TREATMENTS.items():
        if each.waits is None:
            again = ("no", "")
        else:
            again = (f"up to {each.most or policy.attempts} attempts", f"{policy.base * each.waits:g} s")
        rows.append((failure, *again, each.besides))
    return table("class | tried again | first wait up to | besides", rows)


def posix() -> str:
    rows = [
        (failure, f"`{kind.__name__}`", most or "as the class", ", ".join(sorted(names.split())))
        for failure, kind, most, names in local_errors.NAMES
    ]
    return table("class | error | attempts | errno", rows)


def statuses() -> str:
    groups: dict[str, remote_errors.Verdict] = {str(status): v for status, v in sorted(remote_errors.STATUSES.items())}
    return table("class | error | HTTP status | advice", grouped(groups))


def gcs() -> str:
    rows = [
        (verdict.failure, shown(verdict), f"`{kind}`", f"`{pattern}`" if pattern else "any", verdict.advice)
        for kind, pattern, verdict in remote_errors.GCS_TEXTS
    ]
    return table("class | error | exception | text (first that fits) | advice", rows)


def exceptions() -> str:
    return table("class | error | exception | advice", grouped(dict(remote_errors.CLASSES)))


def sockets() -> str:
    named = {name: verdict for verdict, names in remote_errors.ERRNO_NAMES.items() for name in sorted(names.split())}
    return table("class | error | errno | advice", grouped(named))


def value_of(module: str, name: str) -> float:
    if module == "RetryPolicy":
        return float(getattr(RetryPolicy(), name))
    return float(getattr(importlib.import_module(f"ckptstore.{module}"), name))


def limits() -> str:
    rows = [
        (f"`{module.rpartition('.')[2]}.{name}`", f"{value_of(module, name):,.10g}", meaning, change)
        for module, name, meaning, change in LIMITS
    ]
    return table("name | default | what | how to change it", rows)


TABLES: dict[str, Callable[[], str]] = {
    "classes": classes,
    "posix": posix,
    "s3-codes": lambda: table("class | error | code | advice", grouped(dict(remote_errors.S3_CODES))),
    "statuses": statuses,
    "gcs": gcs,
    "exceptions": exceptions,
    "sockets": sockets,
    "limits": limits,
}


def rendered(text: str) -> str:
    return MARK.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n{mark[4]}", text)


def test_the_tables_are_those_of_the_code() -> None:
    """Each table of the document is what the code says, and each is there once."""
    text = DOCUMENT.read_text("utf-8")
    assert sorted(mark[1] for mark in MARK.findall(text)) == sorted(TABLES)
    assert text == rendered(text), "python tests/test_retries_doc.py writes the tables anew"


def test_every_limit_is_in_the_table() -> None:
    """Whatever in the product is named like a limit of time, and each field of the policy, has its row."""
    listed = {(module, name) for module, name, _, _ in LIMITS}
    missing = []
    for path in sorted((ROOT / "ckptstore").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "ckptstore").with_suffix("").parts)
        if module.startswith(("cli.", "testing.")):
            continue  # programs and test kits
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):  # in classes too
            single = [node.target] if isinstance(node, ast.AnnAssign) else []
            for target in node.targets if isinstance(node, ast.Assign) else single:
                name = target.id if isinstance(target, ast.Name) else ""
                timed = re.search(r"SECONDS|TIMEOUT|HEARTBEAT|EXPIRY|LAPSE|DEADLINE|PATIENCE$|GRACE$", name)
                if timed and name.isupper() and (module, name) not in listed:
                    missing.append(f"{module}.{name}")
    assert missing == []
    assert {field.name for field in dataclasses.fields(RetryPolicy)} == {n for m, n in listed if m == "RetryPolicy"}


def test_every_class_of_failure_occurs() -> None:
    """Together the tables use every class but integrity, which the digests decide."""
    verdicts = [*remote_errors.S3_CODES.values(), *remote_errors.CLASSES.values()]
    used = {verdict.failure for verdict in verdicts} | {failure for failure, _, _ in local_errors.CLASSES.values()}
    assert used == set(TREATMENTS) - {"integrity"}


def main() -> None:
    DOCUMENT.write_text(rendered(DOCUMENT.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
