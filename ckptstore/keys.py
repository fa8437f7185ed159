"""The names of all objects in a repository: the one place where keys are made and parsed.

::

    ckptstore.json                            repository marker
    manifests/000000000007-000001.json        epoch 7, generation 1: the commit
    manifests/writer-<run>-000000000002.json  the second writer of a run has claimed its number
    manifests/pin-000000000007.json           epoch 7 is pinned: no prune takes it
    manifests/quarantine-000000000007-000001.json  … generation 1 of it is set aside
    manifests/checked.json                    what was read and checked last, and when
    leases/<attempt>.json                     the attempt is alive
    condemned/<attempt>                       a sweeper's flag: nobody may build on this attempt
    attempts/<attempt>/records/<digest>       record index
    attempts/<attempt>/chunks/<digest>        frame of one chunk
    attempts/<attempt>/parts/000003.json      what rank 3 has written for the attempt of its coordinator
    attempts/<attempt>/outcome.json           … and what became of it
    reserve/1/2/3/4/space                     room set aside on a disk for commits and clean-ups

Keys that match none of these forms are foreign: ignored by readers, never deleted by us.
"""

from __future__ import annotations

import hashlib
import re
import uuid

from ckptstore.errors import InvalidArgumentError

MARKER = "ckptstore.json"
MANIFESTS = "manifests/"
WRITERS = "manifests/writer-"
PINS = "manifests/pin-"
QUARANTINES = "manifests/quarantine-"
CHECKED = "manifests/checked.json"
LEASES = "leases/"
CONDEMNED = "condemned/"
ATTEMPTS = "attempts/"
PROBES = "probes/"
RESERVE = "reserve/1/2/3/4/space"  # its folders are a reserve too: of files (inodes)

MAX_EPOCH = 2**63 - 1
MAX_GENERATION = 999_999
MAX_WRITER = 10**12 - 1
MAX_RANK = 0xFFFF

_HEX32 = r"[0-9a-f]{32}"
_HEX64 = r"[0-9a-f]{64}"
_MANIFEST = re.compile(r"manifests/(\d{12,19})-(\d{6})\.json")
_WRITER = re.compile(rf"manifests/writer-({_HEX32})-(\d{{12}})\.json")
_PIN = re.compile(r"manifests/pin-(\d{12,19})\.json")
_QUARANTINE = re.compile(r"manifests/quarantine-(\d{12,19}-\d{6}\.json)")
_LEASE = re.compile(rf"leases/({_HEX32})\.json")
_CONDEMNED = re.compile(rf"condemned/({_HEX32})")
_CONTENT = re.compile(rf"attempts/({_HEX32})/(records|chunks)/({_HEX64})")
_PART = re.compile(rf"attempts/({_HEX32})/parts/(\d{{6}})\.json")
_OUTCOME = re.compile(rf"attempts/({_HEX32})/outcome\.json")
_PARTIAL = re.compile(r"(.+)\.tmp-[0-9a-f]{16}")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def new_attempt() -> str:
    """A fresh attempt id: 32 hexadecimal digits that nobody else will choose."""
    return uuid.uuid4().hex


def new_rank_attempt(epoch: int, rank: int) -> str:
    """As ``new_attempt``, for a rank of several that save an epoch together: one short listing finds their leases."""
    return ranks_prefix(epoch) + f"{rank:04x}" + uuid.uuid4().hex[:16]


def ranks_prefix(epoch: int) -> str:
    """What the attempts of all ranks at an epoch begin with: 12 digits, and then come 4 for the rank."""
    return hashlib.sha256(f"ranks of epoch {epoch}".encode()).hexdigest()[:12]


def rank_of_attempt(attempt: str) -> int:
    """The rank, of an attempt that begins with ``ranks_prefix``."""
    return int(attempt[12:16], 16)


def manifest_key(epoch: int, generation: int) -> str:
    return f"{MANIFESTS}{epoch:012d}-{generation:06d}.json"


def epoch_prefix(epoch: int) -> str:
    """Prefix of the manifests of every generation of one epoch (and of no other epoch)."""
    return f"{MANIFESTS}{epoch:012d}-"


def parse_manifest_key(key: str) -> tuple[int, int] | None:
    """``(epoch, generation)``, or None when the key is not exactly one that we would write."""
    match = _MANIFEST.fullmatch(key)
    if match is None:
        return None
    epoch, generation = int(match[1]), int(match[2])
    if epoch > MAX_EPOCH or generation == 0 or manifest_key(epoch, generation) != key:
        return None
    return epoch, generation


def writer_key(run: str, number: int) -> str:
    """``run`` is the first half of the digest of its name: names may differ by case only, and folders may not care."""
    return f"{writer_prefix(run)}{number:012d}.json"


def writer_prefix(run: str) -> str:
    """Prefix of all claims of one run."""
    return f"{WRITERS}{run}-"


def parse_writer_key(key: str) -> tuple[str, int] | None:
    """``(run, number)`` of a claim, or None."""
    match = _WRITER.fullmatch(key)
    return (match[1], int(match[2])) if match and int(match[2]) else None


def pin_key(epoch: int) -> str:
    return f"{PINS}{epoch:012d}.json"


def parse_pin_key(key: str) -> int | None:
    """The epoch that is pinned, or None."""
    match = _PIN.fullmatch(key)
    if match is None or int(match[1]) > MAX_EPOCH or pin_key(int(match[1])) != key:
        return None
    return int(match[1])


def quarantine_key(epoch: int, generation: int) -> str:
    return f"{quarantine_prefix(epoch)}{generation:06d}.json"


def quarantine_prefix(epoch: int) -> str:
    """Prefix of the marks of every generation of one epoch."""
    return f"{QUARANTINES}{epoch:012d}-"


def parse_quarantine_key(key: str) -> tuple[int, int] | None:
    """``(epoch, generation)`` of what is set aside, or None."""
    match = _QUARANTINE.fullmatch(key)
    return None if match is None else parse_manifest_key(MANIFESTS + match[1])


def lease_key(attempt: str) -> str:
    return f"{LEASES}{attempt}.json"


def parse_lease_key(key: str) -> str | None:
    match = _LEASE.fullmatch(key)
    return match[1] if match else None


def condemned_key(attempt: str) -> str:
    return f"{CONDEMNED}{attempt}"


def parse_condemned_key(key: str) -> str | None:
    match = _CONDEMNED.fullmatch(key)
    return match[1] if match else None


def attempt_prefix(attempt: str) -> str:
    return f"{ATTEMPTS}{attempt}/"


def chunks_prefix(attempt: str) -> str:
    return f"{ATTEMPTS}{attempt}/chunks/"


def records_prefix(attempt: str) -> str:
    return f"{ATTEMPTS}{attempt}/records/"


def record_key(attempt: str, digest: str) -> str:
    return f"{ATTEMPTS}{attempt}/records/{digest}"


def chunk_key(attempt: str, digest: str) -> str:
    return f"{ATTEMPTS}{attempt}/chunks/{digest}"


def parts_prefix(attempt: str) -> str:
    return f"{ATTEMPTS}{attempt}/parts/"


def part_key(attempt: str, rank: int) -> str:
    """``attempt`` is that of the coordinator."""
    return f"{parts_prefix(attempt)}{rank:06d}.json"


def parse_part_key(key: str) -> tuple[str, int] | None:
    """``(attempt of the coordinator, rank)``, or None."""
    match = _PART.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def outcome_key(attempt: str) -> str:
    return f"{ATTEMPTS}{attempt}/outcome.json"


def parse_note_key(key: str) -> str | None:
    """The attempt that a part or an outcome belongs to, or None: what ranks tell each other, and no content."""
    match = _PART.fullmatch(key) or _OUTCOME.fullmatch(key)
    return match[1] if match else None


def parse_content_key(key: str) -> tuple[str, str, str] | None:
    """``(attempt, "records" | "chunks", digest)`` of a content key, else None."""
    match = _CONTENT.fullmatch(key)
    return (match[1], match[2], match[3]) if match else None


def attempt_of(key: str) -> str | None:
    """The attempt whose content a key is, or None."""
    content = parse_content_key(key)
    return content[0] if content is not None else None


def is_bulk(key: str) -> bool:
    """Whether an object is big or of no lasting use: a chunk or a probe. The rest is what commits and sweeps need."""
    return key.startswith(PROBES) or (key.startswith(ATTEMPTS) and "/chunks/" in key)


def probe_key() -> str:
    """A key that nobody else will choose, for asking a store what it can do."""
    return f"{PROBES}{uuid.uuid4().hex}"


def partial_key(key: str) -> str:
    """A scratch name beside ``key``: what a local put writes before it is linked into place."""
    return f"{key}.tmp-{uuid.uuid4().hex[:16]}"


def parse_partial_key(key: str) -> str | None:
    """The key that an interrupted local put was for, if ``key`` is such a scratch name of ours."""
    match = _PARTIAL.fullmatch(key)
    if match is None or not is_ours(match[1]):
        return None
    return match[1]


def is_ours(key: str) -> bool:
    """Whether ``key`` has exactly a form that ckptstore writes."""
    return (
        key in (MARKER, RESERVE, CHECKED)
        or parse_manifest_key(key) is not None
        or parse_writer_key(key) is not None
        or parse_pin_key(key) is not None
        or parse_quarantine_key(key) is not None
        or any(form.fullmatch(key) for form in (_LEASE, _CONDEMNED, _CONTENT, _PART, _OUTCOME))
        or re.fullmatch(rf"{PROBES}{_HEX32}", key) is not None
    )


def check_key(key: str) -> str:
    """Refuse a key that could leave the root or mean different things to different stores.

    Every store calls this first. Segments are ``[A-Za-z0-9_][A-Za-z0-9._-]*``, joined by ``/``.

    Raises:
        InvalidArgumentError: for any other key (empty, absolute, ``..``, ``//``, odd characters).
    """
    if len(key) > 512 or not all(_SEGMENT.fullmatch(part) for part in key.split("/")):
        raise InvalidArgumentError(f"{key!r} is not a key: use letters, digits, '.', '_', '-' and '/'", key=key[:512])
    return key
