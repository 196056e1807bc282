"""What this process asked of a lab's pools, in memory: the timeline of a lab without a run."""

from __future__ import annotations

import time
import weakref
from collections import Counter, defaultdict, deque
from typing import Any

from jvlab.record._events import Event, RolloutEvent, RunStart, SyncEvent, clock
from jvlab.record._record import Record

KEPT = 2000  # events of a lab; older ones are dropped
# lab client -> its calls
_asked: weakref.WeakKeyDictionary[Any, deque[Event]] = weakref.WeakKeyDictionary()
# lab client -> folders of its runs, for `lab.timeline()`; here, where a lab finds them without importing JAX
runs: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def note(client: Any, *events: Event) -> None:
    """Keep events of a lab, found by its client."""
    _asked.setdefault(client, deque(maxlen=KEPT)).extend(events)


def calls_of(client: Any) -> Record:
    """The calls as a record, empty if there were none; times count from the first of them."""
    events = sorted(_asked.get(client, ()), key=lambda e: e.start)
    if not events:
        return Record.of(())
    at = events[0].start
    return Record.of(
        [
            RunStart(
                run="this session", actor="trainer", start=at, stop=at, wall=time.time()
            ),
            *events,
        ]
    )


class RolloutTally:
    """Counts the samples of one call as they arrive; holds none of them."""

    def __init__(self) -> None:
        self.start = clock()
        self._last: dict[str, float] = {}  # replica -> when its last sample came
        self._counts: defaultdict[str, Any] = defaultdict(Counter)
        self._versions: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._finish: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, sample: Any) -> None:
        """Count one sample."""
        actor = sample.replica or "pool"
        own = sample.versions[sample.own].tolist()
        self._last[actor] = clock()
        self._versions[actor].update(own)
        self._finish[actor][sample.finish_reason] += 1
        self._counts[actor].update(
            samples=1,
            tokens=len(own),
            prompt_tokens=len(sample.prompt_token_ids),
            cached_tokens=sample.cached_tokens,
            retried=sample.retried,
        )

    def events(self) -> list[RolloutEvent]:
        """One per replica that generated."""
        return [
            RolloutEvent(
                actor=actor,
                start=self.start,
                stop=stop,
                versions=dict(self._versions[actor]),
                finish=dict(self._finish[actor]),
                **self._counts[actor],
            )
            for actor, stop in self._last.items()
        ]


def sync_event(report: Any, start: float, stop: float) -> SyncEvent:
    """A committed sync, from its report."""
    return SyncEvent(
        start=start,
        stop=stop,
        version=report.version,
        bytes=report.bytes,
        phases=dict(report.seconds),
        verified=report.verified if report.verify == "full" else None,
        pause=report.seconds.get("pause", float("nan")),
        replicas=tuple(o.replica for o in report.outcomes),
        mode=report.mode,
        transport=report.transport,
        meaning=report.meaning,
    )
