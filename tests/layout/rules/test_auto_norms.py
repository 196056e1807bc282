"""rules="auto" and norms: all of one shape, told apart by names alone, with names that mean different things."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from jvlab._errors import MatchError
from jvlab.layout.rules._auto import infer
from tests.layout.rules.families import checkpoint_of, config_of, policy_leaves, shapes

PRE_ATTN = [
    "attn_norm",
    "input_layernorm",
    "pre_attention_norm",
    "pre_attn_norm",
    "pre_self_attention_layer_norm",
]
POST_ATTN = [
    "post_attention_norm",
    "post_attn_norm",
    "post_attention_layernorm",
    "post_self_attention_layer_norm",
]
PRE_MLP = [
    "pre_ffw_norm",
    "pre_feedforward_layernorm",
    "mlp_norm",
    "pre_mlp_norm",
    "ffn_norm",
]
POST_MLP = ["post_ffw_norm", "post_feedforward_layernorm", "post_mlp_norm"]


def matched(family: str, names: dict[str, str]) -> dict[str, str]:
    """The tensors that auto finds for the Policy's norms under other names."""
    config = config_of(family)
    leaves = {}
    for path, shape in policy_leaves(config).items():
        parts = path.split(".")
        if parts[-2] in names:  # the norms alone: quick enough to try every combination
            leaves[".".join([*parts[:-2], names[parts[-2]], parts[-1]])] = shape
    tensors = [t for t in checkpoint_of(config) if "layernorm" in t.name]
    _, bindings = infer(shapes(leaves), tensors, config)
    return {
        b.leaf.split(".")[2]: b.tensor.split(".")[3]
        for b in bindings
        if b.leaf.startswith("layers.1.")
    }


def test_four_norms_under_every_combination_of_names() -> None:
    for names in itertools.product(PRE_ATTN, POST_ATTN, PRE_MLP, POST_MLP):
        if len(set(names)) < 4:
            continue
        policy = ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm")
        found = matched("gemma2", dict(zip(policy, names, strict=True)))
        want = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        assert [found[n] for n in names] == list(want), names


def test_two_norms_under_every_combination_of_names() -> None:
    """A Llama's second norm may be called after attention or before the MLP: it is the same one."""
    numbered = ["ln1", "ln_1", "norm1"], ["ln2", "ln_2", "norm2"]
    for first, second in itertools.product(
        PRE_ATTN + numbered[0], POST_ATTN + PRE_MLP + numbered[1]
    ):
        found = matched("llama", {"attn_norm": first, "mlp_norm": second})
        assert (found[first], found[second]) == (
            "input_layernorm",
            "post_attention_layernorm",
        ), (first, second)


def test_norms_after_each_block_under_every_combination_of_names() -> None:
    for first, second in itertools.product(
        [*POST_ATTN, "attn_norm"], [*POST_MLP, "ffn_norm"]
    ):
        found = matched("olmo2", {"post_attn_norm": first, "post_mlp_norm": second})
        assert (found[first], found[second]) == (
            "post_attention_layernorm",
            "post_feedforward_layernorm",
        ), (
            first,
            second,
        )


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", {"attn_norm": "norm_a", "mlp_norm": "norm_b"}),
        ("llama", {"attn_norm": "left_norm", "mlp_norm": "right_norm"}),
        (
            "gemma2",
            {
                "attn_norm": "ln1",
                "post_attn_norm": "ln2",
                "mlp_norm": "ln3",
                "post_mlp_norm": "ln4",
            },
        ),
        (
            "olmo2",
            {"post_attn_norm": "pre_attn_norm", "post_mlp_norm": "pre_mlp_norm"},
        ),  # says before, the model norms after
    ],
)
def test_names_that_do_not_tell_are_refused(family: str, names: dict[str, str]) -> None:
    with pytest.raises(MatchError) as caught:
        matched(family, names)
    assert all(n in caught.value.message for n in names.values())


def test_rules_need_numpy_only() -> None:
    code = (
        "import sys, jvlab.layout.rules._auto; from jvlab.layout.rules._ruleset import Rules; Rules.names();"
        "print(sorted({'jax', 'flax', 'torch', 'vllm', 'ml_dtypes'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
