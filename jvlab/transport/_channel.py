"""The interface of every transport: one channel from a trainer process to one rollout rank. Standard library only.

    trainer                                        rank
    sender = listen(...)                           receiver = open_receiver(endpoint, deadline)
    endpoint = sender.endpoint()  ──(gateway)──▶       │
    sender.ready(deadline)   ◀─────────────────────────┘
    sender.send(header, fill, deadline)  ─────▶    parcel = receiver.recv(deadline)
    sender.flush(deadline)   ◀──────────────────   receiver.release(parcel)      (or receiver.fail("why"))
    sender.close()                                 receiver.close()

A bucket counts as arrived when the receiver released it: only then may `flush` return. Every wait has a deadline, in
seconds from the call; the end of the other side ends a wait early. After a failure a channel is closed and a new one is
opened: there is no way to go on with half a bucket. Transports know nothing of plans: bytes in, the same bytes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

Fill = Callable[[memoryview], None]  # writes exactly header.nbytes bytes


@dataclass(frozen=True)
class Header:
    """What a bucket is: the receiver finds its boxes in the plan by device and bucket."""

    version: int  # of the sync it belongs to; a receiver drops buckets of another
    device: int
    bucket: int
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """A bucket that arrived. `data` is valid until it is released."""

    header: Header
    data: memoryview
    token: Any = None  # the transport's own


class Sender(Protocol):
    """The trainer's end."""

    name: str  # of the transport, for reports and errors

    def endpoint(self) -> dict[str, Any]:
        """What the other side needs to open its end: plain values, sent through the gateway."""
        ...

    def ready(self, deadline: float) -> None:
        """Wait until the other side has opened its end."""
        ...

    def send(self, header: Header, fill: Fill, deadline: float) -> None:
        """Hand one bucket over; `fill` writes it where the transport wants it. May return before it arrived."""
        ...

    def flush(self, deadline: float) -> None:
        """Wait until every bucket sent was released; raises the receiver's error if it failed."""
        ...

    def arrived(self) -> int:
        """Buckets released so far, for progress; never waits."""
        ...

    def close(self) -> None:
        """End this end; the other one's waits end too. Can be called twice."""
        ...


class Receiver(Protocol):
    """The rank's end. One thread uses it."""

    name: str

    def recv(self, deadline: float) -> Bucket:
        """The next bucket."""
        ...

    def release(self, received: Bucket) -> None:
        """The bucket's bytes are where they belong; its room may be used again."""
        ...

    def fail(self, message: str) -> None:
        """Report to the sender that this side gave up, and why."""
        ...

    def close(self) -> None:
        """End this end. Can be called twice, and from another thread: a waiting `recv` then raises."""
        ...
