"""Layers that jvlab has no format for: vLLM's own reload processes what arrived, into the memory that the layer has.

    raw copies, as loaded ──process_weights_after_loading──▶ new tensors ──copied──▶ the storage it has

These are the steps of vLLM's layerwise reload (`model_loader/reload/layerwise.py`, checked against 0.32.0), for one
layer whose elements are known to be complete: the plan is proven, where vLLM counts. No parameter gets other memory, so
captured graphs stay valid. If processing fails, the layer is as it was.

On a CPU a kernel may keep a pointer into the tensors that processing made (oneDNN's int8 does, and vLLM's own reload
then computes with freed memory): there they are kept until the layer's next reload, and checked with its parameters.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from jvlab._errors import Unsupported, VerifyError
from jvlab.engine._modules import (
    as_integers,
    format_of,
    held_parameters,
    own_buffers,
    own_parameters,
)
from jvlab.engine.tracing import _vllm_model
from jvlab.engine.worker._live_memory import flat

_DONE = "_already_called_process_weights_after_loading"
CHUNK = 1 << 22  # elements widened at once
Tensors = Mapping[str, torch.Tensor]


@dataclass
class Reloads:
    """What vLLM's own reload did on a rank: seconds of each layer in this sync, and what each layer held afterwards."""

    names: dict[torch.nn.Module, str]
    seconds: dict[str, float] = field(default_factory=dict)
    held: dict[torch.nn.Module, int] = field(default_factory=dict)
    # that kernels may point into
    kept: dict[torch.nn.Module, list[torch.Tensor]] = field(default_factory=dict)

    def run(
        self,
        layer: torch.nn.Module,
        raw: Tensors,
        config: AbstractContextManager[Any],
    ) -> None:
        """Reload one layer; `config`: vLLM's current config, which some methods read."""
        start = time.perf_counter()
        with torch.no_grad(), config:
            made = reload_layer(layer, raw, self.names[layer])
        self.kept[layer] = [t for t in made if t.device.type == "cpu"]
        # also waits for the device
        self.held[layer] = fingerprint(layer, self.kept[layer])
        self.seconds[self.names[layer]] = time.perf_counter() - start

    def unchanged(self, layer: torch.nn.Module) -> bool:
        """Whether the layer holds what its last reload left there."""
        return (
            layer in self.held
            and fingerprint(layer, self.kept[layer]) == self.held[layer]
        )


def reload_layer(layer: Any, raw: Tensors, name: str) -> list[torch.Tensor]:
    """Process `raw`, all that the layer's loader fills, with the layer's own method; results go to its own memory.

    Returns the tensors that processing made.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (
        _copy_and_restore_kernel_tensors,
        _place_kernel_tensors,
        get_layerwise_info,
    )
    from vllm.model_executor.model_loader.reload.meta import (
        materialize_layer,
        restore_layer_on_meta,
    )

    info = get_layerwise_info(layer)
    kernel = held_parameters(layer)
    buffers = {n: t for n, t in own_buffers(layer).items() if t is not None}
    info.kernel_tensors = kernel, buffers
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    before = {n: (t.data_ptr(), format_of(t)) for n, t in kernel.items()}
    try:
        restore_layer_on_meta(layer, info)
        materialize_layer(layer, info)
        _fill(layer, raw, buffers, name)
        if hasattr(layer, _DONE):
            delattr(layer, _DONE)
        layer.quant_method.process_weights_after_loading(layer)
        if hasattr(layer, "update_param_tp_status"):
            layer.update_param_tp_status()
        _check(layer, kernel, name)
        made = [own_parameters(layer)[n].data for n in kernel]
        _copy_and_restore_kernel_tensors(layer, info)
    except BaseException:
        _place_kernel_tensors(layer, info)
        raise
    finally:
        info.reset()
    after = {n: (t.data_ptr(), format_of(t)) for n, t in held_parameters(layer).items()}
    if after != before:
        moved = sorted(
            n for n in after.keys() | before.keys() if after.get(n) != before.get(n)
        )
        raise VerifyError(
            f"{name}: vLLM's reload gave {', '.join(moved)} other memory",
            remedy="restart the replica",
        )
    return made


def _fill(
    layer: Any,
    raw: Tensors,
    buffers: Tensors,
    name: str,
) -> None:
    """Give the layer what arrived; buffers, which no sync fills, keep their values."""
    for key, live in list(own_parameters(layer).items()):
        if live is None or (
            key not in raw and key in _vllm_model.SKIP_TENSORS and key != "bias"
        ):
            continue  # tables that no checkpoint holds
        if key not in raw:
            raise Unsupported(
                f"{name}: nothing that is synced fills {key}, which {type(layer.quant_method).__name__} processes",
                remedy="launch without that quantisation",
                parameter=f"{name}.{key}",
            )
        fresh: Any = live
        # never on meta: the live parameter, to be changed when all is done
        if key in _vllm_model.SKIP_TENSORS:
            fresh = torch.nn.Parameter(torch.empty_like(live), requires_grad=False)
            fresh.__dict__.update(live.__dict__)
            own_parameters(layer)[key] = fresh
        fresh.data.copy_(raw[key])
    for key, kept in buffers.items():
        made = own_buffers(layer).get(key)
        if made is not None and made is not kept and format_of(made) == format_of(kept):
            made.copy_(kept)


def _check(layer: Any, kernel: Tensors, name: str) -> None:
    """Raise unless processing made tensors that fit the layer's own memory: copying would broadcast or cast."""
    for key, live in kernel.items():
        made = own_parameters(layer).get(key)
        if made is None or (tuple(made.shape), made.dtype) != (
            tuple(live.shape),
            live.dtype,
        ):
            have = "nothing" if made is None else f"{tuple(made.shape)} {made.dtype}"
            raise Unsupported(
                f"{name}: processed again, {key} is {have}; the engine's is {tuple(live.shape)} {live.dtype}",
                remedy="launch without that quantisation",
                parameter=f"{name}.{key}",
            )


def fingerprint(layer: torch.nn.Module, more: Sequence[torch.Tensor] = ()) -> int:
    """A number that changes with any bit of the layer's own parameters, and of `more`."""
    named = held_parameters(layer)
    total = 0
    for tensor in (*(named[n] for n in sorted(named)), *more):
        values = as_integers(flat(tensor)) if tensor.numel() else tensor
        for at in range(0, values.numel(), CHUNK):
            part = values[at : at + CHUNK].to(torch.int64)
            # a changed bit never cancels alone
            odd = torch.arange(at, at + part.numel(), device=part.device) * 2 + 1
            total += int((part * odd).sum().item())
        total *= 1_000_003
    return total & (2**64 - 1)
