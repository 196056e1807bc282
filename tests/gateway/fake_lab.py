"""A real gateway with real gRPC in this process, with fake replicas: for control-plane tests without engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from jvlab._errors import EngineDirty, SamplingError, Unsupported
from jvlab.gateway import _gateway, _serve
from jvlab.gateway import _registry as reg
from jvlab.gateway._serve import GatewayOptions
from jvlab.wire import _security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._rpc_errors import abort
from jvlab.wire._sync_words import Phase
from tests.gateway.replica_memory import Broken, Differs, ReplicaMemory

FACTS = pb.EngineFacts(
    vllm_version="0",
    vllm_build="fake",
    dtype="float32",
    max_model_len=64,
    max_num_seqs=8,
    vocab_size=100,
    logprobs_mode="processed_logprobs",
    has_tokenizer=True,
    sampling_names=["max_tokens", "temperature", "seed", "ignore_eos"],
)


class FakeReplica(rpc.RolloutServicer):
    """Returns each sample after `delay` seconds, its tokens being prompt and sample; sends heartbeats until `silent`.

    With `limit`, only that many samples finish; the others wait until the limit is None.
    """

    run = 0  # as its spec says

    def __init__(self, name: str, gateway: str, token: str) -> None:
        self.name, self.gateway, self.token = name, gateway, token
        self.delay, self.silent, self.in_beat, self.epoch = 0.0, False, False, 0
        self.refusal: SamplingError | None = None
        self.limit: int | None = None
        # how many requests are refused as dirty before one is accepted
        self.dirty_refusals = 0
        self.running = self.max_running = self.finished = self.cancelled = (
            self.fenced
        ) = 0
        self.steered: list[int] = []
        self.steer_delay = 0.0
        self.memory = ReplicaMemory()
        self.link = ""
        self.synced: list[str] = []  # the phases of each call, as one text
        self.corrupt = False  # digests differ
        self.hold_close = False
        # the phase that never ends, and the one that fails
        self.hang, self.broken = "", ""
        self.reached = asyncio.Event()  # set when `hang` is reached
        self.sync_lock = asyncio.Lock()
        self.not_halted = asyncio.Event()
        self.not_halted.set()
        # clear while its engine is frozen: heartbeats continue, calls do not return
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.paused = self.sleeping = False
        self.unable = 0  # an order that it refuses
        # if set, the engine dies at the next request, with this message
        self.engine_death = ""
        self.starting = asyncio.Lock()  # a stop meanwhile waits for it

    async def start(self) -> None:
        async with self.starting:
            self.server = grpc.aio.server(
                interceptors=[_security.TokenInterceptor(self.token)]
            )
            rpc.add_RolloutServicer_to_server(self, self.server)
            self.port = self.server.add_insecure_port("127.0.0.1:0")
            await self.server.start()
            self.channel = grpc.aio.insecure_channel(self.gateway)
            self.beating = asyncio.create_task(self.beat())

    async def register(self) -> None:
        stub = rpc.RegistryStub(self.channel)
        request = pb.RegisterRequest(
            replica=self.name,
            address=f"127.0.0.1:{self.port}",
            facts=FACTS,
            stats=self.stats(),
            run=self.run,
        )
        reply = await stub.Register(
            request, timeout=60, metadata=_security.authorization(self.token)
        )
        self.epoch, self.every = reply.epoch, reply.beat_seconds

    async def beat(self) -> None:
        await self.register()
        while True:
            await asyncio.sleep(self.every / 2)
            # its gateway died: it may be started again
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self.beat_once()

    async def beat_once(self) -> None:
        # before the look at `silent`: who sets that waits for this
        self.in_beat = True
        try:
            if self.silent:
                return
            request = pb.BeatRequest(
                replica=self.name, epoch=self.epoch, stats=self.stats()
            )
            reply = await rpc.RegistryStub(self.channel).Beat(
                request, timeout=60, metadata=_security.authorization(self.token)
            )
            if reply.fenced:
                self.fenced += 1
                self.epoch = 0
                await self.register()
        finally:
            self.in_beat = False

    async def check(self, epoch: int, context: Any) -> None:
        """As a real one does: an order may overtake the reply to its registration."""
        while self.epoch == 0:
            await asyncio.sleep(0.005)
        if epoch != self.epoch:
            text = f"epoch {epoch} is not {self.epoch}"
            await context.abort(grpc.StatusCode.ABORTED, text)

    def stats(self) -> pb.ReplicaStats:
        return pb.ReplicaStats(
            running=self.running,
            weight_version=self.memory.version,
            dirty=self.memory.dirty,
            paused=self.paused,
            sleeping=self.sleeping,
        )

    async def stop(self) -> None:
        async with self.starting:
            self.beating.cancel()
            await asyncio.gather(self.beating, return_exceptions=True)
            await self.server.stop(0)
            await self.channel.close()

    async def Generate(
        self, request: pb.RolloutRequest, context: Any
    ) -> AsyncIterator[pb.SampleBatch]:
        await self.check(request.epoch, context)
        if self.refusal:
            await abort(context, self.refusal)
        refused, self.dirty_refusals = (
            self.dirty_refusals > 0,
            max(0, self.dirty_refusals - 1),
        )
        if self.memory.dirty or refused:
            await abort(context, EngineDirty("dirty: refused by the engine"))
        if self.engine_death:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.engine_death)
        parts = [
            (work.prompt_index, sample)
            for work in request.work
            for sample in work.sample_indexes
        ]
        self.running += len(parts)
        self.max_running = max(self.max_running, self.running)
        unfinished = len(parts)
        try:
            for prompt, sample in parts:
                await asyncio.sleep(self.delay)
                while self.limit is not None and self.finished >= self.limit:
                    await asyncio.sleep(0.005)
                await self.can_generate()
                await self.not_halted.wait()
                assert self.memory.content == self.memory.version, (
                    "a mixture was served"
                )
                self.running -= 1
                unfinished -= 1
                self.finished += 1
                yield pb.SampleBatch(samples=[self.sample(prompt, sample)])
        finally:
            self.running -= unfinished
            self.cancelled += unfinished

    async def can_generate(self) -> None:
        """Wait until it is neither frozen nor paused."""
        while self.paused or not self.thawed.is_set():
            await asyncio.sleep(0.005)

    def sample(self, prompt: int, sample: int) -> pb.Sample:
        versions = [pb.VersionSpan(version=self.memory.version, start=0, stop=2)]
        return pb.Sample(
            prompt_index=prompt,
            sample_index=sample,
            text=f"{prompt}.{sample}",
            token_ids=[prompt, sample],
            logprobs=[-1.0, -2.0],
            finish_reason="stop",
            versions=versions,
            replica=self.name,
            prompt_token_ids=[7],
        )

    async def Score(
        self, request: pb.RolloutScoreRequest, context: Any
    ) -> AsyncIterator[pb.ScoreBatch]:
        if self.engine_death:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.engine_death)
        for index, sequence in zip(request.indexes, request.sequences, strict=True):
            await asyncio.sleep(self.delay)
            await self.can_generate()
            yield pb.ScoreBatch(
                scored=[
                    pb.Scored(
                        index=index,
                        logprobs=[0.0] * len(sequence.ids),
                        replica=self.name,
                    )
                ]
            )

    async def Steer(
        self, request: pb.RolloutSteerRequest, context: Any
    ) -> pb.SteerReply:
        await self.check(request.epoch, context)
        await asyncio.sleep(self.steer_delay)
        await self.thawed.wait()
        if request.order.what == self.unable:
            await abort(context, Unsupported("not this one"))
        self.steered.append(request.order.what)
        if request.order.what in (pb.PAUSE, pb.RESUME):
            self.paused = request.order.what == pb.PAUSE
        if request.order.what in (pb.SLEEP, pb.WAKE):
            self.sleeping = request.order.what == pb.SLEEP
        return pb.SteerReply(seconds=0.0)

    async def Stats(self, request: pb.EpochRequest, context: Any) -> pb.ReplicaStats:
        return self.stats()

    async def Sync(
        self, request: pb.RolloutSyncRequest, context: Any
    ) -> pb.RolloutSyncReply:
        await self.check(request.epoch, context)
        async with self.sync_lock:
            await self.thawed.wait()
            outcome = await self.sync(request)
        outcome.state, outcome.version = self.memory.state, self.memory.version
        return pb.RolloutSyncReply(outcome=outcome)

    async def sync(self, request: pb.RolloutSyncRequest) -> pb.ReplicaOutcome:
        outcome = pb.ReplicaOutcome(replica=self.name)
        names = [pb.SyncPhase.Name(phase).lower() for phase in request.phases]
        names = (
            ["open"]
            if request.HasField("open")
            else ["close"]
            if request.close
            else names
        )
        self.synced.append(" ".join(names))
        for name in names:
            try:
                if name not in ("open", "abandon") and request.link != self.link:
                    raise Broken(f"link {request.link!r} is not {self.link!r}")
                if name == self.hang:
                    self.reached.set()
                    await asyncio.sleep(600)
                while name == "close" and self.hold_close:
                    await asyncio.sleep(0.005)
                if name == self.broken:
                    raise Broken(f"{name} is broken")
                self.phase(name, request)
            except Broken as error:
                outcome.failed, outcome.error = name, str(error)
                outcome.differing.extend(
                    ["w (rank 0)"] if isinstance(error, Differs) else []
                )
                break
            outcome.seconds.append(pb.PhaseSeconds(name=name, seconds=0.001))
        (self.not_halted.clear if self.memory.halted else self.not_halted.set)()
        return outcome

    def phase(self, name: str, request: pb.RolloutSyncRequest) -> None:
        match name:
            case "open":
                self.link = request.link
                assert list(request.open.ranks_json) == [json.dumps([self.name])]
            case "close":
                self.link = ""
            case "prepare":
                self.memory.prepare(request.terms.version, request.terms.mode)
            case "verify":
                assert request.digests.replica == self.name
                self.memory.run(Phase.VERIFY, not self.corrupt)
            case _:
                self.memory.run(Phase[name.upper()])

    async def Trace(
        self, request: pb.RolloutTraceRequest, context: Any
    ) -> AsyncIterator[pb.TraceEvent]:
        await self.thawed.wait()
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "p/0 is a fake: it has no layout"
        )
        yield pb.TraceEvent()  # makes this a generator

    async def Peek(
        self, request: pb.RolloutPeekRequest, context: Any
    ) -> AsyncIterator[pb.PeekEvent]:
        await self.thawed.wait()
        for part in (self.name, request.parameter, str(request.rank)):
            yield pb.PeekEvent(piece=part.encode())


class FakeGateway(_gateway.Gateway):
    """Starts fake replicas instead of processes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fakes: dict[str, FakeReplica] = {}
        self.drained: dict[str, FakeReplica] = {}

    async def _start_process(self, replica: str, spec: reg.PoolSpec) -> None:
        self.handle(reg.ProcessStarted(replica, 1, spec.run))
        if json.loads(spec.engine_json).get("broken"):
            self.handle(
                reg.ProcessExited(replica, "ValueError: broken", "last lines", spec.run)
            )
            return
        if replica in self.fakes:  # a restart
            await self.fakes[replica].stop()
        fake = self.fakes[replica] = FakeReplica(replica, self.address, self.token)
        fake.run = spec.run
        await fake.start()

    def _end_process(self, replica: str) -> None:
        # shut_down ends the others
        if (
            replica in self.fakes
            and not self.registry.pool(reg.pool_of(replica)).closed
        ):
            self.in_background(self._end_fake(replica))

    async def _end_fake(self, replica: str) -> None:
        fake = self.fakes.pop(replica)
        self.drained[replica] = fake
        await fake.stop()
        self.handle(reg.ProcessExited(replica, "ended", "", fake.run))

    async def shut_down(self) -> None:
        for fake in list(self.fakes.values()):
            await fake.stop()
        await super().shut_down()


class FakeLab:
    """Runs a FakeGateway on an event loop in a thread, through the same `serve` as the real process."""

    def __init__(
        self,
        folder: Path,
        lease: float = 60.0,
        metrics_port: int | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.folder, self.token = folder, "secret"
        self._loop = asyncio.new_event_loop()
        self.gateway: FakeGateway

        def make(*arguments: Any) -> FakeGateway:
            self.gateway = FakeGateway(*arguments)
            return self.gateway

        async def run() -> None:
            # Heartbeats are sent every 0.1 s; a busy machine may delay them for seconds without a replica being lost.
            options = GatewayOptions(
                lease,
                0.2,
                20,
                host,
                metrics_port=metrics_port,
            )
            await _serve.serve(
                folder, "fake", self.token, options, signals=False, make=make
            )

        self.thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(run()), daemon=True
        )
        self.thread.start()
        while not (folder / "lab.json").exists():
            self.thread.join(0.01)
            assert self.thread.is_alive()
        self.address: str = json.loads((folder / "lab.json").read_text())["address"]

    @property
    def fakes(self) -> dict[str, FakeReplica]:
        return self.gateway.fakes

    @property
    def registry(self) -> reg.Registry:
        return self.gateway.registry

    def served(self, replica: str) -> int:
        """The replica's samples that have reached the gateway."""
        return self.gateway._served.get(replica, 0)

    def silence(self, replica: str) -> None:
        """Stop its heartbeats and backdate the last one, so that it is lost at once."""
        fake = self.fakes[replica]
        fake.silent = True
        deadline = time.monotonic() + 60
        while fake.in_beat:  # it would be refused, and the replica register again
            assert time.monotonic() < deadline, "a heartbeat under way did not end"
            time.sleep(0.01)

        def age() -> None:
            known = self.registry.replica(replica)
            if known.last_beat is not None:
                known.last_beat -= 1000.0

        while self.registry.replica(replica).state is not reg.ReplicaState.LOST:
            assert time.monotonic() < deadline, "the replica was not reported lost"
            self.do(age)
            time.sleep(0.02)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The gateway is frozen, as by SIGSTOP (and its replicas too: they share its event loop)."""
        thaw = threading.Event()
        self._loop.call_soon_threadsafe(thaw.wait, 120.0)
        try:
            yield
        finally:
            thaw.set()

    @contextlib.contextmanager
    def frozen_engines(self) -> Iterator[None]:
        """Replicas send heartbeats, but their engines do not reply."""
        self.do(lambda: [fake.thawed.clear() for fake in self.fakes.values()])
        try:
            yield
        finally:
            self.do(lambda: [fake.thawed.set() for fake in self.fakes.values()])

    def do(self, call: Callable[[], Any]) -> Any:
        """Run a function or coroutine on the gateway's event loop."""

        async def wrapped() -> Any:
            result = call()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(wrapped(), self._loop).result(60)

    def end(self) -> None:
        if self.thread.is_alive():
            self.do(lambda: self.gateway.handle(reg.LabCloseRequested("test over")))
            self.thread.join(60)
        assert not self.thread.is_alive()
        self._loop.close()
