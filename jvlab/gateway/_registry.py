"""Liveness of replicas and the lab's lease: a state machine without I/O. Events, with their time, in; instructions out.

One replica:

    LaunchRequested ─▶ STARTING ──Registered──▶ READY ──missed beats──▶ LOST ──Registered──▶ READY (epoch + 1)
                          │                       │ ───Unreachable────▶   │
                          │                       │                       │
                          └────ProcessExited──────┴───────────────────────┴──▶ FAILED, or RESTARTING
    RESTARTING ──Tick, once its back-off is over──▶ STARTING (a new process; the epoch goes on)
    FAILED, RESTARTING ──RestartRequested──▶ STARTING (the same at once, with all its tries again)
    any state ──PoolCloseRequested, LabCloseRequested, lease over──▶ CLOSED

A replica that was ready once is started again when its process exits, `spec.restarts` times, after 1, 2, 4, … seconds.
One that never came up is not: its launch failed, and whoever launched it is told at once. A try that does not come up
counts as one. After WELL_SECONDS of service the tries are whole again. A replica that waits for its back-off has no
process, counts as one of those wanted, and is forgotten or closed like one that failed.
Where something else starts processes again (SELF_RESTARTING), the registry does not: there would be two of them.
A place that waits for hosts ("join") is open again after the back-off: the next host that offers itself gets it.

A name can be launched again as soon as its pool is closed, while the processes of that one still end. What those say
is told by their `run` and ignored, or refused. Of the closed pools the last KEPT_CLOSED are listed.

    Offered ─▶ STARTING (one more than was launched; the process that offers runs it)

Scaling a pool down removes replicas that do not serve first, then the highest numbers:

    READY ──ScaleRequested──▶ DRAINING ──Drained, missed beats──▶ CLOSED ──ProcessExited──▶ forgotten
                                  └──ScaleRequested──▶ READY (wanted again)
    STARTING, LOST ──ScaleRequested──▶ CLOSED        FAILED ──ScaleRequested──▶ forgotten

The epoch is a fencing token: it grows when a replica is declared lost and again when it registers, every order carries
it, and a replica refuses an order of another epoch. So a replica that was only suspended can't act on old orders. It
never goes back under one name, whatever pools had it.

Time in which the gateway itself was not running (a late tick) does not count towards missed beats or the lease.

The lab ends on LabCloseRequested, or `lease` seconds after its last holder left, unless it was detached.

`plain` and `restore` take a registry from a process that died to one that was started again from its state file.
Replicas that served are LOST then, under the next epoch, and awaited: who comes back registers as after any loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from jvlab._errors import JvlabError
from jvlab.wire.processes._pool_spec import MAX_REPLICAS, MAX_RESTARTS, PoolSpec

# The registry's types: replicas and pools, events and instructions.


class ReplicaState(Enum):
    """The state of a replica."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"
    FAILED = "failed"
    CLOSED = "closed"
    DRAINING = "draining"  # finishes its requests, gets no new ones
    RESTARTING = "restarting"  # it died, and is started again after its back-off


def pool_of(replica: str) -> str:
    """The pool's name, from a replica's, which is "pool/number"."""
    return replica.rpartition("/")[0]


@dataclass(frozen=True)
class Death:
    """Why a process of a replica ended, and its last words."""

    cause: str
    log_tail: str = ""


@dataclass
class Replica:
    """One rollout process, as the gateway knows it."""

    name: str
    pool: str
    index: int
    started: float
    state: ReplicaState = ReplicaState.STARTING
    stage: str = "process"
    pid: int = 0
    epoch: int = 0
    address: str = ""
    last_beat: float | None = None
    ready_after: float | None = None
    cause: str = ""
    log_tail: str = ""
    place: str = ""  # who starts it, if not as the rest of the pool
    # tells its process from every other that had its name: the epoch at which it was started
    run: int = 0
    # of its processes, since it was launched, restarted by hand, or served for WELL_SECONDS
    deaths: tuple[Death, ...] = ()
    restarts: int = 0  # how often it was started again, by hand too
    ready_since: float = 0.0  # when it registered last
    restart_at: float = 0.0  # while it is restarting
    # its engine or process is gone, as a call found out: until then its exit is expected; 0: it is not
    exit_by: float = 0.0
    # the gateway was started again, and has not heard of it yet
    awaited: bool = False

    @property
    def ended(self) -> bool:
        """Whether its process has ended, or is to end."""
        return self.state in (*RESTARTABLE, ReplicaState.CLOSED)


@dataclass
class PoolState:
    """One pool: its spec and its replicas."""

    spec: PoolSpec
    replicas: dict[str, Replica] = field(default_factory=dict)
    closed: bool = False
    # those that left; a name may be used again
    retired: dict[str, Replica] = field(default_factory=dict)
    turn: int = 0  # of the next session: replicas take them in turn

    def sort(self) -> None:
        self.replicas = dict(
            sorted(self.replicas.items(), key=lambda item: item[1].index)
        )


# Events -------------------------------------------------------------------------------------------------------------
#
# What a process does or says carries its `run`: another process may have had its name before, and still be ending.


@dataclass(frozen=True)
class LaunchRequested:
    spec: PoolSpec
    now: float


@dataclass(frozen=True)
class ProcessStarted:
    replica: str
    pid: int
    run: int = 0


@dataclass(frozen=True)
class StageSeen:
    replica: str
    stage: str
    run: int = 0


@dataclass(frozen=True)
class ProcessExited:
    replica: str
    cause: str
    log_tail: str
    run: int = 0


@dataclass(frozen=True)
class Registered:
    replica: str
    address: str
    now: float
    run: int = 0


@dataclass(frozen=True)
class BeatReceived:
    replica: str
    epoch: int
    now: float


@dataclass(frozen=True)
class Unreachable:
    """A call of this epoch failed because the replica's engine or process is gone."""

    replica: str
    epoch: int
    reason: str


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
class Offered:
    """A process that the gateway did not start offers to run one more replica."""

    pool: str
    now: float


@dataclass(frozen=True)
class ScaleRequested:
    """`serving`: replicas that may be given work now; the others are removed first."""

    pool: str
    replicas: int
    serving: frozenset[str]
    now: float


@dataclass(frozen=True)
class Drained:
    """A draining replica has nothing left in flight."""

    replica: str


@dataclass(frozen=True)
class LabCloseRequested:
    reason: str


@dataclass(frozen=True)
class Tick:
    now: float


Event = (
    LaunchRequested
    | ProcessStarted
    | StageSeen
    | ProcessExited
    | Registered
    | BeatReceived
    | Unreachable
    | HoldOpened
    | HoldClosed
    | Detached
    | PoolCloseRequested
    | RestartRequested
    | Offered
    | ScaleRequested
    | Drained
    | LabCloseRequested
    | Tick
)


# Instructions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartProcess:
    """Start it with this spec, whose `run` all its events carry."""

    replica: str
    spec: PoolSpec


@dataclass(frozen=True)
class EndProcess:
    replica: str


@dataclass(frozen=True)
class DropWork:
    """Cancel all calls to this replica."""

    replica: str
    reason: str


@dataclass(frozen=True)
class Announce:
    """The pool's snapshot changed: notify its watchers."""

    pool: str


@dataclass(frozen=True)
class Forget:
    """The replica has left its pool, and its process has exited; or its pool is forgotten."""

    replica: str


@dataclass(frozen=True)
class ForgetPool:
    """A closed pool is no longer listed; its processes may still be ending."""

    pool: str


@dataclass(frozen=True)
class EndLab:
    reason: str


Instruction = (
    StartProcess | EndProcess | DropWork | Announce | Forget | ForgetPool | EndLab
)


class Refused(JvlabError):
    """The event is not allowed in this state; nothing changed."""


# ----------------------------------------------------------------------------------------------------

BEATING = (ReplicaState.READY, ReplicaState.DRAINING)
RESTARTABLE = (ReplicaState.FAILED, ReplicaState.RESTARTING)  # without a process
SELF_RESTARTING = ("ray",)  # places that start a dead process again by themselves
# seconds until a replica is started again; the last for all further deaths
BACK_OFF = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
WELL_SECONDS = 600.0  # of service, after which a replica has all its tries again
EXIT_SECONDS = 10.0  # that a process without its engine may take to exit
KEPT_CLOSED = 8  # closed pools that are still listed, with why their replicas failed
AWAITED = "its gateway died and was started again, and it has not registered there yet"
# of a replica, that outlive the gateway's process; times do not
KEPT_FIELDS = [
    "name",
    "index",
    "stage",
    "pid",
    "epoch",
    "cause",
    "log_tail",
    "place",
    "run",
    "restarts",
    "ready_after",
]
MAX_TICK_SECONDS = 1.0  # between two ticks of a gateway that is busy, but not stopped


def _check_size(replicas: int) -> None:
    if replicas > MAX_REPLICAS:
        raise Refused(
            f"{replicas} replicas are more than one pool takes",
            remedy=f"at most {MAX_REPLICAS}",
        )


class Registry:
    """The gateway's state. Only `handle` changes it."""

    def __init__(
        self, lease: float, beat: float, missed_beats: int, now: float
    ) -> None:
        self.lease = lease
        self.beat = beat
        self.missed_beats = missed_beats
        # the closed ones in the order in which they were closed
        self.pools: dict[str, PoolState] = {}
        self._spent = 0  # no replica of a forgotten pool had a higher epoch
        self._unnamed = 0  # names given by `free_name`
        self.holders: list[str] = []
        self.detached = False
        self.ending = False
        self.unheld_since: float | None = now  # a lab that was never held ends too
        self._ticked: float | None = None  # time of the last tick
        self._now = now  # of the last event that says

    def replicas(self) -> Iterator[Replica]:
        """Every replica of every pool, in order of launch."""
        for pool in self.pools.values():
            yield from pool.replicas.values()

    def replica(self, name: str) -> Replica:
        if (found := self.find(name)) is None:
            raise Refused(f"no replica is called {name!r}")
        return found

    def find(self, name: str) -> Replica | None:
        """By name, without a search: called at each beat and each request."""
        pool = self.pools.get(pool_of(name))
        return None if pool is None else pool.replicas.get(name)

    def cause(self, name: str) -> str:
        """Why a replica failed, was lost or left its pool."""
        pool = self.pools.get(pool_of(name))
        known = (
            None if pool is None else pool.replicas.get(name) or pool.retired.get(name)
        )
        return "it left the pool" if known is None else known.cause

    def pool(self, name: str) -> PoolState:
        if name not in self.pools:
            raise Refused(
                f"no pool is called {name!r}; there are: {', '.join(self.pools) or 'none'}"
            )
        return self.pools[name]

    def ready(self, pool: str) -> list[Replica]:
        """Its replicas that may be asked for something."""
        listed = self.pool(pool).replicas.values()
        return [r for r in listed if r.state is ReplicaState.READY]

    def alive(self, pool: str) -> list[Replica]:
        """The ready and the draining ones: pause and resume go to both."""
        return [r for r in self.pool(pool).replicas.values() if r.state in BEATING]

    def restarts(self, replica: Replica) -> int:
        """How often this replica may be started again here."""
        spec = self.pool(replica.pool).spec
        place = replica.place or spec.place
        return 0 if place in SELF_RESTARTING else spec.restarts

    def restarts_left(self, replica: Replica) -> int:
        """How often it may still be, after the restart that it waits for."""
        return max(0, self.restarts(replica) - len(replica.deaths))

    def returning(self, pool: str) -> list[Replica]:
        """Its replicas that died, or are dying, and are started again; and those that a new gateway awaits."""
        starting = (ReplicaState.STARTING, ReplicaState.RESTARTING)
        return [
            r
            for r in self.pool(pool).replicas.values()
            if (r.state in starting and r.deaths)
            or (r.state is ReplicaState.LOST and r.exit_by and self.restarts_left(r))
            or r.awaited
        ]

    def free_name(self) -> str:
        """A name for a pool that was launched without one: no pool has it, and none was given it before."""
        while True:
            self._unnamed += 1
            name = f"pool-{self._unnamed}"
            if name not in self.pools:
                return name

    def _of_run(self, name: str, run: int) -> Replica | None:
        """The replica whose process this is; None if another has its name now, or none."""
        replica = self.find(name)
        return replica if replica is not None and replica.run == run else None

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event; returns what the gateway must do."""
        self._now = getattr(event, "now", self._now)
        match event:
            case LaunchRequested(spec, now):
                return self._launch(spec, now)
            case ProcessStarted(name, pid, run):
                if (replica := self._of_run(name, run)) is None:
                    return []
                replica.pid = pid
                return [Announce(replica.pool)]
            case StageSeen(name, stage, run):
                replica = self._of_run(name, run)
                if (
                    replica is None
                    or replica.state is not ReplicaState.STARTING
                    or replica.stage == stage
                ):
                    return []
                replica.stage = stage
                return [Announce(replica.pool)]
            case ProcessExited(name, cause, log_tail, run):
                replica = self._of_run(name, run)
                return [] if replica is None else self._exited(replica, cause, log_tail)
            case Registered(name, address, now, run):
                replica = self.replica(name)
                if replica.run != run:
                    raise Refused(f"another process is {name} now")
                return self._registered(replica, address, now)
            case BeatReceived(name, epoch, now):
                replica = self.replica(name)
                if replica.state not in BEATING or replica.epoch != epoch:
                    raise Refused(
                        f"{name} beats with epoch {epoch}, but is {replica.state.value} at {replica.epoch}"
                    )
                replica.last_beat = now
                return []
            case Unreachable(name, epoch, reason):
                replica = self.find(name)
                if (
                    replica is None
                    or replica.state not in BEATING
                    or replica.epoch != epoch
                ):
                    return []  # already known, or of an earlier epoch
                replica.exit_by = self._now + EXIT_SECONDS
                return self._lost(replica, reason)
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
                return [*self._close(self.pool(name)), *self._forget_oldest()]
            case RestartRequested(pool, name, now):
                return self._restart(self.pool(pool), name, now)
            case Offered(pool, now):
                return self._offered(self.pool(pool), now)
            case ScaleRequested(pool, replicas, serving, now):
                return self._scale(self.pool(pool), replicas, serving, now)
            case Drained(name):
                replica = self.replica(name)
                return (
                    self._close_replica(replica, "it was drained")
                    if replica.state is ReplicaState.DRAINING
                    else []
                )
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
        _check_size(spec.replicas)
        if not 0 <= spec.restarts <= MAX_RESTARTS:
            raise Refused(
                f"{spec.restarts} restarts of a replica",
                remedy=f"0 to {MAX_RESTARTS}",
            )
        out = self._forget_pool(spec.pool) if spec.pool in self.pools else []
        pool = self.pools[spec.pool] = PoolState(spec)
        return [*out, *(self._add(pool, index, now) for index in range(spec.replicas))]

    def _forget_pool(self, name: str) -> list[Instruction]:
        """A closed pool: another gets its name, or it was closed long ago."""
        pool = self.pools.pop(name)
        known = [*pool.replicas.values(), *pool.retired.values()]
        self._spent = max([self._spent, *(replica.epoch for replica in known)])
        return [*(Forget(replica) for replica in pool.replicas), ForgetPool(name)]

    # A gateway that died and was started again -------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """What outlives the gateway's process, for JSON. Of what was closed only the highest epoch."""
        known = [
            replica.epoch
            for pool in self.pools.values()
            for replica in (*pool.replicas.values(), *pool.retired.values())
        ]
        pools = [
            {
                "spec": asdict(pool.spec),
                "replicas": [
                    {name: getattr(replica, name) for name in KEPT_FIELDS}
                    | {
                        "state": replica.state.value,
                        "deaths": list(map(asdict, replica.deaths)),
                    }
                    for replica in pool.replicas.values()
                    if replica.state is not ReplicaState.CLOSED
                ],
            }
            for pool in self.pools.values()
            if not pool.closed
        ]
        return {
            "spent": max([self._spent, *known]),
            "unnamed": self._unnamed,
            "detached": self.detached,
            "pools": pools,
        }

    def restore(self, saved: dict[str, Any], now: float) -> None:
        """Go on where `plain` was taken, in a new process. Only before the first event."""
        self._spent = int(saved["spent"])
        self._unnamed = int(saved["unnamed"])
        self.detached = bool(saved["detached"])
        for kept in saved["pools"]:
            pool = PoolState(PoolSpec(**kept["spec"]))
            self.pools[pool.spec.pool] = pool
            for row in kept["replicas"]:
                changed = {
                    "state": ReplicaState(row["state"]),
                    "deaths": tuple(Death(**death) for death in row["deaths"]),
                }
                replica = Replica(
                    **{**row, **changed},
                    pool=pool.spec.pool,
                    started=now,
                    ready_since=now,
                    restart_at=now,
                )
                pool.replicas[replica.name] = replica
                if replica.state is ReplicaState.READY:
                    self._lost(replica, AWAITED)
                # its process may be alive, whether it served or was out of reach
                replica.awaited = replica.state is ReplicaState.LOST

    def spec_of(self, replica: Replica) -> PoolSpec:
        """As its process is started with."""
        spec = self.pool(replica.pool).spec
        # Cores and GPUs are divided by replica number, so the count must exceed a process's own number.
        count = max(spec.replicas, replica.index + 1)
        place = replica.place or spec.place
        return replace(spec, replicas=count, place=place, run=replica.run)

    def _add(self, pool: PoolState, index: int, now: float) -> StartProcess:
        """Add the replica of this number."""
        spec = pool.spec
        name = f"{pool.spec.pool}/{index}"
        # Above that of any earlier one of this name: fences orders to it, and tells its process from this one.
        epoch = max(
            self._spent, pool.retired[name].epoch if name in pool.retired else 0
        )
        fresh = Replica(name, spec.pool, index, started=now, epoch=epoch, run=epoch)
        return self._start(pool, fresh)

    def _start(self, pool: PoolState, fresh: Replica) -> StartProcess:
        """A process for this replica, which is new or takes the place of the one that died."""
        pool.replicas[fresh.name] = fresh
        return StartProcess(fresh.name, self.spec_of(fresh))

    def _check_open(self, pool: PoolState) -> None:
        if pool.closed or self.ending:
            raise Refused(f"pool {pool.spec.pool!r} is closed")

    def _offered(self, pool: PoolState, now: float) -> list[Instruction]:
        self._check_open(pool)
        pool.spec = replace(pool.spec, replicas=pool.spec.replicas + 1)
        taken = {r.index for r in pool.replicas.values()}
        start = self._add(
            pool,
            next(index for index in range(len(taken) + 1) if index not in taken),
            now,
        )
        pool.replicas[start.replica].place = "join"
        pool.sort()
        return [
            replace(start, spec=replace(start.spec, place="join")),
            Announce(pool.spec.pool),
        ]

    def _scale(
        self, pool: PoolState, wanted: int, serving: frozenset[str], now: float
    ) -> list[Instruction]:
        self._check_open(pool)
        if wanted < 1:
            raise Refused(
                "a pool has at least 1 replica", remedy="pool.close() ends it"
            )
        _check_size(wanted)
        pool.spec = replace(pool.spec, replicas=wanted)
        staying = [
            r
            for r in pool.replicas.values()
            if r.state not in (ReplicaState.DRAINING, ReplicaState.CLOSED)
        ]
        out: list[Instruction] = []
        if len(staying) > wanted:
            ranks = {
                ReplicaState.FAILED: 0,
                ReplicaState.RESTARTING: 1,
                ReplicaState.LOST: 2,
                ReplicaState.STARTING: 3,
                ReplicaState.READY: 4,
            }
            staying.sort(key=lambda r: (ranks[r.state], r.name in serving, -r.index))
            for replica in staying[: len(staying) - wanted]:
                out += self._remove(pool, replica)
        else:
            missing = wanted - len(staying)
            draining = [
                r for r in pool.replicas.values() if r.state is ReplicaState.DRAINING
            ]
            for replica in draining[:missing]:
                replica.state = ReplicaState.READY
                replica.stage = "ready"
            taken = {r.index for r in pool.replicas.values()}
            free = (
                index for index in range(len(taken) + missing) if index not in taken
            )
            out += [
                self._add(pool, next(free), now) for _ in range(missing - len(draining))
            ]
            pool.sort()
        return [*out, Announce(pool.spec.pool)]

    def _remove(self, pool: PoolState, replica: Replica) -> list[Instruction]:
        """Remove it at once, or drain it if it is ready."""
        if replica.state in RESTARTABLE:
            return self._forget(pool, replica)
        if replica.state is ReplicaState.READY:
            replica.state = ReplicaState.DRAINING
            replica.stage = "draining"
            return []
        return self._close_replica(replica, "the pool was scaled down")

    def _close_replica(self, replica: Replica, reason: str) -> list[Instruction]:
        """End its process; it is forgotten when that has exited."""
        replica.state = ReplicaState.CLOSED
        replica.stage = "closed"
        replica.cause = reason
        replica.epoch += 1
        return [
            DropWork(replica.name, reason),
            EndProcess(replica.name),
            Announce(replica.pool),
        ]

    def _forget(self, pool: PoolState, replica: Replica) -> list[Instruction]:
        del pool.replicas[replica.name]
        replica.epoch += 1
        pool.retired[replica.name] = replica
        return [Forget(replica.name), Announce(replica.pool)]

    def _exited(self, replica: Replica, cause: str, log_tail: str) -> list[Instruction]:
        pool = self.pool(replica.pool)
        replica.awaited = False
        drained = replica.state is ReplicaState.DRAINING
        if replica.state is ReplicaState.CLOSED and not pool.closed:
            return self._forget(pool, replica)
        if replica.ended:
            return []
        # it was leaving anyway; callers that wait for its work get the reason
        if drained:
            replica.cause = cause
            return [DropWork(replica.name, cause), *self._forget(pool, replica)]
        replica.state = ReplicaState.FAILED
        replica.cause = cause
        replica.log_tail = log_tail
        replica.epoch += 1
        if replica.ready_after is not None or replica.deaths:
            self._died(replica, Death(cause, log_tail))
        replica.stage = replica.state.value
        return [DropWork(replica.name, cause), Announce(replica.pool)]

    def _died(self, replica: Replica, death: Death) -> None:
        """It was ready once: it is started again, unless that was done often enough."""
        replica.deaths = (*replica.deaths, death)
        allowed = self.restarts(replica)
        if len(replica.deaths) > allowed:
            replica.cause = all_causes(replica.deaths)
            return
        replica.state = ReplicaState.RESTARTING
        wait = BACK_OFF[min(len(replica.deaths), len(BACK_OFF)) - 1]
        replica.restart_at = self._now + wait

    def _registered(
        self, replica: Replica, address: str, now: float
    ) -> list[Instruction]:
        if replica.ended:
            raise Refused(f"{replica.name} is {replica.state.value}")
        # A replica that registers while READY did not receive our reply: its old work is void all the same.
        dropped: list[Instruction] = (
            [DropWork(replica.name, "registered again")]
            if replica.state in BEATING
            else []
        )
        if replica.state is not ReplicaState.DRAINING:
            replica.state = ReplicaState.READY
            replica.stage = "ready"
        replica.cause = ""
        replica.awaited = False
        replica.address = address
        replica.last_beat = now
        replica.ready_since = now
        replica.exit_by = 0.0
        replica.epoch += 1
        if replica.ready_after is None:
            replica.ready_after = now - replica.started
        return [*dropped, Announce(replica.pool)]

    def _restart(self, pool: PoolState, name: str, now: float) -> list[Instruction]:
        replica = pool.replicas.get(name)
        if replica is None:
            raise Refused(
                f"pool {pool.spec.pool!r} has no replica {name!r}; it has: {', '.join(pool.replicas)}"
            )
        self._check_open(pool)
        if replica.state not in RESTARTABLE:
            raise Refused(
                f"{name} is {replica.state.value}: only a replica that failed can be restarted"
            )
        return self._start_again(pool, replica, now)

    def _start_again(
        self,
        pool: PoolState,
        replica: Replica,
        now: float,
        deaths: tuple[Death, ...] = (),
    ) -> list[Instruction]:
        """A new process in place of one that died. `deaths`: those that still count."""
        fresh = Replica(
            replica.name,
            replica.pool,
            replica.index,
            started=now,
            epoch=replica.epoch,
            cause=deaths[-1].cause if deaths else "",
            place=replica.place,
            run=replica.epoch,
            deaths=deaths,
            restarts=replica.restarts + 1,
        )
        return [self._start(pool, fresh), Announce(replica.pool)]

    def _close(self, pool: PoolState) -> list[Instruction]:
        if pool.closed:
            return []
        pool.closed = True
        out: list[Instruction] = []
        for replica in pool.replicas.values():
            # already dropped when the pool was scaled down
            if replica.state is ReplicaState.CLOSED:
                continue
            if replica.state is not ReplicaState.FAILED:
                replica.state = ReplicaState.CLOSED
                replica.stage = "closed"
            replica.epoch += 1
            out += [
                DropWork(replica.name, "the pool was closed"),
                EndProcess(replica.name),
            ]
        self.pools[pool.spec.pool] = self.pools.pop(pool.spec.pool)
        return [*out, Announce(pool.spec.pool)]

    def _forget_oldest(self) -> list[Instruction]:
        """Of the closed pools, those beyond KEPT_CLOSED."""
        closed = [name for name, pool in self.pools.items() if pool.closed]
        return [
            instruction
            for name in closed[:-KEPT_CLOSED]
            for instruction in self._forget_pool(name)
        ]

    def _end(self, reason: str) -> list[Instruction]:
        if self.ending:
            return []
        self.ending = True
        out = [
            instruction
            for pool in list(self.pools.values())
            for instruction in self._close(pool)
        ]
        return [*out, EndLab(reason)]

    def _lost(self, replica: Replica, cause: str) -> list[Instruction]:
        if replica.state is ReplicaState.DRAINING:
            return self._close_replica(replica, f"{cause} while draining")
        replica.state = ReplicaState.LOST
        replica.stage = "lost"
        replica.cause = cause
        replica.epoch += 1
        return [DropWork(replica.name, cause), Announce(replica.pool)]

    def _exclude_own_pause(self, now: float) -> None:
        """Leave out the time in which this process was stopped: no beat and no holder could reach it."""
        ticked = self._ticked
        self._ticked = now
        if ticked is None:
            return
        late = lambda since: max(
            0.0, now - max(since, ticked) - max(self.beat, MAX_TICK_SECONDS)
        )
        for replica in self.replicas():
            if replica.last_beat is not None:
                replica.last_beat += late(replica.last_beat)
        if self.unheld_since is not None:
            self.unheld_since += late(self.unheld_since)

    def _tick(self, now: float) -> list[Instruction]:
        self._exclude_own_pause(now)
        out: list[Instruction] = []
        for replica in self.replicas():
            if replica.state in BEATING and replica.last_beat is not None:
                silent = now - replica.last_beat
                if silent > self.beat * self.missed_beats:
                    out += self._lost(replica, f"no heartbeat for {silent:.1f} s")
        if (
            not self.detached
            and self.unheld_since is not None
            and now - self.unheld_since >= self.lease
        ):
            out += self._end(f"nobody held the lab for {self.lease:g} s")
        return [*out, *self._keep_size(now)]

    def _keep_size(self, now: float) -> list[Instruction]:
        """Start replicas again whose back-off is over; give those that served well their tries back."""
        out: list[Instruction] = []
        for replica in list(self.replicas()):
            if replica.state is ReplicaState.RESTARTING and now >= replica.restart_at:
                pool = self.pool(replica.pool)
                out += self._start_again(pool, replica, now, replica.deaths)
            if replica.exit_by and now >= replica.exit_by:
                replica.exit_by = 0.0
                out.append(Announce(replica.pool))
            served = replica.state is ReplicaState.READY and replica.deaths
            if served and now - replica.ready_since >= WELL_SECONDS:
                replica.deaths = ()
                out.append(Announce(replica.pool))
        return out


def all_causes(deaths: tuple[Death, ...]) -> str:
    """Why a replica is not started again: the last reason, and those before it.

    >>> all_causes((Death("out of memory"),))
    'out of memory'
    >>> all_causes((Death("SIGKILL"), Death("SIGKILL"), Death("out of memory")))
    'out of memory (it was restarted 2 times before, after: SIGKILL, 2 times)'
    """
    *earlier, last = deaths
    if not earlier:
        return last.cause
    counts = Counter(death.cause for death in earlier)
    each = [
        cause if count == 1 else f"{cause}, {count} times"
        for cause, count in counts.items()
    ]
    times = "once" if len(earlier) == 1 else f"{len(earlier)} times"
    return f"{last.cause} (it was restarted {times} before, after: {'; '.join(each)})"
