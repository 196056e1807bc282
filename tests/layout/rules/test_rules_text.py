"""The rule language as text: malformed rules point at the character, canonical text parses to the same rule."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvlab._errors import ConfigError, RuleError
from jvlab.layout.rules._ruleset import Rules
from jvlab.layout.rules._syntax import Ax, Index, Name, Rule, name_text, parse_rule
from tests.fuzzing import examples

# the `^` of each second line marks the column the error must point at
MALFORMED = {
    "no arrow": """
a.b : c -> d
    ^""",
    "nothing after the arrow": """
a.b ->
      ^""",
    "no leaf": """
-> a.b
^""",
    "second arrow missing": """
a -> b : d n
            ^""",
    "no axes on the left": """
a -> b : -> d
             ^""",
    "axis on the leaf only": """
a -> b : d n -> d
           ^""",
    "axis on the tensor only": """
a -> b : d -> d n
                ^""",
    "axis twice": """
a -> b : d d -> d
           ^""",
    "axis twice on the tensor": """
a -> b : d n -> (n d) d
                      ^""",
    "unclosed group": """
a -> b : (d n -> n d
              ^""",
    "empty group": """
a -> b : () d -> d
         ^""",
    "empty part": """
a -> [b|c] : [d|] -> d
             ^""",
    "unclosed choice": """
a.[q|k -> b : d -> d
      ^""",
    "choice of one": """
a.[q] -> b
  ^""",
    "choices of different length": """
a.[q|k|v].w -> b.[q|k].w
                 ^""",
    "choice inside a choice": """
a.[q|[k|v]] -> b.[c|d]
  ^""",
    "tensor choices with nothing on the leaf": """
a -> b.[q|k]
       ^""",
    "leaf choices into one place": """
a.[q|k] -> b
  ^""",
    "only some names have choices": """
a.[q|k] -> b.[q|k], c
                    ^""",
    "unbound capture": """
a -> b.{i}.w
       ^""",
    "unused capture": """
a.{i}.w -> b
  ^""",
    "capture twice": """
a.{i}.{i} -> b.{i}
      ^""",
    "computed number on the leaf": """
a.{2*i} -> b.{i}
  ^""",
    "unclosed hole": """
a.{i -> b
    ^""",
    "hole without capture": """
a.{3} -> b
  ^""",
    "bad hole": """
a.{} -> b
   ^""",
    "wild not captured": """
a.{i} -> b.{i}.{x*}
               ^""",
    "text used as a number": """
{x*}.a -> b.{x}
            ^""",
    "capture and axis": """
a.{i} -> b.{i} : i d -> d
                 ^""",
    "axis in name and shape": """
a -> b.{i} : i d -> i d
                    ^""",
    "bare size": """
a -> b : d 3 -> d
           ^""",
    "odd character in axes": """
a -> b : d % -> d
           ^""",
    "rest on one side": """
a -> b : d ... -> d
           ^""",
    "rest twice": """
a -> b : ... d ... -> d ...
               ^""",
    "rest in a group": """
a -> b : (d ...) -> d
            ^""",
    "unknown dtype": """
a -> b as bfloat17
          ^""",
    "unknown tail": """
a -> b : d -> d with n=3
                      ^""",
    "tail in the wrong order": """
a -> b as float32 + 1
                  ^""",
    "add nothing": """
a -> b + x
         ^""",
    "size of no axis": """
a -> b : d -> d where n=3
                      ^""",
    "size twice": """
a -> b : d -> d where d=3, d=4
                           ^""",
    "size zero": """
a -> b : d -> d where d=0
                      ^""",
    "size by itself": """
a -> b : x y -> y x where x=y*2, y=x/2
                          ^""",
    "size without value": """
a -> b : d -> d where d=
                        ^""",
    "two leaves": """
a, b -> c
 ^""",
    "optional leaf": """
a? -> b
 ^""",
    "axes on nothing": """
a -> ~ : d -> d
       ^""",
    "nothing to nothing": """
~ -> ~
     ^""",
    "unclosed quote": """
"a b -> c
^""",
    "missing name after comma": """
a -> b,
       ^""",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_rule_points_at_the_character(case: str) -> None:
    _, text, mark = MALFORMED[case].split("\n")
    with pytest.raises(RuleError) as caught:
        parse_rule(text)
    error = caught.value
    assert error.remedy
    lines = error.message.split("\n")
    assert lines[1].strip() == text
    assert lines[2].index("^") - 4 + 1 == error.fields["column"]
    assert error.fields["column"] == mark.index("^") + 1, error


def test_the_line_number_is_told() -> None:
    with pytest.raises(RuleError, match="rule line 3, column 6") as caught:
        Rules.parse("# a comment\na -> b\nc -> [d|e]\n")
    assert caught.value.fields["line"] == 3


def test_one_leaf_claimed_by_two_lines() -> None:
    with pytest.raises(RuleError, match=r"line 2.*claimed twice: line 1"):
        Rules.parse("a.{i} -> b.{i}\na.{j} -> c.{j}\n")


GOOD = [
    "layers.{i}.attn.q.kernel -> model.layers.{i}.self_attn.q_proj.weight : d n h -> (n h) d",
    "a -> b",
    "a -> b, c?",
    "a -> ~",
    "~ -> {x*}.inv_freq",
    "{path*}.kernel -> {path*}.weight : a b -> b a",
    "blocks_{j}.q -> model.layers.{2*s+j}.q : s d n -> n d",
    "blocks_{j}.q -> model.layers.{s+12*j+1}.q : s d n -> n d",
    "a.qkv -> b.[q|k|v] : d (k [g|1|1] h) -> [k g h|k h|k h] d where g=n_head/k",
    "a.[q|k] -> b : d n -> [n|n] d - 0.5 as bfloat16",
    "a -> b : 1 d ... -> ... d where d=? + 1",
    '"odd name/~."{i} -> "with \\"quotes\\"."{i}',
]


@pytest.mark.parametrize("text", GOOD)
def test_canonical_text_is_a_fixed_point(text: str) -> None:
    assert str(parse_rule(text)) == text


_literal = st.text(
    string.printable.replace("\n", "")
    .replace("\r", "")
    .replace("\x0b", "")
    .replace("\x0c", ""),
    min_size=1,
)


@given(_literal, st.lists(_literal, min_size=1, max_size=3))
def test_any_literal_name_survives_as_text(leaf: str, tensors: list[str]) -> None:
    rule = Rule(Name((leaf,)), tuple(Name((t,)) for t in tensors))
    assert parse_rule(str(rule)) == rule
    assert Rules.parse(f"# first\n{rule}  # last\n").rules == (rule,)


_axes = st.permutations(list("abcdef")).flatmap(
    lambda p: st.integers(1, 6).map(lambda n: p[:n])
)


@st.composite
def _rules(draw: st.DrawFn) -> Rule:
    axes = draw(_axes)
    stacked = draw(st.booleans()) and len(axes) > 1
    inner = axes[1:] if stacked else axes
    right = draw(st.permutations(inner))
    hole = Index(((draw(st.integers(1, 4)), axes[0]),), draw(st.integers(0, 3)))
    name = Name(("m.", hole, ".w")) if stacked else Name(("m.w",))
    cast = draw(st.sampled_from([None, "bfloat16", "float32"]))
    add = draw(st.sampled_from([0.0, 1.0, -1.0, 0.25]))
    return Rule(
        Name(("leaf",)),
        (name,),
        tuple(map(Ax, axes)),
        tuple(map(Ax, right)),
        (),
        add,
        cast,
    )


@given(_rules())
@settings(max_examples=examples(50))
def test_parse_undoes_text(rule: Rule) -> None:
    assert parse_rule(str(rule)) == rule
    assert Rules.parse(Rules((rule,)).to_text()) == Rules((rule,))
    assert Rules.from_json(Rules((rule,)).to_json()) == Rules((rule,))


@pytest.mark.parametrize("suffix", [".json", ".rules"])
def test_files_keep_the_rules_and_their_reasons(tmp_path: Path, suffix: str) -> None:
    rule = parse_rule("a.{i} -> b.{i} : d n -> n d")
    rules = Rules((rule,), {str(rule): ("because", 0.5)})
    rules.save(tmp_path / f"x{suffix}")
    again = Rules.load(tmp_path / f"x{suffix}")
    assert again == rules
    if suffix == ".json":
        assert again.notes == rules.notes
    else:
        assert "# 0.50 because" in (tmp_path / f"x{suffix}").read_text()


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"version": 2, "rules": []}', '{"version": 1, "rules": [3]}'],
)
def test_json_that_is_no_rule_set(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Rules.from_json(text)
    assert caught.value.remedy


def test_a_missing_file_and_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Rules.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"policy\.llama") as caught:
        Rules.named("policy.lama")
    assert "known" in caught.value.remedy


def test_registry_gives_a_name_once() -> None:
    rules = Rules.parse("a -> b")
    Rules.register("test.once", rules)
    assert Rules.register("test.once", "a -> b") == Rules.named("test.once") == rules
    with pytest.raises(ConfigError, match="exist and differ"):
        Rules.register("test.once", "a -> c")
    assert "checkpoint" in Rules.names()


def test_a_hole_keeps_its_arithmetic() -> None:
    assert name_text(Name(("a.", Index(((2, "s"), (1, "j")), 3)))) == "a.{2*s+j+3}"
