"""The trainer's end of a plan: sharded JAX or torch arrays in, packed buckets and digests out.

Values that do not change are copied straight from the shard's memory into the transport's; casts and additions run in
a small compiled program on the shard's device, box by box, so extra memory is bounded by a bucket.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from jvlab._errors import LayoutError
from jvlab.layout import _sparse
from jvlab.layout._digest import (
    CHECKED_BYTES,
    MASK,
    Flawed,
    box_scan,
    flawed,
    row_elements,
)
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import (
    OPAQUE,
    LinkPlan,
    ValueTransform,
    convert,
    numpy_dtype,
    source_order,
)
from jvlab.layout._tree import as_sent, flatten, leaf_from_array
from jvlab.sync._quantise import (
    Naming,
    refuse_unlike,
    sent_arrays,
    unchanged,
    unlike,
)

# A box as static slices, reshapes and one transpose: what a compiled pack program is made of. numpy only.


@dataclass(frozen=True)
class Recipe:
    """Static steps from a local shard to a packed box; hashable, so it can be static in a jitted program."""

    # elements appended to each dimension, so that merged axes divide it
    pad: tuple[int, ...]
    window: tuple[tuple[int, int], ...]  # [start, stop) per dimension
    factors: tuple[int, ...]  # the windows' dimensions split into axes
    picks: tuple[tuple[int, int, int], ...]  # (start, stop, step) per factor
    order: tuple[int, ...]  # transpose to the box's order of axes
    base: tuple[int, ...]  # the box with repeated axes of size one
    shape: tuple[int, ...]  # the box

    def apply(self, shard: Any, xp: Any = np) -> Any:
        """The packed box of a shard, by numpy or any module like it (jax.numpy)."""
        if any(self.pad):
            shard = xp.pad(shard, [(0, n) for n in self.pad])
        part = shard[tuple(slice(a, b) for a, b in self.window)].reshape(self.factors)
        part = (
            part[tuple(slice(a, b, c) for a, b, c in self.picks)]
            .transpose(self.order)
            .reshape(self.base)
        )
        return part if self.base == self.shape else xp.broadcast_to(part, self.shape)


def box_recipe(plan: TransferPlan, link: LinkPlan, i: int) -> Recipe:
    """The recipe of box i of a link."""
    sharding = plan.shardings[plan.leaves[int(link.leaf[i])].sharding]
    cell = sharding.cell_of(link.device)
    local = (sharding.stops[cell] - sharding.starts[cell]).tolist()
    strides = sharding.local_strides[cell].tolist()
    shape = link.shape[i].tolist()
    dims = link.leaf_dim[i].tolist()
    src = link.src_strides[i].tolist()
    rest = int(link.src_offset[i])
    pad: list[int] = []
    window: list[tuple[int, int]] = []
    factors: list[int] = []
    picks: list[tuple[int, int, int]] = []
    place: dict[int, int] = {}  # axis of the box -> its factor
    for d, size in enumerate(local):
        start, rest = divmod(rest, strides[d])
        axes = sorted(
            (k for k in range(len(shape)) if dims[k] == d and shape[k] > 1),
            key=lambda k: -src[k],
        )
        split = _split([shape[k] for k in axes], [src[k] // strides[d] for k in axes])
        place |= {k: len(factors) + j for j, k in enumerate(axes)}
        factors += [w for w, _ in split]
        picks += [p for _, p in split]
        reach = math.prod(w for w, _ in split)
        pad.append(max(start + reach - size, 0))
        window.append((start, start + reach))
    moved = [place[k] for k in range(len(shape)) if k in place]
    order = tuple([f for f in range(len(factors)) if f not in moved] + moved)
    base = tuple(n if k in place else 1 for k, n in enumerate(shape))
    return Recipe(
        tuple(pad),
        tuple(window),
        tuple(factors),
        tuple(picks),
        order,
        base,
        tuple(shape),
    )


def _split(
    sizes: list[int], steps: list[int]
) -> list[tuple[int, tuple[int, int, int]]]:
    """(width, pick) of each factor of one dimension that these axes, major first, walk along."""
    if not sizes:
        return [(1, (0, 1, 1))]
    if any(a % b for a, b in itertools.pairwise(steps)):
        raise LayoutError(
            f"steps {steps} on one dimension do not divide each other",
            remedy="pack this box by gather",
        )
    last = len(sizes) - 1
    span = (sizes[-1] - 1) * steps[-1] + 1
    if last == 0:
        return [(span, (0, span, steps[0]))]
    out = [(sizes[0], (0, sizes[0], 1))]
    for j in range(1, last):
        out.append((steps[j - 1] // steps[j], (0, sizes[j], 1)))
    return [*out, (steps[-2], (0, span, steps[-1]))]


# ----------------------------------------------------------------------------------------------------


class Source:
    """This process's shards of one version of the parameters, by (leaf, device)."""

    def __init__(self, plan: TransferPlan, arrays: Mapping[str, Any]) -> None:
        check_like_connected(plan, arrays)
        self.by_path = arrays  # the trainer's own, where what is sent differs
        # of leaves that are not finite, as `by_path` has them
        self.naming: Naming = unchanged
        self._shards: dict[tuple[str, int], Any] = {}
        self._memory: dict[tuple[str, int], np.ndarray] = {}
        for info in plan.leaves:
            array = arrays[info.path]
            pieces = getattr(array, "addressable_shards", None)
            if pieces is None:
                self._shards[info.path, 0] = array
            else:
                self._shards |= {
                    (info.path, piece.device.id): piece.data for piece in pieces
                }

    @classmethod
    def of(cls, plan: TransferPlan, params: Any) -> Source:
        """From a tree of arrays."""
        return cls.of_arrays(plan, flatten(as_sent(params)).arrays)

    @classmethod
    def of_arrays(cls, plan: TransferPlan, given: Mapping[str, Any]) -> Source:
        """From the trainer's arrays by path; those that feed a quantised engine are quantised here."""
        arrays, naming = sent_arrays(plan, given)
        source = cls(plan, arrays)
        source.by_path = given
        source.naming = naming
        return source

    def shard(self, path: str, device: int) -> Any:
        """The shard as a JAX, torch or numpy array on its device."""
        return self._shards[path, device]

    def memory(self, path: str, device: int) -> np.ndarray | None:
        """The shard as flat host memory, without a copy; None if it is not in host memory."""
        key = path, device
        if key not in self._memory:
            shard = self._shards[key]
            if any(d.platform != "cpu" for d in getattr(shard, "devices", set)()):
                return None
            self._memory[key] = np.ascontiguousarray(shard).reshape(-1)
        return self._memory[key]


def check_like_connected(plan: TransferPlan, arrays: Mapping[str, Any]) -> None:
    """Raise one error listing every path, shape, dtype or sharding that differs from what the plan was compiled for."""
    planned = {info.path: info for info in plan.leaves}
    problems = [
        f"{path}: is new, was not connected"
        for path in arrays.keys() - planned.keys() - plan._connected
    ]
    cache_: dict[object, tuple[np.ndarray, ...]] = {}
    for path, info in planned.items():
        array = arrays.get(path)
        problem = unlike(path, array, info.dtype, info.shape)
        if not problem:
            leaf = leaf_from_array(path, array, cache_)
            if not _same_cells(plan, info.sharding, leaf):
                problem = f"{path}: connected with another sharding than {getattr(array, 'sharding', 'none')}"
        problems.append(problem)
    refuse_unlike(problems, planned.keys() | arrays.keys())


def _same_cells(plan: TransferPlan, index: int, leaf: Any) -> bool:
    sharding = plan.shardings[index]
    cell = np.repeat(np.arange(len(sharding.starts)), np.diff(sharding.owner_ptr))
    order = np.argsort(sharding.owners, kind="stable")
    theirs = np.argsort(leaf.devices)
    return (
        np.array_equal(sharding.owners[order], leaf.devices[theirs])
        and np.array_equal(sharding.starts[cell[order]], leaf.starts[theirs])
        and np.array_equal(sharding.stops[cell[order]], leaf.stops[theirs])
    )


@dataclass(frozen=True)
class Box:
    """One box of a link: where to read it and where to write it."""

    leaf: str
    target: int
    transform: ValueTransform
    shape: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]
    at: int  # byte offset in the bucket
    nbytes: int
    row: int  # elements per row of the target, for its digest


@dataclass(frozen=True)
class Encoded:
    """A bucket to send: its bytes whole, or only what changed since those that the engines hold."""

    payload: Any  # uint8, where the pack has its memory
    sparse: bool
    changed: int  # elements; all if nothing was held
    elements: int


class LinkPack:
    """One device → rank link: its buckets as lists of boxes."""

    def __init__(
        self, plan: TransferPlan, device: int, rank: int, replica: int
    ) -> None:
        self.plan = plan
        self.device = device
        self.rank = rank
        self.replica = replica
        self.link: LinkPlan = source_order(plan.link(device, rank, replica))
        self.sizes: list[int] = self.link.bucket_sizes.tolist()
        rows: dict[int, int] = {}
        for t in np.unique(self.link.target).tolist():
            info = plan.parameters[plan.target_parameter[t]]
            rows[t] = row_elements(info.shape, info.strides)
        self.buckets: list[list[tuple[int, Box]]] = [[] for _ in self.sizes]
        for i in range(len(self.link)):
            self.buckets[int(self.link.bucket[i])].append((i, self._box(i, rows)))
        # bucket -> non-finite leaves found by its last checked write
        self._flawed: dict[int, Flawed] = {}

    def _box(self, i: int, rows: dict[int, int]) -> Box:
        link = self.link
        target = int(self.link.target[i])
        return Box(
            self.plan.leaves[int(link.leaf[i])].path,
            target,
            self.plan.transforms[int(link.transform[i])],
            tuple(link.shape[i].tolist()),
            int(link.src_offset[i]),
            tuple(link.src_strides[i].tolist()),
            int(link.dst_offset[i]),
            tuple(link.dst_strides[i].tolist()),
            int(link.bucket_offset[i]),
            int(link.nbytes[i]),
            rows[target],
        )

    @cached_property
    def fingerprint(self) -> bytes:
        """Equal for links of one device that read and pack the same: those to replicas often are."""
        digest = hashlib.blake2b(repr((self.device, self.rank)).encode())
        for name, table in sorted(vars(self.link).items()):
            if isinstance(table, np.ndarray):
                digest.update(name.encode() + np.ascontiguousarray(table).tobytes())
        return digest.digest()

    def targets(self, bucket: int) -> set[int]:
        """The plan's targets that a bucket contains parts of."""
        return {box.target for _, box in self.buckets[bucket]}

    def values(self, bucket: int, source: Source) -> list[np.ndarray]:
        """Each box's values in the wire dtype: views of the shards if nothing changes, else computed."""
        return [self._values(i, box, source) for i, box in self.buckets[bucket]]

    def _values(self, i: int, box: Box, source: Source) -> np.ndarray:
        # torch and numpy arrays would be copied whole for every box
        is_jax = hasattr(source.shard(box.leaf, self.device), "devices")
        if plain(box.transform) or not is_jax:
            flat = source.memory(box.leaf, self.device)
            if flat is not None:
                size = flat.itemsize
                part = as_strided(
                    flat[box.src_offset :],
                    box.shape,
                    [s * size for s in box.src_strides],
                )
                return part if plain(box.transform) else convert(part, box.transform)
        recipe = box_recipe(self.plan, self.link, i)
        starts = np.array([first for first, _ in recipe.window], np.int32)
        window = tuple((0, last - first) for first, last in recipe.window)
        shard = source.shard(box.leaf, self.device)
        return np.asarray(
            _program()(shard, starts, replace(recipe, window=window), box.transform)
        )

    def write(
        self,
        bucket: int,
        values: list[np.ndarray],
        out: memoryview,
        check_finite: bool = False,
    ) -> None:
        """Copy the boxes of a bucket into its bytes; with `check_finite`, note leaves with non-finite values."""
        data = np.frombuffer(out, np.uint8)
        found: Flawed = set()
        for (_, box), numbers in zip(self.buckets[bucket], values, strict=True):
            part = (
                data[box.at : box.at + box.nbytes]
                .view(numpy_dtype(box.transform.wire))
                .reshape(box.shape)
            )
            if not check_finite:
                np.copyto(part, numbers)
            elif copy_and_check(part, numbers, box.transform.wire):
                found.add((box.leaf, box.transform))
        self._flawed[bucket] = found

    def shapes(self, bucket: int) -> list[tuple[Box, int, int]]:
        """Each box of a bucket, its elements, and the bytes of one."""
        out = []
        for _, box in self.buckets[bucket]:
            elements = math.prod(box.shape)
            out.append((box, elements, box.nbytes // elements))
        return out

    def sections(
        self, bucket: int, counts: list[int]
    ) -> tuple[list[_sparse.Section], int]:
        """Where the changes of each box go in a sparse bucket, and its bytes.

        Tensors for the engine's own loader are passed to it whole.
        """
        shapes = self.shapes(bucket)
        counts = [
            elements if self.plan.target_kind[box.target] == OPAQUE else count
            for count, (box, elements, _) in zip(counts, shapes, strict=True)
        ]
        return _sparse.sections(counts, [s[1] for s in shapes], [s[2] for s in shapes])

    def encode(self, bucket: int, values: Any, held: Any) -> Encoded:
        """A bucket as what changed since `held`, its bytes when it was last sent; whole if that is not smaller."""
        shapes = self.shapes(bucket)
        size = self.sizes[bucket]
        changed = total = sum(elements for _, elements, _ in shapes)
        if held is not None:
            found = [
                _sparse.changed(box_values, held[box.at : box.at + box.nbytes])
                for (box, _, _), box_values in zip(shapes, values, strict=True)
            ]
            changed = sum(map(len, found))
            sections, nbytes = self.sections(bucket, [len(where) for where in found])
            if nbytes < size:
                out = np.zeros(nbytes, np.uint8)
                table = np.array([s.count for s in sections], _sparse.COUNT)
                out[: table.nbytes] = table.view(np.uint8)
                for part in zip(sections, values, found, strict=True):
                    _sparse.pack_box(*part, out)
                return Encoded(out, True, changed, total)
        out = np.zeros(size, np.uint8)
        self.write(bucket, values, out.data)
        return Encoded(out, False, changed, total)

    def advance(self, bucket: int, held: Any, encoded: Encoded) -> Any:
        """The bytes held once this bucket is: `held` with its changes, in place, or its own."""
        data = encoded.payload
        if not encoded.sparse:
            return data
        table = data[: len(self.buckets[bucket]) * _sparse.COUNT.itemsize]
        sections, _ = self.sections(bucket, table.view(_sparse.COUNT).tolist())
        for (box, _, _), part in zip(self.shapes(bucket), sections, strict=True):
            words = held[box.at : box.at + box.nbytes].view(f"u{part.item}")
            words[_sparse.positions_of(part, data)] = _sparse.values_of(part, data)
        return held

    def copy_out(self, encoded: Encoded, out: Any) -> None:
        """Copy an encoded bucket into a transport's slot."""
        np.frombuffer(out, np.uint8)[:] = encoded.payload

    def pop_flawed(self, bucket: int) -> Flawed:
        """The leaves with non-finite values found by the last checked write of this bucket; call once it is sent."""
        return self._flawed.pop(bucket, set())

    def digests(
        self, bucket: int, values: list[np.ndarray], flawed: Flawed | None = None
    ) -> dict[int, int]:
        """What these boxes add to each target's digest; leaves with non-finite values are added to `flawed`."""
        out: dict[int, int] = {}
        for (_, box), numbers in zip(self.buckets[bucket], values, strict=True):
            part, flaw = box_scan(numbers, box.dst_offset, box.dst_strides, box.row)
            out[box.target] = (out.get(box.target, 0) + part) & MASK
            if flaw and flawed is not None:
                flawed.add((box.leaf, box.transform))
        return out


def copy_and_check(out: np.ndarray, numbers: np.ndarray, dtype: str) -> bool:
    """Copy, and return whether some of it is not finite; each block is checked while it is in the cache."""
    out = np.atleast_1d(out)
    numbers = np.atleast_1d(numbers)
    step = max(1, CHECKED_BYTES * len(out) // max(1, out.nbytes)) if len(out) else 1
    flaw = False
    for at in range(0, len(out), step):
        part = out[at : at + step]
        np.copyto(part, numbers[at : at + step])
        flaw = flaw or flawed(part, dtype)
    return flaw


def plain(transform: ValueTransform) -> bool:
    """Does this transform leave every value unchanged?"""
    return (
        not transform.add
        and transform.cast in (None, transform.source)
        and transform.wire == transform.source
    )


@cache
def _program() -> Any:
    """The compiled pack of one box. Its start is an argument, so boxes of one shape share a program."""
    import jax
    import jax.numpy as jnp

    def pack(shard: Any, starts: Any, recipe: Recipe, transform: ValueTransform) -> Any:
        if any(recipe.pad):
            shard = jnp.pad(shard, [(0, n) for n in recipe.pad])
        part = jax.lax.dynamic_slice(shard, starts, [size for _, size in recipe.window])
        values = replace(recipe, pad=(0,) * len(recipe.pad)).apply(part, jnp)
        if transform.add:
            values = (
                values.astype(jnp.promote_types(values.dtype, jnp.float32))
                + transform.add
            )
        if transform.cast:
            values = values.astype(transform.cast)
        return values.astype(transform.wire)

    return jax.jit(pack, static_argnums=(2, 3))
