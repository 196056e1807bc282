"""Links between trainers and pools, as the gateway serves them: gRPC around the state machine in _sync.py."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from jvlab._errors import EngineDirty
from jvlab.gateway import _registry as reg
from jvlab.gateway import _sync_types as sync
from jvlab.gateway._dispatch import being_cancelled
from jvlab.gateway._pool_commands import ReplicaCalls
from jvlab.gateway._sync import SYNC_AGAIN, PoolSync
from jvlab.gateway._sync_types import Standing
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import EOF
from jvlab.wire._rpc_errors import CallFailed, received, refused
from jvlab.wire._sync_words import Phase, Terms, failure_code

# Trainers of several processes (teams): membership, and messages between members.
#     forming ──all members joined──▶ running ──one leaves──▶ over (the others' streams end, with the reason)
#
# The gateway forwards messages unread:
# those of member 0 go to all others, those of another to member 0, or to all if marked so. Trainers
# with different `team` texts are never mixed. A process that joins as a member that is already there replaces
# it: the older one is a dead stream.

MAX_MEMBERS = 65_536
Context = grpc.aio.ServicerContext


@dataclass(eq=False)
class TeamMember:
    """One process of a team, and the events to send to it."""

    member: int
    name: str
    team: TrainerTeam
    outbox: asyncio.Queue[pb.TeamEvent] = field(
        default_factory=asyncio.Queue, repr=False
    )


@dataclass(eq=False)
class TrainerTeam:
    """The processes of one trainer."""

    size: int
    members: dict[int, TeamMember] = field(default_factory=dict)
    running: bool = False

    def roll(self) -> pb.TeamEvent:
        names = [
            self.members[k].name if k in self.members else "" for k in range(self.size)
        ]
        return pb.TeamEvent(roll=pb.TeamRoll(names=names, complete=self.running))


class Teams:
    """Every team, and the streams of its members."""

    def __init__(self) -> None:
        self._forming: dict[tuple[str, str, int], TrainerTeam] = {}

    async def serve(self, context: Context) -> None:
        """One member's stream, until it or the team ends."""
        # no deadline: only its own call waits, and ends with its connection
        first = await context.read()
        if first is EOF or first.WhichOneof("kind") != "join":
            raise refused("the first message of a team must be join")
        member = self.join(first.join)
        reading = asyncio.create_task(self._read(member, context))
        try:
            while True:
                # no deadline: members are silent between two syncs; `_read` reports the end of the stream
                event = await member.outbox.get()
                await context.write(event)
                if event.WhichOneof("kind") == "over":
                    return
        finally:  # also when the call is cancelled, as when the process was killed
            reading.cancel()
            self.leave(member)

    async def _read(self, member: TeamMember, context: Context) -> None:
        why = "it ended its stream"
        try:
            # no deadline: members are silent between two syncs; their connections are watched
            while (message := await context.read()) is not EOF:
                self.deliver(member, message.payload, message.to_all)
        except CallFailed as error:
            why = error.message
        # however a stream breaks, the others must be notified
        except Exception as error:
            why = f"its stream broke: {error}"
        self.tell([member], pb.TeamEvent(over=why))

    def join(self, order: pb.TeamJoin) -> TeamMember:
        """Add a member; raises if its number or the team's size is invalid."""
        if not 2 <= order.size <= MAX_MEMBERS:
            raise refused(
                f"a team of {order.size}: 2 to {MAX_MEMBERS} processes make one"
            )
        if order.member >= order.size:
            raise refused(
                f"member {order.member} of {order.size}: members count from 0"
            )
        key = (order.pool, order.team, order.size)
        team = self._forming.setdefault(key, TrainerTeam(order.size))
        if (old := team.members.get(order.member)) is not None:
            why = f"{order.name} joined as member {order.member} too, after {old.name}"
            self.tell([old], pb.TeamEvent(over=why))
        member = team.members[order.member] = TeamMember(order.member, order.name, team)
        if len(team.members) == team.size:
            team.running = True
            del self._forming[key]
        self._call_the_roll(team)
        return member

    def _call_the_roll(self, team: TrainerTeam) -> None:
        """To everybody once all have joined; until then to the leader, which reports whom it waits for."""
        members = team.members.values()
        self.tell([m for m in members if team.running or not m.member], team.roll())

    def deliver(self, sender: TeamMember, payload: bytes, to_all: bool = False) -> None:
        """A message for each of its recipients."""
        team = sender.team
        if not team.running:
            raise refused("a message before all members are there")
        event = pb.TeamEvent(
            delivery=pb.TeamDelivery(member=sender.member, payload=payload)
        )
        everyone = to_all or not sender.member
        others = [other for other in team.members.values() if other is not sender]
        self.tell([o for o in others if everyone or not o.member], event)

    def leave(self, member: TeamMember) -> None:
        """Its stream has ended."""
        team = member.team
        # it was replaced, or the team is over
        if team.members.get(member.member) is not member:
            return
        del team.members[member.member]
        if not team.running:
            self._forming = {
                key: t for key, t in self._forming.items() if t is not team or t.members
            }
            self._call_the_roll(team)
            return
        rest = list(team.members.values())
        team.members = {}
        why = f"member {member.member} of {team.size} ({member.name}) has gone"
        self.tell(rest, pb.TeamEvent(over=why))

    def tell(self, members: list[TeamMember], event: pb.TeamEvent) -> None:
        for member in members:
            member.outbox.put_nowait(event)


# ----------------------------------------------------------------------------------------------------

# for ABANDON and CLOSE: a replica that takes longer counts as dirty
CLEANUP_SECONDS = 4.0
# after its deadline, for a replica to report what it waited for
OWN_ERROR_SECONDS = 0.3
# seconds that clean-up may go past the deadline of an order; below the client's GRACE
CLEANUP_GRACE = 0.7
MIN_SECONDS = 0.001
LOST_CODES = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
}


class PoolLinks:
    """One pool's state machine, its open calls, and the orders that wait for a reply."""

    def __init__(
        self,
        calls: ReplicaCalls,
        registry: reg.Registry,
        state: reg.PoolState,
        announce: Callable[[str], None],
        paused: Callable[[str], str],
    ) -> None:
        self._replicas = calls
        self._registry = registry
        self._announce = announce
        self._paused = paused
        self.state = state
        self.pool = state.spec.pool
        self.machine = PoolSync(self.pool)
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._waiting: dict[tuple[str, int], asyncio.Future[pb.LinkReply]] = {}
        self._released = asyncio.Event()
        # Of the current order, and of the link:
        self._terms = pb.SyncTerms()
        self._digests: dict[str, pb.ReplicaDigests] = {}
        self._nonfinite = False
        self._call = ""
        self._details: dict[str, pb.ReplicaOutcome] = {}
        self._until = self._seconds = 0.0
        self._opening = pb.LinkOpen()

    def feed(self, event: sync.SyncEvent) -> None:
        """Pass the machine an event and carry out its instructions. Never waits: safe in a call being cancelled."""
        for instruction in self.machine.handle(event):
            match instruction:
                case sync.Send(ticket):
                    self._calls[ticket] = task = asyncio.create_task(
                        self._send(instruction)
                    )
                    self._background.add(task)
                    task.add_done_callback(self._background.discard)
                case sync.Cancel(ticket):
                    if task := self._calls.pop(ticket, None):
                        task.cancel()
                case sync.Reply(link, number):
                    future = self._waiting.pop((link, number), None)
                    if future is not None and not future.done():
                        future.set_result(self._reply(instruction))
                case sync.AnnounceVersion():
                    self._announce(self.pool)
                case sync.Release():
                    self._released.set()

    # To replicas ----------------------------------------------------------------------------------------------------

    async def _send(self, order: sync.Send) -> None:
        """One Rollout.Sync call; its result is fed back as an event."""
        calls = self._replicas
        name = order.replica
        seconds = self._seconds_for(order)
        request = self._request(order, seconds)
        call = calls.begin(name, "Sync", request, seconds + OWN_ERROR_SECONDS)
        calls.track(name, call)
        epoch = request.epoch
        kind = "ok"
        error = ""
        outcome = pb.ReplicaOutcome()
        lost = None
        try:
            outcome = (await call).outcome
        except asyncio.CancelledError:
            if being_cancelled():
                call.cancel()
                raise
            kind = "lost"
            error = self._registry.cause(name)
        except grpc.aio.AioRpcError as failure:
            kind, error = _kind_of(failure, seconds if order.cleanup else self._seconds)
            if kind == "deadline" and (paused := self._paused(self.pool)):
                error += f"; the pool is {paused}"
            if kind == "lost":
                lost = failure
        finally:
            calls.untrack(name, call)
            self._calls.pop(order.ticket, None)
        if lost is not None:
            # also informs the machine if the replica is gone
            why = calls.failed(name, epoch, lost)
            kind, error = ("lost", why) if why else ("failed", error)
        if kind == "ok":
            # what the calls of one order reported of a replica goes into its reply
            self._details.setdefault(name, pb.ReplicaOutcome()).MergeFrom(outcome)
            if outcome.failed:
                kind = failure_code(outcome.kind, bool(outcome.differing))
                error = outcome.error
        self.feed(
            sync.Answered(
                order.ticket,
                kind,
                time.monotonic(),
                outcome.failed,
                error,
                outcome.state,
                outcome.version,
            )
        )

    def _seconds_for(self, order: sync.Send) -> float:
        left = self._until - time.monotonic()
        if not order.cleanup:
            return max(MIN_SECONDS, left)
        # no reply waits for it
        if all(future.done() for future in self._waiting.values()):
            return CLEANUP_SECONDS
        return min(CLEANUP_SECONDS, max(0.0, left) + CLEANUP_GRACE)

    def _request(self, order: sync.Send, seconds: float) -> pb.RolloutSyncRequest:
        epoch = self._registry.replica(order.replica).epoch
        request = pb.RolloutSyncRequest(epoch=epoch, link=order.link, seconds=seconds)
        match order.phases:
            case (Phase.OPEN,):
                endpoint = next(
                    e for e in self._opening.endpoints if e.replica == order.replica
                )
                request.open.CopyFrom(
                    pb.RolloutOpen(
                        transport=self._opening.transport,
                        plan=self._opening.plan,
                        index=endpoint.index,
                        ranks_json=endpoint.ranks_json,
                    )
                )
            case (Phase.CLOSE,):
                request.close = True
            case phases:
                request.phases.extend(int(phase) for phase in phases)  # pyright: ignore[reportArgumentType]
                if Phase.PREPARE in phases:
                    request.terms.CopyFrom(self._terms)
                if {Phase.VERIFY, Phase.CHECK} & set(
                    phases
                ) and order.replica in self._digests:
                    request.digests.CopyFrom(self._digests[order.replica])
                request.nonfinite = self._nonfinite
                if not order.cleanup:
                    request.call = self._call
        return request

    # To the trainer -------------------------------------------------------------------------------------------------

    def _reply(self, reply: sync.Reply) -> pb.LinkReply:
        outcomes = []
        for result in reply.outcomes:
            outcome = pb.ReplicaOutcome()
            outcome.CopyFrom(self._details.get(result.replica, outcome))
            outcome.replica = result.replica
            outcome.state = result.state
            outcome.version = result.version
            outcome.failed = result.failed
            outcome.error = result.error
            outcomes.append(outcome)
        holder = self.machine.holder
        return pb.LinkReply(
            number=reply.number,
            code=reply.code,
            holder=holder.name if holder is not None and reply.code == "busy" else "",
            error=reply.error,
            remedy=reply.remedy,
            state=reply.stage.value,
            outcomes=outcomes,
        )

    async def execute(self, link: str, order: pb.LinkOrder) -> pb.LinkReply:
        """Carry out one order and return its reply."""
        now = time.monotonic()
        until = now + order.seconds
        if order.WhichOneof("kind") == "open":
            await self._wait_for_release(link, until)
            # A refused trainer must not change what the holder's calls read.
            if self.machine.holder is None or self.machine.holder.link == link:
                self._opening = order.open
                self._until = until
                self._seconds = order.seconds
                self._details = {}
            names = tuple(endpoint.replica for endpoint in order.open.endpoints)
            event: sync.SyncEvent = sync.Opened(
                link,
                order.open.holder,
                order.number,
                names,
                order.open.lease_seconds,
                time.monotonic(),
            )
        else:
            steps = order.steps
            try:
                phases = tuple(Phase(number) for number in steps.phases)
            except ValueError as error:
                return pb.LinkReply(
                    number=order.number,
                    code="refused",
                    error=f"no such phase: {error}",
                    state="idle",
                )
            if self.machine.holder is not None and self.machine.holder.link == link:
                self._until = until
                self._seconds = order.seconds
                self._details = {}
                self._digests = {digests.replica: digests for digests in steps.digests}
                self._nonfinite = steps.nonfinite
                self._call = steps.call
                if steps.HasField("terms"):
                    self._terms = steps.terms
            terms = Terms.read(steps.terms) if steps.HasField("terms") else None
            event = sync.Ordered(
                link,
                order.number,
                phases,
                now,
                terms,
                frozenset(d.replica for d in steps.digests),
            )
        future = self._waiting[link, order.number] = (
            asyncio.get_running_loop().create_future()
        )
        self.feed(event)
        return await future

    async def _wait_for_release(self, link: str, until: float) -> None:
        """While the clean-up after a holder that left is running, wait for it instead of replying "busy"."""
        while (
            (holder := self.machine.holder) is not None
            and holder.ended
            and holder.link != link
        ):
            self._released.clear()
            try:
                await asyncio.wait_for(
                    self._released.wait(), max(MIN_SECONDS, until - time.monotonic())
                )
            except TimeoutError:
                return

    async def shut_down(self) -> None:
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for future in self._waiting.values():
            future.cancel()


def _kind_of(failure: grpc.aio.AioRpcError, seconds: float) -> tuple[str, str]:
    details = received(failure).message
    if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "deadline", f"no answer within {seconds:.3g} s"
    if failure.code() in LOST_CODES:
        return "lost", details
    return "failed", details


class Links:
    """The links of every pool. The gateway reports replicas that join and leave; the servicer passes calls on.

    `announce` is told of a pool whose version changed; `paused` says why a pool stands still, if its user wants it.
    """

    def __init__(
        self,
        calls: ReplicaCalls,
        registry: reg.Registry,
        announce: Callable[[str], None],
        paused: Callable[[str], str],
    ) -> None:
        self._calls = calls
        self._registry = registry
        self._announce = announce
        self._paused = paused
        self._pools: dict[str, PoolLinks] = {}
        # replicas whose last beat contradicts our state
        self._contradicting: dict[str, bool] = {}

    def of(self, pool: str) -> PoolLinks:
        """The links of this pool, not those of an earlier pool of the same name."""
        state = self._registry.pool(pool)
        known = self._pools.get(pool)
        if known is None or known.state is not state:
            known = self._pools[pool] = PoolLinks(
                self._calls, self._registry, state, self._announce, self._paused
            )
        return known

    def forget(self, pool: str) -> None:
        """The pool is closed and no longer listed."""
        self._pools.pop(pool, None)
        for replica in [
            name for name in self._contradicting if reg.pool_of(name) == pool
        ]:
            del self._contradicting[replica]

    def joined(self, replica: reg.Replica, stats: pb.ReplicaStats) -> None:
        self.of(replica.pool).feed(
            sync.ReplicaJoined(replica.name, stats.weight_version, stats.dirty)
        )

    def reported(self, replica: reg.Replica, stats: pb.ReplicaStats) -> None:
        """What a replica's beat reports that it holds."""
        links = self.of(replica.pool)
        name = replica.name
        before = self._contradicting.pop(name, None)
        if not stats.dirty and links.machine.is_news(name, stats.weight_version):
            links.feed(sync.ReplicaReported(name, stats.weight_version))
        elif (
            links.machine.is_quiet(name)
            and links.machine.members[name].dirty != stats.dirty
        ):
            # One beat may be out of date; two in a row count.
            if before == stats.dirty:
                links.feed(
                    sync.ReplicaReported(name, stats.weight_version, stats.dirty)
                )
            else:
                self._contradicting[name] = stats.dirty

    def left(self, replica: str, reason: str) -> None:
        self.of(reg.pool_of(replica)).feed(sync.Left(replica, reason))

    def tick(self, now: float) -> None:
        for links in self._pools.values():
            links.feed(sync.SyncTick(now))

    async def shut_down(self) -> None:
        """Cancel the calls that are still open; the replicas have ended before."""
        await asyncio.gather(*(links.shut_down() for links in self._pools.values()))

    # Routing --------------------------------------------------------------------------------------------------------

    def serving(self, pool: str) -> list[reg.Replica]:
        """Replicas that are ready and may be given work."""
        machine = self.of(pool).machine
        return [
            r
            for r in self._registry.ready(pool)
            if machine.standing(r.name) is Standing.SERVING
        ]

    def holding(self, pool: str, version: int) -> list[str]:
        """Ready replicas that are not dirty and hold this version or a later one, stale ones included."""
        members = self.of(pool).machine.members
        ready = [r.name for r in self._registry.ready(pool) if r.name in members]
        return [
            name
            for name in ready
            if not members[name].dirty and members[name].version >= version
        ]

    def syncing(
        self, pool: str, avoid: frozenset[str] = frozenset(), version: int = 0
    ) -> bool:
        """Whether an open sync may soon make a replica available for this work."""
        machine = self.of(pool).machine
        if version and (machine.terms is None or machine.terms.version < version):
            return False
        names = [r.name for r in self._registry.ready(pool) if r.name not in avoid]
        return any(
            name in machine.participants
            if version
            else machine.standing(name) is Standing.SYNCING
            for name in names
        )

    def barred(self, pool: str, version: int = 0) -> EngineDirty | None:
        """Why no ready replica may be given work; None if one may, or none is ready."""
        machine = self.of(pool).machine
        ready = self._registry.ready(pool)
        if version:
            held = ", ".join(
                f"{r.name} holds {machine.members[r.name].version}" for r in ready
            )
            text = f"stale: no replica of pool {pool!r} holds version {version} or a later one ({held})"
            remedy = "sync that version first, or ask for less"
            return (
                EngineDirty(text, remedy=remedy, state=Standing.STALE.value)
                if ready
                else None
            )
        standings = {r.name: machine.standing(r.name) for r in ready}
        if not ready or not set(standings.values()) <= {Standing.DIRTY, Standing.STALE}:
            return None
        words = ", ".join(
            f"{name} is {standing.value}" for name, standing in standings.items()
        )
        if Standing.DIRTY in standings.values():
            state = Standing.DIRTY
            what = "a sync did not finish, or a sleep took the weights"
            why = f"dirty: no replica of pool {pool!r} may generate ({words}): {what}"
        else:
            state = Standing.STALE
            why = f"stale: no replica of pool {pool!r} holds the committed version {machine.version} ({words})"
        return EngineDirty(why, remedy=SYNC_AGAIN, state=state.value)

    def check_steering(self, pool: str, what: int) -> None:
        """Raise if the user may not pause, resume, sleep or wake the pool now."""
        machine = self.of(pool).machine
        if machine.open and machine.holder is not None:
            text = f"{machine.holder.name} syncs pool {pool!r} ({machine.stage.value}) and has it halted or will"
            raise refused(text, "wait for the sync to end, or abandon it")
        dirty = [
            r.name
            for r in self._registry.ready(pool)
            if machine.standing(r.name) is Standing.DIRTY
        ]
        if what == pb.RESUME and dirty:
            text = f"dirty: {', '.join(dirty)} may hold parts of two versions and can't resume"
            raise EngineDirty(text, remedy=SYNC_AGAIN)

    # Calls ----------------------------------------------------------------------------------------------------------

    async def link(self, context: Context) -> None:
        """One Link stream. However it ends, an open sync is abandoned and the pool is released."""
        name = uuid.uuid4().hex
        links = None
        try:
            # no deadline: a trainer is silent between two syncs; its connection is watched
            while (order := await context.read()) is not EOF:
                problem = self._order_problem(order, links)
                if problem is not None:
                    reply = pb.LinkReply(
                        number=order.number, code="refused", error=problem, state="idle"
                    )
                else:
                    if order.WhichOneof("kind") == "open":
                        links = self.of(order.open.pool)
                    assert links is not None
                    reply = await links.execute(name, order)
                await context.write(reply)
        finally:
            if links is not None:
                links.feed(sync.Ended(name, time.monotonic()))

    def _order_problem(
        self, order: pb.LinkOrder, links: PoolLinks | None
    ) -> str | None:
        if order.seconds <= 0:
            return f"an order needs a deadline; seconds is {order.seconds:g}"
        kind = order.WhichOneof("kind")
        if kind is None:
            return "an order must be an open or steps"
        if kind == "open":
            if links is not None and links.pool != order.open.pool:
                return f"this link belongs to pool {links.pool!r}; open another stream for pool {order.open.pool!r}"
            try:
                closed = self._registry.pool(order.open.pool).closed
            except reg.Refused as error:
                return str(error)
            return f"pool {order.open.pool!r} is closed" if closed else None
        return None if links is not None else "the first order of a link must be open"
