"""Checks of what lies there: a repository, who is saving, and what nobody needs any more. Nothing is written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

from ckptstore import keys
from ckptstore.catalog import Catalog
from ckptstore.doctor.findings import Finding
from ckptstore.doctor.patient import Patient
from ckptstore.errors import CorruptionError, FormatError, ObjectNotFoundError
from ckptstore.lease import EXPIRY, read_leases, seems_dead
from ckptstore.preflight import human
from ckptstore.retention import gc
from ckptstore.stores.bucket import base_of

MANY_EPOCHS = 200
"""Beyond so many epochs debris is not counted: that takes the manifest and indexes of each."""
_SAMPLE = 1000


def check_repository(patient: Patient) -> Iterator[Finding]:
    """Is there a repository, and can this version read it?"""
    catalog = Catalog(patient.store)
    try:
        marker = catalog.marker()
    except FormatError as error:
        yield Finding("repository", False, str(error), "upgrade ckptstore")
        return
    except CorruptionError as error:
        yield Finding("repository", False, str(error), "restore ckptstore.json from a mirror; see `ckptstore verify`")
        return
    if marker is None:
        yield _vacant(patient)
        return
    commits = catalog.committed()
    patient.epochs = len({commit.epoch for commit in commits})
    facts = {
        "id": marker.repository, "format": marker.format, "writer": marker.writer, "epochs": patient.epochs,
        "newest": commits[-1].epoch if commits else None,
    }  # fmt: skip
    said = f"format {marker.format}, made by {marker.writer}, "
    said += f"{patient.epochs} epochs, the newest {commits[-1].epoch}" if commits else "no epoch yet"
    for commit in reversed(commits):
        try:
            manifest = catalog.manifest(commit)
        except ObjectNotFoundError:
            continue
        except (CorruptionError, FormatError) as error:
            yield Finding("repository", False, f"{said}, but {error}", f"ckptstore verify {patient.url}", facts)
            return
        patient.newest = sum(entry.bytes_stored for entry in manifest.records)
        break
    yield Finding("repository", True, said, facts=facts)


def _vacant(patient: Patient) -> Finding:
    """No repository: would a first save make one?"""
    base = base_of(patient.store)  # a page of the listing will do, where a store reads by pages
    listing = base.list() if patient.bucket is not None else patient.store.list()
    foreign = next((info.key for info in islice(listing, _SAMPLE) if not keys.is_ours(info.key)), None)
    if foreign is None:
        return Finding("repository", True, "none yet: the first save makes it", facts={"epochs": None})
    said, advice = f"none, and the place holds something else ({foreign})", "choose an empty place for a repository"
    return Finding("repository", None, said, advice, {"epochs": None, "foreign": foreign})


def check_leases(patient: Patient) -> Iterator[Finding]:
    """Who is saving at the moment, and who has died while saving?"""
    if patient.epochs is None:
        return
    now = time.time() + patient.ahead
    live: list[str] = []
    dead: list[str] = []
    for sighting in read_leases(patient.store):
        ended = now - sighting.modified > EXPIRY or seems_dead(sighting, now)
        lease = sighting.lease
        who = (
            f"epoch {lease.epoch} by {lease.host} (process {lease.pid})" if lease else f"{sighting.attempt} (illegible)"
        )
        (dead if ended else live).append(who)
    facts = {"live": live, "dead": dead}
    said = f"in progress: {', '.join(live)}" if live else "no save in progress"
    if dead:
        advice = "the next save of such an epoch takes up what is there; `ckptstore gc` removes it"
        yield Finding("leases", None, f"{said}; ended without a word: {', '.join(dead)}", advice, facts)
    else:
        yield Finding("leases", True, said, facts=facts)


def check_debris(patient: Patient) -> Iterator[Finding]:
    """What would gc remove?"""
    if patient.epochs is None:
        return
    if patient.epochs > MANY_EPOCHS:
        said = f"not counted: that reads something of each of {patient.epochs} epochs"
        yield Finding("debris", None, said, f"ckptstore gc {patient.url} --dry-run")
        return
    report = gc(Catalog(patient.store), dry_run=True, now=time.time() + patient.ahead)
    removable = [one for one in report.removed if one.key not in patient.store.used]
    size = sum(one.size for one in removable)
    facts = {"objects": len(removable), "bytes": size}
    if removable:
        said = f"{len(removable)} objects of {human(size)} that no epoch needs"
        yield Finding("debris", None, said, f"ckptstore gc {patient.url}", facts)
    else:
        yield Finding("debris", True, "none", facts=facts)
