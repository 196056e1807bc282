"""Torch tensors as leaves, with the attributes of jax arrays: shape, dtype, sharding, addressable_shards.

    torch.Tensor   whole, on device 0 of a trainer of one process
    DTensor        cut over its device mesh as its placements say; a "device" is a rank of torch.distributed

Everything after `flatten` (planner, pack, team) uses these attributes and handles both libraries alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from jvlab._errors import LayoutError
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._types import CheckpointTensor, Note

Box = tuple[tuple[int, int], ...]  # [start, stop) per dimension
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def is_tensor(leaf: Any) -> bool:
    """Is it a torch tensor? By class name, so that torch need not be installed."""
    return any(c.__name__ == "Tensor" and c.__module__ == "torch" for c in type(leaf).__mro__)


def is_module(tree: Any) -> bool:
    """Is it a torch.nn.Module?"""
    return any(c.__name__ == "Module" and c.__module__.startswith("torch.nn") for c in type(tree).__mro__)


def is_distributed(leaf: Any) -> bool:
    """Is it a DTensor?"""
    return any(c.__name__ == "DTensor" for c in type(leaf).__mro__)


@dataclass(frozen=True)
class Place:
    """The rank that holds a shard: what jax calls a device."""

    id: int
    process_index: int
    platform: str


@dataclass(frozen=True)
class Boxes:
    """Which place holds which box: what jax calls a sharding. Places that hold nothing are not listed."""

    places: tuple[Place, ...]
    boxes: tuple[Box, ...]
    own: int  # this process

    def devices_indices_map(self, shape: Sequence[int]) -> dict[Place, tuple[slice, ...]]:
        return {p: tuple(slice(a, b) for a, b in box) for p, box in zip(self.places, self.boxes, strict=True)}

    @property
    def device_set(self) -> set[Place]:
        return set(self.places)

    @property
    def addressable_devices(self) -> set[Place]:
        return {p for p in self.places if p.process_index == self.own}


@dataclass(frozen=True)
class PlacedShard:
    """A shard of this process."""

    device: Place
    data: TorchShard


class TorchShard:
    """One tensor's elements for numpy: its own memory where that is the host's, else a copy of it."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.shape = tuple(int(n) for n in tensor.shape)
        self.dtype = dtype_of(tensor)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        import torch

        tensor = self._tensor.detach()
        if tensor.device.type == "meta":
            raise LayoutError(
                f"a tensor of shape {self.shape} is on torch's meta device and holds no numbers",
                remedy="load or initialise the model before a sync; a plan needs no numbers",
            )
        tensor = tensor.cpu()
        if self.dtype.isbuiltin != 1:  # bfloat16, float8: numpy has them by ml_dtypes, torch's numpy() does not
            raw = tensor.view(getattr(torch, _UNSIGNED[self.dtype.itemsize])).numpy().view(self.dtype)
        else:
            raw = tensor.resolve_conj().resolve_neg().numpy()
        return raw if dtype is None else raw.astype(dtype)


class TorchLeaf:
    """A torch tensor of a tree, with the attributes of a jax array."""

    def __init__(self, path: str, tensor: Any, sender: int) -> None:
        self.path = path
        self.shape = tuple(int(n) for n in tensor.shape)
        self.dtype = dtype_of(tensor)
        if str(tensor.layout) != "torch.strided" or tensor.is_quantized:
            raise LayoutError(
                f"leaf {path!r} is a {tensor.layout} tensor, not a plain one",
                remedy="pass dense tensors: tensor.to_dense(), tensor.dequantize()",
                leaf=path,
            )
        self._tensor, self._sender = tensor, sender
        self._dtensor = is_distributed(tensor)

    @cached_property
    def local(self) -> Any:
        """This process's part, as a plain tensor."""
        return self._tensor.detach().to_local() if self._dtensor else self._tensor.detach()

    @cached_property
    def sharding(self) -> Boxes | None:
        """None: whole, in this one process."""
        if self._dtensor:
            return _boxes_of(self.path, self._tensor, self.local)
        if self._sender < 0:
            return None
        from torch import distributed

        whole: Box = tuple((0, n) for n in self.shape)
        return Boxes((Place(self._sender, self._sender, self.local.device.type),), (whole,), distributed.get_rank())

    @property
    def addressable_shards(self) -> list[PlacedShard]:
        if self.sharding is None:
            return [PlacedShard(Place(0, 0, self.local.device.type), TorchShard(self.local))]
        return [PlacedShard(place, TorchShard(self.local)) for place in self.sharding.addressable_devices]

    @property
    def is_fully_addressable(self) -> bool:
        sharding = self.sharding
        return sharding is None or len(sharding.addressable_devices) == len(sharding.places)

    def devices(self) -> set[Place]:
        """The ranks of this process that hold it."""
        return {Place(0, 0, self.local.device.type)}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not self.is_fully_addressable:
            raise LayoutError(
                f"leaf {self.path!r} is sharded over several processes", remedy="gather it first", leaf=self.path
            )
        return TorchShard(self.local).__array__(dtype)

    @property
    def memory_key(self) -> tuple[Any, ...]:
        """Equal for leaves that share the same memory."""
        t = self.local
        return t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), tuple(t.stride()), self.shape, self.dtype

    def __repr__(self) -> str:
        return f"TorchLeaf({self.path!r}, {self.dtype.name}{list(self.shape)})"


def dtype_of(tensor: Any) -> np.dtype:
    """numpy's dtype for a tensor's."""
    return numpy_dtype(str(tensor.dtype).removeprefix("torch."))


def adopt(arrays: dict[str, Any]) -> dict[str, Any]:
    """The leaves of a tree with its torch tensors as `TorchLeaf`s; refuses a mix of libraries."""
    torch_ones = [path for path, leaf in arrays.items() if is_tensor(leaf)]
    if not torch_ones:
        return arrays
    others = [path for path, leaf in arrays.items() if not is_tensor(leaf) and not isinstance(leaf, TorchLeaf)]
    if others:
        kinds = sorted({type(arrays[path]).__module__.split(".")[0].removesuffix("lib") for path in others})
        raise LayoutError(
            f"a tree of torch tensors and of others: {len(torch_ones)} of torch ({torch_ones[0]}, …), {len(others)} of "
            f"{', '.join(kinds)} ({others[0]}, …)",
            remedy="one library to a tree: torch.as_tensor(leaf), or jax.dlpack.from_dlpack(tensor), for the others",
            torch=torch_ones,
            others=others,
        )
    meshes = [t.device_mesh.mesh for t in arrays.values() if is_distributed(t)]
    # A plain tensor beside DTensors is replicated in every process (an unsharded norm): one of them sends it.
    sender = min(int(mesh.min()) for mesh in meshes) if meshes else -1
    return {path: x if isinstance(x, TorchLeaf) else TorchLeaf(path, x, sender) for path, x in arrays.items()}


# DTensor --------------------------------------------------------------------------------------------------------------


def _boxes_of(path: str, tensor: Any, local: Any) -> Boxes:
    from torch import distributed

    mesh, shape = tensor.device_mesh, tuple(int(n) for n in tensor.shape)
    cuts = tuple(_cut(path, p) for p in tensor.placements)
    try:
        boxes = mesh_boxes(shape, tuple(int(n) for n in mesh.mesh.shape), cuts)
    except LayoutError as e:
        raise LayoutError(f"leaf {path!r}: {e.message}", remedy=e.remedy, leaf=path) from e
    ranks = [int(r) for r in mesh.mesh.reshape(-1).tolist()]
    held = {rank: box for rank, box in zip(ranks, boxes, strict=True) if all(b > a for a, b in box)}
    own = distributed.get_rank()
    mine = tuple(b - a for a, b in held[own]) if own in held else None
    if mine is not None and mine != tuple(local.shape):
        raise LayoutError(
            f"leaf {path!r}: its shard here is {tuple(local.shape)}, its placements {tensor.placements} say {mine}",
            remedy="redistribute it to plain Shard or Replicate placements",
            leaf=path,
        )
    platform = str(mesh.device_type)
    return Boxes(tuple(Place(r, r, platform) for r in held), tuple(held.values()), own)


def _cut(path: str, placement: Any) -> tuple[int, int] | None:
    """(dimension, split factor) of a placement; the factor is 0 for a plain Shard. None: replicated."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return None
    if kind == "Shard":
        return int(placement.dim), 0
    if kind == "_StridedShard":  # FSDP on top of tensor parallelism
        return int(placement.dim), int(placement.split_factor)
    raise LayoutError(
        f"leaf {path!r} has the placement {kind}: no process holds its values yet",
        remedy="tensor.redistribute(placements=[Replicate()]), or Shard, before the sync",
        leaf=path,
    )


@lru_cache(maxsize=4096)
def mesh_boxes(shape: tuple[int, ...], mesh: tuple[int, ...], cuts: tuple[tuple[int, int] | None, ...]) -> list[Box]:
    """The box of each rank of a mesh, in C order, as DTensor cuts: like torch.chunk, later ranks may hold less or none.

    Mesh dimensions cut from left to right; one with a split factor cuts after those to its right.
    """
    order = [k for k, cut in enumerate(cuts) if cut and not cut[1]]
    for k in reversed(range(len(cuts))):
        cut = cuts[k]
        if cut and cut[1]:
            right = math.prod(mesh[j] for j in range(k + 1, len(cuts)) if (c := cuts[j]) and c[0] == cut[0])
            if cut[1] != right:
                raise LayoutError(
                    f"a strided shard with split factor {cut[1]}, where the mesh to its right cuts by {right}",
                    remedy="redistribute it to plain Shard or Replicate placements",
                )
            order.append(k)
    out: list[Box] = []
    for coords in np.ndindex(*mesh):
        box = [(0, n) for n in shape]
        for k in order:
            cut = cuts[k]
            assert cut is not None
            first, last = box[cut[0]]
            step = -(-(last - first) // mesh[k])
            start = min(first + coords[k] * step, last)
            box[cut[0]] = (start, min(start + step, last))
        out.append(tuple(box))
    return out


# Names ----------------------------------------------------------------------------------------------------------------


def checkpoint_names(
    arrays: Mapping[str, Any], rules: Any, tensors: Sequence[CheckpointTensor]
) -> tuple[dict[str, Any], list[Note], Any]:
    """For a torch state dict, which has the checkpoint's names: leaves without duplicates of tied ones, and the rules.

    A wrapper's prefix (`module.`, `_orig_mod.`) is handled. Trees of other libraries are returned unchanged.
    """
    leaves = dict(arrays)
    if not all(isinstance(leaf, TorchLeaf) for leaf in leaves.values()):
        return leaves, [], rules
    known = {t.name for t in tensors}
    prefix = _prefix(leaves, known)
    named = {path for path in leaves if path.removeprefix(prefix) in known}
    first = {leaves[path].memory_key: path for path in sorted(named, reverse=True)}
    notes = []
    for path in [p for p in leaves if p not in named]:
        if (twin := first.get(leaves[path].memory_key)) is not None:
            notes.append(Note(path, f"tied: the same memory as {twin}, which the checkpoint names"))
            del leaves[path]
    if isinstance(rules, str) and rules == "auto" and 2 * len(named) > len(leaves):
        rules = f"{prefix}{{path*}} -> {{path*}}" if prefix else "checkpoint"
    return leaves, notes, rules


def _prefix(leaves: Mapping[str, Any], known: set[str]) -> str:
    """The prefix that a wrapper added to every name; empty if there is none."""
    for path in leaves:
        parts = path.split(".")
        for k in range(len(parts)):
            if ".".join(parts[k:]) in known:
                prefix = "".join(f"{part}." for part in parts[:k])
                return prefix if all(p.startswith(prefix) for p in leaves) else ""
    return ""
