"""Tables of a record as pandas, Parquet and CSV."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import MissingDependency
from jvlab.record._events import (
    NAN,
    Event,
    FaultEvent,
    RolloutEvent,
    RunStart,
    RunStop,
    StepEvent,
    SyncEvent,
    plain,
)
from jvlab.record._metrics import lanes

if TYPE_CHECKING:
    import pandas


# A record as Chrome trace JSON: the timeline of every actor, for ui.perfetto.dev or chrome://tracing.

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
            out.append(
                _meta(
                    "thread_name", thread + i, actor if not i else f"{actor} ({i + 1})"
                )
            )
            out.append(_meta("thread_sort_index", thread + i, thread + i, "sort_index"))
        out += [_slice(e, thread + at) for e, at in zip(own, lane, strict=True)]
        thread += count
    for event in known:
        if isinstance(event, StepEvent):
            out += _counters(event)
    return {
        "traceEvents": out,
        "displayTimeUnit": "ms",
        "otherData": {"source": "jvlab record"},
    }


def write(events: Sequence[Event], path: str | os.PathLike[str]) -> str:
    """Write the trace to a file and return its path."""
    target = _target(path)
    target.write_text(json.dumps(trace(events), allow_nan=False), encoding="utf-8")
    return str(target)


def _order(actor: str) -> tuple[int, str]:
    return (0 if actor == "trainer" else 1 if actor.startswith("pool") else 2, actor)


def _run_name(events: Sequence[Event]) -> str:
    return next((e.run for e in events if isinstance(e, RunStart)), "run")


def _meta(what: str, thread: int, value: object, key: str = "name") -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": PID, "tid": thread, "args": {key: value}}


def _slice(event: Event, thread: int) -> dict[str, Any]:
    fields = {
        k: v
        for k, v in event.to_json().items()
        if k not in ("kind", "actor", "start", "stop")
    }
    base = {
        "name": _name(event),
        "cat": event.kind,
        "pid": PID,
        "tid": thread,
        "ts": event.start * 1e6,
        "args": fields,
    }
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
            return "generate, version " + (
                ", ".join(str(v) for v in sorted(event.versions)) or "unknown"
            )
        case FaultEvent():
            return event.fault
        case _:
            return event.kind.replace("_", " ")


def _counters(event: StepEvent) -> list[dict[str, Any]]:
    values = {name: plain(getattr(event, name)) for name in COUNTERS}
    total = sum(event.versions.values())
    if total:
        values["staleness"] = (
            sum(level * n for level, n in event.staleness.items()) / total
        )
    return [
        {
            "name": name,
            "ph": "C",
            "pid": PID,
            "tid": 0,
            "ts": event.stop * 1e6,
            "args": {name: value},
        }
        for name, value in values.items()
        if not isinstance(value, str)  # a counter must be a finite number
    ]


# Dashboards for a run, if installed: TensorBoard and Weights & Biases. Each is called with every event.

STEP_SCALARS = {
    "reward/mean": "reward_mean",
    "reward/std": "reward_std",
    "train/loss": "loss",
    "train/kl": "kl",
    "train/entropy": "entropy",
    "train/grad_norm": "grad_norm",
    "train/clip_fraction": "clip_fraction",
    "train/learning_rate": "learning_rate",
    "health/logprob_gap": "logprob_gap",
}


class Scalars:
    """Converts events to named scalars per step."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, event: Event) -> dict[str, float]:
        """The scalars that an event measured; none for most events."""
        match event:
            case StepEvent():
                self.step = event.step
                found = {
                    name: getattr(event, field) for name, field in STEP_SCALARS.items()
                }
                found |= {f"ratio/{key}": value for key, value in event.ratios.items()}
                found |= {
                    "health/skipped": float(event.skipped),
                    "time/train_s": event.seconds,
                }
                if total := sum(event.versions.values()):
                    found["staleness/mean"] = (
                        sum(s * n for s, n in event.staleness.items()) / total
                    )
                    found["staleness/max"] = max(event.staleness)
            case SyncEvent():
                found = {
                    "sync/gb_per_s": event.gb_per_s,
                    "sync/seconds": event.seconds,
                    "sync/pause_s": event.pause,
                }
            case RolloutEvent() if event.seconds > 0:
                found = {"rollout/tokens_per_s": event.tokens / event.seconds}
            case _:
                found = {}
        return {name: float(value) for name, value in found.items() if value == value}


class TensorBoardSink:
    """Scalars as TensorBoard event files in a folder; needs tensorboardX, or torch and tensorboard."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._scalars, self._writer = Scalars(), _summary_writer()(str(folder))

    def __call__(self, event: Event, *, wall: float | None = None) -> None:
        for name, value in self._scalars(event).items():
            self._writer.add_scalar(name, value, self._scalars.step, walltime=wall)

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


def _summary_writer() -> Any:
    for module in ("tensorboardX", "torch.utils.tensorboard"):
        try:
            return importlib.import_module(module).SummaryWriter
        except ImportError:
            continue
    raise MissingDependency(
        "TensorBoard files need a writer", remedy="pip install tensorboardX"
    )


class WandbSink:
    """Scalars to a Weights & Biases run; `init` goes to wandb.init, for instance project="...", mode="offline"."""

    def __init__(self, **init: Any) -> None:
        try:
            import wandb
        except ImportError as e:
            raise MissingDependency(
                "logging to Weights & Biases needs wandb", remedy="pip install wandb"
            ) from e
        self._scalars = Scalars()
        self._run: Any = wandb.init(**init)

    def __call__(self, event: Event, *, wall: float | None = None) -> None:
        numbers = self._scalars(event)
        if numbers:
            self._run.log(
                numbers
                | {"step": self._scalars.step}
                | ({} if wall is None else {"wall": wall})
            )

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


# ----------------------------------------------------------------------------------------------------

Columns = Mapping[str, np.ndarray]


def event_columns(
    events: Iterable[Event], kind: type[Event] = Event
) -> dict[str, np.ndarray]:
    """One row per event: its scalars; maps from names to numbers as one column per name; anything else as JSON text."""
    found = list(events)
    hints = typing.get_type_hints(kind)
    columns: dict[str, np.ndarray] = {}
    for name in (f.name for f in dataclasses.fields(kind)):
        values = [getattr(e, name) for e in found]
        hint = hints[name]
        if hint in (int, float, bool):
            columns[name] = np.array(values, np.int64 if hint is int else hint)
        elif hint is str or hint == bool | None:
            columns[name] = np.array(values, object)
        elif hint in (dict[str, float], dict[str, int]):
            for key in sorted({k for v in values for k in v}):
                columns[f"{name}_{key}"] = np.array(
                    [v.get(key, NAN) for v in values], float
                )
        elif name != "extra" or any(values):
            texts = [
                None if v is None else json.dumps(plain(v), ensure_ascii=False)
                for v in values
            ]
            columns[name] = np.array(texts, object)
    return columns


def to_pandas(columns: Columns) -> pandas.DataFrame:
    """The columns as a DataFrame."""
    try:
        import pandas
    except ImportError as e:
        raise MissingDependency(
            "a DataFrame needs pandas",
            remedy="pip install pandas; record.steps() and to_csv() need nothing",
        ) from e
    return pandas.DataFrame(dict(columns))


def to_parquet(columns: Columns, path: str | os.PathLike[str]) -> str:
    """Write the columns as one Parquet file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as e:
        raise MissingDependency(
            "a Parquet file needs pyarrow",
            remedy="pip install pyarrow; to_csv() needs nothing",
        ) from e
    target = _target(path)
    table = pyarrow.table(
        {
            name: pyarrow.array(values, from_pandas=False)
            for name, values in columns.items()
        }
    )
    parquet.write_table(table, target)
    return str(target)


def to_csv(columns: Columns, path: str | os.PathLike[str]) -> str:
    """Write the columns as CSV: NaN as `nan`, missing values empty."""
    target = _target(path)
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        lists = [values.tolist() for values in columns.values()]
        writer.writerows(zip(*lists, strict=True))
    return str(target)


def _target(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target
