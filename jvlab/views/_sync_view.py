"""`SyncReport`, `CheckReport` and `Link` as HTML; both reports also as one line."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from jvlab._units import human_bytes, human_seconds
from jvlab.layout._slices import distinct_leaves
from jvlab.views._meaning_view import meaning_line
from jvlab.views._style import BAD, BOX, CELL, GOOD, IDLE, NUMBER, PALETTE, WAIT, dot

if TYPE_CHECKING:
    from jvlab.sync._link import Link
    from jvlab.sync._sync_report import CheckReport, Outcome, SyncReport

STATE_DOTS = {"committed": GOOD, "holds": GOOD, "old": WAIT, "dirty": BAD, "lost": BAD}
ORDER = ("total", "pause", "pack", "move", "scatter", "digest", "repack", "commit")


def known(report: SyncReport) -> str:
    """Exactly what is known of a sync: whether its bits arrived, and whether their meaning was checked."""
    words = {"full": "arrived", "sampled": "a sample arrived", "off": "digests not compared"}
    count = distinct_leaves([text.partition(": ")[0] for text in report.nonfinite])
    nonfinite = f", {count} {'leaf' if count == 1 else 'leaves'} not finite" if count else ""
    return f"{words[report.verify]}{nonfinite}; meaning {report.meaning}"


def sync_line(report: SyncReport) -> str:
    """The report's repr, without times."""
    count = len(report.outcomes)
    replicas = f"{count} replica{'s' if count != 1 else ''}"
    ways = f"{report.mode} over {report.transport}"
    return f"SyncReport(version {report.version}, {human_bytes(report.bytes)} {ways} to {replicas}, {known(report)})"


def sync_html(report: SyncReport) -> str:
    title = (
        f"<b>version {report.version}</b> · {human_bytes(report.bytes)} · {report.gbps:.2f} GB/s · "
        f"{escape(report.mode)} over {escape(report.transport)} · {escape(known(report))}"
    )
    total = report.seconds.get("total", 0.0) or 1e-9
    rows = []
    for name in ORDER:
        seconds = report.seconds.get(name, 0.0)
        if not seconds:
            continue
        width = max(1, round(160 * min(1.0, seconds / total)))
        colour = PALETTE[1] if name == "pause" else PALETTE[0]
        bar = f'<div style="width:{width}px;height:9px;background:{colour};border-radius:2px"></div>'
        rows.append(
            f'<tr><td style="{CELL}">{name}</td><td style="{NUMBER}">{human_seconds(seconds)}</td><td>{bar}</td></tr>'
        )
    notes = "".join(f"<div>{escape(note)}</div>" for note in report.notes)
    table = f'<table style="border-collapse:collapse">{"".join(rows)}</table>'
    return f'<div style="{BOX}">{title}{table}{_outcomes(report.outcomes)}{notes}</div>'


def _outcomes(outcomes: tuple[Outcome, ...]) -> str:
    lines = []
    for o in outcomes:
        mark = dot(STATE_DOTS.get(o.state, IDLE))
        text = escape(o.error) + "".join(f"<br>differs: {escape(name)}" for name in o.differing[:8])
        more = f"<br>… and {len(o.differing) - 8} more" if len(o.differing) > 8 else ""
        lines.append(f"<div>{mark} {escape(o.replica)}: {escape(o.state)}, version {o.version} {text}{more}</div>")
    return "".join(lines)


def check_line(report: CheckReport) -> str:
    found = "digests equal" if report.ok else f"{len(report.differing)} parameters differ"
    return f"CheckReport(version {report.version}, {len(report.digests)} parameters, {found})"


def check_html(report: CheckReport) -> str:
    notes = "".join(f"<div>{escape(note)}</div>" for note in report.notes)
    title = f"<b>{escape(check_line(report))}</b> · {human_seconds(report.seconds)}"
    return f'<div style="{BOX}">{title}{_outcomes(report.outcomes)}{notes}</div>'


def link_html(link: Link) -> str:
    last = sync_html(link.last) if link.last is not None else "<div>no sync yet</div>"
    head = f"<b>{escape(repr(link))}</b><div>{escape(link.reason)}</div>{meaning_line(link.meaning)}"
    return f'<div style="{BOX}">{head}{last}</div>'
