"""`tcp`: our own connections between two processes, on one host or two.

    control (announcements, releases, failures): one framed socket (_slots.py)
    payload: `streams` more connections; each carries its stripe of every bucket, moved by a thread of its own

Beyond loopback every connection is TLS 1.3. The sender makes a key and a certificate for each channel, the receiver
trusts that certificate alone (it comes with the endpoint, through the gateway), and begins every connection with the
endpoint's token: who has not got both sees nothing and sends nothing.

A peer that closes or dies ends its connections, and so every wait, at once. A link that is cut is noticed by the
control socket in about ten seconds. Threads wait on sockets without a deadline; whoever waits for them has one, and
closing this end wakes them.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from jvlab._errors import ConfigError
from jvlab._files import Plain
from jvlab.transport._peer import Clock, Peer, check_ring, closed_here, lost
from jvlab.transport._slots import (
    HELLO_SECONDS,
    TICK,
    FramedSocket,
    SlotReceiver,
    SlotSender,
    bind,
    connect,
    tune_tcp,
)
from jvlab.wire._channels import make_certificate
from jvlab.wire._security import is_loopback

SMALL = 1 << 18  # bytes; a bucket below it goes through the first stream alone
_TOKEN_BYTES = 32
_BUFFER_BYTES = 4 << 20  # of a socket: a link's delay times its rate


class TlsSocket(ssl.SSLSocket):
    """As a plain socket: it says when it would block; shut down in one thread, it leaves another's read alone."""

    def recv(self, *args: Any) -> bytes:
        try:
            return super().recv(*args)  # no deadline: of a socket that does not block
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as e:
            raise BlockingIOError from e

    def send(self, *args: Any) -> int:
        try:
            return super().send(*args)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as e:
            raise BlockingIOError from e

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self, how)


def _server_context(host: str) -> tuple[ssl.SSLContext, str]:
    """What the sender secures connections with, and the certificate that the receiver is to trust."""
    certificate, key = make_certificate([host])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no session is resumed
    context.sslsocket_class = TlsSocket
    # OpenSSL reads files only; mkdtemp's folder is ours alone
    with tempfile.TemporaryDirectory(prefix="jvlab-") as folder:
        path = os.path.join(folder, "both.pem")
        with open(path, "w") as file:
            file.write(certificate + key)
        context.load_cert_chain(path)
    return context, certificate


def _client_context(certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = (
        False  # this certificate alone is trusted, whoever shows it
    )
    context.load_verify_locations(cadata=certificate)
    context.sslsocket_class = TlsSocket
    return context


def stripes(nbytes: int, streams: int) -> list[slice]:
    """The part of a bucket that each stream carries.

    >>> stripes(10, 2), stripes(1 << 20, 4)[1]
    ([slice(0, 10, None)], slice(262144, 524288, None))
    """
    if nbytes < SMALL:
        return [slice(0, nbytes)]
    width = -(-nbytes // streams)
    starts = range(0, nbytes, width)
    return [slice(start, min(start + width, nbytes)) for start in starts]


class _Stream:
    """One connection of payload, and the thread that moves bytes through it, in the order of `put`."""

    def __init__(
        self,
        sock: socket.socket,
        move: Callable[[socket.socket, memoryview], None],
        done: Callable[[Exception | None], None],
    ) -> None:
        self._sock = sock
        self._move = move
        self._done = done
        self._owner = os.getpid()
        self._queue: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        sock.settimeout(None)
        # so that no firewall forgets it between two syncs
        tune_tcp(sock)
        # a busy rank may leave a window closed for long
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self._thread = threading.Thread(target=self._run, name="jvlab-tcp", daemon=True)
        self._thread.start()

    def put(self, memory: memoryview) -> None:
        self._queue.put(memory)

    def _run(self) -> None:
        while (memory := self._queue.get()) is not None:  # no deadline: close() ends it
            try:
                self._move(self._sock, memory)
            except Exception as error:
                self._done(error)
                return
            finally:
                memory.release()
            self._done(None)

    def close(self) -> None:
        """Wakes the thread and waits for it; a forked copy must not close its parent's connection."""
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._queue.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(10)
        self._sock.close()


def _receive_all(
    sock: socket.socket, memory: memoryview, clock: Clock | None = None
) -> None:
    have = 0
    while have < len(memory):
        if clock is not None:
            sock.settimeout(max(clock.left(), 1e-3))
        # no deadline: whoever waits for this thread has one, and close() wakes it
        got = sock.recv_into(memory[have:])
        if not got:
            raise ConnectionError("the connection ended")
        have += got


class TcpSender(SlotSender):
    """The trainer's end: listens, and owns the send slots."""

    name = "tcp"

    def __init__(
        self,
        slot_bytes: int,
        slots: int,
        peer: str,
        label: str,
        host: str,
        streams: int,
        tls: bool | None,
    ) -> None:
        check_ring(self.name, slot_bytes, slots)
        if not 1 <= streams <= 64:
            raise ConfigError(f"streams={streams}", remedy="1 to 64; 4 if left out")
        self._host = host
        self._count = streams
        self._streams: list[_Stream] = []
        secure = not is_loopback(host) if tls is None else tls
        self._tls, self._certificate = _server_context(host) if secure else (None, "")
        listener = bind(host, self.name)
        self._port = listener.getsockname()[1]
        self._memory = self._host_slots(slot_bytes, slots)
        try:
            super().__init__(listener, slot_bytes, slots, peer, label)
        except BaseException:
            listener.close()
            raise

    def _host_slots(self, slot_bytes: int, slots: int) -> list[bytearray]:
        return [bytearray(slot_bytes) for _ in range(slots)]

    def _address(self) -> dict[str, Any]:
        return {
            "host": self._host,
            "port": self._port,
            "streams": self._count,
            "certificate": self._certificate,
        }

    def _secured(self, sock: socket.socket) -> socket.socket:
        if self._tls is None:
            return sock
        sock.settimeout(HELLO_SECONDS)
        return self._tls.wrap_socket(sock, server_side=True)

    def _join(self, framed: FramedSocket, clock: Clock) -> None:
        """Accept the connections of payload; those without the token are refused."""
        found: dict[int, socket.socket] = {}
        try:
            while len(found) < self._count:
                sock = self._accept(clock, lambda: framed.ended("open its end"))
                index = self._greeted(sock)
                if index is None or index in found:
                    sock.close()
                else:
                    found[index] = sock
            for index in range(self._count):
                send = lambda sock, memory: sock.sendall(memory)
                self._streams.append(_Stream(found.pop(index), send, self._moved))
        finally:
            for sock in found.values():
                sock.close()

    def _greeted(self, sock: socket.socket) -> int | None:
        """Which stream a new connection is; None without our token."""
        hello = bytearray(_TOKEN_BYTES + 1)
        try:
            _receive_all(sock, memoryview(hello), Clock(HELLO_SECONDS))
        except OSError:
            return None
        known = hmac.compare_digest(bytes(hello[:-1]), self._token.encode())
        return hello[-1] if known and hello[-1] < self._count else None

    def _moved(self, error: Exception | None) -> None:
        """In a stream's thread. A broken stream ends the channel: the wait for a release is on the control socket."""
        if error is not None and self._framed and not self._closed:
            with contextlib.suppress(OSError):
                self._framed.sock.shutdown(socket.SHUT_RDWR)

    def _view(self, slot: int) -> memoryview:
        if not self._memory:
            raise closed_here(self.name)
        return memoryview(self._memory[slot])

    def _push(self, slot: int, nbytes: int) -> None:
        memory = self._view(slot)
        for stream, part in zip(
            self._streams, stripes(nbytes, self._count), strict=False
        ):
            stream.put(memory[part])

    def _release_resources(self) -> None:
        streams = self._streams
        self._streams = []
        for stream in streams:
            stream.close()
        self._memory = []


class TcpReceiver(SlotReceiver):
    """The rank's end."""

    name = "tcp"

    def __init__(self, endpoint: Plain, clock: Clock, label: str) -> None:
        self._streams: list[_Stream] = []
        self._memory: list[bytearray] = []
        self._done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._broken = False
        certificate = str(endpoint["certificate"])
        self._tls = _client_context(certificate) if certificate else None
        sock = self._connection(endpoint, clock)
        super().__init__(endpoint, sock, clock, label)

    def _connection(self, endpoint: Plain, clock: Clock) -> socket.socket:
        host = str(endpoint["host"])
        sender = Peer.read(endpoint["sender"])
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        address = (host, int(endpoint["port"]))
        sock = connect(family, address, self.name, sender, clock)
        if self._tls is None:
            return sock
        try:
            sock.settimeout(max(clock.left(), 1e-3))
            return self._tls.wrap_socket(sock)
        except OSError as e:
            sock.close()
            clock.check(self.name, sender, "secure the connection")
            raise lost(self.name, sender, f"secure the connection ({e})") from e

    def _join(self, endpoint: Plain, clock: Clock) -> None:
        for index in range(int(endpoint["streams"])):
            sock = self._connection(endpoint, clock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            try:
                sock.sendall(str(endpoint["token"]).encode() + bytes([index]))
            except OSError as e:
                sock.close()
                raise lost(self.name, self._framed.peer, "let our streams in") from e
            self._streams.append(_Stream(sock, _receive_all, self._done.put))
        self._memory = [bytearray(self.slot_bytes) for _ in range(self.slots)]

    def _pull(self, slot: int, nbytes: int, clock: Clock) -> memoryview:
        what = "send the bytes of a bucket that it announced"
        if not self._memory or not self._streams:
            raise closed_here(self.name)
        if self._broken:
            raise lost(self.name, self._framed.peer, what)
        memory = memoryview(self._memory[slot])[:nbytes]
        parts = stripes(nbytes, len(self._streams))
        for stream, part in zip(self._streams, parts, strict=False):
            stream.put(memory[part])
        self._broken = True  # until every part is there: streams are read in order
        left = len(parts)
        while left:
            try:
                error = self._done.get(timeout=max(min(clock.left(), TICK), 1e-3))
            except queue.Empty:
                gone = self._framed.ended(what)
                if gone is not None:
                    raise gone from None
                clock.check(self.name, self._framed.peer, what)
                continue
            if error is not None:
                gone = self._framed.ended(what)
                raise gone or lost(self.name, self._framed.peer, what) from error
            left -= 1
        self._broken = False
        return memory.toreadonly()

    def _release_resources(self) -> None:
        streams = self._streams
        self._streams = []
        for stream in streams:
            stream.close()
        self._memory = []
