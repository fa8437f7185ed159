"""Arrays as bytes: exact for every element type and layout, by ranges, and into memory that exists already."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.arrays import ArraySpec, Destination, dtype_size, mismatch, plane_size, source
from ckptstore.dtypes import numpy_dtype, numpy_name
from ckptstore.errors import FormatError, InvalidArgumentError, InvalidRecordError
from tests.unit.exact import read_all, reload, same_array

PLAIN = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
# What the oldest supported ml_dtypes does not have is tested where it is there.
CUSTOM = [
    name for name in (
        "bfloat16", "complex32", "bcomplex32", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
        "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e5m3fnu", "float8_e8m0fnu", "float6_e2m3fn",
        "float6_e3m2fn", "float4_e2m1fn", "int1", "int2", "int4", "uint1", "uint2", "uint4",
    ) if hasattr(ml_dtypes, name)
]  # fmt: skip
BIG = [">i2", ">i4", ">i8", ">u2", ">u4", ">u8", ">f2", ">f4", ">f8", ">c8", ">c16"]
OTHER = ["<M8[ns]", ">M8[ns]", "<m8[25s]", ">m8[D]", "<M8", "<U10", ">U3", "|S5", "|V8", "<U1"]
NAMES = PLAIN + CUSTOM + BIG + OTHER
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3, 0, 2), (2, 3, 4), (5, 1)]
UNKNOWN = [
    "", "float", "float31", "O", "object", "|O", "<f4", "=f4", "f4", ">f3", "float128", "longdouble", ">U", "<U-1",
    "<U01", "|U3", "<S3", "<M8[1s]", "<M8[xs]", "<M8[99999999999s]", "<M8[999999999s]x", "V8", "i4,f4", "(2,)i4",
    "<U9999999999", "<U999999999", "__import__('os')", "float32\n", "bfloat16 ", "qint8", "void", "<U１",
]  # fmt: skip


def bits(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """An array of that element type whose bits are random: NaN payloads, -0.0, odd booleans and all."""
    dtype = numpy_dtype(name)
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape, dtype=int)) * dtype.itemsize, np.uint8)
    if dtype.kind == "U":
        raw = (raw % 120).astype(np.uint32).view(np.uint8)[: raw.size]
    return raw.view(dtype).reshape(shape) if raw.size else np.empty(shape, dtype)


def raw(array: np.ndarray[Any, Any]) -> bytes:
    return array.tobytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_element_type_is_bit_exact(name: str, shape: tuple[int, ...]) -> None:
    """P7: every element type in 0-d, empty and 3-d comes back with the same bits, type, shape and byte order."""
    array = bits(name, shape)
    found = source(array)
    assert found.spec == ArraySpec("numpy", name, shape)
    assert found.nbytes == array.nbytes == found.spec.nbytes
    assert read_all(found) == raw(array)
    back = reload(found)
    assert type(back) is np.ndarray
    assert (back.dtype, back.dtype.str, back.shape) == (array.dtype, array.dtype.str, array.shape)
    assert raw(back) == raw(array)
    assert back.flags.writeable


def test_nan_payloads_and_negative_zero() -> None:
    """P7: quiet and signalling NaNs of both signs, infinities, -0.0 and denormals keep their bits."""
    patterns = [0x7FF8DEADBEEF0001, 0xFFF0000000000001, 0x7FF0000000000000, 0x8000000000000000, 1, 0x7FF4000000000000]
    for view in ("float64", "complex128", ">f8", "<M8[ns]"):
        array = np.array(patterns, np.uint64).view(numpy_dtype(view))
        assert raw(reload(source(array[::-1]))) == raw(array[::-1])
        assert raw(reload(source(array))) == raw(array)


@pytest.mark.parametrize("name", NAMES)
def test_layouts_come_back_by_value(name: str) -> None:
    """P7: transposed, strided, reversed, broadcast and Fortran arrays come back with the values of every element."""
    base = bits(name, (6, 5, 8))
    views = [
        base.T,
        base[::2],
        base[::-1, :, ::-3],
        base[:, 2],
        base.swapaxes(0, 1),
        np.asfortranarray(base),
        base[1:2].T,
    ]
    views += [np.broadcast_to(base[:1, :, :1], (4, 5, 7)), np.broadcast_to(base[0, 0, 0], (3, 2)), base[:, :0, ::2]]
    for view in views:
        found = source(view)
        assert read_all(found, 11) == raw(view)
        assert same_array(reload(found), view)


@given(st.data())
def test_any_range_of_any_layout(data: st.DataObject) -> None:
    """Any range of elements of any view is what those elements are in C order."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    array = array.transpose(data.draw(st.permutations(range(array.ndim))))
    array = array[tuple(slice(None, None, data.draw(st.sampled_from([1, -1, 2, -2]))) for _ in array.shape)]
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))
    part = source(array).read(start * 4, stop * 4)
    assert bytes(part) == raw(array)[start * 4 : stop * 4]
    assert part.format == "B"
    assert part.nbytes == (stop - start) * 4


def test_contiguous_arrays_are_not_copied() -> None:
    """P6: a range of contiguous memory is a view of it; a range of anything else costs that range and no more."""
    array = np.zeros(1 << 20, np.uint8)
    part = source(array).read(100, 200)
    array[100:200] = 7
    assert bytes(part) == b"\7" * 100
    turned = source(np.zeros((1 << 11, 1 << 11), np.float64).T)
    tracemalloc.start()
    turned.read(8 * 12345, 8 * 22345)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def test_views_store_their_own_elements_only() -> None:
    """A slice of a big array has the bytes of the slice."""
    big = np.zeros(10_000_000, np.float32)
    assert source(big[:10]).nbytes == 40
    assert source(big[::1000]).nbytes == 40_000
    assert source(np.broadcast_to(big[:1], (1000,))).nbytes == 4000


@pytest.mark.parametrize(("start", "stop"), [(-4, 4), (0, 44), (8, 4), (2, 8), (0, 3)])
def test_ranges_that_cut_elements_are_refused(start: int, stop: int) -> None:
    """Ranges must lie inside the array and on borders of elements."""
    with pytest.raises(InvalidArgumentError):
        source(np.zeros(10, np.float32)).read(start, stop)


def test_bytes_and_bytearrays() -> None:
    """Bytes come back as bytes and bytearrays as bytearrays that can still grow."""
    for value in (b"", b"abc", bytearray(b"abc"), bytearray()):
        back = reload(source(value))
        assert type(back) is type(value)
        assert back == value
    grown = reload(source(bytearray(b"ab")))
    grown.extend(b"cd")
    assert grown == b"abcd"


def test_plane_and_element_sizes() -> None:
    """The codec splits by the numbers inside an element, and chunks are cut between elements."""
    expected = {
        "float32": 4, "complex64": 4, "complex128": 8, ">c8": 4, ">c16": 8, "complex32": 2, "bfloat16": 2, "bool": 1,
        "<M8[ns]": 8, "<U10": 4, ">U3": 4, "|S4": 1, "|V8": 1, "float8_e4m3fn": 1, "int4": 1, ">f8": 8, "<U0": 4,
    }  # fmt: skip
    assert {name: plane_size(name) for name in expected} == expected
    assert [dtype_size(name) for name in ("complex128", "<U10", "|S5", "int4", "bfloat16")] == [16, 40, 5, 1, 2]
    found = source(np.zeros(2, "<U10"))
    assert (found.align, found.item_size) == (40, 4)
    assert (source(b"abc").align, source(b"abc").item_size) == (1, 1)


def test_zero_width_text() -> None:
    """Arrays of empty text have no bytes and still come back with their type and shape."""
    for name in ("<U0", "|S0", "|V0"):
        array: np.ndarray[Any, Any] = np.ndarray((3,), name)
        back = reload(source(array))
        assert (back.dtype.str, back.shape) == (name, (3,))


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_names_are_format_errors(name: str) -> None:
    """P8: a name that is not in the tables is an error at load, and never evaluated."""
    for function in (dtype_size, plane_size, numpy_dtype, lambda name: ArraySpec("numpy", name, (1,))):
        with pytest.raises(FormatError):
            function(name)


@pytest.mark.parametrize("name", NAMES)
def test_one_type_has_one_name(name: str) -> None:
    """Names and types map one to one, so the same array always has the same description."""
    assert numpy_name(numpy_dtype(name)) == name
    assert dtype_size(name) == numpy_dtype(name).itemsize


REFUSED = {
    "objects": (np.array([1, None], object), "Python objects"),
    "0-d object": (np.array(None, object), "Python objects"),
    "structured": (np.zeros(2, [("a", "f4"), ("b", "i4")]), "structured"),
    "structured in parts": (np.zeros(2, [("a", "O")]), "Python objects"),
    "longdouble": (np.zeros(2, np.longdouble), "differ between machines"),
    "clongdouble": (np.zeros(2, np.clongdouble), "differ between machines"),
    "masked": (np.ma.masked_array([1, 2], [False, True]), "subclass"),
    "record array": (np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]), "subclass"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_portable_form_is_refused(case: str) -> None:
    """P7: element types and subclasses that cannot come back exactly are refused, with the reason."""
    value, reason = REFUSED[case]
    with pytest.raises(InvalidRecordError, match=reason):
        source(value)


def test_specs_that_make_no_sense() -> None:
    """P8: nothing about an array is trusted before it was checked, and sizes do not overflow."""
    shapes: list[Any] = [(-1,), (2.0,), (True,), ("3",), [2], (2**62, 2), (2**63,), (0, 2**63), (1,) * 65, None]
    for shape in shapes:
        with pytest.raises(FormatError):
            ArraySpec("numpy", "float32", shape)
    for kind, dtype, size in (("list", "uint8", (1,)), ("bytes", "float32", (1,)), ("bytes", "uint8", (1, 1))):
        with pytest.raises(FormatError):
            ArraySpec(kind, dtype, size)
    assert ArraySpec("numpy", "float32", (2**40, 2**20)).nbytes == 2**62
    assert ArraySpec("numpy", "float32", (2**40, 0)).nbytes == 0


def test_aliases_are_the_same_elements_seen_alike() -> None:
    """Sources are equal for one memory seen one way, and different for another shape, type, stride or start."""
    base = np.zeros((4, 4), np.float32)
    alike = [base, base[:], base.view(), base.reshape(4, 4)]
    unlike = [base.T, base[:2], base[1:3], base[::2], base.reshape(16), base.view(np.int32), base[:, ::2], base.copy()]
    assert len({source(array).identity for array in alike}) == 1
    assert len({source(array).identity for array in [base, *unlike]}) == len(unlike) + 1


def test_empty_arrays_are_aliases_only_of_themselves() -> None:
    """Empty arrays share no memory, so only the same object is one array."""
    base = np.zeros((4, 4), np.float32)
    views = [base[:0], base[:0], np.zeros((0, 4), np.float32)]
    assert len({source(array).identity for array in views}) == 3
    assert source(views[0]).identity == source(views[0]).identity


def test_a_source_keeps_its_memory_alive() -> None:
    """What was handed over can still be read when the caller has let go of it."""
    sources = [source(np.full(1000, i, np.int64)) for i in range(50)]
    assert all(bytes(found.read(0, 8000)) == raw(np.full(1000, i, np.int64)) for i, found in enumerate(sources))


def fill(spec: ArraySpec, target: object, data: bytes) -> object:
    destination = Destination.into_existing(spec, target)
    destination.buffer[:] = data
    return destination.finish()


@pytest.mark.parametrize("name", NAMES)
def test_into_existing_memory(name: str) -> None:
    """P6, P7: a load uses the memory of an array in C order and fills any other by element."""
    array = bits(name, (3, 4, 5), seed=1)
    spec = source(array).spec
    plain = np.zeros_like(array)
    destination = Destination.into_existing(spec, plain)
    destination.buffer[:] = raw(array)
    assert raw(plain) == raw(array)
    assert destination.finish() is plain
    room = np.zeros((6, 4, 10), array.dtype)
    others: list[np.ndarray[Any, Any]] = [np.zeros((5, 4, 3), array.dtype).T, room[::2, :, ::-2]]
    for target in [*others, np.zeros_like(array, order="F")]:
        assert fill(spec, target, raw(array)) is target
        assert raw(target) == raw(array)


def test_into_another_byte_order() -> None:
    """A big-endian target takes little-endian bytes and the other way around, value by value."""
    for first, second in (("float32", ">f4"), (">c16", "complex128"), ("<U3", ">U3"), ("<M8[s]", ">M8[s]")):
        array = bits(first, (4,), seed=3)
        target = np.zeros(4, numpy_dtype(second))
        fill(source(array).spec, target, raw(array))
        assert raw(target) == raw(array.astype(target.dtype) if array.dtype.kind == "U" else array.byteswap())


def test_targets_that_do_not_fit() -> None:
    """Read-only, overlapping, foreign or different targets are refused before a byte is written."""
    spec = ArraySpec("numpy", "float32", (2, 3))
    frozen = np.zeros((2, 3), np.float32)
    frozen.flags.writeable = False
    overlap = np.lib.stride_tricks.as_strided(np.zeros(3, np.float32), (2, 3), (0, 4))
    targets: list[tuple[object, str]] = [
        (frozen, "read-only"), (overlap, "same memory"), (np.zeros((3, 2), np.float32), r"\[2, 3\].*\[3, 2\]"),
        (np.zeros((2, 3), np.float64), "float64"), (np.zeros((2, 3), np.int32), "int32"), (None, "not an array"),
        (np.ma.zeros((2, 3), np.float32), "subclass"), ([[0.0]], "not an array"), (np.zeros((2, 3), object), "objects"),
    ]  # fmt: skip
    for target, reason in targets:
        with pytest.raises(InvalidArgumentError, match=reason):
            Destination.into_existing(spec, target)
    assert mismatch(ArraySpec("bytes", "uint8", (3,)), np.zeros(3, np.uint8)) == "the checkpoint holds bytes"
    assert mismatch(spec, np.zeros((2, 3), np.float32)) is None


def test_torch_arrays_are_numpy_arrays_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of tensors can be read where torch is not imported: as NumPy, bfloat16 and float8 by ml_dtypes."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name in ("float32", "bfloat16", "float8_e4m3fn", "bool", "uint4"):
        destination = Destination.allocate(ArraySpec("torch", name, (2,)))
        destination.buffer[:] = bytes(destination.buffer.nbytes)
        found = destination.finish()
        assert isinstance(found, np.ndarray)
        assert numpy_name(found.dtype) == name


def test_torch_is_never_imported() -> None:
    """The package finds torch where the caller imported it and does not import it itself."""
    code = (
        "import sys, numpy as np; from ckptstore.tree import flatten, unflatten; from ckptstore.arrays import *;"
        "flat = flatten({'a': np.ones(3)}, 'r'); Destination.allocate(ArraySpec('torch', 'bfloat16', (3,)));"
        "unflatten({'size': [1]}, None); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
