"""`Channels`: one link's connections to the replicas of its pool, and the orders sent over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, SyncDeadline, SyncError, VerifyError
from jvlab._names import own_name
from jvlab.layout._digest_loop import compiled_scan
from jvlab.sync import _connect
from jvlab.sync._bucket_senders import BucketSenders
from jvlab.sync._senders import Senders
from jvlab.sync._sync_messages import check_report, replica_digests, terms_message
from jvlab.sync._sync_options import SyncOptions
from jvlab.sync._sync_report import CheckReport
from jvlab.sync._transaction import ORDER_SECONDS, Transaction
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._direct_client import DirectStream
from jvlab.wire._link_client import LinkStream
from jvlab.wire._sync_words import BEFORE_BYTES, Phase

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.layout._plan import TransferPlan
    from jvlab.transport._channel import Sender

LEASE_SECONDS = 600.0  # the gateway abandons an open sync that gets no order for this long
Ready = dict[str, tuple[int, int]]  # replica -> its index in the plan, its epoch


class Channels:
    """One process's connections: the gateway's stream, senders, and the replica's own socket for orders.

    Opened on demand, and again whenever the set of ready replicas changes. `version` is the newest one known.
    """

    processes = 1  # trainer processes that hold the parameters

    def __init__(self, pool: Pool, agreed: _connect.Agreement, wrap: Callable[[Sender], Sender] | None) -> None:
        self.pool, self.agreed, self._wrap = pool, agreed, wrap
        self.version = 0
        self.closed = False
        self.stream = LinkStream(pool._client)
        self.senders: Senders | None = None
        self.direct_orders: DirectStream | None = None  # the only replica's own socket, if it is reachable
        self._epochs: dict[str, int] = {}  # of the replicas with open channels

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

    def ensure_open(self, deadline: Deadline, only: frozenset[str] | None = None) -> Senders:
        """Senders to every ready replica, or to `only` these. The link holds the pool while they are open."""
        self._refuse_closed("link = lab.connect(params, pool)")
        ready = self._ready_now(only, deadline)
        if self.senders is not None and self._is_open_to(ready):
            return self.senders
        self._check_replicas(ready, deadline)
        with self._opening(ready) as senders:
            ranks = {name: _connect.ranks_json(channels) for name, channels in senders.replicas.items()}
            self._take_pool(senders, ready, ranks, deadline)
        return senders

    def _refuse_closed(self, remedy: str) -> None:
        if self.closed:
            raise SyncError("this link is closed", remedy=remedy)

    def _ready_now(self, only: frozenset[str] | None, deadline: Deadline) -> Ready:
        # Every replica gets the same values; its index only picks which copy of a leaf they are read from. So a
        # replica that joined after planning reuses an earlier replica's index.
        ready = {n: r for n, r in _connect.ready_replicas(self.pool, deadline).items() if only is None or n in only}
        return {name: (index % self.plan.replicas, epoch) for name, (index, epoch) in ready.items()}

    def _is_open_to(self, ready: Ready) -> bool:
        return self.stream.is_open and self._epochs == {name: epoch for name, (_, epoch) in ready.items()}

    def _check_replicas(self, ready: Ready, deadline: Deadline) -> None:
        """Drop open channels; check that new replicas have the same layout as the first."""
        self.drop()
        for name, (_, epoch) in ready.items():
            self.agreed.check_replica(self.pool, name, epoch, deadline)

    @contextmanager
    def _opening(self, ready: Ready, process: int | None = None) -> Iterator[Senders]:
        """New senders, put in use when the block ends; closed if it fails."""
        senders = self._make_senders({name: index for name, (index, _) in ready.items()}, process)
        try:
            yield senders
        except BaseException:
            senders.close()
            self.drop()
            raise
        self.senders, self._epochs = senders, {name: epoch for name, (_, epoch) in ready.items()}

    def _make_senders(self, replicas: dict[str, int], process: int | None = None) -> Senders:
        if self.transport == "nccl":
            from jvlab.sync._device_pack import DevicePack

            return BucketSenders(self.plan, replicas, self._listen, DevicePack, process)
        if self.transport != "ipc":
            compiled_scan()  # compile the host digest now, not during the first sync
            return BucketSenders(self.plan, replicas, self._listen, process=process)
        if self._wrap is not None:
            raise ConfigError(
                "faults= wraps bucket channels, and ipc has none: it writes engine memory directly",
                remedy='test recovery with transport="shm" on a CPU engine',
            )
        from jvlab.sync._ipc_senders import IpcSenders

        return IpcSenders(self.plan, replicas)

    def _listen(self, slot_bytes: int, replica: str, rank: int) -> Sender:
        sender = _connect.listen(self.agreed, slot_bytes, replica, rank)
        return self._wrap(sender) if self._wrap is not None else sender

    def _take_pool(self, senders: Senders, ready: Ready, ranks: dict[str, list[str]], deadline: Deadline) -> None:
        """Acquire the pool and open the replicas' end of every channel."""
        request = pb.LinkOpen(
            pool=self.pool.name,
            holder=own_name(),
            transport=self.transport,
            plan=self.plan.to_bytes(),
            lease_seconds=LEASE_SECONDS,
            endpoints=[pb.Endpoint(replica=n, index=ready[n][0], ranks_json=of_ranks) for n, of_ranks in ranks.items()],
        )
        reply = senders.open(lambda: self.stream.open(request, deadline.left()), deadline)
        self.direct_orders = senders.direct_orders(reply)
        # the pool's version counts too: restarted replicas hold none of its versions
        replica_versions = (int(o.version) for o in reply.outcomes)
        self.version = max([self.version, int(self.pool._snapshot.version), *replica_versions])

    def drop(self) -> None:
        """Close every channel; the next call opens them again."""
        if self.senders is not None:
            self.senders.close()
        self.senders, self._epochs = None, {}
        if self.direct_orders is not None:
            self.direct_orders.close()
            self.direct_orders = None
        self.stream.close()

    def close(self) -> None:
        """Close for good."""
        self.closed = True
        self.drop()

    # One sync or check --------------------------------------------------------------------------------------------

    def together(self, kind: str) -> AbstractContextManager[None]:
        """A sync or check in which all trainer processes take part."""
        return nullcontext()

    def sharing(self) -> AbstractContextManager[None]:
        """An error inside is raised in the trainer's other processes too."""
        return nullcontext()

    def wake_up(self, options: SyncOptions) -> None:
        """Wake the engine core ahead of a sync, while this process checks the parameters."""
        if self.direct_orders is not None and options.mode == "direct" and options.pause != "wait":
            self.direct_orders.wake_up()

    def begin(self, params: Any, version: int | None, options: SyncOptions, deadline: Deadline) -> Transaction:
        """A transaction, ready for `prepare()`."""
        began = time.perf_counter()
        self.next_version(version)  # refuse a bad version before opening anything
        senders = self.ensure_open(deadline)
        if options.mode == "direct" and senders.no_direct:
            raise ConfigError(
                f"a direct sync writes live memory, and this engine's can't be mapped: {senders.no_direct}",
                remedy='sync with mode="staged", which writes buffers that can be; or launch without sleep mode',
            )
        source = senders.source(params)
        terms = options.terms(self.next_version(version), deadline.seconds)  # opening may have revealed a newer version
        return Transaction(self.stream, senders, source, terms, self.transport, deadline, began)

    def next_version(self, version: int | None) -> int:
        """`version`, or the last version plus one."""
        wanted = self.version + 1 if version is None else version
        if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted <= self.version:
            raise ConfigError(
                f"version must be an integer larger than {self.version}, which the pool holds, not {wanted!r}",
                remedy="leave it out to use the next one",
            )
        return wanted

    def verify(self, params: Any, deadline: Deadline) -> CheckReport:
        """Compare digests of live memory with the last commit, or with these parameters."""
        senders = self.ensure_open(deadline)
        digests = {} if params is None else senders.digests(senders.source(params))
        return self.check(self.expected(senders, digests), deadline)

    def expected(self, senders: Senders, digests: dict[int, int]) -> list[pb.ReplicaDigests]:
        """The digests every replica should report; empty if `digests` is."""
        targets = tuple(sorted(digests))
        rows = [(*pair, digests[t]) for t, pair in zip(targets, senders.named(targets), strict=True)]
        return [replica_digests(replica, rows) for replica in senders.replicas] if rows else []

    def check(self, digests: list[pb.ReplicaDigests], deadline: Deadline) -> CheckReport:
        """Compare digests of live memory with `digests`, or with the last commit's if empty."""
        start = time.perf_counter()
        try:
            outcomes = self.stream.steps([Phase.CHECK], deadline.left(), digests=digests).outcomes
        except SyncDeadline:
            if self.stream.busy:  # a late reply would be taken for the next order's
                self.drop()
            raise
        except VerifyError as error:  # differences are the result here, not an error
            outcomes = error.fields["reply"].outcomes  # type: ignore[union-attr]
        report = check_report(outcomes, self.version, time.perf_counter() - start)
        if self.direct_orders is not None:  # the gateway may not know of the last commit yet
            report = replace(report, version=max(report.version, self.version))
        return report

    def mark_dirty(self, deadline: Deadline) -> None:
        """Stop all replicas from serving their weights, by beginning a sync and abandoning it."""
        # Replicas that reply late count as dirty too: the gateway marks them when it sends the order.
        senders = self.ensure_open(deadline)
        terms = terms_message(SyncOptions(verify="off").terms(self.version + 1, ORDER_SECONDS), senders.replicas)
        self.stream.steps(BEFORE_BYTES["direct"], deadline.left(), terms=terms)
        self.stream.steps([Phase.ABANDON], deadline.left())
        self.drop()
