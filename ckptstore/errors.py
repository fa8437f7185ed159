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
    ├── InvalidArgumentError (ValueError)     a URL, option, epoch or policy that makes no sense
    ├── InvalidRecordError (TypeError)        a value that cannot be stored exactly
    ├── BusyError                             a background save is in flight: wait for it
    ├── TransactionError                      a save that cannot go on or be committed
    │   └── OutcomeUnknownError               the commit may or may not have happened: look again
    └── StoreError (OSError)                  the store did not do it
        ├── TransientError                    may work if tried again (the only kind that is retried)
        ├── AccessError                       refused: credentials, permissions, read-only
        ├── StoreFullError                    no space, no inodes or no quota left
        ├── DeadlineError                     took longer than allowed
        └── RetriesExhaustedError             transient errors until attempts or deadline ran out

``.key`` is the object and ``.epoch`` the epoch concerned, where known; ``.errno`` is kept on
``StoreError`` where the operating system gave one. All of them can be pickled, because a save may
run in another process than the one that must hear of its failure.
"""

from __future__ import annotations

from typing import Any


class CkptStoreError(Exception):
    """Base of all errors raised by ckptstore."""

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

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"key": self.key, "epoch": self.epoch, "errno": self.errno}
        return (_rebuild, (type(self), self.message, state))


def _rebuild(cls: type[CkptStoreError], message: str, state: dict[str, Any]) -> CkptStoreError:
    return cls(message, **state)


class NotFoundError(CkptStoreError, KeyError):
    """Nothing exists under the name asked for."""


class RepositoryNotFoundError(NotFoundError):
    """The URL holds no repository, or its bucket does not exist."""


class EpochNotFoundError(NotFoundError):
    """The repository has no such epoch."""


class RecordNotFoundError(NotFoundError):
    """The checkpoint has no record of that name, or no array at that path."""


class ObjectNotFoundError(NotFoundError):
    """The store has no object under that key."""


class AlreadyExistsError(CkptStoreError, FileExistsError):
    """The name is taken."""


class EpochExistsError(AlreadyExistsError):
    """The epoch is already committed; pass ``replace=True`` to replace it."""


class ObjectExistsError(AlreadyExistsError):
    """A create-only put met an object with other bytes under the same key."""


class CorruptionError(CkptStoreError):
    """Stored bytes differ from what was written, or are missing. ``.key`` names the object."""


class FormatError(CkptStoreError, ValueError):
    """Data of a format that this version does not read, or a place that is no repository."""


class InvalidArgumentError(CkptStoreError, ValueError):
    """An argument that makes no sense: URL, option, epoch, name or policy."""


class InvalidRecordError(CkptStoreError, TypeError):
    """A value that cannot be stored exactly. The message lists each offending path."""


class BusyError(CkptStoreError):
    """A background save is still in flight, and waiting for it was not wanted. ``.epoch`` is the one in flight."""


class TransactionError(CkptStoreError):
    """The save cannot go on: closed, lost its lease, or a part of it is missing."""


class OutcomeUnknownError(TransactionError):
    """The reply to the commit was lost and could not be read back: look at the epoch again."""


class StoreError(CkptStoreError, OSError):
    """The store failed to carry out an operation."""


class TransientError(StoreError):
    """A failure that may pass: a reset connection, a time-out, a stale handle, throttling."""


class AccessError(StoreError):
    """Refused for good: wrong credentials, missing permission, read-only file system."""


class StoreFullError(StoreError):
    """No space, no inodes or no quota left."""


class DeadlineError(StoreError):
    """The operation took longer than its deadline."""


class RetriesExhaustedError(StoreError):
    """Still failing transiently when the attempts or the deadline ran out."""
