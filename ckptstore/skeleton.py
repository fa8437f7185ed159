"""The JSON side of a record: nodes of plain values, and walks over a skeleton. ``tree.py`` describes the encoding.

Everything here is strict, because skeletons are read from stores: one tag a node, only known tags, one spelling for
one value, bounded depth. Whatever is not exactly what ``flatten`` writes is a ``FormatError``.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import re
import reprlib
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import numpy as np

from ckptstore import dtypes
from ckptstore.arrays import torch_module
from ckptstore.errors import FormatError, InvalidRecordError

MAX_DEPTH = 200  # JSON nests three to four levels for each of ours, and JSON parsers give up near a thousand
MAX_KEY_DEPTH = 16
MAX_INLINE = 1024
MAX_SAFE_INT = 2**53 - 1

PAIRS = frozenset({"dict", "odict", "defaultdict", "counter"})
ROWS = frozenset({"list", "tuple"})
FACTORIES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)},
    "None": None,
}


class _Nothing:
    def __repr__(self) -> str:
        return "NOTHING"


NOTHING: Final = _Nothing()
"""What ``prune`` puts where nothing matched. It loads as None, and loading in place leaves such an item alone.

In a state to load into, it stands for what is not wanted.
"""


# ---------------------------------------------------------------- plain values to nodes


def encode_str(value: str) -> object:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"surrogates": _b64(value.encode("utf-8", "surrogatepass"))}
    return value


def encode_int(value: int) -> object:
    return value if -MAX_SAFE_INT <= value <= MAX_SAFE_INT else {"int": hex(value)}


def encode_float(value: float) -> object:
    # The difference of a finite number to itself is 0, of anything else NaN.
    return value if value - value == 0.0 else {"float": _bits(value)}


def encode_bytes(value: bytes | bytearray) -> dict[str, str]:
    return {"bytes": _b64(value)}


def encode_complex(value: complex) -> object:
    return {"complex": [_bits(value.real), _bits(value.imag)]}


def encode_scalar(value: Any) -> object:
    """A NumPy scalar with its exact type. ``InvalidRecordError`` says why it cannot be stored."""
    if type(value) is np.str_:
        # By code points, because both str() and an array of it lose trailing NULs.
        text = str.__str__(value)
        return {"scalar": [f"<U{len(text)}", _b64(text.encode("utf-32-le", "surrogatepass"))]}
    name = dtypes.numpy_name(value.dtype)
    if name is None or value.dtype.type is not type(value):
        raise InvalidRecordError(f"a NumPy scalar of type {value.dtype} has no portable form")
    if type(value) is np.bytes_:
        return {"scalar": [name, _b64(bytes(value))]}
    return {"scalar": [name, _b64(np.asarray(value, dtypes.numpy_dtype(name)).tobytes())]}


def encode_key(value: object, depth: int = 0) -> object:
    """A dictionary key or an element of a set. ``InvalidRecordError`` says why it cannot be stored."""
    kind = type(value)
    encode = _KEYS.get(kind)
    if encode is not None:
        return encode(value)
    if isinstance(value, tuple) and kind is tuple:
        if depth >= MAX_KEY_DEPTH:
            raise InvalidRecordError(f"a key of tuples nested deeper than {MAX_KEY_DEPTH} levels")
        return {"tuple": [encode_key(item, depth + 1) for item in value]}
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        return encode_scalar(value)
    raise InvalidRecordError(f"{kind.__module__}.{kind.__qualname__} cannot be a key or a member of a set")


def key_text(key: object) -> str:
    if type(key) is str:
        return key
    # Decimal digits of very large ints cost quadratic time, and Python refuses to make more than 4300.
    return hex(key) if type(key) is int and key.bit_length() > 64 else str(key)


def join(path: str, key: object) -> str:
    return f"{path}.{key_text(key)}" if path else key_text(key)


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _b64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


def _same(value: object) -> object:
    return value


ATOMS: dict[type, Callable[[Any], object]] = {
    str: encode_str, int: encode_int, float: encode_float, bool: _same, type(None): _same, complex: encode_complex,
}  # fmt: skip
_KEYS: dict[type, Callable[[Any], object]] = {
    str: encode_str, int: encode_int, float: encode_float, bool: _same, type(None): _same, bytes: encode_bytes,
}  # fmt: skip


# ---------------------------------------------------------------- nodes to plain values


def split(node: object, depth: int) -> tuple[str, Any]:
    """``(tag, body)`` of a node: ``value`` for what JSON has itself, ``list`` for an array, else its one tag."""
    if depth > MAX_DEPTH:
        raise FormatError(f"the record is nested deeper than {MAX_DEPTH} levels")
    if type(node) is list:
        return "list", node
    if type(node) is not dict:
        return "value", node
    if len(node) == 1 or (len(node) == 2 and "metadata" in node and "odict" in node):
        tag = "odict" if len(node) == 2 else next(iter(node))
        if tag in _KNOWN:
            return tag, node[tag]
    raise FormatError(f"unknown node {sorted(map(str, node))[:3]} in a record: written by a newer version, or damaged")


def pairs(tag: str, body: Any) -> list[tuple[Any, Any]]:
    """``(key, child node)`` of every entry of a dictionary node."""
    if tag == "defaultdict":
        _require(type(body) is list and len(body) == 2 and type(body[0]) is str and body[0] in FACTORIES, body)
        body = body[1]
    _require(type(body) is list, body)
    found: dict[Any, Any] = {}
    for entry in body:
        _require(type(entry) is list and len(entry) == 2, entry)
        key = entry[0] if type(entry[0]) is str else decode_key(entry[0])
        _require(key not in found, entry[0])
        found[key] = entry[1]
    return list(found.items())


def rows(body: Any) -> list[Any]:
    """The child nodes of a list or tuple node."""
    _require(type(body) is list, body)
    return list(body)


def array_index(body: Any, count: int | None) -> int:
    _require(type(body) is int and body >= 0, body)
    if count is not None and body >= count:
        raise FormatError(f"the record refers to array {body} and has only {count}")
    return int(body)


def decode_leaf(tag: str, body: Any) -> object:
    """The value of a node that holds no other nodes and is no array."""
    if tag == "value":
        return _decode_atom(body)
    if tag in ("set", "frozenset"):
        items = [decode_key(item) for item in rows(body)]
        made = set(items)
        _require(len(made) == len(items), body)
        return made if tag == "set" else frozenset(made)
    decode = _DECODERS.get(tag)
    if decode is None:
        raise FormatError(f"a record cannot hold a {tag} here")
    return decode(body)


def decode_key(node: object, depth: int = 0) -> Any:
    tag, body = split(node, depth)
    if tag == "tuple":
        _require(depth < MAX_KEY_DEPTH, body)
        return tuple(decode_key(item, depth + 1) for item in rows(body))
    _require(tag in _KEY_TAGS, tag)
    key = decode_leaf(tag, body)
    try:
        hash(key)
    except (TypeError, ValueError):
        _require(False, body)
    return key


def _require(condition: bool, found: object) -> None:
    if not condition:
        raise FormatError(f"malformed node in a record, near {reprlib.repr(found)[:80]}")


def _decode_atom(node: Any) -> object:
    kind = type(node)
    if node is NOTHING:
        return None
    if kind is int:
        _require(-MAX_SAFE_INT <= node <= MAX_SAFE_INT, node)
    elif kind is float:
        _require(node - node == 0.0, node)
    elif kind is str:
        _require(encode_str(node) is node, node)
    else:
        _require(node is None or kind is bool, node)
    return cast(object, node)


def _decode_int(body: Any) -> int:
    _require(type(body) is str and re.fullmatch(r"-?0x[0-9a-f]+", body) is not None, body)
    value = int(body, 16)
    _require(abs(value) > MAX_SAFE_INT and hex(value) == body, body)
    return value


def _decode_bits(body: Any) -> float:
    _require(type(body) is str and re.fullmatch(r"[0-9a-f]{16}", body) is not None, body)
    value: float = struct.unpack(">d", bytes.fromhex(body))[0]
    return value


def _decode_float(body: Any) -> float:
    value = _decode_bits(body)
    _require(value - value != 0.0, body)
    return value


def _decode_complex(body: Any) -> complex:
    _require(type(body) is list and len(body) == 2, body)
    return complex(_decode_bits(body[0]), _decode_bits(body[1]))


def _decode_base64(body: Any) -> bytes:
    _require(type(body) is str and body.isascii(), body)
    try:
        data = base64.b64decode(body, validate=True)
    except binascii.Error:
        data = b""
    _require(_b64(data) == body, body)
    return data


def _decode_surrogates(body: Any) -> str:
    return _decode_text(_decode_base64(body), "utf-8")


def _decode_text(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding, "surrogatepass")
    except UnicodeDecodeError:
        raise FormatError(f"malformed text in a record, near {data[:40]!r}") from None


def _decode_scalar(body: Any) -> object:
    _require(type(body) is list and len(body) == 2 and type(body[0]) is str, body)
    name, data = body[0], _decode_base64(body[1])
    _require(dtypes.dtype_size(name) == len(data) and name[0] != ">", name)
    if name.startswith("<U"):
        return np.str_(_decode_text(data, "utf-32-le"))
    if name.startswith("|"):
        return (np.bytes_ if name[1] == "S" else np.void)(data)
    return np.frombuffer(data, dtypes.numpy_dtype(name))[0]


def _decode_size(body: Any) -> object:
    _require(type(body) is list and all(type(size) is int for size in body), body)
    torch = torch_module()
    return tuple(body) if torch is None else torch.Size(body)


_DECODERS: dict[str, Callable[[Any], object]] = {
    "surrogates": _decode_surrogates, "int": _decode_int, "float": _decode_float, "complex": _decode_complex,
    "bytes": _decode_base64, "bytearray": lambda body: bytearray(_decode_base64(body)), "scalar": _decode_scalar,
    "size": _decode_size,
}  # fmt: skip
_KNOWN = PAIRS | set(_DECODERS) | {"tuple", "set", "frozenset", "array", "items"}
_KEY_TAGS = frozenset({"value", "surrogates", "int", "float", "bytes", "scalar"})


# ---------------------------------------------------------------- walks


def unflatten(skeleton: object, make: Callable[[int], object], count: int | None = None) -> object:
    """The state of a skeleton. ``make(i)`` gives array ``i``, once for each; ``count`` bounds the indexes."""
    made: dict[int, object] = {}

    def array(body: Any) -> object:
        index = array_index(body, count)
        if index not in made:
            made[index] = make(index)
        return made[index]

    def value(node: Any, depth: int) -> object:
        tag, body = split(node, depth)
        if tag == "array":
            return array(body)
        if tag in PAIRS:
            entries = [(key, value(child, depth + 1)) for key, child in pairs(tag, body)]
            return _mapping(tag, node, entries, value, depth)
        if tag in ROWS:
            items = [value(child, depth + 1) for child in rows(body)]
            return items if tag == "list" else tuple(items)
        return decode_leaf(tag, body)

    return value(skeleton, 0)


def _mapping(
    tag: str, node: dict[str, Any], items: list[tuple[Any, object]], value: Callable[[Any, int], object], depth: int
) -> object:
    if tag == "dict":
        return dict(items)
    if tag == "counter":
        # Through dict.update: Counter would count the pairs.
        counter: Counter[Any] = Counter()
        dict.update(counter, items)
        return counter
    if tag == "defaultdict":
        return defaultdict(FACTORIES[node[tag][0]], items)
    ordered: Any = OrderedDict(items)
    if "metadata" in node:
        ordered._metadata = value(node["metadata"], depth + 1)
    return ordered


def leaf_paths(skeleton: object) -> dict[int, list[str]]:
    """The dotted paths of the leaves that refer to each array. Tied arrays have several."""
    found: dict[int, list[str]] = {}

    def walk(node: Any, path: str, depth: int) -> None:
        tag, body = split(node, depth)
        if tag == "array":
            found.setdefault(array_index(body, None), []).append(path)
        for key, child in _children(tag, body):
            walk(child, join(path, key), depth + 1)
        if tag == "odict" and "metadata" in node:
            walk(node["metadata"], join(path, "_metadata"), depth + 1)

    walk(skeleton, "", 0)
    return found


def _children(tag: str, body: Any) -> list[tuple[Any, Any]]:
    if tag in PAIRS:
        return pairs(tag, body)
    return list(enumerate(rows(body))) if tag in ROWS else []


def prune(skeleton: object, patterns: Sequence[str]) -> object:
    """What is left of a skeleton when only leaves that match a pattern are kept; None if none does.

    Patterns are those of ``fnmatch.fnmatchcase``, matched against the dotted path of every leaf and of everything
    that it is in: ``encoder`` and ``encoder.*`` select the whole encoder. Dictionaries lose the other entries; lists
    and tuples keep their length.
    """
    alternatives = [fnmatch.translate(form) for pattern in patterns for form in (pattern, f"{pattern}.*")]
    wanted = re.compile("|".join(alternatives or ["(?!)"])).match

    def walk(node: Any, path: str, depth: int) -> object:
        tag, body = split(node, depth)
        children = [walk(child, join(path, key), depth + 1) for key, child in _children(tag, body)]
        if not children:
            return node if wanted(path) else NOTHING
        if all(child is NOTHING for child in children):
            return NOTHING
        if tag in ROWS:
            return children if tag == "list" else {"tuple": children}
        entries = body[1] if tag == "defaultdict" else body
        kept = [[entry[0], child] for entry, child in zip(entries, children, strict=True) if child is not NOTHING]
        return {**node, tag: [body[0], kept] if tag == "defaultdict" else kept}

    kept = walk(skeleton, "", 0)
    return None if kept is NOTHING else kept
