"""vLLM's LoRA slots: where an adapter's tensors go, and the slot that a link writes.

Checked against vLLM 0.32.0. An engine with LoRA has `max_loras` slots: every adapted layer holds, for each of its
parts, `lora_a_stacked` [slots, 1, max rank, in] and `lora_b_stacked` [slots, 1, out, max rank], and computes from them.
A link that syncs an adapter owns one slot (`AdapterSlot`) and writes that memory as other links write weights: no file,
no copy in between. In a plan its parameters are called `adapter.<module>.lora_a.<part>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.utils import parse_fine_tuned_lora_name

from jvlab._errors import ConfigError, SyncError, Unsupported, VerifyError
from jvlab.engine._modules import own_modules
from jvlab.engine.tracing import _vllm_model
from jvlab.engine.tracing._trace import Coords, _layout, meta_tensors, tensors_of
from jvlab.engine.tracing._write_recorder import Recorder, Target
from jvlab.layout._layout_codec import layout_to_plain
from jvlab.layout._types import CheckpointTensor, RankLayout

PREFIX = "adapter."  # of a slot's memory in a plan
# vLLM's id of the adapter that a link writes; those of folders count from 1
NUMBER = 1_000_000_001
_TENSOR = re.compile(r"\.lora_[AB]\.weight$")
NOT_ENABLED = "launch(..., engine={'enable_lora': True, 'max_lora_rank': 16})"


def is_adapter(names: Sequence[str]) -> bool:
    """Whether these are the tensors of an adapter, by their names."""
    return bool(names) and all(_TENSOR.search(name) for name in names)


# -- an adapter's tensors


def manager_of(worker: Any) -> Any:
    """The worker's LoRAModelManager; raises if the engine was started without LoRA."""
    holder = getattr(worker.model_runner, "lora_manager", None)
    if holder is None:
        raise Unsupported("the engine was started without LoRA", remedy=NOT_ENABLED)
    return holder._adapter_manager


def trace_worker_adapter(
    worker: Any, tensors: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """`trace_adapter` inside a vLLM worker: [name, shape, dtype] lists in, plain values out, as of `trace_worker`."""
    wanted = tensors_of(tensors)
    with _vllm_model.current_config(worker):
        rank, coords = _vllm_model.coordinates()
        return layout_to_plain(trace_adapter(worker, wanted, rank, coords)) | {
            "aliases": []
        }


def trace_adapter(
    worker: Any, tensors: Sequence[CheckpointTensor], rank: int, coords: Coords
) -> RankLayout:
    """Where vLLM's own `set_lora` puts every element of an adapter's tensors in a slot. Nothing is written."""
    manager = manager_of(worker)
    sources = meta_tensors(tensors)
    calls = _calls(manager, tensors, sources)
    memory = {
        n: t
        for name, *_ in calls
        for n, t in _memory(name, manager.modules[name], 0).items()
    }
    # marked as buffers: a part that nothing fills (k of an adapter for q alone) is none of the plan's targets
    targets = [Target(k, name, True, t) for k, (name, t) in enumerate(memory.items())]
    recorder = Recorder([t.name for t in tensors], sources, targets)
    for target in targets:
        recorder.fill(target, target.tensor, 0.0)  # set_lora clears the slot first
    with torch.no_grad(), recorder:
        for name, a, b in calls:
            with _without_reset(manager.modules[name]):
                manager.modules[name].set_lora(0, a, b)
    return _layout(recorder, tensors, rank, coords, {}, {})


@contextmanager
def _without_reset(module: Any) -> Iterator[None]:
    """Inside, the layer's `reset_lora` does nothing: it writes in a way that the recorder takes for computed values."""
    module.reset_lora = lambda index: None
    try:
        yield
    finally:
        del module.reset_lora


def _calls(
    manager: Any, tensors: Sequence[CheckpointTensor], sources: list[Any]
) -> list[tuple[str, Any, Any]]:
    """(module, A, B) of every `set_lora` that these tensors need; lists for a layer fused of several."""
    largest = manager.lora_config.max_lora_rank
    rename = getattr(manager.model, "hf_to_vllm_mapper", None)
    rename = rename.get_rename_mapper() if rename is not None else None
    pairs: dict[str, dict[bool, Any]] = {}
    for tensor, source in zip(tensors, sources, strict=True):
        name, is_a = parse_fine_tuned_lora_name(tensor.name, rename)
        pairs.setdefault(name, {})[is_a] = source
        if (rank := tensor.shape[0 if is_a else 1]) > largest:
            raise ConfigError(
                f"the adapter has rank {rank}, the engine's slots have room for {largest}",
                remedy=f"launch(..., engine={{'enable_lora': True, 'max_lora_rank': {rank}}}), "
                f"or with_lora(rank={largest})",
            )
    calls: list[tuple[str, Any, Any]] = []
    left = set(pairs)
    for name, module in manager.modules.items():
        parts = manager.packed_modules.get(name)
        if name in pairs and _has_slots(module):
            calls.append((name, pairs[name][True], pairs[name][False]))
            left.discard(name)
        elif parts and left & set(parts) and _has_slots(module):
            found = [pairs.get(part, {}) for part in parts]
            calls.append(
                (name, [f.get(True) for f in found], [f.get(False) for f in found])
            )
            left -= set(parts)
    if left:
        shown = ", ".join(sorted(left)[:3])
        has = sorted(
            {
                n.rpartition(".")[2]
                for n in chain(manager.modules, *manager.packed_modules.values())
            }
        )
        raise ConfigError(
            f"the engine has no slots for {len(left)} of the adapter's modules: {shown}",
            remedy=f"with_lora(targets=...) of what it adapts: {', '.join(has)}",
            modules=sorted(left),
        )
    return calls


def _has_slots(module: Any) -> bool:
    """Whether the layer's memory is arranged by slots; that of experts is not."""
    return isinstance(getattr(module, "lora_a_stacked", None), tuple | torch.Tensor)


def _memory(name: str, module: Any, slot: int) -> dict[str, torch.Tensor]:
    """The memory of one slot in one layer, by its name in a plan."""
    out = {}
    for side in ("lora_a", "lora_b"):
        stacked = getattr(module, f"{side}_stacked")
        for part, tensor in enumerate(
            [stacked] if isinstance(stacked, torch.Tensor) else stacked
        ):
            out[f"{PREFIX}{name}.{side}.{part}"] = tensor[slot]
    return out


# -- the slot that a link writes


class _LinkedAdapter(LoRAModel):
    """The adapter of a link in vLLM's cache. Its values are in the slot alone, so that it can't be loaded again."""

    placed = False

    def get_lora(self, module_name: str) -> Any:
        if self.placed:
            raise RuntimeError(
                "the slot that a jvlab link writes was given to another adapter: restart the replica"
            )
        return None  # when it is first placed: the slot is cleared


class AdapterSlot:
    """One of the engine's adapter slots, pinned: vLLM gives it to no other adapter while the engine lives."""

    def __init__(self, worker: Any) -> None:
        self._manager = manager = manager_of(worker)
        if NUMBER not in manager.list_adapters():
            adapter = _LinkedAdapter(NUMBER, manager.lora_config.max_lora_rank, {})
            manager._registered_adapters[NUMBER] = adapter
            manager.activate_adapter(NUMBER)
            manager.pin_adapter(NUMBER)
            adapter.placed = True
        self.slot = manager.lora_index_to_id.index(NUMBER)

    def memory(self, names: Sequence[str]) -> torch.nn.Module:
        """The slot's memory as parameters of a model, by the names that a plan has for it."""
        root = torch.nn.Module()
        found: dict[str, torch.Tensor] = {}
        for name in names:
            module, _, _ = name.removeprefix(PREFIX).rpartition(".lora_")
            if name not in found and module in self._manager.modules:
                found |= _memory(module, self._manager.modules[module], self.slot)
            if name not in found:
                raise SyncError(
                    f"no {name} here",
                    remedy="the plan was made for another engine: connect again",
                )
            node = root
            *path, leaf = name.split(".")
            for part in path:
                if part not in own_modules(node):
                    node.add_module(part, torch.nn.Module())
                node = node.get_submodule(part)
            node.register_parameter(
                leaf, torch.nn.Parameter(found[name], requires_grad=False)
            )
        return root

    def check(self) -> None:
        """Raise unless requests of the linked adapter compute with this slot."""
        if self._manager.lora_index_to_id[self.slot] != NUMBER:
            raise VerifyError(
                "the adapter arrived, but vLLM has given its slot to another",
                remedy="restart the replica: something outside of jvlab loads adapters into this engine",
            )

    def clear(self) -> None:
        """Make the adapter zero: requests that use it then compute with the base alone."""
        with torch.no_grad():
            for module_name, module in self._manager.modules.items():
                if not _has_slots(module):
                    module.reset_lora(self.slot)
                    continue
                for memory in _memory(module_name, module, self.slot).values():
                    memory.zero_()
            # others write and read this memory on streams of their own
            if torch.cuda.is_available():
                torch.cuda.synchronize()
