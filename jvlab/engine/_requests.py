"""Many requests to one AsyncLLM at once, without a task and a generator for each. Checked against vLLM 0.32.0.

`AsyncLLM.generate` checks and copies everything again for each sample and wakes a task for each output. Here a prompt
is checked once, its samples are copies that differ in seed and name, and all of them put their outputs into one list
with one reader: what vLLM does for n > 1, but with each sample returned as it ends. To be removed when AsyncLLM accepts
many prompts in one call.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jvlab._errors import SamplingError
from jvlab.engine import _vllm

YIELD_EVERY = 256  # requests added before yielding to the event loop


class _Logprobs:
    """Replaces vLLM's LogprobsProcessor: keeps only the log-probability of each sampled token."""

    __slots__ = ("logprobs",)
    prompt_logprobs = prompt_token_id_logprobs = cumulative_logprob = None

    def __init__(self) -> None:
        self.logprobs: list[float] = []

    def update_from_output(self, output: Any) -> None:
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()


class RequestGroup:
    """Requests with one reader. Has the `put` of vLLM's RequestOutputCollector."""

    def __init__(self, llm: Any, numbers: Iterator[int]) -> None:
        self._llm, self._numbers = llm, numbers
        self._keys: dict[str, Any] = {}  # of requests that are not finished
        self._done: list[tuple[Any, Any]] = []
        self._error: BaseException | None = None
        self._over = False
        self._changed = asyncio.Event()
        self._since_yield = 0

    def __len__(self) -> int:
        """How many outputs have not been read."""
        return 0 if self._over else len(self._keys) + len(self._done)

    async def add(self, ids: list[int], params: Any, samples: Sequence[tuple[int, Any]], lora: Any = None) -> None:
        """One request per sample (its number, and the key of its output) of a prompt."""
        llm = self._llm
        if llm.errored:
            raise _vllm.dead_errors()[0]()
        tasks = await llm.get_supported_tasks()
        request = llm.input_processor.process_inputs(
            "", _vllm.prompt(ids), _vllm.reseeded(params, 0), supported_tasks=tasks, lora_request=lora
        )
        llm.check_admission(len(samples))
        llm._run_output_handler()
        checked = request.sampling_params
        for number, key in samples:
            if self._over:  # dropped while it was being filled
                return
            own = copy.copy(request)
            own.request_id = own.external_req_id = f"jv-{next(self._numbers)}"
            own.sampling_params = _vllm.reseeded(checked, number)
            self._keys[own.request_id] = key
            llm.output_processor.add_request(own, None, None, 0, self)
            llm.output_processor.request_states[own.request_id].logprobs_processor = _Logprobs()
            await llm.engine_core.add_request_async(own)
            self._since_yield += 1
            if self._since_yield >= YIELD_EVERY:  # for heartbeats, and to notice a caller that leaves
                self._since_yield = 0
                await asyncio.sleep(0)

    @property
    def unfinished(self) -> int:
        """How many are still in the engine."""
        return len(self._keys)

    def put(self, output: Any) -> None:
        """Called by vLLM's output processor with a finished request, or an error."""
        if isinstance(output, Exception):
            self._error = output
        else:
            key = self._keys.pop(output.request_id, None)
            if key is not None:
                self._done.append((key, output))
        self._changed.set()

    async def take(self) -> list[tuple[Any, Any]]:
        """(key, output) of those that finished since the last call; waits for at least one. None after `drop`."""
        while not self._done and self._error is None and not self._over:
            self._changed.clear()
            await self._changed.wait()  # no deadline: the caller has one, and cancels this
        if self._error is not None:
            raise self._error
        done, self._done = self._done, []
        return done

    async def abort(self) -> None:
        """Abort what has not finished; its partial outputs can still be taken."""
        if self._keys and not self._llm.errored:
            await self._llm.abort(list(self._keys), internal=True)

    async def drop(self) -> None:
        """Abort what has not finished, and discard all outputs."""
        self._over = True
        names, self._keys, self._done = list(self._keys), {}, []
        self._changed.set()
        if names and not self._llm.errored:
            await self._llm.abort(names, internal=True)


class Queue:
    """The samples of one order that are not in the engine yet: numbers here, but kilobytes each in the engine.

    The engine holds at most `limit` and gets more as they finish, so its memory does not grow with the size of a call,
    and little is to be aborted when a caller leaves.
    """

    def __init__(self, work: Sequence[Any], prompts: Mapping[int, list[int]], limit: int) -> None:
        self._prompts, self._limit = prompts, limit
        self._left = deque((item.prompt_index, deque(item.sample_indexes)) for item in work)
        self.is_partial = sum(len(item.sample_indexes) for item in work) > limit  # never all in the engine at once

    def __bool__(self) -> bool:
        return bool(self._left)

    async def feed(self, group: RequestGroup, params: Any, lora: Any) -> None:
        """Add requests up to the limit."""
        while self._left and (free := self._limit - group.unfinished) > 0:
            index, numbers = self._left[0]
            samples = [(k, (index, k)) for k in (numbers.popleft() for _ in range(min(free, len(numbers))))]
            if not numbers:
                self._left.popleft()
            try:
                await group.add(self._prompts[index], params, samples, lora)
            except _vllm.client_errors() as error:
                raise SamplingError(f"prompt {index}: {error}") from error

    def drain(self) -> list[tuple[int, int]]:
        """Remove what is left; returns its keys."""
        left, self._left = self._left, deque()
        return [(index, k) for index, numbers in left for k in numbers]
