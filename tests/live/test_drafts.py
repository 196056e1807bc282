"""Draft models on real vLLM: what is sampled with them, and their weights, which follow the trainer's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab import errors
from tests.waiting import until

pytestmark = pytest.mark.engine
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}
SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.6, "seed": 5},
    {"temperature": 1.4, "top_k": 20},
]
PROMPTS = [[5, 6, 7, 8] * 4, [100, 200, 300], list(range(50, 90)), [9, 8, 7]]


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts") / "fault.json"


@pytest.fixture(scope="module")
def other() -> str:
    """The draft model's folder: of the model's shape and vocabulary, with other weights."""
    return jv.models.tiny("llama", seed=7)


@pytest.fixture(scope="module")
def drafting(
    lab: jv.Lab, llama: str, other: str, fault_file: Path
) -> Iterator[jv.Pool]:
    pool = lab.launch(
        llama,
        name="drafting",
        speculative={
            "method": "draft_model",
            "model": other,
            "num_speculative_tokens": 3,
        },
        env={"JVLAB_FAULT": str(fault_file)},
    ).wait()
    yield pool
    pool.close(300)


@pytest.fixture(scope="module")
def policy(llama: str) -> jv.Policy:
    return jv.Policy.from_pretrained(llama)


@pytest.fixture(scope="module")
def plain(pool: jv.Pool) -> list[list[int]]:
    """Greedy tokens of an engine without drafts."""
    return tokens_of(pool.generate(PROMPTS, **GREEDY))


def tokens_of(batch: Any) -> list[list[int]]:
    return [s.token_ids.tolist() for s in batch]


def acceptance(pool: jv.Pool, version: int) -> float:
    """Of greedy tokens, which are generated for it; counts come with heartbeats."""
    pool.generate(PROMPTS, **GREEDY)
    found: dict[int, float] = {}

    def told() -> bool:
        found.update(pool.status()["speculative"]["acceptance_by_version"])
        return version in found

    until(told, f"a count of version {version}")
    return found[version]


def processed(policy: jv.Policy, sample: Any, how: dict[str, Any]) -> np.ndarray:
    """Log-probabilities of a sample's tokens after temperature and top-k, by the trainer's own forward pass."""
    row = [*sample.prompt_token_ids.tolist(), *sample.token_ids.tolist()]
    logits = np.asarray(policy.logits(policy.params, [row]))[0] / how["temperature"]
    logits = logits[len(sample.prompt_token_ids) - 1 : -1]
    if "top_k" in how:
        least = np.sort(logits, axis=-1)[:, -how["top_k"], None]
        logits = np.where(logits < least, -np.inf, logits)
    whole = np.logaddexp.reduce(logits, axis=-1)
    return logits[np.arange(len(logits)), sample.token_ids] - whole


# What is sampled ------------------------------------------------------------------------------------------------------


def test_sampled_logprobs_are_those_of_the_model(
    drafting: jv.Pool, policy: jv.Policy
) -> None:
    async def side_by_side() -> list[Any]:
        """Drafted tokens of one step have different temperatures."""
        asked = [
            drafting.agenerate(PROMPTS, n=3, max_tokens=24, ignore_eos=True, **how)
            for how in SAMPLED
        ]
        return await asyncio.gather(*asked)

    for how, batch in zip(SAMPLED, asyncio.run(side_by_side()), strict=True):
        assert len({tuple(t) for t in tokens_of(batch)}) > len(PROMPTS)
        gaps = [np.abs(processed(policy, s, how) - s.logprobs) for s in batch]
        worst = max(gaps, key=np.max)
        own = how["temperature"] == 1.0  # the only one at which the engine scores
        scored = drafting.score(batch).gap(batch) if own else 0.0
        # by token, and whether the engine agrees with itself: it says on which side the fault is
        assert worst.max() < 1e-3, (how, worst.tolist(), scored)
        assert scored < 1e-3
    assert drafting.status()["speculative"]["draft_tokens"] > 0


def test_drafts_change_no_greedy_token(
    drafting: jv.Pool, plain: list[list[int]]
) -> None:
    assert tokens_of(drafting.generate(PROMPTS, **GREEDY)) == plain


# The draft model's weights --------------------------------------------------------------------------------------------


def test_drafts_follow_the_trainer_and_nothing_else_changes(
    lab: jv.Lab,
    drafting: jv.Pool,
    policy: jv.Policy,
    plain: list[list[int]],
    fault_file: Path,
) -> None:
    before = acceptance(drafting, drafting.snapshot.version)
    assert before < 0.5, "the draft model is another model"
    # the model's own weights: it then drafts what the model says
    link = lab.connect(policy.params, drafting, part="draft", meaning="off")
    assert link.part == "draft"
    assert "draft" in repr(link)
    assert {p.name.split(".")[0] for p in link.plan.parameters} == {"draft"}
    report = link.sync(policy.params)
    assert report.verified
    assert link.verify(policy.params).ok
    assert tokens_of(drafting.generate(PROMPTS, **GREEDY)) == plain
    assert acceptance(drafting, report.version) > 0.9
    told = drafting.status()["speculative"]
    assert told["draft_version"] == report.version
    assert not told["draft_stale"]

    # every value is digested, in the drafter's own memory
    flip = {
        "who": "worker",
        "phase": "check",
        "do": "flip",
        "parameter": "draft.model.layers.0.input_layernorm.weight",
    }
    fault_file.write_text(json.dumps(flip))
    found = link.verify()
    assert not found.ok
    assert "draft.model.layers.0.input_layernorm.weight" in str(found.differing)
    fault_file.write_text(json.dumps(flip))  # and back
    assert link.verify(policy.params).ok

    # the model's link takes its turn, and leaves the draft model as it is
    base = lab.connect(policy, drafting)
    assert base.part == "model"
    assert not link.closed
    second = base.sync(policy.params)
    assert second.version == report.version + 1
    assert base.verify().ok
    assert acceptance(drafting, second.version) > 0.9
    told = drafting.status()["speculative"]
    assert told["draft_version"] == report.version
    assert told["draft_stale"], "older than the weights, until it is synced again"

    # back to the first link, by shadow buffers: worse drafts, the same tokens
    other = jv.Policy.from_pretrained(drafting.facts().draft_model)
    third = link.sync(other.params, mode="staged")
    assert third.verified
    assert third.version == second.version + 1
    assert link.verify(other.params).ok
    assert tokens_of(drafting.generate(PROMPTS, **GREEDY)) == plain
    assert acceptance(drafting, third.version) < 0.5
    assert base.verify(policy.params).ok, "the model's weights are those of its sync"
    assert link.meaning.state == "unchecked"


def test_the_draft_models_checkpoint_is_what_values_are_compared_with(
    lab: jv.Lab, drafting: jv.Pool, other: str, tmp_path: Path
) -> None:
    params = jv.Policy.from_pretrained(other).params
    link = lab.connect(params, drafting, part="draft")
    assert (link.meaning.state, link.meaning.how) == ("checked", "value")
    again = lab.connect(params, drafting, part="draft")
    assert again is link
    # and what is published is that model
    assert link.publish(tmp_path, params).kind == "full"
    (publisher,) = link._publishers.values()
    assert publisher._export.folder == Path(other)


def test_trees_and_pools_that_do_not_fit(
    lab: jv.Lab, drafting: jv.Pool, pool: jv.Pool, policy: jv.Policy
) -> None:
    wide = jv.models.tiny("llama", hidden_size=256)
    with pytest.raises(errors.JvlabError) as caught:
        lab.connect(jv.Policy.from_pretrained(wide).params, drafting, part="draft")
    assert caught.value.remedy
    with pytest.raises(errors.Unsupported, match="does not draft") as caught:
        lab.connect(policy, pool, part="draft")
    assert "speculative=" in caught.value.remedy
    with pytest.raises(errors.ConfigError, match="part must be"):
        lab.connect(policy, drafting, part="head")
    with pytest.raises(errors.ConfigError, match="returns none of its draft"):
        lab.connect(policy, drafting, part="draft", meaning="function")
    link = lab.connect(policy.params, drafting, part="draft", meaning="off")
    with pytest.raises(errors.Unsupported, match="behind"):
        link.catch_up(policy.params)
