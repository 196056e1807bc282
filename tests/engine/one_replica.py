"""A link's stream to a gateway with one replica: what the gateway makes of orders, without its processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import BackgroundLoop, LinkStream
from jvlab.wire._sync_words import STAGE_AFTER, Phase, failure_code

Run = Callable[[pb.RolloutSyncRequest], Awaitable[pb.RolloutSyncReply]]


class OneReplica(LinkStream):
    """One order after the other; a sync that fails is abandoned before that is told."""

    def __init__(self, run: Run, loop: asyncio.AbstractEventLoop, link: str) -> None:
        """`run` is called on the replica's `loop`."""
        client: Any = SimpleNamespace(loop=BackgroundLoop(), owed=set(), address="here")
        super().__init__(client)
        self._call = SimpleNamespace(cancel=lambda: None, done=lambda: False)
        self._replica = (run, loop, link)
        self._turn = asyncio.Lock()
        self.asked: list[list[int]] = []

    async def _run(self, **of_request: Any) -> pb.ReplicaOutcome:
        run, loop, link = self._replica
        request = pb.RolloutSyncRequest(epoch=7, link=link, **of_request)
        self.asked.append(list(request.phases))
        future = asyncio.run_coroutine_threadsafe(run(request), loop)  # type: ignore[arg-type]
        return (await asyncio.wrap_future(future)).outcome

    async def _exchange(self, order: pb.LinkOrder) -> pb.LinkReply:
        steps = order.steps
        async with self._turn:
            outcome = await self._run(
                phases=steps.phases,
                terms=steps.terms if steps.HasField("terms") else None,
                seconds=order.seconds,
                digests=next(iter(steps.digests), None),
                nonfinite=steps.nonfinite,
                call=steps.call,
            )
            reply = pb.LinkReply(number=order.number, state="idle", outcomes=[outcome])
            if not outcome.failed:
                reply.state = STAGE_AFTER[Phase(steps.phases[-1])].value
                return reply
            after = await self._run(phases=[pb.ABANDON], seconds=30.0)
        reply.code = failure_code(outcome.kind, bool(outcome.differing))
        where = f"at replica {outcome.replica} in {outcome.failed}"
        reply.error = f"{reply.code} {where}: {outcome.error}"
        reply.outcomes[0].state = after.state
        reply.outcomes[0].version = after.version
        return reply

    def end(self) -> None:
        self._client.loop.stop()
