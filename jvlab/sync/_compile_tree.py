"""Traces a model or pool, binds a tree to it, and compiles a mapping and its plan."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from collections.abc import Mapping as Dict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError
from jvlab._names import model_words
from jvlab._progress import importing
from jvlab.layout.checkpoint._config import read_config
from jvlab.sync._bind import bind_rules, shapes_for

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.layout._types import Binding, CheckpointTensor, RankLayout
    from jvlab.layout.rules._ruleset import Rules
    from jvlab.sync._mapping import Mapping


MakeMapping = Callable[..., "Mapping"]
LINK_GBPS = 50.0  # GB/s each way per device: a 400 Gb/s network port
CPU_GBPS = 2.0  # into an engine on a CPU, packing and digests included, as seen with shm on two cores


def trace_and_compile(
    into: MakeMapping,
    params: Any,
    model: str | os.PathLike[str] | Dict[str, Any] | Pool,
    tensor_parallel: int = 1,
    replicas: int = 1,
    mesh: object = None,
    rules: Any = "auto",
    bucket_mib: float = 64,
    link_gbps: float | None = None,
    pipeline_parallel: int = 1,
    expert_parallel: bool = False,
    dtype: str = "auto",
    quantization: str | None = None,
    timing: dict[str, float] | None = None,
) -> Mapping:
    """The mapping and its plan, traced offline or in a running pool; `into` is the mapping's class.

    The seconds of each step are written into `timing`.
    """
    from jvlab.layout._block_formats import before_blocks, with_block_scales
    from jvlab.layout._shards import MeshSpec
    from jvlab.layout.checkpoint._tensors import checkpoint_tensors
    from jvlab.layout.checkpoint._values import CheckpointValues

    clock = _Clock(timing)
    if not isinstance(model, (str, os.PathLike, Dict)):  # a running pool: trace its engine
        return _for_pool(into, model, params, mesh, rules, bucket_mib, link_gbps, clock)
    config = read_config(model)
    tensors = checkpoint_tensors(model)
    if params is None:
        # raises before tracing if there is no tree to plan for
        shapes_for(rules, config, before_blocks(tensors, config))
    if mesh is not None:
        MeshSpec.of(mesh)
    clock.lap("checkpoint_s")
    with _quiet_vllm():
        trace_offline = _import_tracer()
        clock.lap("import_vllm_s")
        options = {
            "tensor_parallel": tensor_parallel,
            "pipeline_parallel": pipeline_parallel,
            "expert_parallel": expert_parallel,
            "dtype": _engine_dtype(dtype, config),
            "quantization": quantization,
        }
        layouts = trace_offline(model, tensors=tensors, **options)
        if (in_blocks := with_block_scales(tensors, config, layouts)) != tensors:  # from config.json alone
            tensors = in_blocks
            layouts = trace_offline(model, tensors=tensors, **options)
    clock.lap("trace_s")
    title = model_words(str(model)) if not isinstance(model, Dict) else str(config.get("model_type", ""))
    return compile_tree(
        into,
        params,
        config,
        tensors,
        layouts,
        replicas,
        mesh,
        rules,
        bucket_mib,
        link_gbps,
        title,
        clock,
        checkpoint=CheckpointValues.of(model),
    )


def _for_pool(
    into: MakeMapping,
    pool: Any,
    params: Any,
    mesh: object,
    rules: Any,
    bucket_mib: float,
    link_gbps: float | None,
    clock: _Clock,
) -> Mapping:
    """The same for a running pool, whose ranks are traced in place, with the engine's own parallelism."""
    from jvlab.layout.checkpoint._tensors import checkpoint_tensors
    from jvlab.layout.checkpoint._values import CheckpointValues

    if not hasattr(pool, "trace"):
        raise ConfigError(
            f"model must be a model folder, a config or a pool, not {type(pool).__name__}",
            remedy="pass a path, a dict, or what lab.launch returned",
        )
    config, tensors = read_config(pool.model), checkpoint_tensors(pool.model)
    layouts = pool.trace(tensors)
    clock.lap("trace_s")
    return compile_tree(
        into,
        params,
        config,
        tensors,
        layouts,
        pool.replicas,
        mesh,
        rules,
        bucket_mib,
        CPU_GBPS if link_gbps is None and pool._snapshot.device == "cpu" else link_gbps,
        model_words(pool.model),
        clock,
        checkpoint=CheckpointValues.of(pool.model),
    )


@contextlib.contextmanager
def _quiet_vllm() -> Iterator[None]:
    """vLLM logs errors only: a dry run should print only the plan.

    The environment is as before afterwards, without what vLLM's imports set: later labs must not inherit any of it.
    """
    from jvlab.engine._defaults import variables

    level = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level)  # vLLM applies the variable too late for a warning of its own imports
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # it warns about missing Triton on a CPU
    with variables({"VLLM_LOGGING_LEVEL": level}):
        yield


def _import_tracer() -> Any:
    """`trace_offline`."""
    from jvlab.engine import _vllm_versions

    _vllm_versions.build()  # raises with the install command if vLLM is missing
    with importing("vLLM"):
        from jvlab.engine.tracing._offline import trace_offline

    return trace_offline


def _engine_dtype(dtype: str, config: Dict[str, Any]) -> str:
    """The dtype as `lab.launch` chooses it: a float32 checkpoint stays float32, the rest is vLLM's choice."""
    given = config.get("dtype") or config.get("torch_dtype")
    return "float32" if dtype == "auto" and given == "float32" else dtype


def compile_tree(
    into: MakeMapping,
    params: Any,
    config: Dict[str, Any],
    tensors: list[CheckpointTensor],
    layouts: list[RankLayout],
    replicas: int = 1,
    mesh: object = None,
    rules: Any = "auto",
    bucket_mib: float = 64,
    link_gbps: float | None = None,
    title: str = "",
    clock: _Clock | None = None,
    checkpoint: Dict[str, Any] | None = None,
) -> Mapping:
    """Bind rules, compile and prove the plan, for ranks that were traced already (offline or in a live engine)."""
    from jvlab.layout._block_formats import before_blocks, block_scales, expand_blocks
    from jvlab.layout._compile import compile_plan
    from jvlab.layout._formats import expand_formats
    from jvlab.layout._shards import device_processes, leaves_of, mesh_processes
    from jvlab.layout._torch_leaf import checkpoint_names
    from jvlab.layout._tree import FlatTree, flatten
    from jvlab.sync._rebind import Origin

    clock = clock or _Clock(None)
    if params is None:
        flat = FlatTree(shapes_for(rules, config, before_blocks(tensors, config)))
        mesh = mesh or "fsdp=1"
    else:
        flat = flatten(params)
    paths = flat.arrays.keys()
    kept, tied, rules = checkpoint_names(flat.arrays, rules, tensors)
    flat = FlatTree(kept, (*flat.skipped, *tied))
    if params is not None and not flat.arrays:
        raise ConfigError("the tree holds no array", remedy="pass the parameters, e.g. policy.params")
    scales = block_scales(tensors, config) if not any(_is_fp8(x) for x in flat.arrays.values()) else {}
    hidden = {scale.tensor.name for scale in scales.values()}  # filled by the scales that quantising makes
    tensors = [t for t in tensors if t.name not in hidden]
    values = flat.arrays if checkpoint is not None and all(map(_readable, flat.arrays.values())) else None
    in_force, bindings = bind_rules(rules, flat.shapes, tensors, config, values, checkpoint)
    if params is None:  # the tree is derived from the rules, so nothing was assumed
        in_force = replace(in_force, warnings={})
        bindings = [replace(b, warning="") for b in bindings]
    clock.lap("bind_s")
    leaves = leaves_of(flat.arrays, mesh)
    shapes, skipped = flat.shapes, flat.skipped
    processes = device_processes(flat.arrays) if mesh is None else mesh_processes(mesh)

    def make(in_force: Rules, bindings: list[Binding]) -> Mapping:
        bound = {b.leaf for b in bindings}
        sent, sent_bindings, in_blocks = expand_blocks(leaves, bindings, scales)
        sent, sent_bindings, sent_layouts, quantised = expand_formats(sent, sent_bindings, layouts)
        made = compile_plan(
            sent,
            sent_bindings,
            sent_layouts,
            replicas=replicas,
            bucket_mib=bucket_mib,
            link_gbps=LINK_GBPS if link_gbps is None else link_gbps,
            device_process=processes,
            title=title,
            ignored_leaves=[x.path for x in leaves if x.path not in bound],  # `bind` raises unless a rule ignores them
        )
        made = replace(made, quantised=(*in_blocks, *quantised))
        made._connected.update(paths)
        return into(made, bindings, layouts, skipped, Origin(in_force, shapes, tuple(tensors), config, make))

    mapping = make(in_force, bindings)
    clock.lap("compile_and_prove_s")
    return mapping


def _is_fp8(array: Any) -> bool:
    """Whether the trainer's tree holds fp8 values already: then it has their scales, as the checkpoint does."""
    return str(getattr(array, "dtype", "")).endswith("float8_e4m3fn")


def _readable(array: Any) -> bool:
    """Can this process read the whole array? It may span processes."""
    return hasattr(array, "__array__") and bool(getattr(array, "is_fully_addressable", True))


class _Clock:
    """Seconds of each step, by name."""

    def __init__(self, out: dict[str, float] | None) -> None:
        self.out, self.at = out if out is not None else {}, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.out[name] = round(now - self.at, 4)
        self.at = now
