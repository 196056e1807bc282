"""The lab's panel in a real JupyterLab over a real engine: every button does what its method does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.engine_cells import attach, shots
from tests.browser.lab_page import LabPage

pytestmark = pytest.mark.engine
PANEL = ".jv-lab-panel"
POOL = f"{PANEL} .jv-pool-steered"  # other tests may have pools in the same lab
REPLICA = "pool.status()['replicas'][0]"


def test_the_panel_shows_and_steers_a_real_engine(
    page: LabPage, lab: Any, steered: Any
):
    page.open([attach(lab), "lab"]).run_all()
    page.wait(f"{POOL} .jv-pool", text="steered/0")
    text = page.text(f"{POOL} .jv-pool")
    pid = page.run(f"print({REPLICA}['pid'])")
    assert pid in text
    assert "EngineCore" in text, "the worker below the replica"
    assert f"pid {lab._gateway.pid}" in page.text(f"{PANEL} .jv-gateway")
    rows = page.run(
        "for r in lab.processes():\n    if r.pool in ('', 'steered'): print(r.kind, (r.memory or 0) > 1e7, r.state)"
    ).splitlines()
    found = [row.split()[:2] for row in rows]
    assert found[:2] == [["gateway", "True"], ["replica", "True"]]
    assert found[2:], "vLLM's own processes"
    assert all(row == ["worker", "True"] for row in found[2:])

    page.click(f"{POOL} .jv-pause")
    page.wait(f"{POOL} .jv-pool", text="paused")
    assert page.run(f"print({REPLICA}['paused'])") == "True"
    page.until(f"document.querySelector('{POOL} .jv-pause').disabled")
    page.click(f"{POOL} .jv-resume")
    page.until(
        f"!document.querySelector('{POOL} .jv-pool').innerText.includes('paused')"
    )
    assert page.run(f"print({REPLICA}['paused'])") == "False"

    asleep = page.wait(f"{POOL} .jv-sleep")
    assert asleep.is_disabled()
    assert "cannot sleep" in str(asleep.get_attribute("title")), "it says why"
    refused = page.run(
        "try:\n    pool.sleep()\nexcept jv.errors.Unsupported as error:\n    print('refused')"
    )
    assert refused == "refused", "the method says the same"

    page.click(f"{POOL} .jv-log")
    page.wait(f"{POOL} .jv-log-text pre")
    assert page.text(f"{POOL} .jv-log-text pre").strip().splitlines()[-1] in page.run(
        "print(pool.logs(0, 60))"
    )
    page.run(
        "batch = pool.generate([[5, 6, 7]] * 16, max_tokens=60, temperature=1.0, ignore_eos=True)"
    )
    page.wait(f"{POOL} .jv-pool polyline")
    shots(page, "lab", PANEL)

    page.run("jvlab.views.panels._live.ARMED_SECONDS = 3.0")
    page.click(f"{POOL} .jv-close-pool")
    page.wait(f"{POOL} .jv-close-pool", text="really close pool?")
    page.until(
        f"document.querySelector('{POOL} .jv-close-pool').innerText === 'close pool'"
    )
    assert page.run("print(pool.status()['state'])") == "ready", (
        "one click closes nothing"
    )

    page.run("lab._leave()")
    page.until(f"!document.querySelector('{PANEL}')")
    assert "steered/0" in page.text(".jp-OutputArea-output table"), (
        "what stays is a table"
    )
    assert steered.status()["state"] == "ready", "and the lab is still there for others"
