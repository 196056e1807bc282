"""`Record`: a run folder as tables, during the run or after it."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab import _faces
from jvlab._deadline import check_timeout
from jvlab._errors import ConfigError
from jvlab._units import how_many
from jvlab.record import _export, _metrics
from jvlab.record._events import (
    KINDS,
    NAN,
    Event,
    RunStart,
    StepEvent,
    event_from_json,
    noted,
    only,
)
from jvlab.record._log import EVENTS, SAMPLES, LogReader, is_locked
from jvlab.record._samples import SampleRecord, batch_of, current, sample_from_json

if TYPE_CHECKING:
    import pandas

    from jvlab.record._batch import RolloutBatch


# `Record.compare`: two runs side by side, in numbers and in what was set differently.

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
        columns = {
            name: np.array([pair[j] for pair in self.numbers.values()])
            for j, name in enumerate(self.names)
        }
        return _export.to_pandas(columns).set_axis(list(self.numbers), axis=0)

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, one, other: numbers, then settings, as text."""
        out = [
            (n, _text(a, True), _text(b, True)) for n, (a, b) in self.numbers.items()
        ]
        return out + [(n, repr(a), repr(b)) for n, (a, b) in self.settings.items()]

    def __repr__(self) -> str:
        return "\n".join(_export.aligned([("", *self.names), *self.rows()], left=(0,)))

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


def compare(one: Record, other: Record) -> Comparison:
    """The comparison of two records."""
    pair = (one, other)
    summaries = [record.summary() for record in pair]
    rewards = [record.steps()["reward_mean"] for record in pair]
    common = min(map(len, rewards))
    parts = {
        "reward, first step": slice(1),
        f"reward, last {_LAST} steps": slice(-_LAST, None),
        f"reward, same {common} steps": slice(common),
    }
    numbers = {row: [_mean(r[part]) for r in rewards] for row, part in parts.items()}
    for row, key in _SUMMARY.items():
        numbers[row] = [float(s[key]) for s in summaries]
    numbers["faults"] = [float(sum(s["faults"].values())) for s in summaries]
    starts = [only(r.events(), RunStart)[:1] for r in pair]
    configs = [dict(found[0].config) if found else {} for found in starts]
    keys = dict.fromkeys([*configs[0], *configs[1]])
    settings = {k: [config.get(k) for config in configs] for k in keys}
    differ = {k: (a, b) for k, (a, b) in settings.items() if a != b}
    names = _names(one, other, [s["run"] for s in summaries])
    return Comparison(names, {k: (a, b) for k, (a, b) in numbers.items()}, differ)


def _names(one: Record, other: Record, runs: list[str]) -> tuple[str, str]:
    """What tells them apart: the runs' names, or their folders', or which is which."""
    folders = [str(r.folder.name) if r.folder else "" for r in (one, other)]
    for names in (runs, folders):
        if all(names) and names[0] != names[1]:
            return names[0], names[1]
    return "this", "other"


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


# ----------------------------------------------------------------------------------------------------


class _WallClock:
    """Shifts events of every session to seconds since the first start, never before the end of the previous session."""

    def __init__(self) -> None:
        self._wall = NAN
        self._shift = 0.0
        self._reach = 0.0
        self._known = False

    def shift(self, fields: dict[str, Any]) -> dict[str, Any]:
        names = ("start", "stop", "wall")
        start, stop, wall = (_number(fields.get(name)) for name in names)
        if start == start:
            if fields.get("kind") == RunStart.tag and wall == wall:
                self._wall = wall if self._wall != self._wall else self._wall
                self._shift = max(wall - self._wall, self._reach) - start
                self._known = True
            elif not self._known:  # a record without a RunStart
                self._shift = -start
                self._known = True
        if stop == stop:
            self._reach = max(self._reach, stop + self._shift)
        out = dict(fields)
        for name, time_ in (("start", start), ("stop", stop)):
            if name in fields:
                out[name] = time_ + self._shift if time_ == time_ else "NaN"
        return out


def _number(value: object) -> float:
    """A finite time; NaN for anything else."""
    return (
        float(value)
        if isinstance(value, (int, float)) and -1e15 < value < 1e15
        else NAN
    )


class Record:
    """The record of a run. Every call also reads what was appended since; times are seconds since the start.

    `Record.open(folder)` reads a run folder, `Record.of(events)` holds events in memory.

    >>> jv.Record.of([])
    Record('': 0 steps, 0 samples, 0 syncs, not ended)
    """

    def __init__(self, folder: Path | None, events: Iterable[Event] = ()) -> None:
        if not (folder is None or isinstance(folder, Path)):
            raise ConfigError(
                f"a record is not made from {type(folder).__name__}",
                remedy="jv.Record.open(folder), or run.record",
            )
        self.folder = folder
        self._events: list[Event] = []
        self._clock, self._lock = _WallClock(), threading.Lock()
        self._log = LogReader(folder / EVENTS) if folder else None
        self._damaged_samples = 0
        for event in events:
            self._events.append(event_from_json(self._clock.shift(event.to_json())))

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Record:
        """Read a run folder; the run may still be active."""
        if not isinstance(folder, (str, os.PathLike)):
            raise ConfigError(
                f"folder is {type(folder).__name__}",
                remedy="a run, its record, or the path of its folder",
            )
        path = Path(folder)
        if not (path / EVENTS).is_file():
            raise ConfigError(
                f"{path} holds no record: there is no {EVENTS}",
                remedy="pass the folder of a run, for instance runs/<name>; a run writes it when it starts",
                folder=str(path),
            )
        return cls(path)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Record:
        """A record in memory."""
        return cls(None, events)

    def _read(self) -> list[Event]:
        with self._lock:
            if self._log is not None:
                self._events += [
                    event_from_json(self._clock.shift(fields))
                    for fields in self._log.read()
                ]
            return list(self._events)

    def events(self, kind: str | None = None) -> list[Event]:
        """All events in the order they were written, or those of one kind: "rollout", "step", "sync", ..."""
        events = self._read()
        if kind is None:
            return events
        found = [e for e in events if e.kind == kind]
        if not found and kind not in KINDS and kind not in {e.kind for e in events}:
            raise ConfigError(
                f"no events of kind {kind!r}",
                remedy=f"one of {', '.join(KINDS)}",
                kind=kind,
            )
        return found

    def steps(self) -> dict[str, np.ndarray]:
        """One row per optimiser step, as numpy columns."""
        return _metrics.step_table(self._read())

    def samples(
        self, step: int | None = None, group: int | None = None
    ) -> list[SampleRecord]:
        """The kept samples with their tokens, of all steps or of one; empty if the run kept none.

        Of a step that was repeated after a resume, only the later ones.
        """
        wanted = lambda s: (
            (step is None or s.step == step) and (group is None or s.group == group)
        )
        return list(filter(wanted, self.iter_samples()))

    def batch(self, step: int | None = None, model: str = "") -> RolloutBatch:
        """The kept samples with their rewards as a `RolloutBatch`, for the rollout viewer.

        step     one step only; default: all steps, with each group of a step as one prompt
        model    the model's folder, whose tokenizer shows where tokens begin; without it their ids are shown
        """
        return batch_of(self.samples(step), model)

    def iter_samples(self) -> Iterator[SampleRecord]:
        """The kept samples one by one, so that they need not fit in memory. After a resume: see `samples`."""
        if self.folder is None:
            return
        resumed = [e.resumed for e in only(self._read(), RunStart)]
        yield from (
            self._all_samples()
            if len(resumed) < 2
            else current(self._all_samples, resumed)
        )

    def _all_samples(self) -> Iterator[SampleRecord]:
        """Every sample in the file; unreadable ones are counted and skipped."""
        assert self.folder is not None
        log = LogReader(self.folder / SAMPLES)
        bad = 0
        for fields in log.read():
            try:
                sample = sample_from_json(fields)
            except (ConfigError, TypeError):
                bad += 1
                continue
            yield sample
        self._damaged_samples = log.damaged + bad

    def table(self, name: str = "steps") -> dict[str, np.ndarray]:
        """`steps`, `samples`, or the events of one kind as columns; nested values are JSON text, phases are columns."""
        if name == "steps":
            return self.steps()
        if name == "samples":
            return _export.event_columns(self.iter_samples(), SampleRecord)
        kind = name if name in KINDS else name.removesuffix("s")
        return _export.event_columns(self.events(kind), KINDS.get(kind, Event))

    def summary(self) -> dict[str, Any]:
        """The run in plain numbers."""
        # before reading: a writer that ends meanwhile has said how
        running = self.running
        found = _metrics.summary(self._read())
        if found["ended"] is None and self.folder is not None and not running:
            found["ended"] = "interrupted"  # its process was killed
        return {**found, "running": running, "damaged": self.damaged}

    def staleness(self) -> _metrics.Staleness:
        """How stale the tokens of each training step were."""
        return _metrics.staleness(self._read())

    def acceptance(self) -> dict[int, float]:
        """Of speculative decoding: version → share of the drafted tokens that it accepted."""
        return _metrics.acceptance(self._read())

    def alarms(self, threshold: float | None = None) -> list[StepEvent]:
        """Steps on which trainer and engine disagreed by more than the run's, or this, threshold."""
        return _metrics.alarms(self._read(), threshold)

    @property
    def damaged(self) -> int:
        """Damaged lines read so far; they are skipped."""
        return (self._log.damaged if self._log else 0) + self._damaged_samples

    @property
    def running(self) -> bool:
        """Whether a live process is writing this record."""
        return self.folder is not None and is_locked(self.folder)

    @property
    def started(self) -> float:
        """Unix time of the first start; NaN if the record does not say."""
        return next((e.wall for e in only(self._read(), RunStart)), NAN)

    def follow(
        self, *, poll: float = 0.2, timeout: float | None = None
    ) -> Iterator[Event]:
        """Events as they arrive, from the first. Stops when the run has ended or its process died, or after `timeout`
        seconds without a new event.
        """
        limit = check_timeout(timeout)
        return self._follow(poll, limit)

    def _follow(self, poll: float, limit: float) -> Iterator[Event]:
        seen = 0
        quiet = time.monotonic()
        while True:
            # checked before reading, so that a dying writer's last events are read
            writing = self.running
            fresh = self._read()[seen:]
            yield from fresh
            seen += len(fresh)
            if fresh:
                quiet = time.monotonic()
                continue
            if not writing or time.monotonic() - quiet >= limit:
                return
            time.sleep(poll)

    def panel(self, compare: Any = None, model: str = "") -> Any:
        """Show the run's dashboard: curves, smoothing, the best and the worst sample of its last step.

        compare    another record or run, drawn behind this one's curves
        model      the model's folder, whose tokenizer decodes prompts that were chats or tokens

        Follows a run that another process works on. Returns the panel; None where no widget can be shown.
        """
        return _faces.draw(self, "panel", compare, model)

    def compare(self, other: Any) -> Comparison:
        """This run beside another one (a record, a run, or its folder): rewards, speed, and the settings that differ.

        `panel(compare=other)` draws the curves of both.
        """

        found: Any = (
            other if isinstance(other, Record) else getattr(other, "record", other)
        )
        return compare(self, found if isinstance(found, Record) else Record.open(found))

    def to_pandas(self, table: str = "steps") -> pandas.DataFrame:
        """A table as a pandas DataFrame; see `table`."""
        return _export.to_pandas(self.table(table))

    def to_parquet(self, path: str | os.PathLike[str], table: str = "steps") -> str:
        """Write a table as a Parquet file and return its path; needs pyarrow."""
        return _export.to_parquet(self.table(table), path)

    def to_csv(self, path: str | os.PathLike[str], table: str = "steps") -> str:
        """Write a table as a CSV file and return its path; needs nothing."""
        return _export.to_csv(self.table(table), path)

    def to_perfetto(self, path: str | os.PathLike[str]) -> str:
        """Write the timeline as Chrome trace JSON, for ui.perfetto.dev or chrome://tracing, and return its path."""
        target = _export.to_be_written(path)
        trace = json.dumps(_export.trace(self._read()), allow_nan=False)
        target.write_text(trace, encoding="utf-8")
        return str(target)

    def to_tensorboard(self, folder: str | os.PathLike[str]) -> str:
        """Write the steps as TensorBoard scalars and return the folder; needs tensorboardX or torch and tensorboard."""
        return _export.to_tensorboard(self._read(), self.started, folder)

    def to_wandb(self, **init: Any) -> None:
        """Log the steps to Weights & Biases; `init` goes to wandb.init."""
        _export.to_wandb(self._read(), self.started, **init)

    def __repr__(self) -> str:
        return _line(self.summary())

    def _repr_html_(self) -> str:
        s = self.summary()
        shown: Mapping[str, str] = {
            "steps": f"{s['steps']:,}"
            + (f", {s['skipped']} skipped" if s["skipped"] else ""),
            "reward": f"{_text(s['reward_first'])} → {_text(s['reward_last'])}",
            "generated": f"{s['samples']:,} samples, {s['tokens']:,} tokens, {_text(s['tokens_per_s'])} tokens/s",
            "syncs": f"{s['syncs']:,}, {s['syncs_verified']:,} with equal digests, {_text(s['sync_gb_per_s'])} GB/s",
            "staleness": f"mean {_text(s['mean_staleness'])}, at most {s['max_staleness']}",
            "logprob gap": f"at most {_text(s['logprob_gap'])}, {s['alarms']} steps over {s['gap_alarm']:.2g}",
            "time": ", ".join(
                f"{name} {_text(v)} s" for name, v in s["time"].items() if v
            ),
            "faults": ", ".join(f"{name} × {n}" for name, n in s["faults"].items())
            or "none",
        }
        return _faces.draw(self, "html", _line(s), shown)


def _text(value: float, whole: bool = False) -> str:
    """A number in a few characters; `whole`: one without decimals as it is."""
    if value != value:
        return "–"
    exact = whole and float(value).is_integer()
    return f"{value:,.0f}" if exact or abs(value) >= 1000 else f"{value:.3g}"


def _line(s: Mapping[str, Any]) -> str:
    steps = how_many(s["steps"], "step")
    state = "running" if s["running"] else s["ended"] or "not ended"
    if state == "interrupted":
        state = f"interrupted after {steps}"
    parts = [steps, f"{s['samples']:,} samples", f"{s['syncs']:,} syncs"]
    if s["steps"]:
        parts.append(f"reward {_text(s['reward_first'])} → {_text(s['reward_last'])}")
    if s["alarms"]:
        parts.append(how_many(s["alarms"], "gap alarm"))
    if s["faults"]:
        parts.append(how_many(sum(s["faults"].values()), "fault"))
    if s["damaged"]:
        parts.append(f"{s['damaged']} damaged lines skipped")
    return f"Record({s['run']!r}: {', '.join([*parts, state])})"


def calls_of(client: Any) -> Record:
    """What this process asked of a lab, found by its client; times count from the first call."""
    events = sorted(noted(client), key=lambda e: e.start)
    if not events:
        return Record.of(())
    at = events[0].start
    times: dict[str, Any] = {"start": at, "stop": at, "wall": time.time()}
    return Record.of([RunStart(run="this session", actor="trainer", **times), *events])
