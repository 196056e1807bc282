"""Proof that a plan writes every element of every live parameter exactly once, and that it follows the rules. numpy.

`prove(plan)` reads nothing but the plan, in three steps, all exact:
1. each box of a class is a sub-box of the class's piece, lies inside the shard of the device it is read from, and reads
   exactly the elements that the piece's map assigns to the place it writes (source re-derived from the target side);
2. the boxes of a class partition its piece;
3. the pieces of a live parameter partition it, except for as many elements as are declared padding.
So nothing is written twice or out of bounds, and exactly the declared number of elements is left out. A plan alone
cannot show *which* elements are padding (a piece shifted into it passes), nor that its class's map is the right one.

`prove(plan, bindings, layouts)` shows that too: all padding is filled by a loader, and every pair of a rule and a
traced region is in the plan with its position, axes and value transform (see `_spot_check.py`). Tensors that go whole
through load_weights (opaque) are covered by the first three steps only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jvlab.layout._boxes import Strided, partition_defects, unique_rows
from jvlab.layout._compose import row_major
from jvlab.layout._plan import TransferPlan
from jvlab.layout._problems import Problem, dtype_remedy, dtypes_agree, padding_problems, raise_problems
from jvlab.layout._spot_check import spot_check_problems
from jvlab.layout._types import Binding, RankLayout


@dataclass(frozen=True)
class Proof:
    """What was proven, and at what cost."""

    elements: int  # elements of live parameters (and opaque buffers) over all ranks
    padding: int  # of these, declared unfilled
    boxes: int  # boxes checked (each stands for all members of its class)
    copies: int  # boxes that they stand for
    parameters: int
    seconds: float


def prove(plan: TransferPlan, bindings: Sequence[Binding] = (), layouts: Sequence[RankLayout] = ()) -> Proof:
    """Check the plan object; raises one CoverageError with every defect.

    The plan alone: consistent, and complete up to the number of padding elements. With its bindings and layouts: also
    that it follows them. See the head of this file.
    """
    started = time.perf_counter()
    problems = [*padding_problems(layouts), *plan_problems(plan, bindings, layouts)]
    if problems:
        raise_problems(problems)
    sizes = np.array([int(np.prod(p.shape, dtype=np.int64)) for p in plan.parameters], np.int64)
    return Proof(
        elements=int(sizes[plan.target_parameter].sum()),
        padding=int(plan.target_padding.sum()),
        boxes=len(plan.box_cell),
        copies=plan.copies,
        parameters=len(plan.target_rank),
        seconds=time.perf_counter() - started,
    )


def plan_problems(
    plan: TransferPlan, bindings: Sequence[Binding] = (), layouts: Sequence[RankLayout] = ()
) -> list[Problem]:
    """Every defect of a plan; with bindings and layouts, consequences of a missing tensor are left out."""
    problems: list[Problem] = []
    for c in range(len(plan.class_transform)):
        problems += _check_class(plan, c)
    problems += _check_members(plan)
    problems += _check_targets(plan, _explained(bindings, layouts))
    if bindings and layouts and not problems:
        problems += spot_check_problems(plan, bindings, layouts)
    return problems


def _leaf_names(plan: TransferPlan, c: int) -> str:
    lo, hi = int(plan.member_ptr[c]), int(plan.member_ptr[c + 1])
    names = [plan.leaves[i].path for i in plan.member_leaf[lo : min(hi, lo + 1)]]
    more = f" (and {hi - lo - 1} alike)" if hi - lo > 1 else ""
    return (names[0] if names else f"class {c}") + more


def _check_class(plan: TransferPlan, c: int) -> list[Problem]:
    name, out = _leaf_names(plan, c), []
    transform = plan.transforms[plan.class_transform[c]]
    if not dtypes_agree(transform.source, transform.wire, transform.cast):
        text = f"{transform.source} values would go into a {transform.wire} parameter"
        out.append(Problem("dtype", name, text, dtype_remedy(transform.wire)))
    sizes, strides = plan.axis_size[c], plan.axis_dst_stride[c]
    boxes = slice(int(plan.box_ptr[c]), int(plan.box_ptr[c + 1]))
    shape, dst_strides = plan.box_shape[boxes], plan.box_dst_strides[boxes]
    order = np.argsort(-strides, kind="stable")
    reach = 0
    for k in order[::-1]:
        if sizes[k] > 1:
            if strides[k] <= reach:
                return [
                    *out,
                    Problem("overlap", name, "its target strides overlap themselves", "trace the model again"),
                ]
            reach += int((sizes[k] - 1) * strides[k])
    low, rest = np.zeros_like(shape), plan.box_dst[boxes].copy()
    for k in order:
        if sizes[k] > 1:
            low[:, k], rest = np.divmod(rest, strides[k])
    bad = (rest != 0) | (low < 0).any(axis=1) | (shape < 1).any(axis=1) | (low + shape > sizes).any(axis=1)
    bad |= ((shape > 1) & (dst_strides != strides)).any(axis=1)
    if bad.any():
        k = int(np.flatnonzero(bad)[0])
        text = f"box {boxes.start + k} of shape {shape[k].tolist()} leaves its piece of shape {sizes.tolist()}"
        return [*out, Problem("overlap", name, text, "the plan is damaged: compile it again")]
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
        out.append(Problem("gap", name, text, "every element of the leaf must be on some device"))
    if extra:
        out.append(
            Problem("overlap", name, f"{extra} elements are sent twice", "the plan is damaged: compile it again")
        )
    return out


def _check_source(plan: TransferPlan, c: int, low: np.ndarray, name: str) -> list[Problem]:
    """Check that each box stays in its shard and reads the elements that belong where it writes."""
    sharding = plan.shardings[plan.class_sharding[c]]
    boxes = slice(int(plan.box_ptr[c]), int(plan.box_ptr[c + 1]))
    shape, cell = plan.box_shape[boxes], plan.box_cell[boxes]
    if ((cell < 0) | (cell >= len(sharding.starts))).any():
        return [Problem("source", name, "a box reads from a shard that does not exist", "compile the plan again")]
    nd = len(sharding.shape)
    first = np.tile(plan.class_start[c][:nd], (len(cell), 1)).astype(np.int64)
    last = first.copy()
    strides = np.zeros_like(shape)
    local = sharding.local_strides[cell]
    for k in range(shape.shape[1]):
        d, step = int(plan.axis_leaf_dim[c, k]), int(plan.axis_leaf_step[c, k])
        if d >= nd or (d < 0 and step):
            return [Problem("source", name, f"an axis walks along dimension {d}", "compile the plan again")]
        if d >= 0:
            first[:, d] += low[:, k] * step
            last[:, d] += (low[:, k] + shape[:, k] - 1) * step
            strides[:, k] = step * local[:, d]
    wrong = ((shape > 1) & (plan.box_src_strides[boxes] != strides)).any(axis=1)
    wrong |= plan.box_src[boxes] != ((first - sharding.starts[cell]) * local).sum(axis=1)
    wrong |= (first < sharding.starts[cell]).any(axis=1) | (last >= sharding.stops[cell]).any(axis=1)
    if not wrong.any():
        return []
    k = int(np.flatnonzero(wrong)[0])
    text = f"box {boxes.start + k} reads the wrong elements ({int(wrong.sum())} such boxes)"
    return [Problem("source", name, text, "the plan is damaged: compile it again")]


def _check_members(plan: TransferPlan) -> list[Problem]:
    """Members must fit their class: same sharding and dtypes, and starts inside the leaf."""
    out: list[Problem] = []
    cls = plan.member_class
    dtypes = {
        d: i
        for i, d in enumerate(
            {
                *(x.dtype for x in plan.leaves),
                *(x.dtype for x in plan.parameters),
                *(x.source for x in plan.transforms),
                *(x.wire for x in plan.transforms),
            }
        )
    }
    leaf_dtype = np.array([dtypes[x.dtype] for x in plan.leaves], np.int64)
    sharding = np.array([x.sharding for x in plan.leaves], np.int64)
    wire = np.array([dtypes[x.dtype] for x in plan.parameters], np.int64)[plan.target_parameter[plan.member_target]]
    source = np.array([dtypes[x.source] for x in plan.transforms], np.int64)[plan.class_transform[cls]]
    wires = np.array([dtypes[x.wire] for x in plan.transforms], np.int64)[plan.class_transform[cls]]
    bad = (leaf_dtype[plan.member_leaf] != source) | (wire != wires)
    bad |= sharding[plan.member_leaf] != plan.class_sharding[cls]
    extent = np.ones((len(plan.shardings), plan.member_start.shape[1]), np.int64)
    whole = np.ones(extent.shape, bool)
    for i, s in enumerate(plan.shardings):
        extent[i, : len(s.shape)], whole[i, : len(s.shape)] = s.shape, s.whole
    span = np.zeros((len(plan.class_transform), plan.member_start.shape[1]), np.int64)
    for d in range(span.shape[1]):
        span[:, d] = ((plan.axis_size - 1) * plan.axis_leaf_step * (plan.axis_leaf_dim == d)).sum(axis=1)
    end = plan.member_start + plan.class_start[cls] + span[cls]
    bad |= (plan.member_start < 0).any(axis=1) | (end >= extent[plan.class_sharding[cls]]).any(axis=1)
    bad |= ((plan.member_start != 0) & ~whole[plan.class_sharding[cls]]).any(axis=1)
    for m in np.flatnonzero(bad)[:8]:
        leaf = plan.leaves[plan.member_leaf[m]]
        text = f"its piece starting at {plan.member_start[m].tolist()} does not fit the leaf of shape {leaf.shape}"
        out.append(Problem("source", leaf.path, text, "the plan is damaged: compile it again"))
    return out


def _check_targets(plan: TransferPlan, explained: set[tuple[int, str]]) -> list[Problem]:
    _, form = (
        unique_rows([plan.axis_size, plan.axis_dst_stride])
        if len(plan.class_transform)
        else (None, np.zeros(0, np.int64))
    )
    kind = form[plan.member_class] if len(plan.member_leaf) else np.zeros(0, np.int64)
    order = np.lexsort((plan.member_dst, kind, plan.member_target))
    ptr = np.searchsorted(plan.member_target[order], np.arange(len(plan.target_rank) + 1))
    pair = np.stack([kind[order], plan.member_dst[order]], axis=1)
    verdicts: dict[tuple[object, ...], tuple[int, int, list[int]]] = {}
    out: list[Problem] = []
    for t in range(len(plan.target_rank)):
        rows = pair[ptr[t] : ptr[t + 1]]
        param = plan.parameters[plan.target_parameter[t]]
        geometry = (param.shape, param.strides, rows.tobytes())
        if geometry not in verdicts:  # parameters of equal shape and pieces are checked once
            cls = plan.member_class[order[ptr[t] : ptr[t + 1]]]
            verdicts[geometry] = partition_defects(
                Strided(0, param.shape, param.strides), rows[:, 1], plan.axis_size[cls], plan.axis_dst_stride[cls]
            )
        missing, extra, fault = verdicts[geometry]
        rank, padding = int(plan.target_rank[t]), int(plan.target_padding[t])
        where = f"parameter of shape {param.shape} on rank {rank}"
        if missing != padding and (rank, param.name) not in explained:
            text = f"{where}: {missing} of {int(np.prod(param.shape, dtype=np.int64))} elements are never written"
            text += f", {padding} of them declared padding" if padding else ""
            out.append(Problem("gap", param.name, text, "bind a leaf to the checkpoint tensors that fill it"))
        if extra:
            members = order[ptr[t] + np.array(fault, np.int64)] if fault else []
            names = sorted({plan.leaves[plan.member_leaf[m]].path for m in members})
            text = f"{where}: {extra} elements are written more than once or outside of it, by {' and '.join(names)}"
            out.append(Problem("overlap", param.name, text, "remove one of the rules that claim the same part"))
    return out


def _explained(bindings: Sequence[Binding], layouts: Sequence[RankLayout]) -> set[tuple[int, str]]:
    """(rank, parameter) whose gaps follow from a checkpoint tensor without a sound binding, or from an opaque one."""
    bound = {b.tensor for b in bindings}
    unbound: dict[int, np.ndarray] = {}  # by tuple of tensors, which ranks usually share
    out: set[tuple[int, str]] = set()
    for layout in layouts:
        if id(layout.tensors) not in unbound:
            unbound[id(layout.tensors)] = np.array([t.name not in bound for t in layout.tensors], bool)
        loose = unbound[id(layout.tensors)]
        if layout.opaque:
            opaque = {note.name for note in layout.opaque}
            loose = loose | np.array([t.name in opaque for t in layout.tensors], bool)
        if loose.any():
            hit = np.unique(layout.parameter[loose[layout.tensor]])
            out |= {(layout.rank, layout.parameters[p].name) for p in hit}
    return out


__all__ = ["Proof", "plan_problems", "prove"]
