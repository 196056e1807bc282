"""What the gateway asks of a pool's replicas, for its gRPC and HTTP services: calls, adapters, pause and sleep.

Failures raise. Every call ends when its replica is lost, with an error that names the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from jvlab._errors import EngineDirty, JvlabError, ReplicaLost, SamplingError
from jvlab._names import check_name
from jvlab.gateway import _registry as reg
from jvlab.gateway._dispatch import being_cancelled
from jvlab.gateway._routing import Board
from jvlab.wire import _security as security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._channels import Trust, open_channel
from jvlab.wire._rpc_errors import (
    LOST_REMEDY,
    CallFailed,
    received,
    status_of,
)

if TYPE_CHECKING:
    from jvlab.gateway._gateway import Gateway

# Status codes of a failed call that mean that the replica is gone, or registered again under another epoch.
GONE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)


class ReplicaCalls:
    """Calls to replicas: one channel each, kept open; the open calls of each, cancelled when it is lost.

    `lost` is told of a replica that can't be reached, with its epoch and why; `late` makes the error of a deadline.
    """

    def __init__(
        self,
        registry: reg.Registry,
        token: str,
        lost: Callable[[str, int, str], None],
        late: Callable[[str, Sequence[str]], CallFailed],
    ) -> None:
        self._registry = registry
        self._metadata = security.authorization(token)
        self._lost = lost
        self._late = late
        self._trust: dict[str, Trust] = {}  # replicas' certificates
        self._stubs: dict[str, tuple[str, grpc.aio.Channel, rpc.RolloutStub]] = {}
        self._open: dict[str, set[Any]] = {}

    def registered(self, replica: str, trust: Trust) -> None:
        """The certificate that it serves with."""
        self._trust[replica] = trust

    def stub(self, replica: str) -> Any:
        """The replica's own service."""
        address = self._registry.replica(replica).address
        known = self._stubs.get(replica)
        if known is None or known[0] != address:
            channel = open_channel(address, self._trust.get(replica, Trust()))
            known = self._stubs[replica] = (address, channel, rpc.RolloutStub(channel))
        return known[2]

    def begin(self, replica: str, method: str, order: Any, timeout: float) -> Any:
        """A call that its caller tracks."""
        made = getattr(self.stub(replica), method)
        return made(order, timeout=timeout, metadata=self._metadata)

    async def ask(self, replica: str, method: str, order: Any, timeout: float) -> Any:
        """The replica's one answer; raises at once if the replica is lost."""
        call = self.begin(replica, method, order, timeout)
        with self._watched(replica, call):
            return await call

    async def stream(
        self, replica: str, method: str, order: Any, timeout: float
    ) -> AsyncIterator[Any]:
        """The replica's answers as they arrive."""
        call = self.begin(replica, method, order, timeout)
        with self._watched(replica, call):
            async for event in call:
                yield event

    @contextlib.contextmanager
    def _watched(self, replica: str, call: Any) -> Iterator[None]:
        """Raise a call's failures as errors that name the replica."""
        self.track(replica, call)
        epoch = self._registry.replica(replica).epoch
        why = ""
        try:
            yield
            return
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            why = self._registry.cause(replica)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._late(reg.pool_of(replica), [replica]) from None
            why = self.failed(replica, epoch, error)
            if not why:
                raise CallFailed.of(error) from None
        finally:
            self.untrack(replica, call)
        raise ReplicaLost(f"replica {replica} was lost: {why}", remedy=LOST_REMEDY)

    def track(self, replica: str, call: Any) -> None:
        self._open.setdefault(replica, set()).add(call)

    def untrack(self, replica: str, call: Any) -> None:
        self._open.get(replica, set()).discard(call)

    def busy(self, replica: str) -> bool:
        return bool(self._open.get(replica))

    def drop(self, replica: str) -> None:
        """Cancel the open calls."""
        for call in list(self._open.get(replica, ())):
            call.cancel()

    def is_current(self, replica: str, epoch: int) -> bool:
        """Whether the replica is alive with this epoch."""
        known = self._registry.find(replica)
        return known is not None and known.epoch == epoch and known.state in reg.BEATING

    def failed(self, replica: str, epoch: int, error: grpc.aio.AioRpcError) -> str:
        """A call of this epoch failed: if the code means that the replica is gone, declare it lost.

        Returns why it is gone; empty if it is not.
        """
        if error.code() in GONE_CODES and self.is_current(replica, epoch):
            self._lost(replica, epoch, received(error).message)
        if self.is_current(replica, epoch):
            return ""
        return self._registry.cause(replica) or "it registered again"

    def distrust(self, replica: str) -> None:
        """It starts again, with a certificate of its own."""
        self._trust.pop(replica, None)

    def forget(self, replica: str) -> Coroutine[Any, Any, None]:
        """Drop what is known of it, at once; what is returned closes its channel."""
        self._open.pop(replica, None)
        self.distrust(replica)
        known = self._stubs.pop(replica, None)
        return known[1].close(None) if known else asyncio.sleep(0)

    async def shut_down(self) -> None:
        await asyncio.gather(*map(self.forget, list(self._stubs)))


class PoolReplicas:
    """A dispatcher's view of one pool, for one call.

    `version` 0: replicas that hold the pool's version; else those that hold this one or a later one.
    """

    def __init__(self, gateway: Gateway, pool: str, version: int = 0) -> None:
        self._gateway = gateway
        self._pool = pool
        self._version = version
        # parts in flight there; those that have arrived are no longer
        self.count = gateway.count
        self.served = gateway.served
        self.track = gateway.calls.track
        self.untrack = gateway.calls.untrack
        # why it counts as lost after a failed call; empty if it does not
        self.failed = gateway.calls.failed
        self.loss = gateway.registry.cause
        self._find = gateway.registry.find

    def board(self) -> Board:
        """Replicas that may be given work, with their requests in flight."""
        return self._gateway.loads.board(self._pool, self._version, self._names)

    def _names(self) -> list[str]:
        links = self._gateway.links
        if self._version:
            return links.holding(self._pool, self._version)
        return [replica.name for replica in links.serving(self._pool)]

    def wait_for(self, avoid: frozenset[str]) -> asyncio.Event | None:
        """Set when a sync in progress, or a restart, may have made another replica serve; None: nothing to wait for."""
        gateway = self._gateway
        waits = gateway.links.syncing(self._pool, avoid, self._version)
        waits = waits or gateway.registry.returning(self._pool)
        return gateway.change(self._pool) if waits else None

    def barred(self) -> EngineDirty | None:
        """Why no live replica may be given work; None if one may."""
        return self._gateway.links.barred(self._pool, self._version)

    def epoch(self, replica: str) -> int:
        """The epoch of orders to it now."""
        known = self._find(replica)
        return -1 if known is None else known.epoch

    def run(self, replica: str) -> int:
        """Tells its process from those that had its name before."""
        known = self._find(replica)
        return -1 if known is None else known.run

    def deadline_error(self, replicas: Sequence[str]) -> CallFailed:
        """The error for work that these replicas did not finish in time."""
        return self._gateway.deadline_error(self._pool, replicas)


# LoRA adapters of a gateway's pools: loaded on all replicas or on none; later replicas load them on demand.
# A new version is loaded beside the old one. Only when every replica has it do new requests use it and is the old one
# unloaded, which each replica does when its last request with it has ended. So a request has one adapter
# version from its first token to its last.

UNLOAD_SECONDS = 30.0


class Adapters:
    """Which adapters each pool has, and at which version."""

    def __init__(self, registry: reg.Registry, calls: ReplicaCalls) -> None:
        self._registry = registry
        self._calls = calls
        self._known: dict[str, dict[str, pb.Adapter]] = {}
        self._one_at_a_time = asyncio.Lock()

    def forget(self, pool: str) -> None:
        """The pool is closed; another of its name has none of its adapters."""
        self._known.pop(pool, None)

    def plain(self, pool: str) -> list[tuple[str, int, str]]:
        """Those of this pool, for the gateway's state file."""
        known = self._known.get(pool, {}).values()
        return [(adapter.name, adapter.version, adapter.path) for adapter in known]

    def restore(self, pool: str, saved: list[tuple[str, int, str]]) -> None:
        """Those that `plain` listed; replicas load what they lack on demand."""
        made = (pb.Adapter(name=n, version=v, path=path) for n, v, path in saved)
        self._known[pool] = {adapter.name: adapter for adapter in made}

    def find(self, pool: str, name: str) -> pb.Adapter | None:
        """The adapter version for a request that names this adapter."""
        if not name:
            return None
        known = self._known.get(pool, {})
        if name not in known:
            have = ", ".join(sorted(known)) or "none"
            text = f"{pool} has no adapter {name!r}; it has: {have}"
            raise SamplingError(text, remedy="pool.load_adapter(name, ...) loads one")
        return known[name]

    async def set(self, call: pb.AdapterCall, timeout: float) -> None:
        """Load or unload one; a load that fails on any replica is undone on all."""
        check_name("adapter", call.adapter.name)
        async with self._one_at_a_time:
            replicas = self._registry.ready(call.pool)
            known = self._known.setdefault(call.pool, {})
            before = known.get(call.adapter.name)
            if call.unload:
                # raises, with a list, if it is unknown
                self.find(call.pool, call.adapter.name)
                assert before is not None
                del known[call.adapter.name]
                await self._order_all(replicas, before, True, UNLOAD_SECONDS)
                return
            if before is not None and call.adapter.version <= before.version:
                raise SamplingError(
                    f"adapter {before.name!r} is at version {before.version}; {call.adapter.version} is not newer",
                    remedy=f"pass {before.version + 1} or above, or no version",
                )
            failed = await self._order_all(replicas, call.adapter, False, timeout)
            if failed:
                await self._order_all(replicas, call.adapter, True, UNLOAD_SECONDS)
                raise failed[0]
            known[call.adapter.name] = call.adapter
            if before is not None:
                await self._order_all(replicas, before, True, UNLOAD_SECONDS)

    async def _order_all(
        self,
        replicas: list[reg.Replica],
        adapter: pb.Adapter,
        unload: bool,
        timeout: float,
    ) -> list[JvlabError]:
        """Order it from all replicas; returns the failures. A replica lost meanwhile is none: it holds nothing."""
        orders = (
            self._calls.ask(
                replica.name,
                "SetAdapter",
                pb.RolloutAdapterRequest(
                    epoch=replica.epoch, adapter=adapter, unload=unload
                ),
                timeout,
            )
            for replica in replicas
        )
        answers = await asyncio.gather(*orders, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, JvlabError):
                raise answer
        return [
            a
            for a in answers
            if isinstance(a, JvlabError)
            and status_of(a) is not grpc.StatusCode.UNAVAILABLE
        ]


# ----------------------------------------------------------------------------------------------------

STATS_DEADLINE = 2.0  # then a status shows the last beat's stats instead
UNDO_SECONDS = 30.0
PAUSED = "paused"
MEMORY = ("weights", "kv_cache")  # what sleeps


class Steering:
    """Which pools users paused or put to sleep, and the orders that do it. A sync's halts are not among them."""

    def __init__(
        self,
        registry: reg.Registry,
        calls: ReplicaCalls,
        announce: Callable[[str], None],
        in_background: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._registry = registry
        self._calls = calls
        self._announce = announce
        self._in_background = in_background
        self._states: dict[str, dict[str, str]] = {}
        self._orders: Counter[str] = Counter()  # in progress, by pool
        self._reconciling: set[str] = set()

    def of(self, pool: str) -> dict[str, str]:
        """The pool's states, paused and asleep, and who asked for each."""
        return self._states.get(pool, {})

    def restore(self, pool: str, states: dict[str, str]) -> None:
        """What `of` said, in a gateway that was started again."""
        self._states[pool] = dict(states)

    def why(self, pool: str) -> str:
        """The states as text; empty if the pool runs."""
        return " and ".join(sorted(self.of(pool)))

    def _asleep(self, pool: str) -> list[str]:
        """What of its memory sleeps."""
        return [tag for tag in MEMORY if f"{tag} asleep" in self.of(pool)]

    def forget(self, pool: str) -> None:
        self._states.pop(pool, None)

    async def steer(self, order: pb.SteerCall, timeout: float) -> pb.SteerReply:
        """Pause, resume, sleep or wake every replica of a pool, or none."""
        pool = order.pool
        replicas = self._registry.alive(pool)
        until = time.monotonic() + timeout
        undo = self._opposite(order)
        self._orders[pool] += 1
        try:
            orders = (self._one(replica, order, timeout) for replica in replicas)
            answers = await asyncio.gather(*orders, return_exceptions=True)
        finally:
            self._orders[pool] -= 1
            if not self._orders[pool]:
                del self._orders[pool]
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if failed:
            # all or none: don't leave a pool half paused or half asleep
            if undo is not None:
                # One that did not answer in time undoes a pause itself, when its call is cancelled; a sleep may have
                # been done in part, and one that did not sleep wakes without doing anything.
                undone = [
                    self._in_background(self._undo(replica, undo))
                    for replica, answer in zip(replicas, answers, strict=True)
                    if order.what != pb.PAUSE or isinstance(answer, pb.SteerReply)
                ]
                if undone:
                    left = max(0.0, until - time.monotonic())
                    await asyncio.wait(undone, timeout=left)
            raise failed[0]
        self._done(order)
        self._announce(pool)  # held requests may go on
        return pb.SteerReply(
            seconds=max(a.seconds for a in answers if isinstance(a, pb.SteerReply))
        )

    def _done(self, order: pb.SteerCall) -> None:
        """All replicas have done this."""
        states = self._states.setdefault(order.pool, {})
        by = order.by or "another client"
        match order.what:
            case pb.PAUSE:
                states[PAUSED] = by
            case pb.RESUME:
                states.pop(PAUSED, None)
            case pb.SLEEP:
                states |= {f"{tag} asleep": by for tag in MEMORY}
            case pb.WAKE:
                for tag in order.tags or MEMORY:
                    states.pop(f"{tag} asleep", None)
            case _:
                pass  # replicas refuse any other

    def _opposite(self, order: pb.SteerCall) -> pb.SteerCall | None:
        """What undoes an order that some replicas have carried out; None if it changes nothing, or frees the pool.

        Weights that a sleep at level 2 dropped do not come back: such a replica is dirty until a sync.
        """
        if order.what == pb.PAUSE and PAUSED not in self.of(order.pool):
            return pb.SteerCall(pool=order.pool, what=pb.RESUME)
        awake = [tag for tag in MEMORY if tag not in self._asleep(order.pool)]
        if order.what == pb.SLEEP and awake:
            return pb.SteerCall(pool=order.pool, what=pb.WAKE, tags=awake)
        return None

    async def _one(
        self, replica: reg.Replica, order: pb.SteerCall, timeout: float
    ) -> pb.SteerReply:
        message = pb.RolloutSteerRequest(epoch=replica.epoch, order=order)
        return await self._calls.ask(replica.name, "Steer", message, timeout)

    async def _undo(self, replica: reg.Replica, undo: pb.SteerCall) -> None:
        # lost, or too slow: its next beat reports that it is paused or asleep
        with contextlib.suppress(JvlabError):
            await self._one(replica, undo, UNDO_SECONDS)

    # A replica that differs from its pool: it may have missed an order, or have carried out one that was undone.

    def reported(self, replica: reg.Replica, stats: pb.ReplicaStats) -> None:
        """Wake, pause or resume a replica that differs from its pool."""
        differs = self._differs(replica.pool, stats) is not None
        if differs and replica.name not in self._reconciling:
            self._reconciling.add(replica.name)
            self._in_background(self._reconcile(replica))

    def _differs(self, pool: str, stats: pb.ReplicaStats) -> pb.Steering | None:
        """The order that makes a replica as its pool; None while an order to the pool is in progress."""
        if self._orders[pool]:
            return None
        if stats.sleeping and not self._asleep(pool):
            return pb.WAKE
        paused = PAUSED in self.of(pool)
        if stats.paused == paused:
            return None
        return pb.PAUSE if paused else pb.RESUME

    async def _reconcile(self, replica: reg.Replica) -> None:
        name = replica.name
        pool = replica.pool
        try:
            stats = await self._calls.begin(
                name, "Stats", pb.EpochRequest(epoch=replica.epoch), STATS_DEADLINE
            )
            # No await between here and the order, so that it cannot overtake a later one of the user's.
            what = self._differs(pool, stats)
            if what is not None and self._calls.is_current(name, replica.epoch):
                await self._undo(
                    replica, pb.SteerCall(pool=pool, what=what, mode="keep")
                )
        except grpc.aio.AioRpcError:
            pass  # its next beat reports whether it is alive and paused
        finally:
            self._reconciling.discard(name)
