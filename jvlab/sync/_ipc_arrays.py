"""A sync's arrays, checked against the plan in microseconds by remembering trees that passed before.

`jvlab.sync._pack.Source` inspects every cell of every sharding each time, which takes longer than the whole copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

from jvlab.layout._plan import TransferPlan
from jvlab.sync._pack import check_like_connected
from jvlab.sync._quantise import Naming, sent_arrays, unchanged

KEPT = 4  # trees remembered: several programs may alternate
AVAL, SHARDING = attrgetter("aval"), attrgetter("sharding")
DELETED = methodcaller("is_deleted")
READY = methodcaller("is_ready")
READY_SAMPLE = 64  # every 64th array is asked whether it is ready


class Shards:
    """One version of the parameters, with the interface of `Source` that senders need."""

    def __init__(self, arrays: Mapping[str, Any], whole: bool) -> None:
        self._arrays, self._whole = arrays, whole  # whole: every array is on one device
        self.by_path = arrays  # the trainer's own, where what is sent differs
        self.naming: Naming = unchanged  # of leaves that are not finite, as `by_path` has them
        self._pieces: dict[str, dict[int, Any]] = {}

    def shard(self, path: str, device: int) -> Any:
        """The leaf's shard on this device."""
        array = self._arrays[path]
        if self._whole or len(array.sharding.device_set) == 1:
            return array
        if path not in self._pieces:
            self._pieces[path] = {piece.device.id: piece.data for piece in array.addressable_shards}
        return self._pieces[path][device]

    def shards(self, paths: Sequence[str], device: int) -> Sequence[Any]:
        """The shards of several leaves."""
        return _several(self._arrays, paths) if self._whole else [self.shard(p, device) for p in paths]

    def memory(self, path: str, device: int) -> None:
        """None: these arrays are on a GPU."""

    @property
    def arrays(self) -> list[Any]:
        return list(self._arrays.values())

    def seem_ready(self) -> bool:
        """Is a sample of the arrays computed, the last included? One program's outputs become ready together."""
        arrays = self.arrays
        return all(map(READY, (*arrays[::READY_SAMPLE], *arrays[-1:])))


@dataclass(frozen=True)
class TreeSignature:
    """A tree's leaf classes, avals (shape and dtype) and shardings."""

    kinds: set[type]
    avals: tuple[Any, ...]
    shardings: tuple[Any, ...]

    @cached_property
    def whole(self) -> bool:
        """Is every leaf on a single device?"""
        return all(len(sharding.device_set) == 1 for sharding in self.shardings)


class KnownArrays:
    """Remembers the signatures of trees that match the plan.

    A program reuses its aval and sharding objects from step to step, and tuples compare by identity first.
    """

    def __init__(self, plan: TransferPlan) -> None:
        self._plan, self._paths = plan, [info.path for info in plan.leaves]
        self._known: list[TreeSignature] = []

    def source(self, given: Mapping[str, Any]) -> Shards:
        """The arrays as `Shards`; raises unless paths, shapes, dtypes and shardings match the plan."""
        arrays, naming = sent_arrays(self._plan, given)
        source = self._matching(arrays)
        source.by_path, source.naming = given, naming
        return source

    def _matching(self, arrays: Mapping[str, Any]) -> Shards:
        try:
            ours = _several(arrays, self._paths)
            kinds, avals, shardings = set(map(type, ours)), tuple(map(AVAL, ours)), tuple(map(SHARDING, ours))
        except (LookupError, AttributeError):  # a leaf is missing, or is not a JAX array
            check_like_connected(self._plan, arrays)
            raise
        if len(arrays) != len(self._paths):  # extra leaves: tied ones are fine, new ones are an error
            check_like_connected(self._plan, arrays)
        signature = TreeSignature(kinds, avals, shardings)
        deleted = next(iter(kinds)).is_deleted if len(kinds) == 1 else DELETED
        # try signatures with the identical last sharding object first: comparing equal but distinct objects is slow
        likely = sorted(self._known, key=lambda known: known.shardings[-1] is not shardings[-1])
        match = next((known for known in likely if known == signature), None)
        if match is None or any(map(deleted, ours)):
            check_like_connected(self._plan, arrays)
        if match is None or match.shardings[-1] is not shardings[-1]:
            match = signature
            self._known = [signature, *self._known[: KEPT - 1]]
        return Shards(arrays, match.whole)


def _several(arrays: Mapping[str, Any], paths: Sequence[str]) -> Sequence[Any]:
    return itemgetter(*paths)(arrays) if len(paths) > 1 else [arrays[path] for path in paths]
