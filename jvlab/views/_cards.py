"""`Lab` and `Pool` as a line and as a table, from the last snapshot; no RPC. Their panels: live, with buttons."""

from __future__ import annotations

import contextlib
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from jvlab import _faces
from jvlab._states import state, worst
from jvlab._units import human_bytes
from jvlab.record._sample import shorten
from jvlab.record._token_pieces import visible
from jvlab.views._palette import TONES
from jvlab.views._style import (
    BAD,
    BOX,
    FAINT,
    FILL,
    GOOD,
    IDLE,
    LINE,
    MONO,
    WAIT,
    bar,
    dot,
    faint,
    headlines,
    hollow_dots,
    sparkline,
    state_html,
    table,
    unseen,
)
from jvlab.views.panels._live import ConfirmButton, PanelPart, PartsPanel, box
from jvlab.wire._pool_summary import (
    LEAVING,
    is_well,
    model_name,
    pool_health,
    pool_state,
    replica_health,
    stage_word,
)
from jvlab.wire.processes._identity import Identity

if TYPE_CHECKING:
    import psutil

    from jvlab.lab._determinism import Case, DeterminismReport
    from jvlab.lab._lab import Lab
    from jvlab.lab._pool import Pool
    from jvlab.lab._session import Session, Sessions, SessionStats
    from jvlab.record._record import Comparison


# The processes of a lab as rows: gateway, replicas and their workers, with memory if they run on this machine.

WORKER = "VLLM::"  # prefix of the names of vLLM's engine core and ranks
TRACKER = "multiprocessing.resource_tracker"
# between scans of a replica's process tree, each of which reads every process of the machine
RESCAN_SECONDS = 5.0
DESCRIBE_SECONDS = 5.0  # deadline of the one call: the gateway answers from memory


@dataclass(frozen=True, kw_only=True)
class ProcessRow:
    """One process. A number that does not apply, or is not known on this machine, is None."""

    kind: str  # "gateway", "replica" or "worker"
    name: str
    pool: str = ""
    state: str
    colour: str
    pid: int
    device: str
    memory: int | None = None  # resident bytes
    version: int | None = None
    dirty: bool = False
    beat_age: float | None = None  # seconds since its last heartbeat
    in_flight: int | None = None
    tokens_per_s: float | None = None
    cause: str = ""


class ProcessRows:
    """Reads the rows repeatedly, with one call to the gateway each time; psutil's handles are kept."""

    def __init__(self, subject: Lab | Pool) -> None:
        self._subject = subject
        self._workers: dict[int, tuple[float, list[psutil.Process]]] = {}
        self._handles: dict[int, psutil.Process] = {}

    def read(self) -> tuple[Any, list[ProcessRow]]:
        """The lab's status as the gateway reports it, and a row per process."""
        status = self._subject.look(DESCRIBE_SECONDS)
        # the gateway started the others, so that they are local if it is
        local = Identity(status.pid, status.host, status.started).process() is not None
        rows = [
            ProcessRow(
                kind="gateway",
                name=f"gateway {status.lab}",
                state="serving",
                colour=GOOD,
                pid=status.pid,
                device="cpu",
                memory=self._memory(status.pid) if local else None,
            )
        ]
        for pool in status.pools:
            if not pool.closed:
                for replica in pool.replicas:
                    rows += self._replica(pool, replica, local)
        return status, rows

    def _replica(self, pool: Any, r: Any, local: bool) -> list[ProcessRow]:
        words, tone = replica_health(r, pool.sync)
        here = not r.elsewhere or r.facts.host == platform.node()
        local = local and r.pid > 0 and here
        ready = r.stage == "ready"
        row = ProcessRow(
            kind="replica",
            name=r.replica,
            pool=pool.pool,
            state=words,
            colour=TONES[tone],
            pid=r.pid,
            device=pool.device,
            memory=self._memory(r.pid) if local else None,
            version=int(r.stats.weight_version) if ready else None,
            dirty=r.dirty,
            beat_age=r.beat_age if ready and r.beat_age >= 0 else None,
            in_flight=r.routed if ready else None,
            tokens_per_s=r.stats.tokens_per_s if ready else None,
            cause=r.cause,
        )
        workers = self._descendants(r.pid) if local else []
        return [row, *(self._worker(pool, process) for process in workers)]

    def _worker(self, pool: Any, process: psutil.Process) -> ProcessRow:
        memory = self._memory(process.pid)
        state, colour = ("running", GOOD) if memory is not None else ("gone", IDLE)
        return ProcessRow(
            kind="worker",
            name=_worker_name(process),
            pool=pool.pool,
            state=state,
            colour=colour,
            pid=process.pid,
            device=pool.device,
            memory=memory,
        )

    def _descendants(self, pid: int) -> list[psutil.Process]:
        """vLLM's processes below a replica."""
        import psutil

        scanned, found = self._workers.get(pid, (-RESCAN_SECONDS, []))
        if time.monotonic() - scanned > RESCAN_SECONDS:
            found = []
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        # a forked one keeps its parent's name; multiprocessing's resource tracker holds nothing
                        own = child.name().startswith((WORKER, "python"))
                        if own and TRACKER not in " ".join(child.cmdline()):
                            found.append(child)
            kept = {p: w for p, w in self._workers.items() if psutil.pid_exists(p)}
            self._workers = {**kept, pid: (time.monotonic(), found)}
        return found

    def _memory(self, pid: int) -> int | None:
        import psutil

        try:
            if pid not in self._handles:
                self._handles[pid] = psutil.Process(pid)
            return self._handles[pid].memory_info().rss
        except psutil.Error:
            self._handles.pop(pid, None)
            return None


def _worker_name(process: psutil.Process) -> str:
    import psutil

    try:
        name = process.name()
        return name.removeprefix(WORKER) if name.startswith(WORKER) else "EngineCore"
    except psutil.Error:
        return "worker"


# `Session` as a table of turns and `Sessions` as a table of sessions.

ROWS = 20
HEADS = (
    "turn",
    "prompt tokens",
    "from KV cache",
    "generated",
    "version",
    "finish",
    "replica",
    "text",
)


def session_html(session: Session) -> str:
    """The turns, the latest last; only the latest ones of a long session."""
    rows = []
    first = max(0, len(session.turns) - ROWS)
    for number, turn in enumerate(session.turns[first:], first):
        share = turn.cached_tokens / max(1, len(turn.prompt_token_ids))
        moved = f" (moved from {turn.moved_from})" if turn.moved_from else ""
        rows.append(
            [
                str(number),
                f"{len(turn.prompt_token_ids):,}",
                f"{turn.cached_tokens:,} ({share:.0%})",
                f"{len(turn.token_ids):,}",
                ", ".join(str(v) for v, _, _ in turn.version_spans) or "none",
                escape(turn.finish_reason),
                escape(turn.replica + moved),
                _text(turn.text),
            ]
        )
    hidden = unseen(first, "… {} earlier turns")
    return _card(
        repr(session), session.stats, hidden + table(HEADS, rows, numbers=(0, 1, 2, 3))
    )


def sessions_html(sessions: Sessions) -> str:
    """One row per session, with its last turn."""
    rows = []
    for s in list(sessions)[:ROWS]:
        stats = s.stats
        rows.append(
            [
                f"{s.prompt_index}.{s.sample_index}",
                str(stats.turns),
                f"{stats.prompt_tokens:,}",
                f"{stats.cached_tokens:,} ({stats.hit_rate:.0%})",
                f"{stats.generated_tokens:,}",
                ", ".join(map(str, stats.versions)) or "none",
                escape(s.turns[-1].finish_reason if s.turns else "–"),
                escape(s.replica or "–"),
                _text(s.turns[-1].text if s.turns else ""),
            ]
        )
    more = unseen(len(sessions) - len(rows), "… {:,} more sessions")
    heads = ("session", "turns", *HEADS[1:-1], "last text")
    return _card(
        repr(sessions), sessions.stats, table(heads, rows, numbers=(1, 2, 3, 4)) + more
    )


def _card(title: str, stats: SessionStats, body: str) -> str:
    note = (
        f"KV cache: {stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens not computed again "
        f"({stats.hit_rate:.0%}), about {stats.seconds_saved:.2g} s saved"
    )
    words = faint(escape(note)) + bar(stats.hit_rate)
    return f'<div style="{BOX}"><b>{escape(visible(title))}</b>{words}{body}</div>'


def _text(text: str) -> str:
    style = f"font-family:{MONO};unicode-bidi:isolate"
    return f'<span style="{style}">{escape(visible(shorten(text, 80)))}</span>'


# A `DeterminismReport` as HTML: one row per way the prompts were run.


def report_html(report: DeterminismReport) -> str:
    """A table, with the conditions of the comparison above it."""
    rows = [
        [
            escape(case.name),
            _verdict(case),
            f"{case.equal} of {case.prompts}",
            f"{case.same_bits} of {case.prompts}",
            f"{case.gap:.1e}" if case.gap else "0",
            "–" if case.first is None else str(case.first),
        ]
        for case in (*report.cases, *([report.scored] if report.scored else []))
    ]
    heads = (
        "the same prompts",
        "against each alone",
        "tokens equal",
        "equal to the bit",
        "largest logprob gap",
        "from token",
    )
    sampling = ", ".join(f"{k}={v}" for k, v in report.sampling.items())
    note = f"on {report.device}, weight version {report.version}; {sampling}"
    causes = "".join(f"<li>{escape(cause)}</li>" for cause in report.causes)
    why = faint(f"known causes:<ul>{causes}</ul>" if causes else "")
    return (
        f'<div style="{BOX}"><b>{escape(repr(report))}</b>{faint(escape(note))}'
        f"{table(heads, rows, numbers=(2, 3, 4, 5))}{why}</div>"
    )


def _verdict(case: Case) -> str:
    if case.exact:
        return f"{dot(GOOD)} the same"
    if case.equal == case.prompts:
        return f"{dot(WAIT)} the same tokens"
    return f"{dot(BAD)} differs"


# What is known of a record or a policy, and two records side by side.


def facts_html(_: Any, title: str, facts: Mapping[str, str]) -> str:
    """A title, and a row for each fact."""
    rows = [[f"<b>{escape(name)}</b>", escape(text)] for name, text in facts.items()]
    return f'<div style="{BOX}"><b>{escape(title)}</b>{table(("", ""), rows)}</div>'


def comparison_html(found: Comparison) -> str:
    """A column for each run."""
    rows = [[escape(cell) for cell in row] for row in found.rows()]
    return f'<div style="{BOX}">{table(("", *found.names), rows)}</div>'


# ----------------------------------------------------------------------------------------------------


def pool_line(pool: Pool) -> str:
    """The pool's repr."""
    snapshot = pool.snapshot
    count = sum(snapshot.closed or r.stage not in LEAVING for r in snapshot.replicas)
    size = f"{count} replica{'s' if count != 1 else ''} × TP {snapshot.tensor_parallel}"
    return f"Pool({snapshot.pool!r}, {model_name(snapshot)!r}, {size} on {snapshot.device}, {pool_health(snapshot)[0]})"


def state_cell(replica: Any, sync: str = "") -> str:
    """A replica's state as a coloured dot and words."""
    words, tone = replica_health(replica, sync)
    return f"{dot(TONES[tone])} {escape(words)}"


def pool_title(snapshot: Any, lost: bool = False) -> str:
    """The header of a pool: its worst state first, then what it is."""
    words, found = pool_health(snapshot, lost)
    facts = (
        f"{model_name(snapshot)} · TP {snapshot.tensor_parallel} on {snapshot.device}"
    )
    if snapshot.sync not in ("", "idle"):
        facts += f" · sync {stage_word(snapshot.sync)}"
    shown = f'<span style="color:{FAINT}">{escape(facts)}</span>'
    return f"<b>{escape(snapshot.pool)}</b> {state_html(found, words)} {shown}"


def pool_headline(snapshot: Any) -> str:
    """What one looks for first, large; nothing while no replica is up."""
    ready = [r for r in snapshot.replicas if r.stage == "ready"]
    if snapshot.closed or not ready:
        return ""
    versions = sorted({r.stats.weight_version for r in ready})
    differ = "" if len(versions) == 1 else "differ"
    all_of_them = sum(r.stage not in LEAVING for r in snapshot.replicas)
    well = sum(is_well(r, snapshot.sync) for r in ready)
    return headlines(
        [
            (f"{sum(r.stats.tokens_per_s for r in ready):,.0f}", "", "tokens/s"),
            (f"{sum(r.routed for r in ready):,}", "", "requests in flight"),
            (" and ".join(map(str, versions)), differ, "weight version"),
            (str(well), f"of {all_of_them}", "replicas ready"),
        ]
    )


def pool_html(pool: Pool, lost: bool = False) -> str:
    """The static card. Equal for labs in the same state: no process ids and no times."""
    snapshot = pool.snapshot
    rows = []
    # whatever it was when it was last seen
    over = f"{dot(IDLE)} {'gone' if lost else 'closed'}"
    for r in snapshot.replicas:
        stats = ["–", "–", "–"]
        if r.stage == "ready" and not snapshot.closed:
            version = str(r.stats.weight_version)
            stats = [version, str(r.routed), f"{r.stats.tokens_per_s:.0f}"]
        state = over if snapshot.closed else state_cell(r, snapshot.sync)
        cause = f'<span style="white-space:pre-wrap">{escape(r.cause[:300])}</span>'
        rows.append([escape(r.replica), state, *stats, cause])
    heads = ("replica", "state", "version", "in flight", "tokens/s", "")
    body = table(heads, rows, numbers=(2, 3, 4))
    # nothing of a closed pool is alive
    body = hollow_dots(body) if snapshot.closed else body
    return f'<div style="{BOX};margin:2px 0">{pool_title(snapshot, lost)}{pool_headline(snapshot)}{body}</div>'


def lab_state(snapshots: list[Any]) -> str:
    """The worst state of a lab's open pools, for its header; empty if all are well."""
    states = [(s.pool, *pool_health(s)) for s in snapshots if not s.closed]
    bad = worst([found.name for _, _, found in states])
    if bad.tone == "good":
        return ""
    pool, words = next((pool, words) for pool, words, found in states if found == bad)
    return state_html(bad, f"{pool}: {words}")


def lab_html(lab: Lab) -> str:
    pools = list(lab.known_pools.values())
    inside = "".join(_faces.draw(pool, "html") for pool in pools)
    if inside:
        style = f"border-left:2px solid {LINE};padding-left:10px"
        inside = f'<div style="{style}">{inside}</div>'
    return f'<div style="{BOX}"><b>{escape(repr(lab))}</b> {lab_state([p.snapshot for p in pools])}{inside}</div>'


MAX_POINTS = 60  # of a sparkline
LOG_LINES = 30
PROCESS_HEADS = (
    "process",
    "state",
    "pid",
    "device",
    "memory",
    "version",
    "beat",
    "in flight",
    "tokens/s",
    "",
)
NUMBERS = (2, 4, 5, 6, 7, 8)


def rows_html(rows: Iterable[ProcessRow], rates: dict[str, deque[float]]) -> str:
    """The table of processes."""
    shown = []
    for row in rows:
        number = lambda value, form="{}": "–" if value is None else form.format(value)
        name = (
            f'<span style="color:{FAINT}">└ {escape(row.name)}</span>'
            if row.kind == "worker"
            else escape(row.name)
        )
        flag = (
            f' <b style="color:{BAD}">dirty</b>'
            if row.dirty and "dirty" not in row.state
            else ""
        )
        late = f' style="color:{BAD}"' if (row.beat_age or 0) > 5 else ""
        beat = (
            "–" if row.beat_age is None else f"<span{late}>{row.beat_age:.1f} s</span>"
        )
        blank = row.kind != "replica"
        shown.append(
            [
                name,
                f"{dot(row.colour)} {escape(row.state)}{flag}",
                str(row.pid or "–"),
                escape(row.device),
                number(row.memory and human_bytes(row.memory)),
                "" if blank else number(row.version),
                "" if blank else beat,
                "" if blank else number(row.in_flight),
                "" if blank else number(row.tokens_per_s, "{:.0f}"),
                sparkline(list(rates.get(row.name, ())))
                + f'<span style="white-space:pre-wrap">{escape(row.cause[:300])}'
                "</span>",
            ]
        )
    return table(PROCESS_HEADS, shown, NUMBERS)


class PoolSection:
    """The parts of one pool: its processes and its buttons, each of which calls a method of the pool."""

    def __init__(self, pool: Pool, panel: PartsPanel) -> None:
        self.pool = pool
        self._panel = panel
        self._rates: dict[str, deque[float]] = {}
        self._log_due = 0.0
        parts = panel.parts
        self.text = parts.html("jv-pool")
        self.log_text = parts.html("jv-log-text")
        self.log_text.hidden = True
        names = [r.replica for r in pool.snapshot.replicas]
        self.replica = parts.add(
            "select", "jv-replica", options=names, value=names[0] if names else ""
        )
        self.replica.change(tooltip="the replica that restart and log are about")
        self.log = parts.add(
            "toggle",
            "jv-log",
            description="log",
            tooltip="pool.logs(replica)",
            value=False,
            style="",
        )
        self.log.on_change(self._toggle_log)
        self._confirm: list[ConfirmButton] = []
        self._make_buttons()

    def _make_buttons(self) -> None:
        pool = self.pool
        restart = lambda: pool.restart(self.replica.index)
        self.pause = self._button("pause", 'pool.pause("keep")', pool.pause)
        self.resume = self._button("resume", "pool.resume()", pool.resume)
        self.wake = self._button("wake", "pool.wake()", pool.wake)
        self.sleep = self._button("sleep", "pool.sleep()", pool.sleep, True)
        tip = "pool.restart(replica)"
        self.restart = self._button("restart", tip, restart, True)
        self.close = self._button("close pool", "pool.close()", pool.close, True)

    @property
    def buttons(self) -> list[PanelPart]:
        return [
            self.pause,
            self.resume,
            self.sleep,
            self.wake,
            self.replica,
            self.restart,
            self.log,
            self.close,
        ]

    @property
    def box(self) -> dict[str, Any]:
        """The layout of the section."""
        return box(
            self.text,
            box(*self.buttons, row=True),
            self.log_text,
            css_class=f"jv-pool-{self.pool.name}",
        )

    def remove(self) -> None:
        self._panel.parts.remove(self.text, self.log_text, *self.buttons)

    def _button(
        self, text: str, tip: str, work: Callable[[], object], confirm: bool = False
    ) -> PanelPart:
        """A button of the pool; `confirm`: a second click acts."""
        css_class = f"jv-{text.replace(' ', '-')}"
        made = self._panel.parts.button(text, tip, css_class)
        act = lambda: self._panel.act(work, f"{text} {self.pool.name}")
        if confirm:
            self._confirm.append(ConfirmButton(made, act))
            return made
        return made.on_press(act)

    def _toggle_log(self) -> None:
        self.log_text.hidden = not self.log.value
        self._log_due = 0.0
        self._panel.act(self._panel.refresh_now)

    def update(self, snapshot: Any, rows: list[ProcessRow]) -> None:
        """Show the gateway's reply."""
        own = [row for row in rows if row.pool == snapshot.pool]
        for row in own:
            if row.tokens_per_s is not None:
                self._rates.setdefault(row.name, deque(maxlen=MAX_POINTS)).append(
                    row.tokens_per_s
                )
        head = pool_title(snapshot) + pool_headline(snapshot)
        self.text.value = (
            f'<div style="{BOX}">{head}{rows_html(own, self._rates)}</div>'
        )
        for confirm in self._confirm:
            confirm.disarm(only_if_expired=True)
        self._enable(snapshot)
        self._update_log()

    def _enable(self, snapshot: Any) -> None:
        """Say of each button why it cannot work now, or nothing."""
        replicas = {r.replica: r for r in snapshot.replicas}
        if list(replicas) != self.replica.options:
            kept = (
                self.replica.value
                if self.replica.value in replicas
                else next(iter(replicas), "")
            )
            self.replica.change(options=list(replicas), value=kept)
        ready = [r for r in replicas.values() if r.stage == "ready"]
        paused = [r for r in ready if r.stats.paused]
        asleep = [r for r in ready if r.stats.sleeping]
        none = "" if ready else "no replica is ready"
        self.pause.why = none or (
            "it is paused already" if len(paused) == len(ready) else ""
        )
        self.resume.why = "" if paused else "nothing is paused"
        cpu = (
            "an engine on a CPU cannot sleep; pause stops generation"
            if snapshot.device == "cpu"
            else ""
        )
        self.sleep.why = (
            cpu or none or ("it is asleep already" if len(asleep) == len(ready) else "")
        )
        self.wake.why = "" if asleep else "nothing is asleep"
        chosen = replicas.get(self.replica.value)
        gone = chosen is not None and chosen.stage in ("failed", "restarting")
        self.restart.why = "" if gone else f"{self.replica.value} has not failed"
        self.log.why = self.close.why = self.replica.why = ""

    def lose(self, why: str) -> None:
        """The gateway is gone: what is shown is of the past, and no button can work."""
        self.text.value = hollow_dots(self.text.value)
        for button in self.buttons:
            button.why = why

    def _update_log(self) -> None:
        if not self.log.value or time.monotonic() < self._log_due:
            return
        self._log_due = time.monotonic() + 2.0
        lines = self.pool.logs(self.replica.index, LOG_LINES)
        # a reversed column is scrolled to its end: the newest line stays visible
        style = f"display:flex;flex-direction:column-reverse;max-height:18em;overflow:auto;background:{FILL}"
        text = f"font-family:{MONO};font-size:11px;line-height:1.35;padding:6px;margin:0;white-space:pre-wrap"
        self.log_text.value = (
            f'<div style="{style}"><pre style="{text}">{escape(lines)}</pre></div>'
        )


class PoolsPanel(PartsPanel):
    """The common part of a lab's and a pool's panel: one call to the gateway per second, and a line for messages."""

    hz = 1.0
    remedy = "jv.Lab.attach()"
    css_class = "jv-lab-panel"

    def make_parts(self) -> None:
        self._rows = ProcessRows(self.subject)
        self._sections: dict[str, PoolSection] = {}
        self.top()
        self.arrange()
        self.refresh()  # complete from the start, in case the notebook is saved now

    @property
    def done(self) -> bool:
        return self.is_over(self.subject)

    def top(self) -> None:
        """Make the parts above the pools."""

    def head(self) -> list[dict[str, Any]]:
        """The layout above the pools."""
        return []

    def arrange(self) -> None:
        self.parts.arrange(
            box(*self.head(), *(s.box for s in self._sections.values()), self.message)
        )

    def pools(self) -> dict[str, Pool]:
        """The pools to show."""
        raise NotImplementedError

    def refresh(self) -> None:
        answer = None if self.done else self.ask(self._rows.read)
        if answer is not None:
            with self.parts.together():
                self.take(*answer)
            self.found()

    def show_lost(self, what: str) -> None:
        for section in self._sections.values():
            section.lose(what)

    def take(self, status: Any, rows: list[ProcessRow]) -> None:
        """Write the lab's status into the parts; sections are added and removed with the pools."""
        if self.widget.notice:  # it was lost, and is back
            self.say("")
        open_now = {p.pool: p for p in status.pools if not p.closed}
        pools = {name: pool for name, pool in self.pools().items() if name in open_now}
        for name in [n for n in self._sections if n not in pools]:
            self._sections.pop(name).remove()
        for name, pool in pools.items():
            if name not in self._sections:
                self._sections[name] = PoolSection(pool, self)
            self._sections[name].update(open_now[name], rows)
        self.arrange()


class PoolPanel(PoolsPanel):
    """The panel of one pool."""

    @property
    def remedy(self) -> str:  # type: ignore[override]
        return f"jv.Lab.attach().pools[{self.subject.name!r}]"

    def pools(self) -> dict[str, Pool]:
        return {self.subject.name: self.subject}

    @staticmethod
    def is_over(subject: Pool) -> bool:
        return subject.snapshot.closed

    @staticmethod
    def is_renewed(subject: Pool) -> bool:
        return pool_state(subject.snapshot).startswith("starting")


class LabPanel(PoolsPanel):
    """The panel of a lab: its gateway and every pool."""

    def top(self) -> None:
        self.text = self.parts.html("jv-gateway", escape(repr(self.subject)))
        self.close_button = self.parts.button(
            "close lab", "lab.close()", "jv-close-lab"
        )
        self._confirm = ConfirmButton(self.close_button, self._close_lab)

    def head(self) -> list[dict[str, Any]]:
        return [box(self.text, self.close_button, row=True)]

    def _close_lab(self) -> None:
        lab: Lab = self.subject
        self.act(lab.close, "close the lab")

    def pools(self) -> dict[str, Pool]:
        return self.subject.known_pools

    def take(self, status: Any, rows: list[ProcessRow]) -> None:
        super().take(status, rows)
        gateway = rows[0]
        memory = f" · {human_bytes(gateway.memory)}" if gateway.memory else ""
        holders = (
            f"{len(status.holders)} holder{'s' if len(status.holders) != 1 else ''}"
        )
        lease = (
            "no lease: stays until it is closed"
            if status.detached
            else f"lease {status.lease_seconds:.0f} s"
        )
        facts = f"pid {gateway.pid}{memory} · {holders} · {lease} · jvlab {escape(status.version)}"
        health = lab_state(list(status.pools)) or state_html(
            state("serving"), "gateway serving"
        )
        title = f'<b>Lab</b> {health} <span style="color:{FAINT}">{facts}</span>'
        self.text.value = f'<div style="{BOX}">{title}</div>'
        self.close_button.why = ""
        self._confirm.disarm(only_if_expired=True)

    def show_lost(self, what: str) -> None:
        super().show_lost(what)
        title = f"<b>Lab</b> {state_html(state('gone'), what)}"
        self.text.value = f'<div style="{BOX}">{title}</div>'
        self.close_button.why = what

    @staticmethod
    def is_over(subject: Lab) -> bool:
        return subject.closed
