"""A `RolloutBatch` as an HTML table with coloured tokens, and the viewer; how samples lie in rows."""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jvlab._errors import ConfigError
from jvlab._units import how_many
from jvlab.record._sample import spans_text
from jvlab.record._token_pieces import TokenSplitter, visible
from jvlab.views._figures import Plot, dress, new_figure
from jvlab.views._mapping_view import ink
from jvlab.views._style import BOX, MONO, PALETTE, faint, table, unseen
from jvlab.views.panels._live import Panel

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
    reward_head = ["reward"] if rewards else []
    gap_head = ["largest gap"] if gaps else []
    heads = ["prompt", "sample", "prompt text", "completion", *reward_head]
    heads += ["finish", "tokens", "mean logprob", *gap_head, "version"]
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
    words = "… {:,} more samples; batch.panel() shows them all"
    more = unseen(len(batch) - len(rows), words)
    notes = "".join(f"<li>{escape(visible(note))}</li>" for note in batch.notes)
    notes = f"<ul>{notes}</ul>" if notes else ""
    title = f"<div><b>{escape(visible(repr(batch)))}</b></div>"
    return f'<div style="{BOX}">{title}{table(heads, rows, right)}{more}{notes}</div>'


def number(value: float | None) -> str:
    """Three decimals; a dash for None and NaN."""
    return "–" if value is None or value != value else f"{value:.3f}"


def _parts(sample: Sample) -> str:
    """What a reward is the sum of, small below it."""
    parts = sample.reward_parts.items()
    return "".join(faint(f"{escape(visible(n))} {number(v)}") for n, v in parts)


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
    if sample.error is not None:
        return _text(f"{sample.text} [{sample.error}]")
    pieces = splitter(sample) if budget[0] > 0 else None
    if pieces is None or pieces.why or np.isnan(sample.logprobs).all():
        return _text(sample.text)
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
    groups: list[dict[str, Any]] = []
    gaps: list[float] = []
    tokens = 0
    every = batch.groups()
    for group in every:
        tokens += sum(len(s.token_ids) for s in group)
        if groups and tokens > WIDGET_TOKENS:
            break
        gaps += [abs(g) for s in group if s.gap is not None for g in s.gap.tolist()]
        groups.append(
            {
                "prompt": visible(splitter.prompt_text(group[0])),
                "number": group[0].prompt_index,
                "samples": [_sample(s, splitter) for s in group],
            }
        )
    left = len(every) - len(groups)
    words = (
        f"{left:,} more prompts do not fit on one page: batch[a:b].panel() shows a part"
    )
    return {
        "title": visible(repr(batch)),
        "groups": groups,
        "versions": list(batch.versions),
        "palette": list(PALETTE),
        "floor": FLOOR,
        "reach": _rounded(max((g for g in gaps if g == g), default=0.0)),
        "compared": bool(gaps),
        "notes": [visible(note) for note in batch.notes],
        "left": words if left else "",
    }


def _sample(s: Sample, splitter: TokenSplitter) -> dict[str, Any]:
    pieces = splitter(s)
    ids = s.token_ids.tolist()
    return {
        "number": s.sample_index,
        "ids": ids,
        "why": pieces.why,
        "pieces": [visible(t) for t in pieces.texts] or [f"⟨{i}⟩" for i in ids],
        "special": sorted(pieces.special),
        "text": visible(s.text),
        "logprobs": [_rounded(v) for v in s.logprobs.tolist()],
        "gap": None if s.gap is None else [_rounded(v) for v in s.gap.tolist()],
        "versions": s.versions.tolist(),
        "parts": {visible(name): value for name, value in s.reward_parts.items()},
        "reward": s.reward if s.reward == s.reward else None,
        "mean": _rounded(s.mean_logprob),
        "finish": s.finish_reason,
        "error": visible(s.error or ""),
        "replica": s.replica,
    }


def _rounded(value: float) -> float | None:
    """Six digits are enough for colours and tooltips; None for NaN, which JSON does not have."""
    return None if value != value else float(f"{value:.6g}")


# How samples lie in the rows of a step: each sample in its colour, padding hatched.

ROW = 0.16  # inches
NUMBERED = 0.05  # of the width: a sample that is at least as wide shows its number
MAX_ROWS = 120


def packing_figure(*packings: Packing) -> Figure:
    """One panel for each packing, side by side, on the same scale of tokens."""
    most = min(max(len(p.rows) for p in packings), MAX_ROWS)
    longest = max(max(p.widths) for p in packings)
    figure = new_figure(5.2 * len(packings), 1.1 + ROW * most)
    all_axes = figure.subplots(1, len(packings), squeeze=False)[0]
    for axes, packing in zip(all_axes, packings, strict=True):
        _packed_rows(axes, packing, longest)
        passes = how_many(len(packing.shapes), "pass", "passes")
        counts = f"{passes}, {how_many(packing.compiled, 'shape')}"
        title = f"{100 * packing.padding:.1f} % padding, {counts}"
        dress(axes, Plot(title, "tokens of a row", "", ()))
        axes.set(xlim=(0, longest), ylim=(most - 0.4, -0.6), yticks=[])
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
    return figure


def _packed_rows(axes: Any, packing: Packing, longest: int) -> None:
    middle: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5}
    shown = zip(packing.rows[:MAX_ROWS], packing.widths, strict=False)
    for y, (samples, width) in enumerate(shown):
        at = 0
        for sample in samples:
            size = int(packing.lengths[sample])
            place = sample % len(PALETTE)
            edge = {"edgecolor": "white", "linewidth": 0.6}
            axes.barh(y, size, 0.8, at, color=PALETTE[place], **edge)
            if size > NUMBERED * longest:
                axes.text(at + size / 2, y, str(sample), color=ink(place), **middle)
            at += size
        if at < width:
            hatched = {"edgecolor": "#999999", "hatch": "////", "linewidth": 0}
            axes.barh(y, width - at, 0.8, at, facecolor="none", **hatched)
    first = 0
    for count, _ in packing.shapes[:-1]:  # a line between micro-batches
        first += count
        if first < MAX_ROWS:
            axes.axhline(first - 0.5, color="#999999", linewidth=0.5)
    left = len(packing.rows) - MAX_ROWS
    if left > 0:
        axes.text(0, MAX_ROWS - 0.5, f"{left} more rows", fontsize=7)


COLOURS = ("logprob", "gap", "version")


class BatchPanel(Panel):
    """The viewer's Python side. Its methods do the same as the viewer's buttons and keys."""

    hz = 0.01  # a batch never changes
    moving = False
    scripts = ("diff.js", "rollout.js")
    css = ("rollout.css",)
    css_class = "jv-rollout-panel"
    # `reference`: the sample that the others are compared with; -1: none
    traits: ClassVar[dict[str, Any]] = {
        "data": {},
        "colour": "logprob",
        "prompt": 0,
        "sample": 0,
        "reference": -1,
        "query": "",
    }

    def __init__(self, batch: RolloutBatch, colour: str | None = None) -> None:
        self._data = batch_data(batch)
        self._first = colour or ("gap" if self._data["compared"] else "logprob")
        self._check(self._first)
        super().__init__(batch)

    def build(self) -> Any:
        return self.new_widget(data=self._data, colour=self._first)

    def _check(self, colour: str) -> None:
        if colour not in COLOURS:
            raise ConfigError(
                f"colour={colour!r}",
                remedy=f"one of {', '.join(COLOURS)}",
                colour=colour,
            )
        if colour == "gap" and not self._data["compared"]:
            raise ConfigError(
                "this batch has no log-probabilities of the trainer",
                remedy="show batch.compare(policy) instead",
            )

    @property
    def colour(self) -> str:
        """What tokens are coloured by: "logprob", "gap" or "version"."""
        return self.widget.colour

    @property
    def at(self) -> tuple[int, int]:
        """The selected (prompt, sample), each counted from 0 in the order shown."""
        return self.widget.prompt, self.widget.sample

    def colour_by(self, colour: str) -> None:
        """Colour tokens by "logprob", "gap" or "version", like the three buttons and the key c."""
        self._check(colour)
        self.widget.colour = colour

    def select(self, prompt: int, sample: int = 0) -> None:
        """Go to a prompt and one of its samples, counted from 0, like the arrow buttons and keys."""
        groups = self._data["groups"]
        if not 0 <= prompt < len(groups):
            raise ConfigError(
                f"there is no prompt {prompt}", remedy=f"from 0 to {len(groups) - 1}"
            )
        count = len(groups[prompt]["samples"])
        if not 0 <= sample < count:
            raise ConfigError(
                f"prompt {prompt} has no sample {sample}",
                remedy=f"from 0 to {count - 1}",
            )
        with self.widget.hold_sync():
            self.widget.prompt = prompt
            self.widget.sample = sample
            self.widget.reference = -1

    def __repr__(self) -> str:
        return f"BatchPanel({self.subject!r}, {'closed' if self.closed else f'coloured by {self.colour}'})"
