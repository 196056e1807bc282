"""Repacks a layer's weights with vLLM's own function: built beside the live layer first, then put in place."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from jvlab.engine.tracing import _vllm_model

_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass
class Packed:
    """The result of processing a layer's raw weights; `place` puts it into the live layer, without copying."""

    layer: torch.nn.Module
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def place(self) -> None:
        """From now on the layer computes with the new weights. Parameters remain the same objects."""
        for name, tensor in self.tensors.items():
            live = self.layer._parameters.get(name)
            if live is None:
                self.layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
            else:
                live.data = tensor
        self.layer.__dict__.update(self.attributes)

    def holds(self, name: str) -> torch.Tensor | None:
        """The memory that the layer computes with once this is in place: the new one, or what it has already."""
        return self.tensors.get(name, self.layer._parameters.get(name))

    def lost(self) -> list[str]:
        """What was placed and has since been replaced by other memory or another kernel."""
        live = self.layer._parameters
        out = [n for n, t in self.tensors.items() if (p := live.get(n)) is None or p.data_ptr() != t.data_ptr()]
        kernels = [k for k, v in self.attributes.items() if self.layer.__dict__.get(k) is not v]
        return out or (["weight"] if kernels else [])


def pack(layer: torch.nn.Module, raw: Mapping[str, torch.Tensor], own: Collection[str] | None = None) -> Packed:
    """Run the layer's processing after loading on a stand-in that holds `raw`; the layer itself is not changed.

    Those in `own` (by default all) are copies that only `place` puts into the layer, whether or not processing changed
    them; the others are in live memory, or will be.

    The stand-in shares everything with the layer except its tables of parameters, buffers and modules and, for experts,
    the method, whose kernel must be absent or vLLM would skip the processing.
    """
    stand_in = copy.copy(layer)
    for table in _TABLES:
        stand_in.__dict__[table] = dict(layer.__dict__[table])
    given: dict[str, int] = {}
    for name, live in layer._parameters.items():
        tensor = raw.get(name, None if live is None else live.data)
        if tensor is None:
            continue
        fresh: Any = torch.nn.Parameter(tensor, requires_grad=False)  # a new object: processing may set its data
        if live is not None:
            fresh.__dict__.update(live.__dict__)
        stand_in._parameters[name] = fresh
        given[name] = tensor.data_ptr()
    experts = _vllm_model.moe_method(layer)
    method: Any = layer.quant_method
    if experts:
        method = copy.copy(method)
        method.moe_kernel = None
        _set(stand_in, "quant_method", method)
    with torch.no_grad():
        method.process_weights_after_loading(stand_in)
    done = Packed(layer)
    for name, new in stand_in._parameters.items():
        live = layer._parameters.get(name)
        if new is None or (new.numel() == 0 and live is not None and live.numel() == 0):
            continue  # vLLM empties a parameter of which its kernel holds a packed copy
        if name in (raw if own is None else own) or new.data_ptr() != given.get(name):
            done.tensors[name] = new.data
    if not experts:  # the experts' kernel gets its weights at each call, so it stays
        done.attributes = {
            k: v for k, v in stand_in.__dict__.items() if k not in _TABLES and layer.__dict__.get(k) is not v
        }
    return done


def _set(module: torch.nn.Module, name: str, value: Any) -> None:
    """Set an attribute where the module keeps it: submodules have a table of their own."""
    if name in module._modules:
        module._modules[name] = value
    else:
        module.__dict__[name] = value
