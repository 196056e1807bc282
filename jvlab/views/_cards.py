"""`Lab` and `Pool` as a line and as a table, from the last snapshot; no RPC."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from jvlab.views._style import BOX, FAINT, LINE, TONES, dot, table
from jvlab.wire._pool_summary import LEAVING, model_name, pool_state, replica_health, stage_word

if TYPE_CHECKING:
    from jvlab.lab._lab import Lab


def pool_line(snapshot: Any) -> str:
    count = sum(snapshot.closed or r.stage not in LEAVING for r in snapshot.replicas)
    size = f"{count} replica{'s' if count != 1 else ''} × TP {snapshot.tensor_parallel}"
    return f"Pool({snapshot.pool!r}, {model_name(snapshot)!r}, {size} on {snapshot.device}, {pool_state(snapshot)})"


def state_cell(replica: Any, sync: str = "") -> str:
    """A replica's state as a coloured dot and words."""
    words, tone = replica_health(replica, sync)
    return f"{dot(TONES[tone])} {escape(words)}"


def pool_title(snapshot: Any) -> str:
    where = f"TP {snapshot.tensor_parallel} on {escape(snapshot.device)}"
    open_sync = f" · sync {escape(stage_word(snapshot.sync))}" if snapshot.sync not in ("", "idle") else ""
    parts = f"{escape(model_name(snapshot))} · {where} · {escape(pool_state(snapshot))}{open_sync}"
    return f'<b>{escape(snapshot.pool)}</b> <span style="color:{FAINT}">{parts}</span>'


def pool_html(snapshot: Any) -> str:
    """The static card. Equal for labs in the same state: no process ids and no times."""
    rows = []
    for r in snapshot.replicas:
        ready = r.stage == "ready"
        rows.append(
            [
                escape(r.replica),
                state_cell(r, snapshot.sync),
                str(r.stats.weight_version) if ready else "–",
                str(r.routed) if ready else "–",
                f"{r.stats.tokens_per_s:.0f}" if ready else "–",
                f'<span style="white-space:pre-wrap">{escape(r.cause[:300])}</span>',
            ]
        )
    body = table(("replica", "state", "version", "in flight", "tokens/s", ""), rows, numbers=(2, 3, 4))
    return f'<div style="{BOX};margin:2px 0">{pool_title(snapshot)}{body}</div>'


def lab_html(lab: Lab) -> str:
    cards = "".join(pool_html(pool._snapshot) for pool in list(lab._pools.values()))
    inside = f'<div style="border-left:2px solid {LINE};padding-left:10px">{cards}</div>' if cards else ""
    return f'<div style="{BOX}"><b>{escape(repr(lab))}</b>{inside}</div>'
