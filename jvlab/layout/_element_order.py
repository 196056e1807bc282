"""The order of elements on the wire: each box by its source's strides, so that the sender reads memory in sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jvlab.layout._plan_types import LinkPlan


def source_order(link: LinkPlan) -> LinkPlan:
    """The link with every box's axes sorted by source stride, largest first; buckets and offsets stay.

    Both ends call this, so they agree on the packed bytes. The receiver transposes, in the one pass that it makes
    anyway. Repeated axes (source stride 0) come first: their copies follow one another.
    """
    if not len(link):
        return link
    # axes of size one go first
    key = np.where(link.shape == 1, np.iinfo(np.int64).max, link.src_strides)
    key = np.where(
        (link.src_strides == 0) & (link.shape > 1), np.iinfo(np.int64).max - 1, key
    )
    order = np.argsort(-key, axis=1, kind="stable")
    take = lambda table: np.take_along_axis(table, order, axis=1)
    return replace(
        link,
        shape=take(link.shape),
        src_strides=take(link.src_strides),
        dst_strides=take(link.dst_strides),
        leaf_dim=take(link.leaf_dim),
    )
