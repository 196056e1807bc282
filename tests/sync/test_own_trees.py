"""Models of other people are connected by copying what the errors say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.layout._checkpoint import checkpoint_tensors
from jvlab.layout._types import Binding
from jvlab.layout.rules._ruleset import Rules
from jvlab.sync._compile_tree import bind_rules, shapes_for
from tests.sync.own_models import MODELS, Author, offered_by

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=MODELS)
def author(request: pytest.FixtureRequest) -> Author:
    return Author(request.param)


def connected(author: Author, at_once: int) -> tuple[list[str], list[Binding]]:
    """Copies up to `at_once` right lines from each error, until there is none."""
    copied: list[str] = []
    for _ in range(len(author.flat.arrays) + 1):
        try:
            return copied, author.auto(copied)
        except errors.MatchError as error:
            said = error
        lines = author.choose(offered_by(said.message))
        assert lines, f"no line of this message is right:\n{said}"
        copied += lines[:at_once]
    raise AssertionError(f"still not connected: {copied}")


@pytest.mark.parametrize("at_once", [1, 100])
def test_a_model_is_connected_by_copying_lines(author: Author, at_once: int):
    copied, bindings = connected(author, at_once)
    assert copied, "nothing was left open: the model's names say too much for this test"
    assert author.holds(bindings)
    assert {b.tensor for b in bindings} == set(author.weights)
    as_text = bind_rules(
        ("auto", "\n".join(copied)), author.flat.shapes, author.tensors, author.config
    )[1]
    as_list = bind_rules(
        ["auto", copied], author.flat.shapes, author.tensors, author.config
    )[1]
    assert as_text == as_list == bindings


def test_every_line_that_is_offered_binds(author: Author):
    with pytest.raises(errors.MatchError) as caught:
        author.auto([])
    lines = offered_by(caught.value.message)
    assert lines
    listed: Any = caught.value.fields["candidates"]
    for line in {*lines, *(one for some in listed.values() for one in some)}:
        # raises if it has no effect
        Rules.parse(line).check(author.flat.shapes, author.tensors, author.config)
    for leaf, some in listed.items():
        with pytest.raises(errors.MatchError) as after:
            author.auto(some[:1])
        assert leaf not in after.value.fields["candidates"], (
            "a line was copied, and its leaf is still open"
        )


def test_the_message_says_what_its_letters_mean(author: Author):
    with pytest.raises(errors.MatchError) as caught:
        author.auto([])
    heads = author.config.get("num_attention_heads") or author.config["n_head"]
    assert f"n={heads} heads" in caught.value.message
    assert "h=32 head size" in caught.value.message
    assert "help(jv.Rules)" in caught.value.remedy


def test_the_logits_are_those_of_the_checkpoint(author: Author):
    """So that what the bindings are compared with is a model that computes, not an arrangement of arrays."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokens = np.arange(5, 21)
    mine = np.asarray(author.model.forward(author.config, author.params, tokens))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        author.folder, dtype=torch.float32
    )
    with torch.no_grad():
        theirs = reference(torch.tensor(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(mine, theirs, atol=1e-3)


@pytest.mark.vllm
def test_a_plan_of_shapes_and_copied_lines():
    author = Author("towers")
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), author.params
    )
    with pytest.raises(errors.MatchError) as caught:
        jv.plan(shapes, author.folder, tensor_parallel=2)
    lines = author.choose(offered_by(caught.value.message))
    plan = jv.plan(shapes, author.folder, tensor_parallel=2, rules=("auto", *lines))
    assert plan.total_bytes >= sum(x.nbytes for x in author.weights.values())


# ------------------------------------------------------------------------------------- rules that do not bind

RIGHT = [
    "words -> model.embed_tokens.weight",
    "last -> model.norm.weight",
    "speech -> lm_head.weight : d v -> v d",
    "Tower_{i}.first -> model.layers.{i}.input_layernorm.weight",
    "Tower_{i}.looking -> model.layers.{i}.self_attn.[q|k|v]_proj.weight : [n|k|k] h d -> ([n|k|k] h) d",
    "Tower_{i}.joining -> model.layers.{i}.self_attn.o_proj.weight : n d h -> d (n h)",
    "Tower_{i}.second -> model.layers.{i}.post_attention_layernorm.weight",
    "Tower_{i}.thinking -> model.layers.{i}.mlp.[gate|up]_proj.weight : d [1|1] f -> f d",
    "Tower_{i}.saying -> model.layers.{i}.mlp.down_proj.weight : f d -> d f",
]
WRONG = {
    "matches no leaf": (
        "Tower_{i}.frist -> model.layers.{i}.input_layernorm.weight",
        r"the nearest is Tower_\{i\}.first",
    ),
    "no such tensor": (
        "Tower_{i}.first -> model.layers.{i}.input_norm.weight",
        "which the checkpoint does not have",
    ),
    "no axes": (
        "speech -> lm_head.weight",
        r"what fits is `speech -> lm_head.weight : d v -> v d`",
    ),
    "letters that mean something": (
        "Tower_{i}.saying -> model.layers.{i}.mlp.down_proj.weight : n d -> d n",
        "the shapes make axis `n` 384, the config says 4",
    ),
    "a part of a tensor": (
        "Tower_{i}.joining -> model.layers.{i}.mlp.down_proj.weight : n d h -> d (n h)",
        "does not fit tensor model.layers.0.mlp.down_proj.weight",
    ),
    "an unused tensor that is not there": (
        "~ -> lm_haed.weight",
        "the checkpoint has no such tensor; the nearest is lm_head",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("with_auto", [True, False])
def test_a_rule_that_does_not_bind_has_its_own_error(case: str, with_auto: bool):
    author = Author("towers")
    line, says = WRONG[case]
    leaf = line.split(" -> ")[0]
    tensor = line.split(" -> ")[1].split(" : ")[0]
    rules = "\n".join([line, *(x for x in RIGHT if leaf not in x and tensor not in x)])
    with pytest.raises(errors.CoverageError, match=says) as caught:
        bind_rules(
            ("auto", rules) if with_auto else rules,
            author.flat.shapes,
            author.tensors,
            author.config,
        )
    text = str(caught.value)
    assert leaf in text or "lm_haed" in text
    assert not with_auto or text.count("\n") < 6, (
        f"only the rule that is wrong:\n{text}"
    )


def test_the_right_rules_bind():
    author = Author("towers")
    assert author.holds(
        bind_rules("\n".join(RIGHT), author.flat.shapes, author.tensors, author.config)[
            1
        ]
    )


def test_rules_of_a_set_for_many_models_need_not_all_match():
    """A named set has rules for models of its family that this one is not."""
    folder = jv.models.tiny("llama")
    config = json.loads(Path(folder, "config.json").read_text())
    tensors = checkpoint_tensors(folder)
    shapes = shapes_for("policy", config, tensors)
    in_force, _ = bind_rules("policy", shapes, tensors, config)
    # saved and given again, they are the user's, and all of them match
    bind_rules(in_force, shapes, tensors, config)
    bind_rules(Rules.parse(in_force.to_text()), shapes, tensors, config)


def test_rules_as_people_write_them():
    lines = ["a.{i}.q -> b.{i}.q : d n -> n d", "c -> d  # a comment", "", "# nothing"]
    assert (
        jv.Rules("\n".join(lines))
        == jv.Rules(lines)
        == jv.Rules.parse("\n".join(lines))
    )
    assert str(jv.Rules("a -> b")) == "a -> b\n"
    with pytest.raises(errors.RuleError, match="rule line 2"):
        jv.Rules(["a -> b", "c => d"])
    for wrong in (7, {"a": "b"}, [3]):
        with pytest.raises(errors.ConfigError, match="text, not"):
            jv.Rules(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "meant"), [("polcy", "policy"), ("atuo", "auto"), ("hf-flax", "hf_flax")]
)
def test_a_misspelt_set_is_recognised(name: str, meant: str):
    folder = jv.models.tiny("llama")
    with pytest.raises(errors.ConfigError, match=f"did you mean '{meant}'"):
        bind_rules(name, {}, checkpoint_tensors(folder), {})
