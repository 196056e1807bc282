"""The lab's panel: its processes, updated live; buttons that pause, resume, sleep, wake, restart and close."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from html import escape
from typing import TYPE_CHECKING, Any

from jvlab._errors import JvlabError
from jvlab._units import human_bytes
from jvlab.panels._live import Panel, close_tree
from jvlab.views._cards import lab_html, pool_title
from jvlab.views._process_rows import ProcessRow, ProcessRows
from jvlab.views._style import BAD, BOX, FAINT, FILL, GOOD, MONO, dot, message_html, sparkline, table

if TYPE_CHECKING:
    from jvlab.lab._lab import Lab
    from jvlab.lab._pool import Pool

ARMED_SECONDS = 3.0  # within which a second click confirms
MAX_POINTS = 60  # of a sparkline
LOG_LINES = 30
HEADS = ("process", "state", "pid", "device", "memory", "version", "beat", "in flight", "tokens/s", "")
NUMBERS = (2, 4, 5, 6, 7, 8)


class ConfirmButton:
    """A button that asks for confirmation: a second click within `ARMED_SECONDS` acts."""

    def __init__(self, button: Any, act: Callable[[], object]) -> None:
        self.button, self._act, self._text, self._until = button, act, button.description, 0.0
        button.on_click(lambda _: self.click())

    def click(self) -> None:
        if time.monotonic() < self._until:
            self.disarm()
            self._act()
            return
        self._until = time.monotonic() + ARMED_SECONDS
        self.button.description, self.button.button_style = f"really {self._text}?", "danger"

    def disarm(self, only_if_expired: bool = False) -> None:
        if self._until and (not only_if_expired or time.monotonic() >= self._until):
            self._until = 0.0
            self.button.description, self.button.button_style = self._text, ""


def button(text: str, tip: str, css_class: str, act: Callable[[], object] | None = None) -> Any:
    """A small button; tests and style sheets find it by `css_class`."""
    import ipywidgets

    made = ipywidgets.Button(description=text, tooltip=tip, layout={"width": "auto"})
    made.add_class(css_class)
    if act is not None:
        made.on_click(lambda _: act())
    return made


def rows_html(rows: Iterable[ProcessRow], rates: dict[str, deque[float]]) -> str:
    """The table of processes."""
    shown = []
    for row in rows:
        number = lambda value, form="{}": "–" if value is None else form.format(value)
        name = f'<span style="color:{FAINT}">└ {escape(row.name)}</span>' if row.kind == "worker" else escape(row.name)
        flag = f' <b style="color:{BAD}">dirty</b>' if row.dirty and "dirty" not in row.state else ""
        late = f' style="color:{BAD}"' if (row.beat_age or 0) > 5 else ""
        beat = "–" if row.beat_age is None else f"<span{late}>{row.beat_age:.1f} s</span>"
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
    """The widgets of one pool: its processes and its buttons, each of which calls a method of the pool."""

    def __init__(self, pool: Pool, panel: Panel) -> None:
        import ipywidgets

        self.pool, self._panel = pool, panel
        self._rates: dict[str, deque[float]] = {}
        self._log_due = 0.0
        self.text = ipywidgets.HTML()
        self.text.add_class("jv-pool")
        self.log_text = ipywidgets.HTML(layout={"display": "none"})
        self.log_text.add_class("jv-log-text")
        self.replica = ipywidgets.Dropdown(options=[r.replica for r in pool._snapshot.replicas])
        self.replica.layout.width = "auto"
        self.replica.add_class("jv-replica")
        self.log = ipywidgets.ToggleButton(description="log", tooltip="pool.logs(replica)", layout={"width": "auto"})
        self.log.add_class("jv-log")
        self.log.observe(lambda _: self._toggle_log(), "value")
        self._confirm: list[ConfirmButton] = []
        self.widget = ipywidgets.VBox([self.text, self._bar(), self.log_text])
        self.widget.add_class(f"jv-pool-{pool.name}")

    def _bar(self) -> Any:
        import ipywidgets

        pool = self.pool
        self.sleep = self._confirm_button("sleep", "pool.sleep()", "jv-sleep", pool.sleep)
        self.restart = self._confirm_button(
            "restart", "pool.restart(replica)", "jv-restart", lambda: pool.restart(self.replica.index or 0)
        )
        self.close = self._confirm_button("close pool", "pool.close()", "jv-close-pool", pool.close)
        self.pause = button("pause", 'pool.pause("keep")', "jv-pause", lambda: self._do("pause", pool.pause))
        self.resume = button("resume", "pool.resume()", "jv-resume", lambda: self._do("resume", pool.resume))
        self.wake = button("wake", "pool.wake()", "jv-wake", lambda: self._do("wake", pool.wake))
        parts = [self.pause, self.resume, self.sleep, self.wake, self.replica, self.restart, self.log, self.close]
        return ipywidgets.HBox(parts, layout={"flex_flow": "row wrap", "align_items": "center"})

    def _confirm_button(self, text: str, tip: str, css_class: str, work: Callable[[], object]) -> Any:
        made = button(text, tip, css_class)
        self._confirm.append(ConfirmButton(made, lambda: self._do(text, work)))
        return made

    def _do(self, text: str, work: Callable[[], object]) -> None:
        self._panel.act(work, f"{text} {self.pool.name}")

    def _toggle_log(self) -> None:
        self.log_text.layout.display = None if self.log.value else "none"
        self._log_due = 0.0
        self._panel.act(self._panel.refresh_now)

    def update(self, snapshot: Any, rows: list[ProcessRow]) -> None:
        """Show the gateway's reply in the widgets."""
        own = [row for row in rows if row.pool == snapshot.pool]
        for row in own:
            if row.tokens_per_s is not None:
                self._rates.setdefault(row.name, deque(maxlen=MAX_POINTS)).append(row.tokens_per_s)
        self.text.value = f'<div style="{BOX}">{pool_title(snapshot)}{rows_html(own, self._rates)}</div>'
        for confirm in self._confirm:
            confirm.disarm(only_if_expired=True)
        ready = [r for r in snapshot.replicas if r.stage == "ready"]
        paused = [r for r in ready if r.stats.paused]
        self.pause.disabled = len(paused) == len(ready)
        self.resume.disabled = not paused
        self.sleep.disabled = not any(not r.stats.sleeping for r in ready)
        self.wake.disabled = not any(r.stats.sleeping for r in ready)
        self.restart.disabled = all(r.stage != "failed" for r in snapshot.replicas)
        self._update_log()

    def _update_log(self) -> None:
        if not self.log.value or time.monotonic() < self._log_due:
            return
        self._log_due = time.monotonic() + 2.0
        lines = self.pool.logs(self.replica.index or 0, LOG_LINES)
        # a reversed column is scrolled to its end: the newest line stays visible
        box = f"display:flex;flex-direction:column-reverse;max-height:18em;overflow:auto;background:{FILL}"
        text = f"font-family:{MONO};font-size:11px;line-height:1.35;padding:6px;margin:0;white-space:pre-wrap"
        self.log_text.value = f'<div style="{box}"><pre style="{text}">{escape(lines)}</pre></div>'


class PoolsPanel(Panel):
    """The common part of a lab's and a pool's panel: one call to the gateway per second, and a line for messages."""

    hz = 1.0

    def build(self) -> Any:
        import ipywidgets

        self._rows = ProcessRows(self.subject._client)
        self._sections: dict[str, PoolSection] = {}
        self.message = ipywidgets.HTML()
        self.message.add_class("jv-message")
        self.inside = ipywidgets.VBox()
        box = ipywidgets.VBox([*self.top(), self.inside, self.message]).add_class("jv-lab-panel")
        self.refresh()  # complete from the start, in case the notebook is saved now
        return box

    def top(self) -> list[Any]:
        """Widgets above the pools."""
        return []

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
            self.take(status, rows)
        except (
            JvlabError,
            CancelledError,
            TimeoutError,
        ) as error:  # the next refresh tries again
            if not self.done:
                self.say(str(error) or "the gateway did not answer", bad=True)

    def take(self, status: Any, rows: list[ProcessRow]) -> None:
        """Write the lab's status into the widgets; sections are added and removed with the pools."""
        open_now = {p.pool: p for p in status.pools if not p.closed}
        pools = {name: pool for name, pool in self.pools().items() if name in open_now}
        for name in [n for n in self._sections if n not in pools]:
            close_tree(self._sections.pop(name).widget)
        for name, pool in pools.items():
            if name not in self._sections:
                self._sections[name] = PoolSection(pool, self)
            self._sections[name].update(open_now[name], rows)
        children = tuple(s.widget for s in self._sections.values())
        if self.inside.children != children:
            self.inside.children = children


class PoolPanel(PoolsPanel):
    """The panel of one pool."""

    def pools(self) -> dict[str, Pool]:
        return {self.subject.name: self.subject}

    @property
    def done(self) -> bool:
        return self.subject._snapshot.closed


class LabPanel(PoolsPanel):
    """The panel of a lab: its gateway and every pool."""

    def top(self) -> list[Any]:
        import ipywidgets

        self.text = ipywidgets.HTML(value=lab_html(self.subject))
        self.text.add_class("jv-gateway")
        self.close_button = button("close lab", "lab.close()", "jv-close-lab")
        self._confirm = ConfirmButton(self.close_button, self._close_lab)
        return [ipywidgets.HBox([self.text, self.close_button], layout={"align_items": "center"})]

    def _close_lab(self) -> None:
        lab: Lab = self.subject
        self.act(lab.close, "close the lab")

    def pools(self) -> dict[str, Pool]:
        lab: Lab = self.subject
        return lab._pools

    def take(self, status: Any, rows: list[ProcessRow]) -> None:
        self.subject._update_pools(status)
        super().take(status, rows)
        gateway = rows[0]
        memory = f" · {human_bytes(gateway.memory)}" if gateway.memory else ""
        holders = f"{len(status.holders)} holder{'s' if len(status.holders) != 1 else ''}"
        lease = "no lease: stays until it is closed" if status.detached else f"lease {status.lease_seconds:.0f} s"
        facts = f"pid {gateway.pid}{memory} · {holders} · {lease} · jvlab {escape(status.version)}"
        title = f'<b>Lab</b> {dot(GOOD)} gateway serving <span style="color:{FAINT}">{facts}</span>'
        self.text.value = f'<div style="{BOX}">{title}</div>'
        self._confirm.disarm(only_if_expired=True)

    @property
    def done(self) -> bool:
        return self.subject._closed
