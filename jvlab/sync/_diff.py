"""Compares the tensor an engine holds with the one a sync would write."""

from __future__ import annotations

import difflib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from jvlab import _faces
from jvlab._errors import ConfigError
from jvlab.layout._plan_types import OPAQUE, numpy_dtype
from jvlab.sync._mapping import find, targets
from jvlab.sync._pack import Source
from jvlab.sync._senders import jobs_of

if TYPE_CHECKING:
    from jvlab.layout._plan import TransferPlan
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
    names = [name]
    # unless several leaves make up this parameter, or there is none: `targets_named` says so
    with suppress(ConfigError):
        # the parameters of one layer of a stacked leaf, if the name means that
        names = targets(link.mapping, find(link.mapping, name)) or names
    return [
        difference(link, target, source, replica)[0]
        for one in names
        for target in targets_named(link.plan, one)
    ]


def difference(
    link: Link, target: int, source: Source, replica: int
) -> tuple[TensorDiff, np.ndarray, np.ndarray]:
    """A target's difference, the values its engine holds, and those that a sync of `source` would write."""
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
    bits = np.dtype(f"u{now.itemsize}")
    changed = now.view(bits) != new.view(bits)
    before = now.astype(np.float64)
    after = new.astype(np.float64)
    change = after - before
    found = TensorDiff(
        info.name,
        rank,
        info.shape,
        float(np.linalg.norm(before)),
        float(np.linalg.norm(after)),
        float(np.linalg.norm(change)),
        float(np.abs(change).max(initial=0.0)),
        float(changed.mean()) if changed.size else 0.0,
    )
    return found, now, new


# Value histograms of a parameter: the engine's, the trainer's, and their difference ----------------------------------


@dataclass(frozen=True, eq=False)
class Values:
    """One parameter on one rank: counts per bin. `engine` and `trainer` share `edges`; `change` is trainer − engine."""

    change_summary: TensorDiff
    edges: np.ndarray = field(repr=False)
    engine: np.ndarray = field(repr=False)
    trainer: np.ndarray = field(repr=False)
    change_edges: np.ndarray = field(repr=False)
    change: np.ndarray = field(repr=False)
    not_finite: int = 0  # positions that are NaN or infinite on either side; in no bin

    @property
    def parameter(self) -> str:
        return self.change_summary.parameter

    @property
    def rank(self) -> int:
        return self.change_summary.rank

    @property
    def equal(self) -> bool:
        """Bit for bit."""
        return self.change_summary.share_changed == 0

    def __repr__(self) -> str:
        state = (
            "equal" if self.equal else f"{self.change_summary.share_changed:.1%} differ"
        )
        return f"Values({self.parameter} on rank {self.rank}, {state})"

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


def values_of(
    link: Link, name: str, params: Any, replica: int = 0, bins: int = 48
) -> list[Values]:
    """Histograms of every rank's part of a leaf or parameter. `params`: a tree of arrays, or has `.params`; None: those
    that the link was connected with."""
    remedy = "link.mapping.values(name, policy.params), or link.mapping.panel(policy)"
    arrays = link.remembered.or_given(params, remedy)
    source = Source.of_arrays(link.plan, arrays)
    found = (
        difference(link, target, source, replica)
        for target in targets_named(link.plan, name)
    )
    return [histogram(*sides, bins) for sides in found]


def histogram(
    summary: TensorDiff, engine: np.ndarray, trainer: np.ndarray, bins: int = 48
) -> Values:
    """Both sides with shared bins, the difference with its own."""
    a = engine.astype(np.float64).reshape(-1)
    b = trainer.astype(np.float64).reshape(-1)
    good = np.isfinite(a) & np.isfinite(b)
    a = a[good]
    b = b[good]
    edges = _edges(np.concatenate([a, b]), bins)
    change = b - a
    change_edges = _edges(np.append(change, 0.0), bins)
    counts = [
        np.histogram(x, e)[0]
        for x, e in ((a, edges), (b, edges), (change, change_edges))
    ]
    return Values(
        summary,
        edges,
        counts[0],
        counts[1],
        change_edges,
        counts[2],
        int((~good).sum()),
    )


def _edges(values: np.ndarray, bins: int) -> np.ndarray:
    low, high = (
        (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    )
    if high <= low:  # a single value
        reach = abs(low) * 0.5 or 1.0
        low = low - reach
        high = high + reach
    return np.linspace(low, high, bins + 1)
