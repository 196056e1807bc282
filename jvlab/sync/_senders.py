"""`Senders`: the interface shared by sending buckets over channels and writing by CUDA IPC."""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jvlab._deadline import Deadline
from jvlab._errors import DeadlineExceeded, SyncDeadline
from jvlab.layout._digest import MASK, Flawed
from jvlab.layout._plan import TransferPlan
from jvlab.sync._pack import Encoded, LinkPack, Source
from jvlab.transport._ipc_kernels import cupy
from jvlab.transport._peer import Header, Sender
from jvlab.transport._shm import available_bytes
from jvlab.wire import jvlab_pb2 as pb

Key = tuple[bytes, int]  # fingerprint of a link's pack, bucket
THREADS = 4


@dataclass
class Held:
    """What the engines hold as of one sync. It takes as much memory as one replica's weights."""

    mark: str = ""  # empty: nothing is held
    buckets: dict[Key, Any] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets.values())

    def of_version(self, version: int) -> bool:
        return self.mark.startswith(f"{version}-")

    def clear(self) -> None:
        self.mark = ""
        self.buckets = {}


@dataclass(frozen=True)
class Found:
    """One bucket of a sync."""

    pack: LinkPack
    bucket: int
    encoded: Encoded
    digests: dict[int, int]
    flawed: Flawed


class Changes:
    """What one sync changes. `mark` names what it leaves; `base` what it changes, if anything is held."""

    def __init__(self, held: Held, version: int, deadline: Deadline) -> None:
        self.mark = f"{version}-{secrets.token_hex(8)}"
        self.base = held.mark
        self._held = held
        self._deadline = deadline
        self._found: dict[Key, Found] = {}
        self.holders: set[tuple[str, int]] = set()
        self.without: list[str] = []  # replicas that hold another base, or none

    def find(self, jobs: Iterable[tuple[LinkPack, int, bool]], source: Any) -> None:
        """Encode every bucket, before the engines pause; the flag: take its digest too."""
        todo: dict[Key, tuple[LinkPack, int, bool]] = {}
        for pack, bucket, digest in jobs:
            todo.setdefault((pack.fingerprint, bucket), (pack, bucket, digest))

        def one(key: Key) -> tuple[Key, Found]:
            pack, bucket, digest = todo[key]
            values = pack.values(bucket, source)
            held = self._held.buckets.get(key) if self.base else None
            encoded = pack.encode(bucket, values, held)
            flawed: Flawed = set()
            digests = pack.digests(bucket, values, flawed) if digest else {}
            return key, Found(pack, bucket, encoded, digests, flawed)

        threads = ThreadPoolExecutor(THREADS, "jvlab-changes")
        try:
            self._found = dict(threads.map(one, todo, timeout=self._deadline.left()))
        except TimeoutError:
            raise SyncDeadline(
                f"the sync's deadline of {self._deadline.seconds:g} s passed while its changes were sought",
                remedy='pass a larger timeout=; nothing was sent. delta="never" seeks none',
            ) from None
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def agree(self, replies: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
        """Take the ranks' replies to PREPARE: who holds the base."""
        for replica, ranks in replies.items():
            held = {int(r["rank"]): bool(r["holds_base"]) for r in ranks}
            self.holders |= {(replica, rank) for rank, holds in held.items() if holds}
            if not all(held.values()):
                self.without.append(replica)

    def found(self, pack: LinkPack, bucket: int) -> Found:
        return self._found[pack.fingerprint, bucket]

    @property
    def share(self) -> float | None:
        """The share of values that changed; None if nothing was held to compare with."""
        if not self.base:
            return None
        all_found = [found.encoded for found in self._found.values()]
        return sum(e.changed for e in all_found) / max(
            1, sum(e.elements for e in all_found)
        )

    def why_full(self, sparse: int, buckets: int) -> str:
        """Why not every bucket was sparse; empty if all were."""
        if not self.base:
            return "no earlier sync's values are held"
        if self.without:
            names = ", ".join(self.without)
            return f"{names} did not hold the base (new, dirty, or written by another link)"
        if not sparse:
            return f"{self.share:.0%} of the values changed: whole buckets are smaller"
        if sparse < buckets:
            return f"{buckets - sparse} of {buckets} buckets are smaller whole"
        return ""

    def committed(self) -> None:
        """The commit is known: what the engines hold is now held here."""
        held = self._held
        held.mark = ""  # if this is interrupted, nothing is held
        held.buckets = {
            key: found.pack.advance(found.bucket, held.buckets.get(key), found.encoded)
            for key, found in self._found.items()
        }
        held.mark = self.mark


def no_room(held: Held, nbytes: int, on_gpu: bool) -> str:
    """Why a copy of so many bytes can't be held where the shards are packed; empty if it can."""
    # the copy, and a sync that changes everything
    need = 2 * nbytes - held.nbytes
    if on_gpu:
        free = int(cupy().cuda.runtime.memGetInfo()[0])
    else:
        free = available_bytes()
    if need <= free:
        return ""
    where = "GPU" if on_gpu else "host"
    return f"the copy needs {need / 2**30:.1f} GiB of {where} memory, {free / 2**30:.1f} are free"


# Channels -------------------------------------------------------------------------------------------------------------


# ruff: noqa: B027 (hooks that only ipc needs do nothing elsewhere)


DigestRow = tuple[str, int, int]  # parameter, rank, digest
Exports = Mapping[str, Iterable[dict[str, Any]]]  # replica -> what each rank exported


@dataclass
class Sent:
    """What was sent and how long it took. Digests are by target of the plan and equal for every replica."""

    bytes: int = 0
    full_bytes: int = 0  # if all buckets were whole
    buckets: int = 0
    sparse: int = 0  # buckets that held only what changed
    seconds: dict[str, float] = field(
        default_factory=lambda: {"pack": 0.0, "copy": 0.0, "digest": 0.0, "move": 0.0}
    )
    digests: dict[int, int] = field(default_factory=dict)
    flawed: Flawed = field(default_factory=set)  # leaves with NaN or Inf
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            with self.lock:
                self.seconds[name] += time.perf_counter() - start

    def add_digests(self, parts: dict[int, int]) -> None:
        with self.lock:
            for target, value in parts.items():
                self.digests[target] = (self.digests.get(target, 0) + value) & MASK

    def add_flawed(self, found: Flawed) -> None:
        with self.lock:
            self.flawed |= found


Progress = Callable[[Sent], None]  # called with what was sent so far


class Senders(ABC):
    """What one trainer process sends to the ranks of each replica.

        open()                                    once, while the gateway opens the other ends
        settle() gather() attach() send_all()     once per sync, or send() and settle_jobs() step by step
        close()                                   also after errors; can be called twice

    `channels` are in order of replicas and ranks; each has a replica, a rank, a sender, jobs.
    """

    plan: TransferPlan
    channels: Sequence[Any]
    # digests are taken of what goes to this replica: the others get the same
    digest_replica: str
    no_direct = ""  # why live memory can't be written from here; empty if it can
    no_delta = ""  # why everything is sent each time; empty if changes can be
    changes: Changes | None = None  # of the sync in progress, if changes are sent

    def __init__(self, plan: TransferPlan, replicas: Mapping[str, int]) -> None:
        self.plan = plan
        self.digest_replica = next(iter(replicas), "")

    @property
    def replicas(self) -> dict[str, list[Any]]:
        """The channels by replica, in order of ranks."""
        out: dict[str, list[Any]] = {}
        for channel in self.channels:
            out.setdefault(channel.replica, []).append(channel)
        return out

    def rows(self, digests: Mapping[int, int]) -> list[DigestRow]:
        """These digests by parameter and rank, in order of targets."""
        targets = sorted(digests)
        named = zip(targets, by_parameter(self.plan, targets), strict=True)
        return [(*pair, digests[t]) for t, pair in named]

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes of one sync, to all replicas."""

    @abstractmethod
    def source(self, params: Any) -> Any:
        """A tree of parameters as these senders read it; raises if it does not match the connected one."""

    @abstractmethod
    def open(
        self, order: Callable[[], pb.LinkReply], deadline: Deadline
    ) -> pb.LinkReply:
        """Open both ends; `order` asks the gateway to open the replicas' ends."""

    @abstractmethod
    def ready(self, seconds: float) -> None:
        """Wait until every rank has opened its end."""

    def settle(self, source: Any, staged: bool) -> None:
        """Wait for arrays that are still being computed, before the sync pauses the engines."""

    def gather(self, source: Any, digest: bool) -> None:
        """Prepare what can be prepared while the engines pause."""

    def attach(self, exports: Exports) -> None:
        """Map the memory that ranks exported, if any."""

    @abstractmethod
    def send(
        self,
        job: Any,
        channel: Any,
        source: Any,
        version: int,
        seconds: float,
        sent: Sent,
        digest: bool,
    ) -> Callable[[], None] | None:
        """Send one job; returns a function that computes its digest, if that is left to do. `settle_jobs` follows."""

    @abstractmethod
    def settle_jobs(
        self, jobs: Iterable[Any], channel: Any, sent: Sent, seconds: float
    ) -> None:
        """Wait until these jobs have arrived, and add their non-finite leaves to `sent`."""

    @abstractmethod
    def send_all(
        self,
        source: Any,
        version: int,
        seconds: float,
        digest: bool = True,
        progress: Progress = lambda _: None,
        collect: bool = True,
    ) -> Sent:
        """Send everything to every rank; returns on arrival. Without `collect`, results may be left for `collect()`."""

    def collect(self, sent: Sent) -> None:
        """Add the results that `send_all` left to `sent`."""

    def claims(self, sent: Sent) -> bytes:
        """Digests of what was sent, in the order in which the ranks report theirs."""
        values = [
            sent.digests[t]
            for channel in self.replicas[self.digest_replica]
            for t in channel.targets
        ]
        return np.array(values, np.uint64).tobytes()

    @abstractmethod
    def digests(self, source: Any) -> dict[int, int]:
        """By target, the digests of this process's part of these parameters; nothing is sent."""

    def release_shadows(self) -> None:
        """Unmap the shadow buffers of staged syncs before the engines free them."""

    @abstractmethod
    def close(self) -> None:
        """Close every channel. Can be called twice."""


def by_parameter(plan: TransferPlan, targets: Iterable[int]) -> list[tuple[str, int]]:
    """(parameter, rank) of targets of a plan."""
    return [
        (plan.parameters[plan.target_parameter[t]].name, int(plan.target_rank[t]))
        for t in targets
    ]


# Sending in buckets: one channel per rank, and the threads that feed them during a sync.


@dataclass(frozen=True)
class Job:
    """One bucket to send."""

    pack: LinkPack
    bucket: int

    @property
    def nbytes(self) -> int:
        return self.pack.sizes[self.bucket]


@dataclass
class SendingChannel:
    """The sender to one rank of one replica, and its jobs in parameter order."""

    replica: str
    rank: int
    sender: Sender
    jobs: list[Job] = field(repr=False)
    sent: int = 0

    @cached_property
    def targets(self) -> list[int]:
        """The targets that this process writes, sorted."""
        return sorted({t for job in self.jobs for t in job.pack.targets(job.bucket)})


# plan, device, rank, replica
MakePack = Callable[[TransferPlan, int, int, int], LinkPack]


def jobs_of(
    plan: TransferPlan,
    rank: int,
    index: int,
    pack: MakePack = LinkPack,
    process: int | None = None,
) -> list[Job]:
    """Every bucket for one rank of one replica, ordered by parameter across devices so that each completes early."""
    table = plan.links(index)
    mine = [
        d
        for d in table.device[table.rank == rank].tolist()
        if process in (None, plan.process_of(d))
    ]
    packs = [pack(plan, d, rank, index) for d in mine]
    keyed = [
        (min(p.targets(b), default=-1), n, b)
        for n, p in enumerate(packs)
        for b in range(len(p.sizes))
    ]
    return [Job(packs[n], b) for _, n, b in sorted(keyed)]


class BucketSenders(Senders):
    """The channels of one link. `make(max_bucket_bytes, replica, rank)` opens a sender.

    `pack` makes the packer for one device → rank link. With `process`, only that trainer process's shards are sent.
    """

    def __init__(
        self,
        plan: TransferPlan,
        replicas: dict[str, int],
        make: Callable[[int, str, int], Sender],
        pack: MakePack = LinkPack,
        process: int | None = None,
    ) -> None:
        super().__init__(plan, replicas)
        self.channels: list[SendingChannel] = []
        try:
            for name, index in replicas.items():
                for rank in range(plan.ranks):
                    jobs = jobs_of(plan, rank, index, pack, process)
                    largest = max((job.nbytes for job in jobs), default=1)
                    self.channels.append(
                        SendingChannel(name, rank, make(largest, name, rank), jobs)
                    )
        except BaseException:
            self.close()
            raise

    @property
    def total_bytes(self) -> int:
        return sum(job.nbytes for channel in self.channels for job in channel.jobs)

    def source(self, params: Any) -> Source:
        return Source.of(self.plan, params)

    def settle(self, source: Source, staged: bool) -> None:
        if self.changes is not None:
            self.changes.find(
                (
                    (job.pack, job.bucket, channel.replica == self.digest_replica)
                    for channel in self.channels
                    for job in channel.jobs
                ),
                source,
            )

    def attach(self, exports: Exports) -> None:
        if self.changes is not None:
            self.changes.agree(exports)

    def open(
        self, order: Callable[[], pb.LinkReply], deadline: Deadline
    ) -> pb.LinkReply:
        # no deadline: `ready` has one
        # some transports open both ends at the same time
        with ThreadPoolExecutor(1, "jvlab-open") as background:
            opened = background.submit(self.ready, deadline.left())
            try:
                reply = order()
            except BaseException:
                self.close()  # unblocks the thread that waits for the other side
                raise
            opened.result()  # no deadline: `ready` has one
        return reply

    def ready(self, seconds: float) -> None:
        deadline = Deadline(seconds)
        for channel in self.channels:
            channel.sender.ready(max(0.1, deadline.left()))

    def send(
        self,
        job: Job,
        channel: SendingChannel,
        source: Source,
        version: int,
        seconds: float,
        sent: Sent,
        digest: bool,
    ) -> Callable[[], None] | None:
        pack = job.pack
        bucket = job.bucket
        digested = channel.replica == self.digest_replica
        encoded: Encoded | None = None
        if self.changes is not None:
            found = self.changes.found(pack, bucket)
            if digested:
                sent.add_digests(found.digests)
                sent.add_flawed(found.flawed)
                digest = False  # it is taken already
            holds = (channel.replica, channel.rank) in self.changes.holders
            if holds or not found.encoded.sparse:
                encoded = found.encoded
        nbytes = job.nbytes
        values: list[np.ndarray] = []
        if encoded is not None:
            nbytes = int(encoded.payload.nbytes)
        else:
            with sent.timed("pack"):
                values = pack.values(bucket, source)

        def fill(slot: memoryview) -> None:
            with sent.timed("copy"):
                if encoded is not None:
                    pack.copy_out(encoded, slot)
                    return
                check = digested and not digest and self.changes is None
                pack.write(bucket, values, slot, check_finite=check)

        header = Header(version, pack.device, bucket, nbytes)
        channel.sender.send(header, fill, seconds)
        channel.sent += 1
        with sent.lock:
            sent.bytes += nbytes
            sent.full_bytes += job.nbytes
            sent.buckets += 1
            sent.sparse += encoded is not None and encoded.sparse
        if encoded is not None or not digest or not digested:
            return None

        def compute_digests() -> None:
            flawed: Flawed = set()
            with sent.timed("digest"):
                sent.add_digests(pack.digests(bucket, values, flawed))
            sent.add_flawed(flawed)

        return compute_digests

    def settle_jobs(
        self, jobs: Iterable[Job], channel: SendingChannel, sent: Sent, seconds: float
    ) -> None:
        channel.sender.flush(seconds)
        for job in jobs:
            sent.add_flawed(job.pack.pop_flawed(job.bucket))

    def send_all(
        self,
        source: Source,
        version: int,
        seconds: float,
        digest: bool = True,
        progress: Progress = lambda _: None,
        collect: bool = True,
    ) -> Sent:
        """Send every bucket to every rank, one thread per channel; returns once every receiver has released its slots.

        An error on one channel, or a KeyboardInterrupt here, closes all of them.
        """
        sent = Sent()
        until = Deadline(seconds)
        stop = threading.Event()
        start = time.perf_counter()
        # One thread more than there are channels: it computes digests. A thread here waits for nothing but its channel,
        # which ends once it is closed, and a digest, which is always computed once it was submitted.
        # no deadline: each wait in it has one
        with ThreadPoolExecutor(len(self.channels) + 1, "jvlab-send") as threads:

            def feed(channel: SendingChannel) -> Future[None] | None:
                """Returns the digest that is still being computed, if any."""
                digesting: Future[None] | None = None
                for job in channel.jobs:
                    if stop.is_set():
                        return None
                    compute = self.send(
                        job,
                        channel,
                        source,
                        version,
                        _left(until, channel),
                        sent,
                        digest,
                    )
                    if compute is not None:
                        # one at a time: each holds a bucket's values
                        _wait_for_digest(digesting, until, channel)
                        # raises once all of this ends
                        digesting = threads.submit(compute)
                self.settle_jobs(channel.jobs, channel, sent, _left(until, channel))
                return digesting

            try:
                futures = {
                    threads.submit(feed, channel): channel for channel in self.channels
                }
                pending = set(futures)
                while pending:
                    done, pending = wait(pending, 0.2, FIRST_EXCEPTION)
                    progress(sent)
                    for future in done:
                        future.result(0)
                sent.seconds["move"] = time.perf_counter() - start
                for future, channel in futures.items():
                    _wait_for_digest(future.result(0), until, channel)
            except BaseException:
                stop.set()
                self.close()  # unblocks the other threads
                raise
        progress(sent)
        return sent

    def digests(self, source: Source) -> dict[int, int]:
        sent = Sent()
        for channel in self.replicas.get(self.digest_replica, ()):
            for job in channel.jobs:
                values = job.pack.values(job.bucket, source)
                sent.add_digests(job.pack.digests(job.bucket, values))
        return sent.digests

    def close(self) -> None:
        for channel in self.channels:
            channel.sender.close()


def _left(until: Deadline, channel: SendingChannel) -> float:
    left = until.left()
    if not left:
        raise DeadlineExceeded(
            f"the sync's deadline passed while waiting for rank {channel.rank} of {channel.replica}",
            remedy="pass a larger timeout=, or look at pool.logs()",
        )
    return left


def _wait_for_digest(
    digesting: Future[None] | None, until: Deadline, channel: SendingChannel
) -> None:
    if digesting is None:
        return
    try:
        digesting.result(_left(until, channel))
    except TimeoutError:
        raise DeadlineExceeded(
            f"the sync's deadline passed while the digest for rank {channel.rank} of {channel.replica} was computed",
            remedy="pass a larger timeout=; the trainer's processors may be busy with other work",
        ) from None
