"""Packs a link's buckets on the GPU that holds the shards: one launch per bucket and dtype pair, another for digests.

The kernels are those of the ipc transport (see jvlab/transport/_ipc_tables.py), writing a transport slot instead of
the engine's memory.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from jvlab._errors import Unsupported
from jvlab.layout import _sparse
from jvlab.layout._digest import MASK, Flawed
from jvlab.layout._plan import TransferPlan
from jvlab.sync._ipc_lanes import check_layouts, cuda_ordinal
from jvlab.sync._pack import Box, Encoded, LinkPack, Source
from jvlab.transport import _sparse_kernels
from jvlab.transport._ipc_kernels import Launcher, cupy
from jvlab.transport._ipc_tables import IpcBox, program_of, tables
from jvlab.transport._nccl import DeviceBytes


class DeviceShards:
    """The shards that one bucket reads; computed, and kept alive."""

    def __init__(self, paths: list[str], shards: list[Any]) -> None:
        self.paths = paths
        self.shards = shards
        self.pointers = np.array(
            [int(s.unsafe_buffer_pointer()) for s in shards], np.uint64
        )

    @property
    def aligned(self) -> bool:
        return not (self.pointers % 16).any()


class DevicePack(LinkPack):
    """A `LinkPack` whose source is a GPU; `values` are the shards themselves."""

    def __init__(
        self,
        plan: TransferPlan,
        device: int,
        rank: int,
        replica: int,
        ordinal: int | None = None,
    ) -> None:
        super().__init__(plan, device, rank, replica)
        for transform in {
            box.transform for bucket in self.buckets for _, box in bucket
        }:
            try:
                program_of(transform, "rows")
            except Unsupported as e:
                raise Unsupported(
                    f"buckets are packed on the GPU, which can't convert {transform.source} to {transform.wire}",
                    remedy=f"keep these leaves as {transform.wire}",
                    transform=transform,
                ) from e
        self.ordinal = cuda_ordinal(device) if ordinal is None else ordinal
        self._launchers: dict[tuple[str, int, bool], Launcher] = {}
        self._tables: dict[int, _sparse_kernels.Boxes] = {}
        # bucket -> the launch that checked for non-finite values
        self._checked: dict[int, tuple[Launcher, Any]] = {}
        self._lock = threading.Lock()  # another thread takes the digests
        self._stream: Any = None
        for bucket in range(len(self.sizes)):  # compile now, not during the first sync
            paths = self._paths(bucket)
            for what in ("pack", "digest"):
                self._launcher(what, bucket, True, paths).warm(
                    digests=(what == "digest",)
                )

    def _paths(self, bucket: int) -> list[str]:
        """The leaves that a bucket reads, in pointer order."""
        return list(dict.fromkeys(box.leaf for _, box in self.buckets[bucket]))

    def values(self, bucket: int, source: Source) -> Any:
        """The shards that a bucket reads, computed; packing reads them in place."""
        paths = self._paths(bucket)
        shards = [source.shard(path, self.device) for path in paths]
        for shard in shards:  # of JAX, or of torch
            shard.block_until_ready()
        check_layouts([(paths, shards)])
        return DeviceShards(paths, shards)

    def write(
        self, bucket: int, values: Any, out: Any, check_finite: bool = False
    ) -> None:
        """Launch the pack of a bucket into its slot, on the slot's stream; does not wait."""
        if isinstance(out, DeviceBytes) and out.device == self.ordinal:
            launcher = self._launch_pack(bucket, values, out.pointer, out.stream)
            used = launcher, out.stream
        else:
            used = self._write_through(bucket, values, out)
        if check_finite:
            self._checked[bucket] = used

    def encode(self, bucket: int, values: Any, held: Any) -> Encoded:
        """As on a CPU; `held` and the result stay on the GPU."""
        cp = cupy()
        size = self.sizes[bucket]
        total_elements = sum(elements for _, elements, _ in self.shapes(bucket))
        with self._lock:
            stream = self._own_stream()
            with cp.cuda.Device(self.ordinal), stream:
                dense = cp.zeros(max(size, 1), np.uint8)[:size]
                self._launch_pack(bucket, values, dense.data.ptr, stream)
                if held is None:
                    stream.synchronize()
                    return Encoded(dense, False, total_elements, total_elements)
                table = self._boxes(bucket)
                mask, until, counts = table.differing(dense, held)
                changed = sum(counts)
                sections, nbytes = self.sections(bucket, counts)
                if nbytes >= size:
                    return Encoded(dense, False, changed, total_elements)
                out = cp.zeros(nbytes, np.uint8)
                head = np.array([s.count for s in sections], _sparse.COUNT)
                out[: head.nbytes].set(head.view(np.uint8), stream=stream)
                table.fill(sections, dense, mask, until, out)
                stream.synchronize()
        return Encoded(out, True, changed, total_elements)

    def advance(self, bucket: int, held: Any, encoded: Encoded) -> Any:
        if not encoded.sparse:
            return encoded.payload
        cp = cupy()
        data = encoded.payload
        with self._lock:
            stream = self._own_stream()
            with cp.cuda.Device(self.ordinal), stream:
                size = len(self.buckets[bucket]) * _sparse.COUNT.itemsize
                # no deadline: a copy from the GPU
                table = data[:size].get(stream=stream)
                counts = table.view(_sparse.COUNT).tolist()
                sections, _ = self.sections(bucket, counts)
                places = [
                    _sparse_kernels.Place(
                        section, held.data.ptr + box.at, 0, (elements,), (1,)
                    )
                    for (box, elements, _), section in zip(
                        self.shapes(bucket), sections, strict=True
                    )
                ]
                _sparse_kernels.put(places, data.data.ptr, self.ordinal)
                stream.synchronize()
        return held

    def copy_out(self, encoded: Encoded, out: Any) -> None:
        """Launch the copy into a slot, on the slot's stream; does not wait."""
        data = encoded.payload
        if not isinstance(out, DeviceBytes):
            # no deadline: a copy from the GPU
            np.frombuffer(out, np.uint8)[:] = data.get()
            return
        with cupy().cuda.Device(self.ordinal):
            cupy().cuda.runtime.memcpyPeerAsync(
                out.pointer,
                out.device,
                data.data.ptr,
                self.ordinal,
                data.nbytes,
                out.stream.ptr,
            )

    def pop_flawed(self, bucket: int) -> Flawed:
        """The leaves of a bucket if its last checked write found a non-finite value, else none."""
        launcher, stream = self._checked.pop(bucket, (None, None))
        if launcher is None or not launcher.flawed(stream):
            return set()
        # one of these; the caller looks closer
        return {(box.leaf, box.transform) for _, box in self.buckets[bucket]}

    def _launch_pack(
        self, bucket: int, values: DeviceShards, pointer: int, stream: Any
    ) -> Launcher:
        launcher = self._launcher(
            "pack", bucket, values.aligned and pointer % 16 == 0, values.paths
        )
        targets = np.array(
            [pointer + box.at for _, box in self.buckets[bucket]], np.uint64
        )
        launcher.launch(
            stream,
            self._upload(values.pointers, stream),
            self._upload(targets, stream),
            digest=False,
        )
        return launcher

    def _write_through(
        self, bucket: int, values: DeviceShards, out: memoryview | DeviceBytes
    ) -> tuple[Launcher, Any]:
        """For a slot in host memory, or on another GPU of this process than the shards: by a buffer here."""
        cp = cupy()
        stream = self._own_stream()
        size = self.sizes[bucket]
        with cp.cuda.Device(self.ordinal), stream:
            buffer = cp.empty(max(size, 1), np.uint8)
            launcher = self._launch_pack(bucket, values, buffer.data.ptr, stream)
            if isinstance(out, DeviceBytes):
                here = buffer.data.ptr, self.ordinal
                cp.cuda.runtime.memcpyPeerAsync(
                    out.pointer, out.device, *here, size, stream.ptr
                )
                stream.synchronize()
            else:
                # no deadline: a copy from the GPU
                out[:] = buffer.get(stream=stream)[: len(out)].tobytes()
        return launcher, stream

    def digests(
        self, bucket: int, values: Any, flawed: Flawed | None = None
    ) -> dict[int, int]:
        """What these boxes add to the digest of each target, computed from the shards."""
        numbers = sorted(self.targets(bucket))
        if not numbers:
            return {}
        with self._lock:
            stream = self._own_stream()
            launcher = self._launcher("digest", bucket, values.aligned, values.paths)
            # nothing is written
            no_targets = self._upload(np.zeros(len(numbers), np.uint64), stream)
            launcher.launch(stream, self._upload(values.pointers, stream), no_targets)
            sums = launcher.sums(stream).tolist()
            if flawed is not None:
                wrong = {numbers[slot] for slot in launcher.flawed(stream)}
                flawed |= {
                    (box.leaf, box.transform)
                    for _, box in self.buckets[bucket]
                    if box.target in wrong
                }
        return {t: s & MASK for t, s in zip(numbers, sums, strict=True)}

    def _launcher(
        self, what: str, bucket: int, aligned: bool, paths: list[str]
    ) -> Launcher:
        key = (what, bucket, aligned)
        if key not in self._launchers:
            leaf = {path: k for k, path in enumerate(paths)}
            boxes = [box for _, box in self.buckets[bucket]]
            if what == "pack":
                made = tables(
                    [pack_box(box, k, leaf[box.leaf]) for k, box in enumerate(boxes)],
                    aligned,
                )
                self._launchers[key] = Launcher(self.ordinal, made, 1)
            else:
                slot = {t: k for k, t in enumerate(sorted(self.targets(bucket)))}
                made = tables(
                    [
                        digest_box(box, slot[box.target], leaf[box.leaf])
                        for box in boxes
                    ],
                    aligned,
                )
                self._launchers[key] = Launcher(
                    self.ordinal, made, len(slot), write=False
                )
        return self._launchers[key]

    def _boxes(self, bucket: int) -> _sparse_kernels.Boxes:
        if bucket not in self._tables:
            boxes = [
                (box.at, elements, item) for box, elements, item in self.shapes(bucket)
            ]
            self._tables[bucket] = _sparse_kernels.Boxes(boxes, self.ordinal)
        return self._tables[bucket]

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


def pack_box(box: Box, number: int, source: int) -> IpcBox:
    """The dense copy of a box into its bucket, with a target pointer of its own."""
    axes = []
    step = 1
    for n, stride in zip(reversed(box.shape), reversed(box.src_strides), strict=True):
        axes.append((n, stride, step))
        step *= n
    # row length, along which the kernel cuts blocks
    last = next((n for n in reversed(box.shape) if n > 1), 1)
    return IpcBox(
        source, box.src_offset, number, 0, tuple(reversed(axes)), box.transform, last, 0
    )


def digest_box(box: Box, slot: int, source: int) -> IpcBox:
    """The same box at its position in the target, for the digest."""
    axes = zip(box.shape, box.src_strides, box.dst_strides, strict=True)
    return IpcBox(
        source,
        box.src_offset,
        slot,
        box.dst_offset,
        tuple(axes),
        box.transform,
        box.row,
        slot,
    )
