"""Value histograms of a parameter: the engine's, the trainer's, and their difference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab import _faces
from jvlab.sync._diff import TensorDiff, both_sides, difference, targets_named
from jvlab.sync._pack import Source

if TYPE_CHECKING:
    from jvlab.sync._link import Link


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
    out = []
    for target in targets_named(link.plan, name):
        info, rank, now, new = both_sides(link, target, source, replica)
        out.append(
            histogram(difference(info.name, rank, info.shape, now, new), now, new, bins)
        )
    return out


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
