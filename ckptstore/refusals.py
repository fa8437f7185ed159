"""Why an array cannot be stored exactly, and what to do about it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptstore import dtypes


def numpy_refusal(dtype: np.dtype[Any]) -> str:
    """For a NumPy dtype that has no name in the format."""
    if dtype.hasobject or dtype.kind == "T":
        return f"a NumPy array of {dtype} holds Python objects, not plain elements"
    if dtype.names is not None:
        return "a structured NumPy array is not supported: store each field under its own key"
    if dtype.kind in "fc":
        return f"elements of type {dtype} differ between machines: convert them to float64 or complex128"
    return f"NumPy arrays of {dtype} have no portable form"


def torch_refusal(torch: Any, tensor: Any) -> str | None:
    """For a tensor; None if it can be stored."""
    cls = type(tensor)
    if cls is not torch.Tensor and cls is not torch.nn.Parameter:
        return f"{cls.__module__}.{cls.__qualname__} is a subclass of torch.Tensor: store the plain tensors inside it"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}) is not supported: store int_repr(), scale and zero point"
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return f"a tensor of layout {layout} is not supported: store its values and indices, or to_dense()"
    if tensor.is_meta:
        return "a tensor on the meta device has no values"
    if dtypes.torch_name(tensor.dtype) is None:
        return f"elements of type {tensor.dtype} have no portable form: store a view(torch.uint8)"
    try:
        freed = tensor.numel() and not tensor.untyped_storage().nbytes()
    except RuntimeError as error:  # NotImplementedError included: functorch wrappers and the like
        return f"a tensor without memory of its own: {str(error).splitlines()[0]}"
    return "the memory of the tensor was freed (its storage is empty)" if freed else None
