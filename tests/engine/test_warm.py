"""`jvlab warm`: whom it serves, where it listens, and what a gateway does with its replies. Engines: test_warm.py."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from jvlab._errors import ConfigError
from jvlab.engine import _warm
from jvlab.wire.processes import _warm as processes
from jvlab.wire.processes._identity import home

REQUEST = {
    "key": ["cpu", True],
    "environment": {
        "VLLM_LOGGING_LEVEL": "INFO",
        "HOME": "/home/me",
        "TORCHINDUCTOR_CACHE_DIR": "/a",
    },
    "python": sys.executable,
    "package": processes.__file__,
    "namespaces": processes.namespaces(),
}


def facts(began: float | None = None) -> Any:
    own = {
        "VLLM_LOGGING_LEVEL": "INFO",
        "HOME": "/elsewhere",
        "TORCHINDUCTOR_CACHE_DIR": "/b",
    }
    return _warm._Facts("cpu", own, time.time() if began is None else began)


def test_it_serves_who_would_import_the_same():
    assert facts().difference(REQUEST, os.getuid()) == ""


def test_what_an_import_sets_may_be_set_before_it(monkeypatch: pytest.MonkeyPatch):
    """A kernel that has imported vLLM passes on to its gateway what vLLM has set in it."""
    with_import = {**REQUEST["environment"], "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    request = {**REQUEST, "environment": with_import}
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    assert "TORCHINDUCTOR_COMPILE_THREADS" in facts().difference(request, os.getuid())
    # by the import, after the first look at the environment
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    known = facts()
    assert known.difference(request, os.getuid()) == ""
    assert known.difference(REQUEST, os.getuid()) == ""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/cv2:")
    # by a process that imports it and inherits from one that did
    with_import["LD_LIBRARY_PATH"] = "/cv2:/cv2:"
    assert facts().difference(request, os.getuid()) == ""
    with_import["LD_LIBRARY_PATH"] = "/cv2:/cuda:"
    assert facts().difference(request, os.getuid()) == "other values of LD_LIBRARY_PATH"
    with_import["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    assert "TORCHINDUCTOR_COMPILE_THREADS" in known.difference(request, os.getuid())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key": ["cuda", True]}, "local models on cpu"),
        ({"key": ["cpu", False]}, "local models on cpu"),
        ({"python": "/other/python"}, "it runs"),
        ({"package": "/other/jvlab/wire/processes/_warm.py"}, "jvlab from"),
        ({"namespaces": ["net:[1]", "pid:[2]", "mnt:[3]"]}, "another container"),
        ({"environment": {}}, "other values of VLLM_LOGGING_LEVEL"),
        (
            {"environment": {"VLLM_LOGGING_LEVEL": "DEBUG"}},
            "other values of VLLM_LOGGING_LEVEL",
        ),
        (
            {
                "environment": {
                    "VLLM_LOGGING_LEVEL": "INFO",
                    "HF_HOME": "/x",
                    "LD_PRELOAD": "y",
                }
            },
            "HF_HOME, LD_PRELOAD",
        ),
        (
            {"environment": {"VLLM_LOGGING_LEVEL": "INFO", "PYTHONPATH": "/x"}},
            "PYTHONPATH",
        ),
    ],
)
def test_it_refuses_who_would_import_something_else(
    change: dict[str, Any], reason: str
):
    assert reason in facts().difference({**REQUEST, **change}, os.getuid())


def test_it_refuses_others_and_changed_files(monkeypatch: pytest.MonkeyPatch):
    assert "belongs to user" in facts().difference(REQUEST, os.getuid() + 1)
    assert "has changed" in facts(began=0.0).difference(REQUEST, os.getuid())
    known = facts()
    monkeypatch.setattr("jvlab.engine._vllm_versions.build", lambda: ("vllm", "99"))
    assert "has changed" in known.difference(REQUEST, os.getuid())


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "home"), ("1", "home"), ("0", None), ("lab", None), ("/a/b", Path("/a/b"))],
)
def test_where_it_listens(
    value: str | None, expected: object, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("JVLAB_WARM", raising=False)
    if value is not None:
        monkeypatch.setenv("JVLAB_WARM", value)
    assert processes.shared_socket() == (
        home() / "warm.socket" if expected == "home" else expected
    )


def test_its_socket_is_private_and_the_only_one(tmp_path: Path):
    path = tmp_path / "s"
    with _warm._listen(path):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="another `jvlab warm` listens"):
            _warm._listen(path)
    with _warm._listen(path):  # one that was killed leaves its socket
        pass
    with pytest.raises(ConfigError, match="too long"):
        _warm._listen(tmp_path / ("x" * 108))


def test_one_that_is_stopped_with_a_full_queue_listens_too(tmp_path: Path):
    path = tmp_path / "s"
    kind = socket.AF_UNIX, socket.SOCK_SEQPACKET
    with socket.socket(*kind) as stopped, socket.socket(*kind) as first:
        stopped.bind(str(path))
        # one connection waits to be accepted, and a second would wait for that
        stopped.listen(0)
        first.connect(str(path))
        with pytest.raises(ConfigError, match="another `jvlab warm` listens"):
            _warm._listen(path)


def test_switched_off_it_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JVLAB_WARM", "0")
    with pytest.raises(ConfigError, match="JVLAB_WARM=0"):
        _warm.run_host("cpu")


@contextmanager
def replying(
    path: Path, reply: Callable[[dict[str, Any]], bytes]
) -> Iterator[list[socket.socket]]:
    """A stand-in that replies to each request and keeps the connections."""
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            kept.append(connection)
            answer = reply(json.loads(connection.recv(1 << 17)))
            with suppress(BrokenPipeError):  # nobody waits for it any more
                connection.send(answer) if answer else connection.close()

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield kept
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for connection in kept:
                connection.close()


def ask(folder: Path) -> Any:
    return asyncio.run(processes.WarmProcesses(folder)._ask(("cpu", True)))


def test_a_gateway_takes_what_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JVLAB_WARM", f"{tmp_path}/s")
    seen: list[dict[str, Any]] = []
    with replying(
        tmp_path / "s", lambda request: seen.append(request) or b'{"pid": 77}'
    ) as connections:
        warm = ask(tmp_path)
        assert warm.alive
        assert (seen[0]["key"], seen[0]["python"]) == (["cpu", True], sys.executable)
        assert seen[0]["log"] == f"{tmp_path}/warm.log"
        assert "JVLAB_TOKEN" not in seen[0]["environment"]
        connections[0].close()
        assert not warm.alive
        asyncio.run(warm.end())


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b'{"refused": "other values of X"}', "other values of X"),
        (b"", "it ended"),
        (b"?", "char"),
    ],
)
def test_a_gateway_that_is_refused_says_why_and_goes_on(
    reply: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JVLAB_WARM", f"{tmp_path}/s")
    with replying(tmp_path / "s", lambda request: reply):
        assert ask(tmp_path) is None
    assert reason in (tmp_path / "warm.log").read_text()


def test_a_gateway_tells_its_environment_to_its_own_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JVLAB_WARM", f"{tmp_path}/s")
    monkeypatch.setattr(processes, "user_of", lambda connection: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{tmp_path}/s")
        listener.listen()
        assert ask(tmp_path) is None
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(10) == b"", "nothing was sent"
    assert "belongs to user" in (tmp_path / "warm.log").read_text()


def test_a_gateway_without_one_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JVLAB_WARM", f"{tmp_path}/s")
    assert ask(tmp_path) is None
    assert not (tmp_path / "warm.log").exists()
    monkeypatch.setattr(processes, "SHARED_SECONDS", 0.2)
    # busy importing for too long
    with replying(tmp_path / "s", lambda request: time.sleep(1.0) or b"{}"):
        assert ask(tmp_path) is None
    assert "TimeoutError" in (tmp_path / "warm.log").read_text()


def test_the_openmp_that_a_wheel_has_for_itself_does_not_count():
    from jvlab.engine._patches import openmp_of_torch

    torch, other = "/site/torch/lib/libgomp.so.1", "/site/torch/lib/libiomp5.so"
    own = "/site/sentencepiece.libs/libgomp-6a29c32d.so.1.0.0"
    assert openmp_of_torch({torch, own, "/lib/libc.so.6"}) == {torch}
    assert openmp_of_torch({torch, other, own}) == {torch, other}
