"""Displays an object in a notebook as text, HTML and a live panel; one thread refreshes all panels.

In JupyterLab and Notebook 7 a cell's output holds HTML only: the last snapshot, renewed while the panel lives, with the
words for when it no longer does. The panel itself is drawn beside it by static/live.js, so that a notebook that is
saved and opened again shows that snapshot and never a widget without its model. Other front ends get the widget's mime
type with the HTML, and HTML alone once the panel closes: VS Code and Colab (whose custom widget manager loads anywidget
by itself) are untested, and follow the same rule. marimo shows a panel that is a cell's last line, as its widget.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from jvlab._progress import in_kernel, in_marimo
from jvlab.views import _palette
from jvlab.views._style import hollow_dots, notice_html

# The widget of every panel: what its page needs to find its place in the notebook and to notice a dead kernel.


@functools.cache
def live_widget() -> type[Any]:
    """The base class; created on first use, so that importing this module needs no widgets."""
    import anywidget
    import traitlets

    class LiveWidget(anywidget.AnyWidget):
        """`beat` changes every two seconds while the kernel lives, and holds the words for when it does not."""

        panel_id = traitlets.Unicode("").tag(sync=True)
        classes = traitlets.List().tag(sync=True)
        beat = traitlets.Dict().tag(sync=True)
        notice = traitlets.Unicode("").tag(sync=True)

    return LiveWidget


def parts_widget(esm: str, css: str, **traits: Any) -> type[Any]:
    """A class for a panel made of parts (see `_parts.py`), with traits of its own."""
    import traitlets

    fields: dict[str, Any] = {
        "_esm": esm,
        "_css": css,
        "parts": traitlets.Dict().tag(sync=True),
        "arrangement": traitlets.Dict({"of": []}).tag(sync=True),
    }
    return type("PartsWidget", (live_widget(),), fields | traits)


# The JavaScript and CSS files of panels: plain files in static/, concatenated where one uses another.


@cache
def asset(*names: str) -> str:
    """The concatenated text of files in static/: a widget's module cannot import others."""
    folder = files("jvlab.views.panels").joinpath("static")
    return "\n".join(
        folder.joinpath(name).read_text(encoding="utf-8") for name in names
    )


def module(*names: str) -> str:
    """A panel's module: the palette, what every panel does (live.js), and these files."""
    return "\n".join((_palette.javascript(), asset("live.js", *names)))


def styles(*names: str) -> str:
    """A panel's stylesheet: the palette, what every panel shares (panel.css), and these files."""
    return "\n".join((_palette.stylesheet(), asset("panel.css", *names)))


# ----------------------------------------------------------------------------------------------------

WIDGET = "application/vnd.jupyter.widget-view+json"
HINT = "<div style='opacity:.7'>pip install ipywidgets anywidget for live panels</div>"
# between signs of life; static/live.js gives a kernel up after seven seconds without one
BEAT_SECONDS = 2.0
SNAPSHOT_SECONDS = 3.0  # between snapshots for the saved notebook
KEPT_BEATS = 1800  # an hour of them: how long a cell may run while a click waits
# seconds: a panel that moves less often seems dead, whatever it costs
LONGEST_PERIOD = 15.0
# of a core: what a panel may take from the work it shows; half for updates, half for snapshots
SHARE = 0.01
_log = logging.getLogger(__name__)


class Panel:
    """A live widget that shows snapshots of one object.

    A subclass builds its widget in `build()` and writes the newest snapshot into it in `refresh()`. Buttons only
    call the object's public methods, through `self.act`. `refresh` runs in the publisher's thread.
    """

    hz = 2.0  # calls of `refresh` per second
    moving = True  # whether the subject changes: its snapshot is then renewed
    remedy = "run the cell again"  # how to get the subject back in a new kernel

    def __init__(self, subject: Any) -> None:
        self.subject = subject
        self.closed = False
        self.panel_id = uuid.uuid4().hex
        # whether the page draws the panel beside the snapshot
        self.hosted = hosted_by_environment()
        self.mounted = False  # whether it has done so
        self._lock = threading.Lock()
        self._due = self._beat_due = 0.0
        # number of a sign of life -> when it was sent
        self._beats: dict[int, float] = {}
        self.cpu_seconds = 0.0  # of the publisher's thread, for this panel
        self._costs: dict[str, float] = {}  # of the last update and the last snapshot
        self.opened = time.monotonic()
        self._snapshot_due = time.monotonic() + SNAPSHOT_SECONDS
        self._when = time.strftime("%H:%M")
        self._on_close: list[Callable[[], None]] = []
        self._on_snapshot: list[Callable[[], None]] = []
        self.widget: Any = self.build()
        self.widget.panel_id = self.panel_id
        self.widget.on_msg(self._heard)

    @property
    def load(self) -> float:
        """The share of a core that updates and snapshots have taken since the panel was opened."""
        return self.cpu_seconds / max(time.monotonic() - self.opened, 1e-9)

    def spend(self, kind: str, work: Callable[[], object], period: float) -> float:
        """Do a piece of work; returns after how many seconds it may be done again: costly ones less often.

        Of two costs in a row the lower counts, since imports and the like happen once.
        """
        began = time.thread_time()
        work()
        cost = time.thread_time() - began
        self.cpu_seconds += cost
        usual = min(cost, self._costs.get(kind, 0.0))
        self._costs[kind] = cost
        return max(period, min(usual / (SHARE / 2), LONGEST_PERIOD))

    def build(self) -> Any:
        """Make the widget."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Write the newest snapshot into the widget."""
        raise NotImplementedError

    @property
    def done(self) -> bool:
        """Whether nothing will change any more; the panel is then closed."""
        return False

    @property
    def progress(self) -> str:
        """How far the subject is, for the words beside a snapshot: "step 32"."""
        return ""

    def static_html(self) -> str:
        """The subject for a notebook without a kernel."""
        return self.subject._repr_html_()

    def snapshot_line(self) -> str:
        """What a reader is told who sees the last snapshot and nothing else."""
        return f"{self._dated()}; kernel gone: `{self.remedy}`"

    def _dated(self) -> str:
        where = f", {self.progress}" if self.progress else ""
        return f"snapshot of {self._when}{where}"

    def lose(self, what: str, remedy: str) -> None:
        """Say that what the panel shows is gone, though the kernel lives; the date stays that of the last snapshot."""
        self.widget.notice = f"{self._dated()}; {what}: `{remedy}`"

    def found(self) -> None:
        """The subject answered: what the panel shows is of this moment."""
        self._when = time.strftime("%H:%M")
        if self.widget.notice:
            self.widget.notice = ""
        if self.widget.beat and self.widget.beat["line"] != self.snapshot_line():
            # the words of a dead kernel agree with what its panel shows
            self._send_beat()

    def _heard(self, _: Any, message: Any, __: Any) -> None:
        """The page drew the panel: from now on the output may hold HTML only."""
        if isinstance(message, dict) and (
            message.get("hosted") or message.get("mounted")
        ):
            fresh = not (self.hosted and self.mounted)
            self.hosted = self.mounted = True
            if fresh:
                self.save_snapshot()

    def beat(self) -> None:
        """A sign of life for the page."""
        with self._lock:
            if not self.closed:
                self._send_beat()

    def _send_beat(self) -> None:
        number = self.widget.beat.get("number", 0) + 1
        self._beats[number] = time.monotonic()
        self._beats.pop(number - KEPT_BEATS, None)
        self.widget.beat = {"number": number, "line": self.snapshot_line()}

    def age_of(self, message: Any) -> float:
        """How many seconds ago a message of the page was sent, from the beat that it names; 0 if that is not known."""
        sent = self._beats.get(message.get("beat", 0))
        since = message.get("ms", 0)
        if sent is None or not isinstance(since, (int, float)):
            return 0.0
        return max(0.0, time.monotonic() - sent - since / 1000)

    def save_snapshot(self) -> None:
        """Renew the snapshot that a saved notebook holds."""
        with self._lock:
            if not self.closed:
                for renew in self._on_snapshot:
                    renew()

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

    def _display_(self) -> Any:
        """What marimo shows of a panel that is a cell's last line."""
        return self.widget

    @property
    def abandoned(self) -> bool:
        """Whether marimo closed the widget: its cell ran again, or was deleted."""
        comm: Any = getattr(self.widget, "comm", None)
        return getattr(comm, "kernel", None) == "marimo" and comm._closed

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


def hosted_by_environment() -> bool:
    """Whether the front end is JupyterLab or Notebook 7, as far as the kernel can tell: their server names the
    notebook in the environment. VS Code names it too, in a way of its own; its widgets need the mime type.
    """
    name = os.environ.get("JPY_SESSION_NAME", "")
    return bool(name) and "-jvsc-" not in name


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
                self._thread = threading.Thread(
                    target=self._run, name="jvlab-publisher", daemon=True
                )
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
            for panel in panels:
                try:
                    self._visit(panel)
                except Exception:  # a broken panel must not stop the others
                    _log.exception(
                        "a panel of %s could not be refreshed",
                        type(panel.subject).__name__,
                    )
                    self.drop(panel)
            due = min((min(p._due, p._beat_due) for p in panels), default=0.0)
            self._wake.wait(max(0.02, due - time.monotonic()))
            self._wake.clear()

    @staticmethod
    def _visit(panel: Panel) -> None:
        """Do what is due for a panel."""
        now = time.monotonic()
        if panel.abandoned:
            panel.close()
            return
        if panel._beat_due <= now:
            panel._beat_due = now + BEAT_SECONDS
            panel.beat()
        if panel._due <= now:
            panel._due = now + panel.spend("update", panel.refresh_now, 1 / panel.hz)
            if panel.done:
                panel.close()
        if panel.moving and panel._snapshot_due <= now:
            panel._snapshot_due = now + panel.spend(
                "snapshot", panel.save_snapshot, SNAPSHOT_SECONDS
            )


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


class _Output:
    """The output of one cell: what it holds of a panel, and how that is renewed."""

    def __init__(self, panel: Panel) -> None:
        from IPython.display import display

        self.panel = panel
        self._last = self._bundle(dated=False)
        self._handle: Any = display(self._last, raw=True, display_id=True)
        panel._on_snapshot.append(self.renew)
        panel._on_close.append(self.end)

    def _bundle(self, dated: bool = True) -> dict[str, Any]:
        panel = self.panel
        subject = self.panel.subject
        if not panel.hosted:
            view = {
                "version_major": 2,
                "version_minor": 0,
                "model_id": panel.widget.model_id,
            }
            return {
                "text/plain": repr(subject),
                "text/html": panel.static_html(),
                WIDGET: view,
            }
        notice = panel.widget.notice or (
            panel.snapshot_line() if panel.mounted else panel._dated()
        )
        html = (notice_html(notice) if dated else "") + hollow_dots(panel.static_html())
        return {
            "text/plain": repr(subject),
            "text/html": f'<div data-jv-panel="{panel.panel_id}">{html}</div>',
        }

    def renew(self) -> None:
        """Write the newest snapshot, if it differs from the last one."""
        if self._handle is not None and (bundle := self._bundle()) != self._last:
            self._last = bundle
            self._handle.update(bundle, raw=True)

    def end(self) -> None:
        """The last words: of a subject that has ended, or of a kernel that ends before its subject."""
        if self._handle is None:
            return
        html = self.panel.static_html()
        if _ending and not self.panel.done:
            html = notice_html(self.panel.snapshot_line()) + hollow_dots(html)
        self._handle.update(
            {"text/plain": repr(self.panel.subject), "text/html": html}, raw=True
        )


def show(subject: Any, make: Callable[[], Panel] | None) -> Panel | None:
    """Display `subject` (its `repr` and `_repr_html_`), with a live panel if one can be made."""
    if make is not None and in_marimo() and have_widgets():
        return _opened(subject, make())
    from IPython.display import display

    live = make is not None and in_kernel() and have_widgets()
    if not live or make is None:
        data = {"text/plain": repr(subject), "text/html": subject._repr_html_()}
        if make is not None and in_kernel():
            data["text/html"] += HINT
        display(data, raw=True)
        return None
    panel = make()
    _Output(panel)
    return _opened(subject, panel)


def _opened(subject: Any, panel: Panel) -> Panel:
    """Keep a panel alive, and refreshed, until it is closed."""
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
        if not active() and changed in subject.listeners:
            subject.listeners.remove(changed)

    subject.listeners.append(changed)


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


_ending = False  # the kernel ends


@atexit.register
def _make_all_static() -> None:
    global _ending
    _ending = True
    for subject in list(_shown):
        make_static(subject)
