"""A test that fails while the host withholds the processors is run again; one that fails anyway is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
TESTS = """
import time
import pytest

runs, made = [], []

@pytest.fixture(scope="module")
def fragile():
    made.append(1)
    if len(made) < 2:
        raise RuntimeError("no processor")
    return len(made)

def test_with_it(fragile):
    assert fragile == 2

def test_third_time_lucky(tmp_path):
    runs.append(1)
    assert len(runs) == 3

def test_broken():
    raise AssertionError

@pytest.mark.timeout(1)
def test_that_hangs():
    time.sleep(20)
"""
RUN = """
import sys, time
import pytest, tests.waiting
tests.waiting.stolen_time = lambda: time.monotonic() * float(sys.argv[1])
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "--rootdir", sys.argv[2], sys.argv[2]]))
"""


@pytest.mark.parametrize(
    ("share", "expected"), [("0.5", "2 failed, 2 passed"), ("0.1", "3 failed, 1 error")]
)
def test_it_is_run_again_only_then(tmp_path: Path, share: str, expected: str):
    (tmp_path / "test_three.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-c", RUN, share, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert expected in done.stdout, done.stdout + done.stderr
    assert ("test_third_time_lucky failed while the host took 50%" in done.stderr) == (
        share == "0.5"
    )
    assert "Timeout (>1.0s)" in done.stdout
    assert "test_that_hangs failed while" not in done.stderr, (
        "it has no timer the second time"
    )
