"""Samples and rewards as padded batches: masks, buckets, exclusions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvlab._errors import ConfigError
from jvlab.record._sample import Sample
from jvlab.trainer._batching import Buckets, train_batch
from jvlab.trainer._losses import Algorithm


def sample(
    prompt: int,
    index: int,
    start: int,
    length: int,
    versions=None,
    finish: str = "stop",
) -> Sample:
    """Token ids and log-probabilities that say where they came from."""
    spans = versions if versions is not None else [(3, 0, length)] if length else []
    return Sample(
        prompt_index=prompt,
        sample_index=index,
        prompt_token_ids=np.arange(start) + 100,
        token_ids=np.arange(length) + 200,
        logprobs=-np.arange(1, length + 1, dtype=np.float32),
        versions=tuple(spans),
        finish_reason=finish,
    )


def test_positions_belong_to_their_token():
    batch = train_batch(
        [sample(0, 0, 2, 3, [(3, 0, 1), (4, 1, 3)]), sample(0, 1, 2, 1)], [1.0, 0.0]
    )
    assert batch.tokens.shape == (2, 32)
    assert batch.tokens[0, :6].tolist() == [100, 101, 200, 201, 202, 0]
    assert batch.loss_mask[0, :6].tolist() == [0, 0, 1, 1, 1, 0]
    assert batch.token_mask[1, :4].tolist() == [1, 1, 1, 0]
    assert batch.engine_logprobs[0, :6].tolist() == [0, 0, -1, -2, -3, 0]
    assert batch.versions[0, :6].tolist() == [-1, -1, 3, 4, 4, -1]
    np.testing.assert_allclose(batch.advantages, [1, -1], rtol=1e-3)


TURNS = Sample(
    prompt_index=0,
    sample_index=0,
    prompt_token_ids=np.array([1, 2]),
    token_ids=np.array([10, 11, 12, 13]),
    logprobs=np.array([-1.0, np.nan, np.nan, -2.0]),
    versions=[5, -1, -1, 6],
    loss_mask=np.array([True, False, False, True]),
)


def test_observations_are_masked():
    batch = train_batch([TURNS], [1.0])
    assert batch.loss_mask[0, :7].tolist() == [0, 0, 1, 0, 0, 1, 0]
    assert batch.token_mask[0, :7].tolist() == [1, 1, 1, 1, 1, 1, 0]
    assert batch.engine_logprobs[0, :7].tolist() == [0, 0, -1, 0, 0, -2, 0]
    assert batch.versions[0, :7].tolist() == [-1, -1, 5, -1, -1, 6, -1]


def test_failed_rewards_and_samples_are_excluded_and_counted():
    samples = [sample(0, i, 2, 3) for i in range(4)] + [
        sample(1, 0, 2, 3, finish="abort"),
        sample(1, 1, 2, 3),
    ]
    batch = train_batch(
        samples, [1.0, np.nan, 0.0, 0.5, 9.0, 2.0], Algorithm(advantages="mean")
    )
    assert (len(batch), batch.excluded, batch.dropped) == (4, 2, 0)
    assert batch.rewards.tolist() == [1.0, 0.0, 0.5, 2.0]
    # neither NaN nor the aborted 9 moves a mean
    np.testing.assert_allclose(batch.advantages, [0.5, -0.5, 0, 0])
    assert repr(batch) == "TrainBatch(4 samples, 2 groups, 12 tokens, 2 excluded)"


def test_dynamic_sampling_drops_equal_groups():
    samples = [sample(g, i, 2, 3) for g in range(3) for i in range(2)]
    batch = train_batch(samples, [1, 1, 0, 1, 0, 0], Algorithm.named("dapo"))
    assert batch.group_ids.tolist() == [1, 1]
    assert (batch.excluded, batch.dropped) == (0, 4)
    assert len(train_batch(samples, [1] * 6, Algorithm.named("dapo"))) == 0


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=30
    ),
    st.integers(1, 9),
)
def test_every_sample_is_in_one_micro_batch_of_a_known_shape(sizes, rows: int):
    buckets = Buckets(rows)
    batch = train_batch(
        [sample(0, i, a, b) for i, (a, b) in enumerate(sizes)],
        [0.0] * len(sizes),
        buckets=buckets,
    )
    seen = []
    for part in batch.buckets.parts(batch.lengths):
        picked = part.samples
        assert part.width in (32, 48, 72, 112)
        arrays = part.token_arrays(batch, ["loss_mask"])
        tokens, mask = arrays["tokens"], arrays["loss_mask"]
        assert tokens.shape == mask.shape == (rows, part.width)
        np.testing.assert_array_equal(
            mask.sum(1)[: len(picked)], [sizes[r][1] for r in picked]
        )
        # no row is without tokens
        assert (arrays["segments"] > 0).any(axis=1).all()
        seen += picked.tolist()
    assert sorted(seen) == list(range(len(sizes)))


def test_lengths_are_geometric():
    assert [Buckets().width(n) for n in (1, 32, 33, 49, 73)] == [32, 32, 48, 72, 112]


def test_logprobs_of_another_shape_are_refused():
    batch = train_batch([sample(i, 0, 2, i + 1) for i in range(5)], np.arange(5.0))
    with pytest.raises(ConfigError, match=r"shape \(5, 2\)"):
        batch.with_logprobs(reference=np.zeros((5, 2)))


def test_errors():
    with pytest.raises(ConfigError, match="1 sample, rewards of shape"):
        train_batch([sample(0, 0, 1, 1)], [1.0, 2.0])
    silent = Sample(
        prompt_index=7,
        sample_index=0,
        prompt_token_ids=np.array([1]),
        token_ids=np.array([2]),
        versions=((0, 0, 1),),
    )
    with pytest.raises(ConfigError, match=r"prompt 7.*no log-probability"):
        train_batch([silent], [1.0])
    with pytest.raises(ConfigError, match="has no prompt"):
        train_batch([sample(0, 0, 0, 2)], [1.0])
