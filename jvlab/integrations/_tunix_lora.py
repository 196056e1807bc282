"""LoRA actors of Tunix, which are made by qwix, as adapters of vLLM: `Adapters` turns one into the other and back.

qwix adapts a weight `w` by `w_lora_a` and `w_lora_b` beside it. Of an einsum "BTD,DNH->BTNH", a has the axes of w that
are summed over and the rank, (D, r), b the rank and the others, (r, N, H); the layer adds alpha / rank · x a b. Which
axis is which, and what PEFT calls the layer, is read from where w itself goes: (D, N, H) → q_proj's [N·H, D]. A weight
that holds several layers, as Gemma's key and value, has one a for them and a part of b for each.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jvlab._errors import ConfigError, Unsupported
from jvlab.layout._tree import flatten
from jvlab.layout._types import Binding, CheckpointTensor, Shape

PREFIX = "base_model.model."  # of every tensor in PEFT's files
A = "_lora_a"
B = "_lora_b"


class Adapter(dict[str, Any]):
    """An adapter by PEFT's names, alpha / rank multiplied into B: what `lab.connect` and `link.sync` take. A pytree."""

    def peft_tensors(self) -> list[CheckpointTensor]:
        return [
            CheckpointTensor(name, tuple(a.shape), str(a.dtype))
            for name, a in self.items()
        ]

    def is_zero(self) -> bool:
        """Whether it changes nothing yet, whatever A is."""
        return not any(bool(jnp.any(b)) for n, b in self.items() if ".lora_B." in n)

    @property
    def spec(self) -> Any:
        """What an error says about it."""
        return SimpleNamespace(
            rank=max(a.shape[0] for n, a in self.items() if ".lora_A." in n)
        )


jax.tree_util.register_pytree_with_keys(
    Adapter,
    lambda tree: ([(jax.tree_util.DictKey(k), tree[k]) for k in tree], tuple(tree)),
    lambda names, leaves: Adapter(zip(names, leaves, strict=True)),
)


@dataclass(frozen=True)
class Layer:
    """A linear layer of the checkpoint, [outputs, inputs], and the part of an adapted weight that it is."""

    weight: str  # path of the weight: layers.0.attn.q_proj.w
    module: str  # PEFT's name of the layer
    shape: Shape  # of the weight
    inputs: tuple[int, ...]  # the weight's axes, in the order of the layer's inputs
    outputs: tuple[int, ...]
    start: Shape  # of the part, on each axis of the weight
    sizes: Shape
    scale: float

    def peft(self, a: Any, b: Any) -> tuple[Any, Any]:
        """A [rank, inputs] and B [outputs, rank]."""
        kept, others = self._axes
        a = a.reshape(*(self.shape[d] for d in kept), -1)
        a = a.transpose(*(kept.index(d) for d in self.inputs), len(kept))
        b = b.reshape(-1, *(self.shape[d] for d in others))[self._part]
        b = b.transpose(0, *(1 + others.index(d) for d in self._ordered))
        rank = a.shape[-1]
        return a.reshape(-1, rank).T, b.reshape(rank, -1).T * self.scale

    def back(self, a: Any, b: Any, whole_b: Any) -> tuple[Any, Any]:
        """The inverse; `whole_b` is [rank, …] of all parts, of which this one is replaced."""
        kept, others = self._axes
        rank = a.shape[0]
        a = a.T.reshape(*(self.shape[d] for d in self.inputs), rank)
        a = a.transpose(*(self.inputs.index(d) for d in kept), len(kept))
        b = (b / self.scale).T.reshape(rank, *(self.sizes[d] for d in self._ordered))
        b = b.transpose(0, *(1 + self._ordered.index(d) for d in others))
        whole = whole_b.reshape(rank, *(self.shape[d] for d in others))
        return a, whole.at[self._part].set(b).reshape(whole_b.shape)

    @property
    def _axes(self) -> tuple[list[int], list[int]]:
        """The weight's axes that a has, and those of b, both as the weight has them."""
        kept = sorted(self.inputs)
        return kept, [d for d in range(len(self.shape)) if d not in kept]

    @property
    def _ordered(self) -> list[int]:
        """The axes of b in the order of the layer's outputs; those of which it takes one index come first."""
        single = [d for d in self._axes[1] if d not in self.outputs]
        return [*single, *self.outputs]

    @property
    def _part(self) -> tuple[slice, ...]:
        """This layer's part of b."""
        parts = (
            slice(self.start[d], self.start[d] + self.sizes[d]) for d in self._axes[1]
        )
        return (slice(None), *parts)


def layer_of(binding: Binding, scale: float) -> Layer:
    """The layer that a binding of an adapted weight fills."""
    axes = sorted(binding.axes, key=lambda axis: -axis.tensor_step)
    along = lambda dim: tuple(axis.leaf_dim for axis in axes if axis.tensor_dim == dim)
    used = [axis.leaf_dim for axis in axes]
    whole = (
        len(binding.tensor_shape) == 2
        and len(set(used)) == len(used)
        and all(axis.leaf_step == 1 for axis in axes)
        and not any(binding.tensor_start)
        and binding.tensor.endswith(".weight")
    )
    sizes = [1] * len(binding.leaf_shape)
    for axis in axes:
        sizes[axis.leaf_dim] = axis.size
    inputs = along(1)
    if not whole or any(sizes[d] != binding.leaf_shape[d] for d in inputs):
        raise Unsupported(
            f"the adapter of {binding.leaf} is not one of a whole linear layer: {binding.rule}",
            remedy="leave this weight out of the LoRA provider's module_path",
        )
    return Layer(
        binding.leaf,
        PREFIX + binding.tensor.removesuffix(".weight"),
        binding.leaf_shape,
        inputs,
        along(0),
        binding.leaf_start,
        tuple(sizes),
        scale,
    )


class Adapters:
    """Between an actor's LoRA parameters and PEFT's tensors.

    bindings   where the actor's other parameters go
    alpha      of all layers; None: as the actor's qwix provider has it
    """

    def __init__(
        self, actor: Any, bindings: Iterable[Binding], alpha: float | None
    ) -> None:
        lora = flatten(nnx.state(actor, nnx.LoRAParam)).arrays
        self.weights = sorted({path.removesuffix(A).removesuffix(B) for path in lora})
        ranks = {weight: lora[weight + A].shape[-1] for weight in self.weights}
        rules = () if alpha is not None else _rules(actor)
        self.layers = [
            layer_of(b, _scale(b.leaf, ranks[b.leaf], rules, alpha))
            for b in bindings
            if b.leaf in ranks
        ]
        if missing := set(self.weights) - {layer.weight for layer in self.layers}:
            raise Unsupported(
                f"no layer of the checkpoint is known for the adapter of {min(missing)}",
                remedy="leave this weight out of the LoRA provider's module_path",
            )
        self._peft = jax.jit(self._tensors)

    def adapter(self, params: Any) -> Adapter:
        """The adapter in these parameters; others among them are left out."""
        arrays = flatten(params).arrays
        names = [weight + end for weight in self.weights for end in (A, B)]
        if missing := [name for name in names if name not in arrays]:
            raise ConfigError(
                f"these parameters lack {missing[0]}, which the actor had",
                remedy="update_params(nnx.state(actor, nnx.LoRAParam))",
            )
        return Adapter(self._peft({name: arrays[name] for name in names}))

    def _tensors(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for layer in self.layers:
            a, b = layer.peft(arrays[layer.weight + A], arrays[layer.weight + B])
            out[f"{layer.module}.lora_A.weight"] = a
            out[f"{layer.module}.lora_B.weight"] = b
        return out

    def put(self, state: Any, adapter: Mapping[str, Any]) -> Any:
        """A state with the adapter in place of its LoRA parameters."""
        paths = dict(nnx.to_flat_state(state))
        found = {".".join(map(str, path)): path for path in paths}
        for layer in self.layers:
            at_a, at_b = (found[layer.weight + end] for end in (A, B))
            a, b = layer.back(
                adapter[f"{layer.module}.lora_A.weight"],
                adapter[f"{layer.module}.lora_B.weight"],
                paths[at_b][...],
            )
            paths[at_a] = paths[at_a].replace(a.reshape(paths[at_a].shape))
            paths[at_b] = paths[at_b].replace(b)
        return nnx.from_flat_state(paths)


# alpha, which qwix keeps in its provider and nowhere in the model -----------------------------------------------------


def _scale(weight: str, rank: int, rules: Sequence[Any], alpha: float | None) -> float:
    """alpha / rank of a weight's adapter."""
    if alpha is None:
        module = weight.rpartition(".")[0].replace(".", "/")
        alpha = next(
            (
                float(rule.alpha)
                for rule in rules
                if hasattr(rule, "alpha") and re.fullmatch(rule.module_path, module)
            ),
            None,
        )
    if alpha is None:
        raise ConfigError(
            f"alpha of the adapter of {weight} is not known: it is in no parameter",
            remedy="functools.partial(jv.integrations.tunix.Rollout, pool=pool, lora_alpha=16.0)",
        )
    return alpha / rank


def _rules(actor: Any) -> Sequence[Any]:
    """The rules of the LoraProvider in the closure of the actor's `__call__`, which qwix replaced."""
    import qwix

    seen: set[int] = set()
    left: list[Any] = [type(actor).__call__]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, qwix.LoraProvider):
            return item._rules
        if isinstance(item, functools.partial):
            left += [item.func, *item.args, *item.keywords.values()]
        for cell in getattr(item, "__closure__", None) or ():
            left.append(cell.cell_contents)
        left += [x for x in (getattr(item, "__self__", None),) if x is not None]
        left += item if isinstance(item, list | tuple) else []
    return ()
