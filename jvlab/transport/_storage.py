"""Versions of weights in a folder or a bucket: their format, one writer at a time, readers that trust nothing.

weight_v000001/                        a full version: a checkpoint that transformers and vLLM load
  model-00001-of-00002-e0001-1f3a….safetensors
  config.json, tokenizer.json, …       of the model that it was bound to
  model.safetensors.index.json         written last; what has none is no version
weight_v000002/                        a delta: what changed since the version that its index names
  model-00001-of-00001-e0001-07bc….safetensors
  model.safetensors.index.json
writer-000001.json                     the writer of epoch 1, with its heartbeat; the highest epoch may write
latest                                 the newest version's name: a hint for people and other readers

A folder makes a version visible by renaming a finished directory; a bucket by the index, which is created exclusively
where the store can. The index says how many bytes each file has, and their checksum; the checksum of every tensor
of the *result* is in the files' headers, and that of all of them together is the version's `state`. A delta names the
`base_state` that it changes, so it cannot be applied to anything else.

Names, metadata and payloads are those that slime's and miles' readers know: `delta_encoding` "overwrite" (a count,
positions of bytes and the bytes, in a zstd frame), `checksum_format` "xxh3-128". Writing bytes over bytes a second time
changes nothing, which XOR would not bear. The frames hold stored blocks, which any zstd reads and nothing need make.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jvlab._deadline import Deadline
from jvlab._errors import (
    ConfigError,
    DeadlineExceeded,
    JvlabError,
    LinkBusy,
    MissingDependency,
    StorageError,
)
from jvlab._files import FULL, parse_object
from jvlab._names import own_name
from jvlab.layout._checkpoint import (
    DTYPES,
    INDEX,
    LONGEST_INDEX,
    Entry,
    encode_entries,
    parse_header,
)
from jvlab.wire.processes._identity import Identity

FORMAT = 1
CHECKSUM = "xxh3-128"
ENCODING = "overwrite"
COMPRESSION = "zstd"
LATEST = "latest"
WEIGHTS = ".safetensors"
_VERSION = re.compile(r"weight_v(\d{6,19})")
_WRITER = re.compile(r"writer-(\d{6,12})\.json")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_PART = ".part"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
LONGEST_LOCK = 1 << 20
CHUNK = 1 << 26  # bytes read at once: between two of them a caller may give up
# of a tensor: positions of its bytes have 32 bits
LONGEST_TENSOR = 1 << 32
FENCES = 64  # earlier writers that a lock remembers
# unless a publisher is told otherwise: deltas between full versions, and full versions that are kept
FULL_EVERY = 16
KEEP = 2


class Why(StrEnum):
    """Why a version cannot be read, or a folder not be written: the field `why` of a StorageError."""

    MISSING = "missing"  # a file, an index or a base is not there
    DAMAGED = "damaged"  # sizes or checksums differ from what the index says
    BASE = "base"  # the delta changes another state than the one that is held
    FOREIGN = "foreign"  # not written by jvlab, or for another model
    FENCED = "fenced"  # by a writer that had lost its place
    SILENT = "silent"  # the store does not answer


def failure(why: Why, text: str, remedy: str, **fields: object) -> StorageError:
    """A StorageError with its reason."""
    return StorageError(text, remedy=remedy, why=why, **fields)


def version_name(version: int) -> str:
    return f"weight_v{version:06d}"


def versions_in(names: Iterable[str]) -> list[int]:
    """The versions among these names, newest first; an index may still be missing."""
    return _numbers(_VERSION, names)


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> list[int]:
    found = (pattern.fullmatch(name) for name in names)
    return sorted((int(m[1]) for m in found if m is not None), reverse=True)


# Checksums ------------------------------------------------------------------------------------------------------------


def raw(array: np.ndarray) -> np.ndarray:
    """A contiguous array's bytes, as a view."""
    return array.reshape(-1).view(np.uint8)


def checksum(*parts: Any) -> str:
    """Of these bytes, one after the other: xxh3-128, which slime's readers know too and is fast."""
    try:
        import xxhash
    except ImportError as error:
        raise MissingDependency(
            "weights in storage are checked with xxhash, which is not installed",
            remedy="pip install 'jvlab[storage]'",
        ) from error
    made = xxhash.xxh3_128()
    for part in parts:
        made.update(part)
    return made.hexdigest()


def state_of(tensors: Mapping[str, np.ndarray], checksums: Mapping[str, str]) -> str:
    """What tells one set of weights from another: names, dtypes, shapes and checksums of all tensors."""
    lines = (
        f"{name}\0{array.dtype.name}\0{tuple(array.shape)}\0{checksums[name]}\n"
        for name, array in sorted(tensors.items())
    )
    return checksum("".join(lines).encode())


def model_of(shapes: Mapping[str, Sequence[int]]) -> str:
    """What tells one model's tensors from another's: names and shapes."""
    lines = (f"{name}\0{tuple(shape)}\n" for name, shape in sorted(shapes.items()))
    return checksum("".join(lines).encode())


# The index ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a version's index says."""

    version: int
    base: int | None  # None: a full version
    epoch: int  # of its writer
    model: str
    state: str
    base_state: str
    total_bytes: int  # of all tensors, changed or not
    files: Mapping[str, tuple[int, str]] = field(repr=False)  # bytes and checksum
    weight_map: Mapping[str, str] = field(repr=False)  # tensor -> file
    by: str = ""

    @property
    def name(self) -> str:
        return version_name(self.version)

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(size for size, _ in self.files.values())

    def to_bytes(self) -> bytes:
        metadata: dict[str, Any] = {
            "version": f"{self.version:06d}",
            "checksum_format": CHECKSUM,
            "total_size": self.total_bytes,
        }
        if self.base is not None:
            metadata |= {
                "base_version": f"{self.base:06d}",
                "delta_encoding": ENCODING,
                "compression_format": COMPRESSION,
            }
        own = {"format": FORMAT, **vars(self)}
        weight_map = own.pop("weight_map")
        content = {
            "metadata": metadata,
            "weight_map": weight_map,
            "jvlab": own,
        }
        # of its own text, so that no bit of it can change unseen
        content["checksum"] = checksum(_canonical(content))
        return json.dumps(content, indent=1).encode()

    @classmethod
    def parse(cls, text: bytes, version: int) -> Index:
        """From an index file; a StorageError says what is wrong with it."""
        name = version_name(version)
        try:
            content = parse_object(text)
        except ValueError as error:
            raise failure(
                Why.DAMAGED,
                f"the index of {name} cannot be read: {error}",
                "it was cut off; a version published later is read instead",
                version=version,
            ) from error
        own = content.get("jvlab")
        if not isinstance(own, dict) or own.get("format") != FORMAT:
            raise failure(
                Why.FOREIGN,
                f"{name} has no index of jvlab's format {FORMAT}",
                "jv.Publisher writes one; versions of other writers are not read",
                version=version,
            )
        if content.pop("checksum", None) != checksum(_canonical(content)):
            raise failure(
                Why.DAMAGED,
                f"the index of {name} was altered: its checksum is of another text",
                "a version published later is read instead",
                version=version,
            )
        try:
            given = {name: value for name, value in own.items() if name != "format"}
            given["files"] = {
                n: (int(size), str(c)) for n, (size, c) in own["files"].items()
            }
            found = cls(**given, weight_map=content["weight_map"])
            wrong = (
                found.version != version
                or (found.base is not None and found.base >= version)
                or any(_FILE.fullmatch(n) is None for n in found.files)
                or not set(found.weight_map.values()) <= found.files.keys()
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            wrong = True
        if wrong:
            raise failure(
                Why.DAMAGED,
                f"the index of {name} does not describe it",
                "was the directory renamed or edited? publish again",
                version=version,
            )
        return found


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


# Payloads of a delta --------------------------------------------------------------------------------------------------

# A zstd frame of stored blocks: magic, a descriptor (8 bytes of content size, a window of 128 KiB), then for each block
# three bytes (is it the last? its kind, its size) and the bytes as they are.
_MAGIC = bytes.fromhex("28b52ffdc038")
_BLOCK = 1 << 17
COUNT = np.dtype("<u4")


def framed(content: np.ndarray) -> bytes:
    """Bytes as a zstd frame."""
    parts: list[Any] = [_MAGIC, len(content).to_bytes(8, "little")]
    starts = range(0, max(1, len(content)), _BLOCK)
    for start in starts:
        block = content[start : start + _BLOCK]
        is_last = start + _BLOCK >= len(content)
        parts.append((len(block) << 3 | is_last).to_bytes(3, "little"))
        parts.append(block.data)
    return b"".join(parts)


def unframed(frame: np.ndarray) -> np.ndarray:
    """The bytes of such a frame; ValueError for anything else."""
    head = frame[:14].tobytes()
    if head[:6] != _MAGIC or len(head) < 14:
        raise ValueError("it is not a zstd frame of stored blocks")
    # a frame that claims more is refused below, without its memory
    size = min(int.from_bytes(head[6:], "little"), len(frame))
    content = np.empty(size, np.uint8)
    at = 14
    filled = 0
    is_last = False
    while not is_last:
        word = int.from_bytes(frame[at : at + 3].tobytes(), "little")
        size = word >> 3
        is_last = bool(word & 1)
        at += 3
        block = frame[at : at + size]
        if word & 6 or len(block) != size or filled + size > len(content):
            raise ValueError("a block of its zstd frame is cut off or not stored")
        content[filled : filled + size] = block
        filled += size
        at += size
    if filled != len(content) or at != len(frame):
        raise ValueError("its zstd frame has another length than it says")
    return content


def encode_changes(positions: np.ndarray, values: np.ndarray) -> bytes:
    """Which bytes of a tensor changed, and what they are now."""
    count = np.array([len(positions)], COUNT)
    parts = [raw(count), raw(positions.astype(COUNT, copy=False)), values]
    return framed(np.concatenate(parts))


def decode_changes(frame: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and bytes, for a tensor of so many bytes; ValueError if they are none."""
    content = unframed(frame)
    count = int(content[:4].view(COUNT)[0]) if len(content) >= 4 else -1
    if len(content) != 4 + 5 * count:
        raise ValueError(f"it holds {len(content)} bytes for {count} changes")
    positions = content[4 : 4 + 4 * count].view(COUNT)
    if count and int(positions.max()) >= nbytes:
        raise ValueError(f"it changes a byte behind the tensor's {nbytes}")
    return positions, content[4 + 4 * count :]


def encoded_bytes(changes: int) -> int:
    """How long the payload of so many changed bytes is, about."""
    return 20 + 5 * changes


# Stores ---------------------------------------------------------------------------------------------------------------


class Folder:
    """A folder of this machine, or of a file system that several mount. Paths are relative, with slashes."""

    def __init__(self, path: str) -> None:
        self.where = path
        self._root = Path(path)

    def names(self, folder: str = "") -> list[str]:
        """What lies directly in it; nothing if it does not exist."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(self._root / folder)
        return []

    def read(self, path: str, limit: int) -> bytes:
        """A small file. FileNotFoundError where there is none."""
        with (self._root / path).open("rb") as file:
            return file.read(limit)

    def read_array(self, path: str, nbytes: int) -> np.ndarray:
        """A file that should have so many bytes, or fewer if it is shorter. FileNotFoundError where there is none."""
        with (self._root / path).open("rb") as file:
            # one byte more shows a file that is too long
            found = min(nbytes + 1, os.fstat(file.fileno()).st_size)
            out = np.empty(found, np.uint8)
            size = file.readinto(out.data)
        return out[:size]

    def create(self, path: str, content: bytes) -> bool:
        """Write a small file that must not exist; False if it does."""
        self._root.mkdir(parents=True, exist_ok=True)
        part = self._root / f".{path}.{secrets.token_hex(4)}{_PART}"
        part.write_bytes(content)
        try:
            # a link, not open(O_EXCL): nobody may read it half written
            os.link(part, self._root / path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # no hard links here; who reads it half written reads it again
            try:
                with (self._root / path).open("xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
        finally:
            part.unlink(missing_ok=True)
        return True

    def replace(self, path: str, content: bytes) -> None:
        """Write a small file; readers see the old one or the new one."""
        part = self._root / f".{path}.{secrets.token_hex(4)}{_PART}"
        part.write_bytes(content)
        os.replace(part, self._root / path)

    def begin(self, version: str, token: str) -> str:
        """Where the files of a version are written before it is visible."""
        name = f".{version}.{token}{_PART}"
        (self._root / name).mkdir(parents=True)
        return name

    def put(self, path: str, parts: Iterable[Any]) -> None:
        """Write a file, buffer after buffer."""
        with (self._root / path).open("xb") as file:
            file.writelines(parts)

    def show(self, staged: str, version: str, index: bytes) -> bool:
        """Make a finished version visible, in one step; False if another has its name."""
        (self._root / staged / INDEX).write_bytes(index)
        try:
            # refused if there is a directory of that name, since no version is empty
            os.rename(self._root / staged, self._root / version)
        except OSError:
            if not (self._root / version).exists():
                raise
            return False
        return True

    def remove(self, path: str) -> None:
        """Remove a file, or a version: its index first, so that nobody begins to read it."""
        target = self._root / path
        if not target.is_dir():
            target.unlink(missing_ok=True)
            return
        gone = self._root / f".{path.lstrip('.')}.{secrets.token_hex(4)}.gone{_PART}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, gone)
            shutil.rmtree(gone, ignore_errors=True)


class Bucket:
    """As `Folder`, any store that fsspec knows: memory://, s3://, gs://, … What it needs is imported by fsspec.

    `create` is as exclusive as the store's own: by a condition on the request where there is one. Elsewhere two writers
    at the same moment are told apart by reading back what was written, which sees most collisions and not all.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise MissingDependency(
                f"{url} needs fsspec, which is not installed",
                remedy="pip install 'jvlab[storage]'; a plain folder needs none",
            ) from error
        self.where = url
        try:
            self._fs, root = url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"fsspec cannot open {url}: {error}",
                remedy="install what it names; a plain folder needs nothing",
                path=url,
            ) from error
        self._root = root.rstrip("/")

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def names(self, folder: str = "") -> list[str]:
        at = self._at(folder)
        # stores keep listings; ours must be of now
        self._fs.invalidate_cache(at)
        self._fs.invalidate_cache(self._root)
        try:
            found = self._fs.ls(at, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in found)
        return [name for name in names if name]

    def read(self, path: str, limit: int) -> bytes:
        return self._fs.cat_file(self._at(path), start=0, end=limit)

    def read_array(self, path: str, nbytes: int) -> np.ndarray:
        out = np.empty(nbytes + 1, np.uint8)
        at = 0
        while at <= nbytes:
            end = min(at + CHUNK, nbytes + 1)
            try:
                part = self._fs.cat_file(self._at(path), start=at, end=end)
            except (OSError, ValueError):
                # some stores refuse a range that begins at the file's end
                if not at or self._fs.size(self._at(path)) > at:
                    raise
                break
            if not part:
                break
            out[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        return out[:at]

    def create(self, path: str, content: bytes) -> bool:
        try:
            self._fs.pipe_file(self._at(path), content, mode="create")
        except FileExistsError:
            return False
        except OSError:
            # how a store says that its condition was not met is its own
            if not self._fs.exists(self._at(path)):
                raise
        return self.read(path, len(content) + 1) == content

    def replace(self, path: str, content: bytes) -> None:
        self._fs.pipe_file(self._at(path), content)

    def begin(self, version: str, token: str) -> str:
        return version

    def put(self, path: str, parts: Iterable[Any]) -> None:
        with self._fs.open(self._at(path), "wb") as file:
            file.writelines(parts)

    def show(self, staged: str, version: str, index: bytes) -> bool:
        return self.create(f"{version}/{INDEX}", index)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(f"{path}/{INDEX}"))
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._at(path), recursive=True)


Store = Folder | Bucket


def open_store(
    path: str | os.PathLike[str], options: Mapping[str, Any] | None = None
) -> Store:
    """The store of a path: a plain one, or file://, is a folder; any other URL is fsspec's."""
    text = os.fspath(path)
    if not text:
        raise ConfigError(
            "the path is empty",
            remedy='a folder that both sides see, or a URL: "s3://bucket/run"',
        )
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" in text or "::" in text:
        return Bucket(text, options or {})
    if options:
        raise ConfigError(
            f"storage_options= are for URLs, and {text} is a folder",
            remedy="leave them out",
        )
    return Folder(os.path.abspath(text))


# Calls with a deadline ------------------------------------------------------------------------------------------------

T = TypeVar("T")
STUCK = 4  # calls of one store that never came back, until it is not asked any more
_LOOK = 0.2  # seconds between two looks at whether the caller still wants it


class Stopped(Exception):
    """Internal: whoever asked was closed meanwhile."""


class Patient:
    """Calls a store from a thread of its own, so that a store that hangs makes nobody hang with it."""

    def __init__(self, store: Store, stopped: Callable[[], bool] = bool) -> None:
        self.store = store
        self._stopped = stopped
        self._stuck: list[threading.Thread] = []

    def call(
        self, what: str, deadline: Deadline, function: Callable[..., T], *given: Any
    ) -> T:
        """What `function(*given)` returns or raises; `what` it does is for the error at the deadline."""
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= STUCK:
            raise self._silent(what, deadline)
        done = threading.Event()
        got: list[Any] = [None, None]

        def work() -> None:
            try:
                got[0] = function(*given)
            except BaseException as error:
                got[1] = error
            done.set()

        # a daemon, which a process does not wait for at its end
        thread = threading.Thread(target=work, name="jvlab-storage", daemon=True)
        thread.start()
        while not done.wait(deadline.within(_LOOK)):
            if self._stopped() or deadline.over:
                self._stuck.append(thread)
                if self._stopped():
                    raise Stopped
                raise self._silent(what, deadline)
        error = got[1]
        expected = isinstance(error, (JvlabError, FileNotFoundError))
        if isinstance(error, OSError) and not expected:
            raise self._failed(what, error) from error
        if error is not None:
            raise error
        return got[0]

    def _failed(self, what: str, error: OSError) -> StorageError:
        remedy = "can this process read and write there?"
        if error.errno in FULL:
            remedy = "make room; what was published before is kept"
        text = str(error) or type(error).__name__
        return StorageError(
            f"{self.store.where} failed to {what}: {text}",
            remedy=remedy,
            path=self.store.where,
            number=error.errno,
        )

    def _silent(self, what: str, deadline: Deadline) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self.store.where} did not {what} within {deadline.seconds:g} s",
            remedy="is it mounted, and reachable from here? pass a larger timeout= if it is only slow",
            why=Why.SILENT,
            path=self.store.where,
        )


# One writer -----------------------------------------------------------------------------------------------------------

LEASE_SECONDS = 30.0
RELEASE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A writer's file: who writes, whether it lives, and which versions are no longer its predecessors'."""

    epoch: int
    token: str
    by: str
    pid: int = 0
    host: str = ""
    started: float = 0.0
    lease: float = LEASE_SECONDS
    beat: int = 0
    released: bool = False
    # (epoch, version): what an earlier epoch published above that version is refused
    fences: tuple[tuple[int, int], ...] = ()

    def to_bytes(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def parse(cls, text: bytes) -> Lock | None:
        """None if it is being written, or not ours."""
        try:
            content = parse_object(text)
            fences = tuple((int(e), int(v)) for e, v in content.pop("fences"))
            return cls(**content, fences=fences)
        except (ValueError, TypeError, KeyError):
            return None

    @property
    def is_dead(self) -> bool:
        """Whether its process was one of this machine, and has ended."""
        return Identity.own().host == self.host and not self.is_here

    @property
    def is_here(self) -> bool:
        """Whether its process is one of this machine, and lives."""
        return Identity(self.pid, self.host, self.started).process() is not None


def lock_name(epoch: int) -> str:
    return f"writer-{epoch:06d}.json"


def epochs_in(names: Iterable[str]) -> list[int]:
    """The writers among these names, newest first."""
    return _numbers(_WRITER, names)


class Lease:
    """This process's right to write versions, until another takes it over or it is released.

    A writer is an epoch: a file of its own, created exclusively, never overwritten by another. It is taken over once
    its process is known to be dead, or its heartbeat stands still for the time it promised, by our clock alone. Then
    the successor notes the newest version; what the old writer publishes later is refused by every reader.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store = store
        self._calls = Patient(store)
        self._shelf = Shelf(self._calls)
        self._seconds = seconds
        self._closed = threading.Event()
        self._writing = threading.Lock()
        self._lock = Lock(epoch=0, token="", by="")

    @property
    def epoch(self) -> int:
        return self._lock.epoch

    def claim(self, deadline: Deadline) -> None:
        """Become the writer; LinkBusy names the one there is."""
        before = self._wait_for_the_last(deadline)
        epoch = (before.epoch if before is not None else 0) + 1
        own = Identity.own()
        self._lock = Lock(
            epoch=epoch,
            token=secrets.token_hex(8),
            by=own_name(),
            pid=own.pid,
            host=own.host,
            started=own.started,
            lease=self._seconds,
            fences=before.fences if before is not None else (),
        )
        made = self._calls.call(
            "become its writer",
            deadline,
            self._store.create,
            lock_name(epoch),
            self._lock.to_bytes(),
        )
        if not made:
            raise self._busy(self._shelf.lock(epoch, deadline))
        try:
            self._take_over(deadline)
        except BaseException:
            self.release(deadline.within(RELEASE_SECONDS))
            raise
        threading.Thread(target=self._beat, name="jvlab-publisher", daemon=True).start()

    def _take_over(self, deadline: Deadline) -> None:
        """Fence off the writers before, and remove what they left half written."""
        self.check(deadline)
        # Only now: what was published before this epoch's file existed is its predecessor's by right.
        names = self._shelf.names(deadline)
        unfinished: list[str] = []
        newest = 0
        for version in versions_in(names):
            name = version_name(version)
            listed = self._calls.call("list it", deadline, self._store.names, name)
            if INDEX in listed:
                newest = version
                break
            unfinished.append(name)
        fences = (*self._lock.fences, (self.epoch, newest))[-FENCES:]
        self._write(deadline, beat=1, fences=fences)
        parts = (name for name in names if name.endswith(_PART))
        left = [*unfinished, *(name for name in parts if name.startswith(".weight_v"))]
        left += [lock_name(old) for old in epochs_in(names) if old < self.epoch]
        for name in left:
            self._calls.call(f"remove {name}", deadline, self._store.remove, name)

    def _wait_for_the_last(self, deadline: Deadline) -> Lock | None:
        """The last writer, once it has ended; None if there was none."""
        seen: tuple[int, int] | None = None
        since = time.monotonic()
        while True:
            epochs = epochs_in(self._shelf.names(deadline))
            if not epochs:
                return None
            lock = self._shelf.lock(epochs[0], deadline)
            if lock is not None and (lock.released or lock.is_dead):
                return lock
            if lock is not None and lock.is_here:
                raise self._busy(lock)
            now = (epochs[0], lock.beat if lock is not None else -1)
            if seen is not None and seen != now:
                raise self._busy(lock)
            seen = now
            promised = lock.lease if lock is not None else self._seconds
            if time.monotonic() - since > promised:
                return lock or Lock(epoch=epochs[0], token="", by="")
            if deadline.over:
                raise self._busy(lock)
            time.sleep(deadline.within(min(1.0, promised / 10)))

    def check(self, deadline: Deadline) -> None:
        """Raise if another has taken over."""
        newest = max(epochs_in(self._shelf.names(deadline)), default=0)
        if newest > self.epoch:
            self._closed.set()
            raise self._busy(self._shelf.lock(newest, deadline), lost=True)

    def _busy(self, lock: Lock | None, lost: bool = False) -> LinkBusy:
        who = lock.by if lock is not None and lock.by else "another writer"
        what = "has taken over" if lost else "publishes into"
        remedy = "one trainer publishes into one folder: close the other publisher, or choose another folder"
        if lost:
            remedy = (
                "this publisher is closed; make a new one, if that writer has ended"
            )
        return LinkBusy(
            f"{who} {what} {self._store.where}",
            remedy=remedy,
            owner=who,
            path=self._store.where,
            lost=lost,
        )

    def _write(self, deadline: Deadline, **changes: Any) -> None:
        with self._writing:
            lock = Lock(**{**vars(self._lock), **changes})
            self._calls.call(
                "renew its lock",
                deadline,
                self._store.replace,
                lock_name(lock.epoch),
                lock.to_bytes(),
            )
            self._lock = lock

    def _beat(self) -> None:
        """Renew the heartbeat; a beat that fails is followed by another, and a publish checks by itself."""
        while not self._closed.wait(self._seconds / 3):
            with contextlib.suppress(StorageError, DeadlineExceeded, OSError, LinkBusy):
                deadline = Deadline(self._seconds)
                self.check(deadline)
                self._write(deadline, beat=self._lock.beat + 1)

    @property
    def lost(self) -> bool:
        return self._closed.is_set()

    def release(self, seconds: float) -> None:
        """Let the next writer begin at once, if the store answers in time."""
        if self._closed.is_set():
            return
        self._closed.set()
        # RuntimeError: no thread starts while the interpreter ends; our process is then known to be dead
        with contextlib.suppress(StorageError, DeadlineExceeded, OSError, RuntimeError):
            self._write(Deadline(seconds), released=True)


# Writing one version --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: its name, dtype and shape as the header says, its bytes, and the result's checksum."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any  # a buffer of bytes
    checksum: str

    @property
    def nbytes(self) -> int:
        return len(self.data)


def shards(tensors: Iterable[Stored], most: int) -> Iterator[list[Stored]]:
    """Groups of tensors of at most so many bytes, as far as single ones allow."""
    group: list[Stored] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.nbytes > most:
            yield group
            group = []
            size = 0
        group.append(tensor)
        size += tensor.nbytes
    if group:
        yield group


def shard_parts(group: Sequence[Stored]) -> list[Any]:
    """The buffers of one file. Wide elements first, so that all are aligned."""
    metadata = {tensor.name: tensor.checksum for tensor in group}
    head = encode_entries(
        [(tensor.name, tensor.dtype, tensor.shape) for tensor in group],
        {"format": "pt", **metadata},
        align=64,
    )
    return [head, *(tensor.data for tensor in group)]


# Reading --------------------------------------------------------------------------------------------------------------

ReadFile = Callable[[str, int], np.ndarray]  # path, bytes -> what the file holds


@dataclass
class Copy:
    """One version's tensors in memory, with the checksum of each. Anything that fails leaves it as it was."""

    version: int = 0
    state: str = ""
    model: str = ""
    tensors: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    checksums: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, index: Index, read: ReadFile) -> Copy:
        """A full version."""
        made = cls(index.version, index.state, index.model)
        for name in sorted(set(index.weight_map.values())):
            memory = _checked(index, name, read)
            for entry in _entries(index, name, memory)[1]:
                array = entry.array(memory)
                if not array.flags.aligned:
                    array = array.copy()
                made.tensors[entry.name] = array
                made.checksums[entry.name] = checksum(raw(array))
        if made.tensors.keys() != index.weight_map.keys() or (
            state_of(made.tensors, made.checksums) != index.state
        ):
            raise _damaged(index, "its tensors are not those that its index names")
        return made

    def apply(self, index: Index, read: ReadFile) -> int:
        """Bring it to a version that changes this one; returns how many bytes changed."""
        if self.state != index.base_state:
            raise failure(
                Why.BASE,
                f"{index.name} changes a version {index.base} with other values than those held, of {self.version}",
                "a full version is read instead",
                version=index.version,
            )
        undo: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        checksums = dict(self.checksums)
        try:
            for name in sorted(set(index.weight_map.values())):
                memory = _checked(index, name, read)
                metadata, entries = _entries(index, name, memory)
                for entry in entries:
                    flat, positions, values = self._changes(index, entry, memory)
                    undo.append((flat, positions, flat[positions]))
                    flat[positions] = values
                    checksums[entry.name] = checksum(flat)
                    if checksums[entry.name] != metadata.get(entry.name):
                        raise _damaged(
                            index, f"{entry.name} is not the trainer's after it"
                        )
            if state_of(self.tensors, checksums) != index.state:
                raise _damaged(index, "it leads to other values than the trainer's")
        except BaseException:
            for flat, positions, old in reversed(undo):
                flat[positions] = old
            raise
        self.checksums = checksums
        self.version = index.version
        self.state = index.state
        return sum(len(positions) for _, positions, _ in undo)

    def _changes(
        self, index: Index, entry: Entry, memory: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if entry.name not in self.tensors:
            raise _damaged(index, f"it changes {entry.name}, which its base lacks")
        flat = raw(self.tensors[entry.name])
        try:
            found = decode_changes(memory[entry.begin : entry.end], len(flat))
        except ValueError as error:
            raise _damaged(index, f"{entry.name}: {error}") from error
        return flat, *found


def _damaged(index: Index, what: str) -> StorageError:
    return failure(
        Why.DAMAGED,
        f"{index.name} is damaged: {what}",
        "the version before it is served on; publish again, or wait for a full version",
        version=index.version,
    )


def _checked(index: Index, name: str, read: ReadFile) -> np.ndarray:
    """A file's bytes, if they are those that the index names."""
    nbytes, wanted = index.files[name]
    try:
        memory = read(f"{index.name}/{name}", nbytes)
    except FileNotFoundError as error:
        raise failure(
            Why.MISSING,
            f"{name} of {index.name} is not there",
            "the version was pruned, or is incomplete; another is read instead",
            version=index.version,
        ) from error
    if len(memory) != nbytes:
        raise _damaged(index, f"{name} has {len(memory)} bytes of {nbytes}")
    if checksum(memory) != wanted:
        raise _damaged(index, f"the checksum of {name} differs")
    return memory


def _entries(
    index: Index, name: str, memory: np.ndarray
) -> tuple[dict[str, Any], list[Entry]]:
    """The header of a file, which must name the tensors that the index says it has."""
    size = int.from_bytes(memory[:8].tobytes(), "little")
    try:
        head = io.BytesIO(memory[: min(8 + size, len(memory))].tobytes())
        metadata, entries = parse_header(head, len(memory))
    except ValueError as error:
        raise _damaged(index, f"{name}: {error}") from error
    expected = {tensor for tensor, file in index.weight_map.items() if file == name}
    if (
        {entry.name for entry in entries} != expected
        or any(entry.end > len(memory) for entry in entries)
        or any(entry.dtype not in DTYPES for entry in entries)
    ):
        raise _damaged(index, f"{name} holds other tensors than its index says")
    return metadata, entries


class Shelf:
    """The versions of a store as a reader sees them: which are complete, and which files lead to one."""

    def __init__(self, calls: Patient) -> None:
        self.store = calls.store
        self.calls = calls

    def names(self, deadline: Deadline) -> list[str]:
        return self.calls.call("list it", deadline, self.store.names)

    def index(self, version: int, deadline: Deadline) -> Index:
        """A version's index; a StorageError if it has none, or one that is damaged."""
        path = f"{version_name(version)}/{INDEX}"
        try:
            text = self.calls.call(
                f"read {path}", deadline, self.store.read, path, LONGEST_INDEX
            )
        except FileNotFoundError as error:
            raise failure(
                Why.MISSING,
                f"{version_name(version)} is not there, or not complete",
                "it was pruned, or is still being written",
                version=version,
            ) from error
        return Index.parse(text, version)

    def fences(
        self, names: Iterable[str], deadline: Deadline
    ) -> tuple[tuple[int, int], ...]:
        """What earlier writers may no longer publish."""
        for epoch in epochs_in(names):
            # one that is half written has added no fence yet
            if (lock := self.lock(epoch, deadline)) is not None:
                return lock.fences
        return ()

    def lock(self, epoch: int, deadline: Deadline) -> Lock | None:
        """A writer's file; None if it is gone, being written, or not ours."""
        name = lock_name(epoch)
        with contextlib.suppress(FileNotFoundError):
            read = self.store.read
            text = self.calls.call(
                "read its writer", deadline, read, name, LONGEST_LOCK
            )
            return Lock.parse(text)
        return None

    def complete(self, version: int, names: Iterable[str], deadline: Deadline) -> Index:
        """The index of a version that was published by a writer in its place."""
        index = self.index(version, deadline)
        fences = self.fences(names, deadline)
        if any(index.epoch < epoch and version > last for epoch, last in fences):
            raise failure(
                Why.FENCED,
                f"{index.name} was published by a writer that another had replaced",
                "only the newest writer's versions are served",
                version=version,
            )
        return index

    def chain(
        self,
        index: Index,
        names: Iterable[str],
        held: Copy | None,
        deadline: Deadline,
    ) -> list[Index]:
        """What must be read to reach a version: from the copy that is held, or from a full version on."""
        found = [index]
        while (last := found[-1]).base is not None:
            if held is not None and last.base_state == held.state:
                break
            base = self.complete(last.base, names, deadline)
            if base.state != last.base_state:
                raise failure(
                    Why.BASE,
                    f"{last.name} changes another {base.name} than the one that is there",
                    "a full version is read instead",
                    version=last.version,
                )
            found.append(base)
        return found[::-1]

    def read_file(self, path: str, nbytes: int, deadline: Deadline) -> np.ndarray:
        return self.calls.call(
            f"read {path}", deadline, self.store.read_array, path, nbytes
        )


def small_files(folder: Path) -> dict[str, bytes]:
    """What a checkpoint folder holds beside its weights: config, tokenizer. None of them is large."""
    most = 64 << 20
    kept = (".json", ".txt", ".model", ".jinja")
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix in kept
        and _FILE.fullmatch(path.name)
        and not path.name.endswith(".index.json")
        and path.stat().st_size <= most
    }
