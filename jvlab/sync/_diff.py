"""Compares the tensor an engine holds with the one a sync would write."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided

from jvlab._errors import ConfigError
from jvlab.layout._plan_types import OPAQUE, numpy_dtype
from jvlab.sync._mapping import find, targets
from jvlab.sync._pack import Source
from jvlab.sync._senders import jobs_of

if TYPE_CHECKING:
    from jvlab.layout._plan import TransferPlan
    from jvlab.layout._plan_types import TargetInfo
    from jvlab.sync._link import Link


@dataclass(frozen=True)
class TensorDiff:
    """One parameter on one rank, before and after a sync."""

    parameter: str
    rank: int
    shape: tuple[int, ...]
    norm_now: float
    norm_new: float
    norm_change: float
    max_change: float
    share_changed: float  # fraction of elements whose bits differ

    def __repr__(self) -> str:
        return (
            f"TensorDiff({self.parameter} on rank {self.rank}, {self.share_changed:.1%} changed, "
            f"max |Δ| {self.max_change:.3g}, ‖Δ‖ {self.norm_change:.3g} of ‖now‖ {self.norm_now:.3g})"
        )


def targets_named(plan: TransferPlan, name: str) -> list[int]:
    """Targets of a vLLM parameter, or all targets that a trainer leaf is written to."""
    names = [plan.parameters[p].name for p in plan.target_parameter]
    found = [t for t, n in enumerate(names) if n == name]
    if found:
        return found
    leaves = [i for i, leaf in enumerate(plan.leaves) if leaf.path == name]
    if leaves:
        return sorted(set(plan.member_target[plan.member_leaf == leaves[0]].tolist()))
    known = sorted({*names, *(leaf.path for leaf in plan.leaves)})
    close = difflib.get_close_matches(name, known, 3)
    raise ConfigError(
        f"no parameter of the engine and no leaf is called {name!r}",
        remedy=f"did you mean {', '.join(close)}?"
        if close
        else "link.mapping lists them",
    )


def differences(
    link: Link, name: str, source: Source, replica: int = 0
) -> list[TensorDiff]:
    """For every rank's part of a tensor: what the engine holds now against what a sync would write."""
    out = []
    for target in (
        t for one in _of_slice(link, name) for t in targets_named(link.plan, one)
    ):
        info, rank, now, new = both_sides(link, target, source, replica)
        out.append(difference(info.name, rank, info.shape, now, new))
    return out


def _of_slice(link: Link, name: str) -> list[str]:
    """The parameters of one layer of a stacked leaf, if the name means that; else the name itself."""
    try:
        place = find(link.mapping, name)
    # several leaves make up this parameter, or there is none: the caller says so
    except ConfigError:
        return [name]
    return targets(link.mapping, place) or [name]


def both_sides(
    link: Link, target: int, source: Source, replica: int = 0
) -> tuple[TargetInfo, int, np.ndarray, np.ndarray]:
    """A target's parameter and rank, the values its engine holds, and those that a sync of `source` would write."""
    plan = link.plan
    info = plan.parameters[plan.target_parameter[target]]
    rank = int(plan.target_rank[target])
    if plan.target_kind[target] == OPAQUE:
        raise ConfigError(
            f"{info.name} is loaded by vLLM's own loader: it can't be compared element by element"
        )
    if any(info.name in layout.reloaded for layout in link.mapping._layouts):
        raise ConfigError(
            f"{info.name} is what vLLM's own reload makes of it: it can't be compared element by element"
        )
    dtype = numpy_dtype(info.dtype)
    now = np.frombuffer(link.pool.peek(info.name, rank, replica=replica), dtype)
    new = now.copy()
    for job in jobs_of(plan, rank, replica):
        if target not in job.pack.targets(job.bucket):
            continue
        for (_, box), values in zip(
            job.pack.buckets[job.bucket],
            job.pack.values(job.bucket, source),
            strict=True,
        ):
            if box.target == target:
                strides = [s * dtype.itemsize for s in box.dst_strides]
                as_strided(new[box.dst_offset :], box.shape, strides)[...] = values
    return info, rank, now, new


def difference(
    name: str, rank: int, shape: tuple[int, ...], now: np.ndarray, new: np.ndarray
) -> TensorDiff:
    bits = np.dtype(f"u{now.itemsize}")
    changed = now.view(bits) != new.view(bits)
    before = now.astype(np.float64)
    after = new.astype(np.float64)
    change = after - before
    return TensorDiff(
        name,
        rank,
        shape,
        float(np.linalg.norm(before)),
        float(np.linalg.norm(after)),
        float(np.linalg.norm(change)),
        float(np.abs(change).max(initial=0.0)),
        float(changed.mean()) if changed.size else 0.0,
    )
