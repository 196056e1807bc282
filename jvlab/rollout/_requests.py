"""Many requests to one AsyncLLM at once, without a task and a generator for each. Checked against vLLM 0.32.0.

`AsyncLLM.generate` checks and copies everything anew for each sample and wakes a task of its own for each answer. Here
a prompt is checked once, its samples are copies that differ in seed and name, and all of them answer into one list,
which one reader empties: what vLLM does for n > 1, with each sample returned as it ends. To be removed when AsyncLLM
takes many prompts in one call.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jvlab._errors import SamplingError
from jvlab.rollout import _vllm

TOGETHER = 256  # requests that are made before others on the loop have a turn


class _Logprobs:
    """In the place of vLLM's LogprobsProcessor: of each sampled token its log-probability, and nothing else."""

    __slots__ = ("logprobs",)
    prompt_logprobs = prompt_token_id_logprobs = cumulative_logprob = None

    def __init__(self) -> None:
        self.logprobs: list[float] = []

    def update_from_output(self, output: Any) -> None:
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()


class RequestGroup:
    """Requests that answer to one reader. `put` is what vLLM's RequestOutputCollector has."""

    def __init__(self, llm: Any, numbers: Iterator[int]) -> None:
        self._llm, self._numbers = llm, numbers
        self._keys: dict[str, Any] = {}  # of requests that are not finished
        self._done: list[tuple[Any, Any]] = []
        self._error: BaseException | None = None
        self._over = False
        self._changed = asyncio.Event()
        self._since_turn = 0

    def __len__(self) -> int:
        """How many have not been read."""
        return 0 if self._over else len(self._keys) + len(self._done)

    async def add(self, ids: list[int], params: Any, samples: Sequence[tuple[int, Any]], lora: Any = None) -> None:
        """One request per sample (its number, and the key that its answer will have) of a prompt."""
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
            self._since_turn += 1
            if (
                self._since_turn >= TOGETHER
            ):  # else neither a heartbeat nor a caller that leaves would be noticed meanwhile
                self._since_turn = 0
                await asyncio.sleep(0)

    @property
    def unfinished(self) -> int:
        """How many the engine still has."""
        return len(self._keys)

    def put(self, output: Any) -> None:
        """Called by vLLM's output processor: a finished request, or why there will be none."""
        if isinstance(output, Exception):
            self._error = output
        else:
            key = self._keys.pop(output.request_id, None)
            if key is not None:
                self._done.append((key, output))
        self._changed.set()

    async def take(self) -> list[tuple[Any, Any]]:
        """Those that have finished since the last time, at least one, with their keys; none after `drop`."""
        while not self._done and self._error is None and not self._over:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        done, self._done = self._done, []
        return done

    async def abort(self) -> None:
        """End what has not finished; it is still to be taken, with what there is of it."""
        if self._keys and not self._llm.errored:
            await self._llm.abort(list(self._keys), internal=True)

    async def drop(self) -> None:
        """Abort what has not finished, and have no more."""
        self._over = True
        names, self._keys, self._done = list(self._keys), {}, []
        self._changed.set()
        if names and not self._llm.errored:
            await self._llm.abort(names, internal=True)


class Queue:
    """What of one order is not in the engine yet: numbers, where a request in the engine is kilobytes.

    The engine gets `most` at a time and is topped up as they finish, so its memory does not grow with what a caller
    asks, and a caller that leaves has little to be aborted.
    """

    def __init__(self, work: Sequence[Any], prompts: Mapping[int, list[int]], most: int) -> None:
        self._prompts, self._most = prompts, most
        self._left = deque((item.prompt_index, deque(item.sample_indexes)) for item in work)
        self.parted = sum(len(item.sample_indexes) for item in work) > most  # the engine never has all of it at once

    def __bool__(self) -> bool:
        return bool(self._left)

    async def feed(self, group: RequestGroup, params: Any, lora: Any) -> None:
        """Fill the engine's part up."""
        while self._left and (room := self._most - group.unfinished) > 0:
            index, numbers = self._left[0]
            samples = [(k, (index, k)) for k in (numbers.popleft() for _ in range(min(room, len(numbers))))]
            if not numbers:
                self._left.popleft()
            try:
                await group.add(self._prompts[index], params, samples, lora)
            except _vllm.client_errors() as error:
                raise SamplingError(f"prompt {index}: {error}") from error

    def drain(self) -> list[tuple[int, int]]:
        """Keys of what was not fed, which now never will be."""
        left, self._left = self._left, deque()
        return [(index, k) for index, numbers in left for k in numbers]
