"""When each bucket of a plan would be sent, if devices send and ranks receive one bucket at a time. numpy only."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jvlab.layout._plan import TransferPlan

EXACT_COPIES = 20_000  # up to this many copies the real bucket sizes are used; beyond it, full buckets
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
        for order, (device, target, sizes) in enumerate((d, t, s) for (d, t), s in _buckets(plan).items())
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
    rows = sorted(range(len(table)), key=lambda i: ((table.rank[i] - table.device[i]) % plan.ranks, table.device[i]))
    for i in rows:
        device, replica, rank, size = (int(x[i]) for x in (table.device, table.replica, table.rank, table.nbytes))
        if exact:
            sizes = [int(n) for n in plan.link(device, rank, replica).bucket_sizes]
        elif many:
            sizes = [size]
        else:
            sizes = [plan.bucket_bytes] * (size // plan.bucket_bytes)
            sizes += [size % plan.bucket_bytes] if size % plan.bucket_bytes else []
        out[device, (replica, rank)] = sizes
    return out
