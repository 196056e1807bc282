"""KV that is not finite, kept from every request but the one that computed it. Checked against vLLM 0.32.0.

A request's last block has slots behind its last token. vLLM's CPU attention reads them and gives them the weight 0, and
0 × NaN is NaN: a block that once held NaN makes whoever gets it next answer NaN, whatever the weights are by then.
(FlashAttention 3 leaves such slots out.) So the engine core remembers that it is poisoned:

    from    a commit of weights that are not finite (nonfinite="allow"), or a log-probability that came out as NaN
    then    blocks are cleared when they are handed out, by vLLM's own means for hybrid models: requests of the same
            version that have nothing to do with the NaN stay sound
    until   the next commit: requests in flight are computed anew with the new weights, as by kv="recompute", and all KV
            memory is cleared before one of them goes on

NaN is looked for in the log-probabilities that requests ask for; all of jvlab's do. `core` is vLLM's EngineCore.
"""

from __future__ import annotations

import sys
from typing import Any


def nan_in(output: Any) -> bool:
    """Is a log-probability of this step NaN? -inf (a filtered token) is none; a sum is NaN exactly if one of it is."""
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
    """From now on KV memory may hold what is not finite."""
    scheduler = core.scheduler
    scheduler.jv_poisoned = True
    if scheduler.needs_kv_cache_zeroing:
        return
    answers = core.collective_rpc("jv_clears_new_blocks")
    if all(a.get("ready") for a in answers):  # else only a commit clears it
        _hand_out_clear(scheduler, True)
        scheduler.jv_clears = True
    else:
        print(f"jvlab: blocks with NaN stay as they are until the next sync: {answers}", file=sys.stderr, flush=True)


def _hand_out_clear(scheduler: Any, wanted: bool) -> None:
    from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec

    scheduler.needs_kv_cache_zeroing = wanted
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        spec = manager.kv_cache_spec
        attends = isinstance(spec, AttentionSpec) and not isinstance(spec, CircularBufferSpec)
        manager._record_new_block_ids = wanted and attends


def after_step(core: Any) -> None:
    """Called after every step: a NaN that this one brought is the first."""
    scheduler = core.scheduler
    if getattr(scheduler, "jv_saw_nan", False):
        scheduler.jv_saw_nan = False
        if not scheduler.jv_poisoned:
            poison(core)


def reset(core: Any, recompute: bool, connector: bool, forget: Any) -> bool:
    """`forget`, vLLM's reset_prefix_cache; where KV is poisoned, requests lose theirs and all of it is cleared."""
    scheduler = core.scheduler
    poisoned = getattr(scheduler, "jv_poisoned", False)
    done = forget(core, recompute or poisoned, connector)
    if poisoned and done and "kv_cache" not in core.model_executor.sleeping_tags:
        heal(core)
    return done


def heal(core: Any) -> None:
    """Clear all KV memory; nobody holds a block."""
    answers = core.collective_rpc("jv_clear_kv")
    failed = [a["error"] for a in answers if a.get("error")]
    if failed:
        raise RuntimeError(f"KV memory that may hold NaN could not be cleared: {failed[0]}")
    scheduler = core.scheduler
    scheduler.jv_poisoned = scheduler.jv_saw_nan = False
    if scheduler.jv_clears:
        _hand_out_clear(scheduler, False)
        scheduler.jv_clears = False


def woken(core: Any) -> None:
    """KV memory was taken again: what it holds is nobody's, and was perhaps ours before it was given back."""
    if getattr(core.scheduler, "jv_poisoned", False) and "kv_cache" not in core.model_executor.sleeping_tags:
        heal(core)


# In the worker --------------------------------------------------------------------------------------------------------


def clear_kv(worker: Any) -> None:
    """Zero in all KV memory."""
    import torch

    with torch.inference_mode():
        for tensor in _tensors(worker.model_runner.kv_caches):
            tensor.zero_()
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)


def _tensors(caches: Any) -> list[Any]:
    """Each memory once: a cache is a tensor, or several (states of other kinds of layers)."""
    flat = [t for cache in caches for t in (cache if isinstance(cache, list | tuple) else [cache])]
    return list({(t.data_ptr(), tuple(t.shape), t.dtype): t for t in flat if hasattr(t, "zero_")}.values())


def clears_new_blocks(worker: Any) -> bool:
    """Make the runner able to clear blocks that the scheduler names."""
    runner = worker.model_runner
    if worker.device.type == "cpu":
        runner._zero_block_ids = lambda blocks: _clear_blocks(runner, blocks)  # vLLM's leaves sliding windows out
        return True
    if getattr(runner, "_kv_block_zeroer", None) is None and getattr(runner, "kv_block_zeroer", None) is None:
        runner._init_kv_zero_meta()
    return True


def _clear_blocks(runner: Any, blocks: list[int]) -> None:
    count = runner.kv_cache_config.num_blocks
    for tensor in _tensors(runner.kv_caches):
        if tensor.shape[0] % count:
            continue  # not by blocks: a state of its own
        share = tensor.shape[0] // count  # blocks of the kernel to one of the scheduler's
        for block in blocks:
            tensor[block * share : (block + 1) * share].zero_()
