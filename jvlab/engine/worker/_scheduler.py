"""vLLM's schedulers with a prefix cache that can be reset after a sync while requests in flight keep their KV blocks.

(They also look for NaN, see `_poison.py`, hold tokens that are not needed yet, see below, return the
experts that tokens were given, see `_routes.py`, and report their load less often than at every step.)

vLLM's own `reset_prefix_cache` returns False and does nothing while any request holds a block, which is the case in a
sync with pause="keep". Here, without preempting any request:

- every hash is removed from the table and from every block, so no later lookup finds a block of older weights;
- a request that holds blocks keeps them, but those it fills from now on (old and new weights mixed) are hashed with a
  salt of its own: no other request can match them;
- a request that holds none, waiting or preempted, keeps its hashes: it finds only what the new weights computed.

With reset_running_requests=True vLLM's own reset is used: all requests are preempted and recomputed.
Checked against vLLM 0.32.0; to be removed when vLLM can reset the cache around frozen requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from jvlab.engine import _patches
from jvlab.engine.worker import _poison
from jvlab.engine.worker._routes import ATTRIBUTE, RequestRoutes

# Holds output tokens in the engine core until they are needed. Checked against vLLM 0.32.0.
# vLLM's core sends every token of every request to its front end as it is generated: 512 requests are 512 small
# messages a step, which cost both sides time. Requests that asked for their final output only, and have no stop
# strings to check, can wait:
#
#     first token      sent at once: it carries the times at which the request was queued, scheduled and started
#     later tokens     held, with their log-probabilities
#     all held tokens  sent before the weight version changes or generation is paused or aborted (a message carries one
#                      version), and every HOLD_SECONDS, so that token rates stay up to date
#     the last token   sent with the held tokens of its request
#
# The front end receives the same in fewer messages; it accepts several tokens in one, as after speculative decoding. To
# be removed when vLLM's scheduler respects RequestOutputKind.FINAL_ONLY itself.

HOLD_SECONDS = 0.5  # the longest that tokens are held


class _Held:
    """The held tokens of one request."""

    __slots__ = ("client", "logprobs", "tokens")

    def __init__(self, client: int) -> None:
        self.client = client
        self.tokens: list[int] = []
        self.logprobs: list[LogprobsLists] = []

    def add(self, tokens: list[int], logprobs: LogprobsLists | None) -> None:
        self.tokens += tokens
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def take(self) -> tuple[list[int], LogprobsLists | None]:
        tokens = self.tokens
        parts = self.logprobs
        self.tokens = []
        self.logprobs = []
        if len(parts) < 2:
            return tokens, parts[0] if parts else None
        ids, values, ranks, _ = zip(*parts, strict=True)
        return tokens, LogprobsLists(
            np.concatenate(ids), np.concatenate(values), np.concatenate(ranks), None
        )


class HeldOutputs:
    """The held tokens of one scheduler. No I/O."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._held: dict[str, _Held] = {}
        self._clock = clock
        self._released = clock()

    def __len__(self) -> int:
        return len(self._held)

    def filter(
        self, outputs: dict[int, EngineCoreOutputs], requests: dict[str, Any]
    ) -> None:
        """Remove from one step's outputs what can be held, and add held tokens to their request's last output."""
        all_held = self._held
        for client, group in outputs.items():
            sent = []
            for output in group.outputs:
                name = output.request_id
                held = all_held.get(name)
                if held is None:
                    if output.finish_reason is None and _can_wait(requests.get(name)):
                        all_held[name] = _Held(client)
                elif output.finish_reason is None and _is_plain(output):
                    held.add(output.new_token_ids, output.new_logprobs)
                    continue
                else:
                    if held.tokens:
                        held.add(output.new_token_ids, output.new_logprobs)
                        output.new_token_ids, output.new_logprobs = held.take()
                    if output.finish_reason is not None:
                        del all_held[name]
                sent.append(output)
            group.outputs = sent
        if all_held and self._clock() - self._released > HOLD_SECONDS:
            for client, late in self.release().items():
                outputs.setdefault(client, EngineCoreOutputs()).outputs.extend(
                    late.outputs
                )
        for client, group in list(outputs.items()):
            if (
                not group.outputs
                and not group.finished_requests
                and group.scheduler_stats is None
            ):
                del outputs[client]  # an empty message

    def release(self) -> dict[int, EngineCoreOutputs]:
        """All held tokens, by client; their requests continue."""
        self._released = self._clock()
        groups: dict[int, EngineCoreOutputs] = {}
        for name, held in self._held.items():
            if held.tokens:
                tokens, logprobs = held.take()
                group = groups.setdefault(held.client, EngineCoreOutputs())
                group.outputs.append(
                    EngineCoreOutput(name, tokens, new_logprobs=logprobs)
                )
        return groups

    def drop(self, names: Iterable[str]) -> None:
        """These requests have ended; discard their tokens."""
        for name in names:
            self._held.pop(name, None)


def _can_wait(request: Any) -> bool:
    """Whether this request's tokens are not needed before it ends."""
    if request is None:
        return False
    params = request.sampling_params
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.detokenize
        and not request.resumable
    )


def _is_plain(output: EngineCoreOutput) -> bool:
    """Whether it has only tokens and log-probabilities, nothing that needs a message of its own."""
    return (
        output.events is None
        and output.prefill_stats is None
        and output.new_prompt_logprobs_tensors is None
        and output.pooling_output is None
        and output.new_sampling_mask is None
        and output.routed_experts is None
        and output.kv_transfer_params is None
        and output.ec_transfer_params is None
        and output.trace_headers is None
        and not output.num_nans_in_logits
    )


# ----------------------------------------------------------------------------------------------------

REPORT_SECONDS = 0.05


class _SchedulerMixin:
    """`self` is a Scheduler."""

    jv_resets = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.jv_held = HeldOutputs()
        self.jv_reported = 0.0
        self.jv_routes = RequestRoutes()
        self.jv_poisoned = self.jv_saw_nan = self.jv_clears = False

    def update_from_output(self, scheduled: Any, output: Any) -> Any:
        if _poison.nan_in(output):
            self.jv_saw_nan = True
        routes = getattr(output, ATTRIBUTE, None)
        if routes is not None:
            self.jv_routes.add(routes, self.requests)  # type: ignore[attr-defined]  # which still has those that end now
        outputs = super().update_from_output(scheduled, output)  # type: ignore[misc]
        if routes is not None:
            self.jv_routes.attach(outputs)
        self.jv_held.filter(outputs, self.requests)  # type: ignore[attr-defined]
        return outputs

    def make_stats(self, *figures: Any, **more: Any) -> Any:
        """The load, every REPORT_SECONDS and when all requests are done; a step's own `figures`, at that step.

        Counts that vLLM collects here are kept until they are reported.
        """
        now = time.monotonic()
        known = any(figure is not None for figure in (*figures, *more.values()))
        recent = now - self.jv_reported < REPORT_SECONDS
        busy = self.get_num_unfinished_requests()  # type: ignore[attr-defined]
        if not known and recent and busy:
            return None
        self.jv_reported = now
        return super().make_stats(*figures, **more)  # type: ignore[misc]

    def set_pause_state(self, pause_state: Any) -> None:
        """As vLLM's, without its log line: it would come twice in every sync, while generation is paused."""
        self._pause_state = pause_state

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        ended = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        # an error's output includes the held tokens
        if finished_status is not RequestStatus.FINISHED_ERROR:
            self.jv_held.drop(request.request_id for request in ended)
        self.jv_routes.drop(request.request_id for request in ended)
        return ended

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if not reset_running_requests:
            self.jv_resets += 1
            remove_prefix_hashes(self, f"jvlab-{self.jv_resets}")
            aux = self.aux_output_connector  # type: ignore[attr-defined]
            if aux is not None:
                aux.reset()  # experts chosen by older weights; as vLLM's own reset does
            if not reset_connector:
                return True
        return super().reset_prefix_cache(reset_running_requests, reset_connector)  # type: ignore[misc]


_patches.install("core")


class JvlabScheduler(_SchedulerMixin, Scheduler):
    """For engines without async scheduling."""


class JvlabAsyncScheduler(_SchedulerMixin, AsyncScheduler):
    """For engines with async scheduling, the default."""


def cached_blocks(pool: Any) -> set[int]:
    """The blocks in the prefix table; scanning every block of the pool would take milliseconds on a GPU."""
    out: set[int] = set()
    # a block, or several by id
    for found in pool.cached_block_hash_to_block._cache.values():
        out.update(found) if isinstance(found, dict) else out.add(found.block_id)
    return out


def remove_prefix_hashes(scheduler: Any, salt: str) -> None:
    """No later prefix lookup will find anything computed before this call."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    if pool.enable_caching:
        hashed = cached_blocks(pool)
        pool.evict_blocks(hashed | set(pool.cached_block_hashes_by_block))
        assert not len(pool.cached_block_hash_to_block), (
            "every cached block is one of the pool's"
        )
        for request in scheduler.requests.values():
            if any(manager.get_block_ids(request.request_id)):
                request.cache_salt = f"{salt}-{request.request_id}"
                request.block_hashes.clear()
                request.update_block_hashes()
