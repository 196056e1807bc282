"""Tracing a model that was loaded and processed as an engine does: nothing changes, re-packed layers are named."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine.tracing.model_digest import model_digest
from tests.fuzzing import in_turn

pytest.importorskip("vllm")

import torch

from jvlab.engine.tracing import _meta_model
from jvlab.engine.tracing._offline import trace_offline
from jvlab.engine.tracing._trace import trace_model, trace_worker
from jvlab.layout._checkpoint import checkpoint_tensors
from jvlab.layout._layout_codec import layout_from_plain
from jvlab.trainer.models import tiny
from tests.engine.tracing import trace_oracle as oracle
from tests.engine.tracing.trace_oracle_configs import OWN

pytestmark = pytest.mark.vllm


class Live:
    """A CPU model of rank 1 of 2, loaded and then processed by vLLM's own functions, with oneDNN packing or without."""

    def __init__(
        self, folder: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm import _custom_ops
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        if packed and not _custom_ops._supports_onednn:
            pytest.skip("this vLLM has no oneDNN kernels")
        monkeypatch.setattr(_custom_ops, "_supports_onednn", packed)
        self.tensors = checkpoint_tensors(folder)
        self.config = _meta_model.engine_config(folder, 2, 1, False, "float32")
        self.model: Any = oracle.loaded_by_vllm(
            self.config, 2, 1, 1, oracle.weights_of(folder)
        )
        with _meta_model.config_in_force(self.config):
            process_weights_after_loading(
                self.model, self.config.model_config, torch.device("cpu")
            )
        self.worker = SimpleNamespace(
            get_model=lambda: self.model, vllm_config=self.config
        )


def folder_of(name: str, tmp_path: Path) -> Path:
    if name in OWN:
        return oracle.own_checkpoint(tmp_path / name, OWN[name])
    family, _, tied = name.partition("-")
    return Path(
        tiny(family, tmp_path / name, **({"tie_word_embeddings": True} if tied else {}))
    )


@pytest.fixture(autouse=True)
def vllm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.attention import selector

    # vLLM's kernels of MLA for AMX refuse float32 and such small heads; it remembers its choice of kernels
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    selector._cached_get_attn_backend.cache_clear()
    with _meta_model.vllm_globals():
        yield
    selector._cached_get_attn_backend.cache_clear()


PROCESSED = [
    *("llama", "llama-tied", "gpt2", "mixtral"),
    *("olmo2", "gemma3", "deepseek_v3", "phi"),
]


def python_state(model: torch.nn.Module) -> list[Any]:
    return [
        {k: repr(v) for k, v in o.__dict__.items()}
        for o in (*model.modules(), *model.parameters())
    ]


@pytest.mark.parametrize(("name", "packed"), in_turn(PROCESSED, [True, False]))
def test_a_processed_model_traces_as_a_fresh_one(
    name: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(name, tmp_path)
    offline = trace_offline(folder, 2, dtype="float32")[1]
    live = Live(folder, packed, monkeypatch)
    before, state = model_digest(live.model), python_state(live.model)
    with _meta_model.config_in_force(live.config):
        layout = trace_model(live.model, live.tensors, 1, offline.coords)
    assert model_digest(live.model) == before
    assert python_state(live.model) == state
    for f in fields(offline):
        if f.name != "repacked":
            a, b = getattr(offline, f.name), getattr(layout, f.name)
            assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, f.name
    repacked = {n.name for n in layout.repacked}
    experts = {
        p.name for p in layout.parameters if ".w13_" in p.name or ".w2_" in p.name
    }
    latent = {p.name for p in layout.parameters if "kv_b_proj" in p.name}
    if not packed:
        # vLLM's CPU kernels re-arrange experts in any case
        assert repacked == experts | latent
    else:
        matrices = {
            p.name
            for p in layout.parameters
            if len(p.shape) == 2 and "embed" not in p.name and "wpe" not in p.name
        }
        head_is_embedding = name in ("llama-tied", "gemma3", "gpt2")
        table = {"gpt2": "transformer.wte.weight"}.get(
            name, "model.embed_tokens.weight"
        )
        assert repacked == (matrices - {table}) | experts | (
            {table} if head_is_embedding else set()
        )
    assert all(
        n.elements
        == int(np.prod(next(p.shape for p in layout.parameters if p.name == n.name)))
        for n in layout.repacked
    )


@pytest.mark.parametrize("packed", [False, True], ids=["live", "packed"])
def test_repacked_means_that_a_write_does_not_reach_the_output(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(folder_of("llama", tmp_path), packed, monkeypatch)
    with _meta_model.config_in_force(live.config):
        repacked = {n.name for n in trace_model(live.model, live.tensors, 1).repacked}
        head, table = live.model.lm_head, live.model.model.embed_tokens
        x = torch.randn(3, head.weight.shape[1])
        reach = {}
        before = head.quant_method.apply(head, x, None)
        head.weight.data.add_(1.0)
        reach["lm_head.weight"] = not torch.equal(
            before, head.quant_method.apply(head, x, None)
        )
        ids = torch.tensor([1, 5, 9])
        before = table.quant_method.embedding(table, ids)
        table.weight.data.add_(1.0)
        reach["model.embed_tokens.weight"] = not torch.equal(
            before, table.quant_method.embedding(table, ids)
        )
    assert reach == {name: name not in repacked for name in reach}
    assert reach["lm_head.weight"] is not packed


@pytest.mark.parametrize("packed", [False, True], ids=["live", "packed"])
def test_a_workers_reply_survives_vllms_own_wire_without_pickle(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    folder = folder_of("llama-tied", tmp_path)
    live = Live(folder, packed, monkeypatch)
    plain = trace_worker(
        live.worker, [[t.name, list(t.shape), t.dtype] for t in live.tensors]
    )
    received = MsgpackDecoder().decode(MsgpackEncoder().encode(plain))
    layout = layout_from_plain(received)
    with _meta_model.config_in_force(live.config):
        direct = trace_model(
            live.model, live.tensors, 1, (("tp", 1), ("pp", 0), ("ep", 0))
        )
    for f in fields(direct):
        a, b = getattr(direct, f.name), getattr(layout, f.name)
        assert (
            np.array_equal(a, b) and a.dtype == b.dtype
            if isinstance(a, np.ndarray)
            else a == b
        ), f.name
    assert received["aliases"] == [["lm_head.weight", "model.embed_tokens.weight"]]


def test_the_worker_may_only_have_get_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(folder_of("llama", tmp_path), False, monkeypatch)
    bare = SimpleNamespace(get_model=lambda: live.model)
    with _meta_model.config_in_force(live.config):
        assert (
            layout_from_plain(
                trace_worker(bare, [[t.name, t.shape, t.dtype] for t in live.tensors])
            ).rank
            == 1
        )
