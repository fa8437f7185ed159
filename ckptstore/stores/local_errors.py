"""What an errno means to a caller of the local store, and what to do about it. Shown in docs/retries.md."""

from __future__ import annotations

import errno

from ckptstore.errors import AccessError, Failure, StoreError, StoreFullError, TransientError

FEW = 5
"""Attempts that make sense where a failure seldom passes: a bad disk, or a path that cannot be."""

NAMES: tuple[tuple[Failure, type[StoreError], int | None, str], ...] = (
    (
        "transient",
        TransientError,
        None,
        "ESTALE ETIMEDOUT ENOTCONN EAGAIN EINTR EBUSY ENETDOWN ENETUNREACH ENETRESET EHOSTDOWN EHOSTUNREACH "
        "ECONNRESET ECONNREFUSED ECONNABORTED EPIPE ESHUTDOWN ENOBUFS ENOMEM EMFILE ENFILE ENOLCK EDEADLK ETXTBSY "
        "EREMOTEIO ECOMM ENOLINK EPROTO",
    ),
    # ENOENT: where it is no answer, the file or folder vanished under us.
    ("transient", TransientError, FEW, "EIO ENOENT"),
    ("permanent", AccessError, None, "EACCES EPERM EROFS ENAMETOOLONG ELOOP ENOTDIR EISDIR"),
    ("space", StoreFullError, None, "ENOSPC EDQUOT EFBIG"),
)
"""Class of failure, error, most attempts, and the errnos. Anything else is a plain StoreError, permanent."""

CLASSES: dict[int, tuple[Failure, type[StoreError], int | None]] = {
    getattr(errno, name): (failure, kind, most)
    for failure, kind, most, names in NAMES
    for name in names.split()
    if hasattr(errno, name)
}
"""The same by number: not every system has all of them."""

ERRORS: dict[int, type[StoreError]] = {number: kind for number, (_, kind, _) in CLASSES.items()}
"""What an errno means to a caller."""

ADVICE: dict[int, str] = {
    errno.EACCES: "check the permissions of the folder and its owner",
    errno.EPERM: "check the permissions of the folder and its owner",
    errno.EROFS: "mount the file system for writing or choose another folder",
    errno.ENAMETOOLONG: "choose a folder with a shorter path",
    errno.ELOOP: "replace the symbolic link by a file or folder; links below the root are not followed",
    errno.ENOTDIR: "a file is where a folder is needed: move it away or choose another folder",
    errno.EISDIR: "a folder is where a file is needed: move it away or choose another folder",
    errno.EDQUOT: "free some of your quota, for example by pruning old checkpoints",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) or choose another file system",
    errno.ENOENT: "the file or its folder was removed meanwhile: try again",
}


def local_error(error: OSError, what: str, key: str, advice: str | None = None) -> StoreError:
    """Our error for one of the operating system: ``what`` failed, why, and what to do about it (``advice``)."""
    number = error.errno or 0
    kind = ERRORS.get(number, StoreError)
    advice = advice or ADVICE.get(number) or ("try again" if kind is TransientError else "look into the system log")
    ours = kind(f"{what}: {error.strerror or error}; {advice}", key=key, errno=error.errno)
    if isinstance(ours, TransientError):
        ours.most = CLASSES[number][2]
    return ours
