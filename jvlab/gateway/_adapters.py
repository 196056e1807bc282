"""LoRA adapters of a gateway's pools: loaded on all replicas or on none; later replicas load them on demand.

A new version is loaded beside the old one. Only when every replica has it do new requests use it and is the old one
unloaded, which each replica does when its last request with it has ended. So a request has one adapter version from its
first token to its last.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from jvlab._errors import JvlabError, SamplingError
from jvlab._names import check_name
from jvlab.gateway import _registry as reg
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._rpc_errors import status_of

if TYPE_CHECKING:
    from jvlab.gateway._gateway import Gateway

UNLOAD_SECONDS = 30.0


class Adapters:
    """Which adapters each pool has, and at which version."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._known: dict[str, dict[str, pb.Adapter]] = {}
        self._one_at_a_time = asyncio.Lock()

    def forget(self, pool: str) -> None:
        """The pool is closed; another of its name has none of its adapters."""
        self._known.pop(pool, None)

    def find(self, pool: str, name: str) -> pb.Adapter | None:
        """The adapter version for a request that names this adapter."""
        if not name:
            return None
        known = self._known.get(pool, {})
        if name not in known:
            have = ", ".join(sorted(known)) or "none"
            text = f"{pool} has no adapter {name!r}; it has: {have}"
            raise SamplingError(text, remedy="pool.load_adapter(name, ...) loads one")
        return known[name]

    async def set(self, call: pb.AdapterCall, timeout: float) -> None:
        """Load or unload one; a load that fails on any replica is undone on all."""
        check_name("adapter", call.adapter.name)
        async with self._one_at_a_time:
            replicas = self._gateway.ready(call.pool)
            known = self._known.setdefault(call.pool, {})
            before = known.get(call.adapter.name)
            if call.unload:
                self.find(call.pool, call.adapter.name)  # raises, with a list, if it is unknown
                assert before is not None
                del known[call.adapter.name]
                await self._order_all(replicas, before, True, UNLOAD_SECONDS)
                return
            if before is not None and call.adapter.version <= before.version:
                raise SamplingError(
                    f"adapter {before.name!r} is at version {before.version}; {call.adapter.version} is not newer",
                    remedy=f"pass {before.version + 1} or above, or no version",
                )
            failed = await self._order_all(replicas, call.adapter, False, timeout)
            if failed:
                await self._order_all(replicas, call.adapter, True, UNLOAD_SECONDS)
                raise failed[0]
            known[call.adapter.name] = call.adapter
            if before is not None:
                await self._order_all(replicas, before, True, UNLOAD_SECONDS)

    async def _order_all(
        self, replicas: list[reg.Replica], adapter: pb.Adapter, unload: bool, timeout: float
    ) -> list[JvlabError]:
        """Order it from all replicas; returns the failures. A replica lost meanwhile is none: it holds nothing."""
        answers = await asyncio.gather(
            *(self._order_one(replica, adapter, unload, timeout) for replica in replicas), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, JvlabError):
                raise answer
        return [a for a in answers if isinstance(a, JvlabError) and status_of(a) is not grpc.StatusCode.UNAVAILABLE]

    async def _order_one(self, replica: reg.Replica, adapter: pb.Adapter, unload: bool, timeout: float) -> None:
        order = pb.RolloutAdapterRequest(epoch=replica.epoch, adapter=adapter, unload=unload)
        gateway = self._gateway
        call = gateway.stub(replica.name).SetAdapter(order, timeout=timeout, metadata=gateway.metadata())
        with gateway.watched(replica.name, call):
            await call
