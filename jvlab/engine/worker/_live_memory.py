"""A model's live memory by name: which tensors share it, what it holds, and whether it was replaced."""

from __future__ import annotations

from typing import Any

import torch

from jvlab._errors import LayoutError, Unsupported
from jvlab.engine.worker import _read_back
from jvlab.engine.worker._scatter import bits, flat

LIVE_REMEDY = 'launch with env={"JVLAB_LIVE_WEIGHTS": "1"}: linear layers then compute from live memory'
Format = tuple[tuple[int, ...], str, tuple[int, ...]]


def by_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer that the model has now."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def format_of(tensor: torch.Tensor) -> Format:
    """Shape, dtype and strides."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tuple(tensor.stride())


def some(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def holders(model: torch.nn.Module) -> dict[int, dict[int, torch.Tensor]]:
    """Every tensor that the model's modules hold, by storage: parameters, buffers, and plain attributes."""
    found: dict[int, dict[int, torch.Tensor]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers, module.__dict__):
            for tensor in table.values():
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    found.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    return found


def sharing(live: torch.Tensor, holding: dict[int, dict[int, torch.Tensor]]) -> list[torch.Tensor] | None:
    """All tensors that share the parameter's storage; None if there are unknown ones, or it is part of a larger one."""
    storage = live.untyped_storage()
    mine = list(holding.get(storage._cdata, {}).values())
    whole = live.storage_offset() == 0 and flat(live).nbytes == storage.nbytes()
    # one reference for each tensor and one for `storage` itself
    return mine if whole and torch._C._storage_Use_Count(storage._cdata) <= len(mine) + 1 else None


class Addresses:
    """The addresses of some of a model's tensors when this was created.

    Checking them takes a tenth of a microsecond each, so that every sync can: memory that the engine has replaced
    since (a reload, a wake-up) would still accept our bytes, and still have the right digest.
    """

    def __init__(self, model: torch.nn.Module, wanted: dict[str, int]) -> None:
        tables: dict[str, tuple[dict[str, Any], str]] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for table in (module._buffers, module._parameters):
                for leaf in table:
                    tables[f"{prefix}.{leaf}" if prefix else leaf] = (table, leaf)
        self._rows = [(name, *tables[name], pointer) for name, pointer in wanted.items() if name in tables]

    def moved(self) -> list[str]:
        """Names of tensors that have another address now."""
        return [name for name, table, leaf, at in self._rows if (t := table.get(leaf)) is None or t.data_ptr() != at]


def peek(model: torch.nn.Module, name: str, start: int, count: int) -> tuple[bytes, int]:
    """Bytes of a live parameter's storage, and their total number; packed ones are read back."""
    live = by_name(model)
    if name not in live:
        near = sorted(n for n in live if n.split(".")[-1] == name.split(".")[-1])[:3]
        raise LayoutError(
            f"no parameter {name!r} on this rank", remedy=f"for example {', '.join(near or list(live)[:3])}"
        )
    found = _unpacked(model, name, live[name])
    if found is None:
        raise Unsupported(f"{name} is packed after loading: its elements can't be read back", remedy=LIVE_REMEDY)
    values = bits(flat(found.cpu())).view("uint8")
    return values[start : start + count].tobytes(), values.size


def _unpacked(model: torch.nn.Module, name: str, live: torch.Tensor) -> torch.Tensor | None:
    from jvlab.engine.tracing import _vllm_model

    prefix, _, leaf = name.rpartition(".")
    layer = model.get_submodule(prefix)
    made = _vllm_model.as_built(layer).get(leaf)
    if made is not None and _vllm_model.packed_experts(layer):
        return _read_back.experts_in_order(layer.quant_method, leaf, live, tuple(made.shape))
    if live.numel():
        return live
    kernel = _read_back.packed_kernel(layer.__dict__)
    if made is None or kernel is None or leaf != "weight":
        return None
    return _read_back.whole(kernel, layer._parameters[leaf], tuple(made.shape), made.dtype)
