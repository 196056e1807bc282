"""A sync's arrays, checked in microseconds: what was found to fit the plan once is only compared with itself.

`jvlab.sync._pack.Source` looks at every cell of every sharding anew, which takes longer than the whole copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

from jvlab.layout._plan import TransferPlan
from jvlab.sync._pack import check_like_connected

KEPT = 4  # kinds of trees that are remembered: trees of several programs come in turn
AVAL, SHARDING = attrgetter("aval"), attrgetter("sharding")
DELETED = methodcaller("is_deleted")
READY = methodcaller("is_ready")
GLANCE = 64  # one array in so many is asked whether it is computed


class Shards:
    """One version of the parameters, with the interface of `Source` that senders need."""

    def __init__(self, arrays: Mapping[str, Any], whole: bool) -> None:
        self._arrays, self._whole = arrays, whole  # every array lies on one device?
        self._pieces: dict[str, dict[int, Any]] = {}

    def shard(self, path: str, device: int) -> Any:
        """The shard as an array on its one device."""
        array = self._arrays[path]
        if self._whole or len(array.sharding.device_set) == 1:
            return array
        if path not in self._pieces:
            self._pieces[path] = {piece.device.id: piece.data for piece in array.addressable_shards}
        return self._pieces[path][device]

    def shards(self, paths: Sequence[str], device: int) -> Sequence[Any]:
        """Several at once."""
        return _several(self._arrays, paths) if self._whole else [self.shard(p, device) for p in paths]

    def memory(self, path: str, device: int) -> None:
        """No host memory: these are on a GPU."""

    @property
    def by_path(self) -> Mapping[str, Any]:
        return self._arrays

    @property
    def arrays(self) -> list[Any]:
        return list(self._arrays.values())

    def seem_ready(self) -> bool:
        """Have some of the arrays been computed, the last among them? What one program makes is ready together."""
        some = self.arrays
        return all(map(READY, (*some[::GLANCE], *some[-1:])))


@dataclass(frozen=True)
class Fitting:
    """A tree that was found to fit: its leaves' classes, shapes with dtypes, and shardings."""

    kinds: set[type]
    avals: tuple[Any, ...]
    shardings: tuple[Any, ...]

    @cached_property
    def whole(self) -> bool:
        """Does every leaf lie on one device?"""
        return all(len(sharding.device_set) == 1 for sharding in self.shardings)


class KnownArrays:
    """Remembers trees that were found to fit.

    What one program makes shares its objects from step to step, and tuples compare those by identity first.
    """

    def __init__(self, plan: TransferPlan) -> None:
        self._plan, self._paths = plan, [info.path for info in plan.leaves]
        self._known: list[Fitting] = []

    def source(self, arrays: Mapping[str, Any]) -> Shards:
        """The arrays, if their paths, shapes, dtypes and shardings are those the plan was compiled for."""
        try:
            ours = _several(arrays, self._paths)
            kinds, avals, shardings = set(map(type, ours)), tuple(map(AVAL, ours)), tuple(map(SHARDING, ours))
        except (LookupError, AttributeError):  # a leaf is missing, or is no array of JAX's
            check_like_connected(self._plan, arrays)
            raise
        if len(arrays) != len(self._paths):  # more than are sent: tied ones, or new ones, which are an error
            check_like_connected(self._plan, arrays)
        found = Fitting(kinds, avals, shardings)
        deleted = next(iter(kinds)).is_deleted if len(kinds) == 1 else DELETED
        # those whose last leaf's sharding is the very same are compared first: equal but other objects take long
        likely = sorted(self._known, key=lambda known: known.shardings[-1] is not shardings[-1])
        fitting = next((known for known in likely if known == found), None)
        if fitting is None or any(map(deleted, ours)):
            check_like_connected(self._plan, arrays)
        if fitting is None or fitting.shardings[-1] is not shardings[-1]:
            fitting = found
            self._known = [found, *self._known[: KEPT - 1]]
        return Shards(arrays, fitting.whole)


def _several(arrays: Mapping[str, Any], paths: Sequence[str]) -> Sequence[Any]:
    return itemgetter(*paths)(arrays) if len(paths) > 1 else [arrays[path] for path in paths]
