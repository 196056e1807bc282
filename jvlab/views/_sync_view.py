"""`SyncReport`, `CheckReport`, `Meaning` and `Link` as HTML; both reports also as one line."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from jvlab._states import state
from jvlab._units import human_bytes, human_seconds
from jvlab.layout._slices import distinct_leaves, without_slice
from jvlab.views._palette import PHASES, TONES
from jvlab.views._style import BAD, BOX, CELL, FAINT, GOOD, LINE, MONO, NUMBER, WAIT, dot, table

if TYPE_CHECKING:
    from jvlab.sync._link import Link
    from jvlab.sync._meaning import Meaning
    from jvlab.sync._sync_report import CheckReport, Outcome, SyncReport

MEANING_DOTS = {"checked": GOOD, "failed": BAD, "unchecked": WAIT, "pending": WAIT}
SHOWN = 12  # leaves in the table of a meaning
INSIDE = ("pack", "copy", "scatter", "digest", "repack", "reload", "commit")  # work that overlaps with the rest


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
    again = f", {counted_layers(report)} through vLLM's reload" if report.reloaded else ""
    size = human_bytes(report.bytes)
    return f"SyncReport(version {report.version}, {size} {ways} to {replicas}{again}, {known(report)})"


def counted_layers(report: SyncReport) -> str:
    """How many layers vLLM's own reload processed."""
    return f"{len(report.reloaded)} layer{'s' if len(report.reloaded) != 1 else ''}"


def reload_line(report: SyncReport) -> str:
    """The layers that vLLM's own reload processed, slowest first, and what they cost; empty if none."""
    if not report.reloaded:
        return ""
    slowest = sorted(report.reloaded.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{escape(name)} {1e3 * seconds:.1f} ms" for name, seconds in slowest[:SHOWN])
    more = f" and {len(slowest) - SHOWN} more" if len(slowest) > SHOWN else ""
    total = human_seconds(sum(report.reloaded.values()))
    return f"<div>vLLM's own reload: {counted_layers(report)}, {total} ({shown}{more})</div>"


def sync_html(report: SyncReport) -> str:
    title = (
        f"<b>version {report.version}</b> · {human_bytes(report.bytes)} · {report.gbps:.2f} GB/s · "
        f"{escape(report.mode)} over {escape(report.transport)} · {escape(known(report))}"
    )
    notes = "".join(f"<div>{escape(note)}</div>" for note in report.notes)
    inside = f"{waterfall(report)}{_outcomes(report.outcomes)}{reload_line(report)}"
    return f'<div style="{BOX}">{title}{inside}{notes}</div>'


def waterfall(report: SyncReport) -> str:
    """Each part of a sync where it lay in time: measured spans, the pause, and the work that overlapped inside."""
    seconds = report.seconds
    total = seconds.get("total", 0.0) or 1e-9
    spans = dict(report.spans) or {"move": (0.0, seconds.get("move", 0.0))}
    inside = spans.get("move") or next(iter(spans.values()))
    rows = [(name, *span, PHASES["sync"], "") for name, span in spans.items()]
    if pause := seconds.get("pause", 0.0):
        rows.append(("paused", max(0.0, total - pause), total, TONES["wait"], "generation was paused, until the end"))
    for name in INSIDE:
        if took := seconds.get(name, 0.0):
            how = "seconds of work, in pieces that overlap with the others"
            rows.append((name, inside[0], inside[0] + took, PHASES["score"], how))
    lines = [_lane(*row, total) for row in rows]
    end = (
        f'<tr><td style="{CELL}"><b>total</b></td><td style="{NUMBER}"><b>{human_seconds(total)}</b></td><td></td></tr>'
    )
    return f'<table style="border-collapse:collapse">{"".join(lines)}{end}</table>'


def _lane(name: str, start: float, stop: float, colour: str, how: str, total: float) -> str:
    """A row of the waterfall: name, seconds, and a bar at its place in time."""
    left = 100 * min(1.0, max(0.0, start / total))
    width = min(100 - left, max(0.6, 100 * (stop - start) / total))
    bar = f"margin-left:{left:.1f}%;width:{width:.1f}%;height:9px;background:{colour};border-radius:2px"
    lane = f'<div title="{escape(how)}" style="width:260px;background:{LINE}"><div style="{bar}"></div></div>'
    return (
        f'<tr><td style="{CELL}">{name}</td><td style="{NUMBER}">{human_seconds(stop - start)}</td><td>{lane}</td></tr>'
    )


def _outcomes(outcomes: tuple[Outcome, ...]) -> str:
    lines = []
    for o in outcomes:
        mark = dot(TONES[state(o.state).tone])
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


def meaning_line(meaning: Meaning) -> str:
    """The state, how it was determined, and why."""
    how = f" by {meaning.how}" if meaning.how else ""
    why = f' <span style="color:{FAINT}">{escape(meaning.why)}</span>' if meaning.why else ""
    return f"<div>{dot(MEANING_DOTS[meaning.state])} meaning {escape(meaning.state)}{escape(how)}{why}</div>"


def meaning_html(meaning: Meaning) -> str:
    """The line, and a table of what was observed, wrong and ambiguous leaves first."""
    wrong = [leaf for leaf, seen in meaning.leaves.items() if seen.contradicts]
    open_ = [name for name in meaning.leaves if without_slice(name) in meaning.ambiguous]  # slices of stacked leaves
    unseen = [leaf for leaf in meaning.ambiguous if leaf not in {without_slice(name) for name in open_}]
    listed = list(dict.fromkeys([*wrong, *open_, *unseen, *meaning.leaves]))
    rows = []
    for leaf in listed[:SHOWN]:
        seen, why = meaning.leaves.get(leaf), meaning.ambiguous.get(without_slice(leaf), "")
        name = f'<span style="font-family:{MONO}">{escape(leaf)}</span>'
        rows.append([name, escape(seen.text if seen else "not compared"), escape(why)])
    more = f'<div style="color:{FAINT}">and {len(listed) - SHOWN} more</div>' if len(listed) > SHOWN else ""
    body = table(("leaf", "observed", "ambiguous"), rows) if rows else ""
    return f'<div style="{BOX}">{meaning_line(meaning)}{body}{more}</div>'
