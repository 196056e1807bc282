"""The JavaScript and CSS files of panels: plain files in static/, concatenated where one uses another."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def asset(*names: str) -> str:
    """The concatenated text of files in static/: a widget's module cannot import others."""
    folder = files("jvlab.panels").joinpath("static")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)
