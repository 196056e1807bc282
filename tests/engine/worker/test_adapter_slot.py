"""When a slot is cleared: before a link's first write, while generation is halted, and never again."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.vllm


class Written:
    """Both a link and a slot that write down what happens to them."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def _said(self, what: str) -> dict[str, Any]:
        self.events.append(what)
        return {}

    def prepare(self, terms: Any) -> dict[str, Any]:
        return self._said("prepare")

    def move(self) -> dict[str, Any]:
        return self._said("move")

    def commit(self) -> dict[str, Any]:
        return self._said("commit")

    def clear(self) -> None:
        self._said("clear")

    def check(self) -> None:
        pass


@pytest.mark.parametrize(
    "adapter", [True, False], ids=["an adapter's link", "the base's link"]
)
@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_a_slot_is_cleared_once(adapter: bool, mode: str):
    from jvlab.engine.worker._rank_sync import WorkerSync

    rank: Any = object.__new__(WorkerSync)
    seen: Any = Written()
    rank.rank, rank.slot, rank.link, rank._adapter, rank._stale = (
        0,
        seen,
        seen,
        seen if adapter else None,
        True,
    )
    rank.model = None
    rank._drafts = False
    for number in range(2):
        seen.events.clear()
        for answer in (rank.move({"mode": mode}), rank.commit()):
            assert "error" not in answer, answer
        first, after = (["clear"], []) if mode == "direct" else ([], ["clear"])
        assert seen.events == [
            "prepare",
            *(first if not number else []),
            "move",
            *(after if not number else []),
            "commit",
        ]
    rank.slot = None  # an engine without adapters
    seen.events.clear()
    rank.move({"mode": mode})
    assert seen.events == ["prepare", "move"]
