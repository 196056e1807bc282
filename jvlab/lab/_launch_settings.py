"""Validates the arguments of `lab.launch` and `Pool.in_process`, and turns them into engine settings."""

from __future__ import annotations

import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from jvlab._errors import ConfigError, UnknownName, Unsupported
from jvlab._files import Plain
from jvlab._names import check_name
from jvlab.gateway._routing import check_policy
from jvlab.layout._checkpoint import expert_count, read_config
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire.processes._pool_spec import (
    MAX_REPLICAS,
    MAX_RESTARTS,
    MAX_TENSOR_PARALLEL,
    RESTARTS,
)

# Options as fields of a request.


def launch_fields(http: bool | int, key: bool = False) -> Plain:
    """`launch(http=...)` as request fields: True takes a free port, a number that port."""
    if isinstance(http, bool):
        return {"http": http, "http_key": key}
    if not isinstance(http, int) or not 0 < http < 2**16:
        raise ConfigError(
            f"http must be True, False or a port, not {http!r}",
            remedy="True takes a free port",
        )
    return {"http": True, "http_port": http, "http_key": key}


def place_fields(place: str | Plain | None) -> Plain:
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


# Trainer and engine on one GPU: how its memory is divided.
# JAX's default allocator never returns memory and never exceeds its share, so it could neither use what a sleeping
# engine frees nor give it back. Its `cuda_async` allocator keeps its share, takes more if available, and releases
# memory above the share at the next synchronisation after it is freed.

ENGINE_SHARE = 0.45
SPARE = 0.08  # CUDA contexts, graphs, and kernels' own memory, on both sides
# JAX refuses both together
FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
ELASTIC = "cuda_async"


def engine_arguments(given: Plain) -> Plain:
    """The engine's arguments: its share of the GPU, and sleep mode, so that `pool.sleep` can free it."""
    return {"gpu_memory_utilization": ENGINE_SHARE, "enable_sleep_mode": True, **given}


def trainer_share(engine: float) -> float:
    """JAX's share next to an engine with that share; it may take more while the engine sleeps."""
    share = 1.0 - SPARE - engine
    if not 0.0 < engine < 1.0 or share < 0.05:
        raise ConfigError(
            f"gpu_memory_utilization={engine:g} leaves {max(0.0, share):.0%} of the GPU to the trainer",
            remedy=f"launch(..., colocate=True, engine={{'gpu_memory_utilization': {ENGINE_SHARE}}})",
        )
    return round(share, 2)


def share_card(engine: float) -> None:
    """Limit this process's JAX memory pool; if JAX has started already, check that it left enough."""
    share = trainer_share(engine)
    if not jax_has_started():
        if not os.environ.get(FRACTION) and not os.environ.get(OLD_FRACTION):
            os.environ[FRACTION] = str(share)
        os.environ.setdefault(ALLOCATOR, ELASTIC)
        # allocate the share now, at the first array: the engine measures free memory while it starts
        import jax

        jax.block_until_ready(jax.numpy.zeros(1))
        return
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    taken = stats.get("bytes_limit", 0)
    total = _card_bytes()
    if not total or taken <= (share + SPARE / 2) * total:
        return
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in (
        "false",
        "0",
    ):
        return  # an upper bound, not memory that JAX holds
    raise ConfigError(
        f"JAX has already taken {taken / total:.0%} of the GPU, but the engine is to have {engine:.0%}",
        remedy=f"launch(colocate=True) before the first array, or set {FRACTION}={share} and {ALLOCATOR}={ELASTIC} "
        "when the kernel starts",
        taken=taken,
        total=total,
    )


def give_back() -> None:
    """Before an engine wakes: return what this process's JAX has freed above its share."""
    if os.environ.get(ALLOCATOR) != ELASTIC or not jax_has_started():
        return
    from importlib.util import find_spec

    if find_spec("cupy") is None:  # CUDA then releases it at JAX's next synchronisation
        return
    import cupy
    import jax

    for device in jax.local_devices():
        if device.platform in ("gpu", "cuda"):
            cupy.cuda.Device(
                int(getattr(device, "local_hardware_id", 0) or 0)
            ).synchronize()


def jax_has_started() -> bool:
    """Whether JAX's backends are initialized in this process, which fixes its memory settings."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bool(bridge is not None and bridge.backends_are_initialized())


def _card_bytes() -> int:
    from importlib.util import find_spec

    if find_spec("cupy") is None:
        return 0
    import cupy

    return int(cupy.cuda.runtime.memGetInfo()[1])


# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineSettings:
    """The settings of one pool's engines."""

    model: str  # resolved
    device: str
    engine: Plain
    env: dict[str, str]
    limits: dict[str, int]


F = TypeVar("F", bound=Callable[..., Any])


def shows_options(source: Callable[..., Any]) -> Callable[[F], F]:
    """For `help` and completion: a signature with the options of `source` in place of **options."""

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        shown = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        named = [p.name for p in shown]
        shown += [
            p
            for p in inspect.signature(source).parameters.values()
            if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) and p.name not in named
        ]
        function.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return decorate


class LaunchArguments(TypedDict, total=False):
    """The options of `lab.launch` and `Pool.in_process`, for type checkers and editors: those of `LaunchOptions`."""

    replicas: int
    tensor_parallel: int
    load: str
    device: str
    engine: Plain | None
    env: dict[str, str] | None
    name: str | None
    colocate: bool
    routing: str
    deterministic: bool
    speculative: Plain | None
    http: bool | int
    http_key: bool
    place: str | Plain | None
    limits: Mapping[str, int | None] | None
    restarts: int


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The arguments of `lab.launch`, which documents them, and of `Pool.in_process`."""

    model: str
    replicas: int = 1
    tensor_parallel: int = 1
    load: str = "auto"
    device: str = "auto"
    engine: Plain | None = None
    env: dict[str, str] | None = None
    name: str | None = None
    colocate: bool = False
    routing: str = "least"
    deterministic: bool = False
    speculative: Plain | None = None
    http: bool | int = False
    http_key: bool = False
    place: str | Plain | None = None
    limits: Mapping[str, int | None] | None = None
    restarts: int = RESTARTS

    @classmethod
    def of(cls, call: str, model: str, options: Mapping[str, Any]) -> LaunchOptions:
        """From the arguments of a call; one that does not exist is an error that names one that does."""
        known = LaunchArguments.__annotations__
        for name in options:
            if name not in known:
                raise UnknownName.of(
                    f"option of {call}",
                    name,
                    known,
                    "help(jv.Lab.launch) explains them",
                )
        return cls(model=model, **options)

    def check_counts(self) -> None:
        """Raise ConfigError for an invalid name or number of processes."""
        if self.name is not None:
            check_name("pool", self.name)
        if self.http_key and self.http is False:
            raise ConfigError(
                "http_key=True, and no HTTP is served",
                remedy="lab.launch(..., http=True, http_key=True)",
            )
        for what in ("engine", "env", "speculative"):
            given = getattr(self, what)
            if not (given is None or isinstance(given, Mapping)):
                raise ConfigError(
                    f"{what} is {type(given).__name__}",
                    remedy=f'a dict: {what}={{"name": value}}',
                )
        for what, most in (
            ("replicas", MAX_REPLICAS),
            ("tensor_parallel", MAX_TENSOR_PARALLEL),
        ):
            count = getattr(self, what)
            if not isinstance(count, int) or count < 1:
                raise ConfigError(
                    f"{what} must be a whole number of at least 1, not {count!r}"
                )
            if count > most:
                raise ConfigError(
                    f"{what}={count} is more than one pool takes",
                    remedy=f"at most {most}",
                )
        check_restarts(self.restarts)

    def settings(self) -> EngineSettings:
        """The settings; raises `ConfigError` if invalid. With `colocate`, also limits this process's GPU memory."""
        from jvlab.lab import _determinism
        from jvlab.trainer import models
        from jvlab.wire import _limits

        if self.load not in ("auto", "dummy"):
            raise ConfigError(f"load must be 'auto' or 'dummy', not {self.load!r}")
        check_policy(self.routing)
        bounds = _limits.check_given(self.limits)
        path = models.resolve(self.model)
        device = resolve_device(self.device)
        latent = self.deterministic and "kv_lora_rank" in _config_of(path)
        engine, env = _determinism.launch_settings(
            device, self.engine, self.env, self.deterministic, self.speculative, latent
        )
        arguments = dict(engine or {})
        if "head_dtype" in arguments:  # vLLM takes it as a config override
            given = arguments.get("hf_overrides") or {}
            if not isinstance(given, dict):
                raise ConfigError(
                    "head_dtype can't be combined with hf_overrides that are not a dict",
                    remedy="set it in hf_overrides",
                )
            arguments["hf_overrides"] = {
                **given,
                "head_dtype": str(arguments.pop("head_dtype")),
            }
        if (
            device == "cpu"
            and arguments.get("enable_lora")
            and expert_count(_config_of(path)) > 1
        ):
            raise Unsupported(
                "vLLM 0.32.0 cannot adapt a model with experts on a CPU: without Triton it dies at the first token",
                remedy="launch without enable_lora and sync link.sync(policy.merge().params), or use a GPU",
                model=path,
            )
        if (
            arguments.get("enable_return_routed_experts")
            and os.path.isdir(path)
            and expert_count(_config_of(path)) <= 1
        ):
            raise ConfigError(
                "enable_return_routed_experts, but the model has no experts",
                remedy="leave it out",
                model=path,
            )
        if self.colocate:
            if device != "cuda":
                raise ConfigError(
                    f"colocate=True shares a GPU, but the device is {device}",
                    remedy="leave it out",
                )
            arguments = engine_arguments(arguments)
            share_card(float(arguments["gpu_memory_utilization"]))
        return EngineSettings(path, device, arguments, dict(env or {}), bounds)

    def request(self) -> pb.LaunchRequest:
        """The request to the gateway; its pool name is empty if none was given."""
        chosen = self.settings()
        try:
            engine_json = json.dumps(chosen.engine)
            env_json = json.dumps(chosen.env)
        except TypeError as error:
            raise ConfigError(
                f"an engine argument is not a plain value: {error}"
            ) from error
        return pb.LaunchRequest(
            pool=self.name or "",
            model=chosen.model,
            replicas=self.replicas,
            tensor_parallel=self.tensor_parallel,
            load=self.load,
            device=chosen.device,
            engine_json=engine_json,
            env_json=env_json,
            routing=self.routing,
            **launch_fields(self.http, self.http_key),
            **place_fields(self.place),
            limits_json=json.dumps(chosen.limits),
            restarts=self.restarts,
        )


def check_restarts(restarts: Any) -> None:
    """Raise ConfigError for a number of restarts that no pool can have."""
    whole = isinstance(restarts, int) and not isinstance(restarts, bool)
    if not whole or not 0 <= restarts <= MAX_RESTARTS:
        raise ConfigError(
            f"restarts must be a whole number from 0 to {MAX_RESTARTS}, not {restarts!r}",
            remedy="0: a replica that dies stays failed until pool.restart(replica)",
        )


def _config_of(model: str) -> Mapping[str, Any]:
    """The config of a local model; empty for a hub id."""
    return read_config(model) if os.path.isdir(model) else {}


def resolve_device(device: str) -> str:
    """ "cpu" or "cuda"; "auto" takes CUDA if there are both a CUDA build of vLLM and a GPU."""
    from jvlab.engine import _vllm_versions

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be 'auto', 'cpu' or 'cuda', not {device!r}")
    name, version = _vllm_versions.build()
    if text := _vllm_versions.warning(full=False):
        warnings.warn(text, stacklevel=2)
    cuda_build = name == "vllm" and "cpu" not in version
    gpu = os.path.exists("/proc/driver/nvidia/version") or os.path.exists(
        "/dev/nvidia0"
    )
    if device == "cuda" and not (cuda_build and gpu):
        lacks = (
            "no NVIDIA GPU was found"
            if cuda_build
            else f"{name} {version} is a CPU build"
        )
        raise ConfigError(
            f"device='cuda', but {lacks}",
            remedy="`jvlab doctor` shows what this machine can run",
        )
    if device == "auto":
        return "cuda" if cuda_build and gpu else "cpu"
    return device
