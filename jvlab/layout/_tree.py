"""Any pytree of parameters as flat paths, and the leaves that the planner knows: shapes, and which device holds what.

Dicts, nnx modules and states, linen variables, abstract arrays, torch. numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from jvlab._errors import ConfigError, LayoutError
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._types import CheckpointTensor, Leaf, Note, Shape

# Torch tensors as leaves, with the attributes of jax arrays: shape, dtype, sharding, addressable_shards.
#     torch.Tensor   whole, on device 0 of a trainer of one process
#     DTensor        cut over its device mesh as its placements say; a "device" is a rank of torch.distributed
#
# Everything after `flatten` (planner, pack, team) uses these attributes and handles both libraries alike.

Box = tuple[tuple[int, int], ...]  # [start, stop) per dimension
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def is_tensor(leaf: Any) -> bool:
    """Is it a torch tensor? By class name, so that torch need not be installed."""
    return _is(leaf, "torch", "Tensor")


def is_distributed(leaf: Any) -> bool:
    """Is it a DTensor?"""
    return _is(leaf, "torch", "DTensor")


def _is(value: Any, library: str, *names: str) -> bool:
    """Is it an instance of a library's class of that name? By name, so that the library need not be installed."""
    return any(
        c.__name__ in names and c.__module__.split(".")[0] == library
        for c in type(value).__mro__
    )


@dataclass(frozen=True)
class TorchDevice:
    """The rank that holds a shard: what jax calls a device."""

    id: int
    process_index: int
    platform: str


@dataclass(frozen=True)
class Boxes:
    """Which place holds which box: what jax calls a sharding. Places that hold nothing are not listed."""

    places: tuple[TorchDevice, ...]
    boxes: tuple[Box, ...]
    own: int  # this process

    def devices_indices_map(
        self, shape: Sequence[int]
    ) -> dict[TorchDevice, tuple[slice, ...]]:
        return {
            p: tuple(slice(a, b) for a, b in box)
            for p, box in zip(self.places, self.boxes, strict=True)
        }

    @property
    def device_set(self) -> set[TorchDevice]:
        return set(self.places)

    @property
    def addressable_devices(self) -> set[TorchDevice]:
        return {p for p in self.places if p.process_index == self.own}


@dataclass(frozen=True)
class PlacedShard:
    """A shard of this process."""

    device: TorchDevice
    data: TorchShard


class TorchShard:
    """One tensor's elements for numpy: its own memory where that is the host's, else a copy of it."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.shape = tuple(int(n) for n in tensor.shape)
        self.dtype = dtype_of(tensor)

    def unsafe_buffer_pointer(self) -> int:
        """Where its elements are on a GPU, in C order; called as JAX's is. All that computes them has ended."""
        if not self._tensor.is_contiguous():
            self._tensor = self._tensor.contiguous()  # kept as long as this shard
        self.block_until_ready()
        return self._tensor.data_ptr()

    def block_until_ready(self) -> TorchShard:
        """Wait for all streams of its GPU: which of them computes it, nobody knows."""
        import torch

        if self._tensor.device.type == "cuda":
            torch.cuda.synchronize(self._tensor.device)
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        import torch

        tensor = self._tensor.detach()
        if tensor.device.type == "meta":
            raise LayoutError(
                f"a tensor of shape {self.shape} is on torch's meta device and holds no numbers",
                remedy="load or initialise the model before a sync; a plan needs no numbers",
            )
        tensor = tensor.cpu()
        # bfloat16, float8: numpy has them by ml_dtypes, torch's numpy() does not
        if self.dtype.isbuiltin != 1:
            raw = (
                tensor.view(getattr(torch, _UNSIGNED[self.dtype.itemsize]))
                .numpy()
                .view(self.dtype)
            )
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
        self._tensor = tensor
        self._sender = sender
        self._dtensor = is_distributed(tensor)

    @cached_property
    def local(self) -> Any:
        """This process's part, as a plain tensor."""
        return (
            self._tensor.detach().to_local() if self._dtensor else self._tensor.detach()
        )

    @cached_property
    def sharding(self) -> Boxes | None:
        """None: whole, in this one process."""
        if self._dtensor:
            return _boxes_of(self.path, self._tensor, self.local)
        if self._sender < 0:
            return None
        from torch import distributed

        whole = tuple((0, n) for n in self.shape)
        return Boxes(
            (TorchDevice(self._sender, self._sender, self.local.device.type),),
            (whole,),
            distributed.get_rank(),
        )

    @property
    def addressable_shards(self) -> list[PlacedShard]:
        if self.sharding is None:
            return [
                PlacedShard(
                    TorchDevice(0, 0, self.local.device.type), TorchShard(self.local)
                )
            ]
        return [
            PlacedShard(place, TorchShard(self.local))
            for place in self.sharding.addressable_devices
        ]

    @property
    def is_fully_addressable(self) -> bool:
        sharding = self.sharding
        return sharding is None or len(sharding.addressable_devices) == len(
            sharding.places
        )

    def devices(self) -> set[TorchDevice]:
        """The ranks of this process that hold it."""
        return {TorchDevice(0, 0, self.local.device.type)}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not self.is_fully_addressable:
            raise LayoutError(
                f"leaf {self.path!r} is sharded over several processes",
                remedy="gather it first",
                leaf=self.path,
            )
        return TorchShard(self.local).__array__(dtype)

    @property
    def memory_key(self) -> tuple[Any, ...]:
        """Equal for leaves that share the same memory."""
        t = self.local
        return (
            t.untyped_storage()._cdata,
            t.storage_offset(),
            tuple(t.shape),
            tuple(t.stride()),
            self.shape,
            self.dtype,
        )

    def __repr__(self) -> str:
        return f"TorchLeaf({self.path!r}, {self.dtype.name}{list(self.shape)})"


def cuda_ordinals(arrays: Mapping[str, Any]) -> dict[int, int]:
    """Device of a plan -> CUDA ordinal in this process, of torch's tensors; empty for other libraries'."""
    found: dict[int, int] = {}
    for path, leaf in arrays.items():
        if not isinstance(leaf, TorchLeaf) or leaf.local.device.type != "cuda":
            continue
        for shard in leaf.addressable_shards:
            ordinal = int(leaf.local.device.index or 0)
            if found.setdefault(shard.device.id, ordinal) != ordinal:
                raise LayoutError(
                    f"leaf {path!r} is on cuda:{ordinal}, others are on cuda:{found[shard.device.id]}",
                    remedy="one process holds its tensors on one GPU, or they are DTensors of a mesh",
                    leaf=path,
                )
    return found


def dtype_of(tensor: Any) -> np.dtype:
    """numpy's dtype for a tensor's."""
    return numpy_dtype(str(tensor.dtype).removeprefix("torch."))


def adopt(arrays: dict[str, Any]) -> dict[str, Any]:
    """The leaves of a tree with its torch tensors as `TorchLeaf`s; refuses a mix of libraries."""
    torch_ones = [path for path, leaf in arrays.items() if is_tensor(leaf)]
    if not torch_ones:
        return arrays
    others = [
        path
        for path, leaf in arrays.items()
        if not is_tensor(leaf) and not isinstance(leaf, TorchLeaf)
    ]
    if others:
        kind = type(arrays[others[0]]).__module__.split(".")[0].removesuffix("lib")
        raise LayoutError(
            f"a tree of torch tensors and of others: {len(torch_ones)} of torch ({torch_ones[0]}, …), "
            f"{len(others)} others ({others[0]} of {kind}, …)",
            remedy="one library to a tree: torch.as_tensor(leaf), or jax.dlpack.from_dlpack(tensor), for the others",
            torch=torch_ones,
            others=others,
        )
    meshes = [t.device_mesh.mesh for t in arrays.values() if is_distributed(t)]
    # A plain tensor beside DTensors is replicated in every process (an unsharded norm): one of them sends it.
    sender = min(int(mesh.min()) for mesh in meshes) if meshes else -1
    return {
        path: x if isinstance(x, TorchLeaf) else TorchLeaf(path, x, sender)
        for path, x in arrays.items()
    }


# DTensor --------------------------------------------------------------------------------------------------------------


def _boxes_of(path: str, tensor: Any, local: Any) -> Boxes:
    from torch import distributed

    mesh = tensor.device_mesh
    shape = tuple(int(n) for n in tensor.shape)
    cuts = tuple(_cut(path, p) for p in tensor.placements)
    try:
        boxes = mesh_boxes(shape, tuple(int(n) for n in mesh.mesh.shape), cuts)
    except LayoutError as e:
        raise LayoutError(
            f"leaf {path!r}: {e.message}", remedy=e.remedy, leaf=path
        ) from e
    ranks = [int(r) for r in mesh.mesh.reshape(-1).tolist()]
    held = {
        rank: box
        for rank, box in zip(ranks, boxes, strict=True)
        if all(b > a for a, b in box)
    }
    own = distributed.get_rank()
    mine = tuple(b - a for a, b in held[own]) if own in held else None
    if mine is not None and mine != tuple(local.shape):
        raise LayoutError(
            f"leaf {path!r}: its shard here is {tuple(local.shape)}, its placements {tensor.placements} say {mine}",
            remedy="redistribute it to plain Shard or Replicate placements",
            leaf=path,
        )
    platform = str(mesh.device_type)
    return Boxes(
        tuple(TorchDevice(r, r, platform) for r in held), tuple(held.values()), own
    )


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
def mesh_boxes(
    shape: Shape,
    mesh: Shape,
    cuts: tuple[tuple[int, int] | None, ...],
) -> list[Box]:
    """The box of each rank of a mesh, in C order, as DTensor cuts: like torch.chunk, later ranks may hold less or none.

    Mesh dimensions cut from left to right; one with a split factor cuts after those to its right.
    """
    order = [(k, cut[0]) for k, cut in enumerate(cuts) if cut and not cut[1]]
    for k, cut in reversed(list(enumerate(cuts))):
        if not cut or not cut[1]:
            continue
        right = zip(mesh[k + 1 :], cuts[k + 1 :], strict=True)
        count = math.prod(n for n, other in right if other and other[0] == cut[0])
        if cut[1] != count:
            raise LayoutError(
                f"a strided shard with split factor {cut[1]}, where the mesh to its right cuts by {count}",
                remedy="redistribute it to plain Shard or Replicate placements",
            )
        order.append((k, cut[0]))
    starts, stops = _cut_boxes(shape, mesh, order)
    both = np.stack([starts, stops], axis=2).tolist()
    return [tuple((a, b) for a, b in box) for box in both]


def _cut_boxes(
    shape: Shape, mesh: Shape, cuts: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and stops of each device's box, in C order: dimension k of the mesh cuts dimension d, pair after pair."""
    count = math.prod(mesh)
    coords = np.indices(mesh).reshape(len(mesh), count)
    starts = np.zeros((count, len(shape)), np.int64)
    stops = np.tile(np.array(shape, np.int64), (count, 1))
    for k, d in cuts:
        step = -(-(stops[:, d] - starts[:, d]) // mesh[k])
        starts[:, d] = np.minimum(starts[:, d] + coords[k] * step, stops[:, d])
        stops[:, d] = np.minimum(starts[:, d] + step, stops[:, d])
    return starts, stops


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
            notes.append(
                Note(
                    path, f"tied: the same memory as {twin}, which the checkpoint names"
                )
            )
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


# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeafShape:
    """A leaf as the rules see it."""

    shape: Shape
    dtype: str


@dataclass(frozen=True)
class FlatTree:
    """The arrays of a tree by dotted path, and what was left out and why."""

    arrays: Mapping[str, Any]
    skipped: tuple[Note, ...] = ()

    @property
    def shapes(self) -> dict[str, LeafShape]:
        """What `Rules.bind` and `infer` take."""
        return {
            path: LeafShape(tuple(a.shape), str(a.dtype))
            for path, a in self.arrays.items()
        }


_TREES = "a pytree of arrays: nnx.state(model, nnx.Param), variables['params'], or a dict of arrays"


def flatten(tree: Any) -> FlatTree:
    """Flattens a tree of arrays (jax, numpy, ShapeDtypeStruct; torch as `TorchLeaf`) to dotted paths.

    Skipped, and listed in `skipped`: nnx RNG state, PRNG keys, None. A leaf of any other kind is an error. A single
    top-level `params` collection, as linen's `init` returns it, is entered without a prefix.
    """
    arrays: dict[str, Any] = {}
    skipped: list[Note] = []
    tree = _plain(tree)
    if (
        isinstance(tree, Mapping)
        and "params" in tree
        and isinstance(_plain(tree["params"]), Mapping)
    ):
        for collection in tree:
            if collection != "params":
                skipped.append(
                    Note(str(collection), "a collection beside `params`: no parameters")
                )
        tree = tree["params"]
    for path, leaf in _walk(tree, ()):
        name = ".".join(path)
        reason = _skip_reason(leaf)
        if reason:
            skipped.append(Note(name, reason))
            continue
        leaf = _value(leaf)
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            whole = (
                "its parameters: policy.params"
                if not name and hasattr(leaf, "params")
                else ""
            )
            raise LayoutError(
                f"leaf {name or '(the tree itself)'} is of type {type(leaf).__name__}, not an array",
                remedy=f"pass {whole or _TREES}",
                leaf=name,
            )
        if str(leaf.dtype).startswith("key<"):
            skipped.append(Note(name, "a PRNG key"))
            continue
        if name in arrays:
            raise LayoutError(
                f"two leaves have the path {name}",
                remedy="keys that contain '.' collide with nesting: rename one",
                leaf=name,
            )
        arrays[name] = leaf
    return FlatTree(adopt(arrays), tuple(skipped))


def as_sent(tree: Any) -> Any:
    """The tree whose values engines get. An adapter's differ from what is trained: its scale is multiplied in."""
    method = getattr(tree, "as_sent", None)
    return tree if method is None else method()


class Flattener:
    """`flatten` for repeated trees of one structure: after the first, only the leaves are extracted."""

    def __init__(self) -> None:
        self._kind: Any = None
        self._places: dict[str, int] = {}

    def arrays(self, tree: Any) -> dict[str, Any]:
        """The arrays by dotted path, as `flatten(tree).arrays`."""
        import jax

        leaves, kind = jax.tree_util.tree_flatten(tree)
        if self._kind is not None and kind == self._kind:
            return {path: leaves[k] for path, k in self._places.items()}
        arrays = flatten(tree).arrays
        where = {id(leaf): k for k, leaf in enumerate(leaves)}
        # else a leaf occurs twice, or differs from jax's
        plain = (
            len(where) == len(leaves)
            and {id(a) for a in arrays.values()} <= where.keys()
        )
        self._kind = kind if plain else None
        self._places = {p: where[id(a)] for p, a in arrays.items()} if plain else {}
        return dict(arrays)


def _plain(tree: Any) -> Any:
    """flax's own containers as plain mappings."""
    if _is(tree, "flax", "Module") and not isinstance(tree, Mapping):
        from flax import nnx

        if isinstance(tree, nnx.Module):
            return _plain(nnx.state(tree))
    if _is(tree, "flax", "State"):
        return dict(tree.items())
    module: Any = tree
    return module.state_dict() if _is(module, "torch", "Module") else tree


def _is_variable(leaf: Any) -> bool:
    return _is(leaf, "flax", "Variable", "VariableState")


def _value(leaf: Any) -> Any:
    """The array inside an nnx variable or a linen metadata box."""
    if _is_variable(leaf):
        return leaf.get_value() if hasattr(leaf, "get_value") else leaf.value
    if _is(leaf, "flax", "AxisMetadata"):
        return leaf.unbox()
    return leaf


def _skip_reason(leaf: Any) -> str:
    if leaf is None:
        return "None"
    kind = getattr(leaf, "type", None) if _is(leaf, "flax", "VariableState") else None
    if _is(leaf, "flax", "RngState") or "Rng" in getattr(kind, "__name__", ""):
        return "nnx RNG state: no parameter"
    return ""


def _walk(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    tree = _plain(tree)
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            yield from _walk(child, (*path, str(key)))
    elif (
        _is_variable(tree)
        or _is(tree, "flax", "AxisMetadata")
        or tree is None
        or hasattr(tree, "shape")
    ):
        yield path, tree
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        names: tuple[str, ...] = getattr(tree, "_fields")  # noqa: B009 - a NamedTuple, which the type checker cannot see
        for key, child in zip(names, tree, strict=True):
            yield from _walk(child, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, child in enumerate(tree):
            yield from _walk(child, (*path, str(index)))
    else:
        yield from _registered(tree, path)


def _registered(
    tree: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Any other pytree node registered with jax: equinox modules, chex dataclasses, user classes."""
    import jax

    children, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: x is not tree
    )
    if len(children) == 1 and children[0][1] is tree:
        yield path, tree
        return
    for keys, child in children:
        yield from _walk(child, (*path, *(_key(k) for k in keys)))


def _key(key: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


# Leaves for the planner: from jax arrays and shardings, or from a mesh description with no jax at all.

# of a described mesh, as of one made by `jv.mesh`
MESH_AXES = ("fsdp", "tp", "ep", "dp")
_MAX_AXIS_SIZE = 1 << 20  # devices
# mesh axes that conventionally hold copies of the weights
REPLICATING = ("data", "dp", "replica", "batch")


@dataclass(frozen=True)
class MeshSpec:
    """A device mesh by names and sizes, with its device ids in C order; default: from 0."""

    names: tuple[str, ...]
    sizes: Shape
    ids: Shape = ()

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise ConfigError(
                f"mesh {self} repeats an axis", remedy="write it like fsdp=4,tp=2"
            )

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """`fsdp=3,tp=2` → a mesh of six devices."""
        try:
            pairs = [
                part.split("=") for part in text.replace(" ", "").split(",") if part
            ]
            return cls(
                tuple(k for k, _ in pairs), tuple(_axis_size(int(v)) for _, v in pairs)
            )
        except ValueError as e:
            raise ConfigError(
                f"cannot read the mesh {text!r}",
                remedy="write it like fsdp=4,tp=2",
                mesh=text,
            ) from e

    @classmethod
    def of(cls, mesh: object) -> MeshSpec:
        """From text, a mapping, a MeshSpec, or a jax Mesh; a described mesh may have only the axes of `jv.mesh`."""
        if isinstance(mesh, MeshSpec):
            return mesh
        if isinstance(mesh, str):
            made = cls.parse(mesh)
        else:
            shape = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
            if not isinstance(shape, Mapping):
                raise ConfigError(
                    f"cannot read a mesh from {type(mesh).__name__}",
                    remedy='pass "fsdp=4,tp=2" or a dict',
                )
            ids = tuple(int(d.id) for d in _mesh_devices(mesh))
            sizes = tuple(map(_axis_size, shape.values()))
            made = cls(tuple(map(str, shape)), sizes, ids)
        for name in made.names if isinstance(mesh, (str, Mapping)) else ():
            if name not in MESH_AXES:
                raise ConfigError(
                    f"mesh axis {name!r} is not known",
                    remedy=f"axes: {', '.join(MESH_AXES)}",
                    axis=name,
                )
        return made

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)


def _axis_size(size: Any) -> int:
    if (
        isinstance(size, bool)
        or not isinstance(size, (int, np.integer))
        or not 1 <= size <= _MAX_AXIS_SIZE
    ):
        raise ConfigError(
            f"a mesh axis of size {str(size)[:40]}",
            remedy="pass a whole number from 1 up",
        )
    return int(size)


def _mesh_devices(mesh: object) -> list[Any]:
    """The devices of a jax Mesh, in C order; none for a description."""
    try:
        devices = getattr(mesh, "devices", None)
    except ValueError:  # jax's AbstractMesh has the attribute, but no devices
        return []
    return devices.reshape(-1).tolist() if isinstance(devices, np.ndarray) else []


def mesh_processes(mesh: object) -> dict[int, int] | None:
    """Global device id → trainer process of a jax Mesh; None for a description, which has no processes."""
    return {int(d.id): int(d.process_index) for d in _mesh_devices(mesh)} or None


def default_spec(shape: Shape, mesh: MeshSpec) -> tuple[str | None, ...]:
    """A mesh axis or None for each dimension: each mesh axis cuts the largest dimension that it still divides.

    Scalars and vectors (norms, biases) are replicated; nothing is cut along data-parallel axes.
    """
    spec: list[str | None] = [None] * len(shape)
    if len(shape) < 2:
        return tuple(spec)
    for name, size in zip(mesh.names, mesh.sizes, strict=True):
        if name in REPLICATING or size == 1:
            continue
        fits = [d for d, n in enumerate(shape) if spec[d] is None and n % size == 0]
        if fits:
            spec[max(fits, key=lambda d: (shape[d], -d))] = name
    return tuple(spec)


def leaf_from_spec(path: str, shape: Sequence[int], dtype: str, mesh: MeshSpec) -> Leaf:
    """A leaf on a described mesh, in the usual sharding."""
    dims = tuple(int(n) for n in shape)
    return Leaf(path, dims, dtype, *_boxes(dims, mesh))


@lru_cache(maxsize=4096)
def _boxes(shape: Shape, mesh: MeshSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Device boxes; cached, so that equal leaves share arrays and the planner can compare them by identity."""
    spec = enumerate(default_spec(shape, mesh))
    cuts = [(mesh.names.index(name), d) for d, name in spec if name]
    starts, stops = _cut_boxes(shape, mesh.sizes, cuts)
    ids = np.array(mesh.ids or range(mesh.devices), np.int32)
    order = np.argsort(ids)
    return ids[order], starts[order], stops[order]


def leaf_from_array(
    path: str, array: Any, cache: dict[object, tuple[np.ndarray, ...]] | None = None
) -> Leaf:
    """A leaf from a jax.Array, or a ShapeDtypeStruct with a sharding; without one, on device 0."""
    shape = tuple(int(n) for n in array.shape)
    dtype = np.dtype(array.dtype).name
    sharding = getattr(array, "sharding", None)
    if sharding is None:
        one = np.zeros(1, np.int32)
        return Leaf(
            path,
            shape,
            dtype,
            one,
            np.zeros((1, len(shape)), np.int64),
            np.array([shape], np.int64).reshape(1, -1),
        )
    cache = {} if cache is None else cache
    key = (sharding, shape)
    if key not in cache:
        try:
            cache[key] = _read_sharding(sharding, shape)
        # such as jax's IndivisibleError; it does not name the leaf
        except ValueError as e:
            spec = getattr(sharding, "spec", None)
            raise LayoutError(
                f"leaf {path!r}: shape {shape} does not suit its sharding {sharding}: {e}",
                remedy="choose a dimension that the mesh axis divides, or leave the leaf replicated",
                leaf=path,
                shape=shape,
                spec=spec,
            ) from e
    return Leaf(path, shape, dtype, *cache[key])


def _read_sharding(
    sharding: Any, shape: Shape
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    items = sorted(sharding.devices_indices_map(shape).items(), key=lambda kv: kv[0].id)
    bounds = [
        [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        for _, index in items
    ]
    starts, stops = (
        np.array(bounds, np.int64).reshape(len(items), len(shape), 2).transpose(2, 0, 1)
    )
    return np.array([d.id for d, _ in items], np.int32), starts, stops


def leaves_of(arrays: Mapping[str, Any], mesh: object = None) -> list[Leaf]:
    """Leaves of a flat {path: array or shape}. With `mesh`, shardings are described, not read from the arrays."""
    if mesh is None:
        cache: dict[object, tuple[np.ndarray, ...]] = {}
        return [leaf_from_array(path, a, cache) for path, a in arrays.items()]
    described = MeshSpec.of(mesh)
    return [
        leaf_from_spec(path, a.shape, str(a.dtype), described)
        for path, a in arrays.items()
    ]


def device_processes(arrays: Mapping[str, Any]) -> dict[int, int]:
    """Global device id → trainer process, from the shardings of jax arrays."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    for a in arrays.values():
        sharding = getattr(a, "sharding", None)
        if sharding is None or id(sharding) in seen:
            continue
        seen.add(id(sharding))
        found |= {int(d.id): int(d.process_index) for d in sharding.device_set}
    return found
