"""Files for other tools: CSV, Parquet, pandas, Perfetto, Prometheus, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from jvlab._errors import ConfigError, MissingDependency
from jvlab.gateway._http_server import prometheus_text
from jvlab.record import _export
from jvlab.record._events import Event, FaultEvent, RolloutEvent, StepEvent
from jvlab.record._export import check_reports
from jvlab.record._record import Record
from tests.record.synthetic import made_up

# what could upset a line format; quick to draw
TEXT = st.text('ab01"\\\n,{}=: é☃\x00\u2028', max_size=12)


@pytest.fixture(scope="module")
def record() -> Record:
    return Record.of(made_up(25, 2))


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


# tables --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table", ["steps", "rollouts", "syncs", "pauses", "rewards", "faults"]
)
def test_csv_holds_every_number(record: Record, tmp_path: Path, table: str) -> None:
    path = record.to_csv(tmp_path / "new" / "t.csv", table)
    with Path(path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = record.table(table)
    assert list(rows[0]) == list(columns)
    assert len(rows) == len(columns["start"]) > 0
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            if values.dtype == float:
                assert float(row[name]) == value or (
                    math.isnan(float(row[name])) and math.isnan(value)
                )
            elif value is not None:
                assert row[name] == str(value)


def test_phases_of_syncs_are_columns(record: Record) -> None:
    table = record.table("syncs")
    assert table["phases_move"].tolist() == [0.06] * 25
    assert table["verified"].tolist() == [True] * 25
    assert json.loads(table["replicas"][0]) == ["pool/0", "pool/1"]


def test_empty_tables_have_their_columns(tmp_path: Path) -> None:
    path = Record.of([]).to_csv(tmp_path / "t.csv")
    assert Path(path).read_text().startswith("step,version,start,stop,loss,")


def test_missing_packages_are_named_with_the_remedy(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(
        monkeypatch,
        "pandas",
        "pyarrow",
        "tensorboardX",
        "torch.utils.tensorboard",
        "wandb",
        "matplotlib.figure",
    )
    for call, package in (
        (record.to_pandas, "pandas"),
        (lambda: record.to_parquet(tmp_path / "x.parquet"), "pyarrow"),
        (lambda: record.to_tensorboard(tmp_path), "tensorboardX"),
        (record.to_wandb, "wandb"),
    ):
        with pytest.raises(MissingDependency) as caught:
            call()
        assert f"pip install {package}" in caught.value.remedy
    from jvlab.views._record_plots import run_figure

    with pytest.raises(MissingDependency, match="matplotlib"):
        run_figure(record)


def test_pandas(record: Record) -> None:
    pytest.importorskip("pandas")
    frame = record.to_pandas()
    assert len(frame) == 25
    assert frame["reward_mean"].iloc[-1] == record.steps()["reward_mean"][-1]
    assert set(record.to_pandas("rollouts")["actor"]) == {"pool/0", "pool/1"}


def test_parquet(record: Record, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for table in ("steps", "syncs", "rollouts"):
        back = parquet.read_table(
            record.to_parquet(tmp_path / f"{table}.parquet", table)
        )
        columns = record.table(table)
        assert back.column_names == list(columns)
        assert back["start"].to_pylist() == columns["start"].tolist()
    assert back["versions"].to_pylist() == columns["versions"].tolist()


# Perfetto ------------------------------------------------------------------------------------------------------------


def test_perfetto_has_the_shape_of_a_trace(record: Record, tmp_path: Path) -> None:
    text = Path(record.to_perfetto(tmp_path / "trace.json")).read_text()
    trace = json.loads(
        text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )
    found = trace["traceEvents"]
    assert {e["ph"] for e in found} == {"M", "X", "i", "C"}
    for e in found:
        assert isinstance(e["name"], str)
        assert isinstance(e["pid"], int)
        assert isinstance(e["tid"], int)
        if e["ph"] != "M":
            assert e["ts"] >= 0
        if e["ph"] == "X":
            assert e["dur"] > 0
        if e["ph"] == "C":
            assert all(isinstance(v, (int, float)) for v in e["args"].values())
    threads = {
        e["tid"]: e["args"]["name"]
        for e in found
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    assert {"trainer", "pool/0", "pool/1", "reward"} <= set(threads.values())
    slices = [e for e in found if e["ph"] == "X"]
    assert len(slices) == sum(e.seconds > 0 for e in record.events())
    for tid in threads:  # no two slices of a thread overlap by more than a rounding
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == tid)
        assert all(a[1] <= b[0] + 2 for a, b in itertools.pairwise(own))
    assert sum(e["name"] == "staleness" for e in found) == 25


def test_perfetto_puts_overlapping_requests_on_threads_of_their_own() -> None:
    events = [
        RolloutEvent(actor="pool/0", start=0, stop=4),
        RolloutEvent(actor="pool/0", start=1, stop=2),
    ]
    trace = _export.trace(events)["traceEvents"]
    assert [e["tid"] for e in trace if e["ph"] == "X"] == [0, 1]
    assert [e["args"]["name"] for e in trace if e["name"] == "thread_name"] == [
        "pool/0",
        "pool/0 (2)",
    ]


def test_perfetto_of_faults_unknown_times_and_infinite_numbers() -> None:
    events: list[Event] = [
        FaultEvent(fault="nan", start=1, stop=1),
        RolloutEvent(),
        StepEvent(step=0, version=0, start=0, stop=1, loss=math.inf, kl=0.5),
    ]
    trace = _export.trace(events)["traceEvents"]
    json.dumps(trace, allow_nan=False)
    assert [e["name"] for e in trace if e["ph"] == "i"] == ["nan"]
    assert [e["name"] for e in trace if e["ph"] == "C"] == ["kl"]


# Prometheus ----------------------------------------------------------------------------------------------------------


def parse(text: str) -> dict[str, dict[frozenset, float]]:
    """A small reader of the exposition format, written from its description."""
    out: dict[str, dict[frozenset, float]] = {}
    for line in text.split("\n")[:-1]:
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
        assert match, line
        pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or "")
        unescape = lambda s: re.sub(
            r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], s
        )
        labels = frozenset((k, unescape(v)) for k, v in pairs)
        assert labels not in out.setdefault(match[1], {}), "one series twice"
        out[match[1]][labels] = float(match[3])
    assert text == "" or text.endswith("\n")
    return out


def test_prometheus_of_pools() -> None:
    replica = {
        "replica": "pool/0",
        "state": "ready",
        "ready": True,
        "in_flight": 3,
        "running": 2,
        "waiting": 1,
        "kv_use": 0.25,
        "prefix_hit_rate": 0.5,
        "tokens_per_s": 123.4,
        "generated_tokens": 10**12,
        "version": 7,
        "paused": False,
        "sleeping": False,
        "beat_age": 0.1,
        "cause": None,
    }
    pools = [
        {"pool": f'p"{i}\\', "healthy": 1, "replicas": [replica]} for i in range(2)
    ]
    text = prometheus_text(pools).decode()
    found = parse(text)
    assert (
        found["jvlab_replica_weight_version"][
            frozenset({("pool", 'p"1\\'), ("replica", "pool/0")})
        ]
        == 7
    )
    assert found["jvlab_replica_generated_tokens_total"].popitem()[1] == 1e12
    assert found["jvlab_replica_paused"].popitem()[1] == 0
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert families["jvlab_replica_generated_tokens"].type == "counter"
    assert families["jvlab_replica_ready"].samples[0].labels["state"] == "ready"
    assert sum(len(f.samples) for f in families.values()) == sum(
        len(series) for series in parse(text).values()
    )


def test_the_gateways_summary_has_the_fields_that_are_exported() -> None:
    from jvlab.gateway._http_server import REPLICA
    from jvlab.wire import jvlab_pb2 as pb
    from jvlab.wire._pool_summary import pool_summary

    snapshot = pb.PoolStatus(
        pool="p", model="m", replicas=[pb.ReplicaStatus(replica="p/0", stage="ready")]
    )
    summary = pool_summary(snapshot)
    assert summary["replicas"][0].keys() >= REPLICA.keys()
    assert parse(prometheus_text([summary]).decode())[
        "jvlab_pool_healthy_replicas"
    ] == {frozenset({("pool", "p")}): 1}


# dashboards ----------------------------------------------------------------------------------------------------------


def test_tensorboard_gets_every_measured_number(
    record: Record, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a stand-in of the one class that is used; a real tensorboardX is tried where it is installed."""
    calls, closed = [], []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(
            self, name: str, value: float, step: int, walltime: float | None = None
        ) -> None:
            calls.append((name, value, step, walltime))

        def close(self) -> None:
            closed.append(True)

    module = types.ModuleType("tensorboardX")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    record.to_tensorboard(tmp_path)
    rewards = [
        (step, value) for name, value, step, _ in calls if name == "train/reward"
    ]
    table = record.steps()
    assert rewards == list(
        zip((table["step"] + 1).tolist(), table["reward_mean"].tolist(), strict=True)
    )
    gaps = table["logprob_gap"]
    # NaN: not measured, not drawn
    assert sum(
        name == "train/sampling/sampling_logp_difference/max" for name, *_ in calls
    ) == sum(gaps == gaps)
    assert all(wall > 1.6e9 for *_, wall in calls)
    assert closed == [True]


def test_real_tensorboardx(record: Record, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    record.to_tensorboard(tmp_path)
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) > 1000


def test_wandb_gets_one_log_per_step(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged, finished, module = [], [], types.ModuleType("wandb")
    run = types.SimpleNamespace(log=logged.append, finish=lambda: finished.append(True))
    module.init = lambda **init: run if init == {"project": "x"} else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    record.to_wandb(project="x")
    steps = [x["train/global_step"] for x in logged if "train/reward" in x]
    assert steps == list(range(1, 26)), "as a report of the run counts"
    assert all(x["wall"] > 1.6e9 for x in logged)
    assert finished == [True]


# ---------------------------------------------------------------------------------------------------- reports


def reported(folder: Path, to: Any, **options: Any) -> Any:
    """A small run of a fake pool that reports somewhere."""
    from jvlab.trainer._grpo import grpo
    from tests.trainer.fake_pool import fresh_params, logprobs_fn, share, task, world

    def sevens(completions: Any, log_metric: Any, **columns: Any) -> list[float]:
        log_metric("mine", 3.0)
        return [c.split().count("7") / 6 for c in completions]

    pool, link = world()
    given: dict[str, Any] = {
        "steps": 2,
        "group_size": 4,
        "prompts_per_step": 2,
        "folder": folder,
        "checkpoint_every": 1,
        "progress": False,
        "background": True,
        "evaluate": task(),
        "evaluate_prompts": 2,
        **options,
    }
    run = grpo(
        (fresh_params(), logprobs_fn),
        pool,  # type: ignore[arg-type]
        link,  # type: ignore[arg-type]
        task([sevens, share], weights=[0.5, 1.0]),
        report_to=to,
        **given,
    )
    return run.wait(300)


NAMES = [
    "loss",
    "grad_norm",
    "learning_rate",
    "num_tokens",
    "step_time",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "entropy",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "rewards/sevens/mean",
    "rewards/sevens/std",
    "rewards/share/mean",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/mean",
    "mine",
]


@pytest.mark.slow
def test_numbers_have_the_names_of_trl(tmp_path: Path) -> None:
    calls: list[tuple[dict[str, float], int]] = []
    run = reported(
        tmp_path / "run", [lambda metrics, step: calls.append((metrics, step))]
    )
    steps = [(numbers, step) for numbers, step in calls if "loss" in numbers]
    assert [step for _, step in steps] == [1, 2], "as TRL counts"
    for name in NAMES:
        assert name in steps[0][0], name
    assert [step for numbers, step in calls if "eval_reward" in numbers] == [0, 2]
    first = steps[0][0]
    kept = [s for s in run.record.samples() if s.step == 0]
    mean = lambda values: pytest.approx(float(np.mean(list(values))))
    assert first["reward"] == mean(s.reward for s in kept)
    parts = [s.reward_parts["sevens"] / 0.5 for s in kept]
    assert first["rewards/sevens/mean"] == mean(parts), "before its weight"
    assert first["completions/mean_length"] == mean(len(s.tokens) for s in kept)
    assert first["num_tokens"] == sum(
        len(s.tokens) + len(s.prompt_tokens) for s in kept
    )
    assert steps[1][0]["num_tokens"] > first["num_tokens"]
    assert all(np.isfinite(v) for numbers, _ in calls for v in numbers.values())


@pytest.mark.slow
def test_a_report_that_fails_is_said_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good: list[int] = []

    def broken(metrics: dict[str, float], step: int) -> None:
        raise ConnectionError("the server is gone")

    run = reported(tmp_path / "run", [broken, lambda metrics, step: good.append(step)])
    assert run.status.state == "finished"
    (fault,) = run.record.events("fault")
    assert (fault.fault, fault.who) == ("sink failed", "broken")
    assert "the server is gone" in fault.text
    assert "broken failed and is left out; the run goes on" in capsys.readouterr().err
    assert good == [0, 1, 2, 2]


@pytest.mark.slow
def test_a_report_that_hangs_does_not_hold_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr("jvlab.record._export.END_S", 0.5)
    try:
        run = reported(tmp_path / "run", lambda metrics, step: release.wait(60))
    finally:
        release.set()
    assert run.status.state == "finished"
    (fault,) = run.record.events("fault")
    assert "not finished after 0.5 s" in fault.text


@pytest.mark.slow
@pytest.mark.parametrize("place", ["wandb", "tensorboard", "mlflow", "trackio"])
def test_places_offline_and_resumed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "tensorboard":
        pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    else:
        pytest.importorskip(place, reason=f"{place} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    folder = tmp_path / "run"
    first = reported(folder, place)
    assert not first.record.events("fault")
    ids = (folder / "reports.json").read_text() if place != "tensorboard" else ""
    again = reported(folder, place, steps=3, resume=True)
    assert not again.record.events("fault")
    assert again.status.step == 3
    if place != "tensorboard":
        assert (folder / "reports.json").read_text() == ids, "the same run"
    match place:
        case "wandb":
            found = sorted(folder.glob("wandb/offline-run-*"))
            assert len(found) == 2
            ends = {path.name.rpartition("-")[2] for path in found}
            assert ends == {json.loads(ids)["wandb"]}
        case "tensorboard":
            assert tensorboard_steps(folder / "tensorboard") == {1, 2, 3}
        case "mlflow":
            import mlflow

            run_id = json.loads(ids)["mlflow"]
            history = mlflow.MlflowClient().get_metric_history(run_id, "reward")
            assert [m.step for m in history] == [1, 2, 3]


def tensorboard_steps(folder: Path) -> set[int]:
    """Steps with train/reward, of all event files: records are a length, a check, the message and another check."""
    import importlib

    message_type = importlib.import_module("tensorboardX.proto.event_pb2").Event
    found: set[int] = set()
    for file in folder.glob("*tfevents*"):
        data = file.read_bytes()
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            message = message_type.FromString(data[at + 12 : at + 12 + size])
            at += size + 16
            if any(v.tag == "train/reward" for v in message.summary.value):
                found.add(message.step)
    return found


@pytest.mark.parametrize("given", ["tensorbord", 3, ["wandb", "no"]])
def test_a_place_that_is_not_known(given: Any) -> None:
    with pytest.raises(ConfigError, match="report_to"):
        check_reports(given)
    assert check_reports(None) == check_reports("none") == ()


def test_a_place_whose_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependency, match="pip install wandb"):
        check_reports("wandb")
