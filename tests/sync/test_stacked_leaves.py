"""Layers stacked in one leaf: each is found, explained, drawn, compared and doubted on its own."""

from __future__ import annotations

import dataclasses
import json
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab._errors import ConfigError, MeaningError
from jvlab.layout._checkpoint import (
    CheckpointValues,
    checkpoint_tensors,
    read_config,
)
from jvlab.layout._compile import compile_plan
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._tree import MeshSpec
from jvlab.layout.rules._builtin import policy_rules
from jvlab.layout.rules._rules import invert_binding
from jvlab.sync._compile_tree import changed_rules, policy_shapes, rules_of
from jvlab.sync._diff import differences
from jvlab.sync._mapping import Mapping
from jvlab.sync._meaning import MeaningCheck, RememberedParams
from jvlab.sync._pack import Source
from jvlab.views._mapping_view import axes_svg, detail_html, draw, sends
from jvlab.views.panels._inspector import table_bytes
from tests.layout.plan_world import Size, World, transformer
from tests.views.html_checks import check as check_html
from tests.views.mapping_world import SimpleLink

pytestmark = pytest.mark.slow
LAYERS = 3
Q = "layers.attn.q.kernel"


def build(mesh: str = "fsdp=3,tp=2") -> tuple[World, Mapping]:
    world = transformer(
        World(MeshSpec.parse(mesh), 2, "bfloat16"),
        Size(layers=LAYERS),
        layout="scanned",
        rotary=False,
    )
    bindings = [
        dataclasses.replace(b, rule=f"the rule of {b.leaf}") for b in world.bindings
    ]
    return world, Mapping(
        compile_plan(world.leaves, bindings, world.layouts, title="tiny"),
        bindings,
        world.layouts,
    )


def test_a_layer_is_found_by_every_name_it_has() -> None:
    _, mapping = build()
    assert mapping.stacked == dict.fromkeys(
        ("layers.q", "layers.k", "layers.v", "layers.o", "layers.norm"), 0
    )
    texts = {
        str(mapping.explain(name))
        for name in ("layers.o[1]", "model.layers.1.o_proj.weight")
    }
    (text,) = texts
    assert "layers.o  float32[3, 24, 12]" in text
    assert "slice [1] of 3 along dim 0\n" in text
    assert "→ model.layers.1.o_proj.weight on rank 0-1" in text
    assert "model.layers.0" not in text
    numbered = str(mapping.explain("layers.1.o"))
    assert "slice [1] of 3 along dim 0, which 'layers.1.o' means" in numbered
    assert numbered.replace(", which 'layers.1.o' means", "") == text
    assert mapping.find("layers.1.o") == "layers.o"
    for wrong, why in (
        ("layers.3.o", "no leaf"),
        ("layers.o[3]", "has 3 slices"),
        ("layers.o[:, 1]", "stacked along dim 0"),
        ("embed[1]", "it is not"),
        # experts, which have a leaf for each layer here
        ("layers.1", "matches 3 leaves"),
        ("model.layers.1.qkv_proj.weight", "matches 3 leaves"),
    ):
        with pytest.raises(ConfigError, match=why.replace("[", r"\[")):
            mapping.explain(wrong)


def test_a_whole_leaf_says_once_what_all_its_slices_share() -> None:
    _, mapping = build()
    text = str(mapping.explain("layers.o"))
    assert "3 slices along dim 0, one for each layer" in text
    assert text.count("the rule of layers.o") == 1
    for i in range(LAYERS):
        assert f"  [{i}] → model.layers.{i}.o_proj.weight" in text
    assert "starting at" not in text, "the slice says it"


def test_rows_and_searches_name_the_slice() -> None:
    _, mapping = build()
    row = next(r for r in mapping.rows if r.tensor == "model.layers.2.o_proj.weight")
    assert (row.leaf, row.part, row.name, row.numbered) == (
        "layers.o",
        "[2]",
        "layers.o[2]",
        "layers.2.o",
    )
    for text in ("layers.2.o", "layers.o[2]", "model.layers.2. o_proj"):
        assert [r.name for r in mapping.search(text)] == ["layers.o[2]"], text
    assert "layers.o[2]" in mapping._repr_html_()
    sent = table_bytes(mapping.rows)
    header = json.loads(sent[4 : 4 + int.from_bytes(sent[:4], "little")])
    assert [c["title"] for c in header["columns"] if c["key"] == "numbered"] == [""], (
        "searched, not shown"
    )
    assert {r.part for r in mapping.rows if "experts" in r.leaf} == {""}


def test_the_drawing_of_a_slice_shows_where_it_goes_alone() -> None:
    _, mapping = build()
    whole, one = (
        draw(mapping.plan, "layers.o"),
        draw(mapping.plan, "layers.o", ["model.layers.1.o_proj.weight"]),
    )
    assert len(whole.targets) == 2 * LAYERS
    assert {(rank, info.name) for rank, info, _ in one.targets} == {
        (r, "model.layers.1.o_proj.weight") for r in (0, 1)
    }
    parts = [
        sends(mapping.plan, "layers.o", parameters=[f"model.layers.{i}.o_proj.weight"])
        for i in range(LAYERS)
    ]
    total = sends(mapping.plan, "layers.o")
    assert sum(sum(part.values()) for part in parts) == sum(total.values())
    row = next(r for r in mapping.rows if r.name == "layers.o[1]")
    html = detail_html(mapping, row)
    check_html(html.replace('xmlns="http://www.w3.org/2000/svg" ', ""))
    assert "layers.o[1]" in html
    assert "one slice is taken" in html
    binding = next(b for b in mapping.bindings if b.tensor == row.tensor)
    svg = axes_svg(binding)
    assert ">[1]</text>" in svg
    assert f">of {LAYERS}</text>" in svg
    assert "index 1 of 3 along dim 0" in svg
    assert svg.count("<path") == len(binding.axes), "a fixed index goes nowhere"
    many = transformer(
        World(MeshSpec.parse("fsdp=1"), 2, "bfloat16"),
        Size(layers=9),
        layout="scanned",
        rotary=False,
    )
    plan = compile_plan(many.leaves, many.bindings, many.layouts)
    assert draw(plan, "layers.o").left_out == "10 more parameters"


def test_values_and_differences_of_one_layer() -> None:
    world, mapping = build("fsdp=1")
    held = world.dense_params()
    asked: list[str] = []

    def peek(name: str, rank: int, replica: int = 0) -> bytes:
        asked.append(name)
        info = next(p for p in mapping.plan.parameters if p.name == name)
        return (
            (held[rank, name] + ("layers.1." in name))
            .astype(numpy_dtype(info.dtype))
            .tobytes()
        )

    link = SimpleLink(
        plan=mapping.plan,
        pool=SimpleNamespace(peek=peek),
        closed=False,
        mapping=mapping,
        remembered=RememberedParams(),
    )
    mapping._link = weakref.ref(link)
    for name in ("layers.1.o", "layers.o[1]", "model.layers.1.o_proj.weight"):
        asked.clear()
        found = mapping.values(name, world.values)
        assert [(v.parameter, v.rank, v.equal) for v in found] == [
            ("model.layers.1.o_proj.weight", 0, False),
            ("model.layers.1.o_proj.weight", 1, False),
        ]
        assert set(asked) == {"model.layers.1.o_proj.weight"}, "no other layer is read"
    assert [v.equal for v in mapping.values("layers.o", world.values)].count(
        False
    ) == 2, "of six"
    source = Source.of(mapping.plan, world.values)
    assert {d.parameter for d in differences(link, "layers.2.o", source)} == {  # type: ignore
        "model.layers.2.o_proj.weight"
    }
    assert len(differences(link, "model.layers.2.qkv_proj.weight", source)) == 2  # type: ignore[arg-type]


# By value -----------------------------------------------------------------------------------------------------------


class Trainer:
    """A stacked tree of numpy arrays that was loaded from a tiny checkpoint."""

    def __init__(self, layers: int) -> None:
        self.model = jv.models.tiny(
            "llama", num_key_value_heads=4, vocab_size=512, num_hidden_layers=layers
        )
        self.config, self.tensors = (
            read_config(self.model),
            checkpoint_tensors(self.model),
        )
        self.shapes = policy_shapes(self.config, self.tensors, "float32")
        self.rules = policy_rules(self.config, [t.name for t in self.tensors])
        self.bindings = self.rules.bind(self.shapes, self.tensors, self.config)
        values = CheckpointValues.of(self.model)
        assert values is not None
        self.arrays = {
            path: np.zeros(leaf.shape, np.float32) for path, leaf in self.shapes.items()
        }
        for b in self.bindings:
            invert_binding(b, values[b.tensor], self.arrays[b.leaf])

    def check(self, arrays: Any = None, rules: Any = None) -> Any:
        rules = rules or self.rules
        origin = SimpleNamespace(
            rules=rules,
            shapes=self.shapes,
            tensors=tuple(self.tensors),
            config=self.config,
        )
        bindings = rules.bind(self.shapes, self.tensors, self.config)
        mapping = SimpleNamespace(bindings=bindings, _origin=origin, _link=None)
        made: Any = MeaningCheck(SimpleNamespace(mapping=mapping))  # type: ignore[arg-type]
        made.configure("auto", None, None)
        made.by_value(self.arrays if arrays is None else arrays, self.model)
        return made.meaning

    def trained(self, size: float) -> dict[str, np.ndarray]:
        random = np.random.default_rng(1)
        moved = lambda a: (a + size * a.std() * random.standard_normal(a.shape)).astype(
            np.float32
        )
        return {path: moved(a) for path, a in self.arrays.items()}


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(LAYERS)


def test_meaning_is_checked_slice_by_slice(trainer: Trainer) -> None:
    meaning = trainer.check()
    assert (meaning.state, meaning.how) == ("checked", "value")
    assert {f"{Q}[{i}]" for i in range(LAYERS)} <= meaning.leaves.keys()
    assert Q not in meaning.leaves
    assert not meaning.ambiguous
    assert f"{9 * LAYERS + 3} slices of 12 leaves sampled: equal" in meaning.why
    assert "layers.attn.q.kernel[1]" in meaning.to_dict()["leaves"]


@pytest.mark.parametrize("trained", [0.0, 0.2])
def test_meaning_of_two_layers_that_are_exchanged_is_refused(
    trainer: Trainer, trained: float
) -> None:
    moved = trainer.trained(trained)
    assert trainer.check(moved).state == "checked"
    with pytest.raises(MeaningError) as caught:
        trainer.check({**moved, Q: moved[Q][[1, 0, 2]]})
    assert caught.value.leaves == (f"{Q}[0]", f"{Q}[1]"), (
        "not the third, which is where it belongs"
    )
    assert "[0] holds the values of layer [1]" in caught.value.message
    assert (
        "stack the layers of layers.attn.q.kernel in the checkpoint's order"
        in caught.value.remedy
    )
    assert f"{Q}[1]" in caught.value.fields["meaning"]._repr_html_()  # type: ignore[attr-defined]


def test_meaning_of_layers_in_reverse_is_refused(trainer: Trainer) -> None:
    """Every stacked leaf, so that most of the tree is wrong: the rule under which it is right is what convinces."""
    reverse = {
        path: a[::-1] if path.startswith("layers.") else a
        for path, a in trainer.arrays.items()
    }
    with pytest.raises(
        MeaningError, match=r"they are by: .*model\.layers\.\[2\|1\|0\]"
    ):
        trainer.check(reverse)


def test_meaning_of_a_rule_that_takes_slices_in_reverse_is_refused(
    trainer: Trainer,
) -> None:
    right = "layers.attn.q.kernel -> model.layers.{i}.self_attn.q_proj.weight : i d n h -> (n h) d"
    wrong = right.replace("{i}", "[2|1|0]").replace(": i", ": [1|1|1]")
    with pytest.raises(MeaningError) as caught:
        trainer.check(rules=changed_rules(trainer.rules, wrong, right))
    assert caught.value.leaves == (f"{Q}[0]", f"{Q}[2]"), (
        "the middle one is where it belongs"
    )
    assert caught.value.fields["readings"] == dict.fromkeys(caught.value.leaves, right)


def test_meaning_of_one_wrong_layer_among_many_is_refused() -> None:
    """More layers than were sampled together once; trained since, so that nearly all numbers correlate."""
    deep = Trainer(40)
    moved = deep.trained(0.1)
    order = np.arange(40)
    order[[20, 21]] = 21, 20
    with pytest.raises(MeaningError) as caught:
        deep.check({**moved, Q: moved[Q][order]})
    assert caught.value.leaves == (f"{Q}[20]", f"{Q}[21]")
    one = {**moved, Q: moved[Q].copy()}
    one[Q][33] = one[Q][33].transpose(1, 2, 0).reshape(one[Q][33].shape)
    with pytest.raises(MeaningError) as caught:
        deep.check(one)
    assert caught.value.leaves == (f"{Q}[33]",)


def test_a_constant_layer_leaves_its_leaf_ambiguous(trainer: Trainer) -> None:
    flat = {
        **trainer.arrays,
        "layers.mlp.up.kernel": trainer.arrays["layers.mlp.up.kernel"].copy(),
    }
    flat["layers.mlp.up.kernel"][1] = 0
    meaning = trainer.check(flat)
    assert meaning.state == "checked"
    assert meaning.leaves["layers.mlp.up.kernel[1]"].kind == "constant"
    assert meaning.leaves["layers.mlp.up.kernel[0]"].kind == "equal"
    assert set(meaning.ambiguous) == {"layers.mlp.up.kernel"}


def test_a_named_policy_set_fits_stacked_and_numbered_trees(trainer: Trainer) -> None:
    numbered = policy_shapes(trainer.config, trainer.tensors, scanned=False)
    for shapes in (trainer.shapes, numbered):
        found = rules_of("policy.llama", trainer.tensors, trainer.config, shapes)
        assert {
            b.leaf for b in found.bind(shapes, trainer.tensors, trainer.config)
        } == set(shapes)
