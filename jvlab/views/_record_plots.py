"""Figures of a run record: learning curves, staleness of tokens, throughput and utilisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._units import how_many
from jvlab.record import _metrics
from jvlab.record._events import EvaluationEvent, Event, RunStart, StepEvent, SyncEvent
from jvlab.record._record import Record
from jvlab.views._figures import new_figure
from jvlab.views._palette import NEUTRAL, PHASES, SERIES, version_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jvlab.trainer._run import Run

BLUE, ORANGE, GREEN, PINK, SKY, RED = SERIES[:6]
GREY = PHASES["idle"]
INK = NEUTRAL
REWARD, TRAIN, GENERATE, SCORE = (
    PHASES[name] for name in ("reward", "train", "generate", "score")
)
MAX_BARS = 60  # steps drawn as separate bars; more are averaged in groups
MAX_LEVELS = 6  # staleness levels drawn separately
# time bins
MIN_BINS = 12
MAX_BINS = 80
EMPTY = "nothing yet"


def run_name(events: Sequence[Event]) -> str:
    return next((e.run for e in events if isinstance(e, RunStart) and e.run), "run")


def run_figure(record: Record) -> Figure:
    """Reward, loss, KL, entropy, the gap between trainer and engine with its alarm line, and time per phase."""
    events = record.events()
    table = _metrics.step_table(events)
    figure = new_figure(10, 8)
    figure.suptitle(f"{run_name(events)}: {how_many(len(table['step']), 'step')}")
    axes: Any = figure.subplots(3, 2)
    _evaluations(axes[0, 0], events)
    _reward(axes[0, 0], table)
    for ax, name, title, unit in (
        (axes[0, 1], "loss", "Loss", "loss"),
        (axes[1, 0], "kl", "KL to the reference", "KL (nats per token)"),
        (axes[1, 1], "entropy", "Entropy of the policy", "entropy (nats per token)"),
    ):
        _style_axes(ax, title, "step", unit, table["step"])
        _line(ax, table["step"], table[name], TRAIN)
    skipped = table["step"][table["skipped"]]
    for x in skipped:
        axes[0, 1].axvline(
            x,
            color=RED,
            linewidth=1,
            linestyle=":",
            label="skipped" if x == skipped[0] else None,
        )
    if len(skipped):
        axes[0, 1].legend(
            fontsize=8, framealpha=0.85, edgecolor="none", loc="upper right"
        )
    _gap(axes[2, 0], table, events)
    _time_split(axes[2, 1], events, table)
    return figure


COMPARED = (
    ("reward_mean", "Reward", "reward"),
    ("loss", "Loss", "loss"),
    ("entropy", "Entropy of the policy", "entropy (nats per token)"),
    ("logprob_gap", "Trainer against engine", "largest gap (nats)"),
)


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
    figure = new_figure(10, 8)
    figure.suptitle(" and ".join(records))
    axes: Any = figure.subplots(3, 2)
    colours = dict(
        zip(records, (BLUE, ORANGE, GREEN, PINK, SKY, RED) * len(records), strict=False)
    )
    for ax, (name, title, unit) in zip(axes.flat, COMPARED, strict=False):
        _style_axes(ax, title, "step", unit)
        for run, record in records.items():
            table = _metrics.step_table(record.events())
            ax.plot(
                table["step"], table[name], color=colours[run], linewidth=1.2, label=run
            )
    _style_axes(axes[2, 0], "Held-out prompts", "step", "reward, greedy")
    for run, record in records.items():
        found = [e for e in record.events() if isinstance(e, EvaluationEvent)]
        axes[2, 0].plot(
            [e.step for e in found],
            [e.reward_mean for e in found],
            "o-",
            ms=3,
            color=colours[run],
        )
    if not axes[2, 0].has_data() or not any(
        line.get_xdata().size for line in axes[2, 0].lines
    ):
        _blank(axes[2, 0], "no evaluation")
    _style_axes(axes[2, 1], "Time", "step", "seconds since the run began")
    for run, record in records.items():
        steps = [e for e in record.events() if isinstance(e, StepEvent)]
        axes[2, 1].plot(
            [e.step for e in steps],
            [e.stop for e in steps],
            color=colours[run],
            linewidth=1.2,
        )
    axes[0, 0].legend(fontsize=8, frameon=False, loc="best")
    return figure


def _evaluations(ax: Axes, events: Sequence[Event]) -> None:
    found = [e for e in events if isinstance(e, EvaluationEvent)]
    if found:
        ax.plot(
            [e.step for e in found],
            [e.reward_mean for e in found],
            "s",
            ms=4,
            color=SCORE,
            label="held out",
        )


def _reward(ax: Axes, table: dict[str, np.ndarray]) -> None:
    step = table["step"]
    mean = table["reward_mean"]
    std = table["reward_std"]
    if np.isfinite(std).any():
        ax.fill_between(
            step,
            mean - std,
            mean + std,
            color=REWARD,
            alpha=0.15,
            linewidth=0,
            label="± 1 std of samples",
        )
    _style_axes(ax, "Reward", "step", "reward", step)
    _line(ax, step, mean, REWARD, label="mean")
    if np.isfinite(mean).any():
        ax.legend(fontsize=8, frameon=False, loc="best")


def _gap(ax: Axes, table: dict[str, np.ndarray], events: Sequence[Event]) -> None:
    step = table["step"]
    gap = table["logprob_gap"]
    limit = _metrics.gap_alarm(events)
    over = gap > limit
    _style_axes(
        ax, "Trainer against engine", "step", "largest logprob gap (nats)", step
    )
    if np.isfinite(gap).any():
        drawn = np.where(np.isposinf(gap), np.nan, gap)
        positive = drawn[drawn > 0]
        floor = positive.min() / 2 if len(positive) else limit / 1000
        ax.plot(
            step,
            np.where(drawn <= 0, floor, drawn),
            color=SCORE,
            linewidth=1,
            marker=".",
            markersize=5,
        )
        ax.plot(
            step[over],
            np.where(np.isposinf(gap), limit * 10, gap)[over],
            "v",
            color=RED,
            label="over it",
        )
        ax.set_yscale("log")
        if (drawn == 0).any():
            ax.text(
                0.01,
                0.02,
                "exactly 0 is drawn at the bottom",
                transform=ax.transAxes,
                fontsize=7,
                color=INK,
            )
    else:
        _blank(ax, "not measured" if len(step) else EMPTY)
        return
    ax.axhline(
        limit, color=RED, linestyle="--", linewidth=1, label=f"alarm at {limit:g}"
    )
    handles, labels = ax.get_legend_handles_labels()
    shown = [
        (h, x)
        for h, x in zip(handles, labels, strict=True)
        if x != "over it" or over.any()
    ]
    ax.legend(
        *zip(*shown, strict=True), fontsize=8, frameon=False, loc="upper left", ncols=2
    )
    low, high = ax.get_ylim()
    ax.set_ylim(low, max(high, limit * 2) * 4)  # space for the legend above the line


def _time_split(
    ax: Axes, events: Sequence[Event], table: dict[str, np.ndarray]
) -> None:
    split = _metrics.step_times(events)
    total = float((split.windows[:, 1] - split.windows[:, 0]).sum())
    parts: dict[str, tuple[np.ndarray, str, str | None]] = {}
    more = np.zeros(len(split.windows))
    for names, seconds in sorted(split.together.items(), key=lambda item: len(item[0])):
        first, *rest = names
        if len(rest) > 1 or (rest and seconds.sum() < 0.02 * total):
            more = more + seconds
        # two phases at once: the second one's colour, striped if the first is "generate", else dotted
        else:
            hatch = None if not rest else "////" if first == "generate" else "...."
            parts[" + ".join(names)] = (
                seconds,
                PHASES[rest[0] if rest else first],
                hatch,
            )
    parts["other overlaps"] = (more, PINK, None)
    parts["idle"] = (split.idle, GREY, None)
    group, centre, each = _groups(table["step"])
    base = np.zeros(len(centre))
    for name, (seconds, colour, hatch) in parts.items():
        if seconds.sum() > 0:
            mean = group(seconds)
            ax.bar(
                centre,
                mean,
                width=each,
                bottom=base,
                color=colour,
                edgecolor="white",
                linewidth=0 if hatch else 0.2,
                hatch=hatch,
                label=name if seconds.sum() > 0.005 * total else None,
            )
            base = base + mean
    several = f", mean of {each} steps" if each > 1 else ""
    _style_axes(ax, "Time of a step", "step", f"seconds{several}", table["step"])
    if base.any():
        ax.set_ylim(0, base.max() * 1.45)
        ax.legend(fontsize=7, frameon=False, ncols=3, loc="upper center")
    else:
        _blank(ax)


def _groups(
    steps: np.ndarray,
) -> tuple[Callable[[np.ndarray], np.ndarray], np.ndarray, int]:
    """Groups adjacent steps so that bars stay wide enough to see: (mean per group, its centre, its size)."""
    each = max(-(-len(steps) // MAX_BARS), 1)
    index = np.arange(len(steps)) // each
    count = np.bincount(index)
    mean = lambda values: np.bincount(index, values, len(count)) / np.maximum(count, 1)
    return mean, mean(steps), each


def staleness_figure(record: Record) -> Figure:
    """How many versions behind the trainer the tokens were, for each batch and for the whole run."""
    events = record.events()
    stale = _metrics.staleness(events)
    figure = new_figure(10, 6)
    figure.suptitle(f"{run_name(events)}: staleness of trained tokens")
    axes: Any = figure.subplots(2, 2, width_ratios=(2.2, 1))
    _shares(axes[0, 0], stale)
    _style_axes(axes[1, 0], "Per batch", "step", "versions behind", stale.steps)
    _line(
        axes[1, 0],
        stale.steps,
        stale.mean,
        PHASES["sync"],
        label="mean of the batch's tokens",
    )
    axes[1, 0].plot(
        stale.steps,
        stale.max,
        color=RED,
        linewidth=1,
        linestyle="--",
        label="oldest token",
    )
    if len(stale.levels):
        axes[1, 0].set_ylim(
            min(0, stale.levels.min()) - 0.1, max(stale.levels.max(), 1) * 1.35
        )
        axes[1, 0].legend(fontsize=8, frameon=False, ncols=2, loc="upper left")
    _histogram(axes[0, 1], stale)
    _ratios(axes[1, 1], events)
    return figure


def _shares(ax: Axes, stale: _metrics.Staleness) -> None:
    _style_axes(
        ax, "Tokens by staleness", "step", "share of the tokens (%)", stale.steps
    )
    if not len(stale.levels):
        _blank(ax)
        return
    groups = [(str(x), stale.levels == x) for x in stale.levels[:MAX_LEVELS]]
    if len(stale.levels) > MAX_LEVELS:
        cut = stale.levels[MAX_LEVELS - 1]
        groups[-1] = (f"{cut} or more", stale.levels >= cut)
    some = stale.tokens.sum(axis=1) > 0
    tokens = stale.tokens[some]
    steps = stale.steps[some]
    group, centre, each = _groups(steps)
    base = np.zeros(len(centre))
    for i, (label, mask) in enumerate(groups):
        share = group(100 * tokens[:, mask].sum(axis=1) / tokens.sum(axis=1))
        ax.bar(
            centre,
            share,
            width=each,
            bottom=base,
            color=_shade(i, len(groups)),
            label=label,
            edgecolor="white",
            linewidth=0.2,
        )
        base = base + share
    ax.set_ylim(0, 100)
    ax.legend(
        title="versions behind",
        fontsize=8,
        title_fontsize=8,
        loc="lower left",
        ncols=len(groups),
        framealpha=0.9,
    )


def _histogram(ax: Axes, stale: _metrics.Staleness) -> None:
    _style_axes(ax, "Whole run", "versions behind", "tokens (%)")
    total = int(stale.tokens.sum())
    if not total:
        _blank(ax)
        return
    levels = stale.levels
    share = 100 * stale.tokens.sum(axis=0) / total
    colours = [
        _shade(min(i, MAX_LEVELS - 1), min(len(levels), MAX_LEVELS))
        for i in range(len(levels))
    ]
    bars = ax.bar(levels, share, color=colours, width=0.8)
    if len(levels) <= 2 * MAX_LEVELS:
        ax.bar_label(
            bars, [f"{x:.0f} %" if x >= 1 else f"{x:.1g} %" for x in share], fontsize=8
        )
        ax.set_xticks(range(int(levels.min()), max(int(levels.max()), 2) + 1))
    ax.set_ylim(0, 1.15 * share.max())
    ax.set_xlim(levels.min() - 0.7, max(levels.max(), 2) + 0.7)


def _ratios(ax: Axes, events: Sequence[Event]) -> None:
    """The importance ratio (trainer ÷ engine), median and tails, by staleness."""
    _style_axes(
        ax, "Importance ratio by staleness", "versions behind", "trainer ÷ engine"
    )
    found = {
        k: v
        for k, v in _metrics.ratios_by_staleness(events).items()
        if "p50" in v or "mean" in v
    }
    if not found:
        _blank(ax, "not recorded")
        return
    level = np.array(list(found))
    middle = np.array([v.get("p50", v.get("mean", np.nan)) for v in found.values()])
    low = np.array(
        [
            v.get("p01", v.get("min", m))
            for v, m in zip(found.values(), middle, strict=True)
        ]
    )
    high = np.array(
        [
            v.get("p99", v.get("max", m))
            for v, m in zip(found.values(), middle, strict=True)
        ]
    )
    spread = np.maximum(np.stack([middle - low, high - middle]), 0)
    ax.errorbar(
        level,
        middle,
        yerr=spread,
        fmt="o",
        color=BLUE,
        capsize=4,
        label="median, 1 % to 99 %",
    )
    ax.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    ax.set_xticks(level)
    ax.set_xlim(level.min() - 0.5, level.max() + 0.5)
    ax.legend(fontsize=8, frameon=False, loc="best")


def throughput_figure(record: Record) -> Figure:
    """Tokens and samples per second over time, the speed of each sync, and how busy each actor was."""
    events = record.events()
    steps = sum(isinstance(e, StepEvent) for e in events)
    # several steps per bin, to avoid aliasing
    rates = _metrics.rates(events, min(max(steps // 4, MIN_BINS), MAX_BINS))
    mean = _metrics.throughput(events)
    figure = new_figure(10, 6.5)
    figure.suptitle(f"{run_name(events)}: throughput")
    axes: Any = figure.subplots(2, 2)
    for values, label, colour, style in (
        (rates.generated_tokens, "generated", GENERATE, "-"),
        (rates.trained_tokens, "trained", TRAIN, "--"),
    ):
        axes[0, 0].stairs(
            values,
            rates.edges,
            color=colour,
            linestyle=style,
            linewidth=1.3,
            label=label,
            baseline=None,
        )
    axes[0, 1].stairs(
        rates.samples, rates.edges, color=GENERATE, linewidth=1.3, baseline=None
    )
    _style_axes(
        axes[0, 0],
        f"Tokens generated and trained on{_mean_text(mean['tokens_per_s'], 'tokens/s')}",
        "time (s)",
        "tokens/s",
    )
    _style_axes(
        axes[0, 1],
        f"Samples generated{_mean_text(mean['samples_per_s'], 'samples/s')}",
        "time (s)",
        "samples/s",
    )
    axes[0, 0].legend(fontsize=8, frameon=False, ncols=2, loc="upper right")
    for ax, values in (
        (axes[0, 0], (rates.generated_tokens, rates.trained_tokens)),
        (axes[0, 1], (rates.samples,)),
    ):
        most = max(float(np.max(v, initial=0)) for v in values)
        ax.set_ylim(0, 1.25 * most or 1)
        if not most:
            _blank(ax)
    _syncs(
        axes[1, 0],
        [e for e in events if isinstance(e, SyncEvent)],
        mean["sync_gb_per_s"],
    )
    _utilisation(axes[1, 1], _metrics.utilisation(events))
    return figure


def _syncs(ax: Axes, syncs: list[SyncEvent], mean: float) -> None:
    _style_axes(ax, f"Weight syncs{_mean_text(mean, 'GB/s')}", "time (s)", "GB/s")
    groups = (
        ("digests equal", PHASES["sync"], "o", [e for e in syncs if e.verified]),
        ("not compared", ORANGE, "^", [e for e in syncs if e.verified is None]),
        ("digests differ", RED, "X", [e for e in syncs if e.verified is False]),
    )
    for label, colour, mark, found in groups:
        if found:
            x = [e.stop for e in found]
            y = [e.gb_per_s for e in found]
            ax.plot(
                x,
                y,
                mark,
                color=colour,
                markersize=3.5,
                label=f"{label} ({len(found)})",
            )
    speeds = [e.gb_per_s for e in syncs if np.isfinite(e.gb_per_s)]
    ax.set_ylim(0, 1.3 * max(speeds, default=0) or 1)
    if syncs:
        ax.legend(fontsize=8, frameon=False, ncols=3, loc="upper right")
    else:
        _blank(ax)


def _utilisation(ax: Axes, shares: dict[str, float]) -> None:
    _style_axes(ax, "Share of the time busy", "useful work (% of the run)", "")
    if not shares:
        _blank(ax)
        return
    replicas = [name for name in shares if name not in ("trainer", "reward", "pool")]
    shown = [name for name in shares if name != "pool" or len(replicas) != 1]
    shown.sort(key=lambda name: (name == "reward", name != "trainer", name))
    if len(shown) > 16:
        # too many to be readable; pool is their mean
        shown = [name for name in shown if name not in replicas]
    values = [100 * shares[name] for name in shown]
    colours = [{"trainer": TRAIN, "reward": REWARD}.get(n, GENERATE) for n in shown]
    bars = ax.barh(
        [f"{n} (mean)" if n == "pool" and replicas else n for n in shown],
        values,
        color=colours,
        height=0.6,
    )
    ax.bar_label(bars, [f"{v:.0f} %" for v in values], padding=3, fontsize=8)
    ax.set_xlim(0, 115)
    ax.set_xticks([0, 25, 50, 75, 100])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)


def _shade(i: int, count: int) -> Any:
    """Fresh tokens light, stale ones dark: the shades of versions."""
    return version_colour(i, 0, count - 1)


def _line(
    ax: Axes, x: np.ndarray, y: np.ndarray, colour: str, label: str | None = None
) -> None:
    """A line; with markers for few points, since a line alone does not show isolated ones."""
    few = np.isfinite(y).sum() <= 30
    ax.plot(
        x,
        y,
        color=colour,
        linewidth=1.2,
        marker="o" if few else None,
        markersize=3,
        label=label,
    )
    if not np.isfinite(y).any():
        _blank(ax, "not recorded" if len(x) else EMPTY)


def _style_axes(
    ax: Axes, title: str, x: str, y: str, steps: np.ndarray | None = None
) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if steps is not None and len(steps) == 1:
        ax.set_xlim(steps[0] - 1, steps[0] + 1)
        ax.set_xticks(steps)
    elif steps is not None:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _blank(ax: Axes, text: str = EMPTY) -> None:
    """Show a text instead of empty axes."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.text(
        0.5,
        0.5,
        text,
        transform=ax.transAxes,
        ha="center",
        va="center",
        color="#777777",
        fontsize=9,
    )


def _mean_text(value: float, unit: str) -> str:
    return (
        f", mean {value:,.3g} {unit}"
        if value < 1000
        else f", mean {value:,.0f} {unit}"
        if value == value
        else ""
    )
