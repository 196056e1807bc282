"""Shared pieces of HTML: text in the page's theme, states as dots, tables, bars, notices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from jvlab._states import State
from jvlab.views._palette import SERIES, TONES

PALETTE = SERIES
GOOD, WAIT, BAD, IDLE = (TONES[name] for name in ("good", "wait", "bad", "idle"))
# JupyterLab's theme variables, with fallbacks for other pages.
INK = "var(--jp-ui-font-color1, inherit)"
FAINT = "var(--jp-ui-font-color2, #777)"
LINE = "var(--jp-border-color2, rgba(128,128,128,.35))"
FILL = "var(--jp-layout-color2, rgba(128,128,128,.12))"
FONT = "var(--jp-ui-font-family, system-ui, sans-serif)"
MONO = "var(--jp-code-font-family, ui-monospace, monospace)"
BOX = f"font-family:{FONT};font-size:13px;line-height:1.5;color:{INK}"
CELL = "padding:2px 12px 2px 0;text-align:left;white-space:nowrap;vertical-align:top"
NUMBER = f"{CELL.replace('text-align:left', 'text-align:right')};font-variant-numeric:tabular-nums"


def dot(colour: str) -> str:
    """A state as a coloured dot; always used together with a word."""
    return f'<span data-jv="state" style="color:{colour}">●</span>'


def state_html(state: State, words: str = "") -> str:
    """A state of the table of states: its dot and its words."""
    return f"{dot(TONES[state.tone])} {escape(words or state.words)}"


def hollow_dots(html: str) -> str:
    """The same HTML, of the past: no dot claims that something is alive."""
    return re.sub(
        r'<span data-jv="state" style="[^"]*">●</span>',
        f'<span style="color:{IDLE}">○</span>',
        html,
    )


def notice_html(text: str) -> str:
    """A line above a snapshot; text in backquotes is code."""
    words = "".join(
        f'<code style="font-family:{MONO};background:none">{escape(part)}</code>'
        if i % 2
        else escape(part)
        for i, part in enumerate(text.split("`"))
    )
    style = f"{BOX};margin:0 0 8px;padding:6px 10px;border-left:4px solid {BAD};background:{FILL}"
    return f'<div style="{style}">{words}</div>'


def faint(text: str) -> str:
    """A line of lesser weight, as HTML; nothing for an empty one."""
    return f'<div style="color:{FAINT}">{text}</div>' if text else ""


def unseen(count: int, words: str) -> str:
    """What is said of those that are not shown, `words.format(count)`; nothing if there are none."""
    return faint(words.format(count)) if count > 0 else ""


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()
) -> str:
    """A plain table. Cells are HTML: callers escape untrusted text. `numbers`: right-aligned columns."""
    right = set(numbers)
    style = lambda i: NUMBER if i in right else CELL
    head = "".join(
        f'<th style="{style(i)};color:{FAINT};font-weight:600">{escape(h)}</th>'
        for i, h in enumerate(heads)
    )
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{style(i)}">{cell}</td>' for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<table style="border-collapse:collapse"><tr>{head}</tr>{body}</table>'


def headlines(items: Iterable[tuple[str, str, str]]) -> str:
    """Large numbers in a row, each (number, what follows it, what it is below); texts, not HTML."""
    large = "font-size:26px;line-height:1.2;font-weight:600"
    shown = "".join(
        f'<div data-jv="headline"><div style="white-space:nowrap;font-variant-numeric:tabular-nums">'
        f'<span style="{large}">{escape(number)}</span> <span style="color:{FAINT}">{escape(beside)}</span></div>'
        f'<div style="color:{FAINT}">{escape(below)}</div></div>'
        for number, beside, below in items
    )
    style = "display:flex;flex-wrap:wrap;gap:4px 36px;margin:2px 0 6px"
    return f'<div style="{style}">{shown}</div>' if shown else ""


def bar(share: float, colour: str = PALETTE[0], width: str = "16em") -> str:
    """A progress bar; `share` from 0 to 1."""
    percent = 100 * min(max(share, 0.0), 1.0)
    return (
        f'<div style="width:{width};height:6px;background:{LINE};margin:4px 0">'
        f'<div style="width:{percent:.1f}%;height:6px;background:{colour}"></div></div>'
    )


def message_html(text: str, bad: bool = False) -> str:
    """A line of text for the user, coloured if it is an error; empty for an empty text."""
    style = f"{BOX};color:{BAD if bad else FAINT};white-space:pre-wrap"
    return f'<div style="{style}">{escape(text)}</div>' if text else ""


def sparkline(
    values: Sequence[float], width: int = 90, height: int = 18, colour: str = PALETTE[0]
) -> str:
    """A small curve as inline SVG; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    top = max(values)
    low = min(0.0, *values)
    reach = (top - low) or 1.0
    step = (width - 2) / (len(values) - 1)
    points = " ".join(
        f"{1 + i * step:.1f},{height - 1 - (v - low) / reach * (height - 2):.1f}"
        for i, v in enumerate(values)
    )
    return (
        f'<svg width="{width}" height="{height}" role="img" style="vertical-align:middle">'
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/></svg>'
    )
