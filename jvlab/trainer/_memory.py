"""What training takes of a device's memory, estimated before anything is compiled, and what a device has."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jvlab._units import human_bytes
from jvlab.trainer import _model
from jvlab.trainer._config import DecoderConfig
from jvlab.trainer._model import REMAT, Runtime
from jvlab.trainer._sharding import bytes_per_device

SHARE = 0.8  # of the memory at hand that a choice may fill: estimates are rough, and allocators fragment
CPU_SHARE = 0.25  # of a host's free memory: an engine, a kernel and a browser run beside the trainer
BUDGETS = (16384, 8192, 4096, 2048, 1024, 512)  # tokens of a micro-batch to choose from
CPU_BUDGET = 2048  # more tokens at once are no faster there


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device during a step over `tokens` tokens at once."""

    tokens: int
    remat: str
    parameters: int
    gradients: int  # summed over micro-batches in float32, and those of one micro-batch
    moments: int  # of AdamW
    activations: int  # kept for the gradient, and those of the layer being computed
    logits: int
    at_hand: int  # the device's memory that is free or holds this policy; 0 if unknown

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.moments + self.activations + self.logits

    @property
    def fits(self) -> bool:
        """Is there room for it, with something to spare? Yes if the device does not say what it has."""
        return not self.at_hand or self.total <= SHARE * self.at_hand

    def __str__(self) -> str:
        names = ("parameters", "gradients", "moments", "activations", "logits")
        parts = ", ".join(f"{name} {human_bytes(getattr(self, name))}" for name in names)
        of = f" of {human_bytes(self.at_hand)} at hand" if self.at_hand else ""
        return f"{human_bytes(self.total)}{of} for {self.tokens:,} tokens, remat {self.remat}: {parts}"


def estimate(config: DecoderConfig, runtime: Runtime, params: Any, tokens: int, rows: int = 1) -> Memory:
    """For a micro-batch of `tokens` tokens in `rows` rows."""
    leaves = jax.tree.leaves(params)
    held = bytes_per_device(leaves)
    count = bytes_per_device([_Like(leaf, 1) for leaf in leaves])
    devices = runtime.layout.mesh.size if runtime.layout else 1
    here = math.ceil(tokens / max(min(rows, devices), 1))
    width = np.dtype(runtime.dtype).itemsize if runtime.dtype != "bfloat16" else 2
    kept, whole = _per_token(config, width)
    per_layer = {"none": whole, "dots": kept, "full": config.width * width}[runtime.remat]
    length = math.ceil(tokens / rows)
    form = runtime.attention(config, None, length)[0].form
    scores = {"plain": 8 * config.heads * length * here, "chunked": 2 * 2**26}.get(form, 0)
    chunk = min(_model.CHUNK_LOGITS, here * config.vocab)
    return Memory(
        tokens=tokens,
        remat=runtime.remat,
        parameters=held,
        gradients=4 * count + held,
        moments=2 * held,
        activations=here * (per_layer * config.layers + 2 * whole) + scores * (1 + (runtime.remat == "none")),
        logits=3 * 4 * chunk,
        at_hand=at_hand(leaves[0], held),
    )


class _Like:
    """An array's sharding with another item size, for counting."""

    def __init__(self, array: Any, itemsize: int) -> None:
        self.sharding, self.shape = array.sharding, array.shape
        self.dtype = np.dtype(f"u{itemsize}")


def _per_token(config: DecoderConfig, width: int) -> tuple[int, int]:
    """Bytes of one layer's activations for a token: results of matrix products only, and everything."""
    d, f = config.width, config.inner
    heads = config.heads * config.head_dim
    keys = 2 * config.kv_heads * config.head_dim
    kept = (heads + keys + d) + (2 * f + d)
    whole = kept + 2 * (heads + keys) + heads + 2 * f + 6 * d  # norms, rotated heads, mixed values, gate times up
    return kept * width, whole * width


def at_hand(array: Any, held: int) -> int:
    """Bytes that a step may use on this array's device, including those its parameters hold already."""
    device = next(iter(array.sharding.device_set))
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)) + held
    import psutil

    return int(psutil.virtual_memory().available * CPU_SHARE) + held


def choose(config: DecoderConfig, runtime: Runtime, params: Any, fixed_remat: bool) -> tuple[int, str]:
    """The tokens of a micro-batch and `remat` for the memory at hand: the largest that fits, keeping the most."""
    platform = next(iter(jax.tree.leaves(params)[0].sharding.device_set)).platform
    budgets = BUDGETS if platform != "cpu" else tuple(b for b in BUDGETS if b <= CPU_BUDGET)
    kinds = (runtime.remat,) if fixed_remat else REMAT
    for budget in budgets:
        for remat in kinds:
            if estimate(config, replace(runtime, remat=remat), params, budget).fits:
                return budget, remat
    return budgets[-1], kinds[-1]
