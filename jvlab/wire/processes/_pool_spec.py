"""The options that a pool was launched with."""

from __future__ import annotations

from dataclasses import dataclass

MAX_REPLICAS = 4096  # of one pool: each is a process, or several
MAX_TENSOR_PARALLEL = 1024
RESTARTS = 3  # of a replica that dies, unless a launch says otherwise
MAX_RESTARTS = 100
# that replicas on other hosts wait for their gateway, and a gateway that was started again for them
AWAY_SECONDS = 60.0


@dataclass(frozen=True)
class PoolSpec:
    """One pool of equal replicas, as launched."""

    pool: str
    model: str
    replicas: int
    tensor_parallel: int
    load: str
    device: str
    engine_json: str
    env_json: str
    routing: str = "least"
    place: str = "local"  # who starts the processes: "local", "join" or "ray"
    place_json: str = "{}"
    http: bool = False  # serve HTTP beside gRPC
    limits_json: str = "{}"  # of one call, over the defaults
    restarts: int = 0  # how often a replica that dies is started again
    # of the one process that this spec starts; see Replica.run in gateway/_registry.py
    run: int = 0
