"""rules="auto": placeholders are no evidence, multiples are refused, and what is taken for granted is a warning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jvlab._errors import MatchError
from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.layout.rules._auto import infer
from jvlab.layout.rules._builtin import policy_rules
from jvlab.layout.rules._rules import apply_binding, invert_binding
from jvlab.layout.rules._ruleset import Rules
from tests.layout.rules.families import (
    checkpoint_of,
    config_of,
    facts,
    policy_leaves,
    shapes,
)

Arrays = dict[str, np.ndarray]


def checkpoint(config: dict[str, Any], seed: int = 0, norm: float = 1.0) -> Arrays:
    """Numbers like a trained model's: small matrices, norms around a mean."""
    rng = np.random.default_rng(seed)
    out = {}
    for t in checkpoint_of(config):
        wide = rng.normal(size=t.shape)
        out[t.name] = (norm + 0.1 * wide if "norm" in t.name else 0.02 * wide).astype(
            np.float32
        )
    return out


def loaded(config: dict[str, Any], numbers: Arrays, scanned: bool = False) -> Arrays:
    """The Policy tree that holds these numbers."""
    leaves, tensors = policy_leaves(config, scanned), checkpoint_of(config)
    values = {p: np.zeros(s, np.float32) for p, s in leaves.items()}
    for b in policy_rules(config, (), scanned).bind(shapes(leaves), tensors, config):
        invert_binding(b, numbers[b.tensor], values[b.leaf])
    return values


def found(
    config: dict[str, Any], values: Arrays, numbers: Arrays
) -> tuple[Rules, list[Binding]]:
    return infer(
        values, checkpoint_of(config), config, values=values, checkpoint=numbers
    )


def placeholders(kind: str, leaves: dict[str, tuple[int, ...]]) -> Arrays:
    rng = np.random.default_rng(7)
    pool = rng.normal(size=4096) * 0.02
    match kind:
        case "zeros":
            return {p: np.zeros(s, np.float32) for p, s in leaves.items()}
        case "ones":
            return {p: np.ones(s, np.float32) for p, s in leaves.items()}
        case "the same numbers everywhere":
            return {p: np.resize(pool, s).astype(np.float32) for p, s in leaves.items()}
        case "random numbers":
            return {
                p: (0.02 * rng.normal(size=s)).astype(np.float32)
                for p, s in leaves.items()
            }
        case "random numbers around one":
            return {
                p: (1 + 0.02 * rng.normal(size=s)).astype(np.float32)
                for p, s in leaves.items()
            }
    return {p: np.full(s, np.nan, np.float32) for p, s in leaves.items()}


KINDS = [
    "zeros",
    "ones",
    "the same numbers everywhere",
    "random numbers",
    "random numbers around one",
    "nan",
]


@pytest.mark.parametrize(
    ("family", "norm"), [("llama", 1.0), ("gemma2", 0.0), ("qwen3", 1.0)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_placeholders_change_no_meaning(family: str, kind: str, norm: float) -> None:
    """The rules are those of the shapes alone, no reason speaks of values, and the norms carry a warning."""
    config = config_of(family)
    values = placeholders(kind, policy_leaves(config))
    rules, bindings = found(config, values, checkpoint(config, norm=norm))
    plain, want = infer(shapes(policy_leaves(config)), checkpoint_of(config), config)
    assert facts(bindings) == facts(want), rules
    assert rules == plain
    assert not any(b.add for b in bindings)
    assert not any("values" in b.reason for b in bindings)
    norms = [b for b in bindings if "norm" in b.leaf]
    assert norms
    assert all("1 + w" in b.warning for b in norms)


@pytest.mark.parametrize(("add", "rule"), [(1.0, "- 1"), (-1.0, "+ 1"), (0.0, "")])
@pytest.mark.parametrize(("family", "scanned"), [("llama", True), ("gemma3", False)])
def test_an_offset_needs_numbers_that_follow_the_checkpoints(
    family: str, add: float, rule: str, scanned: bool
) -> None:
    config = config_of(family)
    numbers = checkpoint(config, norm=0.0 if family.startswith("gemma") else 1.0)
    rng = np.random.default_rng(1)
    values = loaded(config, numbers, scanned)
    for path, array in values.items():
        # trained a little since
        array += 0.02 * np.std(array) * rng.normal(size=array.shape)
        if "norm" in path:
            array += add
    rules, bindings = found(config, values, numbers)
    norms = [str(r) for r in rules if "norm" in str(r)]
    assert all(
        r.endswith(rule) if rule else "1" not in r.split(":")[-1] for r in norms
    ), norms
    for b in bindings:
        got = np.array(numbers[b.tensor])
        apply_binding(b, values[b.leaf], got)
        np.testing.assert_allclose(got, numbers[b.tensor], atol=0.05)
    assert not any(b.warning for b in bindings), "values settled everything"


def test_few_numbers_may_follow_by_chance() -> None:
    """Three numbers can be near three others; that is no evidence, however well it looks."""
    tensors = [CheckpointTensor("model.norm.weight", (3,), "float32")]
    numbers = {"model.norm.weight": np.array([1.0, 1.1, 0.9], np.float32)}
    values = {"final_norm.scale": np.array([0.0, 0.11, -0.1], np.float32)}
    (binding,) = infer(values, tensors, values=values, checkpoint=numbers)[1]
    assert binding.add == 0
    assert binding.warning
    long = [CheckpointTensor("model.norm.weight", (64,), "float32")]
    spread = np.random.default_rng(0).normal(size=64).astype(np.float32) * 0.1
    values = {"final_norm.scale": spread}
    (binding,) = infer(
        values, long, values=values, checkpoint={"model.norm.weight": 1 + spread}
    )[1]
    assert binding.add == 1
    assert not binding.warning


def test_constant_norms_follow_their_siblings_or_stay_open() -> None:
    config = config_of("gemma2")
    numbers = checkpoint(config, norm=0.0)
    numbers["model.norm.weight"][:] = 0.0
    values = loaded(config, numbers)
    for path, array in values.items():
        array += 1.0 if "norm" in path else 0.0
    _, bindings = found(config, values, numbers)
    final = next(b for b in bindings if b.leaf == "final_norm.scale")
    assert final.add == -1
    assert "sibling" in final.reason
    # the checkpoint's own number, beside norms that hold 1 + w
    values["final_norm.scale"][:] = 0.0
    with pytest.raises(MatchError, match="2 ways fit") as caught:
        found(config, values, numbers)
    assert "final_norm.scale" in caught.value.message


def square(
    value: np.ndarray,
) -> tuple[dict[str, Any], list[CheckpointTensor], Arrays, Arrays]:
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "hidden_size": 24,
    }
    tensors = [
        CheckpointTensor(f"m.layers.0.self_attn.{x}_proj.weight", (24, 24), "float32")
        for x in "vo"
    ]
    numbers = {t.name: value.astype(np.float32) for t in tensors}
    values = {f"layers.0.attn.{x}.mat": value.astype(np.float32) for x in "vo"}
    return config, tensors, numbers, values


@pytest.mark.parametrize("kind", ["identity", "symmetric", "constant", "zeros"])
def test_a_matrix_that_is_its_own_transpose_settles_nothing(kind: str) -> None:
    wide = np.random.default_rng(0).normal(size=(24, 24))
    matrix = {
        "identity": np.eye(24),
        "symmetric": wide + wide.T,
        "constant": np.ones((24, 24)),
        "zeros": 0 * wide,
    }[kind]
    config, tensors, numbers, values = square(matrix)
    with pytest.raises(MatchError, match="2 ways fit"):
        infer(values, tensors, config, values=values, checkpoint=numbers)


def test_equal_siblings_are_not_told_apart_by_their_numbers() -> None:
    """Two tensors with the same numbers, or two leaves with those of one tensor: nobody knows which is which."""
    rng = np.random.default_rng(0)
    tensors = [
        CheckpointTensor(f"m.{x}.weight", (5, 3), "float32") for x in ("left", "right")
    ]
    one, two = (rng.normal(size=(5, 3)).astype(np.float32) for _ in range(2))
    for numbers, values in (
        ({"m.left.weight": one, "m.right.weight": one}, {"foo": one, "bar": one}),
        ({"m.left.weight": one, "m.right.weight": two}, {"foo": one, "bar": one}),
    ):
        with pytest.raises(MatchError, match="2 lines fit"):
            infer(values, tensors, values=values, checkpoint=numbers)
    both = {"foo": two, "bar": one}
    _, bindings = infer(
        both,
        tensors,
        values=both,
        checkpoint={"m.left.weight": one, "m.right.weight": two},
    )
    assert {(b.leaf, b.tensor) for b in bindings} == {
        ("bar", "m.left.weight"),
        ("foo", "m.right.weight"),
    }


# ------------------------------------------------------------------------------------------------ multiples


@pytest.mark.parametrize(("dtype", "scanned"), [("float32", False), ("bfloat16", True)])
def test_a_query_over_the_root_of_its_head_is_refused(
    dtype: str, scanned: bool
) -> None:
    import ml_dtypes

    config = config_of("llama")
    numbers = checkpoint(config)
    values = loaded(config, numbers, scanned)
    for path in values:
        if ".q.kernel" in path:
            values[path] = values[path] / np.sqrt(config["head_dim"])
        values[path] = values[path].astype(
            ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
        )
    with pytest.raises(MatchError, match=r"2\.828.*\(√8\)") as caught:
        found(config, values, numbers)
    assert "attn.q.kernel" in caught.value.message
    assert "multiply these leaves by the factor before the sync" in caught.value.remedy
    factors: Any = caught.value.fields["factors"]
    (per_tensor,) = factors.values()
    assert all(abs(f - 8**0.5) < 0.02 for f in per_tensor.values())
    line = next(
        str(r) for r in policy_rules(config, (), scanned) if ".q.kernel" in str(r)
    )
    given = Rules.parse(line)
    # meant so
    infer(
        values,
        checkpoint_of(config),
        config,
        values=values,
        checkpoint=numbers,
        given=given,
    )


@pytest.mark.parametrize(
    "what", ["embed.embedding", "layers.1.mlp", "fused query", "negated norm"]
)
def test_other_multiples_are_refused(what: str) -> None:
    config = config_of("phi3" if what == "fused query" else "llama")
    numbers = checkpoint(config)
    values = loaded(config, numbers)
    where, factor = {
        "embed.embedding": ("embed.embedding", 24**0.5),
        "layers.1.mlp": ("layers.0.mlp.up.kernel", 0.5),
        "fused query": ("layers.0.attn.q.kernel", 8**-0.5),
        "negated norm": ("layers.0.attn_norm.scale", -1.0),
    }[what]
    values[where] = values[where] * np.float32(factor)
    with pytest.raises(MatchError, match="hold a multiple of the checkpoint's numbers"):
        found(config, values, numbers)


def test_a_decayed_leaf_is_a_warning() -> None:
    """A parameter without gradients shrinks by weight decay alone: an exact multiple, and meant so."""
    config = config_of("llama")
    numbers = checkpoint(config)
    values = loaded(config, numbers)
    values["layers.0.mlp.up.kernel"] *= np.float32(0.95)
    rules, bindings = found(config, values, numbers)
    up = next(b for b in bindings if b.leaf == "layers.0.mlp.up.kernel")
    assert "exactly 1.053 times" in up.warning
    assert "exactly 1.053 times" in rules.to_text()
    trained = loaded(config, numbers)
    trained["layers.0.mlp.up.kernel"] *= np.float32(0.95)
    trained["layers.0.mlp.up.kernel"] += 0.002 * np.random.default_rng(0).normal(
        size=(24, 40)
    ).astype(np.float32)
    assert not any(b.warning for b in found(config, trained, numbers)[1])


# ------------------------------------------------------------------------------------------------ warnings


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "gpt_neox"])
def test_a_rotary_order_that_only_shapes_support_is_a_warning(family: str) -> None:
    config = config_of(family)
    rules, bindings = infer(
        shapes(policy_leaves(config)), checkpoint_of(config), config
    )
    warned = {b.leaf.split("attn.")[-1] for b in bindings if "rotary" in b.warning}
    kernels = {"q.kernel", "k.kernel"}
    fused = kernels | {"v.kernel"}  # one rule for all three
    biased = fused | {"q.bias", "k.bias", "v.bias"}
    assert (
        warned
        == {"gpt2": set(), "llama": kernels, "phi3": fused, "gpt_neox": biased}[family]
    )
    assert not any("rotary" in b.reason for b in bindings), "a warning, not a reason"
    assert Rules.from_json(rules.to_json()).warnings == rules.warnings
    assert Rules.parse(rules.to_text()) == rules
    numbers = checkpoint(config)
    assert not any(
        "rotary" in b.warning
        for b in found(config, loaded(config, numbers), numbers)[1]
    )


def test_a_tensor_chosen_by_its_size_is_a_warning_until_values_bear_it_out() -> None:
    tensors = [
        CheckpointTensor("m.a.weight", (5, 3), "float32"),
        CheckpointTensor("m.b.weight", (7,), "float32"),
    ]
    numbers = {
        t.name: np.random.default_rng(1).normal(size=t.shape).astype(np.float32)
        for t in tensors
    }
    values = {
        "foo": np.ascontiguousarray(numbers["m.a.weight"].T),
        "bar": numbers["m.b.weight"],
    }
    _, bindings = infer(shapes({"foo": (3, 5), "bar": (7,)}), tensors)
    assert all("without a name that says so" in b.warning for b in bindings)
    _, bindings = infer(values, tensors, values=values, checkpoint=numbers)
    assert not any(b.warning for b in bindings)
