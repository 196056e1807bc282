"""A run's checkpoints: read whole, refused for another model."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import jvlab as jv
from jvlab._errors import ConfigError
from jvlab.trainer._run_checkpoint import Checkpoints, Position
from jvlab.trainer._step import TrainStep

POSITION = Position(step=3, version=3, seed=0, groups=12)


def test_a_checkpoint_is_read_where_it_is_wanted(tmp_path: Path):
    policy = jv.Policy.from_pretrained(jv.models.tiny("llama"), mesh=jv.mesh(fsdp=2))
    step = TrainStep(policy.logprobs_fn, donate=False)
    like = step.init(policy.params)
    moved = jax.tree.map(
        lambda x: x + np.arange(x.size, dtype=x.dtype).reshape(x.shape), like.opt_state
    )
    kept = Checkpoints(tmp_path)
    path = kept.save(like._replace(opt_state=moved), POSITION)
    found = kept.load(path, like)
    assert jax.tree.map(lambda x: x.sharding, found.params) == jax.tree.map(
        lambda x: x.sharding, like.params
    )
    jax.tree.map(np.testing.assert_array_equal, found.params, policy.params)
    jax.tree.map(np.testing.assert_array_equal, found.opt_state, moved)
    kept.close()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    first, other = (
        jv.Policy.from_pretrained(jv.models.tiny("llama", num_hidden_layers=n))
        for n in (2, 3)
    )
    step, kept = TrainStep(first.logprobs_fn, donate=False), Checkpoints(tmp_path)
    path = kept.save(step.init(first.params), POSITION)
    with pytest.raises(ConfigError, match="does not fit this policy"):
        kept.load(path, TrainStep(other.logprobs_fn, donate=False).init(other.params))
    kept.close()


def test_moments_are_float32_for_parameters_of_16_bits():
    policy = jv.Policy.from_pretrained(
        jv.models.tiny("llama"), dtype="bfloat16", mesh=jv.mesh(fsdp=2)
    )
    state = TrainStep(policy.logprobs_fn, donate=False).init(policy.params)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert {str(x.dtype) for x in moments} == {"float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    shardings = {x.shape: x.sharding for x in jax.tree.leaves(state.params)}
    assert all(x.sharding == shardings[x.shape] for x in moments)
