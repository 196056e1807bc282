"""A run's folder: disks that are full, folders that cannot be written, and processes that end before their run does."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jvlab.record._log as log
from jvlab._errors import ConfigError, StorageError
from jvlab.record._record import Record
from jvlab.record._run_status import status_of
from jvlab.record._writer import RecordWriter
from jvlab.trainer._grpo import grpo
from jvlab.trainer._run import Run
from jvlab.trainer._run_checkpoint import Checkpoints
from jvlab.trainer._tasks import Task
from tests.trainer.fake_pool import fresh_params, logprobs_fn, task, world
from tests.trainer.test_options import TablePolicy
from tests.waiting import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def train(folder: Path, steps: int = 3, policy: Any = None, **options: Any) -> Run:
    pool, link = world()
    given = {
        "group_size": 4,
        "prompts_per_step": 3,
        "learning_rate": 0.05,
        "background": True,
        **options,
    }
    return grpo(
        policy or (fresh_params(), logprobs_fn),
        pool,  # type: ignore
        link,  # type: ignore
        task(),
        steps=steps,
        folder=folder,
        **given,
    )


def failed(run: Run) -> StorageError:
    with pytest.raises(StorageError) as caught:
        run.wait(120)
    assert run.status.state == "failed"
    assert caught.value.remedy
    return caught.value


# Before the run starts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["file", "file/run"])
def test_a_folder_that_is_a_file_is_refused(tmp_path: Path, where: str):
    (tmp_path / "file").write_text("mine")
    for every in (0, 1):
        with pytest.raises(
            StorageError, match=r"file is a file, not a folder\n.*another folder"
        ):
            train(tmp_path / where, checkpoint_every=every)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_of_checkpoints_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("mine")
    with pytest.raises(
        StorageError,
        match=r"a checkpoint of the run cannot be written.*checkpoints is a file",
    ):
        train(tmp_path / "run", checkpoint_every=1)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["checkpoints"], (
        "no record of a run that did not start"
    )
    assert (
        train(tmp_path / "run", checkpoint_every=0).wait(120).status.state == "finished"
    )


def test_a_file_to_resume_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="holds no run to resume"):
        train(tmp_path / "file", resume=True)


@pytest.mark.parametrize("every", [0, 1])
def test_a_folder_that_nobody_may_write_is_refused(every: int):
    folder = Path("/sys/jvlab-run")  # not even root can make one there
    with pytest.raises(
        StorageError,
        match=r"cannot be written to /sys/jvlab-run.*\n.*folder that can be written",
    ):
        train(folder, checkpoint_every=every)


def test_a_disk_without_room_for_a_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    needed = 3 * 12 * 12 * 4  # the table and its two moments
    usage = lambda free: shutil._ntuple_diskusage(1000, 1000 - free, free)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed - 1))
    with pytest.raises(
        StorageError, match=r"one checkpoint takes 1.7 KB.*\n.*checkpoint_every=0"
    ):
        train(tmp_path / "run")
    assert not (tmp_path / "run" / log.EVENTS).exists()
    assert (
        train(tmp_path / "run", checkpoint_every=0).wait(120).status.state == "finished"
    )


# While it runs ----------------------------------------------------------------------------------------------------


def full_after(monkeypatch: pytest.MonkeyPatch, lines: int, reserve: bool) -> None:
    """From so many lines on, writing fails as on a full disk, having stored a part; until the reserve is given back."""
    write, room, left = log._write_all, log.FolderLock.make_room, [lines]

    def limited(fd: int, line: bytes) -> None:
        left[0] -= 1
        if left[0] >= 0:
            return write(fd, line)
        os.write(fd, line[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def freed(self: Any) -> None:
        room(self)
        left[0] = 1 if reserve else 0

    monkeypatch.setattr(log, "_write_all", limited)
    monkeypatch.setattr(log.FolderLock, "make_room", freed)


@pytest.mark.parametrize("reserve", [True, False])
def test_a_disk_that_fills_up_ends_the_run_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserve: bool
):
    full_after(monkeypatch, 60, reserve)
    run = train(tmp_path / "run", 50, checkpoint_every=0)
    error = failed(run)
    assert "No space left on device" in error.message
    assert "what was written before is kept" in error.remedy
    record = Record.open(tmp_path / "run")
    assert record.damaged == 0, "no line was left half"
    assert len(record.events()) + len(record.samples()) == 60 + reserve
    assert record.summary()["ended"] == ("failed" if reserve else "interrupted")
    assert ("No space left on device" in status_of(record).error) == reserve
    monkeypatch.undo()
    again = train(tmp_path / "run", 6, checkpoint_every=0, resume=True).wait(120)
    assert (again.status.state, again.status.step) == ("finished", 6)


def test_a_small_disk_fills_up(tmp_path: Path):
    """A real one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(tmp_path)],
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("a small disk can be mounted by root alone")
    try:
        error = failed(train(tmp_path / "run", 200, checkpoint_every=0))
        assert "No space left on device" in error.message
        record = Record.open(tmp_path / "run")
        summary = record.summary()
        assert (summary["ended"], summary["damaged"]) == ("failed", 0)
        assert summary["steps"] > 0
        assert "No space left on device" in status_of(record).error
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_checkpoint_that_does_not_fit_ends_the_run_and_leaves_the_ones_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write = Checkpoints.write_arrays

    def full(self: Any, state: Any, path: Path) -> None:
        if state.updates + state.skipped < 3:
            return write(self, state, path)
        path.write_text("half")
        # as Orbax puts it
        raise ValueError(f"INTERNAL: error writing chunk: {os.strerror(errno.ENOSPC)}")

    monkeypatch.setattr(Checkpoints, "write_arrays", full)
    error = failed(train(tmp_path / "run", 5, checkpoint_every=1))
    assert "a checkpoint of the run cannot be written" in error.message
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-000001",
        "step-000002",
    ]
    assert Record.open(tmp_path / "run").summary()["ended"] == "failed"
    monkeypatch.undo()
    run = train(tmp_path / "run", 5, checkpoint_every=1, resume=True).wait(120)
    assert run.record.events("run_start")[-1].resumed == 2  # type: ignore[attr-defined]


def test_a_best_policy_that_does_not_fit_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save, calls = TablePolicy.save_pretrained, []

    def full(self: Any, folder: Path) -> str:
        calls.append(save(self, folder))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return calls[-1]

    monkeypatch.setattr(TablePolicy, "save_pretrained", full)
    rewards = iter(range(100))
    held_out = Task(
        [[2]], lambda sample, example: float(next(rewards)), name="held out"
    )
    run = train(
        tmp_path / "run",
        3,
        TablePolicy(),
        evaluate=held_out,
        every=1,
        checkpoint_every=0,
    )
    assert "the policy cannot be written" in failed(run).message
    assert sorted(p.name for p in (tmp_path / "run").iterdir() if p.is_dir()) == [
        "best"
    ]


def test_a_limit_on_the_size_of_files_ends_a_run(tmp_path: Path):
    """As a quota does; in a process of its own, which could write nothing else either."""
    code = f"""
import resource
from pathlib import Path
from tests.trainer.test_run_folder import failed, train
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
print(failed(train(Path({str(tmp_path / "run")!r}), 200, checkpoint_every=0)).message)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "File too large" in ran.stdout, ran.stderr
    assert Record.open(tmp_path / "run").damaged == 0


def test_a_writer_that_cannot_be_opened_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = set(os.listdir("/proc/self/fd"))
    full_after(monkeypatch, 0, False)
    for _ in range(3):
        with pytest.raises(StorageError, match="No space left on device"):
            RecordWriter(tmp_path / "run")
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert not Record.open(tmp_path / "run").running


# A process that ends before its run does --------------------------------------------------------------------------


def leave(folder: str) -> None:
    """A notebook whose kernel is shut down while a run works in the background."""
    run = train(Path(folder), 100_000, checkpoint_every=1, keep_samples=0)
    until(lambda: run.status.step >= 3 or run.done, "three steps")
    print("left at", run.status.step, run.status.state, flush=True)


def hold(folder: str) -> None:
    """One that is killed."""
    run = train(Path(folder), 100_000, checkpoint_every=1, keep_samples=0)
    until(lambda: run.status.step >= 3, "three steps")
    print("ready", flush=True)
    run.wait()


@pytest.fixture
def start() -> Iterator[Callable[[str, Path], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def run(what: str, folder: Path) -> subprocess.Popen[str]:
        code = (
            f"from tests.trainer.test_run_folder import {what}; {what}({str(folder)!r})"
        )
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=ROOT,
                text=True,
                stdout=pipe,
                stderr=pipe,
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=60)


def test_a_run_whose_process_ends_is_interrupted_not_failed(
    tmp_path: Path, start: Callable[..., Any]
):
    process = start("leave", tmp_path / "run")
    out, err = process.communicate(timeout=300)
    assert "running" in out, err
    record = Record.open(tmp_path / "run")
    status = status_of(record)
    assert (status.state, record.summary()["ended"]) == (
        "interrupted",
        "interrupted",
    ), status.error
    assert status.step >= 3
    assert status.error == f"its process ended after {status.step} steps"
    assert f"interrupted after {status.step} steps" in repr(record)
    again = train(
        tmp_path / "run", status.step + 2, checkpoint_every=1, resume=True
    ).wait(120)
    assert (again.status.state, again.status.step) == ("finished", status.step + 2)
    assert again.record.events("run_start")[-1].resumed == status.step  # type: ignore[attr-defined]


def test_a_record_whose_writer_was_killed_says_so(
    tmp_path: Path, start: Callable[..., Any]
):
    process = start("hold", tmp_path / "run")
    assert process.stdout.readline() == "ready\n"
    record = Record.open(tmp_path / "run")
    assert status_of(record).state == "running"
    assert record.summary()["ended"] is None
    assert "running" in repr(record)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    status = status_of(record)
    assert status.state == "interrupted"
    assert status.error == f"its process ended after {status.step} steps"
    assert f"interrupted after {status.step} steps" in repr(record)
    assert record.summary()["running"] is False


def test_a_record_of_a_run_that_was_killed_before_its_first_step(tmp_path: Path):
    writer = RecordWriter(tmp_path / "run")
    writer._lock.close()  # as the kernel does for a process that is killed
    status = status_of(Record.open(tmp_path / "run"))
    assert (status.state, status.step, status.error) == (
        "interrupted",
        0,
        "its process ended before its first step",
    )
