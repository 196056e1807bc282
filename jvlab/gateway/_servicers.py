"""The gateway's two gRPC services: each method turns a message into an event or a dispatch, and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from jvlab._deadline import ANSWER_SECONDS
from jvlab._errors import ReplicaLost, SamplingError
from jvlab._names import LostNote, check_name
from jvlab.gateway import _registry as reg
from jvlab.gateway._dispatch import Dispatch, Done, Item, Lost
from jvlab.gateway._gateway import Gateway
from jvlab.gateway._pool_commands import PoolReplicas
from jvlab.gateway._replica_processes import ReplicaProcess, check_reachable
from jvlab.gateway._routing import (
    POLICIES,
    check_policy,
    in_turn,
    keep_home,
    prefix_key,
)
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._limits import check_given, of_prompts, read_object
from jvlab.wire._rpc_errors import LOST_REMEDY, CallFailed, refused, reports_errors

MAX_SECONDS = 86_400.0
SLACK = 2.0
# after a snapshot that took t seconds, none for 10 t
PAUSE_FACTOR = 10.0
MAX_PAUSE = 1.0
Context = grpc.aio.ServicerContext


def _remaining(context: Context) -> float:
    """Seconds we may take: the caller's deadline, less the time for an error that says what we waited for."""
    left = context.time_remaining()
    return (
        MAX_SECONDS if left is None else max(0.0, left - min(ANSWER_SECONDS, left / 2))
    )


def _relayed(method: str, order_of: Callable[[Any], Any]) -> Any:
    """A method that streams the reply of the replica that the request names; of any that is ready, if it names none."""

    async def relay(
        self: LabServicer, request: Any, context: Context
    ) -> AsyncIterator[Any]:
        asked = _ready(self.gateway.registry, request.pool, request.replica)
        order = order_of(request)
        order.epoch = asked.epoch
        calls = self.gateway.calls
        async for event in calls.stream(asked.name, method, order, _remaining(context)):
            yield event

    return relay


def _ready(registry: reg.Registry, pool: str, name: str) -> reg.Replica:
    """The ready replica of this name; any, if the name is empty."""
    ready = registry.ready(pool)
    for replica in ready:
        if name in ("", replica.name):
            return replica
    if not name:
        raise refused(f"no replica of {pool} is ready")
    names = ", ".join(r.name for r in ready) or "none"
    raise refused(f"replica {name!r} of pool {pool!r} is not ready; ready: {names}")


@reports_errors
class LabServicer(rpc.LabServicer):
    """What notebooks and scripts call."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def Describe(
        self, request: pb.DescribeRequest, context: Context
    ) -> pb.LabStatus:
        return self.gateway.lab_status()

    async def Hold(
        self, request: pb.HoldRequest, context: Context
    ) -> AsyncIterator[pb.HoldEvent]:
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

    async def Launch(
        self, request: pb.LaunchRequest, context: Context
    ) -> pb.PoolStatus:
        spec = reg.PoolSpec(
            request.pool or self.gateway.registry.free_name(),
            request.model,
            request.replicas,
            request.tensor_parallel,
            request.load,
            request.device,
            request.engine_json,
            request.env_json,
            request.routing or "least",
            place=request.place or self.gateway.place,
            place_json=request.place_json or "{}",
            http=request.http,
            limits_json=request.limits_json or "{}",
            restarts=request.restarts,
        )
        check_policy(spec.routing)
        _check_spec(spec)
        start = lambda: self.gateway.handle(reg.LaunchRequested(spec, time.monotonic()))
        if spec.http:
            await self.gateway.fronts.launch(
                spec, request.http_port, start, request.http_key
            )
        else:
            start()
        return self.gateway.pool_status(spec.pool)

    async def Watch(
        self, request: pb.PoolRequest, context: Context
    ) -> AsyncIterator[pb.PoolStatus]:
        registry = self.gateway.registry
        pool = registry.pool(request.pool)
        status = pb.PoolStatus()
        while True:
            change = self.gateway.change(request.pool)
            began = time.perf_counter()
            # closed, and another may have its name
            if registry.pools.get(request.pool) is not pool:
                status.closed = True
                yield status
                return
            status = self.gateway.pool_status(request.pool)
            took = time.perf_counter() - began
            yield status
            if status.closed:
                return
            # A thousand replicas that register would mean a thousand snapshots of a thousand replicas: several
            # changes go into one.
            await asyncio.sleep(min(MAX_PAUSE, PAUSE_FACTOR * took))
            # no deadline: a watcher waits for news, and leaves when it likes
            await change.wait()

    async def Status(self, request: pb.PoolRequest, context: Context) -> pb.PoolStatus:
        return await self.gateway.fresh_status(request.pool, _remaining(context))

    async def ClosePool(self, request: pb.PoolRequest, context: Context) -> pb.Empty:
        self.gateway.handle(reg.PoolCloseRequested(request.pool))
        names = self.gateway.registry.pool(request.pool).replicas
        ending = [
            self.gateway.processes[name]
            for name in names
            if name in self.gateway.processes
        ]
        # they close whether this call waits for it or not
        closing = self.gateway.fronts.begin_close(request.pool)
        try:
            async with asyncio.timeout(_remaining(context)):
                await asyncio.gather(
                    *(process.ended.wait() for process in ending),
                    *map(asyncio.shield, closing),
                )
        except TimeoutError:
            late = (
                ", ".join(
                    process.replica for process in ending if not process.ended.is_set()
                )
                or "its HTTP front"
            )
            raise CallFailed(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"waited for {late} to end",
                "it is still ending; pool.status() shows it",
            ) from None
        return pb.Empty()

    async def Generate(
        self, request_iterator: Any, context: Context
    ) -> AsyncIterator[pb.GenerateEvent]:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("kind") != "start":
            raise SamplingError("the first message must be a start")
        start: pb.GenerateStart = first.start
        if not start.prompts or start.n < 1:
            raise SamplingError("no prompts, or n below 1")
        remaining = _remaining(context)
        gateway = self.gateway
        pool = gateway.registry.pool(start.pool)
        routing = start.routing or pool.spec.routing
        check_policy(routing)
        if start.min_version < 0:
            raise SamplingError(
                f"min_version must not be negative, but is {start.min_version}"
            )
        policy = POLICIES[routing]
        if start.settles and routing == "least":
            policy = in_turn(pool.turn)
            pool.turn += 1
        adapter = gateway.adapters.find(start.pool, start.adapter)
        _check_limits(gateway, start)

        def order_of(epoch: int, items: list[Item]) -> pb.RolloutRequest:
            work = [
                pb.PromptWork(
                    prompt_index=i.index,
                    prompt=start.prompts[i.index],
                    sample_indexes=sorted(i.parts),
                )
                for i in items
            ]
            return pb.RolloutRequest(
                epoch=epoch,
                work=work,
                sampling_json=start.sampling_json,
                adapter=adapter,
            )

        dispatch = Dispatch(
            PoolReplicas(gateway, start.pool, start.min_version),
            _items(start, routing),
            self._opens("Generate", order_of, remaining),
            lambda s: (s.prompt_index, s.sample_index),
            lambda batch: batch.samples,
            start.window,
            keep_home(start.home, policy),
            remaining,
        )

        async def take_credit() -> None:
            async for message in request_iterator:
                dispatch.credit(message.credit)

        crediting = asyncio.create_task(take_credit()) if start.window else None
        try:
            async for event in dispatch.events():
                yield _generate_event(event)
        finally:
            if crediting is not None:
                crediting.cancel()

    def _opens(
        self, method: str, order_of: Callable[[int, list[Item]], Any], seconds: float
    ) -> Callable[[str, list[Item]], Any]:
        """How a dispatcher opens its calls."""

        def open_call(name: str, items: list[Item]) -> Any:
            replica = self.gateway.registry.find(name)
            if replica is None:
                return None
            order = order_of(replica.epoch, items)
            # This deadline only matters if the gateway dies: ours comes first, with a better error.
            return self.gateway.calls.begin(name, method, order, seconds + SLACK)

        return open_call

    async def Score(
        self, request: pb.ScoreCall, context: Context
    ) -> AsyncIterator[pb.ScoreEvent]:
        remaining = _remaining(context)
        gateway = self.gateway
        lengths = [len(sequence.ids) for sequence in request.sequences]
        gateway.limits(request.pool).check(of_prompts(lengths, 1, {"max_tokens": 1}, 0))

        def order_of(epoch: int, items: list[Item]) -> pb.RolloutScoreRequest:
            return pb.RolloutScoreRequest(
                epoch=epoch,
                top=request.top,
                sequences=[request.sequences[i.index] for i in items],
                indexes=[i.index for i in items],
            )

        dispatch = Dispatch(
            PoolReplicas(gateway, request.pool),
            [Item(i, {0}) for i in range(len(request.sequences))],
            self._opens("Score", order_of, remaining),
            lambda scored: (scored.index, 0),
            lambda batch: batch.scored,
            seconds=remaining,
        )
        notes: list[str] = []
        async for event in dispatch.events():
            if isinstance(event, Done):
                yield pb.ScoreEvent(scored=[result for result, _ in event.results])
            elif isinstance(event, Lost):
                told = ". ".join([f"sequence {event.index}: {event.reason}", *notes])
                raise ReplicaLost(told, remedy=LOST_REMEDY)
            else:
                notes.append(event)

    async def Steer(self, request: pb.SteerCall, context: Context) -> pb.SteerReply:
        return await self.gateway.steer(request, _remaining(context))

    async def Logs(self, request: pb.LogsRequest, context: Context) -> pb.LogsReply:
        known = self.gateway.registry.find(request.replica)
        process = (
            self.gateway.process_of(known)
            if known is not None
            else self.gateway.processes.get(request.replica)
        )
        # one that is not started yet has none
        if process is None and known is None:
            raise CallFailed(
                grpc.StatusCode.NOT_FOUND, f"no replica is called {request.replica!r}"
            )
        deaths = () if known is None else known.deaths
        return pb.LogsReply(text=_log_text(deaths, process, request.lines))

    async def Link(self, request_iterator: Any, context: Context) -> None:
        await self.gateway.links.link(context)

    async def Team(self, request_iterator: Any, context: Context) -> None:
        await self.gateway.teams.serve(context)

    Trace = _relayed("Trace", lambda r: pb.RolloutTraceRequest(tensors=r.tensors))
    Hidden = _relayed("Hidden", lambda r: pb.RolloutHiddenRequest(tokens=r.tokens))
    Peek = _relayed(
        "Peek",
        lambda r: pb.RolloutPeekRequest(rank=r.rank, parameter=r.parameter),
    )

    async def Restart(self, request: pb.RestartRequest, context: Context) -> pb.Empty:
        self.gateway.restart(request.pool, request.replica)
        return pb.Empty()

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.PoolStatus:
        gateway = self.gateway
        serving = frozenset(
            replica.name for replica in gateway.links.serving(request.pool)
        )
        gateway.handle(
            reg.ScaleRequested(
                request.pool, request.replicas, serving, time.monotonic()
            )
        )
        return gateway.pool_status(request.pool)

    async def SetAdapter(self, request: pb.AdapterCall, context: Context) -> pb.Empty:
        await self.gateway.adapters.set(request, _remaining(context))
        return pb.Empty()


def _log_text(
    deaths: Sequence[reg.Death], process: ReplicaProcess | None, lines: int
) -> str:
    """The last lines of a replica's log, and of the processes before it, below why those died."""
    said = [] if process is None else process.tail(lines).splitlines()
    # until it is started again, the process is the one that died last
    ended = process is not None and process.ended.is_set()
    for death in reversed(deaths[:-1] if ended else deaths):
        said = [*death.log_tail.splitlines(), f"— {death.cause} —", *said]
    count = len(deaths)
    ends = [f"death {k} of {count}: {d.cause}" for k, d in enumerate(deaths, 1)]
    return "\n".join([*ends, *said[-lines:]])


def _check_spec(spec: reg.PoolSpec) -> None:
    """Raise ConfigError for a spec with which no process could be started."""
    check_name("pool", spec.pool)
    for name in ("engine_json", "env_json", "place_json", "limits_json"):
        read_object(getattr(spec, name), name)
    check_given(read_object(spec.limits_json))


def _check_limits(gateway: Gateway, start: pb.GenerateStart) -> None:
    """Raise LimitExceeded for a call over the limits. Text prompts are counted where they are tokenised."""
    lengths = [len(prompt.tokens.ids) for prompt in start.prompts]
    sampling = read_object(start.sampling_json, "sampling_json")
    gateway.limits(start.pool).check(
        of_prompts(
            lengths, start.n, sampling, gateway.facts_of(start.pool).max_model_len
        )
    )


def _items(start: pb.GenerateStart, routing: str) -> list[Item]:
    """One item per prompt, with its prefix key if routing needs it."""
    keys = (
        [_key(prompt) for prompt in start.prompts]
        if routing == "prefix"
        else [0] * len(start.prompts)
    )
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
                pb.Sample(
                    prompt_index=index,
                    sample_index=part,
                    finish_reason="error",
                    error=reason,
                )
                for part in parts
            ]
            return pb.GenerateEvent(samples=lost)
        case LostNote():
            return pb.GenerateEvent(notes=[event], lost=event.replica)
        case note:
            return pb.GenerateEvent(notes=[note])


@reports_errors
class RegistryServicer(rpc.RegistryServicer):
    """What replicas call."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def Register(
        self, request: pb.RegisterRequest, context: Context
    ) -> pb.RegisterReply:
        gateway = self.gateway
        check_reachable(request.address, request.tls_pem)
        replica = gateway.register(request)
        return pb.RegisterReply(epoch=replica.epoch, beat_seconds=gateway.registry.beat)

    async def Beat(self, request: pb.BeatRequest, context: Context) -> pb.BeatReply:
        try:
            self.gateway.handle(
                reg.BeatReceived(request.replica, request.epoch, time.monotonic())
            )
        except reg.Refused:
            return pb.BeatReply(fenced=True)
        replica = self.gateway.registry.replica(request.replica)
        self.gateway.reported(replica, request.stats)
        return pb.BeatReply(fenced=False)

    async def Join(
        self, request_iterator: Any, context: Context
    ) -> AsyncIterator[pb.JoinOrder]:
        async for order in self.gateway.agents.join(aiter(request_iterator)):
            yield order
