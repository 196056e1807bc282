"""`nccl`: packed buckets from GPU to GPU by ncclSend and ncclRecv, between processes of one host or several.

    control (announcements, releases, failures): our own TCP socket (_slots.py)
    payload: a communicator of exactly two
    sender     fill on the pack stream ─event─▶ send on the wire stream      overlaps the next fill
    receiver   announced → posted on the wire stream → received → scatter on the use stream → RELEASE

A communicator never blocks (see _nccl.py). Every wait for it also watches the socket, and calls commAbort when
the peer closed, failed or died, or when the deadline passed, which ends kernels that wait for a dead process. Nothing
is reused after that; a new channel creates a new communicator.

Sender and receiver have equally many slots of device memory; `recv` and `fill` get `DeviceBytes`.
The socket binds to loopback unless `host` is given; NCCL's own connections have no token and no encryption: use another
host only in a network you trust. Testing on one GPU: every process needs its own NCCL_HOSTID.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jvlab._errors import MissingDependency, TransportError
from jvlab._files import Plain
from jvlab.transport._peer import (
    Bucket,
    Clock,
    Fill,
    Header,
    Peer,
    check_ring,
    closed,
    closed_here,
)
from jvlab.transport._slots import (
    BYE,
    FramedSocket,
    SlotReceiver,
    SlotSender,
    bind,
    connect,
)


@dataclass(eq=False)
class DeviceBytes:
    """`nbytes` at `pointer` on a GPU. Work on it is ordered by `stream`."""

    readonly = False

    pointer: int
    nbytes: int
    gpu: CudaGpu
    stream: Any
    owner: Any  # kept alive with it
    view: Any = None  # the consumer's cached view of it

    @property
    def device(self) -> int:
        """The GPU's ordinal."""
        return self.gpu.ordinal

    @property
    def __cuda_array_interface__(self) -> Plain:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "version": 3,
            "strides": None,
        }

    def __len__(self) -> int:
        return self.nbytes

    def __bytes__(self) -> bytes:
        return (
            self.gpu.get(self.pointer, self.nbytes, self.stream) if self.nbytes else b""
        )

    def __getitem__(self, key: int | slice) -> Any:
        if isinstance(key, int):
            return bytes(self._part(slice(key, key + 1)))[0]
        return self._part(key)

    def __setitem__(self, key: int | slice, value: Any) -> None:
        part = self._part(slice(key, key + 1) if isinstance(key, int) else key)
        data = bytes([value]) if isinstance(key, int) else bytes(value)
        if len(data) != part.nbytes:
            raise ValueError(f"{len(data)} bytes for a slice of {part.nbytes}")
        if data:
            self.gpu.put(part.pointer, data, self.stream)

    def _part(self, key: slice) -> DeviceBytes:
        start, stop, step = key.indices(self.nbytes)
        if step != 1:
            raise ValueError("device memory takes contiguous slices only")
        size = max(0, stop - start)
        pointer = self.pointer + start
        return DeviceBytes(pointer, size, self.gpu, self.stream, self.owner)

    def release(self) -> None:
        """Drop the consumer's view; the transport owns the memory."""
        self.view = None


# libnccl --------------------------------------------------------------------------------------------------------------


# libnccl through ctypes: non-blocking communicators of two, so that every wait can be monitored and aborted.
# Why not `cupy.cuda.nccl`: its communicators block. A blocked ncclCommInitRank has no handle yet for commAbort, and a
# first send blocks until the peer connects. `ncclConfig_t.blocking = 0` avoids this, but cupy does not expose it. The
# library is the one that this process has loaded already (torch's in a vLLM worker), if any.

SUCCESS = 0
IN_PROGRESS = 7
UINT8 = 1  # ncclUint8
ID_BYTES = 128
# the first version with `blocking`; newer ones default the rest
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21400


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.14."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_FUNCTIONS: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
    "ncclGetUniqueId": [ctypes.POINTER(_Id)],
    "ncclCommInitRankConfig": [
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _Id, ctypes.c_int, ctypes.POINTER(_Config),
    ],
    "ncclCommGetAsyncError": [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)],
    "ncclCommAbort": [ctypes.c_void_p],
    "ncclSend": [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
    ],
    "ncclRecv": [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
    ],
}  # fmt: skip


def _candidates() -> list[tuple[str, int]]:
    """Library names with dlopen modes: already loaded, the wheel that torch and JAX use, the system's."""
    found = [("libnccl.so.2", os.RTLD_NOLOAD | os.RTLD_NOW)]
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / "lib" / "libnccl.so.2"
        if path.is_file():
            found.append((str(path), ctypes.DEFAULT_MODE))
    return [*found, ("libnccl.so.2", ctypes.DEFAULT_MODE)]


@cache
def library() -> ctypes.CDLL:
    """libnccl, or an error that says what to install."""
    why = ""
    for name, mode in _candidates():
        try:
            found = ctypes.CDLL(name, mode=mode)
            for function, arguments in _FUNCTIONS.items():
                getattr(found, function).argtypes = arguments
            found.ncclGetErrorString.restype = ctypes.c_char_p
            return found
        except (OSError, AttributeError) as e:  # AttributeError: older than 2.14
            why = str(e)
    raise MissingDependency(
        f"transport nccl needs NCCL 2.14 or newer: {why}",
        remedy="pip install nvidia-nccl-cu13 or nvidia-nccl-cu12",
    )


def version_text(number: int) -> str:
    """22907 → 2.29.7"""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def check(code: int, what: str) -> int:
    """The code, if it is not an error."""
    if code in (SUCCESS, IN_PROGRESS):
        return code
    text = library().ncclGetErrorString(code).decode()
    raise TransportError(
        f"nccl: {what} failed: {text} (code {code})",
        transport="nccl",
        code=code,
        reason="nccl",
        remedy="set NCCL_DEBUG=WARN on both sides for details. Two processes on one GPU need different "
        "NCCL_HOSTIDs, set before either uses NCCL; NCCL_SOCKET_IFNAME chooses the network interface",
    )


def version() -> int:
    """The version of the loaded library; both sides must have the same."""
    number = ctypes.c_int()
    check(library().ncclGetVersion(ctypes.byref(number)), "ncclGetVersion")
    return number.value


def unique_id() -> bytes:
    """An id that both ends join by; this process holds a thread and a port until both have joined."""
    out = _Id()
    check(library().ncclGetUniqueId(ctypes.byref(out)), "ncclGetUniqueId")
    return ctypes.string_at(ctypes.byref(out), ID_BYTES)


class Communicator:
    """One end of a group of two. No call waits for the peer; `ready` tells when the last one has completed.

    Calls are serialised, because an abort from another thread frees what they use.
    """

    def __init__(self, identity: bytes, rank: int) -> None:
        self._lock = threading.Lock()
        self._comm: ctypes.c_void_p | None = ctypes.c_void_p()
        own = _Id()
        ctypes.memmove(ctypes.byref(own), identity, ID_BYTES)
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0)
        code = library().ncclCommInitRankConfig(
            ctypes.byref(self._comm), 2, own, rank, ctypes.byref(config)
        )
        check(code, "ncclCommInitRankConfig")
        self._peer = 1 - rank

    def ready(self) -> bool:
        """Whether the last call has completed. Raises its error, or a later one."""
        state = ctypes.c_int()
        with self._lock:
            check(
                library().ncclCommGetAsyncError(self._alive(), ctypes.byref(state)),
                "ncclCommGetAsyncError",
            )
        return check(state.value, "a transfer") == SUCCESS

    def send(self, pointer: int, nbytes: int, stream: int) -> None:
        self._transfer("ncclSend", pointer, nbytes, stream)

    def recv(self, pointer: int, nbytes: int, stream: int) -> None:
        self._transfer("ncclRecv", pointer, nbytes, stream)

    def _transfer(self, name: str, pointer: int, nbytes: int, stream: int) -> None:
        call = getattr(library(), name)
        with self._lock:
            check(call(pointer, nbytes, UINT8, self._peer, self._alive(), stream), name)

    def _alive(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise TransportError(
                "nccl: this communicator was ended",
                remedy="open a new channel",
                reason="closed here",
            )
        return self._comm

    def abort(self) -> None:
        """Abort everything in flight, kernels included, and free the communicator. Idempotent."""
        with self._lock:
            comm = self._comm
            self._comm = None
        if comm is not None and comm.value:
            library().ncclCommAbort(comm)  # its result no longer matters


# The GPU interface of the nccl transport: memory, streams, events (by cupy) and communicators (libnccl).


class CudaGpu:
    """The calling thread's current GPU; tests have one made of numpy arrays. Streams and events are cupy's."""

    segment = "VRAM"  # NIXL's word for its memory

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as e:
            raise MissingDependency(
                "transport nccl needs cupy",
                remedy="pip install cupy-cuda12x or cupy-cuda13x",
            ) from e
        self._cupy = cupy
        self.ordinal = int(cupy.cuda.runtime.getDevice())

    def version(self) -> int:
        return version()

    def unique_id(self) -> bytes:
        return unique_id()

    def pair(self, identity: bytes, rank: int) -> Communicator:
        with self.current():
            return Communicator(identity, rank)

    def current(self) -> AbstractContextManager[Any]:
        """CUDA calls inside use this device."""
        return self._cupy.cuda.Device(self.ordinal)

    def stream(self) -> Any:
        """A non-blocking stream."""
        with self.current():
            return self._cupy.cuda.Stream(non_blocking=True)

    def allocate(self, nbytes: int) -> Any:
        """Memory (`.ptr`) outside cupy's pool: freed with its last reference."""
        with self.current():
            try:
                return self._cupy.cuda.Memory(max(nbytes, 1))
            except (
                self._cupy.cuda.memory.OutOfMemoryError,
                self._cupy.cuda.runtime.CUDARuntimeError,
            ) as e:
                free, _ = self._cupy.cuda.runtime.memGetInfo()
                raise TransportError(
                    f"no {nbytes / 2**20:.1f} MiB of GPU memory for a bucket, {free / 2**20:.1f} MiB are free",
                    remedy="connect with a smaller bucket_mib, or leave more memory free on that GPU",
                    reason="no room",
                    need_bytes=nbytes,
                    free_bytes=free,
                ) from e

    def put(self, pointer: int, data: Any, stream: Any) -> None:
        """Copy host bytes into device memory and wait."""
        held = np.frombuffer(bytes(data), np.uint8)
        self._copy(pointer, held.ctypes.data, held.nbytes, "memcpyHostToDevice", stream)

    def get(self, pointer: int, nbytes: int, stream: Any) -> bytes:
        """Device memory as host bytes, after the stream's pending work."""
        out = np.empty(nbytes, np.uint8)
        self._copy(out.ctypes.data, pointer, nbytes, "memcpyDeviceToHost", stream)
        return out.tobytes()

    def _copy(self, to: int, of: int, nbytes: int, kind: str, stream: Any) -> None:
        runtime = self._cupy.cuda.runtime
        with self.current():
            runtime.memcpyAsync(to, of, nbytes, getattr(runtime, kind), stream.ptr)
            stream.synchronize()


# ----------------------------------------------------------------------------------------------------

SPIN = 0.0005  # seconds that a wait spins before it sleeps between polls
SLEEP = 0.0001
CHECK_SECONDS = 0.02  # between two checks of the socket and the clock
CLOSE_SECONDS = 5.0  # a close that takes longer continues in its own thread
# sent when opening, so that NCCL connects then, not in the first sync
HELLO_BYTES = 256
OVER = frozenset({"lost", "closed", "failed", "half sent", "nccl", "deadline in nccl"})


def wait_for(
    done: Callable[[], bool], framed: FramedSocket, clock: Clock, what: str
) -> None:
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

    def __init__(self, gpu: CudaGpu, slot_bytes: int, slots: int) -> None:
        self.gpu = gpu
        # for NCCL; for filling or emptying slots
        self.stream, self.use = gpu.stream(), gpu.stream()
        self._memory = [
            gpu.allocate(max(slot_bytes, HELLO_BYTES)) for _ in range(slots)
        ]
        self._pair: Communicator | None = None
        self._lock = threading.Lock()
        self.ended = False

    def join(
        self, identity: bytes, rank: int, framed: FramedSocket, clock: Clock
    ) -> None:
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
        return DeviceBytes(memory[slot].ptr, nbytes, self.gpu, self.use, memory[slot])

    def move(
        self, what: str, slot: int, nbytes: int, framed: FramedSocket, clock: Clock
    ) -> None:
        """Post a send from or a receive into a slot; returns when NCCL has accepted it."""
        memory = self._memory
        pair = self._pair
        if not memory or pair is None:
            raise closed_here("nccl")
        with self.gpu.current():
            (pair.send if what == "send" else pair.recv)(
                memory[slot].ptr, nbytes, self.stream.ptr
            )
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
            pair = self._pair
            memory = self._memory
            self._memory = []

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

    def __init__(
        self,
        slot_bytes: int,
        slots: int,
        peer: str,
        label: str,
        host: str,
        gpu: CudaGpu | None = None,
    ) -> None:
        check_ring(self.name, slot_bytes, slots)
        self._gpu = gpu or CudaGpu()
        self._host = host
        self._identity = b""
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

    def _address(self) -> Plain:
        # created late: it holds a thread and a port until both have joined
        if not self._identity:
            self._identity = self._gpu.unique_id()
        return {
            "host": self._host,
            "port": self._port,
            "identity": self._identity.hex(),
            "nccl": self._version,
        }

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
        # its content has arrived, but our kernel may not have finished
        if slot in self._sends:
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

    def __init__(
        self,
        endpoint: Plain,
        clock: Clock,
        label: str,
        gpu: CudaGpu | None = None,
    ) -> None:
        self._gpu = gpu or CudaGpu()
        sender = Peer.read(endpoint["sender"])
        check_versions(endpoint.get("nccl"), self._gpu.version(), sender)
        self._posted: deque[tuple[int, Header, Any]] = deque()
        self._over: TransportError | None = None
        self._wire: Wire | None = None
        host = str(endpoint["host"])
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = connect(family, (host, int(endpoint["port"])), self.name, sender, clock)
        super().__init__(endpoint, sock, clock, label)

    def _join(self, endpoint: Plain, clock: Clock) -> None:
        identity = bytes.fromhex(str(endpoint["identity"]))
        if len(identity) != ID_BYTES:
            raise TransportError(
                f"nccl: an identity of {len(identity)} bytes", remedy="connect again"
            )
        self._wire = Wire(self._gpu, self.slot_bytes, self.slots)
        self._wire.join(identity, 1, self._framed, clock)

    def recv(self, deadline: float) -> Bucket:
        clock = Clock(deadline)
        wire = self._open_wire()
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
                wire.drain(
                    event,
                    self._framed,
                    clock,
                    "send the bytes of a bucket that it announced",
                )
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
            # the consumer's stream: the bucket has been consumed
            wire.use.synchronize()
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
            'transport="tcp"',
            transport="nccl",
            reason="version",
            theirs=theirs,
            ours=ours,
        )
