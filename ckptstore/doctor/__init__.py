"""Doctor: what is right, wrong and weak about a place for checkpoints, by trying it out. Nothing stays behind.

Each check stands alone: one that fails is a finding, and the others go on. What is tried out is tried on probe keys
(``probes/…``), which nobody else uses; no repository is needed, and none is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptstore.doctor.contents import check_debris, check_leases, check_repository
from ckptstore.doctor.findings import Diagnosis, Finding, what_failed
from ckptstore.doctor.patient import Patient
from ckptstore.doctor.place import check_keeping, check_mount, check_rules, check_space, check_uploads
from ckptstore.doctor.speed import check_speed
from ckptstore.doctor.verbs import (
    advice_for,
    check_clock,
    check_conditional,
    check_delete,
    check_get,
    check_list,
    check_listing,
    check_put,
)
from ckptstore.stores import LocalStore, RetryPolicy, Store, open_store
from ckptstore.stores.bucket import base_of

__all__ = ["Diagnosis", "Finding", "examine", "examine_store"]

RETRY = RetryPolicy(attempts=4, deadline=15.0, hang=20.0)
"""Who asks what is wrong wants an answer soon."""
_WIDEST = 16
_UNANSWERED = 3
"""After so many calls without an answer the store is not asked any more: each would take as long again."""

_SAY_IT_THEMSELVES = {"folder", "old versions", "list", "put", "get", "delete"}

_Check = Callable[[Patient], Iterator[Finding]]
_CHECKS: dict[str, _Check] = {
    "old versions": check_keeping,  # first: by it is known whether trying something out leaves something
    "list": check_list,
    "put": check_put,
    "get": check_get,
    "delete": check_delete,
    "conditional puts": check_conditional,
    "mount": check_mount,
    "clock": check_clock,
    "reads after writes": check_listing,
    "multipart leftovers": check_uploads,
    "lifecycle rules": check_rules,
    "repository": check_repository,
    "leases": check_leases,
    "debris": check_debris,
    "space": check_space,
    "speed": check_speed,
}


def examine(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    unsafe_single_writer: bool = False,
    speed: bool = True,
    retry: RetryPolicy = RETRY,
    on_check: Callable[[str], object] | None = None,
) -> Diagnosis:
    """Try a place out, and say what was found and what to do about it.

    Takes a few seconds, with ``speed`` some more and up to 220 MiB up and down.

    Args:
        url: as for ``ckptstore.open``. No repository need be there.
        storage_options: as for ``ckptstore.open``.
        unsafe_single_writer: that create-only puts are missing is a warning only.
        speed: measure it too.
        retry: how long to go on with a call that fails. By default not long.
        on_check: told the name of each check before it begins.

    Raises:
        InvalidArgumentError: the URL or an option makes no sense, or a library for it is not installed.
    """
    arguments: dict[str, Any] = {"storage_options": storage_options, "retry": retry, "concurrency": _WIDEST}
    with open_store(url, **arguments) as store:
        if not (unsafe_single_writer and isinstance(base_of(store), LocalStore)):
            return examine_store(store, single_writer=unsafe_single_writer, speed=speed, on_check=on_check)
    # A folder has another way to put then. (A bucket's would only hide what its server does.)
    with open_store(url, **arguments, unsafe_single_writer=True) as store:
        return examine_store(store, single_writer=True, speed=speed, on_check=on_check)


def examine_store(
    store: Store,
    *,
    single_writer: bool = False,
    speed: bool = True,
    on_check: Callable[[str], object] | None = None,
) -> Diagnosis:
    """``examine`` for a store that is open; it stays open."""
    findings: list[Finding] = []
    patient = Patient(store, single_writer=single_writer)
    with patient:
        findings += _run("folder", _look_around, patient)
        for name, check in _CHECKS.items():
            if name != "speed" or speed:
                if on_check is not None:
                    on_check(name)
                findings += _run(name, check, patient)
    if patient.remains:
        said = f"could not be deleted, and may still be there: {', '.join(patient.remains[:5])}"
        said += f" and {len(patient.remains) - 5} more" if len(patient.remains) > 5 else ""
        advice = "delete them by hand; nothing else uses keys below probes/, and gc removes them where it may"
        findings.append(Finding("left behind", False, said, advice, {"keys": patient.remains}))
    if patient.kept:
        count, until = len(patient.store.used), f", for {patient.locked}" if patient.locked else ""
        said = f"old versions of {count} tiny probes stay{until}: {patient.kept}"
        findings.append(Finding("left behind", None, said, "they go with the bucket's other old versions"))
    return Diagnosis(patient.url, tuple(findings))


def _look_around(patient: Patient) -> Iterator[Finding]:
    patient.look_around()
    return iter(())


def _applies(name: str, patient: Patient) -> bool:
    """Whether a check has anything to say of this kind of place, as far as that is known without asking it."""
    if name in ("mount", "space"):
        return patient.local is not None
    if name in ("multipart leftovers", "lifecycle rules"):
        return patient.bucket is not None
    return name not in ("leases", "debris") or patient.epochs is not None


def _run(name: str, check: _Check, patient: Patient) -> list[Finding]:
    """What a check finds; what goes wrong in it is a finding too, so that the others go on."""
    why = "there is no such bucket" if patient.nowhere else "the store does not answer"
    if name not in _SAY_IT_THEMSELVES and (patient.nowhere or patient.store.unanswered >= _UNANSWERED):
        return [Finding(name, None, f"not looked at: {why}")] if _applies(name, patient) else []
    found: list[Finding] = []
    try:
        found.extend(check(patient))
    except Exception as error:  # noqa: BLE001 (whatever it is, it is about this check only)
        advice = advice_for(error)
        found.append(Finding(name, False, what_failed(error) if advice else str(error) or type(error).__name__, advice))
    return found
