"""Metrics from events, as pure functions: staleness, throughput, utilisation, time per step, alarms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jvlab.record._events import (
    NAN,
    DraftEvent,
    Event,
    FaultEvent,
    PauseEvent,
    RewardEvent,
    RolloutEvent,
    RunStart,
    RunStop,
    ScoreEvent,
    StepEvent,
    SyncEvent,
    mean_of,
    only,
)

# Arithmetic of half-open time intervals, as (n, 2) arrays: unions, differences, and a split of time among phases.


def tidy(intervals: Any) -> np.ndarray:
    """As an (n, 2) float array, without empty and NaN intervals."""
    array = np.asarray(intervals, float).reshape(-1, 2)
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
        return sum(
            (t for names, t in self.together.items() if len(names) > 1),
            np.zeros(len(self.windows)),
        )


def split_time(phases: Mapping[str, object], windows: object) -> TimeSplit:
    """Split disjoint windows, in order, among phases whose intervals may overlap each other and themselves."""
    frames = np.asarray(windows, float).reshape(-1, 2)
    unions = {name: union(intervals) for name, intervals in phases.items()}
    cuts = np.unique(
        np.concatenate([frames.ravel(), *(u.ravel() for u in unions.values())])
    )
    points = cuts[:-1]
    lengths = np.diff(cuts)
    frame = _containing(frames, points)
    inside = frame >= 0
    active = {name: _containing(u, points) >= 0 for name, u in unions.items()}
    code = sum(
        (mask << i for i, mask in enumerate(active.values())),
        np.zeros(len(points), np.int64),
    )

    def total(mask: np.ndarray) -> np.ndarray:
        chosen = inside & mask
        return np.bincount(
            frame[chosen], weights=lengths[chosen], minlength=len(frames)
        )

    combinations = [c for c in np.unique(code[inside]).tolist() if c]
    return TimeSplit(
        frames,
        busy={name: total(mask) for name, mask in active.items()},
        together={
            tuple(n for i, n in enumerate(active) if c >> i & 1): total(code == c)
            for c in combinations
        },
        idle=total(code == 0),
    )


def rate(intervals: Any, amounts: Any, edges: np.ndarray) -> np.ndarray:
    """Amount per second in each bin between the edges; amounts are spread evenly over their intervals."""
    total = np.zeros(len(edges))
    # one at a time: runs have many, bins are few
    for (start, stop), amount in zip(intervals, amounts, strict=True):
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
    out = [0] * len(spans)
    ends = []
    for i in np.argsort(spans[:, 0], kind="stable").tolist():
        start, stop = spans[i].tolist()
        free = next(
            (lane for lane, end in enumerate(ends) if end <= start + slack), len(ends)
        )
        ends[free : free + 1] = [stop]
        out[i] = free
    return out


# ----------------------------------------------------------------------------------------------------

PHASES: dict[str, type[Event]] = {
    "generate": RolloutEvent,
    "score": ScoreEvent,
    "reward": RewardEvent,
    "train": StepEvent,
    "sync": SyncEvent,
}
GAP_ALARM = 1e-3  # fp32 on both sides should stay below it; a run may set its own


def spans(events: Iterable[Event]) -> np.ndarray:
    """(n, 2): start and stop of each."""
    return np.array([(e.start, e.stop) for e in events], float).reshape(-1, 2)


def sessions(events: Sequence[Event]) -> np.ndarray:
    """When processes wrote this run: (n, 2). A resumed run has gaps between sessions, which are not counted."""
    found: list[list[float]] = []
    anchored = False
    for event in events:
        if isinstance(event, RunStart) or not found:
            anchored = isinstance(event, RunStart)
            found.append([event.start, event.start])
        # an unknown event may have no times: comparisons with NaN are false
        last = found[-1]
        if not anchored and not last[0] <= event.start and event.start == event.start:
            last[0] = event.start  # a record without a RunStart
        if not last[1] >= event.stop and event.stop == event.stop:
            last[1] = event.stop
    return np.array(found, float).reshape(-1, 2)


def trained(events: Sequence[Event]) -> list[StepEvent]:
    """The steps that count: a session that resumed at step n replaces the earlier steps from n on."""
    out: list[StepEvent] = []
    for event in events:
        if isinstance(event, RunStart) and event.resumed >= 0:
            out = [e for e in out if e.step < event.resumed]
        elif isinstance(event, StepEvent):
            out.append(event)
    return out


def counted(events: Sequence[Event]) -> list[Event]:
    """The events without rollouts and rewards of groups that a later session generated again, or will.

    What a killed process generated after its last checkpoint is lost; the resumed session generates those groups again,
    so they count once. Times and rates include both.
    """
    work = (RolloutEvent, RewardEvent)
    if len(only(events, RunStart)) < 2:
        return list(events)
    out: list[Event] = []
    again: set[int] = set()  # groups generated after the current event
    here: set[int] = set()  # groups of the current session
    undone = NAN  # the first step that a later session repeated
    for event in reversed(events):
        if isinstance(event, StepEvent) and event.step >= undone:
            again.update(event.groups)
        if isinstance(event, work) and event.groups:
            if again.issuperset(event.groups):
                continue
            here.update(event.groups)
        if isinstance(event, RunStart):
            again |= here
            here = set()
            if event.resumed >= 0 and not event.resumed >= undone:
                undone = event.resumed
        out.append(event)
    return out[::-1]


# staleness -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Staleness:
    """`tokens[i, j]`: tokens in row i (a step) that were `levels[j]` versions behind. NaN: a step without tokens."""

    steps: np.ndarray
    levels: np.ndarray
    tokens: np.ndarray
    mean: np.ndarray
    max: np.ndarray

    @property
    def histogram(self) -> dict[int, int]:
        """Staleness → tokens, of the whole run."""
        return dict(
            zip(self.levels.tolist(), self.tokens.sum(axis=0).tolist(), strict=True)
        )


def staleness(events: Sequence[Event]) -> Staleness:
    """The staleness of every step's batch, per token."""
    steps = trained(events)
    counts = [Counter(e.staleness) for e in steps]
    levels = sorted({s for c in counts for s, n in c.items() if n})
    shape = (len(steps), len(levels))
    tokens = np.array([[c[s] for s in levels] for c in counts], np.int64)
    return Staleness(
        steps=np.array([e.step for e in steps], np.int64),
        levels=np.array(levels, np.int64),
        tokens=tokens.reshape(shape),
        mean=np.array([e.mean_staleness for e in steps], float),
        max=np.array([max(+c, default=NAN) for c in counts], float),
    )


# time ----------------------------------------------------------------------------------------------------------------


def step_windows(events: Sequence[Event]) -> np.ndarray:
    """A window per step: from the end of the step before (or the start of its session) to its own end.

    Windows of one session are adjacent, so a step's window holds the sync of the weights it generated with, the
    generation, the rewards and the training. Time after the last step is in no window.
    """
    out = []
    begin = NAN
    counting = {id(e) for e in trained(events)}
    for event in events:
        if isinstance(event, RunStart) or begin != begin:
            begin = event.start
        if isinstance(event, StepEvent):
            if id(event) in counting:
                out.append((min(begin, event.stop), event.stop))
            begin = max(begin, event.stop)
    return np.array(out, float).reshape(-1, 2)


def phase_spans(events: Sequence[Event]) -> dict[str, np.ndarray]:
    """The intervals of each phase."""
    return {name: spans(only(events, kind)) for name, kind in PHASES.items()}


def step_times(events: Sequence[Event]) -> TimeSplit:
    """How the time of each step was spent; phases overlap in an asynchronous run."""
    return split_time(phase_spans(events), step_windows(events))


def run_times(events: Sequence[Event]) -> TimeSplit:
    """How the time of the whole run was spent: one window per session."""
    return split_time(phase_spans(events), sessions(events))


def utilisation(events: Sequence[Event]) -> dict[str, float]:
    """Share of the run's time in which each actor did useful work: generated, scored, rewarded or trained.

    Pauses and syncs do not count. "pool" is the mean over the replicas that generated anything.
    """
    frames = union(sessions(events))
    total = measure(frames)
    if not total:
        return {}
    work: dict[str, list[Event]] = {}
    for event in only(events, RolloutEvent, ScoreEvent, RewardEvent, StepEvent):
        work.setdefault(event.actor, []).append(event)
    pauses = only(events, PauseEvent)
    replicas = {e.actor for e in only(events, RolloutEvent)}
    out = {}
    for actor, found in sorted(work.items()):
        of_it = [p for p in pauses if not p.replicas or actor in p.replicas]
        stood = spans(of_it if actor in replicas else ())
        worked = split_time({"work": spans(found), "stood": stood}, frames).together
        out[actor] = float(worked.get(("work",), np.zeros(1)).sum()) / total
    if replicas:
        out["pool"] = float(np.mean([out[r] for r in sorted(replicas)]))
    return out


# throughput ----------------------------------------------------------------------------------------------------------


def throughput(events: Sequence[Event]) -> dict[str, float]:
    """Means over the run's time. `sync_gb_per_s` counts only the time of syncs. NaN if there is nothing to measure."""
    total = measure(sessions(events))
    rollouts = only(events, RolloutEvent)
    steps = only(events, StepEvent)
    syncs = only(events, SyncEvent)
    generated = sum(e.tokens for e in rollouts)
    over = lambda amount, seconds: amount / seconds if seconds > 0 else NAN
    return {
        "tokens_per_s": over(generated, total),
        "tokens_per_s_generating": over(generated, measure(spans(rollouts))),
        "samples_per_s": over(sum(e.samples for e in rollouts), total),
        "trained_tokens_per_s": over(sum(e.tokens for e in steps), total),
        "steps_per_s": over(len(steps), total),
        "sync_gb_per_s": over(
            sum(e.bytes for e in syncs), 1e9 * sum(e.seconds for e in syncs)
        ),
    }


@dataclass(frozen=True)
class RatesOverTime:
    """Throughput over time: per bin between the edges, in seconds since the run began."""

    edges: np.ndarray
    generated_tokens: np.ndarray
    trained_tokens: np.ndarray
    samples: np.ndarray


def rates(events: Sequence[Event], bins: int = 100) -> RatesOverTime:
    """Tokens and samples per second in equal bins; an event's amount is spread evenly over its duration."""
    frame = sessions(events)
    frame = frame[np.isfinite(frame).all(axis=1)]
    low = float(frame[:, 0].min()) if len(frame) else 0.0
    high = float(frame[:, 1].max()) if len(frame) else 0.0
    edges = np.linspace(low, high if high > low else low + 1.0, bins + 1)
    rollouts = only(events, RolloutEvent)
    steps = only(events, StepEvent)
    return RatesOverTime(
        edges,
        rate(spans(rollouts), [e.tokens for e in rollouts], edges),
        rate(spans(steps), [e.tokens for e in steps], edges),
        rate(spans(rollouts), [e.samples for e in rollouts], edges),
    )


# health and tables ---------------------------------------------------------------------------------------------------


def gap_alarm(events: Iterable[Event], given: float | None = None) -> float:
    """The threshold: `given`, else the run's own, else the default."""
    if given is not None:
        return given
    own = [e.gap_alarm for e in only(events, RunStart) if e.gap_alarm == e.gap_alarm]
    return own[-1] if own else GAP_ALARM


def alarms(events: Sequence[Event], threshold: float | None = None) -> list[StepEvent]:
    """Steps whose `logprob_gap` is over the threshold. NaN is not an alarm: that step had no token to measure it on."""
    limit = gap_alarm(events, threshold)
    return [e for e in trained(events) if e.logprob_gap > limit]


WHOLE = ("step", "version", "samples", "tokens", "dropped", "regenerated")
SCALARS = (
    "step",
    "version",
    "start",
    "stop",
    "loss",
    "reward_mean",
    "reward_std",
    "kl",
    "entropy",
    "clip_fraction",
    "effective_samples",
    "masked_fraction",
    "logprob_gap",
    "logprob_gap_mean",
    "grad_norm",
    "learning_rate",
    "skipped",
    "samples",
    "tokens",
    "dropped",
    "regenerated",
)


def step_table(events: Sequence[Event]) -> dict[str, np.ndarray]:
    """One row per step: what it recorded, its staleness, and the seconds of each phase in its window.

    With a mixture of experts, `expert_max`, `expert_min` and `expert_entropy` are those of its most uneven layers; the
    step's event has them for each layer.

    `generate_s` and the like include overlaps; `overlap_s` is the time in which two or more phases ran, `idle_s` that
    in which none did, `window_s` the total. Idle is the time between phases: threads wake up, samples become arrays, a
    probe of the engines outlasts the training, a pool falls asleep or wakes (see jvlab/trainer/_loop.py). Metrics and
    records of a step are not in it, on-policy: the engines generate again by then.
    """
    steps = trained(events)
    column = lambda values, kind: np.array(list(values), kind)
    kinds: dict[str, Any] = {"skipped": bool} | dict.fromkeys(WHOLE, np.int64)
    table = {
        name: column((getattr(e, name) for e in steps), kinds.get(name, float))
        for name in SCALARS
    }
    for key in sorted({k for e in steps for k in e.ratios}):
        table[f"ratio_{key}"] = column((e.ratios.get(key, NAN) for e in steps), float)
    if any(e.experts for e in steps):
        for key in ("max", "min", "entropy"):
            table[f"expert_{key}"] = column(
                (e.expert_extremes[key] for e in steps), float
            )
    stale = staleness(events)
    split = step_times(events)
    return {
        **table,
        "staleness_mean": stale.mean,
        "staleness_max": stale.max,
        **{f"{name}_s": seconds for name, seconds in split.busy.items()},
        "overlap_s": split.overlap,
        "idle_s": split.idle,
        "window_s": split.windows[:, 1] - split.windows[:, 0],
    }


def ratios_by_staleness(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    """Importance ratios per staleness over the run: means of each statistic over steps; extremes of `min` and `max`."""
    found: dict[int, dict[str, list[float]]] = {}
    for event in trained(list(events)):
        for level, stats in event.ratios_by_staleness.items():
            for key, value in stats.items():
                found.setdefault(level, {}).setdefault(key, []).append(value)
    fold = {"max": np.nanmax, "min": np.nanmin}
    return {
        level: {
            key: float(fold.get(key, np.nanmean)(values))
            if np.isfinite(values).any()
            else NAN
            for key, values in stats.items()
        }
        for level, stats in sorted(found.items())
    }


def acceptance(events: Iterable[Event]) -> dict[int, float]:
    """Version → share of the tokens drafted for it that it accepted; empty without speculative decoding."""
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for event in only(events, DraftEvent):
        drafted[event.version] += event.drafted
        accepted[event.version] += event.accepted
    return {v: accepted[v] / n for v, n in sorted(drafted.items()) if n}


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """The run's summary statistics."""
    steps = trained(events)
    once = counted(events)
    made = lambda found: sum(e.samples for e in only(found, RolloutEvent))
    syncs = only(events, SyncEvent)
    stale = staleness(events)
    times = run_times(events)
    starts = only(events, RunStart)
    last_end = only(events, RunStart, RunStop)[-1:]
    gaps = [e.logprob_gap for e in steps if e.logprob_gap == e.logprob_gap]
    pauses = [e.pause for e in syncs if e.pause == e.pause]
    return {
        "run": starts[0].run if starts else "",
        "ended": next((e.reason for e in only(last_end, RunStop)), None),
        "sessions": len(starts),
        "seconds": measure(sessions(events)),
        "steps": len(steps),
        "skipped": sum(e.skipped for e in steps),
        "reward_first": steps[0].reward_mean if steps else NAN,
        "reward_last": steps[-1].reward_mean if steps else NAN,
        "rollouts": len(only(once, RolloutEvent)),
        "samples": made(once),
        # generated before a resume and again after it; counted once above
        "replayed": made(events) - made(once),
        "tokens": sum(e.tokens for e in only(once, RolloutEvent)),
        "reward_failures": sum(
            e.failures + e.timeouts for e in only(once, RewardEvent)
        ),
        "syncs": len(syncs),
        "syncs_verified": sum(e.verified is True for e in syncs),
        "sync_bytes": sum(e.bytes for e in syncs),
        "sync_pause_mean_s": float(np.mean(pauses)) if pauses else NAN,
        "acceptance": acceptance(events),
        "max_staleness": int(stale.levels.max(initial=0)),
        "mean_staleness": mean_of(stale.histogram),
        "dropped": sum(e.dropped for e in steps),
        "regenerated": sum(e.regenerated for e in steps),
        "logprob_gap": max(gaps, default=NAN),
        "gap_alarm": gap_alarm(events),
        "alarms": len(alarms(events)),
        "faults": dict(Counter(e.fault for e in only(events, FaultEvent))),
        **throughput(events),
        "utilisation": utilisation(events),
        "time": {name: float(s.sum()) for name, s in times.busy.items()}
        | {"overlap": float(times.overlap.sum()), "idle": float(times.idle.sum())},
    }
