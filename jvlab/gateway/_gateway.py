"""The gateway process: a thin layer over the registry, plus the processes it starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from jvlab._errors import ReplicaLost
from jvlab._version import __version__
from jvlab.gateway import _pool_commands
from jvlab.gateway import _registry as reg
from jvlab.gateway._dispatch import being_cancelled
from jvlab.gateway._http_front import Fronts
from jvlab.gateway._link_service import Links, Teams
from jvlab.gateway._pool_commands import Adapters
from jvlab.gateway._replica_processes import (
    Agents,
    JoinedProcess,
    ReplicaProcess,
    make_process,
)
from jvlab.gateway._routing import Loads
from jvlab.gateway._sync_types import Standing
from jvlab.wire import _security as security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._channels import Trust, open_channel
from jvlab.wire._limits import Limits
from jvlab.wire._rpc_errors import LOST_REMEDY, CallFailed, received
from jvlab.wire.processes._identity import Identity
from jvlab.wire.processes._rollout_process import GRACE_SECONDS
from jvlab.wire.processes._warm import WarmProcesses

TICK_SECONDS = 0.25
# that a new process waits for the one that had its name to end, which is killed before
PREDECESSOR_SECONDS = 30.0
WAITS = "waits for its predecessor to end"  # the stage of a replica until then
# Status codes of a failed call that mean that the replica is gone, or registered again under another epoch.
GONE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)
PB_STATE = {
    reg.State.STARTING: pb.STARTING,
    reg.State.READY: pb.READY,
    reg.State.LOST: pb.LOST,
    reg.State.FAILED: pb.FAILED,
    reg.State.CLOSED: pb.CLOSED,
    reg.State.DRAINING: pb.DRAINING,
}


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
        # the last one started under each name, ended or not
        self.processes: dict[str, ReplicaProcess] = {}
        self.warm = WarmProcesses(folder)
        self.agents = Agents(self)
        self.place = "local"  # who starts processes, unless a launch says otherwise
        # by place
        self.process_factories: dict[
            str, Callable[[str, reg.PoolSpec, int], ReplicaProcess]
        ] = {}
        self.trust: dict[str, Trust] = {}  # replicas' certificates
        self.facts: dict[str, pb.EngineFacts] = {}
        self.stats: dict[str, pb.ReplicaStats] = {}
        self.links = Links(self)
        self.fronts, self.pause_state = Fronts(self), _pool_commands.PauseState()
        # pause and resume orders in progress, by pool
        self.steering: Counter[str] = Counter()
        self._reconciling: set[str] = set()
        self.teams = Teams()
        self.adapters = Adapters(self)
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
        """Pass the registry an event and carry out its instructions."""
        for instruction in self.registry.handle(event):
            match instruction:
                case reg.StartProcess(replica, spec):
                    self.in_background(self._start_process(replica, spec))
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

    def _forget(self, replica: str) -> None:
        """Drop everything known of a replica except its log."""
        self.loads.forget(replica)
        for known in (self.facts, self.stats, self._served, self._calls, self.trust):
            known.pop(replica, None)
        if replica in self._stubs:
            self.in_background(self._stubs.pop(replica)[1].close(None))
        process = self.processes.get(replica)
        if isinstance(process, JoinedProcess):  # its agent must not start it again
            self.in_background(process.end(GRACE_SECONDS))

    def _forget_pool(self, pool: str) -> None:
        """Drop everything known of a pool whose replicas were forgotten, except processes that have not ended."""
        self.links.forget(pool)
        self.pause_state.forget(pool)
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
        busy = self.routed(replica) or self._calls.get(replica)
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
            process = make_process(
                self, replica, spec, self.registry.replica(replica).index
            )
        except OSError as error:  # a TimeoutError is one too
            failed(str(error))
            return
        self.processes[replica] = process
        try:
            await process.start(
                on_pid=lambda pid: self.handle(reg.ProcessStarted(replica, pid, run)),
                on_exit=lambda cause, tail: self.handle(
                    reg.ProcessExited(replica, cause, tail, run)
                ),
            )
        # no process, no log file: fail instead of staying in "starting"
        except OSError as error:
            process.ended.set()
            failed(f"the rollout process could not be started: {error}")
            return
        if not self._wanted(replica, run):  # closed while it was starting
            await process.end(GRACE_SECONDS + 5)
        self.agents.match()

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
        for known in (self.facts, self.stats, self.trust):
            known.pop(replica, None)

    def register(self, request: pb.RegisterRequest) -> reg.Replica:
        """A replica registers, or registers again; updates every part of the gateway. Raises Refused."""
        name = request.replica
        self.handle(
            reg.Registered(name, request.address, time.monotonic(), request.run)
        )
        self.trust[name] = Trust(request.tls_pem, request.tls_name)
        self.facts[name] = request.facts
        self.stats[name] = request.stats
        replica = self.registry.replica(name)
        self.links.joined(replica, request.stats)
        self.check_pause(replica, request.stats)
        return replica

    def check_pause(self, replica: reg.Replica, stats: pb.ReplicaStats) -> None:
        """Wake, pause or resume a replica that differs from its pool."""
        pool = replica.pool
        name = replica.name
        what = _pool_commands.differs(self.pause_state, pool, stats)
        if (
            what is not None
            and not self.steering[pool]
            and name not in self._reconciling
        ):
            self._reconciling.add(name)
            self.in_background(_pool_commands.reconcile_pause(self, replica))

    def reconciled(self, replica: str) -> None:
        self._reconciling.discard(replica)

    def is_current(self, replica: str, epoch: int) -> bool:
        """Whether the replica is alive with this epoch."""
        known = self.registry.find(replica)
        return known is not None and known.epoch == epoch and known.state in reg.BEATING

    def failed(self, replica: str, epoch: int, error: grpc.aio.AioRpcError) -> str:
        """A call of this epoch failed: if the code means that the replica is gone, declare it lost.

        Returns why it is gone; empty if it is not.
        """
        if error.code() in GONE_CODES and self.is_current(replica, epoch):
            process = self.processes.get(replica)
            why = received(error).message
            if process is not None and (signalled := process.death()):
                why = f"{why}: {signalled}"
            self.handle(reg.Unreachable(replica, epoch, why))
        return (
            ""
            if self.is_current(replica, epoch)
            else self.loss(replica) or "it registered again"
        )

    async def tick_forever(self) -> None:
        """Check missed beats, the lease, and the stages of starting processes."""
        while not self.ended.is_set():
            self.handle(reg.Tick(time.monotonic()))
            self.links.tick(time.monotonic())
            for replica in list(self.registry.replicas()):
                if replica.state is reg.State.DRAINING and self._idle(replica.name):
                    self.handle(reg.Drained(replica.name))
                process = self.process_of(replica)
                if replica.state is reg.State.STARTING and process is not None:
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
        await asyncio.gather(
            *(channel.close(None) for _, channel, _ in self._stubs.values())
        )
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # For the dispatcher (its protocol `Replicas`) ----------------------------------------------------------------

    def ready(self, pool: str) -> list[reg.Replica]:
        return [
            r
            for r in self.registry.pool(pool).replicas.values()
            if r.state is reg.State.READY
        ]

    def alive(self, pool: str) -> list[reg.Replica]:
        """The ready and the draining ones: pause and resume go to both."""
        return [
            r
            for r in self.registry.pool(pool).replicas.values()
            if r.state in reg.BEATING
        ]

    def routed(self, replica: str) -> int:
        return self.loads.of(replica)

    def count(self, replica: str, change: int) -> None:
        self.loads.count(reg.pool_of(replica), replica, change)

    def served(self, replica: str, parts: int) -> None:
        """This many parts of its work have arrived."""
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
        """Cancel the call if the replica is lost; raise its failures as errors that name the replica."""
        self.track(replica, call)
        epoch = self.registry.replica(replica).epoch
        try:
            yield
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise lost(replica, self.loss(replica)) from None
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self.deadline_error(reg.pool_of(replica), [replica]) from None
            if why := self.failed(replica, epoch, error):
                raise lost(replica, why) from None
            raise CallFailed.of(error) from None
        finally:
            self.untrack(replica, call)

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
        if paused := self.pause_state.why(pool):
            text += f", but the pool is {paused}"
            remedy = f"{'pool.resume()' if paused == _pool_commands.PAUSED else 'pool.wake()'} lets it go on"
        elif machine.open and machine.holder is not None:
            text += f"; {machine.holder.name} syncs the pool meanwhile ({machine.stage.value})"
        return CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, text, remedy)

    def stub(self, replica: str) -> rpc.RolloutStub:
        """The replica's own service, over one channel kept open."""
        address = self.registry.replica(replica).address
        known = self._stubs.get(replica)
        if known is None or known[0] != address:
            channel = open_channel(address, self.trust.get(replica, Trust()))
            known = self._stubs[replica] = (address, channel, rpc.RolloutStub(channel))
        return known[2]

    def model_len(self, pool: str) -> int:
        """The longest sequence of the pool's engines; 0 before the first has reported it."""
        known = self._facts(pool)
        return known.max_model_len if known is not None else 0

    def limits(self, pool: str) -> Limits:
        """What one call may ask of this pool. Raises Refused for an unknown pool."""
        known = self._facts(pool)
        given = json.loads(self.registry.pool(pool).spec.limits_json)
        return Limits.resolve(
            given,
            *(
                (known.max_num_seqs, known.max_model_len)
                if known is not None
                else (0, 0)
            ),
        )

    def _facts(self, pool: str) -> pb.EngineFacts | None:
        """The facts of any engine of the pool; all were launched alike."""
        return next(
            (
                self.facts[name]
                for name in self.registry.pool(pool).replicas
                if name in self.facts
            ),
            None,
        )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return security.authorization(self.token)

    # Snapshots ----------------------------------------------------------------------------------------------------

    def change(self, pool: str) -> asyncio.Event:
        """Set at the pool's next change."""
        return self._changed.setdefault(pool, asyncio.Event())

    def announce(self, pool: str) -> None:
        """The pool's snapshot changed: notify watchers and dispatchers."""
        self.loads.changed(pool)
        self.change(pool).set()
        self._changed.pop(pool, None)

    def replica_status(self, replica: reg.Replica) -> pb.ReplicaStatus:
        now = time.monotonic()
        status = pb.ReplicaStatus(
            replica=replica.name,
            state=PB_STATE[replica.state],
            stage=replica.stage,
            pid=replica.pid,
            seconds=replica.ready_after
            if replica.ready_after is not None
            else now - replica.started,
            epoch=replica.epoch,
            cause=replica.cause,
            log_tail=replica.log_tail,
            routed=self.routed(replica.name),
            beat_age=-1.0 if replica.last_beat is None else now - replica.last_beat,
            served=self._served.get(replica.name, 0),
            elsewhere=isinstance(self.process_of(replica), JoinedProcess),
        )
        machine = self.links.of(replica.pool).machine
        member = machine.members.get(replica.name)
        status.version = -1 if member is None else member.version
        if member is not None:
            standing = machine.standing(replica.name)
            status.dirty = member.dirty
            status.stale = standing is Standing.STALE
        if replica.name in self.facts:
            status.facts.CopyFrom(self.facts[replica.name])
        if replica.name in self.stats:
            status.stats.CopyFrom(self.stats[replica.name])
        # these are its last stats: it runs nothing now
        if replica.state not in reg.BEATING:
            for name in ("running", "waiting", "tokens_per_s"):
                status.stats.ClearField(name)
        return status

    def pool_status(self, name: str) -> pb.PoolStatus:
        pool = self.registry.pool(name)
        spec = pool.spec
        machine = self.links.of(name).machine
        held = self.pause_state.of(name)
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
            http_url=self.fronts.url(name),
            limits=pb.CallLimits(**self.limits(name).as_dict())
            if self._facts(name) is not None
            else None,
            paused_by=held.get(_pool_commands.PAUSED, ""),
            asleep_by=next(
                (by for state, by in held.items() if state != _pool_commands.PAUSED), ""
            ),
            stepping=machine.open
            and machine.terms is not None
            and machine.terms.stepped,
        )

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
        )


def lost(replica: str, why: str) -> ReplicaLost:
    """The error for work on a replica that is gone."""
    return ReplicaLost(f"replica {replica} was lost: {why}", remedy=LOST_REMEDY)
