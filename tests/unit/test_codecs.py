"""Frames: what goes in comes out, and nothing else ever does."""

from __future__ import annotations

import random
import struct
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.codecs import HEADER_SIZE, MAX_RAW, decode, encode, encode_into, raw_length_of, room_for
from ckptstore.errors import CorruptionError, FormatError, InvalidArgumentError
from ckptstore.planes import BLOCK

KEY = "attempts/a/chunks/d"
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
LENGTH = 1000  # bytes in a plane of a forged frame

Bytes = bytes | bytearray | memoryview


def weights(n: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(n) * 0.02).astype(np.float32)


def noise(n: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(n)


def round_trip(data: Bytes, item_size: int, mode: str = "auto") -> bytes:
    """The frame of ``data``, after both ways of decoding gave the same bytes back."""
    frame = encode(data, item_size, mode)
    raw = bytes(data)
    assert bytes(decode(frame, None, len(raw), KEY)) == raw
    out = bytearray(b"\xaa" * len(raw))
    assert bytes(decode(memoryview(frame), memoryview(out), len(raw), KEY)) == raw
    assert out == raw
    assert raw_length_of(frame[:HEADER_SIZE], KEY) == len(raw)
    assert len(frame) <= HEADER_SIZE + len(raw)
    return frame


def seal(
    codec: int = 1,
    item_size: int = 2,
    raw_length: int = 2 * LENGTH,
    stored: int = 0,
    *,
    magic: bytes = b"CKPF",
    version: int = 1,
    zero: int = 0,
    last: int = 0,
) -> bytes:
    """A header with a checksum that is right, whatever it claims."""
    fields = struct.pack("<4sBBBBQQ", magic, version, codec, item_size, zero, raw_length, stored)
    return fields + struct.pack("<II", zlib.crc32(fields), last)


def forge(*planes: tuple[int, bytes], tail: bytes = b"", lengths: tuple[int, ...] = (), raw_length: int = 0) -> bytes:
    """A frame of planes, well sealed; ``lengths`` are put into the plane table instead of the true ones."""
    true = tuple(len(payload) for _, payload in planes)
    methods = (method for method, _ in planes)
    table = b"".join(struct.pack("<BQ", *entry) for entry in zip(methods, lengths or true, strict=True))
    body = table + b"".join(payload for _, payload in planes) + tail
    return seal(1, len(planes), raw_length or len(planes) * LENGTH + len(tail), len(body)) + body


def entries(frame: bytes) -> list[tuple[int, int]]:
    """The plane table of a frame, empty where the whole chunk is raw."""
    return list(struct.iter_unpack("<BQ", frame[HEADER_SIZE : HEADER_SIZE + 9 * frame[6]])) if frame[5] else []


def packed(data: bytes, *, write_content_size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=write_content_size).compress(data)


def peak_of(work: Callable[[], object]) -> int:
    """The most memory that Python and NumPy held at once during ``work``, beyond what they held before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- round trips ------------------------------------------------------------------------------------------------


@given(
    unit=st.binary(max_size=40),
    repeat=st.integers(0, 300),
    tail=st.binary(max_size=9),
    item_size=st.sampled_from([0, 1, 2, 4, 8]),
    mode=st.sampled_from(["auto", "raw", "max"]),
)
def test_any_bytes_come_back(unit: bytes, repeat: int, tail: bytes, item_size: int, mode: str) -> None:
    """Whatever the bytes, the item size and the mode: decoding gives them back."""
    round_trip(unit * repeat + tail, item_size, mode)


@pytest.mark.parametrize("mode", ["auto", "raw", "max"])
@pytest.mark.parametrize("item_size", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("length", [0, 1, 3, 7, 8, 9, 255, 4095, 4096, 4097, 131_071, 131_073, 600_001])
def test_any_length_comes_back(length: int, item_size: int, mode: str) -> None:
    """Empty and tiny chunks, and lengths that are no multiple of the item size, come back whole."""
    round_trip(weights(length // 4 + 1).tobytes()[:length], item_size, mode)


@pytest.mark.parametrize("mode", ["auto", "max"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u8", "?", "c8", ">f4", "M8[s]"])
def test_any_dtype_comes_back_bit_for_bit(dtype: str, mode: str) -> None:
    """Arrays of all dtypes come back, NaN payloads and negative zeros included, as bytes are all that counts."""
    values = np.random.default_rng(1).integers(-100, 100, 70_001)
    array = values.astype("i8").astype(dtype) if dtype.startswith("M") else values.astype(dtype)
    raw = bytearray(array.tobytes())
    raw[:16] = bytes.fromhex("010080ff 00000080 0100c07f deadbeef")
    round_trip(raw, min(array.dtype.itemsize, 8), mode)


def test_special_data_come_back() -> None:
    """All zeros, all ones, pure noise, rows of zeros between noise: all come back, and never longer."""
    rows = weights(1 << 18).reshape(-1, 256)
    rows[::3] = 0
    for data in (bytes(500_000), b"\xff" * 500_001, noise(500_001), rows.tobytes()):
        for item_size in (0, 1, 2, 4, 8):
            round_trip(data, item_size)


def test_input_may_be_any_contiguous_buffer() -> None:
    """bytes, bytearray and memoryviews of other formats, shapes and no bytes at all give the same frame."""
    array = weights(6000).reshape(60, 100)
    raw = array.tobytes()
    expected = encode(raw, 4)
    assert encode(bytearray(raw), 4) == encode(array.data, 4) == encode(memoryview(raw), 4) == expected
    assert encode(np.empty((0, 4), np.float32).data, 4) == encode(b"", 4)


def test_largest_chunk_is_a_whole_one() -> None:
    """A chunk of exactly MAX_RAW bytes is taken; one byte more is refused by name of the limit."""
    zeros = np.zeros(MAX_RAW + 1, np.uint8)
    frame = encode(zeros.data[:MAX_RAW], 1)
    assert raw_length_of(frame, KEY) == MAX_RAW
    with pytest.raises(InvalidArgumentError, match=str(MAX_RAW)):
        encode(zeros.data, 1)


# --- what the encoder promises ----------------------------------------------------------------------------------


def test_layout_is_as_documented() -> None:
    """Header, plane table, planes and tail lie where the format says, so that other programs can read them."""
    raw = weights(50_000).tobytes() + b"xyz"
    frame = encode(raw, 4)
    magic, version, codec, item_size, zero, raw_length, stored = struct.unpack_from("<4sBBBBQQ", frame)
    assert (magic, version, codec, item_size, zero) == (b"CKPF", 1, 1, 4, 0)
    assert (raw_length, stored) == (len(raw), len(frame) - HEADER_SIZE)
    assert struct.unpack_from("<II", frame, 24) == (zlib.crc32(frame[:24]), 0)
    at = HEADER_SIZE + 4 * 9
    for i, (method, length) in enumerate(entries(frame)):
        plane = frame[at : at + length]
        at += length
        assert (zstandard.ZstdDecompressor().decompress(plane) if method else plane) == raw[i:200_000:4]
    assert frame[at:] == b"xyz"


def test_raw_frame_is_the_header_and_the_bytes() -> None:
    """Mode raw never compresses, and noise is stored raw in every mode."""
    zeros = bytes(10_000)
    assert encode(zeros, 4, "raw") == seal(0, 4, 10_000, 10_000) + zeros
    assert encode(zeros, 0, "raw") == seal(0, 1, 10_000, 10_000) + zeros
    data = noise(100_000)
    for mode in ("auto", "raw", "max"):
        assert encode(data, 4, mode) == seal(0, 4, 100_000, 100_000) + data


def test_planes_are_chosen_one_by_one() -> None:
    """Of fp32 weights the noisy mantissa planes stay raw and the exponents are coded: a sixth is saved."""
    frame = encode(weights(1 << 20).data, 4)
    assert [method for method, _ in entries(frame)] == [0, 0, 0, 1]
    assert len(frame) < 4 * (1 << 20) / 1.18


def test_elements_that_repeat_are_not_split() -> None:
    """Few distinct values repeat as whole elements: planes would only hide that."""
    array = weights(1 << 19)
    array[np.random.default_rng(3).random(array.size) < 0.95] = 0
    frame = round_trip(array.tobytes(), 4)
    assert frame[6] == 1
    assert len(frame) < array.nbytes / 8


def test_runs_shrink_to_next_to_nothing() -> None:
    """A megabyte of zeros takes less than a kilobyte, at any item size."""
    for item_size in (0, 1, 2, 4, 8):
        assert len(encode(bytes(1 << 20), item_size)) < 1024


def test_text_that_repeats_is_found() -> None:
    """Lines that come again, far apart, are found as such: a code for their letters alone would save little."""
    rng = np.random.default_rng(0)
    lines = rng.integers(97, 123, (400, 60), np.uint8)
    text = lines[rng.integers(0, 400, 8000)].tobytes()
    assert len(round_trip(text, 1)) < len(text) / 8


def test_no_gain_at_all_is_stored_raw() -> None:
    """Around the length where planes are exactly as long as the data, the frame is a valid one of either kind."""
    codec_of = [round_trip(noise(400) + bytes(zeros), 1)[5] for zeros in range(80)]
    assert codec_of == sorted(codec_of)
    assert set(codec_of) == {0, 1}


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_probe_finds_the_width(dtype: type[np.generic]) -> None:
    """Item size 0 finds the width of the elements of an opaque file by itself, behind a short header too."""
    width = np.dtype(dtype).itemsize
    values = weights(1 << 18) if width > 1 else np.random.default_rng(0).binomial(200, 0.5, 1 << 18)
    data = b"head" * 10 + values.astype(dtype).tobytes()
    frame = round_trip(data, 0)
    assert frame[6] == width
    assert len(frame) == len(encode(data, width))


def test_max_is_never_longer_than_auto() -> None:
    """Mode max only ever gains, and does gain on text."""
    text = b"".join(b'{"id": %d, "loss": %f}\n' % (i, i * 0.37) for i in range(20_000))
    for data, item_size in ((text, 0), (text, 1), (weights(100_000).tobytes(), 4), (bytes(99_999), 2)):
        assert len(encode(data, item_size, "max")) <= len(encode(data, item_size, "auto"))
    assert len(encode(text, 1, "max")) < len(encode(text, 1, "auto")) < len(text) / 5


def test_a_sample_that_misleads_costs_nothing() -> None:
    """Zeros exactly where the sample looks, noise elsewhere: still no longer than raw, and it comes back."""
    size = 8 << 20
    data = np.frombuffer(noise(size), np.uint8).copy()
    step = (size - 32 * 1024) / 7
    for i in range(8):
        data[int(i * step) : int(i * step) + 32 * 1024] = 0
    for item_size in (1, 4):
        round_trip(data.data, item_size)


def test_equal_data_give_equal_frames() -> None:
    """The frame depends on the data alone: not on the thread, nor on what that thread coded before."""
    data = weights(200_000, seed=5).tobytes()
    for mode in ("auto", "max"):
        first = encode(data, 4, mode)
        encode(noise(1_500_000), 8, mode)
        encode(bytes(3_000_000), 2, mode)
        assert encode(data, 4, mode) == first
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(encode, data, 4, mode).result() == first


@pytest.mark.parametrize("item_size", [-1, 3, 5, 16])
def test_unknown_item_size_is_refused(item_size: int) -> None:
    """An item size that the format does not know is refused before any work."""
    with pytest.raises(InvalidArgumentError, match=str(item_size)):
        encode(b"abcd", item_size)


def test_unknown_mode_is_refused() -> None:
    """A misspelt mode is refused, and the message lists those that exist."""
    with pytest.raises(InvalidArgumentError, match=r"'best'.*auto, raw, max"):
        encode(b"abcd", 1, "best")


# --- memory and threads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("item_size", [1, 2, 4, 8, 0])
def test_encoding_takes_two_chunks_of_memory_at_most(item_size: int) -> None:
    """Beside the data: one chunk of scratch, and the frame with its coded planes."""
    data = weights(2 << 20).data
    with ThreadPoolExecutor(1) as fresh:
        peak = peak_of(lambda: fresh.submit(encode, data, item_size).result())
    assert peak < 2.1 * data.nbytes


def test_decoding_takes_one_plane_of_memory() -> None:
    """Decoding into a given buffer needs no more than one plane beside it, and none where all is raw."""
    data = weights(2 << 20).data
    out = np.zeros(data.nbytes, np.uint8)
    frame = encode(data, 4)
    assert peak_of(lambda: decode(frame, out.data, data.nbytes, KEY)) < 0.3 * data.nbytes
    raw = encode(data, 4, "raw")
    assert peak_of(lambda: decode(raw, out.data, data.nbytes, KEY)) < 100_000


@pytest.mark.parametrize("mode", ["auto", "raw", "max"])
@pytest.mark.parametrize("nbytes", [0, 1, 7, 1000, BLOCK - 1, BLOCK, BLOCK + 5, 3 * BLOCK + 4])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_what_is_seen_is_what_is_coded(mode: str, nbytes: int, width: int) -> None:
    """The blocks shown for the digest are the raw bytes of the frame, each once and in order."""
    data = weights(nbytes // 4 + 1).tobytes()[:nbytes]
    shown: list[bytes] = []
    room = np.zeros(room_for(nbytes), np.uint8)
    frame = encode_into(data, width, mode, room.data, lambda block: shown.append(bytes(block)))
    assert b"".join(shown) == data == bytes(decode(frame, None, nbytes, KEY))
    assert bytes(frame) == encode(data, width, mode) == room.tobytes()[: len(frame)]


@pytest.mark.parametrize("kind", ["floats", "noise"])
def test_data_that_changes_meanwhile(kind: str) -> None:
    """Whatever others do to the data while it is coded, the frame holds the bytes that the digest was taken of."""
    data = weights(1 << 18) if kind == "floats" else np.frombuffer(noise(1 << 20), np.float32).copy()
    shown: list[bytes] = []

    def seen(block: memoryview) -> None:
        shown.append(bytes(block))
        data.view(np.uint8)[:] ^= 0x5A

    frame = encode_into(data.data, 4, "auto", np.empty(room_for(data.nbytes), np.uint8).data, seen)
    assert b"".join(shown) == bytes(decode(frame, None, data.nbytes, KEY))


def test_threads_do_not_disturb_each_other() -> None:
    """Many threads code different chunks at once, and each gets its own back."""
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        start.wait()
        for i in range(5):
            data = weights(40_000 + 1000 * i + seed, seed * 100 + i).tobytes()
            round_trip(data, (4, 2, 8, 0, 1)[i], "auto" if seed % 2 else "max")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


# --- where to decode to -----------------------------------------------------------------------------------------


def test_without_out_plain_bytes_are_not_copied() -> None:
    """Without ``out`` the bytes of a plain frame are shown where they lie; planes are put together in fresh memory."""
    for data, there in ((noise(1000), True), (bytes(1000), False)):
        frame = np.frombuffer(bytearray(encode(data, 4)), np.uint8)
        view = decode(frame.data, None, 1000, KEY)
        assert (view.format, view.ndim, view.nbytes, bytes(view)) == ("B", 1, 1000, data)
        assert np.shares_memory(frame, np.frombuffer(view, np.uint8)) is there


def test_out_may_have_any_shape_and_format() -> None:
    """Bytes go straight into an array of floats, or of no elements at all."""
    array = weights(6000).reshape(60, 100)
    target = np.zeros_like(array)
    decode(encode(array.data, 4), target.data, array.nbytes, KEY)
    np.testing.assert_array_equal(target, array)
    decode(encode(b"", 4), np.empty((0, 4), np.float32).data, 0, KEY)


def test_out_of_wrong_kind_is_refused() -> None:
    """A buffer that is too short, too long, read-only or not contiguous is refused untouched."""
    frame = encode(bytes(100), 4)
    gaps = np.full(200, 7, np.uint8)
    short, long = bytearray(b"\x07" * 99), bytearray(b"\x07" * 101)
    for out in (memoryview(short), memoryview(long), memoryview(bytes(100)), gaps.data[::2]):
        with pytest.raises(InvalidArgumentError, match="100 bytes"):
            decode(frame, out, 100, KEY)
    assert set(short) == set(long) == set(gaps) == {7}


# --- hostile frames: the header ---------------------------------------------------------------------------------


@pytest.fixture(params=["raw", "planes", "empty"])
def good(request: pytest.FixtureRequest) -> tuple[bytes, bytes]:
    """Data and its frame, of each kind."""
    data = {"raw": noise(90), "planes": weights(300).tobytes() + b"xyz", "empty": b""}[request.param]
    frame = encode(data, 4)
    assert frame[5] == (request.param == "planes")
    return data, frame


def refuses(frame: Bytes, raw_length: int, match: str | None = None) -> None:
    """Decoding fails and names the object, with and without a buffer."""
    for out in (None, memoryview(bytearray(raw_length))):
        with pytest.raises(CorruptionError, match=match) as caught:
            decode(frame, out, raw_length, KEY)
        assert caught.value.key == KEY
        assert KEY in str(caught.value)


def test_every_flipped_header_bit_is_corruption(good: tuple[bytes, bytes]) -> None:
    """No bit of the header can flip unseen, and none makes a damaged frame look like one of a newer version."""
    data, frame = good
    for bit in range(HEADER_SIZE * 8):
        bad = bytearray(frame)
        bad[bit // 8] ^= 1 << bit % 8
        refuses(bad, len(data))
        with pytest.raises(CorruptionError):
            raw_length_of(bad[:HEADER_SIZE], KEY)


def test_newer_version_asks_for_an_upgrade() -> None:
    """A sound header of a newer version is a FormatError, not corruption, whatever else it says."""
    for header in (seal(version=2), seal(version=255, codec=9, item_size=3, zero=1, last=1)):
        for call in (lambda h=header: decode(h, None, 10, KEY), lambda h=header: raw_length_of(h, KEY)):
            with pytest.raises(FormatError, match="upgrade") as caught:
                call()
            assert caught.value.key == KEY


@pytest.mark.parametrize(
    "header",
    [
        seal(0, 4, 100, 100, magic=b"CKPG"),
        seal(0, 4, 100, 100, version=0),
        seal(0, 4, 100, 100, zero=1),
        seal(0, 4, 100, 100, last=1),
        seal(2, 4, 100, 100),
        seal(2, 4, 100, 99),
        seal(0, 0, 100, 100),
        seal(0, 3, 100, 100),
        seal(1, 16, 100, 99),
        seal(0, 4, 100, 99),
        seal(0, 4, 100, 101),
        seal(1, 4, 100, 100),
        seal(1, 4, 0, 0),
        seal(0, 1, MAX_RAW + 1, MAX_RAW + 1),
        seal(1, 1, 2**64 - 1, 2**64 - 2),
        seal(1, 1, 100, 2**64 - 1),
    ],
)
def test_header_that_makes_no_sense_is_corruption(header: bytes) -> None:
    """A header with a right checksum is still not trusted: each field is checked, and sizes are capped."""
    for stored in (99, 100, 101):
        refuses(header + bytes(stored), 100)
    with pytest.raises(CorruptionError):
        raw_length_of(header, KEY)


def test_frame_of_other_length_is_corruption(good: tuple[bytes, bytes]) -> None:
    """A sound frame of another chunk, of other length than the index says, is refused."""
    data, frame = good
    for length in (len(data) - 1, len(data) + 1, 2 * len(data) + 5):
        if length >= 0:
            refuses(frame, length, match="instead of")


def test_negative_length_is_not_taken() -> None:
    """A nonsensical length in the index is an error too."""
    with pytest.raises(CorruptionError):
        decode(encode(b"", 1), None, -1, KEY)


# --- hostile frames: the body -----------------------------------------------------------------------------------


def test_truncated_anywhere_is_corruption(good: tuple[bytes, bytes]) -> None:
    """A frame that is cut, at any byte, is refused; so is one of nothing."""
    data, frame = good
    for length in range(len(frame)):
        refuses(frame[:length], len(data))


def test_extended_is_corruption(good: tuple[bytes, bytes]) -> None:
    """Bytes behind a frame are refused, be they garbage, zeros, a zstd frame, a skippable one or the frame again."""
    data, frame = good
    for more in (b"\0", b"x" * 100, packed(bytes(100)), SKIPPABLE, frame):
        refuses(frame + more, len(data), match="follow the header")
        refuses(more + frame, len(data))


def test_truncated_or_extended_with_a_matching_header_is_corruption() -> None:
    """As before, but with a header that admits to the new length: the planes must fill it exactly."""
    data = weights(3000).tobytes() + b"xyz"
    frame = encode(data, 4)
    for body in (*(frame[HEADER_SIZE:end] for end in range(HEADER_SIZE, len(frame), 7)), frame[HEADER_SIZE:] + b"x"):
        refuses(seal(1, 4, len(data), len(body)) + body, len(data))


def test_every_flipped_bit_of_the_plane_table_is_corruption() -> None:
    """No bit of the plane table can flip unseen."""
    data = weights(3000).tobytes()
    frame = encode(data, 4)
    for bit in range(HEADER_SIZE * 8, (HEADER_SIZE + 4 * 9) * 8):
        bad = bytearray(frame)
        bad[bit // 8] ^= 1 << bit % 8
        refuses(bad, len(data))


def test_forged_frames_are_fair() -> None:
    """The frames forged below would be read if they were not wrong in the one thing each is wrong in."""
    zeros = bytes(LENGTH)
    frame = forge((1, packed(zeros)), (0, zeros), tail=b"t")
    assert bytes(decode(frame, None, 2 * LENGTH + 1, KEY)) == bytes(2 * LENGTH) + b"t"


ZEROS = bytes(LENGTH)
HALF = bytes(LENGTH // 2)
LYING = bytearray(packed(bytes(LENGTH - 1)))
LYING[5:7] = struct.pack("<H", LENGTH - 256)


@pytest.mark.parametrize(
    "plane",
    [
        pytest.param(packed(HALF) + packed(HALF), id="two frames of half the length each"),
        pytest.param(packed(ZEROS) + packed(ZEROS), id="the frame twice"),
        pytest.param(packed(ZEROS) + packed(b""), id="frame and empty frame"),
        pytest.param(packed(ZEROS) + b"x", id="frame and garbage"),
        pytest.param(packed(ZEROS) + SKIPPABLE, id="frame and skippable frame"),
        pytest.param(SKIPPABLE + packed(ZEROS), id="skippable frame and frame"),
        pytest.param(SKIPPABLE, id="skippable frame"),
        pytest.param(struct.pack("<II", 0x184D2A50, LENGTH), id="skippable frame that claims the length"),
        pytest.param(packed(ZEROS, write_content_size=False), id="no content size"),
        pytest.param(packed(bytes(LENGTH - 1)), id="too short"),
        pytest.param(packed(bytes(LENGTH + 1)), id="too long"),
        pytest.param(packed(b""), id="nothing"),
        pytest.param(bytes(LYING), id="content size is a lie"),
        pytest.param(packed(ZEROS)[:-1], id="cut by a byte"),
        pytest.param(packed(ZEROS)[:8], id="only its header"),
        pytest.param(packed(ZEROS)[:3], id="not even its header"),
        pytest.param(b"", id="empty"),
        pytest.param(b"garbage" * 9, id="garbage"),
        pytest.param(packed(noise(LENGTH)), id="longer than the plane"),
    ],
)
def test_plane_that_is_not_exactly_one_zstd_frame_is_corruption(plane: bytes) -> None:
    """Exactly one zstd frame of exactly the plane's length: zstd itself would pass some of these in silence."""
    refuses(forge((1, plane), (0, ZEROS)), 2 * LENGTH)
    refuses(forge((0, ZEROS), (1, plane)), 2 * LENGTH)


def test_the_lie_about_the_content_size_is_believed_at_first() -> None:
    """The lying frame above claims exactly the plane's length: it is the decompression that finds it out."""
    assert zstandard.get_frame_parameters(bytes(LYING)).content_size == LENGTH
    refuses(forge((1, bytes(LYING)), (0, ZEROS)), 2 * LENGTH, match="plane 0")


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(forge((2, packed(ZEROS)), (0, ZEROS)), id="unknown method"),
        pytest.param(forge((1, packed(noise(LENGTH))), (1, packed(ZEROS))), id="zstd plane longer than raw"),
        pytest.param(forge((1, packed(ZEROS)), (0, ZEROS[1:])), id="raw plane too short"),
        pytest.param(forge((1, packed(ZEROS)), (0, ZEROS + b"x")), id="raw plane too long"),
        pytest.param(forge((1, packed(ZEROS)), (0, ZEROS[1:]), tail=b"x", raw_length=2 * LENGTH), id="tail for plane"),
        pytest.param(forge((1, packed(ZEROS)), (0, ZEROS), raw_length=2 * LENGTH + 1), id="no tail"),
        pytest.param(forge((1, packed(ZEROS)), (0, ZEROS), lengths=(2**64 - 1, 2**64 - 1)), id="huge"),
        pytest.param(
            forge((1, packed(ZEROS)), (0, ZEROS), lengths=(len(packed(ZEROS)) + 2**63, LENGTH + 2**63)),
            id="wraps round at 64 bits",
        ),
        pytest.param(
            forge((1, packed(ZEROS)), (0, ZEROS), lengths=(len(packed(ZEROS)) + 1, LENGTH - 1)), id="border moved"
        ),
        pytest.param(forge((0, ZEROS), (1, packed(ZEROS)), lengths=(len(packed(ZEROS)), LENGTH)), id="lengths swapped"),
        pytest.param(forge((1, packed(ZEROS)), (0, b""), lengths=(len(packed(ZEROS)), 0)), id="second plane missing"),
        pytest.param(seal(1, 2, 2 * LENGTH, 17) + bytes(17), id="table cut"),
        pytest.param(seal(1, 2, 2 * LENGTH, 0), id="no table"),
        pytest.param(seal(1, 8, 7, 6) + bytes(6), id="planes of nothing"),
    ],
)
def test_planes_that_do_not_add_up_are_corruption(frame: bytes) -> None:
    """Lengths in the plane table that lie, overflow, wrap round or leave anything over are refused."""
    refuses(frame, raw_length_of(frame, KEY))


def test_bombs_are_refused_before_memory_is_taken() -> None:
    """A few bytes that claim hundreds of megabytes, in the header or in a plane, cost no memory."""
    huge = packed(bytes(200 << 20))
    assert len(huge) < 32_000
    plane = forge((1, huge), (0, bytes(32_000)), raw_length=64_000)
    header = forge((1, huge), raw_length=200 << 20)
    cut = seal(1, 1, 200 << 20, len(header) - HEADER_SIZE) + header[HEADER_SIZE:-1]
    cases = ((plane, 64_000), (header, 1000), (cut, 200 << 20), (seal(0, 1, MAX_RAW, MAX_RAW), MAX_RAW))

    def attack() -> None:
        for frame, expected in cases:
            with pytest.raises(CorruptionError):
                decode(frame, None, expected, KEY)

    assert peak_of(attack) < 1 << 20


def test_damaged_payload_never_gives_short_data() -> None:
    """Damage inside the planes is an error, or full-length data for the digest to judge: never a short success."""
    rng = random.Random(4)
    data = weights(3000).tobytes() + b"xyz"
    frame = encode(data, 4)
    outcomes = set()
    for _ in range(400):
        bad = bytearray(frame)
        for _ in range(rng.choice((1, 1, 2, 20))):
            bad[rng.randrange(HEADER_SIZE, len(bad))] ^= 1 << rng.randrange(8)
        try:
            outcomes.add(len(decode(bad, None, len(data), KEY)))
        except CorruptionError:
            outcomes.add(-1)
    assert outcomes == {-1, len(data)}


@given(data=st.data())
def test_arbitrary_bytes_raise_corruption_only(data: st.DataObject) -> None:
    """No input whatever makes the decoder fail with anything but a CorruptionError."""
    body = data.draw(st.binary(max_size=200))
    item_size = data.draw(st.sampled_from([1, 2, 4, 8]))
    raw_length = data.draw(st.integers(0, 400))
    for frame in (body, seal(1, item_size, raw_length, len(body)) + body):
        with suppress(CorruptionError):
            assert len(decode(frame, None, raw_length, KEY)) == raw_length


def test_raw_length_of_needs_a_whole_header() -> None:
    """A header that is too short is corruption; bytes behind it do not matter."""
    frame = encode(bytes(5000), 4)
    assert raw_length_of(frame, KEY) == raw_length_of(frame[:HEADER_SIZE], KEY) == 5000
    for length in range(HEADER_SIZE):
        with pytest.raises(CorruptionError, match=KEY):
            raw_length_of(frame[:length], KEY)
