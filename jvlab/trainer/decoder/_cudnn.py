"""cuDNN's attention: one sample a row, or several packed into it.

JAX's public function takes no offsets, which packed samples need; its private one does. It was seen with jax 0.10 and
0.11. If it is not where it was, `missing` says so, and attention is computed in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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


def attend(
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
    attention, mask_type = _private()
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
    """The card's libraries for products and attention are loaded meanwhile: seconds that the first program else waits.

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
