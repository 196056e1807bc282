"""A record as tables, as a trace, and as numbers for dashboards while a run runs."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import importlib
import json
import math
import os
import queue
import secrets
import sys
import threading
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import ConfigError, MissingDependency
from jvlab.record._events import (
    NAN,
    EvaluationEvent,
    Event,
    FaultEvent,
    RolloutEvent,
    RunStart,
    RunStop,
    StepEvent,
    SyncEvent,
    clock,
    only,
    plain,
    run_name,
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
    out = [_meta("process_name", 0, {"name": run_name(events)})]
    thread = 0
    for actor in sorted(actors, key=_order):
        own = actors[actor]
        lane = lanes([(e.start, e.stop) for e in own])
        for i in range(max(lane) + 1):
            name = f"{actor} ({i + 1})" if i else actor
            out.append(_meta("thread_name", thread + i, {"name": name}))
            place = {"sort_index": thread + i}
            out.append(_meta("thread_sort_index", thread + i, place))
        out += [_slice(e, thread + at) for e, at in zip(own, lane, strict=True)]
        thread += max(lane) + 1
    for event in only(known, StepEvent):
        out += _counters(event)
    other = {"source": "jvlab record"}
    return {"traceEvents": out, "displayTimeUnit": "ms", "otherData": other}


def _order(actor: str) -> tuple[int, str]:
    return (0 if actor == "trainer" else 1 if actor.startswith("pool") else 2, actor)


def _meta(what: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": PID, "tid": thread, "args": args}


def _slice(event: Event, thread: int) -> dict[str, Any]:
    fields = event.to_json()
    for name in ("kind", "actor", "start", "stop"):
        del fields[name]
    match event:
        case StepEvent():
            name = f"step {event.step}"
        case SyncEvent():
            name = f"sync version {event.version}"
        case RolloutEvent():
            versions = ", ".join(map(str, sorted(event.versions)))
            name = f"generate, version {versions or 'unknown'}"
        case FaultEvent():
            name = event.fault
        case _:
            name = event.kind.replace("_", " ")
    base = {"name": name, "cat": event.kind, "pid": PID, "tid": thread}
    base |= {"ts": event.start * 1e6, "args": fields}
    if isinstance(event, (FaultEvent, RunStart, RunStop)) or not event.seconds > 0:
        return base | {"ph": "i", "s": "p" if isinstance(event, FaultEvent) else "t"}
    return base | {"ph": "X", "dur": event.seconds * 1e6}


def _counters(event: StepEvent) -> list[dict[str, Any]]:
    values = {name: getattr(event, name) for name in COUNTERS}
    values["staleness"] = event.mean_staleness
    base = {"ph": "C", "pid": PID, "tid": 0, "ts": event.stop * 1e6}
    return [
        {"name": name, **base, "args": {name: value}}
        for name, value in values.items()
        if math.isfinite(value)
    ]


# Reports: where `jv.grpo(report_to=...)` sends a run while it runs, by the names that users of TRL know.

IDS = "reports.json"  # in a run's folder: what a report needs to go on after a resume
QUEUED = 10_000  # numbers of steps that may wait for a report
END_S = 60.0  # for a report to finish
GLOBAL_STEP = "train/global_step"


def trl_metrics(event: Event) -> tuple[dict[str, float], int]:
    """What TRL's GRPOTrainer logs of a step or an evaluation, without NaN, and how many steps were done.

    ({}, 0) for other events.
    """
    if isinstance(event, EvaluationEvent):
        found = {"eval_reward": event.reward_mean, "eval_reward_std": event.reward_std}
        return _known(found), event.step
    if not isinstance(event, StepEvent):
        return {}, 0
    more = event.extra
    found = {
        "loss": event.loss,
        "grad_norm": event.grad_norm,
        "learning_rate": event.learning_rate,
        "reward": event.reward_mean,
        "reward_std": event.reward_std,
        "frac_reward_zero_std": more.get("zero_std", NAN),
        "kl": event.kl,
        "entropy": event.entropy,
        "clip_ratio/region_mean": event.clip_fraction,
        "sampling/sampling_logp_difference/mean": event.logprob_gap_mean,
        "sampling/sampling_logp_difference/max": event.logprob_gap,
    }
    for name, (mean, std) in more.get("rewards", {}).items():
        found[f"rewards/{name}/mean"] = mean
        found[f"rewards/{name}/std"] = std
    for group, key in (("completions", "completions"), ("clip_ratio", "clipped")):
        found |= {f"{group}/{name}": v for name, v in more.get(key, {}).items()}
    for name in ("min", "mean", "max"):
        ratio = event.ratios.get(name, NAN)
        found[f"sampling/importance_sampling_ratio/{name}"] = ratio
    if event.versions:
        found["staleness/max"] = max(event.staleness)
    return _known(found | more.get("logged", {})), event.step + 1


def numbers_of(
    events: Iterable[Event],
) -> Iterator[tuple[dict[str, float], int, Event]]:
    """The same of all events that have numbers, named as the dashboards show them."""
    for event in events:
        numbers, step = trl_metrics(event)
        if numbers:
            yield _prefixed(numbers), step, event


def to_tensorboard(
    events: Iterable[Event], started: float, folder: str | os.PathLike[str]
) -> str:
    """Write the steps of a record as TensorBoard's files."""
    writer = _library("tensorboard")(str(folder))
    try:
        for numbers, step, event in numbers_of(events):
            for name, value in numbers.items():
                writer.add_scalar(name, value, step, walltime=started + event.stop)
    finally:
        writer.close()
    return str(folder)


def to_wandb(events: Iterable[Event], started: float, **init: Any) -> None:
    """Log the steps of a record as a run of Weights & Biases."""
    run = _library("wandb").init(**init)
    try:
        for numbers, step, event in numbers_of(events):
            run.log({**numbers, GLOBAL_STEP: step, "wall": started + event.stop})
    finally:
        run.finish()


def _known(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items() if value == value}


class Report:
    """A sink that hands each step's numbers to `open_log()`'s function, in a thread of its own.

    What goes wrong there is raised at the next event, so that the record says it and the run goes on.
    """

    def __init__(
        self,
        name: str,
        open_log: Callable[[], tuple[Log, Callable[[], None]]],
        seen: int = 0,
    ) -> None:
        self.__name__ = name
        self.seen = seen  # tokens of all steps so far
        self._open = open_log
        self._began = clock()
        self._queue: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(
            QUEUED
        )
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._work, name=f"jvlab-report-{name}", daemon=True
        )

    def __call__(self, event: Event) -> None:
        # not before the record is open: a run that is refused opens nothing elsewhere
        if self._thread.ident is None:
            self._thread.start()
        self._check()
        if isinstance(event, RunStop):
            self._end()
        numbers, step = trl_metrics(event)
        if isinstance(event, StepEvent):
            self.seen += event.extra.get("sequence_tokens", event.tokens)
            numbers["num_tokens"] = float(self.seen)
            numbers["step_time"] = event.stop - self._began
            self._began = event.stop
        if numbers:
            self._put((numbers, step))
            self._check()

    def _put(self, what: tuple[dict[str, float], int] | None) -> None:
        try:
            self._queue.put_nowait(what)
        except queue.Full:
            self._error = self._error or TimeoutError(f"{QUEUED} steps wait for it")

    def _check(self) -> None:
        if self._error is None:
            return
        why = f"{type(self._error).__name__}: {self._error}"
        told = (
            f"report_to: {self.__name__} failed and is left out; the run goes on. {why}"
        )
        print(told, file=sys.stderr, flush=True)
        raise self._error

    def _end(self) -> None:
        """Wait until everything is sent."""
        self.close()
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._error = TimeoutError(f"not finished after {END_S:g} s")
        self._check()

    def _work(self) -> None:
        try:
            log, finish = self._open()
            try:
                while (given := self._queue.get()) is not None:  # no deadline: `close`
                    log(*given)
            finally:
                finish()
        except BaseException as error:
            self._error = error

    def close(self) -> None:
        """Let its thread end."""
        self._put(None)


Log = Callable[[dict[str, float], int], Any]


def reports(
    to: Sequence[Any],
    folder: Path,
    config: Mapping[str, Any],
    resumed: int,
    seen: int = 0,
) -> list[Report]:
    """A sink for each place; `resumed` is the step that the run goes on with, -1 for a new one."""
    made = []
    for where in to:
        if callable(where):
            name = getattr(where, "__name__", type(where).__name__)
            opened: Any = lambda log=where: (log, lambda: None)
        else:
            name = str(where)
            about = plain(dict(config))
            opened = functools.partial(
                PLACES[name], _library(name), folder, about, resumed
            )
        made.append(Report(name, opened, seen))
    return made


def check_reports(to: Any) -> tuple[Any, ...]:
    """`report_to` as a tuple; raises for a place that is not known, or whose library is missing."""
    if to is None or to == "none":
        return ()
    given = tuple(to) if isinstance(to, (list, tuple)) else (to,)
    for where in given:
        if callable(where):
            continue
        if where not in PLACES:
            raise ConfigError(
                f"report_to={where!r}",
                remedy=f"one of {', '.join(PLACES)}, a function(metrics, step), or a list of them",
                option="report_to",
            )
        _library(where)
    return given


def _library(name: str) -> Any:
    """The library, or of TensorBoard the class that writes its files."""
    if name != "tensorboard":
        return needed(name, f"{name} is not installed")
    for module in ("tensorboardX", "torch.utils.tensorboard"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(module).SummaryWriter
    return needed("tensorboardX", "TensorBoard files need a writer")


def _prefixed(numbers: Mapping[str, float]) -> dict[str, float]:
    """As the callbacks of transformers name them: train/reward, eval/reward."""
    return {
        f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in numbers.items()
    }


def _kept_id(folder: Path, name: str, make: Callable[[], str], resumed: int) -> str:
    """The id of a run at this place: the one that it had before it was resumed, or a new one."""
    file = folder / IDS
    known = json.loads(file.read_text()) if file.exists() else {}
    if resumed < 0 or name not in known:
        known[name] = make()
        file.write_text(json.dumps(known) + "\n")
    return known[name]


def _to_wandb(
    wandb: Any, folder: Path, config: Mapping[str, Any], resumed: int
) -> tuple[Log, Callable[[], None]]:
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "jvlab"),
        name=folder.name,
        id=_kept_id(folder, "wandb", lambda: secrets.token_hex(4), resumed),
        resume="allow",
        dir=str(folder),
        config=dict(config),
    )
    run.define_metric(GLOBAL_STEP)
    run.define_metric("*", step_metric=GLOBAL_STEP, step_sync=True)
    log = lambda numbers, step: run.log({**_prefixed(numbers), GLOBAL_STEP: step})
    return log, run.finish


def _to_tensorboard(
    writer: Any, folder: Path, config: Mapping[str, Any], resumed: int
) -> tuple[Log, Callable[[], None]]:
    # what an earlier session wrote after its last checkpoint is not shown
    again = {"purge_step": resumed + 1} if resumed >= 0 else {}
    suffix = f".{max(resumed, 0)}"  # the file's name has whole seconds only
    made = writer(str(folder / "tensorboard"), filename_suffix=suffix, **again)
    if resumed < 0:
        made.add_text("config", f"```\n{json.dumps(config, indent=2)}\n```")

    def log(numbers: dict[str, float], step: int) -> None:
        for name, value in _prefixed(numbers).items():
            made.add_scalar(name, value, step)
        made.flush()

    return log, made.close


def _to_mlflow(
    mlflow: Any, folder: Path, config: Mapping[str, Any], resumed: int
) -> tuple[Log, Callable[[], None]]:
    client = mlflow.MlflowClient()
    wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", "jvlab")
    found = client.get_experiment_by_name(wanted)
    where = client.create_experiment(wanted) if found is None else found.experiment_id
    new = lambda: client.create_run(where, run_name=folder.name).info.run_id
    run = _kept_id(folder, "mlflow", new, resumed)
    if resumed < 0:
        for name, value in config.items():
            client.log_param(run, name, str(value)[:500])
    else:
        client.update_run(run, status="RUNNING")

    def log(numbers: dict[str, float], step: int) -> None:
        now = int(clock() * 1000)
        made = [mlflow.entities.Metric(n, v, now, step) for n, v in numbers.items()]
        client.log_batch(run, metrics=made)

    return log, lambda: client.set_terminated(run)


def _to_trackio(
    trackio: Any, folder: Path, config: Mapping[str, Any], resumed: int
) -> tuple[Log, Callable[[], None]]:
    run = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", "jvlab"),
        name=_kept_id(folder, "trackio", lambda: folder.name, resumed),
        resume="allow" if resumed >= 0 else "never",
        config=dict(config),
        embed=False,
    )
    return lambda numbers, step: run.log(_prefixed(numbers), step=step), run.finish


PLACES = {
    "wandb": _to_wandb,
    "tensorboard": _to_tensorboard,
    "mlflow": _to_mlflow,
    "trackio": _to_trackio,
}


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
    return needed("pandas", "a DataFrame needs pandas").DataFrame(dict(columns))


def to_parquet(columns: Columns, path: str | os.PathLike[str]) -> str:
    """Write the columns as one Parquet file."""
    pyarrow = needed("pyarrow", "a Parquet file needs pyarrow; to_csv() needs nothing")
    parquet = importlib.import_module("pyarrow.parquet")
    target = to_be_written(path)
    arrays = {n: pyarrow.array(v, from_pandas=False) for n, v in columns.items()}
    parquet.write_table(pyarrow.table(arrays), target)
    return str(target)


def to_csv(columns: Columns, path: str | os.PathLike[str]) -> str:
    """Write the columns as CSV: NaN as `nan`, missing values empty."""
    target = to_be_written(path)
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        lists = [values.tolist() for values in columns.values()]
        writer.writerows(zip(*lists, strict=True))
    return str(target)


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """The lines of a table of texts; its columns are aligned at the right, or at the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def to_be_written(path: str | os.PathLike[str]) -> Path:
    """The path, in a folder that exists."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def needed(library: str, why: str) -> Any:
    """An optional library; MissingDependency with its `pip install` if it is not there."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise MissingDependency(why, remedy=f"pip install {library}") from error
