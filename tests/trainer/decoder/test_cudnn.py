"""What cuDNN's attention is told of packed rows. The kernel itself: tests/gpu/test_attention_gpu.py."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jvlab.trainer.decoder._attention import stretches_of

pytestmark = pytest.mark.slow

ROWS = {
    "two rows, padding at the end": [
        [1, 1, 1, 2, 2, 0, 0, 0],
        [1, 1, 2, 3, 3, 3, 3, 0],
    ],
    "full rows": [[1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 1]],
    "a row of padding": [[1, 1, 2, 2, 3, 3, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]],
    "one row": [[1, 2, 3, 3, 3, 3, 0, 0]],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_jax_makes_of_the_stretches_what_the_kernel_reads(rows: list[list[int]]):
    """Every stretch once, in order, at its place in the rows laid end to end, in units of a token's values."""
    from jax._src.cudnn.fused_attention_stablehlo import _fix_seqlen_offsets

    segments, heads, width = np.asarray(rows), 4, 8
    offsets, lengths = stretches_of(jnp.asarray(segments), 4)
    query = jnp.zeros((*segments.shape, heads, width))
    told, _, at, _ = _fix_seqlen_offsets(
        lengths, lengths, offsets, offsets, query, query
    )
    expected, begins = [], []
    for row, of_row in enumerate(segments):
        edges = [0, *(np.flatnonzero(np.diff(of_row)) + 1), len(of_row)]
        expected += list(np.diff(edges))
        begins += [row * len(of_row) + edge for edge in edges[:-1]]
    told, at = np.ravel(told), np.ravel(at) // (heads * width)
    assert list(told) == [*expected, *[0] * (told.size - len(expected))]
    assert list(at[: len(begins) + 1]) == [*begins, segments.size], (
        "the last ends where the rows do"
    )
    assert told.size == segments.shape[0] * 4, (
        "the kernel has memory for so many rows, no more"
    )
