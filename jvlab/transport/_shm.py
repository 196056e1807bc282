"""`shm`: a ring of buckets in shared memory between two processes of one host; the embedded default.

    sender: memfd (no name) ── abstract Unix socket, SCM_RIGHTS ──▶ receiver maps the same pages
    fill writes a slot in place → BUCKET → the receiver reads it in place → RELEASE

The memory has no name: there is nothing to unlink, so nothing is left behind however a process dies, kill -9 included,
and the size of /dev/shm (64 MiB in a plain container) does not matter. Why a message orders memory on every processor:
see _slots.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import Any

from jvlab._errors import TransportError
from jvlab.transport._peer import Clock, Peer, check_ring, closed_here
from jvlab.transport._slots import (
    WELCOME,
    FramedSocket,
    SlotReceiver,
    SlotSender,
    connect,
)

# Memory available to this process: of the machine, or of its cgroup if that is less.

GROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Free memory and reclaimable page cache."""
    import psutil

    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # "max", or no cgroup v2
        limit, used = (
            int((GROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
        stat = (GROUP / "memory.stat").read_text().split()
        available = min(
            available, limit - used + int(stat[stat.index("inactive_file") + 1])
        )
    return max(0, available)


# ----------------------------------------------------------------------------------------------------

_PAGE = mmap.PAGESIZE
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // _PAGE) * _PAGE


def _map(fd: int, size: int) -> mmap.mmap:
    """Populate the page table now: a fault per page would cost more than the copy."""
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _check_owner(sock: socket.socket) -> None:
    """Abstract sockets have no file permissions, so the peer's user is checked."""
    _, uid, _ = struct.unpack(
        "iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    if uid != os.getuid():
        raise TransportError(
            f"shm: the other side runs as user {uid}, we as {os.getuid()}",
            remedy="run both as one",
        )


class ShmSender(SlotSender):
    """The trainer's end: creates the ring."""

    name = "shm"

    def __init__(self, slot_bytes: int, slots: int, peer: str, label: str) -> None:
        check_ring(self.name, slot_bytes, slots)
        self._stride = _stride(slot_bytes)
        self._fd = -1
        self._memory = None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener_name = f"jvlab-{os.getpid()}-{secrets.token_hex(16)}"
            listener.bind("\0" + self._listener_name)
            listener.listen(4)
            self._allocate(self._stride * slots)
            super().__init__(listener, slot_bytes, slots, peer, label)
        except BaseException:
            listener.close()
            self._release_resources()
            raise

    def _allocate(self, size: int) -> None:
        free = available_bytes()
        if size > free:  # the kernel would overcommit and kill some process later
            raise _no_room(size, free)
        self._fd = os.memfd_create("jvlab-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _no_room(size, free) from e
            raise
        # shrinking the file would kill the receiver with SIGBUS
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self._memory = _map(self._fd, size)

    def _address(self) -> dict[str, Any]:
        return {"socket": self._listener_name}

    def _send_welcome(self, framed: FramedSocket, clock: Clock) -> None:
        _check_owner(framed.sock)
        framed.put(WELCOME, fds=(self._fd,))
        os.close(self._fd)  # the mappings keep the memory alive
        self._fd = -1

    def _view(self, slot: int) -> memoryview:
        if self._memory is None:
            raise closed_here(self.name)
        at = slot * self._stride
        return memoryview(self._memory)[at : at + self.slot_bytes]

    def _release_resources(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._memory is not None:
            with contextlib.suppress(BufferError):  # a view is in use: unmapped with it
                self._memory.close()
            self._memory = None


class ShmReceiver(SlotReceiver):
    """The rank's end: maps the sender's ring."""

    name = "shm"

    def __init__(self, endpoint: dict[str, Any], clock: Clock, label: str) -> None:
        self._memory: mmap.mmap | None = None
        sender = Peer.read(endpoint["sender"])
        if not sender.here:
            raise TransportError(
                f"shm: {sender} runs on another host or in another container",
                remedy='use transport="tcp"',
                transport="shm",
                reason="elsewhere",
            )
        sock = connect(
            socket.AF_UNIX, "\0" + str(endpoint["socket"]), self.name, sender, clock
        )
        super().__init__(endpoint, sock, clock, label)

    def _join(self, endpoint: dict[str, Any], clock: Clock) -> None:
        _check_owner(self._framed.sock)
        if len(self._framed.fds) != 1:
            raise TransportError(f"shm: {self._framed.peer} sent no memory")
        fd = self._framed.fds.pop()
        try:
            self._stride = _stride(self.slot_bytes)
            size = self._stride * self.slots
            found = os.fstat(fd).st_size
            if (
                found != size
                or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            ):
                raise TransportError(
                    f"shm: the ring has {found} bytes, or is not sealed; expected {size}"
                )
            self._memory = _map(fd, size)
        finally:
            os.close(fd)

    def _pull(self, slot: int, nbytes: int, clock: Clock) -> memoryview:
        if self._memory is None:
            raise closed_here(self.name)
        at = slot * self._stride
        return memoryview(self._memory)[at : at + nbytes].toreadonly()

    def _release_resources(self) -> None:
        if self._memory is not None:
            with contextlib.suppress(BufferError):
                self._memory.close()
            self._memory = None


def _no_room(size: int, free: int) -> TransportError:
    return TransportError(
        f"shm: the ring needs {size / 2**20:.1f} MiB of memory, but {free / 2**20:.1f} MiB are free",
        remedy="use fewer or smaller slots",
        transport="shm",
        need_bytes=size,
        free_bytes=free,
        reason="no room",
    )
