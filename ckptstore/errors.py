"""Every error that ckptstore raises, grouped by what a handler would do about it.

::

    CkptStoreError
    ├── NotFoundError (KeyError)              nothing under that name: ask for something else
    │   ├── RepositoryNotFoundError           no repository (or no bucket) at that URL
    │   ├── EpochNotFoundError                no such epoch
    │   ├── RecordNotFoundError               the checkpoint has no such record (or path in it)
    │   └── ObjectNotFoundError               the store has no object under that key
    ├── AlreadyExistsError (FileExistsError)  the name is taken: choose another, or replace
    │   ├── EpochExistsError                  the epoch is already committed
    │   └── ObjectExistsError                 the key already holds other bytes
    ├── CorruptionError                       stored bytes are not what was written: use another epoch
    ├── FormatError (ValueError)              well-formed, but not for this version: upgrade
    │   └── UnsafeFileError                   a file that only code of its own could read: nothing was run
    ├── InvalidArgumentError (ValueError)     a URL, option, epoch or policy that makes no sense
    ├── InvalidRecordError (TypeError)        a value that cannot be stored exactly
    ├── BusyError                             a background save is in flight: wait for it
    ├── TransactionError                      a save that cannot go on or be committed
    │   ├── FencedError                       another process has taken the run over: stop
    │   ├── RanksFailedError                  a rank failed or is missing: none has saved
    │   └── OutcomeUnknownError               the commit may or may not have happened: look again
    └── StoreError (OSError)                  the store did not do it
        ├── TransientError                    may work if tried again (the only kind that is retried)
        │   └── ThrottledError                the store asks for fewer requests
        ├── AccessError                       refused: credentials, permissions, read-only
        ├── StoreFullError                    no space, no inodes or no quota left
        ├── DeadlineError                     took longer than allowed
        └── RetriesExhaustedError             transient errors until attempts or deadline ran out

``.key`` is the object and ``.epoch`` the epoch concerned, where known; ``.errno`` is kept on
``StoreError`` where the operating system gave one. ``.failure`` is the class of the failure, which alone
decides what is done about it (docs/retries.md). All of them can be pickled, because a save may
run in another process than the one that must hear of its failure.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

Failure = Literal["transient", "throttled", "auth-refresh", "space", "permanent", "settled", "unsettled", "integrity"]
"""The class of a failure. ``settled``: no failure but an answer (it exists, it is missing); ``unsettled``: a
conflict with a request that is still under way, which promises nothing."""

E = TypeVar("E", bound="CkptStoreError")


class CkptStoreError(Exception):
    """Base of all errors raised by ckptstore."""

    failure: Failure = "permanent"
    key: str | None
    epoch: int | None

    def __init__(
        self, message: str, *, key: str | None = None, epoch: int | None = None, errno: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.key = key
        self.epoch = epoch
        self.errno = errno

    def __str__(self) -> str:
        # KeyError would show the repr of the message, OSError would show "[Errno ...]" forms.
        return self.message

    def __repr__(self) -> str:
        # By the message as it is now: a save says more in it than where it was raised.
        return f"{type(self).__name__}({self.message!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # errno is kept by OSError itself, not among the variables.
        return (_rebuild, (type(self), self.message, {**vars(self), "errno": self.errno}))


def _rebuild(cls: type[E], message: str, state: dict[str, Any]) -> E:
    error = cls(message)
    for name, value in state.items():
        setattr(error, name, value)
    return error


def reworded(error: E, message: str, key: str | None) -> E:
    """The same error with another message and key; everything else that it knows stays."""
    facts = {**vars(error), "message": message, "key": key, "errno": error.errno}
    return _rebuild(type(error), message, facts)


class NotFoundError(CkptStoreError, KeyError):
    """Nothing exists under the name asked for."""

    failure: Failure = "settled"


class RepositoryNotFoundError(NotFoundError):
    """The URL holds no repository, or its bucket does not exist."""

    failure: Failure = "permanent"


class EpochNotFoundError(NotFoundError):
    """The repository has no such epoch."""


class RecordNotFoundError(NotFoundError):
    """The checkpoint has no record of that name, or no array at that path."""


class ObjectNotFoundError(NotFoundError):
    """The store has no object under that key."""


class AlreadyExistsError(CkptStoreError, FileExistsError):
    """The name is taken."""

    failure: Failure = "settled"


class EpochExistsError(AlreadyExistsError):
    """The epoch is already committed; pass ``replace=True`` to replace it."""


class ObjectExistsError(AlreadyExistsError):
    """A create-only put met an object with other bytes under the same key."""


class CorruptionError(CkptStoreError):
    """Stored bytes differ from what was written, or are missing. ``.key`` names the object."""

    failure: Failure = "integrity"


class FormatError(CkptStoreError, ValueError):
    """Data of a format that this version does not read, or a place that is no repository."""


class UnsafeFileError(FormatError):
    """A file of another program that holds objects which only their own code could rebuild. Nothing of it was run."""


class InvalidArgumentError(CkptStoreError, ValueError):
    """An argument that makes no sense: URL, option, epoch, name or policy."""


class InvalidRecordError(CkptStoreError, TypeError):
    """A value that cannot be stored exactly. The message lists each offending path."""


class BusyError(CkptStoreError):
    """A background save is still in flight, and waiting for it was not wanted. ``.epoch`` is the one in flight."""


class TransactionError(CkptStoreError):
    """The save cannot go on: closed, lost its lease, or a part of it is missing."""


class FencedError(TransactionError):
    """The run has a newer writer: this process was given up and must not save. ``.key`` is the other's claim."""


class RanksFailedError(TransactionError):
    """Of the ranks that save a checkpoint together some have failed or are missing: nothing was committed.

    Attributes:
        ranks: which, and why. The same on every rank, but for one that failed by itself: it raises its own error.
        of_the_store: whether all of them failed because of the store, so that ``on_error="warn"`` goes on.
    """

    def __init__(self, message: str, *, ranks: dict[int, str] | None = None, of_the_store: bool = False, **where: Any):
        super().__init__(message, **where)
        self.ranks = dict(ranks or {})
        self.of_the_store = of_the_store


class OutcomeUnknownError(TransactionError):
    """The reply to the commit was lost and could not be read back: look at the epoch again."""


class StoreError(CkptStoreError, OSError):
    """The store failed to carry out an operation."""


class TransientError(StoreError):
    """A failure that may pass: a reset connection, a time-out, a stale handle.

    ``.most`` is how many attempts make sense; None: as many as the retry policy allows.
    """

    def __init__(self, message: str, *, failure: Failure = "transient", most: int | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.failure = failure
        self.most = most


class ThrottledError(TransientError):
    """The store asks for fewer requests. ``.retry_after``: how many seconds it asks to wait, where it says so."""

    def __init__(self, message: str, *, retry_after: float | None = None, **facts: Any) -> None:
        super().__init__(message, **{"failure": "throttled", **facts})
        self.retry_after = retry_after


class AccessError(StoreError):
    """Refused for good: wrong credentials, missing permission, read-only file system."""


class StoreFullError(StoreError):
    """No space, no inodes or no quota left.

    Attributes:
        needed: bytes that the save takes on the store, where that was measured.
        free: bytes that are free there, where the system tells.
        deletable: epochs that may be deleted, and how many bytes each gives back when they go oldest first.
    """

    failure: Failure = "space"

    def __init__(
        self,
        message: str,
        *,
        needed: int | None = None,
        free: int | None = None,
        deletable: dict[int, int] | None = None,
        **where: Any,
    ) -> None:
        super().__init__(message, **where)
        self.needed = needed
        self.free = free
        self.deletable = dict(deletable or {})


class DeadlineError(StoreError):
    """The operation took longer than its deadline. It is not tried again, and may still take effect."""

    failure: Failure = "transient"


class RetriesExhaustedError(StoreError):
    """Still failing transiently when the attempts or the deadline ran out. The last error is its ``__cause__``.

    ``.attempts`` were made in ``.seconds``; ``.failure`` is that of the last error.
    """

    failure: Failure = "transient"

    def __init__(self, message: str, *, attempts: int = 0, seconds: float = 0.0, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.attempts = attempts
        self.seconds = seconds
