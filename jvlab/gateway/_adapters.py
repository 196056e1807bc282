"""LoRA adapters of a gateway's pools: loaded on all replicas or on none, and loaded later by replicas that come later.

A new version is loaded beside the old one. Only when every replica has it do new requests name it, and only then is the
old one dropped, which each replica does when its last request with it has ended. So a request has one adapter version
from its first token to its last.
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

DROP_SECONDS = 30.0


class Adapters:
    """Which adapters each pool has, and at which version."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._known: dict[str, dict[str, pb.Adapter]] = {}
        self._one_at_a_time = asyncio.Lock()

    def find(self, pool: str, name: str) -> pb.Adapter | None:
        """What a request that names this adapter computes with."""
        if not name:
            return None
        known = self._known.get(pool, {})
        if name not in known:
            have = ", ".join(sorted(known)) or "none"
            text = f"{pool} has no adapter {name!r}; it has: {have}"
            raise SamplingError(text, remedy="pool.load_adapter(name, ...) loads one")
        return known[name]

    async def set(self, call: pb.AdapterCall, timeout: float) -> None:
        """Load or forget one; a load that fails anywhere is undone everywhere."""
        check_name("adapter", call.adapter.name)
        async with self._one_at_a_time:
            replicas = self._gateway.ready(call.pool)
            known = self._known.setdefault(call.pool, {})
            before = known.get(call.adapter.name)
            if call.unload:
                self.find(call.pool, call.adapter.name)  # or an error that lists what there is
                assert before is not None
                del known[call.adapter.name]
                await self._tell(replicas, before, True, DROP_SECONDS)
                return
            if before is not None and call.adapter.version <= before.version:
                raise SamplingError(
                    f"adapter {before.name!r} is at version {before.version}; {call.adapter.version} is not newer",
                    remedy=f"pass {before.version + 1} or above, or no version",
                )
            failed = await self._tell(replicas, call.adapter, False, timeout)
            if failed:
                await self._tell(replicas, call.adapter, True, DROP_SECONDS)
                raise failed[0]
            known[call.adapter.name] = call.adapter
            if before is not None:
                await self._tell(replicas, before, True, DROP_SECONDS)

    async def _tell(
        self, replicas: list[reg.Replica], adapter: pb.Adapter, unload: bool, timeout: float
    ) -> list[JvlabError]:
        """One order to all; the failures. A replica that is lost meanwhile holds nothing, so that is none."""
        answers = await asyncio.gather(
            *(self._tell_one(replica, adapter, unload, timeout) for replica in replicas), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, JvlabError):
                raise answer
        return [a for a in answers if isinstance(a, JvlabError) and status_of(a) is not grpc.StatusCode.UNAVAILABLE]

    async def _tell_one(self, replica: reg.Replica, adapter: pb.Adapter, unload: bool, timeout: float) -> None:
        order = pb.RolloutAdapterRequest(epoch=replica.epoch, adapter=adapter, unload=unload)
        gateway = self._gateway
        call = gateway.stub(replica.name).SetAdapter(order, timeout=timeout, metadata=gateway.metadata())
        with gateway.watched(replica.name, call):
            await call
