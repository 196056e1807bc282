"""The gateway process: a thin gRPC skin over the registry, plus the processes it starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import jvlab
from jvlab.control import _registry as reg
from jvlab.control import _security as security
from jvlab.control import jvlab_pb2 as pb
from jvlab.control import jvlab_pb2_grpc as rpc
from jvlab.control._channels import Trust, open_channel
from jvlab.control._dispatch import Fatal, being_cancelled
from jvlab.control._http_front import Fronts
from jvlab.control._launcher import Identity
from jvlab.control._link_service import Links
from jvlab.control._metrics_http import serve_metrics
from jvlab.control._orders import Standstills
from jvlab.control._places import Agents, JoinedProcess, ReplicaProcess, make_process
from jvlab.control._processes import GRACE_SECONDS
from jvlab.control._routing import Loads
from jvlab.control._sync_types import Standing
from jvlab.control._teams import Teams

TICK_SECONDS = 0.25
PB_STATE = {
    reg.State.STARTING: pb.STARTING, reg.State.READY: pb.READY, reg.State.LOST: pb.LOST,
    reg.State.FAILED: pb.FAILED, reg.State.CLOSED: pb.CLOSED, reg.State.DRAINING: pb.DRAINING,
}  # fmt: skip


class Gateway:
    """State, processes and open calls of one lab. The servicers call it; it owns no protocol details."""

    def __init__(self, lab: str, folder: Path, token: str, lease: float, beat: float, missed_beats: int) -> None:
        self.lab, self.folder, self.token = lab, folder, token
        self.registry = reg.Registry(lease, beat, missed_beats, time.monotonic())
        self.address = ""  # where replicas reach us; known once the server listens
        self.processes: dict[str, ReplicaProcess] = {}
        self.agents = Agents(self)
        self.place = "local"  # who starts processes, where a launch does not say
        self.places: dict[str, Callable[[str, reg.PoolSpec, int], ReplicaProcess]] = {}  # those of a cluster
        self.trust: dict[str, Trust] = {}  # replicas' certificates
        self.facts: dict[str, pb.EngineFacts] = {}
        self.stats: dict[str, pb.ReplicaStats] = {}
        self.links = Links(self)
        self.fronts, self.standstills = Fronts(self), Standstills()
        self.teams = Teams()
        self.ended = asyncio.Event()
        self.loads = Loads()
        self._served: dict[str, int] = {}
        self._revision = 0
        self._calls: dict[str, set[Any]] = {}
        self._stubs: dict[str, tuple[str, grpc.aio.Channel, rpc.RolloutStub]] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._background: set[asyncio.Task[None]] = set()

    # What the registry decides ----------------------------------------------------------------------------------

    def handle(self, event: reg.Event) -> None:
        """Give the registry an event and carry out what it says."""
        for instruction in self.registry.handle(event):
            match instruction:
                case reg.StartProcess(replica, spec):
                    self._background_task(self._start_process(replica, spec))
                case reg.EndProcess(replica):
                    self._end_process(replica)
                case reg.DropWork(replica, reason):
                    for call in list(self._calls.get(replica, ())):
                        call.cancel()
                    self.links.left(replica, reason)
                case reg.Announce(pool):
                    self.announce(pool)
                case reg.Forget(replica):
                    self._forget(replica)
                case reg.EndLab(reason):
                    print(f"gateway: ending: {reason}", flush=True)
                    self.ended.set()

    def _background_task(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _end_process(self, replica: str) -> None:
        if replica in self.processes:
            self._background_task(self.processes[replica].end(GRACE_SECONDS + 5))

    def _forget(self, replica: str) -> None:
        """What a replica left here, except its log."""
        self.loads.forget(replica)
        for known in (self.facts, self.stats, self._served, self._calls, self.trust):
            known.pop(replica, None)
        if replica in self._stubs:
            self._background_task(self._stubs.pop(replica)[1].close(None))
        process = self.processes.get(replica)
        if isinstance(process, JoinedProcess):  # whoever would start it again must not
            self._background_task(process.end(GRACE_SECONDS))

    def _idle(self, replica: str) -> bool:
        """Nothing of ours runs there, and no sync counts on it."""
        busy = self.routed(replica) or self._calls.get(replica)
        return not busy and replica not in self.links.of(reg.pool_of(replica)).machine.taking

    async def _start_process(self, replica: str, spec: reg.PoolSpec) -> None:
        try:
            process = make_process(self, replica, spec, self.registry.replica(replica).index)
        except OSError as error:
            self.handle(reg.ProcessExited(replica, str(error), ""))
            return
        if replica in self.processes:  # a restart: stages and causes are read from the log, so it begins anew
            with contextlib.suppress(FileNotFoundError):
                process.log.replace(process.log.with_name(process.log.name + ".old"))
        self.processes[replica] = process
        try:
            await process.start(
                on_pid=lambda pid: self.handle(reg.ProcessStarted(replica, pid)),
                on_exit=lambda cause, tail: self.handle(reg.ProcessExited(replica, cause, tail)),
            )
        except OSError as error:  # no process, no log file: say so instead of starting for ever
            process.ended.set()
            self.handle(reg.ProcessExited(replica, f"the rollout process could not be started: {error}", ""))
            return
        known = self.registry.find(replica)
        if known is None or known.ended:  # closed while it was starting
            await process.end(GRACE_SECONDS + 5)
        self.agents.match()

    def restart(self, pool: str, replica: str) -> None:
        """Start a replica that failed once more. Raises Refused."""
        self.handle(reg.RestartRequested(pool, replica, time.monotonic()))
        for known in (self.facts, self.stats, self.trust):
            known.pop(replica, None)

    async def tick_forever(self) -> None:
        """Missed beats, the lease, and the stages of processes that are coming up."""
        while not self.ended.is_set():
            self.handle(reg.Tick(time.monotonic()))
            self.links.tick(time.monotonic())
            for replica in list(self.registry.replicas()):
                if replica.state is reg.State.DRAINING and self._idle(replica.name):
                    self.handle(reg.Drained(replica.name))
                if replica.state is reg.State.STARTING and replica.name in self.processes:
                    self.handle(reg.StageSeen(replica.name, self.processes[replica.name].stage()))
            await asyncio.sleep(TICK_SECONDS)

    async def shut_down(self) -> None:
        """End every process and close every channel; bounded by each process's own deadline."""
        await self.fronts.shut_down()
        self.agents.dismiss()
        await asyncio.gather(*(process.end(GRACE_SECONDS + 5) for process in self.processes.values()))
        await self.links.shut_down()
        await asyncio.gather(*(channel.close(None) for _, channel, _ in self._stubs.values()))
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # What the dispatcher asks (its protocol `Replicas`) -----------------------------------------------------------

    def ready(self, pool: str) -> list[reg.Replica]:
        return [r for r in self.registry.pool(pool).replicas.values() if r.state is reg.State.READY]

    def alive(self, pool: str) -> list[reg.Replica]:
        """Those that are ready, and those that are draining: what steers the one must reach the other."""
        return [r for r in self.registry.pool(pool).replicas.values() if r.state in reg.BEATING]

    def routed(self, replica: str) -> int:
        return self.loads.of(replica)

    def count(self, replica: str, change: int) -> None:
        self.loads.count(reg.pool_of(replica), replica, change)

    def served(self, replica: str, parts: int) -> None:
        """So many parts of its work have arrived."""
        self._served[replica] = self._served.get(replica, 0) + parts
        self.count(replica, -parts)

    def track(self, replica: str, call: Any) -> None:
        self._calls.setdefault(replica, set()).add(call)

    def untrack(self, replica: str, call: Any) -> None:
        self._calls.get(replica, set()).discard(call)

    def loss(self, replica: str) -> str:
        return self.registry.cause(replica)

    @contextlib.contextmanager
    def watched(self, replica: str, call: Any) -> Iterator[None]:
        """Ends with the replica; its failures become a Fatal that says whose they are."""
        self.track(replica, call)
        try:
            yield
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise Fatal(grpc.StatusCode.UNAVAILABLE, f"replica {replica} was lost: {self.loss(replica)}") from None
        except grpc.aio.AioRpcError as error:
            details = error.details() or error.code().name
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                details = f"replica {replica} was lost: {details}"
            raise Fatal(error.code(), details) from None
        finally:
            self.untrack(replica, call)

    def stub(self, replica: str) -> rpc.RolloutStub:
        """The replica's own service, over one channel kept open."""
        address = self.registry.replica(replica).address
        known = self._stubs.get(replica)
        if known is None or known[0] != address:
            channel = open_channel(address, self.trust.get(replica, Trust()))
            known = self._stubs[replica] = (address, channel, rpc.RolloutStub(channel))
        return known[2]

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return security.authorization(self.token)

    # Pictures -----------------------------------------------------------------------------------------------------

    def change(self, pool: str) -> asyncio.Event:
        """Set at the pool's next change."""
        return self._changed.setdefault(pool, asyncio.Event())

    def announce(self, pool: str) -> None:
        """The pool's picture changed: whoever waits for that, and whoever gives out work, looks again."""
        self.loads.changed(pool)
        self.change(pool).set()
        self._changed.pop(pool, None)

    def replica_status(self, replica: reg.Replica) -> pb.ReplicaStatus:
        now = time.monotonic()
        status = pb.ReplicaStatus(
            replica=replica.name, state=PB_STATE[replica.state], stage=replica.stage, pid=replica.pid,
            seconds=replica.ready_after if replica.ready_after is not None else now - replica.started,
            epoch=replica.epoch, cause=replica.cause, log_tail=replica.log_tail, routed=self.routed(replica.name),
            beat_age=-1.0 if replica.last_beat is None else now - replica.last_beat,
            served=self._served.get(replica.name, 0),
            elsewhere=isinstance(self.processes.get(replica.name), JoinedProcess),
        )  # fmt: skip
        machine = self.links.of(replica.pool).machine
        member = machine.members.get(replica.name)
        status.version = -1 if member is None else member.version
        if member is not None:
            standing = machine.standing(replica.name)
            status.dirty, status.stale = member.dirty, standing is Standing.STALE
        if replica.name in self.facts:
            status.facts.CopyFrom(self.facts[replica.name])
        if replica.name in self.stats:
            status.stats.CopyFrom(self.stats[replica.name])
        return status

    def pool_status(self, name: str) -> pb.PoolStatus:
        pool = self.registry.pool(name)
        spec, machine = pool.spec, self.links.of(name).machine
        self._revision += 1
        return pb.PoolStatus(
            version=machine.version, sync=machine.stage.value, trainer=machine.holder.name if machine.holder else "",
            pool=name, model=spec.model, tensor_parallel=spec.tensor_parallel, load=spec.load, device=spec.device,
            replicas=[self.replica_status(r) for r in pool.replicas.values()], closed=pool.closed, routing=spec.routing,
            revision=self._revision, http_url=self.fronts.url(name),
        )  # fmt: skip

    def lab_status(self) -> pb.LabStatus:
        r, me = self.registry, Identity.own()
        return pb.LabStatus(
            lab=self.lab, pid=me.pid, host=me.host, started=me.started, lease_seconds=r.lease, holders=r.holders,
            detached=r.detached, pools=[self.pool_status(name) for name in r.pools], version=jvlab.__version__,
        )  # fmt: skip


async def serve(
    folder: Path,
    lab: str,
    host: str,
    port: int,
    token: str,
    lease: float,
    beat: float,
    missed_beats: int,
    tls: security.Tls | None,
    max_message: int = security.MAX_MESSAGE,
    signals: bool = True,
    metrics_port: int | None = None,
    make: Callable[..., Gateway] | None = None,
    place: str = "local",
) -> None:
    """Run one gateway until it is closed, its lease is over, or it is told to by a signal."""
    from jvlab.control._servicers import LabServicer, RegistryServicer

    security.check_bind(host, tls)
    gateway = (make or Gateway)(lab, folder, token, lease, beat, missed_beats)
    gateway.place = place
    server = grpc.aio.server(
        interceptors=[security.TokenInterceptor(token)],
        options=security.options(max_message),
        maximum_concurrent_rpcs=None,
    )
    rpc.add_LabServicer_to_server(LabServicer(gateway), server)
    rpc.add_RegistryServicer_to_server(RegistryServicer(gateway), server)
    healthy = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    bound = server.add_secure_port(target, tls.credentials()) if tls else server.add_insecure_port(target)
    shown = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
    # With TLS outside, this machine's own processes use a port of their own that nobody else can reach.
    gateway.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}" if tls else shown
    await server.start()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT) if signals else ():  # only a main thread may take them
        loop.add_signal_handler(number, lambda n=number: gateway.handle(reg.LabCloseRequested(f"signal {n}")))
    scrapes = None if metrics_port is None else await serve_metrics(gateway.lab_status, token, metrics_port)
    facts = {"lab": lab, "address": gateway.address, "public_address": shown, "token": token, "tls": bool(tls)}
    if scrapes is not None:
        facts["metrics_url"] = f"{scrapes.url}/metrics"
    write_lab_file(folder, facts | asdict(Identity.own()))
    print(f"gateway: {lab} listens on {shown}", flush=True)
    ticking = asyncio.create_task(gateway.tick_forever())
    ending = asyncio.create_task(gateway.ended.wait())
    try:
        done, _ = await asyncio.wait({ending, ticking}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # a ticker that failed must not leave a lab without lease and heartbeats
    finally:
        ending.cancel()
        (folder / "lab.json").unlink(missing_ok=True)
        if scrapes is not None:
            await scrapes.close()
        await gateway.shut_down()
        await server.stop(1.0)
        ticking.cancel()


def write_lab_file(folder: Path, content: dict[str, Any]) -> None:
    """Address and token, readable by the owner alone from the first byte on; whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = folder / "lab.json.new"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(content, file)
    temporary.replace(folder / "lab.json")
