"""What the engine core does about NaN in KV memory, with a core that only notes what it is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jvlab.engine._patches import clearing_poison
from jvlab.engine.worker import _poison


class Core:
    """vLLM's EngineCore, as far as `_poison` looks."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken = ""
        self.ready = True
        self.model_executor = SimpleNamespace(sleeping_tags=set[str]())
        self.scheduler: Any = SimpleNamespace(
            jv_poisoned=False,
            jv_saw_nan=False,
            jv_clears=False,
            needs_kv_cache_zeroing=False,
        )

    def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        self.asked.append(method)
        return [
            {
                "rank": 0,
                "ready": self.ready,
                **({"error": self.broken} if self.broken else {}),
            }
        ]

    def forget(self, recompute: bool = False) -> bool:
        """A commit's reset of the prefix cache."""
        reset = lambda core, running, _: core._forgot(running)
        return clearing_poison(reset, self, recompute)

    def _forgot(self, running: bool) -> bool:
        self.asked.append("recompute" if running else "keep")
        return True


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    hand_out = lambda scheduler, wanted: setattr(
        scheduler, "needs_kv_cache_zeroing", wanted
    )
    monkeypatch.setattr(_poison, "_zero_new_blocks", hand_out)
    return Core()


def output(*sampled: float, scored: list[float] | None = None) -> Any:
    lists = (
        SimpleNamespace(logprobs=np.array(sampled, np.float32).reshape(-1, 1))
        if sampled
        else None
    )
    prompts = (
        {"a": None}
        if scored is None
        else {"a": None, "b": SimpleNamespace(logprobs=np.array(scored))}
    )
    return SimpleNamespace(logprobs=lists, prompt_logprobs_dict=prompts)


def test_poison_is_a_log_probability_that_is_nan() -> None:
    assert not _poison.nan_in(output())
    assert not _poison.nan_in(output(-1.0, -np.inf, -np.inf)), (
        "a filtered token's is -inf"
    )
    assert _poison.nan_in(output(-1.0, np.nan, -np.inf))
    assert not _poison.nan_in(output(-1.0, scored=[-2.0, -np.inf]))
    assert _poison.nan_in(output(-1.0, scored=[-2.0, np.nan]))
    assert _poison.nan_in(output(scored=[np.nan]))


def test_poison_that_a_step_shows_is_cleared_by_the_next_commit(core: Core) -> None:
    _poison.after_step(core)
    assert core.forget()
    assert core.asked == ["keep"], "nothing, while all is well"
    core.scheduler.jv_saw_nan = True
    _poison.after_step(core)
    assert core.scheduler.jv_poisoned
    assert core.scheduler.needs_kv_cache_zeroing
    core.scheduler.jv_saw_nan = True
    _poison.after_step(core)
    assert core.asked == ["keep", "jv_clears_new_blocks"], "once"
    assert core.forget()
    assert core.asked[2:] == ["recompute", "jv_clear_kv"], (
        "whoever is in flight loses its KV, then all is cleared"
    )
    assert not core.scheduler.needs_kv_cache_zeroing
    assert core.forget()
    assert core.asked[4:] == ["keep"], "and it is over"


def test_poison_of_a_hybrid_model_leaves_its_own_clearing_on(core: Core) -> None:
    core.scheduler.needs_kv_cache_zeroing = True  # vLLM clears blocks of its own accord
    _poison.poison(core)
    assert core.forget()
    assert core.asked == ["recompute", "jv_clear_kv"]
    assert core.scheduler.needs_kv_cache_zeroing


def test_poison_that_can_not_be_cleared_is_no_commit(
    core: Core, capsys: pytest.CaptureFixture[str]
) -> None:
    core.ready = False
    _poison.poison(core)
    assert not core.scheduler.needs_kv_cache_zeroing
    assert "before the next sync" in capsys.readouterr().err
    core.broken = "no memory"
    with pytest.raises(RuntimeError, match="could not be cleared: no memory"):
        core.forget()
    assert core.scheduler.jv_poisoned, "the next commit tries again"


def test_poison_while_kv_memory_is_given_back(core: Core) -> None:
    _poison.poison(core)
    core.model_executor.sleeping_tags = {"kv_cache"}
    assert core.forget()
    _poison.clear_awake(core)
    assert "jv_clear_kv" not in core.asked, "there is nothing to clear"
    core.model_executor.sleeping_tags = set()
    _poison.clear_awake(core)
    assert core.asked[-1] == "jv_clear_kv"
    assert not core.scheduler.jv_poisoned


def test_poison_in_memory_is_cleared_by_block_and_whole() -> None:
    torch = pytest.importorskip("torch")
    caches = [
        torch.full((8, 2, 3), torch.nan),
        [torch.full((4, 5), torch.nan), torch.full((3,), torch.nan)],
    ]
    runner: Any = SimpleNamespace(
        kv_caches=caches, kv_cache_config=SimpleNamespace(num_blocks=4)
    )
    worker: Any = SimpleNamespace(model_runner=runner, device=torch.device("cpu"))
    assert _poison.clears_new_blocks(worker)
    runner._zero_block_ids([1, 3])
    assert torch.isnan(caches[0]).flatten(1).any(1).tolist() == [
        True,
        True,
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert torch.isnan(caches[1][0]).any(1).tolist() == [True, False, True, False]
    assert torch.isnan(caches[1][1]).all(), "a state that is not kept by blocks"
    _poison.clear_kv(worker)
    assert not any(torch.isnan(t).any() for t in (caches[0], *caches[1]))
