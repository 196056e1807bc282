"""The backend `jvlab` without a server: registration, its weight, messages, and what calls say when they fail."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import jvlab as jv
from jvlab import errors
from jvlab._deadline import Deadline
from jvlab.integrations import _vllm_server as words
from jvlab.wire._core_channel import HEADER, CoreChannel

ROOT = Path(__file__).parents[2]


def test_the_entry_point_is_light():
    """Every process of every vLLM on a machine with jvlab loads it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = project["entry-points"]["vllm.general_plugins"]["jvlab"]
    module, _, function = name.partition(":")
    code = (
        f"import sys, {module}; print(callable({module}.{function}), "
        "[m for m in ('jax', 'torch', 'numba', 'grpc', 'vllm', 'numpy') if m in sys.modules])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert said.stdout == "True []\n", said.stderr


@pytest.mark.vllm
def test_registered_twice():
    from vllm.distributed.weight_transfer import (
        WeightTransferTrainerFactory as Trainers,
    )

    from jvlab.integrations.vllm import TrainerInitInfo, register

    register()
    register()
    with pytest.raises(ValueError, match="already registered"):
        Trainers.register_engine("jvlab", "jvlab.integrations.vllm", "TrainerEngine")
    with pytest.raises(errors.ConfigError, match="WeightSource"):
        Trainers.trainer_init(TrainerInitInfo(rank=0), client=None)  # type: ignore[arg-type]


def test_messages_hold_bytes():
    message = {"rank": 1, "data": b"\0\xff", "names": ["a"], "nested": [{"x": b""}]}
    assert words.decode(words.encode(message)) == message


class Answers(BaseHTTPRequestHandler):
    """Answers each path with a status and a text."""

    replies: ClassVar = {
        "/start_weight_update": (404, "{}"),
        "/resume": (401, '{"error": {"message": "Unauthorized"}}'),
        "/update_weights": (500, '{"error": {"message": "Worker failed: dirty"}}'),
        # as a server whose backend is another one
        "/init_weight_transfer_engine": (200, '{"message": "initialized"}'),
    }

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, text = self.replies[self.path]
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_what_calls_say(url: str):
    calls = words.HttpCalls(url)
    with pytest.raises(errors.ControlError, match="answered 500: Worker failed: dirty"):
        calls.update_weights({})
    with pytest.raises(errors.ControlError, match="VLLM_SERVER_DEV_MODE=1"):
        calls.start_weight_update()
    with pytest.raises(errors.ControlError, match="api_key"):
        calls.ask("POST", "/resume")


def test_another_backend_is_named(url: str):
    params = {"w": np.zeros(2, np.float32)}
    with pytest.raises(errors.SyncError, match="returned before") as caught:
        jv.integrations.vllm.connect(url, params, timeout=120)
    assert '"backend": "jvlab"' in caught.value.remedy


def test_no_server():
    params = {"w": np.zeros(2, np.float32)}
    with pytest.raises(errors.ControlError, match="is `vllm serve` running"):
        jv.integrations.vllm.connect("http://127.0.0.1:9", params, timeout=120)
    with pytest.raises(errors.ConfigError, match="no address"):
        jv.integrations.vllm.connect("localhost:8000", params)


def met(info: dict[str, str]) -> socket.socket:
    """At the trainer's socket."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.connect(f"\0{info['path']}")
    return end


def greeted(info: dict[str, str], **facts: Any) -> CoreChannel:
    """As a rank: the trainer takes it for one."""
    rank = CoreChannel(met(info))
    rank.send(words.HELLO, 0, info["key"].encode() + words.encode(facts))
    return rank


def test_a_busy_server_is_heard_out(monkeypatch: pytest.MonkeyPatch):
    """A rank hung up, and vLLM takes its time to answer why."""
    monkeypatch.setattr(words, "GRACE", 0.01)

    class Busy:
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            about = {"rank": 0, "world": 1, "version": 0, "dirty": False}
            greeted(init_info, started=True, **about).close()
            time.sleep(0.5)
            raise errors.SyncError("another trainer has connected")

    server = words.Server(Busy())  # type: ignore[arg-type]
    with pytest.raises(errors.SyncError, match="another trainer has connected"):
        server.invite(Deadline(60))


def test_a_server_that_never_answers_has_a_deadline():
    over = threading.Event()

    class Silent:
        def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
            json.dumps(init_info)  # what HTTP would carry
            over.wait(30)

    server = words.Server(Silent())  # type: ignore[arg-type]
    try:
        with pytest.raises(
            errors.SyncDeadline, match="0 ranks of vLLM's server connected"
        ):
            server.invite(Deadline(0.5))
    finally:
        over.set()


def test_strangers_at_the_trainers_socket_do_not_end_a_connect():
    """Its name is shown to every user of the host."""

    class Crowd:
        def init_weight_transfer_engine(self, info: dict[str, str]) -> None:
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(words.HELLO, 0, 2) + b"[]"):  # fmt: skip
                with met(info) as end:
                    end.sendall(said)
            about = {"rank": 0, "world": 1, "version": 3, "dirty": True}
            rank = greeted(info, started=False, **about)
            assert rank.receive(time.monotonic() + 60)[0] == words.END
            rank.close()

    server = words.Server(Crowd())  # type: ignore[arg-type]
    server.invite(Deadline(120))
    assert (server.version, server.dirty) == (3, True)
    server.hang_up("done")
