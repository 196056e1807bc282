"""Hostile callers of the control plane: no token, no key, another user, silence, a file laid in the way."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

import jvlab as jv
from jvlab.wire import _channels, _core_channel, _security
from tests.gateway.fake_lab import FakeLab

NOT_PROTO = b"\xff" * 64  # an unknown wire type: no message of ours parses it
METHODS = (
    *(
        f"/jvlab.v1.Lab/{name}"
        for name in (
            "Describe",
            "Hold",
            "Detach",
            "Close",
            "Launch",
            "Watch",
            "Status",
            "ClosePool",
            "Generate",
            "Score",
            "Steer",
            "Trace",
            "Logs",
            "Link",
            "Team",
            "Peek",
            "Restart",
            "Scale",
            "SetAdapter",
        )
    ),
    *(f"/jvlab.v1.Registry/{name}" for name in ("Register", "Beat", "Join")),
    "/grpc.health.v1.Health/Check",
)


def answer(
    channel: grpc.Channel, method: str, body: bytes, metadata: Any
) -> grpc.StatusCode:
    call = channel.unary_unary(method)  # no serializer: bytes as they are
    with pytest.raises(grpc.RpcError) as caught:
        call(body, timeout=30, metadata=metadata)
    return caught.value.code()


def test_hostile_message_without_the_token_is_never_parsed(fake_lab: FakeLab):
    with grpc.insecure_channel(fake_lab.address) as channel:
        for method in METHODS:
            for metadata in (
                (),
                _security.authorization("wrong"),
                (("authorization", "Bearer ~"),),
            ):
                assert (
                    answer(channel, method, NOT_PROTO, metadata)
                    is grpc.StatusCode.UNAUTHENTICATED
                ), method
            code = answer(
                channel, method, NOT_PROTO, _security.authorization(fake_lab.token)
            )
            assert code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK), (
                "with it, it is"
            )


def test_hostile_message_to_a_replica_is_never_parsed(fake_lab: FakeLab, pool: jv.Pool):
    with grpc.insecure_channel(f"127.0.0.1:{fake_lab.fakes['p/0'].port}") as channel:
        for name in (
            "Generate",
            "Score",
            "Steer",
            "Stats",
            "Trace",
            "Sync",
            "Peek",
            "SetAdapter",
        ):
            code = answer(channel, f"/jvlab.v1.Rollout/{name}", NOT_PROTO, ())
            assert code is grpc.StatusCode.UNAUTHENTICATED, name


# Private files ------------------------------------------------------------------------------------------------------


def test_hostile_link_in_the_place_of_a_private_file(tmp_path: Path):
    """Whoever can write into the folder lays links under every name that could be guessed."""
    prey = tmp_path / "prey"
    prey.write_text("before")
    for name in (f"token.{os.getpid()}.new", "lab.json.new"):
        (tmp_path / name).symlink_to(prey)
    written = _channels.write_private(tmp_path / "token", "secret\n")
    assert written.read_text() == "secret\n"
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    file = _channels.write_private(tmp_path / "lab.json", "secret")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert prey.read_text() == "before", "a secret was written through the link"
    assert not written.is_symlink()


def test_hostile_open_file_in_the_place_of_a_private_file(tmp_path: Path):
    """One that others may read is replaced, never filled."""
    there = tmp_path / f"token.{os.getpid()}.new"
    there.touch(mode=0o666)
    there.chmod(0o666)
    with there.open() as reader:
        _channels.write_private(tmp_path / "token", "secret\n")
        assert reader.read() == "", "who had it open reads the secret"
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_private_file_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(OSError, match="full"):
        _channels.write_private(tmp_path / "token", "secret\n")
    assert list(tmp_path.iterdir()) == []


# Local sockets ------------------------------------------------------------------------------------------------------

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="sockets without files are Linux's"
)


def ends(path: str, said: bytes = b"", seconds: float = 30.0) -> float:
    """After how many seconds the other side hangs up on somebody who says this and no more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.connect(path)
        end.settimeout(seconds)
        began = time.monotonic()
        end.sendall(said)
        assert end.recv(1) == b""
        return time.monotonic() - began


@linux
@pytest.mark.parametrize("said", [b"", b"\x20", b"x" * 20])
def test_hostile_silence_at_the_cores_socket_ends(
    monkeypatch: pytest.MonkeyPatch, said: bytes
):
    monkeypatch.setattr(_core_channel, "ADMIT_SECONDS", 0.2)
    server = _core_channel.CoreChannelServer(lambda _: None)
    try:
        assert ends(server.invitation()[0], said) < 10
    finally:
        server.close()


@linux
def test_hostile_half_an_order_at_the_cores_socket_ends(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_core_channel, "ADMIT_SECONDS", 0.2)
    server = _core_channel.CoreChannelServer(lambda _: None)
    path, key = server.invitation()
    half = _core_channel.HEADER.pack(_core_channel.ORDER, 1, 100) + b"half"
    try:
        assert ends(path, key.encode() + _core_channel.ORDERS + half) < 10
    finally:
        server.close()


@linux
def test_hostile_user_at_the_cores_socket(monkeypatch: pytest.MonkeyPatch):
    mine = os.getuid()
    core_channel = _core_channel.CoreChannelServer(lambda _: None)
    try:
        channel = _core_channel.connect(
            core_channel.invitation(), _core_channel.SIGNALS, 5.0
        )
        assert core_channel.channel(time.monotonic() + 30) is not None
        core_channel.disconnect()
        channel.close()
        monkeypatch.setattr(_core_channel.os, "getuid", lambda: mine + 1)
        # it may hang up before it is sent anything
        with contextlib.suppress(BrokenPipeError):
            channel = _core_channel.connect(
                core_channel.invitation(), _core_channel.SIGNALS, 5.0
            )
        with pytest.raises(TimeoutError):
            core_channel.channel(time.monotonic() + 0.5)
        channel.close()
    finally:
        monkeypatch.undo()
        core_channel.close()


# Tokens in environments ---------------------------------------------------------------------------------------------


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


@linux
def test_no_environment_holds_the_token(monkeypatch: pytest.MonkeyPatch):
    """Of the gateway, the supervisor, and whatever a user exported for another lab."""
    monkeypatch.setenv("JVLAB_TOKEN", "somebody-elses")
    with jv.Lab() as lab:
        assert lab._token != "somebody-elses"
        held = environment_of(lab._gateway.pid)
        assert lab._token.encode() not in held
        assert b"somebody-elses" not in held


@linux
def test_the_supervisor_passes_the_token_on_through_its_pipe(tmp_path: Path):
    import jvlab.wire.processes._supervisor as supervisor

    log = tmp_path / "log"
    read = "import sys; print(sys.stdin.readline().strip()[::-1], flush=True); sys.stdin.read()"
    command = [
        sys.executable,
        "-I",
        "-S",
        supervisor.__file__,
        str(log),
        "1",
        sys.executable,
        "-c",
        read,
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b"terces\n")
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while "secret" not in log.read_text() if log.exists() else True:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.stdin.close()
        process.wait(30)
