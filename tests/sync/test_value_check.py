"""Meaning by value: wrong rules that cover everything are seen in a sample of every leaf, and right ones never are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab._errors import ConfigError, MeaningError, ModelError
from jvlab.layout._checkpoint import (
    CheckpointValues,
    checkpoint_tensors,
    read_config,
)
from jvlab.layout._tree import LeafShape
from jvlab.layout.rules._builtin import policy_rules
from jvlab.layout.rules._rules import invert_binding
from jvlab.layout.rules._ruleset import Rules
from jvlab.sync._compile_tree import changed_rules, policy_shapes
from jvlab.sync._meaning import MeaningCheck
from jvlab.sync._value_check import LeafEvidence, ambiguities, decide, judge, points
from jvlab.sync._value_samples import sample, untold

FAMILIES = ("llama", "qwen3", "gemma2")
Q = "layers.{i}.attn.q.kernel -> model.layers.{i}.self_attn.q_proj.weight : "
K = "layers.{i}.attn.k.kernel -> model.layers.{i}.self_attn.k_proj.weight : "
ATTN = "layers.{i}.attn.[q|k|v|o].kernel -> model.layers.{i}.self_attn.[q|k|v|o]_proj.weight : "
# every one of them covers the model: q is square, and q and k have one shape
PLANTED = {
    "transposed q": {"attn.q.kernel": "d n h -> d (n h)"},
    "transposed o": {"attn.o.kernel": "n h d -> (n h) d"},
    "heads in another order": {"attn.q.kernel": "d n h -> (h n) d"},
    "rotary pairs": {"attn.q.kernel": "d n (two r) -> (n r two) d where two=2"},
    "rotary pairs of k": {"attn.k.kernel": "d k (two r) -> (k r two) d where two=2"},
    "1 + w": {"_norm.scale": "+ 1"},
    "q and k swapped": {"swap": ("q_proj", "k_proj")},
    "k and v swapped": {"swap": ("k_proj", "v_proj")},
    "gate and up swapped": {"swap": ("gate_proj", "up_proj")},
    "norms swapped": {"swap": ("input_layernorm", "post_attention_layernorm")},
}


class Trainer:
    """A tree of numpy arrays that was loaded from a tiny checkpoint, and a stand-in for what a connect agrees on."""

    def __init__(self, family: str) -> None:
        self.model = jv.models.tiny(
            family, num_key_value_heads=4, vocab_size=512, num_hidden_layers=2
        )
        self.config, self.tensors = (
            read_config(self.model),
            checkpoint_tensors(self.model),
        )
        self.shapes = policy_shapes(self.config, self.tensors, "float32", scanned=False)
        self.rules = self.bound_rules()
        self.bindings = self.rules.bind(self.shapes, self.tensors, self.config)
        values = CheckpointValues.of(self.model)
        assert values is not None
        self.arrays = {
            path: np.zeros(leaf.shape, np.float32) for path, leaf in self.shapes.items()
        }
        for b in self.bindings:
            invert_binding(b, values[b.tensor], self.arrays[b.leaf])

    def bound_rules(self) -> Rules:
        """One rule for each leaf of a layer, so that one can be changed alone."""
        given = policy_rules(self.config, [t.name for t in self.tensors], scanned=False)
        found = given.bind(self.shapes, self.tensors, self.config)
        lines = {}
        for b in found:
            leaf, tensor = b.leaf, b.tensor
            if ".0." in leaf:
                leaf, tensor = (
                    leaf.replace(".0.", ".{i}.", 1),
                    tensor.replace(".0.", ".{i}.", 1),
                )
            elif ".1." in leaf or ".2." in leaf or ".3." in leaf:
                continue
            axes = b.rule.partition(" : ")[2]
            lines[leaf] = f"{leaf} -> {tensor}" + (f" : {axes}" if axes else "")
        return Rules.parse("\n".join(lines.values()))

    def planted(self, name: str) -> Rules:
        rules = self.rules
        for what, how in PLANTED[name].items():
            if what == "swap":
                one, other = how
                swapped = (
                    str(rules)
                    .replace(f".{one}.", ".\0.")
                    .replace(f".{other}.", f".{one}.")
                )
                rules = Rules.parse(swapped.replace(".\0.", f".{other}."))
                continue
            for rule in [str(r) for r in rules if what in str(r).partition(" -> ")[0]]:
                names, _, _ = rule.partition(" : ")
                rules = changed_rules(
                    rules,
                    f"{names} {how}" if how == "+ 1" else f"{names} : {how}",
                    rule,
                )
        return rules

    def check(
        self,
        rules: Rules | None = None,
        arrays: Any = None,
        way: str = "auto",
        **asked: Any,
    ) -> MeaningCheck:
        bindings = (rules or self.rules).bind(self.shapes, self.tensors, self.config)
        origin = SimpleNamespace(
            rules=rules or self.rules,
            shapes=self.shapes,
            tensors=tuple(self.tensors),
            config=self.config,
        )
        mapping = SimpleNamespace(bindings=bindings, _origin=origin, _link=None)
        made: Any = MeaningCheck(SimpleNamespace(mapping=mapping))  # type: ignore[arg-type]
        made.configure(way, asked.get("checkpoint"), None)
        made.by_value(self.arrays if arrays is None else arrays, self.model)
        return made

    def trained(self, size: float) -> dict[str, np.ndarray]:
        random = np.random.default_rng(1)
        moved = lambda a: (a + size * a.std() * random.standard_normal(a.shape)).astype(
            np.float32
        )
        return {path: moved(a) for path, a in self.arrays.items()}


_made: dict[str, Trainer] = {}


@pytest.fixture(params=FAMILIES)
def trainer(request: pytest.FixtureRequest) -> Trainer:
    if request.param not in _made:
        _made[request.param] = Trainer(request.param)
    return _made[request.param]


@pytest.fixture
def llama() -> Trainer:
    return _made.setdefault("llama", Trainer("llama"))


def test_meaning_of_a_loaded_trainer_is_checked_by_value(trainer: Trainer) -> None:
    meaning = trainer.check().meaning
    assert (meaning.state, meaning.how) == ("checked", "value")
    assert meaning.leaves.keys() == trainer.arrays.keys(), (
        "every leaf, not only the first"
    )
    assert {seen.kind for seen in meaning.leaves.values()} == {"equal"}
    assert not meaning.ambiguous, "values settle every reading"


@pytest.mark.parametrize("name", PLANTED)
def test_meaning_of_a_wrong_rule_is_refused_by_value(
    trainer: Trainer, name: str
) -> None:
    rules = trainer.planted(name)
    assert str(rules) != str(trainer.rules)
    with pytest.raises(MeaningError) as caught:
        trainer.check(rules)
    wrong = set(caught.value.leaves)
    right = {b.leaf for b in trainer.bindings} - wrong
    assert wrong
    assert len(right) > len(wrong)
    how = PLANTED[name]
    expected = how.get("swap") or next(iter(how))
    ends = (
        {b.leaf for b in trainer.bindings if any(x in b.tensor for x in expected)}
        if "swap" in how
        else None
    )
    assert wrong == (ends or {leaf for leaf in trainer.arrays if str(expected) in leaf})
    assert caught.value.leaves[0] in caught.value.message
    assert "by the rule: layers.{i}." in caught.value.message
    readings: Any = caught.value.fields["readings"]
    assert readings.keys() == wrong, "the rule to write is named for every leaf"
    fixed = Rules.parse(
        "\n".join(dict.fromkeys("\n".join(readings.values()).splitlines()))
    )
    others = [r for r in rules if str(r) not in caught.value.message]
    assert trainer.check(Rules((*others, *fixed))).meaning.state == "checked", (
        "and it is right"
    )


@pytest.mark.parametrize("name", PLANTED)
def test_meaning_of_a_wrong_rule_is_refused_for_a_trainer_that_trained_on(
    llama: Trainer, name: str
) -> None:
    moved = llama.trained(0.2)
    meaning = llama.check(arrays=moved).meaning
    assert (meaning.state, meaning.how) == ("checked", "value")
    assert "correlated r ≥ 0.9" in meaning.why
    with pytest.raises(MeaningError):
        llama.check(llama.planted(name), moved)


def test_meaning_is_not_settled_by_other_numbers_or_placeholders(
    llama: Trainer,
) -> None:
    random = np.random.default_rng(0)
    same = random.standard_normal(10**6).astype(np.float32) * 0.02
    for arrays in (
        {
            path: random.standard_normal(a.shape).astype(np.float32)
            for path, a in llama.arrays.items()
        },
        {path: np.zeros_like(a) for path, a in llama.arrays.items()},
        {path: np.ones_like(a) for path, a in llama.arrays.items()},
        {path: same[: a.size].reshape(a.shape) for path, a in llama.arrays.items()},
    ):
        for rules in (
            llama.rules,
            llama.planted("transposed q"),
            llama.planted("1 + w"),
        ):
            meaning = llama.check(rules, arrays).meaning
            assert meaning.state == "pending"
            assert "no leaf holds the checkpoint's numbers" in meaning.why
            assert {
                "layers.0.attn.q.kernel",
                "layers.1.mlp.gate.kernel",
                "final_norm.scale",
            } <= meaning.ambiguous.keys()


def test_meaning_says_which_leaves_a_constant_leaves_open(llama: Trainer) -> None:
    flat = dict(llama.arrays) | {
        "layers.0.mlp.up.kernel": np.zeros_like(llama.arrays["layers.0.mlp.up.kernel"])
    }
    meaning = llama.check(arrays=flat).meaning
    assert meaning.state == "checked"
    assert meaning.leaves["layers.0.mlp.up.kernel"].kind == "constant"
    assert set(meaning.ambiguous) == {"layers.0.mlp.up.kernel"}
    assert "1 of" in meaning.why


def test_meaning_is_not_claimed_where_most_leaves_are_other_numbers(
    llama: Trainer,
) -> None:
    random = np.random.default_rng(0)
    fresh = {
        path: random.standard_normal(a.shape).astype(np.float32)
        for path, a in llama.arrays.items()
    }
    meaning = llama.check(
        arrays=fresh | {"embed.embedding": llama.arrays["embed.embedding"]}
    ).meaning
    assert meaning.state == "pending"
    assert "only 1 of" in meaning.why


def test_meaning_of_a_tensor_under_its_own_name_is_not_doubted(llama: Trainer) -> None:
    values = CheckpointValues.of(llama.model)
    assert values is not None
    arrays = {name: values[name] for name in values}
    arrays["lm_head.weight"] = np.random.default_rng(0).standard_normal(
        arrays["lm_head.weight"].shape
    )
    bindings = Rules.parse("{x*} -> {x*}").bind(arrays, llama.tensors, llama.config)
    seen = sample(bindings, arrays, values).seen
    assert seen["lm_head.weight"].kind == "named", (
        "a new head is other weights, not a wrong rule"
    )
    assert decide(seen).state == "checked"


def test_meaning_by_the_checkpoint_that_is_named(llama: Trainer, tmp_path: Any) -> None:
    other = jv.models.tiny(
        "llama", num_key_value_heads=4, vocab_size=512, num_hidden_layers=2, seed=3
    )
    assert llama.check(checkpoint=other).meaning.state == "pending", (
        "another checkpoint's numbers are other numbers"
    )
    assert llama.check(checkpoint=llama.model).meaning.state == "checked"
    with pytest.raises(ModelError, match="no safetensors"):
        llama.check(checkpoint=tmp_path)


def test_meaning_that_is_turned_off_says_so(llama: Trainer) -> None:
    meaning = llama.check(llama.planted("transposed q"), way="off").meaning
    assert (meaning.state, meaning.how) == ("unchecked", None)
    assert 'meaning="off"' in meaning.why
    assert "layers.0.attn.q.kernel" in meaning.ambiguous
    with pytest.raises(ConfigError, match="meaning must be one of"):
        llama.check(way="perhaps")


def test_meaning_of_a_tree_without_numbers_waits(llama: Trainer) -> None:
    check = llama.check(arrays=llama.shapes)
    assert check.meaning.state == "pending"
    check.before_sync(dict(llama.arrays), llama.model)
    assert check.meaning.state == "checked"


def test_meaning_faces(llama: Trainer) -> None:
    meaning = llama.check().meaning
    assert repr(meaning).startswith("Meaning(checked by value: ")
    assert meaning.text == "meaning checked by value"
    assert meaning.to_dict()["leaves"]["final_norm.scale"]["kind"] == "equal"
    with pytest.raises(MeaningError) as caught:
        llama.check(llama.planted("transposed q"))
    failed: Any = caught.value.fields["meaning"]
    assert failed.state == "failed"
    assert "layers.0.attn.q.kernel" in failed._repr_html_()


# One leaf -------------------------------------------------------------------------------------------------------------


def test_meaning_of_one_leaf_by_what_was_done_to_it() -> None:
    random = np.random.default_rng(0)
    want = random.standard_normal(256) * 0.02
    scale = 1 + random.standard_normal(128) * 0.1
    assert judge(want, want).kind == "equal"
    assert (
        judge(want.astype(np.float16).astype(float), want, ["float16"]).kind == "equal"
    )
    assert judge(want.astype(np.float16).astype(float), want).kind == "correlated", (
        "float32 has no such rounding"
    )
    assert judge(want + 0.005 * random.standard_normal(256), want).kind == "correlated"
    assert judge(random.permutation(want), want).kind == "different"
    assert (
        judge(np.concatenate([want[:192], random.permutation(want[192:])]), want).kind
        == "different"
    ), "a quarter"
    trained = want + 0.002 * random.standard_normal(256)
    assert (
        judge(np.concatenate([trained[:232], np.roll(trained[232:], 5)]), want).kind
        == "weak"
    ), "not agreed to"
    uneven = want + 0.002 * random.standard_t(2, 256)
    assert judge(uneven, want).kind in ("correlated", "weak"), (
        "a few numbers that were trained more"
    )
    assert judge(want / 8, want).kind == "scaled"
    assert judge(trained * 32**0.5, want).kind == "weak", (
        "scaled, and trained since: not agreed to"
    )
    assert "times 5.6" in judge(trained * 32**0.5, want).text
    assert judge(trained * 1.1, want).kind == "correlated"
    assert judge(-trained, want).kind == "different"
    assert judge(scale - 1, scale).kind == "shifted"
    assert (
        judge(scale + 1 + 0.01 * random.standard_normal(128), scale).kind == "shifted"
    ), "trained since"
    assert judge(np.zeros(128), np.ones(128)).kind == "shifted"
    assert judge(np.ones(128), np.ones(128)).kind == "constant"
    assert judge(np.zeros(256), want).kind == "constant", "a placeholder shows nothing"
    assert judge(1 + 0.01 * random.standard_normal(128), np.ones(128)).kind == "near"
    assert judge(np.full(4, np.nan), np.ones(4)).kind == "unread"
    # closer to each other than bfloat16 rounds coarsely
    norms = 1 + random.standard_normal((2, 128)) * 0.004
    assert judge(norms[0], norms[1], ["bfloat16"]).kind == "near", (
        "not taken for the same"
    )
    assert judge(np.zeros(0), np.zeros(0)).kind == "unread"


def test_meaning_of_a_few_numbers_in_the_wrong_place_is_looked_into(
    llama: Trainer,
) -> None:
    leaf = "layers.0.mlp.down.kernel"
    moved: Any = llama.arrays[leaf].copy()
    width = moved.shape[1]
    # one in forty: of the first sample about six
    few = slice(width - width // 40, width)
    moved[:, few] = (
        np.random.default_rng(0)
        .permutation(moved[:, few].reshape(-1))
        .reshape(moved[:, few].shape)
    )
    values = CheckpointValues.of(llama.model)
    assert values is not None
    seen = sample(
        [b for b in llama.bindings if b.leaf == leaf], {leaf: moved}, values
    ).seen[leaf]
    assert seen.kind == "different"
    assert seen.compared > 1000


def test_meaning_needs_leaves_that_agree_before_others_are_wrong() -> None:
    equal, wrong = (
        LeafEvidence("equal", 256, 256),
        LeafEvidence("different", 256, 0, 0.01),
    )
    silent = LeafEvidence("constant", 256, 256)
    assert decide({"a": wrong, "b": wrong, "c": silent}).state == "open"
    assert decide({"a": equal, "b": wrong, "c": silent}).wrong == ("b",)
    assert decide({"a": equal, "b": wrong, "c": wrong}).state == "open", (
        "a minority: a new model with an old embedding"
    )
    assert decide({"a": equal, "b": wrong, "c": wrong}, ["b"]).state == "failed", (
        "unless another reading fits"
    )
    assert decide({"a": equal, "c": silent}).state == "checked"


def test_meaning_samples_every_axis_of_every_leaf(llama: Trainer) -> None:
    for b in llama.bindings:
        leaf, tensor = points(b)
        assert len(leaf) == len(tensor) >= min(int(np.prod(b.leaf_shape)), 200)
        for d, n in enumerate(b.leaf_shape):
            assert leaf[:, d].min() < n / 2 <= leaf[:, d].max(), "both ends"


def test_meaning_is_ambiguous_where_shapes_allow_more_than_one_reading(
    llama: Trainer,
) -> None:
    found = {
        leaf: [kind for kind, _ in reasons]
        for leaf, reasons in ambiguities(llama.bindings, llama.config).items()
    }
    assert found["layers.0.attn.q.kernel"] == ["square", "sibling", "rotary"]
    assert found["layers.0.attn.v.kernel"] == ["square", "sibling"]
    assert found["layers.0.mlp.gate.kernel"] == ["sibling"]
    assert found["layers.0.attn_norm.scale"] == ["sibling", "offset"]
    assert found["final_norm.scale"] == ["offset"]
    assert "layers.0.mlp.down.kernel" not in found
    assert "embed.embedding" not in found


# Values, not shapes ---------------------------------------------------------------------------------------------------

EMBED = "embed.embedding"


def exchanged(table: Any, *rows: int) -> Any:
    """A copy in which these rows hold each other's values."""
    out = table.copy()
    out[list(rows)] = table[[*rows[1:], rows[0]]]
    return out


@pytest.mark.parametrize("trained", [0.0, 0.2])
@pytest.mark.parametrize("rows", [(17, 93), (5, 300, 301), (511, 0)])
def test_meaning_of_an_embedding_is_looked_up_in_every_row(
    llama: Trainer, rows: tuple[int, ...], trained: float
) -> None:
    arrays = llama.trained(trained)
    assert llama.check(arrays=arrays).meaning.text == "meaning checked by value"
    with pytest.raises(MeaningError, match="hold each other's numbers") as caught:
        llama.check(arrays={**arrays, EMBED: exchanged(arrays[EMBED], *rows)})
    assert caught.value.leaves == (EMBED,)
    assert all(str(row) in caught.value.message for row in rows)
    with pytest.raises(MeaningError, match="hold each other's numbers"):
        llama.check(
            arrays={
                **arrays,
                "lm_head.kernel": exchanged(arrays["lm_head.kernel"].T, *rows).T,
            }
        )


def test_meaning_of_a_tied_embedding_is_looked_up_in_every_row() -> None:
    tied = Trainer("gemma2")
    assert "lm_head.kernel" not in tied.arrays
    with pytest.raises(MeaningError, match="rows 17, 93 hold each other's numbers"):
        tied.check(arrays={**tied.arrays, EMBED: exchanged(tied.arrays[EMBED], 17, 93)})


def test_meaning_of_new_rows_of_an_embedding_is_neither_right_nor_wrong(
    llama: Trainer,
) -> None:
    table: Any = llama.arrays[EMBED].copy()
    table[7] = np.random.default_rng(0).standard_normal(table.shape[1])
    table[8] = table[20]  # a copy of a row that stays: how new tokens are often made
    meaning = llama.check(arrays={**llama.arrays, EMBED: table}).meaning
    assert meaning.leaves[EMBED].kind == "partly"
    assert "2 rows hold other numbers" in meaning.leaves[EMBED].text
    assert meaning.text == "meaning checked by value, except for 1 leaf"
    assert set(meaning.ambiguous) == {EMBED}
    table[::4] = np.random.default_rng(0).standard_normal(table[::4].shape)
    with pytest.raises(MeaningError, match="1 do not"):  # a quarter of it
        llama.check(arrays={**llama.arrays, EMBED: table})


def test_meaning_without_power_is_counted(llama: Trainer, tmp_path: Any) -> None:
    from safetensors.numpy import save_file

    values = CheckpointValues.of(llama.model)
    assert values is not None
    ones = {
        name: np.ones_like(values[name]) if "norm" in name else values[name]
        for name in values
    }
    ones["model.layers.1.mlp.up_proj.weight"] = ones[
        "model.layers.0.mlp.up_proj.weight"
    ]
    save_file(ones, tmp_path / "model.safetensors")
    arrays = {
        path: np.ones_like(a) if "norm" in path else a
        for path, a in llama.arrays.items()
    }
    arrays["layers.1.mlp.up.kernel"] = arrays["layers.0.mlp.up.kernel"]
    norms = {path for path in arrays if "norm" in path}
    for rules in (llama.rules, llama.planted("norms swapped")):
        meaning = llama.check(rules, arrays, checkpoint=tmp_path).meaning
        assert (
            meaning.text
            == f"meaning checked by value, except for {len(norms) + 2} leaves"
        )
        assert set(meaning.ambiguous) == norms | {
            "layers.0.mlp.up.kernel",
            "layers.1.mlp.up.kernel",
        }
        assert meaning.ambiguous["final_norm.scale"] == "one number everywhere"
        assert "1 + w" not in meaning.ambiguous["layers.0.attn_norm.scale"], (
            "an offset would be seen"
        )
    moved = {
        path: llama.arrays[path] if "norm" in path else a for path, a in arrays.items()
    }
    told = untold(llama.bindings, moved)
    assert set(told) == {"layers.0.mlp.up.kernel", "layers.1.mlp.up.kernel"}, (
        "norms that differ can be told apart"
    )
    assert set(untold(llama.bindings, arrays)) == norms | set(told)


def test_meaning_of_another_tensors_numbers_under_a_name_is_refused(
    llama: Trainer,
) -> None:
    values = CheckpointValues.of(llama.model)
    assert values is not None
    right = {name: values[name] for name in values}
    gate, q = (
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
    )
    up, heads = gate.replace("gate", "up"), right[q].reshape(4, 32, 128)
    rules = Rules.parse("{x*} -> {x*}")
    named = Trainer("llama")
    named.shapes = {
        name: LeafShape(tuple(a.shape), "float32") for name, a in right.items()
    }
    assert named.check(rules, right).meaning.text == "meaning checked by value"
    for wrong in (
        {gate: right[up], up: right[gate]},
        {gate: -right[gate]},
        {q: right[q] * 32**0.5},
        {q: heads[::-1].reshape(128, 128)},
        {
            "model.layers.0.self_attn.o_proj.weight": right[
                "model.layers.0.self_attn.o_proj.weight"
            ][:, ::-1]
        },
    ):
        with pytest.raises(MeaningError) as caught:
            named.check(rules, {**right, **wrong})
        assert set(caught.value.leaves) == set(wrong)
    other = {
        "lm_head.weight": np.random.default_rng(0).standard_normal(
            right["lm_head.weight"].shape
        )
    }
    assert (
        named.check(rules, {**right, **other}).meaning.text
        == "meaning checked by value, except for 1 leaf"
    )


def test_meaning_of_the_first_sync_is_that_of_its_own_values(llama: Trainer) -> None:
    check = llama.check()
    connected = check.meaning
    wrong = {
        **llama.arrays,
        "layers.0.mlp.gate.kernel": llama.arrays["layers.0.mlp.up.kernel"],
    }
    with pytest.raises(MeaningError):
        check.before_sync(wrong, llama.model)
    assert check.meaning is connected, (
        "these values say nothing about those of the connect"
    )
    check.before_sync(llama.arrays, llama.model)
    assert check.meaning.state == "checked"
    moved = llama.trained(0.2)
    check.before_sync(moved, llama.model)
    assert "correlated" in check.meaning.why
    check.committed(4, moved)
    assert check.text_of(4, moved) == "meaning checked by value"
    assert (
        check.text_of(5, llama.trained(0.3)) == "meaning checked by value at version 4"
    )
    # later syncs are not compared: their reports say at which version it was
    check.before_sync(wrong, llama.model)


def test_meaning_of_an_array_that_changed_in_place_is_compared_again(
    llama: Trainer,
) -> None:
    arrays = {path: np.array(a) for path, a in llama.arrays.items()}
    check = llama.check(arrays=arrays)
    arrays["layers.0.mlp.gate.kernel"] *= -1
    with pytest.raises(MeaningError, match="times -1"):
        check.before_sync(arrays, llama.model)


def test_meaning_of_a_first_sync_after_long_training_is_open_not_wrong(
    llama: Trainer,
) -> None:
    random = np.random.default_rng(0)
    moved = llama.trained(0.2)
    far = random.standard_normal(moved["layers.1.attn.q.kernel"].shape).astype(
        np.float32
    )
    check = llama.check()
    check.before_sync({**moved, "layers.1.attn.q.kernel": far}, llama.model)
    assert check.meaning.state == "pending", "neither checked nor wrong"
    check = llama.check()
    with pytest.raises(MeaningError):  # nothing else was trained: it is not this tree
        check.before_sync({**llama.arrays, "layers.1.attn.q.kernel": far}, llama.model)
    swapped = {"layers.1.mlp.gate.kernel": moved["layers.1.mlp.up.kernel"]}
    swapped |= {"layers.1.mlp.up.kernel": moved["layers.1.mlp.gate.kernel"]}
    with pytest.raises(MeaningError):
        check.before_sync({**moved, **swapped}, llama.model)


def test_meaning_of_a_tree_of_another_shape_is_left_to_the_sync(llama: Trainer) -> None:
    check = llama.check()
    arrays = {**llama.arrays, EMBED: llama.arrays[EMBED][:100]}
    check.before_sync(arrays, llama.model)
    assert check.meaning.leaves[EMBED].kind == "unread"
    assert check.meaning.text == "meaning checked by value, except for 1 leaf"
