"""The decoder: one Flax NNX model for llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3 and olmo2.

From top to bottom: linear map, norm, attention, MLP, layer, decoder; then the pure functions that are compiled. Axes
are named by letters, in equations and shardings alike: b batch, t and s time, d model width, n heads, k key-value
heads, h head dimension, f MLP width, v vocabulary. Parameters keep their own dtype (master weights) and are cast where
they are used; norms, softmax and logits are always float32.
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

from jvlab.trainer import _rope
from jvlab.trainer._config import DecoderConfig
from jvlab.trainer._sharding import Layout

Params = Mapping[str, Any]
Array = jax.Array | np.ndarray
MASKED_SCORE = -0.7 * float(jnp.finfo(jnp.float32).max)  # attention score of masked positions; finite, to avoid NaN
_CHUNK = 2**26  # logits held at once when log-probabilities are computed: 256 MiB of float32
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


@dataclass(frozen=True)
class Runtime:
    """How the decoder computes: dtype of activations, sharding, rematerialisation."""

    dtype: str = "float32"
    layout: Layout | None = None
    remat: bool = False
    head_dtype: str | None = None  # of the output head; None: weights in `dtype`, logits summed and kept in float32

    @property
    def precision(self) -> jax.lax.Precision:
        """Full float32: accelerators default to fewer bits for it."""
        return jax.lax.Precision.HIGHEST if self.dtype == "float32" else jax.lax.Precision.DEFAULT

    def weight(self, parameter: nnx.Param, dtype: str | None = None) -> jax.Array:
        value, dtype = jnp.asarray(parameter[...]), dtype or self.dtype
        if self.layout is None:
            return value.astype(dtype)
        return self.layout.gathered(value, parameter.get_metadata()["letters"], dtype)

    def place(self, value: jax.Array, letters: str) -> jax.Array:
        return self.layout.activation(value, letters) if self.layout else value


def _parameter(shape: tuple[int, ...], letters: str) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape), letters=letters)


class Linear(nnx.Module):
    """An einsum with a kernel, `"btd,dnh->btnh"`; the kernel's letters name its axes."""

    def __init__(self, equation: str, shape: tuple[int, ...], runtime: Runtime, bias: bool = False) -> None:
        self.equation, self.runtime = equation, runtime
        self.out = equation.partition("->")[2]
        letters = equation.partition("->")[0].partition(",")[2]
        self.kernel = _parameter(shape, letters)
        if bias:
            sizes = dict(zip(letters, shape, strict=True))
            self.bias = _parameter(tuple(sizes[c] for c in self.out[2:]), self.out[2:])
        self.biased = bias

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.einsum(self.equation, x, self.runtime.weight(self.kernel), precision=self.runtime.precision)
        if self.biased:
            y = y + self.runtime.weight(self.bias)
        return self.runtime.place(y, self.out)


class Norm(nnx.Module):
    """RMS norm over the last axis; gemma scales by 1 + w."""

    def __init__(self, width: int, config: DecoderConfig) -> None:
        self.scale = _parameter((width,), "-")
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * (self.scale[...].astype(jnp.float32) + self.offset)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, runtime: Runtime) -> None:
        self.config, self.runtime = config, runtime
        d, n, k, h = config.width, config.heads, config.kv_heads, config.head_dim
        self.q = Linear("btd,dnh->btnh", (d, n, h), runtime, config.qkv_bias)
        self.k = Linear("btd,dkh->btkh", (d, k, h), runtime, config.qkv_bias)
        self.v = Linear("btd,dkh->btkh", (d, k, h), runtime, config.qkv_bias)
        self.o = Linear("btnh,nhd->btd", (n, h, d), runtime, config.o_bias)
        if config.head_norms or config.whole_norms:
            self.q_norm = Norm(h if config.head_norms else n * h, config)
            self.k_norm = Norm(h if config.head_norms else k * h, config)

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], visible: jax.Array) -> jax.Array:
        config, q, k, v = self.config, self.q(x), self.k(x), self.v(x)
        if config.head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        elif config.whole_norms:
            q = self.q_norm(q.reshape(*x.shape[:2], -1)).reshape(q.shape)
            k = self.k_norm(k.reshape(*x.shape[:2], -1)).reshape(k.shape)
        q, k = _rope.rotate(q, rope), _rope.rotate(k, rope)
        q = q.reshape(*q.shape[:2], config.kv_heads, -1, config.head_dim)
        einsum = partial(jnp.einsum, precision=self.runtime.precision)
        scores = einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * config.attention_scale
        scores = _softcap(scores, config.attention_softcap)
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, MASKED_SCORE), axis=-1)
        mixed = einsum("bkgts,bskh->btkgh", weights.astype(x.dtype), v)
        return self.o(mixed.reshape(*x.shape[:2], config.heads, config.head_dim))


class Mlp(nnx.Module):
    """Gated feed-forward block."""

    def __init__(self, config: DecoderConfig, runtime: Runtime) -> None:
        d, f = config.width, config.inner
        self.gate = Linear("btd,df->btf", (d, f), runtime, config.mlp_bias)
        self.up = Linear("btd,df->btf", (d, f), runtime, config.mlp_bias)
        self.down = Linear("btf,fd->btd", (f, d), runtime, config.mlp_bias)
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(_ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """Attention and MLP with residual connections, each with a norm before it, after it, or both."""

    def __init__(self, config: DecoderConfig, runtime: Runtime) -> None:
        self.config = config
        self.attn, self.mlp = Attention(config, runtime), Mlp(config, runtime)
        if config.pre_norms:
            self.attn_norm, self.mlp_norm = Norm(config.width, config), Norm(config.width, config)
        if config.post_norms:
            self.post_attn_norm, self.post_mlp_norm = Norm(config.width, config), Norm(config.width, config)

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], visible: jax.Array) -> jax.Array:
        before, after = self.config.pre_norms, self.config.post_norms
        y = self.attn(self.attn_norm(x) if before else x, rope, visible)
        x = x + (self.post_attn_norm(y) if after else y)
        y = self.mlp(self.mlp_norm(x) if before else x)
        return x + (self.post_mlp_norm(y) if after else y)


class Embedding(nnx.Module):
    """The table of token vectors."""

    def __init__(self, config: DecoderConfig) -> None:
        self.embedding = _parameter((config.vocab, config.width), "vd")


class Decoder(nnx.Module):
    """Tokens to logits. Its parameters' paths are the Policy layout of jvlab/rules/_builtin_texts.py."""

    def __init__(self, config: DecoderConfig, runtime: Runtime) -> None:
        self.config, self.runtime = config, runtime
        self.embed = Embedding(config)
        self.layers = nnx.List([Layer(config, runtime) for _ in range(config.layers)])
        self.final_norm = Norm(config.width, config)
        if not config.tied:
            self.lm_head = Linear("btd,dv->btv", (config.width, config.vocab), runtime)

    def hidden(self, tokens: Array, positions: Array, mask: Array, kept: list[jax.Array] | None = None) -> jax.Array:
        """The output layer's input, [B, T, d]. `mask` [B, T] is False on padding, which is not attended to.

        The residual stream after each layer is appended to `kept`, if given.
        """
        config, runtime = self.config, self.runtime
        x = jnp.take(runtime.weight(self.embed.embedding), tokens, axis=0)
        x = runtime.place(x * jnp.asarray(config.embedding_scale, x.dtype), "btd")
        ropes = [_rope.tables(rope, positions) for rope in config.ropes]
        visible = {window: _visible(positions, mask, window) for window in dict.fromkeys(config.windows)}
        step = nnx.remat(Layer.__call__) if runtime.remat else Layer.__call__
        for layer, rope, window in zip(self.layers, config.layer_ropes, config.windows, strict=True):
            x = step(layer, x, ropes[rope], visible[window])
            if kept is not None:
                kept.append(x)
        return self.final_norm(x)

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
        precision = jax.lax.Precision.HIGHEST if dtype == "float32" else self.runtime.precision
        x = x.astype(kernel.dtype)
        out = jnp.einsum(equation, x, kernel, precision=precision, preferred_element_type=jnp.float32)
        if dtype is not None:
            out = out.astype(dtype).astype(jnp.float32)  # rounded like the logits of an engine with this head dtype
        return _softcap(self.runtime.place(out, "btv"), self.config.logit_softcap)


def _softcap(x: jax.Array, cap: float | None) -> jax.Array:
    return x if cap is None else jnp.tanh(x / cap) * cap


def _visible(positions: Array, mask: Array, window: int | None) -> jax.Array:
    """The attention mask [B, T, S]: causal, without padding, and within the window."""
    order = jnp.arange(positions.shape[1])
    visible = (order[:, None] >= order[None, :])[None] & mask[:, None, :]
    if window is not None:
        visible &= positions[:, :, None] - positions[:, None, :] < window
    return visible


# ------------------------------------------------------------------------------------------------ pure functions


@lru_cache(maxsize=64)
def abstract(config: DecoderConfig, runtime: Runtime) -> tuple[nnx.GraphDef, nnx.State]:
    """The decoder's structure and the shapes of its parameters; nothing is allocated."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, runtime)))
    return graph, state


def parameter_letters(config: DecoderConfig) -> dict[tuple[str, ...], tuple[str, tuple[int, ...]]]:
    """{path: (letters of its axes, shape)} of every parameter, in the decoder's order."""
    _, state = abstract(config, Runtime())
    return {
        tuple(map(str, path)): (leaf.get_metadata()["letters"], tuple(leaf.get_value().shape))
        for path, leaf in nnx.to_flat_state(state)
    }


def build(params: Params, config: DecoderConfig, runtime: Runtime) -> Decoder:
    """The decoder with these parameters in it: a nested dict, its layers under "0", "1", …"""
    graph, _ = abstract(config, runtime)
    layers = {int(index): layer for index, layer in params["layers"].items()}
    return nnx.merge(graph, {**params, "layers": layers})


def positions_of(mask: Array) -> jax.Array:
    """Positions that count real tokens only, so that padding on either side has no effect."""
    return jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)


def logits(
    params: Params,
    config: DecoderConfig,
    tokens: Array,
    positions: Array | None = None,
    mask: Array | None = None,
    runtime: Runtime = Runtime(),  # noqa: B008 - frozen
) -> jax.Array:
    """Float32 logits [B, T, v] of the token after each token. Pure."""
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask.astype(bool)
    positions = positions_of(mask) if positions is None else positions
    decoder = build(params, config, runtime)
    return decoder.unembed(decoder.head(), decoder.hidden(tokens, positions, mask))


def layer_states(params: Params, config: DecoderConfig, tokens: Array, runtime: Runtime) -> jax.Array:
    """The residual stream after each layer, float32 [layers, B, T, d]. Pure."""
    mask, kept = jnp.ones(tokens.shape, bool), []
    build(params, config, runtime).hidden(tokens, positions_of(mask), mask, kept)
    return jnp.stack(kept).astype(jnp.float32)


def logprobs(
    params: Params,
    config: DecoderConfig,
    tokens: Array,
    mask: Array | None = None,
    temperature: float | jax.Array = 1.0,
    with_entropy: bool = False,
    runtime: Runtime = Runtime(),  # noqa: B008 - frozen
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """log P of each token given those before it, float32 [B, T]; 0 for padding and each row's first token. Pure.

    Logits are computed in chunks of the sequence, and recomputed for the gradient, so that [B, T, v] never exists.
    `with_entropy` also returns the entropy of the distribution that each token was drawn from.
    """
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask.astype(bool)
    decoder = build(params, config, runtime)
    hidden = decoder.hidden(tokens, positions_of(mask), mask)[:, :-1]
    head, targets = decoder.head(), tokens[:, 1:]

    def chunk(kernel: jax.Array, x: jax.Array, target: jax.Array) -> jax.Array:
        scores = decoder.unembed((head[0], kernel), x) / temperature
        total = jax.nn.logsumexp(scores, axis=-1)
        # a sum over the vocabulary instead of a gather, so that each device reads only its own shard
        chosen = jnp.sum(jnp.where(jnp.arange(scores.shape[-1]) == target[..., None], scores, 0), axis=-1)
        out = [chosen - total]
        if with_entropy:
            out.append(total - jnp.sum(jnp.exp(scores - total[..., None]) * scores, axis=-1))
        return jnp.stack(out)

    found = _map_chunks(jax.checkpoint(chunk), head[1], hidden, targets, config.vocab)
    known = mask[:, 1:] & mask[:, :-1]
    found = jnp.pad(jnp.where(known, found, 0), ((0, 0), (0, 0), (1, 0)))
    return (found[0], found[1]) if with_entropy else found[0]


def _map_chunks(
    f: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    kernel: jax.Array,
    hidden: jax.Array,
    targets: Array,
    vocab: int,
) -> jax.Array:
    """Applies `f` to chunks of the sequence, as large as `_CHUNK` allows, one after the other."""
    batch, length = targets.shape
    size = max(1, _CHUNK // (batch * vocab))
    if size >= length:
        return f(kernel, hidden, jnp.asarray(targets))
    count = -(-length // size)
    pad = count * size - length
    x = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(batch, count, size, -1)
    y = jnp.pad(targets, ((0, 0), (0, pad))).reshape(batch, count, size)
    parts = jax.lax.map(lambda xy: f(kernel, *xy), (jnp.moveaxis(x, 1, 0), jnp.moveaxis(y, 1, 0)))
    return jnp.moveaxis(parts, 0, 2).reshape(parts.shape[1], batch, -1)[..., :length]
