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
        self.take_arrays(flatten(params).arrays)

    def take_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Remember these arrays by path."""
        self._refs = {}
        for path, array in arrays.items():
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

    def holds(self, arrays: Mapping[str, Any]) -> bool:
        """Are these the same arrays, with the same values? Only JAX's can be known to be: others change in place."""
        if not self._refs or arrays.keys() != self._refs.keys():
            return False
        return all(hasattr(a, "addressable_shards") and self._refs[path]() is a for path, a in arrays.items())
