"""Progress of long work: a bar in a terminal or a notebook, a line now and then in a log.

A bar says how far the work is, how long it takes, and, while nothing arrives, what it waits for. Its clock goes on by
itself: a thread redraws it, and ends with it.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
import re
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from jvlab._units import how_many

REDRAW_SECONDS = 0.25  # between updates of a bar, unless its text changed
TICK_SECONDS = 0.5  # between updates while nothing arrives
# seconds until a log gets a line of work that goes on, and between two
FIRST_LINE = 10.0
NEXT_LINE = 60.0
# to wait for the thread of a bar that ends; it ends by itself if it is later
END_SECONDS = 2.0
ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")  # colours and cursor movements
# marks the output, so that a tool can leave it out of a committed notebook
METADATA = {"jvlab": "progress"}
clock = time.monotonic


def watched() -> bool:
    """Whether output is shown to somebody: in a terminal or a Jupyter kernel."""
    return in_kernel() or sys.stderr.isatty()


def in_kernel() -> bool:
    """Whether this process is a notebook's kernel."""
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return hasattr(get_ipython(), "kernel")


def in_marimo() -> bool:
    """Whether this process is the kernel of a marimo notebook, which is not IPython's."""
    marimo = sys.modules.get("marimo")
    return marimo is not None and bool(marimo.running_in_notebook())


def without_ansi(text: str) -> str:
    """The text without a terminal's colours and cursor movements."""
    return ANSI.sub("", text)


@contextlib.contextmanager
def importing(what: str) -> Iterator[None]:
    """Say so if an import takes long; a process imports a package only once, so it is said once.

    `JVLAB_IMPORTS=quiet`: never. What is said depends on the machine, and outputs of the tutorials are compared.
    """
    show = False if os.environ.get("JVLAB_IMPORTS") == "quiet" else None
    with Progress(
        0,
        f"importing {what}, once in each process",
        unit="",
        show=show,
        after=2.0,
        first_line=5.0,
    ):
        yield


class LiveFace:
    """A bar that is drawn again and again, though not too often. `news`: something that must not wait."""

    drawn = -math.inf

    def draw(self, bar: Progress, news: bool) -> None:
        now = clock()
        if news or now - self.drawn >= REDRAW_SECONDS:
            self.drawn = now
            self.show(bar)

    def close(self, bar: Progress) -> None:
        """Draw the last state."""
        self.show(bar)

    def show(self, bar: Progress) -> None:
        raise NotImplementedError


class CellFace(LiveFace):
    """A bar in a notebook's output as plain HTML: a saved notebook holds its last state, and no widget."""

    def __init__(self, bar: Progress) -> None:
        from IPython.display import display

        self.drawn = clock()
        self._handle: Any = display(
            self._bundle(bar), metadata=METADATA, raw=True, display_id=True
        )

    def show(self, bar: Progress) -> None:
        if self._handle is not None:
            self._handle.update(self._bundle(bar), metadata=METADATA, raw=True)

    def _bundle(self, bar: Progress) -> dict[str, str]:
        title = bar.title()
        faint = "color:var(--jp-ui-font-color2, #777)"
        html = (
            '<div style="font-family:var(--jp-ui-font-family, system-ui, sans-serif);font-size:13px;display:flex;'
            'flex-wrap:wrap;gap:2px 10px;align-items:center;color:var(--jp-ui-font-color1, inherit)">'
            f'<span style="white-space:pre">{escape(title)}</span>'
            '<span style="width:10em;height:6px;background:var(--jp-border-color2, rgba(128,128,128,.35))">'
            f'<span style="display:block;width:{100 * bar.share:.1f}%;height:6px;background:#0072B2"></span></span>'
            f'<span style="{faint};font-variant-numeric:tabular-nums">{escape(bar.facts())}</span>'
            f'<span style="{faint};overflow-wrap:anywhere">{escape(bar.remarks())}</span></div>'
        )
        plain = ", ".join(filter(None, (title, bar.facts(), bar.remarks())))
        return {"text/plain": plain, "text/html": html}


class TerminalFace(LiveFace):
    """A bar in one line of a terminal, which is written again and again."""

    WIDTH = 20  # of the bar itself

    def show(self, bar: Progress) -> None:
        done = round(self.WIDTH * bar.share)
        drawing = (
            ""
            if bar.stages or not bar.total
            else f"[{'#' * done}{' ' * (self.WIDTH - done)}]"
        )
        line = " ".join(filter(None, (bar.title(), drawing, bar.facts())))
        line = ", ".join(filter(None, (line, bar.remarks())))
        columns = shutil.get_terminal_size().columns
        sys.stderr.write(f"\r{line[: columns - 1]}\x1b[K")
        sys.stderr.flush()

    def close(self, bar: Progress) -> None:
        super().close(bar)
        sys.stderr.write("\n")
        sys.stderr.flush()


class LogFace:
    """Lines for a log. One for each unit of work if the bar says so, or for each stage; else only of long work."""

    def __init__(self, bar: Progress) -> None:
        self._next = bar.began + bar.first_line
        self._last = -math.inf  # when it got a line
        self._done = 0  # what that said
        self._waiting = ""

    def draw(self, bar: Progress, news: bool) -> None:
        now = clock()
        moved = bar.done != self._done and (
            bar.each or (bool(bar.stages) and now - bar.began >= 1.0)
        )
        # syncs come and go beside long work: a wait is worth a line if it lasts
        waits = (
            bar.waiting not in ("", self._waiting) and now - self._last >= FIRST_LINE
        )
        if moved or waits or now >= self._next:
            self._last = now
            self._next = now + NEXT_LINE
            self._done = bar.done
            self._waiting = bar.waiting
            print(bar.line(), file=sys.stderr, flush=True)

    def close(self, bar: Progress) -> None:
        """A last line, if what the log says is not the end."""
        if self._last > -math.inf and self._done != bar.done:
            print(bar.line(), file=sys.stderr, flush=True)


class Progress:
    """How far some work is: use it in a `with`, or call `start` and `close`.

    show          True, False, or None: in a terminal and a notebook as a bar, elsewhere as lines in the log
    after         seconds until a bar appears
    stages        the total is their number, and each is ticked when it is done
    each          a log gets a line for each unit of work
    first_line    seconds until a log gets a line of work that goes on
    only_waiting  appears only once `waits` has said why nothing arrives
    ask           called at each tick; returns what is waited for
    """

    def __init__(
        self,
        total: int,
        text: str,
        *,
        unit: str,
        show: bool | None = None,
        after: float = 0.0,
        stages: Sequence[str] = (),
        each: bool = False,
        first_line: float = FIRST_LINE,
        only_waiting: bool = False,
        ask: Callable[[], str] | None = None,
    ) -> None:
        self.total = total
        self.text = text
        self.unit = unit
        self.stages = tuple(stages)
        self.each = each
        self.first_line = first_line
        self.done = 0
        self.note = ""  # a rate, or the last line of a log
        self.waiting = ""  # what is waited for
        self.began = clock()
        self._after = after
        self._only_waiting = only_waiting
        self._ask = ask
        self.wanted = show is not False  # whether anybody is told anything
        self.shown = self.wanted and watched()  # whether somebody looks at a bar
        self._face: LiveFace | LogFace | None = None
        # its own thread and that of the work both draw it
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    # Its life -----------------------------------------------------------------------------------------------------

    def start(self) -> Progress:
        """Begin to show it. Its clock goes on by itself until `close`."""
        if self.wanted and not self._only_waiting:
            self._tick_on()
            self._draw()
        return self

    def close(self) -> None:
        """Draw the last state and end its thread. Can be called twice."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(END_SECONDS)
        with self._lock:
            self.waiting = ""
            face = self._face
            self._face = None
            self.wanted = False
            if face is not None:
                # where it was shown is gone
                with contextlib.suppress(OSError, ValueError):
                    face.close(self)

    def __enter__(self) -> Progress:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tick_on(self) -> None:
        if self._thread is None:
            # with the context of the caller: a notebook's output goes to the cell that began the work
            run = contextvars.copy_context().run
            mine = weakref.ref(self)
            ended = self._ended
            self._thread = threading.Thread(
                target=run,
                args=(_tick_until, mine, ended),
                name="jvlab-progress",
                daemon=True,
            )
            self._thread.start()

    # Its state ----------------------------------------------------------------------------------------------------

    def advance(self, count: int, note: str = "") -> None:
        if note:
            self.note = without_ansi(note)
        self.to(self.done + count)

    def restart(self, total: int) -> None:
        """Begin again with another total."""
        self.total = total
        self.done = 0
        self._draw()

    def remark(self, note: str) -> None:
        """A short text after the bar: a rate, or the last line of a log."""
        self.note = without_ansi(note)

    def waits(self, reason: str) -> None:
        """Say what is waited for while nothing arrives; empty: nothing in particular."""
        if reason == self.waiting:
            return
        self.waiting = reason
        if reason and self.wanted:
            self._only_waiting = False
            self._tick_on()
        self._draw(news=True)

    def to(self, done: int) -> None:
        """Set the progress to `done`."""
        moved = done != self.done
        self.done = done
        self._draw(news=moved and done >= self.total)

    def tick(self) -> None:
        """Redraw the bar, so that its clock advances."""
        if self._ask is not None:
            self.waits(self._ask())
        self._draw()

    def describe(self, text: str) -> None:
        if text != self.text:
            self.text = text
            self._draw(news=True)

    def _draw(self, news: bool = False) -> None:
        with self._lock:
            if not self.wanted or self._only_waiting:
                return
            if self._face is None and clock() - self.began < self._after:
                return
            try:
                if self._face is None:
                    self._face = self._new_face()
                self._face.draw(self, news)
            # a closed stream: the work goes on without a bar
            except (OSError, ValueError):
                self.wanted = False

    def _new_face(self) -> LiveFace | LogFace:
        if not self.shown:
            return LogFace(self)
        return CellFace(self) if in_kernel() else TerminalFace()

    # Its words ----------------------------------------------------------------------------------------------------

    @property
    def share(self) -> float:
        """How much is done, 0 to 1."""
        return min(self.done / self.total, 1.0) if self.total else 0.0

    def title(self) -> str:
        """What it is, and its stages."""
        marks = (
            "✓" if i < self.done else "▸" if i == self.done else "·"
            for i in range(len(self.stages))
        )
        ticks = "  ".join(
            f"{mark} {stage}" for mark, stage in zip(marks, self.stages, strict=True)
        )
        return ": ".join(filter(None, (self.text, ticks)))

    def facts(self) -> str:
        """How much is done, and the time since it began."""
        seconds = clock() - self.began
        took = f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
        return ", ".join(filter(None, (self._count(), took)))

    def _count(self) -> str:
        if self.stages or not self.total:
            return ""
        if self.unit == "B":
            return f"{self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB"
        return f"{self.done:,} of {how_many(self.total, self.unit)}"

    def remarks(self) -> str:
        """What is waited for, else the note."""
        return f"waits: {self.waiting}" if self.waiting else self.note

    def line(self) -> str:
        """All of it in one line, with the stage that it is in."""
        stage = self.stages[min(self.done, len(self.stages) - 1)] if self.stages else ""
        title = ": ".join(filter(None, (self.text, stage)))
        return ", ".join(filter(None, (title, self.facts(), self.remarks())))


def _tick_until(bar: weakref.ref[Progress], ended: threading.Event) -> None:
    """Redraw a bar until it ends, or nobody holds it any more."""
    while not ended.wait(TICK_SECONDS):
        held = bar()
        if held is None:
            return
        held.tick()
        del held


@contextlib.contextmanager
def without_transformers_bar() -> Iterator[None]:
    """Inside, transformers shows no progress bar of its own beside ours."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
