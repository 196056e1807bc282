"""A snapshot of a `Stepper`, and that snapshot as a table."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from jvlab._units import human_bytes
from jvlab.views._style import BAD, BOX, FAINT, GOOD, IDLE, MONO, PALETTE, TONES, WAIT, bar, dot, table
from jvlab.wire._pool_summary import replica_health

if TYPE_CHECKING:
    from jvlab.sync._diff import TensorDiff
    from jvlab.sync._stepper import Stepper

COLOURS = {"committed": GOOD, "aborted": BAD, "ready": IDLE}  # other states are in progress
WORDS = {"verified": "digests equal"}  # "verified" would claim more
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
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ticks: str  # one letter per unit
    breaks: tuple[int, ...]  # units before which a run stops
    upcoming: str
    ranks: tuple[RankProgress, ...]
    mode: str
    transport: str

    @property
    def bytes_done(self) -> int:
        return sum(self.sizes[: self.position])


class _Cache:
    """What never or rarely changes in a stepper: a panel reads often, and there may be thousands of units."""

    def __init__(self, stepper: Stepper) -> None:
        units = stepper._units
        self.names = tuple(u.name for u in units)
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


_caches: weakref.WeakKeyDictionary[Any, _Cache] = weakref.WeakKeyDictionary()


def snapshot(stepper: Stepper) -> StepperSnapshot:
    """The stepper's current state, without any RPC."""
    if stepper not in _caches:
        _caches[stepper] = _Cache(stepper)
    cache, position, terms = _caches[stepper], stepper._next, stepper._transaction.terms
    checked, patterns = dict(stepper.checked), tuple(stepper.breakpoints)
    ticks = cache.get("ticks", checked, lambda: "".join(_tick(checked, u) for u in stepper._units))
    return StepperSnapshot(
        stepper.version,
        stepper.state,
        stepper.busy,
        position,
        cache.names,
        cache.sizes,
        ticks,
        cache.get("breaks", patterns, lambda: _breaks(stepper, patterns)),
        stepper.upcoming,
        tuple(RankProgress(*key, sums[position], sums[-1]) for key, sums in cache.sent.items()),
        terms.mode,
        stepper.link.transport,
    )


def _breaks(stepper: Stepper, patterns: tuple[str, ...]) -> tuple[int, ...]:
    """Units before which a run stops."""
    compiled = [re.compile(p) for p in patterns]
    hit = lambda unit: any(p.search(name) for p in compiled for name in (unit.name, *unit.parameters))
    return tuple(i for i, unit in enumerate(stepper._units) if hit(unit))


def _tick(checked: dict[str, bool], unit: Any) -> str:
    found = [checked[name] for name in unit.parameters if name in checked]
    return WRONG if not all(found) else RIGHT if len(found) == len(unit.parameters) else UNKNOWN


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
    colour = COLOURS.get(s.state, WAIT)
    state = escape(WORDS.get(s.state, s.state))
    title = (
        f"<b>Sync to version {s.version}</b> {dot(colour)} {state}{' …' if s.busy else ''} "
        f'<span style="color:{FAINT}">{escape(s.mode)} over {escape(s.transport)} · {s.position} of {len(s.names)} · '
        f"{human_bytes(s.bytes_done)} of {human_bytes(sum(s.sizes))} · next: "
        f'<span style="font-family:{MONO}">{escape(s.upcoming)}</span></span>'
    )
    return f'<div style="{BOX}">{title}<div>{engine_line(pool)}</div>{ranks_html(s)}</div>'


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
    first = max(0, min(s.position - CONTEXT, len(s.names) - 2 * CONTEXT - 1))
    rows = []
    for i in range(first, min(len(s.names), first + 2 * CONTEXT + 1)):
        word, colour = ("sent", GOOD) if i < s.position else ("next", WAIT) if i == s.position else ("waits", IDLE)
        if s.state == "aborted" and i >= s.position:
            word, colour = "not sent", IDLE
        digest = {RIGHT: f'<span style="color:{GOOD}">✓ digest</span>', WRONG: f'<b style="color:{BAD}">✗ differs</b>'}
        rows.append(
            [
                f'<span style="font-family:{MONO}">{escape(s.names[i])}</span>',
                human_bytes(s.sizes[i]),
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
