"""The frozen tables that describe both sides of a layout: leaves, bindings, traced ranks. numpy only.

    JAX leaf ──Binding──▶ checkpoint tensor ──RankLayout row──▶ live vLLM parameter on one rank

The two sides are joined on checkpoint (Hugging Face) tensor names. Offsets and strides are in elements, never bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

Shape = tuple[int, ...]
T = TypeVar("T")


def to_row(item: object) -> list[Any]:
    """The fields of a dataclass in their order, as JSON has them."""
    return [list(x) if isinstance(x, tuple) else x for x in vars(item).values()]


def from_row(kind: type[T], row: Iterable[Any]) -> T:
    """The inverse of `to_row`."""
    return kind(*(tuple(x) if isinstance(x, list) else x for x in row))


@dataclass(frozen=True)
class Axis:
    """One elementary axis of a binding: a run of indices seen from both sides.

    Walking one step along it moves `leaf_step` along dimension `leaf_dim` of the JAX leaf and `tensor_step` along
    dimension `tensor_dim` of the checkpoint tensor. A merged `(n h)` is two axes on one dimension, with steps h and 1.
    """

    size: int
    leaf_dim: int
    leaf_step: int
    tensor_dim: int
    tensor_step: int


@dataclass(frozen=True)
class Binding:
    """A rule applied: an index-for-index map between a part of one JAX leaf and a part of one checkpoint tensor.

    leaf_index[d] = leaf_start[d] + Σ i_a · leaf_step_a over the axes with leaf_dim d; the same for the tensor side.
    Checkpoint value = cast(leaf value + add). Several bindings may share a leaf (fused, stacked leaves) or a tensor.
    """

    leaf: str
    tensor: str
    leaf_shape: Shape
    tensor_shape: Shape
    leaf_start: Shape
    tensor_start: Shape
    axes: tuple[Axis, ...]
    add: float = 0.0
    # dtype to cast to before the engine's own, e.g. "bfloat16"; None: straight to the engine's
    cast: str | None = None
    rule: str = ""  # the rule's text
    reason: str = ""  # why this leaf matched this tensor
    confidence: float = 1.0
    warning: str = ""  # what was assumed without evidence


@dataclass(frozen=True)
class Leaf:
    """One JAX array as the planner sees it: its shape and which device holds which box. Needs no jax.

    `devices[k]` holds the box `starts[k] : stops[k]`; replicated arrays list several devices with equal boxes.
    """

    path: str
    shape: Shape
    dtype: str
    devices: np.ndarray = field(repr=False)  # int32 [D], global device ids
    starts: np.ndarray = field(repr=False)  # int64 [D, ndim]
    stops: np.ndarray = field(repr=False)  # int64 [D, ndim]


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor as a checkpoint names it."""

    name: str
    shape: Shape
    dtype: str


@dataclass(frozen=True)
class Parameter:
    """A live vLLM parameter on one rank. `strides` in elements of its storage; offset 0 is its first element."""

    name: str
    shape: Shape
    dtype: str
    strides: Shape


@dataclass(frozen=True)
class Note:
    """A named exception to plain copying, with the reason in words: an opaque tensor, a re-packed layer, padding."""

    name: str
    reason: str
    elements: int = 0
    # of padding: "constant" (the loader fills it), "opaque" (an opaque tensor does), "scale" (computed from another
    # parameter), "gap" (nothing does); of a re-packed parameter: RELOADED, or "" if jvlab packs it again
    kind: str = ""


@dataclass(frozen=True)
class Format:
    """How the engine holds one parameter: kernel bytes = f(checkpoint boxes). Without one: as the loader writes it.

    `parameter` then has the kernel's shape, dtype and strides. Its values are those of the loader, cast to `loaded`,
    divided by a scale and cast to fp8 (`_formats.py`); the parameter `scale` holds one scale for each `block` elements
    of the storage, over everything that is fused into the block, on all ranks.
    """

    parameter: str
    scale: str
    loaded: str  # the dtype in which vLLM's loader gets the values
    block: int  # elements of storage to a scale
    text: str  # for people: "fp8, one scale per fused parameter, transposed"


# kind of a re-packed parameter that vLLM's own reload makes of what arrives, in each sync
RELOADED = "reloaded"


@dataclass(frozen=True)
class RankLayout:
    """Where vLLM's own loader puts every checkpoint element on one rank, as columns: row r is one strided copy.

    Row r copies an N-d box of shape `shape[r]` (unused trailing dimensions have size 1, stride 0) from the contiguous
    checkpoint tensor `tensors[tensor[r]]` to the live parameter `parameters[parameter[r]]`.
    """

    rank: int  # global rank within one engine
    coords: tuple[tuple[str, int], ...]  # e.g. (("tp", 0), ("pp", 0), ("ep", 0))
    tensors: tuple[CheckpointTensor, ...]
    parameters: tuple[Parameter, ...]
    tensor: np.ndarray = field(repr=False)  # int32 [R], index into tensors
    parameter: np.ndarray = field(repr=False)  # int32 [R], index into parameters
    shape: np.ndarray = field(repr=False)  # int64 [R, K]
    src_offset: np.ndarray = field(repr=False)  # int64 [R]
    src_strides: np.ndarray = field(repr=False)  # int64 [R, K]
    dst_offset: np.ndarray = field(repr=False)  # int64 [R]
    dst_strides: np.ndarray = field(repr=False)  # int64 [R, K]
    # elements of live parameters that no checkpoint element fills
    padding: tuple[Note, ...] = ()
    # checkpoint tensors that must go whole through load_weights
    opaque: tuple[Note, ...] = ()
    repacked: tuple[Note, ...] = ()  # live parameters that are re-packed after loading
    # checkpoint tensors this rank's loader takes nothing from
    unused: tuple[str, ...] = ()
    # parameters that hold a function of the checkpoint's values
    formats: tuple[Format, ...] = ()

    @property
    def reloaded(self) -> set[str]:
        """Parameters that vLLM's own reload makes of what arrives: their memory is not what the layout describes."""
        return {note.name for note in self.repacked if note.kind == RELOADED}
