"""A GPU of numpy arrays with the calls of jvlab/transport/_nccl.py; streams run in order, when asked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np


class FakeStream:
    """Orders run in turn, each when it can; nothing waits inside of a call but `synchronize`."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self._orders, self.done_count, self.given = (
            gpu,
            deque[Callable[[], bool]](),
            0,
            0,
        )
        self._lock, self._poking = gpu.hub.lock, False
        self.ptr = gpu.number(self)

    def give(self, order: Callable[[], bool]) -> None:
        with self._lock:
            self._orders.append(order)
            self.given += 1

    def poke(self) -> None:
        with self._lock:
            # an order of ours asks for another stream, and that one for us
            if self._poking:
                return
            self._poking = True
            while self._orders and self._orders[0]():
                self._orders.popleft()
                self.done_count += 1
            self._poking = False

    def record(self) -> FakeEvent:
        return FakeEvent(self, self.given)

    def wait_event(self, event: FakeEvent) -> None:
        self.give(lambda: event.done)

    def synchronize(self) -> None:
        end = time.monotonic() + 60
        while self._orders:
            self.poke()
            assert time.monotonic() < end, (
                "a stream never ends: its communicator was not aborted"
            )
            time.sleep(0.0005)


class FakeEvent:
    def __init__(self, stream: FakeStream, after: int) -> None:
        self._stream, self._after = stream, after

    @property
    def done(self) -> bool:
        self._stream.poke()
        return self._stream.done_count >= self._after


class FakeMemory:
    def __init__(self, gpu: FakeGpu, nbytes: int) -> None:
        self.array = np.zeros(nbytes, np.uint8)
        self.ptr = self.array.ctypes.data


class Hub:
    """Where communicators find each other: what NCCL's own sockets are."""

    def __init__(self) -> None:
        self.made = 0
        self.lock = threading.RLock()
        self.joined: dict[bytes, dict[int, FakePair]] = {}
        self.aborted = 0
        self.silent = False  # bytes that are sent never arrive


class FakePair:
    """One end; a message is in the air from its send until it is taken."""

    def __init__(self, gpu: FakeGpu, identity: bytes, rank: int) -> None:
        self.gpu, self.rank, self.air = gpu, rank, deque[bytes]()
        self.aborted = False
        self._group = gpu.hub.joined.setdefault(identity, {})
        self._group[rank] = self

    def ready(self) -> bool:
        from jvlab._errors import TransportError

        if self.aborted:
            raise TransportError(
                "nccl: this communicator was ended", reason="closed here"
            )
        return len(self._group) == 2

    def send(self, pointer: int, nbytes: int, stream: int) -> None:
        sent = False

        def order() -> bool:
            nonlocal sent
            if self.aborted:
                return True
            if not sent:
                self.air.append(self.gpu.get(pointer, nbytes, None))
                sent = True
            return not self.air  # taken

        self.gpu.streams[stream].give(order)

    def recv(self, pointer: int, nbytes: int, stream: int) -> None:
        def order() -> bool:
            if self.aborted:
                return True
            other = self._group[1 - self.rank]
            for known in list(other.gpu.streams.values()):
                known.poke()
            if not other.air or self.gpu.hub.silent:
                return False
            data = other.air[0]
            assert len(data) == nbytes, (
                "both sides must speak of the same number of bytes"
            )
            self.gpu.put(pointer, data, None)
            other.air.popleft()
            return True

        self.gpu.streams[stream].give(order)

    def abort(self) -> None:
        self.aborted = True
        self.gpu.hub.aborted += 1


class FakeGpu:
    """One end's GPU. Those of one hub can reach each other."""

    ordinal = 0
    segment = "DRAM"

    def __init__(self, hub: Hub, version: int = 22907) -> None:
        self.hub, self._version = hub, version
        self.streams: dict[int, FakeStream] = {}
        self.held: list[FakeMemory] = []

    def number(self, stream: FakeStream) -> int:
        self.streams[len(self.streams) + 1] = stream
        return len(self.streams)

    def version(self) -> int:
        return self._version

    def unique_id(self) -> bytes:
        self.hub.made += 1
        return self.hub.made.to_bytes(128, "little")

    def pair(self, identity: bytes, rank: int) -> FakePair:
        return FakePair(self, identity, rank)

    def current(self) -> Any:
        return contextlib.nullcontext()

    def stream(self) -> FakeStream:
        return FakeStream(self)

    def allocate(self, nbytes: int) -> FakeMemory:
        return FakeMemory(self, nbytes)

    def put(self, pointer: int, data: Any, stream: Any) -> None:
        import ctypes

        if stream is not None:
            stream.synchronize()
        ctypes.memmove(pointer, bytes(data), len(data))

    def get(self, pointer: int, nbytes: int, stream: Any) -> bytes:
        import ctypes

        if stream is not None:
            stream.synchronize()
        return ctypes.string_at(pointer, nbytes)
