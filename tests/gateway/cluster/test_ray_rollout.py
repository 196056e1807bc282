"""The actor that holds a rollout process, without Ray: both end together, in clear text and with TLS."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import jvlab as jv
from jvlab.wire import _channels
from tests.conftest import wait_for_exit
from tests.fuzzing import soak_but
from tests.gateway.cluster import fake_rollout
from tests.gateway.cluster.test_join import PROMPTS, own_address, rows, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture
def actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with the actor, over a stand-in for ray; replicas below it are simulated."""
    context = SimpleNamespace(gcs_address="127.0.0.1:1", get_node_id=lambda: "node")
    stand_in = SimpleNamespace(
        get_runtime_context=lambda: context,
        util=SimpleNamespace(get_node_ip_address=own_address),
    )
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        f"import jvlab.wire.processes._supervisor as s\ns.__file__ = {fake_rollout.__file__!r}\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{ROOT}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    from jvlab.gateway.cluster import _ray_replica

    return _ray_replica


@pytest.mark.parametrize("tls", soak_but([True], [False, True]))
def test_actor_and_process_end_together(
    actors: Any, tls: bool, tmp_path: Path, llama: str, monkeypatch: pytest.MonkeyPatch
):
    exits, ended = [], threading.Event()
    monkeypatch.setattr(
        actors.os, "_exit", lambda code: (exits.append(code), ended.set())
    )
    host, pair, pem = "127.0.0.1", None, ("", "")
    if tls:
        host = own_address()
        files = _channels.tls_folder(tmp_path / "tls", host)
        pair, pem = (
            (files.certificate, files.key),
            (Path(files.certificate).read_text(), Path(files.key).read_text()),
        )
    with jv.Lab(host=host, tls=pair, lease=60) as lab:
        pool = lab.launch(llama, name="p", place="join")
        actor = actors.RolloutActor("p/0", lab.public_address, lab._token, pem, True)
        pool.wait(60)
        assert len(pool.generate(PROMPTS)) == 12
        until(lambda: "index 0 of 1" in pool.logs(0))
        first = rows(pool)["0"]["pid"]
        os.kill(first, signal.SIGKILL)
        assert ended.wait(60), (
            "its process died, so the actor ends, and Ray would start another"
        )
        assert exits == [1]
        again = actors.RolloutActor("p/0", lab.public_address, lab._token, pem, True)
        until(lambda: rows(pool)["0"]["state"] == "ready")
        second = rows(pool)["0"]["pid"]
        below = {
            p.pid for p in psutil.Process(again._child.pid).children(recursive=True)
        }
        assert second in below
        ended.clear()
        again._child.stdin.close()  # what the death of the actor does
        assert ended.wait(60)
        assert not wait_for_exit(below, 30)
        actor._child.stdin.close()
    until(lambda: not list(tmp_path.glob("jvlab-*")))
