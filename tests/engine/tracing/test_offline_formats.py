"""fp8 planned without an engine: parameters, copies, scales and words are those that a live model of vLLM's gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.online import fp8

import jvlab as jv
from jvlab._errors import ConfigError, TraceError
from jvlab.engine.tracing import _meta_model
from jvlab.engine.tracing._offline import trace_offline
from jvlab.layout._checkpoint import checkpoint_tensors, read_config
from jvlab.layout._plan_types import SCALES
from jvlab.layout._types import RankLayout
from jvlab.sync._compile_tree import compile_tree
from jvlab.sync._mapping import Mapping
from jvlab.trainer.models import tiny
from tests.engine.tracing import fp8_model, test_block_formats, test_formats
from tests.engine.tracing.fp8_model import Reduction
from tests.engine.tracing.trace_oracle import own_checkpoint

pytestmark = pytest.mark.vllm

DEEP = {"num_hidden_layers": 3}  # one layer follows from the pattern of two
CASES = {
    "llama-tp2": (
        "llama",
        {**test_formats.ODD, "intermediate_size": 168, **DEEP},
        2,
        False,
    ),
    # its q, k and v have biases
    "qwen2": ("qwen2", {**test_formats.ODD, **DEEP}, 1, False),
    "qwen3_moe-ep2": ("qwen3_moe", DEEP, 2, True),
}
COLUMNS = (
    "tensor",
    "parameter",
    "shape",
    "src_offset",
    "src_strides",
    "dst_offset",
    "dst_strides",
)


@pytest.fixture(autouse=True)
def vllm_as_it_was() -> Any:
    with _meta_model.vllm_globals():
        yield


def compare(planned: Sequence[RankLayout], live: Sequence[RankLayout]) -> None:
    """Everything that a layout says; notes may come in another order."""
    assert len(planned) == len(live)
    for a, b in zip(planned, live, strict=True):
        assert a.parameters == b.parameters
        assert a.formats == b.formats
        assert sorted(map(repr, a.padding)) == sorted(map(repr, b.padding))
        assert (a.rank, a.coords, a.tensors) == (b.rank, b.coords, b.tensors)
        assert (a.repacked, a.opaque, a.unused) == (b.repacked, b.opaque, b.unused)
        for name in COLUMNS:
            assert np.array_equal(getattr(a, name), getattr(b, name)), name


def same_plan(planned: Mapping, live: Mapping) -> None:
    assert planned.plan == live.plan
    assert planned.plan.quantised == live.plan.quantised != ()
    assert planned.notes == live.notes


@pytest.mark.parametrize("name", CASES)
def test_online_fp8_is_planned_as_a_live_engine_has_it(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    family, sizes, tp, ep = CASES[name]
    folder = tiny(family, tmp_path / "m", dtype="bfloat16", **sizes)
    options: dict[str, Any] = {
        "tensor_parallel": tp,
        "expert_parallel": ep,
        "quantization": "fp8",
    }
    # before anything is made loadable on this machine
    mapping = Mapping.of(None, folder, rules="policy", **options)
    whole = trace_offline(folder, dtype="bfloat16", expand=False, **options)
    reduction: Reduction = fp8_model.fp8_on_cpu(monkeypatch)
    config = fp8_model.quantised_config(Path(folder), tp, ep)
    models = fp8_model.ranks(config, fp8_model.checkpoint(folder), reduction)
    live = test_formats.trace(config, models, folder, reduction)
    assert live[0].formats
    compare(whole, live)
    compare(mapping._layouts, live)
    tensors = checkpoint_tensors(folder)
    title = mapping.plan.title
    same_plan(
        mapping,
        compile_tree(
            Mapping,
            None,
            read_config(folder),
            tensors,
            live,
            rules="policy",
            title=title,
        ),
    )
    assert any(
        "one scale per fused parameter" in note for note in mapping.notes.values()
    )
    assert sum(x.path == SCALES for x in mapping.plan.leaves) == 1


@pytest.mark.parametrize("name", ["llama-tp2", "qwen3_moe"])
def test_a_block_scaled_checkpoint_is_planned_as_a_live_engine_has_it(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """From the config alone: which tensors are fp8, and the shapes of their scales, are the checkpoint's."""
    family, sizes, tp, ep = test_block_formats.CASES[name]
    folder = tiny(family, tmp_path / "m", dtype="bfloat16", **{**sizes, **DEEP})
    block = test_block_formats.BLOCK
    plain = fp8_model.checkpoint(folder)
    given = {
        **read_config(folder),
        "quantization_config": fp8_model.block_settings(plain, block),
    }
    mapping = Mapping.of(
        None, given, rules="policy", tensor_parallel=tp, expert_parallel=ep
    )
    fp8_model.blocks_on_cpu(monkeypatch)
    config = fp8_model.block_config(Path(folder), block, tp, ep)
    weights = fp8_model.block_checkpoint(plain, block, "bfloat16")
    tensors = test_block_formats.tensors_of(weights)
    by_name = lambda found: sorted(found, key=lambda t: t.name)
    assert by_name(mapping._layouts[0].tensors) == by_name(tensors)
    tensors = list(mapping._layouts[0].tensors)
    in_order = {t.name: weights[t.name] for t in tensors}
    live = test_block_formats.traced(
        config, test_block_formats.engines(config, weights), in_order
    )
    compare(mapping._layouts, live)
    same_plan(
        mapping,
        compile_tree(
            Mapping,
            None,
            given,
            tensors,
            live,
            rules="policy",
            title=mapping.plan.title,
        ),
    )
    q = next(
        r for r in mapping.rows if r.tensor == "model.layers.2.self_attn.q_proj.weight"
    )
    assert q.status == "quantised"
    assert mapping.notes[q.parameter].startswith(
        "format: fp8, one scale per block of 32 × "
    )


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_the_plan_has_what_a_card_was_seen_to_hold(name: str, tmp_path: Path) -> None:
    seen = json.loads((Path(__file__).parent / "fp8_parameters_h200.json").read_text())[
        "models"
    ][name]
    folder = own_checkpoint(tmp_path / name, seen["config"], "bfloat16")
    own = ops.scaled_fp8_quant, fp8.init_fp8_linear_kernel
    (layout,) = trace_offline(folder, dtype="bfloat16", quantization="fp8")
    assert own == (ops.scaled_fp8_quant, fp8.init_fp8_linear_kernel), (
        "vLLM is as it was"
    )
    planned = {
        p.name: [list(p.shape), p.dtype, list(p.strides)] for p in layout.parameters
    }
    after = {n: of["after"] for n, of in seen["parameters"].items()}
    assert {n: planned.get(n) for n in after} == after


def test_what_is_not_known_without_an_engine_is_said(tmp_path: Path) -> None:
    """Another quantisation is refused with the remedy, never planned as if it were not there."""
    folder = tiny("llama", tmp_path / "m", dtype="bfloat16", **test_formats.ODD)
    config = read_config(folder)
    with pytest.raises(
        ConfigError, match="'fp8_per_channel' is not known without an engine"
    ) as refused:
        jv.plan(None, folder, quantization="fp8_per_channel")
    assert "jv.plan(params, pool)" in str(refused.value)
    per_tensor = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    gptq = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
    }
    for given in (per_tensor, gptq):
        with pytest.raises(
            TraceError, match="can't plan for a checkpoint quantised by"
        ) as unknown:
            jv.plan(None, {**config, "quantization_config": given})
        assert "jv.plan(params, pool)" in str(unknown.value)
