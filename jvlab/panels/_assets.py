"""The JavaScript and CSS files of panels: plain files beside this one, joined where one uses another."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def asset(*names: str) -> str:
    """The text of files under static/, one behind the other: a widget's module can import nothing."""
    folder = files("jvlab.panels").joinpath("static")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)
