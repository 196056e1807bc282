"""One rule's axes composed with one traced region: which leaf elements go where in the live parameter. numpy only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jvlab._errors import LayoutError
from jvlab.layout._boxes import MAX_ENUMERATED, Strided, merge_axes, stride_chain
from jvlab.layout._types import Axis, Binding, Shape

# a traced row without its target offset: shape, source offset, source strides (of the flat tensor), target strides
Region = tuple[Shape, int, Shape, Shape]


@dataclass(frozen=True)
class PieceAxis:
    """One axis of a piece: a step along it moves both in a leaf dimension and in the live parameter's storage."""

    size: int
    leaf_dim: int  # -1: the same leaf element goes to several places
    leaf_step: int
    dst_stride: int


@dataclass(frozen=True)
class Piece:
    """An affine box map: leaf index = start + Σ i·leaf_step, target position = dst + Σ i·dst_stride."""

    axes: tuple[PieceAxis, ...]
    start: Shape
    dst: int


def row_major(shape: Sequence[int]) -> Shape:
    """Strides, in elements, of a C-contiguous array."""
    strides = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def axes_numbers(bindings: Sequence[Binding]) -> list[int]:
    """A number per distinct tuple of axes; identical objects are recognised without comparing."""
    by_id: dict[int, int] = {}
    by_content: dict[tuple[Axis, ...], int] = {}
    out = []
    for b in bindings:
        number = by_id.get(id(b.axes))
        if number is None:
            number = by_id[id(b.axes)] = by_content.setdefault(b.axes, len(by_content))
        out.append(number)
    return out


def tensor_box(shape: Shape, start: Shape, axes: Sequence[Axis]) -> Strided:
    """The part of a tensor that a binding's axes fill."""
    flat = row_major(shape)
    return Strided(
        sum(s * c for s, c in zip(start, flat, strict=True)),
        tuple(a.size for a in axes),
        tuple(a.tensor_step * flat[a.tensor_dim] for a in axes),
    )


def compose(
    tensor_shape: Shape,
    tensor_start: Shape,
    axes: tuple[Axis, ...],
    ndim: int,
    region: Region,
) -> list[Piece]:
    """Pieces common to a binding (its leaf_start taken as 0) and a region (its dst_offset taken as 0)."""
    ours = tensor_box(tensor_shape, tensor_start, axes)
    shape, offset, src, dst = region
    repeated = [
        PieceAxis(n, -1, 0, d)
        for n, s, d in zip(shape, src, dst, strict=True)
        if n > 1 and s == 0
    ]
    kept = [
        k for k, (n, s) in enumerate(zip(shape, src, strict=True)) if n > 1 and s != 0
    ]
    theirs = Strided(offset, tuple(shape[k] for k in kept), tuple(src[k] for k in kept))
    theirs_dst = tuple(dst[k] for k in kept)
    pieces: list[Piece] = []
    for a, b, a_fixed, b_fixed in _nested(ours, theirs):
        pieces += _meet(a, b, a_fixed, b_fixed, axes, theirs_dst, ndim, repeated)
    return pieces


def _nested(
    ours: Strided, theirs: Strided
) -> Iterator[tuple[Strided, Strided, dict[int, int], dict[int, int]]]:
    """The pair itself where all strides form a chain; else its parts with one offending axis enumerated at a time."""
    work = [(ours, theirs, dict[int, int](), dict[int, int]())]
    made = 0
    while work:
        a, b, a_fixed, b_fixed = work.pop()
        strides = [
            1,
            *(a.strides[k] for k in a.live()),
            *(b.strides[k] for k in b.live()),
        ]
        if stride_chain(strides) is not None:
            yield a, b, a_fixed, b_fixed
            continue
        distinct = sorted(set(strides))
        offending = next(y for x, y in itertools.pairwise(distinct) if y % x)
        side = 0 if any(a.strides[k] == offending for k in a.live()) else 1
        box = (a, b)[side]
        axis = next(k for k in box.live() if box.strides[k] == offending)
        made += box.sizes[axis]
        if made > MAX_ENUMERATED:
            raise LayoutError(
                f"strides {tuple(distinct)} of a rule and of a traced region have no common factorisation",
                remedy="split the merged axis in the rule so that its steps divide each other",
                strides=tuple(distinct),
            )
        for i in range(box.sizes[axis]):
            sizes = (*box.sizes[:axis], 1, *box.sizes[axis + 1 :])
            one = Strided(box.offset + i * offending, sizes, box.strides)
            if side == 0:
                work.append((one, b, {**a_fixed, axis: i}, b_fixed))
            else:
                work.append((a, one, a_fixed, {**b_fixed, axis: i}))


def _meet(
    ours: Strided,
    theirs: Strided,
    ours_fixed: dict[int, int],
    theirs_fixed: dict[int, int],
    axes: tuple[Axis, ...],
    theirs_dst: Shape,
    ndim: int,
    repeated: list[PieceAxis],
) -> list[Piece]:
    chain = stride_chain(
        [
            1,
            *(ours.strides[k] for k in ours.live()),
            *(theirs.strides[k] for k in theirs.live()),
        ]
    )
    assert chain is not None
    mine = _owners(ours, chain)
    other = _owners(theirs, chain)
    pieces: list[Piece] = []
    their_low, their_high = theirs.digit_boxes(chain)
    for low, high in zip(*ours.digit_boxes(chain), strict=True):
        lows = np.maximum(low, their_low)
        highs = np.minimum(high, their_high)
        for k in np.flatnonzero((lows < highs).all(axis=1)):
            both = list(zip(lows[k].tolist(), highs[k].tolist(), strict=True))
            corner = sum(lo * r for (lo, _), r in zip(both, chain, strict=True))
            start = [0] * ndim
            for a, i in enumerate(ours.decode(corner)):
                start[axes[a].leaf_dim] += (i + ours_fixed.get(a, 0)) * axes[
                    a
                ].leaf_step
            at = [
                i + theirs_fixed.get(k, 0) for k, i in enumerate(theirs.decode(corner))
            ]
            dst = sum(i * d for i, d in zip(at, theirs_dst, strict=True))
            found = []
            for level, (lo, hi) in enumerate(both):
                if hi - lo > 1:
                    a = mine[level]
                    k = other[level]
                    leaf_step = axes[a].leaf_step * (chain[level] // ours.strides[a])
                    dst_stride = theirs_dst[k] * (chain[level] // theirs.strides[k])
                    found.append(
                        PieceAxis(hi - lo, axes[a].leaf_dim, leaf_step, dst_stride)
                    )
            pieces.append(Piece(_tidy([*found, *repeated]), tuple(start), dst))
    return pieces


def _owners(box: Strided, chain: list[int]) -> list[int]:
    """For each level of the chain, the axis whose digits it holds: the one with the largest stride not above it."""
    live = box.live()
    return [
        max(
            (k for k in live if box.strides[k] <= r),
            key=lambda k: box.strides[k],
            default=-1,
        )
        for r in chain
    ]


def _tidy(axes: list[PieceAxis]) -> tuple[PieceAxis, ...]:
    """Axes by descending target stride, merged where contiguous in leaf and target; repeats stay apart."""
    order = sorted(axes, key=lambda x: (x.dst_stride, x.leaf_step))[::-1]
    rows = (
        (
            a.size,
            (a.leaf_step, a.dst_stride),
            a.leaf_dim if a.leaf_dim >= 0 else (-1, k),
        )
        for k, a in enumerate(order)
    )
    return tuple(
        PieceAxis(n, dim if isinstance(dim, int) else -1, *steps)
        for n, steps, dim in merge_axes(rows)
    )
