"""The tracer in a live engine: equal to the offline trace, and nothing in the engine changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jvlab as jv
from jvlab.layout._layout_codec import layout_from_bytes
from jvlab.wire.processes._supervisor import descendants, shared_memory, unlink_segments
from tests.conftest import plain_vllm

pytestmark = pytest.mark.engine

# In a process of its own: vLLM's own LLM class, so that workers can be asked for digests before and after.
LIVE = """
import json, sys, jvlab.layout._checkpoint as checkpoint
from jvlab.layout._layout_codec import plain_to_bytes
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, enforce_eager=True, dtype="float32", max_model_len=128,
          worker_extension_cls="tests.engine.tracing.model_digest.Extension", distributed_executor_backend="mp")
params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
tokens = lambda: list(llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0].outputs[0].token_ids)
first, before = tokens(), llm.collective_rpc("jv_digest")
tensors = [[t.name, list(t.shape), t.dtype] for t in checkpoint.checkpoint_tensors(sys.argv[1])]
layouts = llm.collective_rpc("jv_trace", args=(tensors,))
facts = {"same_digest": llm.collective_rpc("jv_digest") == before, "digests": before, "same_tokens": tokens() == first,
         "layouts": [plain_to_bytes(layout).decode() for layout in layouts]}
print("FACTS " + json.dumps(facts), flush=True)
"""
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.mark.soak
def test_live_trace_equals_offline_and_changes_nothing(llama: str, tmp_path: Path):
    from jvlab.engine.tracing._offline import trace_offline

    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", LIVE, llama],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | ENV | plain_vllm(),
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        line = next(
            (line for line in process.stdout if line.startswith("FACTS ")), None
        )
        assert line, (tmp_path / "log").read_text()[-3000:]
    finally:
        held = shared_memory([process.pid, *descendants(process.pid)])
        os.killpg(process.pid, signal.SIGKILL)  # vLLM's own teardown can hang
        process.stdout.close()
        process.wait(10)
        unlink_segments(held)
    facts = json.loads(line.removeprefix("FACTS "))
    assert facts["same_digest"]
    assert facts["same_tokens"]
    assert len(set(facts["digests"])) == 2, "two ranks hold different shards"
    live = sorted(
        (layout_from_bytes(text.encode()) for text in facts["layouts"]),
        key=lambda layout: layout.rank,
    )
    offline = trace_offline(llama, tensor_parallel=2, dtype="float32")
    for one, other in zip(live, offline, strict=True):
        assert one.parameters == other.parameters
        assert one.tensors == other.tensors
        for column in (
            "tensor",
            "parameter",
            "shape",
            "src_offset",
            "src_strides",
            "dst_offset",
            "dst_strides",
        ):
            assert np.array_equal(getattr(one, column), getattr(other, column)), column
        packed = {note.name for note in one.repacked}
        assert "model.layers.0.self_attn.qkv_proj.weight" in packed, (
            "vLLM packs linear weights for oneDNN on a CPU"
        )
        assert not one.opaque


def test_trace_through_the_gateway(pool: jv.Pool):
    (layout,) = pool.trace()
    covered = sum(int(np.prod(shape)) for shape in layout.shape)
    wanted = sum(int(np.prod(parameter.shape)) for parameter in layout.parameters)
    padding = sum(note.elements for note in layout.padding)
    assert covered + padding == wanted
    assert len(pool.generate("still here", max_tokens=2)) == 1


def test_a_mapping_of_a_running_pool(pool: jv.Pool, llama: str):
    live, offline = (
        jv.Mapping.of(None, pool, mesh="fsdp=2"),
        jv.Mapping.of(None, llama, mesh="fsdp=2"),
    )
    assert np.array_equal(live.plan.links().nbytes, offline.plan.links().nbytes)
    assert live.summary()["staged"] > 0, "a live engine says which layers it packed"
    assert offline.summary()["staged"] == 0
    text = str(live.explain("layers.1.attn.q"))
    assert "slice [1] of" in text
    assert "model.layers.1.self_attn.qkv_proj.weight" in text
    assert "model.layers.0." not in text
