"""Where received weights go: live memory, shadows, raw copies to pack, whole tensors for the loader; and the exchange.

Direct mode writes live parameters; what vLLM packed after loading arrives in a raw copy, is packed as soon as its layer
is complete, and the raw copy is freed. Staged mode writes shadows and packs beside the live layers; `commit` exchanges
pointers. After a commit the old memory is the next sync's shadow (no page faults then), so staged mode holds the live
weights twice from its first sync until the link is closed; an abandoned sync frees its shadows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from jvlab._errors import LayoutError, SyncError, Unsupported
from jvlab.layout._digest import MASK, box_digest, flat_digest, in_sample, row_elements
from jvlab.layout._digest_loop import compiled_loop
from jvlab.layout._plan import OPAQUE, STAGED, TargetInfo, TransferPlan, item_bytes
from jvlab.rollout import _repack
from jvlab.rollout._receive import Box, Clock, Ledger
from jvlab.rollout._scatter import bits, extent, flat, scatter
from jvlab.rollout._turned import turned_boxes
from jvlab.transport._device_bytes import DeviceBytes

SPARE = 2  # raw copies of one shape that are kept for the next layer, and the next sync
LIVE_REMEDY = 'launch with env={"JVLAB_LIVE_WEIGHTS": "1"}: linear layers then compute from live memory'


@dataclass(eq=False)
class Group:
    """A layer to process anew once all of its staged parameters are here."""

    layer: torch.nn.Module
    derived: bool
    names: dict[str, int] = field(default_factory=dict)  # within the layer -> target
    left: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Slot:
    """One target of the plan on this rank."""

    number: int
    info: TargetInfo
    kind: int
    padded: bool
    boxes: list[Box]
    live: torch.Tensor | None  # memory in the format of the plan, if the engine has it
    groups: list[Group] = field(default_factory=list)
    shadow: torch.Tensor | None = None
    raw: torch.Tensor | None = None
    device: torch.device | str = "cpu"
    holders: list[torch.Tensor] | None = None  # all that share live memory; None: somebody unknown does
    turned: dict[Box, Box] = field(default_factory=dict)  # where boxes go in a raw copy that is kept transposed

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.info.dtype)

    @property
    def nbytes(self) -> int:
        return extent(self.info.shape, self.info.strides) * item_bytes(self.info.dtype)

    def fresh(self, like: torch.Tensor | None = None) -> torch.Tensor:
        """Memory of this format; what no box fills is taken from `like`, or zero."""
        strides = (1, self.info.shape[0]) if self.turned else self.info.strides
        room = torch.empty_strided(self.info.shape, strides, dtype=self.dtype, device=self.device)
        if self.padded:
            flat(room).copy_(flat(like)) if like is not None else flat(room).zero_()
        return room


class Weights:
    """The memory of one rank as targets of a plan. `load` feeds whole tensors to the model's own loader."""

    def __init__(
        self,
        model: torch.nn.Module,
        plan: TransferPlan,
        rank: int,
        ledger: Ledger,
        staged: list[Any],
        *,
        refuse: Callable[[Any], str] = lambda item: "",
        experts: Callable[[torch.nn.Module], bool] = lambda layer: False,
        load: Callable[[list[tuple[str, torch.Tensor]]], None] | None = None,
        derive: Callable[[torch.nn.Module], None] | None = None,
        swaps: bool = True,
        digest: Callable[[int, torch.Tensor], int] | None = None,
    ) -> None:
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._device_digest = digest
        if self.device.type == "cpu":
            compiled_loop()
        self.model, self.plan, self.rank, self._load, self._derive = model, plan, rank, load, derive
        self._swaps = swaps
        self._lock = threading.Lock()
        self.version, self.mode, self.verify = 0, "direct", "full"
        self.found: dict[int, int] = {}
        self.committed: dict[int, int] = {}
        self._packed: list[_repack.Packed] = []
        self._spare: dict[tuple[Any, ...], list[torch.Tensor]] = {}  # raw copies to use again, by shape
        self.clock = Clock()
        self.slots = self._slots(ledger)
        self._group(staged, refuse, experts)
        self._check_boxes()

    # Opening ------------------------------------------------------------------------------------------------------

    def _slots(self, ledger: Ledger) -> dict[int, Slot]:
        live: dict[str, torch.Tensor] = {**dict(self.model.named_buffers()), **dict(self.model.named_parameters())}
        slots = {}
        for number, boxes in ledger.boxes.items():
            info = self.plan.parameters[int(self.plan.target_parameter[number])]
            kind = int(self.plan.target_kind[number])
            found = None if kind == OPAQUE else live.get(info.name)
            same = found is not None and _format(found) == (info.shape, info.dtype, info.strides)
            if kind not in (OPAQUE, STAGED) and not same:
                have = "not there" if found is None else f"{_format(found)}"
                raise LayoutError(
                    f"rank {self.rank}: the plan writes {info.name} {info.shape} {info.dtype} {info.strides}, "
                    f"which is {have} in this engine",
                    remedy="the plan was made for another engine: connect again",
                    parameter=info.name,
                )
            padded = bool(self.plan.target_padding[number])
            slots[number] = Slot(number, info, kind, padded, boxes, found if same else None, device=self.device)
        return slots

    def _group(self, staged: list[Any], refuse: Callable[[Any], str], experts: Callable[..., bool]) -> None:
        by_name = {s.info.name: s for s in self.slots.values() if s.kind == STAGED}
        groups: dict[int, Group] = {}
        for item in staged:
            slot = by_name.get(item.parameter)
            if slot is None:
                continue
            if why := refuse(item):
                raise Unsupported(
                    f"{item.parameter} cannot be synced: {why} after loading ({item.why})",
                    remedy=LIVE_REMEDY if item.kind == "packed" else "launch without that kernel",
                    parameter=item.parameter,
                )
            group = groups.setdefault(id(item.layer), Group(item.layer, item.kind == "derived"))
            group.names[item.name] = slot.number
            slot.groups.append(group)
            if item.kind == "packed" and slot.live is None and not slot.padded and not experts(item.layer):
                slot.turned = turned_boxes(slot.info.shape, slot.info.strides, slot.boxes)
            if experts(item.layer):
                slot.live = None  # re-arranged: of the same shape perhaps, but not what a loader would write
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
        """as_strided checks nothing beyond the storage: each box must lie within its parameter."""
        for slot in self.slots.values():
            size = extent(slot.info.shape, slot.info.strides)
            for box in slot.boxes:
                if box.offset < 0 or min(box.strides) < 0 or box.offset + extent(box.shape, box.strides) > size:
                    raise LayoutError(f"a box of {slot.info.name} lies outside of its {size} elements: {box}")

    # One sync -----------------------------------------------------------------------------------------------------

    def need(self, mode: str) -> int:
        """Bytes that a sync in this mode takes more than is held now."""
        layers = [sum(self.slots[n].nbytes for n in set(g.names.values())) for g in self.groups]
        opaque = sum(s.nbytes for s in self.slots.values() if s.kind == OPAQUE)
        raw = 3 * max(layers, default=0) + opaque  # one layer arriving, one waiting, one being packed
        if mode == "direct":
            return raw
        shadows = sum(s.nbytes for s in self.slots.values() if s.live is not None and s.shadow is None)
        return raw + shadows + sum(layers)

    def prepare(self, version: int, mode: str, verify: str, available: int) -> int:
        """Make room; the bytes that it takes. Refuses when they aren't there."""
        need = self.need(mode)
        if need > available:
            raise Unsupported(
                f"rank {self.rank}: a {mode} sync needs {need} bytes ({need / 2**30:.2f} GiB) of memory, "
                f"{available} ({available / 2**30:.2f} GiB) are available",
                remedy='sync with mode="direct"' if mode == "staged" else "give the engine a smaller KV cache",
                need=need,
                available=available,
            )
        self.version, self.mode, self.verify = version, mode, verify
        self.found, self._packed, self.clock = {}, [], Clock()
        for group in self.groups:
            group.left = set(group.names.values())
        if mode == "staged":
            holders = _holders(self.model)
            for slot in self.slots.values():
                if slot.live is not None:
                    slot.holders = self._known(slot.live, holders) if self._swaps else None
                    slot.shadow = slot.shadow if slot.shadow is not None else slot.fresh(slot.live)
            self._settle()
        return need

    def _settle(self) -> None:
        """What this thread gave its GPU is done: channels scatter on streams of their own."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @staticmethod
    def _known(live: torch.Tensor, holders: dict[int, dict[int, torch.Tensor]]) -> list[torch.Tensor] | None:
        """All tensors that share the parameter's storage, or None where there are others, or it is a part of more."""
        storage = live.untyped_storage()
        mine = list(holders.get(storage._cdata, {}).values())
        whole = live.storage_offset() == 0 and flat(live).nbytes == storage.nbytes()
        # one count for each tensor and one for `storage` itself
        return mine if whole and torch._C._storage_Use_Count(storage._cdata) <= len(mine) + 1 else None

    def _room(self, slot: Slot) -> torch.Tensor:
        """The memory that this sync writes for a target."""
        if slot.live is not None:
            return slot.live if self.mode == "direct" else _given(slot.shadow)
        with self._lock:
            if slot.raw is None:
                slot.raw = slot.fresh()
                self._settle()
            return slot.raw

    def scatter(self, box: Box, data: memoryview | DeviceBytes) -> None:
        """Write one box."""
        slot = self.slots[box.target]
        with torch.no_grad():
            scatter(slot.turned.get(box, box), data, flat(self._room(slot)))

    def finish(self, number: int) -> None:
        """All boxes of a target are in place: digest it, and pack its layer if that is complete by this."""
        slot = self.slots[number]
        if self.verify == "full" or (self.verify == "sampled" and in_sample(slot.info.name, self.version)):
            with self.clock.timed("digest"):
                self.found[number] = self._digest(slot, self._room(slot))
        for group in slot.groups:
            group.left.discard(number)
            if not group.left and not group.derived:
                with self.clock.timed("repack"):
                    self._pack(group)

    def _digest(self, slot: Slot, memory: torch.Tensor) -> int:
        if memory.is_cuda:
            if self._device_digest is None:
                raise Unsupported("no digest on the GPU for this link", remedy='sync with verify="off"')
            return self._device_digest(slot.number, memory)
        row = row_elements(slot.info.shape, slot.info.strides)
        values = bits(flat(memory))
        if slot.turned:
            return box_digest(values.reshape(slot.info.shape[::-1]), 0, (1, row), row)
        written = sum(box.elements for box in slot.boxes)
        if written == values.size:
            return flat_digest(values, row)
        total = 0
        for box in slot.boxes:
            at = torch.as_strided(flat(memory), box.shape, box.strides, memory.storage_offset() + box.offset)
            total += box_digest(bits(at), box.offset, box.strides, row)
        return total & MASK

    def _pack(self, group: Group) -> None:
        packed = _repack.pack(group.layer, {name: self._room(self.slots[n]) for name, n in group.names.items()})
        if self.mode == "direct":
            packed.place()
        else:
            self._packed.append(packed)
        for number in group.names.values():
            slot = self.slots[number]
            if not any(g.left for g in slot.groups):
                self._recycle(slot)

    def _recycle(self, slot: Slot) -> None:
        """Keep a raw copy that nobody else holds for the next layer alike: fresh pages cost more than the copy."""
        raw, slot.raw = slot.raw, None
        if raw is None or slot.padded or slot.kind != STAGED:
            return
        storage = raw.untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) <= 2:  # `raw` and `storage` themselves
            with self._lock:
                spare = self._spare.setdefault(_shape_of(slot), [])
                if len(spare) < SPARE:
                    spare.append(raw)

    def end(self) -> None:
        """Everything arrived; in direct mode what only the whole can do is done now."""
        if self.mode == "direct":
            self._load_whole()

    def _load_whole(self) -> None:
        whole = [(s.info.name, _given(s.raw)) for s in self.slots.values() if s.kind == OPAQUE]
        with self.clock.timed("load"), torch.no_grad():
            if whole and self._load is not None:
                self._load(whole)
            for group in self.groups:
                if group.derived and self._derive is not None:
                    self._derive(group.layer)
        for slot in self.slots.values():
            slot.raw = None

    def commit(self) -> None:
        """The engine computes with the new weights from now on."""
        waiting = [n for g in self.groups if not g.derived for n in g.left]
        if waiting:
            raise SyncError(f"rank {self.rank}: {self.slots[waiting[0]].info.name} did not arrive", remedy="sync again")
        if self.mode == "staged":
            for packed in self._packed:
                packed.place()
            self._packed = []
            with torch.no_grad():
                for slot in self.slots.values():
                    if slot.live is not None:
                        self._exchange(slot)
            self._load_whole()
        self._settle()
        self.committed = dict(self.found)

    def _exchange(self, slot: Slot) -> None:
        """Shadow and live memory change places; every tensor that showed the old memory shows the new one."""
        live, shadow = _given(slot.live), _given(slot.shadow)
        if slot.holders is None:  # somebody we can't find reads the old memory: it stays, and is written
            flat(live).copy_(flat(shadow))
            return
        slot.shadow = live.data
        new = flat(shadow)
        for holder in slot.holders:
            holder.data = torch.as_strided(new, holder.size(), holder.stride(), holder.storage_offset())

    def abandon(self) -> None:
        """Free what this sync made. In direct mode live memory is what it is."""
        self._packed, self._spare = [], {}
        for slot in self.slots.values():
            slot.shadow = slot.raw = None

    # Looking ------------------------------------------------------------------------------------------------------

    def digests(self, found: dict[int, int]) -> list[list[Any]]:
        """[name, value] of each target, as plain values."""
        return [[self.slots[n].info.name, value] for n, value in sorted(found.items())]

    def check(self) -> tuple[dict[int, int], list[str]]:
        """Digests of live memory now; and which of them are those taken before packing, for want of a way back."""
        found, packed = {}, []
        for number, slot in self.slots.items():
            if slot.live is not None:
                found[number] = self._digest(slot, slot.live)
            elif number in self.committed:
                found[number] = self.committed[number]
                packed.append(slot.info.name)
        return found, packed

    def peek(self, name: str, start: int, count: int) -> tuple[bytes, int]:
        """Bytes of a live parameter's storage, and how many there are in all."""
        return peek(self.model, name, start, count)


def peek(model: torch.nn.Module, name: str, start: int, count: int) -> tuple[bytes, int]:
    """Bytes of a live parameter's storage, and how many there are in all."""
    live: dict[str, torch.Tensor] = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    if name not in live:
        near = sorted(n for n in live if n.split(".")[-1] == name.split(".")[-1])[:3]
        raise LayoutError(
            f"no parameter {name!r} on this rank", remedy=f"for example {', '.join(near or list(live)[:3])}"
        )
    found = live[name] if live[name].numel() else _unpacked(model, name)
    if found is None:
        raise Unsupported(f"{name} is packed after loading: its elements can't be read back", remedy=LIVE_REMEDY)
    values = bits(flat(found.cpu())).view("uint8")
    return values[start : start + count].tobytes(), values.size


def _shape_of(slot: Slot) -> tuple[Any, ...]:
    return slot.info.shape, slot.info.strides, slot.info.dtype, bool(slot.turned)


def _unpacked(model: torch.nn.Module, name: str) -> torch.Tensor | None:
    from jvlab.rollout import _vllm_model

    prefix, _, leaf = name.rpartition(".")
    layer = model.get_submodule(prefix)
    return _repack.read_back(layer, leaf, _vllm_model.as_built(layer).get(leaf))


def _format(tensor: torch.Tensor) -> tuple[tuple[int, ...], str, tuple[int, ...]]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tuple(tensor.stride())


def _given(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise SyncError("a phase ran without the one before it", remedy="prepare, move, then commit")
    return tensor


def _holders(model: torch.nn.Module) -> dict[int, dict[int, torch.Tensor]]:
    """Every tensor that the model's modules keep, by storage: parameters, buffers, and plain attributes."""
    found: dict[int, dict[int, torch.Tensor]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers, module.__dict__):
            for tensor in table.values():
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    found.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    return found
