"""The supervisor: nothing of a command outlives it, its starter, or a kill of any one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jvlab.control import _supervisor
from jvlab.control._supervisor import shared_memory
from tests.conftest import gone, tree

# A command that leaves a grandchild in a session of its own and a mapped shared memory segment, as an engine might.
LEAVES_THINGS = """
import mmap, os, subprocess, sys, time
name = "/dev/shm/jvlab-test-" + str(os.getpid())
with open(name, "wb") as f: f.truncate(4096)
held = mmap.mmap(os.open(name, os.O_RDWR), 4096)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
import multiprocessing
lock = multiprocessing.get_context("spawn").Lock()  # a named semaphore, as vLLM's executors have
print("up", flush=True)
while not os.path.exists({stop!r}): time.sleep(0.05)
sys.exit(3)
"""


def start(tmp_path: Path) -> subprocess.Popen[bytes]:
    log = tmp_path / "log"
    command = [sys.executable, "-c", LEAVES_THINGS.format(stop=str(tmp_path / "stop"))]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", _supervisor.__file__, str(log), "0.5", *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (log.exists() and "up" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def let_look(pid: int) -> None:
    """Until the supervisor has looked for segments again: every third turn of its loop, each of which waits once."""

    def waits() -> int:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    goal, deadline = waits() + 8, time.monotonic() + 60
    while waits() < goal:
        assert time.monotonic() < deadline, "the supervisor's loop stands still"
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["pipe closed", "command exits", "command killed", "supervisor terminated"])
def test_nothing_is_left(tmp_path: Path, how: str):
    process = start(tmp_path)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        child = int(process.stdout.readline())
        deadline = time.monotonic() + 60
        while len(pids := tree(process.pid)) < 3 or not shared_memory(list(pids)):
            assert time.monotonic() < deadline, "command, grandchild and segment are there while it runs"
            time.sleep(0.05)
        held = shared_memory(list(pids))
        assert {os.path.basename(name).partition("-")[0] for name in held} == {"jvlab", "sem.mp"}
        let_look(process.pid)
        if how == "pipe closed":
            process.stdin.close()
        elif how == "command exits":
            (tmp_path / "stop").touch()
        elif how == "command killed":
            os.kill(child, signal.SIGKILL)
        elif how == "supervisor terminated":
            process.terminate()
        code = process.wait(60)
    assert code == {"command exits": 3, "command killed": 137}.get(how, 143)
    assert not gone(pids, 60)
    assert not [name for name in held if os.path.exists(name)]
