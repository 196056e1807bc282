"""Turns a caller's prompts into token ids: texts, chats, tokens, and several of them joined."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from jvlab._errors import SamplingError
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._json_input import read_json

YIELD_BYTES = 1 << 18  # of prompts tokenised before yielding to the event loop, so that heartbeats are not late
MIN_BYTES = 256  # that each prompt counts as


class PromptReader:
    """Tokenises and checks prompts for one engine."""

    def __init__(self, tokenizer: Any, facts: pb.EngineFacts) -> None:
        self._tokenizer, self.facts = tokenizer, facts

    async def read(self, prompts: Sequence[tuple[int, pb.Prompt]]) -> dict[int, list[int]]:
        """Token ids of each prompt, by its index in the caller's list."""
        out: dict[int, list[int]] = {}
        part: list[tuple[int, pb.Prompt]] = []
        size = 0
        for prompt in prompts:
            part.append(prompt)
            size += max(MIN_BYTES, prompt[1].ByteSize())
            if size >= YIELD_BYTES:
                out |= self._tokenize(part)
                part, size = [], 0
                await asyncio.sleep(0)
        return out | self._tokenize(part)

    def _tokenize(self, prompts: Sequence[tuple[int, pb.Prompt]]) -> dict[int, list[int]]:
        out: dict[int, list[int]] = {}
        texts: list[tuple[int, str]] = []
        for index, prompt in prompts:
            match prompt.WhichOneof("kind"):
                case "tokens":
                    out[index] = list(prompt.tokens.ids)
                case "text":
                    texts.append((index, self._short_enough(index, prompt.text)))
                case "chat_json":
                    out[index] = self._render_chat(index, read_json(prompt.chat_json, f"the chat of prompt {index}"))
                case "parts":
                    out[index] = self._joined(index, prompt.parts.parts)
                case other:
                    raise SamplingError(f"prompt {index} is of no known kind ({other})")
        if texts:
            encoded = self._need_tokenizer(texts[0][0])([text for _, text in texts])["input_ids"]
            out |= {index: list(ids) for (index, _), ids in zip(texts, encoded, strict=True)}
        for index, ids in out.items():
            self.check(index, ids)
        return out

    def _joined(self, index: int, parts: Sequence[pb.Prompt]) -> list[int]:
        """Token ids of several parts. Text after the first part gets no special tokens."""
        if not parts:
            raise SamplingError(f"prompt {index} is empty", remedy="give it at least one token")
        ids = self._tokenize([(index, parts[0])])[index]
        for part in parts[1:]:
            match part.WhichOneof("kind"):
                case "tokens":
                    ids += part.tokens.ids
                case "text":
                    text = self._short_enough(index, part.text)
                    ids += self._need_tokenizer(index)(text, add_special_tokens=False)["input_ids"]
                case other:
                    raise SamplingError(f"prompt {index} goes on with {other}", remedy="go on with text or token ids")
        return ids

    def _need_tokenizer(self, index: int) -> Any:
        if self._tokenizer is None:
            raise SamplingError(
                f"prompt {index} is text, but the engine was started without a tokenizer", remedy="pass token ids"
            )
        return self._tokenizer

    def _short_enough(self, index: int, text: str) -> str:
        """The text; raises if its length alone shows that it is too long, as tokenising megabytes takes seconds."""
        limit = self.facts.max_model_len
        if len(text) > (limit + 1) * getattr(self._tokenizer, "max_chars_per_token", len(text)):
            raise SamplingError(
                f"prompt {index} has {len(text)} characters: more than max_model_len={limit} tokens, however read",
                remedy="shorten the prompt, or launch with engine={'max_model_len': ...}",
            )
        return text

    def _render_chat(self, index: int, messages: list[dict[str, Any]]) -> list[int]:
        tokenizer = self._need_tokenizer(index)
        try:
            return list(
                tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
            )
        except Exception as error:  # templates may raise anything
            raise SamplingError(
                f"prompt {index}: the chat template failed: {error}",
                remedy='messages look like {"role": "user", "content": "..."}; a model without a template takes text',
            ) from error

    def check(self, index: int, ids: Sequence[int]) -> None:
        """Raise for a prompt that the engine would reject."""
        limit, vocabulary = self.facts.max_model_len, self.facts.vocab_size
        if not ids:
            raise SamplingError(f"prompt {index} is empty", remedy="give it at least one token")
        if len(ids) >= limit:
            raise SamplingError(
                f"prompt {index} has {len(ids)} tokens; the engine takes at most {limit - 1} and one more to generate "
                f"(max_model_len={limit})",
                remedy="shorten the prompt, or launch with engine={'max_model_len': ...}",
            )
        bad = next((token for token in ids if not 0 <= token < vocabulary), None)
        if bad is not None:
            raise SamplingError(f"prompt {index} holds token id {bad}; the vocabulary has {vocabulary}")
