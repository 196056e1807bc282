"""What the tests on a card share: a tiny model, what an engine says of it, memory in use, a lab that leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jvlab as jv

PROMPTS = [[3 + (i * 7 + k) % 500 for k in range(12)] for i in range(4)]


def tiny(seed: int = 0) -> str:
    """A model whose heads two ranks can share."""
    import jvlab as jv

    return str(jv.models.tiny("llama", seed=seed, head_dim=64, tie_word_embeddings=False))


def greedy(pool: jv.Pool, tokens: int = 24) -> list[list[int]]:
    """One prompt at a time: batches of other sizes are rounded otherwise, and who shares a step is chance."""
    options = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "progress": False}
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
