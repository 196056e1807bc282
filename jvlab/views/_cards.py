"""Faces of `Lab` and `Pool`: one line and a table, drawn from the last snapshot without a call."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from jvlab.views._style import BAD, BOX, FAINT, GOOD, IDLE, LINE, WAIT, dot, table

if TYPE_CHECKING:
    from jvlab._lab import Lab

DOTS = {"ready": GOOD, "failed": BAD, "lost": BAD, "closed": IDLE}  # else: coming up
LEAVING = ("draining", "closed")  # after pool.scale: no longer part of the pool


def pool_state(snapshot: Any) -> str:
    """One word for the whole pool."""
    if snapshot.closed:
        return "closed"
    stages = [replica.stage for replica in snapshot.replicas if replica.stage not in LEAVING]
    leaving = len(snapshot.replicas) - len(stages)
    leaves = f", {leaving} draining" if leaving else ""
    if all(stage == "ready" for stage in stages):
        return f"ready{leaves}"
    for stage in ("failed", "lost"):
        if stage in stages:
            return f"{stages.count('ready')}/{len(stages)} ready, {stages.count(stage)} {stage}{leaves}"
    return (f"starting: {stages[0]}" if len(set(stages)) == 1 else "starting") + leaves


def model_name(snapshot: Any) -> str:
    """The model without its folders: a path differs from machine to machine, and notebooks are shared."""
    return snapshot.model.rstrip("/").rpartition("/")[2]


def pool_line(snapshot: Any) -> str:
    count = sum(snapshot.closed or r.stage not in LEAVING for r in snapshot.replicas)
    size = f"{count} replica{'s' if count != 1 else ''} × TP {snapshot.tensor_parallel}"
    return f"Pool({snapshot.pool!r}, {model_name(snapshot)!r}, {size} on {snapshot.device}, {pool_state(snapshot)})"


def pool_summary(snapshot: Any) -> dict[str, Any]:
    """A snapshot as plain values."""
    replicas = []
    for r in snapshot.replicas:
        s = r.stats
        replicas.append({
            "replica": r.replica, "state": r.stage, "pid": r.pid, "epoch": r.epoch, "version": s.weight_version,
            "health": standing(r, snapshot.sync)[0], "in_flight": r.routed, "served": r.served,
            "running": s.running, "waiting": s.waiting, "kv_use": s.kv_use,
            "prefix_hit_rate": s.prefix_hits / s.prefix_queries if s.prefix_queries else 0.0,
            "tokens_per_s": s.tokens_per_s, "generated_tokens": s.generated_tokens, "paused": s.paused,
            "sleeping": s.sleeping, "dirty": r.dirty, "stale": r.stale, "beat_age": r.beat_age,
            "cause": r.cause or None, "acceptance_rate": _accepted([r]), "http_url": r.facts.http_url or None,
            "adapters": {a.name: a.version for a in s.adapters},
        })  # fmt: skip
    queries = sum(r.stats.prefix_queries for r in snapshot.replicas)
    hits = sum(r.stats.prefix_hits for r in snapshot.replicas)
    facts = next((r.facts for r in snapshot.replicas if r.HasField("facts")), None)
    return {
        "pool": snapshot.pool, "model": snapshot.model, "state": pool_state(snapshot), "device": snapshot.device,
        "version": snapshot.version, "trainer": snapshot.trainer or None, "sync": snapshot.sync or "idle",
        "routing": snapshot.routing, "tensor_parallel": snapshot.tensor_parallel,
        "http_url": snapshot.http_url or None,
        "dtype": facts.dtype if facts else None,
        "healthy": sum(r["state"] == "ready" for r in replicas), "replicas": replicas,
        "in_flight": sum(r["in_flight"] for r in replicas), "tokens_per_s": sum(r["tokens_per_s"] for r in replicas),
        "prefix_hit_rate": hits / queries if queries else 0.0,
        "prefix_caching": facts.prefix_caching if facts else None, "speculative": _speculative(snapshot, facts),
    }  # fmt: skip


def _accepted(replicas: Any) -> float | None:
    """Share of drafted tokens that the model accepted; None before the first draft."""
    drafted = sum(r.stats.draft_tokens for r in replicas)
    return sum(r.stats.accepted_tokens for r in replicas) / drafted if drafted else None


def _speculative(snapshot: Any, facts: Any) -> dict[str, Any] | None:
    """How tokens are drafted, how often that helps, and whether a sync left the draft model behind."""
    if facts is None or not facts.speculative:
        return None
    synced = any(r.stats.weight_version > 0 for r in snapshot.replicas)
    return {
        "method": facts.speculative, "acceptance_rate": _accepted(snapshot.replicas),
        "draft_tokens": sum(r.stats.draft_tokens for r in snapshot.replicas),
        "draft_stale": facts.draft_weights and synced,  # a sync brings the model's weights, not its draft's
    }  # fmt: skip


def standing(replica: Any, sync: str = "") -> tuple[str, str]:
    """(words, colour) of a replica: the worst that is true of it. `sync`: where the pool's open sync stands."""
    if replica.stage != "ready":
        return replica.stage, DOTS.get(replica.stage, WAIT)
    if replica.dirty and sync in ("", "idle"):  # while a sync writes, dirty is what it should be
        return "dirty: sync again", BAD
    if replica.stale:
        return "stale: waits for a sync", WAIT
    if replica.stats.sleeping:
        return "asleep", IDLE
    if sync in ("halted", "moving", "verified") and (replica.stats.paused or replica.dirty):
        return f"stands still for a sync: {sync}", WAIT
    if replica.stats.paused:
        return "paused", WAIT
    return "ready", GOOD


def state_cell(replica: Any, sync: str = "") -> str:
    """The same as a dot and words."""
    words, colour = standing(replica, sync)
    return f"{dot(colour)} {escape(words)}"


def pool_title(snapshot: Any) -> str:
    where = f"TP {snapshot.tensor_parallel} on {escape(snapshot.device)}"
    open_sync = f" · sync {escape(snapshot.sync)}" if snapshot.sync not in ("", "idle") else ""
    parts = f"{escape(model_name(snapshot))} · {where} · {escape(pool_state(snapshot))}{open_sync}"
    return f'<b>{escape(snapshot.pool)}</b> <span style="color:{FAINT}">{parts}</span>'


def pool_html(snapshot: Any) -> str:
    """The static card: nothing in it differs between two labs that stand alike, so no process ids and no clocks."""
    rows = []
    for r in snapshot.replicas:
        ready = r.stage == "ready"
        rows.append([
            escape(r.replica), state_cell(r, snapshot.sync), str(r.stats.weight_version) if ready else "–",
            str(r.routed) if ready else "–", f"{r.stats.tokens_per_s:.0f}" if ready else "–",
            f'<span style="white-space:pre-wrap">{escape(r.cause[:300])}</span>',
        ])  # fmt: skip
    body = table(("replica", "state", "version", "in flight", "tokens/s", ""), rows, numbers=(2, 3, 4))
    return f'<div style="{BOX};margin:2px 0">{pool_title(snapshot)}{body}</div>'


def lab_html(lab: Lab) -> str:
    cards = "".join(pool_html(pool._snapshot) for pool in list(lab._pools.values()))
    inside = f'<div style="border-left:2px solid {LINE};padding-left:10px">{cards}</div>' if cards else ""
    return f'<div style="{BOX}"><b>{escape(repr(lab))}</b>{inside}</div>'
