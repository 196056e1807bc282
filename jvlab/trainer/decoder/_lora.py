"""LoRA adapters as a tree of parameters: shapes, first values, PEFT's names, and the product that a merge adds.

Each adapted kernel W (in × out) gets A (in × r) and B (r × out): the layer computes x W + scale · (x A) B, where scale
is alpha / rank. B is zero at first, so that a new adapter changes nothing. Layers are stacked, as in the decoder.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jvlab._errors import ConfigError
from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.trainer._checks import check_number, check_whole
from jvlab.trainer.decoder._sharding import Layout

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."  # of every tensor in PEFT's files
_PATHS = {
    name: f"layers.{'attn' if name[0] in 'qkvo' else 'mlp'}.{name.removesuffix('_proj')}"
    for name in TARGETS
}


@dataclass(frozen=True)
class LoraModule:
    """One kind of adapted kernel, in all layers."""

    path: str  # of the linear map in the decoder: layers.attn.q
    into: str  # letters of the axes that it sums over: d
    out: str  # letters of its result: nh
    module: str  # in the checkpoint: model.layers.{i}.self_attn.q_proj

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.path.split("."))

    @property
    def target(self) -> str:
        return self.module.rpartition(".")[2]


@dataclass(frozen=True)
class LoraSpec:
    """What an adapter is, besides its values. Hashable, so that it can be part of a compiled program."""

    rank: int
    alpha: float
    modules: tuple[LoraModule, ...]

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / self.rank

    @property
    def names(self) -> frozenset[str]:
        """The decoder's names of the adapted maps: q, v, down."""
        return frozenset(m.keys[-1] for m in self.modules)

    @property
    def targets(self) -> tuple[str, ...]:
        """PEFT's names of the adapted modules."""
        return tuple(m.target for m in self.modules)


class LoraParams(dict[str, Any]):
    """An adapter's parameters: a nested dict of arrays, and in `spec` what they mean. A JAX pytree.

    >>> policy.with_lora(rank=4).lora
    LoraParams(rank 4, alpha 8, 7 targets, ... parameters)
    """

    def __init__(self, tree: Mapping[str, Any], spec: LoraSpec) -> None:
        super().__init__(tree)
        self.spec = spec

    def pair(self, module: LoraModule) -> tuple[Any, Any]:
        """A and B of one module, all layers stacked."""
        flat = flatten_dict(self)
        return flat[(*module.keys, "lora_a")], flat[(*module.keys, "lora_b")]

    def as_sent(self) -> LoraParams:
        """The same with `scale` multiplied into B: an engine holds it so, and keeps no scale."""
        return self if self.spec.scale == 1 else _scaled(self)

    def is_zero(self) -> bool:
        """Whether the adapter changes nothing yet, whatever A is."""
        return not any(bool(jnp.any(self.pair(m)[1])) for m in self.spec.modules)

    def peft_tensors(self) -> list[CheckpointTensor]:
        """The tensors of PEFT's file, in their order."""
        out = []
        for m in self.spec.modules:
            a, b = self.pair(m)
            rank = self.spec.rank
            into = (rank, math.prod(a.shape[1:-1]))
            back = (math.prod(b.shape[2:]), rank)
            for layer in range(a.shape[0]):
                name = PREFIX + m.module.replace("{i}", str(layer))
                for kind, shape in (("A", into), ("B", back)):
                    full = f"{name}.lora_{kind}.weight"
                    out.append(CheckpointTensor(full, shape, str(a.dtype)))
        return out

    def peft_rules(self) -> str:
        """The rules from these leaves to PEFT's tensors."""
        lines = []
        for m in self.spec.modules:
            into = " ".join(m.into)
            out = " ".join(m.out)
            one = lambda axes: f"({axes})" if " " in axes else axes
            lines.append(
                f"{m.path}.lora_a -> {PREFIX}{m.module}.lora_A.weight : i {into} r -> r {one(into)}"
            )
            lines.append(
                f"{m.path}.lora_b -> {PREFIX}{m.module}.lora_B.weight : i r {out} -> {one(out)} r"
            )
        return "\n".join(lines)

    def peft_config(self, base: str) -> dict[str, Any]:
        """The content of adapter_config.json."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.spec.rank,
            "lora_alpha": self.spec.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(self.spec.targets),
            "inference_mode": True,
        }

    def __repr__(self) -> str:
        spec = self.spec
        count = sum(leaf.size for leaf in jax.tree.leaves(self))
        return f"LoraParams(rank {spec.rank}, alpha {spec.alpha:g}, {len(spec.modules)} targets, {count:,} parameters)"


def _with_keys(
    tree: LoraParams,
) -> tuple[list[tuple[Any, Any]], tuple[tuple[str, ...], LoraSpec]]:
    keys = tuple(sorted(tree))
    return [(jax.tree_util.DictKey(k), tree[k]) for k in keys], (keys, tree.spec)


def _back(
    fixed: tuple[tuple[str, ...], LoraSpec], children: Iterable[Any]
) -> LoraParams:
    return LoraParams(dict(zip(fixed[0], children, strict=True)), fixed[1])


jax.tree_util.register_pytree_with_keys(LoraParams, _with_keys, _back)


def _scaled(tree: LoraParams) -> LoraParams:
    def times(path: Any, leaf: Any) -> Any:
        return (
            _times(tree.spec.scale, leaf.sharding)(leaf)
            if path[-1].key == "lora_b"
            else leaf
        )

    return jax.tree_util.tree_map_with_path(times, tree)


@functools.lru_cache(maxsize=256)
def _times(scale: float, where: Any) -> Callable[[Any], Any]:
    """Multiplies an array of this sharding, which the product keeps: a link's plan is made for it."""
    return jax.jit(
        lambda leaf: leaf * jnp.asarray(scale, leaf.dtype), out_shardings=where
    )


def lora_spec(
    rank: int,
    alpha: float | None,
    targets: str | Sequence[str] | None,
    bindings: Sequence[Binding],
    letters: Mapping[tuple[str, ...], tuple[str, tuple[int, ...]]],
) -> LoraSpec:
    """Checks what `Policy.with_lora` was given; `bindings` say what each kernel is called in the checkpoint."""
    check_whole("rank", rank)
    alpha = 2.0 * rank if alpha is None else alpha
    check_number("alpha", alpha, above=0.0)
    # experts are no linear maps
    has = [name for name in TARGETS if (*_PATHS[name].split("."), "kernel") in letters]
    if targets is None:
        targets = has
    elif isinstance(targets, str):
        targets = [targets]
    owners: dict[str, set[str]] = {}  # tensor -> leaves that fill a part of it
    for binding in bindings:
        owners.setdefault(binding.tensor, set()).add(binding.leaf)
    modules = []
    for name in dict.fromkeys(targets):
        if name not in has:
            raise ConfigError(
                f"target {name!r} is not a linear map of this model; experts and their router have no adapters",
                remedy=f"targets: {', '.join(has)}",
                target=name,
            )
        path = _PATHS[name]
        tensor = next(
            b.tensor
            for b in bindings
            if b.leaf == f"{path}.kernel" and b.leaf_start[0] == 0
        )
        if owners[tensor] != {f"{path}.kernel"}:
            raise ConfigError(
                f"target {name!r} is a part of {tensor}: PEFT has one adapter for the whole of it",
                remedy="leave it out of targets; maps that the checkpoint holds by themselves can be adapted",
                target=name,
            )
        module = tensor.removesuffix(".weight").replace(".0.", ".{i}.", 1)
        own = letters[(*path.split("."), "kernel")][0].removeprefix("l")
        into = 2 if name == "o_proj" else 1
        modules.append(LoraModule(path, own[:into], own[into:], module))
    if not modules:
        raise ConfigError("no targets", remedy=f"one or more of {', '.join(has)}")
    return LoraSpec(rank, float(alpha), tuple(modules))


def leaf_letters(
    spec: LoraSpec, params: Mapping[str, Any]
) -> dict[tuple[str, ...], tuple[str, tuple[int, ...]]]:
    """{path: (letters of its axes, shape)} of every leaf, for the base parameters `params`."""
    flat: Any = flatten_dict(dict(params))
    out = {}
    for m in spec.modules:
        layers, *sizes = flat[(*m.keys, "kernel")].shape
        into = tuple(sizes[: len(m.into)])
        rest = tuple(sizes[len(m.into) :])
        out[*m.keys, "lora_a"] = f"l{m.into}r", (layers, *into, spec.rank)
        out[*m.keys, "lora_b"] = f"lr{m.out}", (layers, spec.rank, *rest)
    return out


def first_values(
    spec: LoraSpec, params: Mapping[str, Any], layout: Layout, dtype: str, seed: int
) -> LoraParams:
    """A uniform within ± 1 / sqrt(inputs), as in PEFT, and B zero; sharded like the kernels they go with."""
    flat: dict[tuple[str, ...], Any] = {}
    for number, (path, (letters, shape)) in enumerate(
        leaf_letters(spec, params).items()
    ):
        bound = 1 / math.sqrt(math.prod(shape[1:-1])) if path[-1] == "lora_a" else 0.0
        where, _ = layout.parameter(letters, shape)
        make = jax.jit(
            functools.partial(_uniform, shape=shape, dtype=dtype, bound=bound),
            out_shardings=where,
        )
        flat[path] = make(jax.random.fold_in(jax.random.key(seed), number))
    return LoraParams(unflatten_dict(flat), spec)


def _uniform(
    key: jax.Array, shape: tuple[int, ...], dtype: str, bound: float
) -> jax.Array:
    if not bound:
        return jnp.zeros(shape, dtype)
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)


def combined(base: Mapping[str, Any], adapter: Mapping[str, Any]) -> dict[str, Any]:
    """One tree with the leaves of both: what the decoder with adapters takes. Nothing is copied."""
    return unflatten_dict(flatten_dict(dict(base)) | flatten_dict(dict(adapter)))


def merged(base: Mapping[str, Any], adapter: LoraParams) -> dict[str, Any]:
    """The base with scale · A B added to its kernels, in float32; rounded once, to the kernels' dtype."""
    spec = adapter.spec
    flat: Any = flatten_dict(dict(base))
    for m in spec.modules:
        path = (*m.keys, "kernel")
        flat[path] = _add(flat[path], *adapter.pair(m), spec.scale, m)
    return unflatten_dict(flat)


def _add(
    kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float, module: LoraModule
) -> jax.Array:
    equation = f"l{module.into}r,lr{module.out}->l{module.into}{module.out}"

    def add(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        wide = [x.astype(jnp.float32) for x in (a, b)]
        product = jnp.einsum(equation, *wide, precision=jax.lax.Precision.HIGHEST)
        return (kernel.astype(jnp.float32) + scale * product).astype(kernel.dtype)

    return jax.jit(add, out_shardings=kernel.sharding)(kernel, a, b)
