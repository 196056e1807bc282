"""Scaling, routing and placement of a pool's replicas, client side."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, DeadlineExceeded
from jvlab.gateway._routing import POLICIES
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire.processes._pool_spec import MAX_REPLICAS

if TYPE_CHECKING:
    from jvlab.lab._pool_calls import PoolCalls

LEAVING = (pb.DRAINING, pb.CLOSED)


def staying(snapshot: pb.PoolStatus) -> list[pb.ReplicaStatus]:
    """The replicas that are not leaving; of a closed pool, all it had."""
    return [r for r in snapshot.replicas if snapshot.closed or r.state not in LEAVING]


def not_ready(snapshot: pb.PoolStatus) -> str:
    """The replicas that are not ready, and the stage of each."""
    late = [r for r in staying(snapshot) if r.state != pb.READY]
    words = [
        f"{r.replica}, which is at {r.stage}" + (f" ({r.cause})" if r.cause else "")
        for r in late
    ]
    return "; ".join(words) or f"a replica of {snapshot.pool}"


def check_routing(routing: str | None) -> None:
    if routing is not None and routing not in POLICIES:
        names = ", ".join(map(repr, POLICIES))
        raise ConfigError(
            f"routing={routing!r} is not known",
            remedy=f"one of {names}",
            routing=routing,
        )


def check_version(version: Any) -> int:
    """The version as a request field; 0 stands for the pool's current one."""
    if version is None:
        return 0
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ConfigError(
            f"min_version must be a whole number of at least 1, not {version!r}",
            remedy="versions start with the first sync; leave it out for the pool's current one",
        )
    return version


def place_fields(place: str | dict[str, Any] | None) -> dict[str, Any]:
    """`launch(place=...)` as request fields."""
    if place is None:
        return {}
    if isinstance(place, str):
        if place not in ("local", "join"):
            raise ConfigError(
                f"place={place!r} is not known",
                remedy='"local", "join", or on Ray {"cpus": 1, "gpus": 1, "nodes": [address, ...]}',
            )
        return {"place": place}
    from jvlab.gateway.cluster._ray_replica import Resources

    return {"place": "ray", "place_json": Resources.of(place).to_json()}


def on_this_host(pool: PoolCalls, gateway: str) -> bool:
    """Whether every ready replica runs on this machine."""
    ready = [r for r in pool._snapshot.replicas if r.state == pb.READY]
    return (
        all((r.facts.host or gateway) == platform.node() for r in ready)
        if ready
        else gateway == platform.node()
    )


def reachable(options: dict[str, Any], gateway: str) -> dict[str, Any]:
    """Transport options for other hosts: by default, bind to our address on the route to the gateway."""
    from jvlab.wire import _channels, _security

    host = _channels.host_of(gateway)
    if "host" in options or _security.is_loopback(host):
        return options
    return {**options, "host": _channels.address_towards(host)}


def scale(
    pool: PoolCalls, replicas: Any, wait: bool, timeout: float | Deadline
) -> None:
    """Set the number of replicas, and wait until new ones are ready and surplus ones have ended."""
    deadline = Deadline.of(timeout)
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ConfigError(
            f"a pool has at least 1 replica, so scale({replicas!r}) makes no sense",
            remedy="pass a whole number of at least 1; pool.close() ends the pool",
        )
    if replicas > MAX_REPLICAS:
        raise ConfigError(
            f"scale({replicas}) is more than one pool takes",
            remedy=f"at most {MAX_REPLICAS}",
        )
    pool._take(
        pool._client.call(
            "Scale", pb.ScaleRequest(pool=pool.name, replicas=replicas), deadline
        )
    )
    if not wait:
        return
    while leaving := [r for r in pool._snapshot.replicas if r.state in LEAVING]:
        if pool._snapshot.closed:
            break  # pool.wait() says why
        if deadline.over:
            words = ", ".join(
                f"{r.replica} is {r.stage} with {r.routed} in flight" for r in leaving
            )
            paused = any(r.stats.paused for r in leaving)
            raise DeadlineExceeded(
                f"{pool.name} did not remove all within {deadline.seconds:g} s: {words}"
                + ("; the pool is paused" if paused else ""),
                remedy="pool.resume() lets them finish"
                if paused
                else "they still end when their work is done; is the pool paused? pool.resume() lets them finish",
            )
        with pool._changed:
            pool._changed.wait(deadline.within(0.5))
    pool.wait(deadline)
