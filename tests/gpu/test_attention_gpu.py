"""cuDNN's attention over packed rows on a card: outputs and gradients as those of the plain form."""

from __future__ import annotations

import os

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
ROWS = {
    "one row": (1024, [[300, 500, 200]]),
    "several rows": (512, [[512], [100, 50, 300], [7, 1, 500]]),
    "a row of padding": (640, [[600], [0]]),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_packed_attention_is_the_plain_one(rows: tuple[int, list[list[int]]]):
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jvlab.trainer.decoder import _attention
    from jvlab.trainer.decoder._attention import ScoreForm

    length, samples = rows
    segments = np.zeros((len(samples), length), np.int32)
    for row, lengths in enumerate(samples):
        ends = np.cumsum(lengths)
        for number, (end, size) in enumerate(zip(ends, lengths, strict=True), 1):
            segments[row, end - size : end] = number
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(*segments.shape, n, 128)), jnp.bfloat16)
        for n in (16, 8, 8)
    )
    positions = jnp.zeros(segments.shape, jnp.int32)

    def computed(form: str, segments: np.ndarray) -> list[np.ndarray]:
        def total(
            q: jax.Array, k: jax.Array, v: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            out = _attention.attend(
                form, q, k, v, jnp.asarray(segments), positions, ScoreForm(128**-0.5), 4
            )
            real = jnp.where(
                jnp.asarray(segments)[..., None, None] > 0, out.astype(jnp.float32), 0
            )
            return jnp.sum(jnp.sin(real)), real

        (_, out), gradients = jax.jit(
            jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)
        )(q, k, v)
        return [np.asarray(x, np.float32) for x in (out, *gradients)]

    ours, plain = computed("cudnn", segments), computed("plain", segments)
    gaps = [
        float(np.abs(a - b).max() / max(np.abs(b).max(), 1))
        for a, b in zip(ours, plain, strict=True)
    ]
    print(f"packed attention: {length} {samples} {gaps}")
    assert all(np.isfinite(x).all() for x in ours)
    assert max(gaps) <= 2**-6, "two roundings of bfloat16"
    if len(samples[0]) > 1:
        whole = computed("plain", np.minimum(segments, 1))
        assert np.abs(whole[0] - ours[0]).max() > 0.5, (
            "attention over sample borders would be seen"
        )
