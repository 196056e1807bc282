"""One row of a mapping in detail: rule and reason, its effect on the axes, both shardings, bytes per sender."""

from __future__ import annotations

from collections.abc import Collection
from html import escape
from typing import TYPE_CHECKING

from jvlab._units import human_bytes
from jvlab.views._axes_view import axes_svg
from jvlab.views._drawing import draw, sends
from jvlab.views._mapping_search import dtype_text
from jvlab.views._mapping_view import DOTS, drawing_svg
from jvlab.views._style import BAD, BOX, FAINT, GOOD, LINE, MONO, WAIT, dot, table

if TYPE_CHECKING:
    from jvlab.sync._mapping import Mapping
    from jvlab.sync._mapping_row import MappingRow
    from jvlab.sync._meaning import Meaning

MAX_DEVICES, MAX_RANKS = 16, 8  # of the table of senders
STATUS_WORDS = {
    "direct": "copied, not converted",
    "cast": "converted on the way, on the trainer's device",
    "quantised": "scaled and cast to fp8 on the trainer's device",
    "staged": "written raw, then re-packed by the engine",
    "opaque": "goes whole through vLLM's own loader",
    "unused": "no rank takes anything from it",
}


def detail_html(mapping: Mapping | None, row: MappingRow, meaning: Meaning | None = None) -> str:
    """Text and pictures of a row; the text alone while edited rules do not cover the model (no mapping).

    `meaning`: what is known of the mapping's values.
    """
    path = " → ".join(f"<b>{escape(name)}</b>" for name in (row.name, row.tensor, row.parameter) if name)
    cells = "".join(
        f'<div style="color:{FAINT}">{name}</div><div style="overflow-wrap:anywhere">{value}</div>'
        for name, value in _facts(mapping, row, meaning)
    )
    grid = f'<div style="display:grid;grid-template-columns:auto 1fr;gap:2px 14px;margin:4px 0 8px">{cells}</div>'
    return (
        f'<div style="{BOX};border-top:1px solid {LINE};padding-top:6px"><div style="overflow-wrap:anywhere">{path}'
        f"</div>{grid}{_pictures(mapping, row) if mapping is not None else ''}</div>"
    )


def _facts(mapping: Mapping | None, row: MappingRow, meaning: Meaning | None) -> list[tuple[str, str]]:
    out = [("rule", f'<span style="font-family:{MONO};font-size:12px">{escape(row.rule) or "none"}</span>')]
    if row.status == "problem":
        return [*out, ("problem", escape(row.reason))]
    if row.reason:
        out.append(("because", escape(f"{row.reason} (confidence {row.confidence:.2f})")))
    if row.warning:
        out.append(("warning", escape(row.warning)))
    size = f"{human_bytes(row.nbytes)} as {escape(dtype_text(row))}" if row.nbytes else "nothing"
    out.append(("moves", f"{size} to rank{'s' * (len(row.ranks) > 1)} {row.rank_text}" if row.ranks else size))
    out.append(("status", f"{dot(DOTS[row.status])} {row.status}: {STATUS_WORDS[row.status]}"))
    seen = meaning.leaves.get(row.name) if meaning is not None else None
    if seen is not None:
        tone = BAD if seen.contradicts else GOOD if seen.agrees else WAIT
        out.append(("by value", f"{dot(tone)} {'wrong: ' * seen.contradicts}{escape(seen.text)}"))
    left = meaning.ambiguous if meaning is not None and meaning.state == "checked" else None
    if left is None:
        left = mapping.ambiguous if mapping is not None else {}
    if row.leaf in left:
        out.append(("ambiguous", f"{escape(left[row.leaf])}; only a value or a function can tell"))
    note = mapping.notes.get(row.parameter) or mapping.notes.get(row.tensor) if mapping is not None else None
    return [*out, ("note", escape(note))] if note else out


def _pictures(mapping: Mapping, row: MappingRow) -> str:
    binding = next((b for b in mapping.bindings if (b.leaf, b.tensor) == (row.leaf, row.tensor)), None)
    if binding is None:
        return ""
    only = [row.parameter] if row.part else ()
    titles = (
        "what the rule does to the axes" + (": one slice is taken" if row.part else ""),
        # as wide as its picture, so that this one fits beside the other
        '<div style="width:0;min-width:100%">source and destination of each piece: numbers are devices, empty regions '
        "belong to other tensors</div>",
        "bytes sent by each device",
    )
    pictures = (
        axes_svg(binding) if binding.axes else "one number",
        drawing_svg(draw(mapping.plan, row.leaf, only)),
        _senders(mapping, row.leaf, only),
    )
    blocks = "".join(
        f'<div style="overflow-x:auto"><div style="color:{FAINT}">{title}</div>{picture}</div>'
        for title, picture in zip(titles, pictures, strict=True)
        if picture
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:8px 30px">{blocks}</div>'


def _senders(mapping: Mapping, leaf: str, parameters: Collection[str]) -> str:
    """Bytes of the leaf, or of its slice for these parameters, from each device to each rank of the first replica."""
    found = sends(mapping.plan, leaf, parameters=parameters)
    if not found:
        return ""
    ranks, devices = sorted({r for _, r in found}), sorted({d for d, _ in found})
    rows = [
        [f"device {d}", *(human_bytes(found[d, r]) if (d, r) in found else "" for r in ranks[:MAX_RANKS])]
        for d in devices[:MAX_DEVICES]
    ]
    heads = ["", *(f"rank {r}" for r in ranks[:MAX_RANKS])]
    left = [
        f"{len(x) - most} more {what}"
        for x, most, what in ((devices, MAX_DEVICES, "devices"), (ranks, MAX_RANKS, "ranks"))
        if len(x) > most
    ]
    more = f'<div style="color:{FAINT}">{", ".join(left)}</div>' if left else ""
    return f'<div style="margin-top:6px">{table(heads, rows, range(1, len(heads)))}{more}</div>'
