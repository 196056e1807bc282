"""The words of the sync state machine: phases, terms, events in, instructions out, and what it remembers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum


class Phase(IntEnum):
    """The steps of a sync, numbered as in jvlab.proto; OPEN and CLOSE make and end a link on a replica."""

    PREPARE = 1
    HALT = 2
    MOVE = 3
    VERIFY = 4
    COMMIT = 5
    GO_ON = 6
    ABANDON = 7
    CHECK = 8
    OPEN = 100
    CLOSE = 101


class Stage(Enum):
    """Where a transaction stands."""

    IDLE = "idle"
    PREPARED = "prepared"
    HALTED = "halted"
    MOVING = "moving"
    VERIFIED = "verified"
    COMMITTED = "committed"


class Standing(Enum):
    """Whether a replica may be given work."""

    SERVING = "serving"
    SYNCING = "syncing"  # a sync in progress will make it serve: wait
    DIRTY = "dirty"
    STALE = "stale"


Phases = tuple[Phase, ...]


@dataclass(frozen=True)
class Terms:
    """What one sync was asked to be; the words are those of SyncTerms."""

    version: int
    mode: str = "direct"
    verify: str = "full"
    require: str = "all"
    pause: str = "keep"
    kv: str = "keep"
    replicas: tuple[str, ...] = ()


# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    """A replica registered: what it holds, by its own word."""

    replica: str
    version: int
    dirty: bool


@dataclass(frozen=True)
class Told:
    """A registered replica committed a version, by its own word, outside of any order of ours."""

    replica: str
    version: int


@dataclass(frozen=True)
class Left:
    """A replica is no longer there."""

    replica: str
    reason: str


@dataclass(frozen=True)
class Opened:
    """A trainer asks for the pool, or its holder names replicas that came later."""

    link: str
    holder: str
    number: int
    replicas: tuple[str, ...]
    lease: float
    now: float


@dataclass(frozen=True)
class Ordered:
    """Phases, in order. `digests` names the replicas whose expected digests came along."""

    link: str
    number: int
    phases: Phases
    now: float
    terms: Terms | None = None
    digests: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Answered:
    """What became of one Send. `kind`: "ok", "failed", "mismatch", "transport", "deadline" or "lost"."""

    ticket: int
    kind: str
    now: float
    failed: str = ""  # the phase, in lower case, where known
    error: str = ""
    state: str = ""  # the replica's own word
    version: int = -1


@dataclass(frozen=True)
class Ended:
    """The trainer's stream is over, however it ended."""

    link: str
    now: float


@dataclass(frozen=True)
class Tick:
    now: float


SyncEvent = Joined | Told | Left | Opened | Ordered | Answered | Ended | Tick


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
class Outcome:
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
    outcomes: tuple[Outcome, ...] = ()


@dataclass(frozen=True)
class Announce:
    """Version, standing or holder changed: tell watchers, and whoever waits to be routed."""


@dataclass(frozen=True)
class Release:
    """The pool is free for another trainer."""

    link: str


SyncInstruction = Send | Cancel | Reply | Announce | Release


# What the machine remembers -------------------------------------------------------------------------------------------


@dataclass
class Member:
    """A registered replica: what it holds, as far as the gateway knows."""

    version: int
    dirty: bool = False
    owed: bool = False  # it has not heard yet that a sync was given up


@dataclass
class Holder:
    """The link that has the pool."""

    link: str
    name: str
    since: float
    lease: float
    heard: float
    opened: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)  # those that may know this link
    ended: bool = False


@dataclass
class Work:
    """What is being done now, for an order of the trainer (`number`) or of our own accord (None)."""

    kind: str  # "open", "check", "steps", "abandon" or "close"
    number: int | None
    names: list[str]  # whose outcomes the reply tells
    todo: list[tuple[Phases, tuple[str, ...] | None]] = field(default_factory=list)  # None: all who take part
    terms: Terms | None = None
    cause: tuple[str, str] | None = None  # (code, error), where it is no replica's fault
    current: Phases = ()
    waiting: dict[str, int] = field(default_factory=dict)  # replica → ticket
    faults: dict[str, tuple[str, str, str]] = field(default_factory=dict)  # replica → (kind, phase, error)
    give_up: bool = False
    abandoning: bool = False
