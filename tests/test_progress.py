"""Progress bars: plain HTML in a notebook, without a widget that a saved notebook could lose."""

from __future__ import annotations

from typing import Any

import pytest

from jvlab import _progress
from jvlab._progress import Progress


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a notebook's cell holds after each update."""
    import IPython.display

    held: list[dict[str, Any]] = []

    class Handle:
        def update(self, data: dict[str, Any], **_: Any) -> None:
            held.append(data)

    def display(data: dict[str, Any], **_: Any) -> Handle:
        held.append(data)
        return Handle()

    monkeypatch.setattr(_progress, "in_kernel", lambda: True)
    monkeypatch.setattr(IPython.display, "display", display)
    return held


def test_a_bar_is_html_and_its_last_state_stays(cell: list[dict[str, Any]]):
    with Progress(3, "p: generate", unit="sample") as bar:
        for _ in range(3):
            bar.tick()
            bar.advance(1, "512 tokens/s")
    assert all(set(data) == {"text/plain", "text/html"} for data in cell), "no widget"
    assert cell[-1]["text/plain"].startswith("p: generate, 3 samples of 3 samples, ")
    assert cell[-1]["text/plain"].endswith("512 tokens/s")
    assert "width:100.0%" in cell[-1]["text/html"]


def test_stages_are_ticked_and_a_log_line_has_no_colours(cell: list[dict[str, Any]]):
    stages = ("process", "weights", "ready")
    with Progress(3, "p", unit="stage", stages=stages) as bar:
        bar.to(1)
        bar.remark("\x1b[0;36m(EngineCore)\x1b[0;0m loading <b>\x1b[2K")
        bar.describe("q")
        assert cell[-1]["text/plain"].startswith("q: ✓ process  ▸ weights  · ready, ")
        assert "\x1b" not in cell[-1]["text/plain"] + cell[-1]["text/html"]
        assert "(EngineCore) loading &lt;b&gt;" in cell[-1]["text/html"]
        bar.to(3)
    assert "✓ ready" in cell[-1]["text/plain"]


def test_quick_work_shows_nothing(cell: list[dict[str, Any]]):
    with Progress(2, "p", unit="sample", after=60.0) as bar:
        bar.advance(2, "fast")
    assert cell == []
