"""What every transport shares: the interface, the process at the other end, deadlines and errors that name it.

At the end its simplest implementation, `loopback`. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from jvlab._errors import ConfigError, TransportError
from jvlab._files import Plain

# The interface of every transport: one channel from a trainer process to one rollout rank. Standard library only.
#     trainer                                        rank
#     sender = listen(...)                           receiver = open_receiver(endpoint, deadline)
#     endpoint = sender.endpoint()  ──(gateway)──▶       │
#     sender.ready(deadline)   ◀─────────────────────────┘
#     sender.send(header, fill, deadline)  ─────▶    bucket = receiver.recv(deadline)
#     sender.flush(deadline)   ◀──────────────────   receiver.release(bucket)      (or receiver.fail("why"))
#     sender.close()                                 receiver.close()
#
# A bucket has arrived when the receiver has released it: only then may `flush` return. Every wait has a deadline, in
# seconds from the call; a peer that closes or dies ends a wait early. After a failure a channel is closed and a new one
# opened: a partial bucket is never resumed. Transports are independent of plans: bytes in, the same bytes out.

Fill = Callable[[memoryview], None]  # writes exactly header.nbytes bytes


@dataclass(frozen=True)
class Header:
    """Identifies a bucket: the receiver finds its boxes in the plan by device and bucket.

    >>> jv.transport.Header(version=1, device=0, bucket=3, nbytes=4096).bucket
    3
    """

    version: int  # of its sync; a receiver drops buckets of other versions
    device: int
    bucket: int
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """A received bucket. `data` is valid until it is released.

    >>> sender, receiver = jv.transport.pair()
    >>> sender.send(jv.transport.Header(1, 0, 0, nbytes=2), lambda memory: memory.__setitem__(0, 7), deadline=5)
    >>> bucket = receiver.recv(deadline=5)
    >>> bucket.header.version, bucket.data[0]
    (1, 7)
    """

    header: Header
    data: memoryview
    token: Any = None  # private to the transport


class Sender(Protocol):
    """The trainer's end.

    >>> sender, receiver = jv.transport.pair()
    >>> sender.name, sender.endpoint()["transport"], sender.arrived()
    ('loopback', 'loopback', 0)
    """

    name: str  # of the transport, for reports and errors

    def endpoint(self) -> Plain:
        """What the receiver needs to open its end: plain values, sent through the gateway."""
        ...

    def ready(self, deadline: float) -> None:
        """Wait until the receiver has opened its end."""
        ...

    def send(self, header: Header, fill: Fill, deadline: float) -> None:
        """Send one bucket; `fill` writes it into the transport's buffer. May return before it has arrived."""
        ...

    def flush(self, deadline: float) -> None:
        """Wait until every bucket is released; raises the receiver's error if it failed."""
        ...

    def arrived(self) -> int:
        """Buckets released so far, for progress; never waits."""
        ...

    def close(self) -> None:
        """Close this end, which also ends the peer's waits. Idempotent."""
        ...


class Receiver(Protocol):
    """The rank's end. One thread uses it.

    >>> sender, receiver = jv.transport.pair()
    >>> sender.close()
    >>> receiver.recv(deadline=5)
    Traceback (most recent call last):
    jvlab._errors.TransportError: loopback: the sender closed the channel
      → open a new one
    """

    name: str

    def recv(self, deadline: float) -> Bucket:
        """The next bucket."""
        ...

    def release(self, received: Bucket) -> None:
        """The bucket has been consumed; its buffer may be reused."""
        ...

    def fail(self, message: str) -> None:
        """Report to the sender that this side failed, and why."""
        ...

    def close(self) -> None:
        """Close this end. Idempotent; called from another thread, it makes a waiting `recv` raise."""
        ...


# The process at the other end, identified by pid and start time.


@cache
def place() -> str:
    """This boot and PID namespace: a pid is meaningful only inside one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""  # no /proc: liveness can't be checked, so only deadlines end a wait


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time (clock ticks since boot) of a process; None if it does not exist."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return words[0].decode(), int(words[19])


@dataclass(frozen=True)
class Peer:
    """A process. Its start time distinguishes it from a later one with the same pid."""

    pid: int
    start: int
    place: str
    host: str
    label: str = ""

    @classmethod
    def me(cls, label: str = "") -> Peer:
        found = _stat(os.getpid())
        return cls(
            os.getpid(), found[1] if found else 0, place(), socket.gethostname(), label
        )

    @classmethod
    def read(cls, values: Any) -> Peer:
        """From what the other side sent; anything but the expected fields is refused."""
        try:
            text = [str(values[key]) for key in ("place", "host", "label")]
            return cls(int(values["pid"]), int(values["start"]), *text)
        except (KeyError, TypeError, ValueError) as e:
            raise TransportError(
                f"the other side's description of itself is unreadable: {values!r}"
            ) from e

    def values(self) -> Plain:
        return asdict(self)

    @property
    def here(self) -> bool:
        """Whether its pid can be checked from this process."""
        return bool(self.place) and self.place == place()

    def dead(self) -> bool:
        """Whether it is known to be dead; unknown, so False, for a process of another host or container."""
        if not self.here:
            return False
        found = _stat(self.pid)
        # a zombie counts as dead
        return found is None or found[0] in "ZX" or found[1] != self.start

    def __str__(self) -> str:
        where = "" if self.place == place() else f" on {self.host}"
        return f"{self.label or 'the other side'} (process {self.pid}{where})"


class Clock:
    """One wait's deadline, and the error when it passes."""

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:  # also refuses NaN
            raise ConfigError(
                f"a deadline of {seconds} s",
                remedy="give seconds from now, more than 0",
            )
        self.seconds, self.end = seconds, time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())

    def check(self, transport: str, who: object, what: str) -> None:
        """Raise if the deadline has passed."""
        if time.monotonic() >= self.end:
            raise late(transport, self.seconds, who, what)


def late(transport: str, seconds: float, who: object, what: str) -> TransportError:
    return TransportError(
        f"{transport}: waited {seconds:g} s for {who} to {what}",
        remedy="check whether it is busy or stopped; give a longer deadline if the work needs it",
        transport=transport,
        waited_for=str(who),
        seconds=seconds,
        reason="deadline",
    )


def lost(transport: str, who: object, what: str) -> TransportError:
    return TransportError(
        f"{transport}: {who} died or lost its connection while we waited for it to {what}",
        remedy="check its log; a new channel has to be opened",
        transport=transport,
        waited_for=str(who),
        reason="lost",
    )


def closed(transport: str, who: object) -> TransportError:
    return TransportError(
        f"{transport}: {who} closed the channel",
        remedy="open a new one",
        transport=transport,
        waited_for=str(who),
        reason="closed",
    )


def closed_here(transport: str) -> TransportError:
    return TransportError(
        f"{transport}: this end of the channel is closed",
        remedy="open a new one",
        transport=transport,
        reason="closed here",
    )


def gave_up(transport: str, who: object, message: str) -> TransportError:
    return TransportError(
        f"{transport}: {who} gave up: {message}",
        remedy="a new channel has to be opened",
        transport=transport,
        waited_for=str(who),
        reason="failed",
        said=message,
    )


def check_fits(transport: str, nbytes: int, slot_bytes: int) -> None:
    """A bucket must fit into a slot; checked before anything is sent."""
    if not 0 <= nbytes <= slot_bytes:
        raise ConfigError(
            f"{transport}: a bucket of {nbytes} bytes does not fit into a slot of {slot_bytes}",
            remedy=f"open the channel with slot_bytes={max(nbytes, 1)} or make a plan with smaller buckets",
        )


def check_ring(transport: str, slot_bytes: int, slots: int) -> None:
    if slot_bytes < 1 or slots < 1:
        raise ConfigError(
            f"{transport}: {slots} slots of {slot_bytes} bytes",
            remedy="both must be 1 or more; 2 slots overlap work",
        )


# `loopback`: both ends in one process, with the guarantees of the real transports. Public, for tests and dry runs.

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
        self.sent = self.released = 0
        self.opened = self.closed = self.receiver_closed = False
        self.failure = ""
        self._key = secrets.token_hex(8)
        _waiting[self._key] = self

    def endpoint(self) -> Plain:
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


def open_loopback(endpoint: Plain) -> LoopbackReceiver:
    """The other end of a loopback sender of this process."""
    sender = _waiting.pop(str(endpoint["key"]), None)
    if sender is None:
        raise TransportError(
            "loopback: no sender of this process waits at that endpoint",
            remedy="loopback joins two ends in one process; between processes use shm, tcp or disk",
            reason="lost",
        )
    return LoopbackReceiver(sender)
