"""Reads a few values of every leaf, and the same ones from the checkpoint's files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jvlab._errors import LayoutError
from jvlab.checkpoint._values import CheckpointValues
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._shards import leaf_from_array
from jvlab.layout._slices import slice_name, stacked_dims
from jvlab.layout._types import Binding
from jvlab.planning._value_check import COLUMNS, ROWS, LeafEvidence, chosen, judge, needs_more, points, under_its_name


@dataclass(frozen=True)
class Sampled:
    """The evidence for every leaf, and the leaves whose checkpoint values equal another leaf's.

    A stacked leaf has evidence for each of its slices, named `leaf[1]`: one layer in the wrong place must not hide
    behind the others.
    """

    seen: Mapping[str, LeafEvidence] = field(default_factory=dict)
    alike: frozenset[str] = frozenset()


def sample(
    bindings: Iterable[Binding],
    arrays: Mapping[str, Any],
    checkpoint: CheckpointValues,
    stacked: Mapping[str, int] | None = None,
) -> Sampled:
    """Sample every leaf that `bindings` name, and compare with the checkpoint.

    `stacked`: leaf → the dimension of its layers; default: what the bindings show.
    """
    bindings = list(bindings)
    stacked = stacked_dims(bindings) if stacked is None else stacked
    by_name: dict[str, list[Binding]] = defaultdict(list)
    for b in bindings:
        by_name[slice_name(b, stacked)].append(b)
    seen: dict[str, LeafEvidence] = {}
    prints: dict[bytes, set[str]] = defaultdict(set)
    for name, bound in by_name.items():
        array = arrays.get(bound[0].leaf)
        got, want, dtypes = both_sides(bound, array, checkpoint)
        found = judge(got, want, dtypes, bound[0].rule)
        if needs_more(found):
            more, theirs, _ = both_sides(bound, array, checkpoint, times=4)
            found = judge(more, theirs, dtypes, bound[0].rule)
        seen[name] = replace(found, kind="named") if found.contradicts and under_its_name(bound) else found
        prints[want.tobytes()].add(bound[0].leaf)
    alike = {leaf for leaves in prints.values() if len(leaves) > 1 for leaf in leaves}
    return Sampled(seen, frozenset(alike))


def slice_order(bound: list[Binding], array: Any, checkpoint: CheckpointValues, dim: int) -> dict[int, int]:
    """Index of a stacked leaf → the index whose layer's values it holds, where the slices are in another order.

    Empty unless each slice holds the values of exactly one layer.
    """
    first: dict[int, Binding] = {}
    for b in bound:
        if b.tensor in checkpoint:
            first.setdefault(b.leaf_start[dim], b)
    if len(first) < 2 or array is None or not _has_numbers(array):
        return {}
    indices = sorted(first)
    sides = [both_sides([first[i]], array, checkpoint)[:2] for i in indices]
    if len({len(side) for pair in sides for side in pair}) != 1:
        return {}
    dtypes = [np.dtype(array.dtype).name]
    close = np.array([[judge(mine, theirs, dtypes).agrees for _, theirs in sides] for mine, _ in sides])
    if not (close.sum(axis=1) == 1).all() or not (close.sum(axis=0) == 1).all():
        return {}
    return {indices[i]: indices[int(j)] for i, j in enumerate(close.argmax(axis=1)) if i != j}


def both_sides(
    bound: list[Binding], array: Any, checkpoint: CheckpointValues, times: int = 1
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """One leaf's values under its bindings, the checkpoint's at the same indices, and the dtypes they were cast to."""
    picked = chosen([b for b in bound if b.tensor in checkpoint])
    if array is None or not picked or not _has_numbers(array):
        return np.zeros(0), np.zeros(0), []
    rows = max(8, ROWS // len(picked))
    places = [points(b, times * rows, times * COLUMNS) for b in picked]
    index = np.concatenate([leaf for leaf, _ in places])
    try:
        values = leaf_values(array, index)
    except LayoutError:  # torch's meta device: a shape without values
        return np.zeros(0), np.zeros(0), []
    want = np.concatenate([checkpoint.at(b.tensor, tensor) for b, (_, tensor) in zip(picked, places, strict=True)])
    counts = [len(leaf) for leaf, _ in places]
    got = values + np.repeat([b.add for b in picked], counts)
    for b, (start, stop) in zip(picked, _ranges(counts), strict=True):
        if b.cast:
            got[start:stop] = got[start:stop].astype(numpy_dtype(b.cast)).astype(np.float64)
    return got, want, sorted({np.dtype(array.dtype).name, *(b.cast or "" for b in picked)})


def _ranges(counts: list[int]) -> list[tuple[int, int]]:
    ends = np.cumsum(counts).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _has_numbers(array: Any) -> bool:
    if getattr(array, "is_deleted", bool)():
        return False
    return hasattr(array, "addressable_shards") or hasattr(array, "__array__")


def leaf_values(array: Any, index: np.ndarray) -> np.ndarray:
    """The elements at `index` [n, dimensions] as float64; NaN where another process holds them."""
    pieces = getattr(array, "addressable_shards", None)
    if pieces is None:
        return np.asarray(np.asarray(array)[tuple(index.T)], np.float64)
    leaf = leaf_from_array("", array)
    boxes = {int(d): (a, b) for d, a, b in zip(leaf.devices, leaf.starts, leaf.stops, strict=True)}
    out = np.full(len(index), np.nan)
    open_ = np.ones(len(index), bool)
    for piece in pieces:
        start, stop = boxes.get(int(piece.device.id), (np.zeros(0), np.asarray(leaf.shape)))
        start = start if len(start) == index.shape[1] else np.zeros(index.shape[1], np.int64)
        inside = open_ & ((index >= start) & (index < stop)).all(axis=1)
        if inside.any():
            # clip instead of selecting: a fixed index shape compiles to one program per device
            local = np.clip(index - start, 0, np.asarray(stop) - start - 1)
            out[inside] = _take(piece.data, local)[inside]
            open_ &= ~inside
        if not open_.any():
            break
    return out


def _take(data: Any, index: np.ndarray) -> np.ndarray:
    """Index in host memory without copying the rest; gather on the device otherwise."""
    if any(d.platform != "cpu" for d in getattr(data, "devices", set)()):
        return np.asarray(data[tuple(index.astype(np.int32).T)]).astype(np.float64)
    return np.asarray(np.asarray(data)[tuple(index.T)]).astype(np.float64)
