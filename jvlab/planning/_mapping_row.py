"""One row of a mapping: which leaf fills which parameter on which ranks, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class MappingRow:
    """One way: a leaf, through a checkpoint tensor, into a parameter; `ranks` all those that take the same way."""

    leaf: str
    rule: str
    reason: str
    confidence: float
    tensor: str
    parameter: str
    ranks: tuple[int, ...]
    leaf_dtype: str
    dtype: str
    nbytes: int  # on the wire, over all its ranks
    status: str  # direct, cast, staged, opaque, unused
    warning: str = ""  # what was taken for granted without evidence

    @property
    def rank_text(self) -> str:
        """The ranks, runs shortened: 0-3, 6."""
        return rank_runs(self.ranks)


def rank_runs(ranks: Sequence[int]) -> str:
    """0, 1, 2, 5 → `0-2, 5`."""
    runs: list[list[int]] = []
    for r in sorted(ranks):
        if runs and r == runs[-1][1] + 1:
            runs[-1][1] = r
        else:
            runs.append([r, r])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
