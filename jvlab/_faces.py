"""Faces of objects in lower rooms: what draws them registers here, and is loaded when the first face is asked for."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


def _face(room: str, what: str) -> Any:
    """A function of one object (and options) that a room's `_registered` module gives implementations for."""

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
panel = _face("panels", "panel")
