"""Pool commands shared by the gateway's gRPC and HTTP services: status, pause and resume, tracing. Failures raise."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from jvlab._errors import EngineDirty, JvlabError, SamplingError
from jvlab._names import check_name
from jvlab.gateway import _registry as reg
from jvlab.gateway._routing import Board
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._rpc_errors import CallFailed, refused, status_of

if TYPE_CHECKING:
    from jvlab.gateway._gateway import Gateway
    from jvlab.layout._types import CheckpointTensor


# The replicas of one pool that may be given one call's work, as a dispatcher sees them.


class PoolReplicas:
    """A dispatcher's view of one pool, for one call.

    `version` 0: replicas that hold the pool's version; else those that hold this one or a later one.
    """

    def __init__(self, gateway: Gateway, pool: str, version: int = 0) -> None:
        self._gateway = gateway
        self._pool = pool
        self._version = version
        self.count = gateway.count
        self.served = gateway.served
        self.loss = gateway.loss
        self.track = gateway.track
        self.untrack = gateway.untrack
        self.failed = gateway.failed

    def board(self) -> Board:
        return self._gateway.loads.board(self._pool, self._version, self._names)

    def _names(self) -> list[str]:
        links = self._gateway.links
        if self._version:
            return links.holding(self._pool, self._version)
        return [replica.name for replica in links.serving(self._pool)]

    def wait_for(self, avoid: frozenset[str]) -> asyncio.Event | None:
        waits = self._gateway.links.syncing(self._pool, avoid, self._version)
        return self._gateway.change(self._pool) if waits else None

    def barred(self) -> EngineDirty | None:
        return self._gateway.links.barred(self._pool, self._version)

    def epoch(self, replica: str) -> int:
        known = self._gateway.registry.find(replica)
        return -1 if known is None else known.epoch

    def deadline_error(self, replicas: Sequence[str]) -> CallFailed:
        return self._gateway.deadline_error(self._pool, replicas)


# LoRA adapters of a gateway's pools: loaded on all replicas or on none; later replicas load them on demand.
# A new version is loaded beside the old one. Only when every replica has it do new requests use it and is the old one
# unloaded, which each replica does when its last request with it has ended. So a request has one adapter
# version from its first token to its last.

UNLOAD_SECONDS = 30.0


class Adapters:
    """Which adapters each pool has, and at which version."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._known: dict[str, dict[str, pb.Adapter]] = {}
        self._one_at_a_time = asyncio.Lock()

    def forget(self, pool: str) -> None:
        """The pool is closed; another of its name has none of its adapters."""
        self._known.pop(pool, None)

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
            replicas = self._gateway.ready(call.pool)
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
        answers = await asyncio.gather(
            *(
                self._order_one(replica, adapter, unload, timeout)
                for replica in replicas
            ),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, JvlabError):
                raise answer
        return [
            a
            for a in answers
            if isinstance(a, JvlabError)
            and status_of(a) is not grpc.StatusCode.UNAVAILABLE
        ]

    async def _order_one(
        self, replica: reg.Replica, adapter: pb.Adapter, unload: bool, timeout: float
    ) -> None:
        order = pb.RolloutAdapterRequest(
            epoch=replica.epoch, adapter=adapter, unload=unload
        )
        gateway = self._gateway
        call = gateway.stub(replica.name).SetAdapter(
            order, timeout=timeout, metadata=gateway.metadata()
        )
        with gateway.watched(replica.name, call):
            await call


# ----------------------------------------------------------------------------------------------------

STATS_DEADLINE = 2.0  # then a status shows the last beat's stats instead
UNDO_SECONDS = 30.0
PAUSED = "paused"
MEMORY = ("weights", "kv_cache")  # what sleeps


class PauseState:
    """Which pools were paused or put to sleep by users; a sync's halts are not among them."""

    def __init__(self) -> None:
        self._pools: dict[str, dict[str, str]] = {}

    def of(self, pool: str) -> dict[str, str]:
        """The pool's states, paused and asleep, and who asked for each."""
        return self._pools.get(pool, {})

    def why(self, pool: str) -> str:
        """The states as text; empty if the pool runs."""
        return " and ".join(sorted(self.of(pool)))

    def asleep(self, pool: str) -> list[str]:
        """What of its memory sleeps."""
        return [tag for tag in MEMORY if f"{tag} asleep" in self.of(pool)]

    def steered(self, order: pb.SteerCall) -> None:
        """All replicas have done this."""
        states = self._pools.setdefault(order.pool, {})
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

    def forget(self, pool: str) -> None:
        self._pools.pop(pool, None)


async def fresh_status(
    gateway: Gateway, pool: str, seconds: float = STATS_DEADLINE
) -> pb.PoolStatus:
    """A pool's snapshot with fresh stats from its replicas."""

    async def refresh(replica: reg.Replica) -> None:
        name = replica.name
        epoch = replica.epoch
        try:
            stats = await gateway.stub(name).Stats(
                pb.EpochRequest(epoch=epoch),
                timeout=min(seconds, STATS_DEADLINE),
                metadata=gateway.metadata(),
            )
        except grpc.aio.AioRpcError as error:  # beat_age shows how old the numbers are
            print(
                f"gateway: no fresh numbers from {name}: {error.code().name}",
                flush=True,
            )
            gateway.failed(name, epoch, error)
            return
        if gateway.is_current(name, epoch):  # else the stats are outdated
            gateway.stats[name] = stats

    await asyncio.gather(*(refresh(replica) for replica in gateway.alive(pool)))
    return gateway.pool_status(pool)


async def steer(gateway: Gateway, order: pb.SteerCall, timeout: float) -> pb.SteerReply:
    """Pause, resume, sleep or wake every replica of a pool, or none."""
    replicas = gateway.alive(order.pool)
    if not replicas:
        raise refused(f"no replica of {order.pool} is ready")
    gateway.links.check_steering(order.pool, order.what)
    until = time.monotonic() + timeout
    undo = _opposite(gateway.pause_state, order)
    gateway.steering[order.pool] += 1
    try:
        orders = (_steer_one(gateway, r, order, timeout) for r in replicas)
        answers = await asyncio.gather(*orders, return_exceptions=True)
    finally:
        gateway.steering[order.pool] -= 1
        if not gateway.steering[order.pool]:
            del gateway.steering[order.pool]
    failed = [answer for answer in answers if isinstance(answer, JvlabError)]
    if failed:
        # all or none: don't leave a pool half paused or half asleep
        if undo is not None:
            done = [
                r
                for r, answer in zip(replicas, answers, strict=True)
                if isinstance(answer, pb.SteerReply)
            ]
            # One that did not answer in time undoes a pause itself, when its call is cancelled; a sleep may have been
            # done in part, and one that did not sleep wakes without doing anything.
            steered = done if order.what == pb.PAUSE else replicas
            undone = [gateway.in_background(_undo(gateway, r, undo)) for r in steered]
            if undone:
                await asyncio.wait(undone, timeout=max(0.0, until - time.monotonic()))
        raise failed[0]
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    gateway.pause_state.steered(order)
    gateway.announce(order.pool)  # held requests may go on
    return pb.SteerReply(
        seconds=max(a.seconds for a in answers if isinstance(a, pb.SteerReply))
    )


def _opposite(known: PauseState, order: pb.SteerCall) -> pb.SteerCall | None:
    """What undoes an order that some replicas have carried out; None for one that changes nothing, or frees the pool.

    Weights that a sleep at level 2 dropped do not come back: such a replica is dirty until a sync.
    """
    if order.what == pb.PAUSE and PAUSED not in known.of(order.pool):
        return pb.SteerCall(pool=order.pool, what=pb.RESUME)
    awake = [tag for tag in MEMORY if tag not in known.asleep(order.pool)]
    if order.what == pb.SLEEP and awake:
        return pb.SteerCall(pool=order.pool, what=pb.WAKE, tags=awake)
    return None


async def _undo(gateway: Gateway, replica: reg.Replica, undo: pb.SteerCall) -> None:
    # lost, or too slow: its next beat reports that it is paused or asleep
    with contextlib.suppress(JvlabError):
        await _steer_one(gateway, replica, undo, UNDO_SECONDS)


def differs(known: PauseState, pool: str, stats: pb.ReplicaStats) -> pb.Steering | None:
    """The order that makes a replica as its pool: it may have missed one, or have carried out one that was undone."""
    if stats.sleeping and not known.asleep(pool):
        return pb.WAKE
    paused = PAUSED in known.of(pool)
    if stats.paused == paused:
        return None
    return pb.PAUSE if paused else pb.RESUME


async def reconcile_pause(gateway: Gateway, replica: reg.Replica) -> None:
    """Wake, pause or resume a replica to match its pool."""
    name = replica.name
    epoch = replica.epoch
    try:
        stats = await gateway.stub(name).Stats(
            pb.EpochRequest(epoch=epoch),
            timeout=STATS_DEADLINE,
            metadata=gateway.metadata(),
        )
        # No await between here and the order, so that it cannot overtake a later one of the user's.
        what = differs(gateway.pause_state, replica.pool, stats)
        if (
            gateway.is_current(name, epoch)
            and what is not None
            and not gateway.steering[replica.pool]
        ):
            await _undo(
                gateway,
                replica,
                pb.SteerCall(pool=replica.pool, what=what, mode="keep"),
            )
    except grpc.aio.AioRpcError:
        pass  # its next beat reports whether it is alive and paused
    finally:
        gateway.reconciled(name)


async def _steer_one(
    gateway: Gateway, replica: reg.Replica, order: pb.SteerCall, timeout: float
) -> pb.SteerReply:
    """One order to one replica; raises at once if the replica is lost."""
    message = pb.RolloutSteerRequest(epoch=replica.epoch, order=order)
    call: Any = gateway.stub(replica.name).Steer(
        message, timeout=timeout, metadata=gateway.metadata()
    )
    with gateway.watched(replica.name, call):
        return await call


async def trace(
    gateway: Gateway, pool: str, tensors: list[CheckpointTensor], timeout: float
) -> tuple[str, list[bytes]]:
    """(the replica that was traced, each rank's encoded layout)."""
    ready = gateway.ready(pool)
    if not ready:
        raise refused(f"no replica of {pool} is ready")
    asked = ready[0]
    listed = [
        pb.TraceTensor(name=t.name, shape=t.shape, dtype=t.dtype) for t in tensors
    ]
    order = pb.RolloutTraceRequest(epoch=asked.epoch, tensors=listed)
    call: Any = gateway.stub(asked.name).Trace(
        order, timeout=timeout, metadata=gateway.metadata()
    )
    with gateway.watched(asked.name, call):
        return asked.name, [event.layout async for event in call]
