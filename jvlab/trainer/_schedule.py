"""When a group may be started and when it may be trained on: the schedule as data, and the flow of groups under it.

No threads, clocks or engines in here. One rule makes the on-policy loop and the asynchronous one: with P groups a step
and K the largest staleness, a group may start now if

    next_version + outstanding // P − pool_version ≤ K

next_version is the version that the next batch will be trained at, outstanding counts the groups that are started and
not yet taken by a step, pool_version is what the engines hold. The left side is how stale the group will be when its
turn comes, if nothing is slow. K = 0 leaves: generate a batch, train on it, sync, start again. K = 1 generates one
batch ahead while the trainer works, K = 2 two. What turns out staler than K all the same is not trained on.

    start() ─▶ flying ─▶ finish() ─▶ ready ─▶ take() ─▶ trained by one step
                  └─▶ lose(): nothing usable        └─▶ too stale: dropped, or started again
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from jvlab._errors import ConfigError

ON_STALE = ("drop", "regenerate")


class Aged(Protocol):
    """A finished group: its number, and the version of its oldest token."""

    @property
    def index(self) -> int: ...
    @property
    def oldest(self) -> int: ...


G = TypeVar("G", bound=Aged)


@dataclass(frozen=True)
class Schedule:
    """How far generation may run ahead of training."""

    groups_per_step: int
    max_staleness: int = 0
    on_stale: str = "drop"  # or "regenerate": the same prompt once more, with new seeds

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_staleness < 0:
            raise ConfigError(
                f"groups_per_step={self.groups_per_step}, max_staleness={self.max_staleness}",
                remedy="at least one group a step, and a staleness of 0 (on-policy) or more",
            )
        if self.on_stale not in ON_STALE:
            raise ConfigError(f"on_stale={self.on_stale!r}", remedy=f"one of {', '.join(ON_STALE)}")

    def may_start(self, next_version: int, outstanding: int, pool_version: int) -> bool:
        """Whether a group that starts now will be fresh enough when its turn comes."""
        return next_version + outstanding // self.groups_per_step - pool_version <= self.max_staleness

    def admits(self, version: int, oldest: int) -> bool:
        """Whether a group may be trained on at this version."""
        return version - oldest <= self.max_staleness


@dataclass(frozen=True)
class Ticket:
    """Leave to make one group: its number chooses prompt and seeds, `attempt` other seeds for the same prompt."""

    index: int
    attempt: int = 0


class Flow(Generic[G]):
    """Where every group is. Events go in by method, what to do comes back; see the module's picture."""

    def __init__(self, schedule: Schedule, version: int, position: int = 0, pending: tuple[Ticket, ...] = ()) -> None:
        self.schedule = schedule
        self.next_version, self.pool_version = version, version - schedule.max_staleness - 1  # nothing before a sync
        self.position = position  # the next new group
        self.flying: dict[int, Ticket] = {}
        self.ready: dict[int, G] = {}
        self._attempts: dict[int, int] = {}
        self._again: deque[Ticket] = deque(pending)
        self.dropped = self.regenerated = self.lost = 0  # groups, since the run began

    @property
    def outstanding(self) -> int:
        """Groups that are started and not taken."""
        return len(self.flying) + len(self.ready)

    @property
    def pending(self) -> tuple[Ticket, ...]:
        """What has to be made again if the process ends now: everything outstanding, and what waits for its turn."""
        ready = [Ticket(i, self._attempts[i]) for i in self.ready]
        return tuple(sorted([*self.flying.values(), *ready, *self._again], key=lambda t: t.index))

    def limit(self, max_staleness: int) -> None:
        """Another bound from now on."""
        self.schedule = replace(self.schedule, max_staleness=max_staleness)

    def start(self, wanted: int | None = None) -> Ticket | None:
        """A group to start now, or None. `wanted`: groups that the rest of the run will take at most."""
        if wanted is not None and self.outstanding >= wanted:
            return None
        if not self.schedule.may_start(self.next_version, self.outstanding, self.pool_version):
            return None
        if self._again:
            ticket = self._again.popleft()
        else:
            ticket, self.position = Ticket(self.position), self.position + 1
        self.flying[ticket.index] = ticket
        return ticket

    def finish(self, group: G) -> None:
        """A group is complete, rewards included."""
        self._attempts[group.index] = self.flying.pop(group.index).attempt
        self.ready[group.index] = group

    def lose(self, index: int) -> None:
        """A group came to nothing: no reward, or nothing to learn from it. Another takes its place."""
        del self.flying[index]
        self.lost += 1

    def stale(self) -> list[G]:
        """Remove what is too old for the next step, and say what it was."""
        old = [g for g in self.ready.values() if not self.schedule.admits(self.next_version, g.oldest)]
        for group in old:
            del self.ready[group.index]
            attempt = self._attempts.pop(group.index)
            if self.schedule.on_stale == "regenerate":
                self._again.append(Ticket(group.index, attempt + 1))
                self.regenerated += 1
            else:
                self.dropped += 1
        return old

    def take(self) -> list[G] | None:
        """The groups of one step, lowest numbers first, or None if there are not enough. Call `stale` before."""
        chosen = sorted(self.ready)[: self.schedule.groups_per_step]
        if len(chosen) < self.schedule.groups_per_step:
            return None
        self.next_version += 1
        for index in chosen:
            del self._attempts[index]
        return [self.ready.pop(index) for index in chosen]

    def synced(self, version: int) -> None:
        """The engines hold `version`; the trainer's next batch is trained at it or, if a step is under way, later."""
        self.pool_version = version
        self.next_version = max(self.next_version, version)
