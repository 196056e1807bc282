"""How parameters and activations are sharded: a table from logical axes, named by one letter, to mesh axes.

    letter  axis                   parameters        activations
    d       model width            fsdp              whole
    n, k    heads, key-value heads tp                tp
    f       inner width of the MLP tp                tp
    e       experts                ep                (see _experts.py)
    r       the router's experts   –                 whole
    v       vocabulary             tp                tp
    h       head dimension         –                 whole
    l       stacked layers         –
    b       batch                                    dp, fsdp, ep

jax requires every sharded dimension to divide evenly. If a parameter's first choice does not, fsdp takes the next of
d, f, v, n, k, h that does; tp and ep have no alternative, since they split the computation too. Otherwise the leaf is
replicated along that mesh axis, and `Layout.notes` says so. Norms and biases are small, and never sharded by fsdp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jvlab._errors import ConfigError
from jvlab.layout._tree import MESH_AXES, MeshSpec

FSDP_CHOICES = "dfvnkh"  # in this order
TP_AXES = "nkfv"
# parameters stay split along these while they are used
COMPUTED_IN_PARTS = ("tp", "ep")
BATCH_AXES = ("dp", "fsdp", "ep")


def mesh(spec: str | Mapping[str, int] | None = None, /, **axes: int) -> Mesh:
    """A mesh of this process's devices: `mesh(fsdp=4, tp=2)`, or `mesh("fsdp=4,tp=2")`; any sizes, 3 and 6 included.

    `fsdp` splits parameters and batch, `tp` heads, MLP width and vocabulary, `ep` experts and batch, `dp` the batch
    alone. Without arguments, all devices are on `fsdp`.

    >>> dict(jv.mesh(fsdp=1, tp=1).shape)
    {'fsdp': 1, 'tp': 1}
    """
    if spec is not None and (axes or not isinstance(spec, (str, Mapping))):
        raise ConfigError(
            f"a mesh is given as {spec!r} and {axes}",
            remedy='jv.mesh("fsdp=4,tp=2"), or jv.mesh(fsdp=4, tp=2), one of them',
        )
    read = MeshSpec.of(axes if spec is None else spec)  # raises for what is none
    devices = jax.devices()
    axes = dict(zip(read.names, read.sizes, strict=True)) or {"fsdp": len(devices)}
    wanted = math.prod(axes.values())
    if wanted > len(devices):
        shape = ", ".join(f"{name}={size}" for name, size in axes.items())
        where = devices[0].platform
        remedy = (
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} before jax is imported"
            if where == "cpu"
            else "ask for a smaller mesh, or start on more devices"
        )
        raise ConfigError(
            f"mesh({shape}) needs {wanted} devices, but jax has {len(devices)} ({where})",
            remedy=remedy,
            wanted=wanted,
            devices=len(devices),
        )
    return Mesh(np.asarray(devices[:wanted]).reshape(tuple(axes.values())), tuple(axes))


@dataclass(frozen=True)
class Layout:
    """The table applied to one mesh. Hashable, so that it can be part of a compiled program."""

    mesh: Mesh

    def _size(self, axis: str) -> int:
        return self.mesh.shape.get(axis, 1)

    def parameter(
        self, letters: str, shape: tuple[int, ...]
    ) -> tuple[NamedSharding, tuple[str, ...]]:
        """The sharding of a parameter with these axes, and the mesh axes along which it cannot be sharded."""
        held: list[list[str]] = [[] for _ in letters]
        unplaced = []
        fsdp = (
            FSDP_CHOICES if len(letters.replace("l", "")) > 1 and "d" in letters else ""
        )
        for axis, choices in (("ep", "e"), ("tp", TP_AXES), ("fsdp", fsdp)):
            wanted = [
                dim
                for letter in choices
                for dim, own in enumerate(letters)
                if own == letter
            ]
            if self._size(axis) == 1 or not wanted:
                continue
            for dim in wanted:
                if (
                    shape[dim]
                    % (math.prod(map(self._size, held[dim])) * self._size(axis))
                    == 0
                ):
                    held[dim].append(axis)
                    break
            else:
                unplaced.append(axis)
        return NamedSharding(self.mesh, self._spec(held)), tuple(unplaced)

    def gathered(self, parameter: jax.Array, letters: str, dtype: str) -> jax.Array:
        """A parameter as the computation needs it: cast, whole along fsdp, split along tp and ep.

        Constrained to its own sharding first, so that its gradient is reduce-scattered, never gathered. Cast before
        the gather, so that the compute dtype is what moves.
        """
        if self.mesh.size == 1:
            return parameter.astype(dtype)
        own, _ = self.parameter(letters, parameter.shape)
        value = jax.lax.with_sharding_constraint(parameter, own).astype(dtype)
        return jax.lax.with_sharding_constraint(
            value, NamedSharding(self.mesh, self.whole(letters, parameter.shape))
        )

    def whole(self, letters: str, shape: tuple[int, ...]) -> PartitionSpec:
        """How a parameter lies while it is used: whole along fsdp."""
        own, _ = self.parameter(letters, shape)
        return self._spec(
            [[a for a in axes_of(part) if a in COMPUTED_IN_PARTS] for part in own.spec]
        )

    def activation(self, value: jax.Array, letters: str) -> jax.Array:
        """An activation with its sharding: batch over dp, fsdp and ep; heads, MLP width and vocabulary over tp."""
        if self.mesh.size == 1:
            return value
        return jax.lax.with_sharding_constraint(
            value, NamedSharding(self.mesh, self.activation_spec(letters, value.shape))
        )

    def activation_spec(self, letters: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Along which mesh axes an activation of this shape is split."""
        held: list[list[str]] = [[] for _ in letters]
        for dim, letter in enumerate(letters):
            for axis in (
                BATCH_AXES if letter == "b" else ("tp",) if letter in TP_AXES else ()
            ):
                parts = math.prod(map(self._size, held[dim])) * self._size(axis)
                if self._size(axis) > 1 and shape[dim] % parts == 0:
                    held[dim].append(axis)
        return self._spec(held)

    def _spec(self, held: list[list[str]]) -> PartitionSpec:
        parts = [
            tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in held
        ]
        while parts and parts[-1] is None:
            parts.pop()
        return PartitionSpec(*parts)

    def notes(self, leaves: dict[str, tuple[str, tuple[int, ...]]]) -> tuple[str, ...]:
        """What is replicated although the table would shard it, one line per kind of leaf."""
        out: dict[str, None] = {}
        for path, (letters, shape) in leaves.items():
            kind = re.sub(r"\.\d+\.", ".*.", path)
            for axis in self.parameter(letters, shape)[1]:
                why = f"no suitable dimension divides by {self._size(axis)}"
                out[f"{kind} {shape} is replicated along {axis}: {why}"] = None
        unknown = [
            a
            for a in self.mesh.axis_names
            if a not in MESH_AXES and self.mesh.shape[a] > 1
        ]
        out |= dict.fromkeys(
            f"everything is replicated along mesh axis {a!r}: nothing is sharded over it"
            for a in unknown
        )
        return tuple(out)


def axes_of(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    return (part,) if isinstance(part, str) else part or ()


def bytes_per_device(arrays: list[Any], itemsize: int | None = None) -> int:
    """The largest number of bytes of these arrays on any one device; with an itemsize of 1 that of their elements."""
    held: dict[Any, int] = {}
    for array in arrays:
        for device in array.sharding.device_set:
            elements = math.prod(array.sharding.shard_shape(array.shape))
            size = elements * (itemsize or array.dtype.itemsize)
            held[device] = held.get(device, 0) + size
    return max(held.values(), default=0)
