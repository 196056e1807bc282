"""The parameters that a link was connected with, as long as somebody else keeps them: for comparisons of values."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from jvlab.layout._tree import flatten


class RememberedParams:
    """Weak references to a tree's arrays: comparing values needs no argument, and no memory is kept for it."""

    def __init__(self) -> None:
        self._refs: dict[str, Any] = {}

    def take(self, params: Any) -> None:
        """Remember this tree's arrays; those that cannot be referenced weakly are forgotten."""
        self._refs = {}
        for path, array in flatten(params).arrays.items():
            try:
                self._refs[path] = weakref.ref(array)
            except TypeError:
                self._refs = {}
                return

    def arrays(self) -> Mapping[str, Any] | None:
        """The arrays by path; None if one of them is gone, or its memory was given to a training step."""
        found = {path: ref() for path, ref in self._refs.items()}
        alive = all(a is not None and not getattr(a, "is_deleted", bool)() for a in found.values())
        return found if found and alive else None
