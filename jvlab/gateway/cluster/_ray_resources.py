"""The resources a replica needs on Ray, and the bundles that request them: pure functions, without ray.

bundles   one, on one node: {"CPU": cpus, "GPU": gpus, **resources}
engine    with distributed_executor_backend="ray" vLLM itself requests its GPUs, on as many nodes as needed; our actor
          then only runs the engine's front end and requests none
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jvlab._errors import ConfigError

RESTARTS = 3  # of one replica by Ray, before it stays failed


@dataclass(frozen=True)
class Resources:
    """What one replica needs, from `launch(place={...})`. None: derived from tensor_parallel."""

    cpus: float | None = None
    gpus: float | None = None
    resources: dict[str, float] = field(default_factory=dict)
    # addresses or node ids; replica k goes to nodes[k % len]
    nodes: tuple[str, ...] = ()
    restarts: int = RESTARTS

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
        if (
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


def one_host(nodes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all live nodes are on one machine, as in a test cluster."""
    return len({node["NodeManagerAddress"] for node in nodes if node["Alive"]}) == 1
