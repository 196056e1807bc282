"""Packing: rows that hold each sample once and little padding; training on them equals training on padded samples."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jvlab as jv
from jvlab._errors import ConfigError
from jvlab.record._sample import Sample
from jvlab.trainer._batching import Buckets, TrainBatch, train_batch
from jvlab.trainer._losses import Algorithm
from jvlab.trainer._micro_batches import (
    MOST,
    Packer,
    RowShape,
    pack,
    packed,
    row_length,
)
from jvlab.trainer._step import TrainStep
from jvlab.trainer.decoder import _model

ALGORITHMS = {
    "token": Algorithm(level="token"),
    "sequence": Algorithm(level="sequence", importance_level="sequence"),
    "geometric": Algorithm.named("grpo", importance_level="geometric", kl_coef=0.05),
}


@given(st.lists(st.integers(1, 400), min_size=1, max_size=80), st.integers(8, 300))
def test_every_sample_is_in_one_row_and_rows_are_kept(lengths: list[int], length: int):
    rows = pack(lengths, length)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    for row in rows:
        assert len(row) == 1 or sum(lengths[i] for i in row) <= length
        assert len(row) <= MOST


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.integers(60, 200),
    st.integers(1, 3),
)
def test_what_is_laid_is_found_again(lengths: list[int], length: int, count: int):
    sizes = np.asarray(lengths)
    values = np.zeros((len(sizes), 64), np.int32)
    for i, n in enumerate(sizes):
        values[i, :n] = 1 + i * 64 + np.arange(n)
    rows = pack(sizes, length)
    seen = []
    for at in range(0, len(rows), count):
        shape = RowShape(count, length, MOST)
        part = packed(sizes, rows[at : at + count], shape)
        laid = part.lay(values)
        assert (
            (laid > 0).sum() == sizes[part.samples].sum() == (part.segments > 0).sum()
        )
        flat = np.append(laid.reshape(-1), 0)
        np.testing.assert_array_equal(
            flat[part.place[: len(part.samples)]][:, :64],
            values[part.samples][:, :length],
        )
        seen += list(part.samples)
    assert sorted(seen) == list(range(len(sizes)))


def real_lengths(seed: int, samples: int = 256) -> np.ndarray:
    """Answers of a reasoning model: log-normal, cut at the limit, a prompt of its group before each."""
    rng = np.random.default_rng(seed)
    answers = np.minimum(rng.lognormal(7.2, 0.7, samples).astype(int) + 1, 4096)
    return answers + np.repeat(rng.integers(60, 300, samples // 8), 8)


@pytest.mark.parametrize(
    "lengths",
    [real_lengths(0), np.full(64, 3064), np.full(64, 600)],
    ids=["drawn", "3k", "600"],
)
def test_little_padding(lengths: np.ndarray):
    packer = Packer(16384)
    parts = list(packer.parts(lengths))
    computed = sum(part.tokens for part in parts)
    assert 1 - lengths.sum() / computed < 0.05
    assert len({part.shape for part in parts}) == 1
    if lengths.std() > 0:  # and so are later batches, in the same shape
        more = [
            part for seed in range(1, 6) for part in packer.parts(real_lengths(seed))
        ]
        tokens = sum(int(real_lengths(seed).sum()) for seed in range(1, 6))
        assert 1 - tokens / sum(part.tokens for part in more) < 0.05
        assert {part.shape for part in more} == {packer.shape}


def padding_of(
    packer: Packer, batches: list[np.ndarray]
) -> tuple[float, list[RowShape | None]]:
    """Padding of them all, and the shape that each was computed in."""
    computed, shapes = 0, []
    for lengths in batches:
        computed += sum(part.tokens for part in packer.parts(lengths))
        shapes.append(packer.shape)
    return 1 - sum(int(lengths.sum()) for lengths in batches) / computed, shapes


def test_short_rows_still_fit_when_later_prompts_are_a_little_longer():
    batches = [
        np.repeat(np.arange(4) % 3 + 60 + more, 8) + 64
        for more in (0, 0, 1, 2, 1, 2, 0, 1)
    ]
    padding, shapes = padding_of(Packer(8192, short=True), batches)
    assert padding < 0.05
    assert len(set(shapes)) == 1


def test_rows_grow_with_the_answers():
    # one is scored and trained
    batches = [
        np.full(32, n) for n in (100, 101, 300, 301, 300, 302, 100, 100, 301, 300)
    ]
    _, shapes = padding_of(Packer(4096, short=True), batches)
    assert shapes[0] == shapes[2] != shapes[3], (
        "after two batches that are longer than a row"
    )
    assert len(set(shapes)) == 2, "one short batch among long ones compiles nothing"
    assert padding_of(Packer(4096, short=True), batches[3:6])[0] < 0.12


def test_one_longer_than_a_row_is_computed_alone():
    packer = Packer(64)
    parts = list(packer.parts(np.array([10, 100, 20])))
    assert [sorted(part.samples) for part in parts] == [[1], [0, 2]]
    assert parts[0].tokens >= 100


def test_row_lengths_fit_the_samples():
    assert row_length([3072] * 10, 16384) % 3072 == 0
    assert row_length([], 512) == 512


def batch_of(vocabulary: int, algorithm: Algorithm, seed: int = 0) -> TrainBatch:
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(4):
        for index in range(4):
            # at most 32 tokens with the prompt: one shape of padded rows to compile
            n = int(rng.integers(1, 24))
            drawn: dict[str, Any] = {
                "prompt_token_ids": rng.integers(0, vocabulary, int(rng.integers(1, 9)))
            }
            drawn |= {
                "token_ids": rng.integers(0, vocabulary, n),
                "logprobs": rng.normal(-5, 0.3, n),
            }
            samples.append(
                Sample(
                    prompt_index=group,
                    sample_index=index,
                    versions=((1, 0, n),),
                    **drawn,
                )
            )
    return train_batch(samples, rng.random(len(samples)), algorithm, Buckets(rows=4))


# plain descent whose steps are far larger than the parameters, so that their rounding does not count
RATE = 1000.0
PAIRS = [("llama", "geometric")]
REST = [
    (family, name)
    for family in ("llama", "gemma3")
    for name in ALGORITHMS
    if (family, name) not in PAIRS
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [*PAIRS, *(pytest.param(*p, marks=pytest.mark.soak) for p in REST)],
)
def test_packed_and_padded_are_equal(family: str, name: str):
    """Loss, gradient, metrics and scores, in float32."""
    algorithm = ALGORITHMS[name]
    policy = jv.Policy.from_pretrained(jv.models.tiny(family))
    batch = batch_of(policy.config.vocab, algorithm)
    if algorithm.needs_reference:
        batch = batch.with_logprobs(reference=np.where(batch.token_mask, -5.0, 0.0))
    found = {}
    for budget in (None, 128):
        options: dict[str, Any] = {
            "optimizer": optax.sgd(RATE),
            "max_grad_norm": None,
            "donate": False,
        }
        step = TrainStep(policy.logprobs_fn, algorithm, token_budget=budget, **options)
        state, report = step(step.init(policy.params), batch, version=1)
        found[budget] = (state.params, report, step.score(policy.params, batch))
    (padded, plain, scores), (rows, dense, packed_scores) = found[None], found[128]
    np.testing.assert_allclose(scores, packed_scores, atol=2e-5)
    assert dense.loss == pytest.approx(plain.loss, rel=1e-4, abs=1e-6)
    assert dense.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
    assert dense.metrics == pytest.approx(
        plain.metrics, rel=1e-3, abs=1e-4, nan_ok=True
    )
    assert dense.padding < plain.padding
    gradient = lambda after: jax.tree.map(
        lambda a, b: np.asarray(b - a) / RATE, after, policy.params
    )
    close = lambda a, b: np.testing.assert_allclose(
        a, b, atol=1e-4 * max(np.abs(b).max(), 1e-6)
    )
    jax.tree.map(close, gradient(rows), gradient(padded))


def test_a_sample_does_not_see_its_neighbours():
    policy = jv.Policy.from_pretrained(jv.models.tiny("llama"))
    rng = np.random.default_rng(0)
    one, other = rng.integers(5, 200, 12), rng.integers(5, 200, 20)
    row = np.concatenate([one, other])[None]
    segments = np.array([[1] * 12 + [2] * 20])
    together = policy.logprobs_fn(policy.params, row, segments=segments)
    alone = policy.logprobs_fn(policy.params, other[None], np.ones((1, 20), bool))
    np.testing.assert_allclose(together[:, 12:], alone, atol=1e-5)
    assert together[0, 12] == 0, "a sample's first token has nothing before it"
    np.testing.assert_array_equal(
        _model.positions_of(segments)[0], [*range(12), *range(20)]
    )


def test_a_function_that_cannot_pack_is_refused():
    with pytest.raises(ConfigError, match="segments"):
        TrainStep(lambda params, tokens, mask: tokens, token_budget=64)
