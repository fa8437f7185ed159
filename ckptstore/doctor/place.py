"""Checks of what is under a store: the mount, the room on it, and what a bucket does with objects by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ckptstore.doctor.findings import Finding, days, what_failed
from ckptstore.doctor.patient import Patient
from ckptstore.errors import AccessError, CkptStoreError
from ckptstore.preflight import human
from ckptstore.stores.bucket import Bucket
from ckptstore.stores.remote_errors import Missing, NotSupported

T = TypeVar("T")

_FEW_FILES = 16
_LITTLE = 1024 * 1024
_ABORT_DAYS = 7
ABORT_RULE = (
    '{"Rules": [{"ID": "abort-multipart", "Status": "Enabled", "Filter": {"Prefix": ""}, '
    f'"AbortIncompleteMultipartUpload": {{"DaysAfterInitiation": {_ABORT_DAYS}}}}}]}}'
)
"""What to hand to ``put-bucket-lifecycle-configuration``."""


def check_mount(patient: Patient) -> Iterator[Finding]:
    """What file system is it, and how is a file given a name there that it never takes from another?"""
    if patient.local is None:
        return
    mount, traits = patient.mount(), patient.store.traits
    facts = {"filesystem": mount.filesystem, "network": mount.network, "create_only": traits.create_only}
    weak = traits.weak or mount.weak
    if mount.instead is not None:
        said, advice = f"{mount}: a mount of a bucket, where a rename is a copy", f"use {mount.instead} directly"
        yield Finding("mount", False, said, advice, facts)
    elif weak:
        yield Finding("mount", None, f"{mount}: {'; '.join(weak)}", "see docs/mounts.md for what this means", facts)
    else:
        yield Finding("mount", True, str(mount), facts=facts)
    name, way = "atomic create", traits.create_only
    if way == "link":
        yield Finding(name, True, "by a hard link, which never overwrites")
    elif way == "rename":
        said = "by a rename that does not overwrite"
        yield Finding(name, None if mount.network else True, said + (", on this machine" if mount.network else ""),
                      "write from one machine at a time" if mount.network else "")  # fmt: skip
    elif way == "look":
        advice = "keep the promise of --unsafe-single-writer: one process at a time"
        yield Finding(name, None, "neither hard links nor a rename that does not overwrite", advice)
    else:
        yield Finding(name, None, "not known, because nothing could be put")


def check_space(patient: Patient) -> Iterator[Finding]:
    """How many bytes and files can still be written?"""
    space = patient.store.space()
    if space is None:
        return
    room, files = space.room, space.room_for_files
    if room is not None:
        quota = " (of a quota)" if room == space.quota else ""
        said, facts = f"{human(room)} can be written{quota}", {"free": room, "quota": space.quota}
        advice = "free some: `ckptstore prune`, `ckptstore gc`; `ckptstore preflight` tells whether a save would fit"
        if room < _LITTLE:
            yield Finding("space", False, said, advice, facts)
        elif patient.newest is not None and room < patient.newest:
            yield Finding("space", None, f"{said}, and the newest epoch took {human(patient.newest)}", advice, facts)
        else:
            yield Finding("space", True, said, facts=facts)
    if files is not None:
        facts = {"files": files, "quota_files": space.quota_files}
        advice = "delete files, or make a file system with more inodes" if files < _FEW_FILES else ""
        yield Finding("files", files >= _FEW_FILES, f"{files} more can be made", advice, facts)


def check_keeping(patient: Patient) -> Iterator[Finding]:
    """What does the bucket keep of what is deleted? Asked first: it says whether trying things out leaves something."""
    if patient.bucket is None:
        return
    name = "old versions"
    answer = _asked(name, "keeping", patient.bucket, patient.bucket.keeping)
    if isinstance(answer, Finding):
        yield answer
        return
    patient.versions = answer.versions
    patient.locked = days(f"{answer.locked_days:.3g}") if answer.locked_days else ""
    facts = {
        "versions": answer.versions,
        "locked_days": answer.locked_days,
        "soft_delete_days": answer.soft_days,
    }
    if patient.locked:
        said = f"what is put cannot be deleted for good for {patient.locked}"
        advice = "a prune frees nothing before that: reckon with it, or use a bucket without a default retention"
        yield Finding(name, None, said, advice, facts)
    elif answer.versions:
        said = "the bucket keeps what is overwritten or deleted as old versions"
        advice = (
            "a prune frees nothing by itself: add a lifecycle rule that deletes noncurrent versions after some days"
        )
        rules = _asked(name, "rules", patient.bucket, patient.bucket.rules)
        if not isinstance(rules, Finding) and rules.old_days is not None:
            yield Finding(name, True, f"{said}, and deletes them {days(rules.old_days)} later", facts=facts)
        else:
            yield Finding(name, None, said, advice, facts)
    elif answer.soft_days:
        said = f"deleted objects are kept, and paid for, for {days(f'{answer.soft_days:.3g}')} (soft delete)"
        yield Finding(name, None, said, "for checkpoints that come and go, set the soft delete policy to 0", facts)
    else:
        yield Finding(name, True, "what is deleted is gone, and free", facts=facts)


def check_uploads(patient: Patient) -> Iterator[Finding]:
    """What have interrupted multipart uploads left? (ckptstore makes none; other tools that write there do.)"""
    if patient.bucket is None:
        return
    name = "multipart leftovers"
    answer = _asked(name, "uploads", patient.bucket, patient.bucket.uploads)
    if isinstance(answer, Finding):
        yield answer
    elif answer is not None and answer.names:
        count = f"{len(answer.names)}{' or more' if answer.more else ''}"
        noun = "upload that was" if count == "1" else "uploads that were"
        age = ""
        if answer.oldest is not None:
            age = f", the oldest begun {max(0.0, time.time() + patient.ahead - answer.oldest) / 3600:.1f} h ago"
        said = f"{count} {noun} never ended{age}: {', '.join(answer.names[:3])}"
        advice = "they cost and no listing shows them: abort them, and set the rule of the next line"
        yield Finding(name, None, said, advice, {"uploads": len(answer.names), "oldest": answer.oldest})
    elif answer is not None:
        yield Finding(name, True, "none", facts={"uploads": 0})


def check_rules(patient: Patient) -> Iterator[Finding]:
    """Do lifecycle rules take what checkpoints need, and does one abort unfinished uploads?"""
    if patient.bucket is None:
        return
    name = "lifecycle rules"
    answer = _asked(name, "rules", patient.bucket, patient.bucket.rules)
    if isinstance(answer, Finding):
        yield answer
        return
    facts = {"abort_days": answer.abort_days, "deleting": answer.deleting, "archiving": answer.archiving}
    if answer.deleting or answer.archiving:
        verb = "deletes" if answer.deleting else "archives"
        said = f"the bucket {verb} objects by age: {'; '.join((*answer.deleting, *answer.archiving))}"
        advice = (
            "exempt this prefix: chunks that new epochs reuse are as old as the first epoch that had them, so even the "
            "newest epoch would be damaged; let `keep=` and `ckptstore prune` decide"
        )
        yield Finding(name, False, said, advice, facts)
    elif answer.abort_days is not None or patient.bucket.scheme != "s3":
        said = (
            f"unfinished uploads are aborted after {days(answer.abort_days)}" if answer.abort_days else "none that hurt"
        )
        yield Finding(name, True, said, facts=facts)
    else:
        said = "none aborts unfinished uploads: what other tools leave there is paid for, for ever"
        bucket = patient.url.removeprefix("s3://").partition("/")[0]
        advice = (
            "add a rule (this sets it where there are no others, and replaces those there are): aws s3api "
            f"put-bucket-lifecycle-configuration --bucket {bucket} --lifecycle-configuration '{ABORT_RULE}'"
        )
        yield Finding(name, None, said, advice, facts)


def _asked(name: str, question: str, bucket: Bucket, ask: Callable[[], T]) -> T | Finding:
    """The answer, or the warning that there is none: not being told is no fault of the place."""
    try:
        return ask()
    except AccessError as error:
        return Finding(
            name, None, f"we may not ask: {what_failed(error)}", f"allow {bucket.rights[question]} to see it"
        )
    except (NotSupported, Missing):
        return Finding(name, None, "the server does not know the question", "ask whoever runs it")
    except CkptStoreError as error:
        return Finding(name, None, f"it could not be found out: {what_failed(error)}")
