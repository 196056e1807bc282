"""What `lab.launch` and `Pool.in_process` make of their arguments: checked, and turned into an engine's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jvlab._errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """Of one pool's engines."""

    model: str  # resolved
    device: str
    engine: dict[str, Any]
    env: dict[str, str]


def settings(
    model: str,
    load: str,
    device: str,
    engine: dict[str, Any] | None,
    env: dict[str, str] | None,
    colocate: bool,
    routing: str,
    deterministic: bool,
    speculative: dict[str, Any] | None,
) -> Settings:
    """Raises `ConfigError` for what does not fit. With `colocate`, bounds this process's share of the card too."""
    from jvlab import _colocate, _determinism, _scaling, models
    from jvlab._lab import resolve_device

    if load not in ("auto", "dummy"):
        raise ConfigError(f"load must be 'auto' or 'dummy', not {load!r}")
    _scaling.check_routing(routing)
    path, device = models.resolve(model), resolve_device(device)
    engine, env = _determinism.launch_settings(device, engine, env, deterministic, speculative)
    arguments = dict(engine or {})
    if colocate:
        if device != "cuda":
            raise ConfigError(f"colocate=True shares a GPU, and the device is {device}", remedy="leave it out")
        arguments = _colocate.engine_arguments(arguments)
        _colocate.share_card(float(arguments["gpu_memory_utilization"]))
    return Settings(path, device, arguments, dict(env or {}))
