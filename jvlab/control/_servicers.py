"""The gateway's two gRPC services: each method turns a message into an event or a dispatch, and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from jvlab.control import _orders
from jvlab.control import _registry as reg
from jvlab.control import jvlab_pb2 as pb
from jvlab.control import jvlab_pb2_grpc as rpc
from jvlab.control._adapters import Adapters
from jvlab.control._channels import Trust
from jvlab.control._dispatch import Dispatch, Done, Fatal, Item, Lost
from jvlab.control._gateway import Gateway
from jvlab.control._places import check_reachable
from jvlab.control._routing import POLICIES, Board, keep_home, prefix_key, unknown_policy

LONGEST = 86_400.0
PAUSES, LONGEST_PAUSE = 10.0, 1.0  # after a picture that took t seconds, none for 10 t
Context = grpc.aio.ServicerContext


def _remaining(context: Context) -> float:
    left = context.time_remaining()
    return LONGEST if left is None else max(0.0, left)


async def _refuse(context: Context, error: reg.Refused) -> Any:
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


class PoolReplicas:
    """The replicas of one pool that may be given one call's work, as a dispatcher sees them.

    `version` 0: those that hold the pool's version; else those that hold this one or a later one.
    """

    def __init__(self, gateway: Gateway, pool: str, version: int = 0) -> None:
        self._gateway, self._pool, self._version = gateway, pool, version
        self.count, self.served, self.loss = gateway.count, gateway.served, gateway.loss
        self.track, self.untrack = gateway.track, gateway.untrack

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

    def barred(self) -> str | None:
        return self._gateway.links.barred(self._pool, self._version)


class LabServicer(rpc.LabServicer):
    """What notebooks and scripts call."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.adapters = Adapters(gateway)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.LabStatus:
        return self.gateway.lab_status()

    async def Hold(self, request: pb.HoldRequest, context: Context) -> AsyncIterator[pb.HoldEvent]:
        self.gateway.handle(reg.HoldOpened(request.holder))
        try:
            sequence = 0
            while True:
                yield pb.HoldEvent(sequence=sequence)
                sequence += 1
                await asyncio.sleep(5.0)
        finally:
            self.gateway.handle(reg.HoldClosed(request.holder, time.monotonic()))

    async def Detach(self, request: pb.DetachRequest, context: Context) -> pb.Empty:
        self.gateway.handle(reg.Detached())
        return pb.Empty()

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.Empty:
        self.gateway.handle(reg.LabCloseRequested(request.reason))
        return pb.Empty()

    async def Launch(self, request: pb.LaunchRequest, context: Context) -> pb.PoolStatus:
        spec = reg.PoolSpec(
            request.pool, request.model, request.replicas, request.tensor_parallel, request.load, request.device,
            request.engine_json, request.env_json, request.routing or "least",
            place=request.place or self.gateway.place, place_json=request.place_json or "{}", http=request.http,
        )  # fmt: skip
        if spec.routing not in POLICIES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, unknown_policy(spec.routing))
        start = lambda: self.gateway.handle(reg.LaunchRequested(spec, time.monotonic()))
        try:
            if spec.http:
                await self.gateway.fronts.launch(spec, request.http_port, start)
            else:
                start()
        except reg.Refused as error:
            await _refuse(context, error)
        except Fatal as error:
            await context.abort(error.code, error.details)
        self.gateway.standstills.forget(request.pool)  # those of an older pool of this name
        return self.gateway.pool_status(request.pool)

    async def Watch(self, request: pb.PoolRequest, context: Context) -> AsyncIterator[pb.PoolStatus]:
        try:
            while True:
                change, began = self.gateway.change(request.pool), time.perf_counter()
                status = self.gateway.pool_status(request.pool)
                took = time.perf_counter() - began
                yield status
                if status.closed:
                    return
                # A thousand replicas that register are a thousand changes of a picture of a thousand: the gateway
                # has better things to do, so whoever watches sees several changes at once.
                await asyncio.sleep(min(LONGEST_PAUSE, PAUSES * took))
                await change.wait()
        except reg.Refused as error:
            await _refuse(context, error)

    async def Status(self, request: pb.PoolRequest, context: Context) -> pb.PoolStatus:
        try:
            return await _orders.fresh_status(self.gateway, request.pool)
        except reg.Refused as error:
            return await _refuse(context, error)

    async def ClosePool(self, request: pb.PoolRequest, context: Context) -> pb.Empty:
        try:
            self.gateway.handle(reg.PoolCloseRequested(request.pool))
            processes = [self.gateway.processes.get(name) for name in self.gateway.registry.pool(request.pool).replicas]
            await asyncio.gather(*(process.ended.wait() for process in processes if process is not None))
            await self.gateway.fronts.close(request.pool)
        except reg.Refused as error:
            await _refuse(context, error)
        return pb.Empty()

    async def Generate(self, request_iterator: Any, context: Context) -> AsyncIterator[pb.GenerateEvent]:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("kind") != "start":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a start")
        start: pb.GenerateStart = first.start
        if not start.prompts or start.n < 1:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no prompts, or n below 1")
        remaining, gateway = _remaining(context), self.gateway
        try:
            routing = start.routing or gateway.registry.pool(start.pool).spec.routing
        except reg.Refused as error:
            await _refuse(context, error)
            return
        if routing not in POLICIES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, unknown_policy(routing))
        if start.min_version < 0:
            text = f"min_version must not be negative, but is {start.min_version}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        try:
            adapter = self.adapters.find(start.pool, start.adapter)
        except Fatal as error:
            await context.abort(error.code, error.details)

        def open_call(name: str, items: list[Item]) -> Any:
            if (replica := gateway.registry.find(name)) is None:
                return None
            work = [
                pb.PromptWork(prompt_index=i.index, prompt=start.prompts[i.index], sample_indexes=sorted(i.parts))
                for i in items
            ]
            order = pb.RolloutRequest(
                epoch=replica.epoch, work=work, sampling_json=start.sampling_json, adapter=adapter
            )
            return gateway.stub(name).Generate(order, timeout=remaining, metadata=gateway.metadata())

        dispatch = Dispatch(
            PoolReplicas(gateway, start.pool, start.min_version), _items(start, routing), open_call,
            lambda s: (s.prompt_index, s.sample_index), lambda batch: batch.samples, start.window,
            keep_home(start.home, POLICIES[routing]),
        )  # fmt: skip

        async def take_credit() -> None:
            async for message in request_iterator:
                dispatch.credit(message.credit)

        crediting = asyncio.create_task(take_credit()) if start.window else None
        try:
            async for event in dispatch.events():
                yield _generate_event(event)
        except reg.Refused as error:
            await _refuse(context, error)
        except Fatal as error:
            await context.abort(error.code, error.details)
        finally:
            if crediting is not None:
                crediting.cancel()

    async def Score(self, request: pb.ScoreCall, context: Context) -> AsyncIterator[pb.ScoreEvent]:
        remaining, gateway = _remaining(context), self.gateway

        def open_call(name: str, items: list[Item]) -> Any:
            if (replica := gateway.registry.find(name)) is None:
                return None
            order = pb.RolloutScoreRequest(
                epoch=replica.epoch, top=request.top,
                sequences=[request.sequences[i.index] for i in items], indexes=[i.index for i in items],
            )  # fmt: skip
            return gateway.stub(name).Score(order, timeout=remaining, metadata=gateway.metadata())

        dispatch = Dispatch(
            PoolReplicas(gateway, request.pool), [Item(i, {0}) for i in range(len(request.sequences))],
            open_call, lambda scored: (scored.index, 0), lambda batch: batch.scored,
        )  # fmt: skip
        try:
            gateway.registry.pool(request.pool)
            async for event in dispatch.events():
                if isinstance(event, Done):
                    yield pb.ScoreEvent(scored=[result for result, _ in event.results])
                elif isinstance(event, Lost):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, f"sequence {event.index}: {event.reason}")
        except reg.Refused as error:
            await _refuse(context, error)
        except Fatal as error:
            await context.abort(error.code, error.details)

    async def Steer(self, request: pb.SteerCall, context: Context) -> pb.SteerReply:
        try:
            return await _orders.steer(self.gateway, request, _remaining(context))
        except reg.Refused as error:
            return await _refuse(context, error)
        except Fatal as error:
            await context.abort(error.code, error.details)
            raise AssertionError from error  # abort raises

    async def Trace(self, request: pb.TraceCall, context: Context) -> AsyncIterator[pb.TraceEvent]:
        gateway = self.gateway
        try:
            replicas = gateway.ready(request.pool)
        except reg.Refused as error:
            await _refuse(context, error)
            return
        if not replicas:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"no replica of {request.pool} is ready")
        asked = next((r for r in replicas if r.name == request.replica or not request.replica), None)
        if asked is None:
            names = ", ".join(r.name for r in replicas)
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"{request.replica!r} is not among those ready: {names}"
            )
            raise AssertionError  # abort raises
        order = pb.RolloutTraceRequest(epoch=asked.epoch, tensors=request.tensors)
        call = gateway.stub(asked.name).Trace(order, timeout=_remaining(context), metadata=gateway.metadata())
        try:
            with gateway.watched(asked.name, call):
                async for event in call:
                    yield event
        except Fatal as error:
            await context.abort(error.code, error.details)

    async def Logs(self, request: pb.LogsRequest, context: Context) -> pb.LogsReply:
        process = self.gateway.processes.get(request.replica)
        if process is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no replica is called {request.replica!r}")
            raise AssertionError  # abort raises
        return pb.LogsReply(text=process.tail(request.lines))

    async def Link(self, request_iterator: Any, context: Context) -> None:
        await self.gateway.links.link(context)

    async def Team(self, request_iterator: Any, context: Context) -> None:
        try:
            await self.gateway.teams.serve(context)
        except Fatal as error:
            await context.abort(error.code, error.details)

    async def Peek(self, request: pb.PeekCall, context: Context) -> AsyncIterator[pb.PeekEvent]:
        try:
            async for event in self.gateway.links.peek(request, _remaining(context)):
                yield event
        except reg.Refused as error:
            await _refuse(context, error)
        except Fatal as error:
            await context.abort(error.code, error.details)

    async def Restart(self, request: pb.RestartRequest, context: Context) -> pb.Empty:
        gateway = self.gateway
        try:
            gateway.restart(request.pool, request.replica)
        except reg.Refused as error:
            return await _refuse(context, error)
        return pb.Empty()

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.PoolStatus:
        gateway = self.gateway
        try:
            gateway.registry.pool(request.pool)
            serving = frozenset(replica.name for replica in gateway.links.serving(request.pool))
            gateway.handle(reg.ScaleRequested(request.pool, request.replicas, serving, time.monotonic()))
            return gateway.pool_status(request.pool)
        except reg.Refused as error:
            return await _refuse(context, error)

    async def SetAdapter(self, request: pb.AdapterCall, context: Context) -> pb.Empty:
        try:
            await self.adapters.set(request, _remaining(context))
        except reg.Refused as error:
            await _refuse(context, error)
        except Fatal as error:
            await context.abort(error.code, error.details)
        return pb.Empty()


def _items(start: pb.GenerateStart, routing: str) -> list[Item]:
    """One item a prompt, with the key of its beginning where that decides."""
    keys = [_key(prompt) for prompt in start.prompts] if routing == "prefix" else [0] * len(start.prompts)
    return [Item(i, set(range(start.n)), key=key) for i, key in enumerate(keys)]


def _key(prompt: pb.Prompt) -> int:
    match prompt.WhichOneof("kind"):
        case "tokens":
            return prefix_key(prompt.tokens.ids)
        case "chat_json":
            return prefix_key(prompt.chat_json)
        case "parts" if prompt.parts.parts:
            return _key(prompt.parts.parts[0])
        case _:
            return prefix_key(prompt.text)


def _generate_event(event: Done | Lost | str) -> pb.GenerateEvent:
    match event:
        case Done(results):
            for sample, retried in results:
                sample.retried = retried
            return pb.GenerateEvent(samples=[sample for sample, _ in results])
        case Lost(index, parts, reason):
            lost = [
                pb.Sample(prompt_index=index, sample_index=part, finish_reason="error", error=reason) for part in parts
            ]
            return pb.GenerateEvent(samples=lost)
        case note:
            return pb.GenerateEvent(notes=[note])


class RegistryServicer(rpc.RegistryServicer):
    """What replicas call."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterReply:
        gateway = self.gateway
        try:
            check_reachable(request.address, request.tls_pem)
            gateway.trust[request.replica] = Trust(request.tls_pem, request.tls_name)
            gateway.facts[request.replica] = request.facts
            gateway.handle(reg.Registered(request.replica, request.address, time.monotonic()))
        except reg.Refused as error:
            return await _refuse(context, error)
        replica = gateway.registry.replica(request.replica)
        gateway.links.joined(replica, request.stats)
        return pb.RegisterReply(epoch=replica.epoch, beat_seconds=gateway.registry.beat)

    async def Beat(self, request: pb.BeatRequest, context: Context) -> pb.BeatReply:
        try:
            self.gateway.handle(reg.Beaten(request.replica, request.epoch, time.monotonic()))
        except reg.Refused:
            return pb.BeatReply(fenced=True)
        self.gateway.stats[request.replica] = request.stats
        self.gateway.links.told(self.gateway.registry.replica(request.replica), request.stats)
        return pb.BeatReply(fenced=False)

    async def Join(self, request_iterator: Any, context: Context) -> AsyncIterator[pb.JoinOrder]:
        try:
            async for order in self.gateway.agents.join(aiter(request_iterator)):
                yield order
        except reg.Refused as error:
            await _refuse(context, error)
