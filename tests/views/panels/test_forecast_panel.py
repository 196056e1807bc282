"""The sliders of `jv.whatif` without a browser: what they send does what methods do, and wrong input is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab._errors import ConfigError
from jvlab.analysis.forecast._whatif import WhatIf
from jvlab.views._forecast_view import ForecastPanel, forecast_html
from jvlab.views.panels import _live
from tests.analysis.forecast.synthetic import record, setting
from tests.views.html_checks import check
from tests.views.panels.test_panel_leaks import Output


@pytest.fixture(scope="module")
def plan() -> WhatIf:
    return jv.whatif(record(setting(4, 4, 48)), record(setting(8, 4, 64, 1)))


@pytest.fixture
def panel(plan: WhatIf) -> Any:
    made = ForecastPanel(plan)
    yield made
    made.close()


def test_it_begins_with_the_measured_setting(panel: ForecastPanel):
    widget = panel.widget
    assert widget.chosen["prompts_per_step"] == 4
    assert widget.answers == 1
    for slider in widget.sliders:
        assert widget.chosen[slider["name"]] in slider["values"], (
            "the measured value is one of its stops"
        )
        assert slider["values"] == sorted(set(slider["values"]))
    check(widget.result)


def test_a_message_of_the_sliders_is_a_call_of_predict(panel: ForecastPanel):
    values = {**panel.widget.chosen, "max_staleness": 2, "replicas": 2}
    before = panel.widget.result
    panel._moved(None, {"do": "predict", "values": values}, [])
    wait_for(panel, 2)
    assert panel.forecast == panel.plan.predict(max_staleness=2, replicas=2)
    assert panel.widget.chosen["replicas"] == 2
    assert panel.widget.result != before
    panel._moved(None, {"do": "reset"}, [])
    wait_for(panel, 3)
    assert panel.widget.result == before


def test_what_no_slider_can_ask_is_refused_in_place(panel: ForecastPanel):
    with pytest.raises(ConfigError, match="no slider for steps"):
        panel.predict(steps=3)
    panel._moved(None, {"do": "predict", "values": {"replicas": -3}}, [])
    wait_until(lambda: "replicas=-3" in panel.widget.note)
    assert panel.widget.chosen["replicas"] == 1, "nothing changed"
    for nonsense in (
        None,
        [],
        {"do": "predict"},
        {"do": "predict", "values": 3},
        {"do": "fly"},
    ):
        panel._moved(None, nonsense, [])
    assert panel.widget.answers == 1


def test_static_faces(plan: WhatIf):
    page = plan._repr_html_()
    check(page)
    assert "decoding" in page
    assert "(assumed)" not in page, "one of its records overlaps"
    table = plan.check(*plan.seen)
    check(table._repr_html_())
    lines = repr(table).splitlines()
    assert len({len(line) for line in lines[1:]}) == 1, "columns are aligned"
    assert "measured" in lines[1]
    check(table[0]._repr_html_())
    assert repr(plan).startswith("WhatIf(2 runs")


def test_the_figure(plan: WhatIf):
    figure = plan.figure()
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles[:2] == ["Step time", "Throughput"]
    marks = [line for line in figure.axes[0].lines if line.get_label() == "measured"]
    assert np.asarray(marks[0].get_ydata())[0] == pytest.approx(plan.seen[0].step_s)
    lines = [line for ax in figure.axes for line in ax.lines]
    assert not {line.get_color() for line in lines} & {"k", "black"}, (
        "a dark page would hide it"
    )


def test_its_snapshot_is_the_forecast_that_was_asked_for(
    plan: WhatIf, monkeypatch: pytest.MonkeyPatch
):
    import IPython.display

    output = Output()
    monkeypatch.setenv("JPY_SESSION_NAME", "notebook.ipynb")
    monkeypatch.setattr(_live, "in_kernel", lambda: True)
    monkeypatch.setattr(IPython.display, "display", output.display)
    panel = plan.panel()
    assert panel is not None
    try:
        assert str(panel.plan.predict().setting) in output.bundles[-1]["text/html"]
        panel._heard(None, {"mounted": True}, None)
        panel.beat()
        wanted = panel.predict(replicas=3, max_staleness=2)
        page = output.bundles[-1]["text/html"]
        assert forecast_html(wanted) in page
        assert "kernel gone" in page
        assert panel.widget.beat["line"].endswith("kernel gone: `run the cell again`")
    finally:
        panel.close()
    assert forecast_html(wanted) in output.bundles[-1]["text/html"], (
        "what was asked last stays"
    )


def wait_for(panel: ForecastPanel, answers: int) -> None:
    wait_until(lambda: panel.widget.answers >= answers)


def wait_until(condition: Any) -> None:
    from tests.waiting import until

    until(condition, "an answer")
