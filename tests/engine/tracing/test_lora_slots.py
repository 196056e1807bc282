"""A model below LoRA's wrappers, without an engine: names as its loader knows them, memory shared, nothing changed."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.slow


def wrapped() -> tuple[torch.nn.Module, torch.nn.Module]:
    from vllm.lora.layers import BaseLayerWithLoRA

    class Wrapped(BaseLayerWithLoRA):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base_layer = base

    model = torch.nn.Module()
    model.inner = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    model.norm = torch.nn.LayerNorm(2)
    shared = torch.nn.Embedding(5, 2)
    model.embed, model.head = Wrapped(shared), Wrapped(shared)
    plain = model.inner[1]
    model.inner[1] = Wrapped(plain)
    return model, plain


def test_the_bare_model_has_the_loaders_names_and_the_models_memory():
    from jvlab.engine.tracing._vllm_model import bare_model

    model, plain = wrapped()
    before = [name for name, _ in model.named_parameters()]
    assert "inner.1.base_layer.weight" in before
    bare = bare_model(model)
    names = [
        "embed.weight",
        "inner.0.bias",
        "inner.0.weight",
        "inner.1.bias",
        "inner.1.weight",
        "norm.bias",
        "norm.weight",
    ]
    assert sorted(name for name, _ in bare.named_parameters()) == names
    assert isinstance(bare.inner, torch.nn.Sequential)
    assert bare.inner[1] is plain
    assert bare.norm is model.norm
    assert bare.embed is bare.head
    assert [name for name, _ in model.named_parameters()] == before
    # replaced after packing: both see it
    plain.weight = torch.nn.Parameter(torch.ones(2, 3))
    assert dict(bare.named_parameters())["inner.1.weight"] is plain.weight
    assert bare_model(plain) is plain


def test_adapters_are_known_by_the_names_of_their_tensors():
    from jvlab.engine.tracing._lora_slots import is_adapter

    pair = [
        "base_model.model.m.q_proj.lora_A.weight",
        "base_model.model.m.q_proj.lora_B.weight",
    ]
    assert is_adapter(pair)
    assert not is_adapter([*pair, "model.norm.weight"])
    assert not is_adapter([])
