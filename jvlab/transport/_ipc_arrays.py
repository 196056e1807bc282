"""A sync's arrays, checked in microseconds: what was found to fit the plan once is only compared with itself.

`jvlab.trainer._pack.Source` looks at every cell of every sharding anew, which takes longer than the whole copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jvlab.layout._plan import TransferPlan
from jvlab.trainer._pack import check_like_connected


class Shards:
    """One version of the parameters, with the face of `Source` that an outlet needs."""

    def __init__(self, arrays: Mapping[str, Any], alone: Mapping[str, bool]) -> None:
        self._arrays, self._alone = arrays, alone
        self._pieces: dict[str, dict[int, Any]] = {}

    def shard(self, path: str, device: int) -> Any:
        """The shard as an array on its one device."""
        array = self._arrays[path]
        if self._alone[path]:
            return array
        if path not in self._pieces:
            self._pieces[path] = {piece.device.id: piece.data for piece in array.addressable_shards}
        return self._pieces[path][device]

    def memory(self, path: str, device: int) -> None:
        """No host memory: these are on a GPU."""

    @property
    def arrays(self) -> list[Any]:
        return list(self._arrays.values())


class KnownArrays:
    """Remembers how each leaf was sharded when it was last found to fit."""

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._known: dict[str, tuple[type, Any, Any]] = {}
        self._alone: dict[str, bool] = {}

    def source(self, arrays: Mapping[str, Any]) -> Shards:
        """The arrays, if their paths, shapes, dtypes and shardings are those the plan was compiled for."""
        if not self._same(arrays):
            check_like_connected(self._plan, arrays)
            for info in self._plan.leaves:
                array = arrays[info.path]
                self._known[info.path] = (type(array), array.aval, array.sharding)
                self._alone[info.path] = len(array.sharding.device_set) == 1
        return Shards(arrays, self._alone)

    def _same(self, arrays: Mapping[str, Any]) -> bool:
        if not self._known:
            return False
        for path, (kind, aval, sharding) in self._known.items():
            array: Any = arrays.get(path)
            if type(array) is not kind or array.is_deleted():
                return False
            now, there = array.aval, array.sharding  # what one program makes shares these objects from step to step
            if now is not aval and (now.shape != aval.shape or now.dtype != aval.dtype):
                return False
            if there is not sharding and there != sharding:
                return False
        return True
