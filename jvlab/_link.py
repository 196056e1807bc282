"""`Link`: a trainer's parameters and a pool, connected: sync, verify, step, look."""

from __future__ import annotations

import os
import platform
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jvlab import _connect
from jvlab._errors import ConfigError, SyncError, Unsupported, VerifyError
from jvlab._sync_handle import SyncHandle
from jvlab._sync_report import CheckReport, SyncReport
from jvlab._transaction import ORDER_SECONDS, Terms, Transaction, exports, outcome_of, replica_digests
from jvlab.control import jvlab_pb2 as pb
from jvlab.control._express_client import ExpressStream, try_express
from jvlab.control._link_client import LinkStream
from jvlab.layout._digest_loop import compiled_loop
from jvlab.layout._tree import Flattener, flatten
from jvlab.trainer._outlet import Outlet, Sent, by_parameter
from jvlab.trainer._pack import Source
from jvlab.views._progress import Progress
from jvlab.views._units import human_bytes

if TYPE_CHECKING:
    from jvlab._bisection import Bisection
    from jvlab._pool import Pool
    from jvlab._stepper import Stepper
    from jvlab._team import Team
    from jvlab.layout._mapping import Mapping
    from jvlab.layout._plan import TransferPlan
    from jvlab.transport._channel import Sender
    from jvlab.transport._ipc_arrays import Shards
    from jvlab.transport._ipc_outlet import IpcOutlet

CHOICES = {
    "mode": ("direct", "staged"), "verify": ("full", "sampled", "off"), "require": ("all", "any"),
    "pause": ("keep", "wait", "abort"), "kv": ("keep", "recompute"),
}  # fmt: skip
LEASE_SECONDS = 600.0  # an open sync without an order for so long is abandoned


def choose(what: str, value: str) -> str:
    """The value, if it is one of the known ones."""
    if value not in CHOICES[what]:
        known = ", ".join(repr(v) for v in CHOICES[what])
        raise ConfigError(f"{what} must be one of {known}, not {value!r}")
    return value


class Link:
    """A connected tree of parameters: `link.sync(params)` makes every replica of the pool hold them, with a proof.

    Made by `lab.connect(params, pool)`. `link.mapping` and `link.plan` show where each number goes.

    >>> report = link.sync(policy.params)
    >>> report.verified, report.version == link.version
    (True, True)
    >>> link.verify(policy.params).ok               # digests of live memory against the trainer's bits
    True
    >>> link.diff("final_norm.scale", policy.params)[0].share_changed
    0.0
    """

    def __init__(
        self,
        pool: Pool,
        agreed: _connect.Agreement,
        mode: str,
        wrap: Callable[[Sender], Sender] | None,
        on_close: Callable[[Link], None],
        team: Team | None = None,
    ) -> None:
        self.pool, self._agreed, self.mode = pool, agreed, choose("mode", mode)
        self.version = 0
        self._wrap, self._on_close = wrap, on_close
        self._team = team  # the trainer's processes, where it has several
        self._stream = LinkStream(pool._client)
        self._outlet: Outlet | IpcOutlet | None = None
        self._opened: dict[str, int] = {}  # replica -> the epoch it was opened at
        self._flattener = Flattener()
        self._express: ExpressStream | None = None  # the one replica's own socket, where it has one in reach
        self._no_direct = ""  # why live memory can't be written from here, where ipc found that out
        self._lock = threading.RLock()
        self._closed = False
        self._stepper: Stepper | None = None
        self.last: SyncReport | None = None
        pool._linked.add(self)
        agreed.mapping._link = weakref.ref(self)  # its inspector looks into this link's engines
        if team is None:
            self._ensure_open(ORDER_SECONDS)
        else:
            from jvlab._team_sync import open_first

            open_first(self, team)

    @property
    def mapping(self) -> Mapping:
        """Which leaf lands where, and why."""
        return self._agreed.mapping

    @property
    def plan(self) -> TransferPlan:
        """The boxes that move."""
        return self._agreed.plan

    @property
    def transport(self) -> str:
        """The transport in use; `link.reason` says why."""
        return self._agreed.transport

    @property
    def reason(self) -> str:
        """Why this transport."""
        return self._agreed.reason

    # Opening ------------------------------------------------------------------------------------------------------

    def _ensure_open(self, seconds: float, only: frozenset[str] | None = None) -> Outlet | IpcOutlet:
        """Channels to every replica that is ready now, and the pool held; new or returned replicas are opened too."""
        if self._closed:
            raise SyncError("this link is closed", remedy="link = lab.connect(params, pool)")
        now = self._wanted_now(only)
        if self._outlet is not None and self._is_open(now):
            return self._outlet
        self._drop()
        for name, (_, epoch) in now.items():
            self._agreed.check_replica(self.pool, name, epoch)
        outlet = self._make_outlet({n: i for n, (i, _) in now.items()})
        try:
            ranks = {name: _connect.ranks_json(channels) for name, channels in outlet.replicas.items()}
            self._take_pool(outlet, now, ranks, seconds)
        except BaseException:
            outlet.close()
            self._stream.close()
            raise
        self._outlet, self._opened = outlet, {n: e for n, (_, e) in now.items()}
        return outlet

    def _wanted_now(self, only: frozenset[str] | None) -> dict[str, tuple[int, int]]:
        """Replica -> (place in the plan, epoch) of those that are ready."""
        # Every replica needs the same numbers: its place only says which of several copies of a leaf it takes them
        # from, so one that came after the plan was made takes an earlier one's place.
        ready = {n: r for n, r in _connect.ready_replicas(self.pool).items() if only is None or n in only}
        return {name: (place % self.plan.replicas, epoch) for name, (place, epoch) in ready.items()}

    def _is_open(self, now: dict[str, tuple[int, int]]) -> bool:
        return self._stream.is_open and self._opened == {n: e for n, (_, e) in now.items()}

    def _take_pool(
        self, outlet: Outlet | IpcOutlet, now: dict[str, tuple[int, int]], ranks: dict[str, list[str]], seconds: float
    ) -> None:
        """Hold the pool, with the other end of every channel open."""
        request = pb.LinkOpen(
            pool=self.pool.name, holder=f"python {os.getpid()} on {platform.node()}", transport=self.transport,
            plan=self.plan.to_bytes(), lease_seconds=LEASE_SECONDS,
            endpoints=[pb.Endpoint(replica=n, index=now[n][0], ranks_json=of_ranks) for n, of_ranks in ranks.items()],
        )  # fmt: skip
        if isinstance(outlet, Outlet):
            reply = self._open_both_ends(outlet, request, seconds)
        else:
            reply = self._stream.open(request, seconds)
            self._attach(outlet, reply)
        # the pool's own too: replicas that were all started anew hold none of its versions
        held = (int(o.version) for o in reply.outcomes)
        self.version = max([self.version, int(self.pool._snapshot.version), *held])

    def _make_outlet(self, replicas: dict[str, int], process: int | None = None) -> Outlet | IpcOutlet:
        if self.transport == "nccl":
            from jvlab.trainer._device_pack import DevicePack

            return Outlet(self.plan, replicas, self._sender, DevicePack, process)
        if self.transport != "ipc":
            compiled_loop()  # digests on the host: compiled now, not in the first sync
            return Outlet(self.plan, replicas, self._sender, process=process)
        if self._wrap is not None:
            raise ConfigError(
                "faults= wraps channels of buckets, and ipc has none: it writes memory",
                remedy='try your recovery with transport="shm" on a CPU engine',
            )
        from jvlab.transport._ipc_outlet import IpcOutlet

        return IpcOutlet(self.plan, replicas)

    def _open_both_ends(self, outlet: Outlet, request: pb.LinkOpen, seconds: float) -> pb.LinkReply:
        with ThreadPoolExecutor(1, "jvlab-open") as meanwhile:  # some transports open both ends at the same time
            opened = meanwhile.submit(outlet.ready, seconds)
            try:
                reply = self._stream.open(request, seconds)
            except BaseException:
                outlet.close()  # ends the wait for the other side
                raise
            opened.result()
        return reply

    def _attach(self, outlet: IpcOutlet, reply: pb.LinkReply) -> None:
        # only where its milliseconds count; elsewhere every order goes through the gateway and its state machine
        self._express = try_express(reply.outcomes) if self.transport == "ipc" else None
        told = exports(reply)
        self._no_direct = next((e["no_direct"] for ranks in told.values() for e in ranks if "no_direct" in e), "")
        if not self._no_direct:
            outlet.attach(told)
            outlet.ready(0.0)

    def _sender(self, room: int, replica: str, rank: int) -> Sender:
        sender = _connect.listen(self._agreed, room, replica, rank)
        return self._wrap(sender) if self._wrap is not None else sender

    def _drop(self) -> None:
        if self._outlet is not None:
            self._outlet.close()
        self._outlet, self._opened = None, {}
        if self._express is not None:
            self._express.close()
            self._express = None
        self._stream.close()

    def _let_go_of_shadows(self) -> None:
        """The engines are about to give the memory of staged syncs back: nobody may map it then."""
        with self._lock:
            if self._outlet is not None and not isinstance(self._outlet, Outlet) and self._stepper is None:
                self._outlet.let_go_of_shadows()

    # Sync ---------------------------------------------------------------------------------------------------------

    def sync(
        self,
        params: Any,
        version: int | None = None,
        *,
        mode: str | None = None,
        verify: str = "full",
        require: str = "all",
        pause: str = "keep",
        kv: str = "keep",
        timeout: float = 600.0,
        progress: bool | None = None,
    ) -> SyncReport:
        """Make every replica hold `params` as `version`, prove it, and say how long each part took.

        version   a whole number larger than the last; default: one more
        mode      "direct": generation stands still while live memory is written; "staged": it goes on while shadow
                  buffers fill, and stands still only for the exchange, at twice the weight memory
        verify    "full" compares a digest of every parameter; "sampled" of one in eight, in turn; "off" of none
        require   "all": commit everywhere or nowhere; "any": replicas that fail are left behind and not served from
        pause     what becomes of requests in flight: "keep" (they go on afterwards), "wait" (finish first), "abort"
        kv        kept requests go on with their KV as it is ("keep"), or compute it anew with the new weights

        A failure leaves each engine on its old version, or dirty (it refuses to generate) until a later sync commits.
        A trainer of several processes calls it in every one, with the same arguments: all return, or all raise.
        """
        with self._lock, self._together("sync"):
            if self._express is not None and (mode or self.mode) == "direct" and pause != "wait":
                self._express.knock()  # the engine core wakes up while we look at the parameters
            transaction = self._begin(params, version, mode, verify, require, pause, kv, timeout)
            transaction.express = self._express
            total, title = transaction.outlet.total_bytes, f"sync {transaction.terms.version}"
            try:
                with Progress(total, title, unit="B", show=progress, after=1.0) as bar, self._sharing():
                    show = lambda sent: _show(bar, sent, self._handle_progress)
                    if transaction.at_once and self._team is None:
                        report = transaction.exchange(show)
                    else:
                        transaction.prepare()
                        transaction.send_all(show)
                        report = transaction.finish()
            except BaseException:  # Ctrl-C too: no engine may be left waiting
                self._give_up(transaction)
                raise
            return self._done(report)

    _handle_progress: Callable[[float], None] | None = None

    def _begin(
        self, params: Any, version: int | None, mode: str | None, verify: str, require: str, pause: str, kv: str,
        timeout: float,
    ) -> Transaction:  # fmt: skip
        if self._stepper is not None:
            raise SyncError("a stepper is open on this link", remedy="finish it, or stepper.abort()")
        if not timeout > 0:
            raise ConfigError(f"timeout must be positive, not {timeout!r}")
        wanted = self.version + 1 if version is None else version
        if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted <= self.version:
            raise ConfigError(
                f"version must be a whole number larger than {self.version}, which the pool holds, not {wanted!r}",
                remedy="leave it out to count on by one",
            )
        terms = Terms(
            wanted, choose("mode", mode or self.mode), choose("verify", verify), choose("require", require),
            choose("pause", pause), choose("kv", kv), float(timeout),
        )  # fmt: skip
        began = time.perf_counter()
        if self._team is not None:
            from jvlab._team_sync import begin

            return begin(self, self._team, params, terms, version, began)
        source = Source(self.plan, flatten(params).arrays) if self.transport != "ipc" else None
        outlet = self._ensure_open(min(timeout, ORDER_SECONDS))
        if terms.mode == "direct" and self._no_direct:
            raise ConfigError(
                f"a direct sync writes live memory, and this engine's can't be reached: {self._no_direct}",
                remedy='sync with mode="staged", which copies from buffers that can be; or launch without sleep mode',
            )
        if source is None:
            source = self._shards(outlet, params)
        return Transaction(self._stream, outlet, source, terms, self.transport, began)

    def _together(self, kind: str) -> AbstractContextManager[None]:
        """One thing that all processes of the trainer do."""
        return nullcontext() if self._team is None else self._team.round(kind)

    def _sharing(self) -> AbstractContextManager[None]:
        """What goes wrong in it ends the same in the other processes."""
        return nullcontext() if self._team is None else self._team.sharing()

    def _alone(self, what: str, instead: str) -> None:
        if self._team is not None:
            raise Unsupported(
                f"{what} works where one process holds all parameters; these lie in {self._team.size}", remedy=instead
            )

    def _shards(self, outlet: Outlet | IpcOutlet, params: Any) -> Source | Shards:
        """The arrays as the outlet takes them."""
        if isinstance(outlet, Outlet):
            return Source(self.plan, flatten(params).arrays)
        return outlet.arrays.source(self._flattener.arrays(params))

    def _give_up(self, transaction: Transaction) -> None:
        transaction.abandon()
        self._drop()

    def _done(self, report: SyncReport) -> SyncReport:
        self.version, self.last = report.version, report
        self.plan._reports.append(report)
        return report

    def catch_up(self, params: Any, *, timeout: float = 600.0) -> SyncReport | None:
        """Bring replicas that came later, or came back, to the version that the others hold; None if none is behind.

        `params` must be those of the last sync: the digests of those who hold it prove that first. The others go on
        generating meanwhile, and the version stays as it is.
        """
        from jvlab._catch_up import catch_up

        self._alone("catch_up", "link.sync(params), in every process, brings all replicas to a new version")
        with self._lock:
            return catch_up(self, params, timeout)

    def sync_async(self, params: Any, version: int | None = None, **options: Any) -> SyncHandle:
        """`sync` in the background: a handle with `.progress`, `.done()`, `.result()`."""
        return SyncHandle(self, params, version, options)

    # Looking ------------------------------------------------------------------------------------------------------

    def verify(self, params: Any = None, *, timeout: float = 600.0) -> CheckReport:
        """Digests of what the engines hold now, against the last commit, or against `params`."""
        with self._lock:
            if self._team is not None:
                from jvlab._team_sync import verify

                return verify(self, self._team, params, timeout)
            outlet = self._ensure_open(ORDER_SECONDS)
            return self._check([] if params is None else self._digests(outlet, params), timeout)

    def _check(self, digests: list[pb.ReplicaDigests], timeout: float) -> CheckReport:
        start = time.perf_counter()
        try:
            outcomes = self._stream.steps([pb.CHECK], timeout, digests=digests).outcomes
        except VerifyError as error:  # what differs is what was asked for
            outcomes = error.fields["reply"].outcomes  # type: ignore[union-attr]
        found: dict[tuple[str, int], int] = {}
        for o in outcomes:
            found |= dict(zip(zip(o.found.parameters, o.found.ranks, strict=True), o.found.values, strict=True))
        listed = tuple(outcome_of(o) for o in outcomes)
        version = max((o.version for o in listed), default=self.version)
        if self._express is not None:
            version = max(version, self.version)  # the gateway may not have heard of the last commit yet
        return CheckReport(version, listed, found, time.perf_counter() - start)

    def _check_sent(self, transaction: Transaction, names: set[str]) -> CheckReport:
        """A check in the middle of a sync, of the parameters that have arrived whole."""
        wanted = []
        for d in transaction.expected():
            rows = [row for row in zip(d.parameters, d.ranks, d.values, strict=True) if row[0] in names]
            wanted.append(replica_digests(d.replica, rows))
        return self._check(wanted, transaction.terms.timeout)

    def _digests(self, outlet: Outlet | IpcOutlet, params: Any) -> list[pb.ReplicaDigests]:
        return self._expected(outlet, self._parts(outlet, params))

    def _parts(self, outlet: Outlet | IpcOutlet, params: Any) -> Sent:
        """Digests of what this process would send."""
        sent = Sent()
        if isinstance(outlet, Outlet):
            source = Source(self.plan, flatten(params).arrays)
            for channel in outlet.channels:
                if channel.replica == outlet.witness:
                    for job in channel.jobs:
                        sent.add_digests(job.pack.digests(job.bucket, job.pack.values(job.bucket, source)))
        else:
            sent.add_digests(outlet.digests(self._shards(outlet, params)))
        return sent

    def _expected(self, outlet: Outlet | IpcOutlet, sent: Sent) -> list[pb.ReplicaDigests]:
        targets = sorted(sent.digests)
        rows = [(*pair, sent.digests[t]) for t, pair in zip(targets, by_parameter(self.plan, targets), strict=True)]
        return [replica_digests(replica, rows) for replica in outlet.replicas]

    def stepper(self, params: Any, version: int | None = None, **options: Any) -> Stepper:
        """The same transaction one tensor or bucket at a time; options as for `sync`, and unit="tensor"|"bucket"."""
        from jvlab._stepper import Stepper

        self._alone("a stepper", "link.sync(params), in every process")
        return Stepper(self, params, version, **options)

    def diff(self, name: str, params: Any, *, replica: int = 0) -> list[Any]:
        """What the engine holds of a parameter (or of what a leaf feeds) against what `params` would make of it."""
        from jvlab._diff import differences

        self._alone("diff", "link.verify(params), in every process, compares digests")
        return differences(self, name, Source(self.plan, flatten(params).arrays), replica)

    def bisect(
        self, prompt: Any, policy: Any = None, *, params: Any = None, max_tokens: int = 16, seed: int = 0,
        tolerance: float = 1e-3, timeout: float = 600.0, **sampling: Any,
    ) -> Bisection:  # fmt: skip
        """Engine and trainer disagree: find out why. Checks in order, each with its evidence; the first cause wins.

        prompt      a text, a list of token ids, or a `Sample` whose log-probabilities look wrong
        policy      the trainer's `jv.Policy`; default: the one that fits this link
        params      its parameters; default: `policy.params`
        tolerance   a difference in nats that is no disagreement
        sampling    the settings of your rollouts: temperature=0.7, top_p=0.9, ...

        Looked for: a replica's state, a tensor that changed in memory, a stale version, a stale prefix cache, sampler
        settings, dtype, and two models that compute differently. Nothing in the engine is changed.

        >>> link.bisect("Once upon a time", policy).agrees
        True
        >>> found = link.bisect("Once upon a time", policy, temperature=0.5)
        >>> found.cause
        'sampler'
        >>> found.remedy
        'policy.logprobs(params, tokens, lengths, temperature=0.5) computes the same'
        """
        from jvlab._bisect import bisect

        self._alone("bisect", "connect from one process that holds all parameters")
        return bisect(
            self, prompt, policy, params=params, max_tokens=max_tokens, seed=seed, tolerance=tolerance, timeout=timeout,
            **sampling,
        )  # fmt: skip

    # Ending -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abandon what is open and let go of the pool; the engines keep what they hold. Can be called twice."""
        if self._closed:
            return
        if self._stepper is not None:
            self._stepper.close()
        self._closed = True
        self._drop()
        if self._team is not None:
            self._team.close()
        self._on_close(self)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"version {self.version}"
        size = human_bytes(self.plan.total_bytes)
        return f"Link({Path(self.pool.model).name!r}, {size}, {self.mode} over {self.transport}, {state})"

    def _repr_html_(self) -> str:
        from jvlab.views._sync_view import link_html

        return link_html(self)


def _show(bar: Progress, sent: Sent, listener: Callable[[float], None] | None) -> None:
    bar.to(sent.bytes)
    if listener is not None:
        listener(float(sent.bytes))
