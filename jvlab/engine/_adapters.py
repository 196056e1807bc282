"""LoRA adapters of one engine: versions side by side, each unloaded when its last request has ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jvlab._errors import ConfigError, Unsupported
from jvlab.engine import _vllm
from jvlab.wire import jvlab_pb2 as pb


@dataclass
class Loaded:
    """One adapter at one version."""

    name: str
    version: int
    request: Any  # vLLM's LoRARequest, for requests that use it
    users: int = 0  # requests that compute with it
    dropped: bool = False  # no new request may use it


class EngineAdapters:
    """Each version has an id of its own, so that vLLM confuses neither versions nor their KV blocks."""

    def __init__(self, llm: Any, max_adapters: int, slots: int = 0) -> None:
        self._llm, self._max, self._slots = llm, max_adapters, slots
        self._reserved = False  # a slot belongs to an adapter that a link syncs
        self._loaded: dict[tuple[str, int], Loaded] = {}
        self._numbers = itertools.count(1)
        self._loading = asyncio.Lock()

    def listed(self) -> list[pb.Adapter]:
        """Names and versions that requests may use."""
        return [pb.Adapter(name=a.name, version=a.version) for a in self._loaded.values() if not a.dropped]

    def reserve_slot(self) -> None:
        """Leave one slot to the adapter of a link, for as long as the engine lives.

        vLLM must never need that slot for another, so that from now on no more adapters are loaded than have a slot.
        """
        if len(self._loaded) > self._slots - 1:
            held = ", ".join(f"{a.name} (version {a.version})" for a in self._loaded.values())
            raise ConfigError(
                f"no slot is left for a synced adapter: the engine has {self._slots}, and holds {held}",
                remedy=f"pool.unload_adapter(name), or launch(..., engine={{'max_loras': {len(self._loaded) + 1}}})",
            )
        self._reserved = True

    async def load(self, adapter: pb.Adapter) -> Loaded:
        """Load a version beside the others, unless it is loaded already."""
        async with self._loading:
            found = self._loaded.get((adapter.name, adapter.version))
            if found is None:
                found = await self._read(adapter)
                self._loaded[adapter.name, adapter.version] = found
            found.dropped = False
            return found

    async def _read(self, adapter: pb.Adapter) -> Loaded:
        if not self._max:
            raise Unsupported(
                "the engine was started without LoRA",
                remedy="launch(..., engine={'enable_lora': True, 'max_loras': 4, 'max_lora_rank': 16})",
            )
        if self._reserved and len(self._loaded) >= self._slots - 1:
            raise ConfigError(
                f"no slot for adapter {adapter.name!r}: the engine has {self._slots}, one of them belongs to the "
                f"adapter that a link syncs, and {len(self._loaded)} are loaded",
                remedy=f"launch(..., engine={{'max_loras': {self._slots + 1}}}), or pool.unload_adapter(name); "
                "a new version of an adapter needs a slot beside the old one",
            )
        if len(self._loaded) >= self._max:
            held = ", ".join(f"{a.name} (version {a.version}, {a.users} in flight)" for a in self._loaded.values())
            raise ConfigError(
                f"no room for adapter {adapter.name!r}: the engine holds {self._max} at most, and has {held}",
                remedy="pool.unload_adapter(name), or launch(..., engine={'max_cpu_loras': ...}); "
                "a new version of an adapter needs room beside the old one",
            )
        if not (Path(adapter.path) / "adapter_config.json").is_file():
            raise ConfigError(
                f"{adapter.path} holds no adapter_config.json",
                remedy="pass a folder in PEFT's format that the replica's machine can read, or tensors",
            )
        request = _vllm.lora_request(f"{adapter.name}@{adapter.version}", next(self._numbers), adapter.path)
        try:
            await self._llm.add_lora(request)
        except _vllm.dead_errors():
            raise
        except Exception as error:  # the loader may raise anything
            raise ConfigError(
                f"vLLM cannot load adapter {adapter.name!r} from {adapter.path}: {error}",
                remedy="its rank must not exceed max_lora_rank, and its modules must be the model's",
            ) from error
        return Loaded(adapter.name, adapter.version, request)

    async def drop(self, adapter: pb.Adapter) -> None:
        """No new request uses this version; it is unloaded after the last that does."""
        found = self._loaded.get((adapter.name, adapter.version))
        if found is not None:
            found.dropped = True
            await self._sweep(found)

    @contextlib.asynccontextmanager
    async def use(self, adapter: pb.Adapter | None) -> AsyncIterator[Loaded | None]:
        """Keep the version loaded meanwhile; a replica that joined later loads it first."""
        if adapter is None:
            yield None
            return
        found = self._loaded.get((adapter.name, adapter.version)) or self._newer(adapter) or await self.load(adapter)
        found.users += 1
        try:
            yield found
        finally:
            found.users -= 1
            found.dropped = found.dropped or self._newer(found) is not None
            await asyncio.shield(self._sweep(found))

    def _newer(self, than: pb.Adapter | Loaded) -> Loaded | None:
        """A later version, for a request that arrives after its own was dropped."""
        later = [a for a in self._loaded.values() if a.name == than.name and a.version > than.version and not a.dropped]
        return max(later, key=lambda a: a.version, default=None)

    async def _sweep(self, found: Loaded) -> None:
        if found.dropped and not found.users and self._loaded.pop((found.name, found.version), None):
            await self._llm.remove_lora(found.request.lora_int_id)
