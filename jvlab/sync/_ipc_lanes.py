"""The parts of `IpcSenders`: lanes (device → rank), ports (one rank), jobs (one target), array layout checks."""

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

# Lanes of at least SPLIT_BYTES are launched in two parts; the first has at most FIRST_LEAVES leaves and about
# FIRST_SHARE of the bytes.
SPLIT_BYTES = 64 << 20
FIRST_LEAVES = 24
FIRST_SHARE = 0.35
# leaf paths and their shards on one device, kept alive
Held = list[tuple[Sequence[str], Sequence[Any]]]


class Announcement:
    """Stands in for the sender of other transports: ipc has nothing to open on this side."""

    name = "ipc"

    def endpoint(self) -> dict[str, Any]:
        return {"transport": "ipc"}

    def flush(self, deadline: float) -> None:
        """Nothing to do: `IpcSenders.send` has waited already."""

    def close(self) -> None:
        """Nothing to release."""


@dataclass(eq=False)
class Lane:
    """One device → rank: its boxes, and the launchers made from them."""

    device: int  # in the plan
    ordinal: int  # CUDA ordinal in this process
    leaves: list[str]  # in source pointer order
    numbers: list[int]  # targets, in target pointer and digest order
    pieces: list[IpcBox] = field(repr=False)
    nbytes: int
    _launchers: dict[tuple[LanePart, bool, bool, int | None], Launcher] = field(
        default_factory=dict, repr=False
    )

    @cached_property
    def whole(self) -> LanePart:
        """All leaves at once."""
        return LanePart(self, tuple(range(len(self.leaves))))

    @cached_property
    def parts(self) -> list[LanePart]:
        """Parts launched in order: a few large leaves first; the others are looked up while those are copied."""
        sizes = [0] * len(self.leaves)
        for piece in self.pieces:
            sizes[piece.source] += piece.count * item_bytes(piece.transform.wire)
        if self.nbytes < SPLIT_BYTES or len(self.leaves) < 2 * FIRST_LEAVES:
            return [self.whole]
        largest = sorted(range(len(sizes)), key=lambda k: -sizes[k])[:FIRST_LEAVES]
        enough = (
            n
            for n in range(1, FIRST_LEAVES)
            if sum(sizes[k] for k in largest[:n]) > FIRST_SHARE * self.nbytes
        )
        first = tuple(sorted(largest[: next(enough, FIRST_LEAVES)]))
        return [
            LanePart(self, first),
            LanePart(self, tuple(k for k in range(len(sizes)) if k not in set(first))),
        ]

    def launcher(
        self,
        aligned: bool,
        write: bool = True,
        target: int | None = None,
        part: LanePart | None = None,
    ) -> Launcher:
        """The cached launcher for 16-byte aligned pointers or any, for one target or all, for a part or the lane."""
        part = part or self.whole
        key = (part, aligned, write, target)
        if key not in self._launchers:
            of = self.boxes(target)
            sources = set(part.at)
            made = tables([piece for piece in of if piece.source in sources], aligned)
            self._launchers[key] = Launcher(
                self.ordinal, made, len(self.numbers), write=write
            )
        return self._launchers[key]

    def feeding(self, slot: int) -> set[tuple[str, ValueTransform]]:
        """The leaves written to a target, with their value transforms."""
        return {
            (self.leaves[piece.source], piece.transform)
            for piece in self.pieces
            if piece.slot == slot
        }

    def boxes(self, target: int | None) -> list[IpcBox]:
        """The boxes of one target, or all."""
        return [
            p for p in self.pieces if target is None or self.numbers[p.slot] == target
        ]


@dataclass(frozen=True, eq=False)
class LanePart:
    """Some of a lane's leaves."""

    lane: Lane
    at: tuple[int, ...]  # indices into the lane's leaves

    @cached_property
    def leaves(self) -> list[str]:
        return [self.lane.leaves[k] for k in self.at]

    def table(self, pointers: Sequence[int]) -> np.ndarray:
        """The lane's pointer table, filled in for this part only."""
        if len(self.at) == len(self.lane.leaves):
            return np.array(pointers, np.uint64)
        out = np.zeros(len(self.lane.leaves), np.uint64)
        out[list(self.at)] = pointers
        return out


@dataclass(frozen=True, eq=False)
class IpcJob:
    """One target from one device, for the stepper; `pack` and `bucket` mirror `Job`."""

    lane: Lane
    target: int
    bucket: int = 0

    @property
    def pack(self) -> IpcJob:
        return self

    def targets(self, bucket: int) -> set[int]:
        """The plan's targets in this job."""
        return {self.target}

    @property
    def nbytes(self) -> int:
        return sum(
            p.count * item_bytes(p.transform.wire) for p in self.lane.boxes(self.target)
        )


@dataclass(frozen=True, eq=False)
class Destination:
    """A rank's memory, mapped on one local device."""

    mapped: Mapped
    targets: Any  # device array of pointers
    aligned: bool
    permit: int
    token: int


@dataclass(frozen=True, eq=False)
class Launch:
    """One prepared kernel launch: part of a lane into one rank."""

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
    # (staged, ordinal)
    into: dict[tuple[bool, int], Destination] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        return sum(lane.nbytes for lane in self.lanes)

    @cached_property
    def targets(self) -> list[int]:
        """The rank's targets, sorted."""
        return sorted({t for lane in self.lanes for t in lane.numbers})

    @property
    def jobs(self) -> list[IpcJob]:
        """The jobs of all lanes, ordered by target."""
        return sorted(
            (IpcJob(lane, t) for lane in self.lanes for t in lane.numbers),
            key=lambda job: job.target,
        )


def cuda_ordinal(device: int) -> int:
    """The CUDA ordinal of a JAX device in this process."""
    import jax

    for found in jax.local_devices():
        if found.id == device:
            if found.platform not in ("gpu", "cuda"):
                raise Unsupported(
                    f"device {device} is a {found.platform} device: ipc sends from a GPU",
                    remedy='put the parameters on a GPU, or connect with transport="shm"',
                )
            return int(getattr(found, "local_hardware_id", 0) or 0)
    raise Unsupported(
        f"device {device} of the plan does not belong to this process",
        remedy="each trainer process sends its own shards: pass process=jax.process_index()",
    )


def check_layouts(held: Held) -> None:
    """Raise unless every array has JAX's default (row-major) layout, which the kernels assume."""
    for path, array in (
        (path, array)
        for paths, arrays in held
        for path, array in zip(paths, arrays, strict=True)
    ):
        layout = getattr(getattr(array, "format", None), "layout", None)
        order = getattr(layout, "major_to_minor", None)
        if order is not None and tuple(order) != tuple(range(array.ndim)):
            raise Unsupported(
                f"{path} has the device layout major_to_minor={tuple(order)}; ipc needs the default",
                remedy="give the leaf JAX's default layout: jax.device_put(x, x.sharding)",
                path=path,
            )
