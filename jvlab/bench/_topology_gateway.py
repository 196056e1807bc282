"""The gateway part of `jvlab bench topology`: how fast it routes, with simulated replicas that reply at once.

    this process ──Generate──▶ gateway (its own process) ──Generate──▶ simulated replicas (one process)

Everything but the engines is real: gRPC, tokens, registration, a heartbeat per replica and second, one connection to
each replica. Each number of replicas gets a fresh gateway. The floor is a bare grpc.aio server in the gateway's place,
which passes each call on to the next replica in turn, and does nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from jvlab._errors import ControlError
from jvlab._files import Plain
from jvlab.bench._side import Lines, Side
from jvlab.gateway import _registry as reg
from jvlab.gateway._gateway import Gateway
from jvlab.gateway._serve import GatewayOptions, serve
from jvlab.wire import _security as security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc

POOL = "sim"
# of the row with most replicas
LAST = ("routes_per_s", "route_p99_ms", "floor_routes_per_s", "floor_p99_ms")
START_SECONDS = 120.0
CALL_SECONDS = 600.0
WARM = 1000
FACTS = pb.EngineFacts(
    vllm_version="0",
    vllm_build="simulated",
    dtype="float32",
    max_model_len=1024,
    max_num_seqs=256,
    vocab_size=1000,
    logprobs_mode="processed_logprobs",
    sampling_names=["max_tokens"],
    has_tokenizer=False,
)


def run_bench_gateway(
    replicas: Sequence[int] | None = None, requests: int = 10_000
) -> Plain:
    """`jvlab bench gateway`: prints a line for each number of replicas, and returns everything.

    routes_per_s, route_p99_ms   for the largest number of replicas, with `concurrency` requests in flight
    floor_routes_per_s, floor_p99_ms  the same requests through a bare server of grpc.aio
    rows                         per number of replicas: also one call with all requests as its prompts
                                 (`batch_routes_per_s`)
    """
    concurrency = min(64, max(1, requests // 16))
    rows = asyncio.run(_measure(replicas or (1, 10, 100, 1000), requests, concurrency))
    for row in rows:
        print(
            f"{row['replicas']:4} simulated replicas: {row['routes_per_s']:5.0f} requests/s, p99 "
            f"{row['route_p99_ms']:.1f} ms; "
            f"bare grpc.aio {row['floor_routes_per_s']:.0f} requests/s, p99 {row['floor_p99_ms']:.1f} ms"
        )
    return {
        **{name: rows[-1][name] for name in LAST},
        "requests": requests,
        "concurrency": concurrency,
        "rows": rows,
    }


async def _measure(
    counts: Sequence[int], requests: int, concurrency: int
) -> list[Plain]:
    rows = []
    warm = min(WARM, requests)
    for count in counts:
        token = security.new_token()
        metadata = security.authorization(token)
        with (
            tempfile.TemporaryDirectory(prefix="jvlab-bench-") as folder,
            contextlib.ExitStack() as ends,
        ):
            order = {"folder": folder, "token": token, "count": count}
            gateway = ends.enter_context(Side(f"{__name__}:gateway_side", order))
            address = gateway.receive()
            order["gateway"] = address
            channel = grpc.aio.insecure_channel(address, options=security.options())
            async with channel:
                stub = rpc.LabStub(channel)
                await _launch(stub, metadata, count)
                simulated = ends.enter_context(Side(f"{__name__}:replicas_side", order))
                order["ports"] = simulated.receive()
                await _wait_ready(stub, metadata, count)
                ask = _asker(stub, metadata)
                # the first requests open the connections
                await _load(ask, warm, concurrency)
                many = await _load(ask, requests, concurrency)
                batch = await _batch(stub, metadata, requests)
                await _check(stub, metadata, count, warm + 2 * requests)
                floor = await _floor(order, metadata, requests, concurrency)
        rows.append(
            {
                "replicas": count,
                "routes_per_s": many["per_s"],
                "route_p99_ms": many["p99_ms"],
                "batch_routes_per_s": batch,
                "floor_routes_per_s": floor["per_s"],
                "floor_p99_ms": floor["p99_ms"],
            }
        )
    return rows


# Requests -----------------------------------------------------------------------------------------------------------


async def _launch(stub: rpc.LabStub, metadata: Any, count: int) -> None:
    order = pb.LaunchRequest(
        pool=POOL,
        model="simulated",
        replicas=count,
        tensor_parallel=1,
        load="dummy",
        device="cpu",
        engine_json="{}",
        env_json="{}",
    )
    await stub.Launch(order, timeout=START_SECONDS, metadata=metadata)


async def _wait_ready(stub: rpc.LabStub, metadata: Any, count: int) -> None:
    """Wait until every simulated replica has registered."""
    watched = stub.Watch(
        pb.PoolRequest(pool=POOL), timeout=START_SECONDS, metadata=metadata
    )
    async for status in watched:
        if all(replica.state == pb.READY for replica in status.replicas):
            watched.cancel()
            return
    raise ControlError(
        f"the pool of {count} simulated replicas ended before all had registered"
    )


async def _check(stub: rpc.LabStub, metadata: Any, count: int, requests: int) -> None:
    """Check that every request reached a replica once, and none is still counted as in flight."""
    status = await stub.Describe(
        pb.DescribeRequest(), timeout=START_SECONDS, metadata=metadata
    )
    replicas = status.pools[0].replicas
    served = sum(r.served for r in replicas)
    left = sum(r.routed for r in replicas)
    if (len(replicas), served, left) != (count, requests, 0):
        raise ControlError(
            f"{len(replicas)} replicas served {served} of {requests} requests, {left} are in flight"
        )


def _asker(stub: rpc.LabStub, metadata: Any) -> Callable[[int], Awaitable[None]]:
    """A function that makes one single-sample request through the gateway."""

    async def ask(number: int) -> None:
        start = pb.GenerateStart(
            pool=POOL, prompts=[_prompt(number)], n=1, sampling_json="{}"
        )
        call = stub.Generate(
            iter([pb.GenerateCall(start=start)]),
            timeout=CALL_SECONDS,
            metadata=metadata,
        )
        samples = [sample async for event in call for sample in event.samples]
        if len(samples) != 1 or samples[0].error:
            raise ControlError(f"request {number} came back as {samples}")

    return ask


def _prompt(number: int) -> pb.Prompt:
    return pb.Prompt(tokens=pb.TokenIds(ids=[number % 1000] * 32))


async def _load(
    ask: Callable[[int], Awaitable[None]], requests: int, concurrency: int
) -> dict[str, float]:
    """Make `requests` requests, `concurrency` at a time."""
    numbers = iter(range(requests))
    seconds = []

    async def worker() -> None:
        for number in numbers:
            began = time.perf_counter()
            await ask(number)
            seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    total = time.perf_counter() - began
    seconds.sort()
    return {
        "per_s": requests / total,
        "p99_ms": 1e3 * seconds[min(len(seconds) - 1, len(seconds) * 99 // 100)],
    }


async def _batch(stub: rpc.LabStub, metadata: Any, requests: int) -> float:
    """Prompts routed per second with all of them in one call, as a trainer does."""
    start = pb.GenerateStart(
        pool=POOL, prompts=map(_prompt, range(requests)), n=1, sampling_json="{}"
    )
    began = time.perf_counter()
    arrived = 0
    call = stub.Generate(
        iter([pb.GenerateCall(start=start)]), timeout=CALL_SECONDS, metadata=metadata
    )
    async for event in call:
        arrived += sum(not sample.error for sample in event.samples)
    if arrived != requests:
        raise ControlError(f"{arrived} of {requests} prompts came back")
    return requests / (time.perf_counter() - began)


async def _floor(
    order: Plain, metadata: Any, requests: int, concurrency: int
) -> dict[str, float]:
    """The same requests over as many hops, through a bare server instead of a gateway."""
    with Side(f"{__name__}:bare_side", order) as bare:
        address = bare.receive()
        async with grpc.aio.insecure_channel(
            address, options=security.options()
        ) as channel:
            ask = _asker(rpc.LabStub(channel), metadata)
            await _load(ask, min(WARM, requests), concurrency)
            return await _load(ask, requests, concurrency)


# The other processes ------------------------------------------------------------------------------------------------


def gateway_side(order: Plain, lines: Lines) -> None:
    """A gateway that starts no processes; says where it listens."""

    async def run() -> None:
        options = GatewayOptions(lease=3600.0, missed_beats=30)
        folder = Path(order["folder"])
        serving = asyncio.ensure_future(
            serve(folder, "bench", order["token"], options, make=SimulatedGateway)
        )
        while not (folder / "lab.json").exists() and not serving.done():
            await asyncio.sleep(0.02)
        if not serving.done():
            lines.send(json.loads((folder / "lab.json").read_text())["address"])
        await serving

    asyncio.run(run())


class SimulatedGateway(Gateway):
    """A gateway that starts no processes: its replicas register by themselves."""

    async def _start_process(self, replica: str, spec: reg.PoolSpec) -> None:
        self.handle(reg.ProcessStarted(replica, 0))


class SimulatedReplica(rpc.RolloutServicer):
    """Replies at once."""

    async def Generate(
        self, request: pb.RolloutRequest, context: Any
    ) -> AsyncIterator[pb.SampleBatch]:
        for work in request.work:
            samples = [
                pb.Sample(
                    prompt_index=work.prompt_index,
                    sample_index=part,
                    token_ids=[1],
                    logprobs=[-1.0],
                    finish_reason="length",
                    versions=[pb.VersionSpan(version=0, start=0, stop=1)],
                )
                for part in work.sample_indexes
            ]
            yield pb.SampleBatch(samples=samples)


def bare_side(order: Plain, lines: Lines) -> None:
    """The floor: a server that passes calls on; says where it listens."""
    asyncio.run(_pass_on(order, lines))


async def _pass_on(order: Plain, lines: Lines) -> None:
    metadata = security.authorization(order["token"])
    addresses = [f"127.0.0.1:{port}" for port in order["ports"]]
    channels = [
        grpc.aio.insecure_channel(address, options=security.options())
        for address in addresses
    ]
    stubs = itertools.cycle(map(rpc.RolloutStub, channels))

    class Bare(rpc.LabServicer):
        async def Generate(
            self, calls: AsyncIterator[pb.GenerateCall], context: Any
        ) -> AsyncIterator[pb.GenerateEvent]:
            start = (await anext(aiter(calls))).start
            work = [pb.PromptWork(prompt=start.prompts[0], sample_indexes=[0])]
            request = pb.RolloutRequest(epoch=1, work=work, sampling_json="{}")
            passed = next(stubs).Generate(
                request, timeout=CALL_SECONDS, metadata=metadata
            )
            async for batch in passed:
                yield pb.GenerateEvent(samples=batch.samples)

    server = grpc.aio.server(options=security.options())
    rpc.add_LabServicer_to_server(Bare(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    lines.send(f"127.0.0.1:{port}")
    await server.wait_for_termination()


def replicas_side(order: Plain, lines: Lines) -> None:
    """Simulated replicas, each on its own port, registered and sending heartbeats; says the ports."""
    asyncio.run(_simulate(order["token"], order["gateway"], order["count"], lines))


async def _simulate(token: str, gateway: str, count: int, lines: Lines) -> None:
    server = grpc.aio.server(
        interceptors=[security.TokenInterceptor(token)], options=security.options()
    )
    rpc.add_RolloutServicer_to_server(SimulatedReplica(), server)
    ports = [server.add_insecure_port("127.0.0.1:0") for _ in range(count)]
    await server.start()
    metadata = security.authorization(token)
    stats = pb.ReplicaStats()
    lines.send(ports)
    async with grpc.aio.insecure_channel(
        gateway, options=security.options()
    ) as channel:
        stub = rpc.RegistryStub(channel)

        async def live(number: int) -> None:
            name = f"{POOL}/{number}"
            address = f"127.0.0.1:{ports[number]}"
            hello = pb.RegisterRequest(
                replica=name, address=address, facts=FACTS, stats=stats
            )
            reply = await stub.Register(hello, timeout=START_SECONDS, metadata=metadata)
            # as if started at different times
            await asyncio.sleep(reply.beat_seconds * number / count)
            while True:
                beat = pb.BeatRequest(replica=name, epoch=reply.epoch, stats=stats)
                if (
                    await stub.Beat(beat, timeout=START_SECONDS, metadata=metadata)
                ).fenced:
                    raise ControlError(
                        f"{name} was fenced: the gateway received no heartbeat in time"
                    )
                await asyncio.sleep(reply.beat_seconds)

        await asyncio.gather(*(live(number) for number in range(count)))
