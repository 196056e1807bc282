"""A bucket in device memory: what a transport between GPUs passes to `fill` and to the scatter.

Consumers on the device read `__cuda_array_interface__` and work on `stream`; host code may slice it
like a memoryview, which copies and waits.
"""

from __future__ import annotations

from typing import Any, Protocol


class Copies(Protocol):
    """Copies between host and device memory; both wait for completion."""

    def put(self, pointer: int, data: Any, stream: Any) -> None: ...

    def get(self, pointer: int, nbytes: int, stream: Any) -> bytes: ...


class DeviceBytes:
    """`nbytes` at `pointer` on CUDA device `device`. Work on it is ordered by `stream`."""

    readonly = False

    def __init__(
        self,
        pointer: int,
        nbytes: int,
        device: int,
        stream: Any,
        copies: Copies,
        owner: Any = None,
    ) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self.device = device
        self.stream = stream
        self.view: Any = None  # the consumer's cached view of it
        self._copies = copies
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
            self._copies.get(self.pointer, self.nbytes, self.stream)
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
            self._copies.put(part.pointer, data, self.stream)

    def _part(self, key: slice) -> DeviceBytes:
        start, stop, step = key.indices(self.nbytes)
        if step != 1:
            raise ValueError("device memory takes contiguous slices only")
        size = max(0, stop - start)
        return DeviceBytes(
            self.pointer + start,
            size,
            self.device,
            self.stream,
            self._copies,
            self._owner,
        )

    def release(self) -> None:
        """Drop the consumer's view; the transport owns the memory."""
        self.view = None
