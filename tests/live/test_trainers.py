"""Trainers that people have, on real vLLM through a pool: TRL's two for GRPO, and the trees of MaxText."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab import errors

if find_spec("trl") is None:
    pytest.skip(
        "TRL is not installed: pip install trl==1.16.0", allow_module_level=True
    )

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integrations.maxtext_trees import SIZES, TOKENS
from tests.integrations.test_maxtext import maxtext_tree

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),  # TRL's, torch's and transformers' own
]
WORDS = ["Digits:", "Numbers:", "12", "Say:"]
STEPS = 4
GROUP = 4


def letters(completions: list[Any], **_: Any) -> list[float]:
    """The reward: the share of ASCII letters in a completion. TRL sends it to a process of its own."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [
        sum(c.isalpha() and c.isascii() for c in text) / max(1, len(text))
        for text in texts
    ]


@pytest.fixture(scope="module")
def folder() -> str:
    return jv.models.tiny("qwen3", **SIZES)


@pytest.fixture(scope="module")
def reference(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


@pytest.fixture(scope="module")
def served(lab: jv.Lab, folder: str) -> Iterator[jv.Pool]:
    pool = lab.launch(folder, name="theirs", http=True, http_key=True).wait()
    yield pool
    pool.close(300)


# Asynchronous ---------------------------------------------------------------------------------------------------------


def varlen_attention(
    q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, *_: Any, **options: Any
) -> Any:
    """What flash-attn 3 computes for packed rows, on a CPU: the last query of a segment sees all its keys."""
    out = torch.empty_like(q)
    bounds = zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True)
    for q0, q1, k0, k1 in bounds:
        rows, columns = int(q1 - q0), int(k1 - k0)
        seen = torch.ones(rows, columns).tril(columns - rows).bool()
        out[q0:q1] = torch.nn.functional.scaled_dot_product_attention(
            q[q0:q1].transpose(0, 1)[None],
            k[k0:k1].transpose(0, 1)[None],
            v[k0:k1].transpose(0, 1)[None],
            attn_mask=seen,
            scale=options["softmax_scale"],
            enable_gqa=True,
        )[0].transpose(0, 1)
    return out


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """AsyncGRPOTrainer asks for the GPU's name, and attends by a kernel from the Hub; TRL itself stays as it is."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "none")
    kernels: Any = ModuleType("kernels")
    kernels.get_kernel = lambda *_, **__: SimpleNamespace(
        flash_attn_varlen_func=varlen_attention
    )
    monkeypatch.setitem(sys.modules, "kernels", kernels)


def async_trainer(folder: str, pool: jv.Pool, transfer: Any, path: Path) -> Any:
    from trl.chat_template_utils import qwen3_chat_template
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = qwen3_chat_template  # TRL parses those it knows
    prompts = [[{"role": "user", "content": word}] for word in WORDS]
    return AsyncGRPOTrainer(
        folder,
        reward_funcs=letters,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        weight_transfer=transfer,
        args=AsyncGRPOConfig(
            output_dir=str(path),
            vllm_server_base_url=pool.http_key_url,
            per_device_train_batch_size=len(WORDS) * GROUP,
            num_generations=GROUP,
            max_completion_length=16,
            max_steps=STEPS,
            max_staleness=1,
            learning_rate=3e-3,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
        ),
    )


class Kept(jv.integrations.trl.Transfer):
    """Keeps a copy of what each version was."""

    versions: dict[int, dict[str, torch.Tensor]]

    def send_weights(self, iterator: Any) -> None:
        params = dict(iterator)
        super().send_weights(iter(params.items()))
        self.versions = getattr(self, "versions", {})
        self.versions[self.reports[-1].version] = {
            name: tensor.clone() for name, tensor in params.items()
        }


def logprobs(model: Any, weights: Any, tokens: list[int]) -> np.ndarray:
    """log P of every token but the first, as transformers computes it."""
    model.load_state_dict(weights)
    with torch.no_grad():
        found = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return found.gather(1, torch.tensor(tokens)[1:, None])[:, 0].numpy()


def test_asynchronous_grpo(
    served: jv.Pool, folder: str, reference: Any, tmp_path: Path, no_gpu: None
):
    transfer = Kept(served)
    before = served.status()["version"]
    trainer = async_trainer(folder, served, transfer, tmp_path)
    taken: list[Any] = []
    queue = trainer.rollout_queue
    get = queue.get

    def noted(*args: Any, **options: Any) -> Any:
        taken.append(get(*args, **options))
        return taken[-1]

    queue.get = noted
    trainer.train()
    assert trainer.state.global_step == STEPS
    # one before the first step, one after each
    versions = [report.version for report in transfer.reports]
    assert versions == list(range(before + 1, before + STEPS + 2))
    assert all(report.verified for report in transfer.reports)
    assert "checked by value" in transfer.reports[0].meaning
    assert served.status()["version"] == versions[-1]
    assert transfer.link is not None
    assert transfer.link.closed, "by destroy()"
    # A sample's first token is by the version it is tagged with, or a later one, and so are those that follow until a
    # sync; after it new weights attend to keys and values of the old ones, as TRL's own pause has it.
    samples = [s for s in taken if hasattr(s, "model_version")]
    assert len(samples) >= STEPS * len(WORDS) * GROUP
    tags = {sample.model_version for sample in samples}
    assert len(tags) > 1, "it trained on what later versions generated"
    whole = 0
    for sample in samples[:: len(samples) // 24]:
        ids = list(map(int, sample.input_ids))
        own = np.asarray(sample.completion_mask, bool)[1:]
        held = range(before + sample.model_version, versions[-1] + 1)
        there = np.stack([logprobs(reference, transfer.versions[v], ids) for v in held])
        apart = np.abs(there - np.asarray(sample.old_log_probs)[1:])[:, own]
        assert apart[:, 0].min() < 1e-3, (sample.model_version, apart)
        whole += apart.max(1).min() < 1e-3
    assert whole >= 4, "those of the first step are of one version"


def test_a_failed_sync_ends_the_run(
    served: jv.Pool, folder: str, tmp_path: Path, no_gpu: None
):
    transfer = jv.integrations.trl.Transfer(served)
    trainer = async_trainer(folder, served, transfer, tmp_path)
    with torch.no_grad():
        trainer.model.lm_head.weight[3, 5] = float("nan")
    version = served.status()["version"]
    with pytest.raises(errors.JvlabError, match=r"lm_head.weight: 1 NaN"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert not transfer.reports
    assert served.status()["version"] == version
    with pytest.raises(errors.EngineDirty, match="sync again"):
        served.generate(["x"], max_tokens=2)
    # what a run of the same trainer would send next
    with torch.no_grad():
        trainer.model.lm_head.weight[3, 5] = 0.0
    transfer.send_weights(trainer.model.named_parameters())
    assert served.generate(["x"], max_tokens=2)
    transfer.destroy()


# In step --------------------------------------------------------------------------------------------------------------


def test_grpo_through_rollout_func(
    served: jv.Pool, folder: str, reference: Any, tmp_path: Path
):
    from trl import GRPOConfig, GRPOTrainer

    steps = 8
    before = served.status()["version"]
    ours = jv.integrations.trl.rollout_func(served)
    apart: list[float] = []
    means: list[float] = []

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        out = ours(prompts, trainer)
        assert ours.reports[-1].version == before + 1 + trainer.state.global_step
        weights = {k: v.clone() for k, v in trainer.model.state_dict().items()}
        for k in (0, len(prompts) - 1):
            prompt, completion = out["prompt_ids"][k], out["completion_ids"][k]
            there = logprobs(reference, weights, prompt + completion)
            sampled = np.array(out["logprobs"][k])
            apart.append(np.abs(there[len(prompt) - 1 :] - sampled).max())
        return out

    def reward(completions: list[str], **columns: Any) -> list[float]:
        found = letters(completions)
        means.append(float(np.mean(found)))
        return found

    trainer = GRPOTrainer(
        folder,
        reward_funcs=reward,
        rollout_func=rollout,
        train_dataset=Dataset.from_dict({"prompt": WORDS}),
        args=GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=len(WORDS) * 8,
            num_generations=8,
            max_completion_length=16,
            max_steps=steps,
            learning_rate=3e-2,
            beta=0.0,
            bf16=False,
            gradient_checkpointing=False,
            use_vllm=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            model_init_kwargs={"dtype": "float32"},
        ),
    )
    trainer.train()
    ours.transfer.destroy()
    versions = [report.version for report in ours.reports]
    assert versions == list(range(before + 1, before + steps + 1))
    assert all(report.verified for report in ours.reports)
    assert max(apart) < 1e-3, apart
    assert np.mean(means[-2:]) > means[0] + 0.15, means


# MaxText --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["scanned", "unscanned", "base"])
def test_a_tree_of_maxtext_needs_no_rule(
    lab: jv.Lab, served: jv.Pool, folder: str, kind: str
):
    """Paths and shapes from MaxText itself, and what it computes with them."""
    tree, there = maxtext_tree(kind, folder)
    with lab.connect(tree, served, rules="auto") as link:
        report = link.sync(tree)
        assert report.verified
        assert "checked by value" in report.meaning
        scored = served.score([TOKENS])[0][1:]
    np.testing.assert_allclose(scored, there, atol=1e-4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    given = torch.tensor([TOKENS])
    wanted = model.generate(given, max_new_tokens=8, do_sample=False, eos_token_id=-1)
    found = served.generate([TOKENS], max_tokens=8, temperature=0.0, ignore_eos=True)
    assert found[0].token_ids.tolist() == wanted[0, len(TOKENS) :].tolist()
