"""A record as Chrome trace JSON: the timeline of every actor, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jvlab.record._events import Event, FaultEvent, RolloutEvent, RunStart, RunStop, StepEvent, SyncEvent, plain
from jvlab.record._intervals import lanes

PID = 1
COUNTERS = ("reward_mean", "loss", "kl", "entropy", "logprob_gap")


def trace(events: Sequence[Event]) -> dict[str, Any]:
    """The trace object. One thread per actor, or several where its events overlap, since slices must nest."""
    known = [e for e in events if e.start == e.start]
    actors: dict[str, list[Event]] = {}
    for event in known:
        actors.setdefault(event.actor or "run", []).append(event)
    out: list[dict[str, Any]] = [_meta("process_name", 0, _run_name(events))]
    thread = 0
    for actor in sorted(actors, key=_order):
        own = actors[actor]
        lane = lanes([(e.start, e.stop) for e in own])
        count = max(lane, default=0) + 1
        for i in range(count):
            out.append(_meta("thread_name", thread + i, actor if not i else f"{actor} ({i + 1})"))
            out.append(_meta("thread_sort_index", thread + i, thread + i, "sort_index"))
        out += [_slice(e, thread + at) for e, at in zip(own, lane, strict=True)]
        thread += count
    for event in known:
        if isinstance(event, StepEvent):
            out += _counters(event)
    return {"traceEvents": out, "displayTimeUnit": "ms", "otherData": {"source": "jvlab record"}}


def write(events: Sequence[Event], path: str | os.PathLike[str]) -> str:
    """Write the trace to a file and return its path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(trace(events), allow_nan=False), encoding="utf-8")
    return str(target)


def _order(actor: str) -> tuple[int, str]:
    return (0 if actor == "trainer" else 1 if actor.startswith("pool") else 2, actor)


def _run_name(events: Sequence[Event]) -> str:
    return next((e.run for e in events if isinstance(e, RunStart)), "run")


def _meta(what: str, thread: int, value: object, key: str = "name") -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": PID, "tid": thread, "args": {key: value}}


def _slice(event: Event, thread: int) -> dict[str, Any]:
    fields = {k: v for k, v in event.to_json().items() if k not in ("kind", "actor", "start", "stop")}
    base = {"name": _name(event), "cat": event.kind, "pid": PID, "tid": thread, "ts": event.start * 1e6, "args": fields}
    if isinstance(event, (FaultEvent, RunStart, RunStop)) or not event.seconds > 0:
        return base | {"ph": "i", "s": "p" if isinstance(event, FaultEvent) else "t"}
    return base | {"ph": "X", "dur": event.seconds * 1e6}


def _name(event: Event) -> str:
    match event:
        case StepEvent():
            return f"step {event.step}"
        case SyncEvent():
            return f"sync version {event.version}"
        case RolloutEvent():
            return "generate, version " + (", ".join(str(v) for v in sorted(event.versions)) or "unknown")
        case FaultEvent():
            return event.fault
        case _:
            return event.kind.replace("_", " ")


def _counters(event: StepEvent) -> list[dict[str, Any]]:
    values = {name: plain(getattr(event, name)) for name in COUNTERS}
    total = sum(event.versions.values())
    if total:
        values["staleness"] = sum(level * n for level, n in event.staleness.items()) / total
    return [
        {"name": name, "ph": "C", "pid": PID, "tid": 0, "ts": event.stop * 1e6, "args": {name: value}}
        for name, value in values.items()
        if not isinstance(value, str)  # a counter must be a finite number
    ]
