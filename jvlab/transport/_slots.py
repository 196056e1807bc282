"""Base of `shm`, `tcp` and `nccl`: slots that the sender fills and announces on a socket, and the receiver releases.

sender: free slot → fill → BUCKET(slot, header)          receiver: BUCKET → recv → scatter → RELEASE(slot)
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
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jvlab._errors import ConfigError, TransportError
from jvlab._files import Plain
from jvlab.transport._peer import (
    Bucket,
    Clock,
    Fill,
    Header,
    Peer,
    check_fits,
    check_ring,
    closed,
    closed_here,
    gave_up,
    lost,
)

# The control socket of `shm`, `tcp` and `nccl`: small framed messages, and bounded waits.
# A socket, not flags in shared memory, because the kernel then does what is hard in Python: the peer's death is seen at
# once (its kernel closes the socket), a waiting thread sleeps without polling, and a message is a memory
# barrier: a send puts the message into a queue under the socket's lock, a receive takes it out under the same
# lock. Writes made before the send happen before the unlock (a release), the receiver's lock (an acquire) comes
# after it, and its reads after that. This holds on aarch64 too, where a plain store of a flag would not be
# ordered after the payload's stores.
#
# A forked child of the peer (not one that was exec'ed) keeps the socket open, so the peer is also checked by pid and
# start time, every TICK.

HELLO, WELCOME, OPEN, BUCKET, RELEASE, FAIL, BYE = range(1, 8)
TICK = 0.1  # seconds between two checks that the peer is alive
LONGEST = 64 << 10  # bytes of a message; a longer one is invalid
_FRAME = struct.Struct("<IB")


def frame(kind: int, body: bytes) -> bytes:
    return _FRAME.pack(len(body), kind) + body


class FramedSocket:
    """One end. Messages arrive in order; one thread waits, any thread may close."""

    def __init__(self, sock: socket.socket, transport: str, peer: Peer | str) -> None:
        self.transport = transport
        self.peer = peer
        self.fds: list[int] = []  # received, not yet used
        self.sock, self._owner = sock, os.getpid()
        self._unix = sock.family == socket.AF_UNIX
        self._buffer = bytearray()
        self._ended = False
        self._dead = False
        self._closed = False
        # re-entrant: a hook called during a wait may close
        self._lock = threading.RLock()
        sock.setblocking(False)
        if not self._unix:
            tune_tcp(sock)

    def put(self, kind: int, body: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Send one message. A socket's queue holds hundreds and a channel has a few in flight, so this never waits."""
        data = frame(kind, body)
        with self._lock:
            if self._closed:
                raise closed_here(self.transport)
            try:
                if fds:
                    sent = socket.send_fds(self.sock, [data], list(fds))
                else:
                    sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError as e:
                raise self._after_end("take a message") from e
            if sent != len(data):
                raise TransportError(
                    f"{self.transport}: {self.peer} does not read its messages",
                    remedy="check whether it is stopped",
                    transport=self.transport,
                    waited_for=str(self.peer),
                    reason="deadline",
                )

    def get(self, clock: Clock, what: str) -> tuple[int, bytes]:
        """The next message; `what` names what the peer is expected to do."""
        while True:
            with self._lock:
                if message := self._next(what):
                    return message
                clock.check(self.transport, self.peer, what)
                waiter = select.poll()
                waiter.register(self.sock, select.POLLIN)
                ready = waiter.poll(1000 * min(clock.left(), TICK))
            if not ready and isinstance(self.peer, Peer) and self.peer.dead():
                self._dead = True  # messages sent just before its death are still read

    def poll(self) -> tuple[int, bytes] | None:
        """The next message if there is one; never waits, and does not raise for a closed peer."""
        with self._lock:
            return None if self._closed else self._parse()

    def ended(self, what: str) -> TransportError | None:
        """Why the peer is gone; None while it is alive. Consumes no message then."""
        with self._lock:
            if self._closed:
                raise closed_here(self.transport)
            if not self.hung_up():
                return None
            while message := self._parse():
                if message[0] == FAIL:
                    return gave_up(
                        self.transport, self.peer, message[1].decode(errors="replace")
                    )
                if message[0] == BYE:
                    return closed(self.transport, self.peer)
            return lost(self.transport, self.peer, what)

    def hung_up(self) -> bool:
        """Whether the peer closed its end or is dead; for any thread, reads nothing."""
        waiter = select.poll()
        # reported even with unread messages
        waiter.register(self.sock, select.POLLRDHUP)
        if waiter.poll(0):
            return True
        return isinstance(self.peer, Peer) and self.peer.dead()

    def _next(self, what: str) -> tuple[int, bytes] | None:
        if self._closed:
            raise closed_here(self.transport)
        message = self._parse()
        if message is None and (self._ended or self._dead):
            raise lost(self.transport, self.peer, what)
        if message and message[0] == BYE:
            self._ended = True
            # so that a second wait reports it too
            raise closed(self.transport, self.peer)
        return message

    def _after_end(self, what: str) -> TransportError:
        """Why a send failed: the peer's last message, if there was one."""
        while message := self._parse():
            if message[0] == BYE:
                return closed(self.transport, self.peer)
        return lost(self.transport, self.peer, what)

    def _parse(self) -> tuple[int, bytes] | None:
        while not self._ended:
            if len(self._buffer) >= _FRAME.size:
                size, kind = _FRAME.unpack_from(self._buffer)
                if size > LONGEST:
                    raise TransportError(
                        f"{self.transport}: {self.peer} sent an invalid message"
                    )
                if len(self._buffer) >= _FRAME.size + size:
                    body = bytes(self._buffer[_FRAME.size : _FRAME.size + size])
                    del self._buffer[: _FRAME.size + size]
                    return kind, body
            try:
                data = self._read()
            except BlockingIOError:
                return None
            except OSError:  # reset: the peer closed with our messages unread
                data = b""
            if not data:
                self._ended = True
            self._buffer += data
        return None

    def _read(self) -> bytes:
        if not self._unix:
            return self.sock.recv(LONGEST)  # no deadline: the socket does not block
        data, fds, _, _ = socket.recv_fds(
            self.sock, LONGEST, 4, socket.MSG_CMSG_CLOEXEC
        )
        self.fds += fds
        return data

    def close(self) -> None:
        """Close this end, waking a thread that waits on it."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            # a forked copy must not close its parent's connection
            if self._owner == os.getpid():
                with contextlib.suppress(BlockingIOError):
                    self.sock.send(frame(BYE, b""))
                # wakes the waiter, which then releases the lock
                self.sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self.sock.close()
            for fd in self.fds:
                os.close(fd)
            self.fds.clear()


def tune_tcp(sock: socket.socket) -> None:
    """No delay for small messages; a vanished host is noticed in about 10 s, whether or not something is on its way."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 4),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 10_000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


# ----------------------------------------------------------------------------------------------------

_BUCKET = struct.Struct("<IqqqQ")
_SLOT = struct.Struct("<I")
HELLO_SECONDS = 5.0  # how long a silent connection may block the right one


class SlotSender:
    """The trainer's end of a channel of slots; a subclass owns the memory and transfers a slot's bytes."""

    name = "slots"

    def __init__(
        self,
        listener: socket.socket,
        slot_bytes: int,
        slots: int,
        peer: str,
        label: str,
    ) -> None:
        check_ring(self.name, slot_bytes, slots)
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._listener: socket.socket | None = listener
        self._token, self._expected, self._me = (
            secrets.token_hex(16),
            peer,
            Peer.me(label),
        )
        self._framed: FramedSocket | None = None
        self._free = deque(range(slots))
        self._sent = self._released = 0
        self._failure: TransportError | None = None
        # not an error if it had released everything
        self._peer_closed: TransportError | None = None
        self._closed, self._listener_lock = False, threading.RLock()
        # held by send and flush, which handle messages; `arrived` never waits for it
        self._busy = threading.RLock()

    def endpoint(self) -> Plain:
        return {
            "transport": self.name,
            "token": self._token,
            "slot_bytes": self.slot_bytes,
            "slots": self.slots,
            "sender": self._me.values(),
            **self._address(),
        }

    def ready(self, deadline: float) -> None:
        """Wait until the receiver has opened its end. A second call returns at once."""
        clock = Clock(deadline)
        while self._framed is None:
            framed = FramedSocket(self._accept(clock), self.name, self._expected)
            try:
                self._welcome(framed, clock)
            except BaseException:
                framed.close()
                raise

    def send(self, header: Header, fill: Fill, deadline: float) -> None:
        check_fits(self.name, header.nbytes, self.slot_bytes)
        with self._busy:
            clock = Clock(deadline)
            framed = self._connected()
            self._handle_pending(framed)
            while not self._free:
                self._wait_message(
                    framed,
                    clock,
                    f"release a bucket, so that bucket {header.bucket} has room",
                )
            if self._peer_closed:
                raise self._peer_closed
            self._send(framed, self._free.popleft(), header, fill)

    def _send(
        self, framed: FramedSocket, slot: int, header: Header, fill: Fill
    ) -> None:
        try:
            view = self._view(slot)[: header.nbytes]
            fill(view)
            # the filler may still have arrays on it
            with contextlib.suppress(BufferError):
                view.release()
            framed.put(
                BUCKET,
                _BUCKET.pack(
                    slot, header.version, header.device, header.bucket, header.nbytes
                ),
            )
            self._sent += 1
            self._push(slot, header.nbytes)
        except BaseException as e:
            self._failure = self._failure or TransportError(
                f"{self.name}: bucket {header.bucket} was left half-sent ({type(e).__name__})",
                remedy="open a new channel",
                transport=self.name,
                reason="half sent",
            )
            raise

    def flush(self, deadline: float) -> None:
        with self._busy:
            clock = Clock(deadline)
            framed = self._connected()
            self._handle_pending(framed)
            while self._released < self._sent:
                left = self._sent - self._released
                self._wait_message(
                    framed, clock, f"release {left} of {self._sent} buckets"
                )

    def arrived(self) -> int:
        if self._framed and not self._failure and self._busy.acquire(blocking=False):
            try:
                with contextlib.suppress(TransportError):  # send or flush will raise it
                    self._handle_pending(self._framed)
            finally:
                self._busy.release()
        return self._released

    def close(self) -> None:
        self._closed = True
        with self._listener_lock:
            if self._listener:
                self._listener.close()
                self._listener = None
        if self._framed:
            self._framed.close()
        self._release_resources()

    # ---- for subclasses -------------------------------------------------------------------------------------

    def _address(self) -> Plain:
        """The transport's own part of the endpoint."""
        raise NotImplementedError

    def _view(self, slot: int) -> memoryview:
        """A slot's memory, writable."""
        raise NotImplementedError

    def _secured(self, sock: socket.socket) -> socket.socket:
        """A new connection, encrypted if the transport does; an OSError refuses it."""
        return sock

    def _send_welcome(self, framed: FramedSocket, clock: Clock) -> None:
        """Answer a hello with WELCOME and whatever the receiver needs."""
        framed.put(WELCOME)

    def _join(self, framed: FramedSocket, clock: Clock) -> None:
        """Build what both sides build together, after WELCOME and before OPEN."""

    def _opened(self, framed: FramedSocket, body: bytes) -> None:
        """The receiver opened its end, and said this."""

    def _push(self, slot: int, nbytes: int) -> None:
        """Start sending a slot's bytes, after its bucket was announced."""

    def _on_release(self, slot: int) -> None:
        """The receiver released this slot."""

    def _release_resources(self) -> None:
        """Drop memory and connections. Is called again if close is."""

    # ---- internal -------------------------------------------------------------------------------------------

    def _accept(
        self,
        clock: Clock,
        gone: Callable[[], TransportError | None] = lambda: None,
    ) -> socket.socket:
        """The next connection to our socket; `gone` says why nobody will come any more."""
        while True:
            with self._listener_lock:
                if self._closed or self._listener is None:
                    raise closed_here(self.name)
                clock.check(self.name, self._expected, "open its end")
                waiter = select.poll()
                waiter.register(self._listener, select.POLLIN)
                if not waiter.poll(1000 * min(clock.left(), TICK)):
                    if (error := gone()) is not None:
                        raise error
                    continue
                sock, _ = self._listener.accept()  # no deadline: there is one
            try:
                return self._secured(sock)
            except OSError:  # not one of us
                sock.close()

    def _welcome(self, framed: FramedSocket, clock: Clock) -> None:
        """Handshake; a connection without the token is refused, and the wait continues."""
        try:
            kind, body = framed.get(
                Clock(min(HELLO_SECONDS, max(clock.left(), 1e-3))), "say hello"
            )
            hello = json.loads(body)
            known = kind == HELLO and hmac.compare_digest(
                str(hello["token"]).encode(), self._token.encode()
            )
        except (TransportError, ValueError, KeyError, TypeError, RecursionError):
            known = False
            hello = {}
        if not known:
            framed.close()
            return
        framed.peer = replace(Peer.read(hello["peer"]), label=self._expected)
        self._send_welcome(framed, clock)
        self._join(framed, clock)
        kind, body = framed.get(clock, "open its end")
        if kind != OPEN:
            raise gave_up(self.name, framed.peer, body.decode(errors="replace"))
        self._opened(framed, body)
        self._framed = framed
        with self._listener_lock:
            if self._listener:
                self._listener.close()
                self._listener = None

    def _connected(self) -> FramedSocket:
        if self._closed:
            raise closed_here(self.name)
        if self._failure:
            raise self._failure
        if self._framed is None:
            raise TransportError(
                f"{self.name}: {self._expected} has not opened its end",
                remedy="call ready() first",
            )
        return self._framed

    def _wait_message(self, framed: FramedSocket, clock: Clock, what: str) -> None:
        """Wait for a message."""
        if self._peer_closed:
            raise self._peer_closed
        try:
            message = framed.get(clock, what)
        except TransportError:
            if self._failure:  # why we hung up ourselves
                raise self._failure from None
            raise
        self._handle(message)

    def _handle_pending(self, framed: FramedSocket) -> None:
        """Handle the messages that have already arrived."""
        while message := framed.poll():
            self._handle(message)

    def _handle(self, message: tuple[int, bytes]) -> None:
        kind, body = message
        peer = self._framed.peer if self._framed else self._expected
        if kind == RELEASE:
            (slot,) = _SLOT.unpack(body)
            self._on_release(slot)
            self._free.append(slot)
            self._released += 1
            return
        if kind == BYE:
            self._peer_closed = closed(self.name, peer)
            return
        if kind == FAIL:
            self._failure = gave_up(self.name, peer, body.decode(errors="replace"))
        else:
            self._failure = TransportError(
                f"{self.name}: {peer} sent an unexpected message of kind {kind}"
            )
        raise self._failure


class SlotReceiver:
    """The rank's end of a channel of slots."""

    name = "slots"

    def __init__(
        self, endpoint: Plain, sock: socket.socket, clock: Clock, label: str
    ) -> None:
        self.slot_bytes = int(endpoint["slot_bytes"])
        self.slots = int(endpoint["slots"])
        check_ring(self.name, self.slot_bytes, self.slots)
        sender = Peer.read(endpoint["sender"])
        self._framed = FramedSocket(sock, self.name, sender)
        self._held: set[int] = set()
        try:
            hello = {"token": endpoint["token"], "peer": Peer.me(label).values()}
            self._framed.put(HELLO, json.dumps(hello).encode())
            kind, _ = self._framed.get(clock, "answer our hello")
            if kind != WELCOME:
                raise TransportError(f"{self.name}: {sender} did not welcome us")
            self._join(endpoint, clock)
            self._framed.put(OPEN, self._opening())
        except BaseException as e:
            if isinstance(e, Exception):
                with contextlib.suppress(TransportError):
                    self._framed.put(FAIL, str(e).encode()[:4096])
            self.close()
            raise

    def recv(self, deadline: float) -> Bucket:
        clock = Clock(deadline)
        slot, header = self._announced(self._framed.get(clock, "send the next bucket"))
        view = self._pull(slot, header.nbytes, clock)
        self._held.add(slot)
        return Bucket(header, view, slot)

    def _announced(self, message: tuple[int, bytes]) -> tuple[int, Header]:
        """Slot and header of a BUCKET message; anything else is refused."""
        kind, body = message
        if kind != BUCKET:
            raise TransportError(
                f"{self.name}: {self._framed.peer} sent an unexpected message of kind {kind}"
            )
        slot, version, device, bucket, nbytes = _BUCKET.unpack(body)
        if slot >= self.slots or slot in self._held or nbytes > self.slot_bytes:
            raise TransportError(
                f"{self.name}: {self._framed.peer} sent bucket {bucket} with {nbytes} bytes in slot {slot}, which is "
                f"held or does not exist ({self.slots} slots of {self.slot_bytes} bytes)"
            )
        return slot, Header(version, device, bucket, nbytes)

    def release(self, received: Bucket) -> None:
        if received.token not in self._held:
            raise TransportError(
                f"{self.name}: bucket {received.header.bucket} was released already"
            )
        # arrays may still refer to it; their bytes will change
        with contextlib.suppress(BufferError):
            received.data.release()
        self._held.remove(received.token)
        self._framed.put(RELEASE, _SLOT.pack(received.token))

    def fail(self, message: str) -> None:
        with contextlib.suppress(TransportError):  # the sender is gone
            self._framed.put(FAIL, message.encode()[:16384])

    def close(self) -> None:
        self._framed.close()
        self._release_resources()

    # ---- for subclasses -------------------------------------------------------------------------------------

    def _join(self, endpoint: Plain, clock: Clock) -> None:
        """Map or build what WELCOME described."""
        raise NotImplementedError

    def _opening(self) -> bytes:
        """What the sender's `_opened` is told."""
        return b""

    def _pull(self, slot: int, nbytes: int, clock: Clock) -> memoryview:
        """The announced bytes, read-only."""
        raise NotImplementedError

    def _release_resources(self) -> None:
        """Drop memory and connections. Is called again if close is."""


def bind(host: str, transport: str) -> socket.socket:
    """A listening socket on a free port of one address."""
    if host in ("0.0.0.0", "::", ""):
        raise ConfigError(
            f"{transport}: the wildcard address cannot be connected to",
            remedy="give the address of one interface",
        )
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as e:
        raise ConfigError(
            f"{transport}: {host!r} is not an address: {e}",
            remedy="give an address of this machine",
        ) from e
    try:
        sock.bind((host, 0))
        sock.listen(8)
    except OSError as e:
        sock.close()
        raise ConfigError(
            f"{transport}: can't listen on {host!r}: {e}",
            remedy="give an address of this machine",
        ) from e
    return sock


def connect(
    family: int, address: Any, transport: str, sender: Peer, clock: Clock
) -> socket.socket:
    """A connection to the sender's socket."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(clock.left(), 1e-3))
        sock.connect(address)  # no deadline: the socket has a timeout
    except TimeoutError as e:
        sock.close()
        clock.check(transport, sender, "let us in")
        raise lost(transport, sender, "let us in") from e
    except OSError as e:
        sock.close()
        raise TransportError(
            f"{transport}: {sender} can't be reached: {e}",
            transport=transport,
            waited_for=str(sender),
            reason="lost",
            remedy="the trainer's end is closed or ended; connect again",
        ) from e
    except BaseException:
        sock.close()
        raise
    return sock
