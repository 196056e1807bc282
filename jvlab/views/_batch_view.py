"""A `RolloutBatch` as an HTML table with coloured tokens, and as data for the widget; how samples lie in rows."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab.record._sample import spans_text
from jvlab.record._token_pieces import TokenSplitter, TokenTexts, visible
from jvlab.views._drawing import ink
from jvlab.views._figures import new_figure
from jvlab.views._style import BOX, FAINT, MONO, PALETTE, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jvlab.record._batch import RolloutBatch
    from jvlab.record._sample import Sample
    from jvlab.trainer._micro_batches import Packing

ROWS = 10  # samples in the static table
TEXT = 280  # characters of a text in it
SPANS = 300  # coloured runs in it, to keep saved notebooks small
WIDGET_TOKENS = 50_000  # tokens sent to one widget: splitting them takes about a second
FLOOR = -8.0  # log-probability, in nats, from which a token has the full colour
LEVELS = 6


def batch_html(batch: RolloutBatch) -> str:
    """The first samples as a table, completions coloured by log-probability; small for any batch."""
    splitter = TokenSplitter(batch.model)
    budget = [SPANS]
    rewards = any(s.reward is not None for s in batch.samples)
    gaps = any(s.trainer_logprobs is not None for s in batch.samples)
    heads = [
        "prompt",
        "sample",
        "prompt text",
        "completion",
        *(["reward"] if rewards else []),
        "finish",
        "tokens",
    ]
    heads += ["mean logprob", *(["largest gap"] if gaps else []), "version"]
    rows = []
    for s in batch.samples[:ROWS]:
        row = [
            str(s.prompt_index),
            str(s.sample_index),
            _text(splitter.prompt_text(s), 120, 8),
            _completion(s, splitter, budget),
        ]
        row += [number(s.reward) + _parts(s)] if rewards else []
        row += [escape(s.finish_reason), str(len(s.token_ids)), number(s.mean_logprob)]
        row += [number(largest_gap(s))] if gaps else []
        rows.append([*row, spans_text(s)])
    numbers = ("prompt", "sample", "reward", "tokens", "mean logprob", "largest gap")
    right = [i for i, head in enumerate(heads) if head in numbers]
    rest = len(batch) - len(rows)
    more = (
        f'<div style="color:{FAINT}">… {rest:,} more samples; batch.panel() shows them all</div>'
        if rest > 0
        else ""
    )
    notes = "".join(f"<li>{escape(visible(note))}</li>" for note in batch.notes)
    notes = f"<ul>{notes}</ul>" if notes else ""
    title = f"<div><b>{escape(visible(repr(batch)))}</b></div>"
    return f'<div style="{BOX}">{title}{table(heads, rows, right)}{more}{notes}</div>'


def number(value: float | None) -> str:
    """Three decimals; a dash for None and NaN."""
    return "–" if value is None or value != value else f"{value:.3f}"


def _parts(sample: Sample) -> str:
    """What a reward is the sum of, small below it."""
    lines = (
        f"{escape(visible(name))} {number(value)}"
        for name, value in sample.reward_parts.items()
    )
    return "".join(f'<div style="color:{FAINT}">{line}</div>' for line in lines)


def largest_gap(sample: Sample) -> float | None:
    """The largest |engine − trainer| log-probability gap over the completion."""
    gap = sample.gap
    return None if gap is None or not len(gap) else float(np.abs(gap).max())


def _wrap(inner: str, narrow: int = 22) -> str:
    """Model text in a column of limited width, with its own text direction and line breaks."""
    style = f"font-family:{MONO};white-space:pre-wrap;overflow-wrap:anywhere;min-width:{narrow}em;max-width:36em"
    style += ";unicode-bidi:isolate"
    return f'<div style="{style}">{inner}</div>'


def _text(text: str, limit: int = TEXT, narrow: int = 22) -> str:
    return _wrap(
        escape(visible(text if len(text) <= limit else text[: limit - 1] + "…")), narrow
    )


def _completion(sample: Sample, splitter: TokenSplitter, budget: list[int]) -> str:
    """A completion with its tokens coloured, within the budget of coloured runs."""
    pieces = (
        splitter(sample)
        if budget[0] > 0 and not sample.error
        else TokenTexts(why="not asked for")
    )
    if pieces.why or np.isnan(sample.logprobs).all():
        return _text(
            sample.text if sample.error is None else f"{sample.text} [{sample.error}]"
        )
    out = []
    left = TEXT
    levels = [_level(v) for v in sample.logprobs.tolist()]
    # consecutive tokens of one colour are merged, to keep saved notebooks small
    for level, run in groupby(range(len(levels)), key=lambda t: levels[t]):
        text = "".join(pieces.texts[t] for t in run)
        out.append(_run(text[:left], level if budget[0] > 0 else 0))
        budget[0] -= 1
        left -= len(text)
        if left < 0:
            return _wrap("".join(out) + "…")
    return _wrap("".join(out))


def _level(logprob: float) -> int:
    if logprob != logprob:
        return 0
    return round(LEVELS * min(1.0, max(logprob, FLOOR) / FLOOR))


def _run(text: str, level: int) -> str:
    shown = escape(visible(text))
    if not level:
        return shown
    return f'<span style="background:rgba(213,94,0,{0.55 * level / LEVELS:.2f})">{shown}</span>'


# Data for the widget ----------------------------------------------------------------------------------------------


def batch_data(batch: RolloutBatch) -> dict[str, Any]:
    """The batch as plain values: prompts with their samples, token by token, up to `WIDGET_TOKENS`."""
    splitter = TokenSplitter(batch.model)
    groups = []
    tokens = 0
    every = batch.groups()
    for group in every:
        tokens += sum(len(s.token_ids) for s in group)
        if groups and tokens > WIDGET_TOKENS:
            break
        first = group[0]
        prompt = splitter.prompt_text(first)
        groups.append(
            {
                "prompt": visible(prompt),
                "number": first.prompt_index,
                "samples": [_sample(s, splitter) for s in group],
            }
        )
    gaps = [
        abs(g) for group in groups for s in group["samples"] for g in s["gap"] or ()
    ]
    left = len(every) - len(groups)
    return {
        "title": visible(repr(batch)),
        "groups": groups,
        "versions": list(batch.versions),
        "palette": list(PALETTE),
        "floor": FLOOR,
        "reach": max((g for g in gaps if g == g), default=0.0),
        "compared": bool(gaps),
        "notes": [visible(note) for note in batch.notes],
        "left": f"{left:,} more prompts do not fit on one page: batch[a:b].panel() shows a part"
        if left
        else "",
    }


def _sample(s: Sample, splitter: TokenSplitter) -> dict[str, Any]:
    pieces = splitter(s)
    ids = s.token_ids.tolist()
    gap = None if s.gap is None else list(_rounded(s.gap))
    return {
        "number": s.sample_index,
        "ids": ids,
        "why": pieces.why,
        "pieces": [visible(t) for t in pieces.texts] or [f"⟨{i}⟩" for i in ids],
        "special": sorted(pieces.special),
        "text": visible(s.text),
        "logprobs": list(_rounded(s.logprobs)),
        "gap": gap,
        "versions": s.token_versions.tolist(),
        "parts": {visible(name): value for name, value in s.reward_parts.items()},
        "reward": s.reward if s.reward == s.reward else None,
        "mean": None if s.mean_logprob != s.mean_logprob else round(s.mean_logprob, 4),
        "finish": s.finish_reason,
        "error": visible(s.error or ""),
        "replica": s.replica,
    }


def _rounded(values: np.ndarray) -> Iterator[float | None]:
    """Six digits are enough for colours and tooltips; None for NaN, which JSON does not have."""
    return (None if v != v else float(f"{v:.6g}") for v in values.tolist())


# How samples lie in the rows of a step: each sample in its colour, padding hatched.

ROW = 0.16  # inches
NUMBERED = 0.05  # of the width: a sample that is at least as wide shows its number
MAX_ROWS = 120


def packing_figure(*packings: Packing) -> Figure:
    """One panel for each packing, side by side, on the same scale of tokens."""
    most = min(max(len(p.rows) for p in packings), MAX_ROWS)
    longest = max(max(p.widths) for p in packings)
    figure = new_figure(5.2 * len(packings), 1.1 + ROW * most)
    for axes, packing in zip(
        figure.subplots(1, len(packings), squeeze=False)[0], packings, strict=True
    ):
        _packed_rows(axes, packing, longest)
        passes = len(packing.shapes)
        shapes = packing.compiled
        counts = (
            f"{passes} pass{'es' * (passes != 1)}, {shapes} shape{'s' * (shapes != 1)}"
        )
        axes.set_title(
            f"{100 * packing.padding:.1f} % padding, {counts}", fontsize=10, loc="left"
        )
        axes.set(xlim=(0, longest), ylim=(most - 0.4, -0.6), yticks=[])
        axes.set_xlabel("tokens of a row", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _packed_rows(axes: Any, packing: Packing, longest: int) -> None:
    for y, (samples, width) in enumerate(
        zip(packing.rows[:MAX_ROWS], packing.widths, strict=False)
    ):
        at = 0
        for sample in samples:
            size = int(packing.lengths[sample])
            axes.barh(
                y,
                size,
                left=at,
                height=0.8,
                color=PALETTE[sample % len(PALETTE)],
                edgecolor="white",
                linewidth=0.6,
            )
            if size > NUMBERED * longest:
                shade = ink(sample % len(PALETTE))
                axes.text(
                    at + size / 2,
                    y,
                    str(sample),
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color=shade,
                )
            at += size
        if at < width:
            axes.barh(
                y,
                width - at,
                left=at,
                height=0.8,
                facecolor="none",
                edgecolor="#999999",
                hatch="////",
                linewidth=0,
            )
    first = 0
    for count, _ in packing.shapes[:-1]:  # a line between micro-batches
        first += count
        if first < MAX_ROWS:
            axes.axhline(first - 0.5, color="#999999", linewidth=0.5)
    if len(packing.rows) > MAX_ROWS:
        axes.text(
            0, MAX_ROWS - 0.5, f"{len(packing.rows) - MAX_ROWS} more rows", fontsize=7
        )
