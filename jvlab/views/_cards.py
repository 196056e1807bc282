"""Faces of `Lab` and `Pool`: one line, a table, and a card that follows the pool while it comes up."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jvlab._lab import Lab
    from jvlab._pool import Pool

DOTS = {"ready": "#2a9d5c", "failed": "#c0392b", "lost": "#c0392b", "closed": "#888888"}  # else: coming up
STARTING = "#d98e04"
BOX = "font-family:system-ui,sans-serif;font-size:13px"
CELL = "padding:2px 10px 2px 0;text-align:left;white-space:nowrap"


def pool_state(snapshot: Any) -> str:
    """One word for the whole pool."""
    if snapshot.closed:
        return "closed"
    stages = [replica.stage for replica in snapshot.replicas]
    if all(stage == "ready" for stage in stages):
        return "ready"
    for stage in ("failed", "lost"):
        if stage in stages:
            return f"{stages.count('ready')}/{len(stages)} ready, {stages.count(stage)} {stage}"
    return f"starting: {stages[0]}" if len(set(stages)) == 1 else "starting"


def model_name(snapshot: Any) -> str:
    """The model without its folders: a path differs from machine to machine, and notebooks are shared."""
    return snapshot.model.rstrip("/").rpartition("/")[2]


def pool_line(snapshot: Any) -> str:
    count = len(snapshot.replicas)
    size = f"{count} replica{'s' if count != 1 else ''} × TP {snapshot.tensor_parallel}"
    return f"Pool({snapshot.pool!r}, {model_name(snapshot)!r}, {size} on {snapshot.device}, {pool_state(snapshot)})"


def pool_summary(snapshot: Any) -> dict[str, Any]:
    """A snapshot as plain values."""
    replicas = []
    for r in snapshot.replicas:
        s = r.stats
        replicas.append({
            "replica": r.replica, "state": r.stage, "pid": r.pid, "epoch": r.epoch, "version": s.weight_version,
            "in_flight": r.routed, "running": s.running, "waiting": s.waiting, "kv_use": s.kv_use,
            "prefix_hit_rate": s.prefix_hits / s.prefix_queries if s.prefix_queries else 0.0,
            "tokens_per_s": s.tokens_per_s, "generated_tokens": s.generated_tokens, "paused": s.paused,
            "sleeping": s.sleeping, "dirty": r.dirty, "stale": r.stale, "beat_age": r.beat_age,
            "cause": r.cause or None,
        })  # fmt: skip
    queries = sum(r.stats.prefix_queries for r in snapshot.replicas)
    hits = sum(r.stats.prefix_hits for r in snapshot.replicas)
    facts = next((r.facts for r in snapshot.replicas if r.HasField("facts")), None)
    return {
        "pool": snapshot.pool, "model": snapshot.model, "state": pool_state(snapshot), "device": snapshot.device,
        "version": snapshot.version, "trainer": snapshot.trainer or None, "sync": snapshot.sync or "idle",
        "tensor_parallel": snapshot.tensor_parallel, "dtype": facts.dtype if facts else None,
        "healthy": sum(r["state"] == "ready" for r in replicas), "replicas": replicas,
        "in_flight": sum(r["in_flight"] for r in replicas), "tokens_per_s": sum(r["tokens_per_s"] for r in replicas),
        "prefix_hit_rate": hits / queries if queries else 0.0,
    }  # fmt: skip


def pool_html(snapshot: Any) -> str:
    head = "".join(
        f'<th style="{CELL}">{h}</th>'
        for h in ("replica", "state", "since start", "version", "in flight", "tokens/s", "")
    )
    rows = []
    for r in snapshot.replicas:
        dot = f'<span style="color:{DOTS.get(r.stage, STARTING)}">●</span>'
        ready = r.stage == "ready"
        standing = "dirty: sync again" if r.dirty else "stale: waits for a sync" if r.stale else r.stage
        if r.dirty or r.stale:
            dot = f'<span style="color:{DOTS["failed"] if r.dirty else STARTING}">●</span>'
        cells = [
            escape(r.replica), f"{dot} {escape(standing)}", f"{r.seconds:.0f} s",
            str(r.stats.weight_version) if ready else "–", str(r.routed) if ready else "–",
            f"{r.stats.tokens_per_s:.0f}" if ready else "–",
            f'<span style="white-space:pre-wrap">{escape(r.cause[:300])}</span>',
        ]  # fmt: skip
        rows.append("<tr>" + "".join(f'<td style="{CELL}">{cell}</td>' for cell in cells) + "</tr>")
    where = f"TP {snapshot.tensor_parallel} on {escape(snapshot.device)}"
    title = (
        f"<b>{escape(snapshot.pool)}</b> · {escape(model_name(snapshot))} · {where} · {escape(pool_state(snapshot))}"
    )
    table = f'<table style="border-collapse:collapse"><tr>{head}</tr>{"".join(rows)}</table>'
    return f'<div style="{BOX};line-height:1.5">{title}{table}</div>'


def lab_html(lab: Lab) -> str:
    cards = "".join(pool_html(pool._snapshot) for pool in lab._pools.values())
    return f'<div style="{BOX}"><b>{escape(repr(lab))}</b>{cards}</div>'


def show_live(pool: Pool) -> None:
    """Show the pool's card in a notebook and keep it current until the pool is ready, failed or closed."""
    from IPython.display import display

    def bundle(snapshot: Any) -> dict[str, str]:
        return {"text/plain": pool_line(snapshot), "text/html": pool_html(snapshot)}

    snapshot = pool._snapshot
    handle = display(bundle(snapshot), raw=True, display_id=True)
    if handle is None or not pool_state(snapshot).startswith("starting"):
        return

    def follow(new: Any) -> None:
        handle.update(bundle(new), raw=True)
        if not pool_state(new).startswith("starting"):
            pool._listeners.remove(follow)

    pool._listeners.append(follow)
