"""A gateway, an engine and a trainer on three hosts, over TLS: launch, sync by tcp, generate, a replica that goes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import jvlab as jv
from tests.hosts.conftest import Host
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.soak]
PORT = 7711


def test_three_hosts(hosts: Callable[[int], list[Host]], tmp_path: Path):
    model = jv.models.tiny("llama")
    gateway, engine, trainer = hosts(3)
    secrets = tmp_path / "tls"
    token = tmp_path / "token"
    address = f"{gateway.address}:{PORT}"
    common = ["-m", "jvlab"]
    serving = [*common, "gateway", "--host", gateway.address, "--port", str(PORT)]
    serving += [
        "--tls-dir",
        str(secrets),
        "--token-file",
        str(token),
        "--place",
        "join",
    ]
    gateway.python(*serving, "--folder", str(tmp_path / "gateway"))
    started = lambda: token.exists() and (secrets / "cert.pem").exists()
    until(started, "the gateway's start", 300, 0.1)
    joining = [*common, "rollout", "--gateway", address, "--token-file", str(token)]
    joining += ["--tls-dir", str(secrets), "--folder", str(tmp_path / "replica")]
    replica = engine.python(*joining)
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    script = trainer.python(
        *("-m", "tests.hosts.trainer_script", address, token.read_text().strip()),
        *(str(secrets / "cert.pem"), model),
        env={"JAX_PLATFORMS": "cpu"},
        **streams,
    )
    assert script.stdout is not None
    assert script.stdin is not None
    facts = json.loads(script.stdout.readline())
    assert facts["transport"] == "tcp", facts
    assert "different hosts" in facts["reason"]
    assert facts["verified"] == [True, True]
    assert facts["versions"] == [[1], [2]]
    assert facts["moved"]
    assert facts["still"]
    assert facts["replicas"] == [engine.name]
    replica.terminate()
    replica.wait(120)
    script.stdin.write("\n")
    script.stdin.flush()
    assert json.loads(script.stdout.readline()) != "ready"
    assert script.wait(120) == 0
