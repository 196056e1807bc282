"""A model's live memory by name: which tensors share it, what it holds, and whether it was replaced."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from jvlab._errors import LayoutError, Unsupported
from jvlab.engine._modules import (
    as_integers,
    format_of,
    memory_of,
    own_buffers,
    own_parameters,
    packed_kernel,
    users_of,
)
from jvlab.engine.worker._receivers import ReceivedBox
from jvlab.layout import _sparse
from jvlab.layout._plan_types import TargetInfo, storage_elements
from jvlab.layout._sparse import Section
from jvlab.transport import _ipc_kernels, _sparse_kernels
from jvlab.transport._nccl import DeviceBytes

# Copies a box of a bucket into strided memory at one core's full speed: plain runs as memcpy, transposes in blocks.

# Rows of the source transposed at once where torch's own blocked transpose does not apply. Measured on one core, 2048
# by 4096 float32: torch's copy_ into a strided view 0.66 GB/s, its blocked transpose (dense target only) 2.0, in blocks
# of 128 rows 1.4; two threads were no faster.
ROWS = 128


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's storage from its first to its last element, in one dimension."""
    plain = tensor.detach()
    return torch.as_strided(
        plain, (storage_elements(tuple(plain.shape), plain.stride()),), (1,)
    )


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's bits as integers of the same width, without a copy: numpy has no bfloat16."""
    return as_integers(tensor.detach()).numpy()


def scatter(
    box: ReceivedBox, data: memoryview | DeviceBytes, target: torch.Tensor
) -> None:
    """Write the box's values, packed C-contiguously in `data`, into the flat target of the same dtype."""
    if isinstance(data, DeviceBytes):
        _scatter_on_device(box, data, target)
        return
    count = box.nbytes // target.element_size()
    source = torch.frombuffer(
        _writable(data), dtype=target.dtype, count=count, offset=box.at
    ).view(box.shape)
    _copy(
        target.as_strided(box.shape, box.strides, target.storage_offset() + box.offset),
        source,
    )


def patch(
    parts: Iterable[tuple[ReceivedBox, Section, torch.Tensor]],
    data: memoryview | DeviceBytes,
) -> None:
    """Write what changed in boxes, as a sparse bucket holds it, into their flat targets of the same dtype."""
    if isinstance(data, DeviceBytes):
        _patch_on_device(parts, data)
        return
    for box, part, target in parts:
        if part.whole:
            scatter(replace(box, at=part.values_at), data, target)
            continue
        if not part.count:
            continue
        memory = np.frombuffer(_writable(data), np.uint8)
        _sparse.put(
            bits(target).view(f"u{part.item}"),
            _sparse.positions_of(part, memory),
            _sparse.values_of(part, memory),
            box.offset,
            box.shape,
            box.strides,
        )


def _writable(data: memoryview) -> memoryview:
    """The same memory, for reading, as torch and compiled loops take no other; the caller keeps `data` alive."""
    start = np.frombuffer(data, np.uint8).ctypes.data
    return memoryview((ctypes.c_char * data.nbytes).from_address(start))


def _scatter_on_device(
    box: ReceivedBox, data: DeviceBytes, target: torch.Tensor
) -> None:
    """On the bucket's own stream; releasing the bucket waits for it."""
    if data.view is None:
        data.view = torch.as_tensor(data, device=f"cuda:{data.device}")
    source = data.view[box.at : box.at + box.nbytes].view(target.dtype).view(box.shape)
    with torch.cuda.stream(torch.cuda.ExternalStream(data.stream.ptr, data.device)):
        at = target.as_strided(
            box.shape, box.strides, target.storage_offset() + box.offset
        )
        at.copy_(source, non_blocking=True)


def _patch_on_device(
    parts: Iterable[tuple[ReceivedBox, Section, torch.Tensor]], data: DeviceBytes
) -> None:
    """On the bucket's own stream; releasing the bucket waits for it."""
    places = [
        _sparse_kernels.Place(
            part, target.data_ptr(), box.offset, box.shape, box.strides
        )
        for box, part, target in parts
    ]
    with _ipc_kernels.cupy().cuda.Device(data.device), data.stream:
        _sparse_kernels.put(places, data.pointer, data.device)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.dim() < 2 or target.stride(-2) != 1 or target.stride(-1) == 1:
        target.copy_(source)
        return
    for lead in itertools.product(*(range(n) for n in target.shape[:-2])):
        _transpose(target[lead].t(), source[lead])


def _transpose(target: torch.Tensor, source: torch.Tensor) -> None:
    """target = source.t(); the target's rows are contiguous, with possible gaps between them."""
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source.t())  # torch's blocked transpose
        return
    room = torch.empty(len(target) * min(ROWS, len(source)), dtype=target.dtype)
    for at in range(0, len(source), ROWS):
        part = source[at : at + ROWS]
        transposed = room[: part.numel()].view(len(target), len(part))
        transposed.copy_(part.t())
        target[:, at : at + len(part)].copy_(transposed)


# Reads back what a layer computes with: experts from their packed memory, linear layers through their kernel.
# live        the parameter's own memory, which the engine computes with, is digested
# read back   vLLM packed it: experts are unpacked bit for bit; a kernel's weight is its product with the
# identity, which
#             is exact, as all but one term of each sum are zero (only the sign of zeros is lost)
# sampled     the same for some columns, others in each sync, and the product of all with a vector of signs, which must
#             equal that of the weights that arrived, up to rounding: cheap enough for every sync
# loader      passed to the model's own load_weights, which may do anything with it
# reloaded    processed by vLLM's own reload; the digest is of what that was given, and later checks compare the layer's
#             memory with what the reload left there
# unread      packed in a way that can't be read back; the digest is of what arrived

# read back exactly in each sync; with the signs they make a product of eight rows
COLUMNS = 7
BLOCK = 256  # rows of the identity at once
PANEL = 32  # outputs that vLLM's CPU kernels for experts pack together
CHUNK = 1 << 22  # elements converted to float32 at once

Kernel = Callable[[torch.Tensor, Any, Any], torch.Tensor]


# Linear layers ----------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """What a kernel must compute for a weight: some of its columns, and its product with signs."""

    columns: list[int]
    values: torch.Tensor  # (columns, outputs)
    product: torch.Tensor  # float32, by output
    width: int

    def agrees(self, kernel: Kernel, parameter: Any) -> bool:
        """Whether the kernel's results are those of that weight."""
        dtype = self.values.dtype
        rows = torch.zeros(len(self.columns) + 1, self.width, dtype=dtype)
        rows[torch.arange(len(self.columns)), self.columns] = 1
        rows[-1] = _signs(self.width).to(dtype)
        with torch.no_grad():
            found = kernel(rows, parameter, None)
        if found.shape != (len(rows), len(self.product)):
            return False
        # with an infinite weight a product is not a column
        finite = torch.isfinite(self.product)
        read = found[:-1, finite]
        wanted = self.values[:, finite]
        # a kernel may be set to round float32 to bfloat16 (DNNL_DEFAULT_FPMATH_MODE)
        if not (
            torch.equal(read, wanted)
            or torch.equal(read, wanted.to(torch.bfloat16).to(dtype))
        ):
            return False
        product = self.product.to(dtype).float()
        largest = float(self.product[finite].abs().max()) if bool(finite.any()) else 0.0
        return torch.allclose(
            found[-1].float(),
            product,
            rtol=0,
            atol=rounding(dtype, self.width) * largest,
            equal_nan=True,
        )


def rounding(dtype: torch.dtype, width: int) -> float:
    """Tolerance for two sums of `width` terms, relative to the largest; kernels accumulate float16 in float16."""
    if dtype == torch.bfloat16:
        return 2.0**-5
    return 8 * (math.sqrt(width) + 8) * torch.finfo(dtype).eps


def expected(raw: torch.Tensor, seed: int) -> Expected:
    """For a weight (outputs, inputs), stored by rows or by columns; `seed` chooses the columns."""
    width = raw.shape[1]
    drawn = torch.Generator().manual_seed(seed)
    columns = torch.randperm(width, generator=drawn)[:COLUMNS].tolist()
    return Expected(
        columns, raw[:, columns].t().contiguous(), _product(raw, _signs(width)), width
    )


def _product(raw: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """raw @ signs in float32, reading raw in memory order."""
    if raw.dtype == torch.float32:
        return torch.mv(raw, signs)
    outputs, width = raw.shape
    total = torch.zeros(outputs)
    if raw.stride(0) == 1 and width > 1:
        step = max(1, CHUNK // max(1, outputs))
        for at in range(0, width, step):
            total += torch.mv(raw[:, at : at + step].float(), signs[at : at + step])
        return total
    step = max(1, CHUNK // max(1, width))
    for at in range(0, outputs, step):
        total[at : at + step] = torch.mv(raw[at : at + step].float(), signs)
    return total


@functools.lru_cache(maxsize=32)
def _signs(width: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(width)
    return torch.randint(0, 2, (width,), generator=drawn).float() * 2 - 1


def whole(
    kernel: Kernel, parameter: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """The kernel's whole weight; None if it has none of this shape. Exact except for the sign of zeros.

    Only in the engine's own thread: vLLM's oneDNN kernels share one scratch buffer.
    """
    if len(shape) != 2:
        return None
    out = torch.empty(shape, dtype=dtype)
    with torch.no_grad():
        for at in range(0, shape[1], BLOCK):
            count = min(BLOCK, shape[1] - at)
            rows = torch.zeros(count, shape[1], dtype=dtype)
            rows[torch.arange(count), torch.arange(at, at + count)] = 1
            product = kernel(rows, parameter, None)
            if product.shape != (count, shape[0]):
                return None
            out[:, at : at + count] = product.t()
    return out


# Experts ----------------------------------------------------------------------------------------------------------


def experts_in_order(
    method: Any, name: str, packed: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor | None:
    """A parameter of vLLM's CPU experts in the loader's format, from its packed memory; None if that fails."""
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    isa = getattr(kernel, "isa", None)
    if packed.ndim == 2:
        return _without_padding(packed, name, shape)
    if (
        packed.ndim != 3
        or not isinstance(isa, str)
        or getattr(kernel, "_use_zentorch", True)
    ):
        return None
    back = _panel(isa, packed.shape[2], packed.dtype)
    if back is None or packed.shape[1] % PANEL:
        return None
    # numpy gathers twice as fast as torch
    plain = bits(packed).reshape(-1, len(back)).take(back, axis=1)
    full = torch.from_numpy(plain).view(packed.dtype).view(packed.shape)
    return _without_padding(full, name, shape)


def _without_padding(
    full: torch.Tensor, name: str, shape: tuple[int, ...]
) -> torch.Tensor | None:
    """Remove the zeros with which vLLM may pad each expert's inner dimension; w13 is gate, then up."""
    if tuple(full.shape) == tuple(shape):
        return full
    if len(shape) != full.ndim or any(
        a < b for a, b in zip(full.shape, shape, strict=True)
    ):
        return None
    if name.startswith("w13") and full.shape[2:] == tuple(shape[2:]):
        inner = shape[1] // 2
        wide = full.shape[1] // 2
        return torch.cat([full[:, :inner], full[:, wide : wide + inner]], dim=1)
    if name.startswith("w2") and full.shape[1] == shape[1]:
        return full[..., : shape[-1]].contiguous()
    return None


@functools.lru_cache(maxsize=64)
def _panel(isa: str, inputs: int, dtype: torch.dtype) -> np.ndarray | None:
    """For each element of a panel of outputs its place in the packed panel; None if panels are not packed alike.

    Found by packing numbered elements, one base-256 digit at a time (every dtype has those); tested on random panels.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    count = PANEL * inputs
    place = torch.zeros(count, dtype=torch.int64)
    index = torch.arange(count)
    unit = 1
    while unit < count:
        digit = (index // unit % 256).to(dtype).view(1, PANEL, inputs)
        place += cpu_prepack_moe_weight(digit, isa).reshape(-1).to(torch.int64) * unit
        unit *= 256
    back = np.argsort(place.numpy())
    test = torch.randn(2, 2 * PANEL, inputs).to(dtype)
    packed = bits(cpu_prepack_moe_weight(test, isa)).reshape(-1, count)
    found = packed.take(back, axis=1).reshape(test.shape)
    return back if np.array_equal(found, bits(test)) else None


# ----------------------------------------------------------------------------------------------------

LIVE_REMEDY = 'launch with env={"JVLAB_LIVE_WEIGHTS": "1"}: linear layers then compute from live memory'


def by_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer that the model has now."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def check_format(tensor: torch.Tensor | None, info: TargetInfo, rank: int) -> None:
    """Raise unless a rank's live memory has the format of the plan."""
    have = None if tensor is None else format_of(tensor)
    if have != (info.shape, info.dtype, info.strides):
        raise LayoutError(
            f"rank {rank}: the plan writes {info.name} {info.shape} {info.dtype} {info.strides}; this engine has "
            f"{have or 'no such live memory'}",
            remedy="the plan was made for another engine: connect again",
            parameter=info.name,
        )


def some(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def holders(model: torch.nn.Module) -> dict[int, dict[int, torch.Tensor]]:
    """Every tensor that the model's modules hold, by storage: parameters, buffers, and plain attributes."""
    found: dict[int, dict[int, torch.Tensor]] = {}
    for module in model.modules():
        for table in (own_parameters(module), own_buffers(module), module.__dict__):
            for tensor in table.values():
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    found.setdefault(memory_of(tensor), {})[id(tensor)] = tensor
    return found


def sharing(
    live: torch.Tensor, holding: dict[int, dict[int, torch.Tensor]]
) -> list[torch.Tensor] | None:
    """All tensors that share the parameter's storage; None if there are unknown ones, or it is part of a larger one."""
    storage = live.untyped_storage()
    mine = list(holding.get(memory_of(live), {}).values())
    whole = live.storage_offset() == 0 and flat(live).nbytes == storage.nbytes()
    # one reference for each tensor and one for `storage` itself
    return mine if whole and users_of(storage) <= len(mine) + 1 else None


class Addresses:
    """The addresses of some of a model's tensors when this was created.

    Checking them takes a tenth of a microsecond each, so that every sync can: memory that the engine has replaced
    since (a reload, a wake-up) would still accept our bytes, and still have the right digest.
    """

    def __init__(self, model: torch.nn.Module, wanted: dict[str, int]) -> None:
        tables: dict[str, tuple[dict[str, Any], str]] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for table in (own_buffers(module), own_parameters(module)):
                for leaf in table:
                    tables[f"{prefix}.{leaf}" if prefix else leaf] = (table, leaf)
        self._rows = [
            (name, *tables[name], pointer)
            for name, pointer in wanted.items()
            if name in tables
        ]

    def moved(self) -> list[str]:
        """Names of tensors that have another address now."""
        return [
            name
            for name, table, leaf, at in self._rows
            if (t := table.get(leaf)) is None or t.data_ptr() != at
        ]


def peek(
    model: torch.nn.Module, name: str, start: int, count: int
) -> tuple[bytes, int]:
    """Bytes of a live parameter's storage, and their total number; packed ones are read back."""
    live = by_name(model)
    if name not in live:
        near = sorted(n for n in live if n.split(".")[-1] == name.split(".")[-1])[:3]
        raise LayoutError(
            f"no parameter {name!r} on this rank",
            remedy=f"for example {', '.join(near or list(live)[:3])}",
        )
    found = _unpacked(model, name, live[name])
    if found is None:
        raise Unsupported(
            f"{name} is packed after loading: its elements can't be read back",
            remedy=LIVE_REMEDY,
        )
    values = bits(flat(found.cpu())).view("uint8")
    return values[start : start + count].tobytes(), values.size


def _unpacked(
    model: torch.nn.Module, name: str, live: torch.Tensor
) -> torch.Tensor | None:
    from jvlab.engine.tracing import _vllm_model

    prefix, _, leaf = name.rpartition(".")
    layer = model.get_submodule(prefix)
    made = _vllm_model.as_built(layer).get(leaf)
    if made is not None and _vllm_model.packed_experts(layer):
        return experts_in_order(layer.quant_method, leaf, live, tuple(made.shape))
    if live.numel():
        return live
    kernel = packed_kernel(layer.__dict__)
    if made is None or kernel is None or leaf != "weight":
        return None
    return whole(kernel, own_parameters(layer)[leaf], tuple(made.shape), made.dtype)
