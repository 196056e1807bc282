"""Proof that a plan writes every element of every live parameter exactly once, and that it follows the rules. numpy.

`prove(plan)` reads nothing but the plan, in three steps, all exact:
1. each box of a class is a sub-box of the class's piece, lies inside the shard of the device it is read from, and reads
   exactly the elements that the piece's map assigns to the place it writes (source re-derived from the target side);
2. the boxes of a class partition its piece;
3. the pieces of a live parameter partition it, except for as many elements as are declared padding.
So nothing is written twice or out of bounds, and exactly the declared number of elements is left out. A plan alone
cannot show *which* elements are padding (a piece shifted into it passes), nor that its class's map is the right one.

`prove(plan, bindings, layouts)` shows that too: all padding is filled by a loader, and every pair of a rule and a
traced region is in the plan with its position, axes and value transform (see `_proof.py`). Tensors that go whole
through load_weights (opaque) are covered by the first three steps only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jvlab.layout._boxes import Strided, partition_defects, unique_rows
from jvlab.layout._compose import axes_numbers, row_major
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import LIVE, REPACKED
from jvlab.layout._problems import (
    Problem,
    dtype_remedy,
    dtypes_agree,
    padding_problems,
    raise_problems,
)
from jvlab.layout._types import Binding, CheckpointTensor, RankLayout

# Checks a plan against its inputs: chosen elements are mapped through rule and region directly. numpy only.
# `_proof.py` shows that a plan is self-consistent. This shows that it is the plan of *these* rules and ranks: for every
# pair of a binding and a traced row on one tensor, elements are mapped leaf → tensor → parameter, without the
# compiler's algebra, and must have the same target and value transform in the plan. The elements are the ends
# of the row, of the binding and of their intersection, and one step from there along every axis of either: an
# affine map is determined by its origin and unit steps, so a transposed square differs at a step though both
# its corners agree.

SHOWN = 8


@dataclass
class _Points:
    """Leaf elements and where they must go."""

    leaf: np.ndarray
    target: np.ndarray
    index: np.ndarray  # [N, ND]
    position: np.ndarray
    transform: np.ndarray  # number of the binding's (add, cast)


def spot_check_problems(
    plan: TransferPlan, bindings: Sequence[Binding], layouts: Sequence[RankLayout]
) -> list[Problem]:
    """Elements whose target or value transform in the plan is not what rules and ranks say."""
    leaf_id = {x.path: i for i, x in enumerate(plan.leaves)}
    live = np.isin(plan.target_kind, (LIVE, REPACKED))
    target_id = {
        (int(r), plan.parameters[p].name): t
        for t, (r, p) in enumerate(
            zip(plan.target_rank, plan.target_parameter, strict=True)
        )
        if live[t]
    }
    by_tensor = _ByTensor(bindings)
    table = _BindingTable.of(bindings, leaf_id, plan.member_start.shape[1])
    transforms = np.array(
        [table.transforms.get((float(x.add), x.cast), -1) for x in plan.transforms],
        np.int64,
    )
    keys = (
        plan.member_target.astype(np.int64) * (len(plan.leaves) + 1) + plan.member_leaf
    )
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    problems: list[Problem] = []
    for layout in layouts:
        points = _follow(layout, table, by_tensor, target_id)
        problems += _compare(plan, points, transforms, keys, order)
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
        """(bindings, concatenated by tensor; how many each tensor has)."""
        if id(tensors) not in self._done:
            lists = [self._lists.get(t.name, ()) for t in tensors]
            count = np.array([len(x) for x in lists], np.int64)
            self._done[id(tensors)] = (
                np.array([i for x in lists for i in x], np.int64),
                count,
            )
        return self._done[id(tensors)]


@dataclass
class _BindingTable:
    """Bindings grouped by geometry, so that each group is decoded at once."""

    group: np.ndarray  # [B]
    sample: list[Binding]  # one per group
    leaf: np.ndarray
    start: np.ndarray  # [B, ND]
    first: np.ndarray  # [G, TD], tensor index of the group's first element
    last: np.ndarray  # [G, TD]
    strides: np.ndarray  # [G, TD], of the tensor
    # [G, A], of the axes that move, in flat tensor positions; 0 where there is none
    steps: np.ndarray
    transform: np.ndarray  # [B], number in `transforms`
    transforms: dict[tuple[float, str | None], int]

    @classmethod
    def of(
        cls, bindings: Sequence[Binding], leaf_id: dict[str, int], ndim: int
    ) -> _BindingTable:
        groups: dict[tuple[object, ...], int] = {}
        sample: list[Binding] = []
        transforms: dict[tuple[float, str | None], int] = {}
        group = np.zeros(len(bindings), np.int64)
        start = np.zeros((len(bindings), ndim), np.int64)
        for i, (b, number) in enumerate(
            zip(bindings, axes_numbers(bindings), strict=True)
        ):
            key = (b.tensor_shape, b.tensor_start, number)
            if key not in groups:
                groups[key] = len(groups)
                sample.append(b)
            group[i] = groups[key]
            start[i, : len(b.leaf_start)] = b.leaf_start
        leaf = np.array([leaf_id[b.leaf] for b in bindings], np.int64)
        transform = np.array(
            [
                transforms.setdefault((float(b.add), b.cast), len(transforms))
                for b in bindings
            ],
            np.int64,
        )
        return cls(
            group, sample, leaf, start, *_geometry(sample), transform, transforms
        )


def _geometry(
    sample: Sequence[Binding],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """First and last tensor index, tensor strides and flat steps of the bindings, padded to one width."""
    dims = max([len(b.tensor_shape) for b in sample] + [1])
    first = np.zeros((len(sample), dims), np.int64)
    strides = np.zeros((len(sample), dims), np.int64)
    last = first.copy()
    steps = np.zeros((len(sample), max([len(b.axes) for b in sample] + [1])), np.int64)
    for g, b in enumerate(sample):
        n = len(b.tensor_shape)
        strides[g, :n] = row_major(b.tensor_shape)
        first[g, :n] = last[g, :n] = b.tensor_start
        for k, a in enumerate(b.axes):
            last[g, a.tensor_dim] += (a.size - 1) * a.tensor_step
            steps[g, k] = a.tensor_step * strides[g, a.tensor_dim] if a.size > 1 else 0
    return first, last, strides, steps


def _probes(
    layout: RankLayout, table: _BindingTable, row: np.ndarray, binding: np.ndarray
) -> np.ndarray:
    """[pairs, P] flat tensor positions to check; those outside the row or binding are dropped later."""
    group = table.group[binding]
    strides = table.strides[group]
    first = table.first[group]
    last = table.last[group]
    moves = np.where(layout.shape > 1, layout.src_strides, 0)
    low = layout.src_offset[row]
    high = low + ((layout.shape - 1) * layout.src_strides).sum(axis=1)[row]
    # corners of the intersection
    origin = np.zeros(len(row), np.int64)
    end = np.zeros(len(row), np.int64)
    below = low
    above = high
    for d in range(strides.shape[1]):
        step = np.maximum(strides[:, d], 1)
        begin = below // step
        stop = above // step
        below = below - begin * step
        above = above - stop * step
        origin += np.maximum(begin, first[:, d]) * strides[:, d]
        end += np.minimum(stop, last[:, d]) * strides[:, d]
    steps = np.concatenate([moves[row], table.steps[group]], axis=1)
    corners = [
        low,
        high,
        (first * strides).sum(axis=1),
        (last * strides).sum(axis=1),
        origin,
        end,
    ]
    return np.concatenate(
        [np.stack(corners, axis=1), origin[:, None] + steps, end[:, None] - steps],
        axis=1,
    )


def _follow(
    layout: RankLayout,
    table: _BindingTable,
    by_tensor: _ByTensor,
    target_id: dict[tuple[int, str], int],
) -> _Points:
    flat, count = by_tensor.of(layout.tensors)
    first = np.cumsum(count) - count
    times = count[layout.tensor]
    if layout.opaque:  # these go whole through load_weights
        opaque = {n.name for n in layout.opaque}
        times = times * ~np.array(
            [layout.tensors[t].name in opaque for t in layout.tensor], bool
        )
    row = np.repeat(np.arange(len(layout.tensor)), times)
    within = np.arange(len(row)) - np.repeat(np.cumsum(times) - times, times)
    binding = (
        flat[first[layout.tensor][row] + within] if len(row) else np.zeros(0, np.int64)
    )
    probes = np.sort(_probes(layout, table, row, binding), axis=1)
    fresh = np.ones(probes.shape, bool)
    fresh[:, 1:] = probes[:, 1:] != probes[:, :-1]
    pair = np.nonzero(fresh)[0]
    row = row[pair]
    binding = binding[pair]
    probe = probes[fresh]
    position, inside = _through_rows(layout, row, probe)
    row = row[inside]
    binding = binding[inside]
    probe = probe[inside]
    position = position[inside]
    index, bound = _through_bindings(table, binding, probe)
    row = row[bound]
    binding = binding[bound]
    position = position[bound]
    targets = np.array(
        [target_id.get((layout.rank, p.name), -1) for p in layout.parameters], np.int64
    )
    return _Points(
        table.leaf[binding],
        targets[layout.parameter[row]],
        index[bound],
        position,
        table.transform[binding],
    )


def _through_rows(
    layout: RankLayout, row: np.ndarray, flat: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Target position of flat tensor positions, and whether the row covers them."""
    strides = layout.src_strides
    order = np.argsort(-strides, axis=1, kind="stable")
    step = np.take_along_axis(strides, order, 1)[row]
    size = np.take_along_axis(layout.shape, order, 1)[row]
    out = np.take_along_axis(layout.dst_strides, order, 1)[row]
    rest = flat - layout.src_offset[row]
    inside = rest >= 0
    position = layout.dst_offset[row].copy()
    for k in range(step.shape[1]):
        moves = (step[:, k] > 0) & (size[:, k] > 1)
        digit = np.where(moves, rest // np.maximum(step[:, k], 1), 0)
        inside &= digit < size[:, k]
        rest = rest - digit * np.where(moves, step[:, k], 0)
        position += digit * out[:, k]
    return position, inside & (rest == 0)


def _through_bindings(
    table: _BindingTable, binding: np.ndarray, flat: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
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
        good = (rest_flat >= 0) & (
            rest_flat < int(np.prod(b.tensor_shape, dtype=np.int64))
        )
        for d in range(len(b.tensor_shape) - 1, -1, -1):
            rest_flat, rest = np.divmod(rest_flat, b.tensor_shape[d])
            rest = rest - b.tensor_start[d]
            good &= rest >= 0
            for a in sorted(
                (a for a in b.axes if a.tensor_dim == d), key=lambda a: -a.tensor_step
            ):
                digit = rest // a.tensor_step
                digit = np.where(a.size == 1, 0, digit)
                good &= digit < a.size
                rest = rest - digit * a.tensor_step
                index[here, a.leaf_dim] += digit * a.leaf_step
            good &= rest == 0
        inside[here] = good
    return index, inside


def _compare(
    plan: TransferPlan,
    points: _Points,
    transforms: np.ndarray,
    keys: np.ndarray,
    order: np.ndarray,
) -> list[Problem]:
    """Find each point in the plan and compare the leaf element written there, and its value transform.

    `keys` are the members' targets and leaves in one number each, ascending, and `order` the members in that order.
    """
    wanted = points.target * (len(plan.leaves) + 1) + points.leaf
    first = np.searchsorted(keys, wanted)
    last = np.searchsorted(keys, wanted, side="right")
    hits = np.zeros(len(wanted), np.int64)
    wrong = np.zeros(len(wanted), bool)
    bad_transform = np.zeros(len(wanted), bool)
    for j in range(int((last - first).max(initial=0))):
        at = np.flatnonzero(first + j < last)
        member = order[first[at] + j]
        cls = plan.member_class[member]
        rest = points.position[at] - plan.member_dst[member]
        index = plan.class_start[cls] + plan.member_start[member]
        inside = rest >= 0
        # axes are stored by descending target stride
        for k in range(plan.axis_size.shape[1]):
            size = plan.axis_size[cls, k]
            stride = plan.axis_dst_stride[cls, k]
            digit = np.where(size > 1, rest // np.maximum(stride, 1), 0)
            inside &= digit < size
            rest = rest - digit * stride
            dim = plan.axis_leaf_dim[cls, k].astype(np.int64)
            rows = np.flatnonzero(dim >= 0)
            index[rows, dim[rows]] += digit[rows] * plan.axis_leaf_step[cls[rows], k]
        inside &= rest == 0
        hits[at] += inside
        wrong[at] |= inside & (index != points.index[at]).any(axis=1)
        bad_transform[at] |= inside & (
            transforms[plan.class_transform[cls]] != points.transform[at]
        )
    return _described(
        plan,
        points,
        hits,
        np.flatnonzero(wrong | (hits != 1) | bad_transform),
        bad_transform & ~wrong,
    )


def _described(
    plan: TransferPlan,
    points: _Points,
    hits: np.ndarray,
    bad: np.ndarray,
    bad_transform: np.ndarray,
) -> list[Problem]:
    out = []
    for i in bad[:SHOWN]:
        target = int(points.target[i])
        name = (
            plan.parameters[plan.target_parameter[target]].name
            if target >= 0
            else "a parameter unknown to the plan"
        )
        where = f"element {points.index[i].tolist()} belongs at position {int(points.position[i])} of {name!r}"
        rank = int(plan.target_rank[target]) if target >= 0 else -1
        if bad_transform[i] and hits[i] == 1:
            fault = "changes its value by another transform"
        else:
            fault = "puts another there" if hits[i] else "does not send it there"
        text = f"{where} on rank {rank}, and the plan {fault}"
        out.append(
            Problem(
                "source",
                plan.leaves[points.leaf[i]].path,
                text,
                "the plan is not of these rules: compile it again",
            )
        )
    return out


# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """What was proven, and at what cost."""

    elements: int  # elements of live parameters (and opaque buffers) over all ranks
    padding: int  # of these, declared unfilled
    boxes: int  # boxes checked (each stands for all members of its class)
    copies: int  # boxes that they stand for
    parameters: int
    seconds: float


def prove(
    plan: TransferPlan,
    bindings: Sequence[Binding] = (),
    layouts: Sequence[RankLayout] = (),
) -> Proof:
    """Check the plan object; raises one CoverageError with every defect.

    The plan alone: consistent, and complete up to the number of padding elements. With its bindings and layouts: also
    that it follows them. See the head of this file.
    """
    started = time.perf_counter()
    problems = [*padding_problems(layouts), *plan_problems(plan, bindings, layouts)]
    if problems:
        raise_problems(problems)
    sizes = np.array(
        [int(np.prod(p.shape, dtype=np.int64)) for p in plan.parameters], np.int64
    )
    return Proof(
        elements=int(sizes[plan.target_parameter].sum()),
        padding=int(plan.target_padding.sum()),
        boxes=len(plan.box_cell),
        copies=plan.copies,
        parameters=len(plan.target_rank),
        seconds=time.perf_counter() - started,
    )


def plan_problems(
    plan: TransferPlan,
    bindings: Sequence[Binding] = (),
    layouts: Sequence[RankLayout] = (),
) -> list[Problem]:
    """Every defect of a plan."""
    problems: list[Problem] = []
    for c in range(len(plan.class_transform)):
        problems += _check_class(plan, c)
    problems += _check_members(plan)
    problems += _check_targets(plan, _opaque(layouts))
    if bindings and layouts and not problems:
        problems += spot_check_problems(plan, bindings, layouts)
    return problems


def _leaf_names(plan: TransferPlan, c: int) -> str:
    lo = int(plan.member_ptr[c])
    hi = int(plan.member_ptr[c + 1])
    names = [plan.leaves[i].path for i in plan.member_leaf[lo : min(hi, lo + 1)]]
    more = f" (and {hi - lo - 1} alike)" if hi - lo > 1 else ""
    return (names[0] if names else f"class {c}") + more


def _check_class(plan: TransferPlan, c: int) -> list[Problem]:
    name = _leaf_names(plan, c)
    out = []
    transform = plan.transforms[plan.class_transform[c]]
    if not dtypes_agree(transform.source, transform.wire, transform.cast):
        text = f"{transform.source} values would go into a {transform.wire} parameter"
        out.append(Problem("dtype", name, text, dtype_remedy(transform.wire)))
    sizes = plan.axis_size[c]
    strides = plan.axis_dst_stride[c]
    boxes = slice(int(plan.box_ptr[c]), int(plan.box_ptr[c + 1]))
    shape = plan.box_shape[boxes]
    dst_strides = plan.box_dst_strides[boxes]
    order = np.argsort(-strides, kind="stable")
    reach = 0
    for k in order[::-1]:
        if sizes[k] > 1:
            if strides[k] <= reach:
                return [
                    *out,
                    Problem(
                        "overlap",
                        name,
                        "its target strides overlap themselves",
                        "trace the model again",
                    ),
                ]
            reach += int((sizes[k] - 1) * strides[k])
    low = np.zeros_like(shape)
    rest = plan.box_dst[boxes].copy()
    for k in order:
        if sizes[k] > 1:
            low[:, k], rest = np.divmod(rest, strides[k])
    bad = (
        (rest != 0)
        | (low < 0).any(axis=1)
        | (shape < 1).any(axis=1)
        | (low + shape > sizes).any(axis=1)
    )
    bad |= ((shape > 1) & (dst_strides != strides)).any(axis=1)
    if bad.any():
        k = int(np.flatnonzero(bad)[0])
        text = f"box {boxes.start + k} of shape {shape[k].tolist()} leaves its piece of shape {sizes.tolist()}"
        return [
            *out,
            Problem("overlap", name, text, "the plan is damaged: compile it again"),
        ]
    out += _check_source(plan, c, low, name)
    flat = np.array(row_major(sizes.tolist()), np.int64)
    missing, extra, _ = partition_defects(
        Strided(0, tuple(sizes.tolist()), tuple(flat.tolist())),
        (low * flat).sum(axis=1),
        shape,
        np.broadcast_to(flat, shape.shape),
    )
    if missing:
        text = f"{missing} of {int(sizes.prod())} elements are sent by no device"
        out.append(
            Problem(
                "gap", name, text, "every element of the leaf must be on some device"
            )
        )
    if extra:
        out.append(
            Problem(
                "overlap",
                name,
                f"{extra} elements are sent twice",
                "the plan is damaged: compile it again",
            )
        )
    return out


def _check_source(
    plan: TransferPlan, c: int, low: np.ndarray, name: str
) -> list[Problem]:
    """Check that each box stays in its shard and reads the elements that belong where it writes."""
    sharding = plan.shardings[plan.class_sharding[c]]
    boxes = slice(int(plan.box_ptr[c]), int(plan.box_ptr[c + 1]))
    shape = plan.box_shape[boxes]
    cell = plan.box_cell[boxes]
    if ((cell < 0) | (cell >= len(sharding.starts))).any():
        return [
            Problem(
                "source",
                name,
                "a box reads from a shard that does not exist",
                "compile the plan again",
            )
        ]
    nd = len(sharding.shape)
    first = np.tile(plan.class_start[c][:nd], (len(cell), 1)).astype(np.int64)
    last = first.copy()
    strides = np.zeros_like(shape)
    local = sharding.local_strides[cell]
    for k in range(shape.shape[1]):
        d = int(plan.axis_leaf_dim[c, k])
        step = int(plan.axis_leaf_step[c, k])
        if d >= nd or (d < 0 and step):
            return [
                Problem(
                    "source",
                    name,
                    f"an axis walks along dimension {d}",
                    "compile the plan again",
                )
            ]
        if d >= 0:
            first[:, d] += low[:, k] * step
            last[:, d] += (low[:, k] + shape[:, k] - 1) * step
            strides[:, k] = step * local[:, d]
    wrong = ((shape > 1) & (plan.box_src_strides[boxes] != strides)).any(axis=1)
    wrong |= plan.box_src[boxes] != ((first - sharding.starts[cell]) * local).sum(
        axis=1
    )
    wrong |= (first < sharding.starts[cell]).any(axis=1) | (
        last >= sharding.stops[cell]
    ).any(axis=1)
    if not wrong.any():
        return []
    k = int(np.flatnonzero(wrong)[0])
    text = f"box {boxes.start + k} reads the wrong elements ({int(wrong.sum())} such boxes)"
    return [Problem("source", name, text, "the plan is damaged: compile it again")]


def _check_members(plan: TransferPlan) -> list[Problem]:
    """Members must fit their class: same sharding and dtypes, and starts inside the leaf."""
    out: list[Problem] = []
    cls = plan.member_class
    transform = plan.class_transform[cls]
    leaf_dtype = np.array([x.dtype for x in plan.leaves], str)
    target_dtype = np.array([x.dtype for x in plan.parameters], str)
    source = np.array([x.source for x in plan.transforms], str)[transform]
    wire = np.array([x.wire for x in plan.transforms], str)[transform]
    sharding = np.array([x.sharding for x in plan.leaves], np.int64)
    parameter = plan.target_parameter[plan.member_target]
    bad = (leaf_dtype[plan.member_leaf] != source) | (target_dtype[parameter] != wire)
    bad |= sharding[plan.member_leaf] != plan.class_sharding[cls]
    extent = np.ones((len(plan.shardings), plan.member_start.shape[1]), np.int64)
    whole = np.ones(extent.shape, bool)
    for i, s in enumerate(plan.shardings):
        extent[i, : len(s.shape)] = s.shape
        whole[i, : len(s.shape)] = s.whole
    span = np.zeros((len(plan.class_transform), plan.member_start.shape[1]), np.int64)
    for d in range(span.shape[1]):
        span[:, d] = (
            (plan.axis_size - 1) * plan.axis_leaf_step * (plan.axis_leaf_dim == d)
        ).sum(axis=1)
    end = plan.member_start + plan.class_start[cls] + span[cls]
    bad |= (plan.member_start < 0).any(axis=1) | (
        end >= extent[plan.class_sharding[cls]]
    ).any(axis=1)
    bad |= ((plan.member_start != 0) & ~whole[plan.class_sharding[cls]]).any(axis=1)
    for m in np.flatnonzero(bad)[:8]:
        leaf = plan.leaves[plan.member_leaf[m]]
        text = f"its piece starting at {plan.member_start[m].tolist()} does not fit the leaf of shape {leaf.shape}"
        out.append(
            Problem("source", leaf.path, text, "the plan is damaged: compile it again")
        )
    return out


def _check_targets(plan: TransferPlan, opaque: set[tuple[int, str]]) -> list[Problem]:
    _, form = (
        unique_rows([plan.axis_size, plan.axis_dst_stride])
        if len(plan.class_transform)
        else (None, np.zeros(0, np.int64))
    )
    kind = form[plan.member_class] if len(plan.member_leaf) else np.zeros(0, np.int64)
    order = np.lexsort((plan.member_dst, kind, plan.member_target))
    ptr = np.searchsorted(
        plan.member_target[order], np.arange(len(plan.target_rank) + 1)
    )
    pair = np.stack([kind[order], plan.member_dst[order]], axis=1)
    verdicts: dict[tuple[object, ...], tuple[int, int, list[int]]] = {}
    out: list[Problem] = []
    for t in range(len(plan.target_rank)):
        rows = pair[ptr[t] : ptr[t + 1]]
        param = plan.parameters[plan.target_parameter[t]]
        geometry = (param.shape, param.strides, rows.tobytes())
        # parameters of equal shape and pieces are checked once
        if geometry not in verdicts:
            cls = plan.member_class[order[ptr[t] : ptr[t + 1]]]
            verdicts[geometry] = partition_defects(
                Strided(0, param.shape, param.strides),
                rows[:, 1],
                plan.axis_size[cls],
                plan.axis_dst_stride[cls],
            )
        missing, extra, fault = verdicts[geometry]
        rank = int(plan.target_rank[t])
        padding = int(plan.target_padding[t])
        where = f"parameter of shape {param.shape} on rank {rank}"
        if missing != padding and (rank, param.name) not in opaque:
            text = f"{where}: {missing} of {int(np.prod(param.shape, dtype=np.int64))} elements are never written"
            text += f", {padding} of them declared padding" if padding else ""
            out.append(
                Problem(
                    "gap",
                    param.name,
                    text,
                    "bind a leaf to the checkpoint tensors that fill it",
                )
            )
        if extra:
            members = order[ptr[t] + np.array(fault, np.int64)] if fault else []
            names = sorted({plan.leaves[plan.member_leaf[m]].path for m in members})
            text = f"{where}: {extra} elements are written more than once or outside of it, by {' and '.join(names)}"
            out.append(
                Problem(
                    "overlap",
                    param.name,
                    text,
                    "remove one of the rules that claim the same part",
                )
            )
    return out


def _opaque(layouts: Sequence[RankLayout]) -> set[tuple[int, str]]:
    """(rank, parameter) that opaque tensors fill: no row of the plan does."""
    out: set[tuple[int, str]] = set()
    for layout in layouts:
        names = {note.name for note in layout.opaque}
        if names:
            opaque = np.array([t.name in names for t in layout.tensors], bool)
            filled = np.unique(layout.parameter[opaque[layout.tensor]])
            out |= {(layout.rank, layout.parameters[p].name) for p in filled}
    return out


__all__ = ["Proof", "plan_problems", "prove"]
