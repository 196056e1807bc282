"""The JavaScript and CSS files of panels: plain files in static/, concatenated where one uses another."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from jvlab.views import _palette


@cache
def asset(*names: str) -> str:
    """The concatenated text of files in static/: a widget's module cannot import others."""
    folder = files("jvlab.views.panels").joinpath("static")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def module(*names: str) -> str:
    """A panel's module: the palette, what every panel does (live.js), and these files."""
    return "\n".join((_palette.javascript(), asset("live.js", *names)))


def styles(*names: str) -> str:
    """A panel's stylesheet: the palette, what every panel shares (panel.css), and these files."""
    return "\n".join((_palette.stylesheet(), asset("panel.css", *names)))
