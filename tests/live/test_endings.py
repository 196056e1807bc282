"""Sudden deaths on real vLLM: of the client, of a replica in the middle of work, of the gateway. Nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.wire.processes._supervisor import shared_memory
from tests.conftest import process_tree, scratch_of, wait_for_exit

pytestmark = pytest.mark.engine

KERNEL = """
import sys, time, jvlab as jv
lab = jv.Lab(lease=90, name="deaths")
pool = lab.launch(sys.argv[1], replicas=2, name="p", restarts=0).wait()
batch = pool.generate("Once upon", max_tokens=40, temperature=0.0, ignore_eos=True)
print("READY", *batch[0].token_ids, flush=True)
pool.generate("Once upon", n=8, max_tokens=2000, ignore_eos=True)   # killed in the middle of this
"""

SCRIPT = """
import sys, jvlab as jv
with jv.Lab(name=sys.argv[2]) as lab:
    pool = lab.launch(sys.argv[1], name="p").wait()
    pool.generate("Once upon", max_tokens=4)
    print(lab._gateway.pid, flush=True)
    pool.generate("Once upon", n=8, max_tokens=2000, ignore_eos=True)   # ended in the middle of this
"""


@pytest.fixture(scope="module")
def kernel(llama: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A 'notebook kernel' in a process of its own, with a lab and a pool of two real engines."""
    process = subprocess.Popen(
        [sys.executable, "-c", KERNEL, llama], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("READY"), process.wait(5)
    yield process, [int(word) for word in line.split()[1:]]
    process.kill()
    process.wait(60)
    process.stdout.close()
    with contextlib.suppress(errors.LabNotFound):  # a test that failed left it open
        jv.Lab.attach("deaths").close()


def test_deaths_in_order(kernel):
    process, tokens = kernel
    # 1. kill -9 of the kernel: gateway and pool live on, and attach() finds them.
    time.sleep(0.5)
    process.kill()
    process.wait(60)
    lab = jv.Lab.attach("deaths")
    pool = lab.pools["p"]
    assert pool.status()["healthy"] == 2
    again = pool.generate("Once upon", max_tokens=40, temperature=0.0, ignore_eos=True)[
        0
    ]
    assert list(again.token_ids) == tokens
    deadline = time.monotonic() + 120
    while pool.status()["in_flight"]:
        assert time.monotonic() < deadline, (
            "the dead kernel's requests were not aborted"
        )
        time.sleep(0.1)

    # 2. kill -9 of a replica's engine in the middle of its work: its samples are made elsewhere, and the batch says so.
    victim = pool.status()["replicas"][0]
    pids = process_tree(victim["pid"])
    held, scratch = shared_memory(list(pids)), scratch_of(pids)
    assert len(scratch) == 1, "a replica has one temporary folder, with vLLM's sockets"
    results: list[jv.RolloutBatch] = []
    work = {"n": 4, "max_tokens": 400, "temperature": 0.0, "ignore_eos": True}
    prompts = [[5 + i, 6, 7] for i in range(4)]
    thread = threading.Thread(
        target=lambda: results.append(pool.generate(prompts, **work))
    )
    thread.start()
    while not any(r["running"] for r in pool.status()["replicas"][:1]):
        time.sleep(0.05)
    engine = [
        p
        for p in psutil.Process(victim["pid"]).children(recursive=True)
        if "EngineCore" in p.name()
    ]
    os.kill(engine[0].pid if engine else victim["pid"], signal.SIGKILL)
    thread.join(240)
    batch = results[0]
    assert len(batch) == 16
    assert {s.retried for s in batch} == {0, 1}
    assert {s.replica for s in batch if s.retried} == {"p/1"}
    assert any("p/0 was lost" in note for note in batch.notes)
    for group in batch.groups():
        assert len({tuple(s.token_ids) for s in group}) == 1, (
            "greedy samples are equal wherever they were made"
        )
    assert not wait_for_exit(pids, 90), "the dead replica left processes"
    assert not [name for name in held if os.path.exists(name)], (
        "the dead replica left shared memory"
    )
    assert not [name for name in scratch if os.path.exists(name)], (
        "the dead replica left its temporary folder"
    )
    status = pool.status()
    assert status["healthy"] == 1
    assert status["in_flight"] == 0
    assert np.array_equal(
        pool.generate("Once upon", max_tokens=40, temperature=0.0, ignore_eos=True)[
            0
        ].token_ids,
        tokens,
    )

    # 3. kill -9 of the gateway: everything it started ends by itself, nothing is left, and calls say so.
    everything = process_tree(lab._gateway.pid)
    held, scratch = shared_memory(list(everything)), scratch_of(everything)
    assert held, "vLLM's executor uses shared memory"
    assert len(everything) >= 4
    os.kill(lab._gateway.pid, signal.SIGKILL)
    assert not wait_for_exit(everything, 90), "the gateway's death left processes"
    assert not [name for name in held if os.path.exists(name)], "shared memory was left"
    assert scratch
    assert not [name for name in scratch if os.path.exists(name)], (
        "the temporary folder was left"
    )
    with pytest.raises(errors.ControlError):
        pool.generate("Once", max_tokens=2, timeout=10)
    started = time.monotonic()
    lab.close()
    assert time.monotonic() - started < 60
    with pytest.raises(errors.LabNotFound):
        jv.Lab.attach("deaths")


def test_a_script_takes_its_engines_along(llama: str):
    """SLURM, Kubernetes and `timeout` send SIGTERM, then SIGKILL; the next job needs the device."""
    command = [sys.executable, "-c", SCRIPT, llama]
    scripts = {
        number: subprocess.Popen(
            [*command, f"ended-{number:d}"], stdout=subprocess.PIPE, text=True
        )
        for number in (signal.SIGTERM, signal.SIGKILL)
    }
    try:
        for number, script in scripts.items():
            assert script.stdout is not None
            pids = process_tree(int(script.stdout.readline()))
            assert len(pids) >= 4, (
                "a gateway, a supervisor, a rollout process and its worker"
            )
            held, scratch = shared_memory(list(pids)), scratch_of(pids)
            script.send_signal(number)
            status = script.wait(90)
            if number is signal.SIGTERM:
                assert status == 128 + number
                assert not wait_for_exit(pids, 0), "they end before it does"
            assert not wait_for_exit(pids, 90)
            assert scratch
            assert not [name for name in held | scratch if os.path.exists(name)]
    finally:
        for script in scripts.values():
            script.kill()
            script.wait(60)
            assert script.stdout is not None
            script.stdout.close()
