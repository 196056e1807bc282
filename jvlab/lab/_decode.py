"""Decodes replies into the objects that users get."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np

from jvlab.layout.checkpoint._config import read_config, unnamed_routers
from jvlab.record._sample import Sample
from jvlab.record._scores import Scores
from jvlab.wire import jvlab_pb2 as pb


def logprobs_mode(snapshot: pb.PoolStatus) -> Literal["processed_logprobs", "raw_logprobs"]:
    """How the pool's engines report log-probabilities; the same on all of them."""
    mode = next(r.facts.logprobs_mode for r in snapshot.replicas if r.HasField("facts"))
    return cast(Literal["processed_logprobs", "raw_logprobs"], mode)


def to_sample(message: pb.Sample, prompts: list[Any]) -> Sample:
    prompt = prompts[message.prompt_index]
    return Sample(
        prompt_index=message.prompt_index,
        sample_index=message.sample_index,
        prompt=prompt if isinstance(prompt, str) else None,
        # as plain lists: numpy reads protobuf's containers at half the speed
        prompt_token_ids=message.prompt_token_ids[:],  # type: ignore[arg-type]
        text=message.text,
        token_ids=message.token_ids[:],  # type: ignore[arg-type]
        logprobs=message.logprobs[:],  # type: ignore[arg-type]
        finish_reason=message.finish_reason,
        versions=tuple((span.version, span.start, span.stop) for span in message.versions),
        replica=message.replica,
        retried=message.retried,
        seconds={
            "queued": message.queued_seconds,
            "first_token": message.first_token_seconds,
            "total": message.total_seconds,
        },
        error=message.error or None,
        cached_tokens=message.cached_tokens,
        adapter=(message.adapter.name, message.adapter.version) if message.HasField("adapter") else None,
        **_experts(message),
    )


def _experts(message: pb.Sample) -> dict[str, Any]:
    shape = -1, message.expert_layers, message.experts_chosen
    columns = (("expert_ids", message.expert_ids, "<i2"), ("expert_weights", message.expert_weights, "<f4"))
    return {name: np.frombuffer(data, kind).reshape(shape) for name, data, kind in columns if data}


def to_scores(ordered: Sequence[pb.Scored], request: pb.ScoreCall) -> Scores:
    top = request.top
    return Scores(
        logprobs=[np.array(s.logprobs, np.float32) for s in ordered],
        versions=np.array([s.weight_version for s in ordered], np.int64),
        top_ids=[np.array(s.top_ids, np.int32).reshape(-1, top) for s in ordered] if top else None,
        top_logprobs=[np.array(s.top_logprobs, np.float32).reshape(-1, top) for s in ordered] if top else None,
        token_ids=[np.array(s.ids, np.int32) for s in request.sequences],
    )


def launch_remedy(cause: str, model: str = "") -> str:
    """What to do about an engine that did not start; `model`: its folder, if it is one."""
    low = cause.lower()
    if "illegal instruction" in low:
        return "`jvlab doctor` shows what this CPU can compute; engine={'dtype': 'float32'} works on every one"
    if low.startswith("assertionerror") and os.path.isdir(model) and unnamed_routers(read_config(model)):
        return (
            "the checkpoint is fp8 in blocks, and vLLM takes its routers for fp8 too: name them in config.json, "
            "quantization_config.modules_to_not_convert, e.g. model.layers.0.mlp.gate, one for each layer"
        )
    if "head" in low and "support" in low:
        return "vLLM's kernels for this device do not support that head size: use another model or device"
    if "engine argument" in low or "validation error" in low:
        return "check the names and values in engine={...} against vLLM's engine arguments"
    if "memory" in low or "sigkill" in low or "kv cache" in low:
        return "use a smaller model, fewer replicas or engine={'max_model_len': ...}; `jvlab doctor` shows memory"
    if "architectures" in low or "no such file" in low or "repo id" in low or "config" in low:
        return "is it a model folder with config.json and an architecture that vLLM supports?"
    return "the log lines above say more; pool.logs() shows all of them"
