"""The frozen transfer plan: which box of which device's shard goes where, as numpy tables. numpy only.

Geometry is stored once per class (equal sharding, equal rule axes, equal region), with its boxes; every leaf and
parameter that shares it is a member. `link()` expands one device → rank link to concrete boxes; a 671B plan is small.

    box of a member:  source = box.src + Σ member.start·(shard's own strides)   target = member.dst + box.dst
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from jvlab import _faces
from jvlab._errors import ConfigError
from jvlab.layout._boxes import contiguous
from jvlab.layout._plan_bytes import plan_from_bytes, plan_to_bytes
from jvlab.layout._plan_link import expand_link
from jvlab.layout._plan_types import LeafInfo, LinkPlan, Quantised, Sharding, TargetInfo, ValueTransform, item_bytes

if TYPE_CHECKING:
    from jvlab.layout._bucket_timeline import Slot
    from jvlab.sync._sync_report import SyncReport
    from jvlab.views.panels._plan_panel import PlanPanel


@dataclass(frozen=True, eq=False)
class LinkTable:
    """One row per (replica, device, rank) that transfers anything, of one replica or of all."""

    device: np.ndarray
    process: np.ndarray
    rank: np.ndarray
    nbytes: np.ndarray
    copies: np.ndarray
    contiguous_bytes: np.ndarray
    replica: np.ndarray

    def __len__(self) -> int:
        return len(self.device)


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """Everything needed to move one version of the weights; equal plans have equal `digest`s.

    >>> plan = jv.plan(policy.params, model, tensor_parallel=2)
    >>> plan.ranks, plan.total_bytes > 0, plan.predict(link_gbps=10.0) > 0
    (2, True, True)
    """

    leaves: tuple[LeafInfo, ...] = field(repr=False)
    shardings: tuple[Sharding, ...] = field(repr=False)
    parameters: tuple[TargetInfo, ...] = field(repr=False)
    transforms: tuple[ValueTransform, ...] = field(repr=False)
    target_rank: np.ndarray = field(repr=False)  # int32 [T]
    target_parameter: np.ndarray = field(repr=False)  # int32 [T]
    target_kind: np.ndarray = field(repr=False)  # int8 [T]
    target_padding: np.ndarray = field(repr=False)  # int64 [T], elements that nothing fills
    class_sharding: np.ndarray = field(repr=False)  # int32 [C]
    class_transform: np.ndarray = field(repr=False)  # int32 [C]
    class_start: np.ndarray = field(repr=False)  # int64 [C, ND], leaf index of the piece, 0 along whole dimensions
    axis_size: np.ndarray = field(repr=False)  # int64 [C, K]
    axis_leaf_dim: np.ndarray = field(repr=False)  # int8 [C, K], -1 where a leaf element is repeated
    axis_leaf_step: np.ndarray = field(repr=False)  # int64 [C, K]
    axis_dst_stride: np.ndarray = field(repr=False)  # int64 [C, K]
    member_ptr: np.ndarray = field(repr=False)  # int64 [C + 1]
    member_leaf: np.ndarray = field(repr=False)  # int32 [M]
    member_target: np.ndarray = field(repr=False)  # int32 [M]
    member_start: np.ndarray = field(repr=False)  # int64 [M, ND], leaf index along whole dimensions
    member_dst: np.ndarray = field(repr=False)  # int64 [M]
    box_ptr: np.ndarray = field(repr=False)  # int64 [C + 1]
    box_cell: np.ndarray = field(repr=False)  # int32 [B], cell of the class's sharding
    box_turn: np.ndarray = field(repr=False)  # int32 [B], which owner of the cell serves the first member
    box_shape: np.ndarray = field(repr=False)  # int64 [B, K]
    box_src: np.ndarray = field(repr=False)  # int64 [B]
    box_src_strides: np.ndarray = field(repr=False)  # int64 [B, K]
    box_dst: np.ndarray = field(repr=False)  # int64 [B]
    box_dst_strides: np.ndarray = field(repr=False)  # int64 [B, K]
    devices: np.ndarray = field(repr=False)  # int32 [D], global ids
    processes: np.ndarray = field(repr=False)  # int32 [D], trainer process of each
    ranks: int = 1
    replicas: int = 1
    bucket_bytes: int = 64 << 20
    link_gbps: float = 50.0  # GB/s each way per device and rank, for predictions; 50 is a 400 Gb/s port
    ignored: tuple[str, ...] = ()  # checkpoint tensors that no rank takes anything from
    title: str = ""
    quantised: tuple[Quantised, ...] = field(default=(), repr=False)  # leaves that are sent as fp8

    def __post_init__(self) -> None:
        for part in (self, *self.shardings):
            for f in fields(part):
                if isinstance(getattr(part, f.name), np.ndarray):
                    getattr(part, f.name).setflags(write=False)  # arrays are frozen too

    # ---- identity -------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """A JSON header and the raw arrays; no pickle."""
        return plan_to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> TransferPlan:
        """The plan that `to_bytes` wrote."""
        return plan_from_bytes(data, cls)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, in hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TransferPlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    # ---- sizes ----------------------------------------------------------------------------------------------

    @cached_property
    def box_class(self) -> np.ndarray:
        """The class of each box, [B]."""
        return np.repeat(np.arange(len(self.class_transform)), np.diff(self.box_ptr))

    @cached_property
    def member_class(self) -> np.ndarray:
        """The class of each member, [M]."""
        return np.repeat(np.arange(len(self.class_transform)), np.diff(self.member_ptr))

    @cached_property
    def box_bytes(self) -> np.ndarray:
        """Bytes of each box on the wire, [B]."""
        wire = np.array([item_bytes(x.wire) for x in self.transforms], np.int64)
        return self.box_shape.prod(axis=1) * wire[self.class_transform[self.box_class]]

    @cached_property
    def box_contiguous(self) -> np.ndarray:
        """Is the box one contiguous run on both sides? bool [B]."""
        same = (self.box_src_strides == self.box_dst_strides) | (self.box_shape == 1)
        return contiguous(self.box_shape, self.box_src_strides) & same.all(axis=1)

    @property
    def total_bytes(self) -> int:
        """Bytes sent to all ranks of all replicas."""
        return int(self.links().nbytes.sum()) * self.replicas

    @property
    def copies(self) -> int:
        """Boxes sent to all ranks of one replica."""
        return int((np.diff(self.member_ptr) * np.diff(self.box_ptr)).sum())

    @cached_property
    def _device_slot(self) -> dict[int, int]:
        return {int(d): i for i, d in enumerate(self.devices)}

    def process_of(self, device: int) -> int:
        """The trainer process that holds a device."""
        if device not in self._device_slot:
            raise ConfigError(f"no device {device} in this plan", remedy=f"devices: {self.devices[:8].tolist()} …")
        return int(self.processes[self._device_slot[device]])

    # ---- links ----------------------------------------------------------------------------------------------

    def owners_of(self, box: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start in the sharding's owner list, and number of owners, of boxes of one class."""
        sharding = self.shardings[self.class_sharding[self.box_class[box[0]]]] if len(box) else None
        if sharding is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        cell = self.box_cell[box]
        return sharding.owner_ptr[cell], np.diff(sharding.owner_ptr)[cell]

    def links(self, replica: int = 0) -> LinkTable:
        """Bytes, copies and contiguous bytes of every link of one replica, without expanding any."""
        if replica not in self._link_tables:
            self._link_tables[replica] = self._count_links(replica)
        return self._link_tables[replica]

    @cached_property
    def all_links(self) -> LinkTable:
        """The links of all replicas, concatenated. Copies of a leaf are used in turn, so replicas may differ."""
        tables = [self.links(r) for r in range(self.replicas)]
        return LinkTable(**{f.name: np.concatenate([getattr(t, f.name) for t in tables]) for f in fields(LinkTable)})

    @cached_property
    def _link_tables(self) -> dict[int, LinkTable]:
        return {}

    def _count_links(self, replica: int) -> LinkTable:
        slots = len(self.devices)
        table = np.zeros((3, slots, self.ranks), np.int64)
        slot_of = np.full(int(self.devices.max(initial=-1)) + 1, -1, np.int64)
        slot_of[self.devices] = np.arange(slots)
        ranks = self.target_rank[self.member_target]
        for c in range(len(self.class_transform)):
            boxes = np.arange(self.box_ptr[c], self.box_ptr[c + 1])
            mine = ranks[self.member_ptr[c] : self.member_ptr[c + 1]]
            if not len(boxes) or not len(mine):
                continue
            base, count = self.owners_of(boxes)
            owners = self.shardings[self.class_sharding[c]].owners
            for width in np.unique(count).tolist():
                b = boxes[count == width]
                turns = np.zeros((width, self.ranks), np.int64)  # members of each rank by their position in the round
                np.add.at(turns, (np.arange(len(mine)) % width, mine), 1)
                for place in range(width):
                    owner = (place + self.box_turn[b] + replica * len(mine)) % width
                    slot = slot_of[owners[base[count == width] + owner]]
                    for k, weight in enumerate(
                        (self.box_bytes[b], np.ones(len(b), np.int64), self.box_bytes[b] * self.box_contiguous[b])
                    ):
                        per_slot = np.bincount(slot, weights=weight, minlength=slots).astype(np.int64)
                        table[k] += per_slot[:, None] * turns[place]
        device, rank = np.nonzero(table[1])
        return LinkTable(
            self.devices[device],
            self.processes[device],
            rank.astype(np.int32),
            *(t[device, rank] for t in table),
            replica=np.full(len(device), replica, np.int32),
        )

    def link(self, device: int, rank: int, replica: int = 0) -> LinkPlan:
        """The concrete boxes that one device sends to one rank of one replica, packed into buckets."""
        return expand_link(self, device, rank, replica)

    # ---- display --------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return _faces.text(self)

    def _repr_html_(self) -> str:
        return _faces.html(self)

    def plot(self) -> object:
        """A matplotlib Figure: bytes per link as a heat map."""
        return _faces.figure(self)

    def _ipython_display_(self) -> None:
        self.panel()

    def panel(self) -> PlanPanel | None:
        """The plan in a notebook: bytes per link, bucket timeline, predicted against measured seconds."""
        return _faces.panel(self)

    def schedule(self, link_gbps: float | None = None) -> list[Slot]:
        """When each bucket would be sent, if devices send and ranks receive one at a time at `link_gbps` GB/s."""
        from jvlab.layout._bucket_timeline import schedule

        return schedule(self, link_gbps)

    @property
    def reports(self) -> tuple[SyncReport, ...]:
        """The last few syncs of this process with this plan, oldest first: measured and predicted seconds."""
        return tuple(self._reports)

    @cached_property
    def _reports(self) -> deque[SyncReport]:
        return deque(maxlen=8)

    @cached_property
    def _connected(self) -> set[str]:
        """Paths of the connected tree that are not in `leaves`: tied tensors, of which only one is sent."""
        return set()

    def predict(self, link_gbps: float | None = None) -> float:
        """Seconds to move one version if each device sends and each rank receives `link_gbps` GB/s, all in parallel.

        Bandwidth only: no latency, no pack or scatter time. Default: the plan's own `link_gbps`.
        """
        table = self.all_links
        if not len(table):
            return 0.0
        out = np.bincount(table.device, weights=table.nbytes).max()  # a source feeds every replica
        into = np.bincount(table.replica * self.ranks + table.rank, weights=table.nbytes).max()
        return float(max(out, into) / ((link_gbps or self.link_gbps) * 1e9))
