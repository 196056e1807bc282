"""Geometry of a leaf's two shardings as rectangles in a unit square, to be drawn as SVG or by matplotlib."""

from __future__ import annotations

import colorsys
import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from jvlab.layout._plan import TransferPlan, expand_link
from jvlab.layout._plan_types import LinkPlan, Sharding, TargetInfo
from jvlab.views._style import PALETTE

MAX_RANKS = 8  # parameters drawn side by side
MAX_DEVICES = 512
MAX_RECTS = 1500  # in one panel
MAX_RUNS = 64  # rectangles per box
MAX_POINTS = 1 << 16


@dataclass(frozen=True)
class Rect:
    """A rectangle in a unit square, coloured by piece of the leaf; labelled with the devices that hold or send it."""

    x: float
    y: float
    w: float
    h: float
    piece: int
    label: str
    text: str


@dataclass(frozen=True)
class Drawing:
    """The leaf on its devices, and each (rank, parameter) it is written to."""

    leaf: str
    shape: tuple[int, ...]
    source: list[Rect]
    targets: list[tuple[int, TargetInfo, list[Rect]]]
    left_out: str = ""  # what is not drawn: "4 more ranks"


def _members(
    plan: TransferPlan, leaf: str, parameters: Collection[str]
) -> tuple[int, np.ndarray]:
    """A leaf's index, and its members of the plan: those that are written to these parameters; to any, if none."""
    index = next(i for i, x in enumerate(plan.leaves) if x.path == leaf)
    found = np.flatnonzero(plan.member_leaf == index)
    if not parameters:
        return index, found
    wanted = np.array([info.name in parameters for info in plan.parameters], bool)
    return index, found[wanted[plan.target_parameter[plan.member_target[found]]]]


def _links(
    plan: TransferPlan, index: int, members: np.ndarray, replica: int = 0
) -> list[LinkPlan]:
    """The links that carry some members of a leaf, expanded for its classes only; for the ranks that are drawn."""
    ranks = np.unique(plan.target_rank[plan.member_target[members]])
    devices = np.unique(plan.shardings[plan.leaves[index].sharding].owners)
    classes = np.unique(plan.member_class[members]).tolist()
    pairs = [(int(d), int(r)) for r in ranks[:MAX_RANKS] for d in devices[:MAX_DEVICES]]
    return [expand_link(plan, d, r, replica, classes) for d, r in pairs]


def sends(
    plan: TransferPlan, leaf: str, replica: int = 0, parameters: Collection[str] = ()
) -> dict[tuple[int, int], int]:
    """Bytes of one leaf per (device, rank), without expanding links; only to some parameters, if these are given."""
    out: dict[tuple[int, int], int] = defaultdict(int)
    for m in _members(plan, leaf, parameters)[1].tolist():
        c = int(plan.member_class[m])
        sharding = plan.shardings[plan.class_sharding[c]]
        first = int(plan.member_ptr[c])
        last = int(plan.member_ptr[c + 1])
        boxes = np.arange(plan.box_ptr[c], plan.box_ptr[c + 1])
        base, count = plan.owners_of(boxes)
        turn = (m - first + plan.box_turn[boxes] + replica * (last - first)) % count
        rank = int(plan.target_rank[plan.member_target[m]])
        for d, n in zip(
            sharding.owners[base + turn].tolist(),
            plan.box_bytes[boxes].tolist(),
            strict=True,
        ):
            out[d, rank] += n
    return dict(out)


def draw(plan: TransferPlan, leaf: str, parameters: Collection[str] = ()) -> Drawing:
    """The geometry of one leaf on both sides; only some of the parameters it goes to, if these are given."""
    index, members = _members(plan, leaf, parameters)
    wanted = set(plan.member_target[members].tolist())
    info = plan.leaves[index]
    sharding = plan.shardings[info.sharding]
    counts = np.diff(sharding.owner_ptr)
    each = np.repeat(np.arange(len(counts)), counts).tolist()
    pieces = dict(zip(sharding.owners.tolist(), each, strict=True))
    grouped: dict[int, list[Rect]] = defaultdict(list)
    for link in _links(plan, index, members) if wanted else ():
        for i in np.flatnonzero(link.leaf == index).tolist():
            target = int(link.target[i])
            if target in wanted and len(grouped[target]) < MAX_RECTS:
                piece = pieces[link.device]
                grouped[target] += _target_rects(plan, link, i, target, piece)
    targets = []
    for t in sorted(grouped, key=lambda t: (plan.target_rank[t], t))[:MAX_RANKS]:
        parameter = plan.parameters[plan.target_parameter[t]]
        targets.append((int(plan.target_rank[t]), parameter, grouped[t]))
    several = len({int(plan.target_parameter[t]) for t in wanted}) > 1
    more = len(wanted) - len(targets)
    left_out = f"{more} more {'parameters' if several else 'ranks'}" if more > 0 else ""
    return Drawing(leaf, info.shape, _cells(sharding), targets, left_out)


def _cells(sharding: Sharding) -> list[Rect]:
    """The devices' shards projected to two dimensions: sharded dimensions are preferred, then the longest."""
    dims = range(len(sharding.shape))
    order = sorted(dims, key=lambda d: (sharding.whole[d], -sharding.shape[d]))
    y, x = [None, None, *sorted(order[:2])][-2:]
    rects = []
    for u in range(min(len(sharding.starts), MAX_RECTS)):
        first, last = sharding.owner_ptr[u : u + 2]
        owners = [str(owner) for owner in sharding.owners[first:last]]
        some = lambda most, owners=owners: (
            ", ".join(owners[:most]) + " …" * (len(owners) > most)
        )
        ends = zip(sharding.starts[u], sharding.stops[u], strict=True)
        held = " × ".join(f"{start}:{stop}" for start, stop in ends)
        left, width = _span(sharding, u, x)
        top, height = _span(sharding, u, y)
        text = f"device {some(6)}: {held}"
        rects.append(Rect(left, top, width, height, u, some(4), text))
    return rects


def _span(sharding: Sharding, u: int, d: int | None) -> tuple[float, float]:
    """Where a shard begins along a dimension and how much of it it holds; of no dimension all."""
    if d is None or not sharding.shape[d]:
        return 0.0, 1.0
    start = sharding.starts[u, d]
    size = sharding.shape[d]
    return float(start / size), float((sharding.stops[u, d] - start) / size)


def _target_rects(
    plan: TransferPlan, link: LinkPlan, i: int, target: int, piece: int
) -> list[Rect]:
    """Box i of a link in the parameter's rows × columns: exact rectangles, or their bounding one if too many."""
    info = plan.parameters[plan.target_parameter[target]]
    total = max(math.prod(info.shape), 1)
    columns = info.shape[-1] if len(info.shape) > 1 else total
    rows = max(total // columns, 1)
    y, x = divmod(int(link.dst_offset[i]), columns)
    split: list[tuple[int, int]] = []
    axes = zip(link.shape[i].tolist(), link.dst_strides[i].tolist(), strict=True)
    for n, s in axes:  # an axis that wraps around rows is split in two
        if s < columns < n * s and columns % s == 0 and n % (columns // s) == 0:
            split += [(columns // s, s), (n // (columns // s), columns)]
        elif n > 1:
            split.append((n, s))
    across = _runs(x, [(n, s) for n, s in split if s < columns], columns)
    down = _runs(y, [(n, s // columns) for n, s in split if s >= columns], rows)
    if len(across) * len(down) > MAX_RUNS:
        across = [(across[0][0], across[-1][1])]
        down = [(down[0][0], down[-1][1])]
    label = str(link.device)
    text = f"device {label} → rank {link.rank}: {int(link.nbytes[i]):,} bytes"
    rects = []
    for a, b in across:
        for c, d in down:
            size = ((b - a) / columns, (d - c) / rows)
            rects.append(Rect(a / columns, c / rows, *size, piece, label, text))
    return rects


def _runs(start: int, axes: list[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """The indices start + Σ i·step as runs [a, b) within the limit."""
    if math.prod(n for n, _ in axes) > MAX_POINTS:
        return [(start, min(start + sum((n - 1) * s for n, s in axes) + 1, limit))]
    points = np.array([start])
    for n, s in axes:
        points = (points[:, None] + np.arange(n) * s).reshape(-1)
    points = np.unique(np.minimum(points, limit - 1))
    cut = np.flatnonzero(np.diff(points) > 1) + 1
    return [(int(p[0]), int(p[-1]) + 1) for p in np.split(points, cut)]


def colour(piece: int) -> tuple[int, int, int]:
    """A fixed colour per piece: the palette's, then hues a golden angle apart; readable on light and dark."""
    if piece < len(PALETTE):
        return tuple(bytes.fromhex(PALETTE[piece][1:]))  # type: ignore[return-value]
    shade = colorsys.hsv_to_rgb(piece * 137.508 % 360 / 360, 0.54, 0.78)
    return tuple(int(255 * v) for v in shade)  # type: ignore[return-value]


def ink(piece: int) -> str:
    """Black or white, whichever is readable on a piece's colour."""
    red, green, blue = colour(piece)
    return "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 110 else "#fff"
