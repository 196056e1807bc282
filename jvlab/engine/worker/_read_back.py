"""Reads back what a layer computes with: experts from their packed memory, linear layers through their kernel.

live        the parameter's own memory, which the engine computes with, is digested
read back   vLLM packed it: experts are unpacked bit for bit; a kernel's weight is its product with the identity, which
            is exact, as all but one term of each sum are zero (only the sign of zeros is lost)
sampled     the same for some columns, others in each sync, and the product of all with a vector of signs, which must
            equal that of the weights that arrived, up to rounding: cheap enough for every sync
loader      passed to the model's own load_weights, which may do anything with it
reloaded    processed by vLLM's own reload; the digest is of what that was given, and later checks compare the layer's
            memory with what the reload left there
unread      packed in a way that can't be read back; the digest is of what arrived
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

COLUMNS = 7  # read back exactly in each sync; with the signs they make a product of eight rows
BLOCK = 256  # rows of the identity at once
PANEL = 32  # outputs that vLLM's CPU kernels for experts pack together
CHUNK = 1 << 22  # elements converted to float32 at once

Kernel = Callable[[torch.Tensor, Any, Any], torch.Tensor]


# Linear layers ----------------------------------------------------------------------------------------------------


def packed_kernel(attributes: dict[str, Any]) -> Kernel | None:
    """The layer's matrix product, if its weight is packed: on CPUs, vLLM keeps that in a closure."""
    kernel: Any = attributes.get("cpu_linear")
    code = getattr(kernel, "__code__", None)
    return kernel if code is not None and (code.co_freevars or kernel.__defaults__) else None


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
        finite = torch.isfinite(self.product)  # with an infinite weight a product is not a column
        read, wanted = found[:-1, finite], self.values[:, finite]
        # a kernel may be set to round float32 to bfloat16 (DNNL_DEFAULT_FPMATH_MODE)
        if not (torch.equal(read, wanted) or torch.equal(read, wanted.to(torch.bfloat16).to(dtype))):
            return False
        product = self.product.to(dtype).float()
        largest = float(self.product[finite].abs().max()) if bool(finite.any()) else 0.0
        return torch.allclose(
            found[-1].float(), product, rtol=0, atol=rounding(dtype, self.width) * largest, equal_nan=True
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
    return Expected(columns, raw[:, columns].t().contiguous(), _product(raw, _signs(width)), width)


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
    return torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(width)).float() * 2 - 1


def whole(kernel: Kernel, parameter: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
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


def experts_in_order(method: Any, name: str, packed: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """A parameter of vLLM's CPU experts in the loader's format, from its packed memory; None if that fails."""
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    isa = getattr(kernel, "isa", None)
    if packed.ndim == 2:
        return _without_padding(packed, name, shape)
    if packed.ndim != 3 or not isinstance(isa, str) or getattr(kernel, "_use_zentorch", True):
        return None
    order = _panel(isa, packed.shape[2], packed.dtype)
    if order is None or packed.shape[1] % PANEL:
        return None
    sizes, strides = order
    experts, outputs, inputs = packed.shape
    panels = packed.detach().contiguous().view(-1)
    spread = torch.as_strided(
        panels, (experts * outputs // PANEL, *sizes), (PANEL * inputs, *strides), panels.storage_offset()
    )
    return _without_padding(spread.reshape(experts, outputs, inputs), name, shape)


def _without_padding(full: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Remove the zeros with which vLLM may pad each expert's inner dimension; w13 is gate, then up."""
    if tuple(full.shape) == tuple(shape):
        return full
    if len(shape) != full.ndim or any(a < b for a, b in zip(full.shape, shape, strict=True)):
        return None
    if name.startswith("w13") and full.shape[2:] == tuple(shape[2:]):
        inner, wide = shape[1] // 2, full.shape[1] // 2
        return torch.cat([full[:, :inner], full[:, wide : wide + inner]], dim=1)
    if name.startswith("w2") and full.shape[1] == shape[1]:
        return full[..., : shape[-1]].contiguous()
    return None


@functools.lru_cache(maxsize=64)
def _panel(isa: str, inputs: int, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Sizes and strides that unpack a panel of packed outputs; None if no strides do.

    Found by packing numbered elements, one base-256 digit at a time (every dtype has those); tested on a random panel.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    count = PANEL * inputs
    place = torch.zeros(count, dtype=torch.int64)
    index, unit = torch.arange(count), 1
    while unit < count:
        digit = (index // unit % 256).to(dtype).view(1, PANEL, inputs)
        place += cpu_prepack_moe_weight(digit, isa).reshape(-1).to(torch.int64) * unit
        unit *= 256
    if not torch.equal(torch.sort(place).values, index):
        return None
    back = torch.argsort(place)  # position of each element of the plain panel in the packed one
    found = _as_strides(back)
    test = torch.randn(2, 2 * PANEL, inputs).to(dtype)
    if found is None:
        return None
    packed = cpu_prepack_moe_weight(test, isa)
    spread = torch.as_strided(packed, (4, *found[0]), (count, *found[1]))
    return found if torch.equal(spread.reshape(test.shape), test) else None


def _as_strides(places: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """places[i] as Σ digits(i)·strides, innermost last; None if it is no such sum."""
    sizes: list[int] = []
    strides: list[int] = []
    rest = places
    while len(rest) > 1:
        step = int(rest[1] - rest[0])
        run = 2
        while run < len(rest) and int(rest[run] - rest[run - 1]) == step:
            run += 1
        while len(rest) % run:
            run -= 1
        lines = rest.view(-1, run)
        if run < 2 or not torch.equal(lines - lines[:, :1], (torch.arange(run) * step).expand_as(lines)):
            return None
        sizes.insert(0, run)
        strides.insert(0, step)
        rest = lines[:, 0]
    return tuple(sizes), tuple(strides)
