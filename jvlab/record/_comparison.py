"""`Record.compare`: two runs side by side, in numbers and in what was set differently."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab.record._events import RunStart

if TYPE_CHECKING:
    import pandas

    from jvlab.record._record import Record

_LAST = 10  # steps that "at the end" means
_SUMMARY = {  # row → key of `Record.summary()`
    "steps": "steps",
    "skipped steps": "skipped",
    "seconds": "seconds",
    "samples": "samples",
    "tokens": "tokens",
    "tokens/s": "tokens_per_s",
    "syncs": "syncs",
    "sync pause, mean s": "sync_pause_mean_s",
    "staleness, mean": "mean_staleness",
    "logprob gap, largest": "logprob_gap",
    "steps over the gap alarm": "alarms",
}


@dataclass(frozen=True)
class Comparison:
    """Two runs: `numbers` of both, and the `settings` that differ. `record.panel(compare=other)` draws their curves."""

    names: tuple[str, str]
    numbers: Mapping[str, tuple[float, float]]
    settings: Mapping[str, tuple[Any, Any]]

    def to_pandas(self) -> pandas.DataFrame:
        """One row per number, one column per run."""
        from jvlab.record._export import to_pandas

        columns = {name: np.array([pair[j] for pair in self.numbers.values()]) for j, name in enumerate(self.names)}
        return to_pandas(columns).set_axis(list(self.numbers), axis=0)

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = [(name, _text(one), _text(other)) for name, (one, other) in self.numbers.items()]
        return [*rows, *((name, repr(one), repr(other)) for name, (one, other) in self.settings.items())]

    def __repr__(self) -> str:
        rows = [("", *self.names), *self._rows()]
        widths = [max(len(row[c]) for row in rows) for c in range(3)]
        lines = [f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.rjust(widths[2])}".rstrip() for a, b, c in rows]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cell = "padding:2px 10px 2px 0;text-align:left;color:inherit;background:transparent"
        head = "".join(f'<th style="{cell}">{escape(name)}</th>' for name in ("", *self.names))
        rows = ["".join(f'<td style="{cell}">{escape(text)}</td>' for text in row) for row in self._rows()]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f'<table style="border-collapse:collapse;color:inherit"><tr>{head}</tr>{body}</table>'


def compare(one: Record, other: Record) -> Comparison:
    """The comparison of two records."""
    pair = (one, other)
    summaries = [record.summary() for record in pair]
    rewards = [record.steps()["reward_mean"] for record in pair]
    common = min(map(len, rewards))
    numbers: dict[str, tuple[float, float]] = {
        "reward, first step": _pair(_mean(r[:1]) for r in rewards),
        f"reward, last {_LAST} steps": _pair(_mean(r[-_LAST:]) for r in rewards),
        f"reward, same {common} steps": _pair(_mean(r[:common]) for r in rewards),
    }
    numbers |= {row: _pair(float(s[key]) for s in summaries) for row, key in _SUMMARY.items()}
    numbers["faults"] = _pair(float(sum(s["faults"].values())) for s in summaries)
    starts = [next((e for e in r.events() if isinstance(e, RunStart)), None) for r in pair]
    configs = [dict(s.config) if s is not None else {} for s in starts]
    keys = dict.fromkeys([*configs[0], *configs[1]])
    differ = {k: (configs[0].get(k), configs[1].get(k)) for k in keys if configs[0].get(k) != configs[1].get(k)}
    return Comparison(_names(one, other, [s["run"] for s in summaries]), numbers, differ)


def _names(one: Record, other: Record, runs: list[str]) -> tuple[str, str]:
    """What tells them apart: the runs' names, or their folders', or which is which."""
    folders = [str(r.folder.name) if r.folder else "" for r in (one, other)]
    for names in (runs, folders):
        if all(names) and names[0] != names[1]:
            return names[0], names[1]
    return "this", "other"


def _pair(values: Any) -> tuple[float, float]:
    first, second = values
    return first, second


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if len(values) and not np.isnan(values).all() else math.nan


def _text(value: float) -> str:
    if value != value:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.3g}"
