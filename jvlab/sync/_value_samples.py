"""Reads a few values of every leaf, and the same ones from the checkpoint's files."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jvlab._errors import LayoutError
from jvlab._units import how_many
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._shards import leaf_from_array
from jvlab.layout._slices import layer_number, slice_name, stacked_dims, without_slice
from jvlab.layout._types import Binding
from jvlab.layout.checkpoint._values import CheckpointValues
from jvlab.layout.rules._roles import classify, templates
from jvlab.sync._value_check import (
    COLUMNS,
    ENOUGH,
    MAX_ROWS,
    ONE_NUMBER,
    ROWS,
    SAME_NUMBERS,
    SLIGHT,
    LeafEvidence,
    chosen,
    close_to,
    is_flat,
    judge,
    needs_more,
    points,
    under_its_name,
)

ODD_ROWS, WIDE = 1024, 64  # rows of an embedding that are looked at closely, and how many values of each
FEW = 1 / 8  # of the rows of an embedding: if more hold other numbers, it is another embedding
MANY_ROWS = 2**15  # a tensor with more rows or columns is not searched for its rows in another order
MOVED = 0.5  # relative error of a row that was trained at most; beyond it, the row holds other numbers


@dataclass(frozen=True)
class Sampled:
    """The evidence for every leaf, and the leaves whose checkpoint values equal another leaf's.

    A stacked leaf has evidence for each of its slices, named `leaf[1]`: one layer in the wrong place must not hide
    behind the others.
    """

    seen: Mapping[str, LeafEvidence] = field(default_factory=dict)
    alike: frozenset[str] = frozenset()  # by the same names


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
    tables = _tables(bindings)
    seen: dict[str, LeafEvidence] = {}
    prints: dict[tuple[tuple[int, ...], bytes], set[str]] = defaultdict(set)
    for name, bound in by_name.items():
        array = arrays.get(bound[0].leaf)
        got, want, dtypes = both_sides(bound, array, checkpoint)
        found = judge(got, want, dtypes, bound[0].rule)
        mostly = found.agrees or (2 * found.equal >= found.compared > 0 and not found.fits)
        table = next((b for b in bound if b.tensor in tables and b.tensor in checkpoint), None)  # tied: of two
        if mostly and table is not None:
            found = every_row(found, table, array, checkpoint, dtypes)
        elif needs_more(found):
            more, theirs, _ = both_sides(bound, array, checkpoint, times=4)
            found = judge(more, theirs, dtypes, bound[0].rule)
        # an exact multiple is no other weight, whatever its name
        seen[name] = replace(found, kind="named") if found.kind == "different" and under_its_name(bound) else found
        if len(want):
            prints[bound[0].tensor_shape, want.tobytes()].add(name)
    return Sampled(seen, _doubles(prints))


def _doubles(prints: Mapping[Any, set[str]]) -> frozenset[str]:
    return frozenset(name for names in prints.values() if len(names) > 1 for name in names)


def _tables(bindings: list[Binding]) -> set[str]:
    """Tensors with a row for each token: embeddings and output heads."""
    flat = [b for b in bindings if len(b.tensor_shape) == 2 and layer_number(b.tensor) is None]  # not in a layer
    shapes = {b.tensor: b.tensor_shape for b in flat}
    roles = classify(templates(shapes))
    return {name for t, role in roles.items() if role.base in ("embed", "head") for name in t.members.values()}


def every_row(
    found: LeafEvidence, b: Binding, array: Any, checkpoint: CheckpointValues, dtypes: list[str]
) -> LeafEvidence:
    """The evidence for an embedding from every row of it: two rows that are exchanged are in no small sample."""
    tall = math.prod(a.size for a in b.axes if a.tensor_dim != len(b.tensor_shape) - 1)
    whole = math.prod(a.size for a in b.axes) == math.prod(b.tensor_shape)
    if tall <= ROWS or not whole:
        return found
    rows = min(tall, MAX_ROWS)
    columns = COLUMNS if rows <= MANY_ROWS else COLUMNS // 2
    got, want, at = _values_at(b, points(b, rows, columns), array, checkpoint)
    good = np.isfinite(got) & np.isfinite(want)
    close = close_to(got, want, dtypes)
    seen = replace(found, compared=int(good.sum()), equal=int((good & close).sum()))
    apart = np.where(good & ~close, np.abs(got - want), 0.0)
    if not apart.any():
        return replace(seen, kind="equal", r=None)
    changed, place = np.unique(at[apart > 0, 0], return_inverse=True)
    worst = np.zeros(len(changed))
    np.maximum.at(worst, place.reshape(-1), apart[apart > 0])
    odd = np.sort(changed[np.argsort(-worst, kind="stable")[:ODD_ROWS]]).tolist()
    return _odd_rows(seen, odd, len(changed) > FEW * rows, b, array, checkpoint)


def _odd_rows(
    seen: LeafEvidence, odd: list[int], many: bool, b: Binding, array: Any, checkpoint: CheckpointValues
) -> LeafEvidence:
    """Whether rows that are not the checkpoint's were trained, hold other numbers, or each other's."""
    columns = np.unique(np.linspace(0, b.tensor_shape[1] - 1, WIDE).round().astype(np.int64))
    where = np.stack(np.meshgrid(np.asarray(odd), columns, indexing="ij"), axis=-1).reshape(-1, 2)
    got, want, _ = _values_at(b, (_leaf_index(b, where), where), array, checkpoint)
    here = np.isfinite(got) & np.isfinite(want)  # another process may hold some columns
    got, want = (np.where(here, side, 0.0).reshape(len(odd), -1) for side in (got, want))
    # A row that was exchanged is nearer to another odd row of the checkpoint than to its own, trained since or not. A
    # copy of a row that stayed where it was is no exchange: new tokens are often made so.
    distance = np.sqrt(np.maximum((got**2).sum(1)[:, None] + (want**2).sum(1) - 2 * got @ want.T, 0.0))
    own = np.linalg.norm(got - want, axis=1)
    near = distance < MOVED * own[:, None]
    np.fill_diagonal(near, False)
    moved = [odd[i] for i in np.flatnonzero(near.any(axis=1) & near.any(axis=0))]
    if len(moved) > 1:
        names = ", ".join(map(str, moved[:4])) + (" …" if len(moved) > 4 else "")
        return replace(seen, kind="exchanged", note=f"rows {names} hold each other's numbers")
    other = int((~(own <= MOVED * np.linalg.norm(want, axis=1))).sum())
    if not other:
        return seen if seen.agrees else replace(seen, kind="correlated", r=_correlation(got, want))
    if other == len(odd) and many:
        return replace(seen, kind="different", r=_correlation(got, want))
    rows = how_many(other, "row holds", "rows hold")
    return replace(seen, kind="partly", note=f"{rows} other numbers: no evidence for them")


def rearranged(name: str, bindings: Iterable[Binding], arrays: Mapping[str, Any], checkpoint: CheckpointValues) -> bool:
    """Does this leaf, which is a tensor by name, hold the tensor's rows or columns in another order?"""
    bound = [b for b in bindings if b.leaf == name and b.tensor in checkpoint]
    array = arrays.get(name)
    if len(bound) != 1 or len(bound[0].tensor_shape) != 2 or array is None or max(bound[0].tensor_shape) > MANY_ROWS:
        return False
    b = bound[0]
    for dim in (0, 1):
        lines, across = b.tensor_shape[dim], b.tensor_shape[1 - dim]
        columns = np.unique(np.linspace(0, across - 1, WIDE).round().astype(np.int64))
        grid = np.stack(np.meshgrid(np.arange(lines), columns, indexing="ij"), axis=-1).reshape(-1, 2)
        where = grid if dim == 0 else grid[:, ::-1]
        got, want, _ = _values_at(b, (_leaf_index(b, where), where), array, checkpoint)
        got, want = got.reshape(lines, -1), want.reshape(lines, -1)
        picked = np.unique(np.linspace(0, lines - 1, WIDE).round().astype(np.int64))
        size = (want**2).sum(1)
        distance = (got[picked] ** 2).sum(1)[:, None] + size - 2 * got[picked] @ want.T
        if len(columns) >= ENOUGH and (distance <= SLIGHT**2 * size).any(axis=1).mean() > MOVED:
            return True
    return False


def _correlation(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.corrcoef(got.reshape(-1), want.reshape(-1))[0, 1])


def _leaf_index(b: Binding, tensor: np.ndarray) -> np.ndarray:
    """The leaf's indices [n, d] of these elements of a tensor, which one axis each leads to."""
    leaf = np.tile(np.asarray(b.leaf_start, np.int64), (len(tensor), 1))
    left = tensor - np.asarray(b.tensor_start, np.int64)
    for axis in sorted(b.axes, key=lambda a: -a.tensor_step):
        step = left[:, axis.tensor_dim] // axis.tensor_step
        left[:, axis.tensor_dim] -= step * axis.tensor_step
        leaf[:, axis.leaf_dim] += step * axis.leaf_step
    return leaf


def _values_at(
    b: Binding, at: tuple[np.ndarray, np.ndarray], array: Any, checkpoint: CheckpointValues
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The leaf's values under its binding and the checkpoint's at (leaf, tensor) indices; and the tensor's indices."""
    leaf, tensor = at
    got = leaf_values(array, leaf) + b.add
    if b.cast:
        got = got.astype(numpy_dtype(b.cast)).astype(np.float64)
    return got, checkpoint.at(b.tensor, tensor), tensor


def untold(bindings: Iterable[Binding], arrays: Mapping[str, Any]) -> dict[str, str]:
    """Leaf → why its values cannot be told from others': one number everywhere, or the same as another leaf's."""
    bindings = list(bindings)
    stacked = stacked_dims(bindings)
    by_name: dict[str, list[Binding]] = defaultdict(list)
    for b in bindings:
        by_name[slice_name(b, stacked)].append(b)
    out: dict[str, str] = {}
    prints: dict[tuple[tuple[int, ...], bytes], set[str]] = defaultdict(set)
    for name, bound in by_name.items():
        array = arrays.get(bound[0].leaf)
        if array is None or not _has_numbers(array) or tuple(array.shape) != tuple(bound[0].leaf_shape):
            continue
        picked = chosen(bound)
        index = np.concatenate([points(b, max(8, ROWS // len(picked)))[0] for b in picked])
        try:
            values = leaf_values(array, index)
        except LayoutError:  # torch's meta device: a shape without values
            continue
        if is_flat(values[np.isfinite(values)]):
            out.setdefault(bound[0].leaf, ONE_NUMBER)
        else:
            prints[bound[0].tensor_shape, values.tobytes()].add(name)
    for name in sorted(_doubles(prints)):
        out.setdefault(name if name in arrays else without_slice(name), SAME_NUMBERS)
    return out


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
    if array is None or not picked or not _has_numbers(array) or tuple(array.shape) != tuple(picked[0].leaf_shape):
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
