"""A bucket in device memory: what a transport between GPUs passes to `fill` and to the scatter.

Consumers on the device read `__cuda_array_interface__` and work on `stream`; host code may slice it
like a memoryview, which copies and waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jvlab.transport._nccl import CudaGpu


class DeviceBytes:
    """`nbytes` at `pointer` on a GPU. Work on it is ordered by `stream`."""

    readonly = False

    def __init__(
        self,
        pointer: int,
        nbytes: int,
        gpu: CudaGpu,
        stream: Any,
        owner: Any,
    ) -> None:
        """`owner`: kept alive with it."""
        self.pointer = pointer
        self.nbytes = nbytes
        self.device = gpu.ordinal
        self.stream = stream
        self.view: Any = None  # the consumer's cached view of it
        self._gpu = gpu
        self._owner = owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "version": 3,
            "strides": None,
        }

    def __len__(self) -> int:
        return self.nbytes

    def __bytes__(self) -> bytes:
        return (
            self._gpu.get(self.pointer, self.nbytes, self.stream)
            if self.nbytes
            else b""
        )

    def __getitem__(self, key: int | slice) -> Any:
        if isinstance(key, int):
            return bytes(self._part(slice(key, key + 1)))[0]
        return self._part(key)

    def __setitem__(self, key: int | slice, value: Any) -> None:
        part = self._part(slice(key, key + 1) if isinstance(key, int) else key)
        data = bytes([value]) if isinstance(key, int) else bytes(value)
        if len(data) != part.nbytes:
            raise ValueError(f"{len(data)} bytes for a slice of {part.nbytes}")
        if data:
            self._gpu.put(part.pointer, data, self.stream)

    def _part(self, key: slice) -> DeviceBytes:
        start, stop, step = key.indices(self.nbytes)
        if step != 1:
            raise ValueError("device memory takes contiguous slices only")
        size = max(0, stop - start)
        pointer = self.pointer + start
        return DeviceBytes(pointer, size, self._gpu, self.stream, self._owner)

    def release(self) -> None:
        """Drop the consumer's view; the transport owns the memory."""
        self.view = None
