"""The mapping inspector without a browser: search, edits and what they cover, details, values, what is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jvlab._errors import ConfigError, CoverageError, RuleError
from jvlab.layout.rules._ruleset import Rules
from jvlab.sync._compile_tree import MappingRow
from jvlab.sync._meaning import Meaning
from jvlab.views._mapping_view import detail_html
from jvlab.views.panels._inspector import InspectorPanel, table_bytes
from tests.views.html_checks import check as check_html
from tests.views.mapping_world import (
    Q_RULE,
    many_rows,
    small_mapping,
    with_checkpoint,
    with_link,
)

BAD_RULE = "layers.{i}.q -> model.layers.{i}.q_proj.weight : d n h -> d (n h)"
NORM_RULE = "layers.{i}.norm -> model.layers.{i}.norm.weight + 1"
GOOD_RULE = "layers.{i}.q -> model.layers.{i}.q_proj.weight : d a h -> (a h) d"


@pytest.fixture
def panel() -> Iterator[InspectorPanel]:
    made = InspectorPanel(small_mapping(2))
    yield made
    made.close()


def test_search_takes_words_in_any_column_and_sorts() -> None:
    mapping = small_mapping(12)
    assert [r.leaf for r in mapping.search("LAYERS.1. q_proj")] == ["layers.1.q"]
    assert mapping.search("layers.1. bfloat16 cast") == mapping.search(
        "layers.1.", status="cast"
    )
    assert mapping.search(rank=5) == []
    assert {r.rule for r in mapping.search(rule=Q_RULE)} == {Q_RULE}
    order = [r.leaf for r in mapping.search("q_proj", sort="leaf")]
    assert order.index("layers.9.q") < order.index("layers.10.q"), (
        "numbers are sorted as numbers"
    )
    sizes = [r.nbytes for r in mapping.search(sort="-bytes")]
    assert sizes == sorted(sizes, reverse=True)
    with pytest.raises(ConfigError, match="no column"):
        mapping.search(sort="colour")


def test_an_edit_shows_what_it_covers_and_changes_nothing() -> None:
    mapping = small_mapping(2)
    worse = mapping.edit(BAD_RULE)
    assert not worse.complete
    assert (worse.leaves_bound, worse.leaves) == (
        len(mapping.plan.leaves) - 2,
        len(mapping.plan.leaves),
    )
    assert worse.tensors_filled == worse.tensors - 2
    assert all("q_proj" in p for p in worse.problems)
    assert {r.leaf for r in worse.rows if r.status == "problem"} == {
        "layers.0.q",
        "layers.1.q",
    }
    with pytest.raises(CoverageError, match="2 problems"):
        _ = worse.mapping
    better = worse.edit(GOOD_RULE)
    assert better.complete
    assert better.mapping.plan == mapping.plan, (
        "another name for an axis is the same plan"
    )
    assert repr(better) == f"Coverage({better.line})"
    assert mapping.edit("", replace=Q_RULE).tensors_filled == worse.tensors - 2, (
        "a rule that is taken away"
    )
    assert Q_RULE in {str(r) for r in mapping.rules}, "the mapping itself is as it was"


@pytest.mark.parametrize(
    ("rule", "replace", "error"),
    [
        ("", "", "none is named"),
        ("a -> b", "nothing -> like.this", "no rule in force"),
        ("a -> b\nc -> d", "", "takes one rule"),
    ],
)
def test_edits_that_mean_nothing_are_refused(
    rule: str, replace: str, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        small_mapping(1).edit(rule, replace=replace)


def test_a_mapping_without_rules_says_so() -> None:
    mapping = small_mapping(1)
    mapping._origin = None
    with pytest.raises(ConfigError, match="built by hand"):
        mapping.edit(GOOD_RULE)
    panel = InspectorPanel(mapping)
    assert not panel.widget.editable
    panel.close()


def test_rules_are_saved_and_bind_again(tmp_path: Path) -> None:
    mapping = small_mapping(2)
    for name in ("rules.txt", "rules.json"):
        saved = mapping.edit(GOOD_RULE).save_rules(tmp_path / name)
        assert GOOD_RULE in {str(r) for r in Rules.load(saved)}
    assert Rules.load(mapping.save_rules(tmp_path / "old.txt")) == mapping.rules


def test_the_panel_selects_edits_and_resets(
    panel: InspectorPanel, tmp_path: Path
) -> None:
    row = panel.select("model.layers.1.q_proj.weight")
    assert row.leaf == "layers.1.q"
    assert panel.widget.rule == Q_RULE
    assert panel.widget.detail.count("<svg") == 2
    panel.edit(BAD_RULE, replace=Q_RULE)
    assert panel.widget.state == "problems"
    assert "problem" in panel.widget.line
    assert panel.widget.bad
    assert panel.selected is not None
    assert panel.selected.status == "problem", "the row that was edited stays in sight"
    assert "<svg" not in panel.widget.detail, "there is no plan to draw"
    with pytest.raises(RuleError):
        panel.edit("layers.{i}.q -> ((", replace=BAD_RULE)
    panel.edit(GOOD_RULE, replace=BAD_RULE)
    assert panel.widget.state == "edited"
    assert "<svg" in panel.widget.detail
    panel.save_rules(tmp_path / "mine.txt")
    assert "rules=" in panel.widget.note
    panel.reset()
    assert panel.coverage is None
    assert panel.rows is panel.mapping.rows


def test_values_of_both_sides() -> None:
    mapping, link, params = with_link(shift=0.0)
    for found in mapping.values("layers.0.q", params):
        assert found.equal
        assert found.engine.tolist() == found.trainer.tolist()
        check_html(found._repr_html_())
    link.closed = True
    with pytest.raises(ConfigError, match="no open link"):
        mapping.values("layers.0.q", params)
    mapping, link, params = with_link(shift=2.0)
    found = mapping.values("layers.0.o", params)[0]
    assert found.change_summary.share_changed == 1
    assert (
        found.engine.sum()
        == found.trainer.sum()
        == found.change.sum()
        == np.prod(found.change_summary.shape)
    )
    assert found.change_edges[0] == -2
    with pytest.raises(ConfigError, match="are gone"):
        mapping.values("layers.0.o")


def test_details_are_escaped() -> None:
    evil = MappingRow(
        "<i>a",
        "<script>x -> y",
        "<b>why",
        0.5,
        "<u>t",
        "<s>p",
        (0,),
        "float32",
        "bfloat16",
        8,
        "cast",
    )
    for row in (
        evil,
        MappingRow("<i>a", "", "<b>gone", 0.0, "", "", (), "", "", 0, "problem"),
    ):
        html = detail_html(small_mapping(1), row)
        check_html(html)
        for tag in ("<i>", "<script>", "<u>", "<s>"):
            assert tag not in html


def test_what_is_sent_is_columns() -> None:
    rows = many_rows(1000).rows
    data = table_bytes(rows)
    size = int.from_bytes(data[:4], "little")
    header, body = json.loads(data[4 : 4 + size]), data[4 + size :]
    part = lambda c: body[c["bytes"]["at"] : c["bytes"]["at"] + c["bytes"]["length"]]
    columns = {c["key"]: c for c in header["columns"]}
    assert header["count"] == 1000
    assert part(columns["leaf"]).decode().split("\n") == [r.leaf for r in rows]
    codes = np.frombuffer(part(columns["rule"]), "<u4")
    assert [columns["rule"]["names"][c] for c in codes] == [r.rule for r in rows]
    assert np.frombuffer(part(columns["bytes"]), "<f8").tolist() == [
        r.nbytes for r in rows
    ]
    assert header["ranks"] == list(range(9))


def test_meaning_that_is_open_is_flagged_until_it_is_settled() -> None:
    mapping, link, _ = with_link()
    assert set(mapping.ambiguous) >= {"layers.0.q", "layers.0.norm"}
    link.mapping, link.meaning = mapping, Meaning("pending", why="no numbers yet")
    panel = InspectorPanel(mapping)
    flags = flags_of(panel.widget.table)
    at = next(i for i, r in enumerate(panel.rows) if r.leaf == "layers.0.q")
    assert flags[at].startswith("ambiguous: ")
    assert "rotary order" in flags[at]
    assert "w or 1 + w" in next(
        f for f, r in zip(flags, panel.rows, strict=True) if r.leaf == "layers.0.norm"
    )
    assert "meaning pending: no numbers yet" in panel.widget.line
    panel.select("layers.0.q")
    assert "only a value or a function can tell" in panel.widget.detail
    link.meaning = Meaning("checked", "value", "14 leaves sampled: equal")
    panel.refresh()
    assert not any(flags_of(panel.widget.table)), "settled: no flag is left"
    assert "meaning checked by value" in panel.widget.line
    assert "only a value" not in panel.widget.detail
    changed = mapping.edit(
        "layers.{i}.norm -> model.layers.{i}.norm.weight", replace=NORM_RULE
    )
    assert set(changed.mapping.ambiguous) == {"layers.0.norm"}, (
        "what an edit changes is open again"
    )
    panel.close()


def test_values_on_a_plain_link_and_a_question_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mapping, link, params = with_link(shift=0.5)
    assert InspectorPanel(small_mapping(1)).widget.no_values.startswith("no open link")
    panel = InspectorPanel(mapping)
    assert panel.widget.no_values == ""
    panel.select("layers.0.o")
    with pytest.raises(ConfigError, match="gone"):
        panel.values()
    assert panel.widget.ask
    link.remembered.take(params)
    assert not panel.values()[0].equal
    assert not panel.widget.ask
    kept = {name: np.array(value) for name, value in params.items()}
    link.remembered.take(kept)
    del kept  # nobody keeps them any more: the link alone does not
    with pytest.raises(ConfigError, match="gone"):
        panel.values()
    shell = SimpleNamespace(user_ns={"state": SimpleNamespace(params=params)})
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: shell)
    assert not panel.values_of("state.params")[0].equal
    with pytest.raises(ConfigError, match="no variable 'nothing'"):
        panel.values_of("nothing")
    with pytest.raises(ConfigError, match="has no attribute"):
        panel.values_of("state.weights")
    panel.close()


def test_meaning_is_no_part_of_what_an_edit_claims(panel: InspectorPanel) -> None:
    panel.edit(GOOD_RULE, replace=Q_RULE)
    assert panel.widget.note.startswith(
        "everything is covered, each element once; values are compared when you connect"
    )
    assert panel.widget.line.endswith("complete; values not compared")
    assert panel.widget.state == "edited", "not green"
    assert "proven" not in panel.widget.note


def test_meaning_of_an_edit_is_checked_by_value(tmp_path: Path) -> None:
    mapping, link, params = with_checkpoint(tmp_path)
    panel = InspectorPanel(mapping)
    panel.select("layers.1.q")
    # transposed: queries are square here, so everything is covered
    panel.edit(BAD_RULE, replace=Q_RULE)
    assert panel.coverage is not None
    assert panel.coverage.complete
    assert panel.widget.state == "problems"
    assert panel.widget.line.endswith("complete; wrong by value")
    assert panel.widget.bad
    assert f"they are by: {Q_RULE}" in panel.widget.note
    assert panel.selected is not None
    assert (panel.selected.leaf, panel.selected.rule) == ("layers.1.q", BAD_RULE), (
        "the same row, by its new rule"
    )
    assert "wrong: 256 numbers compared" in panel.widget.detail
    assert "the same bits" not in panel.widget.detail
    panel.edit(GOOD_RULE, replace=BAD_RULE)
    assert panel.widget.state == "checked"
    assert panel.widget.line.endswith("complete; meaning checked by value")
    assert "numbers compared: equal" in panel.widget.detail
    assert not any(flags_of(panel.widget.table)), (
        "values have settled what shapes leave open"
    )
    panel.edit(NORM_RULE.removesuffix(" + 1"), replace=NORM_RULE)
    assert panel.widget.state == "problems"
    assert "the checkpoint's -1" in panel.widget.note
    panel.reset()
    assert panel.widget.state == ""
    assert "wrong" not in panel.widget.detail
    link.remembered.take({})
    panel.edit(BAD_RULE, replace=Q_RULE)
    assert panel.widget.state == "edited", (
        "nobody keeps the values: nothing was compared"
    )
    assert "values were not compared" in panel.widget.note
    asked = InspectorPanel(mapping, params)
    asked.edit(BAD_RULE, replace=Q_RULE)
    assert asked.widget.state == "problems", "the values that the panel was given"
    for made in (panel, asked):
        made.close()


def test_an_edit_keeps_the_row_that_was_selected(tmp_path: Path) -> None:
    mapping, link, _ = with_checkpoint(tmp_path)
    panel = InspectorPanel(mapping)
    rows = [r for r in mapping.rows if r.leaf == "layers.0.experts.w1"]
    assert len(rows) > 1, "one leaf, several tensors"
    for rule in (GOOD_RULE, BAD_RULE, "layers.{i}.q -> ~"):
        panel.select(rows[-1].tensor)
        panel.edit(rule)
        assert panel.selected is not None
        assert (panel.selected.leaf, panel.selected.tensor) == (
            rows[-1].leaf,
            rows[-1].tensor,
        )
    right = rows[-1].rule
    wrong = right.replace("e a b -> b a", "e a b -> a b")
    panel.select(rows[-1].tensor)
    # not square: one problem stands for all tensors of the leaf
    panel.edit(wrong, replace=right)
    assert panel.selected is not None
    assert panel.selected.status == "problem"
    panel.edit(right, replace=wrong)
    assert panel.selected.tensor == rows[-1].tensor, "not the leaf's first"
    panel.reset()
    panel.select("layers.0.k")
    # both rows of the rule change their tensor: the leaf is what was selected
    panel.edit(
        "layers.{i}.[k|v] -> model.layers.{i}.[v|k]_proj.weight : d n h -> (n h) d"
    )
    assert panel.selected is not None
    assert (panel.selected.leaf, panel.selected.tensor) == (
        "layers.0.k",
        "model.layers.0.v_proj.weight",
    )
    assert panel.widget.state == "problems", "swapped"
    assert not link.closed
    panel.close()


def flags_of(data: bytes) -> list[str]:
    """The column of flags, as the browser takes it apart."""
    size = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + size])
    column = next(c for c in header["columns"] if c["key"] == "meaning")
    at = 4 + size + column["bytes"]["at"]
    codes = np.frombuffer(data[at : at + column["bytes"]["length"]], "<u4")
    return [column["names"][c] for c in codes]
