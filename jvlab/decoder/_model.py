"""The decoder: one Flax NNX model for llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3 and olmo2.

From top to bottom: linear map, norm, attention, MLP, layer, decoder; then the pure functions that are compiled. Axes
are named by letters, in equations and shardings alike: b batch, t and s time, d model width, n heads, k key-value
heads, h head dimension, f MLP width, v vocabulary, l layers. Parameters keep their own dtype (master weights) and are
cast where they are used; norms, softmax and logits are always float32.

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

from jvlab._errors import LayoutError
from jvlab.decoder import _attention, _rope
from jvlab.decoder._attention import Choice, Scores, softcap
from jvlab.decoder._config import DecoderConfig
from jvlab.decoder._sharding import Layout

Params = Mapping[str, Any]
Array = jax.Array | np.ndarray
CHUNK_LOGITS = 2**26  # logits held at once when log-probabilities are computed: 256 MiB of float32
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


# What is kept of a layer's activations for its gradient: all, the results of matrix products, only its input. With the
# last two, also what a fused attention kernel returned: as small as the input, and costly to compute again.
REMAT = ("none", "dots", "full")
_FUSED = "dot_product_attention_fwd"  # JAX's name for it


@dataclass(frozen=True)
class Runtime:
    """How the decoder computes: dtype of activations, sharding, rematerialisation."""

    dtype: str = "float32"
    layout: Layout | None = None
    remat: str = "none"  # or "auto": the first of REMAT whose activations fit into `room`
    head_dtype: str | None = None  # of the output head; None: weights in `dtype`, logits summed and kept in float32
    room: int = 0  # bytes

    @property
    def precision(self) -> jax.lax.Precision:
        """Full float32: accelerators default to fewer bits for it."""
        return jax.lax.Precision.HIGHEST if self.dtype == "float32" else jax.lax.Precision.DEFAULT

    def weight(self, parameter: nnx.Param, dtype: str | None = None) -> jax.Array:
        value, dtype = jnp.asarray(parameter[...]), dtype or self.dtype
        if self.layout is None:
            return value.astype(dtype)
        letters = parameter.get_metadata()["letters"]
        return self.layout.gathered(value, letters[len(letters) - value.ndim :], dtype)  # one of stacked layers: no l

    def attention(self, config: DecoderConfig, window: int | None, tokens: int) -> tuple[Choice, Scores]:
        """The form of attention over rows of this many tokens."""
        scores = Scores(config.attention_scale, config.attention_softcap, window, self.precision)
        devices = self.layout.mesh.size if self.layout else 1
        of = self.dtype, scores, config.head_dim, config.heads, tokens, devices
        return _attention.choose(self.platform, *of), scores

    @property
    def platform(self) -> str:
        return self.layout.mesh.devices.flat[0].platform if self.layout else jax.default_backend()

    def kept_bytes(self, config: DecoderConfig, rows: int, tokens: int, remat: str) -> int:
        """Bytes of activations that wait for their gradient on one device, of `rows` rows of `tokens` tokens."""
        products, everything, one = config.activations
        of = {"none": everything, "dots": products + one, "full": config.width + one}[remat]
        shards = self.layout.mesh.size if self.layout else 1
        here = -(-rows // min(rows, shards)) * tokens
        scores = 0
        if remat == "none" and self.attention(config, None, tokens)[0].form == "plain":
            scores = 8 * config.heads * tokens * here * config.layers
        return jnp.dtype(self.dtype).itemsize * of * here * config.layers + scores

    def remat_of(self, config: DecoderConfig, rows: int, tokens: int) -> str:
        """One of REMAT, for so many rows of so many tokens."""
        if self.remat != "auto":
            return self.remat
        # Keeping everything is slower than "dots" on a card: it takes longer to write and read than to compute again.
        kinds = REMAT if self.platform == "cpu" else REMAT[1:]
        fits = (r for r in kinds if self.kept_bytes(config, rows, tokens, r) <= self.room)
        return next(fits, REMAT[-1])

    def rematerialised(self, step: Callable[..., Any], remat: str) -> Callable[..., Any]:
        """A layer that keeps for its gradient what `remat` says."""
        if remat == "none":
            return step
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

        def kept(primitive: Any, *of: Any, **parameters: Any) -> Any:
            if primitive.name.startswith(_FUSED):
                return True
            return remat == "dots" and dots(primitive, *of, **parameters)

        return jax.checkpoint(step, policy=kept, prevent_cse=False)

    def place(self, value: jax.Array, letters: str) -> jax.Array:
        return self.layout.activation(value, letters) if self.layout else value


def _parameter(shape: tuple[int, ...], letters: str, layers: int = 0) -> nnx.Param:
    """A parameter; with `layers`, that of so many layers, stacked."""
    return nnx.Param(jnp.zeros((layers, *shape) if layers else shape), letters="l" * bool(layers) + letters)


class Linear(nnx.Module):
    """An einsum with a kernel, `"btd,dnh->btnh"`; the kernel's letters name its axes."""

    def __init__(
        self, equation: str, shape: tuple[int, ...], runtime: Runtime, bias: bool = False, layers: int = 0
    ) -> None:
        self.equation, self.runtime = equation, runtime
        self.out = equation.partition("->")[2]
        letters = equation.partition("->")[0].partition(",")[2]
        self.kernel = _parameter(shape, letters, layers)
        if bias:
            sizes = dict(zip(letters, shape, strict=True))
            self.bias = _parameter(tuple(sizes[c] for c in self.out[2:]), self.out[2:], layers)
        self.biased = bias

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.einsum(self.equation, x, self.runtime.weight(self.kernel), precision=self.runtime.precision)
        if self.biased:
            y = y + self.runtime.weight(self.bias)
        return self.runtime.place(y, self.out)


class Norm(nnx.Module):
    """RMS norm over the last axis; gemma scales by 1 + w."""

    def __init__(self, width: int, config: DecoderConfig, layers: int = 0) -> None:
        self.scale = _parameter((width,), "-", layers)
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * (self.scale[...].astype(jnp.float32) + self.offset)).astype(x.dtype)


@dataclass(frozen=True)
class Rows:
    """What attention needs to know of a batch's rows. `segments` numbers the samples of a row; 0 is padding."""

    segments: jax.Array
    positions: jax.Array
    ropes: tuple[tuple[jax.Array, jax.Array], ...]
    most: int = 1  # samples in a row


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, runtime: Runtime) -> None:
        self.config, self.runtime = config, runtime
        d, n, k, h = config.width, config.heads, config.kv_heads, config.head_dim
        linear = partial(Linear, runtime=runtime, layers=config.layers)
        self.q = linear("btd,dnh->btnh", (d, n, h), bias=config.qkv_bias)
        self.k = linear("btd,dkh->btkh", (d, k, h), bias=config.qkv_bias)
        self.v = linear("btd,dkh->btkh", (d, k, h), bias=config.qkv_bias)
        self.o = linear("btnh,nhd->btd", (n, h, d), bias=config.o_bias)
        if config.head_norms or config.whole_norms:
            self.q_norm = Norm(h if config.head_norms else n * h, config, config.layers)
            self.k_norm = Norm(h if config.head_norms else k * h, config, config.layers)

    def __call__(self, x: jax.Array, rows: Rows, kind: tuple[int | None, int]) -> jax.Array:
        config, q, k, v = self.config, self.q(x), self.k(x), self.v(x)
        if config.head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        elif config.whole_norms:
            q = self.q_norm(q.reshape(*x.shape[:2], -1)).reshape(q.shape)
            k = self.k_norm(k.reshape(*x.shape[:2], -1)).reshape(k.shape)
        window, rope = kind
        q, k = _rope.rotate(q, rows.ropes[rope]), _rope.rotate(k, rows.ropes[rope])
        choice, scores = self.runtime.attention(config, window, x.shape[1])
        return self.o(_attention.attend(choice.form, q, k, v, rows.segments, rows.positions, scores, rows.most))


class Mlp(nnx.Module):
    """Gated feed-forward block."""

    def __init__(self, config: DecoderConfig, runtime: Runtime) -> None:
        d, f = config.width, config.inner
        linear = partial(Linear, runtime=runtime, bias=config.mlp_bias, layers=config.layers)
        self.gate = linear("btd,df->btf", (d, f))
        self.up = linear("btd,df->btf", (d, f))
        self.down = linear("btf,fd->btd", (f, d))
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(_ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """Attention and MLP with residual connections, each with a norm before it, after it, or both."""

    def __init__(self, config: DecoderConfig, runtime: Runtime) -> None:
        self.config = config
        self.attn, self.mlp = Attention(config, runtime), Mlp(config, runtime)
        norm = lambda: Norm(config.width, config, config.layers)
        if config.pre_norms:
            self.attn_norm, self.mlp_norm = norm(), norm()
        if config.post_norms:
            self.post_attn_norm, self.post_mlp_norm = norm(), norm()

    def __call__(self, x: jax.Array, rows: Rows, kind: tuple[int | None, int]) -> jax.Array:
        """`kind` is the layer's window and rotary embedding; its parameters are those of one layer."""
        before, after = self.config.pre_norms, self.config.post_norms
        y = self.attn(self.attn_norm(x) if before else x, rows, kind)
        x = x + (self.post_attn_norm(y) if after else y)
        y = self.mlp(self.mlp_norm(x) if before else x)
        return x + (self.post_mlp_norm(y) if after else y)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _wide_product(equation: str, precision: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """An einsum summed into float32, whose gradient is rounded to the dtype of its inputs before it is multiplied.

    By itself, JAX would multiply the gradient in float32, several times slower than the product itself.
    """
    return jnp.einsum(equation, x, kernel, precision=precision, preferred_element_type=jnp.float32)


def _wide_forward(equation: str, precision: Any, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Any]:
    return _wide_product(equation, precision, x, kernel), (x, kernel)


def _wide_backward(equation: str, precision: Any, kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    _, back = jax.vjp(lambda x, kernel: jnp.einsum(equation, x, kernel, precision=precision), *kept)
    return back(gradient.astype(kept[0].dtype))


_wide_product.defvjp(_wide_forward, _wide_backward)


class Embedding(nnx.Module):
    """The table of token vectors."""

    def __init__(self, config: DecoderConfig) -> None:
        self.embedding = _parameter((config.vocab, config.width), "vd")


class Decoder(nnx.Module):
    """Tokens to logits. Its parameters' paths are the Policy layout of jvlab/rules/_builtin_texts.py."""

    def __init__(self, config: DecoderConfig, runtime: Runtime) -> None:
        self.config, self.runtime = config, runtime
        self.embed = Embedding(config)
        self.layers = Layer(config, runtime)  # all of them, stacked
        self.final_norm = Norm(config.width, config)
        if not config.tied:
            self.lm_head = Linear("btd,dv->btv", (config.width, config.vocab), runtime)

    def hidden(self, tokens: Array, positions: Array, segments: Array, most: int = 1) -> jax.Array:
        """The output layer's input, [B, T, d]. `segments` [B, T] numbers a row's samples from 1; 0 is padding.

        With `most` samples a row; one sample begins its row.
        """
        return self.final_norm(self._through_layers(tokens, positions, segments, False, most)[0])

    def states(self, tokens: Array, positions: Array, segments: Array) -> jax.Array:
        """The residual stream after each layer, [layers, B, T, d]."""
        return self._through_layers(tokens, positions, segments, True, 1)[1]

    def _through_layers(
        self, tokens: Array, positions: Array, segments: Array, keep: bool, most: int
    ) -> tuple[jax.Array, jax.Array]:
        config, runtime = self.config, self.runtime
        x = jnp.take(runtime.weight(self.embed.embedding), tokens, axis=0)
        x = runtime.place(x * jnp.asarray(config.embedding_scale, x.dtype), "btd")
        ropes = tuple(_rope.tables(rope, positions) for rope in config.ropes)
        rows = Rows(jnp.asarray(segments, jnp.int32), jnp.asarray(positions), ropes, most)
        graph, stacked = nnx.split(self.layers)
        kinds = list(zip(config.windows, config.layer_ropes, strict=True))

        def step(x: jax.Array, one: Any, kind: tuple[int | None, int]) -> jax.Array:
            return nnx.merge(graph, one)(x, rows, kind)

        def run(x: jax.Array, group: Any, kinds: list[tuple[int | None, int]]) -> tuple[jax.Array, Any]:
            kept = []
            for at, kind in enumerate(kinds):
                one = jax.tree.map(lambda leaf, at=at: leaf[at], group)
                x = runtime.rematerialised(partial(step, kind=kind), remat)(x, one)
                kept.append(x)
            return x, jnp.stack(kept) if keep and kept else None

        remat = runtime.remat_of(config, *tokens.shape)
        period = config.period
        whole = config.layers - config.layers % period
        groups = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, period, *leaf.shape[1:]), stacked)
        x, kept = jax.lax.scan(lambda x, group: run(x, group, kinds[:period]), x, groups)
        x, more = run(x, jax.tree.map(lambda leaf: leaf[whole:], stacked), kinds[whole:])
        if not keep:
            return x, x
        kept = kept.reshape(-1, *x.shape)
        return x, jnp.concatenate([kept, more]) if whole < config.layers else kept

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
        out: Any = _wide_product(equation, precision, x.astype(kernel.dtype), kernel)
        if dtype is not None:
            out = out.astype(dtype).astype(jnp.float32)  # rounded like the logits of an engine with this head dtype
        return softcap(self.runtime.place(out, "btv"), self.config.logit_softcap)


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
    """The decoder with these parameters in it: a nested dict, its layers stacked."""
    graph, _ = abstract(config, runtime)
    if "0" in params["layers"]:
        raise LayoutError(
            "these parameters hold their layers one by one, as jvlab 0.1 did; a policy has them stacked",
            remedy="params = jvlab.trainer.stack_layers(params)",
        )
    return nnx.merge(graph, dict(params))


def stack_layers(params: Params) -> dict[str, Any]:
    """Parameters with layers "0", "1", … as they were in jvlab 0.1, stacked as they are now."""
    layers = params["layers"]
    ordered = [layers[name] for name in sorted(layers, key=int)]
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *ordered)}


def positions_of(segments: Array) -> jax.Array:
    """Positions that count the tokens of each sample, so that padding on either side has no effect.

    `segments` as for `logprobs`; a mask is one sample a row.
    """
    segments = jnp.asarray(segments).astype(jnp.int32)
    counted = jnp.cumsum(segments > 0, axis=-1)
    before = jnp.pad(jax.lax.cummax(segments, axis=1), ((0, 0), (1, 0)))[:, :-1]
    first = jax.lax.cummax(jnp.where(segments > before, counted, 0), axis=1)  # of its sample
    return jnp.maximum(counted - jnp.maximum(first, 1), 0)


def logits(
    params: Params,
    config: DecoderConfig,
    tokens: Array,
    positions: Array | None = None,
    mask: Array | None = None,
    runtime: Runtime = Runtime(),  # noqa: B008 - frozen
) -> jax.Array:
    """Float32 logits [B, T, v] of the token after each token. Pure."""
    real = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask, bool)
    positions = positions_of(real) if positions is None else positions
    decoder = build(params, config, runtime)
    places, back = _first(real)
    at = [places(jnp.asarray(x)) for x in (tokens, positions, real.astype(jnp.int32))]
    hidden = decoder.hidden(at[0], at[1], at[2])
    return decoder.unembed(decoder.head(), back(hidden))


def _first(mask: jax.Array) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """Functions that move what is real of each row to its beginning, and back: a fused kernel needs it there."""
    order = jnp.argsort(~mask, axis=1, stable=True)
    inverse = jnp.argsort(order, axis=1)
    take = lambda x, at: jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 2)), axis=1)
    return lambda x: take(x, order), lambda x: take(x, inverse)


def layer_states(params: Params, config: DecoderConfig, tokens: Array, runtime: Runtime) -> jax.Array:
    """The residual stream after each layer, float32 [layers, B, T, d]. Pure."""
    segments = jnp.ones(tokens.shape, jnp.int32)
    return build(params, config, runtime).states(tokens, positions_of(segments), segments).astype(jnp.float32)


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
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """log P of each token given those before it, float32 [B, T]; 0 for padding and each sample's first token. Pure.

    `mask` is False on padding. For rows of several samples, `segments` numbers those of each row from 1, 0 being
    padding, and `most` is how many a row may hold. Logits are computed in chunks of the sequence, and recomputed for
    the gradient, so that [B, T, v] never exists. `with_entropy` also returns the entropy of the distribution that each
    token was drawn from.
    """
    back: Callable[[jax.Array], jax.Array] = lambda x: x
    tokens = jnp.asarray(tokens)
    if segments is None:
        mask = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask).astype(bool)
        places, back = _first(mask)
        tokens, segments = places(tokens), places(mask.astype(jnp.int32))
    segments = jnp.asarray(segments).astype(jnp.int32)
    decoder = build(params, config, runtime)
    hidden = decoder.hidden(tokens, positions_of(segments), segments, most)[:, :-1]
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
    known = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    found = jnp.pad(jnp.where(known, found, 0), ((0, 0), (0, 0), (1, 0)))
    return (back(found[0]), back(found[1])) if with_entropy else back(found[0])


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
    parts = jax.lax.map(lambda xy: f(kernel, *xy), (jnp.moveaxis(x, 1, 0), jnp.moveaxis(y, 1, 0)))
    return jnp.moveaxis(parts, 0, 2).reshape(parts.shape[1], batch, -1)[..., :length]
