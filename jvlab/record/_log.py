"""An append-only, crash-safe file of JSON lines with checksums: one writer, many readers.

    {"kind":"step", ... ,"crc":"1a2b3c4d"}\\n

`crc` is the CRC-32 of the object's text without it. A line is written in one write; a reader accepts only complete
lines with a matching checksum, so it never sees half an event. A torn last line of a killed writer is skipped by
readers and truncated by the next writer. The lock is an flock on a separate file, which the kernel releases however its
holder dies.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jvlab._errors import ConfigError
from jvlab._files import parse_object, writing

EVENTS = "events.jsonl"
SAMPLES = "samples.jsonl"
LOCK = "writer.lock"
# bytes that the lock's file takes, so that a full disk still has room for how the run ended
RESERVE = 8192
# a reader's `is_locked` holds the lock for an instant, so retry that long
LOCK_SECONDS = 0.5
CHUNK = 1 << 20
LONGEST_LINE = 1 << 26  # bytes; a sample of a million tokens fits
MARK = b',"crc":"'


def encode(fields: Mapping[str, Any]) -> bytes:
    """One line. NaN and infinity raise ValueError: strict JSON cannot hold them."""
    try:
        body = json.dumps(
            fields, allow_nan=False, ensure_ascii=False, separators=(",", ":")
        ).encode()
    # half a surrogate pair, as in a cut-off completion: not UTF-8, so escape it
    except UnicodeEncodeError:
        body = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()
    if len(body) < 3:
        raise ValueError("an event without fields")
    return b'%b%b%08x"}\n' % (body[:-1], MARK, zlib.crc32(body))


def decode(line: bytes) -> dict[str, Any] | None:
    """The object of a complete line, or None if the checksum does not match or it is not an object."""
    head, mark, tail = line.rpartition(MARK)
    body = head + b"}"
    if not mark or tail != b'%08x"}\n' % zlib.crc32(body):
        return None
    try:
        return parse_object(body)
    except ValueError:
        return None


class LogReader:
    """Reads a growing log incrementally. `damaged` counts lines that are not objects or have a wrong checksum."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.damaged = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Every complete line since the last call, in order; those written meanwhile are for the next call."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            # a writer faster than its reader would never let it end
            end = os.fstat(file.fileno()).st_size
            while self.offset < end and (line := file.readline(LONGEST_LINE)):
                length = len(line)
                # too long for an event: skip it in pieces
                while not line.endswith(b"\n") and length >= LONGEST_LINE:
                    line = file.readline(CHUNK)
                    length += len(line)
                    if not line:
                        return
                if not line.endswith(b"\n"):
                    return  # still being written, or the writer died here
                self.offset += length
                fields = decode(line) if length <= LONGEST_LINE else None
                if fields is None:
                    self.damaged += 1
                else:
                    yield fields


class FolderLock:
    """An exclusive lock on a folder for its writer; the file names the holder, for the error of a second writer."""

    def __init__(self, folder: Path) -> None:
        import fcntl  # not on Windows, where records can be read but not written

        self._fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                holder = (
                    os.read(self._fd, 200).decode(errors="replace").strip()
                    or "another process"
                )
                os.close(self._fd)
                raise ConfigError(
                    f"the record in {folder} is being written by {holder}",
                    remedy="give this run another folder, or stop the one that writes there; "
                    "Record.open(folder) can read it in the meantime",
                    folder=str(folder),
                    holder=holder,
                ) from None
        os.ftruncate(self._fd, 0)
        holder = f"process {os.getpid()} on {socket.gethostname()}\n"
        try:
            os.pwrite(self._fd, holder.encode().ljust(RESERVE), 0)
        except OSError:
            os.close(self._fd)
            raise
        _OPEN.add(self)

    def make_room(self) -> None:
        """Give the reserved bytes back to the disk."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)

    def leave(self) -> None:
        """Give the descriptor back; in a forked child the parent's stays open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Release the lock, once."""
        self.leave()
        _OPEN.discard(self)


def is_locked(folder: Path) -> bool:
    """Whether a live process, this one included, holds the folder's lock."""
    try:
        import fcntl

        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ImportError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class LogWriter:
    """Appends lines from any thread. `fsync_s`: at most this many seconds of events are lost if the *machine* crashes;
    0: none, with one fsync per event; None: the kernel decides. A killed process loses none.
    """

    def __init__(self, path: Path, *, fsync_s: float | None = 1.0) -> None:
        self.path = path
        self._fsync_s = fsync_s
        self._lock = threading.Lock()
        self._synced = time.monotonic()
        self._fd = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        self._size = self._cut_torn_line()
        _OPEN.add(self)

    def _cut_torn_line(self) -> int:
        """Truncate what a killed writer left after the last complete line; returns the new length."""
        size = end = os.fstat(self._fd).st_size
        while end:
            start = max(end - CHUNK, 0)
            found = os.pread(self._fd, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end != size:
            os.ftruncate(self._fd, end)
        return end

    def append(self, fields: Mapping[str, Any], *, sync: bool = False) -> None:
        """Write one line atomically; `sync` calls fsync before returning."""
        line = encode(fields)
        with self._lock:
            if self._fd < 0:
                raise ConfigError(
                    f"{self.path.name} is closed",
                    remedy="write events before the record is closed",
                )
            with writing(self.path, "the record of the run"):
                try:
                    _write_all(self._fd, line)
                except OSError:
                    # a full disk may have stored a part of it
                    os.ftruncate(self._fd, self._size)
                    raise
                self._size += len(line)
                now = time.monotonic()
                if sync or (
                    self._fsync_s is not None and now - self._synced >= self._fsync_s
                ):
                    os.fsync(self._fd)
                    self._synced = now

    def leave(self) -> None:
        """In a forked child: the descriptor is not its own, and another thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Fsync and close, once."""
        with self._lock:
            if self._fd < 0:
                return
            try:
                with writing(self.path, "the record of the run"):
                    os.fsync(self._fd)
            finally:
                os.close(self._fd)
                self._fd = -1
                _OPEN.discard(self)


def _write_all(fd: int, line: bytes) -> None:
    done = 0
    while done < len(line):
        done += os.write(fd, line[done:])


_OPEN: weakref.WeakSet[FolderLock | LogWriter] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (a reward's process pool) must not write, nor hold the lock after its parent died."""
    for item in list(_OPEN):
        item.leave()
    _OPEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
