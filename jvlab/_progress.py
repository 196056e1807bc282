"""Progress bars for long work: shown in a terminal or a notebook, silent elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from html import escape
from typing import Any

REDRAW_SECONDS = 0.25  # between updates of a notebook's bar
ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")  # colours and cursor movements
METADATA = {"jvlab": "progress"}  # marks the output, so that a tool can leave it out of a committed notebook


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


class CellBar:
    """A bar in a notebook's output as plain HTML: a saved notebook holds its last state, and no widget."""

    def __init__(self, total: int, text: str, unit: str, stages: Sequence[str] = ()) -> None:
        from IPython.display import display

        self.n, self.total, self.text, self.unit, self.stages = 0, total, text, unit, tuple(stages)
        self.note = ""
        self._began, self._drawn = time.monotonic(), time.monotonic()
        self._handle: Any = display(self._bundle(), metadata=METADATA, raw=True, display_id=True)

    def update(self, count: int) -> None:
        self.n += count
        self.refresh(due_only=self.n < self.total)

    def refresh(self, due_only: bool = True) -> None:
        now = time.monotonic()
        if self._handle is not None and not (due_only and now - self._drawn < REDRAW_SECONDS):
            self._drawn = now
            self._handle.update(self._bundle(), metadata=METADATA, raw=True)

    def reset(self, total: int) -> None:
        self.n, self.total = 0, total

    def set_description(self, text: str) -> None:
        self.text = text
        self.refresh(due_only=False)

    def set_postfix_str(self, note: str, refresh: bool = True) -> None:
        self.note = note

    def close(self) -> None:
        self.refresh(due_only=False)

    def _facts(self) -> str:
        seconds = time.monotonic() - self._began
        took = f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
        count = "" if self.stages else f"{_count(self.n, self.unit)} of {_count(self.total, self.unit)}, "
        return count + took

    def _ticks(self) -> str:
        marks = ("✓" if i < self.n else "▸" if i == self.n else "·" for i in range(len(self.stages)))
        return "  ".join(f"{mark} {stage}" for mark, stage in zip(marks, self.stages, strict=True))

    def _bundle(self) -> dict[str, str]:
        text = ": ".join(filter(None, (self.text, self._ticks())))
        plain = ", ".join(filter(None, (text, self._facts(), self.note)))
        share = 100 * min(self.n / self.total, 1.0) if self.total else 0.0
        faint = "color:var(--jp-ui-font-color2, #777)"
        html = (
            '<div style="font-family:var(--jp-ui-font-family, system-ui, sans-serif);font-size:13px;display:flex;'
            'flex-wrap:wrap;gap:2px 10px;align-items:center;color:var(--jp-ui-font-color1, inherit)">'
            f'<span style="white-space:pre">{escape(text)}</span>'
            '<span style="width:10em;height:6px;background:var(--jp-border-color2, rgba(128,128,128,.35))">'
            f'<span style="display:block;width:{share:.1f}%;height:6px;background:#0072B2"></span></span>'
            f'<span style="{faint};font-variant-numeric:tabular-nums">{escape(self._facts())}</span>'
            f'<span style="{faint};overflow-wrap:anywhere">{escape(self.note)}</span></div>'
        )
        return {"text/plain": plain, "text/html": html}


def _count(n: int, unit: str) -> str:
    if unit == "B":
        return f"{n / 1e6:,.1f} MB"
    return f"{n:,} {unit}{'' if n == 1 else 's'}"


class Progress:
    """tqdm in a terminal, `CellBar` in a notebook. `show=None`: only if `watched()`; appears after `after` seconds.

    `stages`: the total is their number, and each is ticked when it is done.
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
    ) -> None:
        self._show = watched() if show is None else show
        self._total, self._text, self._unit, self._after = total, text, unit, after
        self._stages = stages
        self._began, self._done = time.monotonic(), 0
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _ensure_bar(self) -> Any:
        if self._bar is None and self._show and time.monotonic() - self._began >= self._after:
            if in_kernel():
                self._bar = CellBar(self._total, self._text, self._unit, self._stages)
            else:
                from tqdm import tqdm

                self._bar = tqdm(total=self._total, desc=self._text, unit=self._unit, leave=self._show is True)
        return self._bar

    def advance(self, count: int, note: str = "") -> None:
        if note and self._bar is not None:
            self.remark(note)
        self.to(self._done + count)

    @property
    def shown(self) -> bool:
        """Whether anybody sees it."""
        return self._show

    def restart(self, total: int) -> None:
        """Begin again with another total."""
        self._total = total
        self._done = 0
        if (bar := self._ensure_bar()) is not None:
            bar.reset(total=total)

    def remark(self, note: str) -> None:
        """A short text after the bar: a rate, or the last line of a log."""
        if (bar := self._ensure_bar()) is not None:
            bar.set_postfix_str(without_ansi(note), refresh=False)

    def to(self, done: int) -> None:
        """Set the progress to `done`."""
        self._done = done
        if (bar := self._ensure_bar()) is not None and done > bar.n:
            bar.update(done - bar.n)

    def tick(self) -> None:
        """Redraw the bar, so that its clock advances."""
        if (bar := self._ensure_bar()) is not None:
            bar.refresh()

    def describe(self, text: str) -> None:
        if text == self._text:
            return
        self._text = text
        if (bar := self._ensure_bar()) is not None:
            bar.set_description(text)
