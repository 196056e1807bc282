"""A lab on a real Ray cluster: pool, sync, a killed actor, recovery, trainer processes, and nothing left at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import wait_for_exit

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
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


def facts_of(script: str, folder: Path) -> dict[str, Any]:
    """What a script says, in a process of its own: Ray's threads and warnings are not this session's business."""
    home = folder / "home"
    log = folder / "log"
    environment = {**os.environ, "JVLAB_HOME": str(home), "PYTHONPATH": str(ROOT)}
    environment["RAY_raylet_start_wait_time_s"] = "60"
    environment.pop("RAY_ADDRESS", None)
    # else a local cluster leaves a token in the home
    environment["RAY_AUTH_MODE"] = "disabled"
    left: set[int] = set()
    for _ in range(5):
        try:
            with log.open("w") as out:
                code = subprocess.call(
                    [sys.executable, str(ROOT / "tests/live" / script), str(folder)],
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
    assert not left, "nothing of Ray, of vLLM or of a trainer is left"
    said = next(line for line in text.splitlines() if line.startswith("FACTS "))
    print(said)
    return json.loads(said[6:])


# 100 s on two quiet cores, nine minutes on two that also run another suite
@pytest.mark.engine
@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_pool_on_ray(tmp_path: Path):
    facts = facts_of("ray_script.py", tmp_path)
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


# a minute: a Ray cluster, and seven pairs of processes that import jax
@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_trainers_on_ray_without_an_engine(tmp_path: Path):
    """Processes that find each other and the lab, one that dies, one that raises, no room, and a stop."""
    facts = facts_of("ray_trainers_script.py", tmp_path)
    assert facts["met"] == [["a", 0, 2, 2, True], ["a", 1, 2, 2, True]]
    assert facts["alone"] == [0, 1, 1]
    assert facts["script"] == ["well", 0]
    assert facts["died"] == [[1, 1], 1]
    assert "trainer process 1 of 2 died: " in facts["died for good"]
    assert "trainer process 1 of 2 failed:" in facts["raised"]
    assert "ValueError: boom" in facts["raised"]
    assert "could not place 2 × {'CPU': 1000.0} within 3 s" in facts["no room"]
    assert "'CPU': 2.0" in facts["no room"]
    assert "fewer processes" in facts["remedy"]
    assert (
        facts["late"]
        == "Training(sleep, 2 processes, running) has not ended within 0.2 s"
    )
    assert facts["stopped"] == "the training was stopped"
    assert facts["free"] == 2.0, "all CPUs are free again"
    assert facts["closed"] == "the training was stopped"
