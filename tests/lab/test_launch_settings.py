"""Arguments of a launch that no engine could serve: refused before one is started, with what to do instead."""

from __future__ import annotations

import pytest

import jvlab as jv
from jvlab._errors import Unsupported
from jvlab.lab._launch_settings import LaunchOptions


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_adapters_beside_experts_need_a_gpu(family: str):
    model = str(jv.models.tiny(family, num_hidden_layers=1))
    with pytest.raises(
        Unsupported,
        match=r"(?s)model with experts on a CPU.*policy.merge\(\).params",
    ):
        LaunchOptions(
            model=model, device="cpu", engine={"enable_lora": True}
        ).settings()
    assert LaunchOptions(model=model, device="cpu").settings().model == model
    dense = str(jv.models.tiny("llama"))
    assert (
        LaunchOptions(model=dense, device="cpu", engine={"enable_lora": True})
        .settings()
        .engine["enable_lora"]
    )
