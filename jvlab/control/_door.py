"""A line between a trainer and an engine core on one host, for words that must not wait: write now, I have, it holds.

Frames: a kind, the version it is about, a length, then so many bytes. Who listens looks again and again for a while
before it sleeps: a sync takes milliseconds, and being woken up takes a good part of one.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

KNOCK, ORDER, GO, WRITTEN, CLAIMED, DONE = b"K", b"O", b"G", b"W", b"C", b"D"  # kinds of frames
ORDERS, WORDS = b"o", b"w"  # what a line is for
HEADER = struct.Struct("<cQQ")
KEY_BYTES = 32
SPIN_SECONDS = 0.05
LOOKS = 16  # looks at the line between two at what else may come
LONGEST = 64 << 20  # bytes of a frame
ADMIT_SECONDS = 2.0  # for a key to be said, or the rest of an order


class Elsewhere(Exception):
    """The answer comes another way: what else was watched has something to read, or the line broke."""


class Line:
    """One end of a line. Used by one thread."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.setblocking(False)
        self._buffer = bytearray()

    @property
    def is_open(self) -> bool:
        return self._end.fileno() >= 0

    def say(self, kind: bytes, version: int, payload: bytes = b"", seconds: float = 5.0) -> None:
        """Send a frame; raises OSError if nobody takes it."""
        self._end.settimeout(seconds)
        self._end.sendall(HEADER.pack(kind, version, len(payload)) + payload)
        self._end.setblocking(False)

    def hear(self, until: float, other: socket.socket | None = None) -> tuple[bytes, int, bytes]:
        """The next frame. TimeoutError after `until` (time.monotonic); ConnectionError when the other end is gone.

        `other` is watched too: `Elsewhere` is raised when it can be read first.
        """
        sleep_from = time.monotonic() + SPIN_SECONDS
        watch = select.poll()
        watch.register(self._end, select.POLLIN)
        if other is not None:
            watch.register(other, select.POLLIN)
        looks = 0
        while (frame := self._frame()) is None:
            try:
                part = self._end.recv(1 << 16)
            except BlockingIOError:
                looks += 1
                now = time.monotonic()
                if now >= until:
                    raise TimeoutError from None
                asleep = now >= sleep_from
                if asleep or (other is not None and looks % LOOKS == 0):
                    ready = watch.poll(min(until - now, 1.0) * 1e3 if asleep else 0)
                    files = [file for file, _ in ready]
                    if other is not None and other.fileno() in files and self._end.fileno() not in files:
                        raise Elsewhere from None
                continue
            if not part:
                raise ConnectionError("the other end of the line is gone")
            self._buffer += part
        return frame

    @property
    def received(self) -> int:
        """Bytes of the next frame, if all of it has come; else 0."""
        if len(self._buffer) < HEADER.size:
            return 0
        size = HEADER.unpack_from(self._buffer)[2]
        if size > LONGEST:
            raise ConnectionError(f"a frame of {size} bytes")
        return HEADER.size + size if len(self._buffer) >= HEADER.size + size else 0

    def _frame(self) -> tuple[bytes, int, bytes] | None:
        end = self.received
        if not end:
            return None
        kind, version, _ = HEADER.unpack_from(self._buffer)
        payload = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return kind, version, payload

    def close(self) -> None:
        """Can be called twice."""
        self._end.close()


class Door:
    """Where an engine core is called: a line for orders, one for the words of a sync, and only with the key.

    A thread lets trainers in and hands their orders to `ordered`; who does the work asks for its `line`. To who knocks
    before, `knocked` is called: it may ask for the `next_order` itself, from any thread, which saves waking up two.
    """

    def __init__(self, ordered: Callable[[bytes], None], knocked: Callable[[], None] | None = None) -> None:
        self._path = f"\0jvlab-door-{secrets.token_hex(8)}"  # no file: nothing stays behind, however this process ends
        self._key = secrets.token_hex(KEY_BYTES // 2)
        self._ordered, self._knocked = ordered, knocked
        self._lent: Line | None = None  # the line of orders, while another thread may listen to it
        self._returned, self._closing = threading.Event(), False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stop, self._stopped = socket.socketpair()
        try:
            self._listener.bind(self._path)
            self._listener.listen(4)
        except OSError:
            for end in (self._listener, self._stop, self._stopped):
                end.close()
            raise
        self._line: Line | None = None
        self._came = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="jvlab-door", daemon=True)
        self._thread.start()

    def invitation(self) -> list[str]:
        """What a trainer needs to come in."""
        return [self._path, self._key]

    def line(self, until: float) -> Line:
        """The line to who came in with the key; waits for it. TimeoutError after `until` (time.monotonic)."""
        with self._came:
            if not self._came.wait_for(lambda: self._line is not None, max(0.0, until - time.monotonic())):
                raise TimeoutError("nobody came in")
            assert self._line is not None
            return self._line

    def hang_up(self) -> None:
        """End the line; the next who comes in is heard again."""
        self._take(None)

    def _take(self, line: Line | None) -> None:
        with self._came:
            old, self._line = self._line, line
            self._came.notify_all()
        if old is not None:
            old.close()

    def next_order(self, seconds: float) -> bytes | None:
        """What is ordered in so long by who knocked, or None. The door's thread listens again afterwards."""
        line, self._lent = self._lent, None
        try:
            if line is not None:
                kind, _, order = line.hear(time.monotonic() + seconds)
                return order if kind == ORDER else None
        except OSError:  # too late, or gone: the door's thread finds out
            pass
        finally:
            self._returned.set()
        return None

    def _lend(self, line: Line) -> None:
        if self._knocked is not None:
            self._returned.clear()
            if self._closing:
                return
            self._lent = line
            self._knocked()
            self._returned.wait()

    def _serve(self) -> None:
        orders: Line | None = None
        while True:
            watch = select.poll()
            for end in (self._stopped, self._listener, *([orders._end] if orders is not None else [])):
                watch.register(end, select.POLLIN)
            waiting = orders is not None and orders.received  # it came together with the one before
            ready = {file for file, _ in watch.poll(0 if waiting else None)}
            if self._stopped.fileno() in ready:
                break
            if self._listener.fileno() in ready:
                role, line = self._admit()
                if role == ORDERS:
                    if orders is not None:
                        orders.close()
                    orders = line
                elif role == WORDS:
                    self._take(line)
            elif orders is not None:
                try:
                    kind, _, order = orders.hear(time.monotonic() + ADMIT_SECONDS)
                    if kind == KNOCK:
                        self._lend(orders)
                    else:
                        self._ordered(order)
                except (OSError, ValueError):  # gone, half a frame, or no order at all
                    orders.close()
                    orders = None
        if orders is not None:
            orders.close()

    def _admit(self) -> tuple[bytes, Line | None]:
        end, _ = self._listener.accept()
        try:
            said = exactly(end, KEY_BYTES + 1, time.monotonic() + ADMIT_SECONDS)
            if hmac.compare_digest(said[:KEY_BYTES], self._key.encode()):
                return said[KEY_BYTES:], Line(end)
        except OSError:
            pass
        end.close()
        return b"", None

    def close(self) -> None:
        """Nobody is let in any more, and the thread has ended. Can be called twice."""
        if self._thread.is_alive():
            self._stop.send(b".")
            self._closing, self._lent = True, None
            self._returned.set()  # nobody will ask for an order any more
            self._thread.join()
        self.hang_up()
        for end in (self._listener, self._stop, self._stopped):
            end.close()


def call(invitation: list[Any], role: bytes, seconds: float) -> Line:
    """A line to the door of this invitation; raises OSError where there is none."""
    path, key = invitation
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.settimeout(seconds)
        end.connect(path)
        end.sendall(key.encode() + role)
    except OSError:
        end.close()
        raise
    return Line(end)


def exactly(end: socket.socket, size: int, until: float) -> bytes:
    """So many bytes; TimeoutError after `until` (time.monotonic), ConnectionError when there will be no more."""
    parts: list[bytes] = []
    while size:
        end.settimeout(max(0.001, until - time.monotonic()))
        part = end.recv(size)
        if not part:
            raise ConnectionError("it was closed on the other side")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def wanted(terms: Any) -> dict[str, Any]:
    """What the workers are told of a sync."""
    return {
        "version": terms.version, "mode": terms.mode, "verify": terms.verify, "bucket_seconds": terms.bucket_seconds
    }  # fmt: skip


def order(terms: Any, seconds: float, call: str) -> dict[str, Any]:
    """What the core is told of a sync, by the trainer and by the replica alike; `call` tells that it is the same."""
    return {
        "pause": terms.pause, "wanted": wanted(terms), "verify": terms.verify, "recompute": terms.kv == "recompute",
        "seconds": seconds, "call": call,
    }  # fmt: skip
