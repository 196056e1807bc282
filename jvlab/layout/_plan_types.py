"""What a transfer plan is made of: shardings, leaves, targets, value transforms, one link's boxes. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from jvlab._errors import ConfigError, MissingDependency
from jvlab.layout._types import Shape

ALIGN = 16  # bytes: each box of a bucket starts on this boundary


# kinds of target
LIVE = 0
OPAQUE = 1
REPACKED = 2
# the leaf, made while syncing, that holds the scale of every quantised group
SCALES = "@scales"
FP8 = "float8_e4m3fn"
FP8_MAX = 448.0  # its largest value; it has no infinity


def scales_path(leaf: str) -> str:
    """The leaf, made while syncing, that holds the scales of a leaf that is quantised in blocks."""
    return f"{SCALES}/{leaf}"


def is_scales(leaf: str) -> bool:
    """Whether a leaf is made while syncing, and none of the trainer's."""
    return leaf == SCALES or leaf.startswith(f"{SCALES}/")


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a dtype name; bfloat16 and the float8 kinds come from ml_dtypes (installed with jax)."""
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError as e:
        raise MissingDependency(
            f"numpy has no dtype {name!r}",
            remedy="pip install ml_dtypes (it comes with jax)",
            dtype=name,
        ) from e
    if not hasattr(ml_dtypes, name):
        raise ConfigError(
            f"unknown dtype {name!r}",
            remedy="use a numpy or ml_dtypes name, e.g. bfloat16",
            dtype=name,
        )
    return np.dtype(getattr(ml_dtypes, name))


def item_bytes(name: str) -> int:
    """Bytes of one element of a dtype, by name; needs no ml_dtypes."""
    known = {
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2fnuz": 1,
    }
    return known[name] if name in known else numpy_dtype(name).itemsize


def storage_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a strided box."""
    return (
        1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if all(shape)
        else 0
    )


@dataclass(frozen=True, eq=False)
class Sharding:
    """How leaves of one shape are sharded: the distinct cells, and which devices hold each of them."""

    shape: Shape
    starts: np.ndarray = field(repr=False)  # int64 [U, nd]
    stops: np.ndarray = field(repr=False)  # int64 [U, nd]
    owner_ptr: np.ndarray = field(repr=False)  # int64 [U + 1]
    # int32, device ids; cell u is on owners[owner_ptr[u] : owner_ptr[u + 1]]
    owners: np.ndarray = field(repr=False)

    @cached_property
    def local_strides(self) -> np.ndarray:
        """Strides of each cell's C-contiguous local buffer, [U, nd]."""
        local = self.stops - self.starts
        strides = np.ones_like(local)
        for d in range(local.shape[1] - 2, -1, -1):
            strides[:, d] = strides[:, d + 1] * local[:, d + 1]
        return strides

    @cached_property
    def whole(self) -> np.ndarray:
        """Per dimension: does every device hold all of it? bool [nd]."""
        return (
            (self.starts == 0) & (self.stops == np.array(self.shape, np.int64))
        ).all(axis=0)

    def cell_of(self, device: int) -> int:
        """The cell that a device holds, or -1."""
        where = np.flatnonzero(self.owners == device)
        return (
            int(np.searchsorted(self.owner_ptr, where[0], side="right")) - 1
            if len(where)
            else -1
        )


@dataclass(frozen=True)
class LeafInfo:
    """A leaf as stored in the plan."""

    path: str
    shape: Shape
    dtype: str
    sharding: int  # index into TransferPlan.shardings


@dataclass(frozen=True)
class TargetInfo:
    """A live parameter as stored in the plan, shared by all ranks where it is the same."""

    name: str
    shape: Shape
    dtype: str
    strides: Shape


@dataclass(frozen=True)
class Quantised:
    """A leaf that is sent as fp8: what is done to its values first, and which scale each of its slices is divided by.

    `groups` are indices into the leaf of scales (`SCALES`), a table of shape `grid`, which broadcasts against the leaf:
    one number for a whole leaf, one per layer where layers are stacked, one per layer and expert. -1: sent nowhere.
    With a `block` (indices to a block, for each dimension) there are no groups: each block has a scale of its own, and
    all are a leaf of shape `grid` (`scales`).
    """

    path: str
    source: str  # dtype of the trainer's leaf
    loaded: str  # dtype in which the engine's own loader would get it
    grid: Shape
    groups: Shape
    add: float = 0.0
    cast: str | None = None
    block: Shape = ()

    @property
    def count(self) -> int:
        """How many slices or blocks it has."""
        return int(np.prod(self.grid, dtype=np.int64))

    @property
    def scales(self) -> str:
        """The leaf that holds its scales."""
        return scales_path(self.path) if self.block else SCALES

    def group_table(self) -> np.ndarray:
        """The groups as an array of shape `grid`; of blocks, which have scales of their own, -1."""
        groups = np.full(self.count, -1) if self.block else np.array(self.groups)
        return groups.astype(np.int64).reshape(self.grid)


@dataclass(frozen=True)
class ValueTransform:
    """What one class does to values: source dtype, added constant, intermediate cast, wire dtype."""

    source: str
    wire: str
    add: float = 0.0
    cast: str | None = None


@dataclass(frozen=True, eq=False)
class LinkPlan:
    """Concrete boxes of one link, in the order they are packed. All offsets and strides in elements.

    Box i reads `shape[i]` at `src_offset[i]`, `src_strides[i]` of the device's shard of leaf `leaf[i]`, and is packed
    C-contiguously at byte `bucket_offset[i]` of bucket `bucket[i]`, in the wire dtype.
    """

    device: int
    process: int
    rank: int
    replica: int
    leaf: np.ndarray
    target: np.ndarray
    transform: np.ndarray
    shape: np.ndarray
    src_offset: np.ndarray
    src_strides: np.ndarray
    # [N, K], the leaf's dimension that an axis walks along; -1 where an element is repeated
    leaf_dim: np.ndarray
    dst_offset: np.ndarray
    dst_strides: np.ndarray
    nbytes: np.ndarray
    bucket: np.ndarray
    bucket_offset: np.ndarray
    bucket_sizes: np.ndarray  # bytes of each bucket

    def __len__(self) -> int:
        return len(self.leaf)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())


def convert(values: np.ndarray, transform: ValueTransform) -> np.ndarray:
    """cast(value + add) to the wire dtype; the sum is taken in float32 at least."""
    if transform.add:
        wide = values.dtype if values.dtype.itemsize >= 4 else np.dtype(np.float32)
        values = values.astype(wide) + wide.type(transform.add)
    if transform.cast:
        values = values.astype(numpy_dtype(transform.cast))
    return values.astype(numpy_dtype(transform.wire), copy=False)


# The order of elements on the wire: each box by its source's strides, so that the sender reads memory in sequence.


def source_order(link: LinkPlan) -> LinkPlan:
    """The link with every box's axes sorted by source stride, largest first; buckets and offsets stay.

    Both ends call this, so they agree on the packed bytes. The receiver transposes, in the one pass that it makes
    anyway. Repeated axes (source stride 0) come first: their copies follow one another.
    """
    if not len(link):
        return link
    # axes of size one go first
    key = np.where(link.shape == 1, np.iinfo(np.int64).max, link.src_strides)
    key = np.where(
        (link.src_strides == 0) & (link.shape > 1), np.iinfo(np.int64).max - 1, key
    )
    order = np.argsort(-key, axis=1, kind="stable")
    take = lambda table: np.take_along_axis(table, order, axis=1)
    return replace(
        link,
        shape=take(link.shape),
        src_strides=take(link.src_strides),
        dst_strides=take(link.dst_strides),
        leaf_dim=take(link.leaf_dim),
    )
