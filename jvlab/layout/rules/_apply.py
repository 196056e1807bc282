"""The numpy executor of a binding and its inverse: the reference that every faster one is tested against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jvlab._errors import LayoutError
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._types import Binding


def _view(
    array: np.ndarray, start: tuple[int, ...], dims: Sequence[tuple[int, int, int]], writeable: bool
) -> np.ndarray:
    """The strided view of `array` that starts at `start` with (size, dimension, step) axes."""
    corner = array[tuple(slice(at, None) for at in start)]
    shape = [size for size, _, _ in dims]
    strides = [array.strides[dim] * step for _, dim, step in dims]
    return np.lib.stride_tricks.as_strided(corner, shape, strides, writeable=writeable)


def _check(binding: Binding, leaf: np.ndarray, tensor: np.ndarray) -> None:
    """Strided views are not bounds-checked, so the arrays must have the shapes that were bound."""
    if tuple(leaf.shape) != binding.leaf_shape or tuple(tensor.shape) != binding.tensor_shape:
        raise LayoutError(
            f"leaf {binding.leaf} {leaf.shape} and tensor {binding.tensor} {tensor.shape} are not of the shapes "
            f"{binding.leaf_shape} and {binding.tensor_shape} that were bound",
            remedy="bind the rules again for these arrays",
            leaf=binding.leaf,
            tensor=binding.tensor,
        )


def apply_binding(binding: Binding, leaf: np.ndarray, tensor: np.ndarray) -> None:
    """Writes the binding's part of the checkpoint tensor from the leaf: the reference for every faster executor."""
    _check(binding, leaf, tensor)
    source = _view(leaf, binding.leaf_start, [(a.size, a.leaf_dim, a.leaf_step) for a in binding.axes], False)
    target = _view(tensor, binding.tensor_start, [(a.size, a.tensor_dim, a.tensor_step) for a in binding.axes], True)
    target[...] = _shift(source, binding.add, binding.cast).astype(tensor.dtype)


def invert_binding(binding: Binding, tensor: np.ndarray, leaf: np.ndarray) -> None:
    """Writes the binding's part of the leaf from the checkpoint tensor: the inverse of `apply_binding`."""
    _check(binding, leaf, tensor)
    source = _view(tensor, binding.tensor_start, [(a.size, a.tensor_dim, a.tensor_step) for a in binding.axes], False)
    target = _view(leaf, binding.leaf_start, [(a.size, a.leaf_dim, a.leaf_step) for a in binding.axes], True)
    target[...] = _shift(source, -binding.add, None).astype(leaf.dtype)


def _shift(values: np.ndarray, add: float, cast: str | None) -> np.ndarray:
    if add:
        # at least float32: 1 + w in bfloat16 would lose most digits of w
        values = (
            values.astype(np.result_type(values.dtype, np.float32) if values.dtype.kind == "f" else np.float32) + add
        )
    return values.astype(numpy_dtype(cast)) if cast else values


def mark_binding(binding: Binding, count: np.ndarray) -> bool:
    """Adds one to every element of `count` that the binding fills; True if one of them was counted before."""
    view = _view(count, binding.tensor_start, [(a.size, a.tensor_dim, a.tensor_step) for a in binding.axes], True)
    met = bool(view.any())
    view += 1
    return met
