"""The state of a pool's versions and of its open sync, with queries on it."""

from __future__ import annotations

from jvlab.gateway import _sync_types as sync
from jvlab.gateway._sync_types import Holder, Member, Standing, Work
from jvlab.wire._sync_words import Phases, Stage, Terms


class PoolSyncState:
    """The versions of one pool and its open sync; `PoolSync` changes them."""

    def __init__(self, pool: str) -> None:
        self.pool, self.version = pool, 0
        self.members: dict[str, Member] = {}
        self.holder: Holder | None = None
        self.stage = Stage.IDLE
        self.terms: Terms | None = None
        self.participants: set[str] = set()  # of the open transaction
        self._initial_participants: list[str] = []  # when it began
        self._work: Work | None = None
        self._lapsed: Work | None = None  # a sync that ended between two orders: the next reply reports it
        self._queued: sync.Ordered | None = None  # received during clean-up
        self._tickets: dict[int, tuple[str, Phases]] = {}
        self._last_ticket = 0
        self._left_midway: set[str] = set()  # left in the middle of a sync
        self._unacknowledged: dict[int, str] = {}  # ABANDONs that no work waits for: ticket → replica
        self._last_version: dict[str, int] = {}  # of replicas that left
        self._now = 0.0
        self._announced = self._snapshot()  # what was announced last

    # Queries ------------------------------------------------------------------------------------------------------

    def standing(self, replica: str) -> Standing:
        """Whether this registered replica may be given work."""
        member = self.members.get(replica)
        if member is None:
            return Standing.STALE
        if not member.dirty and member.version == self.version:
            return Standing.SERVING
        if replica in self.participants:
            return Standing.SYNCING
        return Standing.DIRTY if member.dirty else Standing.STALE

    @property
    def open(self) -> bool:
        """Whether a sync is open, or being abandoned."""
        return self.stage is not Stage.IDLE or (self._work is not None and self._work.kind in ("steps", "abandon"))

    def is_news(self, replica: str, version: int) -> bool:
        """Whether a replica's report that it committed this version is newer than what we know.

        While an order is in progress, or an ABANDON is unacknowledged, the reply to that counts instead.
        """
        return self.is_quiet(replica) and version > self.members[replica].version

    def is_quiet(self, replica: str) -> bool:
        """Whether no order is in progress there, so that its own report is the latest."""
        member = self.members.get(replica)
        return member is not None and not (
            member.unacknowledged or replica in self.participants or self._work is not None
        )

    def _snapshot(self) -> tuple[object, ...]:
        holder = self.holder
        # These four determine a standing; computing it would cost a call for each of a thousand replicas.
        now, participants = self.version, self.participants
        standings = [
            (n, m.version, m.dirty, n in participants and (m.dirty or m.version != now))
            for n, m in self.members.items()
        ]
        return self.version, self.stage, holder and (holder.link, holder.ended), standings

    def _has_committed(self, replica: str) -> bool:
        member = self.members[replica]
        return self.terms is not None and not member.dirty and member.version == self.terms.version

    def _outcomes(self, names: list[str], work: Work | None = None) -> tuple[sync.ReplicaResult, ...]:
        out = []
        for name in sorted(names, key=lambda name: (len(name), name)):  # p/2 before p/10
            kind, failed, error = work.faults.get(name, ("", "", "")) if work is not None else ("", "", "")
            member = self.members.get(name)
            version = self._last_version.get(name, 0) if member is None else member.version
            state = "lost" if member is None or kind == "lost" else self._state(name, member, work)
            out.append(sync.ReplicaResult(name, state, version, failed, error))
        return tuple(out)

    def _state(self, name: str, member: Member, work: Work | None) -> str:
        if name in self.participants:
            return "committed" if self._has_committed(name) else "ready"
        if member.dirty:
            return "dirty"
        if work is not None and work.terms is not None and member.version == work.terms.version:
            return "committed"
        if member.version != self.version:
            return "stale"
        return "ready" if work is not None and work.kind in ("open", "check") else "old"
