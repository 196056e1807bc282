"""What the pages for users show is what happens: their Python runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzzing import soak_but
from tests.pages import blocks

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "notebooks/GUIDE.md")
ENDS_IN_S = 500


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
