"""Draft models on real vLLM: what is sampled with them, and their weights, which follow the trainer's."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

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


# EAGLE ----------------------------------------------------------------------------------------------------------------


def stored(folder: str) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in Path(folder).glob("*.safetensors"):
        found |= load_file(file)
    return found


def of_one_token(llama: str, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A llama whose layers add nothing, so that a token follows from the one before it alone; and its tensors."""
    shutil.copytree(llama, folder)
    tensors = stored(llama)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, tensors


def test_an_eagle_head_follows_the_trainer(lab: jv.Lab, llama: str, tmp_path: Path):
    """The head shares embedding and output with the model. One that reads the newest token drafts what this model says;
    one that reads the model's hidden state, which knows the token before, does not."""
    model, tensors = of_one_token(llama, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    size = config["hidden_size"]
    nothing = np.zeros((size, size), np.float32)
    whole = np.eye(size, dtype=np.float32)
    layer = {
        name.removeprefix("model."): array
        for name, array in tensors.items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    good = {**layer, "fc.weight": np.concatenate([whole, nothing], 1)}
    bad = {**layer, "fc.weight": np.concatenate([nothing, whole], 1)}
    head = tmp_path / "head"
    shutil.copytree(model, head, ignore=lambda *_: ["model.safetensors", "config.json"])
    shape = {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    (head / "config.json").write_text(json.dumps(config | shape))
    save_file(bad, head / "model.safetensors", metadata={"format": "pt"})
    drafts = {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}
    with lab.launch(str(model), name="eagle", speculative=drafts).wait() as pool:
        assert acceptance(pool, 0) < 0.2
        said = tokens_of(pool.generate(PROMPTS, **GREEDY))
        link = lab.connect(bad, pool, part="draft")
        assert (link.meaning.state, link.meaning.how) == ("checked", "value")
        names = {parameter.name for parameter in link.plan.parameters}
        assert {"draft.model.fc.weight"} <= names
        assert not [name for name in names if "embed" in name or "lm_head" in name]
        for mode, tree, accepted in (
            ("direct", bad, (0.0, 0.2)),  # compared with its checkpoint
            ("direct", good, (0.5, 1.0)),
            ("staged", bad, (0.0, 0.2)),
        ):
            report = link.sync(tree, mode=mode)
            assert report.verified
            assert link.verify(tree).ok
            least, most = accepted
            assert least <= acceptance(pool, report.version) <= most
            assert tokens_of(pool.generate(PROMPTS, **GREEDY)) == said


@pytest.mark.soak  # a head of EAGLE goes the same way
def test_mtp_heads_follow_the_trainer(lab: jv.Lab, tmp_path: Path):
    """Of a tiny GLM-4-MoE whose layers add nothing: embedding and output are the model's, not in the head's tree."""
    import torch
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    model = tmp_path / "model"
    shape: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "head_dim": 32}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 256}
    shape |= {"moe_intermediate_size": 64, "n_routed_experts": 4}
    shape |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1}
    shape |= {"topk_group": 1, "first_k_dense_replace": 1, "initializer_range": 0.1}
    shape |= {"max_position_embeddings": 512, "num_nextn_predict_layers": 1}
    whole = Glm4MoeForCausalLM(Glm4MoeConfig(**shape, tie_word_embeddings=False))
    whole.float().save_pretrained(model)
    tensors = {
        name: np.zeros_like(array)
        if name.endswith(("o_proj.weight", "down_proj.weight"))
        else array
        for name, array in stored(str(model)).items()
    }
    size = shape["hidden_size"]
    one = np.ones(size, np.float32)
    read = np.eye(size, dtype=np.float32)
    nothing = np.zeros_like(read)
    at = "model.layers.2"
    head = {
        name.replace("model.layers.1", at): array.copy()
        for name, array in tensors.items()
        if name.startswith("model.layers.1.")
    }
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        head[f"{at}.{norm}.weight"] = one.copy()
    good = head | {f"{at}.eh_proj.weight": np.concatenate([read, nothing], 1)}
    bad = head | {f"{at}.eh_proj.weight": np.concatenate([nothing, read], 1)}
    shared = {
        f"{at}.embed_tokens.weight": tensors["model.embed_tokens.weight"].copy(),
        f"{at}.shared_head.head.weight": tensors["lm_head.weight"].copy(),
    }
    for file in model.glob("*.safetensors*"):
        file.unlink()
    everything = tensors | bad | shared
    save_file(everything, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    engine = {"max_model_len": 256, "skip_tokenizer_init": True}
    with lab.launch(
        str(model), name="mtp", speculative=drafts, engine=engine
    ).wait() as pool:
        assert acceptance(pool, 0) < 0.2
        said = tokens_of(pool.generate(PROMPTS, **GREEDY))
        link = lab.connect(bad, pool, part="draft")
        for tree, least, most in ((bad, 0.0, 0.2), (good, 0.9, 1.0)):
            report = link.sync(tree)
            assert report.verified
            assert link.verify(tree).ok
            assert least <= acceptance(pool, report.version) <= most
            assert tokens_of(pool.generate(PROMPTS, **GREEDY)) == said
