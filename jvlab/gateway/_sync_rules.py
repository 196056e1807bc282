"""Which orders a sync allows, and which phases share one call: pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from jvlab.gateway._sync_types import Member, Ordered
from jvlab.wire._sync_words import NEXT, STAGE_AFTER, Phase, Phases, Stage, Terms


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
            return f"{phase.name} while {stage.value} in {terms.mode} mode", f"{wanted.name} or ABANDON may follow"
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
        return f"{event.phases[0].name} while {stage.value}: no sync is open", "begin with PREPARE and terms"
    if problem := _out_of_order(event.phases, stage, terms):
        return problem
    if Phase.PREPARE in event.phases:
        if gone := sorted(participants - set(members)):
            return f"not ready: {', '.join(gone)}", "pool.status() says why; leave them out, or restart them"
        if shut := sorted(participants - opened):
            return f"the link is not open on {', '.join(shut)}", "open it again for them: they came later"
        if not participants:
            return "no replica takes part", "wait until one is ready and open the link on it"
        # The pool's own version may be sent to named replicas that are behind it: nothing changes for the others.
        late = bool(terms.replicas) and all(members[name].version < version for name in participants)
        if terms.version < version or (terms.version == version and not late):
            error = f"version {terms.version} is not larger than the pool's, {version}"
            return error, f"use version {version + 1} or more"
        newest = max(sorted(participants), key=lambda name: members[name].version)
        if terms.version <= (held := members[newest].version):
            return f"replica {newest} holds a version {held} already", f"use version {held + 1} or more"
    if Phase.VERIFY in event.phases and terms.verify != "off" and (blind := sorted(participants - event.digests)):
        return f"VERIFY without digests for {', '.join(blind)}", 'send them, or sync with verify="off"'
    return None
