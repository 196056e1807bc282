"""The GPU interface of the nccl transport: memory, streams, events (by cupy) and communicators (libnccl)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from jvlab._errors import MissingDependency, TransportError
from jvlab.transport import _nccl_library as nccl


class Communicator(Protocol):
    """One end of a communicator of two; no call waits for the peer."""

    def ready(self) -> bool: ...

    def send(self, pointer: int, nbytes: int, stream: int) -> None: ...

    def recv(self, pointer: int, nbytes: int, stream: int) -> None: ...

    def abort(self) -> None: ...


class Gpu(Protocol):
    """One GPU of this process; tests have one made of numpy arrays. Streams and events have cupy's interface."""

    ordinal: int

    def version(self) -> int: ...

    def unique_id(self) -> bytes: ...

    def pair(self, identity: bytes, rank: int) -> Communicator: ...

    def current(self) -> AbstractContextManager[Any]: ...

    def stream(self) -> Any: ...

    def allocate(self, nbytes: int) -> Any: ...

    def put(self, pointer: int, data: Any, stream: Any) -> None: ...

    def get(self, pointer: int, nbytes: int, stream: Any) -> bytes: ...


class CudaGpu:
    """The real one. `ordinal`: the CUDA device; default: the calling thread's current one."""

    def __init__(self, ordinal: int | None = None) -> None:
        try:
            import cupy
        except ImportError as e:
            raise MissingDependency(
                "transport nccl needs cupy", remedy="pip install cupy-cuda12x or cupy-cuda13x"
            ) from e
        self._cupy = cupy
        self.ordinal = cupy.cuda.runtime.getDevice() if ordinal is None else ordinal

    def version(self) -> int:
        return nccl.version()

    def unique_id(self) -> bytes:
        return nccl.unique_id()

    def pair(self, identity: bytes, rank: int) -> Communicator:
        with self.current():
            return nccl.Communicator(identity, rank)

    def current(self) -> AbstractContextManager[Any]:
        """CUDA calls inside use this device."""
        return self._cupy.cuda.Device(self.ordinal)

    def stream(self) -> Any:
        """A non-blocking stream."""
        with self.current():
            return self._cupy.cuda.Stream(non_blocking=True)

    def allocate(self, nbytes: int) -> Any:
        """Memory (`.ptr`) outside cupy's pool: freed with its last reference."""
        with self.current():
            try:
                return self._cupy.cuda.Memory(max(nbytes, 1))
            except (self._cupy.cuda.memory.OutOfMemoryError, self._cupy.cuda.runtime.CUDARuntimeError) as e:
                free, _ = self._cupy.cuda.runtime.memGetInfo()
                raise TransportError(
                    f"nccl: no {nbytes / 2**20:.1f} MiB of GPU memory for a bucket, {free / 2**20:.1f} MiB are free",
                    remedy="connect with a smaller bucket_mib, or leave more memory free on that GPU",
                    transport="nccl",
                    reason="no room",
                    need_bytes=nbytes,
                    free_bytes=free,
                ) from e

    def put(self, pointer: int, data: Any, stream: Any) -> None:
        """Copy host bytes into device memory and wait."""
        held = np.frombuffer(bytes(data), np.uint8)
        runtime = self._cupy.cuda.runtime
        with self.current():
            runtime.memcpyAsync(pointer, held.ctypes.data, held.nbytes, runtime.memcpyHostToDevice, stream.ptr)
            stream.synchronize()

    def get(self, pointer: int, nbytes: int, stream: Any) -> bytes:
        """Device memory as host bytes, after the stream's pending work."""
        out = np.empty(nbytes, np.uint8)
        runtime = self._cupy.cuda.runtime
        with self.current():
            runtime.memcpyAsync(out.ctypes.data, pointer, nbytes, runtime.memcpyDeviceToHost, stream.ptr)
            stream.synchronize()
        return out.tobytes()
