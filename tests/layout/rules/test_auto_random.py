"""rules="auto" on models with random naming and layout: right, or an error with candidates; never silently wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jvlab._errors import MatchError
from jvlab.layout._types import CheckpointTensor
from jvlab.layout.rules._auto import infer
from jvlab.layout.rules._ruleset import Rules
from tests.fuzzing import examples
from tests.layout.rules.families import checkpoint_of, config_of, shapes

SYNONYMS = {
    "layer": [
        "layers.{i}",
        "layers_{i}",
        "h.{i}",
        "block{i}",
        "model.blocks.{i}",
        "transformer.layer_{i}",
    ],
    "attn": ["attn", "self_attn", "attention", "SelfAttention", "mha"],
    "mlp": ["mlp", "ffn", "feed_forward", "MlpBlock"],
    "q": ["q", "query", "wq", "q_proj", "query_proj"],
    "k": ["k", "key", "wk", "k_proj", "key_proj"],
    "v": ["v", "value_proj", "wv", "v_proj"],
    "o": ["o", "out", "wo", "o_proj", "out_proj", "output"],
    "gate": ["gate", "w1", "gate_proj", "wi_0", "w_gate"],
    "up": ["up", "w3", "up_proj", "wi_1", "w_up"],
    "down": ["down", "w2", "down_proj", "wo", "w_down"],
    "pre_attn": [
        "attn_norm",
        "input_layernorm",
        "ln1",
        "ln_1",
        "pre_attention_norm",
        "norm1",
        "attention_norm",
    ],
    "pre_mlp": [
        "mlp_norm",
        "post_attention_layernorm",
        "ln2",
        "ln_2",
        "pre_ffw_norm",
        "norm2",
        "ffn_norm",
    ],
    "final": ["final_norm", "norm", "ln_f", "model.norm", "decoder_norm"],
    "embed": [
        "embed",
        "wte",
        "embed_tokens",
        "tok_embeddings",
        "token_embedder",
        "embedder.input_embedding",
    ],
    "head": ["lm_head", "unembed", "output", "logits_dense"],
    "moe": ["moe", "block_sparse_moe", "MoeBlock", "experts"],
    "router": ["router", "router_proj", "gate"],
    "param": ["kernel", "w", "weight", "mat", ""],
}
HEADS = {"q": "n h", "k": "k h", "v": "k h"}
SIZES = {
    "hidden_size": [24, 32],
    "intermediate_size": [40, 32],
    "head_dim": [8, 6],
    "num_attention_heads": [4, 6],
    "num_key_value_heads": [1, 2, 4],
}

SQUARE = {
    "hidden_size": 24,
    "intermediate_size": 24,
    "head_dim": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
# in × out? The last evidence where every matrix is square
CONVENTION = {"kernel": True, "weight": False}


@st.composite
def naming(draw: st.DrawFn) -> dict[str, str]:
    return {role: draw(st.sampled_from(words)) for role, words in SYNONYMS.items()}


@st.composite
def model(
    draw: st.DrawFn,
) -> tuple[Rules, dict[str, tuple[int, ...]], list[CheckpointTensor], dict[str, Any]]:
    """A Llama or Mixtral with random names, orientation, heads and scan axis, and the rules that are true of it."""
    sizes = {key: draw(st.sampled_from(values)) for key, values in SIZES.items()}
    sizes = SQUARE if draw(st.integers(0, 3)) == 0 else sizes
    family = draw(st.sampled_from(["llama", "mixtral"]))
    config = config_of(
        family, num_hidden_layers=draw(st.sampled_from([2, 3, 5])), **sizes
    )
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        config["num_key_value_heads"] = 2
    heads, keys = (
        config[k] * config["head_dim"]
        for k in ("num_attention_heads", "num_key_value_heads")
    )
    square = config["hidden_size"] == config["intermediate_size"] == heads == keys
    words = draw(naming())
    if family == "mixtral" and words["router"] == words["gate"]:
        words["router"] = "router"  # one path cannot be two leaves
    in_first, split = draw(st.booleans()), draw(st.booleans())
    if square:
        in_first = CONVENTION.get(words["param"], in_first)
    # many trees keep the head as the embedding lies
    head_in_first = draw(st.booleans())
    scan = draw(st.sampled_from([None, 0, 1]))
    param = "." + words["param"] if words["param"] else ""
    base = (
        words["layer"]
        if scan is None
        else words["layer"].replace(".{i}", "").replace("_{i}", "").replace("{i}", "")
    )
    size = {
        "d": config["hidden_size"],
        "n": config["num_attention_heads"],
        "k": config["num_key_value_heads"],
    }
    size |= {
        "h": config["head_dim"],
        "f": config["intermediate_size"],
        "v": config["vocab_size"],
    }
    size["i"] = config["num_hidden_layers"]
    lines, leaves = [], {}

    def leaf(path: str, tensor: str, dims: list[str], right: str, layer: bool) -> None:
        if layer and scan is not None:
            dims = [*dims[:scan], "i", *dims[scan:]]
        shape = tuple(_product(size, dim) for dim in dims)
        lines.append(f"{path} -> {tensor} : {' '.join(dims)} -> {right}")
        for i in range(size["i"] if layer and scan is None else 1):
            leaves[path.replace("{i}", str(i))] = shape

    sparse = family == "mixtral"
    if sparse:
        size["x"] = config["num_local_experts"]
        order = ["d", "x"] if in_first else ["x", "d"]
        router = f"{base}.{words['moe']}.{words['router']}{param}"
        leaf(
            router, "model.layers.{i}.block_sparse_moe.gate.weight", order, "x d", True
        )
    for role in ("q", "k", "v", "o", "gate", "up", "down"):
        attention = role in ("q", "k", "v", "o")
        path = f"{base}.{words['attn' if attention else 'moe' if sparse else 'mlp']}.{words[role]}{param}"
        tensor = f"model.layers.{{i}}.{'self_attn' if attention else 'mlp'}.{role}_proj.weight"
        if sparse and not attention:
            number = {"gate": 1, "down": 2, "up": 3}[role]
            tensor = (
                f"model.layers.{{i}}.block_sparse_moe.experts.{{e}}.w{number}.weight"
            )
        out = HEADS.get(role, "d" if role in ("o", "down") else "f")
        into = "n h" if role == "o" else "f" if role == "down" else "d"
        sides = [_dims(into, split), _dims(out, split)]
        dims = [*sides[0], *sides[1]] if in_first else [*sides[1], *sides[0]]
        if sparse and not attention:
            dims, size["e"] = ["e", *dims], config["num_local_experts"]
        leaf(path, tensor, dims, f"{_merged(out)} {_merged(into)}", True)
    leaf(
        f"{base}.{words['pre_attn']}.scale",
        "model.layers.{i}.input_layernorm.weight",
        ["d"],
        "d",
        True,
    )
    leaf(
        f"{base}.{words['pre_mlp']}.scale",
        "model.layers.{i}.post_attention_layernorm.weight",
        ["d"],
        "d",
        True,
    )
    leaf(f"{words['final']}.scale", "model.norm.weight", ["d"], "d", False)
    leaf(
        f"{words['embed']}.embedding",
        "model.embed_tokens.weight",
        ["v", "d"],
        "v d",
        False,
    )
    head = ["d", "v"] if head_in_first else ["v", "d"]
    leaf(f"{words['head']}{param}", "lm_head.weight", head, "v d", False)
    return Rules.parse("\n".join(lines)), leaves, checkpoint_of(config), config


def _dims(axes: str, split: bool) -> list[str]:
    return axes.split() if split else [_merged(axes)]


def _merged(axes: str) -> str:
    return f"({axes})" if " " in axes else axes


def _product(size: dict[str, int], dim: str) -> int:
    out = 1
    for axis in dim.strip("()").split():
        out *= size[axis]
    return out


def test_right_or_an_error_never_wrong() -> None:
    count: Counter[str] = Counter()

    @given(model())
    @settings(
        max_examples=examples(120),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    def one(drawn: tuple[Any, ...]) -> None:
        rules, shapes_, tensors, config = drawn
        leaves = shapes(shapes_)
        want = {
            (b.leaf, b.tensor, b.leaf_start): b.axes
            for b in rules.bind(leaves, tensors, config)
        }
        try:
            got = infer(leaves, tensors, config)[1]
        except MatchError:
            count["refused"] += 1
            return
        count["inferred"] += 1
        assert {(b.leaf, b.tensor, b.leaf_start): b.axes for b in got} == want

    one()
    # refusing everything would be right too
    assert count["inferred"] > 4 * count["refused"], count
