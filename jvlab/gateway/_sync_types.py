"""The sync state machine's events, instructions and records."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from jvlab.wire._sync_words import Phases, Stage, Terms


class Standing(Enum):
    """Whether a replica may be given work."""

    SERVING = "serving"
    SYNCING = "syncing"  # a sync in progress will make it serve: wait
    DIRTY = "dirty"
    STALE = "stale"


# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicaJoined:
    """A replica registered, and reports what it holds."""

    replica: str
    version: int
    dirty: bool


@dataclass(frozen=True)
class ReplicaReported:
    """What a registered replica reports on its own, not in reply to an order."""

    replica: str
    version: int
    dirty: bool = False


@dataclass(frozen=True)
class Left:
    """A replica is gone."""

    replica: str
    reason: str


@dataclass(frozen=True)
class Opened:
    """A trainer asks for the pool, or its holder adds replicas that joined later."""

    link: str
    holder: str
    number: int
    replicas: tuple[str, ...]
    lease: float
    now: float


@dataclass(frozen=True)
class Ordered:
    """Phases, in order. `digests` names the replicas whose expected digests were sent along."""

    link: str
    number: int
    phases: Phases
    now: float
    terms: Terms | None = None
    digests: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Answered:
    """The result of one Send. `kind`: "ok", "failed", "mismatch", "transport", "deadline" or "lost"."""

    ticket: int
    kind: str
    now: float
    failed: str = ""  # the phase, in lower case, where known
    error: str = ""
    state: str = ""  # as the replica reports it
    version: int = -1


@dataclass(frozen=True)
class Ended:
    """The trainer's stream has ended."""

    link: str
    now: float


@dataclass(frozen=True)
class SyncTick:
    now: float


SyncEvent = (
    ReplicaJoined
    | ReplicaReported
    | Left
    | Opened
    | Ordered
    | Answered
    | Ended
    | SyncTick
)


# Instructions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Order these phases from this replica; `cleanup`: under a short deadline of the gateway's own."""

    ticket: int
    replica: str
    link: str
    phases: Phases
    cleanup: bool


@dataclass(frozen=True)
class Cancel:
    """Stop waiting for this ticket's answer; it no longer counts."""

    ticket: int


@dataclass(frozen=True)
class ReplicaResult:
    """One replica after an order. `state`: "ready", "committed", "old", "stale", "dirty" or "lost"."""

    replica: str
    state: str
    version: int
    failed: str = ""
    error: str = ""


@dataclass(frozen=True)
class Reply:
    """To the trainer, for its order `number`."""

    link: str
    number: int
    stage: Stage
    code: str = ""
    error: str = ""
    remedy: str = ""
    outcomes: tuple[ReplicaResult, ...] = ()


@dataclass(frozen=True)
class AnnounceVersion:
    """Version, standing or holder changed: notify watchers and requests that wait to be routed."""


@dataclass(frozen=True)
class Release:
    """The pool is free for another trainer."""

    link: str


SyncInstruction = Send | Cancel | Reply | AnnounceVersion | Release


# Records of the state machine -----------------------------------------------------------------------------------------


@dataclass
class Member:
    """A registered replica: what it holds, as far as the gateway knows."""

    version: int
    dirty: bool = False
    unacknowledged: bool = False  # it has not acknowledged an ABANDON
    # came back to a gateway that was started again, which does not know yet what it holds
    returned: bool = False


@dataclass
class Holder:
    """The link that has the pool."""

    link: str
    name: str
    since: float
    lease: float
    last_order: float
    opened: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)  # replicas that may know this link
    ended: bool = False


@dataclass
class Work:
    """What is being done now, for an order of the trainer (`number`) or as clean-up (None)."""

    kind: str  # "open", "check", "steps", "abandon" or "close"
    number: int | None
    names: list[str]  # whose outcomes are in the reply
    # None: all participants
    todo: list[tuple[Phases, tuple[str, ...] | None]] = field(default_factory=list)
    terms: Terms | None = None
    # (code, error), where it is no replica's fault
    cause: tuple[str, str] | None = None
    current: Phases = ()
    waiting: dict[str, int] = field(default_factory=dict)  # replica → ticket
    # replica → (kind, phase, error)
    faults: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    give_up: bool = False
    abandoning: bool = False
