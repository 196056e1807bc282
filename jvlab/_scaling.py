"""More or fewer replicas of a pool, and which of them takes a prompt: the caller's end."""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError, DeadlineExceeded
from jvlab.control import jvlab_pb2 as pb
from jvlab.control._routing import POLICIES

if TYPE_CHECKING:
    from jvlab._pool import Pool

LEAVING = (pb.DRAINING, pb.CLOSED)


def staying(snapshot: pb.PoolStatus) -> list[pb.ReplicaStatus]:
    """The replicas that are part of the pool, and of a closed one all that were."""
    return [r for r in snapshot.replicas if snapshot.closed or r.state not in LEAVING]


def check_routing(routing: str | None) -> None:
    if routing is not None and routing not in POLICIES:
        names = ", ".join(map(repr, POLICIES))
        raise ConfigError(f"routing={routing!r} is not known", remedy=f"one of {names}", routing=routing)


def check_version(version: Any) -> int:
    """The version as the gateway takes it; 0 stands for the pool's own."""
    if version is None:
        return 0
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ConfigError(
            f"min_version must be a whole number of at least 1, not {version!r}",
            remedy="versions are counted from the first sync; leave it out for the pool's current one",
        )
    return version


def place_fields(place: str | dict[str, Any] | None) -> dict[str, Any]:
    """`place` of a launch as the gateway takes it."""
    if place is None:
        return {}
    if isinstance(place, str):
        if place not in ("local", "join"):
            raise ConfigError(
                f"place={place!r} is not known",
                remedy='"local", "join", or on Ray {"cpus": 1, "gpus": 1, "nodes": [address, ...]}',
            )
        return {"place": place}
    from jvlab.cluster._ray_places import Wish

    return {"place": "ray", "place_json": Wish.of(place).to_json()}


def on_this_host(pool: Pool, gateway: str) -> bool:
    """Whether every replica that is ready runs on this machine."""
    ready = [r for r in pool._snapshot.replicas if r.state == pb.READY]
    return all((r.facts.host or gateway) == platform.node() for r in ready) if ready else gateway == platform.node()


def reachable(options: dict[str, Any], gateway: str) -> dict[str, Any]:
    """Options of a transport to other hosts: unless the caller chose, it binds to our address towards the gateway."""
    from jvlab.control import _channels, _security

    host = _channels.host_of(gateway)
    if "host" in options or _security.is_loopback(host):
        return options
    return {**options, "host": _channels.address_towards(host)}


def scale(pool: Pool, replicas: Any, wait: bool, timeout: float) -> Pool:
    """Order so many replicas, and wait until those that come are ready and those that go are gone."""
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ConfigError(
            f"a pool has at least 1 replica, so scale({replicas!r}) makes no sense",
            remedy="pass a whole number of at least 1; pool.close() ends the pool",
        )
    deadline = time.monotonic() + timeout
    pool._take(pool._client.call("Scale", pb.ScaleRequest(pool=pool.name, replicas=replicas)))
    if not wait:
        return pool
    while leaving := [r for r in pool._snapshot.replicas if r.state in LEAVING]:
        if pool._snapshot.closed:
            break  # pool.wait() says why
        if time.monotonic() > deadline:
            words = ", ".join(f"{r.replica} is {r.stage} with {r.routed} in flight" for r in leaving)
            raise DeadlineExceeded(
                f"{pool.name} did not let go of all within {timeout:g} s: {words}",
                remedy="they still end when their work is done; is the pool paused? pool.resume() lets them finish",
            )
        with pool._changed:
            pool._changed.wait(min(0.5, max(0.0, deadline - time.monotonic())))
    return pool.wait(max(0.0, deadline - time.monotonic()))
