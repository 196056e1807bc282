"""A Ray cluster whose nodes are hosts of their own: a replica and a trainer's processes on them, and one that dies."""

from __future__ import annotations

import json
import secrets
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import jvlab as jv
from tests.hosts.conftest import Host

pytestmark = [
    pytest.mark.engine,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]
PORT = 6379
# else Ray wants a token if a file of one is in the home, and not everywhere
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
ENV = TOKEN | {"RAY_raylet_start_wait_time_s": "40", "JAX_PLATFORMS": "cpu"}


def joins(host: Host, *options: str) -> None:
    """Start Ray there. Its raylet gives its own agents 15 s to start, and a busy machine may need longer."""
    words = ["-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    words += [f"--node-ip-address={host.address}", "--num-cpus=4", *options]
    words += [f"--object-store-memory={80 << 20}", "--include-log-monitor=false"]
    for _ in range(4):
        process = host.python(*words, env=ENV, stdout=subprocess.PIPE)
        assert process.stdout is not None
        if any("Ray runtime started" in line for line in process.stdout):
            return
        host.kill()
    raise AssertionError("Ray did not start")


@pytest.fixture
def temp() -> Iterator[str]:
    """A folder with a short name, for Ray's sockets are in it; removed after the hosts have gone."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        yield folder


def test_a_lab_on_two_nodes(
    temp: str, hosts: Callable[[int], list[Host]], tmp_path: Path
):
    """A verified sync to the other node; a run on both, in which a process dies: the losses of one in one process."""
    head, far = hosts(2)
    address = f"{head.address}:{PORT}"
    words = ("--head", f"--port={PORT}", "--include-dashboard=false")
    joins(head, *words, f"--temp-dir={temp}")
    script = head.python(
        *("-m", "tests.hosts.ray_script", address, head.address, far.address),
        str(tmp_path),
        env=ENV,
        stdout=subprocess.PIPE,
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "ready\n"
    joins(far, f"--address={address}")
    said, _ = script.communicate(timeout=800)
    print(said)
    assert script.returncode == 0
    facts = json.loads(said.splitlines()[-1].removeprefix("FACTS "))
    assert "listens on its own host alone" in facts["too early"]
    assert facts["transport"] == "tcp", facts
    assert facts["verified"]
    assert facts["versions"] == [1]
    assert facts["replica"] == far.name
    assert facts["alone"] == [["finished", 3, 2, head.name]]
    assert facts["apart"] == [
        ["finished", 3, 2, head.name],
        ["finished", 3, 2, far.name],
    ]
    assert facts["restarts"] == 1
    alone, apart = (jv.Record.open(tmp_path / name).steps() for name in "12")
    for name in ("loss", "grad_norm", "reward_mean"):
        np.testing.assert_allclose(apart[name], alone[name], atol=1e-5)
