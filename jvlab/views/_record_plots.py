"""Figures of a run record: learning curves, staleness of tokens, throughput and utilisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._units import how_many
from jvlab.record import _metrics
from jvlab.record._events import (
    EvaluationEvent,
    Event,
    StepEvent,
    SyncEvent,
    only,
    run_name,
)
from jvlab.record._record import Record
from jvlab.views._figures import EMPTY, Plot, Series, draw, dress, new_figure
from jvlab.views._palette import PHASES, SERIES, version_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jvlab.trainer._run import Run

BLUE, ORANGE, PINK, RED = SERIES[0], SERIES[1], SERIES[3], SERIES[5]
MAX_BARS = 60  # steps drawn as separate bars; more are averaged in groups
MAX_LEVELS = 6  # staleness levels drawn separately
# time bins
MIN_BINS = 12
MAX_BINS = 80
# column of the steps' table → title and unit
CURVES = {
    "reward_mean": ("Reward", "reward"),
    "loss": ("Loss", "loss"),
    "kl": ("KL to the reference", "KL (nats per token)"),
    "entropy": ("Entropy of the policy", "entropy (nats per token)"),
    "logprob_gap": ("Trainer against engine", "largest logprob gap (nats)"),
}
Table = dict[str, np.ndarray]


def _figure(title: str, plots: Sequence[Plot], high: float, **grid: Any) -> Figure:
    """Plots in two columns."""
    figure = new_figure(10, high)
    figure.suptitle(title)
    axes: Any = figure.subplots(len(plots) // 2, 2, **grid)
    for ax, plot in zip(axes.flat, plots, strict=True):
        draw(ax, plot)
    return figure


# Learning curves ------------------------------------------------------------------------------------------------------


def run_figure(record: Record) -> Figure:
    """Reward, loss, KL, entropy, the gap between trainer and engine with its alarm line, and time per phase."""
    events = record.events()
    table = _metrics.step_table(events)
    plots = [
        _curve(
            "reward_mean",
            [_reward(table), _evaluations(events, PHASES["score"], "held out", "s")],
        ),
        _curve("loss", [_line(table, "loss")], marks=table["step"][table["skipped"]]),
        _curve("kl", [_line(table, "kl")]),
        _curve("entropy", [_line(table, "entropy")]),
        _gap(table, _metrics.gap_alarm(events)),
        _time_split(events, table),
    ]
    title = f"{run_name(events)}: {how_many(len(table['step']), 'step')}"
    return _figure(title, plots, 8)


def compare_figure(*runs: Run | Record) -> Figure:
    """Several runs side by side: reward, loss, entropy and gap by step, evaluations, and seconds a step."""
    records: dict[str, Record] = {}
    for number, run in enumerate(runs, 1):
        record = run if isinstance(run, Record) else run.record
        name = (
            Path(str(run.folder or f"run {number}")).name
            if isinstance(run, Record)
            else run.name
        )
        records[name if name not in records else f"{name} ({number})"] = record
    events = [record.events() for record in records.values()]
    tables = [_metrics.step_table(found) for found in events]
    colours = [SERIES[i % 6] for i in range(len(records))]
    curves = lambda column, labels: [
        Series(table["step"], table[column], colour, label)
        for table, colour, label in zip(tables, colours, labels, strict=True)
    ]
    unnamed = [""] * len(records)
    plots = [
        _curve(name, curves(name, records if name == "reward_mean" else unnamed))
        for name in ("reward_mean", "loss", "entropy", "logprob_gap")
    ]
    held_out = [_evaluations(*pair) for pair in zip(events, colours, strict=True)]
    plots += [
        Plot("Held-out prompts", "step", "reward, greedy", held_out, "no evaluation"),
        Plot("Time", "step", "seconds since the run began", curves("stop", unnamed)),
    ]
    return _figure(" and ".join(records), plots, 8)


def _curve(name: str, series: Sequence[Series], **more: Any) -> Plot:
    """A column of the steps' table over steps."""
    title, unit = CURVES[name]
    empty = "not recorded" if len(series[0].x) else EMPTY
    return Plot(title, "step", unit, series, empty, whole=True, **more)


def _line(table: Table, name: str) -> Series:
    return Series(table["step"], table[name], PHASES["train"])


def _reward(table: Table) -> Series:
    mean = table["reward_mean"]
    std = table["reward_std"]
    label = "mean, ± 1 std of samples" if np.isfinite(std).any() else "mean"
    band = (mean - std, mean + std)
    return Series(table["step"], mean, PHASES["reward"], label, band=band)


def _evaluations(
    events: Sequence[Event], colour: str, label: str = "", mark: str = "o-"
) -> Series:
    found = only(events, EvaluationEvent)
    rewards = [e.reward_mean for e in found]
    return Series([e.step for e in found], rewards, colour, label, mark)


def _gap(table: Table, limit: float) -> Plot:
    step = table["step"]
    gap = table["logprob_gap"]
    over = gap > limit
    drawn = np.where(np.isposinf(gap), np.nan, gap)
    positive = drawn[drawn > 0]
    floor = positive.min() / 2 if len(positive) else limit / 1000
    note = "exactly 0 is drawn at the bottom" if (drawn == 0).any() else ""
    high = np.where(np.isposinf(gap), limit * 10, gap)
    series = [
        Series(step, np.where(drawn <= 0, floor, drawn), PHASES["score"], note, ".-"),
        Series(step[over], high[over], RED, "over it", "v"),
    ]
    title, unit = CURVES["logprob_gap"]
    empty = "not measured" if len(step) else EMPTY
    alarm = (limit, f"alarm at {limit:g}")
    return Plot(title, "step", unit, series, empty, whole=True, limit=alarm, log=True)


def _time_split(events: Sequence[Event], table: Table) -> Plot:
    split = _metrics.step_times(events)
    total = float((split.windows[:, 1] - split.windows[:, 0]).sum())
    parts: dict[str, tuple[np.ndarray, str, str]] = {}
    more = np.zeros(len(split.windows))
    for names, seconds in sorted(split.together.items(), key=lambda item: len(item[0])):
        first, *rest = names
        if len(rest) > 1 or (rest and seconds.sum() < 0.02 * total):
            more = more + seconds
        # two phases at once: the second one's colour, striped if the first is "generate", else dotted
        else:
            hatch = "" if not rest else "////" if first == "generate" else "...."
            parts[" + ".join(names)] = (seconds, PHASES[[first, *rest][-1]], hatch)
    parts["other overlaps"] = (more, PINK, "")
    parts["idle"] = (split.idle, PHASES["idle"], "")
    mean, centre, each = _groups(table["step"])
    bars = [
        Series(
            centre,
            mean(seconds),
            colour,
            name if seconds.sum() > 0.005 * total else "",
            "bar",
            hatch=hatch,
            width=each,
        )
        for name, (seconds, colour, hatch) in parts.items()
        if seconds.sum() > 0
    ]
    several = f", mean of {each} steps" if each > 1 else ""
    top = np.sum([bar.y for bar in bars], axis=0).max() if bars else 0.0
    return Plot(
        "Time of a step",
        "step",
        f"seconds{several}",
        bars,
        whole=True,
        reach=(0, top * 1.45),
        legend={"ncols": 3, "loc": "upper center", "fontsize": 7},
    )


def _groups(
    steps: np.ndarray,
) -> tuple[Callable[[np.ndarray], np.ndarray], np.ndarray, int]:
    """Groups adjacent steps so that bars stay wide enough to see: (mean per group, its centre, its size)."""
    each = max(-(-len(steps) // MAX_BARS), 1)
    index = np.arange(len(steps)) // each
    count = np.bincount(index)
    mean = lambda values: np.bincount(index, values, len(count)) / np.maximum(count, 1)
    return mean, mean(steps), each


# Staleness ------------------------------------------------------------------------------------------------------------


def staleness_figure(record: Record) -> Figure:
    """How many versions behind the trainer the tokens were, for each batch and for the whole run."""
    events = record.events()
    stale = _metrics.staleness(events)
    lines = [
        Series(
            stale.steps, stale.mean, PHASES["sync"], "mean of the batch's tokens", "o-"
        ),
        Series(stale.steps, stale.max, RED, "oldest token", "--"),
    ]
    plots = [
        _shares(stale),
        _histogram(stale),
        Plot("Per batch", "step", "versions behind", lines, whole=True),
        _ratios(_metrics.ratios_by_staleness(events)),
    ]
    title = f"{run_name(events)}: staleness of trained tokens"
    return _figure(title, plots, 6, width_ratios=(2.2, 1))


def _shares(stale: _metrics.Staleness) -> Plot:
    levels = stale.levels
    groups = [(str(x), levels == x) for x in levels[:MAX_LEVELS]]
    if len(levels) > MAX_LEVELS:
        cut = levels[MAX_LEVELS - 1]
        groups[-1] = (f"{cut} or more", levels >= cut)
    some = stale.tokens.sum(axis=1) > 0
    tokens = stale.tokens[some]
    mean, centre, each = _groups(stale.steps[some])
    bars = [
        Series(
            centre,
            mean(100 * tokens[:, mask].sum(axis=1) / tokens.sum(axis=1)),
            _shade(i, len(groups)),
            label,
            "bar",
            width=each,
        )
        for i, (label, mask) in enumerate(groups)
    ]
    legend = {"title": "versions behind", "title_fontsize": 8, "loc": "lower left"}
    legend |= {"ncols": len(groups), "framealpha": 0.9, "frameon": True}
    y = "share of the tokens (%)"
    title = "Tokens by staleness"
    return Plot(title, "step", y, bars, whole=True, reach=(0, 100), legend=legend)


def _histogram(stale: _metrics.Staleness) -> Plot:
    levels = stale.levels
    share = 100 * stale.tokens.sum(axis=0) / max(int(stale.tokens.sum()), 1)
    most = min(len(levels), MAX_LEVELS)
    colours = [_shade(min(i, most - 1), most) for i in range(len(levels))]
    few = len(levels) <= 2 * MAX_LEVELS
    texts = [f"{x:.0f} %" if x >= 1 else f"{x:.1g} %" for x in share] if few else []
    bars = Series(levels, share, colours, mark="bar", texts=texts)
    reach = (0, 1.15 * share.max(initial=0))
    x = "versions behind"
    return Plot("Whole run", x, "tokens (%)", [bars], whole=True, reach=reach)


def _ratios(found: dict[int, dict[str, float]]) -> Plot:
    """The importance ratio (trainer ÷ engine), median and tails, by staleness."""
    rows = []
    for level, stats in found.items():
        if "p50" in stats or "mean" in stats:
            middle = stats.get("p50", stats.get("mean", np.nan))
            low = stats.get("p01", stats.get("min", middle))
            high = stats.get("p99", stats.get("max", middle))
            rows.append((level, middle, min(low, middle), max(high, middle)))
    level, middle, low, high = np.array(rows, float).reshape(-1, 4).T
    label = "median, 1 % to 99 %"
    return Plot(
        "Importance ratio by staleness",
        "versions behind",
        "trainer ÷ engine",
        [Series(level, middle, BLUE, label, "o", (low, high))],
        "not recorded",
        whole=True,
        limit=(1.0, ""),
    )


def _shade(i: int, count: int) -> Any:
    """Fresh tokens light, stale ones dark: the shades of versions."""
    return version_colour(i, 0, count - 1)


# Throughput -----------------------------------------------------------------------------------------------------------


def throughput_figure(record: Record) -> Figure:
    """Tokens and samples per second over time, the speed of each sync, and how busy each actor was."""
    events = record.events()
    steps = len(only(events, StepEvent))
    # several steps per bin, to avoid aliasing
    rates = _metrics.rates(events, min(max(steps // 4, MIN_BINS), MAX_BINS))
    mean = _metrics.throughput(events)
    stairs = lambda values, phase, label="", mark="-": Series(
        rates.edges, np.append(values, values[-1]), PHASES[phase], label, mark + "|"
    )
    tokens = [
        stairs(rates.generated_tokens, "generate", "generated"),
        stairs(rates.trained_tokens, "train", "trained", "--"),
    ]
    plots = [
        _rate(
            "Tokens generated and trained on", mean["tokens_per_s"], "tokens", tokens
        ),
        _rate(
            "Samples generated",
            mean["samples_per_s"],
            "samples",
            [stairs(rates.samples, "generate")],
        ),
        _syncs(only(events, SyncEvent), mean["sync_gb_per_s"]),
        Plot("Share of the time busy", "useful work (% of the run)", "", ()),
    ]
    figure = _figure(f"{run_name(events)}: throughput", plots, 6.5)
    if shares := _metrics.utilisation(events):
        figure.axes[3].clear()
        _utilisation(figure.axes[3], plots[3], shares)
    return figure


def _rate(title: str, mean: float, what: str, series: Sequence[Series]) -> Plot:
    """So many of something per second, over time; what is 0 all the time is not drawn."""
    most = _highest(s.y for s in series)
    title += _mean_text(mean, f"{what}/s")
    shown = series if most else ()
    return Plot(title, "time (s)", f"{what}/s", shown, reach=(0, 1.25 * most))


def _highest(values: Iterable[Any]) -> float:
    found = [float(v) for row in values for v in row if np.isfinite(v)]
    return max(found, default=0.0)


def _syncs(syncs: list[SyncEvent], mean: float) -> Plot:
    groups = (
        ("digests equal", PHASES["sync"], "o", True),
        ("not compared", ORANGE, "^", None),
        ("digests differ", RED, "X", False),
    )
    series = []
    for label, colour, mark, verified in groups:
        if found := [e for e in syncs if e.verified is verified]:
            speeds = [e.gb_per_s for e in found]
            words = f"{label} ({len(found)})"
            series.append(Series([e.stop for e in found], speeds, colour, words, mark))
    most = _highest(s.y for s in series)
    title = f"Weight syncs{_mean_text(mean, 'GB/s')}"
    return Plot(title, "time (s)", "GB/s", series, reach=(0, 1.3 * most))


def _utilisation(ax: Axes, plot: Plot, shares: dict[str, float]) -> None:
    dress(ax, plot)
    replicas = [name for name in shares if name not in ("trainer", "reward", "pool")]
    shown = [name for name in shares if name != "pool" or len(replicas) != 1]
    shown.sort(key=lambda name: (name == "reward", name != "trainer", name))
    if len(shown) > 16:
        # too many to be readable; pool is their mean
        shown = [name for name in shown if name not in replicas]
    values = [100 * shares[name] for name in shown]
    phases = {"trainer": "train", "reward": "reward"}
    bars = ax.barh(
        [f"{n} (mean)" if n == "pool" and replicas else n for n in shown],
        values,
        color=[PHASES[phases.get(n, "generate")] for n in shown],
        height=0.6,
    )
    ax.bar_label(bars, [f"{v:.0f} %" for v in values], padding=3, fontsize=8)
    ax.set_xlim(0, 115)
    ax.set_xticks([0, 25, 50, 75, 100])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)


def _mean_text(value: float, unit: str) -> str:
    if value != value:
        return ""
    return f", mean {value:,.{'3g' if value < 1000 else '0f'}} {unit}"
