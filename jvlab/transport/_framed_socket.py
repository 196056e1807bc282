"""The control socket of `shm`, `gloo` and `nccl`: small framed messages, and bounded waits.

A socket, not flags in shared memory, because the kernel then does what is hard in Python: the peer's death is seen at
once (its kernel closes the socket), a waiting thread sleeps without polling, and a message is a memory barrier: a send
puts the message into a queue under the socket's lock, a receive takes it out under the same lock. Writes made before
the send happen before the unlock (a release), the receiver's lock (an acquire) comes after it, and its reads after
that. This holds on aarch64 too, where a plain store of a flag would not be ordered after the payload's stores.

A forked child of the peer (not one that was exec'ed) keeps the socket open, so the peer is also checked by pid and
start time, every TICK.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading

from jvlab._errors import TransportError
from jvlab.transport._peer import Clock, Peer, closed, closed_here, gave_up, lost

HELLO, WELCOME, OPEN, BUCKET, RELEASE, FAIL, BYE = range(1, 8)
TICK = 0.1  # seconds between two checks that the peer is alive
LONGEST = 64 << 10  # bytes of a message; a longer one is invalid
_FRAME = struct.Struct("<IB")


def frame(kind: int, body: bytes) -> bytes:
    return _FRAME.pack(len(body), kind) + body


class FramedSocket:
    """One end. Messages arrive in order; one thread waits, any thread may close."""

    def __init__(self, sock: socket.socket, transport: str, peer: Peer | str) -> None:
        self.transport, self.peer = transport, peer
        self.fds: list[int] = []  # received, not yet used
        self._sock, self._owner = sock, os.getpid()
        self._unix = sock.family == socket.AF_UNIX
        self._buffer, self._ended, self._dead, self._closed = bytearray(), False, False, False
        self._lock = threading.RLock()  # re-entrant: a hook called during a wait may close
        sock.setblocking(False)
        if not self._unix:
            _tune_tcp(sock)

    def put(self, kind: int, body: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Send one message. A socket's queue holds hundreds and a channel has a few in flight, so this never waits."""
        data = frame(kind, body)
        with self._lock:
            if self._closed:
                raise closed_here(self.transport)
            try:
                if fds:
                    sent = socket.send_fds(self._sock, [data], list(fds))
                else:
                    sent = self._sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError as e:
                raise self._after_end("take a message") from e
            if sent != len(data):
                raise TransportError(
                    f"{self.transport}: {self.peer} does not read its messages",
                    remedy="check whether it is stopped",
                    transport=self.transport,
                    waited_for=str(self.peer),
                    reason="deadline",
                )

    def get(self, clock: Clock, what: str) -> tuple[int, bytes]:
        """The next message; `what` names what the peer is expected to do."""
        while True:
            with self._lock:
                if message := self._next(what):
                    return message
                clock.check(self.transport, self.peer, what)
                waiter = select.poll()
                waiter.register(self._sock, select.POLLIN)
                ready = waiter.poll(1000 * min(clock.left(), TICK))
            if not ready and isinstance(self.peer, Peer) and self.peer.dead():
                self._dead = True  # messages sent just before its death are still read

    def poll(self) -> tuple[int, bytes] | None:
        """The next message if there is one; never waits, and does not raise for a closed peer."""
        with self._lock:
            return None if self._closed else self._parse()

    def ended(self, what: str) -> TransportError | None:
        """Why the peer is gone; None while it is alive. Consumes no message then."""
        with self._lock:
            if self._closed:
                raise closed_here(self.transport)
            waiter = select.poll()
            waiter.register(self._sock, getattr(select, "POLLRDHUP", 0))  # reported even with unread messages
            if not waiter.poll(0) and not (isinstance(self.peer, Peer) and self.peer.dead()):
                return None
            while message := self._parse():
                if message[0] == FAIL:
                    return gave_up(self.transport, self.peer, message[1].decode(errors="replace"))
                if message[0] == BYE:
                    return closed(self.transport, self.peer)
            return lost(self.transport, self.peer, what)

    def _next(self, what: str) -> tuple[int, bytes] | None:
        if self._closed:
            raise closed_here(self.transport)
        message = self._parse()
        if message is None and (self._ended or self._dead):
            raise lost(self.transport, self.peer, what)
        if message and message[0] == BYE:
            self._ended = True
            raise closed(self.transport, self.peer)  # so that a second wait reports it too
        return message

    def _after_end(self, what: str) -> TransportError:
        """Why a send failed: the peer's last message, if there was one."""
        while message := self._parse():
            if message[0] == BYE:
                return closed(self.transport, self.peer)
        return lost(self.transport, self.peer, what)

    def _parse(self) -> tuple[int, bytes] | None:
        while not self._ended:
            if len(self._buffer) >= _FRAME.size:
                size, kind = _FRAME.unpack_from(self._buffer)
                if size > LONGEST:
                    raise TransportError(f"{self.transport}: {self.peer} sent an invalid message")
                if len(self._buffer) >= _FRAME.size + size:
                    body = bytes(self._buffer[_FRAME.size : _FRAME.size + size])
                    del self._buffer[: _FRAME.size + size]
                    return kind, body
            try:
                data = self._read()
            except BlockingIOError:
                return None
            except OSError:  # reset: the peer closed with our messages unread
                data = b""
            if not data:
                self._ended = True
            self._buffer += data
        return None

    def _read(self) -> bytes:
        if not self._unix:
            return self._sock.recv(LONGEST)  # no deadline: the socket does not block
        data, fds, _, _ = socket.recv_fds(self._sock, LONGEST, 4, socket.MSG_CMSG_CLOEXEC)
        self.fds += fds
        return data

    def close(self) -> None:
        """Close this end, waking a thread that waits on it."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            if self._owner == os.getpid():  # a forked copy must not close its parent's connection
                with contextlib.suppress(BlockingIOError):
                    self._sock.send(frame(BYE, b""))
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the waiter, which then releases the lock
        with self._lock:
            self._sock.close()
            for fd in self.fds:
                os.close(fd)
            self.fds.clear()


def _tune_tcp(sock: socket.socket) -> None:
    """No delay for small messages; keepalive detects a vanished host in about 10 s."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
