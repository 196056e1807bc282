"""vLLM's schedulers, made to forget a prefix cache of older weights while requests in flight keep their KV blocks.

vLLM's own `reset_prefix_cache` returns False and does nothing while any request holds a block, which is just the case
that a sync with pause="keep" meets. Here, without preempting anybody:

- every hash leaves the table and every block, so no later lookup finds a block that older weights computed;
- a request that holds blocks goes on with them, but what it fills from now on (old and new weights mixed) is hashed
  under a salt of its own: no other request can ever match those blocks;
- a request that holds none, waiting or preempted, keeps its hashes: it finds only what the new weights computed.

With reset_running_requests=True vLLM's own way is right and is used: all are preempted and computed anew.
Checked against vLLM 0.32.0; to be removed when vLLM can reset the cache around frozen requests.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore


class _Forgetful:
    """The mix-in; `self` is a Scheduler."""

    jv_forgotten = 0

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if not reset_running_requests:
            self.jv_forgotten += 1
            forget(self, f"jvlab-{self.jv_forgotten}")
            if not reset_connector:
                return True
        return super().reset_prefix_cache(reset_running_requests, reset_connector)  # type: ignore[misc]


def _jv_finish(self: Any, method: Any, args: Any, version: Any, recompute: Any) -> Any:
    """A worker method, then what a commit tells the engine, in one call; `self` is the EngineCore."""
    answers = self.collective_rpc(method, args=tuple(args))
    if not self.reset_prefix_cache(reset_running_requests=recompute):
        raise RuntimeError("vLLM did not reset its prefix cache")
    self.set_weight_version(version)
    return answers


EngineCore.jv_finish = _jv_finish  # type: ignore[attr-defined]  # this module is loaded where the core runs


class ForgetfulScheduler(_Forgetful, Scheduler):
    """For engines without async scheduling."""


class ForgetfulAsyncScheduler(_Forgetful, AsyncScheduler):
    """For engines with async scheduling, the default."""


def cached_blocks(pool: Any) -> set[int]:
    """The blocks in the prefix table; a look at every block of the pool would take milliseconds on a GPU."""
    out: set[int] = set()
    for found in pool.cached_block_hash_to_block._cache.values():  # a block, or several by number
        out.update(found) if isinstance(found, dict) else out.add(found.block_id)
    return out


def forget(scheduler: Any, salt: str) -> None:
    """Nothing computed before this call will be found by a prefix lookup after it."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    if pool.enable_caching:
        hashed = cached_blocks(pool)
        pool.evict_blocks(hashed | set(pool.cached_block_hashes_by_block))
        assert not len(pool.cached_block_hash_to_block), "every cached block is one of the pool's"
        for request in scheduler.requests.values():
            if any(manager.get_block_ids(request.request_id)):
                request.cache_salt = f"{salt}-{request.request_id}"
                request.block_hashes.clear()
                request.update_block_hashes()
