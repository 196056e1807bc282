"""`disk`: one safetensors file per bucket in a shared folder; the fallback, and the baseline.

folder, mode 0700                 written by      seen by
  receiver.json                   receiver        ready(): identifies the receiver
  00000007.part → 00000007.safetensors  sender    recv(): the rename is atomic
  (removal of that file)          receiver        release: frees a slot, completes flush
  failed.txt                      receiver        fail()
  receiver-closed                 receiver        ends the sender's waits
  (removal of the folder)         sender, or the receiver if the sender is dead: ends the receiver's waits
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jvlab._errors import ConfigError, TransportError
from jvlab._files import FULL
from jvlab.layout._checkpoint import encode_header, parse_header
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

_PREFIX = "jvlab-disk-"
_CHECK_SECONDS = 0.05  # between two checks that the peer is alive
# seconds of one sleep while polling
_SHORTEST = 0.0005
_LONGEST = 0.01
LONGEST_HEAD = 1 << 16  # bytes of a bucket's header; usually 100 to 200


def _write(path: Path, text: str) -> None:
    """Write a small file atomically."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def _read_peer(path: Path) -> Peer:
    return Peer.read(json.loads(path.read_text()))


def _wait(
    clock: Clock,
    who: Peer | str,
    what: str,
    done: Callable[[], bool],
    ended: Callable[[], None],
) -> None:
    """Poll a condition with growing pauses; `ended` raises what ends the wait early."""
    pause = _SHORTEST
    next_check = 0.0
    while not done():
        ended()
        now = time.monotonic()
        if now >= next_check:
            next_check = now + _CHECK_SECONDS
            if isinstance(who, Peer) and who.dead() and not done():
                raise lost("disk", who, what)
        clock.check("disk", who, what)
        time.sleep(min(pause, clock.left()))
        pause = min(2 * pause, _LONGEST)


class DiskSender:
    """The trainer's end: owns the folder."""

    name = "disk"

    def __init__(
        self,
        slot_bytes: int,
        slots: int,
        peer: str,
        label: str,
        directory: str | None,
        *,
        fsync: bool = False,
    ) -> None:
        check_ring(self.name, slot_bytes, slots)
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._expected = peer
        self._fsync = fsync
        parent = Path(directory or tempfile.gettempdir())
        if not parent.is_dir():
            raise ConfigError(
                f"disk: {parent} is not a folder",
                remedy="create it, or leave `directory` out",
            )
        _sweep(parent)
        self._me = Peer.me(label)
        self._peer = None
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
        self._outstanding: deque[Path] = deque()
        self._sent = 0
        self._closed = False
        self._broken = False
        # even if close is never called
        self._removal = weakref.finalize(self, _remove, self._folder, self._me.pid)
        _write(self._folder / "sender.json", json.dumps(self._me.values()))

    def endpoint(self) -> dict[str, Any]:
        return {
            "transport": self.name,
            "folder": str(self._folder),
            "slot_bytes": self.slot_bytes,
            "slots": self.slots,
            "sender": self._me.values(),
        }

    def ready(self, deadline: float) -> None:
        there = self._folder / "receiver.json"
        clock = Clock(deadline)
        _wait(clock, self._expected, "open its end", there.exists, self._ended)
        self._peer = replace(_read_peer(there), label=self._expected)

    def send(self, header: Header, fill: Fill, deadline: float) -> None:
        check_fits(self.name, header.nbytes, self.slot_bytes)
        peer = self._open()
        what = f"release a bucket, so that bucket {header.bucket} has room"
        has_room = lambda: self._count() < self.slots
        _wait(Clock(deadline), peer, what, has_room, self._ended)
        self._ended()
        path = self._folder / f"{self._sent:08d}.safetensors"
        part = path.with_suffix(".part")
        try:
            self._store(part, header, fill)
            os.replace(part, path)
        except BaseException as e:
            self._broken = True
            part.unlink(missing_ok=True)
            if isinstance(e, OSError) and e.errno in FULL:
                raise self._full(header.nbytes) from e
            if isinstance(e, FileNotFoundError):
                raise closed_here(self.name) from e
            raise
        self._outstanding.append(path)
        self._sent += 1

    def _store(self, part: Path, header: Header, fill: Fill) -> None:
        names = {
            "version": str(header.version),
            "device": str(header.device),
            "bucket": str(header.bucket),
        }
        tensor = ("bucket", (header.nbytes,))
        head = encode_header([tensor], "uint8", names, align=64)
        size = len(head) + header.nbytes
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # so that a full disk fails here, not with SIGBUS while writing to the map
            os.posix_fallocate(fd, 0, size)
            with mmap.mmap(fd, size) as memory:
                memory[: len(head)] = head
                view = memoryview(memory)[len(head) :]
                try:
                    fill(view)
                finally:
                    view.release()
                if self._fsync:
                    memory.flush()
            if self._fsync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _full(self, nbytes: int) -> TransportError:
        free = shutil.disk_usage(self._folder).free if self._folder.exists() else 0
        return TransportError(
            f"disk: {self._folder.parent} has no room: a bucket of {nbytes} bytes, {free} bytes are free",
            remedy=f"make room for {self.slots} × {self.slot_bytes} bytes there, or give another `directory`",
            transport=self.name,
            need_bytes=nbytes,
            free_bytes=free,
            folder=str(self._folder),
            reason="full",
        )

    def flush(self, deadline: float) -> None:
        peer = self._open()
        what = f"release {self._count()} of {self._sent} buckets"
        is_empty = lambda: self._count() == 0
        _wait(Clock(deadline), peer, what, is_empty, self._ended_unreleased)
        self._ended(closing=False)

    def arrived(self) -> int:
        return self._sent - self._count()

    def close(self) -> None:
        self._closed = True
        self._removal()

    def _count(self) -> int:
        """Files the receiver has not removed. It removes them in order, so only the oldest is checked."""
        while self._outstanding and not self._outstanding[0].exists():
            self._outstanding.popleft()
        return len(self._outstanding)

    def _open(self) -> Peer:
        if self._closed:
            raise closed_here(self.name)
        if self._broken:
            raise TransportError(
                "disk: a bucket was left half-sent",
                remedy="open a new channel",
                reason="half sent",
            )
        if self._peer is None:
            raise TransportError(
                f"disk: {self._expected} has not opened its end",
                remedy="call ready() first",
            )
        return self._peer

    def _ended(self, closing: bool = True) -> None:
        """Raise if either side has ended."""
        if self._closed:
            raise closed_here(self.name)
        with contextlib.suppress(FileNotFoundError):
            message = (self._folder / "failed.txt").read_text()
            raise gave_up(self.name, self._peer or self._expected, message)
        if closing and (self._folder / "receiver-closed").exists():
            raise closed(self.name, self._peer or self._expected)

    def _ended_unreleased(self) -> None:
        """Raise if either side has ended; a receiver that released everything may close."""
        self._ended(closing=False)
        # it releases, then closes: counted after its end was seen, or its last release could fall between the two
        if (self._folder / "receiver-closed").exists() and self._count():
            raise closed(self.name, self._peer or self._expected)


class DiskReceiver:
    """The rank's end."""

    name = "disk"

    def __init__(self, endpoint: dict[str, Any], label: str) -> None:
        self._folder, self._sender = (
            Path(str(endpoint["folder"])),
            Peer.read(endpoint["sender"]),
        )
        self._next, self._closed, self._owner = 0, False, os.getpid()
        self._held: dict[int, tuple[Path, mmap.mmap]] = {}
        try:
            found = os.lstat(self._folder)
        except FileNotFoundError as e:
            raise TransportError(
                f"disk: {self._folder} does not exist: {self._sender} closed it, or this host does not see it",
                remedy="give a `directory` on a file system that both sides mount",
                reason="lost",
            ) from e
        if (
            not stat.S_ISDIR(found.st_mode)
            or found.st_uid != os.getuid()
            or found.st_mode & 0o077
        ):
            raise TransportError(
                f"disk: {self._folder} is not a private folder of this user",
                remedy="run both as one",
            )
        _write(self._folder / "receiver.json", json.dumps(Peer.me(label).values()))

    def recv(self, deadline: float) -> Bucket:
        path = self._folder / f"{self._next:08d}.safetensors"
        what = "send the next bucket"
        _wait(Clock(deadline), self._sender, what, path.exists, self._ended)
        if self._closed:
            raise closed_here(self.name)
        try:
            with path.open("rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as e:
            raise closed(self.name, self._sender) from e
        header, at = _read_head(memory, path)
        number = self._next
        self._held[number] = (path, memory)
        self._next += 1
        return Bucket(header, memoryview(memory)[at : at + header.nbytes], number)

    def release(self, received: Bucket) -> None:
        path, memory = self._held.pop(received.token, (None, None))
        if path is None or memory is None:
            raise TransportError(
                f"disk: bucket {received.header.bucket} was released already"
            )
        with contextlib.suppress(BufferError):
            received.data.release()
            memory.close()
        try:
            path.unlink()
        except FileNotFoundError as e:
            raise closed(self.name, self._sender) from e

    def fail(self, message: str) -> None:
        with contextlib.suppress(OSError):  # the sender is gone
            _write(self._folder / "failed.txt", message[:16384])

    def close(self) -> None:
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        for _, memory in self._held.values():
            # in use: unmapped with its last view
            with contextlib.suppress(BufferError):
                memory.close()
        self._held.clear()
        if self._sender.dead():
            _remove(self._folder)
            return
        with contextlib.suppress(OSError):
            _write(self._folder / "receiver-closed", "")

    def _ended(self) -> None:
        if self._closed:
            raise closed_here(self.name)
        if not self._folder.exists():
            raise closed(self.name, self._sender)


def _read_head(memory: mmap.mmap, path: Path) -> tuple[Header, int]:
    """A bucket's header and the offset of its bytes; refuses any other file."""
    try:
        names, (entry,) = parse_header(memory, len(memory), LONGEST_HEAD)
        version, device, bucket = (
            int(names[key]) for key in ("version", "device", "bucket")
        )
    except (ValueError, KeyError, TypeError) as e:
        raise TransportError(
            f"disk: {path} is not a bucket", remedy="no other program may write there"
        ) from e
    if entry.name != "bucket" or entry.end != len(memory):
        raise TransportError(
            f"disk: {path} has {len(memory)} bytes, its header says {entry.end}"
        )
    return Header(version, device, bucket, entry.end - entry.begin), entry.begin


def _remove(folder: Path, owner: int | None = None) -> None:
    # a forked copy of the sender must not remove its parent's folder
    if owner in (None, os.getpid()):
        gone = folder.with_name(folder.name + ".gone")
        with contextlib.suppress(OSError):
            # atomic, so that the peer cannot write into it any more
            os.rename(folder, gone)
        for path in (folder, gone):
            # a file just being created by the peer keeps the folder from being removed
            for _ in range(5):
                if path.exists():
                    shutil.rmtree(path, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove folders whose two sides were both killed."""
    for folder in parent.glob(_PREFIX + "*"):
        try:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            if (
                not (folder / "sender.json").exists()
                and time.time() - found.st_mtime > 60
            ):
                _remove(folder)  # killed while creating or removing it
                continue
            sender = _read_peer(folder / "sender.json")
            receiver = folder / "receiver.json"
            living = receiver.exists() and not _read_peer(receiver).dead()
        except (OSError, ValueError, TransportError):
            continue  # being created or removed right now
        if sender.dead() and not living:
            _remove(folder)
