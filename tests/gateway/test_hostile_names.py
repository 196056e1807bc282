"""Names that would leave their folder, break a header or hang a close: refused once, where they enter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.wire import _security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from tests.gateway.fake_lab import FakeLab

BAD = [
    "../../x",
    "a/b",
    "..",
    ".",
    "a\0b",
    "a\nb",
    "a\r\nx-y: z",
    "x" * 101,
    " a",
    "a ",
    "-a",
    "ä",
    "\ud800",
    "a\\b",
    "~",
]
GOOD = ["p", "pool-1", "a.b_c-D", "7", "x" * 100]


def refused(lab: FakeLab, method: str, request: Any) -> None:
    """By the gateway itself, whoever calls it without our client."""
    with (
        grpc.insecure_channel(lab.address) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        getattr(rpc.LabStub(channel), method)(
            request, timeout=30, metadata=_security.authorization(lab.token)
        )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, request


def test_hostile_pool_names(fake_lab: FakeLab, client: jv.Lab, llama: str):
    before = set(fake_lab.folder.parent.rglob("*"))
    for name in BAD:
        with pytest.raises(errors.ConfigError, match="pool") as caught:
            client.launch(llama, name=name)
        assert caught.value.remedy
        if name != "\ud800":  # no message can carry that one
            refused(
                fake_lab,
                "Launch",
                pb.LaunchRequest(
                    pool=name,
                    model="m",
                    replicas=1,
                    tensor_parallel=1,
                    load="auto",
                    device="cpu",
                    engine_json="{}",
                    env_json="{}",
                ),
            )
    assert fake_lab.registry.pools == {}
    assert set(fake_lab.folder.parent.rglob("*")) == before
    for name in GOOD:
        client.launch(llama, name=name).wait(60)
    assert list(client.pools) == GOOD


def test_hostile_adapter_names(fake_lab: FakeLab, pool: jv.Pool):
    for name in BAD:
        with pytest.raises(errors.ConfigError, match="adapter"):
            pool.load_adapter(name, "somewhere")
        with pytest.raises(errors.ConfigError, match="adapter"):
            pool.generate([[1]], adapter=name)
        if name != "\ud800":
            adapter = pb.Adapter(name=name, version=1, path="/nowhere")
            refused(fake_lab, "SetAdapter", pb.AdapterCall(pool="p", adapter=adapter))


def test_hostile_names_of_labs(tmp_path: Path):
    command = [sys.executable, "-m", "jvlab", "gateway", "--lab", "../../x"]
    home = {**os.environ, "JVLAB_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=home)
    assert done.returncode == 1
    assert "lab" in done.stderr
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("name", ["../x", "p/../0", "p/x", "p/0/1", "/0", "p/"])
def test_hostile_names_of_a_host_that_offers_itself(tmp_path: Path, name: str):
    from jvlab.cli._cli import parser
    from jvlab.engine._agent import host_from

    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    given = ["--gateway", "127.0.0.1:1", "--token-file", str(token), "--name", name]
    arguments = parser().parse_args(["rollout", *given])
    with pytest.raises(errors.ConfigError, match="name"):
        host_from(arguments, tmp_path)


@pytest.mark.parametrize("replica", ["../../x/0", "a\0b/0", "p/../../0"])
def test_hostile_orders_to_a_host_that_offered_itself(tmp_path: Path, replica: str):
    """The log's name is made of it."""
    from jvlab.wire.processes._rollout_process import RolloutProcess

    with pytest.raises(errors.ConfigError, match="replica"):
        RolloutProcess({"replica": replica}, tmp_path, "token")
