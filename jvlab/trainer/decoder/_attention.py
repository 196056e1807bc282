"""Attention within samples: the forms it is computed in, and which one a model, a length and a device get.

    form      memory     used
    plain     length²    where all scores at once fit into PLAIN_BYTES
    chunked   length     beyond that; windows, soft caps and everything a fused kernel refuses on a card
    cudnn     length     on an NVIDIA card, in 16 bits

A row holds samples one after the other, at most `most` of them. `segments` [B, T] numbers them from 1, and is 0 on
padding; no token sees another sample, a later token, or padding. In the cudnn form rows of one sample begin with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

# of positions that are not visible; finite, to avoid NaN
MASKED_SCORE = -0.7 * float(jnp.finfo(jnp.float32).max)
PLAIN_BYTES = 2**26  # scores held at once, at most
CHUNK = 64  # queries at a time, at least


@dataclass(frozen=True)
class Choice:
    """A form of attention, and why it is used."""

    form: str
    why: str
    refused: str = ""  # why it is not a fused kernel

    def __str__(self) -> str:
        return f"{self.form} ({self.why})"


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
    if platform in ("gpu", "cuda"):
        refused = _refused_by_cudnn(dtype, scores, head_dim, devices)
        if not refused:
            return Choice("cudnn", "the fused kernel of an NVIDIA card")
    else:
        refused = f"cuDNN's kernel needs an NVIDIA card, this is {platform}"
    if 4 * heads * tokens * tokens <= PLAIN_BYTES:
        return Choice(
            "plain", f"the scores of {tokens:,} tokens are small; {refused}", refused
        )
    return Choice("chunked", f"memory is linear in length; {refused}", refused)


def plain_tokens(heads: int) -> int:
    """The longest row whose scores are computed at once."""
    return math.isqrt(PLAIN_BYTES // (4 * heads))


def _refused_by_cudnn(
    dtype: str, scores: ScoreForm, head_dim: int, devices: int
) -> str:
    from jvlab.trainer.decoder import _cudnn

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
    return _cudnn.missing()


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
        from jvlab.trainer.decoder import _cudnn

        return _cudnn.attend(q, k, v, segments, scores.scale, most)
    batch, length, heads, _ = q.shape
    if form == "plain":
        return _rows(
            q,
            k,
            v,
            segments,
            positions,
            jnp.arange(length),
            segments,
            positions,
            scores,
        )
    size = max(CHUNK, PLAIN_BYTES // (4 * batch * heads * length))
    count = math.ceil(length / size)
    if count == 1:
        return _rows(
            q,
            k,
            v,
            segments,
            positions,
            jnp.arange(length),
            segments,
            positions,
            scores,
        )
    size = math.ceil(length / count)
    pad = count * size - length

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def chunk(part: tuple[jax.Array, ...]) -> jax.Array:
        queries, segment, position, order = part
        return _rows(
            queries, k, v, segment, position, order, segments, positions, scores
        )

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
