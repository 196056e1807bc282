"""Validates prompts and sampling parameters, and turns them into messages."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import MissingDependency, ModelError, SamplingError

if TYPE_CHECKING:
    from jvlab.wire import jvlab_pb2 as pb


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
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(t, (int, np.integer)) for t in prompt)


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(m, Mapping) for m in prompt)


def to_message(index: int, prompt: Prompt | Joined) -> pb.Prompt:
    """One prompt as a message."""
    from jvlab.wire import jvlab_pb2 as pb

    if isinstance(prompt, Joined):
        return pb.Prompt(parts=pb.PromptParts(parts=[to_message(index, part) for part in prompt.parts]))
    if isinstance(prompt, str):
        if not prompt:
            raise SamplingError(f"prompt {index} is an empty text", remedy="give it at least one character")
        _check_text(f"prompt {index}", prompt)
        return pb.Prompt(text=prompt)
    if is_tokens(prompt):
        ids = [int(token) for token in prompt]  # type: ignore[arg-type]
        if not -(2**31) <= min(ids) <= max(ids) < 2**31:
            raise SamplingError(f"prompt {index} has a number that is not a token id", remedy="ids start at 0")
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
            f"{what} holds a lone surrogate, which is no character",
            remedy="it comes from bytes that were decoded wrongly; text.encode('utf-8', 'replace').decode() drops it",
        ) from None


def _chat_json(index: int, chat: Sequence[Mapping[str, Any]]) -> str:
    try:
        text = json.dumps(list(chat), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SamplingError(f"prompt {index} is a chat that is not plain JSON: {error}") from error
    _check_text(f"prompt {index}", text)
    return text


def check_sampling(given: Mapping[str, Any], known: Collection[str], reserved: Mapping[str, str]) -> str:
    """Sampling parameters as JSON; the error for an unknown name suggests the closest one."""
    for name in given:
        if name in reserved:
            raise SamplingError(f"the sampling parameter {name!r} is set by jvlab", remedy=reserved[name])
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
            raise SamplingError(f"vLLM has no sampling parameter {name!r}", remedy=hint)
    try:
        return json.dumps({name: _plain(value) for name, value in given.items()}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SamplingError(f"a sampling parameter is not a plain value: {error}") from error


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
            "a tokenizer needs transformers", remedy="pip install transformers, or pass token ids"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others
        lines = str(error).strip().splitlines()
        raise ModelError(
            f"the tokenizer of {model} cannot be loaded here: {lines[0] if lines else type(error).__name__}",
            remedy="the model's folder must be on this machine, with its tokenizer; elsewhere pass token ids",
        ) from error
