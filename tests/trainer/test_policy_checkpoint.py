"""Checkpoints in and out: bit for bit, readable by transformers, one leaf in memory at a time, all or nothing."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jvlab as jv
from jvlab._errors import ConfigError, ModelError
from jvlab.layout._tree import flatten
from jvlab.layout._types import Binding
from jvlab.layout.rules._rules import invert_binding
from jvlab.sync._compile_tree import trace_and_compile
from jvlab.sync._mapping import Mapping
from jvlab.trainer._policy import Policy
from jvlab.trainer.decoder import _checkpoint
from jvlab.trainer.decoder._sharding import mesh
from tests.trainer.decoder.policy_reference import (
    FAMILIES,
    gap,
    reference,
    reference_logits,
    tokens,
)

pytestmark = pytest.mark.slow


def _bytes(folder: str | Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    files = _checkpoint.TensorFiles(Path(folder))
    return {
        name: (str(files[name].dtype), files[name].shape, files[name].tobytes())
        for name in files
    }


def _places(binding: Binding) -> object:
    return (
        binding.leaf,
        binding.tensor,
        binding.leaf_start,
        binding.tensor_start,
        frozenset(binding.axes),
    )


def _edited(source: str, folder: Path, **fields: Any) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    source = jv.models.tiny(family)
    policy = Policy.from_pretrained(source, mesh=mesh(fsdp=2, tp=2))
    saved = policy.save_pretrained(tmp_path / "saved")
    assert _bytes(saved) == _bytes(source)
    assert json.loads(Path(saved, "config.json").read_text()) == json.loads(
        Path(source, "config.json").read_text()
    )
    # the stamp of `tiny`, no longer true
    names = {file.name for file in Path(source).iterdir()} - {"jvlab.json"}
    assert {file.name for file in Path(saved).iterdir()} == names
    again = Policy.from_pretrained(saved)
    jax.tree.map(np.testing.assert_array_equal, again.params, policy.params)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_transformers_loads_what_was_trained(family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    policy = Policy.from_pretrained(jv.models.tiny(family))
    ids = tokens(2048)
    changed = jax.tree.map(lambda x: x * 1.01 + 0.003, policy.params)
    saved = policy.save_pretrained(tmp_path / "saved", params=changed)
    assert (
        gap(policy.logits(changed, ids), reference_logits(reference(saved), ids)) < 5e-5
    )
    assert (
        gap(policy.logits(policy.params, ids), reference_logits(reference(saved), ids))
        > 1e-3
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_leaves_are_what_the_rules_say(family: str) -> None:
    """Every loaded leaf against the reference executor of the layout's bindings."""
    policy = Policy.from_pretrained(jv.models.tiny(family), mesh=mesh(fsdp=3, tp=2))
    files, leaves = (
        _checkpoint.TensorFiles(policy.source),
        flatten(policy.params).arrays,
    )
    expected: dict[str, np.ndarray] = {}
    for binding in policy._bindings:
        into = expected.setdefault(
            binding.leaf, np.full(binding.leaf_shape, np.nan, np.float32)
        )
        invert_binding(binding, files[binding.tensor], into)
    assert set(expected) == set(leaves)
    for leaf, array in expected.items():
        np.testing.assert_array_equal(np.asarray(leaves[leaf]), array, err_msg=leaf)


def test_dtypes(tmp_path: Path) -> None:
    source = jv.models.tiny("qwen2", dtype="bfloat16")
    wide = Policy.from_pretrained(source)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(wide.params)} == {"float32"}
    lossless = wide.save_pretrained(tmp_path / "wide")
    assert json.loads(Path(lossless, "config.json").read_text())["dtype"] == "float32"
    assert _bytes(
        wide.save_pretrained(tmp_path / "narrow", dtype="bfloat16")
    ) == _bytes(source)
    narrow = Policy.from_pretrained(source, dtype="bfloat16")
    assert narrow.dtype == narrow.compute_dtype == "bfloat16"
    assert _bytes(narrow.save_pretrained(tmp_path / "kept")) == _bytes(source)
    with pytest.raises(ConfigError, match="dtype='int8'"):
        Policy.from_pretrained(source, dtype="int8")


def test_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = jv.models.tiny("llama")
    monkeypatch.setattr(_checkpoint, "SHARD_BYTES", 1_000_000)
    policy = Policy.from_pretrained(source)
    saved = Path(policy.save_pretrained(tmp_path / "saved"))
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    files = sorted(saved.glob("*.safetensors"))
    assert len(files) == len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == 4 * policy.parameters
    assert _bytes(saved) == _bytes(source)
    ids = tokens(2048)
    theirs = reference_logits(reference(str(saved)), ids)
    again = Policy.from_pretrained(saved)
    assert gap(again.logits(again.params, ids), theirs) < 5e-5
    files[1].unlink()
    with pytest.raises(
        ModelError,
        match=f"lacks 1 of the {len(files)} files its index names, first {files[1].name}",
    ):
        Policy.from_pretrained(saved)


def test_a_tied_head_that_is_stored_is_saved_too(tmp_path: Path) -> None:
    """Some checkpoints keep both names of a tied table: the embedding is the one that counts, for both."""
    folder = _edited(
        jv.models.tiny("llama"), tmp_path / "both", tie_word_embeddings=True
    )
    policy = Policy.from_pretrained(folder)
    assert "lm_head" not in policy.params
    saved = _bytes(policy.save_pretrained(tmp_path / "saved"))
    assert (
        saved["lm_head.weight"]
        == saved["model.embed_tokens.weight"]
        == _bytes(folder)["model.embed_tokens.weight"]
    )


def test_the_model_is_never_in_memory_twice() -> None:
    path = jv.models.tiny("llama", num_hidden_layers=12, hidden_size=256)
    # imports and caches are paid here
    Policy.from_pretrained(jv.models.tiny("llama"), mesh=mesh(fsdp=2))
    tracemalloc.start()
    try:
        policy = Policy.from_pretrained(path, mesh=mesh(fsdp=2))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    leaves = [leaf.nbytes for leaf in jax.tree.leaves(policy.params)]
    # jax may keep the very memory that numpy filled, so a model's worth is allowed: a second one is not
    assert peak < sum(leaves) + 3 * max(leaves)


def test_only_the_parts_that_devices_hold_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each element of a split leaf is copied once, not once for each device."""
    path, copied = jv.models.tiny("llama"), []
    real = _checkpoint._copy

    def counting(into: np.ndarray, view: np.ndarray) -> None:
        real(into, view)
        copied.append(view.size)

    monkeypatch.setattr(_checkpoint, "_copy", counting)
    policy = Policy.from_pretrained(path, mesh=mesh(fsdp=2, tp=2))
    monkeypatch.undo()
    assert sum(copied) == policy.parameters
    assert max(copied) == 2048 * 128 // 4  # a quarter of the largest


def test_saving_is_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.from_pretrained(jv.models.tiny("llama"))

    def broken(*_: Any) -> str:
        raise OSError("no space left on device")

    monkeypatch.setattr(_checkpoint, "config_text", broken)
    with pytest.raises(OSError, match="no space"):
        policy.save_pretrained(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    saved = policy.save_pretrained(tmp_path / "saved")
    with pytest.raises(ModelError, match="exists"):
        policy.save_pretrained(saved)


def test_a_flax_model_that_is_already_built(tmp_path: Path) -> None:
    """Its values, under another author's names and layouts, in a policy of the shape of a checkpoint."""
    from flax import nnx

    folder = jv.models.tiny("qwen3", num_hidden_layers=2)
    policy = Policy.from_pretrained(folder)
    draw = np.random.default_rng(0)
    trained = lambda leaf: leaf + 0.01 * draw.normal(size=leaf.shape).astype("float32")
    other = jax.tree.map(trained, policy.params)

    class Held(nnx.Module):
        def __init__(self) -> None:
            for name, value in other.items():
                made = jax.tree.map(nnx.Param, value)
                setattr(self, name, nnx.data(made) if isinstance(made, dict) else made)

    for model in (other, Held()):
        made = Policy.from_pretrained(model, like=folder)
        jax.tree.map(np.testing.assert_array_equal, made.params, other)
        assert made.source == Path(folder)
    saved = made.save_pretrained(tmp_path / "saved")
    again = Policy.from_pretrained(saved)
    jax.tree.map(np.testing.assert_array_equal, again.params, other)
    with pytest.raises(ConfigError, match=r"(?s)like=.*logprobs_fn"):
        Policy.from_pretrained(other)
    with pytest.raises(ConfigError, match="already built"):
        Policy.from_pretrained(folder, like=folder)
    with pytest.raises(ModelError, match=r"(?s)'gpt2'.*logprobs_fn"):
        Policy.from_pretrained(other, like=jv.models.tiny("gpt2"))


def test_a_model_of_tunix_computes_the_same_as_a_policy() -> None:
    pytest.importorskip("tunix", reason="google-tunix is not installed")
    from tests.integrations.tunix_world import SIZES, qwen3_actor

    folder = jv.models.tiny("qwen3", **SIZES)
    actor = qwen3_actor(folder, seed=5)
    policy = Policy.from_pretrained(actor, like=folder)
    ids = np.arange(5, 11)[None]
    causal = np.tril(np.ones((1, 6, 6), bool))
    wanted, _ = actor(jax.numpy.asarray(ids), np.arange(6)[None], None, causal)
    found = policy.logits(policy.params, ids)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    llama = jv.models.tiny("llama")
    with pytest.raises(ModelError, match="no decoder for model_type 'gpt2'"):
        Policy.from_pretrained(jv.models.tiny("gpt2"))
    with pytest.raises(ModelError, match=r"lm_head\.weight") as caught:
        Policy.from_pretrained(
            _edited(
                jv.models.tiny("gemma2"), tmp_path / "untied", tie_word_embeddings=False
            )
        )
    assert caught.value.fields["problems"]
    with pytest.raises(ModelError, match=r"layers\.4"):
        Policy.from_pretrained(_edited(llama, tmp_path / "more", num_hidden_layers=5))
    with pytest.raises(ModelError, match="num_hidden_layers='4'"):
        Policy.from_pretrained(_edited(llama, tmp_path / "text", num_hidden_layers="4"))
    short = _edited(llama, tmp_path / "short")
    with (short / "model.safetensors").open("rb+") as stream:
        stream.truncate(1_000_000)
    with pytest.raises(ModelError, match="ends before"):
        Policy.from_pretrained(short)
    empty = _edited(llama, tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no safetensors files"):
        Policy.from_pretrained(empty)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = _edited(jv.models.tiny("llama"), tmp_path / "fp8")
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw.replace(b'"F32"', b'"U32"', 1))
    with pytest.raises(ModelError, match="holds U32, not plain floating-point numbers"):
        Policy.from_pretrained(folder)


def test_a_hub_id_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="'nobody/nothing-here' could not be fetched"):
        Policy.from_pretrained("nobody/nothing-here")


@pytest.mark.vllm
@pytest.mark.parametrize("rules", ["policy", "auto"])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3"])
def test_the_tree_plans_onto_vllm(family: str, rules: str) -> None:
    pytest.importorskip("vllm")
    path = jv.models.tiny(family)
    policy = Policy.from_pretrained(path, mesh=mesh(fsdp=3, tp=2))
    mapping = trace_and_compile(
        Mapping, policy.params, path, tensor_parallel=2, rules=rules
    )
    assert {_places(b) for b in mapping.bindings} == {
        _places(b) for b in policy._bindings
    }
