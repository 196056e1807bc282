"""The frozen transfer plan: which box of which device's shard goes where, as numpy tables. numpy only.

Geometry is stored once per class (equal sharding, equal rule axes, equal region), with its boxes; every leaf and
parameter that shares it is a member. `link()` expands one device → rank link to concrete boxes; a 671B plan is small.

    box of a member:  source = box.src + Σ member.start·(shard's own strides)   target = member.dst + box.dst
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab import _faces
from jvlab._errors import ConfigError
from jvlab._files import parse_object
from jvlab.layout._boxes import contiguous
from jvlab.layout._plan_types import (
    ALIGN,
    LeafInfo,
    LinkPlan,
    Quantised,
    Sharding,
    TargetInfo,
    ValueTransform,
    item_bytes,
)
from jvlab.layout._types import from_row, to_row

if TYPE_CHECKING:
    from jvlab.sync._transaction import SyncReport
    from jvlab.views._plan_view import PlanPanel


# A transfer plan as bytes and back: a JSON header, then the raw little-endian arrays; no pickle. numpy only.

MAGIC = b"jvplan1\n"
SCALARS = ("ranks", "replicas", "bucket_bytes", "link_gbps", "ignored", "title")
DTYPES = {
    "|b1",
    "|i1",
    "|u1",
    *(f"<{kind}{size}" for kind in "iu" for size in (2, 4, 8)),
    "<f4",
    "<f8",
}
ROWS = {
    "leaves": LeafInfo,
    "parameters": TargetInfo,
    "transforms": ValueTransform,
    "quantised": Quantised,
}
CELLS = ("starts", "stops", "owner_ptr", "owners")


def plan_to_bytes(plan: TransferPlan) -> bytes:
    """The plan as bytes; equal plans give equal bytes."""
    arrays = _arrays(plan)
    header = {
        **{name: [to_row(x) for x in getattr(plan, name)] for name in ROWS},
        "shardings": [x.shape for x in plan.shardings],
        "scalars": {k: getattr(plan, k) for k in SCALARS},
        "arrays": [[k, a.dtype.str, a.shape] for k, a in arrays.items()],
    }
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    return b"".join(
        [
            MAGIC,
            len(text).to_bytes(8, "little"),
            text,
            *(a.tobytes() for a in arrays.values()),
        ]
    )


def _arrays(plan: TransferPlan) -> dict[str, np.ndarray]:
    found = {f.name: getattr(plan, f.name) for f in fields(plan)}
    arrays = {k: a for k, a in found.items() if isinstance(a, np.ndarray)}
    for i, s in enumerate(plan.shardings):
        arrays |= {f"sharding.{i}.{k}": getattr(s, k) for k in CELLS}
    return {
        k: a.astype(a.dtype.newbyteorder("<"), copy=False) for k, a in arrays.items()
    }


def plan_from_bytes(data: bytes | memoryview) -> TransferPlan:
    """What `plan_to_bytes` wrote; refuses anything else."""
    view = memoryview(data)
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise ConfigError(
            "these bytes hold no transfer plan",
            remedy="pass what TransferPlan.to_bytes() returned",
        )
    at = len(MAGIC) + 8
    size = int.from_bytes(view[len(MAGIC) : at], "little")
    try:
        header = parse_object(bytes(view[at : at + min(size, len(view))]))
        arrays = _read_arrays(header["arrays"], view, at + size)
        return TransferPlan(**_fields(header, arrays))
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as e:
        raise ConfigError(
            f"the plan's header is cut off or altered: {str(e)[:200]}",
            remedy="send the bytes whole",
        ) from e


def _read_arrays(
    entries: list[Any], view: memoryview, at: int
) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for name, dtype, shape in entries:
        if (
            dtype not in DTYPES
            or any(type(n) is not int or n < 0 for n in shape)
            or len(shape) > 8
        ):
            raise ValueError(
                f"{str(name)[:40]!r} is {str(dtype)[:20]!r} of shape {str(shape)[:60]}"
            )
        end = at + math.prod(shape) * np.dtype(dtype).itemsize
        if end > len(view):
            raise ConfigError(
                f"the plan is cut off inside {str(name)[:40]!r}",
                remedy="send the bytes whole",
                array=name,
            )
        arrays[name] = np.frombuffer(view[at:end], np.dtype(dtype)).reshape(shape)
        at = end
    if at != len(view):
        raise ValueError(f"{len(view) - at} bytes after its last array")
    return arrays


def _fields(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    shardings = tuple(
        Sharding(tuple(shape), *(arrays.pop(f"sharding.{i}.{k}") for k in CELLS))
        for i, shape in enumerate(header["shardings"])
    )
    scalars = header["scalars"] | {"ignored": tuple(header["scalars"]["ignored"])}
    rows = {
        name: tuple(from_row(kind, row) for row in header[name])
        for name, kind in ROWS.items()
    }
    return {**arrays, **scalars, **rows, "shardings": shardings}


# When each bucket of a plan would be sent, if devices send and ranks receive one bucket at a time. numpy only.

# up to this many copies the real bucket sizes are used; beyond it, full buckets
EXACT_COPIES = 20_000
MAX_SLOTS = 20_000


@dataclass(frozen=True)
class Slot:
    """The transfer of one bucket from a device to a rank, at the plan's bandwidth."""

    device: int
    replica: int
    rank: int
    start: float
    seconds: float
    nbytes: int


def schedule(plan: TransferPlan, link_gbps: float | None = None) -> list[Slot]:
    """Every bucket in the order it would be sent; with more than MAX_SLOTS buckets, one entry per link."""
    speed = (link_gbps or plan.link_gbps) * 1e9
    device_free: dict[int, float] = {}
    rank_free: dict[tuple[int, int], float] = {}
    waiting = [
        (0.0, order, device, target, sizes)
        for order, ((device, target), sizes) in enumerate(_buckets(plan).items())
    ]
    heapq.heapify(waiting)
    out: list[Slot] = []
    while waiting:
        at, order, device, target, sizes = heapq.heappop(waiting)
        begin = max(device_free.get(device, 0.0), rank_free.get(target, 0.0))
        if begin > at:  # an end is busy: try again when both are free
            heapq.heappush(waiting, (begin, order, device, target, sizes))
            continue
        seconds = sizes[0] / speed
        out.append(Slot(device, *target, begin, seconds, sizes[0]))
        device_free[device] = rank_free[target] = begin + seconds
        if len(sizes) > 1:
            heapq.heappush(waiting, (begin + seconds, order, device, target, sizes[1:]))
    return out


def _buckets(plan: TransferPlan) -> dict[tuple[int, tuple[int, int]], list[int]]:
    """(device, (replica, rank)) → bytes of each of its buckets."""
    table = plan.all_links
    exact = plan.copies * plan.replicas <= EXACT_COPIES
    many = int((-(-table.nbytes // plan.bucket_bytes)).sum()) > MAX_SLOTS
    out: dict[tuple[int, tuple[int, int]], list[int]] = {}
    # ranks in turn, each device starting at a different one, so that not all send to rank 0 first
    rows = sorted(
        range(len(table)),
        key=lambda i: ((table.rank[i] - table.device[i]) % plan.ranks, table.device[i]),
    )
    for i in rows:
        device, replica, rank, size = (
            int(x[i]) for x in (table.device, table.replica, table.rank, table.nbytes)
        )
        sizes = [size]
        if exact:
            sizes = plan.link(device, rank, replica).bucket_sizes.tolist()
        elif not many:
            most = plan.bucket_bytes
            sizes = [min(most, size - at) for at in range(0, size, most)]
        out[device, (replica, rank)] = sizes
    return out


# One link of a plan, expanded: concrete boxes in packing order, cut and grouped into buckets. numpy only.


def expand_link(
    plan: TransferPlan,
    device: int,
    rank: int,
    replica: int,
    classes: Iterable[int] | None = None,
) -> LinkPlan:
    """The boxes that `device` sends to `rank` of `replica`, by target and position; of all classes, or of some."""
    if not (0 <= rank < plan.ranks and 0 <= replica < plan.replicas):
        raise ConfigError(
            f"no rank {rank} of replica {replica}: the plan has {plan.ranks} ranks × {plan.replicas} replicas",
            remedy="both count from 0",
        )
    process = plan.process_of(device)
    picked = [
        _class_boxes(plan, c, device, rank, replica)
        for c in (range(len(plan.class_transform)) if classes is None else classes)
    ]
    member = np.concatenate([m for m, _, _ in picked] or [np.zeros(0, np.int64)])
    box = np.concatenate([b for _, b, _ in picked] or [np.zeros(0, np.int64)])
    shift = np.concatenate([s for _, _, s in picked] or [np.zeros(0, np.int64)])
    wire = np.array([item_bytes(x.wire) for x in plan.transforms], np.int64)
    table = {
        "leaf": plan.member_leaf[member],
        "target": plan.member_target[member],
        "transform": plan.class_transform[plan.member_class[member]]
        if len(member)
        else np.zeros(0, np.int32),
        "shape": plan.box_shape[box],
        "src_offset": plan.box_src[box] + shift,
        "src_strides": plan.box_src_strides[box],
        "leaf_dim": plan.axis_leaf_dim[plan.box_class[box]],
        "dst_offset": plan.box_dst[box] + plan.member_dst[member],
        "dst_strides": plan.box_dst_strides[box],
    }
    order = np.lexsort((table["dst_offset"], table["target"]))
    table = {k: v[order] for k, v in table.items()}
    table = _cut(table, wire, plan.bucket_bytes)
    nbytes = table["shape"].prod(axis=1) * wire[table["transform"]]
    bucket, place, sizes = _fill(nbytes, plan.bucket_bytes)
    return LinkPlan(
        device,
        process,
        rank,
        replica,
        **table,
        nbytes=nbytes,
        bucket=bucket,
        bucket_offset=place,
        bucket_sizes=sizes,
    )


def _class_boxes(
    plan: TransferPlan, c: int, device: int, rank: int, replica: int
) -> tuple[np.ndarray, ...]:
    """(member, box, source shift) of one class on one link."""
    none = np.zeros(0, np.int64)
    sharding = plan.shardings[plan.class_sharding[c]]
    cell = sharding.cell_of(device)
    lo = int(plan.member_ptr[c])
    hi = int(plan.member_ptr[c + 1])
    if cell < 0 or lo == hi:
        return none, none, none
    boxes = int(plan.box_ptr[c]) + np.flatnonzero(
        plan.box_cell[plan.box_ptr[c] : plan.box_ptr[c + 1]] == cell
    )
    turn = np.flatnonzero(plan.target_rank[plan.member_target[lo:hi]] == rank)
    if not len(boxes) or not len(turn):
        return none, none, none
    first = sharding.owner_ptr[cell]
    last = sharding.owner_ptr[cell + 1]
    place = int(np.flatnonzero(sharding.owners[first:last] == device)[0])
    chosen = (turn[:, None] + plan.box_turn[boxes][None, :] + replica * (hi - lo)) % (
        last - first
    ) == place
    m, b = np.nonzero(chosen)
    member = lo + turn[m]
    strides = sharding.local_strides[cell]
    shift = plan.member_start[member][:, : len(strides)] @ strides
    return member, boxes[b], shift


def _cut(
    table: dict[str, np.ndarray], wire: np.ndarray, limit: int
) -> dict[str, np.ndarray]:
    """Boxes larger than a bucket, halved along their outermost long axis until they fit."""
    while True:
        nbytes = table["shape"].prod(axis=1) * wire[table["transform"]]
        big = np.flatnonzero(nbytes > limit)
        if not len(big):
            return table
        axis = np.argmax(table["shape"][big] > 1, axis=1)
        size = table["shape"][big, axis]
        if (size == 1).any():
            raise ConfigError(
                f"a bucket of {limit} bytes holds no element", remedy="raise bucket_mib"
            )
        first = {k: v.copy() for k, v in table.items()}
        half = -(-size // 2)
        first["shape"][big, axis] = half
        second = {k: v[big].copy() for k, v in table.items()}
        row = np.arange(len(big))
        second["shape"][row, axis] = size - half
        second["src_offset"] += half * second["src_strides"][row, axis]
        second["dst_offset"] += half * second["dst_strides"][row, axis]
        joined = {k: np.concatenate([first[k], second[k]]) for k in table}
        # each second half follows its first
        where = np.concatenate([np.arange(len(nbytes)) * 2, big * 2 + 1])
        order = np.argsort(where, kind="stable")
        table = {k: v[order] for k, v in joined.items()}


def _fill(nbytes: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bucket and byte position of each box: boxes in order, a new bucket where the next box would not fit."""
    padded = -(-nbytes // ALIGN) * ALIGN
    ends = np.cumsum(padded)
    bucket = np.zeros(len(nbytes), np.int32)
    place = np.zeros(len(nbytes), np.int64)
    sizes: list[int] = []
    at = 0
    while at < len(nbytes):
        base = int(ends[at] - padded[at])
        # the tail needs no padding
        last = int(
            np.searchsorted(ends - (padded - nbytes), base + limit, side="right")
        )
        last = max(last, at + 1)
        bucket[at:last] = len(sizes)
        place[at:last] = ends[at:last] - padded[at:last] - base
        sizes.append(int(place[last - 1] + nbytes[last - 1]))
        at = last
    return bucket, place, np.array(sizes, np.int64)


# ----------------------------------------------------------------------------------------------------


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

    leaves: tuple[LeafInfo, ...]
    shardings: tuple[Sharding, ...]
    parameters: tuple[TargetInfo, ...]
    transforms: tuple[ValueTransform, ...]
    target_rank: np.ndarray  # int32 [T]
    target_parameter: np.ndarray  # int32 [T]
    target_kind: np.ndarray  # int8 [T]
    # int64 [T], elements that nothing fills
    target_padding: np.ndarray
    class_sharding: np.ndarray  # int32 [C]
    class_transform: np.ndarray  # int32 [C]
    # int64 [C, ND], leaf index of the piece, 0 along whole dimensions
    class_start: np.ndarray
    axis_size: np.ndarray  # int64 [C, K]
    # int8 [C, K], -1 where a leaf element is repeated
    axis_leaf_dim: np.ndarray
    axis_leaf_step: np.ndarray  # int64 [C, K]
    axis_dst_stride: np.ndarray  # int64 [C, K]
    member_ptr: np.ndarray  # int64 [C + 1]
    member_leaf: np.ndarray  # int32 [M]
    member_target: np.ndarray  # int32 [M]
    # int64 [M, ND], leaf index along whole dimensions
    member_start: np.ndarray
    member_dst: np.ndarray  # int64 [M]
    box_ptr: np.ndarray  # int64 [C + 1]
    box_cell: np.ndarray  # int32 [B], cell of the class's sharding
    # int32 [B], which owner of the cell serves the first member
    box_turn: np.ndarray
    box_shape: np.ndarray  # int64 [B, K]
    box_src: np.ndarray  # int64 [B]
    box_src_strides: np.ndarray  # int64 [B, K]
    box_dst: np.ndarray  # int64 [B]
    box_dst_strides: np.ndarray  # int64 [B, K]
    devices: np.ndarray  # int32 [D], global ids
    processes: np.ndarray  # int32 [D], trainer process of each
    ranks: int = 1
    replicas: int = 1
    bucket_bytes: int = 64 << 20
    # GB/s each way per device and rank, for predictions; 50 is a 400 Gb/s port
    link_gbps: float = 50.0
    ignored: tuple[str, ...] = ()  # checkpoint tensors that no rank takes anything from
    title: str = ""
    # leaves that are sent as fp8
    quantised: tuple[Quantised, ...] = ()

    def __post_init__(self) -> None:
        for part in (self, *self.shardings):
            for f in fields(part):
                if isinstance(getattr(part, f.name), np.ndarray):
                    getattr(part, f.name).setflags(write=False)  # arrays are frozen too

    # ---- identity -------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """A JSON header and the raw arrays; no pickle."""
        return plan_to_bytes(self)

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> TransferPlan:
        """The plan that `to_bytes` wrote."""
        return plan_from_bytes(data)

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
            raise ConfigError(
                f"no device {device} in this plan",
                remedy=f"devices: {self.devices[:8].tolist()} …",
            )
        return int(self.processes[self._device_slot[device]])

    # ---- links ----------------------------------------------------------------------------------------------

    def owners_of(self, box: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start in the sharding's owner list, and number of owners, of boxes of one class."""
        if not len(box):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        sharding = self.shardings[self.class_sharding[self.box_class[box[0]]]]
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
        return LinkTable(
            **{
                f.name: np.concatenate([getattr(t, f.name) for t in tables])
                for f in fields(LinkTable)
            }
        )

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
                # members of each rank by their position in the round
                turns = np.zeros((width, self.ranks), np.int64)
                np.add.at(turns, (np.arange(len(mine)) % width, mine), 1)
                for place in range(width):
                    owner = (place + self.box_turn[b] + replica * len(mine)) % width
                    slot = slot_of[owners[base[count == width] + owner]]
                    for k, weight in enumerate(
                        (
                            self.box_bytes[b],
                            np.ones(len(b), np.int64),
                            self.box_bytes[b] * self.box_contiguous[b],
                        )
                    ):
                        per_slot = np.bincount(
                            slot, weights=weight, minlength=slots
                        ).astype(np.int64)
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
        return _faces.draw(self, "text")

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")

    def plot(self) -> object:
        """A matplotlib Figure: bytes per link as a heat map."""
        return _faces.draw(self, "figure")

    def _ipython_display_(self) -> None:
        self.panel()

    def panel(self) -> PlanPanel | None:
        """The plan in a notebook: bytes per link, bucket timeline, predicted against measured seconds."""
        return _faces.draw(self, "panel")

    def schedule(self, link_gbps: float | None = None) -> list[Slot]:
        """When each bucket would be sent, if devices send and ranks receive one at a time at `link_gbps` GB/s."""

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
        # a source feeds every replica
        out = np.bincount(table.device, weights=table.nbytes).max()
        into = np.bincount(
            table.replica * self.ranks + table.rank, weights=table.nbytes
        ).max()
        return float(max(out, into) / ((link_gbps or self.link_gbps) * 1e9))
