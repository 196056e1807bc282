"""Default engine arguments and environment variables per device and machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jvlab.engine import _cpu
from jvlab.layout._checkpoint import read_config_file

QUIET = {  # no telemetry, from vLLM or from the hub's client
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}

# How long an OpenMP thread spins for its next piece of work before it sleeps. libgomp's default is some milliseconds;
# this is what it chooses itself if its threads share cores. It cannot know that a trainer or another engine uses them
# as well, and those would wait for a core that only spins. On 2 cores, two test files with an engine each at the same
# time: 137 s with the default, 47 s with this; one engine alone is no slower.
SPINS = "1000"
GIB = 1 << 30


def usable_cores() -> list[int]:
    """The cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def thread_binding(
    cores: Sequence[int], ranks: int, replicas: int, replica: int
) -> str:
    """vLLM's VLLM_CPU_OMP_THREADS_BIND: one list of cores per rank, in order of replicas and ranks.

    With cores to spare, one is left for the processes around the engine. With fewer cores than ranks, ranks share.
    """
    usable = list(cores)
    total = ranks * replicas
    if len(usable) > total and len(usable) >= 4:
        usable = usable[:-1]
    share = max(1, len(usable) // total)
    lists = []
    for rank in range(ranks):
        first = (replica * ranks + rank) * share
        lists.append(
            ",".join(str(usable[(first + k) % len(usable)]) for k in range(share))
        )
    return "|".join(lists)


def _config(model: str) -> dict[str, Any]:
    """A local checkpoint's config; empty if there is none to read."""
    try:
        return read_config_file(Path(model))
    except (OSError, ValueError):
        return {}


def checkpoint_dtype(model: str) -> str | None:
    """The dtype in a local checkpoint's config, if there is one."""
    config = _config(model)
    named = config.get("dtype") or config.get("torch_dtype")
    return named if isinstance(named, str) else None


def cpu_dtype(model: str, given: Mapping[str, Any]) -> tuple[str, str]:
    """The dtype that an engine on this CPU needs instead of vLLM's choice, and a sentence for the user; else empty.

    Raises `Unsupported` for a dtype that was asked for by name and that the CPU cannot compute in.
    """
    if _cpu.plain_dtype(given.get("dtype")) != "auto":
        _cpu.check_dtype(given)
        return "", ""
    named = checkpoint_dtype(model)
    if named == "float32" and "dtype" not in given:
        return "", ""  # it stays float32
    stored = _config(model).get("quantization_config") or {}
    quantised = given.get("quantization") or (
        stored.get("quant_method") if isinstance(stored, dict) else None
    )
    return _cpu.instead_of(named, quantised)


def kv_cache_bytes(model: str, given: Mapping[str, Any], replicas: int) -> int:
    """Memory for the KV cache of an engine on a CPU: an eighth of what is free, at most 4 GiB, shared by the replicas.

    Less if all requests that may run at once need less at their full length: all of it is cleared at the start, which
    takes about a second per GiB. They are `max_num_seqs`, 64 unless it is given.
    """
    import psutil

    room = min(4 * GIB, max(GIB, psutil.virtual_memory().available // (8 * replicas)))
    config = _config(model)
    try:
        config = config.get("text_config") or config
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        width = (
            config.get("head_dim")
            or config["hidden_size"] // config["num_attention_heads"]
        )
        asked = _cpu.plain_dtype(given.get("dtype"))
        if asked == "auto":
            asked = _cpu.plain_dtype(config.get("dtype") or config.get("torch_dtype"))
        item = 2 if asked in ("bfloat16", "float16") else 4
        token = 2 * config["num_hidden_layers"] * heads * width * item
        length = given.get("max_model_len") or config["max_position_embeddings"]
        needed = int(given.get("max_num_seqs") or 64) * int(length) * token
        return min(room, max(64 << 20, needed))
    except (ValueError, KeyError, TypeError):
        return room  # not a local checkpoint, or one that does not say


def engine_arguments(
    model: str,
    device: str,
    tensor_parallel: int,
    load: str,
    given: dict[str, Any],
    replicas: int = 1,
) -> dict[str, Any]:
    """Engine arguments: jvlab's defaults, overridden by what the caller gave."""
    ours: dict[str, Any] = {
        "model": model,
        "tensor_parallel_size": tensor_parallel,
        "load_format": load,
        # After temperature and filters: the probability the token was really drawn with, which is what an importance
        # ratio divides by. Raw log-probabilities differ from it as soon as temperature is not 1 or a filter is on.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "jvlab.engine.worker._extension.WorkerExtension",
        "enable_prefix_caching": True,
    }
    if given.get("enable_lora"):
        # a new version of an adapter is loaded beside the one in use, in host memory
        ours["max_cpu_loras"] = 2 * int(given.get("max_loras", 1)) + 2
    if device == "cpu" and given.get("enable_return_routed_experts"):
        # positions that are not computed have no routes (worker/_routes.py)
        ours["enable_prefix_caching"] = False
    if checkpoint_dtype(model) == "float32":
        # vLLM's "auto" would use 16 bits, and trainer and engine would disagree
        ours["dtype"] = "float32"
    if device == "cpu":
        if instead := cpu_dtype(model, given)[0]:
            given = {**given, "dtype": instead}
        ours["enforce_eager"] = True  # torch.compile costs minutes on a CPU
        # not by VLLM_CPU_KVCACHE_SPACE, which would override an argument of the caller
        ours["kv_cache_memory_bytes"] = kv_cache_bytes(model, given, replicas)
        if tensor_parallel > 1:
            ours["distributed_executor_backend"] = "mp"
    return {**ours, **given}


def environment(
    device: str,
    tensor_parallel: int,
    replicas: int,
    replica: int,
    cores: Sequence[int],
    model: str,
    gpus: Sequence[str] = (),
) -> dict[str, str]:
    """Environment variables of one rollout process."""
    env = dict(QUIET)
    if device == "cuda" and replicas > 1 and len(gpus) >= replicas * tensor_parallel:
        # each replica gets its own GPUs; with too few, replicas share, and the caller's memory settings must allow it
        env["CUDA_VISIBLE_DEVICES"] = ",".join(
            gpus[replica * tensor_parallel : (replica + 1) * tensor_parallel]
        )
    if Path(model).is_dir():
        # nothing to download: don't wait for a hub that may not answer
        env["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        env["VLLM_TARGET_DEVICE"] = "cpu"
        # The sampler's kernels are compiled by g++. torch keeps precompiled headers for it in the temporary folder,
        # which is the replica's own: each would compile them again, and find no kernel that another has compiled.
        env["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
        env["VLLM_CPU_OMP_THREADS_BIND"] = thread_binding(
            cores, tensor_parallel, replicas, replica
        )
        if "OMP_WAIT_POLICY" not in os.environ:  # which it would override
            env["GOMP_SPINCOUNT"] = SPINS
    return env


@contextlib.contextmanager
def variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables; afterwards restore all, those that vLLM sets (LD_PRELOAD) included."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
