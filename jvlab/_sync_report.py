"""What a sync did: `SyncReport`, and what a check of live memory found: `CheckReport`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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

    @property
    def verified(self) -> bool:
        """Did every replica that committed hold the trainer's bits, in all parameters?"""
        return self.verify == "full" and bool(self.outcomes)

    @property
    def gbps(self) -> float:
        """Gigabytes per second of the move."""
        return self.bytes / self.seconds["move"] / 1e9 if self.seconds.get("move") else 0.0

    def __repr__(self) -> str:
        from jvlab.views._sync_view import sync_line

        return sync_line(self)

    def _repr_html_(self) -> str:
        from jvlab.views._sync_view import sync_html

        return sync_html(self)


@dataclass(frozen=True)
class CheckReport:
    """What live memory was found to hold, compared with what it should; true if it holds it.

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
    def ok(self) -> bool:
        """Every replica answered, and holds what it should."""
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
