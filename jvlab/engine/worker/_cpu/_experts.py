"""Works around a bug of vLLM 0.32.0's CPU kernels for experts: with expert parallelism the first token crashes.

A rank then holds some of a layer's experts, and `expert_map` gives each expert's place on it, or -1. The kernels do not
get it: they take the number of an expert for its place, and read past the end of the rank's memory. Here numbers are
translated first, and experts of other ranks get the weight 0; vLLM adds the ranks' results up itself. Remove this when
`CPUUnquantizedExperts.apply` uses its expert_map.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch


def patch_cpu_experts() -> None:
    """Patch vLLM's kernels; to be called before they are used."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        CPUUnquantizedExperts,
    )

    if not hasattr(CPUUnquantizedExperts.apply, "__wrapped__"):
        CPUUnquantizedExperts.apply = own_experts_only(CPUUnquantizedExperts.apply)


def own_experts_only(apply: Any) -> Any:
    """The method, given places on this rank instead of numbers of experts."""
    signature = inspect.signature(apply)

    @functools.wraps(apply)
    def apply_own(*args: Any, **options: Any) -> None:
        given = signature.bind(*args, **options).arguments
        if given["expert_map"] is not None:
            ids = given["topk_ids"]
            weights = given["topk_weights"]
            places = given["expert_map"].to(torch.int64)[ids.to(torch.int64)]
            given["topk_weights"] = torch.where(places >= 0, weights, 0)
            given["topk_ids"] = places.clamp(min=0).to(ids.dtype)
        apply(**given)

    return apply_own
