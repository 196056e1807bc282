"""One link of a plan, expanded: concrete boxes in packing order, cut and grouped into buckets. numpy only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from jvlab._errors import ConfigError
from jvlab.layout._plan_types import ALIGN, LinkPlan, item_bytes

if TYPE_CHECKING:
    from jvlab.layout._plan import TransferPlan


def expand_link(
    plan: TransferPlan, device: int, rank: int, replica: int, classes: Iterable[int] | None = None
) -> LinkPlan:
    """The boxes that `device` sends to `rank` of `replica`, by target and position; of all classes, or of some."""
    if not (0 <= rank < plan.ranks and 0 <= replica < plan.replicas):
        raise ConfigError(
            f"no rank {rank} of replica {replica}: the plan has {plan.ranks} ranks × {plan.replicas} replicas",
            remedy="both count from 0",
        )
    process = plan.process_of(device)
    picked = [
        _class_boxes(plan, c, device, rank, replica)
        for c in (range(len(plan.class_transform)) if classes is None else classes)
    ]
    member = np.concatenate([m for m, _, _ in picked] or [np.zeros(0, np.int64)])
    box = np.concatenate([b for _, b, _ in picked] or [np.zeros(0, np.int64)])
    shift = np.concatenate([s for _, _, s in picked] or [np.zeros(0, np.int64)])
    wire = np.array([item_bytes(x.wire) for x in plan.transforms], np.int64)
    table = {
        "leaf": plan.member_leaf[member],
        "target": plan.member_target[member],
        "transform": plan.class_transform[plan.member_class[member]] if len(member) else np.zeros(0, np.int32),
        "shape": plan.box_shape[box],
        "src_offset": plan.box_src[box] + shift,
        "src_strides": plan.box_src_strides[box],
        "leaf_dim": plan.axis_leaf_dim[plan.box_class[box]],
        "dst_offset": plan.box_dst[box] + plan.member_dst[member],
        "dst_strides": plan.box_dst_strides[box],
    }
    order = np.lexsort((table["dst_offset"], table["target"]))
    table = {k: v[order] for k, v in table.items()}
    table = _cut(table, wire, plan.bucket_bytes)
    nbytes = table["shape"].prod(axis=1) * wire[table["transform"]]
    bucket, place, sizes = _fill(nbytes, plan.bucket_bytes)
    return LinkPlan(
        device, process, rank, replica, **table, nbytes=nbytes, bucket=bucket, bucket_offset=place, bucket_sizes=sizes
    )


def _class_boxes(plan: TransferPlan, c: int, device: int, rank: int, replica: int) -> tuple[np.ndarray, ...]:
    """(member, box, source shift) of one class on one link."""
    none = np.zeros(0, np.int64)
    sharding = plan.shardings[plan.class_sharding[c]]
    cell = sharding.cell_of(device)
    lo, hi = int(plan.member_ptr[c]), int(plan.member_ptr[c + 1])
    if cell < 0 or lo == hi:
        return none, none, none
    boxes = int(plan.box_ptr[c]) + np.flatnonzero(plan.box_cell[plan.box_ptr[c] : plan.box_ptr[c + 1]] == cell)
    turn = np.flatnonzero(plan.target_rank[plan.member_target[lo:hi]] == rank)
    if not len(boxes) or not len(turn):
        return none, none, none
    first, last = sharding.owner_ptr[cell], sharding.owner_ptr[cell + 1]
    place = int(np.flatnonzero(sharding.owners[first:last] == device)[0])
    chosen = (turn[:, None] + plan.box_turn[boxes][None, :] + replica * (hi - lo)) % (last - first) == place
    m, b = np.nonzero(chosen)
    member = lo + turn[m]
    strides = sharding.local_strides[cell]
    shift = plan.member_start[member][:, : len(strides)] @ strides
    return member, boxes[b], shift


def _cut(table: dict[str, np.ndarray], wire: np.ndarray, limit: int) -> dict[str, np.ndarray]:
    """Boxes larger than a bucket, halved along their outermost long axis until they fit."""
    while True:
        nbytes = table["shape"].prod(axis=1) * wire[table["transform"]]
        big = np.flatnonzero(nbytes > limit)
        if not len(big):
            return table
        axis = np.argmax(table["shape"][big] > 1, axis=1)
        size = table["shape"][big, axis]
        if (size == 1).any():
            raise ConfigError(f"a bucket of {limit} bytes holds no element", remedy="raise bucket_mib")
        first = {k: v.copy() for k, v in table.items()}
        half = -(-size // 2)
        first["shape"][big, axis] = half
        second = {k: v[big].copy() for k, v in table.items()}
        row = np.arange(len(big))
        second["shape"][row, axis] = size - half
        second["src_offset"] += half * second["src_strides"][row, axis]
        second["dst_offset"] += half * second["dst_strides"][row, axis]
        joined = {k: np.concatenate([first[k], second[k]]) for k in table}
        where = np.concatenate([np.arange(len(nbytes)) * 2, big * 2 + 1])  # each second half follows its first
        order = np.argsort(where, kind="stable")
        table = {k: v[order] for k, v in joined.items()}


def _fill(nbytes: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bucket and byte position of each box: boxes in order, a new bucket where the next box would not fit."""
    padded = -(-nbytes // ALIGN) * ALIGN
    ends = np.cumsum(padded)
    bucket, place = np.zeros(len(nbytes), np.int32), np.zeros(len(nbytes), np.int64)
    sizes: list[int] = []
    at = 0
    while at < len(nbytes):
        base = int(ends[at] - padded[at])
        last = int(np.searchsorted(ends - (padded - nbytes), base + limit, side="right"))  # the tail needs no padding
        last = max(last, at + 1)
        bucket[at:last] = len(sizes)
        place[at:last] = ends[at:last] - padded[at:last] - base
        sizes.append(int(place[last - 1] + nbytes[last - 1]))
        at = last
    return bucket, place, np.array(sizes, np.int64)
