"""Runs ``ckptstore`` in forks of itself: importing once makes many lives of a watcher affordable.

A line of JSON on standard input is ``[file for the output, argument, ...]``; the answer is the process id.
"""

from __future__ import annotations

import json
import os
import sys

from ckptstore.cli import main


def child(output: str, arguments: list[str]) -> None:
    code = 99
    try:
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdin.close()
        code = main(arguments)
        sys.stdout.flush()
    finally:
        os._exit(code)


def serve() -> None:
    for line in sys.stdin:
        words = json.loads(line)
        if words[0] == "wait":
            status = os.waitpid(words[1], 0)[1]
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if not answer:
                child(words[0], words[1:])
        os.write(1, f"{answer}\n".encode())


if __name__ == "__main__":
    serve()
