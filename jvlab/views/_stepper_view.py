"""A snapshot of a `Stepper`, and that snapshot as a table."""

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
from jvlab._units import human_bytes
from jvlab.views._palette import TONES
from jvlab.views._style import BAD, BOX, FAINT, GOOD, IDLE, MONO, PALETTE, WAIT, bar, dot, headlines, state_html, table
from jvlab.wire._pool_summary import replica_health

if TYPE_CHECKING:
    from jvlab.sync._diff import TensorDiff
    from jvlab.sync._stepper import Stepper

UNKNOWN, RIGHT, WRONG = ".", "=", "x"  # a digest: not taken, equal, different
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
    names: tuple[str, ...]  # every tensor, in the order of units; one that is sent in parts is named in each
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
        return f"{sent} tensors" if self.alone else f"{sent} buckets, {self.tensors_done} of {len(self.names)} tensors"


class _Cache:
    """What never or rarely changes in a stepper: a panel reads often, and there may be thousands of units."""

    def __init__(self, stepper: Stepper) -> None:
        units = stepper._units
        self.rows = tuple((name, number) for number, u in enumerate(units) for name in unit_names(u))
        self.sizes = tuple(u.nbytes for u in units)
        steps: dict[tuple[str, int], list[int]] = {}
        for number, unit in enumerate(units):
            for channel, job in unit.work:
                steps.setdefault((channel.replica, channel.rank), [0] * len(units))[number] += job.nbytes
        self.sent = {key: [0, *itertools.accumulate(found)] for key, found in sorted(steps.items())}
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
    cache, position, terms = _caches[stepper], stepper._next, stepper._transaction.terms
    checked, patterns = dict(stepper.checked), tuple(stepper.breakpoints)
    names, units = zip(*cache.rows, strict=True) if cache.rows else ((), ())
    ticks = cache.get("ticks", checked, lambda: "".join(_tick(checked, name) for name in names))
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
        tuple(RankProgress(*key, sums[position], sums[-1]) for key, sums in cache.sent.items()),
        terms.mode,
        stepper.link.transport,
    )


def _breaks(names: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[int, ...]:
    """Tensors before which a run stops."""
    compiled = [re.compile(p) for p in patterns]
    return tuple(i for i, name in enumerate(names) if any(p.search(name) for p in compiled))


def _tick(checked: dict[str, bool], name: str) -> str:
    return UNKNOWN if name not in checked else RIGHT if checked[name] else WRONG


def engine_line(pool: Any) -> str:
    """The state of every engine (serving, paused or dirty) and its version."""
    parts = []
    for r in pool.replicas:
        words, tone = replica_health(r, pool.sync)
        colour = TONES[tone]
        word = "serving" if words == "ready" else words
        parts.append(f"{dot(colour)} {escape(r.replica)} <b>{escape(word)}</b>, version {r.stats.weight_version}")
    return " &nbsp; ".join(parts)


def head_html(s: StepperSnapshot, pool: Any) -> str:
    """Title, engines and progress: the part that is always visible."""
    found = state("waiting" if s.state == "ready" else s.state)
    number, unit = human_bytes(s.bytes_done).split(" ")
    large = [
        (f"{s.tensors_done:,}", f"of {len(s.names):,}", "tensors sent"),
        *([] if s.alone else [(f"{s.position:,}", f"of {len(s.sizes):,}", "buckets sent")]),
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
    digest = {RIGHT: f'<span style="color:{GOOD}">✓ digest</span>', WRONG: f'<b style="color:{BAD}">✗ differs</b>'}
    rows = []
    for i in range(first, min(len(s.names), first + 2 * CONTEXT + 1)):
        unit = s.units[i]
        word, colour = (
            ("sent", GOOD) if unit < s.position else ("next", WAIT) if unit == s.position else ("waits", IDLE)
        )
        if s.state == "aborted" and unit >= s.position:
            word, colour = "not sent", IDLE
        shared = i > 0 and s.units[i - 1] == unit
        rows.append(
            [
                f'<span style="font-family:{MONO}">{escape(s.names[i])}</span>',
                f'<span style="color:{FAINT}">same bucket</span>' if shared else human_bytes(s.sizes[unit]),
                f"{dot(colour)} {word}",
                digest.get(s.ticks[i], ""),
                "● break" if i in s.breaks else "",
            ]
        )
    left = len(s.names) - len(rows)
    more = f'<div style="color:{FAINT}">and {left} more</div>' if left > 0 else ""
    body = table(("tensor", "bytes", "", "", ""), rows, numbers=(1,))
    report = stepper.report._repr_html_() if stepper.report is not None else ""
    return f'<div style="{BOX}">{head_html(s, stepper.link.pool._snapshot)}{body}{more}{report}</div>'
