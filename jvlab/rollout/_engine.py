"""One vLLM engine as jvlab sees it: generate, score, steer. Messages of the control plane in and out."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from jvlab._errors import SamplingError, SyncError, Unsupported
from jvlab.control import jvlab_pb2 as pb
from jvlab.rollout import _sleep, _vllm
from jvlab.rollout._adapters import EngineAdapters, Loaded
from jvlab.rollout._engine_sync import EngineSync
from jvlab.rollout._requests import Flock
from jvlab.rollout._sync_state import SyncState

CONTEXT = 8  # prompt tokens that a completion is decoded after
PARCEL = 4 * 2**20  # bytes of samples in one message, far below the message limit


def _parcels(samples: list[pb.Sample]) -> Iterator[list[pb.Sample]]:
    """The samples in lists that are safe to send: many long ones may finish in one step."""
    parcel: list[pb.Sample] = []
    size = 0
    for sample in samples:
        parcel.append(sample)
        size += sample.ByteSize()
        if size >= PARCEL:
            yield parcel
            parcel, size = [], 0
    if parcel:
        yield parcel


class Engine:
    """Wraps AsyncLLM. All methods run on the loop that the engine was started on."""

    def __init__(
        self,
        arguments: dict[str, Any],
        device: str,
        replica: str,
        start: Callable[[dict[str, Any], _vllm.Meter], Any] = _vllm.start_engine,
    ) -> None:
        self.device, self.replica = device, replica
        self.meter = _vllm.Meter()
        self._arguments = arguments
        self._llm = start(arguments, self.meter)
        facts = _vllm.facts(self._llm)
        self.facts = pb.EngineFacts(**facts)
        self._tokenizer: Any = self._llm.get_tokenizer() if facts["has_tokenizer"] else None
        # samples of one prompt share their context; decoding it once saves half of the decoding
        decode = lambda ids, skip: self._tokenizer.decode(list(ids), skip_special_tokens=skip)
        self._decoded = functools.lru_cache(4096)(decode)
        self._ids = itertools.count()
        self._busy: set[asyncio.Task[Any]] = set()
        self._flocks: set[Flock] = set()
        self.paused = False
        self.state = SyncState()
        self._sync = EngineSync(self._llm, self.state, replica, device)
        self.adapters = EngineAdapters(self._llm, facts["max_adapters"])

    @property
    def version(self) -> int:
        """Of the weights that were committed last."""
        return self.state.version

    @property
    def sleeping(self) -> bool:
        """Whether a part of its memory was given back."""
        return bool(self._sync.asleep)

    async def begin(self) -> None:
        """Label the loaded weights, version 0, and warm up: the first request and the first score build kernels."""
        await self._llm.update_weight_version(str(self.version))
        for params in (_vllm.sampling({"max_tokens": 2, "seed": 0}, False), _vllm.scoring(0)):
            await self._final([1, 2], params)
        await self._llm.reset_prefix_cache()

    # Prompts ------------------------------------------------------------------------------------------------------

    def _tokenize(self, prompts: Sequence[tuple[int, pb.Prompt]]) -> dict[int, list[int]]:
        """Token ids of each prompt, by its index in the caller's list."""
        out: dict[int, list[int]] = {}
        texts: list[tuple[int, str]] = []
        for index, prompt in prompts:
            match prompt.WhichOneof("kind"):
                case "tokens":
                    out[index] = list(prompt.tokens.ids)
                case "text":
                    texts.append((index, prompt.text))
                case "chat_json":
                    out[index] = self._render_chat(index, json.loads(prompt.chat_json))
                case "parts":
                    out[index] = self._joined(index, prompt.parts.parts)
                case other:
                    raise SamplingError(f"prompt {index} is of no known kind ({other})")
        if texts:
            encoded = self._need_tokenizer(texts[0][0])([text for _, text in texts])["input_ids"]
            out |= {index: list(ids) for (index, _), ids in zip(texts, encoded, strict=True)}
        for index, ids in out.items():
            self._check(index, ids)
        return out

    def _joined(self, index: int, parts: Sequence[pb.Prompt]) -> list[int]:
        """Token ids of several parts. Only the first is a beginning: text after it gets no special tokens."""
        if not parts:
            raise SamplingError(f"prompt {index} is empty", remedy="give it at least one token")
        ids = self._tokenize([(index, parts[0])])[index]
        for part in parts[1:]:
            match part.WhichOneof("kind"):
                case "tokens":
                    ids += part.tokens.ids
                case "text":
                    ids += self._need_tokenizer(index)(part.text, add_special_tokens=False)["input_ids"]
                case other:
                    raise SamplingError(f"prompt {index} goes on with {other}", remedy="go on with text or token ids")
        return ids

    def _need_tokenizer(self, index: int) -> Any:
        if self._tokenizer is None:
            raise SamplingError(
                f"prompt {index} is text, but the engine was started without a tokenizer", remedy="pass token ids"
            )
        return self._tokenizer

    def _render_chat(self, index: int, messages: list[dict[str, Any]]) -> list[int]:
        tokenizer = self._need_tokenizer(index)
        try:
            return list(
                tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
            )
        except Exception as error:  # templates raise whatever they like
            raise SamplingError(
                f"prompt {index}: the chat template failed: {error}",
                remedy='messages look like {"role": "user", "content": "..."}; a model without a template takes text',
            ) from error

    def _check(self, index: int, ids: list[int]) -> None:
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

    # Generate -----------------------------------------------------------------------------------------------------

    def _sampling(self, values: dict[str, Any]) -> Any:
        try:
            return _vllm.sampling(values, self._tokenizer is not None)
        except _vllm.client_errors() as error:
            raise SamplingError(f"vLLM refuses these sampling parameters: {error}") from error

    async def generate(
        self, work: Sequence[pb.PromptWork], sampling_json: str, adapter: pb.Adapter | None = None
    ) -> AsyncIterator[list[pb.Sample]]:
        """Samples as they finish, those of one engine step together. Leaving early aborts the rest in the engine."""
        await self._settled()
        async with (
            self.adapters.use(adapter) as loaded,
            contextlib.aclosing(self._generate(work, sampling_json, loaded)) as parts,
        ):
            async for part in parts:
                yield part

    async def _generate(
        self, work: Sequence[pb.PromptWork], sampling_json: str, adapter: Loaded | None
    ) -> AsyncGenerator[list[pb.Sample], None]:
        values = json.loads(sampling_json)
        prompts = self._tokenize([(item.prompt_index, item.prompt) for item in work])
        params = self._sampling(values)
        flock, lora = Flock(self._llm, self._ids), adapter.request if adapter is not None else None
        self._flocks.add(flock)
        try:
            for item in work:
                index, samples = item.prompt_index, [(k, (item.prompt_index, k)) for k in item.sample_indexes]
                try:
                    await flock.add(prompts[index], params, samples, lora)
                except _vllm.client_errors() as error:
                    raise SamplingError(f"prompt {index}: {error}") from error
            while len(flock):
                finished = await flock.take()
                for part in _parcels([self._sample(output, i, k, params, adapter) for (i, k), output in finished]):
                    yield part
        finally:
            self._flocks.discard(flock)
            await flock.drop()

    async def _settled(self) -> None:
        """Clean, or an error; a sync that is just writing is waited for."""
        while self.state.dirty and self.state.terms is not None and not self.state.discarded:
            await asyncio.sleep(0.001)
        self.state.need_clean()

    def _spawn(self, job: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(job)
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)
        return task

    @staticmethod
    async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drop_all(self) -> None:
        """Abort everything in flight: this replica was fenced."""
        for flock in list(self._flocks):
            await flock.drop()
        await self._cancel(list(self._busy))

    async def _final(self, ids: list[int], params: Any) -> Any:
        last = None
        async for output in self._llm.generate(_vllm.prompt(ids), params, f"jv-{next(self._ids)}"):
            last = output
        return last

    def _text(self, output: Any, params: Any) -> str:
        """The completion's text: vLLM's own where it detokenized, else one decode of prompt and completion together.

        Together, because some tokenizers drop a space in front of a text that begins with a word.
        """
        result = output.outputs[0]
        if params.detokenize or self._tokenizer is None:
            return result.text
        tokens = list(result.token_ids)
        if result.finish_reason == "stop" and not params.include_stop_str_in_output:
            tokens = tokens[:-1]  # the token that ended it is no part of the text, as in vLLM
        context = tuple(output.prompt_token_ids[-CONTEXT:])
        before = self._decoded(context, params.skip_special_tokens)
        both = self._tokenizer.decode([*context, *tokens], skip_special_tokens=params.skip_special_tokens)
        if both.startswith(before):
            return both[len(before) :]
        return self._tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)

    def _sample(self, output: Any, prompt: int, sample: int, params: Any, adapter: Loaded | None) -> pb.Sample:
        result, metrics = output.outputs[0], output.metrics
        text = self._text(output, params)
        spans = [
            pb.VersionSpan(version=int(span.version), start=span.start, stop=span.end)
            for span in (result.weight_versions or ())
        ]
        message = pb.Sample(
            prompt_index=prompt, sample_index=sample, text=text, token_ids=result.token_ids,
            logprobs=result.logprobs, finish_reason=result.finish_reason or "abort",
            versions=spans, replica=self.replica, prompt_token_ids=output.prompt_token_ids,
            cached_tokens=output.num_cached_tokens or 0,
        )  # fmt: skip
        if metrics is not None and metrics.first_token_ts:
            message.queued_seconds = max(0.0, metrics.scheduled_ts - metrics.queued_ts)
            message.first_token_seconds = max(0.0, metrics.first_token_ts - metrics.queued_ts)
            message.total_seconds = max(0.0, metrics.last_token_ts - metrics.queued_ts)
        if adapter is not None:
            message.adapter.name, message.adapter.version = adapter.name, adapter.version
        return message

    # Score --------------------------------------------------------------------------------------------------------

    async def score(
        self, sequences: Sequence[Sequence[int]], indexes: Sequence[int], top: int
    ) -> AsyncIterator[pb.Scored]:
        """log P of every token given its prefix, in one prefill pass each, in the order they finish."""
        await self._settled()
        for index, ids in zip(indexes, sequences, strict=True):
            self._check(index, list(ids))
        params = _vllm.scoring(top)

        async def one(index: int, ids: list[int]) -> pb.Scored:
            try:
                return self._scored(await self._final(ids, params), index, top)
            except _vllm.client_errors() as error:
                raise SamplingError(f"sequence {index}: {error}") from error

        tasks = [self._spawn(one(index, list(ids))) for index, ids in zip(indexes, sequences, strict=True)]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            await self._cancel(tasks)

    def _scored(self, output: Any, index: int, top: int) -> pb.Scored:
        flat = output.prompt_logprobs
        starts = flat.start_indices[1:]  # the first token has no prefix
        spans = output.outputs[0].weight_versions or ()
        scored = pb.Scored(
            index=index, logprobs=[math.nan, *(flat.logprobs[s] for s in starts)], replica=self.replica,
            weight_version=int(spans[0].version) if spans else self.version,
        )  # fmt: skip
        if top:
            scored.top_ids.extend([-1] * top + [i for s in starts for i in flat.token_ids[s + 1 : s + 1 + top]])
            scored.top_logprobs.extend(
                [math.nan] * top + [p for s in starts for p in flat.logprobs[s + 1 : s + 1 + top]]
            )
        return scored

    # Steer --------------------------------------------------------------------------------------------------------

    async def steer(self, order: pb.SteerCall) -> float:
        """Pause, resume, sleep or wake; the seconds it took."""
        start = time.perf_counter()
        match order.what:
            case pb.PAUSE:
                await _vllm.pause(self._llm, order.mode, order.clear_cache)
                self.paused = self._sync.user_paused = True
            case pb.RESUME:
                self.state.need_clean()
                if self.state.halted:
                    raise SyncError(
                        f"a sync of version {self.state.terms.version if self.state.terms else '?'} holds generation",
                        remedy="it goes on when the sync has committed or is given up",
                    )
                if self._sync.asleep:
                    raise SyncError(
                        f"{' and '.join(sorted(self._sync.asleep))} sleep", remedy="pool.wake() makes it go on"
                    )
                await self._llm.resume_generation()
                self.paused = self._sync.user_paused = False
            case pb.SLEEP:
                self._need_sleep()
                await _sleep.sleep(self._llm, self._sync, order.level)
            case pb.WAKE:
                self._need_sleep()
                await _sleep.wake(self._llm, self._sync, list(order.tags))
            case other:
                raise Unsupported(f"no such order: {other}")
        return time.perf_counter() - start

    def _need_sleep(self) -> None:
        if self.device == "cpu":
            raise Unsupported(
                "sleep and wake are not supported on CPU: vLLM's CPU worker ignores them",
                remedy="use pool.pause() to stop generation, or pool.close() to give the memory back",
            )
        if not self._arguments.get("enable_sleep_mode"):
            raise Unsupported(
                "the engine was started without sleep mode", remedy="launch(..., engine={'enable_sleep_mode': True})"
            )

    # Look ---------------------------------------------------------------------------------------------------------

    async def stats(self) -> pb.ReplicaStats:
        m = self.meter
        return pb.ReplicaStats(
            running=m.running, waiting=m.waiting, kv_use=m.kv_use, prefix_queries=m.queries, prefix_hits=m.hits,
            generated_tokens=m.generated, prompt_tokens=m.prompt, tokens_per_s=m.tokens_per_s(),
            weight_version=self.version, paused=self.paused, sleeping=self.sleeping, dirty=self.state.dirty,
            draft_tokens=m.drafted, accepted_tokens=m.accepted, adapters=self.adapters.listed(),
        )  # fmt: skip

    async def trace(self, tensors: list[list[Any]]) -> list[dict[str, Any]]:
        """Each rank's layout, as plain values."""
        if self.facts.max_adapters:
            raise Unsupported(
                "an engine with LoRA wraps its layers, so its base weights can be neither traced nor synced",
                remedy="sync the adapter with pool.load_adapter(name, tensors), or launch without enable_lora",
            )
        return await self._llm.collective_rpc("jv_trace", args=(tensors,))

    # Sync ---------------------------------------------------------------------------------------------------------

    @property
    def door(self) -> list[str]:
        """Where the trainer of an open link by ipc reaches the engine core itself."""
        return self._sync.door

    async def sync(self, request: pb.RolloutSyncRequest) -> pb.RolloutSyncReply:
        """Phases of a sync, in order; the outcome says what this replica holds now."""
        return await self._sync.run(request)

    async def peek(self, rank: int, parameter: str) -> AsyncIterator[bytes]:
        """The bytes of one live parameter on one rank, in pieces."""
        self._sync.need_weights()
        start, total = 0, 1
        while start < total:
            answers = await self._sync.ask("jv_peek", rank, parameter, start, PARCEL)
            mine = [a for a in answers if a["rank"] == rank]
            if not mine:
                raise SyncError(f"no rank {rank}: this engine has {len(answers)}", remedy="ranks begin at 0")
            total = mine[0]["total"]
            start += len(mine[0]["data"])
            yield mine[0]["data"]

    @property
    def dead(self) -> bool:
        return bool(self._llm.errored)

    def close(self) -> None:
        self._llm.shutdown(timeout=2.0)
