"""How long samples are: as recorded, cut at a new limit, or carried on beyond the old one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jvlab.analysis.forecast._observe import Observation


class Lengths:
    """The lengths of recorded samples. One that its limit cut short is carried on at the rate at which others ended."""

    def __init__(self, seen: Sequence[Observation]) -> None:
        ended = [n for o in seen for n in o.lengths if n < o.setting.max_tokens]
        cut = [n for o in seen for n in o.lengths if n >= o.setting.max_tokens]
        self._ended, self._cut = np.array(ended, int), np.array(cut, int)
        total = sum(ended) + sum(cut)
        self.hazard = len(ended) / total if total else 0.0  # ends per token
        self.longest = max((o.setting.max_tokens for o in seen), default=0)

    @property
    def fixed(self) -> bool:
        """Whether every sample was as long as it might be."""
        return not len(self._ended)

    def draw(self, count: int, limit: int, random: np.random.Generator) -> list[int]:
        """The lengths of some samples."""
        if self.fixed:
            return [limit] * count
        pool = np.concatenate([self._ended, self._cut])
        chosen = random.integers(len(pool), size=count)
        found = pool[chosen]
        more = random.geometric(self.hazard, size=count)
        return np.minimum(np.where(chosen < len(self._ended), found, found + more), limit).tolist()

    def typical(self, count: int, limit: int) -> list[int]:
        """Lengths that stand for the distribution: its quantiles, in an order that mixes them over groups."""
        if self.fixed:
            return [limit] * count
        many = np.sort(self.draw(64 * count, limit, np.random.default_rng(0)))
        middle = many[32::64]
        return np.random.default_rng(1).permutation(middle).tolist()
