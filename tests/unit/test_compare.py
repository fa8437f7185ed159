"""Comparing elements: every type, bit for bit, against a slow and simple judge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptstore.compare import Difference, compare
from ckptstore.dtypes import numpy_dtype

FLOATS = [
    *("float16", "float32", "float64", ">f4", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float4_e2m1fn"),
]
INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", ">i8", ">u2", "int4", "uint4", "int2"]
OTHERS = ["bool", "complex64", "complex128", ">c8", "<M8[ns]", "<U3", "|S5", "|V7", "|V16"]


def raw(array: Any) -> memoryview:
    return memoryview(np.ascontiguousarray(array).tobytes())


def random_elements(dtype: str, count: int, seed: int) -> Any:
    """Elements of any bits that are valid for the type."""
    rng = np.random.default_rng(seed)
    kind = numpy_dtype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if dtype in ("int4", "uint4", "int2", "float6_e2m3fn", "float4_e2m1fn"):
        return rng.integers(0, 2, count).astype(np.float32).astype(kind)
    if dtype == "<U3":
        return np.array(rng.choice(["abc", "x", ""], count), kind)
    return np.frombuffer(rng.integers(0, 256, count * kind.itemsize, dtype=np.uint8).tobytes(), kind)


@pytest.mark.parametrize("dtype", FLOATS + INTS + OTHERS)
def test_every_type_against_a_slow_judge(dtype: str) -> None:
    """Counts and distances are those of one element after the other."""
    a, b = random_elements(dtype, 400, 1), random_elements(dtype, 400, 2)
    b = np.where(np.arange(400) % 3 == 0, a, b).astype(a.dtype)
    found = compare(dtype, raw(a), raw(b))
    changed = [n for n in range(400) if a[n].tobytes() != b[n].tobytes()]
    assert found.changed == len(changed) > 0
    distances: list[Any] = []
    for n in changed:
        if dtype in INTS:
            distances.append(abs(int(a[n]) - int(b[n])))
        elif dtype in FLOATS:
            with np.errstate(all="ignore"):
                distances.append(abs(np.float64(a[n]) - np.float64(b[n])))
        elif dtype == "bool":
            distances.append(1)
        elif "c" in dtype:
            with np.errstate(all="ignore"):
                distances.append(abs(np.complex128(a[n]) - np.complex128(b[n])))
    known = [distance for distance in distances if distance == distance]
    assert found.incomparable == len(distances) - len(known)
    # NumPy takes the modulus of many complex numbers in another way than that of one.
    assert found.largest == (pytest.approx(max(known), rel=1e-14) if "c" in dtype else max(known, default=None))
    assert compare(dtype, raw(a), raw(a)) == Difference()


def test_bits_decide() -> None:
    """NaN equals the same NaN and no other; -0.0 is another zero, at the distance 0; infinities have a distance."""
    nan, other = np.float32("nan"), np.frombuffer(b"\x01\x00\xc0\x7f", np.float32)[0]
    a = np.array([nan, nan, 0.0, np.inf, np.inf, 1.0], np.float32)
    b = np.array([nan, other, -0.0, np.inf, -np.inf, 1.0], np.float32)
    assert compare("float32", raw(a), raw(b)) == Difference(3, float("inf"), 1)
    assert compare("float32", raw(a[:3]), raw(b[:3])) == Difference(2, 0.0, 1)
    assert compare("float32", raw(a[:2]), raw(b[:2])) == Difference(1, None, 1)


def test_wide_integers_are_exact() -> None:
    """No rounding, no overflow."""
    low, high = np.array([-(2**63)]), np.array([2**63 - 1])
    assert compare("int64", raw(low), raw(high)).largest == 2**64 - 1
    assert compare("uint64", raw(np.array([2**64 - 1], np.uint64)), raw(np.array([1], np.uint64))).largest == 2**64 - 2
    assert compare("int8", raw(np.array([-128], np.int8)), raw(np.array([127], np.int8))).largest == 255


def test_many_elements_are_looked_at_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks together are the whole."""
    a = np.arange(10_000, dtype=np.float64)
    b = a.copy()
    b[[3, 5000, 9999]] += [1, -7, 2]
    monkeypatch.setattr("ckptstore.compare._BLOCK", 256)
    assert compare("float64", raw(a), raw(b)) == Difference(3, 7.0)


def test_odd_ends_and_nothing() -> None:
    """Half an element is only bits; no bytes are equal."""
    assert compare("float32", memoryview(b"abcdef"), memoryview(b"abcdeX")).changed == 1
    assert compare("float32", memoryview(b""), memoryview(b"")) == Difference()
