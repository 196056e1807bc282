"""Snapshots as Prometheus text (exposition format 0.0.4). Pure: the gateway serves what these functions return."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jvlab._errors import ConfigError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")


@dataclass(frozen=True)
class Metric:
    """A family of time series: one value per set of labels."""

    name: str
    help: str
    type: Literal["gauge", "counter"]
    values: Sequence[tuple[Mapping[str, str], float]]


def prometheus_text(metrics: Iterable[Metric]) -> str:
    """The text that a scrape reads. Families of one name are joined; a family without values is left out."""
    families: dict[str, list[Metric]] = {}
    for metric in metrics:
        if not NAME.match(metric.name):
            raise ConfigError(f"{metric.name!r} is no metric name", remedy="letters, digits, _ and :, no digit first")
        if any(metric.type != other.type for other in families.get(metric.name, ())):
            raise ConfigError(f"{metric.name} is both gauge and counter", remedy="give one of them another name")
        families.setdefault(metric.name, []).append(metric)
    lines = []
    for name, parts in families.items():
        series = {_labels(labels): value for part in parts for labels, value in part.values}
        if series:
            escaped = parts[0].help.replace("\\", "\\\\").replace("\n", "\\n")
            lines += [f"# HELP {name} {escaped}", f"# TYPE {name} {parts[0].type}"]
            lines += [f"{name}{labels} {_number(value)}" for labels, value in series.items()]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    for name in labels:
        if not LABEL.match(name):
            raise ConfigError(f"{name!r} is no label name", remedy="letters, digits and _, no digit first")
    escape = lambda text: str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "{" + ",".join(f'{k}="{escape(v)}"' for k, v in labels.items()) + "}" if labels else ""


def _number(value: float) -> str:
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


REPLICA = {  # field of a replica in `pool.stats()`: (name, type, help)
    "in_flight": ("jvlab_replica_in_flight", "gauge", "Requests routed to the replica and not yet answered."),
    "running": ("jvlab_replica_running", "gauge", "Requests the engine is generating for."),
    "waiting": ("jvlab_replica_waiting", "gauge", "Requests waiting in the engine."),
    "kv_use": ("jvlab_replica_kv_cache_use_ratio", "gauge", "Share of the KV cache in use, 0 to 1."),
    "prefix_hit_rate": ("jvlab_replica_prefix_cache_hit_ratio", "gauge", "Share of prompt tokens found cached."),
    "tokens_per_s": ("jvlab_replica_tokens_per_second", "gauge", "Tokens generated per second, of late."),
    "generated_tokens": ("jvlab_replica_generated_tokens_total", "counter", "Tokens generated since the engine began."),
    "version": ("jvlab_replica_weight_version", "gauge", "Version of the weights the engine holds."),
    "paused": ("jvlab_replica_paused", "gauge", "1 while generation is paused."),
    "sleeping": ("jvlab_replica_sleeping", "gauge", "1 while the engine sleeps."),
    "beat_age": ("jvlab_replica_heartbeat_age_seconds", "gauge", "Seconds since the replica was last heard of."),
}


def pool_metrics(pools: Iterable[Mapping[str, Any]]) -> list[Metric]:
    """Metrics of pools, from what `views._cards.pool_summary` gives for each."""
    found = list(pools)
    replicas = [({"pool": p["pool"], "replica": str(r["replica"])}, r) for p in found for r in p["replicas"]]
    out = [
        Metric(
            "jvlab_pool_healthy_replicas", "Replicas that are ready.", "gauge",
            [({"pool": p["pool"]}, p["healthy"]) for p in found],
        ),
        Metric(
            "jvlab_pool_replicas", "Replicas that were asked for.", "gauge",
            [({"pool": p["pool"]}, len(p["replicas"])) for p in found],
        ),
        Metric(
            "jvlab_replica_ready", "1 if the replica is ready; its state is a label.", "gauge",
            [(labels | {"state": r["state"]}, r["state"] == "ready") for labels, r in replicas],
        ),
    ]  # fmt: skip
    for field, (name, kind, text) in REPLICA.items():
        values = [(labels, float(r[field])) for labels, r in replicas if r.get(field) is not None]
        out.append(Metric(name, text, kind, values))  # type: ignore[arg-type]
    return out


RUN = {  # field of `record.summary()`: (name, type, help)
    "steps": ("jvlab_run_steps_total", "counter", "Optimiser steps."),
    "skipped": ("jvlab_run_skipped_steps_total", "counter", "Steps that the NaN guard skipped."),
    "reward_last": ("jvlab_run_reward", "gauge", "Mean reward of the last step."),
    "samples": ("jvlab_run_samples_total", "counter", "Samples generated."),
    "tokens": ("jvlab_run_tokens_total", "counter", "Tokens generated."),
    "reward_failures": ("jvlab_run_reward_failures_total", "counter", "Rewards that raised or timed out."),
    "syncs": ("jvlab_run_syncs_total", "counter", "Weight syncs."),
    "syncs_verified": ("jvlab_run_syncs_verified_total", "counter", "Weight syncs whose digests agreed."),
    "sync_bytes": ("jvlab_run_sync_bytes_total", "counter", "Bytes moved by weight syncs."),
    "max_staleness": ("jvlab_run_max_staleness", "gauge", "Most versions any trained token was behind."),
    "mean_staleness": ("jvlab_run_mean_staleness", "gauge", "Mean versions the trained tokens were behind."),
    "dropped": ("jvlab_run_dropped_samples_total", "counter", "Samples dropped because too stale."),
    "logprob_gap": ("jvlab_run_logprob_gap", "gauge", "Largest gap between trainer and engine so far, in nats."),
    "alarms": ("jvlab_run_gap_alarms_total", "counter", "Steps whose gap was over the threshold."),
    "tokens_per_s": ("jvlab_run_tokens_per_second", "gauge", "Tokens generated per second of the run."),
}


def run_metrics(summary: Mapping[str, Any]) -> list[Metric]:
    """Metrics of a run, from `record.summary()`."""
    run = {"run": str(summary["run"])}
    out = [Metric(n, text, kind, [(run, float(summary[f]))]) for f, (n, kind, text) in RUN.items()]  # type: ignore[arg-type]
    out.append(
        Metric(
            "jvlab_run_utilisation_ratio", "Share of the run's time an actor did useful work.", "gauge",
            [(run | {"actor": a}, v) for a, v in summary["utilisation"].items()],
        )
    )  # fmt: skip
    out.append(
        Metric(
            "jvlab_run_phase_seconds_total", "Seconds in which a phase ran; phases may overlap.", "counter",
            [(run | {"phase": p}, v) for p, v in summary["time"].items()],
        )
    )  # fmt: skip
    out.append(
        Metric(
            "jvlab_run_faults_total", "Faults by kind.", "counter",
            [(run | {"fault": f}, n) for f, n in summary["faults"].items()],
        )
    )  # fmt: skip
    return out
