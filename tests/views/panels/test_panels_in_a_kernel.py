"""Lab, stepper and run displayed in a real kernel, without a browser: widget state, and what a saved notebook holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nbclient import NotebookClient

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
WIDGET = "application/vnd.jupyter.widget-view+json"
LAB = """
import tempfile
from pathlib import Path
import jvlab as jv, jvlab.lab._lab
from tests.gateway.fake_lab import FakeLab
jvlab.lab._lab.resolve_device = lambda device: "cpu"
fake = FakeLab(Path(tempfile.mkdtemp()))
lab = jv.Lab.attach(fake.address, fake.token)
pool = lab.launch(jv.models.tiny("llama"), name="p").wait(60)
lab
"""
STEPPER = """
from tests.views.panels.fake_stepper import stepper
walked = stepper(breakpoints=("lm_head",))
walked.step()
walked
"""
RUN = """
from jvlab.trainer._grpo import grpo
from tests.trainer.fake_pool import fresh_params, logprobs_fn, task, world
pool_, link = world()
run = grpo((fresh_params(), logprobs_fn), pool_, link, task(), folder=tempfile.mkdtemp() + "/run", steps=100_000,
           group_size=4, prompts_per_step=3, checkpoint_every=0, learning_rate=0.05, progress=False)
import time
while run.status.step < 3:  # nbclient hears only what a running cell's own thread says
    time.sleep(0.01)
run
"""
END = """
run.stop().wait(60); walked.abort(); lab._leave(); fake.end()
from jvlab.views.panels import _live
deadline = time.monotonic() + 60  # the publisher turns panels of what is over into tables
while _live._publisher._panels and time.monotonic() < deadline:
    time.sleep(0.05)
time.sleep(0.5)  # and says so from its own thread
"""


def client_of(cells: list[str]) -> NotebookClient:
    import nbformat  # takes seconds
    from nbclient import NotebookClient

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    return NotebookClient(
        book,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT)}},
    )


def shown(book: Any, cell: int) -> list[dict[str, Any]]:
    return [
        o["data"]
        for o in book.cells[cell].outputs
        if o["output_type"] in ("display_data", "execute_result")
    ]


@pytest.mark.filterwarnings("ignore")  # of nbclient and its event loop
def test_widgets_while_it_lives_and_tables_afterwards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    client = client_of([LAB, STEPPER, RUN, END])
    book = client.nb
    with client.setup_kernel():
        for index in range(3):
            client.execute_cell(book.cells[index], index)
        client.set_widgets_metadata()
        _while_it_lives(book)
        client.execute_cell(book.cells[3], 3)
    for cell, words in ((0, "Lab"), (1, "aborted"), (2, "stopped")):
        data = shown(book, cell)[-1]
        assert WIDGET not in data, "a saved notebook holds a table"
        assert words in data["text/html"]
        assert words in data["text/plain"]


def _while_it_lives(book: Any) -> None:
    state = book.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    models = [m["state"] for m in state.values()]
    lists = [m for m in models if "ticks" in m]
    assert [(m["position"], len(m["names"]), m["breaks"]) for m in lists] == [
        (1, 7, [6])
    ]
    curves = [m for m in models if "columns" in m]
    assert len(curves) == 1
    assert curves[0]["facts"]["histogram"][0][0] == 0
    assert curves[0]["facts"]["alarm"] == 1e-3
    parts = [part for m in models for part in m.get("parts", {}).values()]
    classes = {c for m in models for c in m.get("classes", [])} | {
        part["class"] for part in parts
    }
    assert {
        "jv-lab-panel",
        "jv-stepper",
        "jv-run-panel",
        "jv-close-lab",
        "jv-step",
        "jv-set",
    } <= classes
    pools = [part["value"] for part in parts if part["class"] == "jv-pool"]
    assert any("p/0" in text for text in pools)
