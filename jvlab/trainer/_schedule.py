"""When a group may be started and when it may be trained on, without threads, clocks or engines.

One rule covers the on-policy loop and the asynchronous one: with P groups per step and K the largest staleness, a group
may start now if

    next_version + outstanding // P − pool_version ≤ K

next_version is the version at which the next batch will be trained, outstanding counts the groups that are started and
not yet taken by a step, pool_version is the version of the engines. The left side is the staleness that the group will
have when it is trained on, if nothing is delayed. With K = 0 the loop alternates: generate a batch, train on it, sync.
K = 1 generates one batch ahead while the trainer works, K = 2 two. Groups that become staler than K are not trained on.

    start() ─▶ flying ─▶ finish() ─▶ ready ─▶ take() ─▶ trained by one step
                  └─▶ reject(): not usable          └─▶ too stale: dropped, or regenerated
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from jvlab._errors import ConfigError

ON_STALE = ("drop", "regenerate")


class FinishedGroup(Protocol):
    """A finished group: its number, and the version of its oldest token."""

    @property
    def index(self) -> int: ...
    @property
    def oldest(self) -> int: ...


G = TypeVar("G", bound=FinishedGroup)


@dataclass(frozen=True)
class Schedule:
    """How far generation may run ahead of training."""

    groups_per_step: int
    max_staleness: int = 0
    on_stale: str = "drop"  # or "regenerate": the same prompt again, with new seeds

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_staleness < 0:
            raise ConfigError(
                f"groups_per_step={self.groups_per_step}, max_staleness={self.max_staleness}",
                remedy="at least one group a step, and a staleness of 0 (on-policy) or more",
            )
        if self.on_stale not in ON_STALE:
            raise ConfigError(
                f"on_stale={self.on_stale!r}", remedy=f"one of {', '.join(ON_STALE)}"
            )

    def may_start(self, next_version: int, outstanding: int, pool_version: int) -> bool:
        """Whether a group that starts now will be fresh enough when it is trained on."""
        return (
            next_version + outstanding // self.groups_per_step - pool_version
            <= self.max_staleness
        )

    def admits(self, version: int, oldest: int) -> bool:
        """Whether a group may be trained on at this version."""
        return version - oldest <= self.max_staleness


@dataclass(frozen=True)
class Ticket:
    """Permission to generate one group: `index` selects prompt and seeds, `attempt` other seeds for the same prompt."""

    index: int
    attempt: int = 0


class Flow(Generic[G]):
    """Tracks every group through the states in the module's diagram."""

    def __init__(
        self,
        schedule: Schedule,
        version: int,
        position: int = 0,
        pending: tuple[Ticket, ...] = (),
    ) -> None:
        self.schedule = schedule
        self.next_version = version
        # nothing may start before the first sync
        self.pool_version = version - schedule.max_staleness - 1
        self.position = position  # number of the next new group
        self.flying: dict[int, Ticket] = {}
        self.ready: dict[int, G] = {}
        self._attempts: dict[int, int] = {}
        self._retries: deque[Ticket] = deque(pending)
        self.dropped = self.regenerated = self.lost = 0  # groups, since the run began

    @property
    def outstanding(self) -> int:
        """Groups that are started and not yet taken."""
        return len(self.flying) + len(self.ready)

    @property
    def pending(self) -> tuple[Ticket, ...]:
        """What must be regenerated if the process ends now: everything outstanding, and queued retries."""
        ready = [Ticket(i, self._attempts[i]) for i in self.ready]
        return tuple(
            sorted(
                [*self.flying.values(), *ready, *self._retries], key=lambda t: t.index
            )
        )

    def limit(self, max_staleness: int) -> None:
        """Change the staleness bound."""
        self.schedule = replace(self.schedule, max_staleness=max_staleness)

    def start(self, remaining: int | None = None) -> Ticket | None:
        """A group to start now, or None. `remaining`: the most groups that the rest of the run will take."""
        if remaining is not None and self.outstanding >= remaining:
            return None
        if not self.schedule.may_start(
            self.next_version, self.outstanding, self.pool_version
        ):
            return None
        if self._retries:
            ticket = self._retries.popleft()
        else:
            ticket = Ticket(self.position)
            self.position = self.position + 1
        self.flying[ticket.index] = ticket
        return ticket

    def finish(self, group: G) -> None:
        """A group is complete, rewards included."""
        self._attempts[group.index] = self.flying.pop(group.index).attempt
        self.ready[group.index] = group

    def reject(self, index: int) -> None:
        """A group cannot be trained on: no reward, or no learning signal. Another takes its place."""
        del self.flying[index]
        self.lost += 1

    def remove_stale(self) -> list[G]:
        """Remove and return the groups that are too stale for the next step."""
        stale = [
            g
            for g in self.ready.values()
            if not self.schedule.admits(self.next_version, g.oldest)
        ]
        for group in stale:
            del self.ready[group.index]
            attempt = self._attempts.pop(group.index)
            if self.schedule.on_stale == "regenerate":
                self._retries.append(Ticket(group.index, attempt + 1))
                self.regenerated += 1
            else:
                self.dropped += 1
        return stale

    def take(self) -> list[G] | None:
        """The groups of one step, lowest numbers first, or None if there are too few. Call `remove_stale` first."""
        chosen = sorted(self.ready)[: self.schedule.groups_per_step]
        if len(chosen) < self.schedule.groups_per_step:
            return None
        self.next_version += 1
        for index in chosen:
            del self._attempts[index]
        return [self.ready.pop(index) for index in chosen]

    def synced(self, version: int) -> None:
        """The engines hold `version`; the next batch is trained at it or, if a step is in progress, at a later one."""
        self.pool_version = version
        self.next_version = max(self.next_version, version)
