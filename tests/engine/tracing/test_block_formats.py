"""Block-scaled fp8 checkpoints: a sync's bytes are those of vLLM's own load of the checkpoint of the same values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from jvlab._errors import CoverageError
from jvlab.engine.tracing import _meta_model
from jvlab.engine.tracing._trace import trace_model
from jvlab.layout._checkpoint import read_config
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import SCALES
from jvlab.layout._types import CheckpointTensor, RankLayout
from jvlab.sync._compile_tree import compile_tree
from jvlab.sync._mapping import Mapping
from jvlab.trainer.models import tiny
from jvlab.views._mapping_view import detail_html
from tests.engine.tracing import fp8_model
from tests.engine.tracing.model_digest import model_digest
from tests.engine.tracing.test_formats import differing, params_of
from tests.engine.tracing.test_formats import send as send_live

pytestmark = pytest.mark.vllm

BLOCK = 32
SOAK = pytest.mark.soak
DENSE = {
    "hidden_size": 80,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
# 80 is no multiple of 32: the last blocks are cut; two heads of 16 fill a block
CASES = {
    "llama": (
        "llama",
        {**DENSE, "intermediate_size": 96, "num_hidden_layers": 2},
        1,
        False,
    ),
    "llama-tp2": (
        "llama",
        {
            **DENSE,
            "num_key_value_heads": 4,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
        },
        2,
        False,
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2},
        1,
        False,
    ),
}


@pytest.fixture(autouse=True)
def vllm_as_it_was() -> Any:
    with _meta_model.vllm_globals():
        yield


def tensors_of(weights: dict[str, torch.Tensor]) -> list[CheckpointTensor]:
    return [
        CheckpointTensor(n, tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for n, t in weights.items()
    ]


def mapping_of(
    params: Any,
    folder: str,
    weights: dict[str, torch.Tensor],
    layouts: list[RankLayout],
) -> Mapping:
    given = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    config = {**read_config(folder), "quantization_config": given}
    return compile_tree(
        Mapping,
        params,
        config,
        tensors_of(weights),
        layouts,
        rules="policy",
        bucket_mib=0.05,
    )


def engines(config: Any, weights: dict[str, torch.Tensor]) -> list[torch.nn.Module]:
    return [
        fp8_model.loaded(config, weights, r)
        for r in range(config.parallel_config.tensor_parallel_size)
    ]


def traced(
    config: Any, models: list[torch.nn.Module], weights: dict[str, torch.Tensor]
) -> list[RankLayout]:
    out = []
    for rank, model in enumerate(models):
        _meta_model.stand_in(len(models), 1, rank)
        with _meta_model.config_in_force(config):
            out.append(
                trace_model(
                    model,
                    tensors_of(weights),
                    rank,
                    (("tp", rank), ("pp", 0), ("ep", 0)),
                )
            )
    return out


BOTH = (("float32", "direct"), ("bfloat16", "staged"))


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("llama-tp2", BOTH[:1]),
        ("qwen3_moe", BOTH[1:]),
        *(pytest.param(n, BOTH, marks=SOAK) for n in CASES),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(dtype for dtype, _ in x),
)
def test_a_sync_holds_what_a_load_of_the_quantised_checkpoint_would(
    name: str, rounds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and scales, from float32 and bfloat16, direct and staged, into engines that hold other weights."""
    fp8_model.blocks_on_cpu(monkeypatch)
    family, sizes, tp, ep = CASES[name]
    folders = [
        tiny(family, tmp_path / str(seed), seed=seed, **sizes) for seed in (0, 1)
    ]
    config = fp8_model.block_config(Path(folders[0]), BLOCK, tp, ep)
    of = lambda folder, dtype: fp8_model.block_checkpoint(
        fp8_model.checkpoint(folder), BLOCK, dtype
    )
    models = engines(config, of(folders[1], "float32"))
    before = [model_digest(m) for m in models]
    layouts = traced(config, models, of(folders[0], "float32"))
    assert [model_digest(m) for m in models] == before, (
        "known values never reach the live layers"
    )
    assert [x.repacked for x in layouts] == [()] * tp
    for dtype, mode in rounds:
        weights = of(folders[0], dtype)
        params = params_of(folders[0], dtype)
        mapping = mapping_of(params, folders[0], weights, layouts)
        inspect(mapping, dtype)
        plan = mapping.plan
        assert TransferPlan.from_bytes(plan.to_bytes()) == plan
        assert TransferPlan.from_bytes(plan.to_bytes()).quantised == plan.quantised
        for rank, (model, loaded) in enumerate(
            zip(models, engines(config, weights), strict=True)
        ):
            send_live(plan, model, rank, params, mode)
            assert differing(model, loaded) == []
            with torch.no_grad():
                for p in model.parameters():
                    p.view(torch.uint8).zero_()
            assert differing(model, loaded), "what the next round starts from"


def inspect(mapping: Mapping, dtype: str) -> None:
    """What the inspector says of such a mapping."""
    q = next(
        r for r in mapping.rows if r.tensor == "model.layers.0.self_attn.q_proj.weight"
    )
    assert (q.status, q.leaf_dtype, q.dtype) == ("quantised", dtype, "float8_e4m3fn")
    assert "one scale per block" in mapping.notes[q.parameter]
    assert "scaled and cast to fp8 on the trainer" in detail_html(mapping, q)
    assert {x.path for x in mapping.plan.leaves if x.path.startswith(SCALES)} == {
        f"{SCALES}/{x.path}" for x in mapping.plan.quantised
    }


@SOAK
def test_shards_on_a_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_model.blocks_on_cpu(monkeypatch)
    family, sizes, _, _ = CASES["llama"]
    folder = tiny(family, tmp_path / "m", **sizes)
    config = fp8_model.block_config(Path(folder), BLOCK)
    weights = fp8_model.block_checkpoint(fp8_model.checkpoint(folder), BLOCK, "float32")
    (model,), (loaded,) = engines(config, weights), engines(config, weights)
    layouts = traced(config, [model], weights)
    with torch.no_grad():
        for p in model.parameters():
            p.view(torch.uint8).zero_()
    params = params_of(folder, "float32", {"fsdp": 2, "tp": 2})
    mapping = mapping_of(params, folder, weights, layouts)
    send_live(mapping.plan, model, 0, params, "direct")
    assert differing(model, loaded) == []


def test_a_kernel_that_changes_values_is_named_and_reloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepGEMM's powers of two: the same shapes in the same memory, other values. Only running it shows that."""
    from tests.engine.worker.test_reload import memory

    fp8_model.blocks_on_cpu(monkeypatch, e8m0=True)
    family, sizes, _, _ = CASES["llama"]
    folders = [
        tiny(family, tmp_path / str(seed), seed=seed, **sizes) for seed in (0, 1)
    ]
    config = fp8_model.block_config(Path(folders[0]), BLOCK)
    of = lambda folder: fp8_model.block_checkpoint(
        fp8_model.checkpoint(folder), BLOCK, "bfloat16"
    )
    (model,), (loaded,) = (
        engines(config, of(folders[1])),
        engines(config, of(folders[0])),
    )
    layouts = traced(config, [model], of(folders[0]))
    reasons = {n.name: n.reason for n in layouts[0].repacked}
    assert len(reasons) == 16, "weights and scales of four layers, twice"
    assert all("changes values" in why for why in reasons.values())
    assert layouts[0].reloaded == reasons.keys()
    before = memory(model)
    params = params_of(folders[0], "bfloat16")
    plan = mapping_of(params, folders[0], of(folders[0]), layouts).plan
    send_live(plan, model, 0, params, "direct")
    assert differing(model, loaded) == []
    assert {n for n, (at, _) in memory(model).items() if at != before[n][0]} == set(), (
        "the same storage"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_of_hard_values(dtype: str) -> None:
    """Many magnitudes, ties between fp8 values, zeros, blocks below the smallest scale, a negative largest, NaN."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    from jvlab.layout._plan_types import Quantised
    from jvlab.sync._quantise import amax_of, block_scales_of, cast_all

    rng = np.random.default_rng(0)
    values = (
        rng.standard_normal((100, 150)) * 2.0 ** rng.integers(-30, 30, (100, 1))
    ).astype(np.float32)
    values[:32, :32] = 0.0
    values[:32, 32:64] = 1e-7 * rng.standard_normal((32, 32))
    # ties, then subnormals
    values[32:64, :32] = 1.0625 * 2.0 ** -(np.arange(1024).reshape(32, 32) % 24)
    values[32, 0], values[33, 1] = 448.0, -448.0
    values[64:96, :32] = -np.abs(values[64:96, :32])
    values[96:, 128:] = np.nan
    x = torch.from_numpy(values).to(getattr(torch, dtype))
    with torch.compiler.set_stance("force_eager"):
        wanted, wanted_scales = per_block_cast_to_fp8(
            x, [BLOCK, BLOCK], use_ue8m0=False
        )
    q = Quantised("x", dtype, dtype, (4, 5), (), block=(BLOCK, BLOCK))
    leaf = jnp.asarray(values).astype(dtype)
    scales, inverse = block_scales_of(
        np.asarray(jax.jit(lambda x: amax_of([x], (q,)))(leaf))
    )
    (made,) = jax.jit(lambda x, i: cast_all([x], i, (q,)))(leaf, inverse)
    assert np.array_equal(
        scales[:-1].view(np.uint32),
        wanted_scales.numpy().reshape(-1)[:-1].view(np.uint32),
    )
    assert np.isnan(scales[-1]), "a sync finds it there, and names the leaf"
    assert np.isnan(wanted_scales[-1, -1])
    bits = np.asarray(made).view(np.uint8), wanted.view(torch.uint8).numpy()
    plain = np.s_[:96, :128], np.s_[:96, 128:], np.s_[96:, :128]
    assert [np.array_equal(bits[0][at], bits[1][at]) for at in plain] == [True] * 3
    assert np.isnan(np.asarray(made).astype(np.float32)[96:, 128:]).all()
    assert len(np.unique(bits[0])) > 200
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    # 50 × 75
    sharded = jax.device_put(
        leaf, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b"))
    )
    again = block_scales_of(np.asarray(jax.jit(lambda x: amax_of([x], (q,)))(sharded)))
    (parts,) = jax.jit(lambda x, i: cast_all([x], i, (q,)))(sharded, again[1])
    assert np.array_equal(again[0], scales, equal_nan=True), (
        "shards end inside of blocks"
    )
    assert np.array_equal(np.asarray(parts).view(np.uint8), bits[0])


def test_leaves_without_whole_blocks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leaf that is cast in two ways, or whose parts begin inside of a block."""
    from jvlab.layout._formats import block_scales, expand_blocks
    from jvlab.layout._tree import MeshSpec, leaf_from_spec
    from jvlab.layout._types import Axis, Binding

    tensors = [
        CheckpointTensor("w", (64, 96), "float8_e4m3fn"),
        CheckpointTensor("w_scale_inv", (2, 3), "float32"),
    ]
    config = {
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        }
    }
    scales = block_scales(tensors, config)
    assert block_scales(tensors, {}) == {}
    assert (
        block_scales([tensors[0], replace(tensors[1], shape=(3, 2))], config) == {}
    ), "other shapes are no scales"
    leaf = leaf_from_spec("x", (96, 80), "float32", MeshSpec.parse("fsdp=1"))
    axes = (Axis(96, 0, 1, 1, 1), Axis(64, 1, 1, 0, 1))
    whole = Binding("x", "w", (96, 80), (64, 96), (0, 0), (0, 0), axes)
    _, bound, (made,) = expand_blocks([leaf], [whole], scales)
    assert (made.block, made.grid) == ((BLOCK, BLOCK), (3, 3))
    assert bound[1].axes == (Axis(3, 0, 1, 1, 1), Axis(2, 1, 1, 0, 1))
    with pytest.raises(CoverageError, match="begins inside of a block"):
        expand_blocks([leaf], [replace(whole, leaf_start=(0, 16))], scales)
    with pytest.raises(CoverageError, match="cast in different ways"):
        expand_blocks([leaf], [whole, replace(whole, add=1.0)], scales)
    turned = (Axis(96, 0, 1, 1, 1), Axis(32, 1, 2, 0, 1), Axis(2, 1, 1, 0, 32))
    with pytest.raises(CoverageError, match="in another order"):
        expand_blocks([leaf], [replace(whole, axes=turned)], scales)
    with pytest.raises(CoverageError, match="which is not quantised"):
        expand_blocks([leaf], [whole, replace(whole, tensor="norm")], scales)
