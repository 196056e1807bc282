"""`RunStatus`: where a run stands, of a run that works or read from its record."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._units import how_many
from jvlab.record import _metrics
from jvlab.record._events import (
    EvaluationEvent,
    RolloutEvent,
    RunStart,
    RunStop,
    StepEvent,
    only,
)
from jvlab.record._metrics import GAP_ALARM, phase_spans, split_time
from jvlab.record._record import Record

if TYPE_CHECKING:
    from jvlab.record._samples import SampleRecord


# A run's record as rows of float32, read incrementally.

COLUMNS = (
    *("step", "reward", "reward_std", "gap", "tokens_per_s", "stale_mean", "stale_max"),
    *("loss", "entropy", "kl", "clip", "length", "seconds"),
)
SMOOTH = 5  # steps over which tokens per second are averaged
RECENT = 20  # steps over which the time split is averaged
MIN_SHARE = 0.003  # phases with a smaller share of the time are not shown
SPLIT = ("generate", "reward", "score", "train", "sync", "idle")


@dataclass
class RunFeed:
    """`read()` reads what was recorded since the last call and returns the first row that changed."""

    record: Record
    rows: np.ndarray = field(
        default_factory=lambda: np.empty((0, len(COLUMNS)), np.float32)
    )
    # staleness → tokens trained on
    histogram: Counter[int] = field(default_factory=Counter)
    alarm: float = GAP_ALARM
    faults: int = 0
    rollouts: int = 0  # groups that were generated
    # (steps done, mean reward of held-out prompts)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    compile_seconds: float = 0.0  # of the steps that compiled something
    _new_rows: list[tuple[float, ...]] = field(default_factory=list)
    _events_read: int = 0
    _begin: float = math.nan  # start of the next step's time window
    _tokens: int = 0  # generated since then
    # (tokens, seconds) per step
    _rates: deque[tuple[int, float]] = field(
        default_factory=lambda: deque(maxlen=SMOOTH)
    )
    # of the last steps: index among the events, start and stop of the time window
    _windows: deque[tuple[int, float, float]] = field(
        default_factory=lambda: deque(maxlen=RECENT + 1)
    )

    def read(self) -> int | None:
        """The first row that is new or was removed; None if nothing changed."""
        events = self.record.events()
        had = first = len(self.rows)
        for number, event in enumerate(events[self._events_read :], self._events_read):
            match event:
                case RunStart():
                    first = min(first, self._session(event))
                case RolloutEvent():
                    self._tokens += event.tokens
                    self.rollouts += 1
                case EvaluationEvent():
                    self.evaluations = [
                        *self.evaluations,
                        (event.step, event.reward_mean),
                    ]
                case StepEvent():
                    self._new_rows.append(self._row(event, number))
                case _ if event.kind == "fault":
                    self.faults += 1
        self._events_read = len(events)
        self._append_rows()
        return first if first < had or len(self.rows) > had else None

    def _append_rows(self) -> None:
        if self._new_rows:
            self.rows = np.concatenate(
                [self.rows, np.array(self._new_rows, np.float32)]
            )
            self._new_rows = []

    def _session(self, event: RunStart) -> int:
        """A session began; if it resumed a run, drop the steps that it repeats. Returns the first row dropped."""
        if event.gap_alarm == event.gap_alarm:
            self.alarm = event.gap_alarm
        self._begin = event.start
        self._tokens = 0
        self._append_rows()
        if event.resumed >= 0:
            self.rows = self.rows[self.rows[:, 0] < event.resumed]
            self.evaluations = [e for e in self.evaluations if e[0] < event.resumed]
        return len(self.rows)

    def _row(self, event: StepEvent, number: int) -> tuple[float, ...]:
        begin = self._begin if self._begin == self._begin else event.start
        if event.extra.get("compiled"):
            self.compile_seconds += event.seconds
        # averaged, since groups finish in bursts: none in one step, two steps' worth in the next
        self._rates.append((self._tokens, event.stop - begin))
        tokens, seconds = (sum(column) for column in zip(*self._rates, strict=True))
        self._windows.append((number, begin, event.stop))
        self._begin = max(begin, event.stop)
        self._tokens = 0
        stale = event.staleness
        self.histogram.update(stale)
        return (
            event.step,
            event.reward_mean,
            event.reward_std,
            event.logprob_gap,
            tokens / seconds if seconds > 0 else math.nan,
            event.mean_staleness,
            max(stale, default=math.nan),
            event.loss,
            event.entropy,
            event.kl,
            event.clip_fraction,
            event.tokens / event.samples if event.samples else math.nan,
            event.stop - begin,
        )

    def last(self, name: str) -> float:
        """The newest value of a column; NaN before the first step."""
        return float(self.rows[-1, COLUMNS.index(name)]) if len(self.rows) else math.nan

    def split(self) -> dict[str, float]:
        """Seconds per step of each phase over the last steps; phases overlap where rollouts run ahead."""
        if not self._windows:
            return {}
        windows = list(self._windows)
        # events are written when they end, so those that overlap the windows come after the step before them
        start, windows = (
            (windows[0][0] + 1, windows[1:]) if len(windows) > RECENT else (0, windows)
        )
        times = split_time(
            phase_spans(self.record.events()[start:]),
            [window for _, *window in windows],
        )
        found = {
            name: float(busy.sum()) / len(windows) for name, busy in times.busy.items()
        }
        found["idle"] = float(times.idle.sum()) / len(windows)
        threshold = MIN_SHARE * sum(found.values())
        return {name: found[name] for name in SPLIT if found.get(name, 0.0) > threshold}


# ----------------------------------------------------------------------------------------------------

INTERRUPTED = "interrupted"  # the writing process ended before the run did


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A snapshot of a run."""

    # "starting", "running", "paused", "stopping", "finished", "stopped", "failed" or "interrupted"
    state: str
    step: int  # steps done
    steps: int
    version: int
    reward: float = math.nan  # mean of the last step; NaN before the first
    logprob_gap: float = math.nan  # largest so far
    max_staleness: int = 0  # the bound
    flying: int = 0  # groups being generated or rewarded
    ready: int = 0  # groups waiting for the trainer
    dropped: int = 0  # groups that were too stale
    regenerated: int = 0
    lost: int = 0  # groups that were rejected
    seconds: float = 0.0
    error: str = ""
    # of the last step's importance weights: 1 if all tokens weigh the same
    effective_samples: float = math.nan
    # share of the last step's tokens that the importance mask removed
    masked_fraction: float = math.nan
    # `expert_extremes` of the last step; {} if it has none
    experts: Mapping[str, float] = field(default_factory=dict)
    # of the last step's samples: the one with the highest reward
    best: SampleRecord | None = None
    # the one with the lowest; the same sample if all rewards are equal
    worst: SampleRecord | None = None
    waiting: str = ""  # which function of the user's has been waited for, and how long


def extremes(
    samples: Iterable[SampleRecord],
) -> tuple[SampleRecord, SampleRecord] | None:
    """The samples with the highest and the lowest reward, the first of equals; None if none has a reward."""
    found = [s for s in samples if math.isfinite(s.reward)]
    if not found:
        return None
    return max(found, key=lambda s: s.reward), min(found, key=lambda s: s.reward)


def measured(last: StepEvent | None) -> dict[str, Any]:
    """What a status tells of the last step."""
    if last is None:
        return {}
    return {
        "reward": last.reward_mean,
        "effective_samples": last.effective_samples,
        "masked_fraction": last.masked_fraction,
        "experts": last.expert_extremes if last.experts else {},
    }


def status_of(record: Record, samples: bool = True) -> RunStatus:
    """The status of a run as its record tells it; `samples`: look for the best and the worst among the kept ones."""
    # before reading: a writer that ends meanwhile has said how
    running = record.running
    events = record.events()
    start = next(iter(reversed(only(events, RunStart))), None)
    last_word = only(events, RunStart, RunStop)[-1:]
    ended = next(iter(only(last_word, RunStop)), None)
    state = ended.reason if ended else "running" if running else INTERRUPTED
    trained = _metrics.trained(events)
    config = start.config if start else {}
    last = trained[-1] if trained else None
    done = last.step + 1 if last else 0
    error = ended.text if ended else ""
    if state == INTERRUPTED and not error:
        when = f"after {how_many(done, 'step')}" if last else "before its first step"
        error = f"its process ended {when}"
    gaps = [e.logprob_gap for e in trained if e.logprob_gap == e.logprob_gap]
    kept = record.samples(last.step) if samples and last else ()
    best, worst = extremes(kept) or (None, None)
    return RunStatus(
        state=state,
        step=done,
        steps=int(config.get("steps") or done),
        version=last.version + 1 if last else 0,
        logprob_gap=max(gaps, default=math.nan),
        max_staleness=int(config.get("max_staleness") or 0),
        dropped=sum(e.dropped for e in trained),
        regenerated=sum(e.regenerated for e in trained),
        seconds=max((e.stop for e in events if e.stop == e.stop), default=0.0),
        error=error,
        best=best,
        worst=worst,
        **measured(last),
    )
