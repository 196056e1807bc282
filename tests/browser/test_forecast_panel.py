"""The sliders of `jv.whatif` in a real JupyterLab: moving one asks the kernel, which answers with a forecast."""

from __future__ import annotations

from tests.browser.lab_page import LabPage

CELL = """
import jvlab as jv
from tests.analysis.forecast.synthetic import record, setting
plan = jv.whatif(record(setting(4, 4, 48)), record(setting(8, 4, 64, 1)))
panel = plan.panel()
"""


def test_a_slider_asks_and_the_kernel_answers(page: LabPage) -> None:
    page.open([CELL]).run_all()
    page.wait(".jv-forecast-result", text="s a step")
    assert page.cut(".jv-forecast") == []
    before = page.text(".jv-forecast-result")
    slider = page.raw.locator(".jv-forecast .jv-max_staleness")
    slider.focus()
    slider.press("ArrowRight")
    page.until("Number(document.querySelector('.jv-forecast').dataset.answers) >= 2")
    assert page.text(".jv-forecast-result") != before
    assert page.run(
        "print(panel.forecast.setting.max_staleness, panel.forecast == plan.predict(max_staleness=1))"
    ) == ("1 True")
    page.click(".jv-forecast .jv-reset")
    page.until("Number(document.querySelector('.jv-forecast').dataset.answers) >= 3")
    assert page.text(".jv-forecast-result") == before
