"""The plan's and the timeline's panels in a real JupyterLab: clicks, fields and the wheel do what methods do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tests.browser.lab_page import VIEWPORT, LabPage

PLAN = """
from tests.views.mapping_world import *
from tests.views.sync_reports import report
plan = small_mapping(2).plan
panel = plan.panel()
"""
TIMELINE = """
from jvlab.record._record import Record
from jvlab.views._timeline import Timeline
from tests.record.synthetic import made_up
timeline = Timeline(Record.of(made_up(30, staleness=1)))
panel = timeline.panel()
"""


def gesture(page: LabPage, act: Callable[[], None], shows: str) -> None:
    """A gesture and what it shows. One that the page moved away under is made again."""
    for seconds in (5, 10, 20):
        act()
        with contextlib.suppress(AssertionError):
            page.until(shows, seconds)
            return
    act()
    page.until(shows)


def test_the_plan(page: LabPage) -> None:
    page.open([PLAN]).run_all()
    page.wait(".jv-plan .jv-plan-heat rect[data-link]")
    links = int(page.run("print(len(plan.all_links))"))
    assert page.count(".jv-plan .jv-plan-heat rect[data-link]") == links
    page.click('.jv-plan rect[data-link="3"]')
    page.wait(".jv-plan-detail", text="heaviest leaves")
    twin = page.run(
        "t = plan.all_links; k = plan.link(int(t.device[3]), int(t.rank[3])); print(f'{len(k):,} boxes')"
    )
    assert twin in page.text(".jv-plan-detail")
    page.wait(".jv-plan-times", text="nothing measured yet")
    page.run("plan._reports.append(report(version=7, move=0.25))")
    page.wait(".jv-plan-times", text="version 7, measured")
    page.fill(".jv-plan .jv-speed", "5")
    page.raw.locator(".jv-plan .jv-speed").press("Enter")
    page.wait(".jv-plan-times", text="at 5 GB/s")
    assert (
        page.run(
            "print(panel.widget.gbps, panel.widget.lanes['window'][1] >= plan.predict(5))"
        )
        == "5.0 True"
    )
    page.until(
        "Number(document.querySelector('.jv-plan .jv-lanes').dataset.paints) > 0"
    )
    assert int(page.data(".jv-plan .jv-lanes")["bars"]) == int(
        page.run("print(len(plan.schedule()))")
    )


def test_the_timeline(page: LabPage) -> None:
    page.open([TIMELINE]).run_all()
    assert page.cut(".jv-timeline") == []
    lanes = ".jv-timeline .jv-lanes"
    page.until(f"Number(document.querySelector('{lanes}')?.dataset.paints) > 0")
    shown = page.data(lanes)
    low, high = (float(x) for x in page.run("print(*timeline.window)").split())
    assert abs(float(shown["low"]) - low) < 1e-6
    page.raw.set_viewport_size({"width": 700, "height": 900})
    page.until(f"document.querySelector('{lanes} canvas').clientWidth < 400")
    page.until(f"Number(document.querySelector('{lanes}').dataset.ticks) >= 2")
    page.raw.set_viewport_size(VIEWPORT)
    page.until(f"document.querySelector('{lanes} canvas').clientWidth > 600")
    assert int(shown["bars"]) == int(
        page.run("print(len(timeline.data(whole=True).bars))")
    )

    def spot(part: float) -> tuple[float, float]:
        """So far along the first lane, where that is now: a page that still grows moves it."""
        box = page.wait(f"{lanes} canvas").bounding_box()
        return box["x"] + 92 + part * (box["width"] - 100), box["y"] + 13

    def turn_the_wheel() -> None:
        page.raw.mouse.click(*spot(0.5))  # gives the wheel to the lanes
        page.raw.mouse.wheel(0, -300)

    gesture(
        page,
        turn_the_wheel,
        f"Number(document.querySelector('{lanes}').dataset.high) < {high - 0.5}",
    )
    zoomed = page.data(lanes)

    def drag() -> None:
        x, y = spot(0.5)
        page.raw.mouse.move(x, y)
        page.raw.mouse.down()
        page.raw.mouse.move(x + 120, y, steps=4)
        page.raw.mouse.up()

    gesture(
        page,
        drag,
        f"Number(document.querySelector('{lanes}').dataset.low) < {float(zoomed['low']) - 0.1}",
    )
    page.click(".jv-timeline .jv-all")
    page.until(f"Number(document.querySelector('{lanes}').dataset.low) < 0.5")
    page.run("panel.zoom(3, 5)")
    page.until(
        f"Math.abs(Number(document.querySelector('{lanes}').dataset.high) - 5) < 1e-6"
    )
    steps = "[b for b in timeline.data(True).bars if b.label.startswith('step') and 3 < b.start + b.seconds / 2 < 5]"
    at = float(page.run(f"b = {steps}[0]; print(b.start + b.seconds / 2)"))

    def point() -> None:
        page.raw.mouse.move(*spot(0.0))
        page.raw.mouse.move(*spot((at - 3) / 2))

    gesture(
        page,
        point,
        f"document.querySelector('{lanes} .jv-lanes-tip')?.innerText.includes('trained on')",
    )
    page.click(".jv-timeline .jv-last")
    page.until(
        f"Math.abs(Number(document.querySelector('{lanes}').dataset.low) - {low}) < 1e-6"
    )
    assert page.run("print(len(timeline.figure().axes) > 0)") == "True"
