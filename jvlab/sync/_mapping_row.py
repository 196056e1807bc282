"""One row of a mapping: which leaf fills which parameter on which ranks, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MappingRow:
    """A leaf, the checkpoint tensor it corresponds to, the parameter it fills, and the ranks where it does."""

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
    status: str  # direct, cast, quantised, staged, opaque, unused
    warning: str = ""  # what was assumed without evidence
    part: str = ""  # the slice of a stacked leaf, `[1]`
    # the same slice named as a layer of its own, `layers.1.attn.q.kernel`
    numbered: str = ""

    @property
    def name(self) -> str:
        """The leaf, with its slice where layers are stacked: `layers.attn.q.kernel[1]`."""
        return self.leaf + self.part

    @property
    def rank_text(self) -> str:
        """The ranks with runs shortened: 0-3, 6."""
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
