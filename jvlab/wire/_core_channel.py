"""A socket between a trainer and an engine core on one host, for urgent messages (see engine/worker/_ipc_core.py).

A frame is a kind, a weight version, a length and a payload. A receiver spins for a while before it sleeps: a sync takes
milliseconds, and waking a thread takes a good part of one.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from jvlab._errors import SyncDeadline
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._security import user_of
from jvlab.wire._sync_words import (
    AFTER_VERIFY,
    BEFORE_BYTES,
    GRACE,
    Phase,
    Phases,
    Stage,
    Terms,
    for_workers,
)
from jvlab.wire._sync_words import ORDER as PHASES

if TYPE_CHECKING:
    from jvlab.wire._client import LinkStream

# ----------------------------------------------------------------------------------------------------

# kinds of frames
WAKE = b"K"
ORDER = b"O"
GO = b"G"
WRITTEN = b"W"
CLAIMED = b"C"
DONE = b"D"
# first byte of WRITTEN and CLAIMED: whether NaN or Inf was found (and allowed)
FINITE = b"\0"
NON_FINITE = b"\1"
# roles of a connection: orders, or the signals within a sync
ORDERS = b"o"
SIGNALS = b"w"
HEADER = struct.Struct("<cQQ")
KEY_BYTES = 32
SPIN_SECONDS = 0.05
POLL_EVERY = 16  # receive attempts between two polls of the other socket
MAX_FRAME_BYTES = 64 << 20
ADMIT_SECONDS = 2.0  # for a key to arrive, or the rest of an order
LEND_SECONDS = 2.0  # for the engine core to come for the order after a wake-up
CLOSE_SECONDS = 10.0


class OtherSocketReady(Exception):
    """Read the other socket instead: it has data first, or this connection broke."""


class CoreChannel:
    """One end of a connection. Used by one thread."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.setblocking(False)
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def is_open(self) -> bool:
        return self.fileno() >= 0

    def send(
        self, kind: bytes, version: int, payload: bytes = b"", seconds: float = 5.0
    ) -> None:
        """Send a frame; raises OSError if it cannot be delivered."""
        self._end.settimeout(seconds)
        self._end.sendall(HEADER.pack(kind, version, len(payload)) + payload)
        self._end.setblocking(False)

    def receive(
        self, until: float, other: socket.socket | None = None
    ) -> tuple[bytes, int, bytes]:
        """The next frame. TimeoutError after `until` (time.monotonic); ConnectionError when the peer is gone.

        `other` is polled too: `OtherSocketReady` is raised if it becomes readable first.
        """
        sleep_from = time.monotonic() + SPIN_SECONDS
        watch = select.poll()
        watch.register(self._end, select.POLLIN)
        if other is not None:
            watch.register(other, select.POLLIN)
        attempts = 0
        while (frame := self._frame()) is None:
            try:
                part = self._end.recv(1 << 16)  # no deadline: the socket does not block
            except BlockingIOError:
                attempts += 1
                now = time.monotonic()
                if now >= until:
                    raise TimeoutError from None
                asleep = now >= sleep_from
                if asleep or (other is not None and attempts % POLL_EVERY == 0):
                    ready = watch.poll(min(until - now, 1.0) * 1e3 if asleep else 0)
                    files = [file for file, _ in ready]
                    if (
                        other is not None
                        and other.fileno() in files
                        and self._end.fileno() not in files
                    ):
                        raise OtherSocketReady from None
                continue
            if not part:
                raise ConnectionError("the peer closed the connection")
            self._buffer += part
        return frame

    @property
    def buffered_frame(self) -> int:
        """Size in bytes of the next frame if all of it has been received, else 0."""
        if len(self._buffer) < HEADER.size:
            return 0
        size = HEADER.unpack_from(self._buffer)[2]
        if size > MAX_FRAME_BYTES:
            raise ConnectionError(f"a frame of {size} bytes")
        return HEADER.size + size if len(self._buffer) >= HEADER.size + size else 0

    def _frame(self) -> tuple[bytes, int, bytes] | None:
        end = self.buffered_frame
        if not end:
            return None
        kind, version, _ = HEADER.unpack_from(self._buffer)
        payload = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return kind, version, payload

    def close(self) -> None:
        """Can be called twice."""
        self._end.close()


class CoreChannelServer:
    """The engine core's end: accepts one connection for orders and one for signals, from clients that have the key.

    A thread accepts connections and passes orders to `on_order`; code that runs a sync uses the `channel`. A wake-up
    calls `on_wake`; any thread may then read the `next_order` itself, which saves a thread switch.
    """

    def __init__(
        self,
        on_order: Callable[[bytes], None],
        on_wake: Callable[[], None] | None = None,
    ) -> None:
        # abstract: no file to clean up
        self._path = f"\0jvlab-core-{secrets.token_hex(8)}"
        self._key = secrets.token_hex(KEY_BYTES // 2)
        self._on_order = on_order
        self._on_wake = on_wake
        # the connection for orders, while another thread may read it
        self._lent: CoreChannel | None = None
        # held by who reads the lent connection, or takes it back
        self._reading = threading.Lock()
        self._returned = threading.Event()
        self._closing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stop, self._stopped = socket.socketpair()
        try:
            self._listener.bind(self._path)
            self._listener.listen(4)
        except OSError:
            for end in (self._listener, self._stop, self._stopped):
                end.close()
            raise
        self._channel: CoreChannel | None = None
        self._connected = threading.Condition()
        self._thread = threading.Thread(
            target=self._serve, name="jvlab-core", daemon=True
        )
        self._thread.start()

    def invitation(self) -> list[str]:
        """What a trainer needs to connect: path and key."""
        return [self._path, self._key]

    def channel(self, until: float) -> CoreChannel:
        """The trainer's connection for signals; waits for it. TimeoutError after `until` (time.monotonic)."""
        with self._connected:
            if not self._connected.wait_for(
                lambda: self._channel is not None, max(0.0, until - time.monotonic())
            ):
                raise TimeoutError("no trainer connected")
            assert self._channel is not None
            return self._channel

    def disconnect(self) -> None:
        """Close the connection for signals; the trainer may open another."""
        self._set_channel(None)

    def _set_channel(self, channel: CoreChannel | None) -> None:
        with self._connected:
            old = self._channel
            self._channel = channel
            self._connected.notify_all()
        if old is not None:
            old.close()

    def next_order(self, seconds: float) -> bytes | None:
        """The order that follows a wake-up within `seconds`, or None. The server's thread reads again afterwards."""
        with self._reading:
            channel = self._lent
            self._lent = None
            try:
                if channel is not None:
                    kind, _, order = channel.receive(time.monotonic() + seconds)
                    return order if kind == ORDER else None
            except OSError:  # timed out or disconnected: the server's thread handles it
                pass
            finally:
                self._returned.set()
        return None

    def _lend(self, channel: CoreChannel) -> None:
        """Let another thread read the next order; if none comes for it in time, this one does."""
        if self._on_wake is not None:
            self._returned.clear()
            if self._closing:
                return
            self._lent = channel
            self._on_wake()
            self._returned.wait(LEND_SECONDS)
            with self._reading:  # who reads now has a deadline
                self._lent = None

    def _serve(self) -> None:
        orders: CoreChannel | None = None
        while True:
            watch = select.poll()
            for end in (
                self._stopped,
                self._listener,
                *([orders] if orders is not None else []),
            ):
                watch.register(end, select.POLLIN)
            # received together with the previous one
            buffered = orders is not None and orders.buffered_frame
            # no deadline: `close` wakes it
            ready = {file for file, _ in watch.poll(0 if buffered else None)}
            if self._stopped.fileno() in ready:
                break
            if self._listener.fileno() in ready:
                role, channel = self._admit()
                if role == ORDERS:
                    if orders is not None:
                        orders.close()
                    orders = channel
                elif role == SIGNALS:
                    self._set_channel(channel)
            elif orders is not None:
                try:
                    kind, _, order = orders.receive(time.monotonic() + ADMIT_SECONDS)
                    if kind == WAKE:
                        self._lend(orders)
                    else:
                        self._on_order(order)
                # disconnected, a partial frame, or not an order
                except (OSError, ValueError):
                    orders.close()
                    orders = None
        if orders is not None:
            orders.close()

    def _admit(self) -> tuple[bytes, CoreChannel | None]:
        end, _ = self._listener.accept()  # no deadline: there is one
        try:
            sent = (
                read_exactly(end, KEY_BYTES + 1, time.monotonic() + ADMIT_SECONDS)
                if user_of(end) == os.getuid()
                else b""
            )
            if hmac.compare_digest(sent[:KEY_BYTES], self._key.encode()):
                return sent[KEY_BYTES:], CoreChannel(end)
        except OSError:
            pass
        end.close()
        return b"", None

    def close(self) -> None:
        """Accept no more connections, and end the thread. Can be called twice."""
        if self._thread.is_alive():
            self._stop.send(b".")
            self._closing = True
            self._lent = None
            self._returned.set()  # no thread will ask for the next order
            self._thread.join(CLOSE_SECONDS)
        self.disconnect()
        for end in (self._listener, self._stop, self._stopped):
            end.close()


def connect(invitation: list[Any], role: bytes, seconds: float) -> CoreChannel:
    """Connect to the server of this invitation; raises OSError if there is none."""
    path, key = invitation
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.settimeout(seconds)
        end.connect(path)  # no deadline: the socket has a timeout
        end.sendall(key.encode() + role)
    except OSError:
        end.close()
        raise
    return CoreChannel(end)


def read_exactly(end: socket.socket, size: int, until: float) -> bytes:
    """Exactly `size` bytes; TimeoutError after `until` (time.monotonic), ConnectionError if the peer closes first."""
    parts: list[bytes] = []
    while size:
        end.settimeout(max(0.001, until - time.monotonic()))
        part = end.recv(size)  # no deadline: the socket has a timeout
        if not part:
            raise ConnectionError("the peer closed it")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def mark(nonfinite: bool) -> bytes:
    """The first byte of WRITTEN and CLAIMED."""
    return NON_FINITE if nonfinite else FINITE


def order(
    kind: str, terms: Terms | pb.SyncTerms, seconds: float, call: str, **more: Any
) -> dict[str, Any]:
    """An order of this kind; both trainer and front end send it to the core, and `call` identifies it."""
    return {
        "kind": kind,
        "pause": terms.pause,
        "wanted": for_workers(terms),
        "verify": terms.verify,
        "recompute": terms.kv == "recompute",
        "seconds": seconds,
        "call": call,
        **more,
    }


# The trainer's end.

WHOLE = PHASES["direct"]
CONNECT_SECONDS = 2.0
PROMPT_SECONDS = 10.0  # for a reply that should be here already


class CoreOrders:
    """Orders of a sync to the only replica's engine core, which carries them out at once.

    Each goes through the gateway too, which guards the pool, and by which the replica's front end learns of it. The
    core's own signal says when it is done; the gateway's reply follows a little later, and is read at a later order.
    """

    def __init__(self, stream: LinkStream, replica: str, invitation: list[str]) -> None:
        self.replica = replica
        self._stream = stream
        self._reply: Future[pb.LinkReply] = Future()  # the gateway's, to this order
        self._until = time.monotonic()
        self._seconds = 0.0
        # readable when a reply of the gateway's has come
        self._rung, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._ends: list[socket.socket | CoreChannel] = [self._rung, self._bell]
        try:
            self._signals = connect(invitation, SIGNALS, CONNECT_SECONDS)
            self._ends.append(self._signals)
            self._orders = connect(invitation, ORDERS, CONNECT_SECONDS)
            self._ends.append(self._orders)
        except OSError:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return self._signals.is_open

    def wake_up(self) -> None:
        """A direct sync is about to be ordered: the engine core then waits briefly for the order."""
        with contextlib.suppress(OSError):  # it shows when the order is sent
            self._orders.send(WAKE, 0)

    def direct(
        self,
        terms: pb.SyncTerms,
        seconds: float,
        meanwhile: Callable[[], None],
        write: Callable[[], None],
        claims: Callable[[], bytes] | None,
        nonfinite: Callable[[], bool] = bool,
    ) -> pb.LinkReply:
        """A whole direct sync; returns when the engine generates again.

        `meanwhile` is called before the engine has halted, then `write`; `claims` returns the digests of what was
        written while the engine computes its own; `nonfinite`, called after each, tells whether NaN or Inf was found
        (and allowed).
        """
        with self._disconnecting_on_error():
            # of the digests, only whose they are: the core is sent them
            blank = [pb.ReplicaDigests(replica=self.replica)]
            self._give("direct", terms, seconds, WHOLE, blank)
            meanwhile()
            said = self._await(GO, terms.version)
            if isinstance(said, pb.LinkReply):
                return said
            write()
            self._signal(WRITTEN, terms.version, mark(nonfinite()))
            digests = b""
            if claims is not None:
                digests = claims()
                self._signal(CLAIMED, terms.version, mark(nonfinite()) + digests)
            return self._committed(terms.version, digests)

    def prepare(
        self, terms: pb.SyncTerms, seconds: float, meanwhile: Callable[[], None]
    ) -> pb.LinkReply:
        """Begin a staged sync; the outcome holds what the ranks exported."""
        with self._disconnecting_on_error():
            self._give("prepare", terms, seconds, BEFORE_BYTES["staged"])
            meanwhile()
            said = self._await(GO, terms.version)
            if isinstance(said, pb.LinkReply):
                return said
            exported = json.loads(said)
            outcome = pb.ReplicaOutcome(
                replica=self.replica,
                state="ready",
                seconds=_seconds(exported["seconds"]),
                exports_json=exported["handles"],
            )
            return pb.LinkReply(state=Stage.MOVING.value, outcomes=[outcome])

    def swap(
        self,
        terms: pb.SyncTerms,
        seconds: float,
        digests: list[pb.ReplicaDigests],
        claimed: bytes,
        nonfinite: bool,
    ) -> pb.LinkReply:
        """End a staged sync; `claimed` are the digests in the order in which the ranks report theirs."""
        with self._disconnecting_on_error():
            swap = (Phase.VERIFY, *AFTER_VERIFY["staged"])
            also = {"claimed": claimed.hex(), "nonfinite": nonfinite}
            self._give("swap", terms, seconds, swap, digests, **also)
            return self._committed(terms.version, claimed)

    def _give(
        self,
        kind: str,
        terms: pb.SyncTerms,
        seconds: float,
        phases: Phases,
        digests: Sequence[pb.ReplicaDigests] = (),
        **more: Any,
    ) -> None:
        """Give an order, to the core first."""
        call = secrets.token_hex(8)
        self._seconds = seconds
        self._until = time.monotonic() + seconds + GRACE
        message = json.dumps(order(kind, terms, seconds, call, **more)).encode()
        with contextlib.suppress(OSError):  # the core hears of it from the front end
            self._orders.send(ORDER, terms.version, message)
        self._reply = self._stream.post(
            phases,
            seconds,
            terms=terms if Phase.PREPARE in phases else None,
            digests=digests,
            nonfinite=more.get("nonfinite", False),
            call=call,
        )
        self._reply.add_done_callback(self._ring)

    def _ring(self, _: Future[pb.LinkReply]) -> None:
        with contextlib.suppress(OSError):  # closed meanwhile, or rung already
            self._bell.send(b".")

    def _signal(self, kind: bytes, version: int, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # a broken channel shows when it is read
            self._signals.send(kind, version, payload)

    def _await(self, kind: bytes, version: int) -> bytes | pb.LinkReply:
        """The payload of the core's signal; the gateway's reply, if that comes first or the channel breaks."""
        while not self._reply.done():
            try:
                signal, about, payload = self._signals.receive(self._until, self._rung)
            except OtherSocketReady:
                self._rung.recv(64)  # no deadline: it is readable
            except TimeoutError:
                raise SyncDeadline(
                    f"{self.replica} did not answer an order of the sync within {self._seconds:.3g} s",
                    remedy="pass a larger timeout=, or look at pool.logs()",
                ) from None
            except OSError:
                break
            else:
                # else it belongs to an abandoned sync
                if (signal, about) == (kind, version):
                    return payload
        return self._stream.settle(max(0.1, self._until - time.monotonic()))

    def _committed(self, version: int, digests: bytes) -> pb.LinkReply:
        """The reply to an order that ends a sync, once it is done."""
        said = self._await(DONE, version)
        if isinstance(said, pb.LinkReply):
            return said
        self._stream.done_early(self._reply)
        self._stream.settle(PROMPT_SECONDS, self._reply)
        outcome = pb.ReplicaOutcome(
            replica=self.replica,
            state="committed",
            version=version,
            seconds=_seconds(json.loads(said)),
        )
        # with ipc every digest is of live memory, and a commit means that all of them matched
        if digests:
            outcome.evidence["live"] = len(digests) // 8
        return pb.LinkReply(state=Stage.IDLE.value, outcomes=[outcome])

    @contextlib.contextmanager
    def _disconnecting_on_error(self) -> Iterator[None]:
        """If the trainer's part fails, disconnect: that ends the core's call, and the gateway replies."""
        try:
            yield
        except BaseException:
            if not self._reply.done():
                self._signals.close()
            raise

    def close(self) -> None:
        """Can be called twice."""
        for end in self._ends:
            end.close()


def _seconds(parts: dict[str, float]) -> list[pb.PhaseSeconds]:
    return [pb.PhaseSeconds(name=name, seconds=value) for name, value in parts.items()]
