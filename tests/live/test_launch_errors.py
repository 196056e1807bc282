"""Launches that fail on real vLLM: each error carries the root cause, soon after it happened."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.wire.processes._supervisor import shared_memory
from tests.conftest import process_tree, scratch_of, wait_for_exit
from tests.waiting import until

pytestmark = pytest.mark.engine


def test_root_causes(lab: jv.Lab, llama: str, tmp_path: Path):
    strange = tmp_path / "strange"
    shutil.copytree(llama, strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(
        json.dumps({**config, "architectures": ["NoSuchModelForCausalLM"]})
    )
    cases = {
        "architecture": (str(strange), {}, {}, "NoSuchModelForCausalLM"),
        "argument": (llama, {"max_modle_len": 64}, {}, "did you mean 'max_model_len'"),
        "head": (
            jv.models.tiny("llama", head_dim=8),
            {},
            {},
            r"RuntimeError: Unsupported CPU .*head_dim=8",
        ),
        "memory": (llama, {}, {"VLLM_CPU_KVCACHE_SPACE": "4000"}, "memory|Memory"),
    }
    pools = {
        name: lab.launch(model, engine=engine, env=env, name=name)
        for name, (model, engine, env, _) in cases.items()
    }
    for name, pool in pools.items():
        with pytest.raises(errors.LaunchError, match=cases[name][3]) as caught:
            pool.wait(240)
        assert caught.value.remedy
        # pydantic's causes have two lines
        headline = str(caught.value).partition("--- last log lines")[0]
        assert re.search(cases[name][3], headline), (
            "it is said before the log, not only in it"
        )
        assert 'File "' not in headline
        assert caught.value.fields["log"]
        assert "failed" in repr(pool)
        pool.close()
    assert not [name for name in lab.pools if name in cases]


def test_a_cpu_without_bfloat16_and_a_worker_that_dies(
    lab: jv.Lab, monkeypatch: pytest.MonkeyPatch
):
    """A bfloat16 checkpoint is computed in float32, which is said, and synced; by name bfloat16 is refused at once.
    A worker of that engine then dies of a signal while it generates.
    """
    model = jv.models.tiny("llama", dtype="bfloat16", num_hidden_layers=2)
    # for the lab's processes, which run already
    without = {"JVLAB_CPU_WITHOUT": "bfloat16"}
    monkeypatch.setenv("JVLAB_CPU_WITHOUT", "bfloat16")
    with pytest.raises(errors.Unsupported, match="this CPU has no bfloat16") as refused:
        lab.launch(model, engine={"dtype": "bfloat16"}, name="refused")
    assert "float32" in refused.value.remedy
    assert "refused" not in lab.pools
    pool = lab.launch(model, env=without, name="widened", restarts=0)
    with pytest.warns(
        UserWarning, match="computes in float32: this CPU has no bfloat16"
    ):
        pool.wait(400)
    assert pool.status()["dtype"] == "float32"
    assert "computes in float32" in pool.logs()
    other = jv.models.tiny("llama", dtype="bfloat16", num_hidden_layers=2, seed=1)
    for policy in (
        jv.Policy.from_pretrained(other),
        jv.Policy.from_pretrained(other, dtype="bfloat16"),
    ):
        with lab.connect(policy.params, pool) as link:
            assert "arrived; meaning checked" in str(link.sync(policy.params))
    exact = jv.Policy.from_pretrained(other)
    batch = pool.generate(["one", "two"], n=2, max_tokens=8, ignore_eos=True, seed=0)
    assert (
        max(np.abs(np.asarray(sample.gap)).max() for sample in batch.compare(exact))
        < 1e-3
    ), "nothing was rounded on the way"

    workers = [
        pid for pid in process_tree(lab._gateway.pid) if _runs(pid, "Worker", pool)
    ]
    assert workers
    dying = threading.Timer(
        0.5, lambda: [os.kill(pid, signal.SIGILL) for pid in workers]
    )
    dying.start()
    with pytest.raises(
        errors.ReplicaLost, match=r"a worker died of SIGILL \(illegal instruction\)"
    ):
        pool.generate(
            [[5, 6, 7]] * 64, n=16, max_tokens=1500, ignore_eos=True, timeout=300
        )
    dying.join()
    with pytest.raises(
        errors.LaunchError,
        match=r"widened/0 died: a worker died of SIGILL \(illegal instruction\)",
    ):
        pool.wait(60)
    # by the worker itself: vLLM may ask for its exit code before there is one
    assert "Fatal Python error: Illegal instruction" in pool.logs(lines=4000)
    pool.close()


def _runs(pid: int, what: str, pool: jv.Pool) -> bool:
    """Whether a process is a worker, or the core, of this pool's only engine."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        above = {parent.pid for parent in process.parents()}
        return what in process.name() and pool.status()["replicas"][0]["pid"] in above
    return False


@pytest.mark.soak
def test_stop_leaves_nothing_of_an_engine_that_is_coming_up(llama: str):
    """`jvlab stop NAME` from another process. (Engines that serve: tests/live/test_endings.py.)"""
    lab = jv.Lab(lease=60, name="stopped")
    pool = lab.launch(llama, name="brief")
    deadline = time.monotonic() + 400
    while not scratch_of(process_tree(lab._gateway.pid)):
        assert time.monotonic() < deadline, "the engine has no temporary folder"
        time.sleep(0.1)
    pids = process_tree(lab._gateway.pid)
    folders, held = scratch_of(pids), shared_memory(list(pids))
    command = [sys.executable, "-m", "jvlab", "stop", "stopped", "--json"]
    done = json.loads(
        subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.splitlines()[-1]
    )
    assert done["stopped"] == "stopped"
    assert done["processes"] >= 3
    assert not wait_for_exit(pids, 0)
    assert not [name for name in folders | held if Path(name).exists()]
    with pytest.raises(errors.ControlError):
        pool.generate("x", timeout=5)
    lab.close()


def test_closing_a_pool_that_is_coming_up(lab: jv.Lab, llama: str):
    pool = lab.launch(llama, name="brief")
    time.sleep(1.0)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 100
    with pytest.raises(errors.ControlError, match="closed"):
        pool.generate("x")


def test_a_pool_relaunched_while_its_predecessor_still_ends(lab: jv.Lab, llama: str):
    """The exit of the old process marked the new pool as failed; and what it was told, the new one obeyed."""
    old = lab.launch(llama, name="again")
    pid = until(lambda: old.status()["replicas"][0]["pid"], "it has a process")
    supervisor = psutil.Process(psutil.Process(pid).ppid())
    supervisor.suspend()  # so that it surely ends after the new one was launched
    try:
        with pytest.raises(errors.DeadlineExceeded, match="waited for again/0 to end"):
            old.close(timeout=0.5)
        epoch = lab.status()["pools"][-1]["replicas"][0]["epoch"]
        new = lab.launch(llama, name="again")
        stage = until(
            lambda: (now := new.status()["replicas"][0]["state"]) != "process" and now
        )
        assert stage == "waits for its predecessor to end"
    finally:
        # on a slow machine the gateway has killed it by now
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor.resume()
    with new.wait(400):
        row = new.status()["replicas"][0]
        assert row["state"] == "ready"
        assert row["pid"] != pid
        assert not psutil.pid_exists(pid)
        assert row["epoch"] > int(epoch)
        assert (row["generated_tokens"], row["tokens_per_s"]) == (0, 0.0), (
            "nobody asked for a token yet"
        )
        with pytest.raises(errors.ControlError, match="closed"):
            old.generate("x")
        old.close()
        assert len(new.generate("x", max_tokens=4, ignore_eos=True)[0].token_ids) == 4
        assert new.status()["replicas"][0]["generated_tokens"] == 4
