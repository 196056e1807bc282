"""Replica processes, started by the gateway or by an agent on another host (`jvlab rollout --gateway`).

    local   RolloutProcess (wire/processes/_rollout_process.py)   a child of the gateway, under a supervisor
    join    JoinedProcess                                    waits for an agent; orders and reports use its stream
    ray     RayProcess (gateway/cluster/_ray_actors.py)              a JoinedProcess whose agent is a Ray actor

An agent whose stream breaks has RECONNECT_SECONDS to reconnect with its replica still running; then it counts as dead.
If the gateway itself died and was started again, it has `away` seconds, as it waits for the gateway itself.

A pool keeps its size (`restarts`, gateway/_registry.py): a local process is started again. An agent ends with its
replica, so for "join" the place is open again and the next agent takes it, whoever starts that. Ray starts its actor
again, `restarts` times, and the actor's agent joins under the old name; the registry starts none there.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from jvlab.gateway import _registry as reg
from jvlab.wire import _security as security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._channels import host_of
from jvlab.wire.processes._log_causes import death
from jvlab.wire.processes._pool_spec import AWAY_SECONDS
from jvlab.wire.processes._rollout_process import RolloutProcess, order_of

RECONNECT_SECONDS = 5.0
AGENT_SECONDS = 3.0  # that an agent may take in addition to the process it ends
KEEPALIVE_SECONDS = 5.0  # between keep-alive messages to an agent
WAITING = "waits for a host"  # the stage of a replica without an agent


@dataclass
class JoinedHost:
    """One agent's Join stream: its offer, and the orders to it."""

    offer: pb.JoinOffer
    orders: asyncio.Queue[pb.JoinOrder | None] = field(default_factory=asyncio.Queue)

    def fits(self, replica: str) -> bool:
        return self.offer.name in ("", replica, reg.pool_of(replica))


class JoinedProcess:
    """A process that an agent runs; waits until there is one."""

    def __init__(
        self,
        replica: str,
        spec: reg.PoolSpec,
        index: int,
        folder: Path,
        away: float = AWAY_SECONDS,
    ) -> None:
        self.replica = replica
        self.away = away
        self.host = ""  # the agent that runs it, or ran it last
        self.spec = spec
        self.index = index
        self.run = spec.run
        self.log = folder / f"{replica.replace('/', '-')}.log"
        self.ended = asyncio.Event()
        self.agent: JoinedHost | None = None
        self.started = False
        self._stage = WAITING
        self._tail = ""
        self._ending = False
        self._on_pid: Callable[[int], None] = lambda pid: None
        self._on_exit: Callable[[str, str], None] = lambda cause, tail: None
        self._reconnect_timer: asyncio.TimerHandle | None = None

    async def start(
        self, on_pid: Callable[[int], None], on_exit: Callable[[str, str], None]
    ) -> None:
        self._on_pid = on_pid
        self._on_exit = on_exit

    @property
    def free(self) -> bool:
        """No agent has been assigned yet."""
        return (
            self.agent is None
            and not self.started
            and not self.ended.is_set()
            and not self._ending
        )

    def assign(self, agent: JoinedHost) -> None:
        """This agent runs it from now on."""
        self.agent = agent
        self.host = agent.offer.agent
        self.started = True
        self._stage = "process"
        if self._reconnect_timer is not None:
            self._reconnect_timer.cancel()
            self._reconnect_timer = None
        if agent.offer.running:
            agent.orders.put_nowait(
                pb.JoinOrder(end=True) if self._ending else pb.JoinOrder(wait=True)
            )
            return
        order = order_of(self.replica, self.spec, self.index) | {"away": self.away}
        agent.orders.put_nowait(pb.JoinOrder(start_json=json.dumps(order)))

    def handle(self, report: pb.JoinReport) -> None:
        """Handle a report of its agent."""
        match report.WhichOneof("kind"):
            case "pid":
                self._on_pid(report.pid)
            case "news":
                self._stage = report.news.stage
                self._tail = report.news.log_tail
                self.log.write_text(self._tail)
            case "exited":
                self.exited(report.exited)

    def agent_left(self) -> None:
        """The agent's stream ended; if it does not reconnect, its replica counts as exited."""
        agent = self.agent
        self.agent = None
        if self.ended.is_set() or agent is None:
            return
        if self._ending:
            self.exited("ended")
        else:
            self._expect(
                RECONNECT_SECONDS, f"its host's process ({self.host}) went away"
            )

    def resume(self, host: str) -> None:
        """In a gateway that was started again: the agent of this name ran it, and may come back with it."""
        self.host = host
        self.started = True
        self._stage = "process"
        text = f"its host's process ({host}) did not come back within {self.away:g} s of the gateway's new start"
        self._expect(self.away, text)

    def _expect(self, seconds: float, otherwise: str) -> None:
        """Its agent has this long to connect again."""
        self._reconnect_timer = asyncio.get_running_loop().call_later(
            seconds, self.exited, otherwise
        )

    def exited(self, cause: str) -> None:
        """The process has exited, or counts as such. Can be called twice."""
        if self.ended.is_set():
            return
        if self._reconnect_timer is not None:
            self._reconnect_timer.cancel()
            self._reconnect_timer = None
        self.ended.set()
        self._on_exit(cause, "\n".join(self._tail.splitlines()[-40:]))

    def stage(self) -> str:
        return self._stage

    def tail(self, lines: int) -> str:
        """The last lines that its agent sent."""
        return "\n".join(self._tail.splitlines()[-lines:])

    def death(self) -> str:
        return death(self._tail)

    async def end(self, deadline: float) -> None:
        self._ending = True
        if self.agent is not None:
            self.agent.orders.put_nowait(pb.JoinOrder(end=True))
        elif self._reconnect_timer is None:
            self.exited("it was not running")
            return
        # one that is still to come back is told then
        try:
            await asyncio.wait_for(self.ended.wait(), deadline + AGENT_SECONDS)
        except TimeoutError:
            if self.agent is not None:
                # ends the stream, and the agent with it
                self.agent.orders.put_nowait(None)
            self.exited(
                f"its host's process did not answer within {deadline:g} s of the order to end"
            )


# a replica's process, wherever it runs, as the gateway handles it
ReplicaProcess = RolloutProcess | JoinedProcess


class Agents:
    """Matches agents with replicas that wait for one."""

    def __init__(
        self,
        registry: reg.Registry,
        processes: dict[str, ReplicaProcess],
        handle: Callable[[reg.Event], None],
        restart: Callable[[str, str], None],
    ) -> None:
        self._registry = registry
        self._processes = processes
        self._handle = handle
        self._restart = restart
        self._idle: list[JoinedHost] = []

    def _joined(self) -> list[JoinedProcess]:
        return [p for p in self._processes.values() if isinstance(p, JoinedProcess)]

    def match(self) -> None:
        """Assign waiting replicas to idle agents that fit, first come first served."""
        for process in self._joined():
            if process.free and (
                agent := next((a for a in self._idle if a.fits(process.replica)), None)
            ):
                self._idle.remove(agent)
                process.assign(agent)

    def _admit(self, agent: JoinedHost) -> None:
        """Find a replica for a new agent: a waiting, a failed or an additional one. Raises Refused."""
        name = agent.offer.name
        registry = self._registry
        running = agent.offer.running
        if running:
            process = self._processes.get(running)
            # a place that is open again is for a new process, not for the one it lost
            if (
                not isinstance(process, JoinedProcess)
                or process.ended.is_set()
                or not process.started
            ):
                raise reg.Refused(f"{running} counts as exited")
            if process.host != agent.offer.agent:
                raise reg.Refused(f"another agent runs {running}")
            if (before := process.agent) is not None:
                # the same one: its connection broke unnoticed here
                before.orders.put_nowait(None)
            process.assign(agent)
            return
        self._idle.append(agent)
        known = registry.find(name)
        # a new agent for this replica: whatever ran under its name has ended
        if known is not None:
            process = self._processes.get(name)
            if (
                isinstance(process, JoinedProcess)
                and process.started
                and process.agent is None
            ):
                process.exited("its host's process was restarted")
            # one that is restarting takes this agent as soon as its back-off is over
            self.restart_for_agent(name)
        self.match()
        if (
            agent in self._idle
            and name in registry.pools
            and not registry.pools[name].closed
        ):
            if sum(idle.offer.name == name for idle in self._idle) <= self._coming(
                registry.pools[name]
            ):
                return  # `match` is called again for each of those
            self._handle(reg.Offered(name, time.monotonic()))

    def restart_for_agent(self, name: str) -> None:
        """Start this replica again if it has failed and an agent of its name waits. Ray may bring a new actor up before
        the end of the old one's process is known here. Raises Refused."""
        known = self._registry.find(name)
        failed = known is not None and known.state is reg.ReplicaState.FAILED
        if failed and any(idle.offer.name == name for idle in self._idle):
            self._restart(reg.pool_of(name), name)

    def _coming(self, pool: reg.PoolState) -> int:
        """How many replicas of a pool will wait for an agent as soon as the gateway has made their processes."""
        made = {(process.replica, process.run) for process in self._joined()}
        coming = [
            r
            for r in pool.replicas.values()
            if r.state is reg.ReplicaState.RESTARTING
            or (r.state is reg.ReplicaState.STARTING and (r.name, r.run) not in made)
        ]
        return sum((r.place or pool.spec.place) == "join" for r in coming)

    def end_idle(self) -> None:
        """The lab ends: end the agents that were never assigned."""
        for agent in self._idle:
            agent.orders.put_nowait(pb.JoinOrder(end=True))

    async def join(
        self, reports: AsyncIterator[pb.JoinReport]
    ) -> AsyncIterator[pb.JoinOrder]:
        """One agent's stream, from its offer to its end."""
        first = await anext(reports, None)
        if first is None or first.WhichOneof("kind") != "offer":
            raise reg.Refused("the first report must be an offer")
        agent = JoinedHost(first.offer)
        try:
            self._admit(agent)
        except reg.Refused:
            self._leave(agent)
            raise
        reading = asyncio.create_task(self._read(agent, reports))
        try:
            while True:
                try:
                    order = await asyncio.wait_for(
                        agent.orders.get(), KEEPALIVE_SECONDS
                    )
                except TimeoutError:
                    order = pb.JoinOrder(wait=True)
                if order is None:
                    return
                yield order
        finally:
            reading.cancel()
            self._leave(agent)

    async def _read(
        self, agent: JoinedHost, reports: AsyncIterator[pb.JoinReport]
    ) -> None:
        try:
            async for report in reports:
                if process := self._process_of(agent):
                    process.handle(report)
        finally:
            agent.orders.put_nowait(None)  # no more reports: end the stream
            self._leave(agent)

    def _process_of(self, agent: JoinedHost) -> JoinedProcess | None:
        return next(
            (process for process in self._joined() if process.agent is agent), None
        )

    def _leave(self, agent: JoinedHost) -> None:
        if agent in self._idle:
            self._idle.remove(agent)
        if process := self._process_of(agent):
            process.agent_left()


def check_reachable(address: str, tls_pem: str) -> None:
    """Raise Refused for a replica on another host to which the token would go in clear text."""
    if not tls_pem and not security.is_loopback(host_of(address)):
        raise reg.Refused(
            f"a replica at {address} without a certificate: the token would go there in clear text"
        )
