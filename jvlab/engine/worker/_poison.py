"""Keeps KV that is not finite from every request but the one that computed it. Checked against vLLM 0.32.0.

A request's last block has slots after its last token. vLLM's CPU attention reads them with weight 0, and 0 × NaN is
NaN: a block that once held NaN makes the next request that gets it return NaN, whatever the weights are by then.
(FlashAttention 3 skips such slots.) So the engine core keeps a flag that it is poisoned:

    from    a commit of weights that are not finite (nonfinite="allow"), or a log-probability that is NaN
    then    blocks are zeroed when they are allocated, with vLLM's own code for hybrid models: other requests of the
            same version are not affected
    until   the next commit: requests in flight are recomputed with the new weights, as with kv="recompute", and all KV
            memory is zeroed before one of them continues

NaN is looked for in the log-probabilities that requests ask for; all of jvlab's do. `core` is vLLM's EngineCore.
"""

from __future__ import annotations

import sys
from typing import Any


def nan_in(output: Any) -> bool:
    """Whether a log-probability of this step is NaN. A sum is NaN exactly if a term is; -inf (filtered) is not."""
    sampled = output.logprobs
    if sampled is not None:
        total = sampled.logprobs.sum()
        if total != total:
            return True
    for scored in (output.prompt_logprobs_dict or {}).values():
        if scored is not None:
            total = float(scored.logprobs.sum())
            if total != total:
                return True
    return False


def poison(core: Any) -> None:
    """From now on KV memory may hold values that are not finite."""
    scheduler = core.scheduler
    scheduler.jv_poisoned = True
    if scheduler.needs_kv_cache_zeroing:
        return
    answers = core.collective_rpc("jv_clears_new_blocks")
    if all(a.get("ready") for a in answers):  # else only a commit clears it
        _zero_new_blocks(scheduler, True)
        scheduler.jv_clears = True
    else:
        print(
            f"jvlab: blocks with NaN are not zeroed before the next sync: {answers}",
            file=sys.stderr,
            flush=True,
        )


def _zero_new_blocks(scheduler: Any, wanted: bool) -> None:
    from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec

    scheduler.needs_kv_cache_zeroing = wanted
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        spec = manager.kv_cache_spec
        attends = isinstance(spec, AttentionSpec) and not isinstance(
            spec, CircularBufferSpec
        )
        manager._record_new_block_ids = wanted and attends


def after_step(core: Any) -> None:
    """Called after every step: poison the core at the first NaN."""
    scheduler = core.scheduler
    if getattr(scheduler, "jv_saw_nan", False):
        scheduler.jv_saw_nan = False
        if not scheduler.jv_poisoned:
            poison(core)


def clear_poison(core: Any) -> None:
    """Zero all KV memory; no request may hold a block."""
    answers = core.collective_rpc("jv_clear_kv")
    failed = [a["error"] for a in answers if a.get("error")]
    if failed:
        raise RuntimeError(
            f"KV memory that may hold NaN could not be cleared: {failed[0]}"
        )
    scheduler = core.scheduler
    scheduler.jv_poisoned = scheduler.jv_saw_nan = False
    if scheduler.jv_clears:
        _zero_new_blocks(scheduler, False)
        scheduler.jv_clears = False


def clear_awake(core: Any) -> None:
    """After a reset, and when KV memory was allocated again (it may hold old values): zero it, if it is poisoned."""
    if (
        getattr(core.scheduler, "jv_poisoned", False)
        and "kv_cache" not in core.model_executor.sleeping_tags
    ):
        clear_poison(core)


# In the worker --------------------------------------------------------------------------------------------------------


def clear_kv(worker: Any) -> None:
    """Zero all KV memory."""
    import torch

    with torch.inference_mode():
        for tensor in _tensors(worker.model_runner.kv_caches):
            tensor.zero_()
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)


def _tensors(caches: Any) -> list[Any]:
    """Each tensor once: a cache is a tensor, or several (states of other kinds of layers)."""
    flat = [
        t
        for cache in caches
        for t in (cache if isinstance(cache, list | tuple) else [cache])
    ]
    return list(
        {
            (t.data_ptr(), tuple(t.shape), t.dtype): t
            for t in flat
            if hasattr(t, "zero_")
        }.values()
    )


def clears_new_blocks(worker: Any) -> bool:
    """Enable the runner to zero blocks that the scheduler names."""
    runner = worker.model_runner
    if worker.device.type == "cpu":
        # vLLM's own skips sliding windows
        runner._zero_block_ids = lambda blocks: _clear_blocks(runner, blocks)
        return True
    if (
        getattr(runner, "_kv_block_zeroer", None) is None
        and getattr(runner, "kv_block_zeroer", None) is None
    ):
        runner._init_kv_zero_meta()
    return True


def _clear_blocks(runner: Any, blocks: list[int]) -> None:
    count = runner.kv_cache_config.num_blocks
    for tensor in _tensors(runner.kv_caches):
        if tensor.shape[0] % count:
            continue  # not organised in blocks
        share = tensor.shape[0] // count  # kernel blocks per scheduler block
        for block in blocks:
            tensor[block * share : (block + 1) * share].zero_()
