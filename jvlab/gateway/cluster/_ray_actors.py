"""What runs inside Ray: the gateway's actor, and its handles of the actors that run rollout processes.

    driver ──▶ GatewayActor: the gateway of _gateway.py in a thread
                  └─ RayProcess, one per replica ──▶ placement group ▸ RolloutActor (_ray_replica.py) ▸ agent ▸ vLLM

A rollout actor and its vLLM end together. Ray restarts the actor, its agent joins under the old name, and it serves
once it holds the pool's version.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray.util.placement_group import placement_group, remove_placement_group

from jvlab._errors import ConfigError, GatewayUnreachable
from jvlab.gateway import _gateway, _launcher, _serve
from jvlab.gateway import _registry as reg
from jvlab.gateway._replica_processes import JoinedProcess
from jvlab.gateway._serve import GatewayOptions
from jvlab.gateway.cluster._ray_replica import (
    Resources,
    RolloutActor,
    actor_options,
    check_reach,
    no_room,
    one_host,
)
from jvlab.wire import _channels, _security

PLACE_SECONDS = 120.0  # for Ray to place a replica
PROBE_SECONDS = 5.0
START_SECONDS = 60.0
END_SECONDS = 5.0  # for an agent to remove its files
EXIT_SECONDS = 15.0  # after the gateway's end, for the driver to end this actor


class GatewayActor:
    """The lab's gateway, in a thread of this actor. Not restarted: its epochs fence the replicas."""

    def __init__(self, lab: str, options: GatewayOptions, remote: bool) -> None:
        self._folder = _launcher.home() / "labs" / lab
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._token, self._error, self._over = (
            _security.new_token(),
            "",
            threading.Event(),
        )
        self._host = "127.0.0.1"
        self._tls = None
        self._pem: tuple[str, str] = ("", "")
        if remote or not one_host(ray.nodes()):
            self._host = ray.util.get_node_ip_address()
            self._pem = _channels.make_certificate([self._host])
            self._tls = _security.Tls(
                str(_channels.write_private(self._folder / "cert.pem", self._pem[0])),
                str(_channels.write_private(self._folder / "key.pem", self._pem[1])),
            )
        options = replace(options, host=self._host, tls=self._tls, place="ray")
        self._thread = threading.Thread(
            target=self._run, args=(lab, options), name="jvlab-gateway", daemon=True
        )
        self._thread.start()

    def _run(self, lab: str, options: GatewayOptions) -> None:
        try:
            asyncio.run(
                _serve.serve(
                    self._folder,
                    lab,
                    self._token,
                    options,
                    signals=False,
                    make=self._make,
                )
            )
        except BaseException:
            self._error = traceback.format_exc()
            traceback.print_exc()
        self._over.set()
        time.sleep(EXIT_SECONDS)
        # no driver ended this actor: the lease expired, or the driver is gone
        os._exit(0)

    def _make(self, *arguments: Any) -> _gateway.Gateway:
        gateway = _gateway.Gateway(*arguments)
        held: dict[str, ActorHandle] = {}
        gateway.process_factories["ray"] = lambda replica, spec, index: RayProcess(
            replica, spec, index, self._folder, held, self._invitation
        )
        return gateway

    def _invitation(self, replica: str) -> tuple[Any, ...]:
        """The arguments of a rollout actor. On one host, replicas divide its cores by index."""
        return (
            replica,
            self._content()["public_address"],
            self._token,
            self._pem,
            self._tls is None,
        )

    def _content(self) -> dict[str, Any]:
        return json.loads((self._folder / "lab.json").read_text())

    def content(self) -> dict[str, Any]:
        """The gateway's address, token and certificate; waits until it listens."""
        deadline = time.monotonic() + START_SECONDS
        while not (self._folder / "lab.json").exists():
            if self._error or time.monotonic() > deadline:
                raise GatewayUnreachable(
                    f"the gateway did not start on Ray: {self._error or 'too slow'}"
                )
            time.sleep(0.05)
        return {**self._content(), "pem": self._pem[0]}

    def wait_ended(self) -> bool:
        """Wait until all replicas and the gateway have ended."""
        return self._over.wait(timeout=START_SECONDS)


class ActorHandle:
    """A replica's actor and placement group; kept while Ray restarts the actor."""

    def __init__(self) -> None:
        self.group: Any = None
        self.actor: Any = None
        self.closed = False  # released for good: nothing may be allocated any more
        self.lock = threading.Lock()

    def is_alive(self) -> bool:
        """Does Ray run the actor, or is it restarting it?"""
        if self.actor is None:
            return False
        try:
            ray.get(self.actor.node.remote(), timeout=PROBE_SECONDS)
        except exceptions.ActorDiedError:
            return False
        except (exceptions.ActorUnavailableError, exceptions.GetTimeoutError):
            return True  # it is being restarted
        return True

    def free(self, closed: bool = False) -> None:
        """Release the actor and its placement group; if they are `closed` for good, the agent ends by itself first."""
        with self.lock:
            self.closed = self.closed or closed
            if self.actor is not None:
                if closed:
                    # dead already, or too slow
                    with contextlib.suppress(exceptions.RayError):
                        ray.get(
                            self.actor.end.remote(END_SECONDS),
                            timeout=END_SECONDS + 1.0,
                        )
                ray.kill(self.actor, no_restart=True)
            if self.group is not None:
                remove_placement_group(self.group)
            self.actor = self.group = None


class RayProcess(JoinedProcess):
    """A replica whose agent is a Ray actor in a placement group of its own."""

    def __init__(
        self,
        replica: str,
        spec: reg.PoolSpec,
        index: int,
        folder: Path,
        handles: dict[str, ActorHandle],
        invitation: Callable[[str], tuple[Any, ...]],
    ) -> None:
        super().__init__(replica, spec, index, folder)
        self._handles = handles
        self._invitation = invitation
        # the previous process's, if Ray restarts its actor
        self._held = handles.setdefault(replica, ActorHandle())

    async def start(
        self, on_pid: Callable[[int], None], on_exit: Callable[[str, str], None]
    ) -> None:
        await super().start(on_pid, on_exit)
        self._stage = "waits for resources on Ray"
        try:
            await asyncio.to_thread(self._place)
        except (ConfigError, ValueError, exceptions.RayError) as error:
            await asyncio.to_thread(self._held.free)
            self.exited(f"{type(error).__name__}: {error}")

    def _place(self) -> None:
        if self._held.is_alive():
            return  # Ray restarts it, and its agent joins by itself
        self._held.free()
        resources = Resources.from_json(self.spec.place_json)
        spec = self.spec
        bundle = resources.bundle(
            spec.device, spec.tensor_parallel, json.loads(spec.engine_json)
        )
        node = resources.node(self.index, ray.nodes())
        bundles = [bundle or {"CPU": 0.001}]  # Ray has no empty bundles
        where: Any = None if node is None else [{"ray.io/node-id": node}]
        name = f"jvlab {self.replica}"
        group = placement_group(
            bundles, strategy="STRICT_PACK", name=name, bundle_label_selector=where
        )
        with self._held.lock:
            if self._held.closed:
                remove_placement_group(group)
                return
            self._held.group = group
        if not group.wait(PLACE_SECONDS):
            raise no_room(
                f"{bundle}{f' on node {node}' if node else ''}",
                PLACE_SECONDS,
                'ask for less with launch(place={"cpus": ..., "gpus": ...}), or for fewer replicas',
            )
        check_reach(group, self._invitation(self.replica)[1])
        with self._held.lock:
            if not self._held.closed:
                given = resources.restarts
                restarts = spec.restarts if given is None else given
                self._held.actor = self._actor(bundle, restarts, group)

    def _actor(self, bundle: dict[str, float], restarts: int, group: Any) -> Any:
        """Create the actor in its placement group; Ray starts it asynchronously."""
        made = ray.remote(RolloutActor).options(
            max_restarts=restarts,
            max_task_retries=0,
            max_concurrency=2,
            **actor_options(bundle, group, 0),
        )
        return made.remote(*self._invitation(self.replica))

    async def end(self, deadline: float) -> None:
        if self._handles.get(self.replica) is self._held:
            # the next replica with this name starts fresh
            del self._handles[self.replica]
        await super().end(deadline)
        await asyncio.to_thread(self._held.free, True)
