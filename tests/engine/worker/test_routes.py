"""Experts of each token, from a step of the runner to a finished request's output: chunks, preemptions, aborts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from jvlab._errors import Unsupported
from jvlab.engine.worker import _routes
from jvlab.engine.worker._routes import (
    ATTRIBUTE,
    RequestRoutes,
    RouteCapture,
    read_routes,
)

LAYERS, CHOSEN = 3, 2


class Runner:
    """A runner whose routers choose by the position of a token: expert 10 · layer + position, then 7."""

    def __init__(self) -> None:
        select = lambda hidden, layer: (
            torch.stack([hidden * 0.5, hidden * 0.25], dim=1),
            torch.stack([10 * layer + hidden, hidden * 0 + 7], dim=1).int(),
        )
        self.layers = [
            SimpleNamespace(
                router=SimpleNamespace(
                    select_experts=lambda hidden, layer=layer: select(hidden, layer)
                )
            )
            for layer in range(LAYERS)
        ]
        self.skipped: Any = None  # a layer that is not computed
        self.input_batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=[])

    def step(self, *rows: tuple[str, int, int]) -> Any:
        """One step: (request, first position, tokens) each. Returns what the scheduler gets."""
        batch = self.input_batch
        batch.req_ids, batch.num_computed_tokens_cpu = (
            [r[0] for r in rows],
            np.array([r[1] for r in rows]),
        )
        self.hidden = torch.cat([torch.arange(r[1], r[1] + r[2]).float() for r in rows])
        counts = {r[0]: r[2] for r in rows}
        self.execute_model(
            SimpleNamespace(
                num_scheduled_tokens=counts,
                total_num_scheduled_tokens=sum(counts.values()),
            )
        )
        return self.sample_tokens(None)

    def execute_model(self, scheduled: Any) -> None:
        for layer in self.layers:
            if layer is not self.skipped:
                weights, ids = layer.router.select_experts(self.hidden)
                weights.zero_()  # a kernel may reuse their memory
                ids.zero_()

    def sample_tokens(self, grammar: Any) -> Any:
        return SimpleNamespace()


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(_routes, "expert_layers", lambda runner: runner.layers)
    made = Runner()
    assert len(RouteCapture(made)._layers) == LAYERS
    return made


def request(prompt_logprobs: int | None = None) -> Any:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(prompt_logprobs=prompt_logprobs)
    )


def finished(
    routes: RequestRoutes, name: str, reason: str | None = "stop"
) -> np.ndarray | None:
    output = SimpleNamespace(request_id=name, finish_reason=reason, routed_experts=None)
    routes.attach({0: SimpleNamespace(outputs=[output])})
    return output.routed_experts


def test_each_token_has_its_own(runner: Runner) -> None:
    """A prompt in chunks beside another request, whose steps come between; positions do not get mixed up."""
    routes, requests = (
        RequestRoutes(),
        {"a": request(), "b": request(), "scored": request(0)},
    )
    for step in (
        (("a", 0, 3), ("scored", 0, 2)),
        (("b", 0, 2), ("a", 3, 2)),
        (("a", 5, 1), ("gone", 4, 1), ("b", 2, 1)),
    ):
        routes.add(getattr(runner.step(*step), ATTRIBUTE), requests)
    assert len(routes) == 2, "a request that is scored, or has ended, is not kept"
    assert finished(routes, "a", None) is None
    found = finished(routes, "a")
    assert found is not None
    assert found.shape == (6, LAYERS, 2, CHOSEN)
    ids, weights = read_routes(found, 7)
    assert ids.dtype == np.int16
    assert weights is not None
    wanted = 10 * np.arange(LAYERS) + np.arange(6)[:, None]
    np.testing.assert_array_equal(ids[:6, :, 0], wanted)
    np.testing.assert_array_equal(ids[:6, :, 1], 7)
    np.testing.assert_array_equal(weights[:6, 0], np.arange(6)[:, None] * [0.5, 0.25])
    assert (ids[6] == -1).all(), "the last token is in no step"
    assert (read_routes(found, 4)[0][3] == -1).all(), (
        "tokens after a stop string are cut"
    )
    routes.drop(["b"])
    assert not len(routes)


def test_what_is_computed_again_replaces_what_was(runner: Runner) -> None:
    routes, requests = RequestRoutes(), {"a": request()}
    wrong = [
        (
            "a",
            0,
            np.full((4, LAYERS, CHOSEN), 99, np.int16),
            np.ones((4, LAYERS, CHOSEN), np.float32),
        )
    ]
    routes.add(wrong, requests)  # before a preemption
    routes.add(getattr(runner.step(("a", 0, 4)), ATTRIBUTE), requests)
    found = finished(routes, "a")
    assert found is not None
    np.testing.assert_array_equal(read_routes(found, 5)[0][:4, 0, 0], np.arange(4))


def test_positions_of_the_prefix_cache_are_not_known(runner: Runner) -> None:
    routes, requests = RequestRoutes(), {"a": request()}
    routes.add(getattr(runner.step(("a", 16, 2)), ATTRIBUTE), requests)
    found = finished(routes, "a")
    assert found is not None
    ids, _ = read_routes(found, 19)
    assert (ids[:16] == -1).all()
    assert (ids[16:18, 0, 0] == [16, 17]).all()
    assert (ids[18] == -1).all()


def test_a_layer_that_was_not_seen_is_an_error(runner: Runner) -> None:
    runner.skipped = runner.layers[1]
    with pytest.raises(
        Unsupported, match=r"of 2 tokens the layers' routers saw \[2, 0, 2\]"
    ):
        runner.step(("a", 0, 2))
    runner.skipped = None
    assert len(getattr(runner.step(("a", 0, 2)), ATTRIBUTE)) == 1


def test_vllm_s_own_output_has_ids_alone() -> None:
    ids, weights = read_routes(np.arange(12, dtype=np.uint8).reshape(2, 3, 2), 3)
    assert weights is None
    assert ids.dtype == np.int16
    np.testing.assert_array_equal(ids[:2].ravel(), np.arange(12))
    assert (ids[2] == -1).all()
