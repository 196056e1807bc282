"""cuDNN's attention over packed samples. JAX's public function takes no offsets; its private one, used here, does.

Seen with jax 0.10. If the private function is not where it was, `missing` says so and attention is computed in chunks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

SEGMENTS = 64  # samples and stretches of padding in one row, at most


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


def packed(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, scale: float) -> jax.Array:
    """Attention within segments. All rows are laid end to end: a boundary between rows is one between segments."""
    attention, mask_type = _private()
    batch, length = segments.shape
    offsets = offsets_of(segments, SEGMENTS)
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
