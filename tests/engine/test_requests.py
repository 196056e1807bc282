"""A group of requests over vLLM's own output processor, with a core that answers when the test says so."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


class FakeLlm:
    """As much of AsyncLLM as a group uses; the output processor is the real one."""

    def __init__(self) -> None:
        from vllm.v1.engine.output_processor import OutputProcessor

        self.output_processor = OutputProcessor(None, log_stats=False)
        self.input_processor = self.engine_core = self
        self.errored = False
        self.sent: list[Any] = []
        self.aborted: list[str] = []
        self.prompts = 0

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def process_inputs(
        self,
        name: str,
        prompt: Any,
        params: Any,
        supported_tasks: Any,
        lora_request: Any,
    ) -> Any:
        from vllm.v1.engine import EngineCoreRequest

        self.prompts += 1
        return EngineCoreRequest(
            name,
            prompt["prompt_token_ids"],
            None,
            params,
            None,
            0.0,
            lora_request,
            None,
            None,
        )

    def check_admission(self, count: int) -> None: ...

    def _run_output_handler(self) -> None: ...

    async def add_request_async(self, request: Any) -> None:
        self.sent.append(request)

    async def abort(self, names: list[str], internal: bool) -> None:
        assert internal
        self.aborted += self.output_processor.abort_requests(names, internal)

    def answer(self, request: Any, *tokens: int) -> None:
        import numpy as np
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.outputs import LogprobsLists

        ids = np.array(tokens)[:, None]
        logprobs = LogprobsLists(
            ids, -ids.astype(np.float32), np.ones(len(tokens), np.int64), None
        )
        last = EngineCoreOutput(
            request.request_id,
            list(tokens),
            new_logprobs=logprobs,
            finish_reason=FinishReason.LENGTH,
        )
        self.output_processor.process_outputs([last], weight_version="3")


def made() -> tuple[FakeLlm, Any, Any]:
    from jvlab.engine import _vllm
    from jvlab.engine._requests import RequestGroup

    llm = FakeLlm()
    return (
        llm,
        RequestGroup(llm, itertools.count()),
        _vllm.sampling({"max_tokens": 4, "seed": 10}, False),
    )


def test_each_sample_has_its_seed_and_answers_under_its_key() -> None:
    async def go() -> None:
        llm, group, params = made()
        await group.add([1, 2], params, [(0, "a0"), (3, "a3")])
        await group.add([5], params, [(1, "b1")])
        assert llm.prompts == 2
        assert [r.sampling_params.seed for r in llm.sent] == [10, 13, 11]
        assert [r.prompt_token_ids for r in llm.sent] == [[1, 2], [1, 2], [5]]
        assert len({r.request_id for r in llm.sent}) == len(group) == 3
        llm.answer(llm.sent[1], 7, 8)
        llm.answer(llm.sent[2], 9)
        done = await group.take()
        assert [key for key, _ in done] == ["a3", "b1"]
        (result,) = done[0][1].outputs
        assert (result.token_ids, result.logprobs) == ([7, 8], [-7.0, -8.0])
        assert [(s.version, s.start, s.end) for s in result.weight_versions] == [
            ("3", 0, 2)
        ]
        waiting = asyncio.ensure_future(group.take())
        await asyncio.sleep(0)
        assert not waiting.done()
        llm.answer(llm.sent[0], 6)
        assert [key for key, _ in await waiting] == ["a0"]
        assert len(group) == 0
        await group.drop()
        assert llm.aborted == []

    asyncio.run(go())


def test_leaving_aborts_what_has_not_finished_and_frees_a_reader() -> None:
    async def go() -> None:
        llm, group, params = made()
        await group.add([1], params, [(0, 0), (1, 1)])
        llm.answer(llm.sent[0], 6)
        assert len(await group.take()) == 1
        waiting = asyncio.ensure_future(group.take())
        await asyncio.sleep(0)
        await group.drop()
        assert llm.aborted == [llm.sent[1].request_id]
        assert await waiting == []
        assert len(group) == 0
        assert not llm.output_processor.request_states

    asyncio.run(go())


def test_an_engine_that_dies_is_told_to_the_reader() -> None:
    async def go() -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        llm, group, params = made()
        await group.add([1], params, [(0, 0)])
        llm.errored = True
        llm.output_processor.propagate_error(EngineDeadError())
        with pytest.raises(EngineDeadError):
            await group.take()
        with pytest.raises(EngineDeadError):
            await group.add([1], params, [(0, 1)])
        await group.drop()
        assert llm.aborted == []

    asyncio.run(go())


def test_hostile_number_of_samples_does_not_deafen_the_replica() -> None:
    """While thousands are added, beats are sent and a caller that leaves is heard."""

    async def go() -> None:
        llm, group, params = made()
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0)
                beats += 1

        beating = asyncio.create_task(beat())
        adding = asyncio.create_task(
            group.add([1, 2], params, [(k, k) for k in range(5000)])
        )
        while len(llm.sent) < 1000:
            await asyncio.sleep(0)
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        assert adding.cancelled()
        assert len(llm.sent) < 2000
        assert beats > 2
        await group.drop()
        assert len(llm.aborted) == len(llm.sent), "what was added is aborted"
        assert len(llm.output_processor.request_states) == 0
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)

    asyncio.run(go())


def test_a_flock_dropped_while_it_is_filled_takes_no_more() -> None:
    """A replica that is fenced drops its flocks while their callers still fill them."""

    async def go() -> None:
        llm, group, params = made()
        adding = asyncio.create_task(
            group.add([1, 2], params, [(k, k) for k in range(3000)])
        )
        while not llm.sent:
            await asyncio.sleep(0)
        await group.drop()
        await adding
        assert len(llm.sent) < 3000
        assert len(llm.aborted) == len(llm.sent)
        assert len(llm.output_processor.request_states) == 0

    asyncio.run(go())


def test_the_engine_gets_a_part_of_a_call_at_a_time() -> None:
    from types import SimpleNamespace

    from jvlab.engine._requests import Queue

    async def go() -> None:
        llm, group, params = made()
        work = [
            SimpleNamespace(prompt_index=i, sample_indexes=[0, 1, 2]) for i in range(4)
        ]
        queue = Queue(work, {i: [i + 1] for i in range(4)}, 5)
        await queue.feed(group, params, None)
        assert [(r.prompt_token_ids, r.sampling_params.seed) for r in llm.sent] == [
            ([1], 10),
            ([1], 11),
            ([1], 12),
            ([2], 10),
            ([2], 11),
        ]
        llm.answer(llm.sent[0], 7)
        llm.answer(llm.sent[3], 7)
        assert [key for key, _ in await group.take()] == [(0, 0), (1, 0)]
        await queue.feed(group, params, None)
        assert [(r.prompt_token_ids, r.sampling_params.seed) for r in llm.sent[5:]] == [
            ([2], 12),
            ([3], 10),
        ]
        assert bool(queue)
        assert queue.is_partial
        assert queue.drain() == [(2, 1), (2, 2), (3, 0), (3, 1), (3, 2)]
        assert not queue
        await group.abort()
        ended = [
            (key, output.outputs[0].finish_reason) for key, output in await group.take()
        ]
        assert ended == [
            ((0, 1), "abort"),
            ((0, 2), "abort"),
            ((1, 1), "abort"),
            ((1, 2), "abort"),
            ((2, 0), "abort"),
        ]
        assert len(group) == 0
        assert not Queue(work, {}, 12).is_partial

    asyncio.run(go())
