"""Whether an answer that says "done" is one: not every 200 comes from the store, and not every body is whole.

Login pages of portals, error pages of gateways and error documents come with 200 too. Believed, they would be an empty
listing, a damaged object, or a put that never was. None of them is an answer: the request is tried again.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ckptstore.errors import TransientError


def check_length(data: bytes | memoryview, name: str, length: object, span: object = None) -> None:
    """A body that is shorter than it was said to be is not to be trusted.

    Args:
        length: what Content-Length says, which is wrong where something on the way has cut the body.
        span: what Content-Range says.
    """
    match = re.match(r"bytes (\d+)-(\d+)/", str(span))
    for announced in (length, int(match[2]) - int(match[1]) + 1 if match else None):
        if announced is not None and len(data) != int(str(announced)):
            raise TransientError(f"the body of {name!r} ended after {len(data)} of {announced} bytes")


def check_object(name: str, kind: object, *marks: object) -> None:
    """The answer to a read, a look or a delete.

    Args:
        kind: its Content-Type. Nothing of ours is a page.
        marks: what every answer about an object has one of; none: no mark is needed.
    """
    if (marks and not any(marks)) or str(kind).lower().startswith("text/html"):
        raise TransientError(f"what came in answer about {name!r} is not from the store ({kind or 'of no type'})")


def check_listing(reply: Collection[str], prefix: str, *marks: str) -> None:
    """Without any of the fields that each listing has, the answer is no empty listing: it is none."""
    if not set(marks) & set(reply):
        raise TransientError(f"what came in answer to the listing of {prefix!r} is no listing")
