"""Syncs on real engines without a gateway: bit-exact against vLLM's own load, in flight, failing, healing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import jvlab as jv
from jvlab.wire.processes._supervisor import descendants, shared_memory, unlink_segments
from tests.conftest import plain_vllm

# test_sync*.py have the same through a gateway
pytestmark = [pytest.mark.engine, pytest.mark.soak]
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "HF_HUB_OFFLINE": "1",
}


def start(
    folder: Path,
    family: str,
    ranks: int,
    parts: str,
    env: dict[str, str] | None = None,
    **sizes: Any,
) -> subprocess.Popen[str]:
    """sync_script in a process of its own; `facts_of` waits for it."""
    models = [jv.models.tiny(family, seed=seed, **sizes) for seed in (0, 1)]
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "0|1" if ranks == 2 else "0,1"}
    with open(folder / "log", "w") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.live.sync_script",
                *models,
                str(ranks),
                parts,
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **ENV, **plain_vllm(), **bind, **(env or {})},
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )


def facts_of(process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    """What it prints in the end."""
    assert process.stdout is not None
    try:
        line = next(
            (line for line in process.stdout if line.startswith("FACTS ")), None
        )
    finally:
        held = shared_memory([process.pid, *descendants(process.pid)])
        os.killpg(process.pid, signal.SIGKILL)  # vLLM's own teardown can hang
        process.stdout.close()
        process.wait(60)
        unlink_segments(held)
    log_text = (folder / "log").read_text()
    assert line, log_text[-3000:]
    facts = json.loads(line.removeprefix("FACTS "))
    assert "closed" in facts, log_text[-3000:]
    return facts


def run(folder: Path, *what: Any, **sizes: Any) -> dict[str, Any]:
    return facts_of(start(folder, *what, **sizes), folder)


def exact(facts: dict[str, Any]) -> None:
    assert facts["own_again"] == [True, True, True], (
        "answers differ from vLLM's own load of the same weights"
    )
    assert facts["c_twice"]
    assert facts["c_differs"]
    assert facts["check"][0] == ""
    assert facts["check"][1] > 10
    assert facts["check_of_others"][0] == "check"
    assert facts["check_of_others"][1] > 5
    assert facts["peek"]
    assert facts["closed"] == ""


def test_everything_on_one_engine(tmp_path: Path):
    facts = run(
        tmp_path,
        "llama",
        1,
        "exactness,flying,recompute,staged_goes_on,failures,exchange",
    )
    exact(facts)
    for mode, version in (("direct", 12), ("staged", 15)):
        for crossing in facts[f"{mode} crossing"]:
            (old, start, cut), (new, again, stop) = crossing
            assert (old, new, start, stop) == (version - 1, version, 0, 300), (
                "a request that crossed a sync shows both"
            )
            assert 0 < cut == again < 300
        equal, spans = facts[f"{mode} waiting"]
        assert equal, "a request that waited at the commit used KV of older weights"
        assert spans == [[version, 0, 24]]
        assert facts[f"{mode} same prompt"], "KV of older weights was used"
        assert facts[f"{mode} second turn"], (
            "KV of a request that crossed the sync was used by another"
        )
    assert facts["recompute"] == [50, True]
    assert facts["abort"] == "abort"
    assert facts["generated_during_move"] > 5, (
        "generation stood still during a staged move"
    )
    assert facts["mismatch"] == ["verify", "ready", True]
    assert facts["staged abandoned"] == ["old", 60, True]
    assert facts["moving abandoned"] == ["old", True]
    assert "open the link again" in facts["closed channels"]
    assert facts["dirty"] == ["dirty", 60, True]
    assert facts["dirty generate"] == facts["dirty resume"] == "dirty:"
    assert facts["healed"] == ["committed", 70, False, 4]
    assert facts["late"][0] == "verify"
    assert "bucket" in facts["late"][1]
    assert "did not arrive" in facts["late"][1]
    assert facts["user pause kept"]
    first, wrong, dirty, again, count, version = facts["exchange"]
    assert (first, dirty, again, count, version) == (
        "committed",
        True,
        "committed",
        4,
        83,
    )
    assert "does not hold the trainer's bits: b (rank 0)" in wrong
    (old, start, cut), (new, again, stop) = facts["exchange crossing"]
    assert (old, new, start, stop) == (72, 80, 0, 300), (
        "the request went on after the exchange, under its label"
    )
    assert 0 < cut == again < 300
    state, parts = facts["swap"]
    assert (state, parts) == (
        "committed",
        ["commit", "digest", "halt", "pause", "verify"],
    )
    (old, start, cut), (new, again, stop) = facts["swap crossing"]
    assert (old, new, start, stop) == (82, 83, 0, 300)
    assert 40 <= cut == again < 300, "it went on while the shadows were filled"


def test_two_ranks(tmp_path: Path):
    exact(run(tmp_path, "llama", 2, "exactness", tie_word_embeddings=True))


def test_experts_and_live_weights(tmp_path: Path):
    """Two engines side by side, a core for each. Live is without packing: that switch works, and so does a sync."""
    folders = [tmp_path / name for name in ("experts", "live")]
    for folder in folders:
        folder.mkdir()
    cores = [{"VLLM_CPU_OMP_THREADS_BIND": core} for core in ("0", "1")]
    both = [
        start(folders[0], "mixtral", 1, "exactness", cores[0]),
        start(
            folders[1], "qwen2", 1, "exactness", {**cores[1], "JVLAB_LIVE_WEIGHTS": "1"}
        ),
    ]
    with ThreadPoolExecutor(2) as threads:  # both are waited for, whatever comes of one
        experts, facts = threads.map(facts_of, both, folders)
    exact(experts)
    exact(facts)
    assert all("repack" not in seconds for seconds in facts["seconds"].values())
