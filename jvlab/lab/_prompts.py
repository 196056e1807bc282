"""Validates prompts and sampling parameters, and turns them into messages."""

from __future__ import annotations

import difflib
import functools
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from jvlab._errors import (
    JvlabError,
    LaunchError,
    MissingDependency,
    ModelError,
    SamplingError,
)
from jvlab.layout._checkpoint import read_config, unnamed_routers
from jvlab.record._batch import Scores
from jvlab.record._sample import Sample
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire.processes._device_memory import is_full, who_holds

# Decodes replies into the objects that users get.


def logprobs_mode(
    snapshot: pb.PoolStatus,
) -> Literal["processed_logprobs", "raw_logprobs"]:
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
        versions=tuple(
            (span.version, span.start, span.stop) for span in message.versions
        ),
        replica=message.replica,
        retried=message.retried,
        seconds={
            "queued": message.queued_seconds,
            "first_token": message.first_token_seconds,
            "total": message.total_seconds,
        },
        error=message.error or None,
        cached_tokens=message.cached_tokens,
        adapter=(message.adapter.name, message.adapter.version)
        if message.HasField("adapter")
        else None,
        **_experts(message),
    )


def _experts(message: pb.Sample) -> dict[str, Any]:
    shape = -1, message.expert_layers, message.experts_chosen
    columns = (
        ("expert_ids", message.expert_ids, "<i2"),
        ("expert_weights", message.expert_weights, "<f4"),
    )
    return {
        name: np.frombuffer(data, kind).reshape(shape)
        for name, data, kind in columns
        if data
    }


def to_scores(ordered: Sequence[pb.Scored], request: pb.ScoreCall) -> Scores:
    top = request.top
    return Scores(
        logprobs=[np.array(s.logprobs, np.float32) for s in ordered],
        versions=np.array([s.weight_version for s in ordered], np.int64),
        top_ids=[np.array(s.top_ids, np.int32).reshape(-1, top) for s in ordered]
        if top
        else None,
        top_logprobs=[
            np.array(s.top_logprobs, np.float32).reshape(-1, top) for s in ordered
        ]
        if top
        else None,
        token_ids=[np.array(s.ids, np.int32) for s in request.sequences],
    )


SEE_LOG = "the log lines above say more; pool.logs() shows all of them"


def check_whole(
    what: str,
    value: Any,
    error: type[JvlabError] = SamplingError,
    remedy: str = "",
    least: int = 1,
    below: float = float("inf"),
) -> int:
    """The value as an int; raises this error if it is no whole number from `least` up."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not least <= value < below:
        text = f"{what} must be a whole number of at least {least}, not {value!r}"
        raise error(text, remedy=remedy)
    return int(value)


def launch_error(
    what: str, cause: str, model: str, log: str = "", here: bool = True
) -> LaunchError:
    """The error for an engine that did not start, or died. `here`: on this machine, whose GPU may be full."""
    remedy = launch_remedy(cause, model)
    if not log and remedy == SEE_LOG:  # an engine in this process has none
        remedy = "env={'VLLM_LOGGING_LEVEL': 'INFO'} makes vLLM log more"
    held = ""
    if here and is_full(cause):
        held, remedy = who_holds(remedy)
    lines = f"\n--- last log lines ---\n{log}" if log else ""
    return LaunchError(
        f"{what}: {cause}{held}{lines}", remedy=remedy, cause=cause, log=log
    )


def launch_remedy(cause: str, model: str = "") -> str:
    """What to do about an engine that did not start; `model`: its folder, if it is one."""
    low = cause.lower()  # words of vLLM, torch or the kernel, which give no code
    if "illegal instruction" in low:
        return "`jvlab doctor` shows what this CPU can compute; engine={'dtype': 'float32'} works on every one"
    if (
        low.startswith("assertionerror")
        and os.path.isdir(model)
        and unnamed_routers(read_config(model))
    ):
        return (
            "the checkpoint is fp8 in blocks, and vLLM takes its routers for fp8 too: name them in config.json, "
            "quantization_config.modules_to_not_convert, e.g. model.layers.0.mlp.gate, one for each layer"
        )
    if "head" in low and "support" in low:
        return "vLLM's kernels for this device do not support that head size: use another model or device"
    if "engine argument" in low or "validation error" in low:
        return (
            "check the names and values in engine={...} against vLLM's engine arguments"
        )
    if "memory" in low or "sigkill" in low or "kv cache" in low:
        return "use a smaller model, fewer replicas or engine={'max_model_len': ...}; `jvlab doctor` shows memory"
    if (
        "architectures" in low
        or "no such file" in low
        or "repo id" in low
        or "config" in low
    ):
        return "is it a model folder with config.json and an architecture that vLLM supports?"
    return SEE_LOG


# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    """A prompt of several parts whose tokens are concatenated: any prompt first, then texts and token ids."""

    parts: tuple[Any, ...]


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | np.ndarray


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a single text, chat or token list counts as one."""
    if isinstance(prompts, str) or is_tokens(prompts) or _is_chat(prompts):
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, Mapping) or not isinstance(prompts, (Sequence, np.ndarray)):
        raise SamplingError(
            f"prompts must be a list, not {type(prompts).__name__}",
            remedy="pass texts, chats (lists of {'role', 'content'}), or lists of token ids; mixed if you like",
        )
    if not len(prompts):
        raise SamplingError("no prompts were given", remedy="pass at least one prompt")
    return list(prompts)  # type: ignore[arg-type]


def is_tokens(prompt: object) -> bool:
    """Is it one prompt of token ids?"""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and prompt.dtype.kind in "iu" and prompt.size > 0
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(t, (int, np.integer)) for t in prompt)
    )


def _is_chat(prompt: object) -> bool:
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(m, Mapping) for m in prompt)
    )


def to_message(index: int, prompt: Prompt | Joined) -> pb.Prompt:
    """One prompt as a message."""
    from jvlab.wire import jvlab_pb2 as pb

    if isinstance(prompt, Joined):
        return pb.Prompt(
            parts=pb.PromptParts(
                parts=[to_message(index, part) for part in prompt.parts]
            )
        )
    if isinstance(prompt, str):
        if not prompt:
            raise SamplingError(
                f"prompt {index} is an empty text",
                remedy="give it at least one character",
            )
        _check_text(f"prompt {index}", prompt)
        return pb.Prompt(text=prompt)
    if is_tokens(prompt):
        ids = [int(token) for token in prompt]  # type: ignore[arg-type]
        if not -(2**31) <= min(ids) <= max(ids) < 2**31:
            raise SamplingError(
                f"prompt {index} has a number that is not a token id",
                remedy="ids start at 0",
            )
        return pb.Prompt(tokens=pb.TokenIds(ids=ids))
    if _is_chat(prompt):
        return pb.Prompt(chat_json=_chat_json(index, prompt))  # type: ignore[arg-type]
    raise SamplingError(
        f"prompt {index} is neither text, chat nor token ids: {type(prompt).__name__} {str(prompt)[:60]!r}",
        remedy="a text, a list of {'role', 'content'}, or a non-empty list of token ids",
    )


def _check_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SamplingError(
            f"{what} holds a lone surrogate, which is not a character",
            remedy="it comes from bytes that were decoded wrongly; text.encode('utf-8', 'replace').decode() drops it",
        ) from None


def _chat_json(index: int, chat: Sequence[Mapping[str, Any]]) -> str:
    try:
        text = json.dumps(list(chat), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SamplingError(
            f"prompt {index} is a chat that is not plain JSON: {error}"
        ) from error
    _check_text(f"prompt {index}", text)
    return text


def check_sampling(
    given: Mapping[str, Any], known: Collection[str], reserved: Mapping[str, str]
) -> str:
    """Sampling parameters as JSON; the error for an unknown name suggests the closest one."""
    for name in given:
        if name in reserved:
            raise SamplingError(
                f"the sampling parameter {name!r} is set by jvlab",
                remedy=reserved[name],
            )
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = (
                f"did you mean {close[0]!r}?"
                if close
                else f"known: {', '.join(sorted(known))}"
            )
            raise SamplingError(f"vLLM has no sampling parameter {name!r}", remedy=hint)
    try:
        return json.dumps(
            {name: _plain(value) for name, value in given.items()}, allow_nan=False
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise SamplingError(
            f"a sampling parameter is not a plain value: {error}"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return value.tolist() if isinstance(value, np.ndarray) else value


@functools.lru_cache(4)
def tokenizer_of(model: str) -> Any:
    """The tokenizer in a model's folder."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependency(
            "a tokenizer needs transformers",
            remedy="pip install transformers, or pass token ids",
        ) from error
    try:
        return AutoTokenizer.from_pretrained(model)
    # transformers raises OSError, ValueError, KeyError and others
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise ModelError(
            f"the tokenizer of {model} cannot be loaded here: {lines[0] if lines else type(error).__name__}",
            remedy="the model's folder must be on this machine, with its tokenizer; elsewhere pass token ids",
        ) from error
