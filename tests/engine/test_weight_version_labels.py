"""Every output says which weights made it: by vLLM since 0.32.0, by jvlab before. Passes with every version tried."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from jvlab.engine._patches import (
    LabelledOutputs,
    has_labels,
    label_core,
    label_front_end,
)

pytestmark = pytest.mark.vllm


class Front:
    """vLLM's client and output processor for one request; messages go through vLLM's own encoding."""

    def __init__(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.core_client import AsyncMPClient
        from vllm.v1.engine.output_processor import OutputProcessor

        label_front_end()
        self.client: Any = AsyncMPClient.__new__(AsyncMPClient)
        self.client.outputs_queue = asyncio.Queue()
        self.client._ensure_output_queue_task = lambda: None
        self.processor: Any = OutputProcessor(None, log_stats=False)
        self.native = (
            "weight_version"
            in inspect.signature(OutputProcessor.process_outputs).parameters
        )
        self.done: list[Any] = []
        params = SamplingParams(
            detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        request = EngineCoreRequest(
            "r", [1, 2], None, params, None, 0.0, None, None, None
        )
        request.external_req_id = "r"
        self.processor.add_request(
            request, None, None, 0, SimpleNamespace(put=self.done.append)
        )

    async def receive(
        self, version: str | None, tokens: list[int], last: bool = False
    ) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        output = EngineCoreOutput(
            "r", tokens, finish_reason=FinishReason.LENGTH if last else None
        )
        sent = MsgpackEncoder().encode(
            EngineCoreOutputs(outputs=[output], weight_version=version)
        )
        self.client.outputs_queue.put_nowait(
            MsgpackDecoder(EngineCoreOutputs).decode(sent)
        )
        message = await self.client.get_output_async()
        more = {"weight_version": message.weight_version} if self.native else {}
        self.processor.process_outputs(
            message.outputs[0:8], message.timestamp, None, **more
        )

    def spans(self) -> Any:
        versions = self.done[-1].outputs[0].weight_versions
        return versions and [(span.version, span.start, span.end) for span in versions]


def received(*messages: tuple[str | None, list[int]]) -> Any:
    """The spans of a request whose tokens came in these messages."""

    async def go() -> Any:
        front = Front()
        for at, (version, tokens) in enumerate(messages, 1):
            await front.receive(version, tokens, last=at == len(messages))
        return front.spans()

    return asyncio.run(go())


def test_spans_follow_the_version_of_each_message() -> None:
    assert received(("3", [5, 6]), ("3", [7]), ("4", [8])) == [("3", 0, 3), ("4", 3, 4)]


def test_without_a_version_there_is_no_span() -> None:
    assert received((None, [5, 6]), (None, [7])) is None


def test_the_core_labels_what_it_sends() -> None:
    from vllm.v1.engine import core as cores

    label_core()
    assert has_labels()
    core, group = SimpleNamespace(_weight_version="7"), cores.EngineCoreOutputs()
    cores.EngineCore._attach_weight_version(core, {0: group})  # type: ignore[arg-type]
    assert group.weight_version == "7"


def test_slices_know_their_version_and_items_are_plain() -> None:
    outputs = LabelledOutputs([1, 2, 3])
    outputs.weight_version = "5"
    assert (outputs[1:].weight_version, list(outputs[1:]), outputs[0]) == (
        "5",
        [2, 3],
        1,
    )


def test_a_steps_drafts_are_counted_for_the_version_that_checked_them():
    """Messages lag behind a commit: the front end's own version is no measure."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    from jvlab.engine import _vllm

    def message(version: str | None, drafted: int, accepted: int) -> Any:
        drafts = SpecDecodingStats.new(3)
        drafts.num_draft_tokens = drafted
        drafts.num_accepted_tokens = accepted
        stats = SchedulerStats(spec_decoding_stats=drafts)
        made: Any = EngineCoreOutputs(scheduler_stats=stats)
        made.weight_version = version
        return made

    label_front_end()
    messages = [
        message("0", 9, 3),
        message("1", 6, 6),
        message("0", 3, 0),
        EngineCoreOutputs(),
    ]
    client: Any = SimpleNamespace()

    async def get_output_async() -> Any:
        return messages.pop(0)

    client.get_output_async = get_output_async
    _vllm.labelling_stats(client)
    meter = _vllm.Meter()

    async def all_of_them() -> None:
        while messages:
            meter.record((await client.get_output_async()).scheduler_stats, None)

    asyncio.run(all_of_them())
    assert meter.drafts == {0: (12, 3), 1: (6, 6)}
    assert (meter.drafted, meter.accepted) == (18, 9)
    for version in range(2, _vllm.VERSIONS_KEPT + 5):
        stats = message(str(version), 1, 1).scheduler_stats
        setattr(stats, _vllm.STATS_VERSION, str(version))
        meter.record(stats, None)
    assert len(meter.drafts) == _vllm.VERSIONS_KEPT
    assert min(meter.drafts) == 5, "the newest versions are kept"
