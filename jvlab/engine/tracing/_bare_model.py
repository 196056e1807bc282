"""A vLLM model below the layers that LoRA wraps around its own. Checked against vLLM 0.32.0."""

from __future__ import annotations

import copy

import torch
from vllm.lora.layers import BaseLayerWithLoRA


def bare_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model without the layers that vLLM wraps around those with adapters; itself if there are none.

    It shares every parameter with the model, under the names that a loader knows. Modules above a wrapped layer are
    shallow copies, so that the model that the engine runs stays as it is.
    """
    if not any(isinstance(m, BaseLayerWithLoRA) for m in model.modules()):
        return model
    return _bare(model, {})


def _bare(module: torch.nn.Module, seen: dict[int, torch.nn.Module]) -> torch.nn.Module:
    if id(module) in seen:
        return seen[id(module)]
    if isinstance(module, BaseLayerWithLoRA):
        found = _bare(module.base_layer, seen)
    elif not any(isinstance(m, BaseLayerWithLoRA) for m in module.modules()):
        found = module
    else:
        found = copy.copy(module)
        object.__setattr__(found, "_modules", {})
        seen[id(module)] = found
        for name, child in module._modules.items():
            found._modules[name] = None if child is None else _bare(child, seen)
    seen[id(module)] = found
    return found
