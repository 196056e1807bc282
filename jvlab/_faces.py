"""Displays (text, HTML, figure, panel) of objects in lower rooms: `views` and `panels` register them, on first use."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


def _face(room: str, what: str) -> Any:
    """A singledispatch function whose implementations are registered by a room's `_registered` module."""

    @functools.singledispatch
    def draw(obj: Any, *options: Any) -> Any:
        importlib.import_module(f"jvlab.{room}._registered")
        found: Callable[..., Any] = draw.dispatch(type(obj))
        if found is draw.dispatch(object):
            raise TypeError(f"nothing draws the {what} of a {type(obj).__name__}")
        return found(obj, *options)

    return draw


text = _face("views", "text")
html = _face("views", "HTML")
figure = _face("views", "figure")
panel = _face("views.panels", "panel")
