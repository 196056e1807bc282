"""The parts of a panel, buttons, fields and HTML, without ipywidgets: their state here, their look in controls.js."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from jvlab._files import Plain
from jvlab.views.panels._live import Panel

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
        with self.parts.together():
            self.make_parts()
        made.on_msg(lambda _, content, __: self._message(content))
        return made

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
