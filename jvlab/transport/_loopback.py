"""`loopback`: both ends in one process, with the guarantees of the real transports. Public, for tests and dry runs."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from jvlab._errors import TransportError
from jvlab.transport._peer import (
    Bucket,
    Clock,
    Fill,
    Header,
    check_fits,
    check_ring,
    closed,
    closed_here,
    gave_up,
    late,
)

# senders whose other end is not open yet, by the key in their endpoint
_waiting: dict[str, LoopbackSender] = {}


class LoopbackSender:
    """The sending end; holds the state that both ends share."""

    name = "loopback"

    def __init__(
        self,
        slot_bytes: int,
        slots: int,
        peer: str = "the receiver",
        label: str = "the sender",
    ) -> None:
        check_ring(self.name, slot_bytes, slots)
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.peer = peer
        self.label = label
        self.changed = threading.Condition()
        self.queue: deque[tuple[Header, bytearray]] = deque()
        self.filling = self.sent = self.released = 0
        self.opened = self.closed = self.receiver_closed = False
        self.failure = ""
        self._key = secrets.token_hex(8)
        _waiting[self._key] = self

    def endpoint(self) -> dict[str, Any]:
        return {"transport": self.name, "key": self._key}

    def ready(self, deadline: float) -> None:
        self._wait(Clock(deadline), lambda: self.opened, "open its end")

    def send(self, header: Header, fill: Fill, deadline: float) -> None:
        check_fits(self.name, header.nbytes, self.slot_bytes)
        if not self.opened:
            raise TransportError(
                f"loopback: {self.peer} has not opened its end",
                remedy="call ready() first",
            )
        what = f"release a bucket, so that bucket {header.bucket} has room"
        self._wait(
            Clock(deadline), lambda: self.sent - self.released < self.slots, what
        )
        if self.receiver_closed:
            raise closed(self.name, self.peer)
        data = bytearray(header.nbytes)
        fill(memoryview(data))
        with self.changed:
            self.queue.append((header, data))
            self.sent += 1
            self.changed.notify_all()

    def flush(self, deadline: float) -> None:
        self._wait(
            Clock(deadline), lambda: self.released >= self.sent, "release every bucket"
        )

    def arrived(self) -> int:
        return self.released

    def close(self) -> None:
        _waiting.pop(self._key, None)
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _wait(self, clock: Clock, done: Callable[[], bool], what: str) -> None:
        def over() -> bool:
            return bool(self.closed or self.failure or self.receiver_closed or done())

        with self.changed:
            if not self.changed.wait_for(over, clock.left()):
                raise late(self.name, clock.seconds, self.peer, what)
            if self.closed:
                raise closed_here(self.name)
            if self.failure:
                raise gave_up(self.name, self.peer, self.failure)
            if self.receiver_closed and not done():
                raise closed(self.name, self.peer)


class LoopbackReceiver:
    """The receiving end."""

    name = "loopback"

    def __init__(self, sender: LoopbackSender) -> None:
        self._sender = sender
        self._held = 0
        self._closed = False
        with sender.changed:
            sender.opened = True
            sender.changed.notify_all()

    def recv(self, deadline: float) -> Bucket:
        clock = Clock(deadline)
        s = self._sender
        with s.changed:
            if not s.changed.wait_for(
                lambda: bool(self._closed or s.queue or s.closed), clock.left()
            ):
                raise late(self.name, clock.seconds, s.label, "send the next bucket")
            if self._closed:
                raise closed_here(self.name)
            if not s.queue:
                raise closed(self.name, s.label)
            header, data = s.queue.popleft()
            return Bucket(header, memoryview(data).toreadonly(), [True])

    def release(self, received: Bucket) -> None:
        with self._sender.changed:
            if not received.token:
                raise TransportError(
                    f"loopback: bucket {received.header.bucket} was released already"
                )
            received.token.clear()
            if self._sender.closed:
                raise closed(self.name, self._sender.label)
            self._sender.released += 1
            self._sender.changed.notify_all()
        with contextlib.suppress(BufferError):
            received.data.release()

    def fail(self, message: str) -> None:
        with self._sender.changed:
            self._sender.failure = self._sender.failure or message
            self._sender.changed.notify_all()

    def close(self) -> None:
        with self._sender.changed:
            self._closed = self._sender.receiver_closed = True
            self._sender.changed.notify_all()


def pair(
    slots: int = 3, slot_bytes: int = 1 << 40
) -> tuple[LoopbackSender, LoopbackReceiver]:
    """Two connected ends in this process. Slots are as large as their buckets; `slot_bytes` is only a limit.

    >>> sender, receiver = jv.transport.pair()
    >>> sender.send(jv.transport.Header(1, 0, 0, nbytes=1), lambda memory: memory.__setitem__(0, 5), deadline=5)
    >>> receiver.recv(deadline=5).data[0]
    5
    """
    sender = LoopbackSender(slot_bytes, slots)
    return sender, open_loopback(sender.endpoint())


def open_loopback(endpoint: dict[str, Any]) -> LoopbackReceiver:
    """The other end of a loopback sender of this process."""
    sender = _waiting.pop(str(endpoint["key"]), None)
    if sender is None:
        raise TransportError(
            "loopback: no sender of this process waits at that endpoint",
            remedy="loopback joins two ends in one process; between processes use shm, gloo or disk",
            reason="lost",
        )
    return LoopbackReceiver(sender)
