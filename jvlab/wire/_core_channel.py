"""A socket between a trainer and an engine core on one host, for urgent messages (see engine/worker/_ipc_core.py).

A frame is a kind, a weight version, a length and a payload. A receiver spins for a while before it sleeps: a sync takes
milliseconds, and waking a thread takes a good part of one.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

# Identifies the peer of a local socket. Abstract Unix sockets have no permissions: any local user may connect.

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def same_user(end: socket.socket) -> bool:
    """Whether the peer runs as our own user, according to the kernel (SO_PEERCRED)."""
    credentials = end.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    return _CREDENTIALS.unpack(credentials)[1] == os.getuid()


# ----------------------------------------------------------------------------------------------------

# kinds of frames
WAKE = b"K"
ORDER = b"O"
GO = b"G"
WRITTEN = b"W"
CLAIMED = b"C"
DONE = b"D"
# first byte of WRITTEN and CLAIMED: whether NaN or Inf was found (and allowed)
FINITE = b"\0"
NON_FINITE = b"\1"
# roles of a connection: orders, or the signals within a sync
ORDERS = b"o"
SIGNALS = b"w"
HEADER = struct.Struct("<cQQ")
KEY_BYTES = 32
SPIN_SECONDS = 0.05
POLL_EVERY = 16  # receive attempts between two polls of the other socket
MAX_FRAME_BYTES = 64 << 20
ADMIT_SECONDS = 2.0  # for a key to arrive, or the rest of an order
LEND_SECONDS = 2.0  # for the engine core to come for the order after a wake-up
CLOSE_SECONDS = 10.0


class OtherSocketReady(Exception):
    """Read the other socket instead: it has data first, or this connection broke."""


class CoreChannel:
    """One end of a connection. Used by one thread."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.setblocking(False)
        self._buffer = bytearray()

    @property
    def is_open(self) -> bool:
        return self._end.fileno() >= 0

    def send(
        self, kind: bytes, version: int, payload: bytes = b"", seconds: float = 5.0
    ) -> None:
        """Send a frame; raises OSError if it cannot be delivered."""
        self._end.settimeout(seconds)
        self._end.sendall(HEADER.pack(kind, version, len(payload)) + payload)
        self._end.setblocking(False)

    def receive(
        self, until: float, other: socket.socket | None = None
    ) -> tuple[bytes, int, bytes]:
        """The next frame. TimeoutError after `until` (time.monotonic); ConnectionError when the peer is gone.

        `other` is polled too: `OtherSocketReady` is raised if it becomes readable first.
        """
        sleep_from = time.monotonic() + SPIN_SECONDS
        watch = select.poll()
        watch.register(self._end, select.POLLIN)
        if other is not None:
            watch.register(other, select.POLLIN)
        attempts = 0
        while (frame := self._frame()) is None:
            try:
                part = self._end.recv(1 << 16)  # no deadline: the socket does not block
            except BlockingIOError:
                attempts += 1
                now = time.monotonic()
                if now >= until:
                    raise TimeoutError from None
                asleep = now >= sleep_from
                if asleep or (other is not None and attempts % POLL_EVERY == 0):
                    ready = watch.poll(min(until - now, 1.0) * 1e3 if asleep else 0)
                    files = [file for file, _ in ready]
                    if (
                        other is not None
                        and other.fileno() in files
                        and self._end.fileno() not in files
                    ):
                        raise OtherSocketReady from None
                continue
            if not part:
                raise ConnectionError("the peer closed the connection")
            self._buffer += part
        return frame

    @property
    def buffered_frame(self) -> int:
        """Size in bytes of the next frame if all of it has been received, else 0."""
        if len(self._buffer) < HEADER.size:
            return 0
        size = HEADER.unpack_from(self._buffer)[2]
        if size > MAX_FRAME_BYTES:
            raise ConnectionError(f"a frame of {size} bytes")
        return HEADER.size + size if len(self._buffer) >= HEADER.size + size else 0

    def _frame(self) -> tuple[bytes, int, bytes] | None:
        end = self.buffered_frame
        if not end:
            return None
        kind, version, _ = HEADER.unpack_from(self._buffer)
        payload = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return kind, version, payload

    def close(self) -> None:
        """Can be called twice."""
        self._end.close()


class CoreChannelServer:
    """The engine core's end: accepts one connection for orders and one for signals, from clients that have the key.

    A thread accepts connections and passes orders to `on_order`; code that runs a sync uses the `channel`. A wake-up
    calls `on_wake`; any thread may then read the `next_order` itself, which saves a thread switch.
    """

    def __init__(
        self,
        on_order: Callable[[bytes], None],
        on_wake: Callable[[], None] | None = None,
    ) -> None:
        # abstract: no file to clean up
        self._path = f"\0jvlab-core-{secrets.token_hex(8)}"
        self._key = secrets.token_hex(KEY_BYTES // 2)
        self._on_order = on_order
        self._on_wake = on_wake
        # the connection for orders, while another thread may read it
        self._lent: CoreChannel | None = None
        # held by who reads the lent connection, or takes it back
        self._reading = threading.Lock()
        self._returned = threading.Event()
        self._closing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stop, self._stopped = socket.socketpair()
        try:
            self._listener.bind(self._path)
            self._listener.listen(4)
        except OSError:
            for end in (self._listener, self._stop, self._stopped):
                end.close()
            raise
        self._channel: CoreChannel | None = None
        self._connected = threading.Condition()
        self._thread = threading.Thread(
            target=self._serve, name="jvlab-core", daemon=True
        )
        self._thread.start()

    def invitation(self) -> list[str]:
        """What a trainer needs to connect: path and key."""
        return [self._path, self._key]

    def channel(self, until: float) -> CoreChannel:
        """The trainer's connection for signals; waits for it. TimeoutError after `until` (time.monotonic)."""
        with self._connected:
            if not self._connected.wait_for(
                lambda: self._channel is not None, max(0.0, until - time.monotonic())
            ):
                raise TimeoutError("no trainer connected")
            assert self._channel is not None
            return self._channel

    def disconnect(self) -> None:
        """Close the connection for signals; the trainer may open another."""
        self._set_channel(None)

    def _set_channel(self, channel: CoreChannel | None) -> None:
        with self._connected:
            old = self._channel
            self._channel = channel
            self._connected.notify_all()
        if old is not None:
            old.close()

    def next_order(self, seconds: float) -> bytes | None:
        """The order that follows a wake-up within `seconds`, or None. The server's thread reads again afterwards."""
        with self._reading:
            channel = self._lent
            self._lent = None
            try:
                if channel is not None:
                    kind, _, order = channel.receive(time.monotonic() + seconds)
                    return order if kind == ORDER else None
            except OSError:  # timed out or disconnected: the server's thread handles it
                pass
            finally:
                self._returned.set()
        return None

    def _lend(self, channel: CoreChannel) -> None:
        """Let another thread read the next order; if none comes for it in time, this one does."""
        if self._on_wake is not None:
            self._returned.clear()
            if self._closing:
                return
            self._lent = channel
            self._on_wake()
            self._returned.wait(LEND_SECONDS)
            with self._reading:  # who reads now has a deadline
                self._lent = None

    def _serve(self) -> None:
        orders: CoreChannel | None = None
        while True:
            watch = select.poll()
            for end in (
                self._stopped,
                self._listener,
                *([orders._end] if orders is not None else []),
            ):
                watch.register(end, select.POLLIN)
            # received together with the previous one
            buffered = orders is not None and orders.buffered_frame
            # no deadline: `close` wakes it
            ready = {file for file, _ in watch.poll(0 if buffered else None)}
            if self._stopped.fileno() in ready:
                break
            if self._listener.fileno() in ready:
                role, channel = self._admit()
                if role == ORDERS:
                    if orders is not None:
                        orders.close()
                    orders = channel
                elif role == SIGNALS:
                    self._set_channel(channel)
            elif orders is not None:
                try:
                    kind, _, order = orders.receive(time.monotonic() + ADMIT_SECONDS)
                    if kind == WAKE:
                        self._lend(orders)
                    else:
                        self._on_order(order)
                # disconnected, a partial frame, or not an order
                except (OSError, ValueError):
                    orders.close()
                    orders = None
        if orders is not None:
            orders.close()

    def _admit(self) -> tuple[bytes, CoreChannel | None]:
        end, _ = self._listener.accept()  # no deadline: there is one
        try:
            sent = (
                read_exactly(end, KEY_BYTES + 1, time.monotonic() + ADMIT_SECONDS)
                if same_user(end)
                else b""
            )
            if hmac.compare_digest(sent[:KEY_BYTES], self._key.encode()):
                return sent[KEY_BYTES:], CoreChannel(end)
        except OSError:
            pass
        end.close()
        return b"", None

    def close(self) -> None:
        """Accept no more connections, and end the thread. Can be called twice."""
        if self._thread.is_alive():
            self._stop.send(b".")
            self._closing = True
            self._lent = None
            self._returned.set()  # no thread will ask for the next order
            self._thread.join(CLOSE_SECONDS)
        self.disconnect()
        for end in (self._listener, self._stop, self._stopped):
            end.close()


def connect(invitation: list[Any], role: bytes, seconds: float) -> CoreChannel:
    """Connect to the server of this invitation; raises OSError if there is none."""
    path, key = invitation
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.settimeout(seconds)
        end.connect(path)  # no deadline: the socket has a timeout
        end.sendall(key.encode() + role)
    except OSError:
        end.close()
        raise
    return CoreChannel(end)


def read_exactly(end: socket.socket, size: int, until: float) -> bytes:
    """Exactly `size` bytes; TimeoutError after `until` (time.monotonic), ConnectionError if the peer closes first."""
    parts: list[bytes] = []
    while size:
        end.settimeout(max(0.001, until - time.monotonic()))
        part = end.recv(size)  # no deadline: the socket has a timeout
        if not part:
            raise ConnectionError("the peer closed it")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def mark(nonfinite: bool) -> bytes:
    """The first byte of WRITTEN and CLAIMED."""
    return NON_FINITE if nonfinite else FINITE


def wanted(terms: Any) -> dict[str, Any]:
    """The terms of a sync that workers need."""
    return {
        "version": terms.version,
        "mode": terms.mode,
        "verify": terms.verify,
        "bucket_seconds": terms.bucket_seconds,
    }


def order(terms: Any, seconds: float, call: str) -> dict[str, Any]:
    """The order for a sync; both trainer and front end send it to the core, and `call` identifies it."""
    return {
        "pause": terms.pause,
        "wanted": wanted(terms),
        "verify": terms.verify,
        "recompute": terms.kv == "recompute",
        "seconds": seconds,
        "call": call,
    }
