"""Where a drafter's own tensors go: its layout without what it shares with the model, and MTP heads on meta."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from jvlab import errors
from jvlab.engine.tracing import _meta_model, _trace
from jvlab.engine.tracing._offline import build_rank
from jvlab.engine.tracing._vllm_model import DraftWeights
from jvlab.layout._layout_codec import layout_from_plain
from jvlab.layout._types import CheckpointTensor, RankLayout
from jvlab.sync._compile_tree import compile_tree
from jvlab.sync._connections import taken
from jvlab.sync._mapping import Mapping

pytestmark = pytest.mark.vllm


class Head(torch.nn.Module):
    """As EAGLE's and MTP heads: a layer of its own between the model's embedding and output head."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4) if model is None else model.embed
        self.layer = torch.nn.Linear(4, 4)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


TENSORS = [
    ["draft.embed.weight", [8, 4], "float32"],
    ["draft.layer.weight", [4, 4], "float32"],
    ["draft.layer.bias", [4], "float32"],
]


def worker(model: Any, drafter: Any) -> Any:
    runner = SimpleNamespace(get_draft_model=lambda: drafter)
    return SimpleNamespace(model_runner=runner, get_model=lambda: model)


@pytest.mark.parametrize("shares", [False, True])
def test_what_is_shared_is_none_of_the_drafters(shares: bool):
    model = Head(None)
    drafter = Head(model if shares else None)
    plain = _trace.trace_worker(worker(model, drafter), TENSORS)
    layout = layout_from_plain(plain)
    own = ["draft.layer.weight", "draft.layer.bias"]
    names = own if shares else ["draft.embed.weight", *own]
    assert [p.name for p in layout.parameters] == names
    assert [t.name for t in layout.tensors] == [
        "embed.weight",
        "layer.weight",
        "layer.bias",
    ], "tensors have the names that the loader and the rules know"
    assert layout.unused == (("embed.weight",) if shares else ())
    # each row: the tensor of the parameter's own name
    for t, p in zip(layout.tensor, layout.parameter, strict=True):
        assert f"draft.{layout.tensors[t].name}" == layout.parameters[p].name
    sizes = layout.shape.prod(axis=1)
    assert sorted(sizes.tolist()) == ([4, 16] if shares else [4, 16, 32])
    assert not layout.padding


def test_names_in_a_plan_are_those_of_the_weights_that_it_writes():
    drafter = Head(None)
    weights = DraftWeights(drafter)
    plain = _trace.trace_worker(worker(Head(None), drafter), TENSORS)
    names = [p.name for p in layout_from_plain(plain).parameters]
    assert names == [n for n, _ in weights.named_parameters()]
    value = torch.full((4,), 3.0)
    weights.load_weights(iter([("layer.bias", value)]))
    assert torch.equal(drafter.layer.bias, value), "the loader knows its own names"


def test_no_draft_model_is_said_with_the_remedy():
    with pytest.raises(errors.Unsupported, match="no draft model") as caught:
        _trace.trace_worker(worker(Head(None), None), TENSORS)
    assert "speculative=" in caught.value.remedy


# MTP heads: vLLM's own classes on meta. Their tensors are in the model's checkpoint, whose loader leaves them out.

QWEN = {
    "model_type": "qwen3_next",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SHARED = {"model.embed_tokens.weight", "lm_head.weight"}
HEADS = {**QWEN, "architectures": ["Qwen3NextMTP"]}


def layouts_of(ranks: int, tensors: list[CheckpointTensor]) -> list[RankLayout]:
    """Of the heads alone, on each rank, without what they share with the model."""
    shared = {f"draft.{name}" for name in SHARED}
    with _meta_model.vllm_globals(), _meta_model.config_directory(HEADS) as folder:
        config = _meta_model.engine_config(folder, ranks, 1, False, "auto")
        out = []
        for rank in range(ranks):
            model = DraftWeights(build_rank(config, rank))
            coords = (("tp", rank), ("pp", 0), ("ep", 0))
            with _meta_model.config_in_force(config):
                out.append(
                    _trace.trace_model(model, tensors, rank, coords, without=shared)
                )
        return out


def mtp_tensors() -> list[CheckpointTensor]:
    layer = "mtp.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (128, 64),
        "lm_head.weight": (128, 64),
        "mtp.fc.weight": (64, 128),
        "mtp.norm.weight": (64,),
        "mtp.pre_fc_norm_hidden.weight": (64,),
        "mtp.pre_fc_norm_embedding.weight": (64,),
        f"{layer}.input_layernorm.weight": (64,),
        f"{layer}.post_attention_layernorm.weight": (64,),
        f"{layer}.self_attn.q_proj.weight": (128, 64),  # a gate beside each head
        f"{layer}.self_attn.k_proj.weight": (64, 64),
        f"{layer}.self_attn.v_proj.weight": (64, 64),
        f"{layer}.self_attn.o_proj.weight": (64, 64),
        f"{layer}.self_attn.q_norm.weight": (32,),
        f"{layer}.self_attn.k_norm.weight": (32,),
        f"{layer}.mlp.gate.weight": (4, 64),
        f"{layer}.mlp.shared_expert_gate.weight": (1, 64),
        f"{layer}.mlp.shared_expert.gate_proj.weight": (32, 64),
        f"{layer}.mlp.shared_expert.up_proj.weight": (32, 64),
        f"{layer}.mlp.shared_expert.down_proj.weight": (64, 32),
        "model.layers.0.input_layernorm.weight": (64,),  # of the model itself
    }
    for expert in range(4):
        name = f"{layer}.mlp.experts.{expert}"
        shapes[f"{name}.gate_proj.weight"] = (32, 64)
        shapes[f"{name}.up_proj.weight"] = (32, 64)
        shapes[f"{name}.down_proj.weight"] = (64, 32)
    return [CheckpointTensor(n, shape, "bfloat16") for n, shape in shapes.items()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_mtp_heads_are_covered_by_their_own_tensors(ranks: int):
    layouts = layouts_of(ranks, mtp_tensors())
    assert len(layouts) == ranks
    for own in layouts:
        assert not [n for n in own.padding if n.kind == "gap"], own.padding
        assert not own.opaque
        assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(own.unused)
        assert "model.layers.0.input_layernorm.weight" in own.unused
        written = np.zeros(len(own.parameters), np.int64)
        np.add.at(written, own.parameter, own.shape.prod(axis=1))
        assert written.tolist() == [int(np.prod(p.shape)) for p in own.parameters]
        assert all(p.name.startswith("draft.model.") for p in own.parameters)


def test_a_tree_of_mtp_heads_alone_gets_a_proven_plan():
    whole = mtp_tensors()
    tensors = taken(whole, layouts_of(2, whole))
    assert {t.name for t in whole} - {t.name for t in tensors} == {
        *SHARED,
        "model.layers.0.input_layernorm.weight",
    }
    layouts = layouts_of(2, tensors)
    tree = {
        t.name: np.zeros(t.shape, np.float32)
        for t in tensors
        if t.name.startswith("mtp.")
    }
    found = compile_tree(Mapping, tree, QWEN, tensors, layouts, rules="checkpoint")
    names = {p.name for p in found.plan.parameters}
    assert names == {p.name for layout in layouts for p in layout.parameters}
    fc = [r for r in found.rows if r.leaf == "mtp.fc.weight"]
    assert {r.parameter for r in fc} == {"draft.model.fc.weight"}
    del tree["mtp.norm.weight"]
    with pytest.raises(errors.JvlabError, match=r"mtp\.norm|model\.norm"):
        compile_tree(Mapping, tree, QWEN, tensors, layouts, rules="checkpoint")
