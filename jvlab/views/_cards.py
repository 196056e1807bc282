"""`Lab` and `Pool` as a line and as a table, from the last snapshot; no RPC."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from jvlab._states import worst
from jvlab.views._palette import TONES
from jvlab.views._style import BOX, FAINT, LINE, dot, headlines, hollow_dots, state_html, table
from jvlab.wire._pool_summary import LEAVING, is_well, model_name, pool_health, replica_health, stage_word

if TYPE_CHECKING:
    from jvlab.lab._lab import Lab


def pool_line(snapshot: Any) -> str:
    count = sum(snapshot.closed or r.stage not in LEAVING for r in snapshot.replicas)
    size = f"{count} replica{'s' if count != 1 else ''} × TP {snapshot.tensor_parallel}"
    return f"Pool({snapshot.pool!r}, {model_name(snapshot)!r}, {size} on {snapshot.device}, {pool_health(snapshot)[0]})"


def state_cell(replica: Any, sync: str = "") -> str:
    """A replica's state as a coloured dot and words."""
    words, tone = replica_health(replica, sync)
    return f"{dot(TONES[tone])} {escape(words)}"


def pool_title(snapshot: Any, lost: bool = False) -> str:
    """The header of a pool: its worst state first, then what it is."""
    where = f"TP {snapshot.tensor_parallel} on {escape(snapshot.device)}"
    words, found = pool_health(snapshot, lost)
    open_sync = f" · sync {escape(stage_word(snapshot.sync))}" if snapshot.sync not in ("", "idle") else ""
    facts = f'<span style="color:{FAINT}">{escape(model_name(snapshot))} · {where}{open_sync}</span>'
    return f"<b>{escape(snapshot.pool)}</b> {state_html(found, words)} {facts}"


def pool_headline(snapshot: Any) -> str:
    """What one looks for first, large; nothing while no replica is up."""
    ready = [r for r in snapshot.replicas if r.stage == "ready"]
    if snapshot.closed or not ready:
        return ""
    versions = sorted({r.stats.weight_version for r in ready})
    all_of_them = sum(r.stage not in LEAVING for r in snapshot.replicas)
    return headlines(
        [
            (f"{sum(r.stats.tokens_per_s for r in ready):,.0f}", "", "tokens/s"),
            (f"{sum(r.routed for r in ready):,}", "", "requests in flight"),
            (" and ".join(map(str, versions)), "" if len(versions) == 1 else "differ", "weight version"),
            (str(sum(is_well(r, snapshot.sync) for r in ready)), f"of {all_of_them}", "replicas ready"),
        ]
    )


def pool_html(snapshot: Any, lost: bool = False) -> str:
    """The static card. Equal for labs in the same state: no process ids and no times."""
    rows = []
    over = f"{dot(TONES['idle'])} {'gone' if lost else 'closed'}"  # whatever it was when it was last seen
    for r in snapshot.replicas:
        ready = r.stage == "ready" and not snapshot.closed
        rows.append(
            [
                escape(r.replica),
                state_cell(r, snapshot.sync) if not snapshot.closed else over,
                str(r.stats.weight_version) if ready else "–",
                str(r.routed) if ready else "–",
                f"{r.stats.tokens_per_s:.0f}" if ready else "–",
                f'<span style="white-space:pre-wrap">{escape(r.cause[:300])}</span>',
            ]
        )
    body = table(("replica", "state", "version", "in flight", "tokens/s", ""), rows, numbers=(2, 3, 4))
    body = hollow_dots(body) if snapshot.closed else body  # nothing of a closed pool is alive
    return f'<div style="{BOX};margin:2px 0">{pool_title(snapshot, lost)}{pool_headline(snapshot)}{body}</div>'


def lab_state(snapshots: list[Any]) -> str:
    """The worst state of a lab's open pools, for its header; empty if all are well."""
    states = [(s.pool, *pool_health(s)) for s in snapshots if not s.closed]
    bad = worst([found.name for _, _, found in states])
    if bad.tone == "good":
        return ""
    pool, words = next((pool, words) for pool, words, found in states if found == bad)
    return state_html(bad, f"{pool}: {words}")


def lab_html(lab: Lab) -> str:
    pools = list(lab._pools.values())
    cards = "".join(pool._repr_html_() for pool in pools)
    inside = f'<div style="border-left:2px solid {LINE};padding-left:10px">{cards}</div>' if cards else ""
    return f'<div style="{BOX}"><b>{escape(repr(lab))}</b> {lab_state([p._snapshot for p in pools])}{inside}</div>'
