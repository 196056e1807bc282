"""`RunStatus`: where a run stands, of a run that works or read from its record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jvlab._units import how_many
from jvlab.record import _metrics
from jvlab.record._events import RunStart, RunStop

INTERRUPTED = "interrupted"  # the writing process ended before the run did

if TYPE_CHECKING:
    from jvlab.record._record import Record
    from jvlab.record._samples import SampleRecord


@dataclass(frozen=True)
class RunStatus:
    """A snapshot of a run."""

    state: str  # "starting", "running", "paused", "stopping", "finished", "stopped", "failed" or "interrupted"
    step: int  # steps done
    steps: int
    version: int
    reward: float  # mean of the last step; NaN before the first
    logprob_gap: float  # largest so far
    max_staleness: int  # the bound
    flying: int = 0  # groups being generated or rewarded
    ready: int = 0  # groups waiting for the trainer
    dropped: int = 0  # groups that were too stale
    regenerated: int = 0
    lost: int = 0  # groups that were rejected
    seconds: float = 0.0
    error: str = ""
    effective_samples: float = math.nan  # of the last step's importance weights: 1 if all tokens weigh the same
    masked_fraction: float = math.nan  # share of the last step's tokens that the importance mask removed
    experts: Mapping[str, float] = field(default_factory=dict)  # `expert_extremes` of the last step; {} if it has none
    best: SampleRecord | None = None  # of the last step's samples: the one with the highest reward
    worst: SampleRecord | None = None  # the one with the lowest; the same sample if all rewards are equal
    waiting: str = ""  # which function of the user's has been waited for, and how long


def extremes(samples: Iterable[SampleRecord]) -> tuple[SampleRecord, SampleRecord] | None:
    """The samples with the highest and the lowest reward, the first of equals; None if none has a reward."""
    found = [s for s in samples if math.isfinite(s.reward)]
    if not found:
        return None
    return max(found, key=lambda s: s.reward), min(found, key=lambda s: s.reward)


def status_of(record: Record, samples: bool = True) -> RunStatus:
    """The status of a run as its record tells it; `samples`: look for the best and the worst among the kept ones."""
    running = record.running  # before reading: a writer that ends meanwhile has said how
    events = record.events()
    start = next((e for e in reversed(events) if isinstance(e, RunStart)), None)
    stop = next((e for e in reversed(events) if isinstance(e, RunStart | RunStop)), None)
    ended = stop if isinstance(stop, RunStop) else None
    state = ended.reason if ended else "running" if running else INTERRUPTED
    trained = _metrics.trained(events)
    config = start.config if start else {}
    last = trained[-1] if trained else None
    error = ended.text if ended else ""
    if state == INTERRUPTED and not error:
        done = how_many(last.step + 1, "step") if last else "its first step"
        error = f"its process ended after {done}" if last else f"its process ended before {done}"
    gaps = [e.logprob_gap for e in trained if e.logprob_gap == e.logprob_gap]
    status = RunStatus(
        state,
        last.step + 1 if last else 0,
        int(config.get("steps") or (last.step + 1 if last else 0)),
        last.version + 1 if last else 0,
        last.reward_mean if last else math.nan,
        max(gaps, default=math.nan),
        int(config.get("max_staleness") or 0),
        dropped=sum(e.dropped for e in trained),
        regenerated=sum(e.regenerated for e in trained),
        seconds=max((e.stop for e in events if e.stop == e.stop), default=0.0),
        error=error,
    )
    if last is None:
        return status
    found = extremes(record.samples(last.step)) if samples else None
    return replace(
        status,
        effective_samples=last.effective_samples,
        masked_fraction=last.masked_fraction,
        experts=last.expert_extremes if last.experts else {},
        **({"best": found[0], "worst": found[1]} if found else {}),
    )
