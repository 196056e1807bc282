"""`Coordinator`: one link's connections to the replicas of its pool, and its syncs over them, one at a time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jvlab._deadline import Deadline
from jvlab._errors import (
    ConfigError,
    JvlabError,
    SyncDeadline,
    SyncError,
    Unsupported,
    VerifyError,
)
from jvlab._names import own_name
from jvlab._progress import Progress
from jvlab._tracebacks import shorten
from jvlab.layout._digest import compiled_loop
from jvlab.sync._senders import BucketSenders, Changes, Held, Senders, Sent, no_room
from jvlab.sync._transaction import (
    ORDER_SECONDS,
    CheckReport,
    SyncReport,
    Transaction,
    check_report,
    replica_digests,
)
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._core_channel import CoreOrders
from jvlab.wire._sync_words import BEFORE_BYTES, Phase, Terms

if TYPE_CHECKING:
    from jvlab.layout._plan import TransferPlan
    from jvlab.sync._connections import Agreement
    from jvlab.sync._ipc_lanes import Port
    from jvlab.sync._senders import SendingChannel
    from jvlab.sync._stepper import Stepper
    from jvlab.transport._peer import Sender
    from jvlab.wire._client import TeamStream
    from jvlab.wire._pool_view import PoolView


MODEL = "model"
DRAFT = "draft"
PARTS = (MODEL, DRAFT)  # of an engine, that a tree can be connected to
# the gateway abandons an open sync that gets no order for this long
LEASE_SECONDS = 600.0
Ready = dict[str, tuple[int, int]]  # replica -> its index in the plan, its epoch
# buckets in flight to a rank: one being filled, one in transit, one being read
SLOTS = 3
DIRTY_SECONDS = 1.0  # minimum time to mark a pool dirty
STATE_SECONDS = 5.0  # to ask what an interrupted sync left behind
Wrap = Callable[["Sender"], "Sender"] | None  # of each channel: injects faults
Listener = Callable[[float], None]  # called with the bytes sent so far


def behind(snapshot: pb.PoolStatus) -> frozenset[str]:
    """Ready replicas that hold an older version than the pool."""
    return frozenset(
        r.replica
        for r in snapshot.replicas
        if r.state == pb.READY and r.version < snapshot.version
    )


def version_after(last: int, wanted: int | None, who: str) -> int:
    """`wanted`, or the last version plus one; raises if it is not larger than the last, which `who` holds."""
    if wanted is None:
        return last + 1
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted <= last:
        raise ConfigError(
            f"version must be an integer larger than {last}, which {who} holds, not {wanted!r}",
            remedy="leave it out to use the next one",
        )
    return wanted


def ready_replicas(pool: PoolView, deadline: Deadline) -> Ready:
    """Name -> (index in the pool, epoch) of every ready replica; waits for a pool that is still starting."""
    pool.facts(deadline)
    snapshot = pool.snapshot
    return {
        r.replica: (i, r.epoch)
        for i, r in enumerate(snapshot.replicas)
        if r.state == pb.READY
    }


def _epochs_of(ready: Ready) -> dict[str, int]:
    return {name: epoch for name, (_, epoch) in ready.items()}


def ranks_json(channels: Sequence[SendingChannel | Port]) -> list[str]:
    """Per rank, the JSON list of its endpoints: a single one, since one trainer process sends."""
    return [json.dumps([channel.sender.endpoint()]) for channel in channels]


class Coordinator:
    """Runs the syncs, steppers and checks of a link, and keeps the report of the last sync.

    It holds this process's connections: the gateway's stream, senders, and the channel of the engine core, if it has
    one. They are opened on demand, and again whenever the set of ready replicas changes. `version` is the newest one
    known.
    """

    processes = 1  # trainer processes that hold the parameters

    def __init__(
        self,
        pool: PoolView,
        agreed: Agreement,
        wrap: Wrap,
    ) -> None:
        self.pool = pool
        self.agreed = agreed
        self.wrap = wrap
        self.version = 0
        self.closed = False
        self.stream = pool.client.link()
        self.senders: Senders | None = None
        # to the core of the only replica, if it is reachable
        self.core: CoreOrders | None = None
        self._epochs: dict[str, int] = {}  # of the replicas with open channels
        # by the sync in progress: a connect meanwhile makes another
        self._checking = agreed.meaning
        self._lock = threading.RLock()
        self.stepper: Stepper | None = None  # the open one, if any
        self.last: SyncReport | None = None
        # what the engines hold, if syncs send what changed
        self._held = Held()
        # of links to other parts of the pool: an engine has one link open at a time
        self._others: list[Coordinator] = []

    @property
    def plan(self) -> TransferPlan:
        return self.agreed.plan

    @property
    def transport(self) -> str:
        return self.agreed.transport

    # Opening ------------------------------------------------------------------------------------------------------

    def open_first(self, mode: str, deadline: Deadline) -> None:
        """Open right after connect."""
        self.ensure_open(deadline)

    def take_turns(self, other: Coordinator) -> None:
        """From now on either closes the other's channels before it opens its own; one at a time, under one lock."""
        self._lock = other._lock
        self._others.append(other)
        other._others.append(self)

    def ensure_open(
        self, deadline: Deadline, only: frozenset[str] | None = None
    ) -> Senders:
        """Senders to every ready replica, or to `only` these. The link holds the pool while they are open."""
        self._refuse_closed("link = lab.connect(params, pool)")
        ready = self._ready_now(only, deadline)
        if self.senders is not None and self._is_open_to(ready):
            return self.senders
        for other in self._others:
            if not other.closed:
                other.let_go(deadline)
        self._check_replicas(ready, deadline)
        with self._opening(ready) as senders:
            ranks = {
                name: ranks_json(channels)
                for name, channels in senders.replicas.items()
            }
            self._take_pool(senders, ready, ranks, deadline)
        return senders

    def _refuse_closed(self, remedy: str) -> None:
        if self.closed:
            raise SyncError("this link is closed", remedy=remedy)

    def _ready_now(self, only: frozenset[str] | None, deadline: Deadline) -> Ready:
        # Every replica gets the same values; its index only picks which copy of a leaf they are read from. So a
        # replica that joined after planning reuses an earlier replica's index.
        return {
            name: (index % self.plan.replicas, epoch)
            for name, (index, epoch) in ready_replicas(self.pool, deadline).items()
            if only is None or name in only
        }

    def _is_open_to(self, ready: Ready) -> bool:
        return self.stream.is_open and self._epochs == _epochs_of(ready)

    def _check_replicas(self, ready: Ready, deadline: Deadline) -> None:
        """Drop open channels; check that new replicas have the same layout as the first."""
        self.drop()
        for name, (_, epoch) in ready.items():
            self.agreed.check_replica(self.pool, name, epoch, deadline)

    @contextmanager
    def _opening(self, ready: Ready, process: int | None = None) -> Iterator[Senders]:
        """New senders, put in use when the block ends; closed if it fails."""
        indices = {name: index for name, (index, _) in ready.items()}
        senders = self._make_senders(indices, process)
        try:
            yield senders
        except BaseException:
            senders.close()
            self.drop()
            raise
        self.senders = senders
        self._epochs = _epochs_of(ready)

    def _make_senders(
        self, replicas: dict[str, int], process: int | None = None
    ) -> Senders:
        if self._on_gpu:
            from jvlab.sync._device_pack import DevicePack

            def pack(plan: TransferPlan, device: int, rank: int, index: int) -> Any:
                ordinal = self.agreed.ordinals.get(device)  # JAX's knows its own
                return DevicePack(plan, device, rank, index, ordinal)

            return BucketSenders(self.plan, replicas, self._listen, pack, process)
        if self.transport != "ipc":
            compiled_loop()  # compile the host digest now, not during the first sync
            return BucketSenders(self.plan, replicas, self._listen, process=process)
        if self.wrap is not None:
            raise ConfigError(
                "faults= wraps bucket channels, but ipc has none: it writes engine memory directly",
                remedy='test recovery with transport="shm" on a CPU engine',
            )
        from jvlab.sync._ipc_senders import IpcSenders

        if ordinals := self.agreed.ordinals:  # torch's tensors
            find = ordinals.__getitem__
            return IpcSenders(self.plan, replicas, ordinal=find, torch=True)
        return IpcSenders(self.plan, replicas)

    @property
    def _on_gpu(self) -> bool:
        """Whether buckets are packed on the GPU that holds the shards."""
        on_gpu = self.pool.snapshot.device == "cuda"
        return self.transport == "nccl" or (self.transport == "nixl" and on_gpu)

    def _listen(self, slot_bytes: int, replica: str, rank: int) -> Sender:
        from jvlab.transport._choose import listen

        sender = listen(
            self.agreed.transport,
            slot_bytes=slot_bytes,
            slots=SLOTS,
            peer=f"rank {rank} of {replica}",
            on_gpu=self._on_gpu,
            **self.agreed.options,
        )
        return self.wrap(sender) if self.wrap is not None else sender

    def _take_pool(
        self,
        senders: Senders,
        ready: Ready,
        ranks: dict[str, list[str]],
        deadline: Deadline,
    ) -> None:
        """Acquire the pool and open the replicas' end of every channel."""
        request = pb.LinkOpen(
            pool=self.pool.name,
            holder=own_name(),
            transport=self.transport,
            plan=self.plan.to_bytes(),
            lease_seconds=LEASE_SECONDS,
            endpoints=[
                pb.Endpoint(replica=n, index=ready[n][0], ranks_json=of_ranks)
                for n, of_ranks in ranks.items()
            ],
        )
        reply = senders.open(
            lambda: self.stream.open(request, deadline.left()), deadline
        )
        opened = reply.outcomes[0] if len(reply.outcomes) == 1 else None
        if opened is not None and opened.core_channel:
            invitation = list(opened.core_channel)
            # OSError: another mount namespace, where its path does not exist; the gateway will do
            with suppress(OSError):
                self.core = CoreOrders(self.stream, opened.replica, invitation)
        # the pool's version counts too: restarted replicas hold none of its versions
        versions = [self.pool.snapshot, *reply.outcomes]
        self.version = max(self.version, *(int(v.version) for v in versions))

    def drop(self) -> None:
        """Close every channel; the next call opens them again."""
        if self.senders is not None:
            self.senders.close()
        self.senders = None
        self._epochs = {}
        if self.core is not None:
            self.core.close()
            self.core = None
        self.stream.close()

    def close(self) -> None:
        """Abandon an open stepper, and close for good."""
        if self.stepper is not None:
            self.stepper.close()
        self.closed = True
        self.drop()

    # One sync or check --------------------------------------------------------------------------------------------

    def stream_beside(self, purpose: str) -> TeamStream | None:
        """See `Link.stream_beside`; this is the only process."""
        return None

    def together(self, kind: str) -> AbstractContextManager[None]:
        """A sync or check in which all trainer processes take part."""
        return nullcontext()

    def sharing(self) -> AbstractContextManager[None]:
        """An error inside is raised in the trainer's other processes too."""
        return nullcontext()

    def wake_up(self, options: Terms) -> None:
        """Wake the engine core ahead of a sync, while this process checks the parameters."""
        at_once = options.mode == "direct" and options.pause != "wait"
        if self.core is not None and at_once:
            self.core.wake_up()

    def _open_transaction(
        self, params: Any, version: int | None, options: Terms, deadline: Deadline
    ) -> Transaction:
        began = time.perf_counter()
        self.next_version(version)  # refuse a bad version before opening anything
        senders = self.ensure_open(deadline)
        if options.mode == "direct" and senders.no_direct:
            raise ConfigError(
                f"a direct sync writes live memory, but this engine's can't be mapped: {senders.no_direct}",
                remedy='sync with mode="staged", which writes buffers that can be; or launch without sleep mode',
            )
        return Transaction(
            self.stream,
            senders,
            senders.source(params),
            self._terms(options, version, deadline),
            self.transport,
            deadline,
            began,
        )

    def _terms(self, options: Terms, version: int | None, deadline: Deadline) -> Terms:
        """The options with their version: opening may have revealed a newer one."""
        return replace(
            options,
            version=self.next_version(version),
            bucket_seconds=deadline.seconds,
        )

    def next_version(self, version: int | None) -> int:
        """`version`, or the last version plus one."""
        return version_after(self.version, version, "the pool")

    def _verify(self, params: Any, deadline: Deadline) -> CheckReport:
        senders = self.ensure_open(deadline)
        digests = {} if params is None else senders.digests(senders.source(params))
        return self.check(self.expected(senders, digests), deadline)

    def expected(
        self, senders: Senders, digests: dict[int, int]
    ) -> list[pb.ReplicaDigests]:
        """The digests every replica should report; empty if `digests` is."""
        rows = senders.rows(digests)
        if not rows:
            return []
        return [replica_digests(replica, rows) for replica in senders.replicas]

    def check(
        self, digests: list[pb.ReplicaDigests], deadline: Deadline
    ) -> CheckReport:
        """Compare digests of live memory with `digests`, or with the last commit's if empty."""
        start = time.perf_counter()
        try:
            outcomes = self.stream.steps(
                [Phase.CHECK], deadline.left(), digests=digests
            ).outcomes
        except SyncDeadline:
            if self.stream.busy:  # a late reply would be taken for the next order's
                self.drop()
            raise
        except VerifyError as error:  # differences are the result here, not an error
            outcomes = error.fields["reply"].outcomes  # type: ignore[union-attr]
        return check_report(outcomes, self.version, time.perf_counter() - start)

    def mark_dirty(self, deadline: Deadline) -> None:
        """Stop all replicas from serving their weights, by beginning a sync and abandoning it."""
        # Replicas that reply late count as dirty too: the gateway marks them when it sends the order.
        senders = self.ensure_open(deadline)
        terms = Terms(
            self.version + 1,
            verify="off",
            bucket_seconds=ORDER_SECONDS,
            replicas=tuple(senders.replicas),
        ).message()
        self.stream.steps(BEFORE_BYTES["direct"], deadline.left(), terms=terms)
        self.stream.steps([Phase.ABANDON], deadline.left())
        self.drop()

    # Syncs, one at a time ---------------------------------------------------------------------------------------------

    @contextmanager
    def exclusive(self, deadline: Deadline) -> Iterator[None]:
        """One thread of this process at a time."""
        if not self._lock.acquire(timeout=min(deadline.left(), threading.TIMEOUT_MAX)):
            raise SyncDeadline(
                f"waited {deadline.seconds:g} s for another thread of this process that uses this link",
                remedy="one sync or check at a time; its own timeout ends it",
            )
        try:
            yield
        finally:
            self._lock.release()

    def begin(
        self, params: Any, version: int | None, options: Terms, deadline: Deadline
    ) -> Transaction:
        """A transaction, ready for `prepare()`; raises if a stepper is open."""
        self._refuse_stepper()
        self._checking = self.agreed.meaning
        self._checking.before_sync(params, self.agreed.folder or self.pool.model)
        if self.agreed.part == DRAFT:
            self._refuse_old_model(deadline)
        transaction = self._open_transaction(params, version, options, deadline)
        transaction.stacked = lambda: self.agreed.mapping.stacked
        return transaction

    def _refuse_old_model(self, deadline: Deadline) -> None:
        """A commit lets a replica serve: a sync of drafts alone must not do that for weights of an older version."""
        self.ensure_open(deadline)
        self.pool.status(timeout=deadline)
        snapshot = self.pool.snapshot
        dirty = {r.replica for r in snapshot.replicas if r.dirty}
        late = sorted(dirty | behind(snapshot))
        if late:
            raise SyncError(
                f"{', '.join(late)} does not hold the model's weights of version {snapshot.version}, and a sync of the "
                "draft model does not bring them",
                remedy="sync the model first: lab.connect(params, pool).sync(params)",
            )

    def _refuse_stepper(self) -> None:
        if self.stepper is not None:
            raise SyncError(
                "a stepper is open on this link", remedy="finish it, or stepper.abort()"
            )

    def sync(
        self,
        params: Any,
        version: int | None,
        options: Terms,
        deadline: Deadline,
        progress: bool | None,
        listener: Listener | None = None,
    ) -> SyncReport:
        """Run a whole sync. Invalid options raise in all trainer processes."""
        with self.exclusive(deadline), self.together("sync"):
            self.wake_up(options.check())
            transaction = self.begin(params, version, options, deadline)
            transaction.core = self.core
            self._seek_changes(transaction, options, deadline)
            total = transaction.senders.total_bytes
            title = f"sync {transaction.terms.version}"
            try:
                with (
                    Progress(total, title, unit="B", show=progress, after=1.0) as bar,
                    self.sharing(),
                ):
                    report = transaction.run(lambda sent: _show(bar, sent, listener))
            # KeyboardInterrupt included: no engine may be left waiting
            except BaseException as error:
                sparse = transaction.sent.sparse > 0
                self.give_up(transaction, error)
                if isinstance(error, VerifyError) and sparse:
                    # changes led to other values than the trainer's: everything, to every replica
                    self._held.clear()
                    report = self.sync(
                        params, version, options, deadline, progress, listener
                    )
                    why = f"a sparse sync was not proven, so everything was sent: {error.message}"
                    notes = (*report.notes, why)
                    self.last = replace(report, why_full=why, notes=notes)
                    return self.last
                if isinstance(error, KeyboardInterrupt):
                    version = transaction.terms.version
                    self.explain(error, f"the sync of version {version}", version)
                raise
            if (changes := transaction.senders.changes) is not None:
                # first: if this is interrupted, no other order may take them for its own
                transaction.senders.changes = None
                changes.committed()
            return self.committed(report, transaction, params, deadline)

    def _seek_changes(
        self, transaction: Transaction, options: Terms, deadline: Deadline
    ) -> None:
        """Let the transaction send what changed, or say why not."""
        senders = transaction.senders
        senders.changes = None
        why = self._no_delta(senders, options)
        if options.delta == "always" and why:
            raise ConfigError(
                f'delta="always" is impossible here: {why}',
                remedy='delta="auto" then sends everything, and says so',
            )
        if options.delta == "never" or why:
            self._held.clear()
            transaction.why_full = why
            return
        senders.changes = Changes(self._held, transaction.terms.version, deadline)

    def _no_delta(self, senders: Senders, options: Terms) -> str:
        """Why everything must be sent; empty if changes may be."""
        if options.delta == "never":
            return 'delta="never"'
        if senders.no_delta:
            return senders.no_delta
        if self.processes > 1:
            return "several trainer processes send"
        if options.verify != "full":
            # a whole sync heals what an unproven one left, changes to it would not
            return f'verify="{options.verify}" does not prove what changes are added to'
        if options.delta == "auto":
            nbytes = senders.total_bytes // max(1, len(senders.replicas))
            return no_room(self._held, nbytes, self._on_gpu)
        return ""

    def give_up(
        self, transaction: Transaction, error: BaseException | None = None
    ) -> None:
        """Abandon it because of `error`; the next sync opens all channels again."""
        transaction.abandon(error)
        self.drop()

    def explain(self, error: KeyboardInterrupt, what: str, version: int) -> None:
        """Let an interrupt of `what`, which would have committed `version`, say what the engines hold now."""
        pool = self.pool
        said = f"{what} was interrupted"
        try:
            pool.status(timeout=STATE_SECONDS)
        except JvlabError:
            shorten(error, f"{said}; pool.status() says what its replicas hold")
            return
        snapshot = pool.snapshot
        if any(replica.dirty for replica in snapshot.replicas):
            said += f": {pool.name} is dirty, and generates again after the next link.sync(params)"
        elif snapshot.version >= version:
            said += f" after it was committed: {pool.name} serves version {snapshot.version}"
        else:
            said += f": {pool.name} serves version {snapshot.version}, as before"
        shorten(error, said)

    def committed(
        self,
        report: SyncReport,
        transaction: Transaction,
        params: Any,
        deadline: Deadline,
    ) -> SyncReport:
        """After a commit: check the mapping's meaning if that is still open, and store the report."""
        check = self._checking
        self.version = report.version
        arrays = transaction.source.by_path
        check.committed(report.version, arrays)

        def mark_dirty() -> None:
            seconds = max(DIRTY_SECONDS, deadline.within(ORDER_SECONDS))
            self.mark_dirty(Deadline(seconds))

        version = report.version
        try:
            if self.processes > 1:
                check.give_up(
                    "the trainer's log-probabilities are spread over several processes"
                )
            else:
                compare = check.after_sync if check.is_open else check.again
                compare(self.pool, version, params, deadline.left(), mark_dirty)
        finally:
            text = check.text_of(version, arrays)
            self.last = report = replace(report, meaning=_meaning_of(text))
            self.plan._reports.append(report)
        return report

    def catch_up(self, params: Any, mode: str, deadline: Deadline) -> SyncReport | None:
        """See `Link.catch_up`."""
        if self.agreed.part == DRAFT:
            raise Unsupported(
                "a replica that is behind needs the model's weights, and this link writes the draft model",
                remedy="catch_up of the model's link, then sync the draft model again",
            )
        with self.exclusive(deadline):
            self._refuse_stepper()
            try:
                report = self._catch_up(params, mode, deadline)
            except KeyboardInterrupt as error:
                self.explain(error, "the catching up", self.version + 1)
                raise
            if report is None:
                return None
            known = self.agreed.meaning.meaning.text
            if self.last is not None:
                known = self.last.meaning
            # the bits of the last sync, compared by digest
            return replace(report, meaning=_meaning_of(known))

    def verify(self, params: Any, deadline: Deadline) -> CheckReport:
        """See `Link.verify`."""
        with self.exclusive(deadline):
            return self._verify(params, deadline)

    def release_shadows(self, deadline: Deadline) -> None:
        """Unmap the shadow buffers of staged syncs before the engines free them."""
        with self.exclusive(deadline):
            if self.senders is not None and self.stepper is None:
                self.senders.release_shadows()

    def let_go(self, deadline: Deadline) -> None:
        """Close the channels between syncs; the next call opens them again. Raises if a stepper is open."""
        with self.exclusive(deadline):
            self._refuse_stepper()
            self.drop()

    # Catching up ------------------------------------------------------------------------------------------------------

    def _catch_up(
        self, params: Any, mode: str, deadline: Deadline
    ) -> SyncReport | None:
        self.pool.status(timeout=deadline)
        snapshot = self.pool.snapshot
        late = behind(snapshot)
        version = int(snapshot.version)
        if not late:
            return None
        began = time.perf_counter()
        self._same_as_committed(params, late, version, deadline)
        # non-finite values were allowed when this version was committed, and these are the same bits
        terms = Terms(version, mode, nonfinite="allow", bucket_seconds=deadline.seconds)
        if self._held.of_version(version):  # the same bits: later changes fit them too
            terms = replace(terms, mark=self._held.mark)
        senders = self.ensure_open(deadline, late)
        transaction = Transaction(
            self.stream,
            senders,
            senders.source(params),
            terms,
            self.transport,
            deadline,
            began,
        )
        total = senders.total_bytes
        title = f"catch up to {version}"
        try:
            with Progress(total, title, unit="B", show=None, after=1.0) as bar:
                return transaction.run(lambda sent: bar.to(sent.bytes))
        # KeyboardInterrupt included: no engine may be left waiting
        except BaseException as error:
            transaction.abandon(error)
            raise
        finally:
            self.drop()  # the next order opens channels to all replicas again

    def _same_as_committed(
        self,
        params: Any,
        late: frozenset[str],
        version: int,
        deadline: Deadline,
    ) -> None:
        """Check `params` against the digests of the replicas that hold `version`: one version, one set of weights."""
        senders = self.ensure_open(deadline)
        digests = self.expected(senders, senders.digests(senders.source(params)))
        wanted = [of for of in digests if of.replica not in late]
        if wanted:
            report = self.check(wanted, deadline)
            differing = report.differing
            well = report.ok
        else:  # all were started again: this link may know what they held
            differing = self._other_than_last(digests[0], version)
            well = not differing
        if not well:
            names = ", ".join(differing[:3])
            raise VerifyError(
                f"these parameters are not those of version {version}: {len(differing)} differ ({names}, ...)",
                remedy="pass the parameters of the last sync, or link.sync(params) to make a new version",
                differing=differing,
            )

    def _other_than_last(
        self, digests: pb.ReplicaDigests, version: int
    ) -> tuple[str, ...]:
        """The parameters whose digests are not those that this link's last sync left, if that made `version`."""
        last = self.last
        if last is None or last.version != version or not last.verified:
            raise SyncError(
                f"no replica of {self.pool.name} holds version {version}, and this link did not send it with "
                'verify="full": these parameters can\'t be checked against it',
                remedy="link.sync(params) gives all of them a new version",
            )
        pairs = zip(digests.parameters, digests.ranks, strict=True)
        given = dict(zip(pairs, digests.values, strict=True))
        keys = given.keys() | last.digests.keys()
        other = [key for key in keys if given.get(key) != last.digests.get(key)]
        return tuple(f"{name} (rank {rank})" for name, rank in sorted(other))


def _meaning_of(text: str) -> str:
    return text.removeprefix("meaning ")


def _show(bar: Progress, sent: Sent, listener: Listener | None) -> None:
    bar.to(sent.bytes)
    if listener is not None:
        listener(float(sent.bytes))
