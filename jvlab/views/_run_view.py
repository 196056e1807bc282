"""A `Run` as one line and as a card with its curves and samples; the dashboard of a run or of a record."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jvlab._errors import ConfigError, JvlabError
from jvlab._states import state
from jvlab._units import human_seconds
from jvlab.record._events import run_name
from jvlab.record._record import Record
from jvlab.record._run_status import COLUMNS, RunFeed, RunStatus, status_of
from jvlab.record._token_pieces import TokenSplitter, visible
from jvlab.views._palette import PHASES
from jvlab.views._style import (
    BAD,
    BOX,
    CELL,
    FAINT,
    FILL,
    LINE,
    MONO,
    bar,
    headlines,
    state_html,
)
from jvlab.views.panels._live import ConfirmButton, PartsPanel, box

if TYPE_CHECKING:
    from jvlab.record._run_status import RunStatus
    from jvlab.record._samples import SampleRecord
    from jvlab.trainer._run import Run


# The charts of a run: which ones, in which order and colour, for the dashboard's canvas and as static SVG.

POINTS = 60  # of a static curve, to keep saved notebooks small
# of a static chart's own units; its width is the page's
WIDE = 200
TALL = 56


@dataclass(frozen=True)
class Chart:
    """One chart: a column of the feed (or "evaluation") over steps, in the colour of the phase it tells about."""

    title: str
    column: str
    phase: str
    form: str  # of its numbers
    log: bool = False
    zero: bool = False  # the scale begins at 0
    always: bool = False  # shown even while nothing of it is known
    spread: str = ""  # a column: drawn as a band around it


# Rewards in the colour of rewards, what engines do in that of generation, what the trainer does in that of training.
CHARTS = (
    Chart("reward", "reward", "reward", ".3f", always=True, spread="reward_std"),
    Chart("held-out reward", "evaluation", "reward", ".3f"),
    Chart("loss", "loss", "train", ".3g"),
    Chart("entropy", "entropy", "train", ".3f", zero=True),
    Chart("KL to the reference", "kl", "train", ".3g", zero=True),
    Chart("clipped tokens", "clip", "train", ".1%", zero=True),
    Chart("logprob gap", "gap", "score", ".1e", log=True, always=True),
    Chart("response length", "length", "generate", ".0f", zero=True),
    Chart(
        "tokens/s over 5 steps",
        "tokens_per_s",
        "generate",
        ",.0f",
        zero=True,
        always=True,
    ),
    Chart("seconds per step", "seconds", "train", ".2f", zero=True),
    Chart("staleness, mean", "stale_mean", "sync", ".2f", zero=True, always=True),
)


def charts() -> list[dict[str, Any]]:
    """The charts as plain values, for the page."""
    return [asdict(chart) | {"colour": PHASES[chart.phase]} for chart in CHARTS]


def charts_html(feed: RunFeed) -> str:
    """The same charts as SVG, with the staleness of tokens and the time of each phase."""
    parts = [*_curves(feed), _histogram(feed.histogram), _split(feed.split())]
    grid = "display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:8px 24px;margin:6px 0"
    return f'<div style="{grid}">{"".join(parts)}</div>'


def _curves(feed: RunFeed) -> Iterator[str]:
    for chart in CHARTS:
        if chart.column == "evaluation":
            points = np.array(feed.evaluations, np.float64).reshape(-1, 2)
        else:
            points = feed.rows[:, [0, COLUMNS.index(chart.column)]].astype(np.float64)
        band = (
            feed.rows[:, COLUMNS.index(chart.spread)].astype(np.float64)
            if chart.spread
            else None
        )
        yield _curve(
            chart, points, band, feed.alarm if chart.column == "gap" else math.inf
        )


def _curve(
    chart: Chart, points: np.ndarray, band: np.ndarray | None, alarm: float
) -> str:
    good = np.isfinite(points[:, 1])
    points = points[good]
    if not len(points):
        return ""
    spread = np.nan_to_num(band[good]) if band is not None else np.zeros(len(points))
    over = bool((points[:, 1] > alarm).any())
    last = f"{format(float(points[-1, 1]), chart.form)}{', was over the alarm' if over else ''}"
    if len(points) > POINTS:  # means of equal parts
        parts = np.array_split(np.arange(len(points)), POINTS)
        points = np.stack([points[part].mean(axis=0) for part in parts])
        spread = np.array([spread[part].mean() for part in parts])
    drawn = _drawing(chart, points, spread, BAD if over else PHASES[chart.phase])
    colour = f";color:{BAD}" if over else ""
    return (
        f'<div style="min-width:0"><span style="color:{FAINT}">{escape(chart.title)}</span> '
        f'<b style="white-space:nowrap{colour}">{last}</b>{drawn}</div>'
    )


def _drawing(chart: Chart, points: np.ndarray, spread: np.ndarray, colour: str) -> str:
    scale = (lambda v: np.log10(np.maximum(v, 1e-12))) if chart.log else (lambda v: v)
    x = points[:, 0]
    y = scale(points[:, 1])
    low = scale(points[:, 1] - spread)
    high = scale(points[:, 1] + spread)
    bottom = float(low.min())
    top = float(high.max())
    bottom = min(bottom, 0.0) if chart.zero else bottom
    reach = (top - bottom) or 1.0
    width = float(x[-1] - x[0]) or 1.0
    px = lambda at: 1 + (at - x[0]) / width * (WIDE - 2)
    py = lambda value: TALL - 1 - (value - bottom) / reach * (TALL - 2)
    pairs = lambda values: [
        f"{a:.0f},{b:.1f}" for a, b in zip(px(x), py(values), strict=True)
    ]
    filled = ""
    if spread.any():
        edge = " L".join([*pairs(high), *reversed(pairs(low))])
        filled = f'<path d="M{edge}Z" fill="{colour}" fill-opacity="0.15"/>'
    line = (
        pairs(y)
        if len(x) > 1
        else [f"1,{float(py(y)[0]):.1f}", f"{WIDE - 1},{float(py(y)[0]):.1f}"]
    )
    return (
        f'<svg width="100%" height="{TALL}" viewBox="0 0 {WIDE} {TALL}" preserveAspectRatio="none" role="img" '
        f'style="display:block;border-bottom:1px solid {LINE}">{filled}<polyline points="{" ".join(line)}" fill="none" '
        f'stroke="{colour}" stroke-width="1.5" vector-effect="non-scaling-stroke"/></svg>'
    )


def _histogram(histogram: Any) -> str:
    total = sum(histogram.values())
    if not total:
        return ""
    rows = "".join(
        f'<tr><td style="{CELL}">{age}</td><td>{bar(n / total, PHASES["sync"], "7em")}</td>'
        f'<td style="{CELL}">&nbsp;{n / total:.0%}</td></tr>'
        for age, n in sorted(histogram.items())
    )
    title = f'<span style="color:{FAINT}">staleness of tokens</span>'
    return f'<div style="min-width:0">{title}<table style="border-collapse:collapse">{rows}</table></div>'


def _split(split: dict[str, float]) -> str:
    total = sum(split.values())
    if not total:
        return ""
    bars = "".join(
        f'<div title="{name}" style="width:{100 * s / total:.1f}%;background:{PHASES[name]}"></div>'
        for name, s in split.items()
    )
    words = "".join(
        f'<span style="white-space:nowrap;margin-right:10px"><span style="color:{PHASES[name]}">■</span> {name} '
        f"{human_seconds(s)}</span>"
        for name, s in split.items()
    )
    title = f'<span style="color:{FAINT}">time of a step</span>'
    return f'<div style="min-width:0">{title}<div style="display:flex;height:8px">{bars}</div><div>{words}</div></div>'


# ----------------------------------------------------------------------------------------------------

# characters that are shown
PROMPT = 300
ANSWER = 700


def run_text(run: Run) -> str:
    """One line, without anything that depends on the machine."""
    status = run.status
    reward = f", reward {status.reward:.3f}" if status.reward == status.reward else ""
    bound = (
        "on-policy"
        if not status.max_staleness
        else f"staleness ≤ {status.max_staleness}"
    )
    why = f": {status.error.splitlines()[0]}" if status.error else ""
    return f"Run({run.name!r}, {status.state}, step {status.step}/{status.steps}{reward}, {bound}{why})"


def head_html(
    name: str, status: RunStatus, alarm: float = math.inf, feed: RunFeed | None = None
) -> str:
    """Title, progress bar, the headline numbers large and the others small."""
    last = feed.last if feed is not None else lambda _: math.nan
    gap = number(status.logprob_gap, ".2e")
    if status.logprob_gap > alarm:
        gap = f'<b style="color:{BAD}">{gap}, over the alarm at {alarm:.1e}</b>'
    spread = last("reward_std")
    active = status.state not in ("finished", "stopped", "failed", "interrupted")
    large = [
        (
            number(status.reward, ".3f"),
            f"± {spread:.2f}" if spread == spread else "",
            "reward",
        ),
        (str(status.step), f"of {status.steps}", "step"),
        (number(last("tokens_per_s"), ",.0f"), "", "tokens/s"),
        (number(last("seconds"), ".2f"), "", "seconds per step"),
    ]
    small = {
        "version": str(status.version),
        "loss": number(last("loss"), ".3g"),
        "entropy": number(last("entropy"), ".3f"),
        "KL": number(last("kl"), ".3g"),
        "response length": number(last("length"), ".0f"),
        "clipped": number(last("clip"), ".1%"),
        "largest logprob gap": gap,
        "effective samples": number(status.effective_samples, ".1%"),
        "masked": number(status.masked_fraction, ".1%"),
        **_experts(status.experts),
        "staleness": f"at most {status.max_staleness}; {status.dropped} dropped, {status.regenerated} made again",
        "groups": _groups(status) if active else "–",
    }
    small = {k: v for k, v in small.items() if v != "–"}
    cells = "".join(
        f'<span data-jv="fact"><span style="color:{FAINT}">{k}</span> {v}</span>'
        for k, v in small.items()
    )
    if status.error:
        cells += f'<div style="color:{BAD};white-space:pre-wrap;width:100%">{escape(status.error)}</div>'
    title = f"<b>{escape(name)}</b> {run_state(status, feed)}"
    progress = bar(status.step / max(status.steps, 1), width="100%")
    facts = f'<div style="display:flex;flex-wrap:wrap;gap:0 20px">{cells}</div>'
    return f'<div style="{BOX};max-width:900px">{title}{progress}{headlines(large)}{facts}</div>'


def _groups(status: RunStatus) -> str:
    discarded = f", {status.lost} discarded" if status.lost else ""
    return f"{status.flying} being made, {status.ready} ready{discarded}"


def number(value: float, form: str) -> str:
    return "–" if value != value else format(value, form)


def run_state(status: RunStatus, feed: RunFeed | None) -> str:
    """The run's state. Before its first step: what it waits for, and how long already."""
    if status.waiting:
        return state_html(state(status.state), status.waiting)
    if status.state == "running" and status.step == 0:
        phase = (
            "compiling the first step"
            if feed is not None and feed.rollouts
            else "first rollouts"
        )
        return state_html(
            state("compiling"), f"{phase}, {human_seconds(status.seconds)}"
        )
    compiled = feed.compile_seconds if feed is not None else 0.0
    took = (
        f' <span style="color:{FAINT}">compiled in {human_seconds(compiled)}</span>'
        if compiled
        else ""
    )
    return state_html(state(status.state)) + took


def _experts(worst: Mapping[str, float]) -> dict[str, str]:
    """How unevenly the experts of the most uneven layers were used; nothing without experts."""
    if not worst:
        return {}
    return {
        "experts": f"busiest {worst['max']:.1%}, idlest {worst['min']:.1%}, entropy {worst['entropy']:.2f}"
    }


def extremes_html(status: RunStatus, model: str = "") -> str:
    """Both samples side by side; empty before the first step. `model`: the folder whose tokenizer decodes chats."""
    best = status.best
    worst = status.worst
    if best is None or worst is None:
        return ""
    splitter = TokenSplitter(model)
    if best.reward == worst.reward:
        cards = _card(
            "every reward of this step is equal", best, splitter, PHASES["reward"]
        )
    else:
        cards = _card("best", best, splitter, PHASES["reward"]) + _card(
            "worst", worst, splitter, BAD
        )
    grid = (
        "display:grid;grid-template-columns:repeat(auto-fit,minmax(260px,1fr));gap:8px"
    )
    title = (
        f'<div style="color:{FAINT};margin-top:6px">samples of step {best.step}</div>'
    )
    return f'{title}<div style="{grid}">{cards}</div>'


def _card(name: str, sample: SampleRecord, splitter: TokenSplitter, colour: str) -> str:
    prompt = splitter.prompt_text_of(sample.prompt or None, sample.prompt_tokens)
    # a question is at a prompt's end
    prompt = "…" + prompt[1 - PROMPT :] if len(prompt) > PROMPT else prompt
    answer = (
        sample.text if len(sample.text) <= ANSWER else sample.text[: ANSWER - 1] + "…"
    )
    text = "white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;max-height:12em;overflow:auto"
    finish = f", {sample.finish_reason}" if sample.finish_reason else ""
    return (
        f'<div data-jv="sample" style="min-width:0;padding:4px 10px;border-left:3px solid {colour};background:{FILL}">'
        f'<div style="display:flex;flex-wrap:wrap;gap:0 10px"><b>{escape(name)}</b>'
        f'<span style="white-space:nowrap">reward {sample.reward:.3f}</span>'
        f'<span style="color:{FAINT};white-space:nowrap">{len(sample.tokens)} tokens{escape(finish)}</span></div>'
        f'<div style="color:{FAINT};font-family:{MONO};{text}">{escape(visible(prompt))}</div>'
        f'<div style="font-family:{MONO};{text}">{escape(visible(answer)) or "(empty)"}</div></div>'
    )


def run_html(
    name: str, status: RunStatus, feed: RunFeed | None = None, model: str = ""
) -> str:
    """The static card: the dashboard's layout, without its buttons."""
    head = head_html(name, status, feed.alarm if feed else math.inf, feed)
    drawn = charts_html(feed) if feed is not None and len(feed.rows) else ""
    return f'<div style="{BOX}">{head}{drawn}{extremes_html(status, model)}</div>'


def card(run: Run) -> str:
    """The card of a run, from its record."""
    try:
        feed = RunFeed(run.record)
        feed.read()
    except JvlabError:  # nothing recorded yet
        return run_html(run.name, run.status)
    return run_html(run.name, run.status, feed, run.model)


# between synced copies of all rows, while new ones are appended
SNAPSHOT_SECONDS = 10.0
SMOOTHING = {"none": 1, "5 steps": 5, "20 steps": 20, "100 steps": 100}


class Dashboard(PartsPanel):
    """What the panels of a run and of a record share.

    `compare(other)` does what `run.panel(compare=...)` does.
    """

    hz = 2.0
    scripts = ("controls.js", "curves.js")
    css_class = "jv-run-panel"
    traits: ClassVar[dict[str, Any]] = {
        **PartsPanel.traits,
        "columns": list(COLUMNS),
        "charts": charts(),
        "evaluations": [],
        # `snapshot` holds all rows as float32 and is sent rarely; new rows are appended by binary messages
        "snapshot": b"",
        "facts": {},
        "smoothing": 1,
        # a second run, drawn behind the first
        "other": {},
        "other_rows": b"",
    }

    def __init__(self, subject: Any, compare: Any = None) -> None:
        self.feed: RunFeed | None = None
        self.other: RunFeed | None = None
        self._read: tuple[Any, Any] = (None, None)  # the samples that are shown
        self._rows_due = self._other_due = 0.0
        super().__init__(subject)
        if compare is not None:
            self.compare(compare)

    # What it shows of a run; a record says where else that comes from

    @property
    def name(self) -> str:
        """The run's name."""
        return self.subject.name

    @property
    def model(self) -> str:
        """The folder of the run's model, whose tokenizer decodes prompts; empty if it is not known."""
        return self.subject.model

    def status(self) -> RunStatus:
        """The run's status now."""
        return self.subject.status

    def open_record(self) -> Record:
        """The run's record; ConfigError while there is none."""
        return self.subject.record

    @property
    def progress(self) -> str:
        return f"step {self.status().step}"

    def make_controls(self) -> list[Any]:
        """Parts for the bar above the curves."""
        return []

    # Its parts ------------------------------------------------------------------------------------------------------

    def make_parts(self) -> None:
        parts = self.parts
        self.head = parts.html("jv-head")
        self.samples = parts.html("jv-extremes")
        self.curves = self.widget
        self.curves.on_msg(lambda _, content, __: self._send_missing(content))
        controls = self.make_controls()
        self.smoothing = parts.add(
            "select",
            "jv-smoothing",
            description="smoothing",
            value="none",
            options=list(SMOOTHING),
        )
        self.smoothing.on_change(self._smooth)
        drawn = parts.add("draw", "jv-figure", draw="curves")
        parts.arrange(
            box(
                self.head,
                box(*controls, self.smoothing, row=True),
                drawn,
                self.samples,
                self.message,
            )
        )
        self.refresh()  # complete from the start, in case the notebook is saved now

    def _smooth(self) -> None:
        """Each curve as the mean of its last steps, over the faint curve itself."""
        self.curves.smoothing = SMOOTHING[self.smoothing.value]

    def compare(self, other: Any) -> None:
        """Draw another run (or its record) behind this one; None removes it."""
        if other is None:
            self.other = None
            self.curves.other = {}
            self.curves.other_rows = b""
            return
        record = other if isinstance(other, Record) else getattr(other, "record", None)
        if not isinstance(record, Record):
            raise ConfigError(
                f"compare is {type(other).__name__}",
                remedy="a run, or jv.Record.open(folder)",
            )
        name = str(
            getattr(other, "name", "")
            or (record.folder.name if record.folder else "other run")
        )
        self._other_name, self.other, self._other_due = name, RunFeed(record), 0.0
        self._send_other()

    def _send_other(self) -> None:
        """The second run may be active too: what it did since is sent with the next snapshot of rows."""
        if self.other is None or time.monotonic() < self._other_due:
            return
        self._other_due = time.monotonic() + SNAPSHOT_SECONDS
        if self.other.read() is not None:
            with self.curves.hold_sync():
                self.curves.other = {
                    "name": self._other_name,
                    "evaluations": self.other.evaluations,
                }
                self.curves.other_rows = self.other.rows.tobytes()

    def _send_missing(self, content: Any) -> None:
        """A canvas that has just been drawn reports how many rows it has; send it the rest."""
        have = content.get("have") if isinstance(content, dict) else None
        if isinstance(have, int) and self.feed and 0 <= have < len(self.feed.rows):
            self._append(self.feed, have)

    def _append(self, feed: RunFeed, first: int) -> None:
        self.curves.send({"first": first}, buffers=[feed.rows[first:].tobytes()])

    # Its updates ----------------------------------------------------------------------------------------------------

    def static_html(self) -> str:
        return run_html(self.name, self.status(), self.feed, self.model)

    def refresh(self) -> None:
        if self.feed is None:
            try:
                self.feed = RunFeed(self.open_record())
            except ConfigError:  # nothing recorded yet
                return
        self._write(self.feed)

    def _write(self, feed: RunFeed) -> None:
        status = self.status()
        first = feed.read()
        if first is not None:
            self._append(feed, first)
            self.curves.facts = {
                "alarm": feed.alarm,
                "split": feed.split(),
                "histogram": [[age, n] for age, n in sorted(feed.histogram.items())],
                "steps": status.steps,
            }
        if len(self.curves.evaluations) != len(feed.evaluations):
            self.curves.evaluations = [list(pair) for pair in feed.evaluations]
        if time.monotonic() >= self._rows_due or self.done:
            self._rows_due = time.monotonic() + SNAPSHOT_SECONDS
            self.curves.snapshot = feed.rows.tobytes()
        self._send_other()
        with self.parts.together():
            self.head.value = head_html(self.name, status, feed.alarm, feed)
            if self._read != (status.best, status.worst):
                self._read = status.best, status.worst
                self.samples.value = extremes_html(status, self.model)
            self.update_controls(status)
        self.found()

    def update_controls(self, status: RunStatus) -> None:
        """Enable the controls that are of use now."""


# The panel of a record: the dashboard of a run whose process is not this one, or has ended.


class RecordPanel(Dashboard):
    """A record's dashboard: it follows a run that another process works on, and has no buttons to steer it."""

    remedy = "jv.Record.open(folder).panel()"

    def __init__(self, record: Record, compare: Any = None, model: str = "") -> None:
        self._model, self._status, self._events = (
            model,
            status_of(record),
            len(record.events()),
        )
        self.moving = record.running
        self.hz = Dashboard.hz if self.moving else 0.05
        super().__init__(record, compare)

    @property
    def name(self) -> str:
        return run_name(self.subject.events())

    @property
    def model(self) -> str:
        return self._model

    def status(self) -> RunStatus:
        # its writer may have been killed, which writes no event
        if self.moving and (
            len(self.subject.events()) != self._events or not self.subject.running
        ):
            self._events = len(self.subject.events())
            # samples are looked for once the run has ended: their file is long, and this panel need not be exact
            self.moving = self.subject.running
            self._status = status_of(self.subject, samples=not self.moving)
        return self._status

    def open_record(self) -> Record:
        return self.subject


# The panel of a run: its dashboard, with buttons that pause, resume, stop and change the staleness bound.


class RunPanel(Dashboard):
    """A run's dashboard. It closes when the run ends under it; one of a run that has ended stays, to look around."""

    remedy = "jv.Lab.attach(), then jv.grpo(..., folder=..., resume=True)"

    def __init__(self, run: Run, compare: Any = None) -> None:
        self._over = run.done
        super().__init__(run, compare)

    def make_controls(self) -> list[Any]:
        run: Run = self.subject
        button = self.parts.button
        pause = lambda: self.act(run.pause, "pause")
        resume = lambda: self.act(run.resume, "resume")
        stop = lambda: self.act(run.stop, "stop after this step")
        self.pause = button("pause", "run.pause()", "jv-pause", pause)
        self.resume = button("resume", "run.resume()", "jv-resume", resume)
        self.stop = button("stop", "run.stop()", "jv-stop")
        self._confirm = ConfirmButton(self.stop, stop)
        field = {"description": "max staleness", "value": run.max_staleness}
        self.bound = self.parts.add("number", "jv-bound", wrong="", **field)
        self.bound.on_press(self._set_bound)
        self.apply = button("set", "run.max_staleness = k", "jv-set", self._set_bound)
        return [self.pause, self.resume, self.stop, self.bound, self.apply]

    def _set_bound(self) -> None:
        """Set the bound, or say beside the field what is wrong with it."""
        text = str(self.bound.value).strip()
        if not text.isdecimal():
            now = self.subject.max_staleness
            self.bound.wrong = f"a whole number, 0 or more; it stays {now}"
            return
        self.bound.wrong = ""
        self.act(
            lambda: setattr(self.subject, "max_staleness", int(text)),
            f"max_staleness = {text}",
        )

    def update_controls(self, status: RunStatus) -> None:
        over = f"the run is {status.state}"
        self.pause.why = "" if status.state == "running" else over
        self.resume.why = "" if status.state == "paused" else over
        self.stop.why = (
            "" if status.state in ("starting", "running", "paused") else over
        )
        self.apply.why = self.bound.why = over if self.subject.done else ""
        self._confirm.disarm(only_if_expired=True)

    @property
    def done(self) -> bool:
        return self.subject.done and not self._over

    @staticmethod
    def is_renewed(subject: Run) -> bool:
        return not subject.done
