"""Each cause of a disagreement, planted in a real engine, is the one that `link.bisect` names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jvlab as jv
from jvlab.engine.worker._fault_injection import VARIABLE

pytestmark = pytest.mark.engine

# more than one block of the cache, which has 128 tokens on a CPU
PROMPT = [(7 * k) % 500 + 3 for k in range(150)]
# live memory even where linear weights are packed; moves every KV
NORM = "model.layers.0.input_layernorm.weight"


class Planted:
    """A synced engine, its trainer, and a way to spoil a weight of it."""

    def __init__(self, lab: jv.Lab, order: Path) -> None:
        model = jv.models.tiny("llama")
        self.pool = lab.launch(
            model, name="bisected", env={VARIABLE: str(order)}
        ).wait()
        self.policy = jv.Policy.from_pretrained(model)
        self.link = lab.connect(self.policy.params, self.pool, rules="policy")
        self._order = order

    def negate(self) -> None:
        """Turn the sign of one live tensor; a second time turns it back."""
        self._order.write_text(
            json.dumps(
                {"who": "worker", "phase": "check", "do": "negate", "parameter": NORM}
            )
        )
        self.link.verify()
        assert not self._order.exists(), "the fault was not injected"

    def bisect(self, prompt: Any = PROMPT, **options: Any) -> Any:
        return self.link.bisect(prompt, self.policy, max_tokens=8, **options)


@pytest.fixture(scope="module")
def planted(lab: jv.Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    it = Planted(lab, tmp_path_factory.mktemp("fault") / "order.json")
    yield it
    it.link.close()
    it.pool.close()


@pytest.fixture
def synced(planted: Planted) -> Planted:
    """The same, after at least one sync, whichever test runs alone."""
    if not planted.link.version:
        planted.link.sync(planted.policy.params)
    return planted


def states(found: Any) -> list[str]:
    return [c.state for c in found.checks]


def test_never_synced_but_equal_then_synced(planted: Planted):
    found = planted.bisect()
    assert found.agrees, found
    assert "bit for bit" in found.checks[2].evidence, "packed ones are read back"
    other = jv.Policy.from_pretrained(jv.models.tiny("llama", seed=1))
    never = planted.link.bisect(PROMPT, other, max_tokens=8)
    assert never.cause == "version", never
    assert "nothing was ever synced" in never.verdict
    assert planted.link.sync(planted.policy.params).verified
    found = planted.bisect()
    assert found.agrees, found
    assert found.gap < 1e-3
    assert "cause" not in states(found)
    assert found.to_dict()["checks"][0]["state"] == "ok"


def test_a_trainer_that_moved_on(synced: Planted):
    before = synced.policy.params
    synced.policy.params = jax.tree.map(lambda leaf: leaf * 1.001, before)
    found = synced.bisect()
    assert found.cause == "version", found
    assert "moved on since version" in found.verdict
    assert "link.sync" in found.remedy
    assert found.tensors
    assert 0 < max(t.max_change for t in found.tensors) < 0.1
    assert states(found)[:3] == ["ok", "ok", "cause"]
    assert set(states(found)[3:]) == {"skipped"}
    old = synced.pool.generate([PROMPT], max_tokens=8)[0]
    synced.link.sync(synced.policy.params)
    assert synced.bisect().agrees, "the remedy helps"
    assert synced.bisect(old).cause == "version", "a sample of the version before"
    synced.policy.params = before
    synced.link.sync(before)


def test_a_tensor_that_changed_in_the_engine(synced: Planted):
    synced.negate()
    found = synced.bisect()
    assert found.cause == "tensor", found
    assert NORM in found.verdict
    assert [t.parameter for t in found.tensors] == [NORM]
    assert found.tensors[0].share_changed > 0.9
    synced.link.sync(synced.policy.params)
    assert synced.bisect().agrees, "the remedy helps"


def test_a_prefix_cache_of_other_weights(synced: Planted):
    prompt = PROMPT[::-1]  # of which the cache holds nothing yet
    synced.negate()
    # the cache now holds it as the spoilt weights see it
    synced.pool.generate([prompt], max_tokens=1)
    synced.negate()
    found = synced.bisect(prompt)
    assert found.cause == "prefix cache", found
    facts = next(c.facts for c in found.checks if c.name == "prefix cache")
    assert facts["with_cache"] > 10 * facts["without"]
    print(found.verdict)
    synced.pool.pause(clear_cache=True)
    paused = synced.bisect(prompt)
    assert paused.cause == "state"
    assert "paused" in paused.verdict
    synced.pool.resume()
    assert synced.bisect(prompt).agrees, "the remedy helps"


def test_sampler_settings(synced: Planted):
    found = synced.bisect(temperature=0.5)
    assert found.cause == "sampler", found
    assert "temperature=0.5" in found.verdict
    assert "temperature=0.5" in found.remedy
    found = synced.bisect(temperature=1.0, top_p=0.3, seed=3)
    assert found.cause == "sampler", found
    assert "top_p=0.3" in found.verdict
    found = synced.bisect(temperature=0.5, presence_penalty=0.0, repetition_penalty=1.3)
    assert "temperature=0.5, repetition_penalty=1.3" in found.verdict
    assert "raw_logprobs" in found.remedy
    drawn = synced.pool.generate([PROMPT], max_tokens=8, temperature=0.5, seed=0)[0]
    assert synced.bisect(drawn).cause == "sampler"


def test_two_models_that_compute_differently(synced: Planted):
    """Layer by layer: one of them looks back four tokens only, in layer 2 alone, with the same weights."""
    right = synced.policy
    states = synced.pool.hidden(PROMPT)
    mine = np.asarray(right.hidden(right.params, np.array([PROMPT])))[:, 0]
    assert (
        states.shape
        == mine.shape
        == (right.config.layers, len(PROMPT), right.config.width)
    )
    assert np.abs(states - mine).max() < 1e-3 * np.abs(mine).max(), (
        "the engine's own hidden states"
    )
    windows = tuple(
        4 if layer == 2 else window for layer, window in enumerate(right.config.windows)
    )
    wrong = jv.Policy(
        right.params,
        right.runtime,
        config=dataclasses.replace(right.config, windows=windows),
        mesh=right.mesh,
        source=right.source,
        hf_config=right.hf_config,
        tensors=right._tensors,
        bindings=right._bindings,
    )
    found = synced.link.bisect(PROMPT, wrong, max_tokens=8)
    assert found.cause == "model", found
    assert "starting in layer 2" in found.verdict
    print(found.checks[-1].evidence)
    with pytest.raises(jv.errors.ConfigError, match="policies fit"):
        synced.link.bisect(PROMPT)
    assert synced.pool.generate([PROMPT], max_tokens=2)[0].token_ids.size, (
        "the hooks are off again"
    )


def test_dtype(synced: Planted):
    half = jv.Policy.from_pretrained(synced.policy.source, compute_dtype="bfloat16")
    found = synced.link.bisect(PROMPT, half, max_tokens=8)
    assert found.cause == "dtype", found
    assert "the engine computes in float32, the trainer in bfloat16" in found.verdict
    facts = next(c.facts for c in found.checks if c.name == "dtype")
    assert facts["gap"] > 1e-3
    assert facts["rounding"] > facts["gap"] / 4
    print(
        f"bfloat16 against float32: {facts['gap']:.2g} nats, rounding alone {facts['rounding']:.2g}"
    )
