"""The protocol of a weight sync, for trainer, gateway and engine: phases, their order, stages, options, codes.

    direct:  idle ─PREPARE▶ prepared ─HALT▶ halted ─MOVE▶ moving ─VERIFY▶ verified ─COMMIT▶ committed ─GO_ON▶ idle
    staged:  idle ─PREPARE▶ prepared ─MOVE▶ moving ─VERIFY▶ verified ─HALT▶ halted ─COMMIT▶ committed ─GO_ON▶ idle

ABANDON leads from any stage to idle. No I/O and no gRPC here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

from jvlab import _errors as errors
from jvlab.wire import jvlab_pb2 as pb


class Phase(IntEnum):
    """The steps of a sync, numbered as in jvlab.proto; OPEN and CLOSE open and close a link on a replica."""

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

    @property
    def word(self) -> str:
        """Its name in messages, reports and timings."""
        return self.name.lower()


class Stage(Enum):
    """The stage of a transaction."""

    IDLE = "idle"
    PREPARED = "prepared"
    HALTED = "halted"
    MOVING = "moving"
    VERIFIED = "verified"
    COMMITTED = "committed"


Phases = tuple[Phase, ...]
# seconds a reply may arrive after its order's deadline; above CLEANUP_GRACE of gateway/_link_service.py
GRACE = 1.5

_P = Phase
ORDER: dict[str, Phases] = {
    "direct": (_P.PREPARE, _P.HALT, _P.MOVE, _P.VERIFY, _P.COMMIT, _P.GO_ON),
    "staged": (_P.PREPARE, _P.MOVE, _P.VERIFY, _P.HALT, _P.COMMIT, _P.GO_ON),
}
# then the buckets are sent
BEFORE_BYTES = {
    mode: order[: order.index(_P.MOVE) + 1] for mode, order in ORDER.items()
}
AFTER_VERIFY = {
    mode: order[order.index(_P.VERIFY) + 1 :] for mode, order in ORDER.items()
}
STAGE_AFTER = {
    _P.PREPARE: Stage.PREPARED,
    _P.HALT: Stage.HALTED,
    _P.MOVE: Stage.MOVING,
    _P.VERIFY: Stage.VERIFIED,
    _P.COMMIT: Stage.COMMITTED,
    _P.GO_ON: Stage.IDLE,
    _P.ABANDON: Stage.IDLE,
}
NEXT = {  # (mode, stage) → the phase that may follow
    (mode, before): phase
    for mode, order in ORDER.items()
    for before, phase in zip(
        [Stage.IDLE, *(STAGE_AFTER[p] for p in order)], order, strict=False
    )
}
CHOICES = {
    "mode": tuple(ORDER),
    "verify": ("full", "sampled", "off"),
    "require": ("all", "any"),
    "pause": ("keep", "wait", "abort"),
    "kv": ("keep", "recompute"),
    "nonfinite": ("refuse", "allow"),
    "delta": ("auto", "always", "never"),
}
OURS = ("nonfinite", "delta")  # options that only the trainer uses
# Reply codes with an error class of their own; "refused", "lost" and "failed" are plain SyncErrors.
CODE_ERRORS: dict[str, type[errors.SyncError]] = {
    "busy": errors.LinkBusy,
    "mismatch": errors.VerifyError,
    "transport": errors.TransportError,
    "deadline": errors.SyncDeadline,
}
_CODES = {
    "VerifyError": "mismatch",
    "TransportError": "transport",
    "DeadlineExceeded": "deadline",
}


def failure_code(error_name: str, differing: bool) -> str:
    """The code of a phase that failed with this error on a replica."""
    return "mismatch" if differing else _CODES.get(error_name, "failed")


@dataclass(frozen=True)
class Terms:
    """The options of one sync; `Link.sync` documents them. `read` and `message` convert from and to SyncTerms."""

    version: int = 0  # 0: not chosen yet
    mode: str = "direct"
    verify: str = "full"
    require: str = "all"
    pause: str = "keep"
    kv: str = "keep"
    bucket_seconds: float = 30.0  # how long a receiver waits for the next bucket
    nonfinite: str = "refuse"  # NaN and Inf; only the trainer uses it
    replicas: tuple[str, ...] = ()  # the participants; empty: all
    stepped: bool = False  # in steps of a user's
    delta: str = "never"  # whether only what changed is sent; only the trainer uses it
    # what sparse buckets are changes to, and the name of what this sync leaves
    base: str = ""
    mark: str = ""

    @classmethod
    def read(cls, message: Any) -> Terms:
        """From a SyncTerms; an omitted option has its default."""
        names = ("mode", "verify", "require", "pause", "kv", "bucket_seconds")
        names += ("base", "mark")
        given = {name: value for name in names if (value := getattr(message, name))}
        return cls(
            message.version,
            **given,
            replicas=tuple(message.replicas),
            stepped=message.stepped,
        )

    def message(self) -> pb.SyncTerms:
        return pb.SyncTerms(
            **{name: value for name, value in vars(self).items() if name not in OURS}
        )

    def problem(self) -> tuple[str, str] | None:
        """(what is wrong, what to do) if an option is invalid."""
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                words = ", ".join(map(repr, known))
                return f"{name}={value!r} must be one of {words}", "pass one of them"
        if self.bucket_seconds <= 0:
            return f"bucket_seconds={self.bucket_seconds:g}", "a time above 0"
        return None

    def check(self) -> Terms:
        """Itself; raises ConfigError if an option is invalid."""
        if found := self.problem():
            raise errors.ConfigError(found[0], remedy=found[1])
        return self


def for_workers(terms: Terms | pb.SyncTerms) -> dict[str, Any]:
    """The terms that workers need, as plain values."""
    return {
        "version": terms.version,
        "mode": terms.mode,
        "verify": terms.verify,
        "bucket_seconds": terms.bucket_seconds,
        "base": terms.base,
        "mark": terms.mark,
    }
