"""`SyncReport`, `CheckReport`, `Meaning` and `Link` as HTML; both reports also as one line."""

from __future__ import annotations

import bisect
import itertools
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from jvlab._states import state
from jvlab._units import human_bytes, human_seconds
from jvlab.layout._slices import distinct_leaves, without_slice
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
    state_html,
    table,
)
from jvlab.wire._pool_summary import replica_health

if TYPE_CHECKING:
    from jvlab.sync._diff import TensorDiff
    from jvlab.sync._link import Link
    from jvlab.sync._meaning import Meaning
    from jvlab.sync._stepper import Stepper
    from jvlab.sync._transaction import CheckReport, Outcome, SyncReport


# A snapshot of a `Stepper`, and that snapshot as a table.

# a digest: not taken, equal, different
UNKNOWN = "."
RIGHT = "="
WRONG = "x"
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
        self.rows = tuple(
            (name, number) for number, u in enumerate(units) for name in unit_names(u)
        )
        self.sizes = tuple(u.nbytes for u in units)
        steps: dict[tuple[str, int], list[int]] = {}
        for number, unit in enumerate(units):
            for channel, job in unit.work:
                steps.setdefault((channel.replica, channel.rank), [0] * len(units))[
                    number
                ] += job.nbytes
        self.sent = {
            key: [0, *itertools.accumulate(found)]
            for key, found in sorted(steps.items())
        }
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
    position = stepper.position
    checked = dict(stepper.checked)
    patterns = tuple(stepper.breakpoints)
    names, units = zip(*cache.rows, strict=True) if cache.rows else ((), ())
    ticks = cache.get(
        "ticks", checked, lambda: "".join(_tick(checked, name) for name in names)
    )
    return StepperSnapshot(
        stepper.version,
        stepper.state,
        stepper.busy,
        position,
        names,
        units,
        cache.sizes,
        ticks,
        cache.get("breaks", patterns, lambda: _breaks(names, patterns)),
        stepper.upcoming,
        tuple(
            RankProgress(*key, sums[position], sums[-1])
            for key, sums in cache.sent.items()
        ),
        stepper.mode,
        stepper.link.transport,
    )


def _breaks(names: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[int, ...]:
    """Tensors before which a run stops."""
    compiled = [re.compile(p) for p in patterns]
    return tuple(
        i for i, name in enumerate(names) if any(p.search(name) for p in compiled)
    )


def _tick(checked: dict[str, bool], name: str) -> str:
    return UNKNOWN if name not in checked else RIGHT if checked[name] else WRONG


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
    large = [
        (f"{s.tensors_done:,}", f"of {len(s.names):,}", "tensors sent"),
        *(
            []
            if s.alone
            else [(f"{s.position:,}", f"of {len(s.sizes):,}", "buckets sent")]
        ),
        (number, f"{unit} of {human_bytes(sum(s.sizes))}", "bytes sent"),
    ]
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
    at = next((i for i, unit in enumerate(s.units) if unit >= s.position), len(s.names))
    first = max(0, min(at - CONTEXT, len(s.names) - 2 * CONTEXT - 1))
    digest = {
        RIGHT: f'<span style="color:{GOOD}">✓ digest</span>',
        WRONG: f'<b style="color:{BAD}">✗ differs</b>',
    }
    rows = []
    for i in range(first, min(len(s.names), first + 2 * CONTEXT + 1)):
        unit = s.units[i]
        word, colour = (
            ("sent", GOOD)
            if unit < s.position
            else ("next", WAIT)
            if unit == s.position
            else ("waits", IDLE)
        )
        if s.state == "aborted" and unit >= s.position:
            word = "not sent"
            colour = IDLE
        shared = i > 0 and s.units[i - 1] == unit
        rows.append(
            [
                f'<span style="font-family:{MONO}">{escape(s.names[i])}</span>',
                f'<span style="color:{FAINT}">same bucket</span>'
                if shared
                else human_bytes(s.sizes[unit]),
                f"{dot(colour)} {word}",
                digest.get(s.ticks[i], ""),
                "● break" if i in s.breaks else "",
            ]
        )
    left = len(s.names) - len(rows)
    more = f'<div style="color:{FAINT}">and {left} more</div>' if left > 0 else ""
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
        rows.append(
            (
                "paused",
                max(0.0, total - pause),
                total,
                TONES["wait"],
                "generation was paused, until the end",
            )
        )
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
    open_ = [
        name for name in meaning.leaves if without_slice(name) in meaning.ambiguous
    ]
    unseen = [
        leaf
        for leaf in meaning.ambiguous
        if leaf not in {without_slice(name) for name in open_}
    ]
    listed = list(dict.fromkeys([*wrong, *open_, *unseen, *meaning.leaves]))
    rows = []
    for leaf in listed[:SHOWN]:
        seen = meaning.leaves.get(leaf)
        why = meaning.ambiguous.get(without_slice(leaf), "")
        name = f'<span style="font-family:{MONO}">{escape(leaf)}</span>'
        rows.append([name, escape(seen.text if seen else "not compared"), escape(why)])
    more = (
        f'<div style="color:{FAINT}">and {len(listed) - SHOWN} more</div>'
        if len(listed) > SHOWN
        else ""
    )
    body = table(("leaf", "observed", "ambiguous"), rows) if rows else ""
    return f'<div style="{BOX}">{meaning_line(meaning)}{body}{more}</div>'
