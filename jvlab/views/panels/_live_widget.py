"""The widget of every panel: what its page needs to find its place in the notebook and to notice a dead kernel."""

from __future__ import annotations

import functools
from typing import Any


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
