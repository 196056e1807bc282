"""Evidence that weights arrived: digests of what the engine computes with, where they can be computed.

The kinds of evidence (live, read back, sampled, loader, reloaded, unread) are described in `_read_back`.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jvlab.engine.tracing import _vllm_model
from jvlab.engine.worker import _live_memory, _read_back
from jvlab.engine.worker._scatter import bits, flat
from jvlab.layout._digest import MASK
from jvlab.layout._plan_types import OPAQUE

if TYPE_CHECKING:
    from jvlab.engine.worker._repack import Packed
    from jvlab.engine.worker._weight_slot import PackGroup, WeightSlot
    from jvlab.engine.worker._weights import Weights

MAX_PRODUCTS = 4e10  # multiplications that a check may spend on reading kernels back whole; seconds on two cores
CHUNK = 1 << 20  # elements searched at once for negative zeros


@dataclass
class KernelCheck:
    """A pending check that a kernel holds what arrived."""

    number: int
    name: str
    packed: Packed
    expected: _read_back.Expected

    def passes(self) -> bool:
        kernel = _read_back.packed_kernel({**self.packed.layer.__dict__, **self.packed.attributes})
        return kernel is not None and self.expected.agrees(kernel, self.packed.holds(self.name))


@dataclass
class KernelRecord:
    """What a kernel was found to hold."""

    expected: _read_back.Expected
    zeros: int  # what negative zeros add to the digest; kernels lose their sign


@dataclass
class Evidence:
    """A rank's evidence about its targets: how each digest was obtained, and pending checks of packed kernels."""

    how: dict[int, str] = field(default_factory=dict)
    pending: list[KernelCheck] = field(default_factory=list)
    kernels: dict[int, KernelRecord] = field(default_factory=dict)  # of the last commit, for later checks
    arrived: dict[int, KernelRecord] = field(default_factory=dict)  # of this sync
    checks: int = 0

    def begin(self) -> None:
        """Start a new sync; the records of earlier commits stay."""
        self.how, self.pending, self.arrived = {}, [], {}

    def commit(self) -> None:
        """The kernels now hold what arrived."""
        self.kernels |= self.arrived
        self.arrived = {}

    def run_checks(self, until: float) -> list[int]:
        """Check kernels until that time; returns the targets whose kernel does not hold what arrived."""
        wrong = []
        while self.pending:
            check = self.pending.pop()
            if not check.passes():
                wrong.append(check.number)
            if time.monotonic() >= until:
                break
        return wrong

    def counts(self) -> dict[str, int]:
        """Number of targets by kind of evidence."""
        return dict(Counter(self.how.values()))


def record(weights: Weights, slot: WeightSlot, name: str, packed: Packed, raw: torch.Tensor) -> None:
    """A layer was reprocessed: record the digest of what it holds for this target; a packed kernel is checked later."""
    number, evidence = slot.number, weights.evidence
    kernel = _read_back.packed_kernel(packed.attributes) if name == "weight" else None
    if kernel is not None:
        weights.found[number] = found = weights.digest(slot, raw)
        weights.pointers[number] = raw.data_ptr()
        evidence.how[number] = "sampled"
        seed = zlib.crc32(slot.info.name.encode()) ^ weights.version
        expected = _read_back.expected(raw, seed)
        zeros = (found - weights.digest(slot, raw + 0)) & MASK if _has_signed_zero(raw) else 0
        evidence.arrived[number] = KernelRecord(expected, zeros)
        evidence.pending.append(KernelCheck(number, name, packed, expected))
        return
    evidence.how.pop(number, None)
    memory, how = _unpacked(packed.layer, name, packed.holds(name), slot)
    if memory is None:
        weights.found[number], evidence.how[number] = weights.digest(slot, raw), "unread"
    elif tuple(memory.shape) == slot.info.shape:  # else it is missing, and has no digest
        weights.found[number], evidence.how[number] = weights.digest(slot, memory), how
        if slot.live is not None:
            weights.pointers[number] = memory.data_ptr()


def _unpacked(layer: Any, name: str, held: torch.Tensor | None, slot: WeightSlot) -> tuple[torch.Tensor | None, str]:
    """What a layer holds, in the target's format, and the kind of evidence; (None, ...) if it can't be converted."""
    if held is None or not held.numel():
        return torch.empty(0), "live"
    if _vllm_model.packed_experts(layer):
        held, how = _read_back.experts_in_order(layer.quant_method, name, held, slot.info.shape), "read back"
        if not _vllm_model.experts_read_them(layer):
            return torch.empty(0), how
    else:
        how = "live"
    if held is None or tuple(held.shape) != slot.info.shape:
        return None, how
    if held.dtype != slot.dtype:  # a kernel keeps a wider copy of a bias
        held, how = held.to(slot.dtype), "read back"
    if held.stride() != slot.info.strides:
        held = torch.empty_strided(slot.info.shape, slot.info.strides, dtype=slot.dtype).copy_(held)
    return held, how


def _has_signed_zero(raw: torch.Tensor) -> bool:
    values = bits(flat(raw))
    sign = np.iinfo(values.dtype).min
    return any(bool((values[at : at + CHUNK] == sign).any()) for at in range(0, values.size, CHUNK))


# Between syncs -----------------------------------------------------------------------------------------------------


def check(weights: Weights) -> tuple[dict[int, int], dict[int, str]]:
    """(digests of what the engine computes with now, how each was obtained); none for a target that is missing."""
    found: dict[int, int] = {}
    how: dict[int, str] = {}
    now, left = _live_memory.by_name(weights.model), MAX_PRODUCTS
    held: dict[Any, bool] = {}  # reloaded layers: do they hold what the reload left there?
    numbers = list(weights.slots)
    weights.evidence.checks += 1
    first = weights.evidence.checks * 7 % max(1, len(numbers))  # if not all can be read back whole, rotate
    for number in numbers[first:] + numbers[:first]:
        slot = weights.slots[number]
        groups = [g for g in slot.groups if not g.derived]
        live = now.get(slot.info.name) if slot.live is not None else None
        if live is not None and _live_memory.format_of(live) == slot.format:
            found[number], how[number] = weights.digest(slot, live), "live"
        for group in groups:
            if not group.reloaded:
                left -= _check_packed(weights, slot, group, left, found, how)
                continue
            if group.layer not in held:
                held[group.layer] = weights.reloads.unchanged(group.layer)
            if held[group.layer] and number in weights.committed:
                found[number], how[number] = weights.committed[number], "reloaded"
        if slot.kind == OPAQUE and number in weights.committed:
            found[number], how[number] = weights.committed[number], "loader"
    return found, how


def _check_packed(
    weights: Weights, slot: WeightSlot, group: PackGroup, left: float, found: dict[int, int], how: dict[int, str]
) -> float:
    """Check what one packed layer holds of a target; returns the multiplications it took."""
    number, layer = slot.number, group.layer
    name = next(n for n, k in group.names.items() if k == number)
    kernel = _read_back.packed_kernel(layer.__dict__) if name == "weight" else None
    if kernel is None:
        memory, way = _unpacked(layer, name, layer._parameters.get(name), slot)
        if memory is None and number in weights.committed:
            found[number], how[number] = weights.committed[number], "unread"
        elif memory is not None and tuple(memory.shape) == slot.info.shape:
            found[number], how[number] = weights.digest(slot, memory), way
        return 0.0
    shape, parameter = slot.info.shape, layer._parameters.get(name)
    cost = float(shape[0]) * shape[1] * shape[1]
    known = weights.evidence.kernels.get(number)
    finite = known is None or bool(torch.isfinite(known.expected.product).all())
    if finite and cost <= left:
        held = _read_back.whole(kernel, parameter, shape, slot.dtype)
        _compare_whole(weights, slot, held, found, how)
        return cost
    if known is not None and number in weights.committed and known.expected.agrees(kernel, parameter):
        found.setdefault(number, weights.committed[number])
        how[number] = "sampled"
    else:
        found.pop(number, None)
    return 0.0


def _compare_whole(
    weights: Weights, slot: WeightSlot, held: torch.Tensor | None, found: dict[int, int], how: dict[int, str]
) -> None:
    number = slot.number
    if held is None:
        found.pop(number, None)
        return
    how[number] = "read back"
    plain = weights.digest(slot, held)
    if number in found:  # it has live memory too (a tied head): the kernel must hold the same
        live = _live_memory.by_name(weights.model)[slot.info.name]
        if not torch.equal(held, live.detach().reshape(held.shape)):
            found.pop(number)
    elif number in weights.evidence.kernels:
        found[number] = (plain + weights.evidence.kernels[number].zeros) & MASK
    else:  # not synced over this link: zeros are assumed to be positive, as their sign can't be read back
        found[number] = plain
