"""Geometry of a leaf's two shardings as rectangles in a unit square, to be drawn as SVG or by matplotlib."""

from __future__ import annotations

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
    source = _cells(sharding)
    pieces = {
        int(device): piece
        for piece in range(len(sharding.starts))
        for device in sharding.owners[
            sharding.owner_ptr[piece] : sharding.owner_ptr[piece + 1]
        ]
    }
    grouped: dict[int, list[Rect]] = defaultdict(list)
    for link in _links(plan, index, members) if wanted else ():
        for i in np.flatnonzero(link.leaf == index).tolist():
            target = int(link.target[i])
            if target in wanted and len(grouped[target]) < MAX_RECTS:
                grouped[target] += _target_rects(
                    plan, link, i, target, pieces[link.device]
                )
    order = sorted(grouped, key=lambda t: (plan.target_rank[t], t))
    targets = [
        (
            int(plan.target_rank[t]),
            plan.parameters[plan.target_parameter[t]],
            grouped[t],
        )
        for t in order
    ]
    several = len({int(plan.target_parameter[t]) for t in wanted}) > 1
    more = len(wanted) - len(targets[:MAX_RANKS])
    left_out = f"{more} more {'parameters' if several else 'ranks'}" if more > 0 else ""
    return Drawing(leaf, info.shape, source, targets[:MAX_RANKS], left_out)


def _cells(sharding: Sharding) -> list[Rect]:
    """The devices' shards projected to two dimensions: sharded dimensions are preferred, then the longest."""
    nd = len(sharding.shape)
    chosen = sorted(range(nd), key=lambda d: (sharding.whole[d], -sharding.shape[d]))[
        :2
    ]
    y, x = [*sorted(chosen), None, None][:2] if nd > 1 else (None, 0 if nd else None)
    rects = []
    for u in range(min(len(sharding.starts), MAX_RECTS)):
        owners = sharding.owners[
            sharding.owner_ptr[u] : sharding.owner_ptr[u + 1]
        ].tolist()
        spans = [_span(sharding, u, d) for d in (x, y)]
        text = (
            f"device {', '.join(map(str, owners[:6]))}{' …' if len(owners) > 6 else ''}: "
            + " × ".join(
                f"{a}:{b}"
                for a, b in zip(
                    sharding.starts[u].tolist(), sharding.stops[u].tolist(), strict=True
                )
            )
        )
        label = ", ".join(map(str, owners[:4])) + (" …" if len(owners) > 4 else "")
        rects.append(
            Rect(spans[0][0], spans[1][0], spans[0][1], spans[1][1], u, label, text)
        )
    return rects


def _span(sharding: Sharding, u: int, d: int | None) -> tuple[float, float]:
    if d is None or not sharding.shape[d]:
        return 0.0, 1.0
    size = sharding.shape[d]
    return float(sharding.starts[u, d] / size), float(
        (sharding.stops[u, d] - sharding.starts[u, d]) / size
    )


def _target_rects(
    plan: TransferPlan, link: LinkPlan, i: int, target: int, piece: int
) -> list[Rect]:
    """Box i of a link in the parameter's rows × columns: exact rectangles, or their bounding one if too many."""
    info = plan.parameters[plan.target_parameter[target]]
    total = max(int(np.prod(info.shape, dtype=np.int64)), 1)
    columns = info.shape[-1] if len(info.shape) > 1 else total
    rows = max(total // columns, 1)
    y, x = divmod(int(link.dst_offset[i]), columns)
    axes = [
        (n, s)
        for n, s in zip(
            link.shape[i].tolist(), link.dst_strides[i].tolist(), strict=True
        )
        if n > 1
    ]
    split: list[tuple[int, int]] = []
    for n, s in axes:  # an axis that wraps around rows is split in two
        if s < columns < n * s and columns % s == 0 and n % (columns // s) == 0:
            split += [(columns // s, s), (n // (columns // s), columns)]
        else:
            split.append((n, s))
    across = _runs(x, [(n, s) for n, s in split if s < columns], columns)
    down = _runs(y, [(n, s // columns) for n, s in split if s >= columns], rows)
    if len(across) * len(down) > MAX_RUNS:
        across = [(across[0][0], across[-1][1])]
        down = [(down[0][0], down[-1][1])]
    text = f"device {link.device} → rank {link.rank}: {int(link.nbytes[i]):,} bytes"
    return [
        Rect(
            a / columns,
            c / rows,
            (b - a) / columns,
            (d - c) / rows,
            piece,
            str(link.device),
            text,
        )
        for a, b in across
        for c, d in down
    ]


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
    hue = (piece * 137.508) % 360 / 60
    c = 0.42
    m = 0.36
    x = c * (1 - abs(hue % 2 - 1))
    r, g, b = [(c, x, 0), (x, c, 0), (0, c, x), (0, x, c), (x, 0, c), (c, 0, x)][
        int(hue)
    ]
    return tuple(int(255 * (v + m)) for v in (r, g, b))  # type: ignore[return-value]


def ink(piece: int) -> str:
    """Black or white, whichever is readable on a piece's colour."""
    red, green, blue = colour(piece)
    return "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 110 else "#fff"
