"""`SyncReport`, `CheckReport`, `Meaning`, `Link`, `Stepper` and `Bisection` as HTML; the stepper's panel."""

from __future__ import annotations

import bisect
import itertools
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jvlab._errors import JvlabError
from jvlab._states import state
from jvlab._units import human_bytes, human_seconds
from jvlab.layout._slices import distinct_leaves, without_slice
from jvlab.record._token_pieces import visible
from jvlab.views._palette import PHASES, TONES
from jvlab.views._style import (
    BAD,
    BOX,
    CELL,
    FAINT,
    GOOD,
    IDLE,
    LINE,
    MONO,
    NUMBER,
    PALETTE,
    WAIT,
    bar,
    dot,
    headlines,
    hollow_dots,
    sparkline,
    state_html,
    table,
    unseen,
)
from jvlab.views.panels._live import ConfirmButton, PartsPanel, box
from jvlab.wire._pool_summary import replica_health

if TYPE_CHECKING:
    from jvlab.sync._diff import TensorDiff
    from jvlab.sync._link import Link
    from jvlab.sync._meaning import Meaning
    from jvlab.sync._stepper import Stepper
    from jvlab.sync._transaction import CheckReport, Outcome, SyncReport
    from jvlab.sync.diagnose._bisect import Bisection


# A snapshot of a `Stepper`, and that snapshot as a table.

# a digest: not taken, equal, different
UNKNOWN = "."
RIGHT = "="
WRONG = "x"
TICKS = {None: UNKNOWN, True: RIGHT, False: WRONG}
CONTEXT = 4  # rows of the static table before and after the current one


@dataclass(frozen=True)
class RankProgress:
    """What has been sent to one rank of one replica."""

    replica: str
    rank: int
    done: int
    total: int


@dataclass(frozen=True)
class StepperSnapshot:
    """A snapshot of a stepper."""

    version: int
    state: str
    busy: bool
    position: int  # number of units sent
    # every tensor, in the order of units; one that is sent in parts is named in each
    names: tuple[str, ...]
    units: tuple[int, ...]  # the unit that sends it
    sizes: tuple[int, ...]  # bytes of each unit
    ticks: str  # one letter per tensor
    breaks: tuple[int, ...]  # tensors before which a run stops
    upcoming: str
    ranks: tuple[RankProgress, ...]
    mode: str
    transport: str

    @property
    def bytes_done(self) -> int:
        return sum(self.sizes[: self.position])

    @property
    def tensors_done(self) -> int:
        return bisect.bisect_left(self.units, self.position)

    @property
    def alone(self) -> bool:
        """Whether each unit sends one tensor: there are no buckets to speak of."""
        return len(self.names) == len(self.sizes)

    @property
    def progress(self) -> str:
        """How far it is, in words."""
        sent = f"{self.position} of {len(self.sizes)}"
        return (
            f"{sent} tensors"
            if self.alone
            else f"{sent} buckets, {self.tensors_done} of {len(self.names)} tensors"
        )


class _Cache:
    """What never or rarely changes in a stepper: a panel reads often, and there may be thousands of units."""

    def __init__(self, stepper: Stepper) -> None:
        units = stepper.units
        named = [(name, at) for at, u in enumerate(units) for name in unit_names(u)]
        self.names = tuple(name for name, _ in named)
        self.units = tuple(at for _, at in named)
        self.sizes = tuple(u.nbytes for u in units)
        steps: dict[tuple[str, int], list[int]] = {}
        for number, unit in enumerate(units):
            for channel, job in unit.work:
                key = (channel.replica, channel.rank)
                steps.setdefault(key, [0] * len(units))[number] += job.nbytes
        self.sent = {k: [0, *itertools.accumulate(v)] for k, v in sorted(steps.items())}
        self._values: dict[str, tuple[Any, Any]] = {}

    def get(self, what: str, key: Any, make: Callable[[], Any]) -> Any:
        """`make()`, cached until the key changes."""
        if what not in self._values or self._values[what][0] != key:
            self._values[what] = (key, make())
        return self._values[what][1]


def unit_names(unit: Any) -> tuple[str, ...]:
    """The tensors that a unit sends, in whole or in part."""
    return unit.parameters or (unit.name,)


_caches: weakref.WeakKeyDictionary[Any, _Cache] = weakref.WeakKeyDictionary()


def snapshot(stepper: Stepper) -> StepperSnapshot:
    """The stepper's current state, without any RPC."""
    if stepper not in _caches:
        _caches[stepper] = _Cache(stepper)
    cache = _caches[stepper]
    names = cache.names
    position = stepper.position
    checked = dict(stepper.checked)
    patterns = tuple(stepper.breakpoints)
    tick = lambda: "".join(TICKS[checked.get(name)] for name in names)
    sent = cache.sent.items()
    return StepperSnapshot(
        version=stepper.version,
        state=stepper.state,
        busy=stepper.busy,
        position=position,
        names=names,
        units=cache.units,
        sizes=cache.sizes,
        ticks=cache.get("ticks", checked, tick),
        breaks=cache.get("breaks", patterns, lambda: _breaks(names, patterns)),
        upcoming=stepper.upcoming,
        ranks=tuple(RankProgress(*k, sums[position], sums[-1]) for k, sums in sent),
        mode=stepper.mode,
        transport=stepper.link.transport,
    )


def _breaks(names: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[int, ...]:
    """Tensors before which a run stops."""
    compiled = [re.compile(p) for p in patterns]
    return tuple(
        i for i, name in enumerate(names) if any(p.search(name) for p in compiled)
    )


def engine_line(pool: Any) -> str:
    """The state of every engine (serving, paused or dirty) and its version."""
    parts = []
    for r in pool.replicas:
        words, tone = replica_health(r, pool.sync)
        colour = TONES[tone]
        word = "serving" if words == "ready" else words
        parts.append(
            f"{dot(colour)} {escape(r.replica)} <b>{escape(word)}</b>, version {r.stats.weight_version}"
        )
    return " &nbsp; ".join(parts)


def head_html(s: StepperSnapshot, pool: Any) -> str:
    """Title, engines and progress: the part that is always visible."""
    found = state("waiting" if s.state == "ready" else s.state)
    number, unit = human_bytes(s.bytes_done).split(" ")
    large = [(f"{s.tensors_done:,}", f"of {len(s.names):,}", "tensors sent")]
    if not s.alone:
        large.append((f"{s.position:,}", f"of {len(s.sizes):,}", "buckets sent"))
    large.append((number, f"{unit} of {human_bytes(sum(s.sizes))}", "bytes sent"))
    title = (
        f"<b>Sync to version {s.version}</b> {state_html(found)}{' …' if s.busy else ''} "
        f'<span style="color:{FAINT}">{escape(s.mode)} over {escape(s.transport)} · next: '
        f'<span style="font-family:{MONO}">{escape(s.upcoming)}</span></span>'
    )
    return f'<div style="{BOX}">{title}{headlines(large)}<div>{engine_line(pool)}</div>{ranks_html(s)}</div>'


def ranks_html(s: StepperSnapshot) -> str:
    """A progress bar per rank."""
    rows = "".join(
        '<div style="display:flex;align-items:center;gap:10px">'
        f'<span style="color:{FAINT};min-width:7em">{escape(r.replica)} rank {r.rank}</span>'
        f"{bar(r.done / r.total if r.total else 0.0, PALETTE[r.rank % len(PALETTE)])}"
        f"<span>{human_bytes(r.done)} of {human_bytes(r.total)}</span></div>"
        for r in s.ranks
    )
    return f'<div style="margin:2px 0">{rows}</div>'


def diff_html(name: str, diffs: dict[str, list[TensorDiff]]) -> str:
    """A tensor's current values in the engine compared with the new ones: a row per time (before, after) and rank."""
    rows = [
        [
            when,
            str(d.rank),
            "×".join(map(str, d.shape)),
            f"{d.share_changed:.1%}",
            f"{d.max_change:.3g}",
            f"{d.norm_change:.3g}",
            f"{d.norm_now:.4g}",
            f"{d.norm_new:.4g}",
        ]
        for when, found in diffs.items()
        for d in found
    ]
    heads = ("", "rank", "shape", "differs", "max |Δ|", "‖Δ‖", "‖engine‖", "‖trainer‖")
    return f'<div style="{BOX}">{tensor_name(name)}{table(heads, rows, numbers=(1, 3, 4, 5, 6, 7))}</div>'


def tensor_name(name: str) -> str:
    return f'<span style="font-family:{MONO}"><b>{escape(name)}</b></span>'


def stepper_html(stepper: Stepper) -> str:
    """The static view: the state and the tensors around the current one."""
    s = snapshot(stepper)
    at = s.tensors_done
    first = max(0, min(at - CONTEXT, len(s.names) - 2 * CONTEXT - 1))
    digest = {
        RIGHT: f'<span style="color:{GOOD}">✓ digest</span>',
        WRONG: f'<b style="color:{BAD}">✗ differs</b>',
    }
    rows = []
    for i in range(first, min(len(s.names), first + 2 * CONTEXT + 1)):
        unit = s.units[i]
        state = f"{dot(IDLE)} waits"
        if unit < s.position:
            state = f"{dot(GOOD)} sent"
        elif s.state == "aborted":
            state = f"{dot(IDLE)} not sent"
        elif unit == s.position:
            state = f"{dot(WAIT)} next"
        size = human_bytes(s.sizes[unit])
        if i > 0 and s.units[i - 1] == unit:
            size = f'<span style="color:{FAINT}">same bucket</span>'
        name = f'<span style="font-family:{MONO}">{escape(s.names[i])}</span>'
        stop = "● break" if i in s.breaks else ""
        rows.append([name, size, state, digest.get(s.ticks[i], ""), stop])
    more = unseen(len(s.names) - len(rows), "and {} more")
    body = table(("tensor", "bytes", "", "", ""), rows, numbers=(1,))
    report = sync_html(stepper.report) if stepper.report is not None else ""
    return f'<div style="{BOX}">{head_html(s, stepper.link.pool.snapshot)}{body}{more}{report}</div>'


# ----------------------------------------------------------------------------------------------------

MEANING_DOTS = {"checked": GOOD, "failed": BAD, "unchecked": WAIT, "pending": WAIT}
SHOWN = 12  # leaves in the table of a meaning
# work that overlaps with the rest
INSIDE = ("pack", "copy", "scatter", "digest", "repack", "reload", "commit")


def known(report: SyncReport) -> str:
    """Exactly what is known of a sync: whether its bits arrived, and whether their meaning was checked."""
    words = {
        "full": "arrived",
        "sampled": "a sample arrived",
        "off": "digests not compared",
    }
    count = distinct_leaves([text.partition(": ")[0] for text in report.nonfinite])
    nonfinite = (
        f", {count} {'leaf' if count == 1 else 'leaves'} not finite" if count else ""
    )
    return f"{words[report.verify]}{nonfinite}; meaning {report.meaning}"


def sent_words(report: SyncReport) -> str:
    """Bytes sent; of a sync of changes also of how many, and what share of the values changed."""
    size = human_bytes(report.bytes)
    if report.changed is None:
        return size
    whole = f" of {human_bytes(report.full_bytes)}" if report.delta else ""
    return f"{size}{whole}, {report.changed:.2%} changed,"


def sync_line(report: SyncReport) -> str:
    """The report's repr, without times."""
    count = len(report.outcomes)
    replicas = f"{count} replica{'s' if count != 1 else ''}"
    ways = f"{report.mode} over {report.transport}"
    again = (
        f", {counted_layers(report)} through vLLM's reload" if report.reloaded else ""
    )
    size = sent_words(report)
    return f"SyncReport(version {report.version}, {size} {ways} to {replicas}{again}, {known(report)})"


def counted_layers(report: SyncReport) -> str:
    """How many layers vLLM's own reload processed."""
    return f"{len(report.reloaded)} layer{'s' if len(report.reloaded) != 1 else ''}"


def reload_line(report: SyncReport) -> str:
    """The layers that vLLM's own reload processed, slowest first, and what they cost; empty if none."""
    if not report.reloaded:
        return ""
    slowest = sorted(report.reloaded.items(), key=lambda item: -item[1])
    shown = ", ".join(
        f"{escape(name)} {1e3 * seconds:.1f} ms" for name, seconds in slowest[:SHOWN]
    )
    more = f" and {len(slowest) - SHOWN} more" if len(slowest) > SHOWN else ""
    total = human_seconds(sum(report.reloaded.values()))
    return f"<div>vLLM's own reload: {counted_layers(report)}, {total} ({shown}{more})</div>"


def sync_html(report: SyncReport) -> str:
    title = (
        f"<b>version {report.version}</b> · {sent_words(report)} · {report.gbps:.2f} GB/s · "
        f"{escape(report.mode)} over {escape(report.transport)} · {escape(known(report))}"
    )
    lines = list(report.notes)
    if report.changed is not None and report.why_full not in ("", *lines):
        lines.append(f"sent whole, at least in part: {report.why_full}")
    notes = "".join(f"<div>{escape(line)}</div>" for line in lines)
    inside = f"{waterfall(report)}{_outcomes(report.outcomes)}{reload_line(report)}"
    return f'<div style="{BOX}">{title}{inside}{notes}</div>'


def waterfall(report: SyncReport) -> str:
    """Each part of a sync where it lay in time: measured spans, the pause, and the work that overlapped inside."""
    seconds = report.seconds
    total = seconds.get("total", 0.0) or 1e-9
    spans = dict(report.spans) or {"move": (0.0, seconds.get("move", 0.0))}
    inside = spans.get("move") or next(iter(spans.values()))
    rows = [(name, *span, PHASES["sync"], "") for name, span in spans.items()]
    if pause := seconds.get("pause", 0.0):
        how = "generation was paused, until the end"
        rows.append(("paused", max(0.0, total - pause), total, TONES["wait"], how))
    for name in INSIDE:
        if took := seconds.get(name, 0.0):
            how = "seconds of work, in pieces that overlap with the others"
            rows.append((name, inside[0], inside[0] + took, PHASES["score"], how))
    lines = [_lane(*row, total) for row in rows]
    end = (
        f'<tr><td style="{CELL}"><b>total</b></td>'
        f'<td style="{NUMBER}"><b>{human_seconds(total)}</b></td><td></td></tr>'
    )
    return f'<table style="border-collapse:collapse">{"".join(lines)}{end}</table>'


def _lane(
    name: str, start: float, stop: float, colour: str, how: str, total: float
) -> str:
    """A row of the waterfall: name, seconds, and a bar at its place in time."""
    left = 100 * min(1.0, max(0.0, start / total))
    width = min(100 - left, max(0.6, 100 * (stop - start) / total))
    bar = f"margin-left:{left:.1f}%;width:{width:.1f}%;height:9px;background:{colour};border-radius:2px"
    lane = f'<div title="{escape(how)}" style="width:260px;background:{LINE}"><div style="{bar}"></div></div>'
    took = f'<td style="{NUMBER}">{human_seconds(stop - start)}</td>'
    return f'<tr><td style="{CELL}">{name}</td>{took}<td>{lane}</td></tr>'


def _outcomes(outcomes: tuple[Outcome, ...]) -> str:
    lines = []
    for o in outcomes:
        mark = dot(TONES[state(o.state).tone])
        text = escape(o.error) + "".join(
            f"<br>differs: {escape(name)}" for name in o.differing[:8]
        )
        more = f"<br>… and {len(o.differing) - 8} more" if len(o.differing) > 8 else ""
        lines.append(
            f"<div>{mark} {escape(o.replica)}: {escape(o.state)}, version {o.version} {text}{more}</div>"
        )
    return "".join(lines)


def check_line(report: CheckReport) -> str:
    found = (
        "digests equal" if report.ok else f"{len(report.differing)} parameters differ"
    )
    return f"CheckReport(version {report.version}, {len(report.digests)} parameters, {found})"


def check_html(report: CheckReport) -> str:
    notes = "".join(f"<div>{escape(note)}</div>" for note in report.notes)
    title = f"<b>{escape(check_line(report))}</b> · {human_seconds(report.seconds)}"
    return f'<div style="{BOX}">{title}{_outcomes(report.outcomes)}{notes}</div>'


def link_html(link: Link) -> str:
    last = sync_html(link.last) if link.last is not None else "<div>no sync yet</div>"
    head = f"<b>{escape(repr(link))}</b><div>{escape(link.reason)}</div>{meaning_line(link.meaning)}"
    return f'<div style="{BOX}">{head}{last}</div>'


def meaning_line(meaning: Meaning) -> str:
    """The state, how it was determined, and why."""
    how = f" by {meaning.how}" if meaning.how else ""
    why = (
        f' <span style="color:{FAINT}">{escape(meaning.why)}</span>'
        if meaning.why
        else ""
    )
    return f"<div>{dot(MEANING_DOTS[meaning.state])} meaning {escape(meaning.state)}{escape(how)}{why}</div>"


def meaning_html(meaning: Meaning) -> str:
    """The line, and a table of what was observed, wrong and ambiguous leaves first."""
    wrong = [leaf for leaf, seen in meaning.leaves.items() if seen.contradicts]
    # slices of stacked leaves
    open_ = [n for n in meaning.leaves if without_slice(n) in meaning.ambiguous]
    named = {without_slice(name) for name in open_}
    unseen_ = [leaf for leaf in meaning.ambiguous if leaf not in named]
    listed = list(dict.fromkeys([*wrong, *open_, *unseen_, *meaning.leaves]))
    rows = []
    for leaf in listed[:SHOWN]:
        seen = meaning.leaves.get(leaf)
        why = meaning.ambiguous.get(without_slice(leaf), "")
        name = f'<span style="font-family:{MONO}">{escape(leaf)}</span>'
        rows.append([name, escape(seen.text if seen else "not compared"), escape(why)])
    more = unseen(len(listed) - SHOWN, "and {} more")
    body = table(("leaf", "observed", "ambiguous"), rows) if rows else ""
    return f'<div style="{BOX}">{meaning_line(meaning)}{body}{more}</div>'


DESCRIBE_SECONDS = 2.0  # deadline for the engines' state
OVER = ("committed", "aborted")


class StepperPanel(PartsPanel):
    """Step, run, run to a breakpoint, pause, abort, verify; shows progress and the engines' state."""

    hz = 4.0
    remedy = (
        "jv.Lab.attach(), then link.stepper(params): the gateway abandoned this one"
    )

    scripts = ("controls.js", "stepper.js")
    css_class = "jv-stepper"
    # names, units and sizes are sent once; after that only position, digest results and breakpoints
    traits: ClassVar[dict[str, Any]] = {
        **PartsPanel.traits,
        "names": [],
        "units": [],
        "sizes": [],
        "position": 0,
        "ticks": "",
        "breaks": [],
        "over": False,
    }

    @staticmethod
    def is_over(subject: Stepper) -> bool:
        return subject.state in OVER

    @property
    def progress(self) -> str:
        return snapshot(self.subject).progress

    def make_parts(self) -> None:
        stepper: Stepper = self.subject
        s = snapshot(stepper)
        self.list = self.widget
        self.list.names = list(s.names)
        self.list.units = list(s.units)
        self.list.sizes = list(s.sizes)
        self.list.on_msg(lambda _, content, __: self._clicked(content))
        parts = self.parts
        self.head = parts.html("jv-head")
        self.difference = parts.html("jv-diff")
        self.pattern = parts.add(
            "text",
            "jv-pattern",
            placeholder="regex of a tensor",
            width="16em",
            wrong="",
        )
        self.pattern.on_press(self._run_to)
        self.compare = parts.add(
            "check", "jv-compare", description="differences", value=True
        )
        rows = parts.add("draw", "jv-list", draw="tensors")
        parts.arrange(
            box(
                self.head,
                box(*self._buttons(), row=True),
                rows,
                self.difference,
                self.message,
            )
        )
        self._write()

    def _buttons(self) -> list[Any]:
        stepper: Stepper = self.subject
        button = self.parts.button
        step = lambda: self._advance(stepper.step, "step", one=True)
        run = lambda: self._advance(stepper.run, "run")
        pause = lambda: self.act(stepper.pause, "pause")
        abort = lambda: self.act(stepper.abort, "abort")
        verify = lambda: self.act(self._verify)
        tip = "stepper.run(until=regex)"
        self.step = button("step", "stepper.step()", "jv-step", step)
        self.run = button("run", "stepper.run()", "jv-run", run)
        self.run_to = button("run to", tip, "jv-run-to", self._run_to)
        self.pause = button("pause", "stepper.pause()", "jv-stop", pause)
        self.verify = button("verify", "stepper.verify()", "jv-verify", verify)
        self.abort = button("abort", "stepper.abort()", "jv-abort")
        self._confirm = ConfirmButton(self.abort, abort)
        walking = [self.step, self.run, self.pattern, self.run_to, self.pause]
        return [*walking, self.verify, self.abort, self.compare]

    # Actions of the buttons ---------------------------------------------------------------------------------------

    def _run_to(self) -> None:
        until = self.pattern.value.strip()
        if not until:
            self.pattern.wrong = "give a regular expression: the run stops before the first tensor that it matches"
            return
        try:
            matches = [name for name in self.list.names if re.search(until, name)]
        except re.error as error:
            self.pattern.wrong = f"not a regular expression: {error}"
            return
        if not matches:
            self.pattern.wrong = "no tensor has this name"
            return
        self.pattern.wrong = ""
        self._advance(lambda: self.subject.run(until=until), f"run to {until}")

    def _advance(self, method: Callable[[], Any], text: str, one: bool = False) -> None:
        self.act(lambda: self._advance_and_compare(method, one), text)

    def _advance_and_compare(self, method: Callable[[], Any], one: bool) -> None:
        """After a single step, compare its tensor before and after; after a run, show the next tensor."""
        stepper: Stepper = self.subject
        name = stepper.upcoming
        before = self._diff(name) if one else None
        method()
        if one:
            self._compare(name, {"before": before, "after": self._diff(name)})
        else:
            self._compare(stepper.upcoming, {"ahead": self._diff(stepper.upcoming)})

    def _diff(self, name: str) -> list[TensorDiff] | str | None:
        """`stepper.diff(name)`, or why it failed; None if there is no such tensor or comparing is switched off."""
        stepper: Stepper = self.subject
        if (
            not self.compare.value
            or name not in self.list.names
            or stepper.state in OVER
        ):
            return None
        try:
            return stepper.diff(name)
        # some tensors cannot be read back; stepping continues
        except JvlabError as error:
            return error.message

    def _compare(
        self, name: str, diffs: dict[str, list[TensorDiff] | str | None]
    ) -> None:
        found = {when: diff for when, diff in diffs.items() if isinstance(diff, list)}
        why = next((diff for diff in diffs.values() if isinstance(diff, str)), "")
        if found:
            self.difference.value = diff_html(name, found)
        elif why:
            faint = f'<span style="color:{FAINT}">{escape(why)}</span>'
            self.difference.value = (
                f'<div style="{BOX}">{tensor_name(name)} {faint}</div>'
            )
        else:
            self.difference.value = ""

    def _clicked(self, content: Any) -> None:
        """A tensor in the list was clicked."""
        index = content.get("look") if isinstance(content, dict) else None
        if isinstance(index, int) and 0 <= index < len(self.list.names):
            name = self.list.names[index]
            self.act(lambda: self._compare(name, {"now": self._diff(name)}))

    def _verify(self) -> None:
        report = self.subject.verify()
        self.say(repr(report), bad=not report.ok)

    # Display ------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        pool = self.subject.link.pool
        # polled, since the gateway does not push when only a heartbeat's numbers changed
        if self.ask(lambda: pool.look(DESCRIBE_SECONDS)) is not None:
            self._write()
            self.found()

    @property
    def another(self) -> str:
        return "lab.panel()"

    def show_lost(self, what: str) -> None:
        self.head.value = hollow_dots(self.head.value)
        for part in (self.step, self.run, self.run_to, self.verify, self.pause):
            part.why = what

    def _write(self) -> None:
        stepper: Stepper = self.subject
        s = snapshot(stepper)
        over = f"the sync is {s.state}" if s.state in OVER else ""
        with self.parts.together():
            self.head.value = head_html(s, stepper.link.pool.snapshot)
            for part in (self.step, self.run, self.run_to, self.verify):
                part.why = over or ("a step is being sent" if s.busy else "")
            self.pause.why = "" if s.busy else "nothing runs"
            self.abort.why = over
            self._confirm.disarm(only_if_expired=True)
        with self.list.hold_sync():
            self.list.position = s.position
            self.list.ticks = s.ticks
            self.list.breaks = list(s.breaks)
            self.list.over = s.state in OVER

    @property
    def done(self) -> bool:
        return self.subject.state in OVER and not self.subject.busy


STATES = {
    "ok": (GOOD, "ruled out"),
    "cause": (BAD, "the cause"),
    "skipped": (IDLE, "not asked"),
}
POINTS = 120  # of the gap's curve, to keep saved notebooks small


def bisection_html(found: Bisection) -> str:
    """The verdict, then the evidence."""
    colour = GOOD if found.agrees else BAD
    title = f"<b>{escape(found.cause or 'agree')}</b>: {escape(visible(found.verdict))}"
    remedy = (
        f'<div>→ <code style="font-family:{MONO}">{escape(found.remedy)}</code></div>'
        if found.remedy
        else ""
    )
    head = f'<div style="border-left:3px solid {colour};padding:2px 10px;margin:2px 0 6px">{title}{remedy}</div>'
    wrap = lambda text: (
        f'<div style="white-space:normal;max-width:60em">{escape(visible(text))}</div>'
    )
    rows = []
    for check in found.checks:
        shade, word = STATES[check.state]
        rows.append([f"{dot(shade)} {word}", escape(check.name), wrap(check.evidence)])
    checks = table(("", "check", "evidence"), rows)
    return f'<div style="{BOX}">{head}{checks}{_rule(found)}{_tensors(found)}{_curve(found)}</div>'


def _rule(found: Bisection) -> str:
    """The current rule, and the one to write instead."""
    facts = next(
        (c.facts for c in found.checks if c.name == "rule" and c.state == "cause"), {}
    )
    code = lambda text: (
        f'<code style="font-family:{MONO}">{escape(visible(text))}</code>'
    )
    rows = [
        [word, code(text)]
        for word, key in (("now", "now"), ("write", "write"))
        for text in facts.get(key, ())
    ]
    return table(("", "rule"), rows) if rows else ""


def _tensors(found: Bisection) -> str:
    if not found.tensors:
        return ""
    rows = [
        [
            f'<code style="font-family:{MONO}">{escape(t.parameter)}</code>',
            str(t.rank),
            escape(str(list(t.shape))),
            f"{t.share_changed:.1%}",
            f"{t.max_change:.3g}",
            f"{t.norm_change:.3g}",
            f"{t.norm_now:.3g}",
        ]
        for t in found.tensors
    ]
    heads = (
        "parameter",
        "rank",
        "shape",
        "elements that differ",
        "largest",
        "‖difference‖",
        "‖engine‖",
    )
    line = f'<div style="border-top:1px solid {LINE};margin:6px 0 2px;color:{FAINT}">engine against trainer</div>'
    return line + table(heads, rows, numbers=(1, 3, 4, 5, 6))


def _curve(found: Bisection) -> str:
    """|engine − trainer| along the tokens."""
    if found.engine is None or found.trainer is None or found.gap is None:
        return ""
    apart = np.nan_to_num(np.abs(found.engine - found.trainer))[1:]
    step = max(1, -(-len(apart) // POINTS))
    peaks = [float(apart[i : i + step].max()) for i in range(0, len(apart), step)]
    text = f"|engine − trainer| along {len(found.tokens)} tokens, at most {found.gap:.2g} nats"
    curve = sparkline(peaks, 240, 24, PALETTE[0])
    return f'<div style="margin-top:6px">{curve} <span style="color:{FAINT}">{text}</span></div>'
