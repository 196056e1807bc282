"""Runs ahead of their weights can be compared once it is settled which weights make which group, and in what order."""

from __future__ import annotations

from typing import Any

from jvlab.trainer._schedule import Flow
from tests.waiting import until


def _in_order(flow: Flow[Any], take: Any = Flow.take) -> Any:
    lowest = sorted([*flow.flying, *flow.ready])[: flow.schedule.groups_per_step]
    return take(flow) if all(index in flow.ready for index in lowest) else None


def take_in_order() -> None:
    """Groups are trained on in the order of their numbers, not as they end."""
    Flow.take = _in_order  # type: ignore[method-assign]


def groups_before(version: int, steps: int, ahead: int, per_step: int) -> int:
    """How many groups may start before a run's sync of this version; its first is version 1."""
    return 0 if version == 1 else per_step * min(steps, version - 1 + ahead)


class Made:
    """Counts the groups that a pool has generated; whoever syncs waits for those that may start before."""

    def __init__(self, pool: Any) -> None:
        self.groups = 0
        generate = pool.agenerate

        async def counted(*args: Any, **options: Any) -> Any:
            found = await generate(*args, **options)
            self.groups += 1
            return found

        pool.agenerate = counted

    def wait(self, groups: int) -> None:
        until(lambda: self.groups >= groups, "the groups before a sync")
