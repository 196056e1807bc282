"""What a saved notebook holds of a panel: HTML only in JupyterLab, renewed while it lives, dated, and never green."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from jvlab._states import TABLE, state, worst
from jvlab.views._palette import TONES
from jvlab.views._style import dot
from jvlab.views._sync_view import StepperPanel
from jvlab.views.panels import _live
from jvlab.views.panels._live import WIDGET, Panel
from tests.views.panels.fake_stepper import stepper
from tests.views.panels.test_panel_leaks import Output

GREEN = dot(TONES["good"])


class Subject:
    """Something that lives, and says so."""

    steps = 0

    def __repr__(self) -> str:
        return f"Subject({self.steps})"

    def _repr_html_(self) -> str:
        return f"<b>{GREEN} step {self.steps}</b>"


class SubjectPanel(Panel):
    hz = 0.01  # tests renew it themselves
    remedy = "jv.Lab.attach()"

    def refresh(self) -> None:
        """Nothing."""

    @property
    def progress(self) -> str:
        return f"step {self.subject.steps}"


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Iterator[Output]:
    import IPython.display

    made = Output()
    monkeypatch.setattr(_live, "in_kernel", lambda: True)
    monkeypatch.setattr(_live, "SNAPSHOT_SECONDS", 3600.0)
    monkeypatch.setattr(IPython.display, "display", made.display)
    yield made
    _live._make_all_static()
    _live._ending = False


def shown(subject: Any) -> SubjectPanel:
    panel = _live.show(subject, lambda: SubjectPanel(subject))
    assert isinstance(panel, SubjectPanel)
    return panel


def test_in_jupyterlab_the_output_is_the_last_snapshot(
    output: Output, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JPY_SESSION_NAME", "some/notebook.ipynb")
    subject = Subject()
    panel = shown(subject)
    first = output.bundles[0]
    assert set(first) == {"text/plain", "text/html"}, "no widget, from the first moment"
    assert f'data-jv-panel="{panel.widget.panel_id}"' in first["text/html"]
    assert "snapshot" not in first["text/html"], "it is of this moment"
    panel._heard(None, {"mounted": True}, None)
    words = r"snapshot of \d\d:\d\d, step 0; kernel gone: <code[^>]*>jv\.Lab\.attach\(\)</code>"
    assert re.search(words, output.bundles[-1]["text/html"]), (
        "what a reader sees if nothing draws the panel"
    )
    assert GREEN not in output.bundles[-1]["text/html"]
    before = len(output.bundles)
    panel.save_snapshot()
    assert len(output.bundles) == before, "nothing changed, nothing is sent"
    subject.steps = 32
    panel.save_snapshot()
    assert "step 32</b>" in output.bundles[-1]["text/html"]
    assert output.bundles[-1]["text/plain"] == "Subject(32)"
    panel.beat()
    assert re.fullmatch(
        r"snapshot of \d\d:\d\d, step 32; kernel gone: `jv.Lab.attach\(\)`",
        panel.widget.beat["line"],
    )
    panel.lose("gateway gone", "lab = jv.Lab()")
    panel.save_snapshot()
    assert "gateway gone" in output.bundles[-1]["text/html"]
    assert "kernel gone" not in output.bundles[-1]["text/html"]
    panel.found()
    _live._make_all_static()  # the kernel ends
    assert "kernel gone" in output.bundles[-1]["text/html"]
    assert GREEN not in output.bundles[-1]["text/html"]


def test_elsewhere_the_widget_is_shown_and_goes_when_it_closes(
    output: Output, monkeypatch: pytest.MonkeyPatch
):
    # as VS Code names it
    monkeypatch.setenv("JPY_SESSION_NAME", "book-jvsc-1234.ipynb")
    panel = shown(Subject())
    assert WIDGET in output.bundles[0]
    # a JupyterLab that the environment does not name says so itself
    panel._heard(None, {"hosted": True}, None)
    assert WIDGET not in output.bundles[-1]
    panel.close()
    assert set(output.bundles[-1]) == {"text/plain", "text/html"}
    assert GREEN in output.bundles[-1]["text/html"], (
        "closed by its owner: its own words, of this moment"
    )


def test_a_steppers_snapshot_says_how_far_it_is(
    output: Output, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JPY_SESSION_NAME", "notebook.ipynb")
    walked = stepper(per_bucket=3)
    panel = _live.show(walked, lambda: StepperPanel(walked))
    assert panel is not None
    walked.step()
    panel._heard(None, {"mounted": True}, None)
    assert (
        "1 of 3 buckets, 3 of 7 tensors; kernel gone" in output.bundles[-1]["text/html"]
    )


def test_the_table_of_states():
    assert len({s.name for s in TABLE}) == len(TABLE)
    assert {s.tone for s in TABLE} == set(TONES)
    for bad in ("paused", "dirty", "stale", "lost", "failed", "gone", "something new"):
        assert worst(["ready", bad, "ready"]).name == bad
    assert worst(["paused", "stale", "dirty", "lost"]).name == "lost"
    assert worst(["paused", "stale", "dirty"]).name == "dirty"
    assert worst([]).name == "ready"
    assert state("something new").tone == "wait"
