"""Hostile rule text and rule files: one error of ours each, in bounded time and memory."""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvlab._errors import ConfigError, CoverageError, JvlabError, LayoutError, RuleError
from jvlab.layout._types import CheckpointTensor
from jvlab.layout.rules._builtin import leaf_shapes_for
from jvlab.layout.rules._ruleset import Rules
from jvlab.layout.rules._syntax import parse_rule
from tests.fuzzing import examples
from tests.layout.rules.families import shapes

SECONDS = 1.0  # what any one rule may take, on a busy machine too
MEBIBYTES = 32

DIGITS = "9" * 100_000
TEXTS = {
    "digits in a hole": f"a.{{i}} -> b.{{{DIGITS}*i}}",
    "digits added in a hole": f"a.{{i}} -> b.{{i+{DIGITS}}}",
    "digits in a size": f"a -> b : d -> d where d={DIGITS}",
    "digits that divide": f"a -> b : d -> d where d=8/{DIGITS}",
    "digits to add": f"a -> b : d -> d + {DIGITS}",
    "few enough digits for a float, and still infinite": f"a -> b : d -> d + {'9' * 400}",
    "a subtraction that is infinite": f"a -> b : d -> d - {'9' * 400}.5",
    "a sum that only float32 cannot hold": f"a -> b : d -> d + {'9' * 60}",
    "digits of another script": "a -> b : d -> d where d=²",
    "a size of zeros": "a -> b : d -> d where d=٠",
    "parentheses": f"a -> b : {'(' * 50_000}d{')' * 50_000} -> d",
    "parentheses that never close": f"a -> b : {'(' * 50_000}",
    "brackets in axes": f"a -> b : {'[' * 50_000}",
    "brackets in a name": f"{'[' * 50_000} -> b",
    "deep choices in a name": f"a.{'[x|' * 5_000}y{']' * 5_000} -> b",
    "a choice of many": f"a.[{'|'.join(f'x{j}' for j in range(50_000))}] -> b : d -> d",
    "a product of sums": "a -> b : ("
    + " ".join(f"[a{j}|b{j}|c{j}]" for j in range(40))
    + ") -> d",
    "many names": "a -> " + ", ".join(f"b{j}" for j in range(50_000)),
    "many holes": "a." + ".".join(f"{{i{j}}}" for j in range(20_000)) + " -> b",
    "many axes": "a -> b : " + " ".join(f"x{j}" for j in range(20_000)) + " -> d",
    "many sizes": "a -> b : d -> d where " + ", ".join("d=1" for _ in range(20_000)),
    "one long name": "a" * 1_000_000,
    "one long quoted name": '"' + "a" * 1_000_000,
    "many spaces": " " * 1_000_000 + "->",
    "many quotes": '"' * 100_000,
}


def bounded(call: Any) -> Any:
    """The result of a call, which must keep to time and memory."""
    began = time.process_time()
    try:
        return call()
    finally:
        took = time.process_time() - began
        assert took < SECONDS, f"{took:.1f} s"
        tracemalloc.start()
        with contextlib.suppress(JvlabError):
            call()
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        assert peak < MEBIBYTES, f"{peak:.0f} MiB"


@pytest.mark.parametrize("case", TEXTS)
def test_hostile_text_is_one_error_of_ours(case: str) -> None:
    with pytest.raises(RuleError) as caught:
        bounded(lambda: Rules.parse(TEXTS[case]))
    assert caught.value.remedy
    assert len(str(caught.value)) < 2_000, "an error is read by people"
    assert caught.value.fields["column"] in range(1, 1_000_001)


def matched(name: str, path: str) -> Any:
    from jvlab.layout.rules._rules import Compiled

    rule = parse_rule(f"{name} -> ~")
    return Compiled(rule).match(path)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("{x*}.{y*}.end", "a." * 1_000 + "enD"),
        ("{x*}a{y*}b", "a" * 2_000),
        ("{x*}.{i}.{y*}.w", "1." * 1_000 + "v"),
        ("{x*}.{y*}", "." * 1_000_000),
    ],
)
def test_hostile_holes_match_in_bounded_time(name: str, path: str) -> None:
    bounded(lambda: matched(name, path))


@pytest.mark.parametrize(
    "name", ["{x*}.{y*}.{z*}", "{x*}{y*}", "{i}{j}.w", "a.[{i}|q]{x*}"]
)
def test_holes_that_no_text_parts_are_refused(name: str) -> None:
    with pytest.raises(RuleError):
        parse_rule(f"{name} -> ~")
    with pytest.raises(RuleError):
        parse_rule(f"{name} -> b.{name}")


def test_holes_take_what_they_took() -> None:
    """As much text as possible goes to the first `{x*}`, then to the next."""
    assert matched("{x*}.{y*}.w", "a.b.c.d.w") == (0, {"x*": "a.b.c", "y*": "d"})
    assert matched("{x*}.{i}.{y*}.w", "l.3.a.4.b.w") == (
        0,
        {"x*": "l.3.a", "i": 4, "y*": "b"},
    )
    assert matched("{x*}.{y*}.w", "a.w") is None
    assert matched("{i}.w", f"{'9' * 19}.w") is None
    assert matched("a.[q|k].{x*}.{y*}", "a.k.1.2.3") == (1, {"x*": "1.2", "y*": "3"})


LEAVES = {
    "layers.0.q": (4, 6),
    "layers.1.q": (4, 6),
    "norm": (4,),
    "deep.a.b.c": (2, 3, 4),
}
TENSORS = [
    CheckpointTensor("m.0.q", (6, 4), "float32"),
    CheckpointTensor("m.1.q", (6, 4), "float32"),
    CheckpointTensor("norm", (4,), "float32"),
    CheckpointTensor("abc", (4, 3, 2), "float32"),
]

HOSTILE_BINDS = {
    "huge sizes multiplied": "norm -> norm : d -> d where d="
    + "*".join(["999999999"] * 400),
    "a size that is a word of the config": "norm -> norm : d -> d where d=model_type",
    "a size that is a list of the config": "norm -> norm : d -> d where d=architectures",
    "a size that is no number": "norm -> norm : d -> d where d=rope",
    "a product of many axes": "norm -> norm : ("
    + " ".join(f"a{j}" for j in range(60))
    + ") -> ("
    + " ".join(f"a{j}" for j in range(60))
    + ") where "
    + ", ".join(f"a{j}=999999999" for j in range(60)),
    "a stack of everything": "big -> t.{v}.{d} : v d -> 1",
}


@pytest.mark.parametrize("case", HOSTILE_BINDS)
def test_hostile_sizes_are_coverage_errors(case: str) -> None:
    config = {"model_type": "llama", "architectures": ["A"], "rope": float("nan")}
    leaves = shapes({**LEAVES, "big": (200_000, 4_000)})
    with pytest.raises((RuleError, CoverageError)) as caught:
        bounded(lambda: Rules.parse(HOSTILE_BINDS[case]).bind(leaves, TENSORS, config))
    assert len(str(caught.value)) < 5_000


def test_hostile_rules_read_backwards() -> None:
    """`jvlab plan --rules FILE` reads rules from the tensors' side."""
    tensors = [CheckpointTensor("a." * 300 + "weighT", (4,), "float32")]
    wild = "{x*}.{y*}.weight"
    assert (
        bounded(lambda: leaf_shapes_for(Rules.parse(f"{wild} -> {wild}"), tensors, {}))
        == {}
    )
    twice = Rules.parse("p.{i} -> m.{i}.x.{i}")
    found = leaf_shapes_for(twice, [CheckpointTensor("m.3.x.3", (4,), "float32")], {})
    assert list(found) == ["p.3"]
    assert (
        leaf_shapes_for(twice, [CheckpointTensor("m.3.x.4", (4,), "float32")], {}) == {}
    )


FILES: dict[str, bytes] = {
    "deep.json": b'{"version": 1, "rules": ' + b"[" * 100_000,
    "no_object.json": b"[1, 2]",
    "a_number_for_a_rule.json": b'{"version": 1, "rules": [{"rule": 5}]}',
    "a_word_for_a_confidence.json": b'{"version": 1, "rules": [{"rule": "a -> b", "confidence": "much"}]}',
    "an_infinite_confidence.json": b'{"version": 1, "rules": [{"rule": "a -> b", "reason": "x", "confidence": 1e999}]}',
    "digits.json": b'{"version": ' + b"9" * 100_000 + b', "rules": []}',
    "no_text.rules": b"a -> b\n\xff\xfe\x00",
    "no_text.json": b"\xff\xfe\x00",
    "much_too_long.rules": b"# a comment\n" * 2_000_000,
}


@pytest.mark.parametrize("name", FILES)
def test_hostile_rule_files_are_one_error_of_ours(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    with pytest.raises((ConfigError, RuleError)) as caught:
        bounded(lambda: Rules.load(tmp_path / name))
    assert caught.value.remedy
    assert len(str(caught.value)) < 2_000


def test_too_many_rules_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jvlab.layout.rules._ruleset._RULES", 3)
    entries = [{"rule": f"a{j} -> b{j}"} for j in range(4)]
    for read in (
        lambda: Rules.parse("\n".join(e["rule"] for e in entries)),
        lambda: Rules.from_json(json.dumps({"version": 1, "rules": entries})),
    ):
        with pytest.raises(ConfigError, match="more than 3 rules"):
            read()


def test_a_number_is_written_as_it_is_read() -> None:
    for number in ("1000000", "0.00001", "0.1234567890123", "1"):
        rule = parse_rule(f"a -> b : d -> d + {number}")
        assert rule.add == float(number)
        assert parse_rule(str(rule)) == rule


PIECES = st.sampled_from(
    [
        "a",
        "q",
        "norm",
        "layers.",
        "m.",
        "{i}",
        "{x*}",
        "{y*}",
        "{2*i+j}",
        "[",
        "]",
        "|",
        "(",
        ")",
        " ",
        " -> ",
        ":",
        ",",
        "?",
        "~",
        '"',
        "\\",
        "where ",
        "d",
        "n",
        "d=",
        "4",
        "²",
        "1",
        "...",
        "+ ",
        "- ",
        "0.5",
        " as ",
        "bfloat16",
        "\t",
        "#",
        "\x00",
        "\u2028",
        "*",
        "/",
        "=",
    ]
)


@settings(max_examples=examples(200))
@given(st.one_of(st.lists(PIECES, max_size=40).map("".join), st.text(max_size=80)))
def test_hostile_text_of_any_kind(text: str) -> None:
    """A rule or a RuleError; a rule's own text gives the rule back; and it binds, or says in one error why not."""
    try:
        rules = Rules.parse(text)
    except RuleError:
        return
    assert Rules.parse(rules.to_text()) == rules
    try:
        bindings = rules.bind(
            shapes(LEAVES), TENSORS, {"num_attention_heads": 2, "hidden_size": 4}
        )
        assert {b.tensor for b in bindings} <= {t.name for t in TENSORS}
    except CoverageError:
        pass
    with contextlib.suppress(LayoutError):
        leaf_shapes_for(rules, TENSORS, {})


@settings(max_examples=examples(60))
@given(
    st.recursive(
        st.none() | st.floats() | st.text(max_size=8),
        lambda x: (
            st.lists(x)
            | st.dictionaries(
                st.sampled_from(["version", "rules", "rule", "reason", "confidence"]), x
            )
        ),
        max_leaves=12,
    )
)
def test_hostile_json_of_any_kind(data: Any) -> None:
    for document in (
        data,
        {"version": 1, "rules": data},
        {"version": 1, "rules": [data]},
        {
            "version": 1,
            "rules": [{"rule": "a -> b", "confidence": data, "reason": data}],
        },
    ):
        with contextlib.suppress(JvlabError):
            Rules.from_json(json.dumps(document))
