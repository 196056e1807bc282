"""A tree of parameters as a quantised engine gets it: fp8 leaves and their scales, made on the devices that hold them.

    1. one program reads every leaf and returns the largest magnitude of each slice       amax, a few numbers
    2. here, in numpy: scale = amax / 448 and 1 / scale, per group (`layout/_formats.py`)
    3. a second program multiplies, clamps and casts; its results have the leaves' shardings, and live for one sync

The divisions are done here because XLA does not round them as vLLM does: a division by a constant becomes a product,
and on a GPU others are approximate by one bit (seen on an H200: scales off by one, two values in 2 million).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from jvlab._errors import LayoutError, Unsupported
from jvlab.layout._finite import Flawed
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import FP8, SCALES, Quantised, ValueTransform

FP8_MAX = np.float32(448)
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
        """The group of every slice of every leaf, in the order of the first program's result."""
        return np.concatenate([q.group_table().reshape(-1) for q in self.leaves])

    def arrays(self, given: Mapping[str, Any]) -> tuple[Mapping[str, Any], Naming]:
        """The arrays to send, by path, and how to name those of `given` that are not finite."""
        self._check(given)
        import jax

        values = [given[q.path] for q in self.leaves]
        largest, cast, everywhere = self._compiled(values)
        amax = np.asarray(largest(values), np.float32)
        scales, inverse = scales_of(amax, self._groups)
        flawed = self._not_finite(amax)
        parts = cast(values, jax.device_put(inverse, everywhere))
        sent = {q.path: part for q, part in zip(self.leaves, parts, strict=True)}
        return {**given, **sent, SCALES: jax.device_put(scales, everywhere)}, lambda found: named(found, flawed)

    def _check(self, given: Mapping[str, Any]) -> None:
        problems = []
        for q in self.leaves:
            array = given.get(q.path)
            if array is None:
                problems.append(f"{q.path}: was connected, is missing now")
            elif not hasattr(array, "addressable_shards") or not hasattr(array, "sharding"):
                raise Unsupported(
                    f"{q.path} is {type(array).__name__}: leaves of a quantised engine are quantised by JAX",
                    remedy="pass jax.Arrays, e.g. jax.device_put(x); torch tensors by jax.dlpack.from_dlpack(t)",
                )
            elif (str(array.dtype), tuple(array.shape)) != (q.source, self._shapes[q.path]):
                was = f"{q.source}{self._shapes[q.path]}"
                problems.append(f"{q.path}: connected as {was}, now {array.dtype}{tuple(array.shape)}")
            elif array.is_deleted():
                problems.append(f"{q.path}: its buffer was deleted or donated")
        if problems:
            raise LayoutError(
                f"{len(problems)} leaves differ from what was connected:\n  " + "\n  ".join(problems[:8]),
                remedy="pass the same tree, or connect again: link = lab.connect(params, pool)",
                problems=problems,
            )

    def _compiled(self, values: list[Any]) -> tuple[Any, Any, Any]:
        import jax

        shardings = tuple(x.sharding for x in values)
        if shardings not in self._programs:
            everywhere = replicated(shardings[0])
            largest = jax.jit(lambda leaves: amax_of(leaves, self.leaves), out_shardings=everywhere)
            cast = jax.jit(lambda leaves, inverse: cast_all(leaves, inverse, self.leaves), out_shardings=[*shardings])
            self._programs = {shardings: (largest, cast, everywhere)}
        return self._programs[shardings]

    def _not_finite(self, amax: np.ndarray) -> Flawed:
        """The leaves whose scale is not finite, and so not their values as the loader gets them."""
        out, at = set(), 0
        for q in self.leaves:
            if not np.isfinite(amax[at : at + len(q.groups)]).all():
                out.add((q.path, ValueTransform(q.source, q.loaded, q.add, q.cast)))
            at += len(q.groups)
        return out


def sent_arrays(plan: TransferPlan, given: Mapping[str, Any]) -> tuple[Mapping[str, Any], Naming]:
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
    if not any(leaf == SCALES for leaf, _ in found):
        return found
    return {(leaf, x) for leaf, x in found if leaf != SCALES} | flawed


def scales_of(amax: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale of each group, and 1 / scale for each slice; float32, each operation rounded once, as vLLM does."""
    largest = np.zeros(int(groups.max()) + 1, np.float32)
    used = groups >= 0
    with np.errstate(all="ignore"):
        np.maximum.at(largest, groups[used], amax[used])  # NaN stays NaN
        scales = largest / FP8_MAX
        inverse = np.where(used, np.float32(1) / scales[groups], np.float32(1)).astype(np.float32)
    return scales, inverse


def amax_of(leaves: list[Any], recipes: tuple[Quantised, ...]) -> Any:
    """The largest magnitude of each slice of each leaf, as one vector of float32."""
    import jax.numpy as jnp

    out = []
    for x, q in zip(leaves, recipes, strict=True):
        inner = tuple(d for d, n in enumerate(q.grid) if n == 1)
        out.append(jnp.max(jnp.abs(_loaded(x, q)), axis=inner).astype(jnp.float32).reshape(-1))
    return jnp.concatenate(out)


def cast_all(leaves: list[Any], inverse: Any, recipes: tuple[Quantised, ...]) -> list[Any]:
    """Every leaf as fp8, given 1 / scale of each slice."""
    import jax.numpy as jnp

    out, at = [], 0
    for x, q in zip(leaves, recipes, strict=True):
        scaled = _loaded(x, q).astype(jnp.float32) * inverse[at : at + len(q.groups)].reshape(q.grid)
        at += len(q.groups)
        # 0 · (1 / 0) is NaN; vLLM's kernel clamps it to the largest value
        limited = jnp.where(jnp.isnan(scaled), FP8_MAX, jnp.clip(scaled, -FP8_MAX, FP8_MAX))
        out.append(limited.astype(FP8))
    return out


def _loaded(x: Any, q: Quantised) -> Any:
    """The values as the engine's own loader would get them: after the rule's constant and cast, in its dtype."""
    import jax
    import jax.numpy as jnp

    if q.add:
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32)) + q.add
    for name in (q.cast, q.loaded):
        if name and str(x.dtype) != name:  # not astype: XLA may leave out a cast down and up again
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
