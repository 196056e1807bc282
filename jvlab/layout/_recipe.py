"""A box as static slices, reshapes and one transpose: what a compiled pack program is made of. numpy only."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from jvlab._errors import LayoutError
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import LinkPlan


@dataclass(frozen=True)
class Recipe:
    """Static steps from a local shard to a packed box; hashable, so it can be static in a jitted program."""

    pad: tuple[int, ...]  # elements appended to each dimension, so that merged axes divide it
    window: tuple[tuple[int, int], ...]  # [start, stop) per dimension
    factors: tuple[int, ...]  # the windows' dimensions split into axes
    picks: tuple[tuple[int, int, int], ...]  # (start, stop, step) per factor
    order: tuple[int, ...]  # transpose to the box's order of axes
    base: tuple[int, ...]  # the box with repeated axes of size one
    shape: tuple[int, ...]  # the box

    def apply(self, shard: Any, xp: Any = np) -> Any:
        """The packed box of a shard, by numpy or any module like it (jax.numpy)."""
        if any(self.pad):
            shard = xp.pad(shard, [(0, n) for n in self.pad])
        part = shard[tuple(slice(a, b) for a, b in self.window)].reshape(self.factors)
        part = part[tuple(slice(a, b, c) for a, b, c in self.picks)].transpose(self.order).reshape(self.base)
        return part if self.base == self.shape else xp.broadcast_to(part, self.shape)


def box_recipe(plan: TransferPlan, link: LinkPlan, i: int) -> Recipe:
    """The recipe of box i of a link."""
    sharding = plan.shardings[plan.leaves[int(link.leaf[i])].sharding]
    cell = sharding.cell_of(link.device)
    local = (sharding.stops[cell] - sharding.starts[cell]).tolist()
    strides = sharding.local_strides[cell].tolist()
    shape, dims, src = link.shape[i].tolist(), link.leaf_dim[i].tolist(), link.src_strides[i].tolist()
    rest = int(link.src_offset[i])
    pad: list[int] = []
    window: list[tuple[int, int]] = []
    factors: list[int] = []
    picks: list[tuple[int, int, int]] = []
    place: dict[int, int] = {}  # axis of the box -> its factor
    for d, size in enumerate(local):
        start, rest = divmod(rest, strides[d])
        axes = sorted((k for k in range(len(shape)) if dims[k] == d and shape[k] > 1), key=lambda k: -src[k])
        split = _split([shape[k] for k in axes], [src[k] // strides[d] for k in axes])
        place |= {k: len(factors) + j for j, k in enumerate(axes)}
        factors += [w for w, _ in split]
        picks += [p for _, p in split]
        reach = int(np.prod([w for w, _ in split], dtype=np.int64))
        pad.append(max(start + reach - size, 0))
        window.append((start, start + reach))
    moved = [place[k] for k in range(len(shape)) if k in place]
    order = tuple([f for f in range(len(factors)) if f not in moved] + moved)
    base = tuple(n if k in place else 1 for k, n in enumerate(shape))
    return Recipe(tuple(pad), tuple(window), tuple(factors), tuple(picks), order, base, tuple(shape))


def _split(sizes: list[int], steps: list[int]) -> list[tuple[int, tuple[int, int, int]]]:
    """(width, pick) of each factor of one dimension that these axes, major first, walk along."""
    if not sizes:
        return [(1, (0, 1, 1))]
    if any(a % b for a, b in itertools.pairwise(steps)):
        raise LayoutError(f"steps {steps} on one dimension do not divide each other", remedy="pack this box by gather")
    last = len(sizes) - 1
    span = (sizes[-1] - 1) * steps[-1] + 1
    if last == 0:
        return [(span, (0, span, steps[0]))]
    out = [(sizes[0], (0, sizes[0], 1))]
    for j in range(1, last):
        out.append((steps[j - 1] // steps[j], (0, sizes[j], 1)))
    return [*out, (steps[-2], (0, span, steps[-1]))]
