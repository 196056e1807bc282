"""A plan against what it was made from: corner elements followed through rule and region by hand. numpy only.

The proof of `_proof.py` shows that a plan is consistent in itself. This shows that it is the plan of *these* rules and
ranks: for every pair of a binding and a traced row on one tensor, the first and last element of each is followed leaf →
tensor → parameter, without the compiler's algebra, and must go the same way in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jvlab.layout._compose import axes_numbers
from jvlab.layout._plan import LIVE, STAGED, TransferPlan
from jvlab.layout._problems import Problem
from jvlab.layout._types import Binding, CheckpointTensor, RankLayout

SHOWN = 8


@dataclass
class _Points:
    """Leaf elements and where they must go."""

    leaf: np.ndarray
    target: np.ndarray
    index: np.ndarray  # [N, ND]
    position: np.ndarray


def witness_problems(plan: TransferPlan, bindings: Sequence[Binding], layouts: Sequence[RankLayout]) -> list[Problem]:
    """Corner elements that the plan sends elsewhere than rules and ranks say."""
    leaf_id = {x.path: i for i, x in enumerate(plan.leaves)}
    live = np.isin(plan.target_kind, (LIVE, STAGED))
    target_id = {
        (int(r), plan.parameters[p].name): t
        for t, (r, p) in enumerate(zip(plan.target_rank, plan.target_parameter, strict=True))
        if live[t]
    }
    by_tensor = _ByTensor(bindings)
    table = _BindingTable.of(bindings, leaf_id, plan.member_start.shape[1])
    problems: list[Problem] = []
    for layout in layouts:
        points = _follow(layout, table, by_tensor, target_id)
        problems += _compare(plan, points)
        if len(problems) > SHOWN:
            break
    return problems[:SHOWN]


class _ByTensor:
    """Bindings of each tensor, as a flat list with pointers; ranks usually share one tuple of tensors."""

    def __init__(self, bindings: Sequence[Binding]) -> None:
        self._lists: dict[str, list[int]] = {}
        for i, b in enumerate(bindings):
            self._lists.setdefault(b.tensor, []).append(i)
        self._done: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def of(self, tensors: Sequence[CheckpointTensor]) -> tuple[np.ndarray, np.ndarray]:
        """(bindings one behind the other, how many each tensor has)."""
        if id(tensors) not in self._done:
            lists = [self._lists.get(t.name, ()) for t in tensors]
            count = np.array([len(x) for x in lists], np.int64)
            self._done[id(tensors)] = np.array([i for x in lists for i in x], np.int64), count
        return self._done[id(tensors)]


@dataclass
class _BindingTable:
    """Bindings grouped by geometry, so that each group is decoded at once."""

    group: np.ndarray  # [B]
    sample: list[Binding]  # one per group
    leaf: np.ndarray
    start: np.ndarray  # [B, ND]
    corners: np.ndarray  # [B, 2], flat tensor positions of the first and last element

    @classmethod
    def of(cls, bindings: Sequence[Binding], leaf_id: dict[str, int], ndim: int) -> _BindingTable:
        groups: dict[tuple[object, ...], int] = {}
        sample: list[Binding] = []
        corner: list[tuple[int, int]] = []
        group = np.zeros(len(bindings), np.int64)
        start = np.zeros((len(bindings), ndim), np.int64)
        for i, (b, number) in enumerate(zip(bindings, axes_numbers(bindings), strict=True)):
            key = (b.tensor_shape, b.tensor_start, number)
            if key not in groups:
                groups[key] = len(groups)
                sample.append(b)
                last = list(b.tensor_start)
                for a in b.axes:
                    last[a.tensor_dim] += (a.size - 1) * a.tensor_step
                corner.append((_flat(b.tensor_start, b.tensor_shape), _flat(last, b.tensor_shape)))
            group[i] = groups[key]
            start[i, : len(b.leaf_start)] = b.leaf_start
        leaf = np.array([leaf_id[b.leaf] for b in bindings], np.int64)
        return cls(group, sample, leaf, start, np.array(corner, np.int64).reshape(-1, 2)[group])


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    out = 0
    for i, n in zip(index, shape, strict=True):
        out = out * n + i
    return out


def _follow(
    layout: RankLayout, table: _BindingTable, by_tensor: _ByTensor, target_id: dict[tuple[int, str], int]
) -> _Points:
    flat, count = by_tensor.of(layout.tensors)
    first = np.cumsum(count) - count
    times = count[layout.tensor]
    if layout.opaque:  # these go whole through load_weights
        opaque = {n.name for n in layout.opaque}
        times = times * ~np.array([layout.tensors[t].name in opaque for t in layout.tensor], bool)
    row = np.repeat(np.arange(len(layout.tensor)), times)
    within = np.arange(len(row)) - np.repeat(np.cumsum(times) - times, times)
    binding = flat[first[layout.tensor][row] + within] if len(row) else np.zeros(0, np.int64)
    reach = layout.src_offset + ((layout.shape - 1) * layout.src_strides).sum(axis=1)
    probes = np.stack([layout.src_offset[row], reach[row], *table.corners[binding].T], axis=1)
    probe = probes.reshape(-1)
    row, binding = np.repeat(row, 4), np.repeat(binding, 4)
    position, inside = _through_rows(layout, row, probe)
    index, bound = _through_bindings(table, binding, probe)
    keep = inside & bound
    targets = np.array([target_id.get((layout.rank, p.name), -1) for p in layout.parameters], np.int64)
    return _Points(table.leaf[binding[keep]], targets[layout.parameter[row[keep]]], index[keep], position[keep])


def _through_rows(layout: RankLayout, row: np.ndarray, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Target position of flat tensor positions, and whether the row covers them."""
    strides = layout.src_strides
    order = np.argsort(-strides, axis=1, kind="stable")
    step = np.take_along_axis(strides, order, 1)[row]
    size = np.take_along_axis(layout.shape, order, 1)[row]
    out = np.take_along_axis(layout.dst_strides, order, 1)[row]
    rest = flat - layout.src_offset[row]
    inside, position = rest >= 0, layout.dst_offset[row].copy()
    for k in range(step.shape[1]):
        moves = (step[:, k] > 0) & (size[:, k] > 1)
        digit = np.where(moves, rest // np.maximum(step[:, k], 1), 0)
        inside &= digit < size[:, k]
        rest = rest - digit * np.where(moves, step[:, k], 0)
        position += digit * out[:, k]
    return position, inside & (rest == 0)


def _through_bindings(table: _BindingTable, binding: np.ndarray, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Leaf index of flat tensor positions, and whether the binding covers them."""
    index = table.start[binding]
    inside = np.ones(len(flat), bool)
    group = table.group[binding]
    order = np.argsort(group, kind="stable")
    edges = np.searchsorted(group[order], np.arange(len(table.sample) + 1))
    for g, b in enumerate(table.sample):
        here = order[edges[g] : edges[g + 1]]
        if not len(here):
            continue
        rest_flat = flat[here]
        good = (rest_flat >= 0) & (rest_flat < int(np.prod(b.tensor_shape, dtype=np.int64)))
        for d in range(len(b.tensor_shape) - 1, -1, -1):
            rest_flat, rest = np.divmod(rest_flat, b.tensor_shape[d])
            rest = rest - b.tensor_start[d]
            good &= rest >= 0
            for a in sorted((a for a in b.axes if a.tensor_dim == d), key=lambda a: -a.tensor_step):
                digit = rest // a.tensor_step
                digit = np.where(a.size == 1, 0, digit)
                good &= digit < a.size
                rest = rest - digit * a.tensor_step
                index[here, a.leaf_dim] += digit * a.leaf_step
            good &= rest == 0
        inside[here] = good
    return index, inside


def _compare(plan: TransferPlan, points: _Points) -> list[Problem]:
    """Find each point's place in the plan and compare the leaf element that lands there."""
    width = len(plan.leaves) + 1
    keys = plan.member_target.astype(np.int64) * width + plan.member_leaf
    order = np.argsort(keys, kind="stable")
    wanted = points.target * width + points.leaf
    first = np.searchsorted(keys[order], wanted)
    last = np.searchsorted(keys[order], wanted, side="right")
    hits = np.zeros(len(wanted), np.int64)
    wrong = np.zeros(len(wanted), bool)
    for j in range(int((last - first).max(initial=0))):
        at = np.flatnonzero(first + j < last)
        member = order[first[at] + j]
        cls = plan.member_class[member]
        rest = points.position[at] - plan.member_dst[member]
        index = plan.class_start[cls] + plan.member_start[member]
        inside = rest >= 0
        for k in range(plan.axis_size.shape[1]):  # axes are stored by descending target stride
            size, stride = plan.axis_size[cls, k], plan.axis_dst_stride[cls, k]
            digit = np.where(size > 1, rest // np.maximum(stride, 1), 0)
            inside &= digit < size
            rest = rest - digit * stride
            dim = plan.axis_leaf_dim[cls, k].astype(np.int64)
            rows = np.flatnonzero(dim >= 0)
            index[rows, dim[rows]] += digit[rows] * plan.axis_leaf_step[cls[rows], k]
        inside &= rest == 0
        hits[at] += inside
        wrong[at] |= inside & (index != points.index[at]).any(axis=1)
    bad = np.flatnonzero(wrong | (hits != 1))
    out = []
    for i in bad[:SHOWN]:
        target = int(points.target[i])
        name = plan.parameters[plan.target_parameter[target]].name if target >= 0 else "a parameter unknown to the plan"
        where = f"element {points.index[i].tolist()} belongs at position {int(points.position[i])} of {name!r}"
        rank = int(plan.target_rank[target]) if target >= 0 else -1
        text = f"{where} on rank {rank}, and the plan " + (
            "puts another there" if hits[i] else "does not send it there"
        )
        out.append(
            Problem(
                "source", plan.leaves[points.leaf[i]].path, text, "the plan is not of these rules: compile it again"
            )
        )
    return out
