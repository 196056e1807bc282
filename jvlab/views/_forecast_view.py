"""`jv.whatif`'s plan and its forecasts as text, HTML and a figure; the panel with a slider for each setting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from jvlab._errors import ConfigError
from jvlab._units import human_seconds
from jvlab.record._export import aligned
from jvlab.views._figures import Plot, Series, draw, dress, new_figure
from jvlab.views._palette import NEUTRAL
from jvlab.views._palette import PHASES as PHASE_COLOURS
from jvlab.views._style import BOX, FAINT, IDLE, LINE, PALETTE, WAIT, headlines, table
from jvlab.views.panels._live import Panel, static_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jvlab.analysis.forecast._whatif import Forecast, WhatIf


PHASES = ("generate", "reward", "train", "sync")
BOUNDS = (0, 1, 2, 3)  # staleness bounds in the figure
REPLICAS = (1, 2, 4)
BATCHES = (0.25, 0.5, 1, 2, 4)
HEADS = (
    "prompts",
    "group",
    "tokens",
    "K",
    "replicas",
    "s a step",
    "90 %",
    "tokens/s",
    "staleness",
    "idle",
    "engines",
)
MEASURED = ("measured", "error")


def _cells(row: Any, measured: bool) -> list[str]:
    s = row.setting
    sizes = (
        s.prompts_per_step,
        s.group_size,
        s.max_tokens,
        s.max_staleness,
        s.replicas,
    )
    out = [
        *map(str, sizes),
        f"{row.step_s:.3g}",
        f"{row.low:.3g} – {row.high:.3g}" if row.low == row.low else "–",
        f"{row.tokens_per_s:,.0f}",
        f"{row.staleness_mean:.2f}",
        f"{row.idle_s / row.step_s:.0%}",
        f"{row.engine_busy:.0%} busy",
    ]
    if not measured:
        return out
    if row.error is None:
        return [*out, "–", "–"]
    return [*out, f"{row.measured_s:.3g}", f"{100 * row.error:+.1f} %"]


def _table(rows: Iterable[Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    rows = list(rows)
    measured = any(row.error is not None for row in rows)
    heads = (*HEADS, *MEASURED) if measured else HEADS
    return heads, [_cells(row, measured) for row in rows]


def _rows_html(rows: Iterable[Any]) -> str:
    heads, lines = _table(rows)
    cells = [[escape(cell) for cell in line] for line in lines]
    return table(heads, cells, numbers=range(len(heads)))


def table_text(rows: Any) -> str:
    """Forecasts as aligned text."""
    heads, cells = _table(rows)
    lines = aligned([heads, *cells])
    return "\n".join([rows.title, *lines] if rows.title else lines)


def table_html(rows: Any) -> str:
    """Forecasts as a table."""
    title = f"<b>{escape(rows.title)}</b>" if rows.title else ""
    return f'<div style="{BOX};overflow-x:auto">{title}{_rows_html(rows)}</div>'


def _bars(row: Any) -> list[tuple[str, float, str]]:
    """The phases of a step, which may overlap, and what is idle: name, seconds, colour."""
    shown = [(name, row.seconds.get(name, 0.0), PHASE_COLOURS[name]) for name in PHASES]
    return [*shown, ("idle", row.idle_s, IDLE)]


def _phases_svg(row: Any) -> str:
    """The bars of a step, a line each."""
    reach = max(row.step_s, *row.seconds.values(), 1e-9)
    lines = []
    for at, (name, seconds, colour) in enumerate(_bars(row)):
        y = 18 * at
        width = 260 * seconds / reach
        lines.append(
            f'<text x="0" y="{y + 12}" fill="currentColor">{name}</text>'
            f'<rect x="70" y="{y + 2}" width="{width:.1f}" height="12" fill="{colour}"/>'
            f'<text x="{76 + width:.1f}" y="{y + 12}" fill="currentColor">{human_seconds(seconds)}</text>'
        )
    edge = 70 + 260 * row.step_s / reach
    lines.append(
        f'<path d="M{edge:.1f} 0V90" stroke="currentColor" stroke-dasharray="2 3" opacity=".5"/>'
    )
    style = "font-size:12px;max-width:100%"
    text = f"seconds of a step by phase; a step takes {human_seconds(row.step_s)}"
    head = f'<svg role="img" aria-label="{text}" viewBox="0 0 420 92" width="420" style="{style}">'
    return f"{head}{''.join(lines)}</svg>"


def forecast_html(row: Any) -> str:
    """One forecast: large numbers, where the time goes, how far it is from what was measured."""
    closed = row.closed
    check = f"closed form {closed.low:.3g} s" + (
        f" to {closed.high:.3g} s" if closed.high > closed.low else ""
    )
    span = f"{row.low:.3g} to {row.high:.3g} s" if row.low == row.low else "no interval"
    heads = [
        (f"{row.step_s:.3g}", "s a step", f"{span} · {check}"),
        (f"{row.tokens_per_s:,.0f}", "tokens/s", "trained on"),
        (
            f"{row.staleness_mean:.2f}",
            "staleness",
            f"mean of a token; at most {row.staleness_max}",
        ),
        (f"{row.engine_busy:.0%}", "engines busy", f"trainer {row.trainer_busy:.0%}"),
    ]
    notes = "".join(
        f'<div style="color:{WAIT}">⚠ {escape(note)}</div>' for note in row.notes
    )
    return (
        f'<div style="{BOX}"><div style="color:{FAINT}">{escape(str(row.setting))}</div>'
        f"{headlines(heads)}{_phases_svg(row)}{notes}</div>"
    )


def whatif_html(plan: Any) -> str:
    """The plan: what it was fitted to, and its forecast for K from 0 to 2."""
    rates = plan.rates
    fit = plan.fit
    facts = {
        "decoding": f"{human_seconds(rates.step)} a step + {human_seconds(rates.row)} a row",
        "training": f"{human_seconds(rates.train)} + {human_seconds(1000 * rates.train_token)} per 1,000 tokens",
        "sync": human_seconds(rates.syncing(plan.setting.replicas)),
        "loads": f"engine {rates.engine_load:.0%}, trainer {rates.train_load:.0%} of a shared device"
        + ("" if fit.overlapping else " (assumed)"),
        "errors of the fit": f"generation {fit.generation_error:.1%}, training {fit.training_error:.1%}",
    }
    known = table(
        ("", ""), [[f"<b>{escape(k)}</b>", escape(v)] for k, v in facts.items()]
    )
    ahead = _rows_html(plan.predict(max_staleness=k) for k in (0, 1, 2))
    rule = f'<div style="border-top:1px solid {LINE};margin:6px 0"></div>'
    return f'<div style="{BOX};overflow-x:auto"><b>{escape(repr(plan))}</b>{known}{rule}{ahead}</div>'


# The figure -----------------------------------------------------------------------------------------------------------


def whatif_figure(plan: Any) -> Figure:
    """Step time and staleness by K for some numbers of replicas, tokens per second by batch, the parts of a step."""
    figure = new_figure(11, 3.6)
    axes: Any = figure.subplots(1, 3)
    for ax, plot in zip(axes, (_by_bound(plan), _by_batch(plan)), strict=False):
        draw(ax, plot)
        ax.set_ylim(bottom=0)
    _parts(axes[2], [plan.predict(max_staleness=k, interval=False) for k in (0, 1, 2)])
    return figure


def _by_bound(plan: Any) -> Plot:
    base = plan.setting.replicas
    series = []
    for replicas in list(dict.fromkeys((base, *REPLICAS)))[:3]:
        rows = [
            plan.predict(max_staleness=k, replicas=replicas, interval=replicas == base)
            for k in BOUNDS
        ]
        label = f"{replicas} replica{'s' * (replicas > 1)}"
        band = ([r.low for r in rows], [r.high for r in rows])
        times = [r.step_s for r in rows]
        colour = PALETTE[len(series)]
        series.append(Series(BOUNDS, times, colour, label, "o-", band))
    same = [
        o
        for o in plan.seen
        if o.setting.changed(max_staleness=0, replicas=base)
        == plan.setting.changed(max_staleness=0)
    ]
    bounds = [o.setting.max_staleness for o in same]
    times = [o.step_s for o in same]
    series.append(Series(bounds, times, NEUTRAL, "measured", "x"))
    x = "largest staleness K"
    return Plot("Step time", x, "seconds a step", series, whole=True)


def _by_batch(plan: Any) -> Plot:
    prompts = sorted(
        {max(round(plan.setting.prompts_per_step * f), 1) for f in BATCHES}
    )
    series = []
    for bound in (0, 1):
        rows = [
            plan.predict(prompts_per_step=p, max_staleness=bound, interval=not bound)
            for p in prompts
        ]
        tokens = [r.tokens_per_s * r.step_s for r in rows]
        over = lambda seconds, tokens=tokens: [
            n / s for n, s in zip(tokens, seconds, strict=True)
        ]
        band = (over([r.low for r in rows]), over([r.high for r in rows]))
        samples = [r.setting.samples for r in rows]
        speeds = [r.tokens_per_s for r in rows]
        label = f"K = {bound}"
        series.append(Series(samples, speeds, PALETTE[bound], label, "o-", band))
    return Plot("Throughput", "samples a step", "trained tokens per second", series)


def _parts(ax: Axes, rows: Sequence[Any]) -> None:
    dress(ax, Plot("A step's phases (line: its time)", "seconds", "", ()))
    named: set[str] = set()
    for at, row in enumerate(rows):
        shown = [bar for bar in _bars(row) if bar[1] > 0]
        height = 0.8 / max(len(shown), 1)
        for line, (name, seconds, colour) in enumerate(shown):
            label = None if name in named else name
            named.add(name)
            y = at - 0.4 + height * line
            ax.barh(y, seconds, height, color=colour, label=label, align="edge")
        ax.plot([row.step_s] * 2, [at - 0.45, at + 0.45], color=NEUTRAL, linewidth=1.5)
    ax.set_yticks(
        range(len(rows)), [f"K = {row.setting.max_staleness}" for row in rows]
    )
    ax.invert_yaxis()
    # beside the bars, not on them
    ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


LABELS = {
    "prompts_per_step": "prompts a step",
    "group_size": "samples of each",
    "max_tokens": "tokens at most",
    "max_staleness": "staleness K",
    "replicas": "replicas",
}
PLACEMENTS = ("shared", "trainer apart", "apart")


class ForecastPanel(Panel):
    """The sliders; `predict` does what they do, `reset` goes back to the measured setting."""

    hz = 0.2  # nothing changes by itself
    moving = False  # its snapshot is renewed when a slider was moved
    scripts = ("forecast.js",)
    css = ("forecast.css",)
    css_class = "jv-forecast-panel"
    traits: ClassVar[dict[str, Any]] = {
        "title": "",
        "sliders": [],
        "places": [],
        "chosen": {},
        "result": "",
        "note": "",
        "answers": 0,  # `answers`: forecasts so far
    }

    def __init__(self, plan: WhatIf) -> None:
        self.plan = plan
        self.forecast: Forecast = plan.predict()
        super().__init__(plan)

    def build(self) -> Any:
        widget = self.new_widget(
            title=repr(self.plan), sliders=self._sliders(), places=list(PLACEMENTS)
        )
        widget.on_msg(self._moved)
        self._write(widget)
        return widget

    def _sliders(self) -> list[dict[str, Any]]:
        base = self.plan.setting
        return [
            {"name": name, "label": label, "values": _values(name, getattr(base, name))}
            for name, label in LABELS.items()
        ]

    def static_html(self) -> str:
        """The plan, and the forecast that the sliders asked for last."""
        return static_html(self.plan) + forecast_html(self.forecast)

    def say(self, text: str, bad: bool = False) -> None:
        self.widget.note = text

    def _moved(self, _: Any, message: Any, __: Any) -> None:
        if not isinstance(message, dict):
            return
        if message.get("do") == "reset":
            self.act(self.reset)
        elif message.get("do") == "predict" and isinstance(message.get("values"), dict):
            self.act(lambda: self.predict(**message["values"]))

    def predict(self, **changes: Any) -> Forecast:
        """`plan.predict(**changes)`, shown."""
        unknown = set(changes) - {*LABELS, "placement"}
        if unknown:
            raise ConfigError(
                f"no slider for {', '.join(sorted(unknown))}",
                remedy=f"one of {', '.join(LABELS)}",
            )
        self.forecast = self.plan.predict(**changes)
        with self.widget.hold_sync():
            self._write(self.widget)
        self.save_snapshot()
        return self.forecast

    def reset(self) -> Forecast:
        """The measured setting again."""
        return self.predict()

    def _write(self, widget: Any) -> None:
        setting = self.forecast.setting
        widget.chosen = {
            **{name: getattr(setting, name) for name in LABELS},
            "placement": setting.placement,
        }
        widget.result = forecast_html(self.forecast)
        widget.note = ""
        widget.answers += 1

    def __repr__(self) -> str:
        return f"ForecastPanel({self.forecast!r})"


def _values(name: str, base: int) -> list[int]:
    """The stops of a slider, the measured value among them."""
    if name == "max_staleness":
        return sorted({*range(9), base})
    if name == "replicas":
        return sorted({1, 2, 3, 4, 6, 8, 12, 16, base})
    steps = {max(round(base * 2 ** (k / 2)), 1) for k in range(-6, 7)}
    return sorted(steps | {base})
