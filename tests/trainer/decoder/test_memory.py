"""What training takes of memory, and what is chosen from that: rematerialisation by shape, tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

import jvlab as jv
from jvlab._errors import ConfigError
from jvlab._units import human_bytes
from jvlab.trainer.decoder import _memory


@pytest.fixture(scope="module")
def policy() -> jv.Policy:
    return jv.Policy.from_pretrained(jv.models.tiny("llama"))


def test_memory_is_that_of_the_arrays_and_grows_with_the_tokens(policy: jv.Policy):
    small, large = policy.memory(2, 128), policy.memory(8, 128)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(policy.params))
    assert (small.parameters, small.moments) == (held, 2 * held)
    assert small.gradients == 2 * held, (
        "summed in float32, and those of one micro-batch"
    )
    assert large.activations == pytest.approx(4 * small.activations, rel=0.01)
    assert small.total < large.total
    assert small.fits
    assert str(small).startswith(human_bytes(small.total))
    with pytest.raises(ConfigError, match="batch=0"):
        policy.memory(0, 128)


def test_parameters_of_16_bits_have_moments_of_32():
    narrow = jv.Policy.from_pretrained(
        jv.models.tiny("llama"), dtype="bfloat16"
    ).memory(1, 64)
    assert narrow.moments == 4 * narrow.parameters


def test_the_less_room_the_less_is_kept(policy: jv.Policy):
    config, runtime = policy.config, policy.runtime
    assert runtime.remat == "auto"
    kept = {r: runtime.kept_bytes(config, 4, 256, r) for r in ("none", "dots", "full")}
    assert kept["none"] > kept["dots"] > kept["full"]
    for remat, size in kept.items():
        assert replace(runtime, room=size).remat_of(config, 4, 256) == remat
    assert replace(runtime, room=0).remat_of(config, 4, 256) == "full"
    assert replace(runtime, room=0, remat="none").remat_of(config, 4, 256) == "none", (
        "as it was asked for"
    )
    assert policy.memory(1, 64).remat == "none"


def test_a_budget_fits_into_the_memory_at_hand(
    policy: jv.Policy, monkeypatch: pytest.MonkeyPatch
):
    budget = policy.token_budget()
    assert budget == _memory.CPU_BUDGET
    needed = policy.memory(1, 1024).total
    monkeypatch.setattr(
        _memory, "at_hand", lambda array, held: int(needed / _memory.SHARE) + 1
    )
    assert policy.token_budget() == 1024


def test_a_fused_kernel_takes_memory_for_each_sample_of_a_row(
    policy: jv.Policy, monkeypatch: pytest.MonkeyPatch
):
    """XLA's temporaries on an H200 grew by 35.9 GiB from 1 to 64 samples in 32,768 tokens of Qwen3-1.7B."""
    wide = replace(policy.config, heads=16, kv_heads=8, head_dim=128)
    sizes = [
        _memory.estimate(wide, policy.runtime, policy.params, 1, 32768, n).kernel
        for n in (1, 64)
    ]
    assert sizes[0] == 0
    assert sizes[1] == pytest.approx(35.9 * 2**30, rel=0.1)
    assert policy.memory(1, 512, samples=64).kernel == 0, "no such kernel on a CPU"
    monkeypatch.setattr(jv.Policy, "fused_attention", True)
    assert policy.memory(1, 512, samples=64).total > policy.memory(1, 512).total


def test_unknown_remat():
    with pytest.raises(ConfigError, match="remat='some'"):
        jv.Policy.from_pretrained(jv.models.tiny("llama"), remat="some")
