"""vLLM internals used to trace a live model: coordinates, reload metadata, packed layers. Checked against vLLM 0.32.0.

Every non-public vLLM name that the tracer relies on is in this file, in `_meta_model` or in `engine/_patches.py`.
Remove an entry when vLLM offers a public equivalent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import vllm.distributed.parallel_state as _groups
from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.quantization.online.fp8 import (
    OnlineLinearBase,
    _is_tp_sharded,
)
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from jvlab._errors import Unsupported
from jvlab.engine._modules import (
    format_of,
    held_parameters,
    own_modules,
    own_parameters,
    packed_kernel,
)

# A vLLM model below the layers that LoRA wraps around its own. Checked against vLLM 0.32.0.


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
        for name, child in own_modules(module).items():
            own_modules(found)[name] = None if child is None else _bare(child, seen)
    seen[id(module)] = found
    return found


# ----------------------------------------------------------------------------------------------------

# MoE backends that compute from the loader's own format
_IN_PLACE_MOE = ("TRITON", "BATCHED_TRITON")


# -- a live model


def worker_model(worker: Any) -> torch.nn.Module:
    """The model a worker runs, without CUDA graph wrappers."""
    return worker.get_model()


# of a drafter's tensors in an order to trace, and of its parameters in a plan; vLLM's own prefix for them
DRAFT = "draft."


def draft_model(worker: Any) -> torch.nn.Module:
    """The model that drafts tokens for the worker's; raises if none does."""
    found = worker.model_runner.get_draft_model()
    if not isinstance(found, torch.nn.Module):
        raise Unsupported(
            "this rank has no draft model",
            remedy='launch(..., speculative={"method": "draft_model", "model": FOLDER, "num_speculative_tokens": 3}); '
            "with pipeline_parallel the last stage alone has one, which jvlab does not sync",
        )
    return bare_model(found)


class DraftWeights(torch.nn.Module):
    """A draft model, with its parameters under the names that a plan has for them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.draft = model

    def load_weights(self, weights: Any) -> Any:
        """vLLM's own loader of the draft model, which knows its tensors by their own names."""
        loader: Any = self.draft.load_weights
        return loader(weights)


@contextmanager
def current_config(worker: Any) -> Iterator[None]:
    """Sets the worker's config as vLLM's current one, which some loaders read."""
    config = getattr(worker, "vllm_config", None)
    if config is None:
        yield
    else:
        with set_current_vllm_config(config):
            yield


def may_swap(worker: Any) -> bool:
    """Whether a parameter's memory may be swapped: nothing compiled or captured holds its address."""
    config = getattr(worker, "vllm_config", None)
    return config is None or (
        config.device_config.device_type == "cpu" and config.model_config.enforce_eager
    )


def coordinates() -> tuple[int, tuple[tuple[str, int], ...]]:
    """(global rank, coordinates) of this process, from vLLM's groups; expert rank 0 without expert parallelism."""
    config = get_current_vllm_config_or_none()
    experts = config is not None and config.parallel_config.enable_expert_parallel
    groups = {
        "tp": group_of("tp"),
        "pp": group_of("pp"),
        "ep": group_of("ep") if experts else None,
    }
    world = group_of("world")
    return 0 if world is None else world.rank, tuple(
        (axis, 0 if group is None else group.rank_in_group)
        for axis, group in groups.items()
    )


def group_of(axis: str) -> Any:
    """vLLM's group of this axis; None if there is none, where vLLM's own function raises."""
    return vars(_groups)[f"_{axis.upper()}"]


def method_of(layer: torch.nn.Module) -> Any:
    """What computes with the layer's weights and processes them after loading, if it has one."""
    return getattr(layer, "quant_method", None)


def as_built(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The layer's parameters as its constructor made them (on meta): what vLLM keeps for its own reload."""
    info = LAYERWISE_INFO.get(layer)
    return {} if info is None else info.restore_metadata[0]


def _repacked(layer: torch.nn.Module) -> dict[str, str]:
    """Parameters that no longer have the format their loader writes: name -> what happened to them."""
    if isinstance(method_of(layer), BaseKVCacheMethod):
        # scales of the KV cache: few checkpoints have any, and a sync leaves them alone
        return {}
    found = {}
    for name, meta in as_built(layer).items():
        live = own_parameters(layer).get(name)
        if live is None:
            found[name] = "removed after loading"
        elif format_of(live) != format_of(meta):
            found[name] = (
                f"re-packed after loading: {tuple(live.shape)} {live.dtype} strides {live.stride()}"
            )
    return found


def _replaced(layer: torch.nn.Module) -> list[str]:
    """Parameters that processing after loading made anew, as plain ones: without what their loader asks them for."""
    own = own_parameters(layer)
    return [
        name
        for name, built in as_built(layer).items()
        if (live := own.get(name)) is not None
        and (type(live) is not type(built) or vars(built).keys() - vars(live).keys())
    ]


def _made_later(layer: torch.nn.Module) -> list[str]:
    """Parameters that processing after loading added (MLA's W_UV and W_UK_T): computed from others, never loaded."""
    if LAYERWISE_INFO.get(layer) is None:
        return []
    known = as_built(layer).keys() | SKIP_TENSORS
    return [name for name in held_parameters(layer) if name not in known]


def changed_later(layer: torch.nn.Module) -> tuple[list[str], list[str]]:
    """Parameters that processing after loading re-packed, and those that it added."""
    return list(_repacked(layer)), _made_later(layer)


def own_loader(parameter: Any) -> None:
    """Undo what online quantisation does to a parameter's loader: once loaded, it ignores every further tensor."""
    for name in ("_weight_loader", "weight_loader"):
        loader = parameter.__dict__.get(name)
        while getattr(loader, "__name__", "") == "online_process_loader":
            loader = parameter.__dict__[name] = loader.__wrapped__


@contextmanager
def loader_format(
    model: torch.nn.Module,
    strides: Mapping[tuple[torch.nn.Module, str], tuple[int, ...]],
) -> Iterator[None]:
    """Inside, a processed model has the parameters it was built with, for its loader; they are restored on exit.

    Re-packed parameters become meta tensors in the format their loader writes, as do those that were replaced by plain
    parameters, which have no loader; parameters added later are hidden.
    Those in `strides`, by layer and name, lie as the kernel's storage does.
    """
    saved: list[tuple[torch.nn.Module, dict[str, Any]]] = []
    try:
        for layer in model.modules():
            names = {*_repacked(layer), *_replaced(layer)}
            extra = _made_later(layer)
            if names or extra:
                saved.append((layer, dict(own_parameters(layer))))
            for name in extra:
                del own_parameters(layer)[name]
            for name in names:
                meta = as_built(layer)[name]
                lying = strides.get((layer, name), meta.stride())
                fresh: Any = torch.empty_strided(
                    tuple(meta.shape), lying, dtype=meta.dtype, device="meta"
                )
                fresh.__class__ = meta.__class__
                fresh.__dict__.update(meta.__dict__)
                own_loader(fresh)
                own_parameters(layer)[name] = restore_layer_refs(fresh, layer)  # pyright: ignore[reportArgumentType]
        yield
    finally:
        for layer, parameters in saved:
            own_parameters(layer).clear()
            own_parameters(layer).update(parameters)


@contextmanager
def loader_state(model: torch.nn.Module) -> Iterator[None]:
    """Restores, on exit, what a loader may change on modules and parameters: attributes and plain containers."""
    owners = [*model.modules(), *model.parameters()]
    saved = [(o, dict(o.__dict__)) for o in owners]
    held = [
        (v, copy.copy(v))
        for _, d in saved
        for v in d.values()
        if type(v) in (dict, list, set)
    ]
    try:
        yield
    finally:
        for owner, attributes in saved:
            if owner.__dict__.keys() != attributes.keys() or any(
                owner.__dict__[k] is not v for k, v in attributes.items()
            ):
                owner.__dict__.clear()
                owner.__dict__.update(attributes)
        for container, before in held:
            if type(container) is list:
                container[:] = before
            else:
                container.clear()
                container.update(before)


@dataclass(frozen=True)
class Repacked:
    """A parameter whose memory the engine does not compute with, and the layer that must process it again."""

    parameter: str  # the reported name: the first of a shared parameter
    # for "derived": the attention that caches matrices computed from it
    layer: torch.nn.Module
    name: str  # within the layer
    why: str
    # "packed": jvlab has it packed again; "reloaded": only vLLM's own reload can; "derived": others are
    kind: str
    # computed from it by an attention


def repacked_layers(model: torch.nn.Module) -> list[Repacked]:
    """Every parameter that is packed after loading, with the layer to process again; none for a model on meta."""
    # the first name of a shared parameter
    reported = {id(p): n for n, p in model.named_parameters()}
    own_head = any(isinstance(m, ParallelLMHead) for m in model.modules())
    found: list[Repacked] = []
    for prefix, layer in model.named_modules():
        reasons = {**_held_elsewhere(layer, own_head), **_repacked(layer)}
        kind = "packed"
        if reasons and reloads(layer):
            kind = "reloaded"
            other = (
                f"{type(layer.quant_method).__name__} processes weights after loading"
            )
            reasons = {n: reasons.get(n, other) for n in loaded_names(layer)}
        for name, why in reasons.items():
            full = f"{prefix}.{name}" if prefix else name
            found.append(
                Repacked(
                    reported.get(id(own_parameters(layer).get(name)), full),
                    layer,
                    name,
                    why,
                    kind,
                )
            )
        if (
            isinstance(layer, MLAAttention)
            and getattr(layer, "W_UK_T", None) is not None
        ):
            for name, p in layer.kv_b_proj.named_parameters():
                full = f"{prefix}.kv_b_proj.{name}"
                why = f"{prefix} keeps matrices computed from it after loading"
                found.append(
                    Repacked(reported.get(id(p), full), layer, name, why, "derived")
                )
        if isinstance(layer, Attention):
            above = model.get_submodule(prefix.rpartition(".")[0])
            sinks = own_parameters(above).get("sinks")
            if sinks is not None and _converts(layer, sinks):
                _SINKS[layer] = sinks
                why = f"{prefix} computes with a copy of other precision, made once"
                found.append(
                    Repacked(reported[id(sinks)], layer, "sinks", why, "derived")
                )
    return found


# before conversion
_SINKS: WeakKeyDictionary[torch.nn.Module, torch.nn.Parameter] = WeakKeyDictionary()


def _converts(layer: Any, sinks: torch.nn.Parameter) -> bool:
    """Whether an attention converts its sinks to a copy: FlashInfer; CPUs in float16, from the first step on."""
    held = getattr(layer.impl, "sinks", None)
    if held is None or sinks.is_meta:
        return False
    lazily = sinks.device.type == "cpu" and sinks.dtype not in (
        torch.float32,
        torch.bfloat16,
    )
    return lazily or held.data_ptr() != sinks.data_ptr()


def derive(layer: Any, dtype: torch.dtype) -> None:
    """Make an attention recompute what it caches of parameters that have changed."""
    if layer not in _SINKS:
        layer.process_weights_after_loading(dtype)
        return
    layer.impl.process_weights_after_loading(dtype)
    if _SINKS[layer].device.type == "cpu":
        layer.impl.sinks = _SINKS[layer]  # converted again at the next step


def derived_well(layer: Any) -> bool:
    """Whether what the attention caches matches its parameters."""
    if layer in _SINKS:
        return torch.equal(
            layer.impl.sinks.detach().float(), _SINKS[layer].detach().float()
        )
    weight = layer.kv_b_proj.weight.detach()
    nope = layer.qk_nope_head_dim
    wide = weight.t().reshape(layer.kv_lora_rank, -1, nope + layer.v_head_dim)
    keys = wide[..., :nope].permute(1, 2, 0)
    values = wide[..., nope:].transpose(0, 1)
    return torch.equal(layer.W_UK_T.to(weight.dtype), keys) and torch.equal(
        layer.W_UV.to(weight.dtype), values
    )


def online_method(layer: torch.nn.Module) -> QuantizeMethodBase | None:
    """The layer's method if it quantises what the loader brings, after loading."""
    method = method_of(layer)
    online = isinstance(method, OnlineLinearBase | OnlineMoEMethodBase)
    return method if online else None


def block_method(layer: torch.nn.Module) -> QuantizeMethodBase | None:
    """The layer's method if its checkpoint holds fp8 values with a scale for each block."""
    method = method_of(layer)
    return (
        method
        if isinstance(method, Fp8LinearMethod | Fp8MoEMethod) and method.block_quant
        else None
    )


def ranks_sharing(layer: Any) -> tuple[int, int]:
    """(place, size) of this rank among those that vLLM takes the maximum of this layer's values over."""
    method: Any = layer.quant_method
    experts = isinstance(method, OnlineMoEMethodBase)
    size = int(method.moe.tp_size if experts else layer.tp_size)
    group = group_of("ep" if experts else "tp")
    if size == 1 or group is None or (not experts and not _is_tp_sharded(layer)):
        return 0, 1
    return group.rank_in_group, size


def reloads(layer: Any) -> bool:
    """Whether what the layer's method does after loading is unknown to jvlab, so that vLLM's own reload must do it."""
    method = method_of(layer)
    if isinstance(method, UnquantizedFusedMoEMethod):
        return method.unquantized_backend.name != "CPU" and packed_experts(layer)
    known = UnquantizedLinearMethod | UnquantizedEmbeddingMethod
    return (
        isinstance(method, QuantizeMethodBase)
        and not isinstance(method, known)
        and bool(loaded_names(layer))
    )


def loaded_names(layer: torch.nn.Module) -> list[str]:
    """The layer's own parameters that a loader fills; a bias is not among what vLLM keeps of a layer as built."""
    live = [n for n, p in held_parameters(layer).items() if not p.is_meta]
    return (
        list(dict.fromkeys([*as_built(layer), *(n for n in live if n == "bias")]))
        if live
        else []
    )


def not_repackable(item: Repacked) -> str:
    """Why this layer can't be processed again after a sync; empty if it can, by jvlab or by vLLM's reload."""
    if item.kind != "derived":
        return ""
    special = (
        "is_amx_bmm_enabled",
        "is_aiter_triton_fp4_bmm_enabled",
        "is_aiter_triton_fp8_bmm_enabled",
    )
    if any(getattr(item.layer, n, False) for n in special) or reloads(
        getattr(item.layer, "kv_b_proj", None)
    ):
        return "its matrices are quantised or packed"
    return ""


def moe_method(layer: torch.nn.Module) -> bool:
    """Whether the layer holds experts."""
    return isinstance(method_of(layer), UnquantizedFusedMoEMethod)


def packed_experts(layer: torch.nn.Module) -> bool:
    """Whether the layer holds experts that its kernel re-arranged."""
    method = method_of(layer)
    return (
        moe_method(layer)
        and method.moe_kernel is not None
        and method.unquantized_backend.name not in _IN_PLACE_MOE
    )


def experts_read_them(layer: torch.nn.Module) -> bool:
    """Whether the experts' kernel uses the layer's own bias tensors, which it got when it was created."""
    method = method_of(layer)
    kernel: Any = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    for name, held in (
        ("w13_bias", getattr(kernel, "w1_bias", None)),
        ("w2_bias", getattr(kernel, "w2_bias", None)),
    ):
        live = own_parameters(layer).get(name)
        if live is not None and held is not None and held.data_ptr() != live.data_ptr():
            return False
    return True


def _held_elsewhere(layer: torch.nn.Module, own_head: bool) -> dict[str, str]:
    """Parameters of which the layer's kernel has, or may have, a converted copy of the same shape."""
    method = method_of(layer)
    live = [n for n, p in held_parameters(layer).items() if not p.is_meta]
    if not live or not isinstance(method, QuantizeMethodBase):
        return {}
    if isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        if (
            own_head
            and isinstance(layer, VocabParallelEmbedding)
            and not isinstance(layer, ParallelLMHead)
        ):
            # also packed, but only used for lookups: F.embedding reads the live weight
            return {}
        if packed_kernel(layer.__dict__) is not None:
            return {
                "weight": "the CPU kernel computes from a packed copy (oneDNN or like) made after loading"
            }
        return {}
    if isinstance(method, UnquantizedFusedMoEMethod):
        if not packed_experts(layer):
            return {}
        name = method.unquantized_backend.value
        return {
            n: f"the {name} MoE kernel re-arranges experts after loading"
            for n in live
            if n in as_built(layer)
        }
    return {n: f"{type(method).__name__} processes weights after loading" for n in live}


# -- a model without an engine
