"""The replicas of one pool that may be given one call's work, as a dispatcher sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jvlab._errors import EngineDirty
from jvlab.gateway._routing import Board
from jvlab.wire._rpc_errors import CallFailed

if TYPE_CHECKING:
    from jvlab.gateway._gateway import Gateway


class PoolReplicas:
    """A dispatcher's view of one pool, for one call.

    `version` 0: replicas that hold the pool's version; else those that hold this one or a later one.
    """

    def __init__(self, gateway: Gateway, pool: str, version: int = 0) -> None:
        self._gateway, self._pool, self._version = gateway, pool, version
        self.count, self.served, self.loss = gateway.count, gateway.served, gateway.loss
        self.track, self.untrack, self.failed = gateway.track, gateway.untrack, gateway.failed

    def board(self) -> Board:
        return self._gateway.loads.board(self._pool, self._version, self._names)

    def _names(self) -> list[str]:
        links = self._gateway.links
        if self._version:
            return links.holding(self._pool, self._version)
        return [replica.name for replica in links.serving(self._pool)]

    def wait_for(self, avoid: frozenset[str]) -> asyncio.Event | None:
        waits = self._gateway.links.syncing(self._pool, avoid, self._version)
        return self._gateway.change(self._pool) if waits else None

    def barred(self) -> EngineDirty | None:
        return self._gateway.links.barred(self._pool, self._version)

    def epoch(self, replica: str) -> int:
        known = self._gateway.registry.find(replica)
        return -1 if known is None else known.epoch

    def deadline_error(self, replicas: Sequence[str]) -> CallFailed:
        return self._gateway.deadline_error(self._pool, replicas)
