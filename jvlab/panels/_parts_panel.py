"""A panel made of parts: buttons, fields and HTML that the kernel describes and controls.js draws."""

from __future__ import annotations

import functools
from typing import Any

from jvlab.panels._assets import module, styles
from jvlab.panels._live import Panel
from jvlab.panels._live_widget import parts_widget
from jvlab.panels._parts import Parts


class PartsPanel(Panel):
    """A subclass makes its parts in `make_parts()`; changes made in `refresh()` reach the page with one message."""

    def build(self) -> Any:
        self.classes: list[str] = []
        made = self.widget = self.widget_class()()
        self.parts = Parts(self._send)
        with self.parts.together():
            self.make_parts()
        made.classes = self.classes
        made.on_msg(lambda _, content, __: self.parts.received(content))
        return made

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
