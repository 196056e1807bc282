"""A panel made of parts: buttons, fields and HTML that the kernel describes and controls.js draws."""

from __future__ import annotations

import functools
from typing import Any

from jvlab.views.panels._assets import module, styles
from jvlab.views.panels._live import Panel
from jvlab.views.panels._live_widget import parts_widget
from jvlab.views.panels._parts import Parts

STALE_CLICK_SECONDS = 4.0  # a busy page or network takes less; a running cell usually more


class PartsPanel(Panel):
    """A subclass makes its parts in `make_parts()`; changes made in `refresh()` reach the page with one message."""

    def build(self) -> Any:
        self.classes: list[str] = []
        made = self.widget = self.widget_class()()
        self.parts = Parts(self._send)
        with self.parts.together():
            self.make_parts()
        made.classes = self.classes
        made.on_msg(lambda _, content, __: self._message(content))
        return made

    def _message(self, content: Any) -> None:
        """A message of the page. A click that waited while a cell ran was meant for what was on show then: ignored."""
        if isinstance(content, dict) and content.get("press") and (age := self.age_of(content)) > STALE_CLICK_SECONDS:
            self.say(
                f"a click came {age:.0f} s late, because a cell was running: nothing was done; click again", bad=True
            )
            return
        self.parts.received(content)

    def widget_class(self) -> type[Any]:
        """The class of the widget."""
        return plain_parts()

    def make_parts(self) -> None:
        """Make the parts, and arrange them."""
        raise NotImplementedError

    def _send(self, parts: dict[str, Any], arrangement: dict[str, Any]) -> None:
        with self.widget.hold_sync():
            self.widget.parts, self.widget.arrangement = parts, arrangement

    @property
    def widget_notice(self) -> str:
        """What the panel says is lost; empty if nothing is."""
        return self.widget.notice


@functools.cache
def plain_parts() -> type[Any]:
    """The class of panels that have no traits of their own."""
    return parts_widget(module("controls.js", "parts.js"), styles())
