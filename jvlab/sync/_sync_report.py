"""What a sync did: `SyncReport`, and what a check of live memory found: `CheckReport`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


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
    evidence: Mapping[str, int] = field(default_factory=dict)  # parameters by how they are known to have arrived


@dataclass(frozen=True)
class SyncReport:
    """One committed version: what moved, how long each part took, what each replica holds now.

    Parts overlap, so they add up to more than `total`: pack, move (first byte sent until the last one lies in the
    engine's memory), scatter and digest (the slowest rank's), repack, pause (generation stood still), total.

    >>> report = link.sync(policy.params)
    >>> [outcome.state for outcome in report.outcomes], report.seconds["total"] > 0
    (['committed'], True)
    """

    version: int
    bytes: int
    seconds: Mapping[str, float]
    outcomes: tuple[Outcome, ...]
    digests: Mapping[tuple[str, int], int] = field(repr=False, default_factory=dict)  # (parameter, rank) -> digest
    verify: str = "full"
    mode: str = "direct"
    transport: str = "shm"
    buckets: int = 0
    notes: tuple[str, ...] = ()
    nonfinite: tuple[str, ...] = ()  # leaves with NaN or Inf, where nonfinite="allow" let them through
    meaning: str = (
        "unchecked"  # or "checked by value", "checked by function", "unchecked: " and why; see `link.meaning`
    )

    @property
    def verified(self) -> bool:
        """Did every replica that committed hold the trainer's bits, in all parameters: were all digests equal?

        It says that the bits arrived. Whether they mean the same on both sides is in `meaning`.
        """
        return self.verify == "full" and bool(self.outcomes)

    @property
    def evidence(self) -> dict[str, int]:
        """Parameters by how they are known to have arrived, over all replicas and ranks; empty without verification.

        live         the digest is of the memory that the engine computes with
        read back    vLLM keeps it packed; it was put in order again, and the digest is of that
        sampled      vLLM's kernel keeps it packed: some columns were read back, and the product of all with a vector
                     is that of the weights that arrived, to rounding; `link.verify()` reads more
        loader       handed whole to vLLM's own loader; the digest is of what was handed over
        unread       packed in a way that can't be read; the digest is of what arrived

        >>> sorted(link.sync(policy.params).evidence)
        ['live', 'sampled']
        """
        return _sum(o.evidence for o in self.outcomes)

    @property
    def gbps(self) -> float:
        """Gigabytes per second of the move."""
        return self.bytes / self.seconds["move"] / 1e9 if self.seconds.get("move") else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything but the digests as plain values."""
        plain = asdict(self)
        del plain["digests"]
        return {**plain, "verified": self.verified, "notes": list(self.notes), "seconds": dict(self.seconds)}

    def __repr__(self) -> str:
        from jvlab.views._sync_view import sync_line

        return sync_line(self)

    def _repr_html_(self) -> str:
        from jvlab.views._sync_view import sync_html

        return sync_html(self)


@dataclass(frozen=True)
class CheckReport:
    """Digests of live memory against those that were expected; true if all are equal.

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
        """Parameters by how their digests were had; the words are `SyncReport.evidence`'s."""
        return _sum(o.evidence for o in self.outcomes)

    @property
    def ok(self) -> bool:
        """Every replica answered, and its digests are those that were expected: the bits, not their meaning."""
        return bool(self.outcomes) and not any(o.differing or o.error for o in self.outcomes)

    @property
    def differing(self) -> tuple[str, ...]:
        """ "replica: parameter (rank)" of everything that differs."""
        return tuple(f"{o.replica}: {name}" for o in self.outcomes for name in o.differing)

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        from jvlab.views._sync_view import check_line

        return check_line(self)

    def _repr_html_(self) -> str:
        from jvlab.views._sync_view import check_html

        return check_html(self)


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(sorted(total.items()))
