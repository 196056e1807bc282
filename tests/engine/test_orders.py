"""Which orders a replica takes: those of its own epoch, also when it learns that a moment later."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jvlab.engine import _engine
from jvlab.wire._rpc_errors import CallFailed


def check(servicer: Any, epoch: int, becomes: int) -> None:
    async def work() -> None:
        asyncio.get_running_loop().call_later(0.05, setattr, servicer, "epoch", becomes)
        await servicer._check(epoch)

    asyncio.run(work())


def replica(epoch: int) -> Any:
    async def make() -> Any:
        servicer = _engine.RolloutServicer(None)  # type: ignore[arg-type]
        servicer.epoch = epoch
        return servicer

    return asyncio.run(make())


def test_an_order_that_overtakes_the_answer_to_the_registration():
    check(replica(0), epoch=1, becomes=1)
    with pytest.raises(
        CallFailed, match="order of epoch 1, this replica is at epoch 2"
    ):
        # meant for what it was before it was fenced
        check(replica(0), epoch=1, becomes=2)


def test_an_order_of_another_epoch_is_refused_at_once():
    with pytest.raises(
        CallFailed, match="order of epoch 2, this replica is at epoch 3"
    ):
        check(replica(3), epoch=2, becomes=2)


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_engine, "REGISTER_SECONDS", 0.05)
    with pytest.raises(CallFailed, match="at epoch 0"):
        check(replica(0), epoch=1, becomes=0)
