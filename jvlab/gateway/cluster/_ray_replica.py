"""Replicas and trainer processes on Ray: the resources that they ask for, and the actors that run them.

Neither ray nor gRPC is imported with this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import runpy
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jvlab._errors import ConfigError, MissingDependency
from jvlab.wire.processes import _labs
from jvlab.wire.processes._labs import LabInfo


def import_ray() -> Any:
    """The ray package; raises with the install command if it is missing."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(
            'cluster="ray" needs the package ray, which is not installed',
            remedy='pip install "jvlab[ray]"',
        ) from error
    return ray


# The resources of a replica, and the one bundle, on one node, that requests them: {"CPU": cpus, "GPU": gpus, ...}.
# With distributed_executor_backend="ray" vLLM itself requests its GPUs, on as many nodes as needed; our actor then only
# runs the engine's front end and requests none.


@dataclass(frozen=True)
class Resources:
    """What one replica needs, from `launch(place={...})`. None: derived from tensor_parallel."""

    cpus: float | None = None
    gpus: float | None = None
    resources: dict[str, float] = field(default_factory=dict)
    # addresses or node ids; replica k goes to nodes[k % len]
    nodes: tuple[str, ...] = ()
    # of one replica by Ray, in all its life, before it stays failed; None: `launch(restarts=...)`
    restarts: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Resources:
        """Validate `given`; an error names an unknown or impossible entry."""
        known = set(cls.__dataclass_fields__)
        if unknown := sorted(set(given) - known):
            raise ConfigError(
                f"place: {unknown[0]!r} is not known",
                remedy=f"one of {', '.join(sorted(known))}",
            )
        chosen = cls(**{**given, "nodes": _names(given.get("nodes", ()))})
        for name in ("cpus", "gpus"):
            value = getattr(chosen, name)
            if value is not None and (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or value < 0
            ):
                raise ConfigError(
                    f"place: {name} must be a number of at least 0, not {value!r}"
                )
        if chosen.restarts is not None and (
            isinstance(chosen.restarts, bool)
            or not isinstance(chosen.restarts, int)
            or chosen.restarts < 0
        ):
            raise ConfigError(
                f"place: restarts must be a whole number of at least 0, not {chosen.restarts!r}"
            )
        if not isinstance(chosen.resources, dict) or not all(
            isinstance(k, str) and isinstance(v, (int, float)) and v > 0
            for k, v in chosen.resources.items()
        ):
            raise ConfigError(
                f"place: resources must be names with numbers above 0, not {chosen.resources!r}"
            )
        return chosen

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Resources:
        return cls.of(json.loads(text))

    def bundle(
        self, device: str, tensor_parallel: int, engine: Mapping[str, Any]
    ) -> dict[str, float]:
        """What one replica's actor requests.

        >>> Resources().bundle("cuda", 4, {})
        {'CPU': 1.0, 'GPU': 4.0}
        >>> Resources().bundle("cuda", 16, {"distributed_executor_backend": "ray"})
        {'CPU': 1.0}
        """
        own = engine.get("distributed_executor_backend") != "ray"
        cpus = (
            self.cpus
            if self.cpus is not None
            else float(tensor_parallel if device == "cpu" and own else 1)
        )
        gpus = (
            self.gpus
            if self.gpus is not None
            else float(tensor_parallel if device == "cuda" and own else 0)
        )
        return {
            name: float(n)
            for name, n in {"CPU": cpus, "GPU": gpus, **self.resources}.items()
            if n
        }

    def node(self, index: int, nodes: Sequence[Mapping[str, Any]]) -> str | None:
        """The id of the node that replica `index` must be on; None for any. `nodes`: from `ray.nodes()`."""
        if not self.nodes:
            return None
        wanted = self.nodes[index % len(self.nodes)]
        alive = [node for node in nodes if node["Alive"]]
        found = [
            n["NodeID"]
            for n in alive
            if wanted
            in (n["NodeID"], n["NodeManagerAddress"], n["NodeManagerHostname"])
        ]
        if not found:
            there = ", ".join(sorted({str(n["NodeManagerAddress"]) for n in alive}))
            raise ConfigError(
                f"place: no node of this cluster is called {wanted!r}",
                remedy=f"there are: {there}",
            )
        return str(found[index // len(self.nodes) % len(found)])


def _names(nodes: Any) -> tuple[str, ...]:
    if isinstance(nodes, str) or not all(isinstance(node, str) for node in nodes):
        raise ConfigError(
            f"place: nodes must be a list of addresses or node ids, not {nodes!r}"
        )
    return tuple(nodes)


def actor_options(
    bundle: Mapping[str, float], group: Any, place: int
) -> dict[str, Any]:
    """Of an actor that gets a bundle of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "resources": {k: v for k, v in bundle.items() if k not in ("CPU", "GPU")},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, place),
    }


def no_room(asked: str, seconds: float, remedy: str) -> ConfigError:
    """The error of something that Ray did not place in time."""
    free = {
        k: v
        for k, v in import_ray().available_resources().items()
        if not k.startswith("node:")
    }
    return ConfigError(
        f"Ray could not place {asked} within {seconds:g} s; free in the whole cluster: {free}",
        remedy=remedy,
    )


def one_host(nodes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all live nodes are on one machine, as in a test cluster."""
    return len({node["NodeManagerAddress"] for node in nodes if node["Alive"]}) == 1


def check_reach(group: Any, gateway: str) -> None:
    """Raise if this gateway listens on its own host, which is ours, and a bundle of the group is on another."""
    from jvlab.wire._channels import host_of
    from jvlab.wire._security import is_loopback

    ray = import_ray()
    placed = ray.util.placement_group_table(group)["bundles_to_node_id"].values()
    ours = ray.get_runtime_context().get_node_id()
    involved = [node for node in ray.nodes() if node["NodeID"] in {ours, *placed}]
    if is_loopback(host_of(gateway)) and not one_host(involved):
        raise ConfigError(
            "Ray placed it on a host that was not in the cluster when this lab was made: its gateway listens on its "
            "own host alone",
            remedy="make the lab once a second host is in the cluster",
        )


# The Ray actor that runs one rollout process, `jvlab rollout --gateway`, as its child; both end together.
#     actor ──pipe──▶ agent (`jvlab rollout --gateway`) ──pipe──▶ supervisor ──▶ vLLM
#
# The actor's death closes the pipe, which ends all below. If the agent ends without being told to, so does the actor,
# and Ray restarts it. It is a child process, not a thread: this process belongs to Ray, and can't fork safely once
# Python's gRPC runs in it; so nothing here imports gRPC.


class RolloutActor:
    """Offers one rollout process to the lab's gateway while this actor lives."""

    def __init__(
        self, replica: str, gateway: str, token: str, pem: tuple[str, str], shared: bool
    ) -> None:
        ray = import_ray()
        command = [
            sys.executable,
            "-m",
            "jvlab",
            "rollout",
            "--gateway",
            gateway,
            "--name",
            replica,
        ]
        command += ["--supervised", "--invited"]
        if shared:
            command.append("--share-host")
        if pem[0]:
            command += ["--bind", ray.util.get_node_ip_address()]
        # for vLLM's Ray executor, which connects by itself
        environment = {
            **os.environ,
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        }
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=environment, start_new_session=True
        )
        # Passed by pipe: files would be left behind if this process is killed, and environment variables would be
        # inherited by every process below.
        invitation = json.dumps({"token": token, "certificate": pem[0], "key": pem[1]})
        assert self._child.stdin is not None
        self._child.stdin.write(f"{invitation}\n".encode())
        self._child.stdin.flush()
        self._told_to_end = False
        threading.Thread(target=self._watch, name="jvlab-agent", daemon=True).start()

    def _watch(self) -> None:
        # no deadline: a thread that does nothing else
        if self._child.wait() and not self._told_to_end:
            os._exit(1)  # Ray restarts the actor

    def end(self, seconds: float) -> bool:
        """End the agent, so that it removes its files: Ray kills it with this actor. Whether it has ended."""
        self._told_to_end = True
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def node(self) -> str:
        """The actor's node id; also used as a liveness probe."""
        return import_ray().get_runtime_context().get_node_id()


# The Ray actor that is one process of `lab.train`. The user's program is its main module and no child of it: whatever
# kills one kills the other.


@dataclass(frozen=True)
class Failure:
    """How a program ended that did not end well."""

    kind: str  # the exception's
    text: str


class TrainerActor:
    """One process of a `jax.distributed` job."""

    def __init__(self, number: int, env: dict[str, str], lab: LabInfo) -> None:
        self._number = number
        os.environ.update(env)
        _labs.given = lab

    def listen(self) -> str:
        """An address where this process can listen."""
        host = import_ray().util.get_node_ip_address()
        while True:
            # below the range of outgoing connections: it is used only once jax has been imported
            port = random.randrange(20_000, 30_000)
            with socket.socket() as tried, contextlib.suppress(OSError):
                tried.bind(("", port))
                return f"{host}:{port}"

    def run(
        self,
        program: str | Callable[..., Any],
        arguments: Sequence[str],
        coordinator: str,
        processes: int,
    ) -> Any:
        """Run a script, or call a function: what it returned, or a Failure."""
        import jax

        # As under srun: it takes no arguments. Ray may itself run in a job that jax would find.
        told = partial(
            jax.distributed.initialize,
            coordinator,
            processes,
            self._number,
            cluster_detection_method="deactivate",
        )
        jax.distributed.initialize = told
        try:
            if callable(program):
                return program(*arguments)
            sys.argv = [program, *arguments]
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                return None
            text = f"failed:\n{traceback.format_exc()}"
            return Failure(type(error).__name__, text)
