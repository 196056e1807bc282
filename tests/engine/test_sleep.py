"""Sleep and wake: what is asleep when, when generation goes on, and what a sleeping engine refuses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from jvlab._errors import EngineDirty, SyncError
from jvlab.engine import _engine
from jvlab.engine._engine_sync import EngineSync, SyncState
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._sync_words import Terms


class FakeLlm:
    """Writes down what it is told."""

    errored = False

    def __init__(self) -> None:
        self.told: list[Any] = []
        scheduler = SimpleNamespace(
            scheduler_cls="jvlab.engine.worker._scheduler.JvlabAsyncScheduler"
        )
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler)
        self.engine_core = self

    async def sleep(self, level: int) -> None:
        self.told.append(("sleep", level))

    async def call_utility_async(self, method: str, *args: Any) -> None:
        self.told.append((method, *args))

    async def collective_rpc(self, method: str, args: Any = ()) -> list[dict[str, Any]]:
        self.told.append((method, *args))
        return [{"rank": 0, "digests": []}]

    async def resume_generation(self) -> None:
        self.told.append("go on")


class World:
    """One engine with version 3."""

    def __init__(self, link: str = "") -> None:
        self.llm = FakeLlm()
        self.sync = EngineSync(self.llm, SyncState(version=3, link=link), "p/0")

    def sleep(self, level: int) -> None:
        asyncio.run(_engine.sleep(self.llm, self.sync, level))

    def wake(self, *tags: str) -> list[Any]:
        self.llm.told.clear()
        asyncio.run(_engine.wake(self.llm, self.sync, list(tags)))
        return self.llm.told

    def check(self) -> pb.ReplicaOutcome:
        request = pb.RolloutSyncRequest(link=self.sync.state.link, phases=[pb.CHECK])
        return asyncio.run(self.sync.run(request)).outcome


def test_level_1_goes_on_when_all_is_back():
    world = World()
    world.sleep(1)
    assert world.sync.asleep == {"weights", "kv_cache"}
    assert world.wake("weights") == [("jv_wake", ["weights"])], "KV has no memory yet"
    assert world.wake("weights", "kv_cache") == [("jv_wake", ["kv_cache"]), "go on"], (
        "only what still sleeps is asked"
    )
    assert world.wake() == [], "nothing sleeps"
    world.sync.state.need_clean()


def test_level_2_does_not_go_on_before_a_sync():
    world = World()
    world.sleep(2)
    assert world.wake() == [("jv_wake", ["kv_cache", "weights"])]
    with pytest.raises(EngineDirty, match="level 2"):
        world.sync.state.need_clean()
    world.sleep(2)
    world.wake("weights")
    world.sync.state.terms = Terms(4)
    world.sync.state.did("commit")
    world.sync.state.terms = None
    assert world.wake("kv_cache") == [("jv_wake", ["kv_cache"]), "go on"]


def test_a_pause_and_a_dirty_engine_outlive_a_sleep():
    paused, dirty = World(), World()
    paused.sync.user_paused = True
    dirty.sync.state.dirty = dirty.sync.state.halted = True
    for world in (paused, dirty):
        world.sleep(1)
        assert world.wake() == [("jv_wake", ["kv_cache", "weights"])]


def test_shadows_are_given_back_before_a_sleep_and_before_a_wake():
    world = World(link="L")
    world.sleep(1)
    assert world.llm.told == [("jv_release_shadows",), ("sleep", 1)]
    assert world.wake("weights") == [("jv_release_shadows",), ("jv_wake", ["weights"])]
    world.sync.state.terms = Terms(4, "staged")
    assert world.wake("kv_cache")[0] == ("jv_wake", ["kv_cache"]), (
        "an open sync writes them just now"
    )


def test_what_a_sleeping_engine_refuses():
    world = World(link="L")
    world.sleep(1)
    told = list(world.llm.told)
    outcome = world.check()
    assert outcome.failed == "check"
    assert "its weights have no memory" in outcome.error
    with pytest.raises(SyncError, match="sleeps"):
        world.sync.need_weights()
    world.sleep(1)
    with pytest.raises(SyncError, match="sleeps at level 1"):
        world.sleep(2)
    assert world.llm.told == told, (
        "no worker was asked to read memory that is not there"
    )
    world.wake("weights")
    assert not world.check().failed


def test_an_open_sync_refuses_a_sleep():
    world = World(link="L")
    world.sync.state.terms = Terms(4)
    with pytest.raises(SyncError, match="version 4 is open"):
        world.sleep(1)
    assert world.llm.told == []
