"""The lab's panel: its processes, updated live; buttons that pause, resume, sleep, wake, restart and close."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from html import escape
from typing import TYPE_CHECKING, Any

from jvlab._errors import GatewayUnreachable, JvlabError
from jvlab._states import state
from jvlab._units import human_bytes
from jvlab.views._cards import (
    ProcessRow,
    ProcessRows,
    lab_state,
    pool_headline,
    pool_title,
)
from jvlab.views._style import (
    BAD,
    BOX,
    FAINT,
    FILL,
    MONO,
    dot,
    hollow_dots,
    message_html,
    sparkline,
    state_html,
    table,
)
from jvlab.views.panels._parts import ConfirmButton, PanelPart, PartsPanel, box
from jvlab.wire._pool_summary import pool_state

if TYPE_CHECKING:
    from jvlab.lab._lab import Lab
    from jvlab.lab._pool import Pool

MAX_POINTS = 60  # of a sparkline
LOG_LINES = 30
HEADS = (
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
NEW_LAB = "lab = jv.Lab()"


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
    return table(HEADS, shown, NUMBERS)


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
        button = self._panel.parts.button
        self.sleep = self._confirm_button(
            "sleep", "pool.sleep()", "jv-sleep", pool.sleep
        )
        self.restart = self._confirm_button(
            "restart",
            "pool.restart(replica)",
            "jv-restart",
            lambda: pool.restart(self.replica.index),
        )
        self.close = self._confirm_button(
            "close pool", "pool.close()", "jv-close-pool", pool.close
        )
        self.pause = button(
            "pause",
            'pool.pause("keep")',
            "jv-pause",
            lambda: self._do("pause", pool.pause),
        )
        self.resume = button(
            "resume",
            "pool.resume()",
            "jv-resume",
            lambda: self._do("resume", pool.resume),
        )
        self.wake = button(
            "wake", "pool.wake()", "jv-wake", lambda: self._do("wake", pool.wake)
        )

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

    def _confirm_button(
        self, text: str, tip: str, css_class: str, work: Callable[[], object]
    ) -> PanelPart:
        made = self._panel.parts.button(text, tip, css_class)
        self._confirm.append(ConfirmButton(made, lambda: self._do(text, work)))
        return made

    def _do(self, text: str, work: Callable[[], object]) -> None:
        self._panel.act(work, f"{text} {self.pool.name}")

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
        self.message = self.parts.html("jv-message")
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

    def say(self, text: str, bad: bool = False) -> None:
        self.message.value = message_html(text, bad)

    def refresh(self) -> None:
        if self.done:
            return
        try:
            status, rows = self._rows.read()
        # the next refresh tries again
        except (JvlabError, CancelledError, TimeoutError) as error:
            if not self.done:
                self._lost(isinstance(error, GatewayUnreachable), error)
            return
        with self.parts.together():
            self.take(status, rows)
        self.found()

    def _lost(self, gone: bool, error: BaseException) -> None:
        """The gateway did not answer."""
        what = "gateway gone" if gone else "the gateway does not answer"
        with self.parts.together():
            for section in self._sections.values():
                section.lose(what)
            self.lost_head(what)
            self.say(str(error) or what, bad=True)
        self.lose(what, NEW_LAB if gone else self.remedy)

    def lost_head(self, what: str) -> None:
        """Say in the header that the gateway is gone."""

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

    def lost_head(self, what: str) -> None:
        self.text.value = (
            f'<div style="{BOX}"><b>Lab</b> {state_html(state("gone"), what)}</div>'
        )
        self.close_button.why = what

    @staticmethod
    def is_over(subject: Lab) -> bool:
        return subject.closed
