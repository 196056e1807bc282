"""A `Certificate` as a text table and as HTML: one row per check."""

from __future__ import annotations

import textwrap
from html import escape
from typing import TYPE_CHECKING

from jvlab._units import human_seconds
from jvlab.views._style import BAD, BOX, CELL, FAINT, GOOD, IDLE, dot, table

if TYPE_CHECKING:
    from jvlab.analysis.certification._certificate import Certificate, CertificateRow

DOTS = {"pass": GOOD, "fail": BAD, "not applicable": IDLE, "not run": BAD}
WIDTH = 100
SHOWN = 600  # characters of a detail in HTML; to_dict has all


def certificate_text(found: Certificate) -> str:
    """A line for each check and what it saw, below it the first tensor that was wrong."""
    name = max((len(row.name) for row in found.rows), default=0)
    indent = name + 34
    lines = [repr(found), "  " + _engine(found)]
    for row in found.rows:
        head = f"  {row.name:<{name}}  {row.state:<14}  {human_seconds(row.seconds):>10}  "
        words = row.detail + (f" First wrong: {row.first_wrong}." if row.first_wrong else "")
        body = textwrap.wrap(words, WIDTH) or [""]
        lines.append(head + body[0])
        lines += [" " * (indent - 2) + line for line in body[1:]]
    lines += [f"  note: {note}" for note in found.notes]
    return "\n".join(lines)


def certificate_html(found: Certificate) -> str:
    """A table, with the configuration above it and notes below."""
    rows = [
        [
            f'<span title="{escape(row.question)}">{escape(row.name)}</span>',
            f"{dot(DOTS[row.state])} {escape(row.state)}",
            f'<div style="white-space:normal;max-width:56em">{_detail(row)}</div>',
            human_seconds(row.seconds),
        ]
        for row in found.rows
    ]
    notes = "".join(f"<div>{escape(note)}</div>" for note in found.notes)
    return (
        f'<div style="{BOX}"><b>{escape(repr(found))}</b><div style="{CELL};color:{FAINT};white-space:normal">'
        f"{escape(_engine(found))}</div>{table(('check', 'result', 'what was seen', 'took'), rows, numbers=(3,))}"
        f'<div style="color:{FAINT}">{notes}</div></div>'
    )


def _engine(found: Certificate) -> str:
    parts = [f"{name.replace('_', ' ')} {value}" for name, value in found.engine.items() if value not in ("", None)]
    return f"weight version {found.version}; " + ", ".join(parts)


def _detail(row: CertificateRow) -> str:
    text = row.detail if len(row.detail) <= SHOWN else row.detail[: SHOWN - 1] + "…"
    wrong = f"<br><b>first wrong: {escape(row.first_wrong)}</b>" if row.first_wrong else ""
    return escape(text) + wrong
