"""The supervisor: nothing of a command outlives it, its starter, or a kill of any one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jvlab.wire.processes import _supervisor
from jvlab.wire.processes._supervisor import make_scratch, shared_memory, sweep_scratch
from tests.conftest import alive, command_line, process_tree, wait_for_exit

pytestmark = pytest.mark.slow

# A command that leaves a grandchild in a session of its own, a mapped shared memory segment, and sockets and files in
# the temporary folder, as an engine might. Like a rollout process it ends with its supervisor.
LEAVES_THINGS = """
import mmap, os, socket, subprocess, sys, tempfile, threading, time, uuid
from jvlab.engine._process import _end_with_parent
threading.Thread(target=_end_with_parent, daemon=True).start()
door = socket.socket(socket.AF_UNIX)
door.bind(os.environ["VLLM_RPC_BASE_PATH"] + "/" + str(uuid.uuid4()))
open(tempfile.gettempdir() + "/vllm_dist_x", "w").close()
os.mkdir(tempfile.gettempdir() + "/deeper")
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


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder of its own, with a short name: sockets have at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


def start(tmp_path: Path, temporary: Path) -> subprocess.Popen[bytes]:
    log = tmp_path / "log"
    command = [sys.executable, "-c", LEAVES_THINGS.format(stop=str(tmp_path / "stop"))]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", _supervisor.__file__, str(log), "0.5", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    deadline = time.monotonic() + 60
    while not (log.exists() and "up" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def told(process: subprocess.Popen[bytes]) -> tuple[int, Path]:
    """What a supervisor says when it has started: the command's process, and its temporary folder."""
    assert process.stdout is not None
    pid, scratch = process.stdout.readline().decode().split()
    return int(pid), Path(scratch)


def let_look(pid: int) -> None:
    """Until the supervisor has looked for segments again: every third turn of its loop, each of which waits once."""

    def waits() -> int:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(
            int(line.split()[1])
            for line in lines
            if line.startswith("voluntary_ctxt_switches")
        )

    goal, deadline = waits() + 8, time.monotonic() + 60
    while waits() < goal:
        assert time.monotonic() < deadline, "the supervisor's loop stands still"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "how", ["pipe closed", "command exits", "command killed", "supervisor terminated"]
)
def test_nothing_is_left(tmp_path: Path, temporary: Path, how: str):
    process = start(tmp_path, temporary)
    with process:
        assert process.stdin is not None
        child, scratch = told(process)
        assert scratch.parent == temporary
        assert scratch.stat().st_mode & 0o777 == 0o700
        assert len(list(scratch.iterdir())) == 3, "a socket, a file and a folder"
        assert list(temporary.iterdir()) == [scratch], "nothing beside its own folder"
        deadline = time.monotonic() + 60
        while len(pids := process_tree(process.pid)) < 3 or not shared_memory(
            list(pids)
        ):
            assert time.monotonic() < deadline, (
                "command, grandchild and segment are there while it runs"
            )
            time.sleep(0.05)
        held = shared_memory(list(pids))
        assert {os.path.basename(name).partition("-")[0] for name in held} == {
            "jvlab",
            "sem.mp",
        }
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
    assert not wait_for_exit(pids, 60)
    assert not [name for name in held if os.path.exists(name)]
    assert list(temporary.iterdir()) == []


def test_a_killed_supervisor_leaves_no_temporary_folder(
    tmp_path: Path, temporary: Path
):
    with start(tmp_path, temporary) as process:
        pids = process_tree(process.pid)
        assert len(list(temporary.iterdir())) == 1
        process.kill()
        process.wait(60)
        deadline = time.monotonic() + 30
        while list(temporary.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(temporary.iterdir()) == []
        # the grandchild in a session of its own: nobody is left who could end it
        for pid in {
            p for p in alive(pids) if "sleep(600)" in command_line(psutil.Process(p))
        }:
            os.kill(pid, signal.SIGKILL)


def test_what_all_at_once_killed_processes_leave_is_swept_later(
    tmp_path: Path, temporary: Path
):
    second = tmp_path / "second"
    second.mkdir()
    with start(tmp_path, temporary) as process, start(second, temporary) as other:
        _, scratch = told(process)
        pids = process_tree(process.pid)
        for pid in sorted(pids):
            os.kill(pid, signal.SIGSTOP)  # so that none can clean up after another
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.wait(60)
        assert not wait_for_exit(pids, 60)
        assert len(list(temporary.iterdir())) == 2
        stranger = temporary / "jvlab-adapter-x"
        stranger.mkdir()
        young = temporary / "jvnew-x"
        young.mkdir()
        sweep_scratch(temporary)
        assert not scratch.exists(), "at once: nobody holds its lock"
        assert young.exists(), "its owner may not have locked it yet"
        sweep_scratch(temporary, age=0)
        assert not young.exists()
        assert len(list(temporary.iterdir())) == 2, (
            "the living one's folder and the stranger's stay"
        )
        assert other.stdin is not None
        other.stdin.close()
        other.wait(60)
        assert list(temporary.iterdir()) == [stranger]


def test_a_long_temporary_folder_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    deep = tmp_path / ("x" * 80)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder, lock = make_scratch()
    try:
        assert len(f"{folder}/{uuid.uuid4()}") < 107, "a socket of vLLM's fits"
        sweep_scratch(Path(folder).parent)
        assert os.path.isdir(folder), "locked from its first moment"
    finally:
        os.rmdir(folder)
        if lock is not None:
            os.close(lock)
