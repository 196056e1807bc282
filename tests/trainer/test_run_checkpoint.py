"""A run's checkpoints: those of jvlab 0.1, which numbered its layers, are read into stacked ones."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jvlab as jv
from jvlab._errors import ConfigError
from jvlab.trainer._run_checkpoint import Checkpoints, Position
from jvlab.trainer._step import TrainStep
from jvlab.trainer.decoder._model import stack_layers

POSITION = Position(step=3, version=3, seed=0, groups=12)


def test_a_checkpoint_with_numbered_layers_is_read_into_stacked_ones(tmp_path: Path):
    policy = jv.Policy.from_pretrained(jv.models.tiny("llama"), mesh=jv.mesh(fsdp=2))
    layers = policy.params["layers"]
    one = lambda i: jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[i]), layers)
    numbered = {
        **policy.params,
        "layers": {str(i): one(i) for i in range(policy.config.layers)},
    }
    step = TrainStep(policy.logprobs_fn, donate=False)
    older = step.init(numbered)
    moved = jax.tree.map(
        lambda x: x + np.arange(x.size, dtype=x.dtype).reshape(x.shape), older.opt_state
    )
    kept = Checkpoints(tmp_path)
    path = kept.save(older._replace(opt_state=moved), POSITION)
    like = step.init(policy.params)
    found = kept.load(path, like)
    assert jax.tree.map(lambda x: x.sharding, found.params) == jax.tree.map(
        lambda x: x.sharding, like.params
    )
    jax.tree.map(np.testing.assert_array_equal, found.params, policy.params)
    wanted = stack_layers(moved[1][0].mu)
    jax.tree.map(np.testing.assert_array_equal, found.opt_state[1][0].mu, wanted)
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
