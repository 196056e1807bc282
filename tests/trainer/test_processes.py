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

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).with_name("crew_script.py"))
PATIENCE = 240.0  # seconds, on a machine that is busy with other things


class Crews:
    """Starts trainers, and ends their processes."""

    def __init__(self, fake: FakeLab, folder: Path) -> None:
        self.fake = fake
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, name: str, processes: int, devices: int = 1, **plan: Any) -> None:
        flags = f"--xla_force_host_platform_device_count={devices}"
        env = {
            **os.environ,
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        port = str(free_port())
        rest = [self.fake.address, self.fake.token, str(self.folder / name)]
        self.processes = [
            subprocess.Popen(
                [
                    *(sys.executable, SCRIPT, str(k), str(processes), port, *rest),
                    json.dumps(plan),
                ],
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )
            for k in range(processes)
        ]

    def ended(self) -> list[dict[str, Any]]:
        """What each process said last."""
        found = []
        for process in self.processes:
            try:
                said, _ = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGUSR1)  # where is it?
                raise
            lines = said.splitlines()
            found.append(json.loads(lines[-1]) if lines else {"gone": process.returncode})
        return found

    def run(self, name: str, processes: int, devices: int = 1, **plan: Any) -> list[Any]:
        self.start(name, processes, devices, **plan)
        return self.ended()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def crews(tmp_path: Path) -> Iterator[Crews]:
    fake = FakeLab(tmp_path / "lab")
    made = Crews(fake, tmp_path)
    yield made
    made.close()
    fake.end()


def same(several: list[Any], alone: Any) -> None:
    """A run of several processes, and the one on the same mesh in one process."""
    assert {found.get("state") for found in [*several, alone]} == {"finished"}, several
    assert {found["step"] for found in several} == {alone["step"]}
    assert len(alone["losses"]) == alone["step"]
    assert np.ptp(alone["losses"]) > 1e-3, "losses that could not differ show nothing"
    np.testing.assert_allclose(several[0]["losses"], alone["losses"], atol=1e-5)
    for found in several:
        np.testing.assert_allclose(found["table"], alone["table"], atol=1e-5)


@pytest.mark.parametrize("processes", [2, 3])
def test_as_in_one_process(crews: Crews, processes: int):
    """On-policy, with a reference that all processes score, and a sync that fails once in all of them."""
    plan: dict[str, Any] = {"options": {"algorithm": "kl"}, "fail": 1}
    [alone] = crews.run("one", 1, processes, **plan)
    several = crews.run("several", processes, **plan)
    same(several, alone)
    assert several[0]["versions"] == alone["versions"]
