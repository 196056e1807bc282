"""What senders by ipc are made of: lanes (a device to a rank), ports (a rank), jobs (one target), checks of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jvlab._errors import Unsupported
from jvlab.layout._plan_types import ValueTransform, item_bytes
from jvlab.transport._ipc_kernels import Launcher
from jvlab.transport._ipc_memory import Mapped
from jvlab.transport._ipc_tables import IpcBox, tables

LARGE, FEW, AHEAD = 64 << 20, 24, 0.35  # bytes of a lane that is launched in parts; leaves and share of the first
Held = list[tuple[Sequence[str], Sequence[Any]]]  # leaves and their shards on one device


class Announcement:
    """What stands where other transports have a sender: there is nothing to open on this side."""

    name = "ipc"

    def endpoint(self) -> dict[str, Any]:
        return {"transport": "ipc"}

    def flush(self, deadline: float) -> None:
        """`IpcSenders.send` has waited already."""

    def close(self) -> None:
        """Nothing is held here."""


@dataclass(eq=False)
class Lane:
    """One device → rank: boxes, and the launchers made of them."""

    device: int  # of the plan
    ordinal: int  # of CUDA in this process
    leaves: list[str]  # in the order of the source pointers
    numbers: list[int]  # targets, in the order of the target pointers and digests
    pieces: list[IpcBox] = field(repr=False)
    nbytes: int
    _launchers: dict[tuple[LanePart, bool, bool, int | None], Launcher] = field(default_factory=dict, repr=False)

    @cached_property
    def whole(self) -> LanePart:
        """All leaves at once."""
        return LanePart(self, tuple(range(len(self.leaves))))

    @cached_property
    def parts(self) -> list[LanePart]:
        """What is launched one after the other: a few large leaves, then all others, which are looked up meanwhile."""
        sizes = [0] * len(self.leaves)
        for piece in self.pieces:
            sizes[piece.source] += piece.count * item_bytes(piece.transform.wire)
        if self.nbytes < LARGE or len(self.leaves) < 2 * FEW:
            return [self.whole]
        largest = sorted(range(len(sizes)), key=lambda k: -sizes[k])[:FEW]
        count = next((n for n in range(1, FEW) if sum(sizes[k] for k in largest[:n]) > AHEAD * self.nbytes), FEW)
        first = tuple(sorted(largest[:count]))
        return [LanePart(self, first), LanePart(self, tuple(k for k in range(len(sizes)) if k not in set(first)))]

    def launcher(
        self, aligned: bool, write: bool = True, target: int | None = None, part: LanePart | None = None
    ) -> Launcher:
        """Made once: for pointers on 16-byte boundaries, or for any; of all targets, or of one; of a part, or all."""
        part = part or self.whole
        key = (part, aligned, write, target)
        if key not in self._launchers:
            of, sources = self.boxes(target), set(part.at)
            made = tables([piece for piece in of if piece.source in sources], aligned)
            self._launchers[key] = Launcher(self.ordinal, made, len(self.numbers), write=write)
        return self._launchers[key]

    def feeding(self, slot: int) -> set[tuple[str, ValueTransform]]:
        """The leaves that end up in a target, and what happens to their values on the way."""
        return {(self.leaves[piece.source], piece.transform) for piece in self.pieces if piece.slot == slot}

    def boxes(self, target: int | None) -> list[IpcBox]:
        """Those of one target, or all."""
        return [p for p in self.pieces if target is None or self.numbers[p.slot] == target]


@dataclass(frozen=True, eq=False)
class LanePart:
    """Some of a lane's leaves."""

    lane: Lane
    at: tuple[int, ...]  # their places in the lane's

    @cached_property
    def leaves(self) -> list[str]:
        return [self.lane.leaves[k] for k in self.at]

    def table(self, pointers: Sequence[int]) -> np.ndarray:
        """The lane's table of pointers, with those of this part."""
        if len(self.at) == len(self.lane.leaves):
            return np.array(pointers, np.uint64)
        out = np.zeros(len(self.lane.leaves), np.uint64)
        out[list(self.at)] = pointers
        return out


@dataclass(frozen=True, eq=False)
class IpcJob:
    """One target from one device, for going step by step; `pack` and `bucket` as buckets have them."""

    lane: Lane
    target: int
    bucket: int = 0

    @property
    def pack(self) -> IpcJob:
        return self

    def targets(self, bucket: int) -> set[int]:
        """The plan's targets that it holds parts of."""
        return {self.target}

    @property
    def nbytes(self) -> int:
        return sum(p.count * item_bytes(p.transform.wire) for p in self.lane.boxes(self.target))


@dataclass(frozen=True, eq=False)
class Destination:
    """A rank's memory as one of our devices sees it."""

    mapped: Mapped
    targets: Any  # device array of pointers
    aligned: bool
    permit: int
    token: int


@dataclass(frozen=True, eq=False)
class Launch:
    """Part of a lane into one rank, ready to go."""

    port: Port
    lane: Lane
    launcher: Launcher
    into: Destination
    sources: Any  # device array of pointers
    digest: bool


@dataclass(eq=False)
class Port:
    """One rank of one replica."""

    replica: str
    rank: int
    lanes: list[Lane]
    sender: Announcement = field(default_factory=Announcement)
    into: dict[tuple[bool, int], Destination] = field(default_factory=dict, repr=False)  # (staged, ordinal)

    @property
    def nbytes(self) -> int:
        return sum(lane.nbytes for lane in self.lanes)

    @cached_property
    def targets(self) -> list[int]:
        """The rank's targets, in order."""
        return sorted({t for lane in self.lanes for t in lane.numbers})

    @property
    def jobs(self) -> list[IpcJob]:
        """Target by target over all devices."""
        return sorted((IpcJob(lane, t) for lane in self.lanes for t in lane.numbers), key=lambda job: job.target)


def cuda_ordinal(device: int) -> int:
    """Which CUDA device of this process a JAX device is."""
    import jax

    for found in jax.local_devices():
        if found.id == device:
            if found.platform not in ("gpu", "cuda"):
                raise Unsupported(
                    f"device {device} is {found.platform}: ipc writes from a GPU",
                    remedy='put the parameters on a GPU, or connect with transport="shm"',
                )
            return int(getattr(found, "local_hardware_id", 0) or 0)
    raise Unsupported(
        f"device {device} of the plan is not one of this process's",
        remedy="each trainer process sends what it holds: pass process=jax.process_index()",
    )


def check_layouts(held: Held) -> None:
    """The kernels take elements in the order of indices; JAX can be made to keep an array in another order."""
    for path, array in ((path, array) for paths, arrays in held for path, array in zip(paths, arrays, strict=True)):
        layout = getattr(getattr(array, "format", None), "layout", None)
        order = getattr(layout, "major_to_minor", None)
        if order is not None and tuple(order) != tuple(range(array.ndim)):
            raise Unsupported(
                f"{path}: its elements lie in the order of axes {tuple(order)} on the device",
                remedy="give the leaf JAX's default layout: jax.device_put(x, x.sharding)",
                path=path,
            )
