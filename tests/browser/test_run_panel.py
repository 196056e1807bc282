"""The run's dashboard in a real JupyterLab: it moves while a real engine and trainer work, and it steers them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.browser.engine_cells import CONNECT, attach, shots
from tests.browser.lab_page import LabPage

pytestmark = pytest.mark.engine
PANEL = ".jv-run-panel"
RUN = """
from jvlab.trainer._task_library import digits
run = jv.grpo(policy, pool, link, digits(), steps=500, group_size=4, prompts_per_step=4, learning_rate=1e-3,
              micro_batch=16, checkpoint_every=0, progress=False, folder="run")
panel = run.panel()
"""


def rows(page: LabPage) -> int:
    return int(page.data(f"{PANEL} .jv-curves").get("rows", 0))


def more_than(page: LabPage, count: int, seconds: float = 240.0) -> None:
    page.until(
        f"Number(document.querySelector('{PANEL} .jv-curves')?.dataset.rows) > {count}",
        seconds,
    )


def test_it_moves_while_a_run_trains_and_steers_it(
    page: LabPage, lab: Any, steered: Any
):
    page.open([attach(lab), CONNECT, RUN]).run_all()
    more_than(page, 1)
    first = rows(page)
    paints = int(page.data(f"{PANEL} .jv-curves")["paints"])
    more_than(page, first + 1)
    assert int(page.data(f"{PANEL} .jv-curves")["paints"]) > paints
    assert page.data(f"{PANEL} .jv-curves")["alarms"] == "0"

    page.click(f"{PANEL} .jv-pause")
    page.wait(f"{PANEL} .jv-head", text="paused")
    stood, paused = int(page.run("print(run.status.step)")), time.monotonic()
    for wrong in ("-3", "1e-3"):
        page.fill(f"{PANEL} .jv-bound input", wrong)
        page.raw.keyboard.press("Enter")
        page.wait(
            f"{PANEL} .jv-bound .jv-wrong", text="a whole number, 0 or more; it stays 0"
        )
    assert page.run("print(run.max_staleness)") == "0", "refused in place, not changed"
    page.until(
        f"document.querySelectorAll('{PANEL} .jv-extremes [data-jv=sample]').length > 0"
    )
    reward = page.run("print(f'reward {run.status.best.reward:.3f}')")
    assert reward in page.text(f"{PANEL} .jv-extremes")
    page.raw.wait_for_timeout(max(0.0, 4000 - 1000 * (time.monotonic() - paused)))
    state, step = page.run("print(run.status.state, run.status.step)").split()
    assert (state, int(step) - stood) in (("paused", 0), ("paused", 1)), (
        "at most the step under way ends"
    )

    page.fill(f"{PANEL} .jv-bound input", "2")
    page.raw.keyboard.press("Tab")
    page.click(f"{PANEL} .jv-set")
    page.wait(f"{PANEL} .jv-message", text="max_staleness = 2: done")
    assert page.run("print(run.max_staleness)") == "2"
    page.click(f"{PANEL} .jv-resume")
    more_than(page, int(step) + 6)
    ages = page.data(f"{PANEL} .jv-curves")["ages"]
    assert set(ages.split(",")) <= {"0", "1", "2"}
    assert ages != "0", "rollouts run ahead now"
    shots(page, "run", PANEL)
    told = "print(panel.load, panel.cpu_seconds, run.record.steps()['window_s'].sum())"
    load, spent, steps = map(float, page.run(told).split())
    print(f"\na panel of a real run takes {100 * load:.2f} % of a core")
    print(f"{100 * spent / steps:.2f} % of its steps' time")
    assert 0 < spent / steps < 0.05, "the target is 1 % on an idle machine"

    page.click(f"{PANEL} .jv-stop")
    page.wait(f"{PANEL} .jv-stop", text="really stop?")
    page.click(f"{PANEL} .jv-stop")
    page.until(f"!document.querySelector('{PANEL}')", 120)
    said = page.run(
        "run.wait(200); print(run.status.state, run.record.staleness().max.max() <= 2, len(run.record.steps()['step']))"
    )
    assert said.startswith("stopped True")
    drawn = page.count(".jp-OutputArea-output polyline")
    assert drawn >= 8, "the curves stay, as a picture"
    assert page.count(".jp-OutputArea-output [data-jv=sample]") > 0, "and the samples"

    page.save()
    page.close_notebook()
    page.open(kernel=False)
    page.wait(".jp-OutputArea-output", text="stopped")
    assert page.count(".jp-OutputArea-output polyline") == drawn
    assert "Error displaying widget" not in page.raw.content()
