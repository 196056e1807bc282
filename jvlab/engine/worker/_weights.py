"""Destinations of received weights: live memory, shadows, raw copies to pack, whole tensors for the loader; the swap.

Direct mode writes live parameters; what vLLM packed after loading is received into a raw copy, packed as soon as its
layer is complete, and the raw copy is freed. Staged mode writes shadows and packs beside the live layers; `commit`
swaps pointers. After a commit the old memory is the next sync's shadow (no page faults then), so staged mode holds the
live weights twice from its first sync until the link is closed; an abandoned sync frees its shadows.

Digests are of what the engine computes with, and a commit checks that this memory was not replaced.
"""

from __future__ import annotations

import copy
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from jvlab._errors import LayoutError, SyncError, Unsupported, VerifyError
from jvlab.engine import _modules
from jvlab.engine._modules import (
    Format,
    as_integers,
    format_of,
    own_parameters,
    packed_kernel,
)
from jvlab.engine.tracing import _vllm_model
from jvlab.engine.worker import _live_memory, _reload
from jvlab.engine.worker._live_memory import LIVE_REMEDY, bits, flat, patch, scatter
from jvlab.engine.worker._receivers import Ledger, PhaseClock, ReceivedBox
from jvlab.layout._digest import (
    MASK,
    box_digest,
    compiled_loop,
    flat_digest,
    in_sample,
    row_elements,
)
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import (
    OPAQUE,
    REPACKED,
    TargetInfo,
    item_bytes,
    storage_elements,
)
from jvlab.layout._sparse import Section, warm_put
from jvlab.transport import _sparse_kernels
from jvlab.transport._nccl import DeviceBytes

# Raw copies in transposed storage: oneDNN packs from any strides, so a weight that it packs need not be transposed.


def packs_any_strides(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether vLLM packs it by oneDNN. Its own kernels for AMX, of small weights, take contiguous memory only."""
    from vllm.model_executor.layers.utils import check_cpu_sgl_kernel

    return len(shape) == 2 and not check_cpu_sgl_kernel(shape[0], shape[1], dtype)


def transposed_boxes(
    shape: tuple[int, ...], strides: tuple[int, ...], boxes: Sequence[ReceivedBox]
) -> dict[ReceivedBox, ReceivedBox]:
    """Each box with its box in the transposed storage of a matrix; empty if that is no gain, or impossible.

    It is a gain where the bytes arrive with the matrix's first dimension fastest, as those of Flax kernels: they are
    then copied as plain runs. The boxes must cover every element, so that the whole storage is written.
    """
    if len(shape) != 2 or tuple(strides) != (shape[1], 1) or min(shape) < 2:
        return {}
    lines, row = shape
    out: dict[ReceivedBox, ReceivedBox] = {}
    covered = gained = 0
    for box in boxes:
        moved = _moved(box, lines, row)
        if moved is None:
            return {}
        out[box] = moved
        covered += box.elements
        gained += box.elements * ((moved.strides[-1] == 1) - (box.strides[-1] == 1))
    return out if covered == lines * row and gained > 0 else {}


def _moved(box: ReceivedBox, lines: int, row: int) -> ReceivedBox | None:
    line, column = divmod(box.offset, row)
    strides = []
    reach = 0
    for n, s in zip(box.shape, box.strides, strict=True):
        if s % row == 0:
            strides.append(s // row)
        else:
            strides.append(s * lines)
            reach += (n - 1) * s
    if column + reach >= row:
        return None  # an axis crosses rows
    return replace(box, offset=column * lines + line, strides=tuple(strides))


# Repacks a layer's weights with vLLM's own function: built beside the live layer first, then put in place.


@dataclass
class PackedLayer:
    """The result of processing a layer's raw weights; `place` puts it into the live layer, without copying."""

    layer: torch.nn.Module
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def place(self) -> None:
        """From now on the layer computes with the new weights. Parameters remain the same objects."""
        for name, tensor in self.tensors.items():
            live = own_parameters(self.layer).get(name)
            if live is None:
                self.layer.register_parameter(
                    name, torch.nn.Parameter(tensor, requires_grad=False)
                )
            else:
                live.data = tensor
        self.layer.__dict__.update(self.attributes)

    def holds(self, name: str) -> torch.Tensor | None:
        """The memory that the layer computes with once this is in place: the new one, or what it has already."""
        return self.tensors.get(name, own_parameters(self.layer).get(name))

    def lost(self) -> list[str]:
        """What was placed and has since been replaced by other memory or another kernel."""
        live = own_parameters(self.layer)
        out = [
            n
            for n, t in self.tensors.items()
            if (p := live.get(n)) is None or p.data_ptr() != t.data_ptr()
        ]
        kernels = [
            k for k, v in self.attributes.items() if self.layer.__dict__.get(k) is not v
        ]
        return out or (["weight"] if kernels else [])


def pack(
    layer: torch.nn.Module,
    raw: Mapping[str, torch.Tensor],
    own: Collection[str],
    experts: bool,
) -> PackedLayer:
    """Run the layer's processing after loading on a stand-in that holds `raw`; the layer itself is not changed.

    Those in `own` are copies that only `place` puts into the layer, whether or not processing changed
    them; the others are in live memory, or will be.

    The stand-in shares everything with the layer except its tables of parameters, buffers and modules and, for experts,
    the method, whose kernel must be absent or vLLM would skip the processing.
    """
    beside = _modules.stand_in(layer)
    given: dict[str, int] = {}
    for name, live in own_parameters(layer).items():
        tensor = raw.get(name, None if live is None else live.data)
        if tensor is None:
            continue
        # a new object: processing may set its data
        fresh: Any = torch.nn.Parameter(tensor, requires_grad=False)
        if live is not None:
            fresh.__dict__.update(live.__dict__)
        own_parameters(beside)[name] = fresh
        given[name] = tensor.data_ptr()
    method: Any = layer.quant_method
    if experts:
        method = copy.copy(method)
        method.moe_kernel = None
        _modules.put(beside, "quant_method", method)
    with torch.no_grad():
        method.process_weights_after_loading(beside)
    done = PackedLayer(layer)
    for name, new in own_parameters(beside).items():
        live = own_parameters(layer).get(name)
        if new is None or (new.numel() == 0 and live is not None and live.numel() == 0):
            continue  # vLLM empties a parameter of which its kernel holds a packed copy
        if name in own or new.data_ptr() != given.get(name):
            done.tensors[name] = new.data
    if not experts:  # the experts' kernel gets its weights at each call, so it stays
        done.attributes = {
            k: v
            for k, v in _modules.attributes(beside).items()
            if layer.__dict__.get(k) is not v
        }
    return done


# One target of a plan on a rank, and the layer that must be processed again once its targets have arrived.


@dataclass(eq=False)
class PackGroup:
    """A layer to reprocess once all of its parameters have arrived."""

    layer: torch.nn.Module
    derived: bool
    reloaded: bool = False  # by vLLM's own reload
    experts: bool = False
    # name within the layer -> target
    names: dict[str, int] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)


@dataclass(eq=False)
class WeightSlot:
    """One target of the plan on this rank."""

    number: int
    info: TargetInfo
    kind: int
    padded: bool
    boxes: list[ReceivedBox]
    live: torch.Tensor | None  # memory in the format of the plan, if the engine has it
    groups: list[PackGroup] = field(default_factory=list)
    shadow: torch.Tensor | None = None
    raw: torch.Tensor | None = None
    # the last raw copy, kept if later syncs may send changes to it
    kept: torch.Tensor | None = None
    device: torch.device | str = "cpu"
    # all tensors that share live memory; None: unknown
    holders: list[torch.Tensor] | None = None
    # boxes of a transposed raw copy
    transposed: dict[ReceivedBox, ReceivedBox] = field(default_factory=dict)

    @property
    def reloaded(self) -> bool:
        return any(g.reloaded for g in self.groups)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.info.dtype)

    @property
    def format(self) -> Format:
        return self.info.shape, self.info.dtype, self.info.strides

    @property
    def nbytes(self) -> int:
        return storage_elements(self.info.shape, self.info.strides) * item_bytes(
            self.info.dtype
        )

    def allocate(self, like: torch.Tensor | None = None) -> torch.Tensor:
        """New memory of this format; elements that no box fills are copied from `like`, or zero."""
        strides = (1, self.info.shape[0]) if self.transposed else self.info.strides
        memory = torch.empty_strided(
            self.info.shape, strides, dtype=self.dtype, device=self.device
        )
        if self.padded:
            flat(memory).copy_(flat(like)) if like is not None else flat(memory).zero_()
        return memory


# Evidence that weights arrived: digests of what the engine computes with, where they can be computed.
# The kinds of evidence (live, read back, sampled, loader, reloaded, unread) are described in `_live_memory`.

# multiplications that a check may spend on reading kernels back whole; seconds on two cores
MAX_PRODUCTS = 4e10


@dataclass
class KernelRecord:
    """What a packed kernel was found to hold."""

    expected: _live_memory.Expected
    zeros: int  # what negative zeros add to the digest; kernels lose their sign


def _unpacked(
    layer: Any, name: str, held: torch.Tensor | None, slot: WeightSlot
) -> tuple[torch.Tensor | None, str]:
    """What a layer holds, in the target's format, and the kind of evidence; (None, ...) if it can't be converted."""
    if held is None or not held.numel():
        return torch.empty(0), "live"
    if _vllm_model.packed_experts(layer):
        held = _live_memory.experts_in_order(
            layer.quant_method, name, held, slot.info.shape
        )
        how = "read back"
        if not _vllm_model.experts_read_them(layer):
            return torch.empty(0), how
    else:
        how = "live"
    if held is None or tuple(held.shape) != slot.info.shape:
        return None, how
    if held.dtype != slot.dtype:  # a kernel keeps a wider copy of a bias
        held = held.to(slot.dtype)
        how = "read back"
    if held.stride() != slot.info.strides:
        held = torch.empty_strided(
            slot.info.shape, slot.info.strides, dtype=slot.dtype
        ).copy_(held)
    return held, how


def _has_signed_zero(raw: torch.Tensor) -> bool:
    values = bits(flat(raw))
    return bool((values == np.iinfo(values.dtype).min).any())


# ----------------------------------------------------------------------------------------------------


class Weights:
    """The memory of one rank as targets of a plan; `worker` is vLLM's, of which config and dtype are read.

    zero_padding    what no tensor fills is zero, whatever live memory holds there
    digest          computes digests on a GPU, by target number and memory
    """

    def __init__(
        self,
        worker: Any,
        model: torch.nn.Module,
        plan: TransferPlan,
        rank: int,
        ledger: Ledger,
        *,
        zero_padding: bool = False,
        digest: Callable[[int, torch.Tensor], int] | None = None,
    ) -> None:
        self._worker = worker
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._device_digest = digest
        if self.device.type == "cpu":
            compiled_loop()
        self.model = model
        self.plan = plan
        self.rank = rank
        self._zero_padding = zero_padding
        self._lock = threading.Lock()
        self.committed: dict[int, int] = {}
        # of the last commit, for later checks
        self._kernels: dict[int, KernelRecord] = {}
        self._checks = 0
        # the mark of the sync that left what is here now; empty: unknown, or written to since
        self.base = ""
        self.sparse = False  # changes to `base` may arrive in this sync
        self._begin(0, "direct", "full", "")
        self.slots = self._slots(ledger)
        self.reloads = _reload.Reloads(
            {layer: name for name, layer in model.named_modules()}
        )
        self._group()
        self._check_boxes()
        items = {item_bytes(slot.info.dtype) for slot in self.slots.values()}
        if self.device.type == "cpu":
            warm_put(items)
        elif digest is not None:
            _sparse_kernels.warm(sorted(items), torch.cuda.current_device())

    def _begin(self, version: int, mode: str, verify: str, mark: str) -> None:
        """The state of one sync."""
        self.version = version
        self.mode = mode
        self.verify = verify
        self._mark = mark
        self.found: dict[int, int] = {}
        self.how: dict[int, str] = {}  # by target: the kind of evidence
        self.pointers: dict[int, int] = {}  # of the memory that was digested
        # packed kernels that hold what arrived, if a check passes
        self._pending: list[tuple[int, PackedLayer, _live_memory.Expected]] = []
        self._arrived: dict[int, KernelRecord] = {}
        self._packed: list[PackedLayer] = []  # in direct mode already in place
        # changes may go to shadows, which do not hold what is live yet
        self._outdated = False
        self.clock = PhaseClock()

    # Opening ------------------------------------------------------------------------------------------------------

    def _slots(self, ledger: Ledger) -> dict[int, WeightSlot]:
        live = _live_memory.by_name(self.model)
        slots = {}
        for number, boxes in ledger.boxes.items():
            info = self.plan.parameters[int(self.plan.target_parameter[number])]
            kind = int(self.plan.target_kind[number])
            found = None if kind == OPAQUE else live.get(info.name)
            if kind not in (OPAQUE, REPACKED):
                _live_memory.check_format(found, info, self.rank)
            wanted = (info.shape, info.dtype, info.strides)
            same = found is not None and format_of(found) == wanted
            padded = bool(self.plan.target_padding[number])
            slots[number] = WeightSlot(
                number,
                info,
                kind,
                padded,
                boxes,
                found if same else None,
                device=self.device,
            )
        return slots

    def _group(self) -> None:
        by_name = {s.info.name: s for s in self.slots.values() if s.kind == REPACKED}
        groups: dict[int, PackGroup] = {}
        for item in _vllm_model.repacked_layers(self.model):
            slot = by_name.get(item.parameter)
            if slot is None:
                continue
            if why := _vllm_model.not_repackable(item):
                raise Unsupported(
                    f"{item.parameter} cannot be synced: {why} after loading ({item.why})",
                    remedy="launch without that kernel",
                    parameter=item.parameter,
                )
            again = item.kind == "reloaded"
            experts = _vllm_model.moe_method(item.layer)
            group = groups.setdefault(
                id(item.layer),
                PackGroup(item.layer, item.kind == "derived", again, experts),
            )
            group.names[item.name] = slot.number
            slot.groups.append(group)
            if (
                item.kind == "packed"
                and slot.live is None
                and not slot.padded
                and not experts
                and packs_any_strides(slot.info.shape, slot.dtype)
            ):
                slot.transposed = transposed_boxes(
                    slot.info.shape, slot.info.strides, slot.boxes
                )
            if experts or again:
                # rearranged: perhaps of the same shape, but not as the loader writes it
                slot.live = None
        self.groups = list(groups.values())
        for slot in by_name.values():
            if not slot.groups:
                raise Unsupported(
                    f"{slot.info.name} was packed when it was traced, and this engine does not pack it",
                    remedy="the plan was made for another engine: connect again",
                )
        if any(s.kind == OPAQUE for s in self.slots.values()):
            for slot in by_name.values():
                if slot.padded and slot.live is None:
                    raise Unsupported(
                        f"{slot.info.name} is packed after loading and may be filled in part by a tensor that only the "
                        "loader can place",
                        remedy=LIVE_REMEDY,
                    )

    def _check_boxes(self) -> None:
        """Each box must lie within its parameter: as_strided only checks the storage's bounds."""
        for slot in self.slots.values():
            size = storage_elements(slot.info.shape, slot.info.strides)
            for box in slot.boxes:
                if (
                    box.offset < 0
                    or min(box.strides) < 0
                    or box.offset + storage_elements(box.shape, box.strides) > size
                ):
                    raise LayoutError(
                        f"a box of {slot.info.name} lies outside of its {size} elements: {box}"
                    )

    # One sync -----------------------------------------------------------------------------------------------------

    def need(self, mode: str, keep: bool = False) -> int:
        """Bytes that a sync in this mode allocates in addition; `keep`: raw copies are kept."""
        layers = [
            sum(self.slots[n].nbytes for n in set(g.names.values()))
            for g in self.groups
        ]
        whole = sum(
            s.nbytes
            for s in self.slots.values()
            if s.kind == OPAQUE or (s.reloaded and not self._at_once(mode))
        )
        # one layer arriving, one waiting, one being packed
        raw = 3 * max(layers, default=0) + whole
        if keep:
            raw += sum(s.nbytes for s in self._packed_slots() if s.kept is None)
        if mode == "direct":
            return raw
        shadows = sum(
            s.nbytes
            for s in self.slots.values()
            if s.live is not None and s.shadow is None
        )
        return raw + shadows + sum(layers)

    def _packed_slots(self) -> list[WeightSlot]:
        """What this engine holds in another format than the plan's only."""
        slots = self.slots.values()
        return [s for s in slots if s.live is None and s.kind != OPAQUE]

    def prepare(
        self,
        version: int,
        mode: str,
        verify: str,
        available: int,
        base: str = "",
        mark: str = "",
    ) -> int:
        """Allocate what the sync needs; returns its bytes. Raises if they are not available.

        `base`: the sync that sparse buckets are changes to; `sparse` then says whether this rank holds it.
        `mark`: the name of what this sync leaves.
        """
        need = self.need(mode, bool(mark))
        if need > available:
            raise Unsupported(
                f"rank {self.rank}: a {mode} sync needs {need} bytes ({need / 2**30:.2f} GiB) of memory, "
                f"{available} ({available / 2**30:.2f} GiB) are available",
                remedy='sync with mode="direct"'
                if mode == "staged"
                else "give the engine a smaller KV cache",
                need=need,
                available=available,
            )
        self._begin(version, mode, verify, mark)
        self.reloads.seconds = {}
        self.sparse = bool(base) and base == self.base
        if any(slot.kept is None for slot in self._packed_slots()):
            self.sparse = False
        self._outdated = self.sparse and mode == "staged"
        for group in self.groups:
            group.left = set(group.names.values())
        if mode == "staged":
            holders = _live_memory.holders(self.model)
            swaps = _vllm_model.may_swap(self._worker)
            for slot in self.slots.values():
                if slot.live is not None:
                    slot.holders = (
                        _live_memory.sharing(slot.live, holders) if swaps else None
                    )
                    if slot.shadow is None:
                        like = None if self._zero_padding else slot.live
                        slot.shadow = slot.allocate(like)
            self._synchronize()
        return need

    def _synchronize(self) -> None:
        """Wait for this thread's GPU work: channels scatter on streams of their own."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def forget_base(self) -> None:
        """What is here is no longer what a sync left: the next one must send everything."""
        self.base = ""
        self.sparse = False
        for slot in self.slots.values():
            slot.kept = None

    def move(self) -> None:
        """Memory is written from now on."""
        # a staged sync writes what is kept of packed layers, and no live memory
        if self.mode == "direct" or self.keeps():
            self.base = ""

    def keeps(self) -> bool:
        """Whether raw copies are kept of what is packed: without them nothing here is a base any more."""
        return any(slot.kept is not None for slot in self.slots.values())

    def _destination(self, slot: WeightSlot) -> torch.Tensor:
        """The memory that this sync writes for a target; if changes may arrive, it holds what they are changes to."""
        if slot.live is not None:
            if self.mode == "direct":
                return slot.live
            self._renew()
            return _required(slot.shadow)
        with self._lock:
            if slot.raw is None:
                slot.raw = self._raw(slot)
                self._synchronize()
            return slot.raw

    def _renew(self) -> None:
        """Bring the shadows that changes go to up to what is live."""
        with self._lock:
            if not self._outdated:
                return
            for slot in self.slots.values():
                if slot.live is not None:
                    flat(_required(slot.shadow)).copy_(flat(slot.live))
            self._synchronize()
            self._outdated = False

    def _raw(self, slot: WeightSlot) -> torch.Tensor:
        kept = slot.kept
        slot.kept = None
        if not self.sparse or kept is None:
            return slot.allocate()
        # the live layer may compute with it
        return kept if self.mode == "direct" else kept.clone()

    def scatter(self, box: ReceivedBox, data: memoryview | DeviceBytes) -> None:
        """Write one box."""
        slot = self.slots[box.target]
        with torch.no_grad():
            scatter(slot.transposed.get(box, box), data, flat(self._destination(slot)))

    def patch(
        self, boxes: Sequence[ReceivedBox], parts: Sequence[Section], data: Any
    ) -> None:
        """Write what changed in the boxes of a bucket."""
        slots = [self.slots[box.target] for box in boxes]
        with torch.no_grad():
            patch(
                [
                    (
                        slot.transposed.get(box, box),
                        part,
                        flat(self._destination(slot)),
                    )
                    for box, part, slot in zip(boxes, parts, slots, strict=True)
                ],
                data,
            )

    def finish(self, number: int) -> None:
        """All boxes of a target are written: digest it, or pack its layer if this completes it."""
        slot = self.slots[number]
        if self.wanted(slot) and not any(
            not (g.derived or g.reloaded) for g in slot.groups
        ):
            how = (
                "reloaded"
                if slot.reloaded
                else "loader"
                if slot.kind == OPAQUE
                else "live"
            )
            with self.clock.timed("digest"):
                self._record(slot, self._destination(slot), how)
        for group in slot.groups:
            group.left.discard(number)
            if group.left or group.derived:
                continue
            if not group.reloaded:
                with self.clock.timed("repack"):
                    self._pack(group)
            elif self._at_once(self.mode):
                self._reload(group)

    def wanted(self, slot: WeightSlot) -> bool:
        """Whether this target is verified in this sync."""
        return self.verify == "full" or (
            self.verify == "sampled" and in_sample(slot.info.name, self.version)
        )

    def _record(self, slot: WeightSlot, memory: torch.Tensor, how: str) -> None:
        """Record this memory's digest as the target's."""
        self.found[slot.number] = self.digest(slot, memory)
        self.pointers[slot.number] = memory.data_ptr()
        self.how[slot.number] = how

    def _record_packed(
        self, slot: WeightSlot, name: str, packed: PackedLayer, raw: torch.Tensor
    ) -> None:
        """A layer was reprocessed: record the digest of what it holds for this target; a kernel is checked later."""
        number = slot.number
        if name == "weight" and packed_kernel(packed.attributes) is not None:
            self._record(slot, raw, "sampled")
            seed = zlib.crc32(slot.info.name.encode()) ^ self.version
            expected = _live_memory.expected(raw, seed)
            zeros = 0
            if _has_signed_zero(raw):
                zeros = (self.found[number] - self.digest(slot, raw + 0)) & MASK
            self._arrived[number] = KernelRecord(expected, zeros)
            self._pending.append((number, packed, expected))
            return
        memory, how = _unpacked(packed.layer, name, packed.holds(name), slot)
        self.how.pop(number, None)
        if memory is None:
            self.found[number] = self.digest(slot, raw)
            self.how[number] = "unread"
        # else it is missing, and has no digest
        elif tuple(memory.shape) == slot.info.shape:
            self.found[number] = self.digest(slot, memory)
            self.how[number] = how
            if slot.live is not None:
                self.pointers[number] = memory.data_ptr()

    def digest(self, slot: WeightSlot, memory: torch.Tensor) -> int:
        """The digest of the elements that boxes write, in memory of the target's format."""
        if memory.is_cuda:
            if self._device_digest is None:
                raise Unsupported(
                    "no digest on the GPU for this link",
                    remedy='sync with verify="off"',
                )
            return self._device_digest(slot.number, memory)
        row = row_elements(slot.info.shape, slot.info.strides)
        values = bits(flat(memory))
        if slot.transposed and memory.stride() != slot.info.strides:
            return box_digest(values.reshape(slot.info.shape[::-1]), 0, (1, row), row)
        written = sum(box.elements for box in slot.boxes)
        if written == values.size:
            return flat_digest(values, row)
        total = 0
        for box in slot.boxes:
            at = torch.as_strided(
                flat(memory),
                box.shape,
                box.strides,
                memory.storage_offset() + box.offset,
            )
            total += box_digest(bits(at), box.offset, box.strides, row)
        return total & MASK

    def _pack(self, group: PackGroup) -> None:
        """Reprocess the layer, and record digests of what it then computes with."""
        raw = {
            name: self._destination(self.slots[n]) for name, n in group.names.items()
        }
        own = {name for name, n in group.names.items() if self.slots[n].live is None}
        packed = pack(group.layer, raw, own, group.experts)
        self._packed.append(packed)
        if self.mode == "direct":
            packed.place()
        for name, number in group.names.items():
            if self.wanted(self.slots[number]):
                with self.clock.timed("digest"):
                    self._record_packed(self.slots[number], name, packed, raw[name])
        for number in group.names.values():
            slot = self.slots[number]
            if not any(g.left for g in slot.groups):
                slot.kept = slot.raw if self._mark and slot.live is None else None
                slot.raw = None

    def _at_once(self, mode: str) -> bool:
        """Whether layers are reloaded as they arrive: else at the commit, when all ranks do it, in the same order.

        vLLM's processing may take maxima over ranks, and each rank would wait for the others.
        """
        return mode == "direct" and self.plan.ranks == 1

    def _reload(self, group: PackGroup) -> None:
        raw = {name: _required(self.slots[n].raw) for name, n in group.names.items()}
        self._synchronize()
        for name, number in group.names.items() if self._mark else ():
            self.slots[number].kept = raw[name].clone()
        self.reloads.run(group.layer, raw, self._config)
        for number in group.names.values():
            self.slots[number].raw = None

    def confirm(self, until: float) -> bool:
        """Check what packed kernels hold, in the engine's own thread; False if there are more to check."""
        if not self._pending:
            return True
        with self.clock.timed("digest"):
            while self._pending:
                number, packed, expected = self._pending.pop()
                layer = packed.layer
                kernel = packed_kernel({**layer.__dict__, **packed.attributes})
                if kernel is None or not expected.agrees(
                    kernel, packed.holds("weight")
                ):
                    # it does not hold what was digested
                    self.found.pop(number, None)
                if time.monotonic() >= until:
                    break
        return not self._pending

    def end(self) -> None:
        """Everything has arrived; in direct mode, load and derive what needs whole tensors."""
        if self.mode == "direct" and not self._waiting():
            self._load_whole()

    def _waiting(self) -> list[PackGroup]:
        """Layers that the commit will reload."""
        return [g for g in self.groups if g.reloaded and not self._at_once(self.mode)]

    @property
    def _config(self) -> AbstractContextManager[None]:
        """vLLM's current config, which loaders and methods read."""
        return _vllm_model.current_config(self._worker)

    def _load_whole(self) -> None:
        whole = [
            (s.info.name, _required(s.raw))
            for s in self.slots.values()
            if s.kind == OPAQUE
        ]
        derived = [group.layer for group in self.groups if group.derived]
        with self.clock.timed("load"), torch.no_grad():
            # the config is the process's: it is not touched without need
            config = self._config if whole or derived else nullcontext()
            with config:
                if whole:
                    self.model.load_weights(iter(whole))  # type: ignore[operator]
                for layer in derived:
                    _vllm_model.derive(layer, self._worker.model_config.dtype)
        for slot in self.slots.values():
            slot.raw = None

    def commit(self) -> None:
        """The engine computes with the new weights from now on."""
        self.base = ""
        if self.mode == "staged":
            for packed in self._packed:
                packed.place()
            with torch.no_grad():
                for slot in self.slots.values():
                    if slot.live is not None:
                        self._swap(slot)
        for group in self._waiting():
            self._reload(group)
        if self.mode == "staged" or self._waiting():
            self._load_whole()
        self._synchronize()
        self._check_live_memory()
        self.committed = dict(self.found)
        self.base = self._mark
        self._kernels |= self._arrived
        self._arrived = {}
        self._packed = []

    def _check_live_memory(self) -> None:
        """Raise unless the model has what was digested: the same address, else the same bits."""
        lost = {name for packed in self._packed for name in self._lost(packed)}
        now = _live_memory.by_name(self.model)
        copied: dict[str, torch.Tensor] = {}  # whether they differ
        for number, pointer in self.pointers.items():
            slot = self.slots[number]
            if slot.live is None:
                continue
            there = now.get(slot.info.name)
            if there is None or there.data_ptr() != slot.live.data_ptr():
                lost.add(slot.info.name)
            elif there.data_ptr() != pointer:
                shadow = as_integers(flat(_required(slot.shadow)))
                copied[slot.info.name] = torch.any(as_integers(flat(there)) != shadow)
        for group in self.groups:
            if group.derived and not _vllm_model.derived_well(group.layer):
                lost |= {self.slots[n].info.name for n in group.names.values()}
        lost |= {name for name, differs in copied.items() if differs}
        if lost and self.verify != "off":
            shown = _live_memory.some(sorted(lost))
            raise VerifyError(
                f"rank {self.rank}: {shown} arrived, but the model computes with different memory",
                remedy="sync again; if it happens again, something replaces the engine's weights: restart the pool",
                parameters=sorted(lost),
            )

    def _lost(self, packed: PackedLayer) -> list[str]:
        """Full names of what was replaced in a packed layer since it was placed."""
        names = next(g.names for g in self.groups if g.layer is packed.layer)
        return [
            self.slots[names[name]].info.name if name in names else name
            for name in packed.lost()
        ]

    def _swap(self, slot: WeightSlot) -> None:
        """Swap shadow and live memory; every tensor that was a view of the old memory becomes one of the new."""
        live = _required(slot.live)
        shadow = _required(slot.shadow)
        # unknown tensors share the old memory, so it is overwritten instead
        if slot.holders is None:
            flat(live).copy_(flat(shadow))
            return
        slot.shadow = live.data
        new = flat(shadow)
        for holder in slot.holders:
            holder.data = torch.as_strided(
                new, holder.size(), holder.stride(), holder.storage_offset()
            )

    def abandon(self) -> None:
        """Free what this sync allocated. In direct mode live memory stays as it is."""
        self._packed = []
        for slot in self.slots.values():
            slot.shadow = slot.raw = None

    # Inspection ---------------------------------------------------------------------------------------------------

    def digests(self, found: dict[int, int]) -> list[list[Any]]:
        """[name, value] of each target, as plain values."""
        return [[self.slots[n].info.name, value] for n, value in sorted(found.items())]

    def midway(self) -> dict[int, int]:
        """Digests in the middle of a sync: of what has arrived, packed or waiting for the rest of its layer."""
        found = dict(self.found)
        for group in self.groups:
            for number in group.names.values():
                slot = self.slots[number]
                if (
                    number in found
                    or number in group.left
                    or group.derived
                    or not self.wanted(slot)
                ):
                    continue
                memory = slot.raw if slot.live is None else self._destination(slot)
                # else it is being packed, and will be in `found`
                if memory is not None:
                    found[number] = self.digest(slot, memory)
        return found

    def check(self) -> tuple[dict[int, int], dict[int, str]]:
        """(digests of what the engine computes with now, how each was obtained); none for a target that is missing."""
        found: dict[int, int] = {}
        how: dict[int, str] = {}
        now = _live_memory.by_name(self.model)
        left = MAX_PRODUCTS
        numbers = list(self.slots)
        self._checks += 1
        # if not all can be read back whole, rotate
        first = self._checks * 7 % max(1, len(numbers))
        for number in numbers[first:] + numbers[:first]:
            slot = self.slots[number]
            live = now.get(slot.info.name) if slot.live is not None else None
            if live is not None and format_of(live) == slot.format:
                found[number] = self.digest(slot, live)
                how[number] = "live"
            for group in slot.groups:
                if group.derived:
                    continue
                if not group.reloaded:
                    left -= self._check_packed(slot, group, left, found, how)
                elif number in self.committed and self.reloads.unchanged(group.layer):
                    found[number] = self.committed[number]
                    how[number] = "reloaded"
            if slot.kind == OPAQUE and number in self.committed:
                found[number] = self.committed[number]
                how[number] = "loader"
        return found, how

    def _check_packed(
        self,
        slot: WeightSlot,
        group: PackGroup,
        left: float,
        found: dict[int, int],
        how: dict[int, str],
    ) -> float:
        """Check what one packed layer holds of a target; returns the multiplications it took."""
        number = slot.number
        layer = group.layer
        name = next(n for n, k in group.names.items() if k == number)
        parameter = own_parameters(layer).get(name)
        kernel = packed_kernel(layer.__dict__) if name == "weight" else None
        if kernel is None:
            memory, way = _unpacked(layer, name, parameter, slot)
            if memory is None and number in self.committed:
                found[number] = self.committed[number]
                how[number] = "unread"
            elif memory is not None and tuple(memory.shape) == slot.info.shape:
                found[number] = self.digest(slot, memory)
                how[number] = way
            return 0.0
        shape = slot.info.shape
        cost = float(shape[0]) * shape[1] * shape[1]
        known = self._kernels.get(number)
        finite = known is None or bool(torch.isfinite(known.expected.product).all())
        if finite and cost <= left:
            held = _live_memory.whole(kernel, parameter, shape, slot.dtype)
            self._compare_whole(slot, held, found, how)
            return cost
        if (
            known is not None
            and number in self.committed
            and known.expected.agrees(kernel, parameter)
        ):
            found.setdefault(number, self.committed[number])
            how[number] = "sampled"
        else:
            found.pop(number, None)
        return 0.0

    def _compare_whole(
        self,
        slot: WeightSlot,
        held: torch.Tensor | None,
        found: dict[int, int],
        how: dict[int, str],
    ) -> None:
        number = slot.number
        if held is None:
            found.pop(number, None)
            return
        how[number] = "read back"
        # it has live memory too (a tied head): the kernel must hold the same
        if number in found:
            live = _live_memory.by_name(self.model)[slot.info.name]
            if not torch.equal(held, live.detach().reshape(held.shape)):
                found.pop(number)
            return
        # not synced over this link: zeros are assumed to be positive, as their sign can't be read back
        known = self._kernels.get(number)
        zeros = 0 if known is None else known.zeros
        found[number] = (self.digest(slot, held) + zeros) & MASK


def _required(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise SyncError(
            "a phase ran without the one before it", remedy="prepare, move, then commit"
        )
    return tensor
