"""A tree of parameters as a quantised engine gets it: fp8 leaves and their scales, made on the devices that hold them.

    1. one program reads every leaf and returns the largest magnitude of each slice       amax, a few numbers
    2. here, in numpy: scale = amax / 448 and 1 / scale, per group (`layout/_formats.py`)
    3. a second program multiplies, clamps and casts; its results have the leaves' shardings, and live for one sync

The divisions are done here because XLA does not round them as vLLM does: a division by a constant becomes a product,
and on a GPU others are approximate by one bit (seen on an H200: scales off by one, two values in 2 million).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from jvlab._errors import LayoutError, Unsupported
from jvlab.layout._digest import Flawed
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import (
    FP8,
    FP8_MAX,
    SCALES,
    Quantised,
    ValueTransform,
    is_scales,
)

_LARGEST = np.float32(FP8_MAX)
# vLLM's `per_block_cast_to_fp8` takes no magnitude of a block for smaller
SMALLEST = np.float32(1e-4)
NAMED = 8  # leaves that one message names
Naming = Callable[[Flawed], Flawed]
BITS = {"bfloat16": (8, 7), "float32": (8, 23)}  # exponent, mantissa
_KNOWN: WeakKeyDictionary[TransferPlan, Quantiser] = WeakKeyDictionary()


class Quantiser:
    """Quantises trees for one plan; keeps its compiled programs."""

    def __init__(self, plan: TransferPlan) -> None:
        self.leaves = plan.quantised
        self._shapes = {info.path: info.shape for info in plan.leaves}
        self._programs: dict[Any, tuple[Any, Any, Any]] = {}

    @cached_property
    def _groups(self) -> np.ndarray:
        """The group of every slice of every leaf, in the order of the first program's result; of blocks -1."""
        return np.concatenate([q.group_table().reshape(-1) for q in self.leaves])

    @cached_property
    def _parts(self) -> dict[Quantised, slice]:
        """Where each leaf's slices or blocks are in that result."""
        ends = np.cumsum([q.count for q in self.leaves]).tolist()
        return {
            q: slice(end - q.count, end)
            for q, end in zip(self.leaves, ends, strict=True)
        }

    def arrays(self, given: Mapping[str, Any]) -> tuple[Mapping[str, Any], Naming]:
        """The arrays to send, by path, and how to name those of `given` that are not finite."""
        self._check(given)
        import jax

        values = [given[q.path] for q in self.leaves]
        largest, cast, everywhere = self._compiled(values)
        amax = np.asarray(largest(values), np.float32)
        scales, inverse = scales_of(amax, self._groups)
        made = {SCALES: scales} if len(scales) else {}
        for q, part in self._parts.items():
            if q.block:
                of_blocks, inverse[part] = block_scales_of(amax[part])
                made[q.scales] = of_blocks.reshape(q.grid)
        flawed = self._not_finite(amax)
        parts = cast(values, jax.device_put(inverse, everywhere))
        sent = {q.path: part for q, part in zip(self.leaves, parts, strict=True)}
        sent |= {path: jax.device_put(x, everywhere) for path, x in made.items()}
        return {**given, **sent}, lambda found: named(found, flawed)

    def _check(self, given: Mapping[str, Any]) -> None:
        problems = []
        for q in self.leaves:
            array = given.get(q.path)
            if array is not None and not hasattr(array, "addressable_shards"):
                raise Unsupported(
                    f"{q.path} is {type(array).__name__}: leaves of a quantised engine are quantised by JAX",
                    remedy="pass jax.Arrays, e.g. jax.device_put(x); torch tensors by jax.dlpack.from_dlpack(t)",
                )
            problems.append(unlike(q.path, array, q.source, self._shapes[q.path]))
        refuse_unlike(problems, given.keys())

    def _compiled(self, values: list[Any]) -> tuple[Any, Any, Any]:
        import jax

        shardings = tuple(x.sharding for x in values)
        if shardings not in self._programs:
            everywhere = replicated(shardings[0])
            largest = jax.jit(
                lambda leaves: amax_of(leaves, self.leaves), out_shardings=everywhere
            )
            cast = jax.jit(
                lambda leaves, inverse: cast_all(leaves, inverse, self.leaves),
                out_shardings=[*shardings],
            )
            self._programs = {shardings: (largest, cast, everywhere)}
        return self._programs[shardings]

    def _not_finite(self, amax: np.ndarray) -> Flawed:
        """The leaves whose scale is not finite, and so not their values as the loader gets them."""
        return {
            (q.path, ValueTransform(q.source, q.loaded, q.add, q.cast))
            for q, part in self._parts.items()
            if not np.isfinite(amax[part]).all()
        }


def unlike(path: str, array: Any, dtype: str, shape: tuple[int, ...]) -> str:
    """How an array differs from the leaf that was connected; empty if it does not."""
    if array is None:
        return f"{path}: was connected, is missing now"
    if getattr(array, "is_deleted", bool)():
        return f"{path}: its buffer was deleted or donated"
    now = (np.dtype(array.dtype).name, tuple(array.shape))
    if now != (dtype, shape):
        return f"{path}: connected as {dtype}{shape}, now {now[0]}{now[1]}"
    return ""


def refuse_unlike(found: Iterable[str], leaves: Collection[str]) -> None:
    """Raise if any of these says something: one error for all."""
    problems = [text for text in found if text]
    if not problems:
        return
    more = f"\n  … and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
    raise LayoutError(
        f"{len(problems)} of {len(leaves)} leaves differ from what was connected:\n  "
        + "\n  ".join(sorted(problems)[:NAMED])
        + more,
        remedy="pass the same tree, or connect again: link = lab.connect(params, pool)",
        problems=problems,
    )


def sent_arrays(
    plan: TransferPlan, given: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Naming]:
    """`Quantiser.arrays` of the plan's quantiser, made once: its programs take longer to compile than a sync."""
    if not plan.quantised:
        return given, unchanged
    if plan not in _KNOWN:
        _KNOWN[plan] = Quantiser(plan)
    return _KNOWN[plan].arrays(given)


def unchanged(found: Flawed) -> Flawed:
    """The naming of arrays that are sent as they are."""
    return found


def named(found: Flawed, flawed: Flawed) -> Flawed:
    """Leaves that are not finite, with those of the trainer in place of the scales that show it."""
    if not any(is_scales(leaf) for leaf, _ in found):
        return found
    return {(leaf, x) for leaf, x in found if not is_scales(leaf)} | flawed


def scales_of(amax: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale of each group, and 1 / scale for each slice; float32, each operation rounded once, as vLLM does."""
    largest = np.zeros(int(groups.max()) + 1, np.float32)
    used = groups >= 0
    inverse = np.ones(len(groups), np.float32)
    with np.errstate(all="ignore"):
        np.maximum.at(largest, groups[used], amax[used])  # NaN stays NaN
        scales = largest / _LARGEST
        inverse[used] = np.float32(1) / scales[groups[used]]
    return scales, inverse


def block_scales_of(amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale of each block, and 1 / scale; rounded as in `scales_of`."""
    with np.errstate(all="ignore"):
        scales = np.maximum(amax, SMALLEST) / _LARGEST  # NaN stays NaN
        return scales, np.float32(1) / scales


def amax_of(leaves: list[Any], recipes: tuple[Quantised, ...]) -> Any:
    """The largest magnitude of each slice of each leaf, as one vector of float32."""
    import jax.numpy as jnp

    out = []
    for x, q in zip(leaves, recipes, strict=True):
        magnitude = jnp.abs(_loaded(x, q))
        inner = tuple(d for d, n in enumerate(q.grid) if n == 1)
        if q.block:
            magnitude = in_blocks(magnitude, q)
            inner = tuple(range(1, 2 * len(q.grid), 2))
        # XLA's maximum may drop NaN (seen on a CPU: a block of NaN and padding gave 0)
        flawed = jnp.isnan(magnitude)
        largest = jnp.max(jnp.where(flawed, 0, magnitude), axis=inner).astype(
            jnp.float32
        )
        out.append(jnp.where(jnp.any(flawed, axis=inner), jnp.nan, largest).reshape(-1))
    return jnp.concatenate(out)


def in_blocks(x: Any, q: Quantised) -> Any:
    """The array with two dimensions for each of its own, blocks and indices in a block; zeros fill the last block."""
    import jax.numpy as jnp

    pairs = list(zip(q.grid, q.block, strict=True))
    wide = jnp.pad(
        x,
        [
            (0, grid * block - n)
            for n, (grid, block) in zip(x.shape, pairs, strict=True)
        ],
    )
    return wide.reshape([n for pair in pairs for n in pair])


def over_blocks(values: Any, q: Quantised, shape: tuple[int, ...]) -> Any:
    """One value for each block, repeated for each of its elements."""
    import jax.numpy as jnp

    pairs = list(zip(q.grid, q.block, strict=True))
    spread = jnp.broadcast_to(
        values.reshape([n for grid, _ in pairs for n in (grid, 1)]),
        [n for p in pairs for n in p],
    )
    return spread.reshape([grid * block for grid, block in pairs])[
        tuple(slice(n) for n in shape)
    ]


def cast_all(
    leaves: list[Any], inverse: Any, recipes: tuple[Quantised, ...]
) -> list[Any]:
    """Every leaf as fp8, given 1 / scale of each slice."""
    import jax.numpy as jnp

    out = []
    at = 0
    for x, q in zip(leaves, recipes, strict=True):
        own = inverse[at : at + q.count].reshape(q.grid)
        scaled = _loaded(x, q).astype(jnp.float32) * (
            over_blocks(own, q, x.shape) if q.block else own
        )
        at += q.count
        # 0 · (1 / 0) is NaN; vLLM's kernel clamps it to the largest value. Scales of blocks are never 0
        limited = jnp.where(
            jnp.isnan(scaled) & (not q.block),
            _LARGEST,
            jnp.clip(scaled, -_LARGEST, _LARGEST),
        )
        out.append(limited.astype(FP8))
    return out


def _loaded(x: Any, q: Quantised) -> Any:
    """The values as the engine's own loader would get them: after the rule's constant and cast, in its dtype."""
    import jax
    import jax.numpy as jnp

    if q.add:
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32)) + q.add
    for name in (q.cast, q.loaded):
        # not astype: XLA may leave out a cast down and up again
        if name and str(x.dtype) != name:
            x = jax.lax.reduce_precision(x.astype(jnp.float32), *BITS[name])
    return x


def replicated(sharding: Any) -> Any:
    """A sharding that holds everything on each device of this one."""
    import jax

    if len(sharding.device_set) == 1:
        return jax.sharding.SingleDeviceSharding(next(iter(sharding.device_set)))
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    raise Unsupported(
        f"parameters with a {type(sharding).__name__} can't be quantised",
        remedy="give them NamedShardings, e.g. those of jv.mesh(...)",
    )
