"""One pool's weight syncs as a transaction: a state machine without I/O. Events in, instructions out.

    direct   idle ─PREPARE─▶ prepared ─HALT─▶ halted ─MOVE─▶ moving ─VERIFY─▶ verified ─COMMIT─▶ committed ─GO_ON─▶ idle
    staged   idle ─PREPARE─▶ prepared ─MOVE─▶ moving ─VERIFY─▶ verified ─HALT─▶ halted ─COMMIT─▶ committed ─GO_ON─▶ idle
    any stage ──ABANDON, a failure, a replica lost, the lease over, the trainer's stream ended──▶ idle

One replica, in the outcomes of an order:

    ready ──COMMIT answered──▶ committed        participates, no failure so far
    ready ──abandoned──▶ old                    its old version, and it serves
                    ──▶ stale                   its old version, but the pool is at another: gets no work
                    ──▶ dirty                   may hold parts of two versions (direct, from MOVE on): gets no work
    any   ──left, or can't be reached──▶ lost

Rules. At most one link holds the pool. A phase out of order is refused and changes nothing. The pool's version moves
only when a replica has answered COMMIT, and COMMIT is only sent after VERIFY. With require="all" one replica's failure
before the first COMMIT was sent abandons the sync on all; from then on, and with require="any", only on that replica.
A replica that does not acknowledge ABANDON, or left during a sync and came back, is dirty; ABANDON is sent again,
at ticks and at the next open or PREPARE, until it reports what it holds. A replica is dirty from the moment MOVE is
sent, not from its answer: bytes may arrive in between. A call that may commit is never cancelled, not even when the
trainer is gone: its answer says which version is served.
A gateway that was started again knows the pool's version and no sync: whoever comes back is sent ABANDON, and says in
answer what it holds. If that is clean and newer than the pool's version, the pool has it: only a COMMIT makes it so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jvlab.gateway import _sync_types as sync
from jvlab.gateway._sync_types import Holder, Member, Ordered, Standing, Work
from jvlab.wire._sync_words import NEXT, STAGE_AFTER, Phase, Phases, Stage, Terms

# Which orders a sync allows, and which phases share one call: pure functions.


def segments(phases: Phases, terms: Terms, count: int) -> list[Phases]:
    """The phases in groups of one call each, with a barrier between two groups.

    A barrier costs a round trip, so there are few: no replica commits before all have matched, none becomes dirty
    before all are ready to move, and where HALT may take long ("wait") none commits before all have halted.
    """
    if count < 2 or terms.require == "any":
        return [phases]
    before = {Phase.MOVE} if terms.mode == "direct" else {Phase.HALT}
    if terms.mode == "direct" or terms.pause == "wait":
        before.add(Phase.COMMIT)
    out: list[list[Phase]] = [[]]
    for phase in phases:
        if phase in before and out[-1]:
            out.append([])
        out[-1].append(phase)
    return [tuple(group) for group in out]


def _out_of_order(phases: Phases, stage: Stage, terms: Terms) -> tuple[str, str] | None:
    """(what is wrong, what to do) if these phases can't follow this stage, or an option is unknown."""
    if found := terms.problem():
        return found
    for phase in phases:
        wanted = NEXT[terms.mode, stage]
        if phase is not wanted:
            return (
                f"{phase.name} while {stage.value} in {terms.mode} mode",
                f"{wanted.name} or ABANDON may follow",
            )
        stage = STAGE_AFTER[phase]
    return None


def order_problem(
    event: Ordered,
    terms: Terms | None,
    participants: set[str],
    stage: Stage,
    version: int,
    members: Mapping[str, Member],
    opened: set[str],
) -> tuple[str, str] | None:
    """(why this order is refused, what to do); None if it is allowed."""
    if not event.phases:
        return "an order without phases", "name at least one"
    if terms is None:
        return (
            f"{event.phases[0].name} while {stage.value}: no sync is open",
            "begin with PREPARE and terms",
        )
    if problem := _out_of_order(event.phases, stage, terms):
        return problem
    if Phase.PREPARE in event.phases:
        if gone := sorted(participants - set(members)):
            return (
                f"not ready: {', '.join(gone)}",
                "pool.status() says why; leave them out, or restart them",
            )
        if shut := sorted(participants - opened):
            return (
                f"the link is not open on {', '.join(shut)}",
                "open it again for them: they came later",
            )
        if not participants:
            return (
                "no replica takes part",
                "wait until one is ready and open the link on it",
            )
        # The pool's own version may be sent to named replicas that are behind it: nothing changes for the others.
        late = bool(terms.replicas) and all(
            members[name].version < version for name in participants
        )
        if terms.version < version or (terms.version == version and not late):
            error = f"version {terms.version} is not larger than the pool's, {version}"
            return error, f"use version {version + 1} or more"
        newest = max(sorted(participants), key=lambda name: members[name].version)
        if terms.version <= (held := members[newest].version):
            return (
                f"replica {newest} holds a version {held} already",
                f"use version {held + 1} or more",
            )
    if (
        Phase.VERIFY in event.phases
        and terms.verify != "off"
        and (blind := sorted(participants - event.digests))
    ):
        return (
            f"VERIFY without digests for {', '.join(blind)}",
            'send them, or sync with verify="off"',
        )
    return None


# The state of a pool's versions and of its open sync, with queries on it.


class PoolSyncState:
    """The versions of one pool and its open sync; `PoolSync` changes them."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.version = 0
        self.members: dict[str, Member] = {}
        self.holder: Holder | None = None
        self.stage = Stage.IDLE
        self.terms: Terms | None = None
        self.participants: set[str] = set()  # of the open transaction
        self._initial_participants: list[str] = []  # when it began
        self._work: Work | None = None
        # a sync that ended between two orders: the next reply reports it
        self._lapsed: Work | None = None
        self._queued: sync.Ordered | None = None  # received during clean-up
        self._tickets: dict[int, tuple[str, Phases]] = {}
        self._last_ticket = 0
        self._left_midway: set[str] = set()  # left in the middle of a sync
        self._restored: set[str] = set()  # known from a state file alone
        # ABANDONs that no work waits for: ticket → replica
        self._unacknowledged: dict[int, str] = {}
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
        if replica in self.participants or member.returned:
            return Standing.SYNCING
        return Standing.DIRTY if member.dirty else Standing.STALE

    @property
    def open(self) -> bool:
        """Whether a sync is open, or being abandoned."""
        return self.stage is not Stage.IDLE or (
            self._work is not None and self._work.kind in ("steps", "abandon")
        )

    def is_news(self, replica: str, version: int) -> bool:
        """Whether a replica's report that it committed this version is newer than what we know.

        While an order is in progress, or an ABANDON is unacknowledged, the reply to that counts instead.
        """
        return self.is_quiet(replica) and version > self.members[replica].version

    def is_quiet(self, replica: str) -> bool:
        """Whether no order is in progress there, so that its own report is the latest."""
        member = self.members.get(replica)
        return member is not None and not (
            member.unacknowledged
            or replica in self.participants
            or self._work is not None
        )

    def _snapshot(self) -> tuple[object, ...]:
        holder = self.holder
        # These four determine a standing; computing it would cost a call for each of a thousand replicas.
        now = self.version
        participants = self.participants
        standings = [
            (
                n,
                m.version,
                m.dirty,
                m.returned or (n in participants and (m.dirty or m.version != now)),
            )
            for n, m in self.members.items()
        ]
        return (
            self.version,
            self.stage,
            holder and (holder.link, holder.ended),
            standings,
        )

    def _has_committed(self, replica: str) -> bool:
        member = self.members[replica]
        return (
            self.terms is not None
            and not member.dirty
            and member.version == self.terms.version
        )

    def _outcomes(
        self, names: list[str], work: Work | None = None
    ) -> tuple[sync.ReplicaResult, ...]:
        out = []
        # p/2 before p/10
        for name in sorted(names, key=lambda name: (len(name), name)):
            kind, failed, error = (
                work.faults.get(name, ("", "", ""))
                if work is not None
                else ("", "", "")
            )
            member = self.members.get(name)
            version = (
                self._last_version.get(name, 0) if member is None else member.version
            )
            state = (
                "lost"
                if member is None or kind == "lost"
                else self._state(name, member, work)
            )
            out.append(sync.ReplicaResult(name, state, version, failed, error))
        return tuple(out)

    def _state(self, name: str, member: Member, work: Work | None) -> str:
        if name in self.participants:
            return "committed" if self._has_committed(name) else "ready"
        if member.dirty:
            return "dirty"
        if (
            work is not None
            and work.terms is not None
            and member.version == work.terms.version
        ):
            return "committed"
        if member.version != self.version:
            return "stale"
        return "ready" if work is not None and work.kind in ("open", "check") else "old"


# ----------------------------------------------------------------------------------------------------

SYNC_AGAIN = "sync again: the next commit heals every replica that it reaches"


class PoolSync(PoolSyncState):
    """Runs the syncs of one pool. Only `handle` changes its state."""

    def restore(self, version: int, replicas: Iterable[str]) -> None:
        """In a gateway that was started again: a sync may have been open on any of these. Before the first event."""
        self.version = version
        self._restored = set(replicas)
        self._left_midway = set(replicas)

    # Events -------------------------------------------------------------------------------------------------------

    def handle(self, event: sync.SyncEvent) -> list[sync.SyncInstruction]:
        """Handle one event; returns what must be done."""
        self._now = getattr(event, "now", self._now)
        match event:
            case sync.ReplicaJoined(replica, version, dirty):
                out = (
                    self._left(replica, "it registered again")
                    if replica in self.members
                    else []
                )
                # it may still be halted by a sync that has ended
                unacknowledged = replica in self._left_midway
                self._left_midway.discard(replica)
                self.members[replica] = Member(
                    version,
                    dirty or unacknowledged,
                    unacknowledged,
                    replica in self._restored,
                )
                self._restored.discard(replica)
            case sync.ReplicaReported(replica, version, dirty):
                if not dirty and self.is_news(replica, version):
                    self._holds(self.members[replica], version)
                elif self.is_quiet(replica):
                    self.members[replica].dirty = dirty
                out = []
            case sync.Left(replica, reason):
                out = self._left(replica, reason)
            case sync.Opened():
                out = self._open(event)
            case sync.Ordered():
                out = self._ordered(event)
            case sync.Answered():
                out = self._answered(event)
            case sync.Ended(link, _):
                out = (
                    self._ended()
                    if self.holder is not None and self.holder.link == link
                    else []
                )
            case sync.SyncTick(now):
                out = self._tick(now)
        before = self._announced
        self._announced = self._snapshot()
        return [*out, sync.AnnounceVersion()] if self._announced != before else out

    def _open(self, event: sync.Opened) -> list[sync.SyncInstruction]:
        holder = self.holder
        problem: tuple[str, str, str] | None = None
        if holder is not None and holder.link != event.link:
            text = f"pool {self.pool!r} is held by {holder.name}, for {event.now - holder.since:.0f} s already"
            problem = (
                "busy",
                text,
                "close that link or end that process: a pool has one trainer at a time",
            )
            if holder.ended and self._work is not None:
                who = ", ".join(self._work.waiting) or "its replicas"
                text = f"waited for {who} to let go of the link of {holder.name}, which has ended"
                problem = (
                    "deadline",
                    text,
                    "try again; pool.status() and pool.logs() say more of a silent replica",
                )
        elif self._work is not None or self.stage is not Stage.IDLE:
            problem = (
                "refused",
                f"a sync is {self.stage.value}",
                "finish or abandon it before opening again",
            )
        elif event.lease <= 0:
            problem = (
                "refused",
                f"lease_seconds must be positive, not {event.lease:g}",
                "",
            )
        elif gone := [name for name in event.replicas if name not in self.members]:
            problem = (
                "refused",
                f"not ready: {', '.join(gone)}",
                "pool.status() says why; open without them",
            )
        if problem is not None:
            return [
                sync.Reply(
                    event.link,
                    event.number,
                    self.stage,
                    *problem,
                    self._outcomes(list(self.members)),
                )
            ]
        if holder is None:
            holder = self.holder = Holder(
                event.link, event.holder, event.now, event.lease, event.now
            )
            self._lapsed = None
        holder.lease = event.lease
        holder.asked |= set(event.replicas)
        unacknowledged = tuple(
            name for name in event.replicas if self.members[name].unacknowledged
        )
        work = self._work = Work(
            "open",
            event.number,
            list(event.replicas),
            [((Phase.OPEN,), event.replicas)],
        )
        if unacknowledged:
            work.todo.append(((Phase.ABANDON,), unacknowledged))
        return self._advance()

    def _ordered(self, event: sync.Ordered) -> list[sync.SyncInstruction]:
        if self.holder is None or self.holder.link != event.link:
            return [
                sync.Reply(
                    event.link,
                    event.number,
                    self.stage,
                    "refused",
                    "the first order of a link must be open",
                )
            ]
        if self._work is not None:
            if self._work.number is None and self._queued is None:
                self._queued = event  # after our own clean-up
                return []
            return self._refusal(
                event,
                "the order before this one is still being carried out",
                "wait for its reply",
            )
        self.holder.last_order = event.now
        lapsed = self._lapsed
        self._lapsed = None
        only = event.phases[0] if len(event.phases) == 1 else None
        if only is Phase.ABANDON:
            return self._abandon(event.number)
        if only is Phase.CHECK:
            return self._check(event)
        fresh = Phase.PREPARE in event.phases
        if lapsed is not None and not fresh:
            return [self._reply(lapsed, event.number)]
        terms = event.terms if fresh else self.terms
        participants = (
            self._choose(terms) if terms is not None and fresh else self.participants
        )
        if problem := order_problem(
            event,
            terms,
            participants,
            self.stage,
            self.version,
            self.members,
            self.holder.opened,
        ):
            return self._refusal(event, *problem)
        assert terms is not None
        if fresh:
            self.terms = terms
            self.participants = set(participants)
            self._initial_participants = [
                name for name in self.members if name in participants
            ]
        work = Work("steps", event.number, self._initial_participants, terms=terms)
        work.todo = [
            (part, None)
            for part in segments(event.phases, terms, len(self.participants))
        ]
        if fresh and (
            unacknowledged := tuple(
                name
                for name in self._initial_participants
                if self.members[name].unacknowledged
            )
        ):
            work.todo.insert(0, ((Phase.ABANDON,), unacknowledged))
        return self._begin(work)

    def _check(self, event: sync.Ordered) -> list[sync.SyncInstruction]:
        assert self.holder is not None
        named = event.digests or self.holder.opened
        targets = tuple(
            name
            for name in self.members
            if name in self.holder.opened and name in named
        )
        if not targets:
            return self._refusal(
                event,
                "CHECK: the link is open on no replica that is there",
                "open the link again",
            )
        return self._begin(
            Work("check", event.number, list(targets), [((Phase.CHECK,), targets)])
        )

    def _choose(self, terms: Terms) -> set[str]:
        """The participants: the replicas named, or all; with "any" only those of them that are ready."""
        assert self.holder is not None
        wanted = set(terms.replicas) or set(self.members)
        return (
            wanted & self.holder.opened & set(self.members)
            if terms.require == "any"
            else wanted
        )

    def _refusal(
        self, event: sync.Ordered, error: str, remedy: str
    ) -> list[sync.SyncInstruction]:
        outcomes = self._outcomes(
            self._initial_participants if self.participants else list(self.members)
        )
        return [
            sync.Reply(
                event.link, event.number, self.stage, "refused", error, remedy, outcomes
            )
        ]

    # Execution -----------------------------------------------------------------------------------------------------

    def _begin(self, work: Work) -> list[sync.SyncInstruction]:
        self._work = work
        return self._advance()

    def _send(self, replica: str, phases: Phases, cleanup: bool = False) -> sync.Send:
        assert self._work is not None
        assert self.holder is not None
        self._last_ticket += 1
        self._tickets[self._last_ticket] = (replica, phases)
        self._work.waiting[replica] = self._last_ticket
        if (
            Phase.MOVE in phases
            and self.terms is not None
            and self.terms.mode == "direct"
        ):
            self.members[replica].dirty = True
        return sync.Send(self._last_ticket, replica, self.holder.link, phases, cleanup)

    def _advance(self) -> list[sync.SyncInstruction]:
        """If no answer is outstanding: send the next group of phases, abandon, or finish this work."""
        work = self._work
        holder = self.holder
        assert work is not None
        assert holder is not None
        if work.waiting:
            return []
        if work.give_up and not work.abandoning:
            work.abandoning = True
            work.todo = []
            if out := self._send_abandon(work):
                return out
        if (
            work.kind == "steps"
            and work.current
            and not work.abandoning
            and self.participants
        ):
            self._move_stage(work)
        if work.abandoning or (work.kind == "steps" and not self.participants):
            self._close_transaction()
        elif work.todo and (work.kind == "close" or not holder.ended):
            work.current, targets = work.todo.pop(0)
            names = [
                n
                for n in self.members
                if n in (self.participants if targets is None else targets)
            ]
            cleanup = work.current[0] in (Phase.ABANDON, Phase.CLOSE)
            sends: list[sync.SyncInstruction] = [
                self._send(name, work.current, cleanup) for name in names
            ]
            return sends or self._advance()
        return self._finish(work, holder)

    def _move_stage(self, work: Work) -> None:
        """The stage after the phases just done; a GO_ON that failed on a replica may be ordered again."""
        assert self.terms is not None
        for phase in work.current if work.current != (Phase.ABANDON,) else ():
            if phase is Phase.GO_ON and any(
                name in self.participants for name in work.faults
            ):
                break
            self.stage = STAGE_AFTER[phase]
        work.current = ()
        if self.stage is Stage.IDLE:
            self._close_transaction()

    def _send_abandon(self, work: Work) -> list[sync.SyncInstruction]:
        """Replicas that committed go on with the new version, the others abandon."""
        out: list[sync.SyncInstruction] = []
        for name in [n for n in self.members if n in self.participants]:
            # unreachable; sent again at the next open
            if work.faults.get(name, ("",))[0] != "lost":
                phase = Phase.GO_ON if self._has_committed(name) else Phase.ABANDON
                out.append(self._send(name, (phase,), cleanup=True))
        return out

    def _close_transaction(self) -> None:
        self.stage = Stage.IDLE
        self.terms = None
        self.participants = set()

    def _finish(self, work: Work, holder: Holder) -> list[sync.SyncInstruction]:
        """This work is done: reply, then run the queued order, or wind up an ended link."""
        self._work = None
        holder.last_order = self._now
        if work.kind == "close":
            self.holder = None
            return [sync.Release(holder.link)]
        out: list[sync.SyncInstruction] = []
        if work.number is not None:
            out.append(self._reply(work, work.number))
        elif work.faults or work.cause:
            self._lapsed = work
        queued = self._queued
        self._queued = None
        if holder.ended:
            return [*out, *self._wind_up(holder)]
        return [*out, *(self._ordered(queued) if queued is not None else [])]

    # Answers and losses ---------------------------------------------------------------------------------------------

    def _answered(self, event: sync.Answered) -> list[sync.SyncInstruction]:
        if event.ticket in self._unacknowledged:
            return self._acknowledged(self._unacknowledged.pop(event.ticket), event)
        known = self._tickets.pop(event.ticket, None)
        work = self._work
        if known is None or work is None:
            return []  # cancelled, or its replica was lost meanwhile
        replica, phases = known
        del work.waiting[replica]
        return [*self._apply_answer(work, replica, phases, event), *self._advance()]

    def _apply_answer(
        self, work: Work, replica: str, phases: Phases, event: sync.Answered
    ) -> list[sync.SyncInstruction]:
        """Apply one answer to its replica."""
        assert self.holder is not None
        member = self.members[replica]
        well = event.kind == "ok"
        if phases == (Phase.CLOSE,):
            return []
        if phases == (Phase.ABANDON,):
            return self._abandoned(work, replica, member, event)
        if phases == (Phase.OPEN,) and well:
            self.holder.opened.add(replica)
            if (
                event.state != "dirty"
                and event.version > member.version
                and not member.unacknowledged
            ):
                # of a direct sync, not yet reported by a beat
                self._holds(member, event.version)
        where = event.failed or "/".join(phase.word for phase in phases)
        names = [phase.word for phase in phases]
        done = (
            phases
            if well
            else phases[: names.index(event.failed)]
            if event.failed in names
            else ()
        )
        if Phase.COMMIT in done:
            self._committed(member)
        if well:
            return []
        unknown = event.kind == "lost" or (
            Phase.COMMIT in phases and event.failed not in names
        )
        if unknown or (work.abandoning and phases == (Phase.GO_ON,)):
            # unknown what it holds, or whether it runs, until it reports
            member.dirty = True
            member.unacknowledged = True
        return self._fault(work, replica, (event.kind, where, event.error))

    def _abandoned(
        self, work: Work, replica: str, member: Member, event: sync.Answered
    ) -> list[sync.SyncInstruction]:
        if event.kind != "ok":
            member.dirty = member.unacknowledged = True
            fault = (event.kind, "abandon", event.error)
            # of an earlier sync, resent before PREPARE
            if replica in self.participants:
                return self._fault(work, replica, fault)
            work.faults.setdefault(replica, fault)
            return []
        self._says(member, event)
        # its answer to COMMIT was late; ABANDON made it go on
        if self._has_committed(replica):
            self._committed(member)
        return []

    def _acknowledged(
        self, replica: str, event: sync.Answered
    ) -> list[sync.SyncInstruction]:
        member = self.members.get(replica)
        if (
            member is not None
            and member.unacknowledged
            and event.kind == "ok"
            and replica not in self.participants
        ):
            self._says(member, event)
        return []

    def _resend(self) -> list[sync.SyncInstruction]:
        """Send ABANDON again to those that have not acknowledged it."""
        out: list[sync.SyncInstruction] = []
        for name, member in self.members.items():
            if (
                member.unacknowledged
                and name not in self.participants
                and name not in self._unacknowledged.values()
            ):
                self._last_ticket += 1
                self._unacknowledged[self._last_ticket] = name
                link = self.holder.link if self.holder is not None else ""
                out.append(
                    sync.Send(
                        self._last_ticket, name, link, (Phase.ABANDON,), cleanup=True
                    )
                )
        return out

    def _says(self, member: Member, event: sync.Answered) -> None:
        """What it holds, in answer to an ABANDON."""
        member.dirty = event.state == "dirty"
        member.version = event.version
        if member.returned and not member.dirty:
            self.version = max(self.version, member.version)
        member.unacknowledged = member.returned = False

    def _holds(self, member: Member, version: int) -> None:
        """As the replica itself reports."""
        member.version = version
        member.dirty = False
        self.version = max(self.version, version)

    def _committed(self, member: Member) -> None:
        assert self.terms is not None
        member.version = self.terms.version
        member.dirty = False
        member.unacknowledged = False
        self.version = self.terms.version

    def _fault(
        self, work: Work, replica: str, fault: tuple[str, str, str]
    ) -> list[sync.SyncInstruction]:
        work.faults.setdefault(replica, fault)
        if work.kind != "steps" or work.abandoning or self._has_committed(replica):
            return []  # nothing to abandon: only GO_ON failed, or no sync is open
        assert self.terms is not None
        if self.terms.require == "any" or Phase.COMMIT in work.current:
            self.participants.discard(replica)
            return (
                []
                if fault[0] == "lost"
                else [self._send(replica, (Phase.ABANDON,), cleanup=True)]
            )
        work.give_up = True
        # After a failure that a replica reports, the others may finish and report too; not after a lost or silent one.
        return self._cancel_waiting(work) if fault[0] in ("lost", "deadline") else []

    def _cancel_waiting(self, work: Work) -> list[sync.SyncInstruction]:
        """Cancel the open calls, except ABANDON: it is short and must arrive."""
        cut = [
            (name, ticket)
            for name, ticket in work.waiting.items()
            if self._tickets[ticket][1] != (Phase.ABANDON,)
        ]
        for name, ticket in cut:
            del work.waiting[name], self._tickets[ticket]
        return [sync.Cancel(ticket) for _, ticket in cut]

    def _left(self, replica: str, reason: str) -> list[sync.SyncInstruction]:
        member = self.members.pop(replica, None)
        if member is None:
            return []
        self._last_version[replica] = member.version
        if member.returned:
            self._restored.add(replica)
        took_part = replica in self.participants
        work = self._work
        if (
            took_part
            or member.unacknowledged
            or (work is not None and replica in work.waiting)
        ):
            self._left_midway.add(replica)
        self.participants.discard(replica)
        if self.holder is not None:
            self.holder.opened.discard(replica)
            self.holder.asked.discard(replica)
        if work is None:
            return self._left_between_orders(replica, reason) if took_part else []
        ticket = work.waiting.pop(replica, None)
        out: list[sync.SyncInstruction] = []
        if ticket is not None:
            del self._tickets[ticket]
            out.append(sync.Cancel(ticket))
        if replica in work.names:
            phase = "/".join(phase.word for phase in work.current)
            work.faults.setdefault(replica, ("lost", phase, reason))
        if (
            work.kind == "steps"
            and took_part
            and not work.abandoning
            and self._all_or_none(work)
        ):
            work.give_up = True
            out += self._cancel_waiting(work)
        return [*out, *self._advance()]

    def _all_or_none(self, work: Work | None) -> bool:
        """Whether one replica's loss must end the sync on the others: none of them can have committed."""
        committing = self.stage is Stage.COMMITTED or (
            work is not None and Phase.COMMIT in work.current
        )
        return self.terms is not None and self.terms.require == "all" and not committing

    def _left_between_orders(
        self, replica: str, reason: str
    ) -> list[sync.SyncInstruction]:
        """A participant left while no order was in progress."""
        if self.participants and not self._all_or_none(None):
            return []  # the next reply reports it
        fault = ("lost", self.stage.value, reason)
        return self._abandon(faults={replica: fault})

    def _abandon(
        self, number: int | None = None, **why: Any
    ) -> list[sync.SyncInstruction]:
        """Begin to abandon the open sync: ordered by `number`, or for a reason."""
        who = self._initial_participants
        return self._begin(
            Work("abandon", number, who, terms=self.terms, give_up=True, **why)
        )

    # Endings --------------------------------------------------------------------------------------------------------

    def _ended(self) -> list[sync.SyncInstruction]:
        assert self.holder is not None
        self.holder.ended = True
        self._queued = None
        work = self._work
        if work is None:
            return self._wind_up(self.holder)
        if work.abandoning or Phase.COMMIT in work.current:
            return []
        out = self._cancel_waiting(work)
        work.give_up = work.kind == "steps"
        return [*out, *self._advance()]

    def _wind_up(self, holder: Holder) -> list[sync.SyncInstruction]:
        if self.stage is not Stage.IDLE:
            return self._abandon()
        targets = tuple(name for name in self.members if name in holder.asked)
        return self._begin(Work("close", None, [], [((Phase.CLOSE,), targets)]))

    def _tick(self, now: float) -> list[sync.SyncInstruction]:
        holder = self.holder
        if self._work is not None:
            return []
        if (
            holder is None
            or holder.ended
            or self.stage is Stage.IDLE
            or now - holder.last_order <= holder.lease
        ):
            return self._resend()
        text = f"no order came for {holder.lease:g} s while {self.stage.value}: the sync was abandoned"
        return self._abandon(cause=("deadline", text))

    # Replies --------------------------------------------------------------------------------------------------------

    def _reply(self, work: Work, number: int) -> sync.Reply:
        assert self.holder is not None
        outcomes = self._outcomes(work.names, work)
        code, error = work.cause or ("", "")
        well = any(o.state in ("ready", "committed") and not o.error for o in outcomes)
        lenient = (
            work.terms is not None
            and work.terms.require == "any"
            and work.kind == "steps"
            and well
        )
        if work.faults and not lenient and not code:
            name, (code, phase, why) = next(iter(work.faults.items()))
            error = f"{code} at replica {name} in {phase}" + (f": {why}" if why else "")
            if len(work.faults) > 1:
                error += f" ({len(work.faults) - 1} more failed too)"
        remedy = (
            ""
            if not code
            else SYNC_AGAIN
            if work.terms is not None
            else "look at the outcomes; pool.logs() says more"
        )
        return sync.Reply(
            self.holder.link, number, self.stage, code, error, remedy, outcomes
        )
