"""The bench itself: cells run, clicks arrive, requests that leave are caught, console errors are heard."""

from __future__ import annotations

import time

from tests.browser.lab_page import LabPage

BUTTON = """
import ipywidgets as w
button = w.Button(description="count"); button.add_class("bench-button")
label = w.Label("0"); label.add_class("bench-label")
button.on_click(lambda _: setattr(label, "value", str(int(label.value) + 1)))
w.VBox([button, label])
"""


def test_cells_clicks_and_kernels(page: LabPage) -> None:
    page.open(["x = 20", BUTTON]).run_all()
    page.click(".bench-button")
    page.wait(".bench-label", text="1")
    assert page.run("print(x + 1, label.value)") == "21 1"
    assert len(page.server.api("kernels")) == 1


def test_what_must_not_happen_is_seen(page: LabPage) -> None:
    page.open(
        [
            "from IPython.display import HTML",
            "HTML('<img src=\"https://example.com/a.png\">')",
        ]
    ).run_all()
    page.script("() => console.error('planted')")
    deadline = time.monotonic() + 60
    while not (page.left and len(page.errors) > 1) and time.monotonic() < deadline:
        # told by events: the request, the error that it brings, and the planted one
        page.raw.wait_for_timeout(100)
    assert set(page.left) == {"https://example.com/a.png"}, (
        "an image of another host was not caught"
    )
    assert any("planted" in e for e in page.errors)
    page.left.clear()
    page.errors.clear()
