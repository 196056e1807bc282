"""Leaves × bindings × traced ranks → TransferPlan: join by tensor, compose, merge, classify, cut. numpy only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jvlab._errors import ConfigError
from jvlab.layout._affine_pieces import Pieces, join, merge_stacks
from jvlab.layout._boxes import unique_rows
from jvlab.layout._cells import Drafts, build_boxes
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import LeafInfo, Sharding, ValueTransform
from jvlab.layout._problems import check_inputs, raise_problems
from jvlab.layout._proof import plan_problems
from jvlab.layout._tables import Rows, Targets
from jvlab.layout._types import Binding, Leaf, RankLayout


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
    """The proven plan; raises one CoverageError with every gap, overlap and mismatch."""
    if replicas < 1 or bucket_mib <= 0 or link_gbps <= 0 or not layouts:
        raise ConfigError(
            f"no plan for {len(layouts)} ranks × {replicas}, buckets of {bucket_mib} MiB, links of {link_gbps} GB/s",
            remedy="all of these must be above 0",
        )
    problems, good, sound = check_inputs(leaves, bindings, layouts, ignored_leaves)
    if problems and not _meet(sound, layouts):  # nothing to compile, so no further problems
        raise_problems(problems)
    size = int(bucket_mib * (1 << 20))
    plan = _compile(good, sound, layouts, replicas, device_process or {}, size, float(link_gbps), title)
    problems += plan_problems(plan, bindings=sound, layouts=layouts)
    if problems:
        raise_problems(problems)
    return plan


def _meet(bindings: Sequence[Binding], layouts: Sequence[RankLayout]) -> bool:
    """Whether any binding reaches any rank."""
    bound = {b.tensor for b in bindings}
    return any(
        any(note.name in bound for note in x.opaque) or any(x.tensors[i].name in bound for i in np.unique(x.tensor))
        for x in layouts
    )


def _compile(
    leaves: Sequence[Leaf],
    bindings: Sequence[Binding],
    layouts: Sequence[RankLayout],
    replicas: int,
    device_process: Mapping[int, int],
    bucket_bytes: int,
    link_gbps: float,
    title: str,
) -> TransferPlan:
    shardings, leaf_sharding = distinct_shardings(leaves)
    targets = Targets.of(layouts)
    rows = Rows.of(layouts, targets)
    pieces = merge_stacks(join(leaves, bindings, rows))
    drafts = _classes(leaves, shardings, leaf_sharding, targets, pieces)
    boxes = build_boxes(drafts, shardings, replicas)
    devices = np.unique(np.concatenate([s.owners for s in shardings] or [np.zeros(0, np.int32)])).astype(np.int32)
    return TransferPlan(
        leaves=tuple(LeafInfo(x.path, x.shape, x.dtype, int(k)) for x, k in zip(leaves, leaf_sharding, strict=True)),
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
        processes=np.array([device_process.get(int(d), 0) for d in devices], np.int32),
        quantised=(),
        ranks=max(x.rank for x in layouts) + 1,
        replicas=replicas,
        bucket_bytes=bucket_bytes,
        link_gbps=link_gbps,
        title=title,
        ignored=tuple(sorted(set.intersection(*(set(x.unused) for x in layouts)))),
    )


def distinct_shardings(leaves: Sequence[Leaf]) -> tuple[list[Sharding], np.ndarray]:
    """The distinct shardings (shape, device boxes) of the leaves, and the index of each leaf's."""
    by_id: dict[tuple[object, ...], int] = {}  # by array identity, to skip comparing contents
    by_content: dict[tuple[object, ...], int] = {}
    shardings: list[Sharding] = []
    which = np.zeros(len(leaves), np.int32)
    for i, leaf in enumerate(leaves):
        identity = (leaf.shape, id(leaf.devices), id(leaf.starts), id(leaf.stops))
        if identity not in by_id:
            key = (leaf.shape, leaf.devices.tobytes(), leaf.starts.tobytes(), leaf.stops.tobytes())
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
        first, cell = np.zeros(1, np.int64), np.zeros(len(leaf.devices), np.int64)
    order = np.lexsort((leaf.devices, cell))
    ptr = np.concatenate([[0], np.cumsum(np.bincount(cell, minlength=len(first)))]).astype(np.int64)
    return Sharding(tuple(leaf.shape), starts[first], stops[first], ptr, leaf.devices[order].astype(np.int32))


def _classes(
    leaves: Sequence[Leaf], shardings: Sequence[Sharding], leaf_sharding: np.ndarray, targets: Targets, p: Pieces
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
    dst = np.array([dtypes.setdefault(x.dtype, len(dtypes)) for x in targets.parameters], np.int64)
    names = list(dtypes)
    lf, lk = unique_rows([p.transform, src[p.leaf], dst[targets.parameter[p.target]]])
    numbers = []
    for f in lf:
        add, cast = p.transforms[p.transform[f]]
        wire = names[dst[targets.parameter[p.target[f]]]]
        numbers.append(transforms.setdefault(ValueTransform(names[src[p.leaf[f]]], wire, add, cast), len(transforms)))
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
        member_ptr=np.concatenate([[0], np.cumsum(np.bincount(cls, minlength=len(heads)))]).astype(np.int64),
        member_leaf=p.leaf[order].astype(np.int32),
        member_target=p.target[order].astype(np.int32),
        member_start=np.where(free, p.start, 0)[order],
        member_dst=p.dst[order],
    )
