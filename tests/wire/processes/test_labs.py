"""Several labs of one user: which one attach() takes, what lists them, what ends them. Real gateway processes."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jvlab as jv
from jvlab import errors
from jvlab.wire.processes import _identity, _labs
from jvlab.wire.processes._identity import Identity
from tests.conftest import process_tree, wait_for_exit
from tests.fuzzing import examples

pytestmark = pytest.mark.slow
EXIT = {"x86_64": 60, "aarch64": 93}  # the system call, by machine


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("JVLAB_HOME", str(tmp_path))
    yield tmp_path
    assert not _labs.list_labs(query=False), "a lab was left"


def command(*words: str, code: int = 0) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "jvlab", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(
    platform.machine() not in EXIT, reason="the number of exit(2) is not known here"
)
def test_a_gateway_is_reaped_when_its_last_thread_has_ended(
    monkeypatch: pytest.MonkeyPatch,
):
    """It is a zombie as soon as its first thread has ended; nobody asks again after that."""
    import psutil

    work = "threading.Thread(target=lambda: (time.sleep(0.5), os._exit(0))).start()"
    # of this thread alone
    end = f"ctypes.CDLL(None).syscall({EXIT[platform.machine()]}, 0)"
    child = subprocess.Popen(
        [sys.executable, "-c", f"import ctypes, os, threading, time; {work}; {end}"]
    )
    monkeypatch.setattr(_identity, "_CHILDREN", [child])
    found = psutil.Process(child.pid)
    gateway = Identity(child.pid, platform.node(), found.create_time())
    while found.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert gateway.process() is None
    assert child.returncode == 0


def test_attach_takes_the_only_lab_and_asks_which_where_there_are_several(home: Path):
    with pytest.raises(errors.LabNotFound, match="no lab is running"):
        jv.Lab.attach()
    with jv.Lab() as first:
        again = jv.Lab.attach()
        assert again.name == first.name
        again._leave()
        with jv.Lab(name="second") as second:
            with pytest.raises(
                errors.LabNotFound, match="2 labs are running"
            ) as caught:
                jv.Lab.attach()
            assert set(caught.value.fields["labs"]) == {first.name, "second"}  # type: ignore[arg-type]
            assert first.name in str(caught.value)
            assert f"held by python {os.getpid()}" in str(caught.value)
            for word in ("second", second.address):
                again = jv.Lab.attach(word)
                assert (again.name, again.address) == ("second", second.address)
                again._leave()
            with pytest.raises(
                errors.LabNotFound,
                match=r"no lab called 'third' is running.*\n.*second",
            ):
                jv.Lab.attach("third")
            listed = jv.Lab.list()
            assert [(info.name, info.state, len(info.holders)) for info in listed] == [
                ("second", "running", 1),
                (first.name, "running", 1),
            ]
            assert repr(listed[0]) == "LabInfo('second', running, no pools)"
            assert second._token not in repr(listed) + json.dumps(listed[0].plain())
    with pytest.raises(errors.LabNotFound):
        jv.Lab.attach()
    with pytest.raises(errors.ConfigError, match="no token"):
        jv.Lab.attach("127.0.0.1:1")


def test_a_name_is_one_labs_at_a_time(home: Path):
    with pytest.raises(errors.ConfigError, match="not allowed"):
        jv.Lab(name="../x")
    with jv.Lab(name="mine") as lab:
        assert lab.name == "mine"
        with pytest.raises(errors.ConfigError, match="'mine' is running"):
            jv.Lab(name="mine")
        assert lab.status()["lab"] == "mine"
    with jv.Lab(name="mine") as lab:
        assert (home / "labs" / "mine" / "gateway.log").read_text().count(
            "listens"
        ) == 1, "its logs are its own"


def test_a_lab_that_never_comes_up_holds_no_other_for_ever(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jvlab.gateway._launcher.START_DEADLINE", 0.2)
    (home / "labs").mkdir(parents=True)
    with open(home / "labs" / ".names", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(
            errors.GatewayUnreachable,
            match=r"another lab that is just starting, to start 'mine'",
        ):
            jv.Lab(name="mine")


def test_ps_and_stop(home: Path):
    assert command("ps") == {"labs": []}
    one, two = jv.Lab(name="one"), jv.Lab(name="two")
    pids = process_tree(two._gateway.pid)
    found = command("ps")["labs"]
    assert [(info["name"], info["state"], info["pools"]) for info in found] == [
        ("two", "running", {}),
        ("one", "running", {}),
    ]
    assert "token" not in found[0]
    lost = command("stop", "three", code=1)
    assert "no lab called 'three'" in lost["error"]
    assert "one" in lost["error"]
    done = command("stop", "two")
    assert done["stopped"] == "two"
    assert done["killed"] == []
    assert done["processes"] == len(pids)
    assert not wait_for_exit(pids, 0)
    assert [info["name"] for info in command("ps")["labs"]] == ["one"]
    two.close()
    one.close()


def test_stop_ends_a_frozen_gateway(home: Path):
    lab = jv.Lab(name="frozen")
    pids = process_tree(lab._gateway.pid)
    os.kill(lab._gateway.pid, signal.SIGSTOP)
    (seen,) = jv.Lab.list()
    assert seen.state == "silent"
    began = time.monotonic()
    done = _labs.stop_lab("frozen", timeout=6.0)
    assert time.monotonic() - began < 60
    assert done["killed"] == [lab._gateway.pid]
    assert not wait_for_exit(pids, 0)
    lab.close()


def state(home: Path, name: str, content: bytes) -> Path:
    file = home / "labs" / name / "lab.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    return file


def test_hostile_state_files_hide_no_other_lab(home: Path):
    me = vars(Identity.own())
    fields = {"lab": "x", "address": "127.0.0.1:1", "token": "t", **me}
    bad = {
        "text": b"hello",
        "deep": b"[" * 100_000,
        "wide": b" " * (2 << 20),
        "list": b"[]",
        "half": b'{"lab": "x", ',
        "types": json.dumps({**fields, "pid": "one"}).encode(),
        "digits": b'{"pid": ' + b"9" * 100_000 + b"}",
        "huge": json.dumps({**fields, "pid": 10**30}).encode(),
        "nan": json.dumps({**fields, "started": "x"}).encode(),
    }
    files = [state(home, name, content) for name, content in bad.items()]
    away = state(
        home, "away", json.dumps({**fields, "lab": "away", "host": "another"}).encode()
    )
    dead = state(
        home, "dead", json.dumps({**fields, "lab": "dead", "started": 1.0}).encode()
    )
    with jv.Lab(name="good") as lab:
        again = jv.Lab.attach()
        assert again.name == lab.name
        again._leave()
        states = {info.name: info.state for info in jv.Lab.list()}
        assert states["good"] == "running"
        assert states["away"] == "elsewhere", (
            "another host's lab is not ours to clear away"
        )
        assert {name for name, found in states.items() if found == "unreadable"} == set(
            bad
        ) - {"huge"}
        assert away.exists()
        assert not dead.exists()
        with pytest.raises(errors.LabNotFound, match="no lab called 'dead'"):
            jv.Lab.attach("dead")
    for file in [*files, away]:
        file.unlink(missing_ok=True)


@settings(max_examples=examples(60))
@given(
    content=st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists)
    .map(json.dumps)
    .map(str.encode)
)
def test_hostile_state_files_of_any_content(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
):
    file = tmp_path_factory.mktemp("lab") / "lab.json"
    file.write_bytes(content)
    found = _labs._read(file)
    assert found is None or found.state == "unreadable"
