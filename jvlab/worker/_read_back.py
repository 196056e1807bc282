"""What a layer computes with, read back: experts from their packed memory, linear layers by asking their kernel.

live        the parameter's own memory: a digest of it is a digest of what is computed with
read back   vLLM packed it: experts are put in order again, bit for bit; a kernel is asked for its product with the
            identity, which is exact, for one summand alone is not zero (only the sign of zeros is lost)
sampled     the same for some columns, others in each sync, and the product of all with a vector of signs, which
            must be that of the weights that arrived, to rounding: what a sync can afford
loader      handed to the model's own load_weights, which may do anything with it
unread      packed in a way that nobody here can read back; the digest is of what arrived
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
CHUNK = 1 << 22  # elements made float32 at once

Kernel = Callable[[torch.Tensor, Any, Any], torch.Tensor]


# Linear layers ----------------------------------------------------------------------------------------------------


def packed_kernel(attributes: dict[str, Any]) -> Kernel | None:
    """The layer's product, if it holds a packed weight: vLLM keeps that in a closure, on CPUs only."""
    kernel: Any = attributes.get("cpu_linear")
    code = getattr(kernel, "__code__", None)
    return kernel if code is not None and (code.co_freevars or kernel.__defaults__) else None


@dataclass
class Expected:
    """What a kernel must answer for a weight: some of its columns, and its product with signs."""

    columns: list[int]
    values: torch.Tensor  # (columns, outputs)
    product: torch.Tensor  # float32, by output
    width: int

    def agrees(self, kernel: Kernel, parameter: Any) -> bool:
        """Does the kernel hold that weight, as far as these show?"""
        dtype = self.values.dtype
        rows = torch.zeros(len(self.columns) + 1, self.width, dtype=dtype)
        rows[torch.arange(len(self.columns)), self.columns] = 1
        rows[-1] = _signs(self.width).to(dtype)
        with torch.no_grad():
            found = kernel(rows, parameter, None)
        if found.shape != (len(rows), len(self.product)):
            return False
        finite = torch.isfinite(self.product)  # a product with an infinite weight is no column any more
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
    """How far two sums of so many terms may be apart, as a part of the largest; kernels add float16 in float16."""
    if dtype == torch.bfloat16:
        return 2.0**-5
    return 8 * (math.sqrt(width) + 8) * torch.finfo(dtype).eps


def expected(raw: torch.Tensor, seed: int) -> Expected:
    """Of a weight (outputs, inputs), stored by lines or by columns; `seed` chooses the columns."""
    width = raw.shape[1]
    drawn = torch.Generator().manual_seed(seed)
    columns = torch.randperm(width, generator=drawn)[:COLUMNS].tolist()
    return Expected(columns, raw[:, columns].t().contiguous(), _product(raw, _signs(width)), width)


def _product(raw: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """raw @ signs in float32, read in the order in which it lies."""
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
    """The kernel's weight, all of it; None if it has none of this shape. Exact but for the sign of zeros.

    In the engine's own thread only: vLLM's oneDNN kernels share one scratch memory.
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
    """A parameter of vLLM's CPU experts as its loader knows it, from the memory that their kernel reads; or None."""
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
    """vLLM may widen each expert's inner dimension with zeros: gate and up lie one after the other in w13."""
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
    """Sizes and strides that bring a panel of packed outputs back in order; None if it is no such permutation.

    Found by packing numbered elements, 256 numbers at a time: those every dtype can hold. Tried on a random panel.
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
    back = torch.argsort(place)  # where each element of the plain panel lies in the packed one
    found = _as_strides(back)
    test = torch.randn(2, 2 * PANEL, inputs).to(dtype)
    if found is None:
        return None
    packed = cpu_prepack_moe_weight(test, isa)
    spread = torch.as_strided(packed, (4, *found[0]), (count, *found[1]))
    return found if torch.equal(spread.reshape(test.shape), test) else None


def _as_strides(places: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """places[i] as Σ digits(i)·strides, innermost last; None where it is no such sum."""
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
