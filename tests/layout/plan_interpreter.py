"""A plan run in this process on numpy arrays: the interpreter that every transport is compared with. numpy only."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import numpy as np
from numpy.lib.stride_tricks import as_strided

from jvlab._errors import LayoutError
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import LinkPlan, ValueTransform, convert, numpy_dtype

# (leaf path, device) -> that device's local buffer
Shards = Mapping[tuple[str, int], np.ndarray]
# (rank, parameter) -> storage, written in place
Params = MutableMapping[tuple[int, str], np.ndarray]


def execute(
    plan: TransferPlan,
    shards: Shards,
    params: Params,
    *,
    mode: str = "packed",
    replica: int = 0,
) -> int:
    """Move everything to the parameters of one replica; returns the bytes that crossed.

    "packed" goes as a transport does: pack a bucket, hand over its bytes, scatter. "direct" copies box by box.
    """
    if mode not in ("packed", "direct"):
        raise LayoutError(f"unknown mode {mode!r}", remedy='use "packed" or "direct"')
    table, moved = plan.links(replica), 0
    for device, rank in zip(table.device.tolist(), table.rank.tolist(), strict=True):
        link = plan.link(device, rank, replica)
        moved += link.total_bytes
        if mode == "direct":
            for i in range(len(link)):
                target_view(plan, link, i, params)[...] = convert(
                    source_view(plan, link, i, shards), transform_of(plan, link, i)
                )
            continue
        for bucket in range(len(link.bucket_sizes)):
            scatter_bucket(
                plan, link, bucket, pack_bucket(plan, link, bucket, shards), params
            )
    return moved


def transform_of(plan: TransferPlan, link: LinkPlan, i: int) -> ValueTransform:
    """What happens to the values of box i."""
    return plan.transforms[int(link.transform[i])]


def source_view(
    plan: TransferPlan, link: LinkPlan, i: int, shards: Shards
) -> np.ndarray:
    """Box i as a strided view of the device's shard."""
    leaf = plan.leaves[int(link.leaf[i])]
    shard = shards[leaf.path, link.device]
    return _strided(
        shard, int(link.src_offset[i]), link.shape[i], link.src_strides[i], leaf.path
    )


def target_view(
    plan: TransferPlan, link: LinkPlan, i: int, params: Params
) -> np.ndarray:
    """Box i as a strided view of the live parameter's storage."""
    name = plan.parameters[plan.target_parameter[link.target[i]]].name
    return _strided(
        params[link.rank, name],
        int(link.dst_offset[i]),
        link.shape[i],
        link.dst_strides[i],
        name,
    )


def _strided(
    array: np.ndarray, offset: int, shape: np.ndarray, strides: np.ndarray, name: str
) -> np.ndarray:
    if not array.flags.c_contiguous:
        raise LayoutError(
            f"{name!r}: the interpreter wants flat storage",
            remedy="pass the C-contiguous storage",
            name=name,
        )
    flat = array.reshape(-1)
    last = offset + int(((shape - 1) * strides).sum())
    if offset < 0 or last >= flat.size:  # as_strided itself checks nothing
        raise LayoutError(
            f"{name!r}: box from {offset} to {last} is outside of {flat.size} elements",
            name=name,
        )
    return as_strided(flat[offset:], shape.tolist(), (strides * flat.itemsize).tolist())


def pack_bucket(
    plan: TransferPlan, link: LinkPlan, bucket: int, shards: Shards
) -> bytearray:
    """One bucket's bytes, as they cross."""
    out = bytearray(int(link.bucket_sizes[bucket]))
    for i in np.flatnonzero(link.bucket == bucket).tolist():
        transform = transform_of(plan, link, i)
        values = convert(source_view(plan, link, i, shards), transform)
        at = int(link.bucket_offset[i])
        out[at : at + int(link.nbytes[i])] = np.ascontiguousarray(values).tobytes()
    return out


def scatter_bucket(
    plan: TransferPlan,
    link: LinkPlan,
    bucket: int,
    data: bytes | bytearray | memoryview,
    params: Params,
) -> None:
    """Write one bucket's bytes to the live parameters of the link's rank."""
    for i in np.flatnonzero(link.bucket == bucket).tolist():
        transform, at = transform_of(plan, link, i), int(link.bucket_offset[i])
        raw = memoryview(data)[at : at + int(link.nbytes[i])]
        target_view(plan, link, i, params)[...] = np.frombuffer(
            raw, numpy_dtype(transform.wire)
        ).reshape(link.shape[i])
