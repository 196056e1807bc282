"""Real JupyterLab in a real browser: one server, one Chromium, one page and one kernel for all tests here.

Each test gets a notebook of its own; the page and the kernel of the test before it are tidied (lab_page.py: TIDY). A
kernel that a test kills is replaced by a new one.

A test in five lines:

    def test_card(page):
        page.open(["import jvlab as jv", "display(thing)"]).run_all()  # waits for the kernel; a raise fails the test
        page.click(".jv-thing button", text="Pause")                   # CSS selectors: give your widgets classes
        assert page.run("print(thing.paused)") == "True"               # one more cell; its text output
        page.screenshot(tmp_path / "thing.png", "dark", 1920)          # light | dark, width

`page` is a LabPage (lab_page.py): open, run_all, run, wait, click, fill, text, count, data, script, until, outputs,
save, shut_kernel, screenshot; `page.raw` is playwright's own page. After each test it is checked that the console held
no error and that no request went anywhere but to this server, below its prefix, as a proxy demands. All tests here
carry the marker `browser`.

A pool: use the session's `lab` and `pool` fixtures (tests/conftest.py; mark the test `engine`), and in the notebook
`lab = jv.Lab.attach()`, `pool = lab.pools["shared"]`: the kernel inherits JVLAB_HOME, so it finds the same lab.

Without a browser the tests are skipped, and the reason says how to get one (`.ci/browser.py`).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab_page import CHROMIUM_FLAGS, VIEWPORT, LabPage, LabServer


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "browser: drives a real JupyterLab in a real browser"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("browser")


@pytest.fixture(scope="package")
def chromium() -> str:
    """The path of a browser, or a loud skip."""
    spec = importlib.util.spec_from_file_location(
        "ci_browser", Path(__file__).parents[2] / ".ci" / "browser.py"
    )
    assert spec is not None
    assert spec.loader is not None
    finder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(finder)
    pytest.importorskip(
        "playwright", reason="browser tests need playwright: pip install playwright"
    )
    found = finder.find()
    if found is None:
        pytest.skip(f"NO BROWSER: the panels are not tested. {finder.REMEDY}")
    return found


@pytest.fixture(scope="package")
def jupyterlab(
    private_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LabServer]:
    """One JupyterLab for every browser test; its kernels share this session's home of labs."""
    server = LabServer(tmp_path_factory.mktemp("jupyter"))
    try:
        yield server.wait()
    finally:
        server.close()


@pytest.fixture(scope="package")
def browser_context(chromium: str, jupyterlab: LabServer) -> Iterator[Any]:
    # Not for the whole session: while sync playwright is open, asyncio.run() fails in this thread.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=CHROMIUM_FLAGS
        )
        yield browser.new_context(viewport=VIEWPORT)
        browser.close()


@pytest.fixture(scope="package")
def spare_pages() -> list[tuple[Any, str | None]]:
    """The page of the test before, in which JupyterLab is open (loading it takes longer than most tests), and its
    kernel.
    """
    return []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    setattr(item, f"jv_{report.when}_failed", report.failed)
    return report


@pytest.fixture
def page(
    request: pytest.FixtureRequest,
    browser_context: Any,
    jupyterlab: LabServer,
    spare_pages: list[Any],
) -> Iterator[LabPage]:
    """A page of JupyterLab; afterwards: no console error, no request outside of its prefix, no kernel left."""
    spare = spare_pages.pop() if spare_pages else (None, None)
    lab_page = LabPage(
        jupyterlab, browser_context, re.sub(r"\W+", "_", request.node.name), *spare
    )
    try:
        yield lab_page
    finally:
        if getattr(request.node, "jv_call_failed", True) or lab_page.errors:
            lab_page.close()
        elif (spare := lab_page.hand_on()) is not None:
            spare_pages.append(spare)
    assert not lab_page.left, (
        f"requests that a proxy would not let through: {lab_page.left}"
    )
    assert not lab_page.errors, "the browser's console holds errors:\n" + "\n".join(
        lab_page.errors
    )


@pytest.fixture(scope="package")
def steered(lab: Any) -> Iterator[Any]:
    """One real engine for every browser test that steers, syncs or trains one: `lab.pools["steered"]`.

    Its memory holds plain weights, so that each can be read back; its vocabulary is small: a run learns quickly.
    """
    import jvlab as jv

    model = jv.models.tiny("llama", vocab_size=288)
    pool = lab.launch(
        model, load="dummy", name="steered", env={"JVLAB_LIVE_WEIGHTS": "1"}
    ).wait()
    yield pool
    pool.close()
