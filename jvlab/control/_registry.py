"""Who is alive and who holds the lab: a state machine without I/O. Events in, instructions out; time is in the event.

One replica:

    LaunchRequested ─▶ STARTING ──Registered──▶ READY ──missed beats──▶ LOST ──Registered──▶ READY (epoch + 1)
                          │                       │                       │
                          └────ProcessExited──────┴───────────────────────┴──▶ FAILED
    FAILED ──RestartRequested──▶ STARTING (a new process; the epoch goes on)
    any state ──PoolCloseRequested, LabCloseRequested, lease over──▶ CLOSED

The epoch fences: it grows when a replica is declared lost and again when it registers, every order carries it, and a
replica refuses an order with another epoch than its own. So a replica that was only asleep can't act on old orders.

The lab: ends on LabCloseRequested, or `lease` seconds after its last holder left, unless somebody said Detached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum


class State(Enum):
    """Where a replica stands."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True)
class PoolSpec:
    """What was asked for: one pool of equal replicas."""

    pool: str
    model: str
    replicas: int
    tensor_parallel: int
    load: str
    device: str
    engine_json: str
    env_json: str


@dataclass
class Replica:
    """One rollout process, as the gateway knows it."""

    name: str
    pool: str
    index: int
    started: float
    state: State = State.STARTING
    stage: str = "process"
    pid: int = 0
    epoch: int = 0
    address: str = ""
    last_beat: float | None = None
    ready_after: float | None = None
    cause: str = ""
    log_tail: str = ""

    @property
    def ended(self) -> bool:
        return self.state in (State.FAILED, State.CLOSED)


@dataclass
class PoolState:
    """One pool: its order and its replicas."""

    spec: PoolSpec
    replicas: dict[str, Replica] = field(default_factory=dict)
    closed: bool = False


# Events -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaunchRequested:
    spec: PoolSpec
    now: float


@dataclass(frozen=True)
class ProcessStarted:
    replica: str
    pid: int


@dataclass(frozen=True)
class StageSeen:
    replica: str
    stage: str


@dataclass(frozen=True)
class ProcessExited:
    replica: str
    cause: str
    log_tail: str


@dataclass(frozen=True)
class Registered:
    replica: str
    address: str
    now: float


@dataclass(frozen=True)
class Beaten:
    replica: str
    epoch: int
    now: float


@dataclass(frozen=True)
class HoldOpened:
    holder: str


@dataclass(frozen=True)
class HoldClosed:
    holder: str
    now: float


@dataclass(frozen=True)
class Detached:
    pass


@dataclass(frozen=True)
class PoolCloseRequested:
    pool: str


@dataclass(frozen=True)
class RestartRequested:
    pool: str
    replica: str
    now: float


@dataclass(frozen=True)
class LabCloseRequested:
    reason: str


@dataclass(frozen=True)
class Tick:
    now: float


Event = (
    LaunchRequested | ProcessStarted | StageSeen | ProcessExited | Registered | Beaten | HoldOpened | HoldClosed
    | Detached | PoolCloseRequested | RestartRequested | LabCloseRequested | Tick
)  # fmt: skip


# Instructions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartProcess:
    replica: str
    spec: PoolSpec


@dataclass(frozen=True)
class EndProcess:
    replica: str


@dataclass(frozen=True)
class DropWork:
    """Whoever waits for this replica must stop waiting."""

    replica: str
    reason: str


@dataclass(frozen=True)
class Announce:
    """The pool's picture changed: tell its watchers."""

    pool: str


@dataclass(frozen=True)
class EndLab:
    reason: str


Instruction = StartProcess | EndProcess | DropWork | Announce | EndLab


class Refused(Exception):
    """The event is not allowed in this state; nothing changed."""


class Registry:
    """The gateway's memory. `handle` is the only way to change it."""

    def __init__(self, lease: float, beat: float, missed_beats: int, now: float) -> None:
        self.lease, self.beat, self.missed_beats = lease, beat, missed_beats
        self.pools: dict[str, PoolState] = {}
        self.holders: list[str] = []
        self.detached = False
        self.ending = False
        self.unheld_since: float | None = now  # a lab nobody ever held ends too

    def replicas(self) -> Iterator[Replica]:
        """Every replica of every pool, in order of launch."""
        for pool in self.pools.values():
            yield from pool.replicas.values()

    def replica(self, name: str) -> Replica:
        for replica in self.replicas():
            if replica.name == name:
                return replica
        raise Refused(f"no replica is called {name!r}")

    def pool(self, name: str) -> PoolState:
        if name not in self.pools:
            raise Refused(f"no pool is called {name!r}; there are: {', '.join(self.pools) or 'none'}")
        return self.pools[name]

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; answer with what the gateway must now do."""
        match event:
            case LaunchRequested(spec, now):
                return self._launch(spec, now)
            case ProcessStarted(name, pid):
                self.replica(name).pid = pid
                return [Announce(self.replica(name).pool)]
            case StageSeen(name, stage):
                replica = self.replica(name)
                if replica.state is not State.STARTING or replica.stage == stage:
                    return []
                replica.stage = stage
                return [Announce(replica.pool)]
            case ProcessExited(name, cause, log_tail):
                return self._exited(self.replica(name), cause, log_tail)
            case Registered(name, address, now):
                return self._registered(self.replica(name), address, now)
            case Beaten(name, epoch, now):
                replica = self.replica(name)
                if replica.state is not State.READY or replica.epoch != epoch:
                    raise Refused(f"{name} beats with epoch {epoch}, but is {replica.state.value} at {replica.epoch}")
                replica.last_beat = now
                return []
            case HoldOpened(holder):
                self.holders.append(holder)
                self.unheld_since = None
                return []
            case HoldClosed(holder, now):
                self.holders.remove(holder)
                if not self.holders:
                    self.unheld_since = now
                return []
            case Detached():
                self.detached = True
                return []
            case PoolCloseRequested(name):
                return self._close(self.pool(name))
            case RestartRequested(pool, name, now):
                return self._restart(self.pool(pool), name, now)
            case LabCloseRequested(reason):
                return self._end(reason)
            case Tick(now):
                return self._tick(now)

    def _launch(self, spec: PoolSpec, now: float) -> list[Instruction]:
        if self.ending:
            raise Refused("the lab is closing")
        if spec.pool in self.pools and not self.pools[spec.pool].closed:
            raise Refused(f"a pool called {spec.pool!r} is there already")
        if spec.replicas < 1 or spec.tensor_parallel < 1:
            raise Refused("replicas and tensor_parallel must be at least 1")
        pool = self.pools[spec.pool] = PoolState(spec)
        for index in range(spec.replicas):
            name = f"{spec.pool}/{index}"
            pool.replicas[name] = Replica(name, spec.pool, index, started=now)
        return [StartProcess(name, spec) for name in pool.replicas]

    def _exited(self, replica: Replica, cause: str, log_tail: str) -> list[Instruction]:
        if replica.ended:
            return []
        replica.state, replica.stage, replica.cause, replica.log_tail = State.FAILED, "failed", cause, log_tail
        replica.epoch += 1
        return [DropWork(replica.name, cause), Announce(replica.pool)]

    def _registered(self, replica: Replica, address: str, now: float) -> list[Instruction]:
        if replica.ended:
            raise Refused(f"{replica.name} is {replica.state.value}")
        # A second registration while READY is a replica that lost its answer: its old work is void all the same.
        dropped: list[Instruction] = (
            [DropWork(replica.name, "registered again")] if replica.state is State.READY else []
        )
        replica.state, replica.stage, replica.cause = State.READY, "ready", ""
        replica.address, replica.last_beat = address, now
        replica.epoch += 1
        if replica.ready_after is None:
            replica.ready_after = now - replica.started
        return [*dropped, Announce(replica.pool)]

    def _restart(self, pool: PoolState, name: str, now: float) -> list[Instruction]:
        replica = pool.replicas.get(name)
        if replica is None:
            raise Refused(f"pool {pool.spec.pool!r} has no replica {name!r}; it has: {', '.join(pool.replicas)}")
        if pool.closed or self.ending:
            raise Refused(f"pool {pool.spec.pool!r} is closed")
        if replica.state is not State.FAILED:
            raise Refused(f"{name} is {replica.state.value}: only a replica that failed can be restarted")
        pool.replicas[name] = Replica(name, replica.pool, replica.index, started=now, epoch=replica.epoch)
        return [StartProcess(name, pool.spec), Announce(replica.pool)]

    def _close(self, pool: PoolState) -> list[Instruction]:
        if pool.closed:
            return []
        pool.closed = True
        out: list[Instruction] = []
        for replica in pool.replicas.values():
            if replica.state is not State.FAILED:
                replica.state, replica.stage = State.CLOSED, "closed"
            replica.epoch += 1
            out += [DropWork(replica.name, "the pool was closed"), EndProcess(replica.name)]
        return [*out, Announce(pool.spec.pool)]

    def _end(self, reason: str) -> list[Instruction]:
        if self.ending:
            return []
        self.ending = True
        out = [instruction for pool in self.pools.values() for instruction in self._close(pool)]
        return [*out, EndLab(reason)]

    def _tick(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for replica in self.replicas():
            if replica.state is State.READY and replica.last_beat is not None:
                silent = now - replica.last_beat
                if silent > self.beat * self.missed_beats:
                    replica.state, replica.stage = State.LOST, "lost"
                    replica.cause = f"no heartbeat for {silent:.1f} s"
                    replica.epoch += 1
                    out += [DropWork(replica.name, replica.cause), Announce(replica.pool)]
        if not self.detached and self.unheld_since is not None and now - self.unheld_since >= self.lease:
            out += self._end(f"nobody held the lab for {self.lease:g} s")
        return out
