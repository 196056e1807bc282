"""What TRL's trainers ask of a pool, without an engine; tests/live/test_trainers.py has them train on one."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab import errors
from tests.integrations.fake_pool import FakePool

if find_spec("trl") is None:
    pytest.skip(
        "TRL is not installed: pip install trl==1.16.0", allow_module_level=True
    )

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
trl: Any = jv.integrations.trl


def tiny() -> Any:
    return Qwen3ForCausalLM(
        Qwen3Config(
            num_hidden_layers=1,
            hidden_size=8,
            intermediate_size=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            vocab_size=32,
        )
    )


class Tokenizer:
    """A text's length and 7; of messages, 9 in front."""

    def __call__(self, text: list[str]) -> dict[str, Any]:
        return {"input_ids": [[len(t), 7] for t in text]}

    def apply_chat_template(self, conversation: Any, **options: Any) -> dict[str, Any]:
        assert options["add_generation_prompt"]
        assert options["enable_thinking"] is False
        assert options["tools"] is None
        return {"input_ids": [[9, len(c[-1]["content"]), 7] for c in conversation]}


def trainer_of(model: Any, **more: Any) -> Any:
    """The parts of a GRPOTrainer that are read."""
    made = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=1, unwrap_model=lambda m: m),
        model=model,
        state=SimpleNamespace(global_step=0),
        use_vllm=False,
        max_completion_length=6,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=None,
        repetition_penalty=1.1,
        args=SimpleNamespace(generation_kwargs={"ignore_eos": True}),
        processing_class=Tokenizer(),
        tools=[],
        chat_template=None,
        chat_template_kwargs={"enable_thinking": False},
    )
    vars(made).update(more)
    return made


def test_a_transfer_is_what_trl_calls_one():
    from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol

    wanted = {name for name in vars(WeightTransferProtocol) if name[0] != "_"}
    assert wanted <= set(dir(trl.Transfer))


@pytest.mark.parametrize("given", ["pool", "link"])
def test_tensors_are_synced_under_their_names(given: str):
    pool = FakePool()
    model = tiny()
    link = pool.connect(dict(model.named_parameters()))
    transfer = trl.Transfer(pool if given == "pool" else link)
    transfer.init_weight_transfer()
    for version in (1, 2):
        transfer.pause()
        transfer.send_weights(model.named_parameters())
        transfer.resume()
        assert [report.version for report in transfer.reports][-1] == version
    assert len(pool.links) == (2 if given == "pool" else 1), "connected once"
    held = pool.links[-1].held
    assert held.keys() == dict(model.named_parameters()).keys()
    head = model.lm_head.weight.detach().numpy()
    np.testing.assert_array_equal(held["lm_head.weight"], head)
    transfer.destroy()


def test_a_failed_sync_raises_its_reason():
    pool = FakePool()
    link = pool.connect(None)
    transfer = trl.Transfer(link)

    def fail(_: Any) -> None:
        raise errors.VerifyError("a digest differs", remedy="sync again")

    link.on_sync = fail
    with pytest.raises(errors.VerifyError, match="a digest differs"):
        transfer.send_weights(tiny().named_parameters())
    assert not transfer.reports
    with pytest.raises(errors.ConfigError, match="not a pool"):
        trl.Transfer("pool")


def test_rollouts_are_those_of_the_step():
    pool = FakePool()
    rollouts = trl.rollout_func(pool)
    trainer = trainer_of(tiny())
    prompts = ["a", "a", "a", "bb", "bb", "bb"]
    out = rollouts(prompts, trainer)
    (call,) = pool.calls
    assert call["prompts"] == [[1, 7], [2, 7]]
    assert call["n"] == 3
    wanted = {"max_tokens": 6, "temperature": 0.7, "top_p": 0.9, "top_k": 5}
    wanted |= {"min_p": 0.0, "repetition_penalty": 1.1, "ignore_eos": True}
    assert wanted.items() <= call.items()
    assert out["prompt_ids"] == [[1, 7]] * 3 + [[2, 7]] * 3
    lengths = [len(ids) for ids in out["completion_ids"]]
    assert [len(row) for row in out["logprobs"]] == lengths
    assert all(isinstance(x, float) for row in out["logprobs"] for x in row)
    rollouts(["a", "bb", "bb"], trainer)
    assert [call["n"] for call in pool.calls[1:]] == [1, 2], "groups of two sizes"
    assert len(rollouts.reports) == 1, "the same step"
    trainer.state.global_step = 1
    out = rollouts([[{"role": "user", "content": "abc"}]], trainer)
    assert out["prompt_ids"] == [[9, 3, 7]]
    assert [report.version for report in rollouts.reports] == [1, 2]


def test_what_rollouts_refuse():
    rollouts = trl.rollout_func(FakePool())
    several = SimpleNamespace(num_processes=2)
    image = [{"role": "user", "content": [{"type": "image", "image": "x"}]}]
    for more, prompt, word in (
        ({"accelerator": several}, "a", "has several"),
        ({"use_vllm": True}, "a", "use_vllm=True"),
        ({}, image, "not text"),
    ):
        with pytest.raises(errors.JvlabError, match=word) as caught:
            rollouts([prompt], trainer_of(tiny(), **more))
        assert caught.value.remedy


def test_an_adapter_is_merged_for_the_sync():
    pool = FakePool()
    base = tiny()
    before = base.model.layers[0].self_attn.q_proj.weight.detach().clone()
    names = dict(base.named_parameters()).keys()
    from peft import LoraConfig, get_peft_model

    adapted: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    q = adapted.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        q.lora_B["default"].weight.fill_(0.5)
    held: dict[str, Any] = {}
    link = pool.connect(None)
    link.on_sync = lambda params: held.update({k: v.clone() for k, v in params.items()})
    trl.rollout_func(pool, link)(["a"], trainer_of(adapted))
    assert held.keys() == names
    change = (q.lora_B["default"].weight @ q.lora_A["default"].weight) * q.scaling[
        "default"
    ]
    merged = (before + change).detach().numpy()
    path = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_allclose(held[path], merged, rtol=1e-5)
    np.testing.assert_allclose(q.base_layer.weight.detach(), before, atol=1e-6)
