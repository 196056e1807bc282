"""Arithmetic of half-open time intervals, as (n, 2) arrays: unions, differences, and a split of time among phases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np


def tidy(intervals: object) -> np.ndarray:
    """As an (n, 2) float array, without empty and NaN intervals."""
    given = list(intervals) if isinstance(intervals, Iterable) and not isinstance(intervals, np.ndarray) else intervals
    array = np.asarray(given, float).reshape(-1, 2)
    return array[array[:, 1] > array[:, 0]]


def union(intervals: object) -> np.ndarray:
    """The same points as disjoint intervals in order; those that touch are joined."""
    array = tidy(intervals)
    if not len(array):
        return array
    array = array[np.argsort(array[:, 0], kind="stable")]
    reach = np.maximum.accumulate(array[:, 1])
    first = np.concatenate([[True], array[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([array[first, 0], reach[last]], axis=1)


def measure(intervals: object) -> float:
    """Seconds that at least one interval covers."""
    joined = union(intervals)
    return float((joined[:, 1] - joined[:, 0]).sum())


def intersect(a: object, b: object) -> np.ndarray:
    """Points in both."""
    return _combine(a, b, lambda x, y: x & y)


def subtract(a: object, b: object) -> np.ndarray:
    """Points in a that are not in b."""
    return _combine(a, b, lambda x, y: x & ~y)


def _combine(a: object, b: object, keep) -> np.ndarray:
    left, right = union(a), union(b)
    cuts = np.unique(np.concatenate([left.ravel(), right.ravel()]))
    chosen = keep(_containing(left, cuts[:-1]) >= 0, _containing(right, cuts[:-1]) >= 0)
    return union(np.stack([cuts[:-1], cuts[1:]], axis=1)[chosen])


def _containing(disjoint: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Index of the interval that contains each point; -1: none."""
    if not len(disjoint):
        return np.full(len(points), -1)
    at = np.searchsorted(disjoint[:, 0], points, side="right") - 1
    return np.where((at >= 0) & (points < disjoint[np.maximum(at, 0), 1]), at, -1)


@dataclass(frozen=True)
class TimeSplit:
    """How the time of each window was spent. `busy[phase]` is the time in which it ran, alone or not;
    `together[phases]` the time in which exactly these ran: with `idle`, they sum to the window's length.
    """

    windows: np.ndarray
    busy: dict[str, np.ndarray]
    together: dict[tuple[str, ...], np.ndarray]
    idle: np.ndarray

    @property
    def overlap(self) -> np.ndarray:
        """The time in which two or more phases ran."""
        return sum((t for names, t in self.together.items() if len(names) > 1), np.zeros(len(self.windows)))


def split_time(phases: Mapping[str, object], windows: object) -> TimeSplit:
    """Split disjoint windows, in order, among phases whose intervals may overlap each other and themselves."""
    frames = np.asarray(windows, float).reshape(-1, 2)
    unions = {name: union(intervals) for name, intervals in phases.items()}
    cuts = np.unique(np.concatenate([frames.ravel(), *(u.ravel() for u in unions.values())]))
    points, lengths = cuts[:-1], np.diff(cuts)
    frame = _containing(frames, points)
    inside = frame >= 0
    active = {name: _containing(u, points) >= 0 for name, u in unions.items()}
    code = sum((mask << i for i, mask in enumerate(active.values())), np.zeros(len(points), np.int64))

    def total(mask: np.ndarray) -> np.ndarray:
        chosen = inside & mask
        return np.bincount(frame[chosen], weights=lengths[chosen], minlength=len(frames))

    combinations = [c for c in np.unique(code[inside]).tolist() if c]
    return TimeSplit(
        frames,
        busy={name: total(mask) for name, mask in active.items()},
        together={tuple(n for i, n in enumerate(active) if c >> i & 1): total(code == c) for c in combinations},
        idle=total(code == 0),
    )


def rate(intervals: object, amounts: object, edges: np.ndarray) -> np.ndarray:
    """Amount per second in each bin between the edges; amounts are spread evenly over their intervals."""
    spans, weights = np.asarray(intervals, float).reshape(-1, 2), np.asarray(amounts, float).reshape(-1)
    total = np.zeros(len(edges))
    for (start, stop), amount in zip(spans, weights, strict=True):  # one at a time: runs have many, bins are few
        if stop > start:
            total += amount * np.clip((edges - start) / (stop - start), 0.0, 1.0)
        else:
            total += amount * (edges > start)
    return np.diff(total) / np.diff(edges)


def lanes(intervals: object, slack: float = 1e-6) -> list[int]:
    """A lane for each interval, so that none overlap within a lane; greedy, first lanes first.

    Two that overlap by at most `slack` seconds may share one, to allow for rounding.
    """
    spans = np.asarray(intervals, float).reshape(-1, 2)
    out, ends = [0] * len(spans), []
    for i in np.argsort(spans[:, 0], kind="stable").tolist():
        start, stop = spans[i].tolist()
        free = next((lane for lane, end in enumerate(ends) if end <= start + slack), len(ends))
        ends[free : free + 1] = [stop]
        out[i] = free
    return out
