"""`gloo`: torch.distributed's gloo backend between two processes, on one host or two.

    control (announcements, releases, failures): our own TCP socket (_slots.py)
    payload: ProcessGroupGloo send and recv

A group of two is built directly from its own store: the default group, which a vLLM worker has already, is not touched.
Gloo's behaviour, tried with torch 2.13: a killed or closed peer ends a wait at once; a wait that times out closes the
pair for good; a wait can't be interrupted from another thread, not even by `abort`. So long waits are on the control
socket, and gloo receives only buckets that were announced: only a sender that is stopped in the middle of a bucket can
keep a `recv` waiting until its deadline although this end was closed.

Everything binds to loopback unless `host` is given. Gloo's own connections have no token and no encryption: use another
host only in a network you trust.
"""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any

from jvlab._errors import MissingDependency
from jvlab.transport._peer import Clock, Peer, check_ring, closed_here, lost
from jvlab.transport._slots import (
    WELCOME,
    FramedSocket,
    SlotReceiver,
    SlotSender,
    bind,
    connect,
)

_STORE_SECONDS = 20.0  # the group takes tens of milliseconds once both sides are there


def _torch() -> Any:
    try:
        import torch
        import torch.distributed
    except ImportError as e:
        raise MissingDependency(
            "gloo needs torch", remedy='pip install torch, or use transport="shm"'
        ) from e
    if not torch.distributed.is_gloo_available():
        raise MissingDependency(
            "this torch was built without gloo", remedy='use transport="shm" or "disk"'
        )
    return torch


def _group(torch: Any, store: Any, rank: int, host: str, clock: Clock) -> Any:
    """The group of sender (0) and receiver (1)."""
    gloo = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=max(min(clock.left(), _STORE_SECONDS), 0.1))
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, 2, options)


class GlooSender(SlotSender):
    """The trainer's end: owns the store and the send slots."""

    name = "gloo"

    def __init__(
        self, slot_bytes: int, slots: int, peer: str, label: str, host: str
    ) -> None:
        check_ring(self.name, slot_bytes, slots)
        self._torch = _torch()
        self._host = host
        self._group: Any = None
        self._works: dict[int, Any] = {}
        listener = bind(host, self.name)
        self._store_listener = bind(host, self.name)
        try:
            self._ports = (
                listener.getsockname()[1],
                self._store_listener.getsockname()[1],
            )
            self._memory = [
                self._torch.zeros(slot_bytes, dtype=self._torch.uint8)
                for _ in range(slots)
            ]
            super().__init__(listener, slot_bytes, slots, peer, label)
        except BaseException:
            listener.close()
            self._store_listener.close()
            raise

    def _address(self) -> dict[str, Any]:
        return {
            "host": self._host,
            "port": self._ports[0],
            "store_port": self._ports[1],
        }

    def _send_welcome(self, framed: FramedSocket, clock: Clock) -> None:
        # The store's own socket would listen on every interface, so pass ours.
        limit = timedelta(seconds=max(min(clock.left(), _STORE_SECONDS), 0.1))
        self._store = self._torch.distributed.TCPStore(
            self._host,
            self._ports[1],
            2,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=self._store_listener.detach(),
        )
        framed.put(WELCOME)

    def _join(self, framed: FramedSocket, clock: Clock) -> None:
        try:
            self._group = _group(self._torch, self._store, 0, self._host, clock)
        except RuntimeError as e:  # also its own timeout
            clock.check(self.name, framed.peer, "join the gloo group")
            raise lost(self.name, framed.peer, "join the gloo group") from e

    def _view(self, slot: int) -> memoryview:
        if not self._memory:
            raise closed_here(self.name)
        return memoryview(self._memory[slot].numpy())

    def _push(self, slot: int, nbytes: int) -> None:
        if not nbytes:
            return
        try:
            self._works[slot] = self._group.send([self._memory[slot][:nbytes]], 1, slot)
        except RuntimeError as e:
            peer = self._framed.peer if self._framed else "the receiver"
            raise lost(self.name, peer, "take a bucket") from e

    def _on_release(self, slot: int) -> None:
        if work := self._works.pop(slot, None):
            # it has the bytes: a closed connection no longer matters
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=1))

    def _release_resources(self) -> None:
        self._store_listener.close()
        self._works.clear()
        self._group = self._store = None
        self._memory = []


class GlooReceiver(SlotReceiver):
    """The rank's end."""

    name = "gloo"

    def __init__(self, endpoint: dict[str, Any], clock: Clock, label: str) -> None:
        self._torch = _torch()
        self._group = None
        self._memory = []
        self._store = None
        host = str(endpoint["host"])
        sender = Peer.read(endpoint["sender"])
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = connect(family, (host, int(endpoint["port"])), self.name, sender, clock)
        self._own = sock.getsockname()[0]  # our address as the sender sees it
        super().__init__(endpoint, sock, clock, label)

    def _join(self, endpoint: dict[str, Any], clock: Clock) -> None:
        limit = timedelta(seconds=max(min(clock.left(), _STORE_SECONDS), 0.1))
        try:
            self._store = self._torch.distributed.TCPStore(
                str(endpoint["host"]),
                int(endpoint["store_port"]),
                2,
                is_master=False,
                timeout=limit,
                wait_for_workers=False,
            )
            self._group = _group(self._torch, self._store, 1, self._own, clock)
        except RuntimeError as e:
            clock.check(self.name, self._framed.peer, "join the gloo group")
            raise lost(self.name, self._framed.peer, "join the gloo group") from e
        self._memory = [
            self._torch.zeros(self.slot_bytes, dtype=self._torch.uint8)
            for _ in range(self.slots)
        ]

    def _pull(self, slot: int, nbytes: int, clock: Clock) -> memoryview:
        memory = self._memory
        if self._group is None or not memory:
            raise closed_here(self.name)
        target = memory[slot][:nbytes]
        if nbytes:
            # no local variable for the group: an error's traceback would keep it and its threads alive
            try:
                self._group.recv([target], 0, slot).wait(
                    timedelta(seconds=max(clock.left(), 1e-3))
                )
            except RuntimeError as e:
                clock.check(
                    self.name,
                    self._framed.peer,
                    "send the bytes of a bucket that it announced",
                )
                raise lost(
                    self.name,
                    self._framed.peer,
                    "send the bytes of a bucket that it announced",
                ) from e
        return memoryview(target.numpy()).toreadonly()

    def _release_resources(self) -> None:
        self._group = self._store = None
        self._memory = []
