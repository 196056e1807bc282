"""Held tokens: whatever is held and released, the front end receives the same tokens in the same order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def held(clock: Clock) -> Any:
    from jvlab.engine.worker._scheduler import HeldOutputs

    return HeldOutputs(clock)


def request(**options: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        **{"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False, **options}
    )
    return SimpleNamespace(sampling_params=params, resumable=False)


def output(name: str, token: int, finish: Any = None, **fields: Any) -> Any:
    import numpy as np
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    column = lambda value, dtype: np.array([[value]], dtype)
    logprobs = LogprobsLists(
        column(token, np.int64), column(-token, np.float32), np.array([token % 7]), None
    )
    return EngineCoreOutput(
        name, [token], new_logprobs=logprobs, finish_reason=finish, **fields
    )


def step(
    kept: Any, requests: dict[str, Any], *outputs: Any, client: int = 0
) -> list[Any]:
    from vllm.v1.engine import EngineCoreOutputs

    groups = {client: EngineCoreOutputs(outputs=list(outputs))}
    kept.filter(groups, requests)
    return groups[client].outputs if groups else []  # no message that says nothing


def tokens(outputs: list[Any]) -> dict[str, list[int]]:
    """What arrived, each token beside its log-probability, id and rank."""
    for o in outputs:
        ids, values, ranks, _ = o.new_logprobs
        assert ids[:, 0].tolist() == o.new_token_ids
        assert values[:, 0].tolist() == [-t for t in o.new_token_ids]
        assert ranks.tolist() == [t % 7 for t in o.new_token_ids]
    return {o.request_id: o.new_token_ids for o in outputs}


def test_first_at_once_the_rest_with_the_last() -> None:
    from vllm.v1.engine import FinishReason

    kept, requests = held(Clock()), {"a": request(), "b": request()}
    assert tokens(step(kept, requests, output("a", 1), output("b", 11))) == {
        "a": [1],
        "b": [11],
    }
    assert step(kept, requests, output("a", 2), output("b", 12)) == []
    last = step(kept, requests, output("a", 3, FinishReason.LENGTH), output("b", 13))
    assert tokens(last) == {"a": [2, 3]}
    assert last[0].finish_reason == FinishReason.LENGTH
    assert tokens(step(kept, requests, output("b", 14, FinishReason.STOP))) == {
        "b": [12, 13, 14]
    }
    assert len(kept) == 0


@pytest.mark.parametrize(
    "watched", ["stream", "stop strings", "input to come", "another's"]
)
def test_what_somebody_watches_is_not_held(watched: str) -> None:
    from vllm.sampling_params import RequestOutputKind

    asked = {
        "stream": request(output_kind=RequestOutputKind.DELTA),
        "stop strings": request(detokenize=True, stop=["x"]),
        "input to come": SimpleNamespace(**{**vars(request()), "resumable": True}),
        "another's": None,
    }[watched]
    kept = held(Clock())
    for token in (1, 2, 3):
        assert tokens(step(kept, {"a": asked}, output("a", token))) == {"a": [token]}
    assert len(kept) == 0


def test_an_event_goes_out_with_what_was_held_before_it() -> None:
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType

    kept, requests = held(Clock()), {"a": request()}
    step(kept, requests, output("a", 1))
    step(kept, requests, output("a", 2))
    preempted = [EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED)]
    told = step(kept, requests, output("a", 3, events=preempted))
    assert tokens(told) == {"a": [2, 3]}
    assert told[0].events == preempted
    assert step(kept, requests, output("a", 4)) == []


def test_nothing_is_held_for_long() -> None:
    from jvlab.engine.worker._scheduler import HOLD_SECONDS

    clock = Clock()
    kept, requests = held(clock), {"a": request()}
    step(kept, requests, output("a", 1))
    assert step(kept, requests, output("a", 2)) == []
    clock.now += 1.5 * HOLD_SECONDS
    assert tokens(step(kept, requests, output("a", 3))) == {"a": [2, 3]}
    assert step(kept, requests, output("a", 4)) == []


def test_release_and_drop() -> None:
    from vllm.v1.engine import FinishReason

    kept, requests = held(Clock()), {"a": request(), "b": request()}
    step(kept, requests, output("a", 1), client=1)
    step(kept, requests, output("a", 2), client=1)
    step(kept, requests, output("b", 11))
    released = kept.release()
    assert list(released) == [1]
    assert tokens(released[1].outputs) == {"a": [2]}
    assert kept.release() == {}
    step(kept, requests, output("a", 3), client=1)
    kept.drop(["a", "unknown"])
    assert kept.release() == {}
    assert len(kept) == 1
    assert tokens(step(kept, requests, output("b", 12, FinishReason.STOP))) == {
        "b": [12]
    }


def test_the_core_sends_held_tokens_under_their_own_label() -> None:
    """Weights get a new label, or generation is paused: what older weights made has left before."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCoreProc

    from jvlab.engine.worker import _scheduler

    sent: list[tuple[int, EngineCoreOutputs]] = []
    kept, requests = held(Clock()), {"a": request()}
    core: Any = EngineCoreProc.__new__(EngineCoreProc)
    core._weight_version = "7"
    core.scheduler = SimpleNamespace(jv_held=kept)
    core.output_queue = SimpleNamespace(put_nowait=sent.append)
    step(kept, requests, output("a", 1))
    step(kept, requests, output("a", 2))
    core.set_weight_version("8")
    assert core._weight_version == "8"
    ((client, group),) = sent
    assert (client, group.weight_version, tokens(group.outputs)) == (0, "7", {"a": [2]})
    step(kept, requests, output("a", 3))
    # refused by vLLM, but the tokens left first
    with pytest.raises(ValueError, match="pause mode"):
        core.pause_scheduler("no such mode")
    assert (sent[1][1].weight_version, tokens(sent[1][1].outputs)) == ("8", {"a": [3]})
    assert (
        _scheduler.JvlabAsyncScheduler.update_from_output
        is _scheduler._SchedulerMixin.update_from_output
    )


def test_the_load_is_told_now_and_then_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jvlab.engine.worker import _scheduler

    class Plain:
        unfinished = 1

        def make_stats(self, *figures: Any, **more: Any) -> str:
            return "stats"

        def get_num_unfinished_requests(self) -> int:
            return self.unfinished

    class Quiet(_scheduler._SchedulerMixin, Plain): ...

    clock = Clock()
    clock.now = 100.0
    monkeypatch.setattr(_scheduler.time, "monotonic", clock)
    scheduler = Quiet()
    assert scheduler.make_stats(None, perf_stats=None) == "stats"
    assert scheduler.make_stats(None, perf_stats=None) is None
    # a step's own figures are never lost
    assert scheduler.make_stats("drafts", perf_stats=None) == "stats"
    clock.now += 2 * _scheduler.REPORT_SECONDS
    assert scheduler.make_stats() == "stats"
    assert scheduler.make_stats() is None
    scheduler.unfinished = 0
    assert scheduler.make_stats() == "stats"
