"""A lab on a real Ray cluster of two nodes: pool, sync, a killed actor, recovery, and nothing left at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.conftest import wait_for_exit

pytestmark = [
    pytest.mark.engine,
    pytest.mark.soak,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]
ROOT = Path(__file__).parents[2]


def started_by(home: Path) -> set[int]:
    """Every process that has this home in its environment: all that the program started, Ray's daemons included."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("JVLAB_HOME") == str(home):
                found.add(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


# 100 s on two quiet cores, nine minutes on two that also run another suite
@pytest.mark.timeout(1200)
def test_pool_on_ray(tmp_path: Path):
    """In a process of its own: Ray's threads and warnings are not this session's business."""
    home, log = tmp_path / "home", tmp_path / "log"
    environment = {**os.environ, "JVLAB_HOME": str(home), "PYTHONPATH": str(ROOT)}
    # a busy machine is slow, not wrong
    environment["RAY_raylet_start_wait_time_s"] = "150"
    environment.pop("RAY_ADDRESS", None)
    script = str(ROOT / "tests/live/ray_script.py")
    left: set[int] = set()
    for _ in range(3):
        try:
            with log.open("w") as out:
                code = subprocess.call(
                    [sys.executable, script],
                    env=environment,
                    stdout=out,
                    stderr=out,
                    timeout=900,
                )
            left = wait_for_exit(started_by(home), 30)
        finally:
            # a test that failed must not disturb the next one
            for pid in started_by(home):
                os.kill(pid, signal.SIGKILL)
        # Ray's raylet gives its own agents 15 s to start, and a busy machine may need longer: that is Ray's failure.
        if code == 0 or "timed out during startup" not in log.read_text():
            break
    text = log.read_text()
    assert code == 0, text[-6000:]
    facts = json.loads(
        next(line for line in text.splitlines() if line.startswith("FACTS "))[6:]
    )
    print(facts)
    assert facts["nodes"] == 2
    assert facts["synced"] == [1, True, ["p/0", "p/1"]]
    assert facts["served_by"] == ["p/0", "p/1"]
    assert facts["hosts"] == 2, "one replica a node"
    assert facts["during"] == ["p/0"], "the other one serves meanwhile"
    assert facts["back"] == [0, True], (
        "Ray started it anew; it holds no version, so it gets no request"
    )
    assert facts["caught_up"] == [1, True, ["p/1"]]
    assert facts["after"] == [["p/0", 1], ["p/1", 1]]
    assert facts["same"]
    assert facts["verified"]
    assert facts["left"]
    assert facts["disconnected"]
    assert facts["cluster_stays"] == [2, 2.0], (
        "the cluster we joined lives on, with all its CPUs free"
    )
    assert not left, "nothing of Ray or vLLM is left"
