"""Device memory that another process may write: CUDA IPC handles of whole allocations, and offsets in them.

    exporter   Exports.add(pointer, nbytes) → place;  .plain() → dict of plain values
    importer   Mapped(plain, device) → .pointer(place);  .close()

A handle is for a whole allocation; torch's allocator puts many tensors into one. Memory that is mapped piecewise
(sleep mode's allocator, expandable segments) has no handle and is refused with a remedy.
"""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path
from typing import Any

from jvlab._errors import TransportError, Unsupported
from jvlab.transport._ipc_kernels import cupy

NO_HANDLE = (
    "launch the engine without sleep mode and without expandable segments "
    '(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False), or connect with transport="nccl" or "shm"'
)


def allocation_of(pointer: int) -> tuple[int, int]:
    """Start and size of the allocation that contains a device pointer."""
    base = ctypes.c_uint64()
    size = ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer)
    )
    if code:
        raise Unsupported(
            f"no device allocation at {pointer:#x} (CUDA error {code})",
            remedy=NO_HANDLE,
            pointer=pointer,
            code=code,
        )
    return base.value, size.value


def host_name() -> str:
    """An id of this machine, equal for all its processes, containers included."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def bus_id(device: int) -> str:
    """The GPU's PCI address: the same in every process, whatever CUDA_VISIBLE_DEVICES."""
    return cupy().cuda.runtime.deviceGetPCIBusId(device).lower()


class Exports:
    """Parts of this process's memory on one device that others may map."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._numbers: dict[int, int] = {}  # base -> number
        self._allocations: list[list[Any]] = []  # [handle in hex, bytes, base]

    def add(self, pointer: int, nbytes: int, name: str) -> list[int]:
        """The place of a tensor: allocation and byte offset. Raises Unsupported if there is no handle."""
        base, size = allocation_of(pointer)
        if pointer + nbytes > base + size:
            raise Unsupported(
                f"{name}: {nbytes} bytes at {pointer:#x} run over the end of their allocation of {size}: it is mapped "
                "in pieces, which CUDA IPC cannot export",
                remedy=NO_HANDLE,
                parameter=name,
            )
        if base not in self._numbers:
            self._numbers[base] = len(self._allocations)
            self._allocations.append([self._handle(base, name).hex(), size, base])
        return [self._numbers[base], pointer - base]

    def _handle(self, base: int, name: str) -> bytes:
        cp = cupy()
        try:
            with cp.cuda.Device(self.device):
                return bytes(cp.cuda.runtime.ipcGetMemHandle(base))
        except cp.cuda.runtime.CUDARuntimeError as e:
            raise Unsupported(
                f"{name}: its memory can't be exported by CUDA IPC ({e})",
                remedy=NO_HANDLE,
                parameter=name,
            ) from e

    def plain(self) -> dict[str, Any]:
        """What an importer needs, as plain values."""
        return {
            "host": host_name(),
            "pid": os.getpid(),
            "bus": bus_id(self.device),
            "allocations": self._allocations,
        }


class Mapped:
    """Another process's memory, mapped on one of our devices. Must be closed."""

    def __init__(self, plain: dict[str, Any], device: int, peer: str) -> None:
        self.device = device
        self._opened = []
        self._bases = []
        if plain["host"] != host_name():
            raise Unsupported(
                f"{peer} is on another host: CUDA IPC reaches no further than this one",
                remedy='connect with transport="nccl" or "tcp"',
            )
        self._check_reach(plain["bus"], peer)
        cp = cupy()
        runtime = cp.cuda.runtime
        try:
            with cp.cuda.Device(device):
                for handle, _, base in plain["allocations"]:
                    # CUDA cannot open a handle in the process that created it
                    if plain["pid"] == os.getpid():
                        self._bases.append(int(base))
                        continue
                    # flag 1: lazy peer access, the default
                    pointer = runtime.ipcOpenMemHandle(bytes.fromhex(handle))
                    self._opened.append(pointer)
                    self._bases.append(int(pointer))
        except runtime.CUDARuntimeError as e:
            self.close()
            raise TransportError(
                f"the memory of {peer} (GPU {plain['bus']}) could not be opened on our GPU {bus_id(device)}: {e}",
                remedy="both processes need to see the same GPU or peers of it, under one user and one IPC namespace "
                '(containers: --ipc=host); or connect with transport="nccl"',
            ) from e

    def _check_reach(self, bus: str, peer: str) -> None:
        cp = cupy()
        ours = {bus_id(k): k for k in range(cp.cuda.runtime.getDeviceCount())}
        other = ours.get(bus, self.device)  # if it is not visible to us, CUDA decides
        if other != self.device and not cp.cuda.runtime.deviceCanAccessPeer(
            self.device, other
        ):
            raise Unsupported(
                f"our GPU {bus_id(self.device)} has no peer access to GPU {bus} of {peer}",
                remedy='connect with transport="nccl"',
            )

    def pointer(self, place: list[int]) -> int:
        """Our address of a place."""
        number, offset = place
        return self._bases[number] + int(offset)

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        opened = self._opened
        self._opened = []
        self._bases = []
        if not opened:
            return
        cp = cupy()
        with cp.cuda.Device(self.device):
            for pointer in opened:
                try:
                    cp.cuda.runtime.ipcCloseMemHandle(pointer)
                # the context is gone, and with it the mapping
                except cp.cuda.runtime.CUDARuntimeError:
                    return
