"""Nine things about Tunix that a rollout class of another's can get wrong without a word, and what else it is asked."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab import errors

pytest.importorskip("tunix", reason="google-tunix is not installed")

import jax
from flax import nnx
from transformers import AutoTokenizer
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl import common
from tunix.rl import utils as rl_utils
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput

from tests.integrations.fake_pool import EOS, FakePool
from tests.integrations.tunix_world import (
    SIZES,
    Role,
    batches,
    cluster_of,
    learner_of,
    mesh,
    qwen3_actor,
    rollout_on,
)

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
CONFIG = {"max_tokens_to_generate": 6, "max_prompt_length": 8, "temperature": 1.0}


@pytest.fixture(scope="module")
def folder() -> str:
    return jv.models.tiny("qwen3", **SIZES)


@pytest.fixture(scope="module")
def actor(folder: str) -> Any:
    return qwen3_actor(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def make(actor: Any, tokenizer: Any) -> Any:
    """A rollout as Tunix makes it, on a fake pool."""

    def make(pool: FakePool, config: dict[str, Any] | None = None, **options: Any):
        return rollout_on(pool, **options)(
            rollout_actor=actor,
            tokenizer=TokenizerAdapter(tokenizer),
            mesh=mesh(),
            rollout_config=RolloutConfig(**{**CONFIG, **(config or {})}),
        )

    return make


def generate(rollout: Any, prompts: Any, **config: Any) -> Any:
    given = {**CONFIG, "return_logprobs": True, **config}
    return rollout.generate(prompts, RolloutConfig(**given))


# The nine traps -------------------------------------------------------------------------------------------------------


def test_1_syncs_stay_on(actor: Any, tokenizer: Any):
    pool = FakePool()
    cluster = cluster_of(actor, tokenizer, rollout_on(pool))
    assert cluster.rollout.model() is None
    assert learner_of(cluster).should_sync_weights
    assert rl_utils.is_sharing_weights(actor, actor), "a model would switch them off"


def test_2_the_first_sync_is_made_by_the_rollout(make: Any, actor: Any):
    pool = FakePool()
    rollout = make(pool)
    (link,) = pool.links
    assert not pool.calls
    assert link.version == len(rollout.reports) == 1
    own = nnx.to_flat_state(nnx.state(actor, nnx.Param))
    assert {".".join(map(str, path)) for path, _ in own} == link.held.keys()
    table = actor.embedder.input_embedding.value
    np.testing.assert_array_equal(link.held["embedder.input_embedding"], table)


def test_3_parameters_come_as_an_nnx_state_with_or_without_filter(
    make: Any, actor: Any
):
    pool = FakePool()
    rollout = make(pool)
    state = jax.tree.map(lambda a: a + 1, nnx.state(actor, nnx.Param))
    rollout.update_params(state, (nnx.Param,))
    held = pool.links[0].held["final_norm.w"]
    np.testing.assert_array_equal(held, actor.final_norm.w.value + 1)
    # as MaxText calls it
    rollout.update_params(nnx.state(actor, nnx.Param))
    held = pool.links[0].held["final_norm.w"]
    np.testing.assert_array_equal(held, actor.final_norm.w.value)
    assert [report.version for report in rollout.reports] == [1, 2, 3]


def test_4_a_sync_may_copy_though_tunix_forbids_it(actor: Any, tokenizer: Any):
    pool = FakePool()
    cluster = cluster_of(actor, tokenizer, rollout_on(pool))
    copies = lambda params: jax.device_put(np.ones(3)) + 1
    pool.links[0].on_sync = copies
    cluster.sync_weights()
    assert pool.links[0].version == 2
    with (
        jax.transfer_guard_host_to_device("disallow_explicit"),
        pytest.raises(Exception, match="Disallowed"),
    ):
        copies(None)


@pytest.mark.parametrize("seed", [None, 7])
def test_5_equal_neighbours_are_one_prompt(make: Any, tokenizer: Any, seed: int | None):
    pool = FakePool()
    rollout = make(pool)
    prompts = [np.str_("abc")] * 3 + [np.str_("de")] * 3
    out = generate(rollout, prompts, seed=seed)
    (call,) = pool.calls
    begin = tokenizer.bos_token_id
    assert call["prompts"] == [
        [begin, *tokenizer.encode(p, add_special_tokens=False)] for p in ("abc", "de")
    ]
    assert call["n"] == 3
    assert call.get("seed") == seed
    assert len(out.text) == len(out.tokens) == 6
    for row, prompt in zip(out.left_padded_prompt_tokens, prompts, strict=True):
        ids = [begin, *tokenizer.encode(str(prompt), add_special_tokens=False)]
        assert row.tolist() == [0] * (8 - len(ids)) + ids
    assert out.tokens[0].tolist() != out.tokens[1].tolist()


def test_5_groups_that_meet_stay_groups(make: Any):
    """The same prompt in two groups, side by side."""
    pool = FakePool()
    rollout = make(pool)
    generate(rollout, ["abc"] * 4 + ["de"] * 2)
    assert [(len(c["prompts"]), c["n"]) for c in pool.calls] == [(3, 2)]
    again = FakePool()
    rollout = make(again)
    out = generate(rollout, ["abc"] * 4 + ["de"] * 2, seed=1)
    assert [c["n"] for c in again.calls] == [2, 2, 2]
    assert [c["seed"] for c in again.calls] == [1, 3, 5], "no seed is used twice"
    generate(rollout, ["abc"] * 2, seed=1)
    assert again.calls[-1]["seed"] == 7, "nor by the next call"
    assert len({tuple(row) for row in out.tokens[:4]}) == 4


def test_6_the_end_is_kept_in_the_tokens_with_processed_logprobs(
    make: Any, tokenizer: Any
):
    pool = FakePool()
    out = generate(make(pool), ["abc"] * 3)
    assert out.tokens[2][-1] == EOS
    assert [len(row) for row in out.tokens] == [6, 6, 4]
    for tokens, logprobs in zip(out.tokens, out.logprobs, strict=True):
        assert logprobs.dtype == np.float32
        assert tokens.dtype == np.int32
        np.testing.assert_allclose(
            logprobs, -np.arange(1, len(tokens) + 1) / 10, rtol=1e-6
        )
    assert out.text[2] == tokenizer.decode(out.tokens[2][:-1]), "not in the text"
    assert pool.calls[0]["stop_token_ids"] == [EOS]
    assert generate(make(pool), ["abc"], return_logprobs=False).logprobs is None


def test_6_old_logprobs_are_scored_without_padding(make: Any):
    pool = FakePool()
    rollout = make(pool)
    prompts = np.array([[0, 0, 5, 6], [0, 7, 8, 9]])
    completions = np.array([[11, 12, 0, 0], [13, 0, 14, 15]])
    found = rollout.get_per_token_logps(jax.numpy.asarray(prompts), completions)
    assert pool.scored == [[[5, 6, 11, 12], [7, 8, 9, 13, 0, 14, 15]]]
    expected = [[-0.11, -0.12, 0, 0], [-0.13, 0, -0.14, -0.15]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert isinstance(found, jax.Array)


def test_6_old_logprobs_at_another_temperature_are_those_of_the_samples(make: Any):
    """A pool scores at temperature 1; Tunix' default is 0.9, and its loss computes with that."""
    pool = FakePool()
    rollout = make(pool, {"temperature": 0.7})
    out = generate(rollout, ["abc"] * 3, temperature=0.7)
    completions = np.zeros((3, 8), int)
    for row, tokens in zip(completions, out.tokens, strict=True):
        row[: len(tokens)] = tokens
    rows = jax.numpy.asarray(out.left_padded_prompt_tokens), completions
    found = np.asarray(rollout.get_per_token_logps(*rows))
    for row, logprobs in zip(found, out.logprobs, strict=True):
        np.testing.assert_array_equal(row[: len(logprobs)], logprobs)
        assert not row[len(logprobs) :].any()
    assert not pool.scored
    rollout.update_params(pool.links[0].trainer.params)
    with pytest.raises(errors.Unsupported, match=r"not at 0.7"):
        rollout.get_per_token_logps(*rows)


def test_6_one_prompt_may_be_a_bare_text(make: Any):
    """So Tunix' cluster hands on what a chat parser made."""
    pool = FakePool()
    out = generate(make(pool), "abc")
    assert len(out.text) == len(pool.calls[0]["prompts"]) == 1


def test_6_threads_generate_at_the_same_time(make: Any):
    """Each of the pool's calls waits until all are there: one after the other would wait for ever."""
    rollout = make(FakePool(together=8))
    with ThreadPoolExecutor(8) as threads:
        found = list(
            threads.map(lambda k: generate(rollout, [f"prompt {k}"]), range(8))
        )
    assert len({tuple(out.tokens[0]) for out in found}) > 1
    assert rollout.record.summary()["samples"] == 8


def test_7_meshes_decide_whether_training_overlaps(actor: Any, tokenizer: Any):
    pool = FakePool()
    shared = mesh()
    meshes = dict.fromkeys(Role, shared)
    cluster = cluster_of(actor, tokenizer, rollout_on(pool), meshes=meshes)
    assert cluster.cluster_config.role_to_mesh[Role.ROLLOUT] is shared
    assert not learner_of(cluster).can_enable_async_rollout
    own = cluster_of(actor, tokenizer, rollout_on(pool, overlap=True), meshes=meshes)
    assert own.cluster_config.role_to_mesh[Role.ROLLOUT].axis_names == ("jvlab",)
    assert learner_of(own).can_enable_async_rollout
    apart = {**meshes, Role.ROLLOUT: mesh(("other",))}
    given = cluster_of(actor, tokenizer, rollout_on(pool), meshes=apart)
    assert given.cluster_config.role_to_mesh[Role.ROLLOUT] is apart[Role.ROLLOUT]
    assert learner_of(given).can_enable_async_rollout


def test_8_offloading_is_refused(actor: Any, tokenizer: Any):
    pool = FakePool()
    with pytest.raises(errors.ConfigError, match="offload_to_cpu") as caught:
        cluster_of(actor, tokenizer, rollout_on(pool), offload_to_cpu=True)
    assert "offload_to_cpu=False" in caught.value.remedy
    assert not pool.links


def test_9_only_what_the_next_tunix_has_too_is_used(
    make: Any, actor: Any, monkeypatch: pytest.MonkeyPatch
):
    """There compute_per_token_logps takes no `return_logits`; a RolloutOutput has the same fields."""
    fields = {field.name for field in dataclasses.fields(RolloutOutput)}
    assert {
        "text",
        "logits",
        "tokens",
        "left_padded_prompt_tokens",
        "logprobs",
    } <= fields
    asked: list[set[str]] = []

    def next_one(
        graphdef: Any,
        state: Any,
        prompt_tokens: Any,
        completion_tokens: Any,
        pad_id: int,
        eos_id: int,
    ) -> Any:
        asked.append(set(inspect.signature(next_one).parameters))
        return completion_tokens * 0.0

    monkeypatch.setattr(common, "compute_per_token_logps", next_one)
    pool = FakePool()
    make(pool)
    trainer = pool.links[0].trainer
    found = trainer.logprobs(trainer.params, np.ones((2, 5), int))
    assert found.shape == (2, 5)
    assert asked


# What else ------------------------------------------------------------------------------------------------------------


def test_a_learner_trains_on_it(actor: Any, tokenizer: Any, tmp_path: Path):
    """Two steps of GRPO, which trains on a half of its prompts while it samples the other; all reaches the record."""
    pool = FakePool()
    cluster = cluster_of(
        actor,
        tokenizer,
        rollout_on(pool, record=tmp_path / "run", overlap=True),
        training={
            "mini_batch_size": 4,
            "train_micro_batch_size": 2,
            "rollout_micro_batch_size": 2,
        },
        max_tokens_to_generate=6,
    )
    rollout = cluster.rollout
    learner = learner_of(cluster, metric_fns=[rollout.metrics])
    training = threading.Event()
    update = cluster.update_actor

    def updating(*args: Any, **options: Any) -> Any:
        training.set()
        return update(*args, **options)

    cluster.update_actor = updating
    waited: list[bool] = []
    # one after the other, this would time out
    pool.on_call = lambda number: waited.append(number != 2 or training.wait(300))
    learner.train(batches(2))
    assert waited == [True] * 4
    assert "staleness" in rollout.record._repr_html_()
    rollout.close()
    record = jv.Record.open(tmp_path / "run")
    summary = record.summary()
    assert summary["steps"] == 2
    assert summary["syncs"] == summary["syncs_verified"] == 3
    assert summary["samples"] == 32
    assert summary["ended"] == "finished"
    assert summary["max_staleness"] == 0
    assert record.steps()["samples"].tolist() == [16, 16]
    assert record.steps()["version"].tolist() == [1, 2]
    assert np.isfinite(record.steps()["reward_mean"]).all()
    samples = record.samples(step=1)
    assert {s.versions[0][0] for s in samples} == {2}
    assert len({s.group for s in samples}) == 4
    assert all(np.isfinite(s.reward) and np.isfinite(s.advantage) for s in samples)
    held = pool.links[0].held["embedder.input_embedding"]
    trained = cluster.actor_trainer.model.embedder.input_embedding.value
    np.testing.assert_array_equal(held, trained)


def test_an_actor_on_several_devices_scores_too(folder: str, tokenizer: Any, make: Any):
    """Its rows are shared out over the mesh: fewer than devices would not do."""
    devices = np.array(jax.devices()[:4]).reshape(4, 1)
    apart = jax.sharding.Mesh(devices, ("fsdp", "tp"))
    scores = []
    for axes in (mesh(), apart):
        pool = FakePool()
        meshes = dict.fromkeys(Role, axes)
        engine = rollout_on(pool)
        cluster_of(qwen3_actor(folder, seed=5), tokenizer, engine, meshes=meshes)
        trainer = pool.links[0].trainer
        tokens = np.arange(10, 24).reshape(2, 7)
        scores.append(np.asarray(trainer.logprobs(trainer.params, tokens)))
        kernel = trainer.params["layers"][0]["attn"]["q_proj"]["w"][...]
        assert len(kernel.sharding.device_set) == axes.size
    assert scores[0].shape == (2, 7)
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)


def test_a_dead_engine_ends_the_training(actor: Any, tokenizer: Any, tmp_path: Path):
    pool = FakePool()

    def dies(number: int) -> None:
        raise errors.ReplicaLost("fake/0 was lost")

    pool.on_call = dies
    folder = tmp_path / "run"
    cluster = cluster_of(actor, tokenizer, rollout_on(pool, record=folder))
    with pytest.raises(errors.ReplicaLost):
        learner_of(cluster).train(batches(2))
    assert jv.Record.open(folder).running, "until nobody holds it"
    cluster.rollout.close("failed")
    assert jv.Record.open(folder).summary()["ended"] == "failed"


def test_a_rollout_that_nobody_holds_ends_its_record(make: Any, tmp_path: Path):
    rollout = make(FakePool(), record=tmp_path / "run")
    assert rollout.record.running
    del rollout
    gc.collect()
    record = jv.Record.open(tmp_path / "run")
    assert not record.running
    assert record.summary()["ended"] == "interrupted"


def test_a_prompt_longer_than_it_may_be_widens_the_padding(make: Any):
    """As in Tunix' own samplers: to a power of two, nothing is cut."""
    out = generate(make(FakePool()), ["one two three four five six seven", "a"])
    width = out.left_padded_prompt_tokens.shape[1]
    assert width == 32
    assert (out.left_padded_prompt_tokens[0] != 0).sum() > 16


def test_settings_reach_the_pool(make: Any):
    pool = FakePool()
    more = {"rollout_vllm_sampling_kwargs": {"min_p": 0.1}, "eos_tokens": [7, 8]}
    generate(make(pool), ["a"], top_k=5, top_p=0.9, temperature=0.5, **more)
    call = pool.calls[0]
    assert (call["top_k"], call["top_p"], call["min_p"]) == (5, 0.9, 0.1)
    assert (call["temperature"], call["stop_token_ids"]) == (0.5, [7, 8])
    endless = {"rollout_vllm_sampling_kwargs": {"ignore_eos": True}}
    generate(make(pool), ["a"], **endless)
    assert pool.calls[1]["stop_token_ids"] == []


def test_a_key_of_jax_is_a_seed(make: Any):
    pool = FakePool()
    rollout = make(pool)
    for seed in (jax.random.PRNGKey(3), jax.random.key(3), 3):
        generate(rollout, ["a"], seed=seed)
    assert [call["seed"] for call in pool.calls] == [3, 4, 5]


def test_what_cannot_work_is_refused_at_once(make: Any, actor: Any):
    with pytest.raises(errors.ConfigError, match="takes 10 in all") as caught:
        make(FakePool(max_model_len=10))
    assert "max_model_len': 14" in caught.value.remedy
    with pytest.raises(errors.ConfigError, match="not a pool"):
        make("pool")
    with pytest.raises(errors.SamplingError, match="not a text"):
        generate(make(FakePool()), [[{"role": "user", "content": "a"}]])


def test_a_failed_first_sync_leaves_no_open_record(make: Any, tmp_path: Path):
    class Refusing(FakePool):
        def connect(self, trainer: Any, **options: Any) -> Any:
            raise errors.LinkBusy("another trainer holds the pool")

    with pytest.raises(errors.LinkBusy):
        make(Refusing(), record=tmp_path / "run")
    record = jv.Record.open(tmp_path / "run")
    assert not record.running
    assert record.summary()["ended"] == "failed"


def test_what_shapes_leave_open_is_read_as_tunix_writes_it(make: Any):
    class TwoWays(FakePool):
        def connect(self, trainer: Any, **options: Any) -> Any:
            if options["rules"] == "auto":
                raise errors.MatchError("2 ways fit")
            if options["rules"] != "tunix":
                raise errors.RuleError("no such rules")
            return super().connect(trainer, **options)

    pool = TwoWays()
    assert make(pool).reports
    assert pool.links[0].options["rules"] == "tunix"
    with pytest.raises(errors.RuleError):
        make(pool, rules="mine")


def test_maxtext_may_pass_its_config(make: Any):
    assert make(FakePool(), maxtext_config=object()).reports


def test_without_tunix_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['tunix'] = None\n"
        "import jvlab as jv\n"
        "try: jv.integrations.tunix\n"
        "except jv.errors.MissingDependency as error: print(error.remedy)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert "pip install --no-deps google-tunix==0.1.7" in done.stdout, done.stderr
    assert "safetensors" in done.stdout
