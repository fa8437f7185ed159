"""torch in, torch out: every element type and layout, real modules, optimizers and schedulers."""

from __future__ import annotations

import importlib
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckptstore.arrays import ArraySpec, Destination, source
from ckptstore.errors import FormatError, InvalidArgumentError, InvalidRecordError
from ckptstore.tree import fill_into, flatten, leaf_paths, match_into
from tests.unit.exact import read_all, reload, round_trip, same, same_array

pytest.importorskip("torch.nn")
torch: Any = importlib.import_module("torch")

NAMES = [
    name for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64", "bfloat16", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz",
        "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "int1", "int2", "int4", "uint1", "uint2", "uint4",
    ) if hasattr(torch, name)
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3, 0, 2), (2, 3, 4), (5, 1)]


def tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    """A tensor of that element type whose bits are random."""
    size = ArraySpec("torch", name, (1,)).nbytes
    count = int(np.prod(shape, dtype=int))
    raw = np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8)
    whole = torch.empty(count * size + size, dtype=torch.uint8).view(getattr(torch, name))[:count].reshape(shape)
    if count:
        whole.view(-1).view(torch.uint8).copy_(torch.from_numpy(raw.reshape(-1)))
    return whole


def ints(value: Any) -> Any:
    """The same elements as integers (complex128: as two doubles), which every torch can compare and move."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.view(width[value.element_size()]) if value.element_size() in width else value


def raw(value: Any) -> bytes:
    contiguous = ints(value).contiguous()
    return bytes(contiguous.reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""


def layouts(base: Any) -> list[Any]:
    """Views of a tensor of shape (6, 4, 5, 2) that are not in C order."""
    return [
        base.permute(3, 1, 0, 2), base[::2], base[:, 1:3, ::2], base[:, 2], base[1:2, :1].expand(3, 4, 5, 2),
        base[..., 0], base[0, 0].t(), base.permute(0, 2, 3, 1), base[:, :0, ::2], base[3, 2, 1, :1].expand(7),
    ]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_element_type_is_bit_exact(name: str, shape: tuple[int, ...]) -> None:
    """P7: every element type that others know comes back with the same bits in 0-d, empty and 3-d."""
    value = tensor(name, shape)
    found = source(value)
    assert found.spec == ArraySpec("torch", name, shape)
    assert read_all(found) == raw(value)
    back = reload(found)
    assert type(back) is torch.Tensor
    assert (back.dtype, tuple(back.shape), back.device.type) == (value.dtype, shape, "cpu")
    assert raw(back) == raw(value)


@pytest.mark.parametrize("name", NAMES)
def test_layouts_come_back_by_value(name: str) -> None:
    """P7: transposed, strided, expanded and permuted tensors come back in C order with the same bits."""
    for view in layouts(ints(tensor(name, (6, 4, 5, 2)))):
        expected = view.contiguous()
        typed = view.view(getattr(torch, name)) if expected.dtype != getattr(torch, name) else view
        assert read_all(source(typed), 11) == raw(expected)
        back = reload(source(typed))
        assert back.is_contiguous()
        assert same_array(back, typed)


def test_channels_last_comes_back_contiguous() -> None:
    """The memory format is not kept, the values are."""
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    back = round_trip({"x": images})["x"]
    assert back.is_contiguous()
    assert torch.equal(back, images)


def test_lazy_conjugates_and_negatives() -> None:
    """P7: a lazily conjugated or negated tensor is stored by value and is no alias of what it is a view of."""
    for dtype in (torch.complex64, torch.complex128):
        z = torch.randn(3, 4, dtype=dtype)
        state = {"z": z, "conj": z.conj(), "turned": z.mH, "imag": z.conj().imag, "one": z[0, 0].conj()}
        assert state["imag"].is_neg()
        assert len(flatten(state, "r").arrays) == 5
        back = round_trip(state)
        assert all(torch.equal(back[key], state[key].resolve_conj().resolve_neg()) for key in state)


def test_ranges_of_other_layouts_gather_only_the_range() -> None:
    """P6: contiguous tensors are read without a copy, others by gathering the range."""
    value = torch.zeros(1000)
    part = source(value).read(40, 80)
    value[10:20] = 1
    assert bytes(part) == np.ones(10, np.float32).tobytes()
    turned = torch.arange(60, dtype=torch.bfloat16).reshape(3, 4, 5).permute(2, 0, 1)
    expected = raw(turned)
    for start in range(0, 60, 7):
        for stop in range(start, 61, 5):
            assert bytes(source(turned).read(2 * start, 2 * stop)) == expected[2 * start : 2 * stop]


def test_views_store_their_own_elements_only() -> None:
    """A slice of a big tensor has the bytes of the slice, not of the storage."""
    big = torch.zeros(10_000_000)
    assert [source(view).nbytes for view in (big[:10], big[::1000], big[:1].expand(1000))] == [40, 40_000, 4000]


def test_parameters_and_buffers_come_back_as_tensors() -> None:
    """Parameters, buffers and tensors that need gradients are stored by value; the class and the flag are not kept."""
    leaf = torch.ones(2, requires_grad=True)
    state = {
        "p": torch.nn.Parameter(torch.randn(3)),
        "g": leaf,
        "computed": leaf * 2,
        "e": torch.nn.Parameter(leaf[:0]),
    }
    if hasattr(torch.nn, "Buffer"):
        state["b"] = torch.nn.Buffer(torch.randn(2))
    back = round_trip(state)
    for key, value in state.items():
        assert type(back[key]) is torch.Tensor
        assert not back[key].requires_grad
        assert torch.equal(back[key], value.detach())


def test_tied_weights_come_back_tied() -> None:
    """Aliases are stored once, through detach and Parameter too; overlaps and other shapes or types are not aliases."""
    w = torch.nn.Parameter(torch.randn(4, 4))
    data = w.detach()
    state = {"a": w, "b": data, "c": w, "part": data[:2], "t": data.t(), "flat": data.reshape(-1), "i": ints(data)}
    assert len(flatten(state, "r").arrays) == 5
    back = round_trip(state)
    assert back["a"] is back["b"] is back["c"]
    back["a"].zero_()
    assert torch.equal(back["part"], data[:2])
    assert torch.equal(back["t"], data.t())


def test_empty_tensors_are_aliases_only_of_themselves() -> None:
    """Empty tensors that share no elements do not come back as one."""
    one, two = torch.zeros(0), torch.zeros(0)
    back = round_trip([one, two, one])
    assert back[0] is back[2]
    assert back[0] is not back[1]


def test_numpy_views_of_tensors_keep_their_kind() -> None:
    """A tensor and a NumPy array of the same memory come back as a tensor and a NumPy array."""
    value = torch.arange(3)
    back = round_trip({"t": value, "n": value.numpy()})
    assert isinstance(back["n"], np.ndarray)
    assert same(back, {"t": value, "n": value.numpy()})


class Labelled(torch.Tensor):  # type: ignore[misc]
    """What a tensor subclass looks like (DTensor and the like)."""


def quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def sparse_rows() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


def freed() -> Any:
    whole = torch.ones(10)
    part = whole[3:]
    whole.untyped_storage().resize_(0)
    return part


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "layout sparse_coo"),
    "sparse rows": (sparse_rows, "layout sparse_csr"),
    "quantized": (quantized, "quantized"),
    "nested": (nested, "nested|subclass"),
    "meta": (lambda: torch.ones(3, device="meta"), "no values"),
    "subclass": (lambda: torch.ones(3).as_subclass(Labelled), "Labelled is a subclass"),
    "uninitialized": (lambda: torch.nn.UninitializedParameter(), "subclass"),
    "bits": (lambda: torch.empty(3, dtype=torch.bits8), "no portable form"),
    "freed": (freed, "was freed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exact_is_refused_by_path(case: str) -> None:
    """P7: tensors without plain elements of their own are refused with path and reason, to save and as target."""
    make, reason = REFUSED[case]
    value = make()
    with pytest.raises(InvalidRecordError, match=rf"model\.x\.0: .*({reason})"):
        flatten({"x": [value], "ok": torch.ones(1)}, "model")
    with pytest.raises(InvalidArgumentError, match=reason):
        Destination.into_existing(ArraySpec("torch", "float32", (3,)), value)


def test_unknown_element_types_are_format_errors() -> None:
    """P8: a type that this torch does not have, or that only NumPy has, is an error at load."""
    for name in ("<M8[ns]", ">f4", "<U3", "float8_e3m4"):
        with pytest.raises(FormatError):
            Destination.allocate(ArraySpec("torch", name, (2,)))


def test_nan_payloads_and_negative_zero() -> None:
    """P7: NaN payloads and the sign of zero survive in floats of every width."""
    for name, patterns in (("float32", [0x7FC01234, -1, -(2**31)]), ("bfloat16", [0x7FC1, -1, -(2**15)])):
        width = torch.int32 if name == "float32" else torch.int16
        value = torch.tensor(patterns, dtype=width).view(getattr(torch, name))
        for view in (value, value.expand(2, 3).t(), value[::2]):
            assert raw(reload(source(view))) == raw(view)


def fill(spec: ArraySpec, target: Any, data: bytes) -> None:
    destination = Destination.into_existing(spec, target)
    destination.buffer[:] = data
    assert destination.finish() is target


@pytest.mark.parametrize("name", NAMES)
def test_into_existing_memory(name: str) -> None:
    """P6, P7: a load uses the memory of a contiguous tensor and fills only the elements of any other."""
    value = tensor(name, (4, 3, 2), seed=1)
    spec = source(value).spec
    plain = tensor(name, (4, 3, 2), seed=2)
    destination = Destination.into_existing(spec, plain)
    destination.buffer[:] = raw(value)
    assert raw(plain) == raw(value)
    assert destination.finish() is plain
    width = ints(plain).dtype
    room = torch.zeros(8, 3, 4, dtype=width)
    target = room[::2, :, 1::2]
    fill(spec, target.view(value.dtype) if target.dtype != value.dtype else target, raw(value))
    assert raw(target) == raw(value)
    assert not room[1::2].any()
    assert not room[:, :, ::2].any()


def test_into_parameters_views_and_lazy_tensors() -> None:
    """Tensors that need gradients, their views and lazy conjugates are filled with the value that is stored."""
    data = np.arange(6, dtype=np.float32)
    spec = ArraySpec("torch", "float32", (2, 3))
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    turned = torch.zeros(3, 2, requires_grad=True)
    for target in (parameter, turned.t(), torch.zeros(2, 3).to_sparse().to_dense()):
        fill(spec, target, data.tobytes())
        assert target.detach().reshape(-1).tolist() == data.tolist()
    assert parameter.requires_grad
    assert parameter.is_leaf
    lazy = torch.zeros(3, dtype=torch.complex64).conj()
    value = torch.tensor([1 + 2j, 3j, -1], dtype=torch.complex64)
    fill(source(value).spec, lazy, raw(value))
    assert torch.equal(lazy, value)


def test_numpy_and_torch_fill_each_other() -> None:
    """A record of tensors loads into NumPy arrays and the other way around, big-endian ones included."""
    value = torch.randn(2, 3)
    array = np.zeros((3, 2), np.float32).T
    fill(source(value).spec, array, raw(value))
    assert np.array_equal(array, value.numpy())
    for dtype, name in ((">f4", "float32"), (">c8", "complex64"), (">i2", "int16")):
        numbers = np.arange(6).astype(dtype)[::-1]
        target = torch.zeros(12, dtype=getattr(torch, name))[::2]
        fill(source(numbers).spec, target, numbers.tobytes())
        assert target.tolist() == numbers.tolist()
        plain = torch.zeros(6, dtype=getattr(torch, name))
        fill(source(numbers).spec, plain, numbers.tobytes())
        assert plain.tolist() == numbers.tolist()
    for target in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(1, 3).expand(2, 3)):
        with pytest.raises(InvalidArgumentError):
            Destination.into_existing(source(value).spec, target)


def test_the_default_device_and_grad_mode_do_not_matter() -> None:
    """Sources and destinations are on the CPU whatever the caller's defaults are."""
    value = torch.arange(6.0).reshape(2, 3).t()
    with torch.device("meta"):
        back = reload(source(value))
    with torch.inference_mode():
        also = reload(source(value))
    assert torch.equal(back, value)
    assert torch.equal(also, value)


def train(steps: int = 3) -> dict[str, Any]:
    """A model, its optimizers and schedulers after a few steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(1, 4, 3),
        torch.nn.BatchNorm1d(4),
        torch.nn.Flatten(),
        torch.nn.LSTM(4 * 6, 3),
        torch.nn.Identity(),
    )
    first = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    second = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(first, 0.1, total_steps=20),
        torch.optim.lr_scheduler.LambdaLR(second, lambda step: 0.9**step),
        torch.optim.lr_scheduler.MultiStepLR(first, [2, 5, 5]),
        torch.optim.lr_scheduler.ReduceLROnPlateau(second),
    ]
    for _ in range(steps):
        loss = model(torch.randn(5, 1, 8))[0].square().mean()
        loss.backward()
        first.step()
        second.step()
        for scheduler in schedulers:
            scheduler.step(*([loss.item()] if scheduler is schedulers[3] else []))
    return {"model": model, "first": first, "second": second, "schedulers": schedulers}


def states(trainer: dict[str, Any]) -> dict[str, Any]:
    parts = {key: trainer[key].state_dict() for key in ("model", "first", "second")}
    found = {**parts, "schedulers": [scheduler.state_dict() for scheduler in trainer["schedulers"]]}
    return {**found, "rng": torch.get_rng_state(), "python": random.getstate(), "epoch": 3}


def test_real_training_state() -> None:
    """Module (with versions), optimizer and scheduler states come back equal and load again, round after round."""
    trainer = train()
    state = states(trainer)
    back = state
    for _ in range(3):
        back = round_trip(back)
        assert same(back, state)
    other = train(steps=1)
    for key in ("model", "first", "second"):
        other[key].load_state_dict(back[key])
    for scheduler, stored in zip(other["schedulers"], back["schedulers"], strict=True):
        scheduler.load_state_dict(stored)
    assert same(states(other)["first"], state["first"])
    torch.set_rng_state(back["rng"])
    assert state["model"]._metadata == back["model"]._metadata
    paths = {path for found in leaf_paths(flatten(state, "r").skeleton).values() for path in found}
    assert {"model.0.weight", "first.state.0.exp_avg", "second.state.1.momentum_buffer"} <= paths


def test_schedulers_that_hold_code_are_refused_by_path() -> None:
    """Whatever code a scheduler keeps in its state is named by its path, and the rest is not."""
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    state = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=5).state_dict()
    state["_scale_fn_ref"] = lambda step: step
    state["anneal_func"] = sgd.step
    with pytest.raises(InvalidRecordError) as error:
        flatten(state, "scheduler")
    named = {line.split(":")[0].strip() for line in str(error.value).splitlines()[1:]}
    assert named == {"scheduler._scale_fn_ref", "scheduler.anneal_func"}


def test_in_place_into_live_optimizer_and_model() -> None:
    """A load into live state dicts changes the model itself, without a second copy of any tensor."""
    state = states(train())
    live = train(steps=1)
    target = states(live)
    flat = flatten(state, "r")
    specs = [found.spec for found in flat.arrays]
    for index, targets in match_into(flat.skeleton, specs, target, "r").items():
        for existing in targets:
            fill(specs[index], existing, read_all(flat.arrays[index]))
    fill_into(flat.skeleton, target, lambda index: reload(flat.arrays[index]), len(specs))
    assert same(target, state)
    assert same(live["model"].state_dict(), state["model"])


def test_torch_size() -> None:
    """Shapes come back as shapes."""
    state = {"size": torch.ones(2, 3).size(), "empty": torch.Size([])}
    back = round_trip(state)
    assert same(back, state)
    assert type(back["size"]) is torch.Size


def test_tensors_come_back_as_numpy_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of tensors read where torch is not imported has the same bits in NumPy arrays."""
    flat = flatten([tensor(name, (2, 3)) for name in NAMES], "r")
    stored = [(found.spec, read_all(found)) for found in flat.arrays]
    monkeypatch.delitem(sys.modules, "torch")
    for spec, data in stored:
        destination = Destination.allocate(spec)
        destination.buffer[:] = data
        array = destination.finish()
        assert isinstance(array, np.ndarray)
        assert array.tobytes() == data
        assert array.dtype.name == spec.dtype
