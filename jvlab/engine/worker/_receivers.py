"""Receives buckets: a ledger of expected and received boxes (no I/O), and the threads that read the channels.

One receive thread per channel scatters; another finishes complete parameters (digest, re-pack), so that the next bucket
need not wait for it. The queue between them is short, so that raw copies waiting to be packed cannot pile up.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jvlab._errors import DeadlineExceeded, SyncError, TransportError
from jvlab.layout._boxes import merge_axes
from jvlab.layout._plan_types import LinkPlan
from jvlab.layout._sparse import Section, read_sections
from jvlab.transport._peer import Header, Receiver

QUEUE_SIZE = 2  # complete parameters that may wait for the finishing thread


@dataclass(frozen=True)
class ReceivedBox:
    """One strided copy: `nbytes` at byte `at` of its bucket, to an offset in a target. No axes of size 1."""

    target: int
    at: int
    nbytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ExpectedBucket:
    """What one bucket holds."""

    nbytes: int
    boxes: tuple[ReceivedBox, ...]

    def sections(self, data: Any, nbytes: int) -> list[Section]:
        """Where each box's changes are in a sparse bucket of so many bytes."""
        elements = [box.elements for box in self.boxes]
        items = [box.nbytes // box.elements for box in self.boxes]
        return read_sections(data, nbytes, elements, items)


class Ledger:
    """Expected boxes by device and bucket, and what has been received. Thread-safe."""

    def __init__(self, links: Sequence[LinkPlan]) -> None:
        self.buckets: dict[tuple[int, int], ExpectedBucket] = {}
        self.boxes: dict[int, list[ReceivedBox]] = {}
        for link in links:
            grouped: list[list[ReceivedBox]] = [[] for _ in link.bucket_sizes]
            for i in range(len(link)):
                axes = zip(
                    link.shape[i].tolist(), link.dst_strides[i].tolist(), strict=True
                )
                merged = merge_axes(
                    (size, (stride,), None) for size, stride in axes
                ) or [(1, (1,), None)]
                box = ReceivedBox(
                    int(link.target[i]),
                    int(link.bucket_offset[i]),
                    int(link.nbytes[i]),
                    int(link.dst_offset[i]),
                    tuple(size for size, _, _ in merged),
                    tuple(stride for _, (stride,), _ in merged),
                )
                grouped[int(link.bucket[i])].append(box)
                self.boxes.setdefault(box.target, []).append(box)
            for number, boxes in enumerate(grouped):
                self.buckets[link.device, number] = ExpectedBucket(
                    int(link.bucket_sizes[number]), tuple(boxes)
                )
        self._lock = threading.Lock()
        self.begin(0)

    def begin(self, version: int, sparse: bool = False) -> None:
        """Expect everything again, of this version; `sparse`: a smaller bucket holds what changed."""
        self.version = version
        self.sparse = sparse
        self._seen: set[tuple[int, int]] = set()
        self._left = {target: len(boxes) for target, boxes in self.boxes.items()}
        self.bytes = 0

    def admit(self, header: Header) -> ExpectedBucket | None:
        """The bucket that this header announces; None if it is of another version, to be dropped; raises if invalid."""
        if header.version != self.version:
            return None
        key = (header.device, header.bucket)
        found = self.buckets.get(key)
        if found is None:
            raise TransportError(
                f"bucket {header.bucket} of device {header.device} is not in the plan",
                remedy="trainer and replica hold different plans: connect again",
            )
        if header.nbytes != found.nbytes and not (
            self.sparse and header.nbytes < found.nbytes
        ):
            raise TransportError(
                f"bucket {header.bucket} of device {header.device} has {header.nbytes} bytes; in the plan it has "
                f"{found.nbytes}",
                remedy="trainer and replica hold different plans: connect again",
            )
        with self._lock:
            if key in self._seen:
                raise TransportError(
                    f"bucket {header.bucket} of device {header.device} arrived twice",
                    remedy="sync again",
                )
            self._seen.add(key)
        return found

    def landed(self, bucket: ExpectedBucket, nbytes: int) -> list[int]:
        """The bucket's boxes are written, from so many bytes; returns the targets that this completes."""
        complete = []
        with self._lock:
            self.bytes += nbytes
            for box in bucket.boxes:
                self._left[box.target] -= 1
                if not self._left[box.target]:
                    complete.append(box.target)
        return complete

    def missing(self, devices: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """(device, bucket) of those not received yet."""
        with self._lock:
            return [
                k
                for k in self.buckets
                if k not in self._seen and (devices is None or k[0] in devices)
            ]


def describe_missing(missing: Sequence[tuple[int, int]]) -> str:
    """`12 buckets, the first: 3 of device 0`."""
    if not missing:
        return "no bucket"
    device, bucket = missing[0]
    return f"{len(missing)} bucket{'s' * (len(missing) > 1)}, the first: {bucket} of device {device}"


@dataclass
class ReceivingChannel:
    """The channel from one trainer process, and the devices whose buckets it carries."""

    receiver: Receiver
    devices: tuple[int, ...]
    process: int = 0


@dataclass
class PhaseClock:
    """Seconds of each kind of work, summed over threads."""

    seconds: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[name] = (
                    self.seconds.get(name, 0.0) + time.perf_counter() - start
                )


class Receivers:
    """The threads of one link on one rank. `scatter` writes a box, `finish` completes a target, `end` comes last.

    `patch` writes what changed in the boxes of a bucket.
    """

    def __init__(
        self,
        channels: Sequence[ReceivingChannel],
        ledger: Ledger,
        scatter: Callable[[ReceivedBox, Any], None],  # a memoryview, or DeviceBytes
        finish: Callable[[int], None],
        end: Callable[[], None],
        ready: Callable[[], None] = lambda: None,
        patch: Callable[[Sequence[ReceivedBox], Sequence[Section], Any], None]
        | None = None,
    ) -> None:
        self.channels = list(channels)
        self.ledger = ledger
        self._scatter = scatter
        self._patch = patch
        self._finish = finish
        self._end = end
        self._ready = ready
        self._threads: list[threading.Thread] = []
        self._work: queue.Queue[int] = queue.Queue(QUEUE_SIZE)
        self._stop = threading.Event()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._participants = 0
        self.error: Exception | None = None
        self.closed = False
        self.dropped = 0
        self.clock = PhaseClock()

    @property
    def running(self) -> bool:
        return any(t.is_alive() for t in self._threads)

    @property
    def done(self) -> bool:
        """Whether everything is written, digested and packed, or it failed."""
        return self._done.is_set() or self.error is not None

    def check(self) -> None:
        """Raise if no sync can begin."""
        if self.closed:
            raise TransportError(
                "the channels were closed by an earlier failure",
                remedy="open the link again",
            )
        if self.running:
            raise SyncError(
                "an earlier move is still running", remedy="abandon it first"
            )

    def start(self, version: int, bucket_seconds: float, sparse: bool = False) -> None:
        """Receive buckets of this version from now on, also sparse ones if so; returns at once."""
        self.check()
        self.ledger.begin(version, sparse and self._patch is not None)
        self.error = None
        self.dropped = 0
        self.clock = PhaseClock()
        self._stop.clear()
        self._done.clear()
        self._work = queue.Queue(QUEUE_SIZE)
        self._participants = len(self.channels)
        self._threads = []
        for channel in self.channels:
            name = f"jvlab-receive-{channel.process}"
            self._start(name, self._receive, channel, bucket_seconds)
        self._start("jvlab-finish", self._finish_all)

    def _start(self, name: str, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self, seconds: float) -> bool:
        """End the threads; True if all ended in time. Channels in use are closed: half a sync can't be continued."""
        self._stop.set()
        if self.running or self.error is not None:
            self.close()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not self.running

    def close(self) -> None:
        """Close the channels; waiting threads end."""
        self.closed = True
        self._stop.set()
        for channel in self.channels:
            with contextlib.suppress(Exception):  # it may be broken already
                channel.receiver.close()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self.error is None and not self._stop.is_set():
                self.error = error

    def _receive(self, channel: ReceivingChannel, bucket_seconds: float) -> None:
        try:
            self._ready()
            left = len(self.ledger.missing(channel.devices))
            while left and not self._stop.is_set():
                left -= self._receive_one(channel, bucket_seconds)
        except Exception as error:  # reported to the trainer and the gateway
            if not self._stop.is_set():
                self._fail(self._with_context(error, channel, bucket_seconds))
                with contextlib.suppress(Exception):  # the trainer may be gone
                    channel.receiver.fail(str(self.error))
        finally:
            with self._lock:
                self._participants -= 1

    def _with_context(
        self, error: Exception, channel: ReceivingChannel, bucket_seconds: float
    ) -> Exception:
        missing = self.ledger.missing(channel.devices)
        late = isinstance(error, TimeoutError | DeadlineExceeded)
        if not late and not (isinstance(error, TransportError) and missing):
            return error
        return TransportError(
            f"{getattr(error, 'message', error)} (trainer process {channel.process}; {describe_missing(missing)} "
            "did not arrive)",
            remedy=getattr(error, "remedy", "")
            or f"a bucket may take {bucket_seconds:g} s: see bucket_seconds",
        )

    def _receive_one(self, channel: ReceivingChannel, bucket_seconds: float) -> int:
        """Receive one bucket; 1 if it was expected, 0 if it was dropped."""
        received = channel.receiver.recv(bucket_seconds)
        if self.error is not None:
            # another channel failed: report it to this trainer process too
            raise self.error
        bucket = self.ledger.admit(received.header)
        if bucket is None:
            self.dropped += 1
            channel.receiver.release(received)
            return 0
        nbytes = received.header.nbytes
        if len(received.data) < nbytes:
            raise TransportError(
                f"bucket {received.header.bucket}: {len(received.data)} bytes of {nbytes} arrived"
            )
        with self.clock.timed("scatter"):
            if nbytes == bucket.nbytes or self._patch is None:
                for box in bucket.boxes:
                    self._scatter(box, received.data)
            else:
                parts = bucket.sections(received.data, nbytes)
                self._patch(bucket.boxes, parts, received.data)
        complete = self.ledger.landed(bucket, nbytes)
        channel.receiver.release(received)
        for target in complete:
            self._queue_finish(target)
        return 1

    def _queue_finish(self, target: int) -> None:
        while not self._stop.is_set() and self.error is None:
            with contextlib.suppress(queue.Full):
                self._work.put(target, timeout=0.1)
                return

    def _finish_all(self) -> None:
        try:
            self._ready()
            while not self._stop.is_set() and self.error is None:
                with self._lock:
                    over = not self._participants
                try:
                    target = self._work.get(timeout=0 if over else 0.005)
                except queue.Empty:
                    if not over:
                        continue
                    if self.ledger.missing():
                        return  # a receive thread ended early and has recorded why
                    self._end()
                    self._done.set()
                    return
                self._finish(target)
        except Exception as error:  # reported to the gateway at VERIFY
            self._fail(error)
