"""LoRA adapters of one engine: versions side by side, each dropped with its last request. The engine is a fake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jvlab import errors
from jvlab.engine import _vllm
from jvlab.engine._engine import EngineAdapters
from jvlab.engine._engine_sync import LinkedAdapter
from jvlab.wire import jvlab_pb2 as pb


class FakeEngine:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.broken = False

    async def add_lora(self, request: Any) -> bool:
        await asyncio.sleep(0)
        if self.broken:
            raise ValueError("LoRA rank 16 is greater than max_lora_rank 8")
        self.calls.append(f"add {request.lora_name} as {request.lora_int_id}")
        return True

    async def remove_lora(self, number: int) -> bool:
        await asyncio.sleep(0)
        self.calls.append(f"remove {number}")
        return True


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda name, number, path: SimpleNamespace(
        lora_name=name, lora_int_id=number, lora_path=path
    )
    monkeypatch.setattr(_vllm, "lora_request", make)
    monkeypatch.setattr(_vllm, "dead_errors", lambda: (MemoryError,))


@pytest.fixture
def style(tmp_path: Path) -> Callable[[int], pb.Adapter]:
    (tmp_path / "adapter_config.json").write_text("{}")
    return lambda version: pb.Adapter(name="style", version=version, path=str(tmp_path))


def names(adapters: EngineAdapters) -> list[tuple[str, int]]:
    return [(a.name, a.version) for a in adapters.listed()]


def test_a_version_goes_with_its_last_request(style: Callable[[int], pb.Adapter]):
    async def work() -> None:
        engine = FakeEngine()
        adapters = EngineAdapters(engine, 4)
        await adapters.load(style(1))
        await adapters.load(style(1))
        async with adapters.use(style(1)) as first, adapters.use(style(1)):
            await adapters.load(style(2))
            await adapters.drop(style(1))
            assert names(adapters) == [("style", 2)]
            assert first is not None
            assert first.users == 2
            assert engine.calls == ["add style@1 as 1", "add style@2 as 2"], (
                "it is still in use"
            )
        assert engine.calls[2:] == ["remove 1"]
        await adapters.drop(style(1))
        await adapters.drop(style(2))
        assert engine.calls[3:] == ["remove 2"]
        assert names(adapters) == []

    asyncio.run(work())


def test_a_replica_that_came_later_loads_what_it_is_asked_for(
    style: Callable[[int], pb.Adapter],
):
    async def work() -> None:
        engine = FakeEngine()
        adapters = EngineAdapters(engine, 4)
        async with adapters.use(None) as none:
            assert none is None

        async def one() -> int:
            async with adapters.use(style(3)) as found:
                assert found is not None
                return found.version

        assert await asyncio.gather(one(), one()) == [3, 3]
        assert engine.calls == ["add style@3 as 1"], (
            "once, though two asked at once; and it stays"
        )
        # was on its way when the pool went over to version 3
        async with adapters.use(style(2)) as found:
            assert found is not None
            assert found.version == 3
        assert names(adapters) == [("style", 3)]

    asyncio.run(work())


def test_what_cannot_be_loaded_leaves_nothing(
    style: Callable[[int], pb.Adapter], tmp_path: Path
):
    async def work() -> None:
        engine = FakeEngine()
        adapters = EngineAdapters(engine, 1)
        engine.broken = True
        with pytest.raises(errors.ConfigError, match="max_lora_rank 8"):
            await adapters.load(style(1))
        engine.broken = False
        with pytest.raises(errors.ConfigError, match=r"holds no adapter_config\.json"):
            await adapters.load(
                pb.Adapter(name="style", version=1, path=str(tmp_path / "none"))
            )
        assert names(adapters) == []
        await adapters.load(style(1))
        with pytest.raises(errors.ConfigError, match="no room for adapter 'style'"):
            await adapters.load(style(2))
        with pytest.raises(errors.Unsupported, match="started without LoRA"):
            await EngineAdapters(engine, 0).load(style(1))
        assert names(adapters) == [("style", 1)]

    asyncio.run(work())


def test_a_slot_is_left_to_the_adapter_of_a_link(style: Callable[[int], pb.Adapter]):
    async def work() -> None:
        adapters = EngineAdapters(FakeEngine(), 4, slots=2)
        await adapters.load(style(1))
        await adapters.load(style(2))
        with pytest.raises(
            errors.ConfigError,
            match=r"(?s)no slot is left for a synced adapter.*'max_loras': 3",
        ):
            adapters.reserve_slot()
        await adapters.drop(style(1))
        adapters.reserve_slot()
        with pytest.raises(
            errors.ConfigError, match=r"(?s)no slot for adapter 'style'.*'max_loras': 3"
        ):
            await adapters.load(style(3))
        assert names(adapters) == [("style", 2)]

    asyncio.run(work())


def test_spans_without_the_linked_adapter_have_the_versions_of_the_base():
    linked = LinkedAdapter()
    found = [
        SimpleNamespace(version=str(v), start=s, end=e)
        for v, s, e in ((3, 0, 4), (4, 4, 6), (6, 6, 9))
    ]
    plain = [(3, 0, 4), (4, 4, 6), (6, 6, 9)]
    assert linked.spans(found, False) == plain, "no link to an adapter was ever opened"
    linked.opened(7, version=3)
    assert linked.request.lora_int_id == 7
    linked.committed(4)
    linked.open = False  # a link to the base
    linked.committed(5)
    linked.opened(7, version=5)
    linked.committed(6)
    assert linked.spans(found, True) == plain
    assert linked.spans(found, False) == [(3, 0, 6), (5, 6, 9)], (
        "4 and 6 were the adapter's"
    )
