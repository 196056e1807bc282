"""A test that fails is run once more, twice where the host withholds the processors; the end says which passed so."""

from __future__ import annotations

import os
import re
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
RACES = """
import pytest

runs = set()

@pytest.mark.parametrize("k", range({count}))
def test_race(k):
    first = k not in runs
    runs.add(k)
    assert not first, "lost a race"
"""
RUN = """
import sys, time
import pytest, tests.waiting
tests.waiting.stolen_time = lambda: time.monotonic() * float(sys.argv[1])
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "--rootdir", *sys.argv[2:]]))
"""


def run(share: float, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, str(share), str(folder), str(folder), *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.parametrize(
    ("share", "expected", "lucky"),
    [
        (0.5, "2 failed, 2 passed", {"test_with_it", "test_third_time_lucky"}),
        (0.1, "3 failed, 1 passed", {"test_with_it"}),
    ],
)
def test_a_third_time_only_on_a_starved_machine(
    tmp_path: Path, share: float, expected: str, lucky: set[str]
):
    (tmp_path / "test_three.py").write_text(TESTS)
    done = run(share, tmp_path)
    assert expected in done.stdout, done.stdout + done.stderr
    again = re.findall(r"^AGAIN .*::(\w+)$", done.stdout, re.MULTILINE)
    assert set(again) == lucky
    assert f"the host took {share:.0%} of the processors" in done.stdout
    assert "Timeout (>1.0s)" in done.stdout
    assert "test_that_hangs" not in again, "it has no timer the second time"


@pytest.mark.parametrize(
    ("count", "status", "workers"), [(3, 0, ("-n", "2")), (4, 1, ())]
)
def test_races_are_named_and_many_of_them_fail(
    tmp_path: Path, count: int, status: int, workers: tuple[str, ...]
):
    (tmp_path / "test_races.py").write_text(RACES.format(count=count))
    done = run(0.0, tmp_path, *workers)
    assert f"{count} passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == status
    assert done.stdout.count("\nAGAIN ") == count
    assert "lost a race" in done.stdout


def test_both_failures_are_shown(tmp_path: Path):
    (tmp_path / "test_two.py").write_text(
        "runs = []\n\ndef test_it():\n    runs.append(1)\n    assert False, f'run {len(runs)}'\n"
    )
    done = run(0.0, tmp_path)
    assert "1 failed" in done.stdout
    assert "AssertionError: run 1" in done.stdout
    assert "AssertionError: run 2" in done.stdout
