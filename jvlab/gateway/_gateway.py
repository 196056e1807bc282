"""The gateway process: a thin layer over the registry, plus the processes it starts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import grpc
import grpc.aio

from jvlab._errors import JvlabError
from jvlab._files import Plain
from jvlab._version import __version__
from jvlab.gateway import _registry as reg
from jvlab.gateway._link_service import Links, Teams
from jvlab.gateway._pool_commands import (
    PAUSED,
    STATS_DEADLINE,
    Adapters,
    ReplicaCalls,
    Steering,
)
from jvlab.gateway._replica_processes import (
    Agents,
    JoinedProcess,
    ReplicaProcess,
)
from jvlab.gateway._routing import Loads
from jvlab.gateway._sync_types import Standing
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._channels import Trust
from jvlab.wire._limits import Limits
from jvlab.wire._rpc_errors import CallFailed, refused
from jvlab.wire._security import Tls
from jvlab.wire.processes._identity import Identity
from jvlab.wire.processes._pool_spec import AWAY_SECONDS
from jvlab.wire.processes._rollout_process import (
    GRACE_SECONDS,
    RolloutProcess,
    order_of,
)
from jvlab.wire.processes._warm import WarmProcesses

if TYPE_CHECKING:
    from jvlab.gateway._http_front import Front

TICK_SECONDS = 0.25
# the longest that a launch waits for the HTTP front of the pool that had its name
CLOSE_SECONDS = 10.0
# that a new process waits for the one that had its name to end, which is killed before
PREDECESSOR_SECONDS = 30.0
WAITS = "waits for its predecessor to end"  # the stage of a replica until then


class Gateway:
    """State, processes and open calls of one lab, for the servicers; no protocol details."""

    def __init__(
        self,
        lab: str,
        folder: Path,
        token: str,
        lease: float,
        beat: float,
        missed_beats: int,
    ) -> None:
        self.lab = lab
        self.folder = folder
        self.token = token
        self.registry = reg.Registry(lease, beat, missed_beats, time.monotonic())
        self.address = ""  # for replicas; known once the server listens
        # for others; the latter is empty without metrics
        self.public_address = self.metrics_url = ""
        self.fingerprint = ""  # of the certificate there
        # the last one started under each name, ended or not
        self.processes: dict[str, ReplicaProcess] = {}
        self.warm = WarmProcesses(folder)
        self.place = "local"  # who starts processes, unless a launch says otherwise
        # where `plain` is kept; None: this gateway does not come back
        self.keep: Callable[[Plain], None] | None = None
        # where other hosts reach it, over TLS
        self.public: tuple[str, Tls] | None = None
        self.away = AWAY_SECONDS  # that joined replicas and it wait for each other
        # by place
        self.process_factories: dict[
            str, Callable[[str, reg.PoolSpec, int], ReplicaProcess]
        ] = {}
        self.facts: dict[str, pb.EngineFacts] = {}
        self.stats: dict[str, pb.ReplicaStats] = {}
        self.loads = Loads()
        self.ended = asyncio.Event()
        self._served: dict[str, int] = {}
        # above those of an earlier process of this gateway
        self._revision = time.time_ns() // 1000
        self._changed: dict[str, asyncio.Event] = {}
        self._background: set[asyncio.Task[None]] = set()
        # Its parts: each takes what it uses.
        registry = self.registry
        self.agents = Agents(registry, self.processes, self.handle, self.restart)
        self.calls = ReplicaCalls(
            registry, token, self.declare_lost, self.deadline_error
        )
        self.steering = Steering(
            registry, self.calls, self.announce, self.in_background
        )
        self.links = Links(self.calls, registry, self.announce, self.steering.why)
        self.adapters = Adapters(registry, self.calls)
        self.teams = Teams()
        self.fronts = Fronts(self)

    # What the registry decides ----------------------------------------------------------------------------------

    def handle(self, event: reg.Event) -> None:
        """Pass the registry an event and carry out its instructions."""
        instructions = self.registry.handle(event)
        if instructions:
            self.save()  # before anybody learns of an epoch that it gave out
        for instruction in instructions:
            match instruction:
                case reg.StartProcess(replica, spec):
                    self._forget_process(replica)
                    self.in_background(self._start_process(replica, spec))
                case reg.EndProcess(replica):
                    self._end_process(replica)
                case reg.DropWork(replica, reason):
                    self.calls.drop(replica)
                    self.links.left(replica, reason)
                case reg.Announce(pool):
                    self.announce(pool)
                case reg.Forget(replica):
                    self._forget(replica)
                case reg.ForgetPool(pool):
                    self._forget_pool(pool)
                case reg.EndLab(reason):
                    print(f"gateway: ending: {reason}", flush=True)
                    self.ended.set()

    def in_background(self, work: Any) -> asyncio.Task[None]:
        """Run it as a task that is cancelled when the gateway ends."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _end_process(self, replica: str) -> None:
        if replica in self.processes:
            self.in_background(self.processes[replica].end(GRACE_SECONDS + 5))

    def _forget_process(self, replica: str) -> None:
        """A new process takes the place of the one that had this name: what that one reported is void."""
        for known in (self.facts, self.stats):
            known.pop(replica, None)
        self.calls.distrust(replica)

    def _forget(self, replica: str) -> None:
        """Drop everything known of a replica except its log."""
        self.loads.forget(replica)
        for known in (self.facts, self.stats, self._served):
            known.pop(replica, None)
        self.in_background(self.calls.forget(replica))
        process = self.processes.get(replica)
        if isinstance(process, JoinedProcess):  # its agent must not start it again
            self.in_background(process.end(GRACE_SECONDS))

    def _forget_pool(self, pool: str) -> None:
        """Drop everything known of a pool whose replicas were forgotten, except processes that have not ended."""
        self.links.forget(pool)
        self.steering.forget(pool)
        self.adapters.forget(pool)
        self.announce(pool)  # its watchers end
        for replica in [name for name in self.processes if reg.pool_of(name) == pool]:
            self._drop_process(replica)

    def _drop_process(self, replica: str) -> None:
        """Forget a process that has ended, with its log, if its pool is forgotten."""
        if (
            reg.pool_of(replica) not in self.registry.pools
            and self.processes[replica].ended.is_set()
        ):
            del self.processes[replica]

    def process_of(self, replica: reg.Replica) -> ReplicaProcess | None:
        """The replica's own process, not one that had its name before; None if it is not started yet."""
        process = self.processes.get(replica.name)
        return process if process is not None and process.run == replica.run else None

    def _idle(self, replica: str) -> bool:
        """No request runs there, and no sync includes it."""
        busy = self.loads.of(replica) or self.calls.busy(replica)
        return (
            not busy
            and replica not in self.links.of(reg.pool_of(replica)).machine.participants
        )

    async def _start_process(self, replica: str, spec: reg.PoolSpec) -> None:
        run = spec.run

        def failed(cause: str) -> None:
            self.handle(reg.ProcessExited(replica, cause, "", run))

        try:
            await self._predecessor_ended(replica, run)
            if not self._wanted(replica, run):
                failed("it was closed before it was started")
                return
            process = self._make_process(replica, spec)
        except OSError as error:  # a TimeoutError is one too
            failed(str(error))
            return
        self.processes[replica] = process
        try:
            await self._begin(process)
        # no process, no log file: fail instead of staying in "starting"
        except OSError as error:
            process.ended.set()
            failed(f"the rollout process could not be started: {error}")
            return
        if not self._wanted(replica, run):  # closed while it was starting
            await process.end(GRACE_SECONDS + 5)
        self.agents.match()

    async def _begin(self, process: ReplicaProcess) -> None:
        """Start it, and pass on what it reports."""
        name = process.replica
        run = process.run

        def exited(cause: str, tail: str) -> None:
            self.handle(reg.ProcessExited(name, cause, tail, run))
            with suppress(reg.Refused):  # its pool is closed
                self.agents.restart_for_agent(name)

        await process.start(
            lambda pid: self.handle(reg.ProcessStarted(name, pid, run)), exited
        )

    def _make_process(self, replica: str, spec: reg.PoolSpec) -> ReplicaProcess:
        """The process of this replica, by its place; raises OSError for an unknown place."""
        index = self.registry.replica(replica).index
        folder = self.folder
        match spec.place:
            case "local":
                order = order_of(replica, spec, index) | {"gateway": self.address}
                return RolloutProcess(order, folder, self.token, self.warm)
            case "join":
                return JoinedProcess(replica, spec, index, folder, self.away)
            case place if place in self.process_factories:
                return self.process_factories[place](replica, spec, index)
            case place:
                raise OSError(
                    f"this gateway can't start processes on {place!r}; it can: local, join"
                )

    async def _predecessor_ended(self, replica: str, run: int) -> None:
        """Wait for the process that had this name: they would share a log, cores and the GPU's memory."""
        before = self.processes.get(replica)
        if before is None or before.ended.is_set():
            return
        self.handle(reg.StageSeen(replica, WAITS, run))
        try:
            await asyncio.wait_for(before.ended.wait(), PREDECESSOR_SECONDS)
        except TimeoutError:
            text = f"the process that had this name before did not end within {PREDECESSOR_SECONDS:g} s"
            raise TimeoutError(f"{text}; launch under another name") from None

    def _wanted(self, replica: str, run: int) -> bool:
        """Whether the replica's process is to be this run, and to live."""
        known = self.registry.find(replica)
        return known is not None and known.run == run and not known.ended

    def restart(self, pool: str, replica: str) -> None:
        """Start a replica that failed once more. Raises Refused."""
        self.handle(reg.RestartRequested(pool, replica, time.monotonic()))

    def register(self, request: pb.RegisterRequest) -> reg.Replica:
        """A replica registers, or registers again; updates every part of the gateway. Raises Refused."""
        name = request.replica
        self.handle(
            reg.Registered(name, request.address, time.monotonic(), request.run)
        )
        self.calls.registered(name, Trust(request.tls_pem, request.tls_name))
        self.facts[name] = request.facts
        self.stats[name] = request.stats
        replica = self.registry.replica(name)
        self.links.joined(replica, request.stats)
        self.steering.reported(replica, request.stats)
        return replica

    def reported(self, replica: reg.Replica, stats: pb.ReplicaStats) -> None:
        """A replica's beat; updates every part of the gateway."""
        self.stats[replica.name] = stats
        self.links.reported(replica, stats)
        self.steering.reported(replica, stats)

    def declare_lost(self, replica: str, epoch: int, why: str) -> None:
        """It can't be reached. The reason names a signal that ended one of its processes, if that is known."""
        process = self.processes.get(replica)
        if process is not None and (signalled := process.death()):
            why = f"{why}: {signalled}"
        self.handle(reg.Unreachable(replica, epoch, why))

    # Its state file -----------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write what a gateway needs that is started in place of this one, if it changed."""
        if self.keep is not None and not self.registry.ending:
            self.keep(self._plain())

    def _plain(self) -> Plain:
        plain = self.registry.plain()
        for kept in plain["pools"]:
            name = kept["spec"]["pool"]
            kept["version"] = self.links.of(name).machine.version
            kept["adapters"] = self.adapters.plain(name)
            kept["steered"] = self.steering.of(name)
            front = self.fronts.of(name)
            kept["http"] = front.url if front else ""
            kept["http_key"] = front is not None and front.keyed
            for row in kept["replicas"]:
                process = self.processes.get(row["name"])
                row["host"] = (
                    process.host
                    if isinstance(process, JoinedProcess) and process.run == row["run"]
                    else ""
                )
        return plain

    async def restore(self, saved: Plain) -> None:
        """Go on where `_plain` was taken. The server's addresses are known, and it does not listen yet."""
        hosts = {
            row["name"]: row.pop("host")
            for kept in saved["pools"]
            for row in kept["replicas"]
        }
        registry = self.registry
        registry.restore(saved, time.monotonic())
        for kept in saved["pools"]:
            spec = registry.pool(kept["spec"]["pool"]).spec
            replicas = registry.pool(spec.pool).replicas
            self.links.of(spec.pool).machine.restore(kept["version"], replicas)
            self.adapters.restore(spec.pool, kept["adapters"])
            self.steering.restore(spec.pool, kept["steered"])
            if port := urlsplit(kept["http"]).port:
                await self.fronts.launch(spec, port, lambda: None, kept["http_key"])
        for replica in list(registry.replicas()):
            await self._resume(replica, hosts[replica.name])

    async def _resume(self, replica: reg.Replica, host: str) -> None:
        """Wait for the process of a replica, if it outlived the gateway that died."""
        if replica.ended:
            return
        spec = self.registry.spec_of(replica)
        if spec.place != "join":
            text = "its gateway died, and with it what that had started"
            self.handle(reg.ProcessExited(replica.name, text, "", replica.run))
            return
        process = self._make_process(replica.name, spec)
        self.processes[replica.name] = process
        await self._begin(process)
        if host and isinstance(process, JoinedProcess):
            process.resume(host)
        if replica.state is reg.ReplicaState.DRAINING:  # what it still did has failed
            self.handle(reg.Drained(replica.name))

    async def tick_forever(self) -> None:
        """Check missed beats, the lease, and the stages of starting processes."""
        while not self.ended.is_set():
            self.handle(reg.Tick(time.monotonic()))
            self.links.tick(time.monotonic())
            self.save()  # what no event said: adapters, who joined
            for replica in list(self.registry.replicas()):
                if replica.state is reg.ReplicaState.DRAINING and self._idle(
                    replica.name
                ):
                    self.handle(reg.Drained(replica.name))
                process = self.process_of(replica)
                if replica.state is reg.ReplicaState.STARTING and process is not None:
                    self.handle(
                        reg.StageSeen(replica.name, process.stage(), replica.run)
                    )
            for name in list(self.processes):
                self._drop_process(name)
            await asyncio.sleep(TICK_SECONDS)

    async def shut_down(self) -> None:
        """End every process and close every channel; bounded by each process's own deadline."""
        await self.fronts.shut_down()
        self.agents.end_idle()
        await asyncio.gather(
            *(process.end(GRACE_SECONDS + 5) for process in self.processes.values())
        )
        await self.warm.close()
        await self.links.shut_down()
        await self.calls.shut_down()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # Work of replicas, and what may be asked of them ----------------------------------------------------------------

    def count(self, replica: str, change: int) -> None:
        self.loads.count(reg.pool_of(replica), replica, change)

    def served(self, replica: str, parts: int) -> None:
        """This many parts of its work have arrived."""
        self._served[replica] = self._served.get(replica, 0) + parts
        self.count(replica, -parts)

    def deadline_error(self, pool: str, replicas: Sequence[str]) -> CallFailed:
        """The error for work that these replicas did not finish in time; empty: no replica had it yet."""
        who = (
            f"replica {', '.join(replicas)}"
            if replicas
            else f"a replica of pool {pool!r} that takes work"
        )
        text = f"waited for {who}"
        remedy = ""
        machine = self.links.of(pool).machine
        if paused := self.steering.why(pool):
            text += f", but the pool is {paused}"
            remedy = f"{'pool.resume()' if paused == PAUSED else 'pool.wake()'} lets it continue"
        elif machine.open and machine.holder is not None:
            text += f"; {machine.holder.name} syncs the pool meanwhile ({machine.stage.value})"
        elif back := self.registry.returning(pool):
            each = (f"{r.name} ({r.stage}) after: {r.cause}" for r in back)
            text += f", but it is still starting {', '.join(each)} again"
        return CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, text, remedy)

    async def steer(self, order: pb.SteerCall, timeout: float) -> pb.SteerReply:
        """Pause, resume, sleep or wake a pool, unless a sync forbids it."""
        if not self.registry.alive(order.pool):
            raise refused(f"no replica of {order.pool} is ready")
        self.links.check_steering(order.pool, order.what)
        return await self.steering.steer(order, timeout)

    def limits(self, pool: str) -> Limits:
        """What one call may ask of this pool. Raises Refused for an unknown pool."""
        known = self.facts_of(pool)
        given = self.registry.pool(pool).spec.limits_json
        return Limits.resolve(
            json.loads(given), known.max_num_seqs, known.max_model_len
        )

    def facts_of(self, pool: str) -> pb.EngineFacts:
        """The facts of any engine of the pool, since all were launched alike; empty before the first is up."""
        for name in self.registry.pool(pool).replicas:
            if name in self.facts:
                return self.facts[name]
        return pb.EngineFacts()

    # Snapshots ----------------------------------------------------------------------------------------------------

    def change(self, pool: str) -> asyncio.Event:
        """Set at the pool's next change."""
        return self._changed.setdefault(pool, asyncio.Event())

    def announce(self, pool: str) -> None:
        """The pool's snapshot changed: notify watchers and dispatchers."""
        self.save()
        self.loads.changed(pool)
        self.change(pool).set()
        self._changed.pop(pool, None)

    def replica_status(self, replica: reg.Replica) -> pb.ReplicaStatus:
        now = time.monotonic()
        status = pb.ReplicaStatus(
            replica=replica.name,
            state=replica.state.name,
            stage=replica.stage,
            pid=replica.pid,
            seconds=replica.ready_after
            if replica.ready_after is not None
            else now - replica.started,
            epoch=replica.epoch,
            cause=replica.cause,
            log_tail=replica.log_tail,
            routed=self.loads.of(replica.name),
            beat_age=-1.0 if replica.last_beat is None else now - replica.last_beat,
            served=self._served.get(replica.name, 0),
            elsewhere=isinstance(self.process_of(replica), JoinedProcess),
            deaths=[death.cause for death in replica.deaths],
            restarts_left=self.registry.restarts_left(replica),
            restarts=replica.restarts,
            awaited=replica.awaited,
            facts=self.facts.get(replica.name),
            stats=self.stats.get(replica.name),
        )
        machine = self.links.of(replica.pool).machine
        member = machine.members.get(replica.name)
        status.version = -1 if member is None else member.version
        if member is not None:
            standing = machine.standing(replica.name)
            # of one that came back to a new gateway, as it says itself
            status.dirty = status.stats.dirty if member.returned else member.dirty
            status.stale = standing is Standing.STALE
        # these are its last stats: it runs nothing now
        if replica.state not in reg.BEATING:
            for name in ("running", "waiting", "tokens_per_s"):
                status.stats.ClearField(name)
        return status

    def pool_status(self, name: str) -> pb.PoolStatus:
        pool = self.registry.pool(name)
        spec = pool.spec
        machine = self.links.of(name).machine
        held = self.steering.of(name)
        front = self.fronts.of(name)
        self._revision += 1
        return pb.PoolStatus(
            version=machine.version,
            sync=machine.stage.value,
            trainer=machine.holder.name if machine.holder else "",
            pool=name,
            model=spec.model,
            tensor_parallel=spec.tensor_parallel,
            load=spec.load,
            device=spec.device,
            replicas=[self.replica_status(r) for r in pool.replicas.values()],
            closed=pool.closed,
            routing=spec.routing,
            revision=self._revision,
            http_url=front.url if front else "",
            https_port=front.public_port if front else 0,
            http_key=front is not None and front.keyed,
            limits=pb.CallLimits(**vars(self.limits(name)))
            if self.facts_of(name).max_num_seqs
            else None,
            paused_by=held.get(PAUSED, ""),
            asleep_by=next((by for state, by in held.items() if state != PAUSED), ""),
            stepping=machine.open
            and machine.terms is not None
            and machine.terms.stepped,
        )

    async def fresh_status(
        self, pool: str, seconds: float = STATS_DEADLINE
    ) -> pb.PoolStatus:
        """A pool's snapshot with fresh stats from its replicas."""

        async def refresh(name: str, epoch: int) -> None:
            timeout = min(seconds, STATS_DEADLINE)
            order = pb.EpochRequest(epoch=epoch)
            try:
                stats = await self.calls.begin(name, "Stats", order, timeout)
            # beat_age shows how old the numbers are
            except grpc.aio.AioRpcError as error:
                code = error.code().name
                print(f"gateway: no fresh numbers from {name}: {code}", flush=True)
                self.calls.failed(name, epoch, error)
                return
            if self.calls.is_current(name, epoch):  # else the stats are outdated
                self.stats[name] = stats

        alive = self.registry.alive(pool)
        await asyncio.gather(*(refresh(r.name, r.epoch) for r in alive))
        return self.pool_status(pool)

    def lab_status(self) -> pb.LabStatus:
        r = self.registry
        me = Identity.own()
        return pb.LabStatus(
            lab=self.lab,
            pid=me.pid,
            host=me.host,
            started=me.started,
            lease_seconds=r.lease,
            holders=r.holders,
            detached=r.detached,
            pools=[self.pool_status(name) for name in r.pools],
            version=__version__,
            public_address=self.public_address,
            metrics_url=self.metrics_url,
            fingerprint=self.fingerprint,
            away_seconds=0.0 if self.keep is None else self.away,
        )


class Fronts:
    """The HTTP fronts of a gateway's pools."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._open: dict[str, Front] = {}
        # of fronts of closed pools, until their port is free
        self._closing: dict[asyncio.Task[None], str] = {}

    async def launch(
        self,
        spec: reg.PoolSpec,
        port: int,
        start: Callable[[], None],
        keyed: bool = False,
    ) -> None:
        """Listen for a pool, then start it; whichever fails leaves nothing behind."""
        # aiohttp and pydantic take half a second to import
        from jvlab.gateway._http_front import Front

        if spec.place != "local":
            text = f"replicas serve HTTP on loopback, and those of a {spec.place!r} pool may run elsewhere"
            remedy = "launch it without http, or in a lab whose gateway starts the replicas itself"
            raise refused(text, remedy)
        # that of an earlier pool of this name may have the same port
        if closing := self._closing_of(spec.pool):
            await asyncio.wait(closing, timeout=CLOSE_SECONDS)
        front = Front(self._gateway, spec.pool, keyed)
        try:
            await front.open(port)
        except JvlabError as error:
            raise refused(error.message, error.remedy) from error
        try:
            start()
        except BaseException:
            await front.close()
            raise
        self._open[spec.pool] = front

    def of(self, pool: str) -> Front | None:
        """A pool's front; None if it has no HTTP."""
        return self._open.get(pool)

    def _closing_of(self, pool: str) -> list[asyncio.Task[None]]:
        return [task for task, name in self._closing.items() if name == pool]

    def begin_close(self, pool: str) -> list[asyncio.Task[None]]:
        """Close a pool's front, if it has one; it closes even if nobody waits for these tasks."""
        if front := self._open.pop(pool, None):
            task = asyncio.create_task(front.close())
            self._closing[task] = pool
            task.add_done_callback(self._closing.pop)
        return self._closing_of(pool)

    async def shut_down(self) -> None:
        for pool in list(self._open):
            self.begin_close(pool)
        await asyncio.gather(*self._closing)
