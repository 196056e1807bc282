"""The interface of every transport: one channel from a trainer process to one rollout rank. Standard library only.

    trainer                                        rank
    sender = listen(...)                           receiver = open_receiver(endpoint, deadline)
    endpoint = sender.endpoint()  ──(gateway)──▶       │
    sender.ready(deadline)   ◀─────────────────────────┘
    sender.send(header, fill, deadline)  ─────▶    bucket = receiver.recv(deadline)
    sender.flush(deadline)   ◀──────────────────   receiver.release(bucket)      (or receiver.fail("why"))
    sender.close()                                 receiver.close()

A bucket has arrived when the receiver has released it: only then may `flush` return. Every wait has a deadline, in
seconds from the call; a peer that closes or dies ends a wait early. After a failure a channel is closed and a new one
opened: a partial bucket is never resumed. Transports are independent of plans: bytes in, the same bytes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

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

    def endpoint(self) -> dict[str, Any]:
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
