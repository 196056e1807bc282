"""`nccl`: packed buckets from GPU to GPU by ncclSend and ncclRecv, between processes of one host or several.

    control (announcements, releases, failures): our own TCP socket (_framed_socket.py)
    payload: a communicator of exactly two
    sender     fill on the pack stream ─event─▶ send on the wire stream      overlaps the next fill
    receiver   announced → posted on the wire stream → received → scatter on the use stream → RELEASE

A communicator never blocks (see _nccl_library.py). Every wait for it also watches the socket, and calls commAbort when
the peer closed, failed or died, or when the deadline passed, which ends kernels that wait for a dead process. Nothing
is reused after that; a new channel creates a new communicator.

Sender and receiver have equally many slots of device memory; `recv` and `fill` get `DeviceBytes`.
The socket binds to loopback unless `host` is given; NCCL's own connections have no token and no encryption: use another
host only in a network you trust. Testing on one GPU: every process needs its own NCCL_HOSTID.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from jvlab._errors import TransportError
from jvlab.transport._channel import Bucket, Fill, Header
from jvlab.transport._device_bytes import DeviceBytes
from jvlab.transport._framed_socket import BYE, FramedSocket
from jvlab.transport._nccl_device import Communicator, CudaGpu, Gpu
from jvlab.transport._nccl_library import ID_BYTES, version_text
from jvlab.transport._peer import Clock, Peer, check_ring, closed, closed_here
from jvlab.transport._slots import SlotReceiver, SlotSender, bind, connect

SPIN = 0.0005  # seconds that a wait spins before it sleeps between polls
SLEEP = 0.0001
CHECK_SECONDS = 0.02  # between two checks of the socket and the clock
CLOSE_SECONDS = 5.0  # a close that takes longer continues in its own thread
HELLO_BYTES = 256  # sent when opening, so that NCCL connects then, not in the first sync
OVER = frozenset({"lost", "closed", "failed", "half sent", "nccl", "deadline in nccl"})


def wait_for(done: Callable[[], bool], framed: FramedSocket, clock: Clock, what: str) -> None:
    """Wait for NCCL, and watch the control socket, which shows when the peer died."""
    begun = checked = time.monotonic()
    while True:
        try:
            if done():
                return
        except TransportError as e:  # the control socket may have a better reason
            raise (framed.ended(what) or e) from e
        now = time.monotonic()
        if now - checked >= CHECK_SECONDS:
            checked = now
            if end := framed.ended(what):
                raise end
            clock.check(framed.transport, framed.peer, what)
        if now - begun > SPIN:
            time.sleep(SLEEP)


class Wire:
    """One end's communicator, streams and slots; closes them together, without waiting for the peer."""

    def __init__(self, gpu: Gpu, slot_bytes: int, slots: int) -> None:
        self.gpu = gpu
        self.stream, self.use = gpu.stream(), gpu.stream()  # for NCCL; for filling or emptying slots
        self._memory = [gpu.allocate(max(slot_bytes, HELLO_BYTES)) for _ in range(slots)]
        self._pair: Communicator | None = None
        self._lock = threading.Lock()
        self.ended = False

    def join(self, identity: bytes, rank: int, framed: FramedSocket, clock: Clock) -> None:
        """Build the communicator and its connection, both sides at the same time."""
        pair = self.gpu.pair(identity, rank)
        with self._lock:
            if self.ended:
                pair.abort()
                raise closed_here("nccl")
            self._pair = pair
        try:
            wait_for(pair.ready, framed, clock, "join the NCCL communicator")
            self.move("send" if rank == 0 else "recv", 0, HELLO_BYTES, framed, clock)
            self.drain(self.mark(self.stream), framed, clock, "answer over NCCL")
        except BaseException:
            self.end()
            raise

    def slot(self, slot: int, nbytes: int) -> DeviceBytes:
        """A slot's memory, for its consumer or filler, which keeps it alive."""
        memory = self._memory
        if not memory:
            raise closed_here("nccl")
        gpu = self.gpu
        return DeviceBytes(memory[slot].ptr, nbytes, gpu.ordinal, self.use, gpu, memory[slot])

    def move(self, what: str, slot: int, nbytes: int, framed: FramedSocket, clock: Clock) -> None:
        """Post a send from or a receive into a slot; returns when NCCL has accepted it."""
        memory, pair = self._memory, self._pair
        if not memory or pair is None:
            raise closed_here("nccl")
        with self.gpu.current():
            (pair.send if what == "send" else pair.recv)(memory[slot].ptr, nbytes, self.stream.ptr)
        wait_for(pair.ready, framed, clock, "take part in an NCCL transfer")

    def mark(self, stream: Any) -> Any:
        """An event after all work submitted to the stream so far."""
        with self.gpu.current():
            return stream.record()

    def after(self, stream: Any, event: Any) -> None:
        """Make later work on the stream wait for the event."""
        with self.gpu.current():
            stream.wait_event(event)

    def drain(self, event: Any, framed: FramedSocket, clock: Clock, what: str) -> None:
        """Wait for an event; raises NCCL's asynchronous errors."""
        pair = self._pair

        def done() -> bool:
            with self.gpu.current():
                if event.done:
                    return True
            if pair is not None:
                pair.ready()
            return False

        wait_for(done, framed, clock, what)

    def end(self) -> None:
        """Abort the communicator and free the memory once the device no longer uses it. Idempotent."""
        with self._lock:
            if self.ended:
                return
            self.ended = True
            pair, memory, self._memory = self._pair, self._memory, []

        def reap() -> None:
            if pair is not None:
                with self.gpu.current():
                    pair.abort()
            for stream in (self.stream, self.use):
                with self.gpu.current():
                    stream.synchronize()
            memory.clear()

        reaper = threading.Thread(target=reap, name="jvlab-nccl-end", daemon=True)
        reaper.start()
        reaper.join(CLOSE_SECONDS)


class NcclSender(SlotSender):
    """The trainer's end: creates the communicator's id, and packs into slots on its GPU."""

    name = "nccl"

    def __init__(self, slot_bytes: int, slots: int, peer: str, label: str, host: str, gpu: Gpu | None = None) -> None:
        check_ring(self.name, slot_bytes, slots)
        self._gpu: Gpu = gpu if gpu is not None else CudaGpu()
        self._host, self._identity = host, b""
        self._version = self._gpu.version()
        listener = bind(host, self.name)
        try:
            self._port = listener.getsockname()[1]
            self._wire = Wire(self._gpu, slot_bytes, slots)
            super().__init__(listener, slot_bytes, slots, peer, label)
        except BaseException:
            listener.close()
            raise
        self._sends: dict[int, Any] = {}
        self._clock = Clock(1.0)

    def _address(self) -> dict[str, Any]:
        if not self._identity:  # created late: it holds a thread and a port until both have joined
            self._identity = self._gpu.unique_id()
        return {"host": self._host, "port": self._port, "identity": self._identity.hex(), "nccl": self._version}

    def _join(self, framed: FramedSocket, clock: Clock) -> None:
        self._address()
        self._wire.join(self._identity, 0, framed, clock)

    def send(self, header: Header, fill: Fill, deadline: float) -> None:
        with self._busy:
            self._clock = Clock(deadline)
            try:
                super().send(header, fill, deadline)
            except TransportError as e:
                self._end_if_over(e)
                raise

    def flush(self, deadline: float) -> None:
        try:
            super().flush(deadline)
        except TransportError as e:
            self._end_if_over(e)
            raise

    def _end_if_over(self, error: TransportError) -> None:
        """Abort after a fatal error: a kernel that waits for a dead process must not stay on the GPU until close."""
        if error.fields.get("reason") in OVER or self._failure is not None:
            self._wire.end()

    def _view(self, slot: int) -> Any:
        if slot in self._sends:  # its content has arrived, but our kernel may not have finished
            self._wire.after(self._wire.use, self._sends.pop(slot))
        return self._wire.slot(slot, self.slot_bytes)

    def _push(self, slot: int, nbytes: int) -> None:
        if not nbytes or self._framed is None:
            return
        wire = self._wire
        wire.after(wire.stream, wire.mark(wire.use))
        wire.move("send", slot, nbytes, self._framed, self._clock)
        self._sends[slot] = wire.mark(wire.stream)

    def _release_resources(self) -> None:
        self._wire.end()
        self._sends.clear()


class NcclReceiver(SlotReceiver):
    """The rank's end. Buckets announced while another is scattered are received meanwhile."""

    name = "nccl"

    def __init__(self, endpoint: dict[str, Any], clock: Clock, label: str, gpu: Gpu | None = None) -> None:
        self._gpu: Gpu = gpu if gpu is not None else CudaGpu()
        sender = Peer.read(endpoint["sender"])
        check_versions(endpoint.get("nccl"), self._gpu.version(), sender)
        self._posted: deque[tuple[int, Header, Any]] = deque()
        self._over: TransportError | None = None
        self._wire: Wire | None = None
        host = str(endpoint["host"])
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = connect(family, (host, int(endpoint["port"])), self.name, sender, clock)
        super().__init__(endpoint, sock, clock, label)

    def _join(self, endpoint: dict[str, Any], clock: Clock) -> None:
        identity = bytes.fromhex(str(endpoint["identity"]))
        if len(identity) != ID_BYTES:
            raise TransportError(f"nccl: an identity of {len(identity)} bytes", remedy="connect again")
        self._wire = Wire(self._gpu, self.slot_bytes, self.slots)
        self._wire.join(identity, 1, self._framed, clock)

    def recv(self, deadline: float) -> Bucket:
        clock, wire = Clock(deadline), self._open_wire()
        try:
            if not self._posted:
                if self._over:
                    raise self._over
                self._post(self._framed.get(clock, "send the next bucket"), wire, clock)
            while self._over is None and (message := self._framed.poll()):
                if message[0] == BYE:  # buckets announced before are still valid
                    self._over = closed(self.name, self._framed.peer)
                else:
                    self._post(message, wire, clock)
            slot, header, event = self._posted[0]
            if event is not None:
                wire.drain(event, self._framed, clock, "send the bytes of a bucket that it announced")
        except TransportError as e:
            if self._posted or e.fields.get("reason") in OVER:
                wire.end()  # a bucket is partly received: the channel cannot continue
            raise
        self._posted.popleft()
        return Bucket(header, wire.slot(slot, header.nbytes), slot)  # type: ignore[arg-type]

    def _post(self, message: tuple[int, bytes], wire: Wire, clock: Clock) -> None:
        slot, header = self._announced(message)
        self._held.add(slot)
        event = None
        if header.nbytes:
            wire.move("recv", slot, header.nbytes, self._framed, clock)
            event = wire.mark(wire.stream)
        self._posted.append((slot, header, event))

    def release(self, received: Bucket) -> None:
        wire = self._open_wire()
        with self._gpu.current():
            wire.use.synchronize()  # the consumer's stream: the bucket has been consumed
        super().release(received)

    def _open_wire(self) -> Wire:
        if self._wire is None or self._wire.ended:
            raise closed_here(self.name)
        return self._wire

    def _release_resources(self) -> None:
        if self._wire is not None:
            self._wire.end()


def check_versions(theirs: Any, ours: int, sender: Peer) -> None:
    """Both sides need the same NCCL version."""
    if not isinstance(theirs, int) or theirs != ours:
        other = version_text(theirs) if isinstance(theirs, int) else f"{theirs!r}"
        raise TransportError(
            f"nccl: {sender} has NCCL {other}, this process {version_text(ours)}",
            remedy="install the same nvidia-nccl wheel on both sides (jvlab doctor shows them), or connect with "
            'transport="gloo"',
            transport="nccl",
            reason="version",
            theirs=theirs,
            ours=ours,
        )
