"""A `Meaning` as a line with a dot, and as a table of wrong, undecided and ambiguous leaves."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from jvlab.layout._slices import without_slice
from jvlab.views._style import BAD, BOX, FAINT, GOOD, MONO, WAIT, dot, table

if TYPE_CHECKING:
    from jvlab.sync._meaning import Meaning

DOTS = {"checked": GOOD, "failed": BAD, "unchecked": WAIT, "pending": WAIT}
SHOWN = 12  # leaves in the table


def meaning_line(meaning: Meaning) -> str:
    """The state, how it was determined, and why."""
    how = f" by {meaning.how}" if meaning.how else ""
    why = f' <span style="color:{FAINT}">{escape(meaning.why)}</span>' if meaning.why else ""
    return f"<div>{dot(DOTS[meaning.state])} meaning {escape(meaning.state)}{escape(how)}{why}</div>"


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
