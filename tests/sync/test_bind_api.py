"""How `jv.plan` takes rules: auto, declared, both; and a checkpoint's numbers as evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jvlab as jv
from jvlab import errors
from jvlab.layout._checkpoint import CheckpointValues, checkpoint_tensors
from jvlab.layout._tree import flatten
from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.sync._compile_tree import bind_rules, compile_tree, shapes_for
from jvlab.sync._mapping import Mapping
from tests.layout.plan_world import Loader


def bind(*given: Any) -> list[Binding]:
    return bind_rules(*given)[1]


@pytest.fixture(scope="module")
def tiny() -> Path:
    return Path(jv.models.tiny("llama"))


@pytest.fixture(scope="module")
def weights(tiny: Path) -> dict[str, np.ndarray]:
    return load_file(tiny / "model.safetensors")


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_checkpoint_values_are_the_files_numbers(
    tiny: Path, weights: dict[str, np.ndarray], tmp_path: Path
):
    values = CheckpointValues.of(tiny)
    assert values is not None
    assert set(values) == set(weights)
    assert len(values) == len(weights)
    for name, array in weights.items():
        assert np.array_equal(values[name], array)
    half = {
        "a": np.arange(6, dtype=np.float16).reshape(2, 3),
        "b": np.arange(4, dtype=np.int32),
    }
    save_file(half, tmp_path / "model.safetensors")
    read = CheckpointValues.of(tmp_path)
    assert read is not None
    assert np.array_equal(read["a"], half["a"].astype(np.float32))
    assert np.array_equal(read["b"], half["b"].astype(np.float32))


def test_bfloat16_is_widened(tmp_path: Path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    exact = np.array([[1.5, -2.0], [0.0078125, 3e38]], np.float32).astype(
        ml_dtypes.bfloat16
    )
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + exact.tobytes()
    )
    read = CheckpointValues.of(tmp_path)
    assert read is not None
    assert np.array_equal(read["w"], exact.astype(np.float32))


def test_no_values_where_there_are_none(tmp_path: Path):
    assert CheckpointValues.of(tmp_path) is None
    assert CheckpointValues.of({"model_type": "llama"}) is None
    assert CheckpointValues.of("org/model") is None


def test_a_kind_that_is_not_read_is_not_at_hand(tmp_path: Path):
    entries = {
        "__metadata__": {"format": "pt"},
        "q": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]},
        "s": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
    }
    header = json.dumps(entries).encode()
    data = bytes(4) + np.float32(1.5).tobytes()
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + data
    )
    read = CheckpointValues.of(tmp_path)
    assert read is not None
    assert list(read) == ["s"]
    assert "q" not in read
    assert read["s"].tolist() == [1.5]


class Elsewhere:
    """A jax array of several processes, as one of them sees it: shape and dtype, but no numbers."""

    is_fully_addressable = False
    shape, dtype = (24, 24), np.dtype("float32")

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise RuntimeError("fetching a value that spans non-addressable devices")


def test_arrays_of_several_processes_are_no_probe():
    tensor = CheckpointTensor(
        "model.layers.0.self_attn.q_proj.weight", (24, 24), "float32"
    )
    loader = Loader(0)
    at = loader.parameter("q", (24, 24))
    loader.copy(tensor, (slice(None),) * 2, at, (slice(None),) * 2)
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "hidden_size": 24,
    }
    values = {tensor.name: np.eye(24, dtype=np.float32)}
    layouts = [loader.layout((tensor,))]
    tree = {"layers": [{"attn": {"q": {"kernel": Elsewhere()}}}]}
    mapping = compile_tree(
        Mapping, tree, config, [tensor], layouts, mesh="fsdp=2", checkpoint=values
    )
    made = mapping.plan
    assert made.total_bytes == 24 * 24 * 4
    assert "by convention" in mapping.bindings[0].reason


def test_warnings_are_on_every_face_of_a_mapping_until_its_meaning_settles_them(
    monkeypatch: pytest.MonkeyPatch,
):
    tensor = CheckpointTensor(
        "model.layers.0.self_attn.q_proj.weight", (24, 24), "float32"
    )
    loader = Loader(0)
    at = loader.parameter("q", (24, 24))
    loader.copy(tensor, (slice(None),) * 2, at, (slice(None),) * 2)
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "hidden_size": 24,
    }
    tree = {"layers": [{"attn": {"q": {"kernel": np.zeros((24, 24), np.float32)}}}]}
    layouts = [loader.layout((tensor,))]
    mapping = compile_tree(Mapping, tree, config, [tensor], layouts, mesh="fsdp=1")
    (warning,) = mapping.warnings
    assert warning.startswith(
        "layers.{i}.attn.q.kernel: rotary order taken to be the checkpoint's"
    )
    assert f"warning: {warning}" in str(mapping)
    assert "rotary order" in mapping._repr_html_()
    assert "warning: rotary order" in str(mapping.explain("layers.0.attn.q"))
    assert "rotary" in mapping.rows[0].warning
    assert "warning" not in str(
        compile_tree(
            Mapping, tree, config, [tensor], layouts, mesh="fsdp=1", rules=RULE
        )
    ), "declared"
    leaf = "layers.0.attn.q.kernel"
    for still, shown in (
        ({leaf: "rotary order: halves or pairs"}, 1),
        ({leaf: "square"}, 0),
        ({}, 0),
    ):
        monkeypatch.setattr(type(mapping), "meaning", "a link's")
        monkeypatch.setattr(type(mapping), "ambiguous", still)
        assert len(mapping.warnings) == shown


RULE = "layers.{i}.attn.q.kernel -> model.layers.{i}.self_attn.q_proj.weight : d (n h) -> (n h) d"


@pytest.mark.parametrize(
    "rules",
    ["policy", "policy.llama.scanned", "hf_flax", "checkpoint", "tunix", "maxtext"],
)
def test_declared_rules_give_the_tree_they_are_written_for(tiny: Path, rules: str):
    tensors, config = checkpoint_tensors(tiny), config_of(tiny)
    shapes = shapes_for(rules, config, tensors)
    bindings = bind(rules, shapes, tensors, config)
    assert {b.tensor for b in bindings} == {t.name for t in tensors}
    assert {b.leaf for b in bindings} == set(shapes)
    if rules == "hf_flax":
        assert shapes["model.embed_tokens.embedding"].shape == (2048, 128)
        assert shapes["model.layers.1.mlp.up_proj.kernel"].shape == (128, 384)
        assert shapes["model.norm.scale"].shape == (128,)
    if rules == "checkpoint":
        assert {p: s.shape for p, s in shapes.items()} == {
            t.name: t.shape for t in tensors
        }


def unnamed_tree(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The checkpoint's own numbers, its square matrices turned, under names that say nothing of the order of axes."""
    turn = ("q_proj", "o_proj")
    plain = {
        name.removesuffix(".weight").replace("_proj", ""): array.T
        if any(t in name for t in turn)
        else array
        for name, array in weights.items()
    }
    return {name: np.ascontiguousarray(array) for name, array in plain.items()}


def test_numbers_settle_what_names_cannot(tiny: Path, weights: dict[str, np.ndarray]):
    params = unnamed_tree(weights)
    flat = flatten(params)
    tensors, config = checkpoint_tensors(tiny), config_of(tiny)
    found = bind(
        "auto", flat.shapes, tensors, config, flat.arrays, CheckpointValues.of(tiny)
    )
    query = next(
        b for b in found if b.tensor == "model.layers.2.self_attn.q_proj.weight"
    )
    assert {(a.leaf_dim, a.tensor_dim) for a in query.axes} == {(0, 1), (1, 0)}, (
        "turned"
    )
    assert "values match the checkpoint" in query.reason


def test_given_rules_and_the_rest_inferred(tiny: Path, weights: dict[str, np.ndarray]):
    named = {}
    for name, array in weights.items():
        kernel = array.ndim == 2 and "embed" not in name
        named[name.removesuffix("weight") + "kernel" if kernel else name] = (
            array.T if kernel else array
        )
    named["the_odd_one"] = named.pop("lm_head.kernel")
    flat, tensors, config = flatten(named), checkpoint_tensors(tiny), config_of(tiny)
    found = bind(
        ("auto", "the_odd_one -> lm_head.weight : d v -> v d"),
        flat.shapes,
        tensors,
        config,
    )
    assert {b.tensor for b in found} == set(weights)
    assert next(b for b in found if b.leaf == "the_odd_one").tensor == "lm_head.weight"


def test_what_is_no_model_is_refused():
    with pytest.raises(
        errors.ConfigError, match="a model folder, a config or a pool, not int"
    ):
        jv.Mapping.of({}, 7)


def test_what_is_no_rule_is_refused(tiny: Path):
    with pytest.raises(
        errors.ConfigError, match=r"rules must be text, a list of lines, or jv\.Rules"
    ):
        bind(7, {}, checkpoint_tensors(tiny), {})
