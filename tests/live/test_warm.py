"""Warm processes, of a lab and of `jvlab warm`: launches fork them, their death costs an import, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import jvlab as jv
from jvlab.cli._cli import main
from jvlab.wire.processes._labs import stop_lab
from jvlab.wire.processes._warm import OF_A_LAB
from tests.conftest import process_tree, scratch_of, wait_for_exit
from tests.fuzzing import soak_but
from tests.waiting import until

pytestmark = pytest.mark.engine


def warm_of(lab: jv.Lab) -> psutil.Process | None:
    children = psutil.Process(lab._gateway.pid).children()
    return next((p for p in children if "--warm" in p.cmdline()), None)


def rollout_of(pool: jv.Pool) -> psutil.Process:
    return psutil.Process(pool.status()["replicas"][0]["pid"])


def tokens(pool: jv.Pool) -> list[int]:
    return list(
        pool.generate([[5, 6, 7]], max_tokens=8, temperature=0.0, ignore_eos=True)[
            0
        ].token_ids
    )


def _launch_cold(lab: jv.Lab, llama: str, expected: list[int]) -> None:
    """Kill the warm process that a launch starts, before it can fork."""
    third = lab.launch(llama, name="third")
    other = until(lambda: warm_of(lab), "a warm process")
    assert other is not None
    other.kill()
    third.wait()
    assert "starting cold" in third.logs(lines=400)
    assert warm_of(lab) is None
    assert tokens(third) == expected


@pytest.mark.parametrize("again", soak_but([False], [False, True]))
def test_launches_fork_the_warm_process_and_survive_it(
    llama: str, again: bool, monkeypatch: pytest.MonkeyPatch
):
    """`again`: and another one that dies before it is asked to fork."""
    monkeypatch.setenv("JVLAB_WARM", "lab")
    lab = jv.Lab(lease=120)
    try:
        env = {"JVLAB_LIVE_WEIGHTS": "1"}
        first = lab.launch(llama, name="first", env=env, restarts=0).wait()
        warm = warm_of(lab)
        assert warm is not None
        assert warm.num_threads() == 1, "what runs in threads is lost in a fork"
        second = lab.launch(llama, name="second").wait()
        assert all(warm in rollout_of(pool).parents() for pool in (first, second))
        below = [
            p
            for pool in (first, second)
            for p in rollout_of(pool).children(recursive=True)
        ]
        workers = [p for p in below if p.cmdline()[0] == "VLLM::Worker"]
        # vLLM sets it for one that starts Python again
        preloaded = {p.environ().get("LD_PRELOAD") for p in workers}
        assert len(workers) == 2
        assert preloaded == {warm.environ().get("LD_PRELOAD")}, (
            "a worker imported vLLM again; the log says why"
        )
        expected = tokens(first)
        assert tokens(second) == expected
        pids = process_tree(lab._gateway.pid)
        warm.kill()
        warm.wait(30)
        assert tokens(first) == tokens(second) == expected, "they need it no more"

        if again:
            _launch_cold(lab, llama, expected)
        pids |= process_tree(lab._gateway.pid)
        folders = scratch_of(pids)
        assert len(folders) == 2 + again
        os.kill(rollout_of(first).pid, signal.SIGKILL)
        second.close()
    finally:
        lab.close()
    assert not wait_for_exit(pids, 60)
    assert not [folder for folder in folders if Path(folder).exists()]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """`jvlab warm`: the one that `make test` has started, or another."""
    if os.sep not in os.environ.get("JVLAB_WARM", ""):
        monkeypatch.setenv("JVLAB_WARM", f"{tempfile.gettempdir()}/w")
        with subprocess.Popen([sys.executable, "-m", "jvlab", "warm"]) as process:
            until(Path(os.environ["JVLAB_WARM"]).is_socket, "a socket")
            yield psutil.Process(process.pid)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        assert not Path(os.environ["JVLAB_WARM"]).exists()
    else:
        yield psutil.Process(listener_at(os.environ["JVLAB_WARM"]))


def listener_at(path: str) -> int:
    """The pid of the process that listens there: another `jvlab warm` may run on this machine."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as looking:
        looking.connect(path)
        return struct.unpack(
            "3i", looking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )[0]


@pytest.mark.soak
def test_labs_share_what_jvlab_warm_has_imported(
    llama: str, host: psutil.Process, monkeypatch: pytest.MonkeyPatch
):
    expected, everything = None, set()
    for name in ("warm-one", "warm-two"):
        if name == "warm-two":  # as in a kernel that has imported vLLM
            monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        lab = jv.Lab(lease=120, name=name)
        try:
            pool = lab.launch(llama, name="first").wait()
            warm = next(p for p in rollout_of(pool).parents() if p.name() == OF_A_LAB)
            assert warm.parent() == host
            assert warm_of(lab) is None, "it imports nothing itself"
            assert host.num_threads() == warm.num_threads() == 1
            expected = expected or tokens(pool)
            assert tokens(pool) == expected
            everything |= process_tree(lab._gateway.pid)
            assert {warm.pid, rollout_of(pool).pid} < everything
            if name == "warm-one":
                warm.kill()
                warm.wait(30)
                again = lab.launch(llama, name="again").wait()
                assert warm not in rollout_of(again).parents()
                assert host in rollout_of(again).parents(), "it forked another"
                assert tokens(pool) == tokens(again) == expected
                everything |= process_tree(lab._gateway.pid)
            else:
                done = stop_lab(name)
                assert done["processes"] >= 5
                assert not done["killed"]
        finally:
            lab.close()
    assert not wait_for_exit(everything, 60)
    assert host.is_running()


@pytest.mark.soak
def test_to_the_first_step_for_real(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "launch", "--first-step", "--tokens", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for run in found["runs"]:
        reached = run["reached"]
        assert set(reached) == {"imports", "policy", "engine", "link", "step"}
        assert list(reached.values()) == sorted(reached.values())
    assert found["jvlab_cold_s"] > found["jvlab_warm_s"] > 0
