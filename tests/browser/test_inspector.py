"""The mapping inspector in a real JupyterLab: search, filter, select, edit, save, compare, and 50,000 rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.lab_page import LabPage

SETUP = "from tests.views.mapping_world import *"
BOX = ".jv-inspector"


def shown(page: LabPage) -> int:
    return int(page.data(BOX)["shown"])


def test_search_filter_sort_and_select(page: LabPage) -> None:
    page.open([SETUP, "mapping = small_mapping(4); mapping"]).run_all()
    page.wait(f"{BOX} .jv-row")
    assert page.cut(BOX) == [], "names have their room at 700 px"
    left = "e => Math.round(e.getBoundingClientRect().left)"
    heads, cells = (
        [
            page.wait(f"{BOX} {part} .jv-{key}").evaluate(left)
            for key in ("leaf", "tensor", "parameter", "status")
        ]
        for part in (".jv-table-head", ".jv-row")
    )
    assert heads == cells, "a column's name stands above it"
    whole = (
        "rows => rows.every(r => r.querySelector('bdi').offsetWidth <= r.clientWidth)"
    )
    assert page.raw.locator(f"{BOX} .jv-row .jv-leaf").evaluate_all(whole), (
        "leaves are whole at 1280 px"
    )
    assert shown(page) == int(page.run("print(len(mapping.rows))"))
    page.fill(f"{BOX} .jv-search", "LAYERS.1 q_proj")
    assert (
        shown(page)
        == int(page.run("print(len(mapping.search('LAYERS.1 q_proj')))"))
        == 1
    )
    page.click(f"{BOX} .jv-row")
    page.wait(f"{BOX} .jv-detail", text="model.layers.1.q_proj.weight")
    assert page.count(f"{BOX} .jv-detail svg") == 2, "the axes, and both shardings"
    assert page.wait(f"{BOX} .jv-rule-text").input_value() == page.run(
        "print(mapping.search('layers.1 q_proj')[0].rule)"
    )
    page.fill(f"{BOX} .jv-search", "")
    page.raw.locator(f"{BOX} .jv-by-status").select_option(label="cast")
    assert shown(page) == int(page.run("print(len(mapping.search(status='cast')))"))
    page.raw.locator(f"{BOX} .jv-by-status").select_option("")
    page.raw.locator(f"{BOX} .jv-by-rank").select_option(label="rank 1")
    assert shown(page) == int(page.run("print(len(mapping.search(rank=1)))"))
    page.raw.locator(f"{BOX} .jv-by-rank").select_option("")
    page.click(f"{BOX} .jv-table-head .jv-bytes")
    page.click(f"{BOX} .jv-table-head .jv-bytes")
    first = page.raw.locator(f"{BOX} .jv-row .jv-tensor").first.inner_text()
    assert first == page.run(
        "print(mapping.search(sort='-bytes')[0].tensor)"
    ) or first in page.run(
        "m = max(r.nbytes for r in mapping.rows); print([r.tensor for r in mapping.rows if r.nbytes == m])"
    )


def test_what_is_done_before_all_rows_came_stays(page: LabPage) -> None:
    """A busy machine paints the first rows, and all of them seconds later: typing and pressing between is not lost."""
    page.open([SETUP, "mapping = small_mapping(2); panel = mapping.panel()"])
    page.script(
        "() => { const soon = window.requestAnimationFrame.bind(window);"
        "        window.jvHeld = [];"
        "        const all = (f) => window.jvHeld && String(f).includes('setTimeout(callback');"
        "        window.requestAnimationFrame = (f) => all(f) ? (window.jvHeld.push(f), 0) : soon(f); }"
    )
    release = (
        "() => { const held = window.jvHeld; window.jvHeld = null;"
        "        for (const f of held) f(performance.now()); }"
    )
    page.run_all()
    page.fill(f"{BOX} .jv-search", "layers.1 q_proj")
    assert page.script("window.jvHeld.length > 0"), "of table.js: afterPaint()"
    assert "readyCount" not in page.data(BOX)
    row = page.wait(f"{BOX} .jv-row")
    row.hover()
    page.raw.mouse.down()
    page.script(release)
    page.until(f"document.querySelector('{BOX}').dataset.readyCount === '1'")
    page.raw.mouse.up()
    assert page.wait(f"{BOX} .jv-search").input_value() == "layers.1 q_proj"
    assert shown(page) == 1
    page.wait(f"{BOX} .jv-detail", text="model.layers.1.q_proj.weight")


def test_a_rule_is_edited_saved_and_undone(page: LabPage) -> None:
    page.open([SETUP, "mapping = small_mapping(2); panel = mapping.panel()"]).run_all()
    page.run("way = mapping.select('layers.1.q')")
    page.wait(f"{BOX} .jv-detail", text="model.layers.1.q_proj.weight")
    rule = page.wait(f"{BOX} .jv-rule-text")
    rule.fill("layers.{i}.q -> model.layers.{i}.q_proj.weight : d n h -> d (n h)")
    page.click(f"{BOX} .jv-apply")
    page.wait(f"{BOX} .jv-line[data-state=problems]", text="problem")
    page.wait(f"{BOX} .jv-row.jv-selected", text="layers.1.q")
    twin = page.run(
        "print(mapping.edit('layers.{i}.q -> model.layers.{i}.q_proj.weight : d n h -> d (n h)').line)"
    )
    assert page.text(f"{BOX} .jv-line") == f"edited: {twin}"
    assert "problem" in twin
    page.fill(
        f"{BOX} .jv-rule-text",
        "layers.{i}.q -> model.layers.{i}.q_proj.weight : d n h -> (n h d",
    )
    page.click(f"{BOX} .jv-apply")
    page.wait(f"{BOX} .jv-note[data-bad=true]", text="RuleError")
    page.fill(
        f"{BOX} .jv-rule-text",
        "layers.{i}.q -> model.layers.{i}.q_proj.weight : d a h -> (a h) d",
    )
    page.click(f"{BOX} .jv-apply")
    page.wait(
        f"{BOX} .jv-line[data-state=edited]", text="complete; values not compared"
    )
    page.wait(f"{BOX} .jv-row.jv-selected", text="layers.1.q")
    assert page.wait(f"{BOX} .jv-rule-text").input_value().endswith("d a h -> (a h) d")
    page.wait(f"{BOX} .jv-detail", text="model.layers.1.q_proj.weight")
    page.fill(f"{BOX} .jv-path", "mine.txt")
    page.click(f"{BOX} .jv-save")
    page.wait(f"{BOX} .jv-note", text="mine.txt")
    saved = Path(page.server.notebooks / "mine.txt").read_text()
    assert "d a h -> (a h) d" in saved
    assert (
        page.run(
            "import jvlab as jv; print(len(jv.Rules.load('mine.txt')) == len(mapping.rules))"
        )
        == "True"
    )
    page.click(f"{BOX} .jv-undo")
    page.wait(f"{BOX} .jv-note", text="edits discarded")
    assert page.run("print(panel.coverage)") == "None"


def test_values_of_both_sides(page: LabPage) -> None:
    cells = [
        SETUP,
        "mapping, link, params = with_link(shift=0.5)",
        "panel = mapping.panel(params)",
    ]
    page.open(cells).run_all()
    page.run("row = panel.select('layers.0.o')")
    page.click(f"{BOX} .jv-compare")
    page.wait(f"{BOX} .jv-values", text="of the values differ")
    assert page.count(f"{BOX} .jv-values svg") == 6, (
        "two ranks: engine, trainer, difference"
    )
    page.run("panel.params = None; link.remembered.take(params)")
    page.click(f"{BOX} .jv-compare")
    # what it was connected with is gone: it asks in place
    page.run("link.remembered.take({})")
    page.click(f"{BOX} .jv-compare")
    page.wait(f"{BOX} .jv-note[data-bad=true]", text="link.mapping.panel(policy)")
    page.fill(f"{BOX} .jv-params", "params")
    page.click(f"{BOX} .jv-take")
    page.until(f"document.querySelector('{BOX} .jv-ask').style.display === 'none'")


@pytest.mark.soak
def test_fifty_thousand_rows(page: LabPage, record_property) -> None:
    page.open([SETUP, "mapping = many_rows(50_000)", "mapping"]).run_all()
    page.until(f"Number(document.querySelector('{BOX}')?.dataset.readyCount) >= 1")
    assert page.data(BOX)["rows"] == "50000"
    assert page.count(f"{BOX} .jv-row") < 60, "only the rows in sight are in the page"
    search = page.wait(f"{BOX} .jv-search")
    text = "experts.77 gate_proj"
    spent = []
    for n, letter in enumerate(text, 1):
        search.press_sequentially(letter)
        page.until(
            f"Number(document.querySelector('{BOX}').dataset.filterCount) >= {n}"
        )
        spent.append(float(page.data(BOX)["filterMs"]))
    found = page.data(BOX)
    assert (
        int(found["shown"])
        == int(page.run(f"print(len(mapping.search({text!r})))"))
        > 0
    )
    page.script(
        f"() => {{ document.querySelector('{BOX} .jv-table-body').scrollTop = 1e6; }}"
    )
    first, worst = float(found["paintMs"]), max(spent)
    usual = sorted(spent)[len(spent) // 2]
    print(
        f"\n50,000 rows: first paint {first:.0f} ms (all of them in {found['readyMs']}); ",
        end="",
    )
    print(f"a keystroke {usual:.0f} ms, at most {worst:.0f} ms")
    record_property("first_paint_ms", first)
    record_property("keystroke_max_ms", worst)
    # The target is 200 ms on an idle machine; a busy one takes longer, and what is not windowed takes minutes.
    assert first < 5000, found
    assert usual < 5000, spent
