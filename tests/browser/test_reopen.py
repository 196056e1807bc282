"""A notebook that is saved and opened again shows static views and no error, whatever became of its kernel."""

from __future__ import annotations

import pytest

from tests.browser.lab_page import LabPage

CELLS = [
    "from tests.views.mapping_world import *\nmapping = small_mapping(2); plan = mapping.plan",
    "mapping",  # live
    "plan",  # live
    "mapping.explain('layers.1.q')",  # static
    """
from jvlab.record._record import Record
from jvlab.views._timeline import Timeline
from tests.record.synthetic import made_up
timeline = Timeline(Record.of(made_up(30)))
timeline
""",
]
WIDGET = "application/vnd.jupyter.widget-view+json"
CLOSE = "from jvlab.views.panels import _live\n_live._make_all_static()"


def saved_mimes(page: LabPage) -> list[set[str]]:
    cells = page.saved()["cells"]
    return [{m for o in c["outputs"] for m in o.get("data", {})} for c in cells]


@pytest.mark.parametrize(
    "ending", ["closed", pytest.param("kernel shut down", marks=pytest.mark.soak)]
)
def test_saved_and_opened_again(page: LabPage, ending: str) -> None:
    page.open(CELLS).run_all()
    for panel in (
        ".jv-inspector .jv-row",
        ".jv-plan .jv-lanes canvas",
        ".jv-timeline .jv-lanes canvas",
    ):
        page.wait(panel)
    if ending == "closed":
        page.run(CLOSE)
    else:
        page.shut_kernel()
    page.until(
        "document.querySelectorAll('.jv-inspector, .jv-plan, .jv-timeline').length === 0"
    )
    page.save()
    assert not any(WIDGET in mimes for mimes in saved_mimes(page)), (
        "a widget whose model is gone was saved"
    )
    page.server.end_kernels()
    page.open()  # the same notebook, with a fresh kernel that has run nothing
    area = page.wait(".jp-Notebook").inner_text()
    assert "Error" not in area, area
    assert "model not found" not in area
    page.wait(".jp-OutputArea-output table", text="model.layers.1.q_proj.weight")
    page.wait(".jp-OutputArea-output svg[aria-label='bytes per link']")
    page.wait(".jp-OutputArea-output svg[aria-label*='who was busy when']")


def test_a_panel_that_is_still_open_comes_back_to_life(page: LabPage) -> None:
    """The kernel lives on: the page is reloaded, and the same panels are there, live."""
    page.open(CELLS[:2]).run_all()
    page.wait(".jv-inspector .jv-row")
    page.save()
    page.open()
    page.wait(".jv-inspector .jv-row")
    page.fill(".jv-inspector .jv-search", "layers.1 q_proj")
    # before that, the first row is another tensor's
    page.until("document.querySelector('.jv-inspector').dataset.shown === '1'")
    page.click(".jv-inspector .jv-row")
    page.wait(".jv-inspector .jv-detail", text="model.layers.1.q_proj.weight")


@pytest.mark.soak
def test_fifty_panels_in_a_real_kernel(page: LabPage) -> None:
    """Threads and comms as the kernel itself counts them, and the widgets that the page holds."""
    count = (
        "import threading\nfrom IPython import get_ipython\n"
        "def count():\n    return len(get_ipython().kernel.comm_manager.comms), "
        "[t.name for t in threading.enumerate() if t.name.startswith('jvlab-')]"
    )
    fifty = (
        "from IPython.display import clear_output\n"
        "for _ in range(50):\n    for shown in (mapping, plan):\n        shown.panel().close()\n    clear_output()"
    )
    # the kernel's test before left no panel, but the thread of its panels may be about to end
    settle = (
        "import time\nend = time.monotonic() + 60\n"
        "while {} and time.monotonic() < end: time.sleep(0.1)"
    )
    before = f"{settle.format('count()[1]')}\nbefore = count()"
    page.open([CELLS[0], count, before, fifty]).run_all()
    after = settle.format("count() != before")
    assert page.run(f"{after}\nprint(count() == before, before[1])") == "True []"
    assert page.count(".jv-inspector, .jv-plan") == 0
    # jupyterlab-manager hands a late layout message to a view that was closed in the frame it was made in; nobody's
    # hand is that quick, and nothing is left behind (counted above).
    page.errors[:] = [e for e in page.errors if "processLuminoMessage" not in e]
