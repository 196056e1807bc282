"""Wrong rules for jvlab's own layout, planted in the place of the right ones; and the models on which they fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from jvlab.layout.rules._ruleset import Rules, stacked
from jvlab.layout.rules._syntax import rule_text
from jvlab.sync._compile_tree import changed_rules

# Shapes chosen so that as little as possible is settled by them: q, k, v and o are square and of one shape, with as
# many heads as numbers in a head (where an engine runs that).
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 256,
    },
    "qwen3": {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 160,
    },
    "gemma3": {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 160,
    },
}
COMMON: dict[str, Any] = {"num_hidden_layers": 3, "head_dim": 32, "vocab_size": 512}

Q = "layers.{i}.attn.q.kernel -> model.layers.{i}.self_attn.q_proj.weight"
KV = "layers.{i}.attn.[k|v].kernel -> model.layers.{i}.self_attn.[k|v]_proj.weight"
OUT = "layers.{i}.attn.o.kernel -> model.layers.{i}.self_attn.o_proj.weight"
MLP = "layers.{i}.mlp.[gate|up|down].kernel -> model.layers.{i}.mlp.[gate|up|down]_proj.weight : a b -> b a"
NORMS = "layers.{i}.[attn|mlp]_norm.scale -> model.layers.{i}.[input|post_attention]_layernorm.weight"
SANDWICH = "layers.{i}.[attn|post_attn]_norm.scale -> model.layers.{i}.[input|post_attention]_layernorm.weight"
EMBED = "embed.embedding -> model.embed_tokens.weight, lm_head.weight?"
HEAD_NORMS = (
    "layers.{i}.attn.[q|k]_norm.scale -> model.layers.{i}.self_attn.[q|k]_norm.weight"
)


def scanned(text: str) -> str:
    """The same rules for stacked layers."""
    return "\n".join(rule_text(rule) for rule in stacked(Rules.parse(text)))


@dataclass(frozen=True)
class Planted:
    """Rules put in the place of right ones, on one family; `right` are those to be named again."""

    name: str
    family: str
    kind: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]

    def rules(self, rules: Rules) -> Rules:
        """The right rules with the wrong ones in the place of the first of `right`."""
        for text in self.right[1:]:
            rules = changed_rules(rules, "", text)
        first, *more = self.wrong
        rules = changed_rules(rules, first, self.right[0])
        return Rules((*rules, *Rules.parse("\n".join(more)).rules)) if more else rules


def _layers(order: tuple[int, ...]) -> tuple[str, ...]:
    turned = lambda i, j: MLP.replace("layers.{i}", f"layers.{i}", 1).replace(
        "layers.{i}", f"layers.{j}"
    )
    return tuple(turned(i, j) for i, j in enumerate(order))


def planted_in_stacks() -> list[Planted]:
    """The same rules for layers that are stacked in one leaf, as jv.Policy has them."""
    out = []
    for case in planted():
        right, wrong = (
            tuple(map(scanned, texts)) for texts in (case.right, case.wrong)
        )
        if case.name == "layers":
            right = (scanned(f"{OUT} : n h d -> d (n h)"),)
            wrong = (
                right[0]
                .replace("{i}", "[2|1|0]")
                .replace(": i n h d", ": [1|1|1] n h d"),
            )
        out.append(replace(case, right=right, wrong=wrong))
    return out


def planted() -> list[Planted]:
    """Every wrong rule on every family it makes sense for."""
    out = []
    for family in SIZES:
        norms = SANDWICH if family == "gemma3" else NORMS
        first = "attn|post_attn" if family == "gemma3" else "attn|mlp"
        swapped = norms.replace("[input|post_attention]", "[post_attention|input]")
        assert first in norms
        q, kv, o = (
            f"{Q} : d n h -> (n h) d",
            f"{KV} : d k h -> (k h) d",
            f"{OUT} : n h d -> d (n h)",
        )
        out += [
            Planted(
                "query transposed",
                family,
                "transposed",
                (q,),
                (f"{Q} : d n h -> d (n h)",),
            ),
            Planted(
                "query heads", family, "head order", (q,), (f"{Q} : d n h -> (h n) d",)
            ),
            Planted(
                "output transposed",
                family,
                "transposed",
                (o,),
                (f"{OUT} : n h d -> (n h) d",),
            ),
            Planted(
                "keys and values",
                family,
                "swapped",
                (kv,),
                (kv.replace("[k|v]_proj", "[v|k]_proj"),),
            ),
            Planted(
                "gate and up",
                family,
                "swapped",
                (MLP,),
                (MLP.replace("[gate|up|down]_", "[up|gate|down]_"),),
            ),
            Planted("norms", family, "swapped", (norms,), (swapped,)),
            Planted("offset", family, "offset", (norms,), (f"{norms} + 1",)),
            Planted("layers", family, "layer order", (MLP,), _layers((2, 1, 0))),
            Planted(
                "query and key",
                family,
                "swapped",
                (q, kv),
                (
                    f"{Q.replace('q_proj', 'k_proj')} : d n h -> (n h) d",
                    f"{Q.replace('q.kernel', 'k.kernel')} : d k h -> (k h) d",
                    "layers.{i}.attn.v.kernel -> model.layers.{i}.self_attn.v_proj.weight : d k h -> (k h) d",
                ),
            ),
            Planted(
                "interleaved rotary",
                family,
                "rotary order",
                (q,),
                (f"{Q} : d n (r two) -> (n two r) d where two=2",),
            ),
        ]
    out += [
        Planted(
            "embedding and head",
            "llama",
            "swapped",
            (EMBED, "lm_head.kernel -> lm_head.weight : d v -> v d"),
            (
                "embed.embedding -> lm_head.weight",
                "lm_head.kernel -> model.embed_tokens.weight : d v -> v d",
            ),
        ),
        Planted(
            "head norms",
            "qwen3",
            "swapped",
            (HEAD_NORMS,),
            (HEAD_NORMS.replace("[q|k]_norm.w", "[k|q]_norm.w"),),
        ),
        Planted(
            "down for up",
            "llama",
            "swapped",
            (MLP,),
            (MLP.replace("[gate|up|down]_", "[gate|down|up]_"),),
        ),
        Planted("offset down", "gemma3", "offset", (SANDWICH,), (f"{SANDWICH} - 1",)),
    ]
    # one engine after the other
    return sorted(out, key=lambda case: list(SIZES).index(case.family))


def each_in_turn(cases: list[Planted]) -> list[Any]:
    """For `parametrize`: each wrong rule in one family, the families in turn; the rest soaks."""
    names = list(dict.fromkeys(case.name for case in cases))
    usual = set()
    for k, name in enumerate(names):
        families = [case.family for case in cases if case.name == name]
        usual.add((name, families[k % len(families)]))
    return [
        pytest.param(
            case,
            id=f"{case.family}: {case.name}",
            marks=() if (case.name, case.family) in usual else pytest.mark.soak,
        )
        for case in cases
    ]
