"""cuDNN's attention: one sample a row, or several packed into it.

JAX's public function takes no offsets, which packed samples need; its private one does. It was seen with jax 0.10 and
0.11. If it is not where it was, `missing` says so, and attention is computed in chunks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp


@cache
def missing() -> str:
    """Why the kernel cannot be used; empty if it can."""
    try:
        _private()
    except (ImportError, AttributeError) as error:
        return f"jax {jax.__version__} has no packed attention where jvlab looks for it: {error}"
    return ""


def _private() -> tuple[Any, Any]:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    return dot_product_attention, MaskType.PADDING_CAUSAL


def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, scale: float, most: int) -> jax.Array:
    """Attention within samples. With one a row, what comes after it is computed too, and means nothing."""
    if most == 1:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=scale, implementation="cudnn")
    attention, mask_type = _private()
    batch, length = segments.shape
    offsets = offsets_of(segments, most + 1)  # the kernel's memory grows with their number
    lengths = jnp.diff(offsets, axis=-1)
    flat = lambda x: x.reshape(1, batch * length, *x.shape[2:])
    out = attention(
        flat(q), flat(k), flat(v), None, None, lengths, lengths, offsets, offsets, scale=scale, mask_type=mask_type
    )
    return out.reshape(q.shape)


def offsets_of(segments: jax.Array, most: int) -> jax.Array:
    """Where stretches of equal segments begin, [1, B · most + 1] int32, in ascending order; the rest is B · T."""
    batch, length = segments.shape
    begins = jnp.concatenate([jnp.ones((batch, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    found = jnp.nonzero(begins.reshape(-1), size=batch * most, fill_value=batch * length)[0]
    return jnp.append(found, batch * length).astype(jnp.int32)[None]
