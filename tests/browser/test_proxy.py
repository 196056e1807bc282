"""Behind a proxy: every browser test serves JupyterLab below a prefix, as a JupyterHub does, and ends with an error if
its page asked for anything else. Here: that such a request is noticed, and that a live panel needs none."""

from __future__ import annotations

from tests.browser.lab_page import BASE, LabPage
from tests.browser.test_other_front_ends import RECORD, is_alive


def test_a_live_panel_needs_nothing_outside_its_prefix(page: LabPage):
    page.open([RECORD]).run_all()
    is_alive(page.raw)
    assert page.raw.evaluate("location.pathname").startswith(f"{BASE}/lab")
    assert page.left == []


def test_a_request_elsewhere_is_noticed(page: LabPage):
    page.open([])
    port = page.server.port
    for ask in (
        "fetch('http://127.0.0.1:9/x').catch(() => 0)",
        f"fetch('http://127.0.0.1:{port}/x').catch(() => 0)",
        f"new Image().src = 'http://localhost:{port}{BASE}/x.png'",
        f"new WebSocket('ws://127.0.0.1:{port}/api/kernels/x/channels')",
    ):
        page.raw.evaluate(f"() => {{ {ask} }}")
        page.raw.wait_for_timeout(300)
        assert len(page.left) == 1, ask
        page.left.clear()
    page.errors.clear()  # the browser says of each that it failed
