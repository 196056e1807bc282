"""LoRA in memory, on real vLLM: adapters synced into a slot, base weights synced below them, errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jvlab as jv
from jvlab import errors
from tests.fuzzing import soak_but
from tests.live.test_sync_versions import until_generating

pytestmark = pytest.mark.engine
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 16}
PROMPTS = [[5, 6, 7, 8] * 4, [100, 200, 300], list(range(50, 90))]


@pytest.fixture(scope="module")
def adapting(lab: jv.Lab, llama: str) -> Iterator[jv.Pool]:
    engine = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    pool = lab.launch(llama, name="adapting", engine=engine).wait()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def base(llama: str) -> jv.Policy:
    return jv.Policy.from_pretrained(llama)


def trained(policy: Any, seed: int, size: float = 0.05) -> Any:
    """Adapters as after training: no value is zero."""
    leaves, tree = jax.tree.flatten(policy.lora)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            x + size * jax.random.normal(k, x.shape)
            for k, x in zip(keys, leaves, strict=True)
        ],
    )


def tokens_of(batch: Any) -> list[list[int]]:
    return [s.token_ids.tolist() for s in batch]


def test_adapters_are_synced_into_a_slot(
    lab: jv.Lab, adapting: jv.Pool, base: jv.Policy, tmp_path: Path
) -> None:
    policy = base.with_lora(rank=8, alpha=12)
    before = adapting.generate(PROMPTS, **GREEDY)
    # a mapping of its own, also if run again
    link = lab.connect(policy.lora, adapting, bucket_mib=1 + time.time() % 1)
    assert tokens_of(adapting.generate(PROMPTS, **GREEDY)) == tokens_of(before), (
        "an adapter starts as zero"
    )
    first = link.sync(policy.lora)
    assert first.verified
    assert link.meaning.state == "pending", "a zero adapter proves nothing"
    seen = tokens_of(before)
    for seed in (1, 2):
        policy.lora = trained(policy, seed)
        report = link.sync(policy.lora, mode="staged" if seed == 2 else "direct")
        assert report.verified
        assert report.version == link.version == first.version + seed
        assert link.verify(policy.lora).ok
        ours = adapting.generate(PROMPTS, **GREEDY)
        assert tokens_of(ours) != seen
        seen = tokens_of(ours)
        assert {v for s in ours for v in s.versions.tolist()} == {report.version}
        scores = adapting.score(ours)
        assert scores.gap(ours) < 1e-3
        row = [*PROMPTS[0], *seen[0]]
        expected = np.asarray(policy.logprobs(policy.lora, [row]))[0, len(PROMPTS[0]) :]
        assert np.abs(expected - ours[0].logprobs).max() < 1e-3
        # the same adapter, by way of files
        adapting.load_adapter(
            "file", policy.save_pretrained(tmp_path / f"adapter{seed}")
        )
        theirs = adapting.generate(PROMPTS, adapter="file", **GREEDY)
        assert tokens_of(theirs) == seen
        assert (
            max(
                np.abs(a.logprobs - b.logprobs).max()
                for a, b in zip(ours, theirs, strict=True)
            )
            < 1e-5
        )
        adapting.unload_adapter("file")
    assert link.meaning.how == "function"
    assert not link.verify(trained(policy, 9)).ok, "other adapters have other digests"
    assert link.verify().ok


def test_what_arrived_is_what_the_engine_holds(
    lab: jv.Lab, adapting: jv.Pool, base: jv.Policy
) -> None:
    policy = base.with_lora(rank=8, alpha=12, targets=["q_proj", "o_proj"])
    policy.lora = trained(policy, 3)
    link = lab.connect(policy.lora, adapting)
    assert link.sync(policy.lora).verified
    a, b = policy.lora.pair(policy.lora.spec.modules[0])
    width = a.shape[1]
    held = np.frombuffer(
        adapting.peek("adapter.model.layers.0.self_attn.qkv_proj.lora_a.0"), np.float32
    )
    held = held.reshape(16, width)
    np.testing.assert_array_equal(held[:8], np.asarray(a)[0].T)
    assert not held[8:].any()
    out = np.asarray(b)[0].reshape(8, -1).T * np.float32(1.5)
    held = np.frombuffer(
        adapting.peek("adapter.model.layers.0.self_attn.qkv_proj.lora_b.0"), np.float32
    )
    np.testing.assert_array_equal(held.reshape(-1, 16)[:, :8], out)


@pytest.mark.parametrize("mode", soak_but(["direct"], ["direct", "staged"]))
def test_nothing_is_left_of_a_wider_adapter(
    lab: jv.Lab, adapting: jv.Pool, base: jv.Policy, mode: str
) -> None:
    wide = base.with_lora(rank=16)
    wide.lora = trained(wide, 10)
    assert lab.connect(wide.lora, adapting).sync(wide.lora).verified
    narrow = base.with_lora(rank=4, targets=["q_proj"])
    narrow.lora = trained(narrow, 11)
    link = lab.connect(narrow.lora, adapting)
    assert link.sync(narrow.lora, mode=mode).verified
    sample = adapting.generate(PROMPTS, **GREEDY)[0]
    row = [*PROMPTS[0], *sample.token_ids.tolist()]
    expected = np.asarray(narrow.logprobs(narrow.lora, [row]))[0, len(PROMPTS[0]) :]
    assert np.abs(expected - sample.logprobs).max() < 1e-3


def test_requests_in_flight_go_on_with_spans(
    lab: jv.Lab, adapting: jv.Pool, base: jv.Policy
) -> None:
    policy = base.with_lora(rank=8)
    link = lab.connect(policy.lora, adapting)
    policy.lora = trained(policy, 4)
    began = link.sync(policy.lora).version
    out: list[Any] = []
    many = {**GREEDY, "max_tokens": 200}
    policy.lora = jax.block_until_ready(trained(policy, 5))
    thread = threading.Thread(
        target=lambda: out.extend(adapting.generate(PROMPTS, **many))
    )
    thread.start()
    # each has tokens of the version before, and most of them are still to come
    until_generating(adapting, 30, len(PROMPTS))
    ended = link.sync(policy.lora).version
    thread.join()
    assert {v for s in out for v in s.versions.tolist()} == {began, ended}
    whole = adapting.generate(PROMPTS, **GREEDY)
    assert {v for s in whole for v in s.versions.tolist()} == {ended}, (
        "and no block of older KV is read"
    )
    row = [*PROMPTS[0], *whole[0].token_ids.tolist()]
    expected = np.asarray(policy.logprobs(policy.lora, [row]))[0, len(PROMPTS[0]) :]
    assert np.abs(expected - whole[0].logprobs).max() < 1e-3


def test_grpo_trains_adapters_alone(
    lab: jv.Lab, adapting: jv.Pool, base: jv.Policy, tmp_path: Path
) -> None:
    policy = base.with_lora(rank=8)
    link = lab.connect(policy.lora, adapting)
    given = {
        "group_size": 4,
        "prompts_per_step": 2,
        "learning_rate": 1e-2,
        "checkpoint_every": 2,
        "background": False,
    }
    run = jv.grpo(
        policy,
        adapting,
        link,
        jv.tasks.digits(),
        steps=2,
        folder=tmp_path / "run",
        **given,
    )
    s = run.record.summary()
    assert (s["steps"], s["syncs_verified"], s["faults"]) == (2, 3, {})
    assert 0 < s["logprob_gap"] < 1e-3
    assert not policy.lora.is_zero()
    again = base.with_lora(rank=8)
    more = jv.grpo(
        again,
        adapting,
        link,
        jv.tasks.digits(),
        steps=3,
        folder=tmp_path / "run",
        resume=True,
        **given,
    )
    assert more.record.summary()["steps"] == 3
    assert more.record.steps()["logprob_gap"].max() < 1e-3, (
        "it went on with the adapters of the checkpoint"
    )


def test_the_base_below_adapters_is_synced_bit_for_bit(
    lab: jv.Lab, adapting: jv.Pool, pool: jv.Pool, base: jv.Policy
):
    adapted = base.with_lora(rank=8)
    adapted.lora = trained(adapted, 6)
    lab.connect(adapted.lora, adapting).sync(adapted.lora)
    with_adapter = tokens_of(adapting.generate(PROMPTS, **GREEDY))
    link = lab.connect(base.params, adapting)
    names = [p.name for p in link.plan.parameters]
    assert sorted(names) == sorted(p.name for p in pool.trace()[0].parameters), (
        "as without LoRA"
    )
    loaded = {name: pool.peek(name) for name in names}  # by vLLM's own loader
    for mode in ("direct", "staged"):
        changed = jax.tree.map(lambda x: x * 1.25, base.params)
        assert link.sync(changed, mode=mode).verified
        assert link.verify(changed).ok
        assert not link.verify(base.params).ok
        ours = adapting.generate(PROMPTS, **GREEDY)
        row = [*PROMPTS[1], *ours[1].token_ids.tolist()]
        expected = np.asarray(base.logprobs(changed, [row]))[0, len(PROMPTS[1]) :]
        assert np.abs(expected - ours[1].logprobs).max() < 1e-3, (
            "the base alone, without the adapter"
        )
        assert all(adapting.peek(name) != loaded[name] for name in names)
        assert link.sync(base.params, mode=mode).verified
        assert {name: adapting.peek(name) for name in names} == loaded
    ours, theirs = (
        adapting.generate(PROMPTS, **GREEDY),
        pool.generate(PROMPTS, **GREEDY),
    )
    assert tokens_of(ours) == tokens_of(theirs) != with_adapter
    assert (
        max(
            np.abs(x.logprobs - y.logprobs).max()
            for x, y in zip(ours, theirs, strict=True)
        )
        < 1e-5
    )


def test_what_does_not_fit_is_refused_with_a_remedy(
    lab: jv.Lab, adapting: jv.Pool, pool: jv.Pool, base: jv.Policy
) -> None:
    with pytest.raises(
        errors.Unsupported,
        match=r"(?s)launched without LoRA.*'max_lora_rank': 8.*policy.merge",
    ):
        lab.connect(base.with_lora(rank=8).lora, pool)
    with pytest.raises(
        errors.ConfigError, match=r"(?s)rank 32.*room for 16.*'max_lora_rank': 32"
    ):
        lab.connect(base.with_lora(rank=32).lora, adapting)
    policy = base.with_lora(rank=4)
    lab.connect(policy.lora, adapting)
    folder = {
        "model.layers.0.self_attn.q_proj.lora_A.weight": np.ones(
            (4, base.config.width), np.float32
        )
    }
    folder["model.layers.0.self_attn.q_proj.lora_B.weight"] = np.ones(
        (base.config.heads * base.config.head_dim, 4), np.float32
    )
    adapting.load_adapter("one", folder, config={"lora_alpha": 4})
    with pytest.raises(
        errors.ConfigError, match=r"(?s)no slot for adapter 'two'.*'max_loras': 3"
    ):
        adapting.load_adapter("two", folder, config={"lora_alpha": 4})
    adapting.unload_adapter("one")


@pytest.mark.soak
def test_ranks_hold_their_parts(
    lab: jv.Lab, base: jv.Policy, llama: str, tmp_path: Path
) -> None:
    engine = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    pool = lab.launch(
        llama, name="adapting-tp", tensor_parallel=2, engine=engine
    ).wait()
    policy = base.with_lora(rank=8, alpha=12)
    policy.lora = trained(policy, 8)
    link = lab.connect(policy.lora, pool)
    assert link.plan.ranks == 2
    assert link.sync(policy.lora).verified
    ours = pool.generate(PROMPTS, **GREEDY)
    pool.load_adapter("file", policy.save_pretrained(tmp_path / "adapter"))
    assert tokens_of(pool.generate(PROMPTS, adapter="file", **GREEDY)) == tokens_of(
        ours
    )
    changed = jax.tree.map(lambda x: x * 1.25, base.params)
    below = lab.connect(base.params, pool)
    assert below.sync(changed).verified
    ours = pool.generate(PROMPTS, **GREEDY)
    row = [*PROMPTS[1], *ours[1].token_ids.tolist()]
    expected = np.asarray(base.logprobs(changed, [row]))[0, len(PROMPTS[1]) :]
    assert np.abs(expected - ours[1].logprobs).max() < 1e-3
    pool.close()
