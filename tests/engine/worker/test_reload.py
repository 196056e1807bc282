"""Layers that jvlab has no format for: vLLM's own reload in place, bytes, memory, failures, later checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from jvlab._errors import Unsupported
from jvlab.engine._cpu import lacks
from jvlab.engine.tracing import _meta_model, _vllm_model
from jvlab.engine.tracing._trace import trace_model
from jvlab.engine.worker._reload import fingerprint
from jvlab.engine.worker._weights import Weights
from jvlab.layout._checkpoint import checkpoint_tensors
from jvlab.layout._types import RELOADED, CheckpointTensor, RankLayout
from jvlab.trainer.models import tiny
from jvlab.wire._sync_words import Terms, for_workers
from tests.engine.tracing import fp8_model
from tests.engine.worker import row_quant
from tests.engine.worker.fake_trainer import FakeTrainer, checkpoint
from tests.engine.worker.test_weights import fill, weights_of

pytestmark = pytest.mark.vllm
PLENTY = 1 << 40
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with _meta_model.vllm_globals():
        yield
        row_quant.RowsMethod.breaks = ""


def folders(tmp_path: Path) -> list[str]:
    # it has biases
    return [tiny("qwen2", tmp_path / str(seed), seed=seed, **SIZES) for seed in (0, 1)]


def rows_config(folder: str, tp: int = 1) -> Any:
    config = _meta_model.engine_config(Path(folder), tp, 1, False, "float32")
    config.quant_config = row_quant.RowsConfig()
    return config


def reload_by_vllm(config: Any, model: Any, weights: dict[str, torch.Tensor]) -> None:
    """What vLLM's `reload_weights` does."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    with torch.no_grad(), _meta_model.config_in_force(config):
        initialize_layerwise_reload(model)
        model.load_weights(iter((n, w.clone()) for n, w in weights.items()))
        finalize_layerwise_reload(model, config.model_config)


def memory(model: torch.nn.Module) -> dict[str, tuple[int, bytes]]:
    """Address and bytes of every parameter."""
    bits = lambda p: (
        p.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )
    return {n: (p.data_ptr(), bits(p)) for n, p in model.named_parameters()}


def open_weights(
    config: Any, model: Any, layout: RankLayout
) -> tuple[FakeTrainer, Weights, Any]:
    trainer = FakeTrainer.of([layout])
    worker = SimpleNamespace(vllm_config=config)
    weights, links = weights_of(model, trainer.plan, worker=worker)
    return trainer, weights, links


def send(
    trainer: FakeTrainer,
    weights: Weights,
    links: Any,
    values: Any,
    mode: str,
    version: int = 1,
) -> None:
    weights.prepare(version, mode, "full", PLENTY)
    fill(weights, links, trainer.plan, trainer.shards(values))
    assert weights.confirm(float("inf"))
    found = {(weights.slots[n].info.name, 0): d for n, d in weights.found.items()}
    assert found == trainer.digests(values), "the digests are the trainer's"


def send_and_commit(
    trainer: FakeTrainer,
    weights: Weights,
    links: Any,
    values: Any,
    mode: str,
    version: int = 1,
) -> None:
    send(trainer, weights, links, values, mode, version)
    weights.commit()


def test_bytes_are_those_of_vllms_reload_and_memory_stays(tmp_path: Path) -> None:
    """Both modes, twice each, against a second model that vLLM itself reloads; biases and scales included."""
    one, other = folders(tmp_path)
    config = rows_config(one)
    by_vllm = fp8_model.loaded(config, fp8_model.checkpoint(one))
    model = fp8_model.loaded(config, fp8_model.checkpoint(one))
    layout = trace_model(model, checkpoint_tensors(one))
    notes = {n.name: n.reason for n in layout.repacked if n.kind == RELOADED}
    names = [
        f"model.layers.{i}.{part}"
        for i in (0, 1)
        for part in ("mlp.down_proj", "self_attn.qkv_proj")
    ]
    assert notes.keys() == {
        *(f"{n}.weight" for n in names),
        *(f"{n}.bias" for n in names if "qkv" in n),
    }
    assert all("RowsMethod" in why or "re-packed" in why for why in notes.values())
    trainer, weights, links = open_weights(config, model, layout)
    before = memory(model)
    for version, (folder, mode) in enumerate(
        [(other, "direct"), (one, "staged"), (other, "staged"), (one, "direct")], 1
    ):
        live = memory(model)
        send(trainer, weights, links, checkpoint(folder), mode, version)
        if mode == "staged":
            assert memory(model) == live, "live memory before the commit"
        weights.commit()
        reload_by_vllm(config, by_vllm, fp8_model.checkpoint(folder))
        now = memory(model)
        kernels = ("weight_scale", "bias", "qkv_proj.weight", "down_proj.weight")
        assert {n: b for n, (_, b) in now.items()} == {
            n: b for n, (_, b) in memory(by_vllm).items()
        }
        assert [
            n for n in now if n.endswith(kernels) and now[n][0] != before[n][0]
        ] == [], "the same storage"
        assert weights.reloads.seconds.keys() == set(names)
        assert all(0 < s < 60 for s in weights.reloads.seconds.values())
        assert Counter(weights.how.values())["reloaded"] == 6
        assert all(s.raw is None for s in weights.slots.values()), (
            "raw copies were kept"
        )
    assert {n: b for n, (_, b) in memory(model).items()} == {
        n: b for n, (_, b) in before.items()
    }


def test_two_ranks_are_reloaded_at_the_commit(tmp_path: Path) -> None:
    """Processing may reduce over ranks, which receive in different orders: nothing is processed before all have all."""
    one, other = folders(tmp_path)
    config = rows_config(one, 2)
    of = lambda folder: [
        fp8_model.loaded(config, fp8_model.checkpoint(folder), rank) for rank in (0, 1)
    ]
    models, wanted = of(one), of(other)
    layouts = []
    for rank, model in enumerate(models):
        _meta_model.stand_in(2, 1, rank)
        layouts.append(
            trace_model(
                model,
                checkpoint_tensors(one),
                rank,
                (("tp", rank), ("pp", 0), ("ep", 0)),
            )
        )
    trainer = FakeTrainer.of(layouts)
    for rank, (model, loaded) in enumerate(zip(models, wanted, strict=True)):
        _meta_model.stand_in(2, 1, rank)
        weights, links = weights_of(model, trainer.plan, rank)
        before = memory(model)
        weights.prepare(1, "direct", "full", PLENTY)
        assert (
            weights.need("direct")
            > sum(s.nbytes for s in weights.slots.values() if s.reloaded)
            > 0
        )
        fill(weights, links, trainer.plan, trainer.shards(checkpoint(other)))
        assert weights.confirm(float("inf"))
        names = [n for n in before if "qkv_proj" in n or "down_proj" in n]
        assert [memory(model)[n] for n in names] == [before[n] for n in names]
        weights.commit()
        assert {n: b for n, (_, b) in memory(model).items()} == {
            n: b for n, (_, b) in memory(loaded).items()
        }
        assert [memory(model)[n][0] for n in names] == [before[n][0] for n in names]


def test_later_checks_see_a_changed_bit(tmp_path: Path) -> None:
    """In a weight, in its scale, in a bias: the layer's parameters are then missing; changed back, they are there."""
    one, _ = folders(tmp_path)
    config = rows_config(one)
    model: Any = fp8_model.loaded(config, fp8_model.checkpoint(one))
    trainer, weights, links = open_weights(
        config, model, trace_model(model, checkpoint_tensors(one))
    )
    assert not {"reloaded"} & set(weights.check()[1].values()), (
        "nothing is known of them before a sync"
    )
    send_and_commit(trainer, weights, links, checkpoint(one), "direct")
    wanted = trainer.digests(checkpoint(one))
    named = lambda found: {(weights.slots[n].info.name, 0): d for n, d in found.items()}
    found, how = weights.check()
    assert named(found) == wanted
    assert list(how.values()).count("reloaded") == 6
    layer = model.model.layers[1].self_attn.qkv_proj
    for name in ("weight", "weight_scale", "bias"):
        values = layer._parameters[name].data.view(torch.uint8).view(-1)
        values[3] ^= 1
        lost = wanted.keys() - named(weights.check()[0]).keys()
        assert lost == {
            (f"model.layers.1.self_attn.qkv_proj.{n}", 0) for n in ("weight", "bias")
        }, name
        values[3] ^= 1
        assert named(weights.check()[0]) == wanted
    swapped = layer.weight.data.clone()
    before = fingerprint(layer)
    layer.weight.data[[0, 1]] = swapped[[1, 0]]
    assert fingerprint(layer) != before, "the same bytes in another order"


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_a_layer_that_fails_is_as_it_was(mode: str, tmp_path: Path) -> None:
    """vLLM's processing raises: that layer keeps its tensors, old bytes and addresses, and the next sync is whole."""
    one, other = folders(tmp_path)
    config = rows_config(one)
    model: Any = fp8_model.loaded(config, fp8_model.checkpoint(one))
    trainer, weights, links = open_weights(
        config, model, trace_model(model, checkpoint_tensors(one))
    )
    before = memory(model)
    row_quant.RowsMethod.breaks = "model.layers.1.mlp.down_proj"
    with pytest.raises(RuntimeError, match="out of order"):
        send_and_commit(trainer, weights, links, checkpoint(other), mode)
    weights.abandon()
    after = memory(model)
    broken = [n for n in before if n.startswith(row_quant.RowsMethod.breaks)]
    assert len(broken) == 2
    assert [after[n] for n in broken] == [before[n] for n in broken]
    row_quant.RowsMethod.breaks = ""
    send_and_commit(trainer, weights, links, checkpoint(other), mode, 2)
    wanted = fp8_model.loaded(config, fp8_model.checkpoint(other))
    assert {n: b for n, (_, b) in memory(model).items()} == {
        n: b for n, (_, b) in memory(wanted).items()
    }


def test_what_no_sync_fills_is_refused(tmp_path: Path) -> None:
    """A raw copy is missing: vLLM would process memory that nobody wrote."""
    from jvlab.engine.worker._reload import reload_layer

    one, _ = folders(tmp_path)
    config = rows_config(one)
    model: Any = fp8_model.loaded(config, fp8_model.checkpoint(one))
    before = memory(model)
    layer = model.model.layers[0].self_attn.qkv_proj
    raw = torch.zeros(_vllm_model.as_built(layer)["weight"].shape)
    with pytest.raises(Unsupported, match="nothing that is synced fills bias"):
        reload_layer(layer, {"weight": raw}, "qkv")
    assert memory(model) == before


def test_a_worker_replies_with_seconds_and_a_new_link_still_checks(
    tmp_path: Path,
) -> None:
    """A whole sync of a worker over loopback; its commit names the layers, and a link that is opened later checks."""
    import json
    import threading

    from jvlab.engine.worker._rank_sync import WorkerSync
    from jvlab.transport import listen

    one, other = folders(tmp_path)
    config = rows_config(one)
    model: Any = fp8_model.loaded(config, fp8_model.checkpoint(one))
    sync = WorkerSync(
        SimpleNamespace(
            get_model=lambda: model,
            vllm_config=config,
            model_config=config.model_config,
        )
    )
    trainer = FakeTrainer.of([trace_model(model, checkpoint_tensors(one))])
    terms = for_workers(Terms(version=1, bucket_seconds=20.0))
    for again in (False, True):  # the second time nothing is sent
        sender = listen("loopback")
        opened = sync.open(
            "loopback",
            trainer.plan.to_bytes(),
            0,
            [json.dumps([sender.endpoint()])],
            10.0,
        )
        assert "error" not in opened, opened
        if not again:
            assert "error" not in sync.prepare(terms)
            sync.move()
            sending = threading.Thread(
                target=trainer.send, args=([sender], checkpoint(other), 1)
            )
            sending.start()
            reply = sync.verify(20.0)
            sending.join(20)
            assert reply["done"], reply
            assert reply["evidence"]["reloaded"] == 6
            assert {(n, 0): d for n, d in reply["digests"]} == trainer.digests(
                checkpoint(other)
            )
            assert sync.commit()["reloaded"].keys() == {
                n for n in row_quant.RowsMethod.made if "layers" in n
            }
        found = sync.check(False)
        assert {(n, 0): d for n, d in found["digests"]} == trainer.digests(
            checkpoint(other)
        )
        assert found["evidence"]["reloaded"] == 6
    sync.close()
    wanted = fp8_model.loaded(config, fp8_model.checkpoint(other))
    assert {n: b for n, (_, b) in memory(model).items()} == {
        n: b for n, (_, b) in memory(wanted).items()
    }


def test_a_registered_quantisation_is_vllms_own_path(tmp_path: Path) -> None:
    """By its name, as an engine is launched: vLLM finds the config, and the layers get its method."""
    from vllm.engine.arg_utils import EngineArgs

    one, _ = folders(tmp_path)
    config = EngineArgs(
        model=one, quantization=row_quant.NAME, dtype="float32", max_model_len=64
    ).create_engine_config()
    assert isinstance(config.quant_config, row_quant.RowsConfig)
    model: Any = fp8_model.loaded(config, fp8_model.checkpoint(one))
    assert isinstance(
        model.model.layers[0].mlp.down_proj.quant_method, row_quant.RowsMethod
    )
    assert not isinstance(
        model.model.layers[0].mlp.gate_up_proj.quant_method, row_quant.RowsMethod
    )


def test_the_report_names_layers_and_what_they_cost() -> None:
    """From a replica's message to the report, its line and its HTML; of two replicas the slower one."""
    from jvlab.sync._transaction import SyncReport, outcome_of
    from jvlab.wire import jvlab_pb2 as pb

    said = [{"model.layers.0.<b>": 0.25, "lm": 0.5}, {"model.layers.0.<b>": 0.75}]
    replies = [
        pb.ReplicaOutcome(replica=f"p/{k}", state="committed", reloaded=of)
        for k, of in enumerate(said)
    ]
    seconds = {"move": 1.0, "total": 2.0, "reload": 1.25}
    outcomes = tuple(
        outcome_of(pb.ReplicaOutcome.FromString(r.SerializeToString())) for r in replies
    )
    report = SyncReport(3, 8, seconds, outcomes)
    assert report.reloaded == {"lm": 0.5, "model.layers.0.<b>": 0.75}
    assert "to 2 replicas, 2 layers through vLLM's reload" in repr(report)
    html = report._repr_html_()
    assert "model.layers.0.&lt;b&gt; 750.0 ms, lm 500.0 ms" in html
    assert "<b>" not in html.partition("own reload")[2]
    assert report.to_dict()["outcomes"][1]["reloaded"] == said[1]
    assert "reload" not in repr(SyncReport(3, 8, seconds, ()))


_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def int8_checkpoint(folder: str) -> dict[str, torch.Tensor]:
    """The checkpoint with int8 linear layers, one scale per row, as llm-compressor writes it."""
    out = {}
    for name, tensor in fp8_model.checkpoint(folder).items():
        if name.endswith("proj.weight"):
            scale = tensor.abs().amax(dim=1, keepdim=True) / 127
            out[name] = (tensor / scale).round().to(torch.int8)
            out[f"{name}_scale"] = scale.float()
        else:
            out[name] = tensor
    return out


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_compressed_tensors_on_a_cpu(
    mode: str, tmp_path: Path, needs_int8: None
) -> None:
    """int8 W8A8, a method that vLLM's CPU build runs: its oneDNN kernel computes with what was synced."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    one, other = (
        tiny("llama", tmp_path / str(seed), seed=seed, **SIZES) for seed in (0, 1)
    )
    dtype = "float32" if lacks("bfloat16") else "bfloat16"  # of activations
    config = _meta_model.engine_config(Path(one), 1, 1, False, dtype)
    config.quant_config = CompressedTensorsConfig.from_config(INT8)
    model: Any = fp8_model.loaded(config, int8_checkpoint(one))
    wanted: Any = fp8_model.loaded(config, int8_checkpoint(other))
    values = int8_checkpoint(other)
    tensors = [
        CheckpointTensor(n, tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for n, t in values.items()
    ]
    trainer, weights, links = open_weights(config, model, trace_model(model, tensors))
    before = memory(model)
    x = torch.randn(5, SIZES["hidden_size"]).to(getattr(torch, dtype))
    product = lambda m: m.model.layers[1].mlp.gate_up_proj(x)[0]
    was = product(model)
    assert not torch.equal(was, product(wanted))
    send(
        trainer,
        weights,
        links,
        {
            n: np.asarray(t.float() if t.is_floating_point() else t)
            for n, t in values.items()
        },
        mode,
    )
    weights.commit()
    now = memory(model)
    assert {n: b for n, (_, b) in now.items()} == {
        n: b for n, (_, b) in memory(wanted).items()
    }
    assert [n for n in now if "proj" in n and now[n][0] != before[n][0]] == []
    assert torch.equal(product(model), product(wanted)), "what the kernel computes with"
    assert len(weights.reloads.seconds) == 8
