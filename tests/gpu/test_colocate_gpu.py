"""`launch(colocate=True)`: one card for JAX and vLLM; see colocate_script.py, which runs in a fresh process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"),
]
SECONDS = 400


def test_sleep_lends_the_card_and_wake_is_never_on_old_weights(tmp_path: Path) -> None:
    ours = ("PREALLOCATE", "ALLOCATOR", "MEM_FRACTION")  # JAX's settings of this process, which launch() must make
    env = {name: value for name, value in os.environ.items() if not (name.startswith("XLA_") and name.endswith(ours))}
    command, log = [sys.executable, "-u", "-m", "tests.gpu.colocate_script"], tmp_path / "log"
    with log.open("w") as into:  # a file: the lab's processes outlive the script for a moment, and would hold a pipe
        script = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            env=env,
            stdout=into,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        script.wait(SECONDS)
    finally:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
        print(text := log.read_text(errors="replace"), flush=True)
    assert script.returncode == 0, text[-3000:]
    lines = text.splitlines()
    told = [line for line in lines if line.startswith("colocate: ")]
    assert told, "the script says what it measured"
    facts: dict[str, Any] = json.loads(told[-1].removeprefix("colocate: "))
    for level in ("level_1", "level_2"):
        assert facts[level]["freed_bytes"] > facts["weights_bytes"]
        assert facts[level]["jax_beyond_share_bytes"] > 0.8 * facts[level]["freed_bytes"]
