"""The tracer against vLLM's own loader: for each family, TP and rank, rows applied by numpy give the same bits."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from jvlab._errors import ConfigError, CoverageError, TraceError
from jvlab.engine.tracing import _meta_model, _offline
from jvlab.engine.tracing._offline import trace_offline
from jvlab.layout._checkpoint import checkpoint_tensors
from jvlab.layout._types import CheckpointTensor, RankLayout
from jvlab.sync._compile_tree import compile_tree
from jvlab.sync._mapping import Mapping
from jvlab.trainer.models import tiny
from tests.engine.tracing import trace_oracle as oracle
from tests.engine.tracing.trace_oracle_configs import OWN, TINY
from tests.fuzzing import in_turn

pytestmark = pytest.mark.vllm

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama-bf16": ("llama", {"dtype": "bfloat16"}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
}
ALL = (*TINY, *VARIANTS, *OWN)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("models") / name
            if name in OWN:
                made[name] = oracle.own_checkpoint(folder, OWN[name])
            else:
                family, sizes = VARIANTS.get(name, (name, {}))
                made[name] = Path(tiny(family, folder, **sizes))
        return made[name]

    return get


def check(
    folder: Path,
    layouts: list[RankLayout],
    tp: int,
    pp: int = 1,
    ep: bool = False,
    dtype: str = "float32",
) -> None:
    weights = oracle.weights_of(folder)
    with _meta_model.vllm_globals():
        config = _meta_model.engine_config(folder, tp, pp, ep, dtype)
        for rank, layout in enumerate(layouts):
            model = oracle.loaded_by_vllm(config, tp, pp, rank, weights)
            assert layout.rank == rank
            assert oracle.differences(layout, model, weights) == []


def unlike(a: RankLayout, b: RankLayout) -> list[str]:
    """The fields in which two layouts differ."""
    out = []
    for f in fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        equal = (
            np.array_equal(x, y) and x.dtype == y.dtype
            if isinstance(x, np.ndarray)
            else x == y
        )
        out += [] if equal else [f.name]
    return out


@pytest.mark.parametrize(("name", "tp"), in_turn(ALL, [1, 2, 4]))
def test_rows_give_what_vllm_loads(name: str, tp: int, checkpoint: Any) -> None:
    folder = checkpoint(name)
    layouts = trace_offline(folder, tensor_parallel=tp, dtype="float32")
    assert len(layouts) == tp
    assert all(
        layout.opaque == () and layout.unused == () and layout.repacked == ()
        for layout in layouts
    )
    check(folder, layouts, tp)


@pytest.mark.parametrize(
    ("name", "tp"),
    in_turn([*TINY, "qwen3_moe", "deepseek_v3", "gpt_neox", "odd_vocab"], [4, 2, 1]),
)
def test_expanded_layers_equal_a_full_trace(
    name: str, tp: int, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(name)
    full = trace_offline(folder, tensor_parallel=tp, dtype="float32", expand=False)
    calls = []
    original = _offline._expanded
    monkeypatch.setattr(
        _offline, "_expanded", lambda *a: calls.append(a[-1]) or original(*a)
    )
    short = trace_offline(folder, tensor_parallel=tp, dtype="float32", expand=True)
    assert [unlike(a, b) for a, b in zip(short, full, strict=True)] == [[]] * tp
    # those build all layers, or have too few to save any
    if name not in ("olmo2", "gpt_neox", "odd_vocab"):
        assert len(calls) == tp  # the shortcut was really taken


def test_where_no_pattern_holds_every_layer_is_traced(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama")
    full = trace_offline(folder, 2, dtype="float32", expand=False)
    calls = []
    original = _offline._expanded
    monkeypatch.setattr(
        _offline, "_expanded", lambda *a: calls.append(a[-1]) or original(*a)
    )
    monkeypatch.setattr(
        _offline._NamePattern,
        "matches",
        lambda self, other, layout: self.layer == other.layer,
    )
    found = trace_offline(folder, 2, dtype="float32")
    assert [unlike(a, b) for a, b in zip(found, full, strict=True)] == [[], []]
    assert len(calls) == 1  # tried on the first rank, refused, and not tried again


@pytest.mark.parametrize(
    ("name", "expand"),
    in_turn(
        ["llama", "llama-tied", "gpt2", "mixtral", "deepseek_v3", "olmo2"],
        [True, False],
    ),
)
def test_pipeline_stages(name: str, expand: bool, checkpoint: Any) -> None:
    folder = checkpoint(name)
    layouts = trace_offline(
        folder, tensor_parallel=2, pipeline_parallel=2, dtype="float32", expand=expand
    )
    assert [dict(layout.coords)["pp"] for layout in layouts] == [0, 0, 1, 1]
    assert [dict(layout.coords)["tp"] for layout in layouts] == [0, 1, 0, 1]
    everywhere = set(layouts[0].unused) & set(layouts[2].unused)
    assert everywhere == set()  # each tensor is wanted by some stage
    assert set(layouts[0].unused) | set(layouts[2].unused)
    check(folder, layouts, 2, 2)


@pytest.mark.parametrize(
    ("name", "tp"),
    in_turn(["mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v2", "olmoe"], [2, 4]),
)
def test_expert_parallel(name: str, tp: int, checkpoint: Any) -> None:
    folder = checkpoint(name)
    layouts = trace_offline(
        folder, tensor_parallel=tp, expert_parallel=True, dtype="float32"
    )
    assert [dict(layout.coords)["ep"] for layout in layouts] == list(range(tp))
    experts = [{n for n in layout.unused if ".experts." in n} for layout in layouts]
    assert all(experts)  # a rank leaves the other ranks' experts alone
    assert set.intersection(*experts) == set()
    full = trace_offline(
        folder, tensor_parallel=tp, expert_parallel=True, dtype="float32", expand=False
    )
    assert [unlike(a, b) for a, b in zip(layouts, full, strict=True)] == [[]] * tp
    check(folder, layouts, tp, ep=True)


def test_a_cast_on_loading_is_no_reason_to_be_opaque(checkpoint: Any) -> None:
    folder = checkpoint("qwen2")  # float32 on disk
    layouts = trace_offline(folder, tensor_parallel=2, dtype="bfloat16")
    assert {p.dtype for p in layouts[0].parameters} == {"bfloat16"}
    assert layouts[0].opaque == ()
    check(folder, layouts, 2, dtype="bfloat16")


def test_vocabulary_padding_is_counted_per_rank(checkpoint: Any) -> None:
    folder = checkpoint("odd_vocab")  # 203 tokens, padded to 256 by vLLM
    one = trace_offline(folder, 1, dtype="float32")[0]
    assert [(n.name, n.elements) for n in one.padding] == [
        ("model.embed_tokens.weight", 53 * 64)
    ]
    assert "fills them with 0" in one.padding[0].reason
    four = trace_offline(folder, 4, dtype="float32")
    assert [sum(n.elements for n in layout.padding) for layout in four] == [
        0,
        0,
        0,
        53 * 64,
    ]


def test_tied_embeddings_are_one_parameter(checkpoint: Any) -> None:
    folder = checkpoint("llama-tied")
    names = [p.name for p in trace_offline(folder, 2, dtype="float32")[0].parameters]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_a_tied_head_in_the_checkpoint_is_unused(checkpoint: Any) -> None:
    folder = checkpoint("llama-tied")
    tensors = checkpoint_tensors(folder)
    head = CheckpointTensor(
        "lm_head.weight", next(t.shape for t in tensors if "embed" in t.name), "float32"
    )
    assert trace_offline(folder, 2, dtype="float32", tensors=[*tensors, head])[
        0
    ].unused == ("lm_head.weight",)


@pytest.mark.parametrize(
    "column", ["src_offset", "dst_offset", "src_strides", "shape", "tensor"]
)
def test_the_comparison_sees_one_wrong_number(column: str, checkpoint: Any) -> None:
    folder = checkpoint("qwen2")
    layout = trace_offline(folder, 2, dtype="float32")[1]
    weights = oracle.weights_of(folder)
    values = getattr(layout, column).copy()
    names = [t.name for t in layout.tensors]
    r = int(
        np.flatnonzero(
            layout.tensor == names.index("model.layers.1.self_attn.k_proj.weight")
        )[0]
    )
    if column == "tensor":
        values[r] = names.index("model.layers.1.self_attn.v_proj.weight")
    elif column == "shape":
        values[r, 0] -= 1
    elif column == "src_strides":
        values[r, 0] = 0
    elif column == "src_offset":
        values[r] -= 1
    else:
        values[r] += 1
    with _meta_model.vllm_globals():
        config = _meta_model.engine_config(folder, 2, 1, False, "float32")
        model = oracle.loaded_by_vllm(config, 2, 1, 1, weights)
    assert oracle.differences(layout, model, weights) == []
    problems = oracle.differences(replace(layout, **{column: values}), model, weights)
    assert problems
    assert all("model.layers.1.self_attn.qkv_proj.weight" in p for p in problems)


@pytest.mark.parametrize("name", [*TINY, "gpt_neox", "qwen3_moe"])
def test_an_unknown_tensor_is_named(name: str, checkpoint: Any) -> None:
    folder = checkpoint(name)
    tensors = [
        *checkpoint_tensors(folder),
        CheckpointTensor("nobody.knows.this.weight", (8,), "float32"),
    ]
    with pytest.raises(TraceError, match=r"nobody\.knows\.this\.weight") as caught:
        trace_offline(folder, 1, dtype="float32", tensors=tensors)
    assert caught.value.fields["tensor"] == "nobody.knows.this.weight"
    assert caught.value.remedy


def test_a_tensor_vllm_ignores_is_unused(checkpoint: Any) -> None:
    folder = checkpoint("llama")
    extra = CheckpointTensor(
        "model.layers.1.self_attn.rotary_emb.inv_freq", (8,), "float32"
    )
    layouts = trace_offline(
        folder, 2, dtype="float32", tensors=[*checkpoint_tensors(folder), extra]
    )
    assert [layout.unused for layout in layouts] == [(extra.name,)] * 2


@pytest.mark.parametrize("expand", [True, False])
def test_a_missing_tensor_leaves_a_named_gap(expand: bool, checkpoint: Any) -> None:
    folder = checkpoint("llama")
    tensors = [
        t
        for t in checkpoint_tensors(folder)
        if t.name != "model.layers.2.self_attn.k_proj.weight"
    ]
    layout = trace_offline(folder, 2, dtype="float32", tensors=tensors, expand=expand)[
        0
    ]
    (gap,) = layout.padding
    assert gap.name == "model.layers.2.self_attn.qkv_proj.weight"
    assert "no checkpoint tensor" in gap.reason
    assert gap.kind == "gap"
    wanted = next(
        t
        for t in checkpoint_tensors(folder)
        if t.name == "model.layers.2.self_attn.k_proj.weight"
    )
    assert gap.elements == wanted.shape[0] * wanted.shape[1] // 2


def test_a_checkpoint_without_its_keys_gets_no_plan(checkpoint: Any) -> None:
    """Every k_proj left out of list and tree alike: the rest fits, and part of each qkv_proj would stay as it was."""
    folder = checkpoint("llama")
    config = json.loads((folder / "config.json").read_text())
    for left_out, whole in (("k_proj", False), ("", True)):
        tensors = [
            t for t in checkpoint_tensors(folder) if whole or left_out not in t.name
        ]
        layouts = trace_offline(folder, 2, dtype="float32", tensors=tensors)
        tree = {t.name: np.zeros(t.shape, np.float32) for t in tensors}
        if whole:
            compile_tree(
                Mapping,
                tree,
                config,
                tensors,
                layouts,
                mesh="fsdp=2",
                rules="checkpoint",
            )
            continue
        with pytest.raises(CoverageError) as caught:
            compile_tree(
                Mapping,
                tree,
                config,
                tensors,
                layouts,
                mesh="fsdp=2",
                rules="checkpoint",
            )
        assert all(
            p.startswith("[gap]") and "qkv_proj" in p for p in caught.value.problems
        )
        assert len(caught.value.problems) == config["num_hidden_layers"]


@pytest.mark.parametrize(
    "name",
    ["odd_vocab", "qwen3_moe", "deepseek_v3", "gpt_neox", "phi", "bloom", "llama-tied"],
)
def test_all_padding_of_a_whole_checkpoint_is_the_loaders_own(
    name: str, checkpoint: Any
) -> None:
    for layout in trace_offline(checkpoint(name), 4, dtype="float32"):
        assert {n.kind for n in layout.padding} <= {"constant"}, layout.padding


def test_a_wrong_shape_is_named(checkpoint: Any) -> None:
    folder = checkpoint("llama")
    name = "model.layers.1.input_layernorm.weight"
    tensors = [
        replace(t, shape=(3,)) if t.name == name else t
        for t in checkpoint_tensors(folder)
    ]
    with pytest.raises(TraceError, match=r"layers\.1\.input_layernorm.*\(3,\)"):
        trace_offline(folder, 1, dtype="float32", tensors=tensors)


def test_sizes_vllm_cannot_divide_are_its_own_words(checkpoint: Any) -> None:
    with pytest.raises(TraceError, match="attention heads") as caught:
        trace_offline(checkpoint("llama"), tensor_parallel=3, dtype="float32")
    assert caught.value.fields["tensor_parallel"] == 3
    with pytest.raises(ConfigError, match="tensor_parallel=0"):
        trace_offline(checkpoint("llama"), tensor_parallel=0)


def test_vllm_is_left_as_it_was(checkpoint: Any) -> None:
    import os

    from vllm.distributed import parallel_state
    from vllm.distributed.utils import get_pp_indices
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    before = {
        k: v
        for k, v in vars(parallel_state).items()
        if k.isupper() or k.startswith("_")
    }
    ropes, environment = dict(_ROPE_DICT), dict(os.environ)
    trace_offline(checkpoint("llama"), tensor_parallel=2, dtype="float32")
    with pytest.raises(TraceError):
        trace_offline(checkpoint("llama"), tensor_parallel=3, dtype="float32")
    after = {
        k: v
        for k, v in vars(parallel_state).items()
        if k.isupper() or k.startswith("_")
    }
    assert {k for k in before if after[k] is not before[k]} == set()
    assert (dict(_ROPE_DICT), dict(os.environ)) == (ropes, environment)
    from vllm.distributed import utils

    assert utils.get_pp_indices is get_pp_indices
    assert get_pp_indices.__name__ == "get_pp_indices"


def test_transformers_classes_are_left_as_they_were(checkpoint: Any) -> None:
    """vLLM runs olmo2 by its Transformers backend, which rewrites classes of transformers while it builds."""
    from transformers import Olmo2Config, Olmo2ForCausalLM
    from transformers.models.olmo2 import modeling_olmo2

    classes = {n: c for n, c in vars(modeling_olmo2).items() if isinstance(c, type)}
    before = {n: (c.__bases__, dict(c.__dict__)) for n, c in classes.items()}
    trace_offline(checkpoint("olmo2"), tensor_parallel=2, dtype="float32")
    changed = {
        n for n, c in classes.items() if (c.__bases__, dict(c.__dict__)) != before[n]
    }
    assert changed == set()
    Olmo2ForCausalLM(
        Olmo2Config(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )


def test_the_largest_models_in_seconds() -> None:
    """DeepSeek-V3's own sizes at TP 2: 671e9 elements, 45395 tensors, every live element filled once."""
    import time

    config = {
        **OWN["deepseek_v3"],
        "vocab_size": 129280,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "dtype": "bfloat16",
    }
    tensors = checkpoint_tensors(config)
    assert round(sum(float(np.prod(t.shape)) for t in tensors) / 1e9) == 671
    start = time.perf_counter()
    layouts = trace_offline(config, tensor_parallel=2, tensors=tensors)
    assert time.perf_counter() - start < 400
    for layout in layouts:
        assert (layout.opaque, layout.padding, layout.unused) == ((), (), ())
        live = sum(int(np.prod(p.shape, dtype=np.int64)) for p in layout.parameters)
        assert int(layout.shape.prod(axis=1).sum()) == live
