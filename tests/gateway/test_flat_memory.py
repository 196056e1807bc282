"""A gateway that runs for long: a hundred thousand requests and a thousand pools leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from jvlab.bench import _topology_gateway as bench
from jvlab.bench._side import Side
from jvlab.wire import _security as security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
SIDE = "jvlab.bench._topology_gateway"
GROWTH_MIB = 8.0  # a leak of 100 bytes a request would be 10


def grown(
    folder: Path,
    work: Callable[[rpc.LabStub, Any], Awaitable[None]],
    replicas: int = 0,
) -> float:
    """MiB by which a gateway grows while this work is done a second time, ten times as much."""

    async def measure() -> float:
        token = security.new_token()
        metadata = security.authorization(token)
        order = {"folder": str(folder), "token": token, "count": replicas}
        with Side(f"{SIDE}:gateway_side", order) as gateway:
            order["gateway"] = gateway.receive()
            memory = lambda: psutil.Process(gateway.pid).memory_info().rss / 2**20
            async with grpc.aio.insecure_channel(
                order["gateway"], options=security.options()
            ) as channel:
                stub = rpc.LabStub(channel)
                if not replicas:
                    return await twice(stub, metadata, memory)
                await bench._launch(stub, metadata, replicas)
                with Side(f"{SIDE}:replicas_side", order) as simulated:
                    simulated.receive()
                    await bench._wait_ready(stub, metadata, replicas)
                    return await twice(stub, metadata, memory)

    async def twice(stub: rpc.LabStub, metadata: Any, memory: Any) -> float:
        await work(stub, metadata)
        before = memory()
        for _ in range(10):
            await work(stub, metadata)
        return memory() - before

    return asyncio.run(measure())


def test_requests(tmp_path: Path):
    async def ten_thousand(stub: rpc.LabStub, metadata: Any) -> None:
        await bench._load(bench._asker(stub, metadata), 10_000, 32)

    assert grown(tmp_path, ten_thousand, replicas=2) < GROWTH_MIB


def test_pools(tmp_path: Path):
    async def a_hundred(stub: rpc.LabStub, metadata: Any) -> None:
        for _ in range(100):
            order = pb.LaunchRequest(
                model="simulated",
                replicas=2,
                tensor_parallel=1,
                load="dummy",
                device="cpu",
                engine_json="{}",
                env_json="{}",
            )
            made = await stub.Launch(order, timeout=60, metadata=metadata)
            request = pb.PoolRequest(pool=made.pool)
            await stub.ClosePool(request, timeout=60, metadata=metadata)
        status = await stub.Describe(
            pb.DescribeRequest(), timeout=60, metadata=metadata
        )
        assert len(status.pools) < 10, "closed pools are removed, but for the last"

    assert grown(tmp_path, a_hundred) < GROWTH_MIB
