"""Tunix' own learners on real vLLM through a pool: GRPO beside its vanilla sampler, LoRA, agents, log-probabilities."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab import errors

pytest.importorskip("tunix", reason="google-tunix is not installed")

import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from transformers import AutoTokenizer
from tunix import AgenticGRPOConfig, AgenticGRPOLearner
from tunix.rl.agentic.parser.chat_template_parser.parser import QwenChatTemplateParser
from tunix.rl.rollout.base_rollout import RolloutConfig

from tests.integrations.tunix_world import (
    PROMPTS,
    SIZES,
    batches,
    cluster_of,
    learner_of,
    letters,
    mesh,
    qwen3_actor,
    rollout_on,
)

pytestmark = pytest.mark.engine
STEPS = 16
GROUP = 8


@pytest.fixture(scope="module")
def folder() -> str:
    return jv.models.tiny("qwen3", **SIZES)


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def served(lab: jv.Lab, folder: str) -> Iterator[jv.Pool]:
    """One engine for all of them; it can hold an adapter."""
    engine = {"enable_lora": True, "max_lora_rank": 8}
    pool = lab.launch(folder, name="tunix", engine=engine).wait()
    yield pool
    pool.close(300)


def trained(cluster: Any) -> tuple[list[float], float, float]:
    """The mean reward of each step, the seconds of the median one, and tokens per second while generating."""
    means: list[float] = []
    times: list[float] = []
    rates: list[float] = []
    generate = cluster.rollout.generate

    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        out = generate(*args, **options)
        rates.append(sum(map(len, out.tokens)) / (time.perf_counter() - start))
        return out

    cluster.rollout.generate = timed

    def reward(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        found = letters(prompts, completions)
        means.append(float(np.mean(found)))
        times.append(time.perf_counter())
        # else the vanilla sampler draws the same numbers in each step
        cluster.cluster_config.rollout_config.seed = jax.random.PRNGKey(len(means))
        return found

    more = (
        {"metric_fns": [cluster.rollout.metrics]}
        if hasattr(cluster.rollout, "metrics")
        else {}
    )
    learner_of(cluster, GROUP, reward=reward, **more).train(batches(STEPS))
    return means, float(np.median(np.diff(times)[1:])), float(np.median(rates[1:]))


def test_the_reward_rises_as_with_the_vanilla_sampler(
    served: jv.Pool, folder: str, tokenizer: Any, record_property: Any
):
    engines = {"jvlab": rollout_on(served), "vanilla": "vanilla"}
    curves: dict[str, list[float]] = {}
    for name, engine in engines.items():
        cluster = cluster_of(
            qwen3_actor(folder), tokenizer, engine, STEPS, learning_rate=3e-2
        )
        curves[name], seconds, rate = trained(cluster)
        record_property(f"{name}_step_s", seconds)
        record_property(f"{name}_tokens_per_s", rate)
        record_property(f"{name}_rewards", curves[name])
        if name == "jvlab":
            rollout = cluster.rollout
            summary = rollout.record.summary()
            assert rollout.link.meaning.how == "function"
            assert summary["syncs_verified"] == STEPS + 1
            assert summary["steps"] == STEPS
            assert summary["max_staleness"] == 0
            steps = rollout.record.steps()
            np.testing.assert_allclose(steps["reward_mean"], curves[name], rtol=1e-6)
            assert "Record('tunix on tunix'" in repr(rollout.record)
            rollout.close()
    for curve in curves.values():
        assert np.mean(curve[-4:]) > curve[0] + 0.3, curves
    # the first step samples the same distribution, and each mean of 32 samples is off by about 0.02; later ones are
    # two runs of one recipe
    assert abs(curves["jvlab"][0] - curves["vanilla"][0]) < 0.12, curves
    last = {name: np.mean(curve[-4:]) for name, curve in curves.items()}
    assert abs(last["jvlab"] - last["vanilla"]) < 0.2, curves


def test_a_lora_actor_goes_into_the_adapter_slot(
    served: jv.Pool, folder: str, tokenizer: Any
):
    actor = qwen3_actor(folder, seed=1)
    provider = qwix.LoraProvider(
        module_path=".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
        rank=4,
        alpha=8.0,
    )
    with mesh():
        adapted = qwix.apply_lora_to_model(
            actor, provider, rngs=nnx.Rngs(1), **actor.get_model_input()
        )
    # two passes over each batch: the second one needs log-probabilities of the first
    cluster = cluster_of(adapted, tokenizer, rollout_on(served), 2)
    rollout = cluster.rollout
    base, adapter = rollout.reports
    assert "checked by function" in base.meaning
    assert "still zero" in adapter.meaning
    assert adapter.bytes < base.bytes / 10
    learner_of(cluster, 4, num_iterations=2).train(batches(1))
    assert rollout.link.meaning.how == "function", rollout.link.meaning
    assert rollout.reports[-1].bytes == adapter.bytes
    assert [e.kind for e in rollout.record.events()].count("score") == 1
    config = RolloutConfig(
        max_tokens_to_generate=8,
        max_prompt_length=16,
        temperature=1.0,
        return_logprobs=True,
    )
    out = rollout.generate(["Digits:", "Digits:", "12"], config)
    completions = np.zeros((3, 8), int)
    sampled = np.zeros((3, 8))
    for k, (tokens, logprobs) in enumerate(zip(out.tokens, out.logprobs, strict=True)):
        completions[k, : len(tokens)] = tokens
        sampled[k, : len(tokens)] = logprobs
    own = completions != rollout.pad_id()
    rows = jnp.asarray(out.left_padded_prompt_tokens), jnp.asarray(completions)
    scored = np.asarray(rollout.get_per_token_logps(*rows))
    actors = np.asarray(
        cluster.get_actor_per_token_logps(
            *rows, pad_id=rollout.pad_id(), eos_id=rollout.eos_id()
        )
    )
    assert np.abs(scored - sampled)[own].max() < 1e-4
    assert np.abs(actors - sampled)[own].max() < 1e-4
    rollout.close()


def test_agents_of_many_threads_are_one_batch(
    served: jv.Pool, folder: str, tokenizer: Any
):
    """One prompt to a call, from threads of the learner.

    With off_policy_steps Tunix 0.1.7 can stop for ever: an episode that starts while a sync waits blocks the loop on
    which the others, whom the sync waits for, would end.
    """
    per_step = len(PROMPTS) * 4
    cluster = cluster_of(
        qwen3_actor(folder, seed=2),
        tokenizer,
        rollout_on(served),
        3,
        max_prompt_length=64,
        # Tunix drops an episode that fills its room: a fifth of the tokens end one
        eos_tokens=list(range(230, 288)),
    )
    rollout = cluster.rollout
    config = AgenticGRPOConfig(
        num_generations=4,
        beta=0.0,
        max_response_length=16,
        max_concurrency=32,
    )
    learner = AgenticGRPOLearner(
        rl_cluster=cluster,
        algo_config=config,
        reward_fns=letters,
        chat_parser=QwenChatTemplateParser(tokenizer),
        metric_fns=[rollout.metrics],
    )
    learner.train(batches(3))
    record = rollout.record
    steps = record.events("step")
    assert len(steps) == 3
    assert [step.samples for step in steps] == [per_step] * 3
    assert {len(step.groups) for step in steps} == {len(PROMPTS)}
    assert all(step.reward_mean == step.reward_mean for step in steps)
    assert [set(step.staleness) for step in steps] == [{0}] * 3
    # what vLLM's own scheduler says while eight threads generate
    long = RolloutConfig(max_tokens_to_generate=200, max_prompt_length=64)
    long.rollout_vllm_sampling_kwargs = {"ignore_eos": True}
    most = 0
    done = threading.Event()

    def one(k: int) -> int:
        return len(rollout.generate([f"{k}:"], long).tokens[0])

    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(one, k) for k in range(8)]
        until = time.monotonic() + 60
        while not all(f.done() for f in running) and time.monotonic() < until:
            most = max(most, served.status()["replicas"][0]["running"])
            done.wait(0.02)
        assert [f.result(60) for f in running] == [200] * 8
    assert most == 8
    rollout.close()


def test_an_actor_that_computes_something_else_is_refused(
    served: jv.Pool, folder: str, tokenizer: Any
):
    """Names, shapes and bytes are right; log-probabilities are not."""
    actor = qwen3_actor(folder, seed=3)
    for layer in actor.layers:
        layer.attn.scale *= 3.0
    with pytest.raises(errors.MeaningError, match="nats apart") as caught:
        cluster_of(actor, tokenizer, rollout_on(served))
    assert "compare its config with the folder's config.json" in caught.value.remedy
