"""Checkpoint tensors: from safetensors headers, through an index, and from config.json alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from jvlab._errors import ModelError
from jvlab.layout._checkpoint import CheckpointValues, checkpoint_tensors
from jvlab.trainer.models import tiny
from tests.engine.tracing.trace_oracle_configs import OWN, TINY


@pytest.mark.parametrize("family", TINY)
def test_the_config_alone_gives_what_the_file_holds(
    family: str, tmp_path: Path
) -> None:
    folder = Path(tiny(family, tmp_path / family))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((folder / "config.json").read_text())
    on_disk = {t.name: t for t in checkpoint_tensors(folder)}
    derived = {
        t.name.removeprefix("transformer.") if family == "gpt2" else t.name: t
        for t in checkpoint_tensors(tmp_path / "bare")
    }
    assert {n: (t.shape, t.dtype) for n, t in derived.items()} == {
        n: (t.shape, t.dtype) for n, t in on_disk.items()
    }


def test_deepseek_names_are_the_published_ones() -> None:
    """As in the index of deepseek-ai/DeepSeek-V3, less the fp8 scales and the MTP module (layer 61 there)."""
    names = {t.name: t.shape for t in checkpoint_tensors(OWN["deepseek_v3"])}
    attention = (
        "q_a_proj",
        "q_a_layernorm",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "kv_b_proj",
        "o_proj",
    )
    wanted = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for i in range(5):
        at = f"model.layers.{i}."
        wanted |= {
            f"{at}{n}.weight" for n in ("input_layernorm", "post_attention_layernorm")
        }
        wanted |= {f"{at}self_attn.{n}.weight" for n in attention}
        mlps = (
            ["mlp"]
            if i == 0
            else ["mlp.shared_experts", *(f"mlp.experts.{e}" for e in range(8))]
        )
        wanted |= {
            f"{at}{m}.{p}_proj.weight" for m in mlps for p in ("gate", "up", "down")
        }
        wanted |= (
            set()
            if i == 0
            else {f"{at}mlp.gate.weight", f"{at}mlp.gate.e_score_correction_bias"}
        )
    assert set(names) == wanted
    assert names["model.layers.1.mlp.experts.3.down_proj.weight"] == (64, 32)


def split(folder: Path, keep: bool) -> list[str]:
    """The file of a tiny model as two shards and an index; without `keep` the shards are missing."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    names = sorted(weights, reverse=True)
    shards = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, members in shards.items():
        if keep:
            save_file({n: weights[n] for n in members}, folder / file)
    index = {
        "metadata": {},
        "weight_map": {n: f for f, members in shards.items() for n in members},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return list(index["weight_map"])


@pytest.mark.parametrize("keep", [True, False], ids=["with shards", "index only"])
def test_an_index(keep: bool, tmp_path: Path) -> None:
    folder = Path(tiny("qwen2", tmp_path / "m"))
    before = set(checkpoint_tensors(folder))
    order = split(folder, keep)
    found = checkpoint_tensors(folder)
    assert set(found) == before
    assert [t.name for t in found] == order


def test_an_index_that_names_an_unknown_tensor(tmp_path: Path) -> None:
    folder = Path(tiny("qwen2", tmp_path / "m"))
    split(folder, keep=False)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.surprise"] = "model-00001-of-00002.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model\.surprise"):
        checkpoint_tensors(folder)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a directory"):
        checkpoint_tensors(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json"):
        checkpoint_tensors(tmp_path)
    with pytest.raises(ModelError, match="model_type"):
        checkpoint_tensors({"hidden_size": 4})
    with pytest.raises(ModelError, match="no_such_model"):
        checkpoint_tensors({"model_type": "no_such_model"})
    (tmp_path / "model.safetensors").write_bytes(
        b"\x10\0\0\0\0\0\0\0 this is no header"
    )
    with pytest.raises(ModelError, match="not a safetensors file"):
        checkpoint_tensors(tmp_path)


def test_values_are_read_in_place(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {
        "matrix": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "packed": torch.zeros(2, dtype=torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    values = CheckpointValues(tmp_path)
    assert set(values) == {"matrix", "scalar", "empty"}, "float8 has no scales here"
    for name in values:
        expected = tensors[name].float().numpy()
        assert values[name].dtype == np.float32
        assert np.array_equal(values[name], expected)
    picked = values.at("matrix", np.array([[1, 2], [0, 0]]))
    assert picked.tolist() == [5.0, 0.0]
    assert values.at("scalar", np.zeros((2, 0), np.int64)).tolist() == [3.5, 3.5]
    assert values.at("empty", np.zeros((0, 2), np.int64)).shape == (0,)
