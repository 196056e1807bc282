"""Attention within samples: the forms it is computed in, and which one a model, a length and a device get.

    form      memory     used
    plain     length²    where all scores at once fit into PLAIN_BYTES
    chunked   length     beyond that; windows, soft caps and everything a fused kernel refuses on a GPU
    cudnn     length     on an NVIDIA GPU, in 16 bits

A row holds samples one after the other, at most `most` of them. `segments` [B, T] numbers them from 1, and is 0 on
padding; no token sees another sample, a later token, or padding. In the cudnn form rows of one sample begin with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

# of positions that are not visible; finite, to avoid NaN
MASKED_SCORE = -0.7 * float(jnp.finfo(jnp.float32).max)
PLAIN_BYTES = 2**26  # scores held at once, at most
CHUNK = 64  # queries at a time, at least


@dataclass(frozen=True)
class Choice:
    """A form of attention, and why it is not a fused kernel."""

    form: str
    why: str = ""


@dataclass(frozen=True)
class ScoreForm:
    """How a model turns products of queries and keys into weights."""

    scale: float
    softcap: float | None = None
    # positions a token sees, itself included; None: all before it
    window: int | None = None
    precision: jax.lax.Precision | None = None


def choose(
    platform: str,
    dtype: str,
    scores: ScoreForm,
    head_dim: int,
    heads: int,
    tokens: int,
    devices: int,
) -> Choice:
    """The form for rows of this many tokens; `tokens` counts those of one row."""
    why = f"cuDNN's kernel needs an NVIDIA GPU, this is {platform}"
    if platform in ("gpu", "cuda"):
        why = _refused_by_cudnn(dtype, scores, head_dim, devices)
        if not why:
            return Choice("cudnn")
    small = 4 * heads * tokens * tokens <= PLAIN_BYTES
    return Choice("plain" if small else "chunked", why)


def plain_tokens(heads: int) -> int:
    """The longest row whose scores are computed at once."""
    return math.isqrt(PLAIN_BYTES // (4 * heads))


def _refused_by_cudnn(
    dtype: str, scores: ScoreForm, head_dim: int, devices: int
) -> str:
    if dtype not in ("bfloat16", "float16"):
        return f"cuDNN's kernel computes in 16 bits, this policy in {dtype}"
    if scores.softcap is not None:
        return "cuDNN's kernel has no soft cap"
    if scores.window is not None:
        return "cuDNN's packed kernel has no window"
    if head_dim > 128 or head_dim % 8:
        return f"cuDNN's kernel takes heads of up to 128, in multiples of 8; this model's have {head_dim}"
    if devices > 1:
        return "cuDNN's packed kernel was not seen over several devices"
    return _cudnn_missing()


def attend(
    form: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    positions: jax.Array,
    scores: ScoreForm,
    most: int = 1,
) -> jax.Array:
    """[B, T, n, h] from q [B, T, n, h] and k, v [B, T, k, h]; each of the k key heads serves n / k query heads."""
    if form == "cudnn":
        return _attend_cudnn(q, k, v, segments, scores.scale, most)
    batch, length, heads, _ = q.shape

    def rows(
        q: jax.Array, segment: jax.Array, position: jax.Array, order: jax.Array
    ) -> jax.Array:
        return _rows(q, k, v, segment, position, order, segments, positions, scores)

    size = max(CHUNK, PLAIN_BYTES // (4 * batch * heads * length))
    count = 1 if form == "plain" else math.ceil(length / size)
    if count == 1:
        return rows(q, segments, positions, jnp.arange(length))
    size = math.ceil(length / count)
    pad = count * size - length

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)

    chunk = jax.checkpoint(lambda part: rows(*part))
    parts = (
        cut(q),
        cut(segments),
        cut(positions),
        jnp.arange(count * size).reshape(count, size),
    )
    out = jnp.moveaxis(jax.lax.map(chunk, parts), 0, 1)
    return out.reshape(batch, count * size, *out.shape[3:])[:, :length]


def _rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment: jax.Array,
    position: jax.Array,
    order: jax.Array,
    segments: jax.Array,
    positions: jax.Array,
    scores: ScoreForm,
) -> jax.Array:
    """Some queries, at places `order` of their rows, against all keys."""
    batch, length, heads, width = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, width)
    found = jnp.einsum(
        "btkgh,bskh->bkgts",
        grouped,
        k,
        precision=scores.precision,
        preferred_element_type=jnp.float32,
    )
    found = softcap(found * scores.scale, scores.softcap)
    visible = (order[:, None] >= jnp.arange(k.shape[1])[None, :])[None]
    visible &= (segment[:, :, None] == segments[:, None, :]) & (
        segments[:, None, :] > 0
    )
    if scores.window is not None:
        visible &= position[:, :, None] - positions[:, None, :] < scores.window
    weights = jax.nn.softmax(
        jnp.where(visible[:, None, None], found, MASKED_SCORE), axis=-1
    )
    mixed = jnp.einsum(
        "bkgts,bskh->btkgh", weights.astype(q.dtype), v, precision=scores.precision
    )
    return mixed.reshape(batch, length, heads, width)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """x, bent so that it stays within ± cap."""
    return x if cap is None else jnp.tanh(x / cap) * cap


# cuDNN's attention: one sample a row, or several packed into it. JAX's public function takes no offsets, which packed
# samples need; its private one does. It was seen with jax 0.10 and 0.11. If it is not where it was, `_cudnn_missing`
# says so, and attention is computed in chunks.


@cache
def _cudnn_missing() -> str:
    """Why the kernel cannot be used; empty if it can."""
    try:
        _cudnn()
    except (ImportError, AttributeError) as error:
        return f"jax {jax.__version__} has no packed attention where jvlab looks for it: {error}"
    return ""


def _cudnn() -> tuple[Any, Any]:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    return dot_product_attention, MaskType.PADDING_CAUSAL


def _attend_cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    scale: float,
    most: int,
) -> jax.Array:
    """Attention within samples. With one a row, what comes after it is computed too, and means nothing."""
    if most == 1:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, scale=scale, implementation="cudnn"
        )
    attention, mask_type = _cudnn()
    offsets, lengths = stretches_of(segments, most + 1)  # padding is one more
    of = lengths, lengths, offsets, offsets
    return attention(q, k, v, None, None, *of, scale=scale, mask_type=mask_type)


def stretches_of(segments: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Where a row's stretches of equal segments begin, [B, most + 1], and their lengths, [B, most]; the rest is -1.

    The kernel's backward pass has memory for each of B · most stretches at the length of a row: rows laid end to end
    as one would take B times as much.
    """
    _, length = segments.shape
    begins = jnp.concatenate(
        [jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]],
        axis=1,
    )
    first = jax.vmap(lambda row: jnp.nonzero(row, size=most, fill_value=length)[0])(
        begins
    )
    lengths = jnp.diff(first, axis=-1, append=length)
    known = first < length
    offsets = jnp.pad(jnp.where(known, first, -1), ((0, 0), (0, 1)), constant_values=-1)
    return offsets.astype(jnp.int32), jnp.where(known, lengths, -1).astype(jnp.int32)


@contextmanager
def loading_libraries(needed: bool) -> Iterator[None]:
    """Load the GPU's libraries for products and attention meanwhile: seconds that the first program would wait for.

    From a disk that was not read yet, three to four on an H200's host.
    """
    if not needed:
        yield
        return
    # no deadline: it computes, and waits for nobody
    with ThreadPoolExecutor(1, "load-libraries") as background:
        loaded = background.submit(_load_libraries)
        yield
        loaded.result()  # no deadline: it computes, and waits for nobody


def _load_libraries() -> None:
    def total(x: jax.Array, weight: jax.Array) -> jax.Array:
        y = jax.nn.dot_product_attention(
            x, x, x, is_causal=True, implementation="cudnn"
        )
        return jax.nn.silu(y.reshape(-1, 1024) @ weight).astype(jnp.float32).sum()

    arguments = (
        jnp.zeros((1, 512, 8, 128), jnp.bfloat16),
        jnp.zeros((1024, 1024), jnp.bfloat16),
    )
    jax.block_until_ready(jax.jit(jax.grad(total, argnums=(0, 1)))(*arguments))
