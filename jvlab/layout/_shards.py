"""Leaves for the planner: from jax arrays and shardings, or from a mesh description with no jax at all. numpy only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from jvlab._errors import ConfigError, LayoutError
from jvlab.layout._types import Leaf, Shape

# of a described mesh, as of one made by `jv.mesh`
MESH_AXES = ("fsdp", "tp", "ep", "dp")
_MAX_AXIS_SIZE = 1 << 20  # devices
# mesh axes that conventionally hold copies of the weights
REPLICATING = ("data", "dp", "replica", "batch")
# per dimension: the mesh axis (or axes) it is cut along
Spec = tuple[str | tuple[str, ...] | None, ...]


@dataclass(frozen=True)
class MeshSpec:
    """A device mesh by names and sizes, with its device ids in C order; default: from 0."""

    names: tuple[str, ...]
    sizes: Shape
    ids: Shape = ()

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names) or any(n < 1 for n in self.sizes):
            raise ConfigError(
                f"mesh {self} repeats an axis or has one smaller than 1",
                remedy="write it like fsdp=4,tp=2",
            )
        if self.ids and (
            len(self.ids) != self.devices or len(set(self.ids)) != len(self.ids)
        ):
            raise ConfigError(
                f"mesh {self} of {self.devices} devices needs as many distinct ids",
                remedy="list each device once",
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
            return cls.parse(mesh).with_known_axes()
        shape = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
        if not isinstance(shape, Mapping):
            raise ConfigError(
                f"cannot read a mesh from {type(mesh).__name__}",
                remedy='pass "fsdp=4,tp=2" or a dict',
            )
        ids = tuple(int(d.id) for d in _mesh_devices(mesh))
        made = cls(
            tuple(str(k) for k in shape), tuple(map(_axis_size, shape.values())), ids
        )
        return made.with_known_axes() if isinstance(mesh, Mapping) else made

    def with_known_axes(self) -> MeshSpec:
        """Itself; a ConfigError where an axis is none of those that `jv.mesh` has."""
        for name in self.names:
            if name not in MESH_AXES:
                raise ConfigError(
                    f"mesh axis {name!r} is not known",
                    remedy=f"axes: {', '.join(MESH_AXES)}",
                    axis=name,
                )
        return self

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    def size_of(self, entry: str | tuple[str, ...] | None) -> int:
        """Number of parts that a spec entry cuts a dimension into."""
        names = (entry,) if isinstance(entry, str) else entry or ()
        return math.prod(self.sizes[self.names.index(n)] for n in names)


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


def default_spec(shape: Shape, mesh: MeshSpec) -> Spec:
    """The usual sharding of this shape: each mesh axis cuts the largest dimension that it still divides.

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


def leaf_from_spec(
    path: str,
    shape: Sequence[int],
    dtype: str,
    mesh: MeshSpec,
    spec: Spec | None = None,
) -> Leaf:
    """A leaf on a described mesh. As in JAX, a mesh axis must divide the dimension it cuts."""
    dims = tuple(int(n) for n in shape)
    entries = (
        default_spec(dims, mesh)
        if spec is None
        else tuple(spec) + (None,) * (len(dims) - len(spec))
    )
    try:
        devices, starts, stops = _boxes(dims, mesh, entries)
    except LayoutError as e:
        raise LayoutError(
            f"leaf {path!r}: {e.message}", remedy=e.remedy, leaf=path, **e.fields
        ) from e
    return Leaf(path, dims, dtype, devices, starts, stops)


@lru_cache(maxsize=4096)
def _boxes(
    shape: Shape, mesh: MeshSpec, spec: Spec
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Device boxes; cached, so that equal leaves share arrays and the planner can compare them by identity."""
    flat = [
        n
        for entry in spec
        for n in ((entry,) if isinstance(entry, str) else entry or ())
    ]
    unknown = [n for n in flat if n not in mesh.names]
    if len(spec) != len(shape) or unknown or len(set(flat)) != len(flat):
        raise LayoutError(
            f"partition {spec} does not suit shape {shape} on mesh {dict(zip(mesh.names, mesh.sizes, strict=True))}",
            remedy="name each mesh axis at most once, one entry per dimension",
            shape=shape,
            spec=spec,
        )
    coords = (
        np.indices(mesh.sizes).reshape(len(mesh.sizes), -1)
        if mesh.sizes
        else np.zeros((0, 1), np.int64)
    )
    starts = np.zeros((coords.shape[1], len(shape)), np.int64)
    stops = np.tile(np.array(shape, np.int64), (coords.shape[1], 1))
    for d, entry in enumerate(spec):
        parts = mesh.size_of(entry)
        if shape[d] % parts:
            raise LayoutError(
                f"dimension {d} of shape {shape} has {shape[d]} elements, which mesh axis {entry!r} of size {parts} "
                "does not divide",
                remedy="choose another dimension or mesh axis, or leave the leaf replicated (JAX requires it too)",
                shape=shape,
                spec=spec,
            )
        place = np.zeros(coords.shape[1], np.int64)
        for name in (entry,) if isinstance(entry, str) else entry or ():
            axis = mesh.names.index(name)
            place = place * mesh.sizes[axis] + coords[axis]
        starts[:, d] = place * (shape[d] // parts)
        stops[:, d] = starts[:, d] + shape[d] // parts
    ids = np.array(mesh.ids or range(coords.shape[1]), np.int32)
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
        [s.indices(n) for s, n in zip(index, shape, strict=True)] for _, index in items
    ]
    starts = np.array([[b[0] for b in row] for row in bounds], np.int64).reshape(
        len(items), len(shape)
    )
    stops = np.array([[b[1] for b in row] for row in bounds], np.int64).reshape(
        len(items), len(shape)
    )
    return np.array([d.id for d, _ in items], np.int32), starts, stops


def leaves_of(
    arrays: Mapping[str, Any],
    mesh: object = None,
    specs: Mapping[str, Spec] | None = None,
) -> list[Leaf]:
    """Leaves of a flat {path: array or shape}. With `mesh`, shardings are described, not read from the arrays."""
    if mesh is None:
        cache: dict[object, tuple[np.ndarray, ...]] = {}
        return [leaf_from_array(path, a, cache) for path, a in arrays.items()]
    described = MeshSpec.of(mesh)
    problems = []
    leaves: list[Leaf] = []
    for path, a in arrays.items():
        name = a.dtype if isinstance(a.dtype, str) else np.dtype(a.dtype).name
        try:
            leaves.append(
                leaf_from_spec(path, a.shape, name, described, (specs or {}).get(path))
            )
        except LayoutError as e:
            problems.append(e)
    if problems:
        text = "\n".join(f"  {e.message}" for e in problems[:40])
        raise LayoutError(
            f"{len(problems)} leaves do not fit the mesh\n{text}",
            remedy=problems[0].remedy,
        )
    return leaves


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
