"""Progress bars for long work: shown in a terminal or a notebook, silent elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any


def watched() -> bool:
    """Whether output is shown to somebody: in a terminal or a Jupyter kernel."""
    return in_kernel() or sys.stderr.isatty()


def in_kernel() -> bool:
    """Whether this process is a notebook's kernel."""
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return hasattr(get_ipython(), "kernel")


class Progress:
    """A thin wrapper around tqdm. `show=None`: only if `watched()`; the bar appears after `after` seconds."""

    def __init__(self, total: int, text: str, *, unit: str, show: bool | None = None, after: float = 0.0) -> None:
        self._show = watched() if show is None else show
        self._total, self._text, self._unit, self._after = total, text, unit, after
        self._began, self._done, self._bar = time.monotonic(), 0, None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _ensure_bar(self) -> Any:
        if self._bar is None and self._show and time.monotonic() - self._began >= self._after:
            if in_kernel():
                from tqdm.auto import tqdm
            else:
                from tqdm import tqdm
            self._bar = tqdm(total=self._total, desc=self._text, unit=self._unit, leave=self._show is True)
        return self._bar

    def advance(self, count: int, note: str = "") -> None:
        self.to(self._done + count)
        if note and self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)

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
