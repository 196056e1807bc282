"""The registry's types: replicas and pools, events and instructions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from jvlab._errors import JvlabError
from jvlab.wire.processes._pool_spec import PoolSpec


class State(Enum):
    """The state of a replica."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"
    FAILED = "failed"
    CLOSED = "closed"
    DRAINING = "draining"  # finishes its requests, gets no new ones


def pool_of(replica: str) -> str:
    """The pool's name, from a replica's, which is "pool/number"."""
    return replica.rpartition("/")[0]


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
    place: str = ""  # who starts it, if not as the rest of the pool
    run: int = 0  # tells its process from every other that had its name: the epoch at which it was started

    @property
    def ended(self) -> bool:
        return self.state in (State.FAILED, State.CLOSED)


@dataclass
class PoolState:
    """One pool: its spec and its replicas."""

    spec: PoolSpec
    replicas: dict[str, Replica] = field(default_factory=dict)
    closed: bool = False
    retired: dict[str, Replica] = field(default_factory=dict)  # those that left; a name may be used again


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


Instruction = StartProcess | EndProcess | DropWork | Announce | Forget | ForgetPool | EndLab


class Refused(JvlabError):
    """The event is not allowed in this state; nothing changed."""
