"""What a rollout process sets before its engine starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from jvlab.engine import _process

torch = pytest.importorskip("torch")


@pytest.fixture
def compiler() -> Iterator[None]:
    """torch's compiler, with its setting restored afterwards."""
    import torch._dynamo as dynamo

    with dynamo.config.patch(disable=False):
        dynamo.reset()
        yield
    dynamo.reset()


def doubled(x: Any) -> Any:
    return x * 2


@pytest.mark.parametrize(("given", "traced"), [(None, 0), ("1", 0), ("0", 1)])
def test_without_the_compiler_nothing_is_traced(
    compiler: None, given: str | None, traced: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    if given is not None:
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", given)
    graphs = []
    compiled = torch.compile(
        doubled, backend=lambda graph, inputs: graphs.append(graph) or graph.forward
    )
    _process.switch_compiler_off()  # as in a worker: after the function was decorated
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    assert len(graphs) == traced


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "Cancelled call to utility method failed with error: Server shutting down",
            False,
        ),
        ("Cancelled call to utility method failed with error: out of memory", True),
        ("Engine core died", True),
    ],
)
def test_what_an_engine_that_is_closed_logs(text: str, said: bool):
    from jvlab.engine._engine import _is_news

    record = logging.LogRecord("vllm", logging.ERROR, "", 0, "%s", (text,), None)
    assert _is_news(record) is said
