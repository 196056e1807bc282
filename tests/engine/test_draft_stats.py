"""What a step drafted is counted for the weights that checked it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.vllm


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
    assert (meter.stats.draft_tokens, meter.stats.accepted_tokens) == (18, 9)
    for version in range(2, _vllm.VERSIONS_KEPT + 5):
        stats = message(str(version), 1, 1).scheduler_stats
        setattr(stats, _vllm.STATS_VERSION, str(version))
        meter.record(stats, None)
    assert len(meter.drafts) == _vllm.VERSIONS_KEPT
    assert min(meter.drafts) == 5, "the newest versions are kept"
