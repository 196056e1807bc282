"""Validates the arguments of `lab.launch` and `Pool.in_process`, and turns them into engine settings."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jvlab._errors import ConfigError, Unsupported
from jvlab._names import check_name
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire.processes._pool_spec import MAX_REPLICAS, MAX_TENSOR_PARALLEL


@dataclass(frozen=True)
class EngineSettings:
    """The settings of one pool's engines."""

    model: str  # resolved
    device: str
    engine: dict[str, Any]
    env: dict[str, str]
    limits: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The arguments of `Lab.launch`, which documents them, and of `Pool.in_process`."""

    model: str
    replicas: int = 1
    tensor_parallel: int = 1
    load: str = "auto"
    device: str = "auto"
    engine: dict[str, Any] | None = None
    env: dict[str, str] | None = None
    name: str | None = None
    colocate: bool = False
    routing: str = "least"
    deterministic: bool = False
    speculative: dict[str, Any] | None = None
    http: bool | int = False
    place: str | dict[str, Any] | None = None
    limits: Mapping[str, int | None] | None = None

    def check_counts(self) -> None:
        """Raise ConfigError for an invalid name or number of processes."""
        if self.name is not None:
            check_name("pool", self.name)
        for what in ("engine", "env", "speculative"):
            given = getattr(self, what)
            if not (given is None or isinstance(given, Mapping)):
                raise ConfigError(f"{what} is {type(given).__name__}", remedy=f'a dict: {what}={{"name": value}}')
        for what, most in (("replicas", MAX_REPLICAS), ("tensor_parallel", MAX_TENSOR_PARALLEL)):
            count = getattr(self, what)
            if not isinstance(count, int) or count < 1:
                raise ConfigError(f"{what} must be a whole number of at least 1, not {count!r}")
            if count > most:
                raise ConfigError(f"{what}={count} is more than one pool takes", remedy=f"at most {most}")

    def settings(self) -> EngineSettings:
        """The settings; raises `ConfigError` if invalid. With `colocate`, also limits this process's GPU memory."""
        from jvlab.lab import _colocate, _determinism, _scaling
        from jvlab.trainer import models
        from jvlab.wire import _limits

        if self.load not in ("auto", "dummy"):
            raise ConfigError(f"load must be 'auto' or 'dummy', not {self.load!r}")
        _scaling.check_routing(self.routing)
        bounds = _limits.check_given(self.limits)
        path, device = models.resolve(self.model), resolve_device(self.device)
        latent = self.deterministic and _latent_attention(path)
        engine, env = _determinism.launch_settings(
            device, self.engine, self.env, self.deterministic, self.speculative, latent
        )
        arguments = dict(engine or {})
        if "head_dtype" in arguments:  # vLLM takes it as a config override
            given = arguments.get("hf_overrides") or {}
            if not isinstance(given, dict):
                raise ConfigError(
                    "head_dtype can't be combined with hf_overrides that are no dict", remedy="set it in hf_overrides"
                )
            arguments["hf_overrides"] = {**given, "head_dtype": str(arguments.pop("head_dtype"))}
        if device == "cpu" and arguments.get("enable_lora") and _has_experts(path):
            raise Unsupported(
                "vLLM 0.32.0 adapts no model with experts on a CPU: it dies at the first token, for want of Triton",
                remedy="launch without enable_lora and sync link.sync(policy.merge().params), or use a GPU",
                model=path,
            )
        if arguments.get("enable_return_routed_experts") and os.path.isdir(path) and not _has_experts(path):
            raise ConfigError(
                "enable_return_routed_experts, and the model has no experts", remedy="leave it out", model=path
            )
        if self.colocate:
            if device != "cuda":
                raise ConfigError(f"colocate=True shares a GPU, and the device is {device}", remedy="leave it out")
            arguments = _colocate.engine_arguments(arguments)
            _colocate.share_card(float(arguments["gpu_memory_utilization"]))
        return EngineSettings(path, device, arguments, dict(env or {}), bounds)

    def request(self) -> pb.LaunchRequest:
        """The request to the gateway; its pool name is empty if none was given."""
        from jvlab.lab import _scaling
        from jvlab.lab._http import launch_fields

        chosen = self.settings()
        try:
            engine_json, env_json = json.dumps(chosen.engine), json.dumps(chosen.env)
        except TypeError as error:
            raise ConfigError(f"an engine argument is not a plain value: {error}") from error
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
            **launch_fields(self.http),
            **_scaling.place_fields(self.place),
            limits_json=json.dumps(chosen.limits),
        )


def _has_experts(model: str) -> bool:
    """Whether a local model is a mixture of experts; False for a hub id."""
    from jvlab.layout.checkpoint._config import expert_count, read_config

    return os.path.isdir(model) and expert_count(read_config(model)) > 1


def _latent_attention(model: str) -> bool:
    """Whether a local model uses multi-head latent attention; False for a hub id."""
    from jvlab.layout.checkpoint._config import read_config

    return os.path.isdir(model) and "kv_lora_rank" in read_config(model)


def resolve_device(device: str) -> str:
    """ "cpu" or "cuda"; "auto" takes CUDA if there are both a CUDA build of vLLM and a GPU."""
    from jvlab.engine import _vllm_versions

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be 'auto', 'cpu' or 'cuda', not {device!r}")
    name, version = _vllm_versions.build()
    if text := _vllm_versions.warning(full=False):
        warnings.warn(text, stacklevel=2)
    cuda_build = name == "vllm" and "cpu" not in version
    gpu = os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidia0")
    if device == "cuda" and not (cuda_build and gpu):
        lacks = "no NVIDIA GPU was found" if cuda_build else f"{name} {version} is a CPU build"
        raise ConfigError(f"device='cuda', but {lacks}", remedy="`jvlab doctor` shows what this machine can run")
    if device == "auto":
        return "cuda" if cuda_build and gpu else "cpu"
    return device
