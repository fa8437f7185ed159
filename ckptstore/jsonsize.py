"""How much memory JSON takes once it is decoded, known before it is decoded.

Three bytes, ``[],``, become a list of 72: a document within every cap on its length can still be a bomb. So what comes
from a store is weighed first, in one pass over its bytes that builds nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Measured on CPython and rounded up: what an object takes, with its share of the container it is in.
_LIST = 96
_DICT = 192
_VALUE = 40  # one for each comma and colon
_QUOTE = 12  # two a text
_BLOCK = 1 << 20


def fits(data: bytes, limit: int) -> bool:
    """Whether the objects that ``data`` decodes to take at most ``limit`` bytes."""
    # The quick look also counts what is inside of texts; only if that is too much is it worth a closer one.
    quick = sum(weight * data.count(sign) for sign, weight in _WEIGHTS.items())
    return quick + _text_size(data) <= limit or decoded_size(data) <= limit


def decoded_size(data: bytes) -> int:
    """An upper bound, in bytes, of the objects that ``data`` decodes to."""
    if b"\\" in data:  # first the pairs, so that what is left before a quote belongs to it
        data = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    view = np.frombuffer(data, np.uint8)
    total = inside = 0
    for start in range(0, view.size, _BLOCK):
        block = view[start : start + _BLOCK]
        # Wraps round at 256, which is even: the last bit is right.
        quotes = np.cumsum(block == ord('"'), dtype=np.uint8)
        outside: npt.NDArray[np.bool_] = ((quotes + np.uint8(inside)) & 1) == 0
        inside = (inside + int(quotes[-1])) & 1
        for sign, weight in _WEIGHTS.items():
            found = block == ord(sign)
            total += weight * int(np.count_nonzero(found if sign == b'"' else found & outside))
    return total + _text_size(data)


def _text_size(data: bytes) -> int:
    """One letter beyond Latin-1 makes Python keep all of its text at up to four bytes a letter."""
    return len(data) if data.isascii() and b"\\u" not in data else 4 * len(data)


_WEIGHTS = {b"[": _LIST, b"{": _DICT, b",": _VALUE, b":": _VALUE, b'"': _QUOTE}
