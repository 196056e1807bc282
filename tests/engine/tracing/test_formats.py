"""fp8 engines: the formats that connecting finds, and syncs whose bytes are those of vLLM's own load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tracing.model_digest import model_digest
from tests.fuzzing import soak_but

pytest.importorskip("vllm")

import numpy as np
import torch

from jvlab.analysis.certification._subject import (
    Memory,
    as_loaded,
    differences,
    values_held,
)
from jvlab.engine.tracing import _meta_model
from jvlab.engine.tracing._trace import trace_model
from jvlab.engine.worker._receivers import Ledger
from jvlab.engine.worker._weights import Weights
from jvlab.layout._checkpoint import checkpoint_tensors, read_config
from jvlab.layout._layout_codec import (
    layout_from_bytes,
    layout_to_plain,
    plain_to_bytes,
)
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._types import RELOADED, RankLayout
from jvlab.sync._compile_tree import compile_tree
from jvlab.sync._mapping import Mapping
from jvlab.sync._pack import LinkPack, Source
from jvlab.trainer.models import tiny
from jvlab.views._mapping_view import detail_html
from tests.engine.tracing import fp8_model
from tests.engine.tracing.fp8_model import Reduction
from tests.engine.tracing.trace_oracle import own_checkpoint

pytestmark = pytest.mark.vllm

PLENTY = 1 << 40
SOAK = pytest.mark.soak
ODD = {
    "hidden_size": 64,
    "intermediate_size": 168,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def vllm_as_it_was() -> Any:
    with _meta_model.vllm_globals():
        yield


@pytest.fixture
def reduction(monkeypatch: pytest.MonkeyPatch) -> Reduction:
    return fp8_model.fp8_on_cpu(monkeypatch)


def trace(
    config: Any,
    models: list[torch.nn.Module],
    folder: str,
    reduction: Reduction,
    shared: bool = True,
) -> list[RankLayout]:
    """Every rank's layout, as its engine would report it; not `shared`: no maximum is taken over ranks."""
    out = []
    for rank, model in enumerate(models):
        _meta_model.stand_in(len(models), 1, rank)
        factor = 2 ** (len(models) - 1 - rank) if shared else 1
        # what the other ranks' known values reach
        reduction.known = lambda amax, factor=factor: amax * factor
        with _meta_model.config_in_force(config):
            ep = rank if config.parallel_config.enable_expert_parallel else 0
            out.append(
                trace_model(
                    model,
                    checkpoint_tensors(folder),
                    rank,
                    (("tp", rank), ("pp", 0), ("ep", ep)),
                )
            )
    return out


def mapping_of(params: Any, folder: str, layouts: list[RankLayout]) -> Mapping:
    tensors = checkpoint_tensors(folder)
    return compile_tree(
        Mapping,
        params,
        read_config(folder),
        tensors,
        layouts,
        rules="policy",
        bucket_mib=0.05,
    )


def send(
    plan: TransferPlan,
    model: torch.nn.Module,
    rank: int,
    params: Any,
    mode: str,
) -> dict[str, int]:
    """One sync into a rank by the real plan, pack, scatter and swap; the digests of both sides must agree."""
    source, sums = Source.of(plan, params), {}
    table = plan.links()
    packs = [
        LinkPack(plan, d, rank, 0)
        for d in sorted(table.device[table.rank == rank].tolist())
    ]
    ledger = Ledger([pack.link for pack in packs])
    weights = Weights(None, model, plan, rank, ledger)
    weights.prepare(1, mode, "full", PLENTY)
    left = {n: len(s.boxes) for n, s in weights.slots.items()}
    for pack in packs:
        for bucket in range(len(pack.sizes)):
            values = pack.values(bucket, source)
            room = memoryview(bytearray(pack.sizes[bucket]))
            pack.write(bucket, values, room)
            for target, part in pack.digests(bucket, values).items():
                sums[target] = (sums.get(target, 0) + part) & (2**64 - 1)
            for box in ledger.buckets[pack.device, bucket].boxes:
                weights.scatter(box, room)
                left[box.target] -= 1
                if not left[box.target]:
                    weights.finish(box.target)
    weights.end()
    weights.commit()
    assert weights.found == sums
    return {weights.slots[n].info.name: value for n, value in sums.items()}


def differing(one: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    """Parameters of two models whose bytes differ; both must have the same ones."""
    a, b = dict(one.named_parameters()), dict(other.named_parameters())
    assert a.keys() == b.keys()
    bits = lambda t: t.detach().contiguous().view(torch.uint8)
    return [
        n
        for n in a
        if a[n].dtype != b[n].dtype or not torch.equal(bits(a[n]), bits(b[n]))
    ]


def memory_of(layouts: list[RankLayout], models: list[torch.nn.Module]) -> Memory:
    """What `jv.certify` would read from these engines."""
    out: Memory = {}
    for layout, model in zip(layouts, models, strict=True):
        live = dict(model.named_parameters())
        for p in layout.parameters:
            flat = torch.as_strided(
                live[p.name].detach(), (live[p.name].numel(),), (1,)
            ).clone()
            out[layout.rank, p.name] = np.frombuffer(
                flat.view(torch.uint8).numpy().tobytes(), numpy_dtype(p.dtype)
            )
    return out


def certified(
    layouts: list[RankLayout],
    weights: dict[str, torch.Tensor],
    loaded: Memory,
    other: Memory,
) -> None:
    """What `jv.certify` expects of these values is vLLM's own load; what it reads from it is loaded again the same."""
    given = {n: t.float().numpy() for n, t in weights.items()}
    assert differences(loaded, other), "they differ before"
    assert differences(as_loaded(layouts, given, other), loaded) == []
    held, left = values_held(layouts, loaded)
    assert not left
    assert differences(as_loaded(layouts, held, other), loaded) == []
    name = next(n for n in given if n.endswith("q_proj.weight"))
    wrong = differences(
        as_loaded(layouts, {**held, name: held[name] * np.float32(1.5)}, other), loaded
    )
    assert {d.parameter.rpartition("self_attn.")[2] for d in wrong} == {
        "qkv_proj.weight",
        "qkv_proj.weight_scale",
    }


def params_of(folder: str, dtype: str, mesh: dict[str, int] | None = None) -> Any:
    import jvlab as jv

    return jv.Policy.from_pretrained(
        folder, dtype=dtype, mesh=jv.mesh(**mesh) if mesh else None
    ).params


CASES = {
    "llama": ("llama", {**ODD}, 1, False),  # 168 inputs of down_proj are padded to 176
    "llama-tp2": ("llama", {**ODD, "intermediate_size": 192}, 2, False),
    # its router of few experts is padded
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 2}, 1, False),
    "qwen3_moe-ep2": ("qwen3_moe", {"num_hidden_layers": 2}, 2, True),
}


@pytest.mark.parametrize(
    "name",
    soak_but(
        ["llama-tp2", "qwen3_moe-ep2"],
        ["llama", "llama-tp2", "qwen3_moe", "qwen3_moe-ep2"],
    ),
)
def test_a_sync_holds_what_a_load_would(
    name: str, tmp_path: Path, reduction: Reduction
) -> None:
    """float32 and bfloat16 parameters into engines that hold other weights: afterwards every byte is as loaded."""
    family, sizes, tp, ep = CASES[name]
    folders = [
        tiny(family, tmp_path / str(seed), seed=seed, **sizes) for seed in (0, 1)
    ]
    config = fp8_model.quantised_config(Path(folders[0]), tp, ep)
    wanted = fp8_model.ranks(config, fp8_model.checkpoint(folders[0]), reduction)
    others = fp8_model.ranks(config, fp8_model.checkpoint(folders[1]), reduction)
    before = [model_digest(model) for model in others]
    layouts = trace(config, others, folders[0], reduction)
    assert [model_digest(model) for model in others] == before, (
        "known values never reach the live layers"
    )
    assert [
        layout_from_bytes(plain_to_bytes(layout_to_plain(x))).formats for x in layouts
    ] == [x.formats for x in layouts]
    certified(
        layouts,
        fp8_model.checkpoint(folders[0]),
        memory_of(layouts, wanted),
        memory_of(layouts, others),
    )
    for dtype, mode in (("float32", "direct"), ("bfloat16", "staged")):
        params = params_of(folders[0], dtype)
        plan = mapping_of(params, folders[0], layouts).plan
        assert TransferPlan.from_bytes(plan.to_bytes()) == plan
        for rank, (model, loaded) in enumerate(zip(others, wanted, strict=True)):
            assert differing(model, loaded), "they differ before"
            send(plan, model, rank, params, mode)
            assert differing(model, loaded) == []
            # other bytes for the next round, but for padding, which no sync writes: it is 0
            with torch.no_grad():
                for p in model.parameters():
                    (p.t() if p.dim() == 2 and p.element_size() == 1 else p).view(
                        torch.uint8
                    ).zero_()


def test_what_the_inspector_says(tmp_path: Path, reduction: Reduction) -> None:
    folder = tiny("llama", tmp_path / "m", **ODD)
    config = fp8_model.quantised_config(Path(folder))
    models = fp8_model.ranks(config, fp8_model.checkpoint(folder), reduction)
    mapping = mapping_of(
        params_of(folder, "bfloat16"), folder, trace(config, models, folder, reduction)
    )
    q = next(
        r for r in mapping.rows if r.tensor == "model.layers.0.self_attn.q_proj.weight"
    )
    assert (q.status, q.leaf_dtype, q.dtype) == (
        "quantised",
        "bfloat16",
        "float8_e4m3fn",
    )
    assert (
        mapping.notes[q.parameter]
        == "format: fp8, one scale per fused parameter, transposed"
    )
    down = mapping.notes["model.layers.0.mlp.down_proj.weight"]
    assert (
        down
        == "format: fp8, one scale per fused parameter, transposed, padded with zeros"
    )
    assert "14 quantised" in repr(mapping)
    assert "scaled and cast to fp8 on the trainer" in detail_html(mapping, q)


def reloaded(layouts: list[RankLayout]) -> dict[str, str]:
    """Parameters that go through vLLM's own reload, and why."""
    return {n.name: n.reason for x in layouts for n in x.repacked if n.kind == RELOADED}


def test_a_format_that_jvlab_has_not_is_named(
    tmp_path: Path, reduction: Reduction
) -> None:
    """Scales per row: vLLM's own reload takes over, into the memory that the engine has."""
    folders = [tiny("llama", tmp_path / str(k), seed=k, **ODD) for k in (0, 1)]
    config = fp8_model.quantised_config(Path(folders[0]), how="fp8_per_channel")
    (model,), (wanted,) = (
        fp8_model.ranks(config, fp8_model.checkpoint(f), reduction) for f in folders
    )
    layouts = trace(config, [model], folders[0], reduction)
    assert layouts[0].formats == ()
    assert len(reloaded(layouts)) == 8
    why = reloaded(layouts)["model.layers.0.self_attn.qkv_proj.weight"]
    assert why.startswith(
        "jvlab has no format for what Fp8PtpcOnlineLinearMethod makes of it: weight has 256 scales"
    )
    params = params_of(folders[1], "float32")
    mapping = mapping_of(params, folders[1], layouts)
    assert mapping.notes["model.layers.0.self_attn.qkv_proj.weight"] == f"staged: {why}"
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    with _meta_model.config_in_force(config):
        send(mapping.plan, model, 0, params, "direct")
    assert differing(model, wanted) == []
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == before


def test_other_arithmetic_is_no_format(
    tmp_path: Path, reduction: Reduction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that rounds one value otherwise has no format of jvlab's."""
    from vllm import _custom_ops as ops

    folder = tiny("llama", tmp_path / "m", **ODD)
    config = fp8_model.quantised_config(Path(folder))
    models = fp8_model.ranks(config, fp8_model.checkpoint(folder), reduction)
    right = ops.scaled_fp8_quant

    def rounded_down(x: torch.Tensor, scale: torch.Tensor, **_: Any) -> Any:
        values, scale = right(x, scale)
        changed = values.view(torch.uint8).clone()
        changed[-1, -1] ^= 1  # one bit of one value
        return changed.view(values.dtype), scale

    assert not reloaded(trace(config, models, folder, reduction))
    monkeypatch.setattr(ops, "scaled_fp8_quant", rounded_down)
    found = reloaded(trace(config, models, folder, reduction))
    assert len(found) == 8
    assert all("is not max" in why for why in found.values())


def test_ranks_with_scales_of_their_own_are_no_format(
    tmp_path: Path, reduction: Reduction
) -> None:
    """Known values differ from rank to rank: a scale that is not over all of them shows, and is not taken for one."""
    folder = tiny("llama", tmp_path / "m", **{**ODD, "intermediate_size": 192})
    config = fp8_model.quantised_config(Path(folder), 2)
    models = fp8_model.ranks(config, fp8_model.checkpoint(folder), reduction)
    assert all(
        "is not max" in why
        for why in reloaded(
            trace(config, models, folder, reduction, shared=False)
        ).values()
    )
    assert len(reloaded(trace(config, models, folder, reduction, shared=False))) == 8


@pytest.mark.parametrize(
    "mesh", [pytest.param({"fsdp": 2}, marks=SOAK), {"fsdp": 2, "tp": 2}], ids=str
)
def test_shards_on_a_mesh_give_the_same_bytes(
    mesh: dict[str, int], tmp_path: Path, reduction: Reduction
) -> None:
    """A group's scale is over all shards: quantised where they are, equal to one device's."""
    import jax

    folder = tiny("llama", tmp_path / "m", **ODD)
    config = fp8_model.quantised_config(Path(folder))
    models = fp8_model.ranks(config, fp8_model.checkpoint(folder), reduction)
    layouts = trace(config, models, folder, reduction)
    sums = []
    for chosen in (None, mesh):
        params = params_of(folder, "float32", chosen)
        if chosen:
            assert any(len(x.sharding.device_set) > 1 for x in jax.tree.leaves(params))
        sums.append(
            send(
                mapping_of(params, folder, layouts).plan, models[0], 0, params, "direct"
            )
        )
    assert sums[0] == sums[1]
    changed = jax.tree.map(lambda x: x, params)
    layer = changed["layers"]["mlp"]["down"]["kernel"]
    changed["layers"]["mlp"]["down"]["kernel"] = layer.at[0, 0, 0].set(8.0)
    other = send(
        mapping_of(params, folder, layouts).plan, models[0], 0, changed, "direct"
    )
    assert {n for n in other if other[n] != sums[1][n]} == {
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.down_proj.weight_scale",
    }


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_the_card_holds_the_same_formats(
    name: str, tmp_path: Path, reduction: Reduction
) -> None:
    """What these tests load on a CPU has the shapes, dtypes and strides that were seen in an engine on an H200."""
    seen = json.loads((Path(__file__).parent / "fp8_parameters_h200.json").read_text())[
        "models"
    ][name]
    folder = own_checkpoint(tmp_path / name, seen["config"], "bfloat16")
    config = fp8_model.quantised_config(folder)
    (model,) = fp8_model.ranks(config, fp8_model.checkpoint(folder), reduction)
    form = lambda p: [
        list(p.shape),
        str(p.dtype).removeprefix("torch."),
        list(p.stride()),
    ]
    live = {n: form(p) for n, p in model.named_parameters()}
    after = {n: of["after"] for n, of in seen["parameters"].items()}
    assert {n: live.get(n) for n in after} == after
    (layout,) = trace(config, [model], str(folder), reduction)
    traced = {
        p.name: [list(p.shape), p.dtype, list(p.strides)] for p in layout.parameters
    }
    assert {n: traced.get(n) for n in after} == after
    texts = {
        f.parameter.rpartition("layers.0.")[2]: f.text
        for f in layout.formats
        if "layers.0." in f.parameter
    }
    if name == "moe":
        assert (
            texts["mlp.experts.routed_experts.w13_weight"]
            == "fp8, one scale per expert and part"
        )
        assert texts["mlp.gate.weight"].endswith("transposed, padded with zeros")
