"""Prometheus metrics of pools, from their summaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
POOL = {  # name: (value from a pool's summary, help)
    "jvlab_pool_healthy_replicas": (lambda pool: pool["healthy"], "Replicas that are ready, and not dirty or stale."),
    "jvlab_pool_replicas": (lambda pool: len(pool["replicas"]), "Replicas requested."),
}
REPLICA = {  # field of a replica in the summary: (name, type, help)
    "in_flight": ("jvlab_replica_in_flight", "gauge", "Requests routed to the replica and not yet answered."),
    "running": ("jvlab_replica_running", "gauge", "Requests the engine is generating for."),
    "waiting": ("jvlab_replica_waiting", "gauge", "Requests waiting in the engine."),
    "kv_use": ("jvlab_replica_kv_cache_use_ratio", "gauge", "Share of the KV cache in use, 0 to 1."),
    "prefix_hit_rate": ("jvlab_replica_prefix_cache_hit_ratio", "gauge", "Share of prompt tokens found cached."),
    "tokens_per_s": ("jvlab_replica_tokens_per_second", "gauge", "Tokens generated per second, recently."),
    "generated_tokens": (
        "jvlab_replica_generated_tokens_total",
        "counter",
        "Tokens generated since engine start.",
    ),
    "version": ("jvlab_replica_weight_version", "gauge", "Version of the weights the engine holds."),
    "paused": ("jvlab_replica_paused", "gauge", "1 while generation is paused."),
    "sleeping": ("jvlab_replica_sleeping", "gauge", "1 while the engine sleeps."),
    "beat_age": ("jvlab_replica_heartbeat_age_seconds", "gauge", "Seconds since the replica's last heartbeat."),
}


class PoolMetrics:
    """A prometheus_client collector over the `pool_summary` of each pool."""

    def __init__(self, pools: Iterable[Mapping[str, Any]]) -> None:
        self._pools = list(pools)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, (value, text) in POOL.items():
            family = GaugeMetricFamily(name, text, labels=["pool"])
            for pool in self._pools:
                family.add_metric([pool["pool"]], value(pool))
            yield family
        replicas = [([p["pool"], str(r["replica"])], r) for p in self._pools for r in p["replicas"]]
        labels = ["pool", "replica", "state"]
        ready = GaugeMetricFamily(
            "jvlab_replica_ready", "1 if the replica may be given work; its state is a label.", labels=labels
        )
        for values, replica in replicas:
            ready.add_metric([*values, replica["state"]], float(replica["ready"]))
        yield ready
        for field, (name, kind, text) in REPLICA.items():
            family = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}[kind](name, text, labels=labels[:2])
            for values, replica in replicas:
                if replica.get(field) is not None:
                    family.add_metric(values, float(replica[field]))
            yield family


def prometheus_text(pools: Iterable[Mapping[str, Any]]) -> bytes:
    """The response to a scrape."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(PoolMetrics(pools))
    return generate_latest(registry)
