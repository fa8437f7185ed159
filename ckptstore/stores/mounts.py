"""What is under a folder: the file system by the mount table, and by a probe how a put can be create-only there.

A put that must not overwrite is what every commit rests on. The ways to make one, best first:

* ``link``: a hard link never overwrites.
* ``rename``: ``renameat2(RENAME_NOREPLACE)``, the same guarantee, where there are no hard links.
* ``look``: look, then rename. No guarantee: only where the user promises that there is a single writer.

On file systems of the kernel's own (ext4, xfs, ...) the kernel itself refuses to give a name twice. Everything else
(FUSE, network mounts, what we do not know) answers for itself and is asked: in the folder of the first put, with empty
files that are gone afterwards, once per process and root. What cannot be made right is refused before any data.
(That a call refuses to overwrite is shown for this machine; what the server of a mount does when two machines race, no
probe on one of them can see. Servers of NFS and of other network file systems owe it for links by their protocols.)
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ckptstore.errors import AccessError
from ckptstore.stores._posix import probe_link, probe_rename

log = logging.getLogger("ckptstore")

Way = Literal["link", "rename", "look"]

_LOOKS = (0.0, 0.05, 0.15, 0.4, 1.0, 2.4)  # seconds after each look at what must be there
LATE_SECONDS = sum(_LOOKS)
SPENT_SECONDS = 60.0
"""For so long a folder that was waited for in vain is not waited for again."""

_TABLE = "/proc/self/mountinfo"
_ESCAPE = re.compile(r"\\([0-7]{3})")

# The kernel keeps the names of these itself, so that two of its processes can never create one name twice.
_OWN = {
    "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "jfs", "nilfs2", "tmpfs", "ramfs", "overlay",
    "vfat", "msdos", "exfat", "ntfs3", "hfsplus",
}  # fmt: skip
_VOLATILE = {"tmpfs", "ramfs"}
_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "orangefs", "pvfs2",
    "panfs", "wekafs", "gfs2", "ocfs2", "virtiofs", "fuse",
}  # fmt: skip
_FUSE_ON_A_DISK = {
    "fuseblk", "fuse.ntfs-3g", "fuse.bindfs", "fuse.gocryptfs", "fuse.encfs", "fuse.mergerfs",
    "fuse.fuse-overlayfs", "fuse.unionfs",
}  # fmt: skip

# Mounts of buckets whose rename is a copy and a delete (or missing). Another name stands for the same program in the
# column of sources, because some of them mount as plain "fuse".
_BUCKETS = {
    **dict.fromkeys(("s3fs", "goofys", "geesefs", "mountpoint-s3", "mount-s3", "riofs", "yas3fs", "tigrisfs"), "s3://"),
    **dict.fromkeys(("cosfs", "ossfs", "obsfs"), "s3://"),
    "gcsfuse": "gs://",
    **dict.fromkeys(("blobfuse", "blobfuse2"), "another store"),
}

_WAYS: dict[tuple[str, int, str | None], Way] = {}
_WARNED: set[tuple[str, str]] = set()


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of the mount table.

    Attributes:
        filesystem: its type as the kernel calls it ("ext4", "nfs4", "fuse.rclone"); None where there is no table.
        network: others than this kernel may change it, or answer for it.
        own: the kernel itself sees that no name is given twice.
        instead: what to use in place of this mount, where a rename is no rename.
        weak: what is weak about it, in words.
    """

    filesystem: str | None
    network: bool = False
    own: bool = False
    instead: str | None = None
    weak: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.filesystem or "an unknown file system"


def mount_of(path: str, table: str = _TABLE) -> Mount:
    """The mount on which ``path`` is, or will be when it is made. Never fails: unknown is an answer."""
    path = os.path.realpath(path)
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        with open(table, encoding="utf-8", errors="surrogateescape") as lines:
            found = _line_of(path, lines.readlines())
    except OSError:
        found = None
    return Mount(None) if found is None else _judge(*found)


def _line_of(path: str, lines: list[str]) -> tuple[str, str] | None:
    """Type and source of the mount that holds ``path``: the longest mount point, the last of its name."""
    try:
        device = os.stat(path).st_dev
    except OSError:
        device = 0
    best: tuple[tuple[bool, int], str, str] | None = None
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(kind) < 2:
            continue
        point = _unescaped(fields[4])
        if path != point and not path.startswith(point.rstrip("/") + "/"):
            continue
        # A mount may lie hidden under a later one of a shorter path. (btrfs gives other device numbers here.)
        rank = (fields[2] == f"{os.major(device)}:{os.minor(device)}", len(point))
        if best is None or rank >= best[0]:
            best = (rank, _unescaped(kind[0]), _unescaped(kind[1]))
    return best[1:] if best is not None else None


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def _judge(kind: str, source: str) -> Mount:
    name = kind.partition(".")[2] or source.lower()
    if kind.split(".")[0] == "fuse" and name in _BUCKETS:
        return Mount(kind, network=True, instead=_BUCKETS[name])
    network = kind.split(".")[0] in _NETWORK and kind not in _FUSE_ON_A_DISK
    weak = []
    if kind in _VOLATILE:
        weak.append("its content is lost when the machine restarts")
    if network:
        weak.append("it is a network or user-space mount: other machines may see changes late")
    if kind == "fuse.seaweedfs":
        weak.append(
            "two machines that create one name at the same moment may both be told that they did, and an object "
            "that is replaced may be missing for a moment: write from one machine at a time, or use s3:// instead"
        )
    if kind == "fuse.rclone":
        weak.append("rclone may hold files back for seconds after it has taken them: use the store behind it directly")
    return Mount(kind, network=network, own=kind in _OWN, weak=tuple(weak))


class Lag:
    """How long a name that has to be there is waited for, on a mount whose kernel remembers that it was not."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def waits(self, folder: str) -> Iterator[float]:
        """What to wait after each look at a name in ``folder``, except for the last look."""
        if time.monotonic() < self._spent.get(folder, 0.0):
            yield 0.0
            return
        self._spent.pop(folder, None)
        yield from _LOOKS
        self._spent[folder] = time.monotonic() + SPENT_SECONDS


class Ground:
    """What a local store stands on. Looked at by the first verb and not before: a dead mount may hang.

    Args:
        root: the folder of the store.
        single_writer: the user promises that one process at a time writes, so ``look`` will do.
    """

    def __init__(self, root: str, *, single_writer: bool = False) -> None:
        self._root = root
        self._single_writer = single_writer
        self._mount: Mount | None = None
        self._way: Way | None = None

    @property
    def known(self) -> Mount:
        """What is known so far, without looking."""
        return self._mount or Mount(None)

    @property
    def way(self) -> Way | None:
        """How a put is create-only here, as far as that is known."""
        return self._way

    @property
    def conditional_put(self) -> bool | None:
        """As ``StoreTraits`` has it."""
        if self._way is not None:
            return self._way != "look"
        return True if self.known.own else None

    def look(self) -> Mount:
        """The mount, looked up once."""
        if self._mount is None:
            self._mount = mount_of(self._root)
            log.info("%s is on %s", self._root, self._mount)
            for weakness in self._mount.weak:
                self._warn(weakness)
        return self._mount

    def forget(self) -> None:
        """The root is on another file system now."""
        self._mount = self._way = None

    def folders_do_not_sync(self) -> None:
        """The file system knows no sync of folders."""
        self._weaken("it cannot sync folders: after a power cut the newest checkpoint may be missing")

    def _weaken(self, weakness: str) -> None:
        mount = self.look()
        if weakness not in mount.weak:
            self._mount = replace(mount, weak=(*mount.weak, weakness))
            self._warn(weakness)

    def require(self) -> None:
        """Refuse what no put can be made right on.

        Raises:
            AccessError: a rename is a copy there.
        """
        mount = self.look()
        if mount.instead is not None:
            raise AccessError(
                f"cannot write to {self._root}: on a {mount} mount a rename is a copy and a delete, so that a crash "
                f"leaves half a file under its final name, whoever else writes or not; use {mount.instead} instead "
                "of the mount (reading from it is fine)"
            )

    def ask(self, name: str, place: int, *, without: Way | None = None) -> Way:
        """How a put under ``name`` in an open folder can be create-only.

        Args:
            without: a way that has just been found not to work.

        Raises:
            AccessError: not at all.
            OSError: it could not be found out.
        """
        if self._way is not None and self._way != without:
            return self._way
        mount = self.look()
        spot = (self._root, os.fstat(place).st_dev, mount.filesystem)
        cached = _WAYS.get(spot)
        if mount.own and without is None:
            self._way = "link"  # and if there are no hard links, the first one says so
        elif cached is not None and cached != without and (cached != "look" or self._single_writer):
            self._way = cached
        else:
            self._way = _WAYS[spot] = self._probe(name, place, without)
        if self._way == "rename" and mount.network:
            self._weaken(
                "it has no hard links, and that a rename does not overwrite is known for this machine only: "
                "write from one machine at a time"
            )
        return self._way

    def _probe(self, name: str, place: int, without: Way | None) -> Way:
        mount = self.look()
        way: Way
        if without != "link" and probe_link(name, place):
            way, words = "link", "hard links"
        elif probe_rename(name, place):
            way, words = "rename", "a rename that does not overwrite"
        elif self._single_writer:
            way, words = "look", "a look and a rename (unsafe_single_writer)"
        else:
            raise AccessError(
                f"cannot write to {self._root}: {mount} has neither hard links nor a rename that refuses to overwrite, "
                "so two writers could overwrite each other's commit; choose another folder, or pass "
                "unsafe_single_writer=True if one process at a time writes here",
                errno=errno.EPERM,
            )
        log.info("%s on %s: creates without overwriting by %s", self._root, mount, words)
        return way

    def _warn(self, weakness: str) -> None:
        if (self._root, weakness) not in _WARNED:
            _WARNED.add((self._root, weakness))
            log.warning("%s is on %s: %s", self._root, self.known, weakness)
