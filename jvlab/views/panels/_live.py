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
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from importlib.resources import files
from typing import Any, ClassVar, TypeVar

from jvlab._errors import GatewayUnreachable, JvlabError
from jvlab._files import Plain
from jvlab._progress import in_kernel, in_marimo
from jvlab.views import _palette
from jvlab.views._style import hollow_dots, message_html, notice_html

# The JavaScript and CSS files of panels: plain files in static/, concatenated where one uses another.


@functools.cache
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


@functools.cache
def widget_class(panel: type[Panel]) -> type[Any]:
    """The class of a panel's widget; made on first use, so that importing this module needs no widgets."""
    import anywidget
    import traitlets

    kinds: dict[type, Any] = {
        bool: traitlets.Bool,
        bytes: traitlets.Bytes,
        dict: traitlets.Dict,
        float: traitlets.Float,
        int: traitlets.Int,
        list: traitlets.List,
        str: traitlets.Unicode,
    }
    # `beat` changes every two seconds while the kernel lives, and holds the words for when it does not
    shared = {"panel_id": "", "classes": [], "beat": {}, "notice": "", **panel.traits}
    fields: dict[str, Any] = {
        name: kinds[type(value)](value).tag(sync=True) for name, value in shared.items()
    }
    files = {"_esm": module(*panel.scripts), "_css": styles(*panel.css)}
    return type(f"{panel.__name__}Widget", (anywidget.AnyWidget,), fields | files)


class Panel:
    """A live widget that shows snapshots of one object.

    A subclass names its files, and the traits that it shares with its page by their first values; it fills a widget
    in `build()` and writes the newest snapshot into it in `refresh()`. Buttons only call the object's public methods,
    through `self.act`. `refresh` runs in the publisher's thread.
    """

    scripts: tuple[str, ...] = ("parts.js",)
    css: tuple[str, ...] = ()
    traits: ClassVar[dict[str, Any]] = {}
    css_class = ""
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
        self._refresh_due = self._beat_due = 0.0
        # number of a sign of life -> when it was sent
        self._beats: dict[int, float] = {}
        self.cpu_seconds = 0.0  # of the publisher's thread, for this panel
        self._costs: dict[str, float] = {}  # of the last update and the last snapshot
        self.opened = time.monotonic()
        self._snapshot_due = time.monotonic() + SNAPSHOT_SECONDS
        self._when = time.strftime("%H:%M")
        self.on_close: list[Callable[[], None]] = []
        self.on_snapshot: list[Callable[[], None]] = []
        self.widget: Any = self.build()
        self.widget.panel_id = self.panel_id
        self.widget.classes = [self.css_class]
        self.widget.on_msg(self._heard)

    @classmethod
    def show(cls, subject: Any, *options: Any) -> Any:
        """Display the subject with its panel, and return that; without widgets its static view."""
        if hasattr(subject, "listeners") and not have_widgets():
            return follow(subject, cls.is_renewed)
        make = None if cls.is_over(subject) else lambda: cls(subject, *options)
        return show(subject, make)

    @staticmethod
    def is_over(subject: Any) -> bool:
        """Whether nothing will change any more: its static view says all."""
        return False

    @staticmethod
    def is_renewed(subject: Any) -> bool:
        """Whether a static view without a widget is worth renewing."""
        return False

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
        return self.new_widget()

    def new_widget(self, **values: Any) -> Any:
        return widget_class(type(self))(**values)

    def refresh(self) -> None:
        """Write the newest snapshot into the widget; nothing, where nothing changes by itself."""

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
        return static_html(self.subject)

    def snapshot_line(self) -> str:
        """What a reader is told who sees the last snapshot and nothing else."""
        return f"{self.dated()}; kernel gone: `{self.remedy}`"

    def dated(self) -> str:
        """Of when the snapshot is."""
        where = f", {self.progress}" if self.progress else ""
        return f"snapshot of {self._when}{where}"

    def lose(self, what: str, remedy: str) -> None:
        """Say that what the panel shows is gone, though the kernel lives; the date stays that of the last snapshot."""
        self.widget.notice = f"{self.dated()}; {what}: `{remedy}`"

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
                for renew in self.on_snapshot:
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
        for after in self.on_close:
            after()
        close_tree(self.widget)

    @property
    def due(self) -> float:
        """When the publisher's next visit is due."""
        return min(self._refresh_due, self._beat_due)

    def visit(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if self.abandoned:
            self.close()
            return
        if self._beat_due <= now:
            self._beat_due = now + BEAT_SECONDS
            self.beat()
        if self._refresh_due <= now:
            self._refresh_due = now + self.spend(
                "update", self.refresh_now, 1 / self.hz
            )
            if self.done:
                self.close()
        if self.moving and self._snapshot_due <= now:
            self._snapshot_due = now + self.spend(
                "snapshot", self.save_snapshot, SNAPSHOT_SECONDS
            )


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
                    panel.visit()
                except Exception:  # a broken panel must not stop the others
                    _log.exception(
                        "a panel of %s could not be refreshed",
                        type(panel.subject).__name__,
                    )
                    self.drop(panel)
            due = min(panel.due for panel in panels)
            self._wake.wait(max(0.02, due - time.monotonic()))
            self._wake.clear()


_publisher = _Publisher()
_shown: list[Panel] = []


def open_panels(subject: Any) -> list[Panel]:
    """The panels of a subject that have not been closed."""
    return [panel for panel in _shown if panel.subject is subject]


def static_html(subject: Any) -> str:
    """The HTML that a notebook shows of an object."""
    return subject._repr_html_()


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
        panel.on_snapshot.append(self.renew)
        panel.on_close.append(self.end)

    def _bundle(self, dated: bool = True) -> dict[str, Any]:
        panel = self.panel
        html = panel.static_html()
        if not panel.hosted:
            model = panel.widget.model_id
            view = {"version_major": 2, "version_minor": 0, "model_id": model}
            return {**_faces_of(panel.subject, html), WIDGET: view}
        words = panel.snapshot_line() if panel.mounted else panel.dated()
        notice = notice_html(panel.widget.notice or words) if dated else ""
        marked = (
            f'<div data-jv-panel="{panel.panel_id}">{notice}{hollow_dots(html)}</div>'
        )
        return _faces_of(panel.subject, marked)

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
        self._handle.update(_faces_of(self.panel.subject, html), raw=True)


def _faces_of(subject: Any, html: str) -> dict[str, Any]:
    return {"text/plain": repr(subject), "text/html": html}


def show(subject: Any, make: Callable[[], Panel] | None = None) -> Panel | None:
    """Display `subject` (its `repr` and `_repr_html_`), with a live panel if one can be made."""
    if make is None or not have_widgets() or not (in_kernel() or in_marimo()):
        from IPython.display import display

        hint = HINT if make is not None and in_kernel() else ""
        display(_faces_of(subject, static_html(subject) + hint), raw=True)
        return None
    panel = make()
    if not in_marimo():
        _Output(panel)
    # kept alive, and refreshed, until it is closed
    panel.on_close.append(lambda: _shown.remove(panel))
    _shown.append(panel)
    _publisher.add(panel)
    return panel


def follow(subject: Any, active: Callable[[Any], bool]) -> None:
    """Without widgets: show the static view, and update it at each change that `subject` reports to its listeners."""
    from IPython.display import display

    now = lambda: _faces_of(subject, static_html(subject) + HINT)
    handle = display(now(), raw=True, display_id=True)
    if handle is None or not active(subject):
        return

    def changed(_: Any) -> None:
        handle.update(now(), raw=True)
        if not active(subject) and changed in subject.listeners:
            subject.listeners.remove(changed)

    subject.listeners.append(changed)


def make_static(subject: Any) -> None:
    """Replace every panel of `subject` by its static view: it will not change again."""
    for panel in open_panels(subject):
        with contextlib.suppress(Exception):  # the notebook may already be closed
            panel.refresh_now()
            panel.close()


_ending = False  # the kernel ends


@atexit.register
def _make_all_static() -> None:
    global _ending
    _ending = True
    for panel in list(_shown):
        make_static(panel.subject)


NEW_LAB = "lab = jv.Lab()"
T = TypeVar("T")
ARMED_SECONDS = 3.0  # within which a second click confirms


def _field(name: str) -> Any:
    def get(part: PanelPart) -> Any:
        return part.state[name]

    def put(part: PanelPart, value: Any) -> None:
        part.change(**{name: value})

    return property(get, put)


class PanelPart:
    """One button, field or piece of HTML. A change reaches the page at once, or at the end of `parts.together()`."""

    value = _field("value")
    description = _field("description")
    style = _field("style")  # "danger" while a button asks for confirmation
    hidden = _field("hidden")
    options = _field("options")
    wrong = _field("wrong")  # what is wrong with a field's value, shown beside it
    why = _field("why")  # why it cannot be used now; empty if it can

    def __init__(
        self, parts: Parts, name: str, kind: str, css_class: str, **state: Any
    ) -> None:
        self._parts = parts
        self.name = name
        self.state: Plain = {
            "kind": kind,
            "class": css_class,
            "value": "",
            "description": "",
            "tooltip": "",
            "why": "",
            "hidden": False,
            **state,
        }
        self._pressed: list[Callable[[], object]] = []
        self._changed: list[Callable[[], object]] = []

    @property
    def disabled(self) -> bool:
        return bool(self.state["why"])

    @property
    def index(self) -> int:
        """Of a selection: the place of its value among the options."""
        return self.options.index(self.value) if self.value in self.options else 0

    def change(self, **state: Any) -> None:
        """Change several fields with one message; nothing is sent if nothing differs."""
        if any(self.state.get(name) != value for name, value in state.items()):
            new_value = "value" in state and state["value"] != self.state["value"]
            self.state.update(state)
            self._parts.changed()
            if new_value:
                self._call(self._changed)

    def on_press(self, act: Callable[[], object]) -> PanelPart:
        self._pressed.append(act)
        return self

    def on_change(self, act: Callable[[], object]) -> PanelPart:
        self._changed.append(act)
        return self

    def click(self) -> None:
        """What a click in the page does; a disabled button does nothing."""
        if not self.disabled:
            self.press()

    def press(self) -> None:
        """What the button does, whether or not it is of use now."""
        self._call(self._pressed)

    @staticmethod
    def _call(handlers: list[Callable[[], object]]) -> None:
        for handler in list(handlers):
            handler()


class Parts:
    """The parts of one panel, and how they are laid out; `send` takes both to the page."""

    def __init__(self, send: Callable[[Plain, Plain], None]) -> None:
        self._send = send
        self._parts: dict[str, PanelPart] = {}
        self._lock = threading.RLock()
        self._depth = 0
        self._dirty = False
        self._numbers = 0
        self.tree: Plain = {"of": []}

    def add(self, kind: str, css_class: str, **state: Any) -> PanelPart:
        """Make a part. It is shown once a tree passed to `arrange` names it."""
        self._numbers += 1
        part = PanelPart(self, f"{css_class}-{self._numbers}", kind, css_class, **state)
        self._parts[part.name] = part
        return part

    def html(self, css_class: str, value: str = "") -> PanelPart:
        return self.add("html", css_class, value=value)

    def button(
        self,
        text: str,
        tip: str,
        css_class: str,
        act: Callable[[], object] | None = None,
    ) -> PanelPart:
        part = self.add("button", css_class, description=text, tooltip=tip, style="")
        return part.on_press(act) if act is not None else part

    def remove(self, *parts: PanelPart) -> None:
        for part in parts:
            self._parts.pop(part.name, None)
        self.changed()

    def arrange(self, tree: Plain) -> None:
        """Lay the parts out: boxes `{"of": [names and boxes], "row": bool, "class": str}`."""
        if tree != self.tree:
            self.tree = tree
            self.changed()

    def changed(self) -> None:
        with self._lock:
            self._dirty = True
            if not self._depth:
                self._flush()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Send the changes made inside with one message."""
        with self._lock:
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if not self._depth and self._dirty:
                    self._flush()

    def _flush(self) -> None:
        self._dirty = False
        self._send(
            {name: dict(part.state) for name, part in self._parts.items()}, self.tree
        )

    def received(self, message: Any) -> bool:
        """Take a message of the page: a press, or a field's new value."""
        part = (
            self._parts.get(str(message.get("part")))
            if isinstance(message, dict)
            else None
        )
        if part is None:
            return False
        if message.get("press"):
            part.click()
        elif (
            "value" in message and not part.disabled and message["value"] != part.value
        ):
            # the same value comes again when Enter is pressed, after it: what is wrong with it must stay in sight
            part.change(value=message["value"], wrong="")
        return True


def box(*parts: PanelPart | Plain, row: bool = False, css_class: str = "") -> Plain:
    """A box of parts and boxes, for `Parts.arrange`."""
    return {
        "of": [p.name if isinstance(p, PanelPart) else p for p in parts],
        "row": row,
        "class": css_class,
    }


class ConfirmButton:
    """A button that asks for confirmation: a second click within `ARMED_SECONDS` acts."""

    def __init__(self, button: PanelPart, act: Callable[[], object]) -> None:
        self.button = button
        self._act = act
        self._text = button.description
        self._until = 0.0
        button.on_press(self.click)

    def click(self) -> None:
        if time.monotonic() < self._until:
            self.disarm()
            self._act()
            return
        self._until = time.monotonic() + ARMED_SECONDS
        self.button.change(description=f"really {self._text}?", style="danger")

    def disarm(self, only_if_expired: bool = False) -> None:
        if self._until and (not only_if_expired or time.monotonic() >= self._until):
            self._until = 0.0
            self.button.change(description=self._text, style="")


# A panel made of parts: buttons, fields and HTML that the kernel describes and controls.js draws.

# a busy page or network takes less; a running cell usually more
STALE_CLICK_SECONDS = 4.0


class PartsPanel(Panel):
    """A subclass makes its parts in `make_parts()`; changes made in `refresh()` reach the page with one message."""

    scripts = ("controls.js", "parts.js")
    traits: ClassVar[Plain] = {"parts": {}, "arrangement": {"of": []}}

    def build(self) -> Any:
        made = self.widget = self.new_widget()
        self.parts = Parts(self._send)
        self.message = self.parts.html("jv-message")
        with self.parts.together():
            self.make_parts()
        made.on_msg(lambda _, content, __: self._message(content))
        return made

    def say(self, text: str, bad: bool = False) -> None:
        self.message.value = message_html(text, bad)

    def ask(self, question: Callable[[], T]) -> T | None:
        """What the gateway answers; None if it does not, and the panel says so."""
        try:
            return question()
        except (JvlabError, CancelledError, TimeoutError) as error:
            if not self.done:
                gone = isinstance(error, GatewayUnreachable)
                what = "gateway gone" if gone else "the gateway does not answer"
                with self.parts.together():
                    self.show_lost(what)
                    self.say(str(error) or what, bad=True)
                self.lose(what, NEW_LAB if gone else self.another)
        return None

    @property
    def another(self) -> str:
        """What to do if the gateway is there but does not answer."""
        return self.remedy

    def show_lost(self, what: str) -> None:
        """Say that what is shown is of the past, and of each button that it cannot work."""

    def _message(self, content: Any) -> None:
        """A message of the page. A click that waited while a cell ran was meant for what was on show then: ignored."""
        if (
            isinstance(content, dict)
            and content.get("press")
            and (age := self.age_of(content)) > STALE_CLICK_SECONDS
        ):
            self.say(
                f"a click came {age:.0f} s late, because a cell was running: nothing was done; click again",
                bad=True,
            )
            return
        self.parts.received(content)

    def make_parts(self) -> None:
        """Make the parts, and arrange them."""
        raise NotImplementedError

    def _send(self, parts: Plain, arrangement: Plain) -> None:
        with self.widget.hold_sync():
            self.widget.parts = parts
            self.widget.arrangement = arrangement
