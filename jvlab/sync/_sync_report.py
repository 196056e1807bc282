"""`SyncReport`, the result of a sync, and `CheckReport`, the result of a check of live memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jvlab import _faces


@dataclass(frozen=True)
class Outcome:
    """One replica after a sync or a check."""

    replica: str
    state: str  # "committed", "old", "dirty" or "lost"
    version: int
    bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    differing: tuple[str, ...] = ()
    # parameter counts, see `SyncReport.evidence`
    evidence: Mapping[str, int] = field(default_factory=dict)
    # layer -> seconds, see `SyncReport.reloaded`
    reloaded: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SyncReport:
    """One committed version: what moved, how long each part took, what each replica holds now.

    Parts overlap, so they add up to more than `total`: pack, move (first byte sent until the last one is in the
    engine's memory), scatter and digest (of the slowest rank), repack, pause (generation was paused), total.

    >>> report = link.sync(policy.params)
    >>> [outcome.state for outcome in report.outcomes], report.seconds["total"] > 0
    (['committed'], True)
    """

    version: int
    bytes: int
    seconds: Mapping[str, float]
    outcomes: tuple[Outcome, ...]
    # (parameter, rank) -> digest
    digests: Mapping[tuple[str, int], int] = field(repr=False, default_factory=dict)
    verify: str = "full"
    mode: str = "direct"
    transport: str = "shm"
    buckets: int = 0
    notes: tuple[str, ...] = ()
    # leaves with NaN or Inf, sent because of nonfinite="allow"
    nonfinite: tuple[str, ...] = ()
    # part -> start, stop in seconds
    spans: Mapping[str, tuple[float, float]] = field(repr=False, default_factory=dict)
    # or "checked by value", "checked by function", "unchecked: <why>"; see `link.meaning`. With "at version 1": these
    # values were not compared, but those of version 1; with "except for 5 leaves": those could not be told apart
    meaning: str = "unchecked"

    @property
    def verified(self) -> bool:
        """Were the digests of all parameters equal on every replica that committed?

        This shows that the bits arrived; whether they mean the same on both sides is in `meaning`.
        """
        return self.verify == "full" and bool(self.outcomes)

    @property
    def evidence(self) -> dict[str, int]:
        """Number of parameters by how their arrival is known, over all replicas and ranks; empty without verification.

        live         the digest is of the memory that the engine computes with
        read back    vLLM keeps it packed; the digest is of the unpacked values
        sampled      vLLM's kernel keeps it packed: some columns were read back, and its product with a vector equals
                     that of the weights that arrived, up to rounding; `link.verify()` reads more
        loader       passed to vLLM's own loader; the digest is of what was passed
        reloaded     processed by vLLM's own reload (see `reloaded`); the digest is of what that was given
        unread       packed in a format that can't be read; the digest is of what arrived

        >>> sorted(link.sync(policy.params).evidence)
        ['live', 'sampled']
        """
        return _sum(o.evidence for o in self.outcomes)

    @property
    def reloaded(self) -> dict[str, float]:
        """Layers that jvlab has no format for, and the seconds that vLLM's own reload took for each (slowest replica).

        `link.mapping.notes` says why for each of their parameters.

        >>> link.sync(policy.params).reloaded
        {}
        """
        slowest: dict[str, float] = {}
        for o in self.outcomes:
            for layer, seconds in o.reloaded.items():
                slowest[layer] = max(seconds, slowest.get(layer, 0.0))
        return dict(sorted(slowest.items()))

    @property
    def gbps(self) -> float:
        """Gigabytes per second during the move."""
        return (
            self.bytes / self.seconds["move"] / 1e9 if self.seconds.get("move") else 0.0
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything but the digests as plain values."""
        plain = asdict(self)
        del plain["digests"]
        return {
            **plain,
            "verified": self.verified,
            "notes": list(self.notes),
            "seconds": dict(self.seconds),
        }

    def __repr__(self) -> str:
        return _faces.draw(self, "text")

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


@dataclass(frozen=True)
class CheckReport:
    """Digests of live memory compared with the expected ones; true if all are equal.

    >>> report = link.verify()
    >>> bool(report), report.differing
    (True, ())
    """

    version: int
    outcomes: tuple[Outcome, ...]
    digests: Mapping[tuple[str, int], int] = field(repr=False, default_factory=dict)
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def evidence(self) -> dict[str, int]:
        """Number of parameters by how their digests were obtained; see `SyncReport.evidence`."""
        return _sum(o.evidence for o in self.outcomes)

    @property
    def ok(self) -> bool:
        """Did every replica reply with the expected digests? This is about bits, not their meaning."""
        return bool(self.outcomes) and not any(
            o.differing or o.error for o in self.outcomes
        )

    @property
    def differing(self) -> tuple[str, ...]:
        """What differs, as "replica: parameter (rank)"."""
        return tuple(
            f"{o.replica}: {name}" for o in self.outcomes for name in o.differing
        )

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return _faces.draw(self, "text")

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(sorted(total.items()))
