"""A run's record as rows of float32: read on from where the last look ended, so that a look costs what is new."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from jvlab.record._events import RolloutEvent, RunStart, StepEvent
from jvlab.record._intervals import split_time
from jvlab.record._metrics import GAP_ALARM, phase_spans
from jvlab.record._record import Record

COLUMNS = ("step", "reward", "reward_std", "gap", "tokens_per_s", "stale_mean", "stale_max")
SMOOTH = 5  # steps over which tokens per second are taken
RECENT = 20  # steps over which the time split is taken
SEEN = 0.003  # a smaller share of the time than this is not worth a colour
SPLIT = ("generate", "reward", "score", "train", "sync", "idle")


@dataclass
class RunFeed:
    """`read()` takes in what was recorded since the last call and says from which row on something is new."""

    record: Record
    rows: np.ndarray = field(default_factory=lambda: np.empty((0, len(COLUMNS)), np.float32))
    histogram: Counter[int] = field(default_factory=Counter)  # staleness → tokens trained on
    alarm: float = GAP_ALARM
    faults: int = 0
    _fresh: list[tuple[float, ...]] = field(default_factory=list)
    _seen: int = 0
    _begin: float = math.nan  # where the window of the next step begins
    _tokens: int = 0  # generated since then
    _made: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SMOOTH))  # tokens, seconds of steps
    # of the last steps: where each is in the events, and from when to when its window goes
    _marks: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=RECENT + 1))

    def read(self) -> int | None:
        """The first row that is new or gone, or None if all is as it was."""
        events = self.record.events()
        had = first = len(self.rows)
        for number, event in enumerate(events[self._seen :], self._seen):
            match event:
                case RunStart():
                    first = min(first, self._session(event))
                case RolloutEvent():
                    self._tokens += event.tokens
                case StepEvent():
                    self._fresh.append(self._row(event, number))
                case _ if event.kind == "fault":
                    self.faults += 1
        self._seen = len(events)
        self._settle()
        return first if first < had or len(self.rows) > had else None

    def _settle(self) -> None:
        if self._fresh:
            self.rows = np.concatenate([self.rows, np.array(self._fresh, np.float32)])
            self._fresh = []

    def _session(self, event: RunStart) -> int:
        """A session began; when it resumed, the steps that it makes again count no more. The first row that is gone."""
        if event.gap_alarm == event.gap_alarm:
            self.alarm = event.gap_alarm
        self._begin, self._tokens = event.start, 0
        self._settle()
        if event.resumed >= 0:
            self.rows = self.rows[self.rows[:, 0] < event.resumed]
        return len(self.rows)

    def _row(self, event: StepEvent, number: int) -> tuple[float, ...]:
        begin = self._begin if self._begin == self._begin else event.start
        # groups end in clumps: one step may see none of them, the next one two steps' worth
        self._made.append((self._tokens, event.stop - begin))
        tokens, seconds = (sum(column) for column in zip(*self._made, strict=True))
        self._marks.append((number, begin, event.stop))
        self._begin, self._tokens = max(begin, event.stop), 0
        stale = event.staleness
        self.histogram.update(stale)
        total = sum(stale.values())
        mean = sum(age * n for age, n in stale.items()) / total if total else math.nan
        return (
            event.step,
            event.reward_mean,
            event.reward_std,
            event.logprob_gap,
            tokens / seconds if seconds > 0 else math.nan,
            mean,
            max(stale, default=math.nan),
        )

    def split(self) -> dict[str, float]:
        """Seconds per step of each phase over the last steps; phases overlap where rollouts run ahead."""
        if not self._marks:
            return {}
        marks = list(self._marks)
        # what overlaps these windows was written after the step before them: an event is written when it ends
        start, marks = (marks[0][0] + 1, marks[1:]) if len(marks) > RECENT else (0, marks)
        times = split_time(phase_spans(self.record._events[start:]), [window for _, *window in marks])
        found = {name: float(busy.sum()) / len(marks) for name, busy in times.busy.items()}
        found["idle"] = float(times.idle.sum()) / len(marks)
        seen = SEEN * sum(found.values())
        return {name: found[name] for name in SPLIT if found.get(name, 0.0) > seen}
