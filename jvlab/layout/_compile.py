"""Leaves × bindings × traced ranks → TransferPlan: join by tensor, compose, merge, classify, cut. numpy only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jvlab._errors import ConfigError, LayoutError
from jvlab.layout._boxes import clip_axes, unique_rows
from jvlab.layout._compose import (
    Piece,
    PieceAxis,
    Region,
    axes_numbers,
    compose,
    row_major,
)
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import (
    LIVE,
    OPAQUE,
    REPACKED,
    LeafInfo,
    Sharding,
    TargetInfo,
    ValueTransform,
    item_bytes,
)
from jvlab.layout._problems import check_inputs, raise_problems
from jvlab.layout._proof import plan_problems
from jvlab.layout._types import Binding, Leaf, Parameter, RankLayout

# Each class's piece cut by its sharding's cells: local boxes, and which of several owners sends each. numpy only.

# a replicated box above this is split among the devices that hold it
SPLIT_BYTES = 4 << 20


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
        size = np.ones(shape, np.int64)
        dim = np.full(shape, -1, np.int8)
        step = np.zeros(shape, np.int64)
        stride = np.zeros(shape, np.int64)
        for c, axes in enumerate(self.axes):
            for k, a in enumerate(axes):
                size[c, k] = a.size
                dim[c, k] = a.leaf_dim
                step[c, k] = a.leaf_step
                stride[c, k] = a.dst_stride
        return {
            "axis_size": size,
            "axis_leaf_dim": dim,
            "axis_leaf_step": step,
            "axis_dst_stride": stride,
        }


def pad_columns(table: np.ndarray, width: int, fill: int) -> np.ndarray:
    """A [N, k] table widened to [N, width]."""
    if table.shape[1] == width:
        return table
    return np.concatenate(
        [table, np.full((len(table), width - table.shape[1]), fill, table.dtype)],
        axis=1,
    )


def build_boxes(
    drafts: Drafts, shardings: Sequence[Sharding], replicas: int
) -> dict[str, np.ndarray]:
    """The plan's box_* columns."""
    width = drafts.width
    parts: list[tuple[np.ndarray, ...]] = []
    for c, axes in enumerate(drafts.axes):
        sharding = shardings[drafts.sharding[c]]
        members = int(drafts.member_ptr[c + 1] - drafts.member_ptr[c])
        item = item_bytes(drafts.transforms[drafts.transform[c]].wire)
        cell, low, high = cut_by_cells(axes, drafts.start[c], sharding)
        cell, low, high = _share_out(
            cell, low, high, sharding, members * replicas, item
        )
        shape = high - low
        dim = np.array([a.leaf_dim for a in axes], np.int64)
        step = np.array([a.leaf_step for a in axes], np.int64)
        stride = np.array([a.dst_stride for a in axes], np.int64)
        local = sharding.local_strides[cell]
        leaf_strides = (
            np.where(dim >= 0, local[:, dim] * step, 0)
            if local.shape[1]
            else np.zeros_like(shape)
        )
        anchor = drafts.start[c][: local.shape[1]] - sharding.starts[cell]
        src = (anchor * local).sum(axis=1) + (low * leaf_strides).sum(axis=1)
        dst_strides = np.broadcast_to(stride, shape.shape)
        parts.append(
            (cell, shape, src, leaf_strides, (low * stride).sum(axis=1), dst_strides)
        )
    sizes = [len(p[0]) for p in parts]
    nd = np.zeros(0, np.int64)
    none = np.zeros((0, width), np.int64)
    boxes = {
        "box_ptr": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        "box_cell": np.concatenate([p[0] for p in parts] or [nd]).astype(np.int32),
        "box_shape": np.concatenate(
            [pad_columns(p[1], width, 1) for p in parts] or [none]
        ),
        "box_src": np.concatenate([p[2] for p in parts] or [nd]),
        "box_src_strides": np.concatenate(
            [pad_columns(p[3], width, 0) for p in parts] or [none]
        ),
        "box_dst": np.concatenate([p[4] for p in parts] or [nd]),
        "box_dst_strides": np.concatenate(
            [pad_columns(p[5], width, 0) for p in parts] or [none]
        ),
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
        lo = sharding.starts[:, d] - start[d]
        hi = sharding.stops[:, d] - start[d]
        at, a_lo, a_hi = clip_axes(
            [axes[k].leaf_step for k in mine],
            [axes[k].size for k in mine],
            lo[cell],
            hi[cell],
        )
        cell = cell[at]
        low = low[at]
        high = high[at]
        low[:, mine] = a_lo
        high[:, mine] = a_hi
    return cell, low, high


def _share_out(
    cell: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    sharding: Sharding,
    uses: int,
    item: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Large boxes that round-robin would not balance, split along their longest axis, one part per owner."""
    owners = np.diff(sharding.owner_ptr)[cell]
    if not len(cell) or not low.shape[1]:
        return cell, low, high
    shape = high - low
    axis = np.argmax(shape, axis=1)
    row = np.arange(len(cell))
    uneven = (
        (owners > 1)
        & (uses % np.maximum(owners, 1) != 0)
        & (shape.prod(axis=1) * item > SPLIT_BYTES)
    )
    parts = np.where(uneven, np.minimum(owners, shape[row, axis]), 1)
    at = np.repeat(row, parts)
    k = np.arange(len(at)) - np.repeat(np.cumsum(parts) - parts, parts)
    new_low = low[at]
    new_high = high[at]
    ax = axis[at]
    size = shape[at, ax]
    base = low[at, ax]
    n = parts[at]
    i = np.arange(len(at))
    new_low[i, ax] = base + size * k // n
    new_high[i, ax] = base + size * (k + 1) // n
    return cell[at], new_low, new_high


def _turns(
    drafts: Drafts,
    shardings: Sequence[Sharding],
    boxes: dict[str, np.ndarray],
    replicas: int,
) -> np.ndarray:
    """Members of a class are sent round-robin by the owners of a cell; choose the first owner to balance the devices.

    Heaviest classes first; each box starts where the members left over after full rounds hit the least loaded devices.
    """
    ptr = boxes["box_ptr"]
    turn = np.zeros(len(boxes["box_cell"]), np.int32)
    top = max([int(s.owners.max(initial=0)) for s in shardings] + [0]) + 1
    load = np.zeros(top, np.int64)
    item = np.array([item_bytes(x.wire) for x in drafts.transforms], np.int64)
    owner_of = np.repeat(np.arange(len(drafts.axes)), np.diff(ptr))
    nbytes = boxes["box_shape"].prod(axis=1) * (
        item[drafts.transform[owner_of]] if len(owner_of) else 1
    )
    heaviest = [
        int(nbytes[ptr[c] : ptr[c + 1]].max(initial=0)) for c in range(len(drafts.axes))
    ]
    for c in sorted(range(len(drafts.axes)), key=lambda c: (-heaviest[c], c)):
        sharding = shardings[drafts.sharding[c]]
        uses = int(drafts.member_ptr[c + 1] - drafts.member_ptr[c]) * replicas
        for b in (
            range(int(ptr[c]), int(ptr[c + 1]))
            if np.diff(sharding.owner_ptr).max(initial=0) > 1
            else ()
        ):
            cell = boxes["box_cell"][b]
            group = sharding.owners[
                sharding.owner_ptr[cell] : sharding.owner_ptr[cell + 1]
            ]
            even, odd = divmod(uses, len(group))
            if odd:
                around = np.concatenate([load[group], load[group]])
                window = np.convolve(around, np.ones(odd, np.int64), "valid")[
                    : len(group)
                ]
                turn[b] = int(np.argmin(window))
                load[group[(turn[b] + np.arange(odd)) % len(group)]] += nbytes[b]
            load[group] += even * nbytes[b]
    return turn


# The two sides of a join as tables: live parameters of all ranks, and traced rows of all ranks. numpy only.


@dataclass
class Targets:
    """Every live parameter on every rank, and a whole-tensor buffer for each opaque tensor."""

    parameters: tuple[TargetInfo, ...]
    rank: np.ndarray
    parameter: np.ndarray
    kind: np.ndarray
    padding: np.ndarray
    of_rank: list[np.ndarray]  # per layout: its parameter index -> target
    opaque_of_rank: list[dict[str, int]]  # per layout: opaque tensor -> target

    @classmethod
    def of(cls, layouts: Sequence[RankLayout]) -> Targets:
        table: dict[TargetInfo, int] = {}
        rows: list[tuple[int, int, int, int]] = []
        of_rank = []
        opaque_of_rank = []
        for layout in layouts:
            padding: dict[str, int] = {}
            for note in layout.padding:
                padding[note.name] = padding.get(note.name, 0) + note.elements
            repacked = {note.name for note in layout.repacked}
            mine = []
            for p in layout.parameters:
                info = table.setdefault(_info(p), len(table))
                mine.append(len(rows))
                rows.append(
                    (
                        layout.rank,
                        info,
                        REPACKED if p.name in repacked else LIVE,
                        padding.get(p.name, 0),
                    )
                )
            of_rank.append(np.array(mine, np.int32))
            shapes = {t.name: t for t in layout.tensors} if layout.opaque else {}
            opaque: dict[str, int] = {}
            for name in sorted({note.name for note in layout.opaque} & set(shapes)):
                t = shapes[name]
                info = table.setdefault(
                    TargetInfo(name, t.shape, t.dtype, row_major(t.shape)), len(table)
                )
                opaque[name] = len(rows)
                rows.append((layout.rank, info, OPAQUE, 0))
            opaque_of_rank.append(opaque)
        columns = np.array(rows, np.int64).reshape(-1, 4)
        rank = columns[:, 0].astype(np.int32)
        parameter = columns[:, 1].astype(np.int32)
        return cls(
            tuple(table),
            rank,
            parameter,
            columns[:, 2].astype(np.int8),
            columns[:, 3],
            of_rank,
            opaque_of_rank,
        )


def _info(p: Parameter) -> TargetInfo:
    return TargetInfo(p.name, tuple(p.shape), p.dtype, tuple(p.strides))


@dataclass
class TracedRows:
    """Traced rows of all ranks in one table, with tensors numbered across ranks."""

    tensor_ids: dict[str, int]
    tensor: np.ndarray
    target: np.ndarray
    shape: np.ndarray
    src_offset: np.ndarray
    src_strides: np.ndarray
    dst_offset: np.ndarray
    dst_strides: np.ndarray

    @classmethod
    def of(cls, layouts: Sequence[RankLayout], targets: Targets) -> TracedRows:
        ids: dict[str, int] = {}
        numbered: dict[int, np.ndarray] = {}  # ranks usually share one tuple of tensors
        width = max(
            [x.shape.shape[1] for x in layouts]
            + [len(t.shape) for x in layouts for t in x.tensors if x.opaque]
        )
        fill = {"shape": 1, "src_strides": 0, "dst_strides": 0}
        parts: dict[str, list[np.ndarray]] = defaultdict(list)

        def add(columns: dict[str, np.ndarray]) -> None:
            for k, values in columns.items():
                wide = pad_columns(values, width, fill[k]) if k in fill else values
                parts[k].append(wide)

        for layout, of_rank, opaque in zip(
            layouts, targets.of_rank, targets.opaque_of_rank, strict=True
        ):
            if id(layout.tensors) not in numbered:
                numbered[id(layout.tensors)] = np.array(
                    [ids.setdefault(t.name, len(ids)) for t in layout.tensors]
                )
            tensor = numbered[id(layout.tensors)][layout.tensor]
            plain = ~np.isin(tensor, [ids[n] for n in opaque])
            add(
                {
                    "tensor": tensor[plain],
                    "target": of_rank[layout.parameter][plain],
                    "shape": layout.shape[plain],
                    "src_offset": layout.src_offset[plain],
                    "src_strides": layout.src_strides[plain],
                    "dst_offset": layout.dst_offset[plain],
                    "dst_strides": layout.dst_strides[plain],
                }
            )
            for name, target in opaque.items():
                info = targets.parameters[targets.parameter[target]]
                strides = np.array(info.strides, np.int64)[None]
                add(
                    {
                        "tensor": np.array([ids[name]]),
                        "target": np.array([target]),
                        "shape": np.array(info.shape, np.int64)[None],
                        "src_offset": np.zeros(1, np.int64),
                        "src_strides": strides,
                        "dst_offset": np.zeros(1, np.int64),
                        "dst_strides": strides,
                    }
                )
        return cls(
            ids, **{k: np.concatenate(v).astype(np.int64) for k, v in parts.items()}
        )


# Affine pieces of the whole model: bindings joined with traced rows, stacked pieces merged into one. numpy only.


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


def join(
    leaves: Sequence[Leaf], bindings: Sequence[Binding], rows: TracedRows
) -> Pieces:
    """Every binding composed with every traced row of its tensor; equal pairs of geometries are composed once."""
    leaf_id = {x.path: i for i, x in enumerate(leaves)}
    ndim = max([len(x.shape) for x in leaves] + [1])
    transforms: dict[tuple[float, str | None], int] = {}
    transform = np.array(
        [
            transforms.setdefault((float(b.add), b.cast), len(transforms))
            for b in bindings
        ],
        np.int64,
    )
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
    b = binding[pair]
    r = row[pair]
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


def _pairs(
    bindings: Sequence[Binding], rows: TracedRows
) -> tuple[np.ndarray, np.ndarray]:
    """(binding, row) for every pair that shares a tensor."""
    tensor = np.array([rows.tensor_ids.get(b.tensor, -1) for b in bindings], np.int64)
    order = np.argsort(tensor, kind="stable")
    first = np.searchsorted(tensor[order], rows.tensor)
    row, within = _repeat(
        np.searchsorted(tensor[order], rows.tensor, side="right") - first
    )
    return order[first[row] + within].astype(np.int64), row


def _compose_kinds(
    bindings: Sequence[Binding], rows: TracedRows, binding: np.ndarray, row: np.ndarray
) -> tuple[list[list[Piece]], np.ndarray]:
    """The pieces of each distinct pair of geometries, and each pair's kind."""
    shapes: dict[tuple[object, ...], int] = {}
    numbers = axes_numbers(bindings)
    keys = [
        (b.tensor_shape, b.tensor_start, n, len(b.leaf_shape))
        for b, n in zip(bindings, numbers, strict=True)
    ]
    geometry = np.array([shapes.setdefault(k, len(shapes)) for k in keys], np.int64)
    heads, row_kind = unique_rows(
        [rows.shape, rows.src_offset, rows.src_strides, rows.dst_strides]
    )
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
        return compose(
            b.tensor_shape, b.tensor_start, b.axes, len(b.leaf_shape), region
        )
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
    span = np.array(
        [sum((a.size - 1) * a.dst_stride for a in axes) for axes in geometry], np.int64
    )
    least = np.array(
        [min([a.dst_stride for a in axes], default=1 << 62) for axes in geometry],
        np.int64,
    )
    apart = (step_dst > span[kind]) | ((size - 1) * step_dst < least[kind])
    return apart & ~((step != 0) & taken[kind]).any(axis=1)


def merge_stacks(p: Pieces) -> Pieces:
    """Equal pieces of one leaf into one target that advance in step on both sides (experts of a stack) become one.

    The idea: pieces that differ only in where they start, by the same step each time, are one piece with one more axis.
    The invariant: the same leaf elements go to the same places. So a group is merged whole or not at all, the new axis
    walks along one leaf dimension that its pieces do not use, and it must not interleave with their target strides.

    Example: a leaf [3, 4, 8] of three experts, each to a third of a parameter of 96 elements, gives three pieces of one
    geometry (4 × 8), with starts (0, 0, 0), (1, 0, 0), (2, 0, 0) and targets 0, 32, 64. They step by (1, 0, 0) and 32:
    one piece of 3 × 4 × 8 remains, with a first axis of size 3, leaf dimension 0, leaf step 1, target stride 32.
    """
    if len(p.kind) < 2:
        return p
    # 1. Sort, so that pieces which may become one are neighbours, in the order of their targets.
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
    # 2. Groups: of each piece its group, of each group its first piece and its size.
    group = np.concatenate([[0], np.cumsum(~same)])
    head = np.flatnonzero(np.concatenate([[True], ~same]))
    size = np.diff(np.append(head, len(kind)))
    # 3. The step of a group is that from its first piece to its second; all others must keep it.
    step_dst = np.zeros(len(head), np.int64)
    step = np.zeros((len(head), start.shape[1]), np.int64)
    many = size > 1
    step_dst[many] = dst[head[many] + 1] - dst[head[many]]
    step[many] = start[head[many] + 1] - start[head[many]]
    at = np.arange(len(kind)) - head[group]
    fits = (dst == dst[head[group]] + at * step_dst[group]) & (
        start == start[head[group]] + at[:, None] * step[group]
    ).all(axis=1)
    # 4. Merge where the step goes up in the target and along one leaf dimension, and the new axis nests.
    good = np.bitwise_and.reduceat(fits, head) & many & (step_dst > 0)
    good &= ((step != 0).sum(axis=1) == 1) & (step.sum(axis=1) > 0)
    good &= _nests(p.geometry, kind[head], step, step_dst, size)
    if not good.any():
        return p
    # 5. The new geometries, one for each distinct (old geometry, size, dimension, steps).
    forms = {g: i for i, g in enumerate(p.geometry)}
    chosen = np.flatnonzero(good)
    dim = np.argmax(step[chosen] != 0, axis=1)
    stride = step[chosen, dim]
    cols = [kind[head[chosen]], size[chosen], dim, stride, step_dst[chosen]]
    firsts, cls = unique_rows(cols)
    made = []
    for f in firsts:
        base, *axis = (int(c[f]) for c in cols)
        axes = [*p.geometry[base], PieceAxis(*axis)]
        axes.sort(key=lambda x: -x.dst_stride)
        made.append(forms.setdefault(tuple(axes), len(forms)))
    # 6. The first piece of a merged group stands for all of it.
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


# ----------------------------------------------------------------------------------------------------


def compile_plan(
    leaves: Sequence[Leaf],
    bindings: Sequence[Binding],
    layouts: Sequence[RankLayout],
    *,
    replicas: int = 1,
    bucket_mib: float = 64,
    device_process: Mapping[int, int] | None = None,
    ignored_leaves: Collection[str] = (),
    link_gbps: float = 50.0,
    title: str = "",
) -> TransferPlan:
    """The proven plan; raises one CoverageError with every mismatch of what is given, or every gap and overlap."""
    if replicas < 1 or bucket_mib <= 0 or link_gbps <= 0 or not layouts:
        raise ConfigError(
            f"no plan for {len(layouts)} ranks × {replicas}, buckets of {bucket_mib} MiB, links of {link_gbps} GB/s",
            remedy="all of these must be above 0",
        )
    problems = check_inputs(leaves, bindings, layouts, ignored_leaves)
    if problems:
        raise_problems(problems)
    shardings, leaf_sharding = distinct_shardings(leaves)
    targets = Targets.of(layouts)
    rows = TracedRows.of(layouts, targets)
    pieces = merge_stacks(join(leaves, bindings, rows))
    drafts = _classes(leaves, shardings, leaf_sharding, targets, pieces)
    boxes = build_boxes(drafts, shardings, replicas)
    devices = np.unique(
        np.concatenate([s.owners for s in shardings] or [np.zeros(0, np.int32)])
    ).astype(np.int32)
    processes = device_process or {}
    plan = TransferPlan(
        leaves=tuple(
            LeafInfo(x.path, x.shape, x.dtype, int(k))
            for x, k in zip(leaves, leaf_sharding, strict=True)
        ),
        shardings=tuple(shardings),
        parameters=targets.parameters,
        transforms=tuple(drafts.transforms),
        target_rank=targets.rank,
        target_parameter=targets.parameter,
        target_kind=targets.kind,
        target_padding=targets.padding,
        class_sharding=drafts.sharding,
        class_transform=drafts.transform,
        class_start=drafts.start,
        **drafts.axis_tables(),
        member_ptr=drafts.member_ptr,
        member_leaf=drafts.member_leaf,
        member_target=drafts.member_target,
        member_start=drafts.member_start,
        member_dst=drafts.member_dst,
        **boxes,
        devices=devices,
        processes=np.array([processes.get(int(d), 0) for d in devices], np.int32),
        quantised=(),
        ranks=max(x.rank for x in layouts) + 1,
        replicas=replicas,
        bucket_bytes=int(bucket_mib * (1 << 20)),
        link_gbps=float(link_gbps),
        title=title,
        ignored=tuple(sorted(set.intersection(*(set(x.unused) for x in layouts)))),
    )
    problems = plan_problems(plan, bindings, layouts)
    if problems:
        raise_problems(problems)
    return plan


def distinct_shardings(leaves: Sequence[Leaf]) -> tuple[list[Sharding], np.ndarray]:
    """The distinct shardings (shape, device boxes) of the leaves, and the index of each leaf's."""
    # by array identity, to skip comparing contents
    by_id: dict[tuple[object, ...], int] = {}
    by_content: dict[tuple[object, ...], int] = {}
    shardings: list[Sharding] = []
    which = np.zeros(len(leaves), np.int32)
    for i, leaf in enumerate(leaves):
        identity = (leaf.shape, id(leaf.devices), id(leaf.starts), id(leaf.stops))
        if identity not in by_id:
            key = (
                leaf.shape,
                leaf.devices.tobytes(),
                leaf.starts.tobytes(),
                leaf.stops.tobytes(),
            )
            if key not in by_content:
                by_content[key] = len(shardings)
                shardings.append(_sharding(leaf))
            by_id[identity] = by_content[key]
        which[i] = by_id[identity]
    return shardings, which


def _sharding(leaf: Leaf) -> Sharding:
    starts = leaf.starts.reshape(len(leaf.devices), len(leaf.shape)).astype(np.int64)
    stops = leaf.stops.reshape(starts.shape).astype(np.int64)
    if starts.shape[1]:
        first, cell = unique_rows([starts, stops])
    else:
        first = np.zeros(1, np.int64)
        cell = np.zeros(len(leaf.devices), np.int64)
    order = np.lexsort((leaf.devices, cell))
    ptr = np.concatenate(
        [[0], np.cumsum(np.bincount(cell, minlength=len(first)))]
    ).astype(np.int64)
    return Sharding(
        tuple(leaf.shape),
        starts[first],
        stops[first],
        ptr,
        leaf.devices[order].astype(np.int32),
    )


def _classes(
    leaves: Sequence[Leaf],
    shardings: Sequence[Sharding],
    leaf_sharding: np.ndarray,
    targets: Targets,
    p: Pieces,
) -> Drafts:
    ndim = p.start.shape[1]
    whole = np.ones((len(shardings), ndim), bool)
    for i, s in enumerate(shardings):
        whole[i, : len(s.shape)] = s.whole
    of_leaf = leaf_sharding[p.leaf]
    free = whole[of_leaf]
    transforms: dict[ValueTransform, int] = {}
    dtypes: dict[str, int] = {}
    src = np.array([dtypes.setdefault(x.dtype, len(dtypes)) for x in leaves], np.int64)
    dst = np.array(
        [dtypes.setdefault(x.dtype, len(dtypes)) for x in targets.parameters], np.int64
    )
    names = list(dtypes)
    lf, lk = unique_rows([p.transform, src[p.leaf], dst[targets.parameter[p.target]]])
    numbers = []
    for f in lf:
        add, cast = p.transforms[p.transform[f]]
        wire = names[dst[targets.parameter[p.target[f]]]]
        numbers.append(
            transforms.setdefault(
                ValueTransform(names[src[p.leaf[f]]], wire, add, cast), len(transforms)
            )
        )
    transform = np.array(numbers, np.int64)[lk] if len(lk) else np.zeros(0, np.int64)
    fixed = np.where(free, 0, p.start)
    heads, cls = unique_rows([of_leaf, transform, p.kind, fixed])
    order = np.lexsort((p.dst, p.target, targets.rank[p.target], cls))
    return Drafts(
        transforms=list(transforms),
        sharding=of_leaf[heads].astype(np.int32),
        transform=transform[heads].astype(np.int32),
        start=fixed[heads],
        axes=[p.geometry[k] for k in p.kind[heads]],
        member_ptr=np.concatenate(
            [[0], np.cumsum(np.bincount(cls, minlength=len(heads)))]
        ).astype(np.int64),
        member_leaf=p.leaf[order].astype(np.int32),
        member_target=p.target[order].astype(np.int32),
        member_start=np.where(free, p.start, 0)[order],
        member_dst=p.dst[order],
    )
