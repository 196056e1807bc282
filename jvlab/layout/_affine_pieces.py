"""Affine pieces of the whole model: bindings joined with traced rows, stacked pieces merged into one. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jvlab._errors import LayoutError
from jvlab.layout._boxes import unique_rows
from jvlab.layout._compose import Piece, PieceAxis, Region, axes_numbers, compose
from jvlab.layout._tables import Rows
from jvlab.layout._types import Binding, Leaf


@dataclass
class Pieces:
    """Affine pieces of all leaves and targets: the geometry of each, and its start in leaf and target."""

    geometry: list[tuple[PieceAxis, ...]]
    kind: np.ndarray  # [P] index into geometry
    leaf: np.ndarray
    target: np.ndarray
    start: np.ndarray  # [P, ND]
    dst: np.ndarray
    transforms: list[tuple[float, str | None]]
    transform: np.ndarray  # [P] index into transforms


def join(leaves: Sequence[Leaf], bindings: Sequence[Binding], rows: Rows) -> Pieces:
    """Every binding composed with every traced row of its tensor; equal pairs of geometries are composed once."""
    leaf_id = {x.path: i for i, x in enumerate(leaves)}
    ndim = max([len(x.shape) for x in leaves] + [1])
    transforms: dict[tuple[float, str | None], int] = {}
    transform = np.array([transforms.setdefault((float(b.add), b.cast), len(transforms)) for b in bindings], np.int64)
    start = np.zeros((len(bindings), ndim), np.int64)
    for i, b in enumerate(bindings):
        start[i, : len(b.leaf_start)] = b.leaf_start
    which_leaf = np.array([leaf_id[b.leaf] for b in bindings], np.int64)
    binding, row = _pairs(bindings, rows)
    found, kind = _compose_kinds(bindings, rows, binding, row)
    forms: dict[tuple[PieceAxis, ...], int] = {}
    flat = [p for x in found for p in x]
    flat_kind = np.array([forms.setdefault(p.axes, len(forms)) for p in flat], np.int64)
    flat_start = np.zeros((len(flat), ndim), np.int64)
    for i, p in enumerate(flat):
        flat_start[i, : len(p.start)] = p.start
    flat_dst = np.array([p.dst for p in flat], np.int64)
    sizes = np.array([len(x) for x in found], np.int64)
    times = sizes[kind]
    pair, within = _repeat(times)
    piece = (np.cumsum(sizes) - sizes)[kind[pair]] + within
    b, r = binding[pair], row[pair]
    return Pieces(
        geometry=list(forms),
        kind=flat_kind[piece],
        leaf=which_leaf[b],
        target=rows.target[r],
        start=start[b] + flat_start[piece],
        dst=rows.dst_offset[r] + flat_dst[piece],
        transforms=list(transforms),
        transform=transform[b],
    )


def _repeat(times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each index i `times[i]` times, and the count within it."""
    index = np.repeat(np.arange(len(times)), times)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(times) - times, times)


def _pairs(bindings: Sequence[Binding], rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """(binding, row) for every pair that shares a tensor."""
    tensor = np.array([rows.tensor_ids.get(b.tensor, -1) for b in bindings], np.int64)
    order = np.argsort(tensor, kind="stable")
    first = np.searchsorted(tensor[order], rows.tensor)
    row, within = _repeat(np.searchsorted(tensor[order], rows.tensor, side="right") - first)
    return order[first[row] + within].astype(np.int64), row


def _compose_kinds(
    bindings: Sequence[Binding], rows: Rows, binding: np.ndarray, row: np.ndarray
) -> tuple[list[list[Piece]], np.ndarray]:
    """The pieces of each distinct pair of geometries, and each pair's kind."""
    shapes: dict[tuple[object, ...], int] = {}
    numbers = axes_numbers(bindings)
    keys = [(b.tensor_shape, b.tensor_start, n, len(b.leaf_shape)) for b, n in zip(bindings, numbers, strict=True)]
    geometry = np.array([shapes.setdefault(k, len(shapes)) for k in keys], np.int64)
    heads, row_kind = unique_rows([rows.shape, rows.src_offset, rows.src_strides, rows.dst_strides])
    firsts, kind = unique_rows([geometry[binding], row_kind[row]])
    found: list[list[Piece]] = []
    for at in firsts.tolist():
        r = heads[row_kind[row[at]]]
        region = (
            tuple(rows.shape[r].tolist()),
            int(rows.src_offset[r]),
            tuple(rows.src_strides[r].tolist()),
            tuple(rows.dst_strides[r].tolist()),
        )
        found.append(_compose_named(bindings[int(binding[at])], region))
    return found, kind


def _compose_named(binding: Binding, region: Region) -> list[Piece]:
    b = binding
    try:
        return compose(b.tensor_shape, b.tensor_start, b.axes, len(b.leaf_shape), region)
    except LayoutError as e:
        raise LayoutError(
            f"{binding.leaf!r} {binding.leaf_shape} → {binding.tensor!r} {binding.tensor_shape}: {e.message}",
            remedy=e.remedy or "check the rule's axes",
            tensor=binding.tensor,
            leaf=binding.leaf,
            rule=binding.rule,
        ) from e


def _nests(
    geometry: Sequence[tuple[PieceAxis, ...]],
    kind: np.ndarray,
    step: np.ndarray,
    step_dst: np.ndarray,
    size: np.ndarray,
) -> np.ndarray:
    """Whether a new axis keeps the mixed radix: its leaf dimension is unused, and no target stride is overlapped."""
    taken = np.zeros((len(geometry), step.shape[1]), bool)
    for g, axes in enumerate(geometry):
        taken[g, [a.leaf_dim for a in axes if a.leaf_dim >= 0]] = True
    span = np.array([sum((a.size - 1) * a.dst_stride for a in axes) for axes in geometry], np.int64)
    least = np.array([min([a.dst_stride for a in axes], default=1 << 62) for axes in geometry], np.int64)
    apart = (step_dst > span[kind]) | ((size - 1) * step_dst < least[kind])
    return apart & ~((step != 0) & taken[kind]).any(axis=1)


def merge_stacks(p: Pieces) -> Pieces:
    """Equal pieces of one leaf into one target that advance in step on both sides (experts of a stack) become one."""
    if len(p.kind) < 2:
        return p
    order = np.lexsort((p.dst, p.transform, p.kind, p.leaf, p.target))
    kind, leaf, target, start, dst, transform = (
        x[order] for x in (p.kind, p.leaf, p.target, p.start, p.dst, p.transform)
    )
    same = (
        (kind[1:] == kind[:-1])
        & (leaf[1:] == leaf[:-1])
        & (target[1:] == target[:-1])
        & (transform[1:] == transform[:-1])
    )
    group = np.concatenate([[0], np.cumsum(~same)])
    head = np.flatnonzero(np.concatenate([[True], ~same]))
    size = np.diff(np.append(head, len(kind)))
    step_dst = np.zeros(len(head), np.int64)
    step = np.zeros((len(head), start.shape[1]), np.int64)
    many = size > 1
    step_dst[many] = dst[head[many] + 1] - dst[head[many]]
    step[many] = start[head[many] + 1] - start[head[many]]
    at = np.arange(len(kind)) - head[group]
    fits = (dst == dst[head[group]] + at * step_dst[group]) & (
        start == start[head[group]] + at[:, None] * step[group]
    ).all(axis=1)
    good = np.bitwise_and.reduceat(fits, head) & many & (step_dst > 0)
    good &= ((step != 0).sum(axis=1) == 1) & (step.sum(axis=1) > 0)
    good &= _nests(p.geometry, kind[head], step, step_dst, size)
    if not good.any():
        return p
    forms = {g: i for i, g in enumerate(p.geometry)}
    chosen = np.flatnonzero(good)
    dim = np.argmax(step[chosen] != 0, axis=1)
    stride = step[chosen, dim]
    cols = [kind[head[chosen]], size[chosen], dim, stride, step_dst[chosen]]
    firsts, cls = unique_rows(cols)
    made = []
    for f in firsts:
        base, n, d, s, t = (int(c[f]) for c in cols)
        axes = tuple(sorted((*p.geometry[base], PieceAxis(n, d, s, t)), key=lambda x: -x.dst_stride))
        made.append(forms.setdefault(axes, len(forms)))
    new_kind = kind.copy()
    new_kind[head[chosen]] = np.array(made, np.int64)[cls]
    keep = ~good[group] | (at == 0)
    return Pieces(
        list(forms),
        new_kind[keep],
        leaf[keep],
        target[keep],
        start[keep],
        dst[keep],
        p.transforms,
        transform[keep],
    )
