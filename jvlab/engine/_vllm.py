"""Every dependence on vLLM's engine-side internals, in one place. Checked against vLLM 0.32.0.

vLLM is imported only inside functions. `_vllm_versions.py` lists the names that are used and says which are missing.
(What is changed of vLLM is in `_patches.py`, the model and loader side in `engine/tracing/_vllm_model.py`, HTTP in
`_http.py`.)
"""

from __future__ import annotations

import copy
import os
import time
from collections import deque
from typing import Any

from jvlab._errors import ConfigError, SyncError
from jvlab.engine import _patches, _vllm_versions
from jvlab.wire import jvlab_pb2 as pb

STATS_VERSION = "jv_version"  # attribute of a step's stats: the version that made them
# methods whose drafts come from the text alone; all others have weights of their own
DRAFTS_FROM_TEXT = ("ngram", "suffix")
VERSIONS_KEPT = 32  # whose drafts are counted
RESERVED = {  # sampling parameters that jvlab sets itself, and why
    "n": "use the argument n",
    "logprobs": "the sampled token's log-probability is always returned",
    "prompt_logprobs": "use pool.score",
    "prompt_logprob_token_ids": "use pool.score",
    "prompt_logprob_start": "use pool.score",
    "logprob_token_ids": "use pool.score(top=...)",
    "flat_logprobs": "jvlab sets it",
    "output_kind": "use pool.stream for samples as they finish",
    "stream_interval": "use pool.stream for samples as they finish",
    "skip_clone": "internal to vLLM",
    "detokenize": "text is always returned if there is a tokenizer",
    "spaces_between_special_tokens": "not passed through: text is decoded once, at the end",
    "output_text_buffer_length": "internal to vLLM",
    "structured_outputs": "not passed through yet",
}


class Meter:
    """Keeps the latest stats of vLLM's scheduler, and tokens/s over a few seconds."""

    WINDOW = 5.0

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Count from 0 again."""
        self.stats = pb.ReplicaStats()  # what vLLM counts
        # version -> tokens drafted, accepted; of the newest versions
        self.drafts: dict[int, tuple[int, int]] = {}
        self._recent: deque[tuple[float, int]] = deque()

    def record(self, scheduler: Any, iteration: Any) -> None:
        stats = self.stats
        if scheduler is not None:
            stats.running = scheduler.num_running_reqs
            stats.waiting = scheduler.num_waiting_reqs
            stats.kv_use = scheduler.kv_cache_usage
            stats.prefix_queries += scheduler.prefix_cache_stats.queries
            stats.prefix_hits += scheduler.prefix_cache_stats.hits
            if scheduler.spec_decoding_stats is not None:
                self._count_drafts(scheduler)
        if iteration is not None:
            stats.generated_tokens += iteration.num_generation_tokens
            stats.prompt_tokens += iteration.num_prompt_tokens
            self._recent.append((time.monotonic(), iteration.num_generation_tokens))

    def _count_drafts(self, scheduler: Any) -> None:
        """Of one step, for the version that checked them: the message says which (`labelling_stats`)."""
        drafted = scheduler.spec_decoding_stats.num_draft_tokens
        accepted = scheduler.spec_decoding_stats.num_accepted_tokens
        self.stats.draft_tokens += drafted
        self.stats.accepted_tokens += accepted
        version = int(getattr(scheduler, STATS_VERSION, None) or 0)
        before = self.drafts.pop(version, (0, 0))
        self.drafts[version] = (before[0] + drafted, before[1] + accepted)
        if len(self.drafts) > VERSIONS_KEPT:
            del self.drafts[min(self.drafts)]

    def tokens_per_s(self) -> float:
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - self.WINDOW:
            self._recent.popleft()
        if not self._recent:
            return 0.0
        return sum(count for _, count in self._recent) / max(
            now - self._recent[0][0], 0.1
        )


def _stat_logger(meter: Meter) -> Any:
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Forward(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            return

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ):
            meter.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            return

    return Forward


def start_engine(arguments: dict[str, Any], meter: Meter) -> Any:
    """An AsyncLLM for these engine arguments, without vLLM's own metrics exporters (they cost time on each step)."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    known = set(AsyncEngineArgs.__dataclass_fields__)
    for name in arguments:
        if name not in known:
            raise ConfigError(
                f"vLLM {_vllm_versions.build()[1]} has no engine argument {name!r}{nearest(name, known)}",
                remedy="engine={...} takes the names of vllm.AsyncEngineArgs",
            )
    # vLLM's default limits of sequences and tokens per step depend on the usage context: 128 and 2048 for an unknown
    # one, more for offline batches, as here (on an H200 1024 and 16384).
    config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    if config.scheduler_config.scheduler_cls is None:
        kind = (
            "JvlabAsyncScheduler"
            if config.scheduler_config.async_scheduling
            else "JvlabScheduler"
        )
        config.scheduler_config.scheduler_cls = f"jvlab.engine.worker._scheduler.{kind}"
    with _patches.forked(config.device_config.device_type):
        engine: Any = AsyncLLM(
            config,
            Executor.get_class(config),
            log_stats=False,
            log_requests=False,
            stat_loggers=[_stat_logger(meter)],
        )
    # vLLM always adds its Prometheus exporter, which costs more per sample than everything else here.
    manager = engine.logger_manager
    exporters = [
        logger
        for logger in manager.stat_loggers
        if isinstance(logger, PrometheusStatLogger)
    ]
    for exporter in exporters:
        manager.stat_loggers.remove(exporter)
    engine.jv_exporters = exporters
    labelling_stats(engine.engine_core)
    return engine


def labelling_stats(client: Any) -> None:
    """From now on the stats that this client of a core receives say which version their step was made with.

    Loggers get them without the message that they came in, which does.
    """
    receive = client.get_output_async

    async def get_output_async() -> Any:
        message = await receive()  # no deadline: vLLM's own loop waits here
        if message.scheduler_stats is not None:
            version = message.weight_version
            setattr(message.scheduler_stats, STATS_VERSION, version)
        return message

    client.get_output_async = get_output_async


def export_metrics(engine: Any) -> None:
    """Collect vLLM's own Prometheus metrics from now on, for HTTP."""
    engine.logger_manager.stat_loggers += engine.jv_exporters
    engine.jv_exporters = []


def has_our_scheduler(engine: Any) -> bool:
    """Whether the engine's scheduler can invalidate stale KV while requests are in flight (worker/_scheduler.py)."""
    return str(engine.vllm_config.scheduler_config.scheduler_cls).startswith(
        "jvlab.engine.worker._scheduler."
    )


async def invalidate_kv(engine: Any, recompute: bool) -> None:
    """No request will find KV of older weights; requests in flight keep their own unless `recompute`."""
    if not await engine.reset_prefix_cache(reset_running_requests=recompute):
        raise SyncError(
            "vLLM did not reset its prefix cache", remedy='sync with pause="abort"'
        )
    if is_multimodal(engine):
        await engine.reset_encoder_cache()


async def finish(
    engine: Any, version: int, recompute: bool, nonfinite: bool
) -> list[Any]:
    """Commit in the workers, invalidate KV of older weights and set the new version, in one round trip."""
    arguments = (str(version), recompute, nonfinite)
    answers = await engine.engine_core.call_utility_async("jv_finish", *arguments)
    if is_multimodal(engine):
        await engine.reset_encoder_cache()
    return answers


async def poison(engine: Any) -> None:
    """Weights that are not finite were committed: KV that they compute is cleared at the next commit."""
    await engine.engine_core.call_utility_async("jv_poison")


async def core_channel(engine: Any, wanted: bool) -> tuple[list[str], bool]:
    """Open or close the core channel for a trainer on this host: its path and key, or empty.

    And whether the core began a sync over the previous channel that no order of ours followed.
    """
    # one core of several, or one in its trainer's process
    if engine.vllm_config.parallel_config.data_parallel_size > 1 or getattr(
        engine.engine_core, "in_process", False
    ):
        return [], False
    invitation, unheard = await engine.engine_core.call_utility_async(
        "jv_open_core_channel", wanted
    )
    return list(invitation), unheard


def is_multimodal(engine: Any) -> bool:
    """Whether it has an encoder, whose outputs are cached too."""
    return bool(engine.vllm_config.model_config.is_multimodal_model)


def nearest(name: str, known: set[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def sampling_names() -> list[str]:
    """The sampling parameters that a user may pass."""
    from vllm import SamplingParams

    names = set(SamplingParams.__struct_fields__) - RESERVED.keys()
    return sorted(name for name in names if not name.startswith("_"))


def sampling(values: dict[str, Any], has_tokenizer: bool) -> Any:
    """SamplingParams for one sample, with the sampled token's log-probability and nothing else."""
    import msgspec
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if isinstance(bias := values.get("logit_bias"), dict):
        # JSON turned its keys into strings
        values = {**values, "logit_bias": {int(k): v for k, v in bias.items()}}
    # Stop strings need vLLM's incremental detokenizer; otherwise one decode at the end is cheaper.
    detokenize = has_tokenizer and bool(values.get("stop") or values.get("bad_words"))
    ours = {
        "n": 1,
        "logprobs": 0,
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    params = SamplingParams(**{**values, **ours, "detokenize": detokenize})
    # vLLM checks no types here; a value of a wrong type would kill the engine's input thread that decodes it.
    msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    return params


def reseeded(params: Any, sample: int) -> Any:
    """A copy of the parameters for sample number `sample`: its own seed, so that samples differ and can be repeated."""
    own = copy.copy(params)
    own.skip_clone = True  # it is not shared; vLLM would make another deep copy
    if params.seed is not None:
        own.seed = params.seed + sample
    return own


def scoring(top: int) -> Any:
    """SamplingParams that score a prompt in one prefill pass."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=top,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def prompt(ids: list[int]) -> Any:
    """Token ids as an engine input, without vLLM's own rendering."""
    from vllm.inputs import tokens_input

    return tokens_input(ids)


def lora_request(name: str, number: int, path: str) -> Any:
    """A request's reference to an adapter; vLLM identifies adapters by the number."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, path)


def adapter_slots(engine: Any) -> int:
    """The adapters that one step can compute with; 0: the engine was started without LoRA."""
    lora = getattr(engine.vllm_config, "lora_config", None)
    return int(lora.max_loras) if lora else 0


def client_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises for an invalid request."""
    from vllm.exceptions import VLLMClientError

    return (VLLMClientError, ValueError, TypeError)


def dead_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises when the engine is dead."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return (EngineDeadError,)


def core_signal(engine: Any) -> int:
    """The signal that ended the engine's core; 0 if none did, or its core is in this process."""
    manager: Any = getattr(engine.engine_core.resources, "engine_manager", None)
    finished = manager.finished_procs() if hasattr(manager, "finished_procs") else {}
    return next((-code for code in finished.values() if code < 0), 0)


async def pause(engine: Any, mode: str, clear_cache: bool) -> None:
    """Pause without the fixed 20 ms sleep at the end of AsyncLLM.pause_generation."""
    await engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)


async def wake(engine: Any, tags: list[str]) -> None:
    """Allocate memory again. `AsyncLLM.wake_up` would also resume generation, which is for the caller to decide."""
    if has_our_scheduler(engine):
        await engine.engine_core.call_utility_async("jv_wake", tags)
    # a scheduler of the user's own, without our method; such an engine is never synced
    else:
        await engine.wake_up(tags)


def facts(engine: Any) -> dict[str, Any]:
    """Constants of the engine."""
    config = engine.vllm_config
    model = config.model_config
    name, version = _vllm_versions.build()
    drafting = config.speculative_config
    drafter = getattr(drafting, "draft_model_config", None)
    drafts = bool(drafting) and not drafting.method.startswith(DRAFTS_FROM_TEXT)
    lora = config.lora_config
    return {
        "vllm_version": version,
        "vllm_build": name,
        "vllm_warning": _vllm_versions.warning(full=True),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "logprobs_mode": str(model.logprobs_mode),
        "sampling_names": sampling_names(),
        "vocab_size": model.get_vocab_size(),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "has_tokenizer": not model.skip_tokenizer_init,
        "architecture": model.architecture,
        "speculative": str(drafting.method) if drafting else "",
        "draft_weights": drafts,
        # where its weights were read from; some are the model's own
        "draft_model": str(drafter.model) if drafts and drafter is not None else "",
        "max_adapters": (lora.max_cpu_loras or lora.max_loras) if lora else 0,
        "block_size": config.cache_config.block_size,
        "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1",
        "attention_backend": getattr(config.attention_config.backend, "name", None)
        or "",
        "graph_tokens": _graph_tokens(config),
        "quantization": str(model.quantization or ""),
        "routed_experts": "ids" if config.aux_output_config.enabled else "",
    }


def _graph_tokens(config: Any) -> int:
    """The largest step, in tokens, that a CUDA graph was captured for; 0 if there are no graphs."""
    compiled = config.compilation_config
    mode = getattr(compiled.cudagraph_mode, "name", "NONE")
    if config.device_config.device_type != "cuda" or mode == "NONE":
        return 0
    return int(compiled.max_cudagraph_capture_size or 0)
