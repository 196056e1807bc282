"""Buckets of a link packed on the GPU that holds the shards: one launch per bucket and dtypes, digests by another.

The kernels are those of the ipc transport (see jvlab/transport/_ipc_tables.py): there they write the engine's memory,
here a slot of the transport.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from jvlab._errors import Unsupported
from jvlab.layout._digest import MASK
from jvlab.layout._plan import TransferPlan
from jvlab.trainer._pack import Box, LinkPack, Source
from jvlab.transport._device_bytes import DeviceBytes
from jvlab.transport._ipc_kernels import Launcher, cupy
from jvlab.transport._ipc_lanes import check_layouts, cuda_ordinal
from jvlab.transport._ipc_tables import Piece, program_of, tables


class Held:
    """The shards that one bucket reads, computed and kept."""

    def __init__(self, paths: list[str], shards: list[Any]) -> None:
        self.paths, self.shards = paths, shards
        self.pointers = np.array([int(s.unsafe_buffer_pointer()) for s in shards], np.uint64)

    @property
    def aligned(self) -> bool:
        return not (self.pointers % 16).any()


class DevicePack(LinkPack):
    """A link whose source is a GPU. Same face as LinkPack; `values` are the shards themselves."""

    def __init__(self, plan: TransferPlan, device: int, rank: int, replica: int, ordinal: int | None = None) -> None:
        super().__init__(plan, device, rank, replica)
        for law in {box.law for bucket in self.buckets for _, box in bucket}:
            try:
                program_of(law, "rows")
            except Unsupported as e:
                raise Unsupported(
                    f"nccl packs on the GPU, where {law.source} is not converted to {law.wire}",
                    remedy=f"keep these leaves as {law.wire}",
                    law=law,
                ) from e
        self.ordinal = cuda_ordinal(device) if ordinal is None else ordinal
        self._launchers: dict[tuple[str, int, bool], Launcher] = {}
        self._lock = threading.Lock()  # digests are taken by another thread
        self._stream: Any = None
        for bucket in range(len(self.sizes)):  # made and compiled now, so that the first sync needn't
            paths = self._paths(bucket)
            for what in ("pack", "digest"):
                self._launcher(what, bucket, True, paths).warm(digests=(what == "digest",))

    def _paths(self, bucket: int) -> list[str]:
        """The leaves that a bucket reads, in the order of their pointers."""
        return list(dict.fromkeys(box.leaf for _, box in self.buckets[bucket]))

    def values(self, bucket: int, source: Source) -> Any:
        """The shards of a bucket's boxes, computed; views of nothing: packing reads them where they lie."""
        import jax

        paths = self._paths(bucket)
        shards = [source.shard(path, self.device) for path in paths]
        jax.block_until_ready(shards)
        check_layouts([(paths, shards)])
        return Held(paths, shards)

    def write(self, bucket: int, values: Any, out: Any) -> None:
        """Launch the pack of a bucket into its slot, in the order of that slot's stream; does not wait."""
        if not isinstance(out, DeviceBytes):
            self._write_host(bucket, values, out)
        elif out.device == self.ordinal:
            self._launch_pack(bucket, values, out.pointer, out.stream)
        else:
            self._write_far(bucket, values, out)

    def _launch_pack(self, bucket: int, values: Held, pointer: int, stream: Any) -> None:
        launcher = self._launcher("pack", bucket, values.aligned and pointer % 16 == 0, values.paths)
        targets = np.array([pointer + box.at for _, box in self.buckets[bucket]], np.uint64)
        launcher.launch(stream, self._upload(values.pointers, stream), self._upload(targets, stream), digest=False)

    def _write_host(self, bucket: int, values: Held, out: memoryview) -> None:
        cp = cupy()
        stream = self._own_stream()
        with cp.cuda.Device(self.ordinal), stream:
            room = cp.empty(max(self.sizes[bucket], 1), np.uint8)
            self._launch_pack(bucket, values, room.data.ptr, stream)
            out[:] = room.get(stream=stream)[: len(out)].tobytes()

    def _write_far(self, bucket: int, values: Held, out: DeviceBytes) -> None:
        """The slot is on another GPU of this process than the shards."""
        cp = cupy()
        stream = self._own_stream()
        with cp.cuda.Device(self.ordinal), stream:
            room = cp.empty(max(self.sizes[bucket], 1), np.uint8)
            self._launch_pack(bucket, values, room.data.ptr, stream)
            cp.cuda.runtime.memcpyPeerAsync(
                out.pointer, out.device, room.data.ptr, self.ordinal, self.sizes[bucket], stream.ptr
            )
            stream.synchronize()

    def digests(self, bucket: int, values: Any) -> dict[int, int]:
        """What these boxes add to the digest of each target, computed from the shards."""
        numbers = sorted(self.targets(bucket))
        if not numbers:
            return {}
        with self._lock:
            stream = self._own_stream()
            launcher = self._launcher("digest", bucket, values.aligned, values.paths)
            nowhere = self._upload(np.zeros(len(numbers), np.uint64), stream)
            launcher.launch(stream, self._upload(values.pointers, stream), nowhere)
            sums = launcher.sums(stream).tolist()
        return {t: s & MASK for t, s in zip(numbers, sums, strict=True)}

    def _launcher(self, what: str, bucket: int, aligned: bool, paths: list[str]) -> Launcher:
        key = (what, bucket, aligned)
        if key not in self._launchers:
            leaf = {path: k for k, path in enumerate(paths)}
            boxes = [box for _, box in self.buckets[bucket]]
            if what == "pack":
                made = tables([packed(box, k, leaf[box.leaf]) for k, box in enumerate(boxes)], aligned)
                self._launchers[key] = Launcher(self.ordinal, made, 1)
            else:
                slot = {t: k for k, t in enumerate(sorted(self.targets(bucket)))}
                made = tables([placed(box, slot[box.target], leaf[box.leaf]) for box in boxes], aligned)
                self._launchers[key] = Launcher(self.ordinal, made, len(slot), write=False)
        return self._launchers[key]

    def _upload(self, pointers: np.ndarray, stream: Any) -> Any:
        cp = cupy()
        with cp.cuda.Device(self.ordinal), stream:
            out = cp.empty(len(pointers), np.uint64)
            out.set(pointers, stream=stream)
        return out

    def _own_stream(self) -> Any:
        if self._stream is None:
            with cupy().cuda.Device(self.ordinal):
                self._stream = cupy().cuda.Stream(non_blocking=True)
        return self._stream


def packed(box: Box, number: int, source: int) -> Piece:
    """The copy of a box into its place in a bucket: dense, with a pointer of its own."""
    axes, step = [], 1
    for n, stride in zip(reversed(box.shape), reversed(box.src_strides), strict=True):
        axes.append((n, stride, step))
        step *= n
    last = next((n for n in reversed(box.shape) if n > 1), 1)  # as if the place had lines: blocks are cut along them
    return Piece(source, box.src_offset, number, 0, tuple(reversed(axes)), box.law, last, 0)


def placed(box: Box, slot: int, source: int) -> Piece:
    """The same box at its place in the target, for its digest."""
    axes = zip(box.shape, box.src_strides, box.dst_strides, strict=True)
    return Piece(source, box.src_offset, slot, box.dst_offset, tuple(axes), box.law, box.row, slot)
