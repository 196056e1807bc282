"""A lab's warm process: later launches fork it, its death costs a cold start and is said, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

import jvlab as jv
from tests.conftest import process_tree, scratch_of, wait_for_exit

pytestmark = pytest.mark.engine


def warm_of(lab: jv.Lab) -> psutil.Process | None:
    children = psutil.Process(lab._gateway.pid).children()
    return next((p for p in children if "--warm" in p.cmdline()), None)


def rollout_of(pool: jv.Pool) -> psutil.Process:
    return psutil.Process(pool.status()["replicas"][0]["pid"])


def tokens(pool: jv.Pool) -> list[int]:
    return list(pool.generate([[5, 6, 7]], max_tokens=8, temperature=0.0, ignore_eos=True)[0].token_ids)


def test_launches_fork_the_warm_process_and_survive_it(llama: str):
    lab = jv.Lab(lease=120)
    try:
        first = lab.launch(llama, name="first", env={"JVLAB_LIVE_WEIGHTS": "1"}).wait()
        warm = warm_of(lab)
        assert warm is not None
        assert warm.num_threads() == 1, "what runs in threads is lost in a fork"
        second = lab.launch(llama, name="second").wait()
        assert all(warm in rollout_of(pool).parents() for pool in (first, second))
        expected = tokens(first)
        assert tokens(second) == expected
        pids = process_tree(lab._gateway.pid)
        warm.kill()
        warm.wait(30)
        assert tokens(first) == tokens(second) == expected, "they need it no more"

        third = lab.launch(llama, name="third")  # starts another one, which dies before it is asked to fork
        deadline = time.monotonic() + 60
        while (other := warm_of(lab)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        other.kill()
        third.wait()
        assert "starting cold" in third.logs(lines=400)
        assert warm_of(lab) is None
        assert tokens(third) == expected
        pids |= process_tree(lab._gateway.pid)
        folders = scratch_of(pids)
        assert len(folders) == 3
        os.kill(rollout_of(first).pid, signal.SIGKILL)
        second.close()
    finally:
        lab.close()
    assert not wait_for_exit(pids, 60)
    assert not [folder for folder in folders if Path(folder).exists()]
