"""What the program ``fusermount3`` does, for root: mounts for FUSE programs where the Debian package is missing.

They start it with a socket in ``_FUSE_COMMFD`` and want the open device back through it.
"""

from __future__ import annotations

import array
import ctypes
import os
import socket
import sys
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
FLAGS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "sync": 16, "noatime": 1024}
OWN = {"fsname", "subtype", "rw", "suid", "dev", "exec", "async", "atime", "auto_unmount", "blkdev"}


def install(folder: Path) -> dict[str, str]:
    """An environment in which FUSE programs find this file under both names. ``folder`` is for the scripts."""
    folder.mkdir()
    for name in ("fusermount", "fusermount3"):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).absolute()} "$@"\n')
        script.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def main() -> None:
    arguments, options, place, unmount = sys.argv[1:], "", "", False
    while arguments:
        argument = arguments.pop(0)
        if argument == "-o":
            options = arguments.pop(0)
        elif argument.startswith("-"):
            unmount = unmount or "u" in argument.lstrip("-")
        else:
            place = argument
    if unmount:
        sys.exit(1 if libc.umount2(os.fsencode(place), 2) else 0)
    given = dict(option.partition("=")[::2] for option in options.split(",") if option)
    device = os.open("/dev/fuse", os.O_RDWR)
    kept = [f"{name}={value}" if value else name for name, value in given.items() if name not in {*OWN, *FLAGS}]
    kept += [f"fd={device}", f"rootmode={os.stat(place).st_mode & 0o170000:o}", "user_id=0", "group_id=0"]
    kind = ".".join(part for part in ("fuse", given.get("subtype", "")) if part)
    texts = (given.get("fsname", "fuse"), place, kind, ",".join(kept))
    source, target, filesystem, data = (os.fsencode(text) for text in texts)
    flags = 6 | sum(bit for name, bit in FLAGS.items() if name in given)
    if libc.mount(source, target, filesystem, flags, data):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), place)
    with socket.socket(fileno=int(os.environ["_FUSE_COMMFD"])) as reply:
        reply.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [device]))])


if __name__ == "__main__":
    main()
