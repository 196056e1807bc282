"""What the pages for users show is what happens: their Python runs, and a command prints what they say it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzzing import soak_but

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "notebooks/GUIDE.md")
ENDS_IN_S = 500


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```",
        (ROOT / page).read_text(),
        re.MULTILINE | re.DOTALL,
    )


@pytest.mark.parametrize("page", soak_but(PAGES[:1], PAGES))
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    assert "lab.close()" in script.read_text(), "a page leaves nothing running"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=ENDS_IN_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = next(
        line for line in done.stdout.splitlines() if line.startswith("SyncReport(")
    )
    shown = re.search(r"^print\(report\)  # (.*)$", script.read_text(), re.MULTILINE)
    assert shown is not None
    assert re.fullmatch(re.escape(shown[1]).replace("…", ".*"), report), (
        shown[1],
        report,
    )


def test_the_plan_of_the_guide_is_what_the_command_prints():
    """In a process of its own: it imports vLLM, which keeps the streams that it finds."""
    block = next(
        text
        for text in blocks("notebooks/GUIDE.md", "console")
        if text.startswith("$ jvlab plan")
    )
    command, shown = block.split("\n", 1)
    done = subprocess.run(
        [sys.executable, "-m", "jvlab", *command.split()[2:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=ENDS_IN_S,
    )
    pattern = (
        re.escape(shown.strip())
        .replace(re.escape("…"), "(?s:.*)")
        .replace("…", "(?s:.*)")
    )
    assert re.fullmatch(pattern, done.stdout.strip()), done.stdout + done.stderr
