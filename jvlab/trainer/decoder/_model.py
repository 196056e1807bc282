"""The decoder: one Flax NNX model for llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3, olmo2, mixtral, qwen3_moe.

From top to bottom: norm, attention, MLP, layer, decoder; then the pure functions that are compiled. Linear maps are in
_runtime.py, mixtures of experts in _experts.py. Axes are named by letters, in equations and shardings alike: b batch, t
and s time, d model width, n heads, k key-value heads, h head dimension, f MLP width, v vocabulary, l layers. Parameters
keep their own dtype (master weights) and are cast where they are used; norms, softmax and logits are always float32.

Layers are scanned: each of their parameters is one leaf with all layers stacked in it, and a program holds one layer
(of each kind, where kinds alternate), however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jvlab.trainer.decoder import _attention, _rope
from jvlab.trainer.decoder._attention import softcap
from jvlab.trainer.decoder._config import ACTIVATIONS, DecoderConfig
from jvlab.trainer.decoder._experts import Experts, Routes
from jvlab.trainer.decoder._runtime import Linear, Runtime, parameter

Params = Mapping[str, Any]
Array = jax.Array | np.ndarray
# logits held at once when log-probabilities are computed: 256 MiB of float32
CHUNK_LOGITS = 2**26


class Norm(nnx.Module):
    """RMS norm over the last axis; gemma scales by 1 + w."""

    def __init__(self, width: int, config: DecoderConfig, layers: int = 0) -> None:
        self.scale = parameter((width,), "-", layers)
        self.eps = config.norm_eps
        self.offset = config.norm_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(
            jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps
        )
        return (wide * (self.scale[...].astype(jnp.float32) + self.offset)).astype(
            x.dtype
        )


@dataclass(frozen=True)
class TokenRows:
    """What attention needs to know of a batch's rows. `segments` numbers the samples of a row; 0 is padding."""

    segments: jax.Array
    positions: jax.Array
    ropes: tuple[tuple[jax.Array, jax.Array], ...]
    most: int = 1  # samples in a row


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, runtime: Runtime) -> None:
        self.config = config
        self.runtime = runtime
        d = config.width
        n = config.heads
        k = config.kv_heads
        h = config.head_dim
        linear = partial(Linear, runtime=runtime, layers=config.layers)
        self.q = linear("btd,dnh->btnh", (d, n, h), bias=config.qkv_bias, name="q")
        self.k = linear("btd,dkh->btkh", (d, k, h), bias=config.qkv_bias, name="k")
        self.v = linear("btd,dkh->btkh", (d, k, h), bias=config.qkv_bias, name="v")
        self.o = linear("btnh,nhd->btd", (n, h, d), bias=config.o_bias, name="o")
        if config.head_norms or config.whole_norms:
            self.q_norm = Norm(h if config.head_norms else n * h, config, config.layers)
            self.k_norm = Norm(h if config.head_norms else k * h, config, config.layers)

    def __call__(
        self, x: jax.Array, rows: TokenRows, kind: tuple[int | None, int]
    ) -> jax.Array:
        config = self.config
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        if config.head_norms:
            q = self.q_norm(q)
            k = self.k_norm(k)
        elif config.whole_norms:
            q = self.q_norm(q.reshape(*x.shape[:2], -1)).reshape(q.shape)
            k = self.k_norm(k.reshape(*x.shape[:2], -1)).reshape(k.shape)
        window, rope = kind
        q = _rope.rotate(q, rows.ropes[rope])
        k = _rope.rotate(k, rows.ropes[rope])
        choice, scores = self.runtime.attention(config, window, x.shape[1])
        return self.o(
            _attention.attend(
                choice.form, q, k, v, rows.segments, rows.positions, scores, rows.most
            )
        )


class Mlp(nnx.Module):
    """Gated feed-forward block."""

    def __init__(self, config: DecoderConfig, runtime: Runtime) -> None:
        d = config.width
        f = config.inner
        linear = partial(
            Linear, runtime=runtime, bias=config.mlp_bias, layers=config.layers
        )
        self.gate = linear("btd,df->btf", (d, f), name="gate")
        self.up = linear("btd,df->btf", (d, f), name="up")
        self.down = linear("btf,fd->btd", (f, d), name="down")
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """Attention and MLP or experts, with residual connections, each with a norm before it, after it, or both."""

    def __init__(self, config: DecoderConfig, runtime: Runtime) -> None:
        self.config = config
        self.attn = Attention(config, runtime)
        if config.experts:
            self.moe = Experts(config, runtime)
        else:
            self.mlp = Mlp(config, runtime)
        norm = lambda: Norm(config.width, config, config.layers)
        if config.pre_norms:
            self.attn_norm, self.mlp_norm = norm(), norm()
        if config.post_norms:
            self.post_attn_norm, self.post_mlp_norm = norm(), norm()

    def __call__(
        self,
        x: jax.Array,
        rows: TokenRows,
        kind: tuple[int | None, int],
        routes: Routes | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Its output, and of experts how many tokens chose each, [e].

        `kind` is the layer's window and rotary embedding; its parameters and `routes` are those of one layer.
        """
        before = self.config.pre_norms
        after = self.config.post_norms
        y = self.attn(self.attn_norm(x) if before else x, rows, kind)
        x = x + (self.post_attn_norm(y) if after else y)
        y = self.mlp_norm(x) if before else x
        load = None
        if self.config.experts:
            y, load = self.moe(y, rows.segments > 0, routes)
        else:
            y = self.mlp(y)
        return x + (self.post_mlp_norm(y) if after else y), load


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _wide_product(
    equation: str, precision: Any, x: jax.Array, kernel: jax.Array
) -> jax.Array:
    """An einsum summed into float32, whose gradient is rounded to the dtype of its inputs before it is multiplied.

    By itself, JAX would multiply the gradient in float32, several times slower than the product itself.
    """
    return jnp.einsum(
        equation, x, kernel, precision=precision, preferred_element_type=jnp.float32
    )


def _wide_forward(
    equation: str, precision: Any, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, Any]:
    return _wide_product(equation, precision, x, kernel), (x, kernel)


def _wide_backward(
    equation: str, precision: Any, kept: Any, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    _, back = jax.vjp(
        lambda x, kernel: jnp.einsum(equation, x, kernel, precision=precision), *kept
    )
    return back(gradient.astype(kept[0].dtype))


_wide_product.defvjp(_wide_forward, _wide_backward)


class Embedding(nnx.Module):
    """The table of token vectors."""

    def __init__(self, config: DecoderConfig) -> None:
        self.embedding = parameter((config.vocab, config.width), "vd")


class Decoder(nnx.Module):
    """Tokens to logits. Its parameters' paths are the Policy layout of jvlab/layout/rules/_builtin_texts.py."""

    def __init__(self, config: DecoderConfig, runtime: Runtime) -> None:
        self.config = config
        self.runtime = runtime
        self.embed = Embedding(config)
        self.layers = Layer(config, runtime)  # all of them, stacked
        self.final_norm = Norm(config.width, config)
        if not config.tied:
            self.lm_head = Linear("btd,dv->btv", (config.width, config.vocab), runtime)

    def hidden(
        self,
        tokens: Array,
        positions: Array,
        segments: Array,
        most: int = 1,
        routes: Routes | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """The output layer's input, [B, T, d], and how many tokens chose each expert, float32 [layers, e].

        `segments` [B, T] numbers a row's samples from 1; 0 is padding. With `most` samples a row; one sample begins
        its row. The second is None where there are no experts. `routes` are of every layer, [B, T, layers, c].
        """
        x, _, loads = self._through_layers(
            tokens, positions, segments, False, most, routes
        )
        return self.final_norm(x), loads

    def states(self, tokens: Array, positions: Array, segments: Array) -> jax.Array:
        """The residual stream after each layer, [layers, B, T, d]."""
        states = self._through_layers(tokens, positions, segments, True, 1)[1]
        assert states is not None
        return states

    def _through_layers(
        self,
        tokens: Array,
        positions: Array,
        segments: Array,
        keep: bool,
        most: int,
        routes: Routes | None = None,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """The last layer's output, with `keep` those of all layers, and the loads of experts."""
        config = self.config
        runtime = self.runtime
        x = jnp.take(runtime.weight(self.embed.embedding), tokens, axis=0)
        x = runtime.place(x * jnp.asarray(config.embedding_scale, x.dtype), "btd")
        ropes = tuple(_rope.tables(rope, positions) for rope in config.ropes)
        rows = TokenRows(
            jnp.asarray(segments, jnp.int32), jnp.asarray(positions), ropes, most
        )
        graph, parameters = nnx.split(self.layers)
        stacked = (
            parameters,
            jax.tree.map(lambda given: jnp.moveaxis(jnp.asarray(given), 2, 0), routes),
        )
        kinds = list(zip(config.windows, config.layer_ropes, strict=True))

        def step(
            x: jax.Array, one: Any, kind: tuple[int | None, int]
        ) -> tuple[jax.Array, jax.Array | None]:
            own, given = one
            return nnx.merge(graph, own)(x, rows, kind, given)

        def run(
            x: jax.Array, group: Any, kinds: list[tuple[int | None, int]]
        ) -> tuple[jax.Array, Any]:
            found = []  # of each layer: its output, if that is asked for, and its load
            for at, kind in enumerate(kinds):
                one = jax.tree.map(lambda leaf, at=at: leaf[at], group)
                x, load = runtime.rematerialised(partial(step, kind=kind), remat)(
                    x, one
                )
                found.append((x if keep else None, load))
            return x, jax.tree.map(
                lambda *each: jnp.stack(each), *found
            ) if found else None

        remat = runtime.remat_of(config, *tokens.shape)
        period = config.period
        whole = config.layers - config.layers % period
        groups = jax.tree.map(
            lambda leaf: leaf[:whole].reshape(-1, period, *leaf.shape[1:]), stacked
        )
        x, found = jax.lax.scan(
            lambda x, group: run(x, group, kinds[:period]), x, groups
        )
        found = jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), found)
        x, more = run(
            x, jax.tree.map(lambda leaf: leaf[whole:], stacked), kinds[whole:]
        )
        if more is not None:
            found = jax.tree.map(lambda *each: jnp.concatenate(each), found, more)
        return x, *found

    def head(self) -> tuple[str, jax.Array]:
        """The output layer: an einsum equation and its weights."""
        dtype = self.runtime.head_dtype
        if self.config.tied:
            return "btd,vd->btv", self.runtime.weight(self.embed.embedding, dtype)
        return self.lm_head.equation, self.runtime.weight(self.lm_head.kernel, dtype)

    def unembed(self, head: tuple[str, jax.Array], x: jax.Array) -> jax.Array:
        """Float32 logits of hidden states."""
        equation, kernel = head
        dtype = self.runtime.head_dtype
        precision = (
            jax.lax.Precision.HIGHEST if dtype == "float32" else self.runtime.precision
        )
        out: Any = _wide_product(equation, precision, x.astype(kernel.dtype), kernel)
        if dtype is not None:
            # rounded like the logits of an engine with this head dtype
            out = out.astype(dtype).astype(jnp.float32)
        return softcap(self.runtime.place(out, "btv"), self.config.logit_softcap)


# ------------------------------------------------------------------------------------------------ pure functions


@lru_cache(maxsize=64)
def abstract(config: DecoderConfig, runtime: Runtime) -> tuple[nnx.GraphDef, nnx.State]:
    """The decoder's structure and the shapes of its parameters; nothing is allocated."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, runtime)))
    return graph, state


def parameter_letters(
    config: DecoderConfig,
) -> dict[tuple[str, ...], tuple[str, tuple[int, ...]]]:
    """{path: (letters of its axes, shape)} of every parameter, in the decoder's order."""
    _, state = abstract(config, Runtime())
    return {
        tuple(map(str, path)): (
            leaf.get_metadata()["letters"],
            tuple(leaf.get_value().shape),
        )
        for path, leaf in nnx.to_flat_state(state)
    }


def build(params: Params, config: DecoderConfig, runtime: Runtime) -> Decoder:
    """The decoder with these parameters in it: a nested dict, its layers stacked."""
    graph, _ = abstract(config, runtime)
    return nnx.merge(graph, dict(params))


def positions_of(segments: Array) -> jax.Array:
    """Positions that count the tokens of each sample, so that padding on either side has no effect.

    `segments` as for `logprobs`; a mask is one sample a row.
    """
    segments = jnp.asarray(segments).astype(jnp.int32)
    counted = jnp.cumsum(segments > 0, axis=-1)
    before = jnp.pad(jax.lax.cummax(segments, axis=1), ((0, 0), (1, 0)))[:, :-1]
    # of its sample
    first = jax.lax.cummax(jnp.where(segments > before, counted, 0), axis=1)
    return jnp.maximum(counted - jnp.maximum(first, 1), 0)


def logits(
    params: Params,
    config: DecoderConfig,
    tokens: Array,
    mask: Array | None = None,
    runtime: Runtime = Runtime(),  # noqa: B008 - frozen
) -> jax.Array:
    """Float32 logits [B, T, v] of the token after each token. Pure."""
    real = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask, bool)
    decoder = build(params, config, runtime)
    places, back = _first(real)
    segments = places(real.astype(jnp.int32))
    hidden, _ = decoder.hidden(
        places(jnp.asarray(tokens)), positions_of(segments), segments
    )
    return decoder.unembed(decoder.head(), back(hidden))


def _first(
    mask: jax.Array,
) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """Functions that move what is real of each row to its beginning, and back: a fused kernel needs it there."""
    order = jnp.argsort(~mask, axis=1, stable=True)
    inverse = jnp.argsort(order, axis=1)
    take = lambda x, at: jnp.take_along_axis(
        x, at.reshape(*at.shape, *[1] * (x.ndim - 2)), axis=1
    )
    return lambda x: take(x, order), lambda x: take(x, inverse)


def layer_states(
    params: Params, config: DecoderConfig, tokens: Array, runtime: Runtime
) -> jax.Array:
    """The residual stream after each layer, float32 [layers, B, T, d]. Pure."""
    segments = jnp.ones(tokens.shape, jnp.int32)
    states = build(params, config, runtime).states(
        tokens, positions_of(segments), segments
    )
    return states.astype(jnp.float32)


def logprobs(
    params: Params,
    config: DecoderConfig,
    tokens: Array,
    mask: Array | None = None,
    temperature: float | jax.Array = 1.0,
    with_entropy: bool = False,
    runtime: Runtime = Runtime(),  # noqa: B008 - frozen
    segments: Array | None = None,
    most: int = 1,
    with_loads: bool = False,
    routes: Routes | None = None,
) -> Any:
    """log P of each token given those before it, float32 [B, T]; 0 for padding and each sample's first token. Pure.

    `mask` is False on padding. For rows of several samples, `segments` numbers those of each row from 1, 0 being
    padding, and `most` is how many a row may hold. Logits are computed in chunks of the sequence, and recomputed for
    the gradient, so that [B, T, v] never exists. `with_entropy` also returns the entropy of the distribution that each
    token was drawn from, `with_loads` how many tokens chose each expert, [layers, e], or None if there are no experts.
    `routes` are experts chosen by an engine, [B, T, layers, c].
    """
    back: Callable[[jax.Array], jax.Array] = lambda x: x
    tokens = jnp.asarray(tokens)
    if segments is None:
        mask = (
            jnp.ones(tokens.shape, bool)
            if mask is None
            else jnp.asarray(mask).astype(bool)
        )
        places, back = _first(mask)
        tokens = places(tokens)
        segments = places(mask.astype(jnp.int32))
        routes = jax.tree.map(lambda given: places(jnp.asarray(given)), routes)
    segments = jnp.asarray(segments).astype(jnp.int32)
    decoder = build(params, config, runtime)
    hidden, loads = decoder.hidden(
        tokens, positions_of(segments), segments, most, routes
    )
    hidden = hidden[:, :-1]
    head = decoder.head()
    targets = tokens[:, 1:]

    def chunk(kernel: jax.Array, x: jax.Array, target: jax.Array) -> jax.Array:
        scores = decoder.unembed((head[0], kernel), x) / temperature
        total = jax.nn.logsumexp(scores, axis=-1)
        # a sum over the vocabulary instead of a gather, so that each device reads only its own shard
        chosen = jnp.sum(
            jnp.where(jnp.arange(scores.shape[-1]) == target[..., None], scores, 0),
            axis=-1,
        )
        out = [chosen - total]
        if with_entropy:
            out.append(
                total - jnp.sum(jnp.exp(scores - total[..., None]) * scores, axis=-1)
            )
        return jnp.stack(out)

    found = _map_chunks(jax.checkpoint(chunk), head[1], hidden, targets, config.vocab)
    known = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    found = jnp.pad(jnp.where(known, found, 0), ((0, 0), (0, 0), (1, 0)))
    out = [back(found[0])] + [back(found[1])] * with_entropy + [loads] * with_loads
    return tuple(out) if len(out) > 1 else out[0]


def _map_chunks(
    f: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    kernel: jax.Array,
    hidden: jax.Array,
    targets: Array,
    vocab: int,
) -> jax.Array:
    """Applies `f` to chunks of the sequence, as large as `CHUNK_LOGITS` allows, one after the other."""
    batch, length = targets.shape
    size = max(1, CHUNK_LOGITS // (batch * vocab))
    if size >= length:
        return f(kernel, hidden, jnp.asarray(targets))
    count = -(-length // size)
    pad = count * size - length
    x = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(batch, count, size, -1)
    y = jnp.pad(targets, ((0, 0), (0, pad))).reshape(batch, count, size)
    parts = jax.lax.map(
        lambda xy: f(kernel, *xy), (jnp.moveaxis(x, 1, 0), jnp.moveaxis(y, 1, 0))
    )
    return jnp.moveaxis(parts, 0, 2).reshape(parts.shape[1], batch, -1)[..., :length]
