"""Trainers of several real processes, for tests: each runs team_script.py and takes orders."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jvlab as jv

SCRIPT = str(Path(__file__).with_name("team_script.py"))
PATIENCE = 180.0  # seconds for one answer, on a machine that is busy with other things


def free_port() -> int:
    """One that no outgoing connection of this machine is given meanwhile: those come from above 32767."""
    for port in random.SystemRandom().sample(range(15_000, 30_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


class TrainerProcesses:
    """The processes of one trainer."""

    def __init__(self, lab: jv.Lab, pool: str, kind: str, size: int) -> None:
        env = {
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        rest = [str(free_port()), lab.address, lab._token, pool]
        self.processes = [
            subprocess.Popen(
                [sys.executable, SCRIPT, kind, str(k), str(size), *rest],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )
            for k in range(size)
        ]
        self._threads = ThreadPoolExecutor(size)
        self._started = False

    def ready(self) -> TrainerProcesses:
        """Wait until they have started; at once if they had."""
        if not self._started:
            assert self._answers() == [{"ready": k} for k in range(len(self.processes))]
            self._started = True
        return self

    def _answers(self) -> list[dict[str, Any]]:
        def read(process: subprocess.Popen[str]) -> dict[str, Any]:
            assert process.stdout is not None
            line = process.stdout.readline()
            return json.loads(line) if line else {"gone": process.wait(60)}

        try:
            return list(self._threads.map(read, self.processes, timeout=PATIENCE))
        except TimeoutError:
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGUSR1)  # where is it?
            time.sleep(1)
            for process in self.processes:
                process.kill()
            raise

    def ask(self, do: str, **order: Any) -> list[dict[str, Any]]:
        """The same order to every process; their answers in order."""
        self.ready()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": do, **order}) + "\n")
            process.stdin.flush()
        return self._answers()

    def end(self) -> None:
        for process in self.processes:
            if process.stdin is not None and process.poll() is None:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and not pipe.closed:
                    pipe.close()
        self._threads.shutdown()


def all_equal(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What every process replied, which must be the same."""
    assert all(answer == answers[0] for answer in answers), answers
    assert "error" not in answers[0], answers[0]
    return answers[0]
