"""What the tests on a card share: a tiny model, what an engine says of it, memory in use, a lab that leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jvlab as jv

PROMPTS = [[3 + (i * 7 + k) % 500 for k in range(12)] for i in range(4)]


def tiny(seed: int = 0) -> str:
    """A model whose heads two ranks can share."""
    import jvlab as jv

    return str(
        jv.models.tiny("llama", seed=seed, head_dim=64, tie_word_embeddings=False)
    )


def greedy(pool: jv.Pool, tokens: int = 24) -> list[list[int]]:
    """One prompt at a time: batches of other sizes are rounded otherwise, and who shares a step is chance."""
    options = {
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "progress": False,
    }
    return [pool.generate([ids], **options)[0].token_ids.tolist() for ids in PROMPTS]


def device_used() -> int:
    """Bytes of the card that are taken, by whomever."""
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return total - free


@contextmanager
def ending_lab(seconds: float = 20) -> Iterator[jv.Lab]:
    """A lab, all of whose processes are gone so soon after it was closed."""
    import jvlab as jv
    from tests.conftest import process_tree, wait_for_exit

    lab = jv.Lab(lease=120)
    pids = process_tree(lab._gateway.pid)
    try:
        yield lab
    finally:
        pids |= process_tree(lab._gateway.pid)
        lab.close()
    assert not wait_for_exit(pids, seconds)


def run_script(
    module: str, word: str, log: Path, seconds: float, **environment: str
) -> dict[str, Any]:
    """The facts that a script says at its end, as `word: {...}`; it runs in a process of its own, with its own JAX."""
    # settings of this process's JAX
    ours = ("PREALLOCATE", "ALLOCATOR", "MEM_FRACTION")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith("XLA_") and name.endswith(ours))
    }
    # a file: the lab's processes outlive the script for a moment, and would hold a pipe
    with log.open("w") as into:
        script = subprocess.Popen(
            [sys.executable, "-u", "-m", module],
            cwd=Path(__file__).parents[2],
            env=kept | environment,
            stdout=into,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        script.wait(seconds)
    finally:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
        print(text := log.read_text(errors="replace"), flush=True)
    assert script.returncode == 0, text[-3000:]
    told = [line for line in text.splitlines() if line.startswith(f"{word}: ")]
    assert told, "the script says what it measured"
    return json.loads(told[-1].removeprefix(f"{word}: "))
