"""Draft models on real vLLM: what is sampled with them, and their weights, which follow the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import jvlab as jv

pytestmark = pytest.mark.engine
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}
PROMPTS = [[5, 6, 7, 8] * 4, [100, 200, 300], list(range(50, 90)), [9, 8, 7]]


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts") / "fault.json"


@pytest.fixture(scope="module")
def other() -> str:
    """The draft model's folder: another model, of fewer layers, with the same vocabulary."""
    return jv.models.tiny("llama", seed=7)


@pytest.fixture(scope="module")
def drafting(
    lab: jv.Lab, llama: str, other: str, fault_file: Path
) -> Iterator[jv.Pool]:
    pool = lab.launch(
        llama,
        name="drafting",
        speculative={
            "method": "draft_model",
            "model": other,
            "num_speculative_tokens": 3,
        },
        env={"JVLAB_FAULT": str(fault_file)},
    ).wait()
    yield pool
    pool.close()


def tokens_of(batch: Any) -> list[list[int]]:
    return [s.token_ids.tolist() for s in batch]


def acceptance(pool: jv.Pool, version: int) -> float:
    return pool.status()["speculative"]["acceptance_by_version"][version]


def changed(params: Any) -> Any:
    return jax.tree.map(lambda x: x * 1.01, params)


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.3, "seed": 5},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    ],
    ids=str,
)
def test_sampled_logprobs_are_what_scoring_gives(
    drafting: jv.Pool, how: dict[str, Any]
):
    batch = drafting.generate(PROMPTS, n=4, max_tokens=24, ignore_eos=True, **how)
    print("GAP", how, drafting.score(batch).gap(batch))
