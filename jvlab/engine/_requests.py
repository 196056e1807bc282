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
from dataclasses import dataclass
from typing import Any

from jvlab._errors import SamplingError
from jvlab.engine import _vllm
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._limits import read_json

# Turns a caller's prompts into token ids: texts, chats, tokens, and several of them joined.

# of prompts tokenised before yielding to the event loop, so that heartbeats are not late
YIELD_BYTES = 1 << 18
MIN_BYTES = 256  # that each prompt counts as


@dataclass
class PromptReader:
    """Tokenises and checks prompts for one engine."""

    _tokenizer: Any
    facts: pb.EngineFacts

    async def read(
        self, prompts: Sequence[tuple[int, pb.Prompt]]
    ) -> dict[int, list[int]]:
        """Token ids of each prompt, by its index in the caller's list."""
        out: dict[int, list[int]] = {}
        part: list[tuple[int, pb.Prompt]] = []
        size = 0
        for prompt in prompts:
            part.append(prompt)
            size += max(MIN_BYTES, prompt[1].ByteSize())
            if size >= YIELD_BYTES:
                out |= self._tokenize(part)
                part = []
                size = 0
                await asyncio.sleep(0)
        return out | self._tokenize(part)

    def _tokenize(
        self, prompts: Sequence[tuple[int, pb.Prompt]]
    ) -> dict[int, list[int]]:
        out: dict[int, list[int]] = {}
        texts: list[tuple[int, str]] = []
        for index, prompt in prompts:
            match prompt.WhichOneof("kind"):
                case "tokens":
                    out[index] = list(prompt.tokens.ids)
                case "text":
                    texts.append((index, self._short_enough(index, prompt.text)))
                case "chat_json":
                    out[index] = self._render_chat(
                        index,
                        read_json(prompt.chat_json, f"the chat of prompt {index}"),
                    )
                case "parts":
                    out[index] = self._joined(index, prompt.parts.parts)
                case other:
                    raise SamplingError(f"prompt {index} is of no known kind ({other})")
        if texts:
            encoded = self._need_tokenizer(texts[0][0])([text for _, text in texts])[
                "input_ids"
            ]
            out |= {
                index: list(ids) for (index, _), ids in zip(texts, encoded, strict=True)
            }
        for index, ids in out.items():
            self.check(index, ids)
        return out

    def _joined(self, index: int, parts: Sequence[pb.Prompt]) -> list[int]:
        """Token ids of several parts. Text after the first part gets no special tokens."""
        if not parts:
            raise SamplingError(
                f"prompt {index} is empty", remedy="give it at least one token"
            )
        ids = self._tokenize([(index, parts[0])])[index]
        for part in parts[1:]:
            match part.WhichOneof("kind"):
                case "tokens":
                    ids += part.tokens.ids
                case "text":
                    text = self._short_enough(index, part.text)
                    ids += self._need_tokenizer(index)(text, add_special_tokens=False)[
                        "input_ids"
                    ]
                case other:
                    raise SamplingError(
                        f"prompt {index} continues with {other}",
                        remedy="continue with text or token ids",
                    )
        return ids

    def _need_tokenizer(self, index: int) -> Any:
        if self._tokenizer is None:
            raise SamplingError(
                f"prompt {index} is text, but the engine was started without a tokenizer",
                remedy="pass token ids",
            )
        return self._tokenizer

    def _short_enough(self, index: int, text: str) -> str:
        """The text; raises if its length alone shows that it is too long, as tokenising megabytes takes seconds."""
        limit = self.facts.max_model_len
        if len(text) > (limit + 1) * getattr(
            self._tokenizer, "max_chars_per_token", len(text)
        ):
            raise SamplingError(
                f"prompt {index} has {len(text)} characters: more than max_model_len={limit} tokens, however read",
                remedy="shorten the prompt, or launch with engine={'max_model_len': ...}",
            )
        return text

    def _render_chat(self, index: int, messages: list[dict[str, Any]]) -> list[int]:
        tokenizer = self._need_tokenizer(index)
        try:
            return list(
                tokenizer.apply_chat_template(
                    messages,
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                )
            )
        except Exception as error:  # templates may raise anything
            raise SamplingError(
                f"prompt {index}: the chat template failed: {error}",
                remedy='messages look like {"role": "user", "content": "..."}; a model without a template takes text',
            ) from error

    def check(self, index: int, ids: Sequence[int]) -> None:
        """Raise for a prompt that the engine would reject."""
        limit = self.facts.max_model_len
        vocabulary = self.facts.vocab_size
        if not ids:
            raise SamplingError(
                f"prompt {index} is empty", remedy="give it at least one token"
            )
        if len(ids) >= limit:
            raise SamplingError(
                f"prompt {index} has {len(ids)} tokens; the engine takes at most {limit - 1} and one more to generate "
                f"(max_model_len={limit})",
                remedy="shorten the prompt, or launch with engine={'max_model_len': ...}",
            )
        bad = next((token for token in ids if not 0 <= token < vocabulary), None)
        if bad is not None:
            raise SamplingError(
                f"prompt {index} holds token id {bad}; the vocabulary has {vocabulary}"
            )


# ----------------------------------------------------------------------------------------------------

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
        self._llm = llm
        self._numbers = numbers
        self._keys: dict[str, Any] = {}  # of requests that are not finished
        self._done: list[tuple[Any, Any]] = []
        self._error: BaseException | None = None
        self._over = False
        self._changed = asyncio.Event()
        self._since_yield = 0

    def __len__(self) -> int:
        """How many outputs have not been read."""
        return 0 if self._over else len(self._keys) + len(self._done)

    async def add(
        self,
        ids: list[int],
        params: Any,
        samples: Sequence[tuple[int, Any]],
        lora: Any = None,
    ) -> None:
        """One request per sample (its number, and the key of its output) of a prompt."""
        llm = self._llm
        if llm.errored:
            raise _vllm.dead_errors()[0]()
        tasks = await llm.get_supported_tasks()
        request = llm.input_processor.process_inputs(
            "",
            _vllm.prompt(ids),
            _vllm.reseeded(params, 0),
            supported_tasks=tasks,
            lora_request=lora,
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
            llm.output_processor.request_states[
                own.request_id
            ].logprobs_processor = _Logprobs()
            await llm.engine_core.add_request_async(own)
            self._since_yield += 1
            # for heartbeats, and to notice a caller that leaves
            if self._since_yield >= YIELD_EVERY:
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
            # no deadline: the caller has one, and cancels this
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        done = self._done
        self._done = []
        return done

    async def abort(self) -> None:
        """Abort what has not finished; its partial outputs can still be taken."""
        if self._keys and not self._llm.errored:
            await self._llm.abort(list(self._keys), internal=True)

    async def drop(self) -> None:
        """Abort what has not finished, and discard all outputs."""
        self._over = True
        self._changed.set()
        await self.abort()
        self._keys = {}
        self._done = []


class Queue:
    """The samples of one order that are not in the engine yet: numbers here, but kilobytes each in the engine.

    The engine holds at most `limit` and gets more as they finish, so its memory does not grow with the size of a call,
    and little is to be aborted when a caller leaves.
    """

    def __init__(
        self, work: Sequence[Any], prompts: Mapping[int, list[int]], limit: int
    ) -> None:
        self._prompts = prompts
        self._limit = limit
        self._left = deque((w.prompt_index, k) for w in work for k in w.sample_indexes)
        # never all in the engine at once
        self.is_partial = len(self._left) > limit

    def __bool__(self) -> bool:
        return bool(self._left)

    async def feed(self, group: RequestGroup, params: Any, lora: Any) -> None:
        """Add requests up to the limit."""
        while self._left and (free := self._limit - group.unfinished) > 0:
            index = self._left[0][0]
            samples: list[tuple[int, tuple[int, int]]] = []  # of one prompt
            while self._left and self._left[0][0] == index and len(samples) < free:
                key = self._left.popleft()
                samples.append((key[1], key))
            try:
                await group.add(self._prompts[index], params, samples, lora)
            except _vllm.client_errors() as error:
                raise SamplingError(f"prompt {index}: {error}") from error

    def drain(self) -> list[tuple[int, int]]:
        """Remove what is left; returns its keys."""
        left = list(self._left)
        self._left.clear()
        return left
