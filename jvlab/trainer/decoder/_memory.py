"""What training takes of a device's memory, estimated before anything is compiled, and what a device has."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jvlab._units import human_bytes
from jvlab.trainer.decoder import _model
from jvlab.trainer.decoder._config import DecoderConfig
from jvlab.trainer.decoder._runtime import Runtime
from jvlab.trainer.decoder._sharding import bytes_per_device

# of the memory at hand that a choice may fill: estimates are rough, and allocators fragment
SHARE = 0.8
# of a host's free memory: an engine, a kernel and a browser run beside the trainer
CPU_SHARE = 0.25
BUDGETS = (16384, 8192, 4096, 2048, 1024, 512)  # tokens of a micro-batch to choose from
MIB = 1 << 20
CPU_BUDGET = 2048  # more tokens at once are no faster there


PARTS = ("parameters", "gradients", "moments", "activations", "logits", "kernel")


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device during a step over `rows` rows of `length` tokens at once."""

    rows: int
    length: int
    remat: str
    parameters: int
    gradients: int  # summed over micro-batches in float32, and those of one micro-batch
    moments: int  # of AdamW
    activations: int  # kept for the gradient, and those of the layer being computed
    logits: int
    kernel: int  # of a fused kernel's backward pass over rows of several samples
    at_hand: int  # the device's memory that is free or holds this policy; 0 if unknown

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in PARTS)

    @property
    def fits(self) -> bool:
        """Is there room for it, with something to spare? Yes if the device does not say what it has."""
        return not self.at_hand or self.total <= SHARE * self.at_hand

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {human_bytes(getattr(self, name))}"
            for name in PARTS
            if getattr(self, name)
        )
        of = f" of {human_bytes(self.at_hand)} at hand" if self.at_hand else ""
        return f"{human_bytes(self.total)}{of} for {self.rows} × {self.length:,} tokens, remat {self.remat}: {parts}"


def estimate(
    config: DecoderConfig,
    runtime: Runtime,
    params: Any,
    rows: int,
    tokens: int,
    samples: int = 1,
    frozen: Any = (),
) -> Memory:
    """For a micro-batch of `rows` rows of `tokens` tokens; `samples` is how many a fused kernel is told a row may hold.

    `params` are trained, `frozen` only held.

    It then has room for the gradients of queries, keys and values of each of them at the row's full length, in float32.
    (XLA's temporaries for Qwen3-1.7B on an H200: 15.6 GiB for 32,768 tokens and one sample, 51.5 for 64; 12.5 for
    16,384 tokens and 8 samples, 19.2 for 32.)
    """
    leaves = jax.tree.leaves(params)
    trained = bytes_per_device(leaves)
    held = bytes_per_device([*leaves, *jax.tree.leaves(frozen)])
    count = bytes_per_device(leaves, 1)
    remat = runtime.remat_of(config, rows, tokens)
    shards = runtime.layout.mesh.size if runtime.layout else 1
    here = -(-rows // min(rows, shards)) * tokens
    everything = runtime.kept_bytes(config, rows, tokens, "none") // config.layers
    per_token = 4 * (config.heads + 2 * config.kv_heads) * config.head_dim
    return Memory(
        rows=rows,
        length=tokens,
        remat=remat,
        parameters=held,
        gradients=4 * count + trained,
        moments=8 * count,
        activations=runtime.kept_bytes(config, rows, tokens, remat) + 2 * everything,
        logits=3 * 4 * min(_model.CHUNK_LOGITS, here * config.vocab),
        kernel=int(1.15 * samples * here * per_token) if samples > 1 else 0,
        at_hand=at_hand(leaves[0], held),
    )


def room(params: Any, frozen: Any = ()) -> int:
    """Bytes of activations that fit beside parameters, gradients and moments. The same in each run of a script:
    what is free just now does not count."""
    leaves = jax.tree.leaves(params)
    fixed = jax.tree.leaves(frozen)
    count = bytes_per_device(leaves, 1)
    held = 2 * bytes_per_device(leaves) + bytes_per_device(fixed)
    free = least(capacity(leaves[0]), leaves[0], MIB)
    return max(0, int(SHARE * free) - held - 12 * count) // 2


def least(number: int, array: Any, unit: int = 1) -> int:
    """The least of what the processes say that hold this array, in whole units if there are several.

    Their programs must be the same, and depend on it.
    """
    if array.sharding.is_fully_addressable:
        return number
    devices = sorted(array.sharding.device_set, key=lambda device: device.id)
    mesh = Mesh(np.array(devices), ("all",))
    each = jax.make_array_from_callback(
        (len(devices),),
        NamedSharding(mesh, PartitionSpec("all")),
        lambda index: np.array([number // unit], np.int32),
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    return int(jax.jit(jnp.min, out_shardings=everywhere)(each)) * unit


def capacity(array: Any) -> int:
    """Bytes of this array's device that a trainer may use if it is alone there."""
    device = next(iter(array.sharding.addressable_devices))
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    import psutil

    return int(psutil.virtual_memory().total * CPU_SHARE)


def at_hand(array: Any, held: int) -> int:
    """Bytes that a step may use on this array's device now, including those its parameters hold already."""
    device = next(iter(array.sharding.addressable_devices))
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        import psutil

        return int(psutil.virtual_memory().available * CPU_SHARE) + held
    free = int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    # an engine may hold a part of the GPU's memory
    with contextlib.suppress(ImportError):
        import cupy

        with cupy.cuda.Device(device.local_hardware_id):
            unused = int(stats.get("pool_bytes", 0)) - int(stats.get("bytes_in_use", 0))
            free = min(free, cupy.cuda.runtime.memGetInfo()[0] + max(unused, 0))
    return free + held


def choose_budget(
    config: DecoderConfig,
    runtime: Runtime,
    params: Any,
    samples: int = 1,
    frozen: Any = (),
) -> int:
    """The tokens of a micro-batch for the memory at hand: as many as fit; `samples`, `frozen` as for `estimate`."""
    platform = next(iter(jax.tree.leaves(params)[0].sharding.device_set)).platform
    budgets = [b for b in BUDGETS if b <= CPU_BUDGET or platform != "cpu"]
    while len(budgets) > 1:
        if estimate(config, runtime, params, 1, budgets[0], samples, frozen).fits:
            break
        del budgets[0]
    return least(budgets[0], jax.tree.leaves(params)[0])
