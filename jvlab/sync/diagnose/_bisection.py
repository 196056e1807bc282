"""`Bisection`: the result of `link.bisect`, and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab import _faces

if TYPE_CHECKING:
    from jvlab.layout.rules._ruleset import Rules
    from jvlab.sync._diff import TensorDiff


@dataclass(frozen=True)
class Check:
    """The result of one check: `state` is "ok", "cause", or "skipped" (the evidence says why)."""

    name: str
    state: str
    evidence: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Check({self.name}: {self.state}, {self.evidence})"


@dataclass(frozen=True, eq=False)
class Bisection:
    """Why engine and trainer disagree on a prompt: `cause`, `verdict` and `remedy`, and the checks that led there.

    `cause` is one of "state", "tensor", "version", "prefix cache", "sampler", "rule", "dtype", "model", or "" if they
    agree. If a rule was wrong, `rules` are those in force with that one corrected.
    `engine[t]` and `trainer[t]` are log P of `tokens[t]` given the tokens before it (NaN at 0), if they were needed.

    >>> found = link.bisect("Once upon a time", policy)
    >>> found.agrees, found.gap < 1e-3
    (True, True)
    >>> [check.name for check in found.checks if check.state == "ok"][:3]
    ['state', 'tensor', 'version']
    """

    cause: str
    verdict: str
    remedy: str
    checks: tuple[Check, ...]
    tokens: np.ndarray
    engine: np.ndarray | None = None
    trainer: np.ndarray | None = None
    tensors: tuple[TensorDiff, ...] = ()
    rules: Rules | None = field(repr=False, default=None)

    @property
    def agrees(self) -> bool:
        """Was no cause found?"""
        return not self.cause

    @property
    def gap(self) -> float | None:
        """The largest difference in log-probability; None if they were not compared."""
        return (
            None
            if self.engine is None or self.trainer is None
            else largest(self.engine, self.trainer)
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        listed = lambda row: (
            None
            if row is None
            else [None if v != v else float(v) for v in row.tolist()]
        )
        return {
            "cause": self.cause,
            "verdict": self.verdict,
            "remedy": self.remedy,
            "gap": self.gap,
            "checks": [
                {
                    "name": c.name,
                    "state": c.state,
                    "evidence": c.evidence,
                    "facts": dict(c.facts),
                }
                for c in self.checks
            ],
            "tensors": [
                {
                    "parameter": t.parameter,
                    "rank": t.rank,
                    "share_changed": t.share_changed,
                    "max_change": t.max_change,
                }
                for t in self.tensors
            ],
            "rules": None if self.rules is None else self.rules.to_text(),
            "tokens": self.tokens.tolist(),
            "engine": listed(self.engine),
            "trainer": listed(self.trainer),
        }

    def __repr__(self) -> str:
        return f"Bisection({self.cause or 'agree'}: {self.verdict})"

    def __str__(self) -> str:
        marks = {"ok": "✓", "cause": "✗", "skipped": "–"}
        lines = [f"  {marks[c.state]} {c.name}: {c.evidence}" for c in self.checks]
        return "\n".join(
            [self.verdict, *lines, *([f"  → {self.remedy}"] if self.remedy else [])]
        )

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


def largest(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference, ignoring NaN."""
    both = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))
    known = both[~np.isnan(both)]
    return float(known.max()) if known.size else 0.0
