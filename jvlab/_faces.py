"""The pictures of objects: an object asks for one of its faces by name; `views` has the functions that draw them.

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")

Nothing of `views` is imported before something is drawn.
"""

from __future__ import annotations

import importlib
import operator
from typing import Any


def draw(subject: Any, face: str, *given: Any, **options: Any) -> Any:
    """A face of the subject, by the table in `views/_registered.py`: its class's, or one that its class inherits."""
    faces = importlib.import_module("jvlab.views._registered").FACES
    for kind in type(subject).__mro__:
        if place := faces.get(kind.__name__, {}).get(face):
            module, _, name = place.partition(":")
            views = importlib.import_module(f"jvlab.views.{module}")
            return operator.attrgetter(name)(views)(subject, *given, **options)
    raise TypeError(f"nothing draws the {face} of a {type(subject).__name__}")
