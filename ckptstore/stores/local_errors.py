"""What an errno means to a caller of the local store, and what to do about it."""

from __future__ import annotations

import errno

from ckptstore.errors import AccessError, StoreError, StoreFullError, TransientError

_TRANSIENT = (
    "ESTALE EIO ETIMEDOUT ENOTCONN EAGAIN EINTR EBUSY ENETDOWN ENETUNREACH ENETRESET EHOSTDOWN EHOSTUNREACH "
    "ECONNRESET ECONNREFUSED ECONNABORTED EPIPE ESHUTDOWN ENOBUFS ENOMEM EMFILE ENFILE ENOLCK EDEADLK ETXTBSY "
    "EREMOTEIO ECOMM ENOLINK EPROTO ENOENT"  # ENOENT: where it is no answer, the file or folder vanished under us
)
_REFUSED = "EACCES EPERM EROFS ENAMETOOLONG ELOOP ENOTDIR EISDIR"
_FULL = "ENOSPC EDQUOT EFBIG"

ERRORS: dict[int, type[StoreError]] = {
    getattr(errno, name): kind
    for names, kind in ((_TRANSIENT, TransientError), (_REFUSED, AccessError), (_FULL, StoreFullError))
    for name in names.split()
    if hasattr(errno, name)
}
"""What an errno means to a caller. Anything else is a plain StoreError."""

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
