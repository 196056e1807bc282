"""A live panel in Notebook 7 and in marimo: the dashboard of a record, drawn, answered by its kernel, kept alive."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab_page import ELSEWHERE, END_WITH_US, ROOT, LabPage

RECORD = """
from jvlab.record._record import Record
from tests.record.synthetic import made_up
record = Record.of(made_up(30))
panel = record.panel()
"""
APP = f"""
import marimo
app = marimo.App()
@app.cell
def _():
{"".join(f"    {line}" + chr(10) for line in RECORD.strip().splitlines())}
    panel
    return
"""
# What Notebook 7 says by itself: it leaves out plugins of JupyterLab's whose settings and command it then asks for.
OF_NOTEBOOK_7 = ("reading 'schema'", "Command 'filebrowser:open-path' not registered")
SILENCE = 9_000  # ms: longer than a page waits for a sign of life


def is_alive(raw: Any, silence: int = 0) -> None:
    """The panel shows the record, its field reaches the kernel, and its page hears of the kernel."""
    curves = raw.locator(".jv-run-panel .jv-curves").first
    curves.wait_for(state="visible", timeout=120_000)
    until = lambda name, value: raw.wait_for_function(
        "([node, name, value]) => node.dataset[name] === value",
        arg=[curves.element_handle(), name, value],
    )
    until("rows", "30")
    assert (
        "30" in raw.locator('.jv-run-panel [data-jv="headline"]').nth(1).inner_text()
    ), "step 30"
    raw.locator(".jv-smoothing select").first.select_option("20 steps")
    until("smoothing", "20")  # the kernel says so: the field alone changes nothing
    raw.wait_for_timeout(silence)
    live = raw.locator(".jv-live").first
    assert live.get_attribute("data-gone") == "", raw.locator(
        ".jv-notice"
    ).first.inner_text()
    assert raw.locator(".jv-smoothing select").first.is_enabled()


# the same server and labextension as JupyterLab's; a page of its own takes 30 s
@pytest.mark.soak
def test_notebook_7(page: LabPage):
    pytest.importorskip("notebook", minversion="7")
    page.open([RECORD], app="notebooks").run_all()
    is_alive(page.raw)
    assert page.count(".jv-live") == 1, "beside its snapshot, not below it too"
    page.save()
    html = "".join(page.saved()["cells"][0]["outputs"][0]["data"]["text/html"])
    assert "application/vnd.jupyter.widget-view+json" not in str(
        page.saved()["cells"][0]["outputs"]
    )
    assert "<polyline" in html
    page.errors = [
        e for e in page.errors if not any(words in e for words in OF_NOTEBOOK_7)
    ]


@pytest.fixture
def marimo_url(tmp_path: Path) -> Iterator[str]:
    """A marimo server of one notebook, which runs when its page is opened."""
    pytest.importorskip("marimo")
    (tmp_path / "app.py").write_text(APP)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "marimo",
        "-y",
        "run",
        "app.py",
        "--headless",
        "--no-token",
    ]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    first = [sys.executable, "-c", END_WITH_US] if sys.platform == "linux" else []
    with (tmp_path / "marimo.log").open("wb") as log:
        server = subprocess.Popen(
            [*first, *command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{url}/health", timeout=10),
            ):
                break
            assert server.poll() is None, (tmp_path / "marimo.log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "marimo.log").read_text()
            time.sleep(0.2)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(15)


def test_marimo(marimo_url: str, browser_context: Any):
    raw, left, errors = browser_context.new_page(), [], []
    raw.on("request", lambda r: left.append(r.url) if ELSEWHERE.match(r.url) else None)
    raw.on("pageerror", lambda e: errors.append(str(e)))
    try:
        raw.goto(marimo_url, timeout=120_000)
        is_alive(raw, SILENCE)
        assert not errors, errors
        assert not [url for url in left if "jvlab" in url], left
    finally:
        raw.close(run_before_unload=False)
