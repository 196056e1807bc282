"""Panels stay true in a real JupyterLab: kernel killed or restarted, saved and opened again, gateway killed."""

from __future__ import annotations

import os
import re
import signal
import time

from tests.browser.engine_cells import shots
from tests.browser.lab_page import CONTEXT, LabPage
from tests.views.panels.test_panels_in_a_kernel import RUN, STEPPER

WIDGET = "application/vnd.jupyter.widget-view+json"
GREEN = "rgb(0, 158, 115)"
BAR = """
import os, tempfile
from jvlab._progress import Progress
with Progress(4, "four", unit="step", show=True) as bar:
    bar.advance(3, "3 of them")
"""
WORDS = r"snapshot of \d\d:\d\d, step (\d+); kernel gone: jv\.Lab\.attach\(\)"


def green_dots(page: LabPage) -> int:
    """Dots that claim that something is alive, in what can be seen; a stepper's list tells what was sent."""
    return page.script(
        f"""() => [...document.querySelectorAll('.jp-OutputArea span')].filter(e => e.textContent === '●'
            && e.offsetParent && !e.closest('.jv-tensors') && getComputedStyle(e).color === '{GREEN}').length"""
    )


def saved_html(page: LabPage, cell: int) -> str:
    data = [o["data"] for o in page.outputs()[cell] if "data" in o]
    assert all(WIDGET not in d for d in data), (
        "a widget that a saved notebook would lose"
    )
    return "".join("".join(d.get("text/html", "")) for d in data)


def saved_step(page: LabPage) -> int:
    """The step of the run's snapshot, once one was made: it is renewed while the run lives."""
    deadline = time.monotonic() + 90
    while "kernel gone" not in saved_html(page, 2):
        assert time.monotonic() < deadline, "no snapshot in 90 s"
        page.raw.wait_for_timeout(200)
    return steps_said(re.sub("<[^>]*>", "", saved_html(page, 2)))


def steps_said(text: str) -> int:
    found = re.search(WORDS, text)
    assert found, text
    return int(found[1])


def opened_again(page: LabPage, step: int) -> None:
    """Save, open in a page that knows nothing: the same words, no error, nothing green, no orphan."""
    page.save()
    page.server.end_kernels()
    page.open(kernel=False)
    page.wait(".jp-OutputArea-output", text="kernel gone")
    text = page.wait(".jp-Notebook").inner_text()
    assert steps_said(text) >= step
    for wrong in ("model not found", "Error displaying widget", "Loading widget"):
        assert wrong not in text, text
    assert "3 of 4 steps" in text, "the progress bar's last state"
    assert green_dots(page) == 0
    assert page.count(".jv-live") == 0
    # JupyterLab has started a new one; ended while it starts, the next test would hear of it
    page.wait_kernel()


def test_a_killed_kernel_is_noticed_and_what_is_saved_is_the_last_snapshot(
    page: LabPage,
) -> None:
    page.open([BAR, STEPPER, RUN]).run_all()
    pid = int(page.run("print(os.getpid())"))
    page.wait(".jv-live .jv-stepper .jv-tensor")
    page.wait(".jv-live .jv-run-panel .jv-head", text="running")
    assert page.count("text=model not found") == 0
    assert green_dots(page) > 0
    page.until(
        "Number(document.querySelector('.jv-run-panel .jv-curves')?.dataset.rows) >= 3"
    )
    first = saved_step(page)
    assert first >= 3, "not step 0"
    page.until("!document.querySelector('.jv-gone')")

    os.kill(pid, signal.SIGKILL)
    page.wait(".jv-live.jv-gone .jv-notice", text="kernel gone")
    page.until("document.querySelectorAll('.jv-live.jv-gone').length === 2")
    # the notice's step came with the last beat, the saved one with the last snapshot: each every few seconds
    assert steps_said(page.text(".jv-live.jv-gone:has(.jv-run-panel) .jv-notice")) >= 3
    assert green_dots(page) == 0, "nothing claims to be alive"
    assert page.script(
        "[...document.querySelectorAll('.jv-live button')].every(b => b.disabled)"
    )
    shots(page, "kernel-gone", ".jv-live:has(.jv-run-panel)")
    opened_again(page, first)


def test_a_restart_and_a_killed_gateway(page: LabPage) -> None:
    start = "import jvlab as jv\nlab = jv.Lab(lease=20)\nlab"
    page.open([BAR, start, RUN]).run_all()
    page.wait(".jv-lab-panel .jv-gateway", text="gateway serving")
    assert green_dots(page) > 0
    page.run("import os, signal; os.kill(lab._gateway.pid, signal.SIGKILL)")
    page.wait(".jv-live.jv-gone:has(.jv-lab-panel) .jv-notice", text="gateway gone")
    assert "gateway gone" in page.text(".jv-lab-panel .jv-gateway")
    assert page.count(".jv-lab-panel [data-jv=state][style*='009E73']") == 0, (
        "no green dot for a gateway that is gone"
    )
    close = page.wait(".jv-close-lab")
    assert close.is_disabled()
    assert close.get_attribute("title") == "not now: gateway gone"
    shots(page, "gateway-gone", ".jv-live:has(.jv-lab-panel)")

    page.until(
        "Number(document.querySelector('.jv-run-panel .jv-curves')?.dataset.rows) >= 3"
    )
    assert saved_step(page) >= 3
    page.script(f"() => {{ {CONTEXT}.sessionContext.session.kernel.restart(); }}")
    page.until("!document.querySelector('.jv-live:not(.jv-gone)')")
    page.until(
        "document.querySelector('.jp-Notebook').innerText.includes('kernel gone')"
    )
    assert green_dots(page) == 0
    opened_again(page, 3)
    # the page drops the comms of a kernel that it restarts, and logs the farewell that each of them still sends
    page.errors[:] = [e for e in page.errors if "Comm not found for comm id" not in e]
