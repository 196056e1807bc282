"""Displays an object in a notebook as text, HTML and a live panel; one thread refreshes all panels.

A display holds text, HTML and widget of the same snapshot. While the panel is open the widget is shown; when it closes,
the output is updated without the widget, so that a saved notebook holds a table and not a widget without a model.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from jvlab._progress import in_kernel

WIDGET = "application/vnd.jupyter.widget-view+json"
HINT = "<div style='opacity:.7'>pip install ipywidgets anywidget for live panels</div>"
_log = logging.getLogger(__name__)


class Panel:
    """A live widget that shows snapshots of one object.

    A subclass builds its widgets in `build()` and writes the newest snapshot into them in `refresh()`. Buttons only
    call the object's public methods, through `self.act`. `refresh` runs in the publisher's thread.
    """

    hz = 2.0  # calls of `refresh` per second

    def __init__(self, subject: Any) -> None:
        self.subject = subject
        self.closed = False
        self._lock = threading.Lock()
        self._due = 0.0
        self._on_close: list[Callable[[], None]] = []
        self.widget: Any = self.build()

    def build(self) -> Any:
        """Make the widgets; return the outermost."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Write the newest snapshot into the widgets."""
        raise NotImplementedError

    @property
    def done(self) -> bool:
        """Whether nothing will change any more; the panel is then closed."""
        return False

    def say(self, text: str, bad: bool = False) -> None:
        """Show a message to the user; this base class only logs it."""
        _log.log(logging.WARNING if bad else logging.INFO, "%s", text)

    def act(self, work: Callable[[], Any], text: str = "") -> threading.Thread:
        """Run a button's method in a thread, and show how it ended."""

        def run() -> None:
            try:
                if text:
                    self.say(f"{text} …")
                work()
                if text:
                    self.say(f"{text}: done")
            except Exception as error:  # shown in the panel, with its remedy
                self.say(f"{type(error).__name__}: {error}", bad=True)
            self.refresh_now()

        thread = threading.Thread(target=run, name="jvlab-button", daemon=True)
        thread.start()
        return thread

    def _ipython_display_(self) -> None:
        """Do nothing: the panel is already displayed, and `x.panel()` may be a cell's last line."""

    def refresh_now(self) -> None:
        """Refresh unless closed; never concurrently."""
        with self._lock:
            if not self.closed:
                self.refresh()

    def close(self) -> None:
        """Close the widgets and their comms; safe to call twice."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        _publisher.drop(self)
        for after in self._on_close:
            after()
        close_tree(self.widget)


def close_tree(widget: Any) -> None:
    """Close a widget and everything inside it: closing a box alone leaves its children's comms open."""
    for child in getattr(widget, "children", ()):
        close_tree(child)
    for name in ("layout", "style"):
        part: Any = getattr(widget, name, None)
        if hasattr(part, "close"):
            part.close()
    widget.close()


class _Publisher:
    """One thread for all panels; it exists while a panel is open."""

    def __init__(self) -> None:
        self._panels: list[Panel] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, panel: Panel) -> None:
        with self._lock:
            self._panels.append(panel)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="jvlab-publisher", daemon=True)
                self._thread.start()

    def drop(self, panel: Panel) -> None:
        with self._lock:
            if panel in self._panels:
                self._panels.remove(panel)
        self._wake.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                panels = list(self._panels)
                if not panels:
                    self._thread = None
                    return
            now = time.monotonic()
            for panel in (p for p in panels if p._due <= now):
                panel._due = now + 1 / panel.hz
                try:
                    panel.refresh_now()
                    if panel.done:
                        panel.close()
                except Exception:  # a broken panel must not stop the others
                    _log.exception("a panel of %s could not be refreshed", type(panel.subject).__name__)
                    self.drop(panel)
            self._wake.wait(max(0.02, min((p._due for p in panels), default=now) - time.monotonic()))
            self._wake.clear()


_publisher = _Publisher()
_shown: weakref.WeakKeyDictionary[Any, list[Panel]] = weakref.WeakKeyDictionary()


def have_widgets() -> bool:
    """Whether ipywidgets and anywidget are installed."""
    try:
        import anywidget  # noqa: F401
        import ipywidgets  # noqa: F401
    except ImportError:
        return False
    return True


def show(subject: Any, make: Callable[[], Panel] | None) -> Panel | None:
    """Display `subject` (its `repr` and `_repr_html_`), with a live panel if one can be made."""
    from IPython.display import display

    def bundle() -> dict[str, Any]:
        return {"text/plain": repr(subject), "text/html": subject._repr_html_()}

    live = make is not None and in_kernel() and have_widgets()
    if not live or make is None:
        data = bundle()
        if make is not None and in_kernel():
            data["text/html"] += HINT
        display(data, raw=True)
        return None
    panel = make()
    view = {"version_major": 2, "version_minor": 0, "model_id": panel.widget.model_id}
    handle = display(bundle() | {WIDGET: view}, raw=True, display_id=True)
    if handle is not None:
        panel._on_close.append(lambda: handle.update(bundle(), raw=True))
    panel._on_close.append(lambda: _forget(panel))
    _shown.setdefault(subject, []).append(panel)
    _publisher.add(panel)
    return panel


def follow(subject: Any, active: Callable[[], bool]) -> None:
    """Without widgets: show the static view, and update it at each change that `subject` reports to its listeners."""
    from IPython.display import display

    def bundle() -> dict[str, str]:
        return {"text/plain": repr(subject), "text/html": subject._repr_html_() + HINT}

    handle = display(bundle(), raw=True, display_id=True)
    if handle is None or not active():
        return

    def changed(_: Any) -> None:
        handle.update(bundle(), raw=True)
        if not active() and changed in subject._listeners:
            subject._listeners.remove(changed)

    subject._listeners.append(changed)


def _forget(panel: Panel) -> None:
    """Remove a closed panel from `_shown`: it references its subject, so that both would stay alive."""
    others = [p for p in _shown.get(panel.subject, []) if p is not panel]
    if others:
        _shown[panel.subject] = others
    else:
        _shown.pop(panel.subject, None)


def make_static(subject: Any) -> None:
    """Replace every panel of `subject` by its static view: it will not change again."""
    for panel in _shown.pop(subject, []):
        with contextlib.suppress(Exception):  # the notebook may already be closed
            panel.refresh_now()
            panel.close()


@atexit.register
def _make_all_static() -> None:
    for subject in list(_shown):
        make_static(subject)
