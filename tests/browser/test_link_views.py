"""Mapping and plan of a real link in a real JupyterLab: the engine's own numbers, and what a sync took."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.engine_cells import CONNECT, attach, shots
from tests.browser.lab_page import LabPage

pytestmark = pytest.mark.engine
BOX = ".jv-inspector"


def test_the_engines_numbers_and_the_seconds_of_a_sync(
    page: LabPage, lab: Any, steered: Any
) -> None:
    page.open(
        [attach(lab), CONNECT, "panel = link.mapping.panel(policy)", "link.plan"]
    ).run_all()
    page.wait(".jv-plan-times", text="nothing measured yet")
    page.run("report = link.sync(policy.params, progress=False)")
    page.wait(
        ".jv-plan-times", text=f"version {page.run('print(report.version)')}, measured"
    )
    page.fill(f"{BOX} .jv-search", "layers.1. q_proj")
    page.click(f"{BOX} .jv-row")
    page.wait(f"{BOX} .jv-detail", text="model.layers.1.self_attn.q_proj.weight")
    page.click(f"{BOX} .jv-compare")
    page.wait(f"{BOX} .jv-values", text="equal, bit for bit")
    shots(page, "mapping", BOX)
    shots(page, "plan", ".jv-plan")
    page.run("report = link.sync(other, progress=False)")
    page.click(f"{BOX} .jv-compare")
    page.wait(f"{BOX} .jv-values", text="of the values differ")
    twin = page.run(
        "v = link.mapping.values('layers.1.attn.q.kernel', policy)[0]; print(f'{v.change_summary.max_change:.3g}')"
    )
    assert f"by at most {twin}" in page.text(f"{BOX} .jv-values")
    # a rule, changed where it stands: the link goes on by the old ones, a new link takes the new ones
    rule = page.wait(f"{BOX} .jv-rule-text").input_value()
    page.fill(
        f"{BOX} .jv-rule-text", rule.replace(" n ", " heads ").replace("(n ", "(heads ")
    )
    page.click(f"{BOX} .jv-apply")
    page.wait(
        f"{BOX} .jv-line[data-state=checked]", text="complete; meaning checked by value"
    )
    page.wait(f"{BOX} .jv-row.jv-selected", text="q_proj")
    right = page.wait(f"{BOX} .jv-rule-text").input_value()
    # transposed: square, so it covers
    page.fill(f"{BOX} .jv-rule-text", right.replace("(heads h) d", "d (heads h)"))
    page.click(f"{BOX} .jv-apply")
    page.wait(f"{BOX} .jv-line[data-state=problems]", text="complete; wrong by value")
    page.wait(f"{BOX} .jv-note[data-bad=true]", text="they are by: ")
    page.wait(f"{BOX} .jv-detail", text="wrong: ")
    page.wait(f"{BOX} .jv-row.jv-selected", text="q_proj")
    page.fill(f"{BOX} .jv-rule-text", right)
    page.click(f"{BOX} .jv-apply")
    page.wait(
        f"{BOX} .jv-line[data-state=checked]", text="complete; meaning checked by value"
    )
    cell = "link.close(); again = lab.connect(policy.params, pool, rules=panel.coverage.rules, bucket_mib=0.25)\n"
    cell += "print(again.plan == link.plan, again.sync(policy.params, progress=False).verified); again.close()"
    assert page.run(cell) == "True True"
