"""Each class's piece cut by its sharding's cells: local boxes, and which of several owners sends each. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jvlab.layout._boxes import clip_axes
from jvlab.layout._compose import PieceAxis
from jvlab.layout._plan_types import Sharding, ValueTransform, item_bytes

SPLIT_BYTES = 4 << 20  # a replicated box above this is split among the devices that hold it


@dataclass
class Drafts:
    """Classes of a plan before their boxes are built."""

    transforms: list[ValueTransform]
    sharding: np.ndarray
    transform: np.ndarray
    start: np.ndarray
    axes: list[tuple[PieceAxis, ...]]
    member_ptr: np.ndarray
    member_leaf: np.ndarray
    member_target: np.ndarray
    member_start: np.ndarray
    member_dst: np.ndarray

    @property
    def width(self) -> int:
        """Axes of the widest class, at least one so that tables have a column."""
        return max([len(a) for a in self.axes] + [1])

    def axis_tables(self) -> dict[str, np.ndarray]:
        """The plan's axis_* columns, unused axes with size 1."""
        shape = (len(self.axes), self.width)
        size, dim = np.ones(shape, np.int64), np.full(shape, -1, np.int8)
        step, stride = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for c, axes in enumerate(self.axes):
            for k, a in enumerate(axes):
                size[c, k], dim[c, k], step[c, k], stride[c, k] = a.size, a.leaf_dim, a.leaf_step, a.dst_stride
        return {"axis_size": size, "axis_leaf_dim": dim, "axis_leaf_step": step, "axis_dst_stride": stride}


def pad_columns(table: np.ndarray, width: int, fill: int) -> np.ndarray:
    """A [N, k] table widened to [N, width]."""
    if table.shape[1] == width:
        return table
    return np.concatenate([table, np.full((len(table), width - table.shape[1]), fill, table.dtype)], axis=1)


def build_boxes(drafts: Drafts, shardings: Sequence[Sharding], replicas: int) -> dict[str, np.ndarray]:
    """The plan's box_* columns."""
    width = drafts.width
    parts: list[tuple[np.ndarray, ...]] = []
    for c, axes in enumerate(drafts.axes):
        sharding = shardings[drafts.sharding[c]]
        members = int(drafts.member_ptr[c + 1] - drafts.member_ptr[c])
        item = item_bytes(drafts.transforms[drafts.transform[c]].wire)
        cell, low, high = cut_by_cells(axes, drafts.start[c], sharding)
        cell, low, high = _share_out(cell, low, high, sharding, members * replicas, item)
        shape = high - low
        dim = np.array([a.leaf_dim for a in axes], np.int64)
        step = np.array([a.leaf_step for a in axes], np.int64)
        stride = np.array([a.dst_stride for a in axes], np.int64)
        local = sharding.local_strides[cell]
        leaf_strides = np.where(dim >= 0, local[:, dim] * step, 0) if local.shape[1] else np.zeros_like(shape)
        anchor = drafts.start[c][: local.shape[1]] - sharding.starts[cell]
        src = (anchor * local).sum(axis=1) + (low * leaf_strides).sum(axis=1)
        dst_strides = np.broadcast_to(stride, shape.shape)
        parts.append((cell, shape, src, leaf_strides, (low * stride).sum(axis=1), dst_strides))
    sizes = [len(p[0]) for p in parts]
    nd = np.zeros(0, np.int64)
    none = np.zeros((0, width), np.int64)
    boxes = {
        "box_ptr": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        "box_cell": np.concatenate([p[0] for p in parts] or [nd]).astype(np.int32),
        "box_shape": np.concatenate([pad_columns(p[1], width, 1) for p in parts] or [none]),
        "box_src": np.concatenate([p[2] for p in parts] or [nd]),
        "box_src_strides": np.concatenate([pad_columns(p[3], width, 0) for p in parts] or [none]),
        "box_dst": np.concatenate([p[4] for p in parts] or [nd]),
        "box_dst_strides": np.concatenate([pad_columns(p[5], width, 0) for p in parts] or [none]),
    }
    boxes["box_turn"] = _turns(drafts, shardings, boxes, replicas)
    return boxes


def cut_by_cells(
    axes: Sequence[PieceAxis], start: np.ndarray, sharding: Sharding
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A piece cut at the cells' edges: (cell, lows [N, A], highs [N, A]) in the piece's own axis indices."""
    cell = np.arange(len(sharding.starts))
    low = np.zeros((len(cell), len(axes)), np.int64)
    high = np.tile(np.array([a.size for a in axes], np.int64), (len(cell), 1))
    for d in range(len(sharding.shape)):
        if sharding.whole[d]:
            continue
        mine = [k for k, a in enumerate(axes) if a.leaf_dim == d]
        lo, hi = sharding.starts[:, d] - start[d], sharding.stops[:, d] - start[d]
        at, a_lo, a_hi = clip_axes([axes[k].leaf_step for k in mine], [axes[k].size for k in mine], lo[cell], hi[cell])
        cell, low, high = cell[at], low[at], high[at]
        low[:, mine], high[:, mine] = a_lo, a_hi
    return cell, low, high


def _share_out(
    cell: np.ndarray, low: np.ndarray, high: np.ndarray, sharding: Sharding, uses: int, item: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Large boxes that round-robin would not balance, split along their longest axis, one part per owner."""
    owners = np.diff(sharding.owner_ptr)[cell]
    if not len(cell) or not low.shape[1]:
        return cell, low, high
    shape = high - low
    axis = np.argmax(shape, axis=1)
    row = np.arange(len(cell))
    uneven = (owners > 1) & (uses % np.maximum(owners, 1) != 0) & (shape.prod(axis=1) * item > SPLIT_BYTES)
    parts = np.where(uneven, np.minimum(owners, shape[row, axis]), 1)
    at = np.repeat(row, parts)
    k = np.arange(len(at)) - np.repeat(np.cumsum(parts) - parts, parts)
    new_low, new_high, ax = low[at], high[at], axis[at]
    size, base, n = shape[at, ax], low[at, ax], parts[at]
    i = np.arange(len(at))
    new_low[i, ax], new_high[i, ax] = base + size * k // n, base + size * (k + 1) // n
    return cell[at], new_low, new_high


def _turns(drafts: Drafts, shardings: Sequence[Sharding], boxes: dict[str, np.ndarray], replicas: int) -> np.ndarray:
    """Members of a class are sent round-robin by the owners of a cell; choose the first owner to balance the devices.

    Heaviest classes first; each box starts where the members left over after full rounds hit the least loaded devices.
    """
    ptr, turn = boxes["box_ptr"], np.zeros(len(boxes["box_cell"]), np.int32)
    top = max([int(s.owners.max(initial=0)) for s in shardings] + [0]) + 1
    load = np.zeros(top, np.int64)
    item = np.array([item_bytes(x.wire) for x in drafts.transforms], np.int64)
    owner_of = np.repeat(np.arange(len(drafts.axes)), np.diff(ptr))
    nbytes = boxes["box_shape"].prod(axis=1) * (item[drafts.transform[owner_of]] if len(owner_of) else 1)
    heaviest = [int(nbytes[ptr[c] : ptr[c + 1]].max(initial=0)) for c in range(len(drafts.axes))]
    for c in sorted(range(len(drafts.axes)), key=lambda c: (-heaviest[c], c)):
        sharding = shardings[drafts.sharding[c]]
        uses = int(drafts.member_ptr[c + 1] - drafts.member_ptr[c]) * replicas
        for b in range(int(ptr[c]), int(ptr[c + 1])) if np.diff(sharding.owner_ptr).max(initial=0) > 1 else ():
            cell = boxes["box_cell"][b]
            group = sharding.owners[sharding.owner_ptr[cell] : sharding.owner_ptr[cell + 1]]
            even, odd = divmod(uses, len(group))
            if odd:
                around = np.concatenate([load[group], load[group]])
                window = np.convolve(around, np.ones(odd, np.int64), "valid")[: len(group)]
                turn[b] = int(np.argmin(window))
                load[group[(turn[b] + np.arange(odd)) % len(group)]] += nbytes[b]
            load[group] += even * nbytes[b]
    return turn
