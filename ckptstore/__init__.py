"""ckptstore: an atomic checkpoint storage layer over object stores.

>>> repo = ckptstore.open("runs/demo")
>>> repo.save(7, {"model": {"w": weights}}, metadata={"loss": 0.31})
>>> state = repo.latest().load()
"""

from typing import TYPE_CHECKING

from ckptstore.background import SaveHandle
from ckptstore.catalog import Skipped
from ckptstore.checkpoint import Checkpoint, Record
from ckptstore.diff import ArrayDiff, Diff, ValueDiff
from ckptstore.errors import (
    AccessError,
    AlreadyExistsError,
    BusyError,
    CkptStoreError,
    CorruptionError,
    DeadlineError,
    EpochExistsError,
    EpochNotFoundError,
    FencedError,
    FormatError,
    InvalidArgumentError,
    InvalidRecordError,
    NotFoundError,
    ObjectExistsError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    RanksFailedError,
    RecordNotFoundError,
    RepositoryNotFoundError,
    RetriesExhaustedError,
    StoreError,
    StoreFullError,
    ThrottledError,
    TransactionError,
    TransientError,
    UnsafeFileError,
)
from ckptstore.export import ExportedFile, ExportReport
from ckptstore.mirror import EpochCopy, MirrorReport
from ckptstore.opening import open  # noqa: A004 (the name is the API: ckptstore.open)
from ckptstore.policies import (
    EpochInfo,
    KeepBest,
    KeepBytes,
    KeepDaily,
    KeepEvery,
    KeepHourly,
    KeepLast,
    KeepWeekly,
    KeepWithin,
    Policy,
    parse_policy,
)
from ckptstore.preemption import Preemption, on_preemption
from ckptstore.preflight import Preflight
from ckptstore.reader import Problem
from ckptstore.repair import EpochRepair, Mend, RepairReport
from ckptstore.repository import Repository
from ckptstore.retention import GcReport, PruneReport
from ckptstore.scrub import ScrubReport
from ckptstore.shards import ShardedArray
from ckptstore.stores import RetryEvent, RetryPolicy
from ckptstore.stores.trace import StoreEvent
from ckptstore.sweep import Removal
from ckptstore.tier import Tier, TierStatus
from ckptstore.tiers import TieredRepository
from ckptstore.transaction import Transaction
from ckptstore.usage import EpochUsage, Usage
from ckptstore.verify import EpochHealth, VerifyReport
from ckptstore.watching import Finding, import_files, watch
from ckptstore.writer import Tally

if TYPE_CHECKING:
    __version__: str

__all__ = [
    "AccessError",
    "AlreadyExistsError",
    "ArrayDiff",
    "BusyError",
    "Checkpoint",
    "CkptStoreError",
    "CorruptionError",
    "DeadlineError",
    "Diff",
    "EpochCopy",
    "EpochExistsError",
    "EpochHealth",
    "EpochInfo",
    "EpochNotFoundError",
    "EpochRepair",
    "EpochUsage",
    "ExportReport",
    "ExportedFile",
    "FencedError",
    "Finding",
    "FormatError",
    "GcReport",
    "InvalidArgumentError",
    "InvalidRecordError",
    "KeepBest",
    "KeepBytes",
    "KeepDaily",
    "KeepEvery",
    "KeepHourly",
    "KeepLast",
    "KeepWeekly",
    "KeepWithin",
    "Mend",
    "MirrorReport",
    "NotFoundError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "OutcomeUnknownError",
    "Policy",
    "Preemption",
    "Preflight",
    "Problem",
    "PruneReport",
    "RanksFailedError",
    "Record",
    "RecordNotFoundError",
    "Removal",
    "RepairReport",
    "Repository",
    "RepositoryNotFoundError",
    "RetriesExhaustedError",
    "RetryEvent",
    "RetryPolicy",
    "SaveHandle",
    "ScrubReport",
    "ShardedArray",
    "Skipped",
    "StoreError",
    "StoreEvent",
    "StoreFullError",
    "Tally",
    "ThrottledError",
    "Tier",
    "TierStatus",
    "TieredRepository",
    "Transaction",
    "TransactionError",
    "TransientError",
    "UnsafeFileError",
    "Usage",
    "ValueDiff",
    "VerifyReport",
    "import_files",
    "on_preemption",
    "open",
    "parse_policy",
    "watch",
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("ckptstore")
    raise AttributeError(f"module 'ckptstore' has no attribute {name!r}")
