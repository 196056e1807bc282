"""A mixture of experts: a router picks some of many MLPs for each token, and their results are weighed and added.

Every token reaches all of its experts: none is dropped for want of room, so that a token's result depends on no other
token. Tokens are sorted by expert, and one grouped product (`jax.lax.ragged_dot`) serves all experts of a device.

On a mesh the layer runs device by device (`jax.shard_map`). Experts are split over `ep`, their inner width over `tp`;
tokens are split over `ep` like a batch everywhere else, gathered here, and each device's share of the sum is scattered
back. Letters as in _model.py; besides, e experts, r the router's view of them (never split), c those chosen.

`Routes` replace the router's own choice by that of an engine, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jvlab._errors import ConfigError
from jvlab.trainer.decoder._config import ACTIVATIONS, DecoderConfig
from jvlab.trainer.decoder._runtime import Linear, Runtime, parameter
from jvlab.trainer.decoder._sharding import Layout, axes_of


class Routes(NamedTuple):
    """The experts that an engine chose: ids [..., c], in its order; -1 where the router chooses itself.

    Without `weights` those of the same experts come from this model's router, and its gradient too. With them, float32
    [..., c], they are constants: the router gets no gradient where they are used.
    """

    ids: jax.Array
    weights: jax.Array | None = None


def checked_routes(
    given: Sequence[Any] | None, shape: tuple[int, ...], config: DecoderConfig
) -> Routes | None:
    """Routes of tokens [B, T] from (ids,) or (ids, weights); ConfigError if they are not of this model."""
    if given is None:
        return None
    if not config.experts:
        raise ConfigError(
            f"{config.family} has no experts to replay", remedy="leave routes out"
        )
    parts: list[Any] = [np.asarray(part) for part in given]
    wanted = (*shape, config.layers, config.chosen)
    known = (
        all(part.shape == wanted for part in parts)
        and parts[0].min() >= -1
        and parts[0].max() < config.experts
    )
    if not known:
        raise ConfigError(
            f"routes of shapes {[part.shape for part in parts]}, ids from {parts[0].min()} to {parts[0].max()}",
            remedy=f"pass arrays of shape {wanted}, ids from -1 to {config.experts - 1}",
        )
    return Routes(*parts)


class ExpertKernel(nnx.Module):
    """One matrix of every expert, `e d f` or `e f d`."""

    def __init__(self, letters: str, shape: tuple[int, ...], layers: int) -> None:
        self.kernel = parameter(shape, letters, layers)


class Experts(nnx.Module):
    """Router and gated feed-forward experts."""

    def __init__(self, config: DecoderConfig, runtime: Runtime) -> None:
        self.config = config
        self.runtime = runtime
        d = config.width
        f = config.inner
        e = config.experts
        self.router = Linear("btd,dr->btr", (d, e), runtime, layers=config.layers)
        self.gate = ExpertKernel("edf", (e, d, f), config.layers)
        self.up = ExpertKernel("edf", (e, d, f), config.layers)
        self.down = ExpertKernel("efd", (e, f, d), config.layers)

    def __call__(
        self, x: jax.Array, real: jax.Array, routes: Routes | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The block's output, and how many of the `real` tokens chose each expert: float32 [e]."""
        ids, weights = route(self.router(x), self.config, routes)
        load = jnp.sum(
            jax.nn.one_hot(ids, self.config.experts) * real[..., None, None],
            axis=(0, 1, 2),
        )
        return self._mix(x, ids, weights), jax.lax.stop_gradient(load)

    def _mix(self, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        runtime = self.runtime
        kernels = [
            runtime.weight(part.kernel) for part in (self.gate, self.up, self.down)
        ]
        mix = partial(
            mixture,
            activation=ACTIVATIONS[self.config.activation],
            precision=runtime.precision,
        )
        if runtime.layout is None or runtime.layout.mesh.size == 1:
            return mix(x, ids, weights, *kernels)
        return _split(runtime.layout, mix, x, ids, weights, kernels)


def route(
    scores: jax.Array, config: DecoderConfig, routes: Routes | None = None
) -> tuple[jax.Array, jax.Array]:
    """The chosen experts of each token, best first or as `routes` say, and their weights in float32: both [b, t, c].

    Weights are the router's probabilities, or those of the chosen alone (`renormalised`).
    """
    shares = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)
    weights, ids = jax.lax.top_k(shares, config.chosen)
    if routes is not None:
        given = routes.ids.astype(ids.dtype)
        ids = jnp.where(given >= 0, given, ids)
        weights = jnp.take_along_axis(shares, ids, axis=-1)
    if config.renormalised:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    if routes is not None and routes.weights is not None:
        weights = jnp.where(
            routes.ids >= 0, jax.lax.stop_gradient(routes.weights), weights
        )
    return ids, weights


def mixture(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array],
    precision: jax.lax.Precision,
    first: jax.Array | int | None = None,
) -> jax.Array:
    """Σ_c weight_c · expert_c(x) of tokens x [b, t, d], over the experts in these kernels.

    Those are all experts, or the ones from number `first` on; another device adds the rest.
    """
    count = gate.shape[0]
    chosen = ids.shape[-1]
    flat = x.reshape(-1, x.shape[-1])
    wanted = ids.reshape(-1)
    if first is not None:
        wanted = wanted - first
        # the others come last
        wanted = jnp.where((wanted >= 0) & (wanted < count), wanted, count)
    order = jnp.argsort(wanted, stable=True)
    back = jnp.argsort(order)
    sizes = jnp.bincount(wanted, length=count + 1)[:count].astype(jnp.int32)
    # What a grouped product returns for rows of no group is not defined, nor is its gradient.
    mine = jnp.arange(len(order)) < jnp.sum(sizes)
    clear = lambda rows: rows if first is None else jnp.where(mine[:, None], rows, 0)
    product = partial(jax.lax.ragged_dot, group_sizes=sizes, precision=precision)
    rows = clear(_permuted(jnp.repeat(flat, chosen, axis=0), order, back))
    inner = activation(product(rows, gate)) * product(rows, up)
    found = _permuted(clear(product(inner, down)), back, order).reshape(
        len(flat), chosen, -1
    )
    mixed = jnp.sum(
        found.astype(jnp.float32) * weights.reshape(len(flat), chosen, 1), axis=1
    )
    return mixed.astype(x.dtype).reshape(x.shape)


@jax.custom_vjp
def _permuted(rows: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """`rows[order]`; `back` is the inverse. The gradient is a permutation too, not a sum over scattered rows."""
    return rows[order]


def _permuted_forward(
    rows: jax.Array, order: jax.Array, back: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return rows[order], back


def _permuted_backward(
    back: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, None, None]:
    return gradient[back], None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


def _split(
    layout: Layout,
    mix: Callable[..., jax.Array],
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    kernels: list[jax.Array],
) -> jax.Array:
    """The mixture on a mesh, along which the tokens and the experts of a layer are split."""
    e, d, f = kernels[0].shape
    tokens = layout.activation_spec("btd", x.shape)  # of [b, t, …]
    gate = layout.whole("edf", (e, d, f))
    down = layout.whole("efd", (e, f, d))
    held = lambda spec, dim: axes_of(spec[dim]) if len(spec) > dim else ()
    experts_split = "ep" in held(gate, 0)
    inner_split = "tp" in held(gate, 2)
    tokens_split = experts_split and "ep" in held(tokens, 0)

    def local(
        x: jax.Array, ids: jax.Array, weights: jax.Array, *kernels: jax.Array
    ) -> jax.Array:
        if tokens_split:
            x, ids, weights = (
                jax.lax.all_gather(a, "ep", axis=0, tiled=True)
                for a in (x, ids, weights)
            )
        # each device adds its experts' share of the gradient, also of a permutation
        elif experts_split:
            x = jax.lax.pcast(x, "ep", to="varying")
        first = (
            jax.lax.axis_index("ep") * kernels[0].shape[0] if experts_split else None
        )
        y = mix(x, ids, weights, *kernels, first=first)
        if inner_split:
            y = jax.lax.psum(y, "tp")
        if tokens_split:
            return jax.lax.psum_scatter(y, "ep", scatter_dimension=0, tiled=True)
        return jax.lax.psum(y, "ep") if experts_split else y

    specs = (tokens, tokens, tokens, gate, gate, down)
    split = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=tokens)
    return split(x, ids, weights, *kernels)
