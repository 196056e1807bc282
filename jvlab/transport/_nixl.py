"""`nixl`: NIXL writes a bucket into the receiver's memory; from GPU to GPU where both sides have one.

    control (announcements, releases, failures): the framed socket of `tcp`, with its token and TLS
    payload: slots of both ends are registered once; a write ends with a notification that carries its number

Slots are host memory (DRAM), or with `on_gpu` device memory of both ends (VRAM), which `fill` and `recv` get as
`DeviceBytes`.

The receiver's OPEN says where its slots are. NIXL's backend is UCX, which takes the network that it finds: TCP, or RDMA
(untried). On loopback it listens there only. Beyond, UCX has neither a token nor TLS: who reaches its ports can write
into both processes, so the network has to be a trusted one. UCX_NET_DEVICES and UCX_TLS choose what it uses.

A thread of NIXL's own would spin, so there is none: whoever waits makes the progress. While a write is under way that
is the sender's writer; while announced bytes are missing, the receiver. Both look at the control socket too, which
knows first that the peer is gone.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib
import importlib.util
import json
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from jvlab._errors import ConfigError, TransportError
from jvlab.transport._nccl import CudaGpu, DeviceBytes
from jvlab.transport._peer import Bucket, Clock, closed_here, lost
from jvlab.transport._slots import TICK, FramedSocket
from jvlab.transport._tcp import TcpReceiver, TcpSender
from jvlab.wire._security import is_loopback

PACKAGES = ("nixl_cu13", "nixl_cu12")  # both work without a GPU
INSTALL = 'pip install "jvlab[nixl]", for CUDA 12 nixl-cu12; or use transport="tcp"'
NAP = 1e-4  # seconds between two looks at NIXL
GONE_SECONDS = 2.0  # how much later than NIXL the control socket may see a death
# Read when UCX is loaded: it must not take over our signals, and errors are told by us.
ENVIRONMENT = {
    "UCX_HANDLE_ERRORS": "none",
    "UCX_LOG_LEVEL": "fatal",
    "NIXL_LOG_LEVEL": "FATAL",
}


def installed() -> str:
    """The module of the installed package; empty without one."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name)), "")


def check_installed() -> None:
    if not installed():
        raise ConfigError("nixl: NIXL is not installed here", remedy=INSTALL)


def library() -> Any:
    """NIXL's module, loaded so that it leaves this process's signals and logs alone."""
    check_installed()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    shown = logging.raiseExceptions
    try:
        return importlib.import_module(installed())
    except ImportError as e:
        raise ConfigError(f"nixl: it can't be loaded: {e}", remedy=INSTALL) from e
    finally:
        logging.raiseExceptions = shown  # which NIXL switches off for everyone


class _DeviceSlots:
    """Slots in device memory, and the stream that fills or empties them."""

    def __init__(self, gpu: CudaGpu, slot_bytes: int, slots: int) -> None:
        self.gpu = gpu
        self.stream = gpu.stream()
        self.memory = [gpu.allocate(slot_bytes) for _ in range(slots)]

    def view(self, slot: int, nbytes: int) -> DeviceBytes:
        memory = self.memory[slot]
        return DeviceBytes(memory.ptr, nbytes, self.gpu, self.stream, memory)

    def filled(self) -> Any:
        """An event after all that was ordered on the stream so far."""
        with self.gpu.current():
            return self.stream.record()

    def settle(self) -> None:
        """Wait until the slots are filled or emptied: kernels of this process alone."""
        with self.gpu.current():
            self.stream.synchronize()


Slots = list[bytearray] | _DeviceSlots


class _Agent:
    """One end's agent of NIXL, and its slots."""

    def __init__(self, name: str, slots: Slots, slot_bytes: int, host: str) -> None:
        if isinstance(slots, _DeviceSlots):
            self.segment = slots.gpu.segment
            self.ordinal = slots.gpu.ordinal
            self.places = [memory.ptr for memory in slots.memory]
            self.current = slots.gpu.current
        else:
            self.segment = "DRAM"
            self.ordinal = 0
            self.places = [_place(slot) for slot in slots]
            self.current = contextlib.nullcontext
        api = library()
        # With `cma` a sender would write by the system's call, whether or not the memory is still registered: into a
        # slot that was freed after a deadline.
        settings = ["TLS=^cma"]
        if is_loopback(host):
            settings.append("NET_DEVICES=lo")
        mode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self.nixl: Any = None
        self._slots = slots  # not freed before the agent
        try:
            with self.current():
                self.nixl = api.nixl_agent(
                    name,
                    api.nixl_agent_config(
                        backends=[], enable_prog_thread=False, sync_mode=mode
                    ),
                )
                self.nixl.create_backend("UCX", {"engine_config": ",".join(settings)})
                rows = [(place, slot_bytes, self.ordinal, "") for place in self.places]
                self._registered = self.nixl.register_memory(rows, self.segment)
        except Exception as e:
            raise TransportError(
                f"nixl: no agent can be made here ({e})",
                remedy='check UCX_TLS and UCX_NET_DEVICES if they are set; or use transport="tcp"',
                transport="nixl",
            ) from e

    def part(self, place: int, nbytes: int, ordinal: int) -> Any:
        return self.nixl.get_xfer_descs([(place, nbytes, ordinal)], self.segment)

    def heard(self, peer: str) -> list[bytes]:
        """New notifications of another agent; asking makes UCX progress."""
        nixl = self.nixl
        if nixl is None:
            raise closed_here("nixl")
        with self.current():
            return nixl.get_new_notifs().get(peer, [])

    def close(self) -> None:
        nixl = self.nixl
        self.nixl = None  # an error's frames may hold `self` for long
        if nixl is not None:
            # the agent is going anyway
            with contextlib.suppress(Exception), self.current():
                nixl.deregister_memory(self._registered)


def _place(slot: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot))


class _Writer:
    """The thread that writes one bucket after the other, and makes UCX progress meanwhile."""

    def __init__(
        self,
        agent: _Agent,
        framed: FramedSocket,
        body: bytes,
        failed: Callable[[TransportError], None],
    ) -> None:
        try:
            told = json.loads(body)
            self._there = [int(place) for place in told["slots"]]
            self._ordinal = int(told["ordinal"])
            self._peer = agent.nixl.add_remote_agent(base64.b64decode(told["agent"]))
        except Exception as e:
            raise TransportError(
                f"nixl: {framed.peer} can't be written to ({e})",
                remedy="both ends need the same version of NIXL",
                transport="nixl",
            ) from e
        self._agent = agent
        self._framed = framed
        self._failed = failed
        self._count = 0
        self._stop = threading.Event()
        self._queue: queue.SimpleQueue[tuple[int, int, Any] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(
            target=self._run, name="jvlab-nixl", daemon=True
        )
        self._thread.start()

    def put(self, slot: int, nbytes: int, filled: Any) -> None:
        """`filled`: the event after which a slot on a GPU may be read; else None."""
        self._queue.put((slot, nbytes, filled))

    def _run(self) -> None:
        while (order := self._queue.get()) is not None:  # no deadline: close() ends it
            try:
                with self._agent.current():
                    self._write(*order)
            except Exception as error:
                if not self._stop.is_set():
                    self._hang_up(error)
                return

    def _write(self, slot: int, nbytes: int, filled: Any) -> None:
        self._count += 1
        while filled is not None and not filled.done:
            if self._stop.wait(NAP):
                raise closed_here("nixl")
        handle = self._agent.nixl.initialize_xfer(
            "WRITE",
            self._agent.part(self._agent.places[slot], nbytes, self._agent.ordinal),
            self._agent.part(self._there[slot], nbytes, self._ordinal),
            self._peer,
            str(self._count).encode(),
        )
        try:
            state = self._agent.nixl.transfer(handle)
            while state == "PROC":
                if self._stop.wait(NAP):
                    raise closed_here("nixl")
                state = self._agent.nixl.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"the write ended with {state}")
        finally:
            with contextlib.suppress(Exception):  # one under way: it is given up
                handle.release()

    def _hang_up(self, error: Exception) -> None:
        """Ends the wait for a release. NIXL names no cause: a peer that is gone is told by the control socket."""
        end = time.monotonic() + GONE_SECONDS
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            while not self._framed.hung_up():
                if time.monotonic() > end:
                    self._failed(_not_written(self._framed, error))
                    break
                if self._stop.wait(TICK):
                    return
            self._framed.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> bool:
        """Whether the thread has ended."""
        self._stop.set()
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(10)
        return not self._thread.is_alive()


def _not_written(framed: FramedSocket, error: Exception) -> TransportError:
    return TransportError(
        f"nixl: the memory of {framed.peer} could not be written ({error})",
        remedy='open a new channel; if it stays, use transport="tcp"',
        transport="nixl",
        reason="failed",
    )


class NixlSender(TcpSender):
    """The trainer's end: listens, and writes."""

    name = "nixl"

    def __init__(
        self,
        slot_bytes: int,
        slots: int,
        peer: str,
        label: str,
        host: str,
        tls: bool | None,
        on_gpu: bool = False,
        gpu: CudaGpu | None = None,
    ) -> None:
        check_installed()
        self._agent: _Agent | None = None
        self._agent_name = secrets.token_hex(8)
        self._writer: _Writer | None = None
        self._device = (
            _DeviceSlots(gpu or CudaGpu(), slot_bytes, slots) if on_gpu else None
        )
        super().__init__(slot_bytes, slots, peer, label, host, 1, tls)

    def _host_slots(self, slot_bytes: int, slots: int) -> list[bytearray]:
        return [] if self._device else super()._host_slots(slot_bytes, slots)

    def _join(self, framed: FramedSocket, clock: Clock) -> None:
        """While the receiver does the same."""
        if self._agent is None:
            self._agent = _Agent(
                self._agent_name,
                self._device or self._memory,
                self.slot_bytes,
                self._host,
            )

    def _opened(self, framed: FramedSocket, body: bytes) -> None:
        if self._agent is None:
            raise closed_here(self.name)
        self._writer = _Writer(self._agent, framed, body, self._broke)

    def _broke(self, error: TransportError) -> None:
        """In the writer's thread."""
        self._failure = self._failure or error

    def _address(self) -> dict[str, Any]:
        return {
            **super()._address(),
            "agent": self._agent_name,
            "on_gpu": self._device is not None,
        }

    def _view(self, slot: int) -> Any:
        device = self._device
        if device is None:
            return super()._view(slot)
        return device.view(slot, self.slot_bytes)

    def _push(self, slot: int, nbytes: int) -> None:
        writer = self._writer
        if writer is None:
            raise closed_here(self.name)
        if nbytes:
            device = self._device
            writer.put(slot, nbytes, device.filled() if device else None)

    def _release_resources(self) -> None:
        writer = self._writer
        agent = self._agent
        self._writer = None
        self._agent = None
        self._device = None  # the agent's, as long as that lives
        # a thread that is stuck in a write keeps its agent
        if agent and (writer is None or writer.close()):
            agent.close()
        super()._release_resources()


class NixlReceiver(TcpReceiver):
    """The rank's end, whose memory is written."""

    name = "nixl"

    def __init__(
        self,
        endpoint: dict[str, Any],
        clock: Clock,
        label: str,
        gpu: CudaGpu | None = None,
    ) -> None:
        check_installed()
        self._agent: _Agent | None = None
        self._gpu = (gpu or CudaGpu()) if endpoint["on_gpu"] else None
        self._device: _DeviceSlots | None = None
        self._sender_agent = str(endpoint["agent"])
        self._count = 0  # of announced writes
        self._landed = 0
        super().__init__(endpoint, clock, label)

    def _join(self, endpoint: dict[str, Any], clock: Clock) -> None:
        if self._gpu is not None:
            self._device = _DeviceSlots(self._gpu, self.slot_bytes, self.slots)
        else:
            self._memory = [bytearray(self.slot_bytes) for _ in range(self.slots)]
        self._agent = _Agent(
            secrets.token_hex(8),
            self._device or self._memory,
            self.slot_bytes,
            str(endpoint["host"]),
        )

    def _opening(self) -> bytes:
        agent = self._agent
        if agent is None:
            raise closed_here(self.name)
        told = base64.b64encode(agent.nixl.get_agent_metadata()).decode()
        return json.dumps(
            {"agent": told, "slots": agent.places, "ordinal": agent.ordinal}
        ).encode()

    def _pull(self, slot: int, nbytes: int, clock: Clock) -> Any:
        agent = self._agent
        if agent is None:
            raise closed_here(self.name)
        if self._device is not None:
            memory: Any = self._device.view(slot, nbytes)
        else:
            memory = memoryview(self._memory[slot])[:nbytes].toreadonly()
        if nbytes:
            self._count += 1
            self._await(agent, clock)
        return memory

    def release(self, received: Bucket) -> None:
        if self._device is not None:
            self._device.settle()
        super().release(received)

    def _await(self, agent: _Agent, clock: Clock) -> None:
        """Until the notification of the last announced write is here; they come in their order."""
        what = "write the bytes of a bucket that it announced"
        look = 0.0
        while True:
            try:
                for number in agent.heard(self._sender_agent):
                    self._landed = int(number)
            except TransportError:
                raise
            except Exception as e:  # NIXL's own
                gone = self._framed.ended(what)
                raise gone or lost(self.name, self._framed.peer, what) from e
            if self._landed >= self._count:
                return
            if time.monotonic() >= look:
                gone = self._framed.ended(what)
                if gone is not None:
                    raise gone
                look = time.monotonic() + TICK
            clock.check(self.name, self._framed.peer, what)
            time.sleep(NAP)

    def _release_resources(self) -> None:
        agent = self._agent
        self._agent = None
        self._device = None  # the agent's, as long as that lives
        if agent is not None:
            agent.close()
        super()._release_resources()
