"""`jv.grpo` in several processes of jax.distributed: the same losses as in one, and what happens if one dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gateway.fake_lab import FakeLab
from tests.sync.team_processes import free_port
from tests.trainer.settled import groups_before
from tests.xla_flags import UNOPTIMISED, plain_loops

PATIENCE = 400.0  # seconds, on a machine that is busy with other things
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE)]

SCRIPT = str(Path(__file__).with_name("crew_script.py"))


class Crews:
    """Starts trainers, and ends their processes."""

    def __init__(self, fake: FakeLab, folder: Path) -> None:
        self.fake = fake
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, processes: int, *plans: dict[str, Any], devices: int = 1) -> None:
        """Each process makes these runs, one after the other."""
        flags = [f"--xla_force_host_platform_device_count={devices}"]
        flags += [*UNOPTIMISED, *plain_loops()]
        env = {
            **os.environ,
            "XLA_FLAGS": " ".join(flags),
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        port = str(free_port())
        rest = [self.fake.address, self.fake.token, str(self.folder / f"{processes}")]
        self.processes = [
            subprocess.Popen(
                [
                    *(sys.executable, SCRIPT, str(k), str(processes), port, *rest),
                    json.dumps(plans),
                ],
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )
            for k in range(processes)
        ]

    def ended(self) -> list[list[dict[str, Any]]]:
        """By run, what each process says of it; of one that was killed, its exit status."""
        found = []
        for process in self.processes:
            try:
                said, _ = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGUSR1)  # where is it?
                raise
            told = [json.loads(line) for line in said.splitlines() if line[:1] == "{"]
            gone = {"gone": process.returncode}
            found.append([*told, gone] if process.returncode else told)
        return [list(each) for each in zip(*found, strict=True)]

    def run(
        self, processes: int, *plans: dict[str, Any], devices: int = 1
    ) -> list[list[dict[str, Any]]]:
        self.start(processes, *plans, devices=devices)
        return self.ended()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def crews(tmp_path: Path) -> Iterator[Crews]:
    # nobody holds it while the processes of a crew start, which takes a busy machine longer than the usual lease
    fake = FakeLab(tmp_path / "lab", lease=3600.0)
    made = Crews(fake, tmp_path)
    yield made
    made.close()
    fake.end()


def plan(name: str, steps: int = 4, ahead: int = 0, **more: Any) -> dict[str, Any]:
    """A run; `ahead` is its staleness bound. It says how many groups there are before each sync."""
    options = {"steps": steps, "max_staleness": ahead, **more.pop("options", {})}
    calls = [groups_before(version, steps, ahead, 3) for version in range(1, steps + 2)]
    return {"name": name, "options": options, "calls": calls, **more}


def same(several: list[Any], alone: Any) -> None:
    """A run of several processes, and the one on the same mesh in one process."""
    assert {found.get("state") for found in [*several, alone]} == {"finished"}, several
    assert {found["step"] for found in several} == {alone["step"]}
    assert len(alone["losses"]) == alone["step"]
    assert np.ptp(alone["losses"]) > 1e-3, "losses that could not differ show nothing"
    np.testing.assert_allclose(several[0]["losses"], alone["losses"], atol=1e-5)
    for found in several:
        np.testing.assert_allclose(found["table"], alone["table"], atol=1e-5)


def test_two_processes_as_one_and_one_that_dies(crews: Crews):
    """On-policy and one ahead, with a sync that fails once in all; then one is killed, and all are started again."""
    six = plan("six", 6)
    more = [plan("zero", fail=1), plan("one", ahead=1)]
    zero, one, unbroken = (alone for [alone] in crews.run(1, *more, six, devices=2))
    broken = plan("six", 6, dies=1, dies_at=6, options={"checkpoint_every": 2})
    runs = crews.run(2, *more, broken)
    same(runs[0], zero)
    assert runs[0][0]["versions"] == zero["versions"]
    same(runs[1], one)
    assert one["losses"] != zero["losses"], "one is ahead"
    assert runs[2][1] == {"gone": -signal.SIGKILL}
    assert runs[2][0]["error"] == "TrainerLost"
    pid = crews.processes[1].pid
    assert f"member 1 of 2 (python {pid} on" in runs[2][0]["message"]
    assert "resume=True" in runs[2][0]["remedy"]
    again = plan("six", 6, options={"checkpoint_every": 2, "resume": True})
    del again["calls"]
    [resumed] = crews.run(2, again)
    same(resumed, unbroken)


@pytest.mark.soak
def test_three_processes_and_the_first_dies(crews: Crews):
    [[zero], [one]] = crews.run(1, plan("0"), plan("1", ahead=1), devices=3)
    options = {"checkpoint_every": 1}
    broken = plan("0", dies=0, dies_at=4, options=options)
    runs = crews.run(3, plan("1", ahead=1), broken)
    same(runs[0], one)
    assert runs[1][0] == {"gone": -signal.SIGKILL}
    for found in runs[1][1:]:
        assert found["error"] == "TrainerLost"
        pid = crews.processes[0].pid
        assert f"member 0 of 3 (python {pid} on" in found["message"]
    again = plan("0", options={**options, "resume": True})
    del again["calls"]
    same(crews.run(3, again)[0], zero)


@pytest.mark.soak
def test_what_the_others_hear(crews: Crews):
    """Processes that ask for different runs, one whose own part fails, and owners that stop a run from anywhere."""
    stopped = plan("stopped", 10_000, then={"1": ["stop"]})
    del stopped["calls"]
    differing = plan("differing", of_1={"learning_rate": 0.2})
    runs = crews.run(2, stopped, differing)
    assert [found["state"] for found in runs[0]] == ["stopped", "stopped"]
    assert runs[0][0]["step"] == runs[0][1]["step"] < 10_000
    for found in runs[1]:
        assert "learning_rate is 0.2 and 0.1" in found["message"]
    assert [found["error"] for found in runs[1]] == ["ConfigError", "TrainerLost"]
