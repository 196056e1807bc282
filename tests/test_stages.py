"""`make test` ends, whatever its tests do: a worker that crashes fails one test, a stage that hangs is ended."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ci_scripts import ci_script
from tests.conftest import SOAKED, wait_for_exit
from tests.fuzzing import soak_but

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-p",
    "tests.workers",
    "-p",
    "no:nbval",
    "-p",
    "no:cacheprovider",
    "-c",
    "/dev/null",
]
CRASHES = """
import os, signal
import pytest

@pytest.mark.parametrize("k", range(3))
def test_it(k):
    if k == {at}:
        os.kill(os.getpid(), signal.SIGILL)
"""
HANGS = """
import time

def wait_for_ever():
    while True:
        time.sleep(60)

def test_it():
    wait_for_ever()
"""


@pytest.fixture
def stages() -> Any:
    """.ci/test.py, as a module."""
    return ci_script("test")


@pytest.mark.parametrize("workers", soak_but([3], [1, 2, 3]))
def test_a_test_that_crashes_its_worker_fails_by_name_and_alone(
    workers: int, tmp_path: Path
) -> None:
    """In the first, middle and last place of a file: the others run, once each, and the session ends."""
    for at in range(3):
        (tmp_path / f"test_{at}.py").write_text(CRASHES.format(at=at))
    (tmp_path / "test_fine.py").write_text(CRASHES.format(at=-1))
    command = [
        *PYTEST,
        "-q",
        "-n",
        str(workers),
        "--dist",
        "loadfile",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    failed = re.findall(
        r"^FAILED \S*(test_\d\.py::test_it\[\d\])", done.stdout, re.MULTILINE
    )
    assert sorted(failed) == [f"test_{at}.py::test_it[{at}]" for at in range(3)], (
        done.stdout
    )
    assert "3 failed, 9 passed" in done.stdout
    assert done.returncode == 1


def test_a_stage_that_is_silent_shows_its_stacks_and_is_ended(
    stages: Any, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    command = [*PYTEST, "-n", "1", "--rootdir", str(tmp_path), str(tmp_path)]
    stage = stages.Stage("planted", [command], silent=25.0)
    stage.run()
    said = capfdbinary.readouterr().out.decode()
    assert stage.failed
    assert stage.names[0] == "planted: ended, no output for 25 s"
    assert any(
        "test_hangs.py::test_it: was running then" in name for name in stage.names[1:]
    ), said
    listed = {int(pid) for pid in re.findall(r"^ +(\d+) ", said, re.MULTILINE)}
    assert len(listed) >= 2, "pytest and its worker"
    assert re.search(r"line \d+ in wait_for_ever", said), (
        "the stack of the test that hangs"
    )
    assert re.search(r"line \d+ in loop_once", said), (
        "and that of the process that waits for it"
    )
    assert not wait_for_exit({pid for pid in listed if psutil.pid_exists(pid)}, 30)


def test_a_stage_that_says_something_now_and_then_goes_on(stages: Any) -> None:
    """Also without a new line, as pytest's dots come."""
    code = "import sys, time\nfor _ in range(4): time.sleep(3); print('.', end='', flush=True)"
    stage = stages.Stage("dots", [[sys.executable, "-c", code]], silent=10.0)
    stage.run()
    assert not stage.failed


def test_a_test_that_passed_the_second_time_is_named_and_does_not_fail(
    stages: Any,
) -> None:
    said = "AGAIN tests/test_a.py::test_b[1]@tests/browser\nFAILED tests/test_a.py::test_c - no"
    stage = stages.Stage("again", [[sys.executable, "-c", f"print({said!r})"]])
    stage.run()
    assert stage.again == ["tests/test_a.py::test_b[1]"]
    assert stage.names == ["tests/test_a.py::test_c"]
    assert not stage.failed, "the command's exit status says whether it did"


def test_a_pipe_that_another_process_holds_is_no_reason_to_wait(stages: Any) -> None:
    """The command has ended; a process that it left keeps its output open."""
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    stage = stages.Stage("left", [[sys.executable, "-c", code]], silent=10.0)
    stage.run()
    assert stage.names == ["left: ended, no output for 10 s"]
    assert stage.failed


def test_what_soaks_exists():
    assert SOAKED
    for line in SOAKED:
        path, name = re.split(r"::|\[", line)[:2]
        source = (ROOT / path).read_text()
        assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), line
