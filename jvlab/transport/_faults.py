"""Fault injection: a sender that fails on request, so that users can test their recovery.

faults = Faults(flip=3)              # one bit of bucket 3 is flipped in transit
sender = faults.wrap(sender)
...
assert faults.fired                  # it happened: [Fired(fault="flip", header=…)]
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jvlab._errors import ConfigError, TransportError
from jvlab.transport._peer import Fill, Header, Sender


@dataclass(frozen=True)
class Fired:
    """One fault that was injected.

    >>> jv.transport.Fired("flip", jv.transport.Header(1, 0, 3, 4096)).header.bucket
    3
    """

    fault: str
    header: Header


class Faults:
    """Which fault happens at which bucket (`Header.bucket`), over all wrapped channels.

    flip   one bit in the middle of the bucket is flipped
    drop   the bucket is silently not sent
    twice  the bucket is sent a second time
    delay  (bucket, seconds): it is sent that much later
    fail   sending it raises TransportError
    hook   (bucket, callable): called with the header before it is sent, e.g. to kill a process

    Each happens the first `times` times that its bucket is sent, so that a second sync shows the recovery.

    >>> sender, receiver = jv.transport.pair()
    >>> faults = jv.transport.Faults(flip=0)                   # lab.connect(..., faults=faults.wrap)
    >>> header = jv.transport.Header(1, 0, bucket=0, nbytes=1)
    >>> faults.wrap(sender).send(header, lambda memory: memory.__setitem__(0, 0), deadline=5)
    >>> receiver.recv(deadline=5).data[0] == 0, [fired.fault for fired in faults.fired]
    (False, ['flip'])
    """

    def __init__(
        self,
        *,
        flip: int | None = None,
        drop: int | None = None,
        twice: int | None = None,
        delay: tuple[int, float] | None = None,
        fail: int | None = None,
        hook: tuple[int, Callable[[Header], object]] | None = None,
        times: int = 1,
    ) -> None:
        if times < 1:
            raise ConfigError(f"times={times}", remedy="1 or more")
        at = {
            "flip": flip,
            "drop": drop,
            "twice": twice,
            "fail": fail,
            "delay": delay[0] if delay else None,
            "hook": hook[0] if hook else None,
        }
        self._at = {fault: bucket for fault, bucket in at.items() if bucket is not None}
        self._left = dict.fromkeys(self._at, times)
        self.delay_seconds = delay[1] if delay else 0.0
        self.hook = hook[1] if hook else None
        self._lock = threading.Lock()
        self.fired: list[Fired] = []

    def wrap(self, sender: Sender) -> FaultySender:
        """The same channel, with these faults."""
        return FaultySender(sender, self)

    def is_due(self, fault: str, header: Header) -> bool:
        """Whether the fault happens now; counted over all channels and threads."""
        with self._lock:
            if self._at.get(fault) != header.bucket or not self._left[fault]:
                return False
            self._left[fault] -= 1
            self.fired.append(Fired(fault, header))
            return True

    def __repr__(self) -> str:
        return f"Faults({', '.join(f'{fault} at bucket {bucket}' for fault, bucket in self._at.items())})"


class FaultySender:
    """A Sender with faults; everything but `send` is delegated."""

    def __init__(self, inner: Sender, faults: Faults) -> None:
        self.name = inner.name
        self._inner = inner
        self._faults = faults
        self._closed = threading.Event()

    def endpoint(self) -> dict[str, Any]:
        return self._inner.endpoint()

    def ready(self, deadline: float) -> None:
        self._inner.ready(deadline)

    def send(self, header: Header, fill: Fill, deadline: float) -> None:
        faults = self._faults
        if faults.is_due("hook", header) and faults.hook:
            faults.hook(header)
        if faults.is_due("delay", header):
            # interrupted by close, like every wait of a channel
            self._closed.wait(faults.delay_seconds)
        if faults.is_due("fail", header):
            raise TransportError(
                f"{self.name}: bucket {header.bucket} fails: injected fault",
                reason="fault",
            )
        if faults.is_due("drop", header):
            return
        if header.nbytes and faults.is_due("flip", header):
            fill = _flipped(fill)
        if not faults.is_due("twice", header):
            self._inner.send(header, fill, deadline)
            return
        copy = bytearray(header.nbytes)  # `fill` may be callable only once
        fill(memoryview(copy))
        for _ in range(2):
            self._inner.send(
                header, lambda view: view.__setitem__(slice(None), copy), deadline
            )

    def flush(self, deadline: float) -> None:
        self._inner.flush(deadline)

    def arrived(self) -> int:
        return self._inner.arrived()

    def close(self) -> None:
        self._closed.set()
        self._inner.close()


def _flipped(fill: Fill) -> Fill:
    def wrong(view: memoryview) -> None:
        fill(view)
        view[len(view) // 2] ^= 1

    return wrong
