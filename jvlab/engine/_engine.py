"""One vLLM engine behind jvlab's control-plane messages: generate, score, pause, sleep, sync."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from jvlab._errors import ConfigError, SamplingError, SyncError, Unsupported
from jvlab.engine import _vllm
from jvlab.engine._engine_sync import EngineSync, SyncState, checked
from jvlab.engine._requests import PromptReader, Queue, RequestGroup
from jvlab.engine.worker._routes import read_routes
from jvlab.layout._layout_codec import plain_to_bytes
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._limits import Asked, Limits, new_tokens, of_prompts, read_object
from jvlab.wire._rpc_errors import CallFailed, reports_errors
from jvlab.wire.processes._log_causes import signal_name

# LoRA adapters of one engine: versions side by side, each unloaded when its last request has ended.


@dataclass
class Loaded:
    """One adapter at one version."""

    name: str
    version: int
    request: Any  # vLLM's LoRARequest, for requests that use it
    users: int = 0  # requests that compute with it
    dropped: bool = False  # no new request may use it


class EngineAdapters:
    """Each version has an id of its own, so that vLLM confuses neither versions nor their KV blocks."""

    def __init__(self, llm: Any, max_adapters: int, slots: int = 0) -> None:
        self._llm = llm
        self._max = max_adapters
        self._slots = slots
        self._reserved = False  # a slot belongs to an adapter that a link syncs
        self._loaded: dict[tuple[str, int], Loaded] = {}
        self._numbers = itertools.count(1)
        self._loading = asyncio.Lock()

    def listed(self) -> list[pb.Adapter]:
        """Names and versions that requests may use."""
        return [
            pb.Adapter(name=a.name, version=a.version)
            for a in self._loaded.values()
            if not a.dropped
        ]

    def reserve_slot(self) -> None:
        """Leave one slot to the adapter of a link, for as long as the engine lives.

        vLLM must never need that slot for another, so that from now on no more adapters are loaded than have a slot.
        """
        if len(self._loaded) > self._slots - 1:
            raise ConfigError(
                f"no slot is left for a synced adapter: the engine has {self._slots}, and holds {self._held()}",
                remedy=f"pool.unload_adapter(name), or launch(..., engine={{'max_loras': {len(self._loaded) + 1}}})",
            )
        self._reserved = True

    def _held(self) -> str:
        return ", ".join(
            f"{a.name} (version {a.version}, {a.users} in flight)"
            for a in self._loaded.values()
        )

    async def load(self, adapter: pb.Adapter) -> Loaded:
        """Load a version beside the others, unless it is loaded already."""
        async with self._loading:
            found = self._loaded.get((adapter.name, adapter.version))
            if found is None:
                found = await self._read(adapter)
                self._loaded[adapter.name, adapter.version] = found
            found.dropped = False
            return found

    async def _read(self, adapter: pb.Adapter) -> Loaded:
        if not self._max:
            raise Unsupported(
                "the engine was started without LoRA",
                remedy="launch(..., engine={'enable_lora': True, 'max_loras': 4, 'max_lora_rank': 16})",
            )
        if self._reserved and len(self._loaded) >= self._slots - 1:
            raise ConfigError(
                f"no slot for adapter {adapter.name!r}: the engine has {self._slots}, one of them belongs to the "
                f"adapter that a link syncs, and it holds {self._held()}",
                remedy=f"pool.unload_adapter(name), or launch(..., engine={{'max_loras': {self._slots + 1}}}); "
                "a new version of an adapter needs a slot beside the old one",
            )
        if len(self._loaded) >= self._max:
            raise ConfigError(
                f"no room for adapter {adapter.name!r}: the engine holds {self._max} at most, and has {self._held()}",
                remedy="pool.unload_adapter(name), or launch(..., engine={'max_cpu_loras': ...}); "
                "a new version of an adapter needs room beside the old one",
            )
        if not (Path(adapter.path) / "adapter_config.json").is_file():
            raise ConfigError(
                f"{adapter.path} holds no adapter_config.json",
                remedy="pass a folder in PEFT's format that the replica's machine can read, or tensors",
            )
        request = _vllm.lora_request(
            f"{adapter.name}@{adapter.version}", next(self._numbers), adapter.path
        )
        try:
            await self._llm.add_lora(request)
        except _vllm.dead_errors():
            raise
        except Exception as error:  # the loader may raise anything
            raise ConfigError(
                f"vLLM cannot load adapter {adapter.name!r} from {adapter.path}: {error}",
                remedy="its rank must not exceed max_lora_rank, and its modules must be the model's",
            ) from error
        return Loaded(adapter.name, adapter.version, request)

    async def drop(self, adapter: pb.Adapter) -> None:
        """No new request uses this version; it is unloaded after the last that does."""
        found = self._loaded.get((adapter.name, adapter.version))
        if found is not None:
            found.dropped = True
            await self._sweep(found)

    @contextlib.asynccontextmanager
    async def use(self, adapter: pb.Adapter | None) -> AsyncIterator[Loaded | None]:
        """Keep the version loaded meanwhile; a replica that joined later loads it first."""
        if adapter is None:
            yield None
            return
        found = (
            self._loaded.get((adapter.name, adapter.version))
            or self._newer(adapter)
            or await self.load(adapter)
        )
        found.users += 1
        try:
            yield found
        finally:
            found.users -= 1
            found.dropped = found.dropped or self._newer(found) is not None
            await asyncio.shield(self._sweep(found))

    def _newer(self, than: pb.Adapter | Loaded) -> Loaded | None:
        """A later version, for a request that arrives after its own was dropped."""
        later = [
            a
            for a in self._loaded.values()
            if a.name == than.name and a.version > than.version and not a.dropped
        ]
        return max(later, key=lambda a: a.version, default=None)

    async def _sweep(self, found: Loaded) -> None:
        if (
            found.dropped
            and not found.users
            and self._loaded.pop((found.name, found.version), None)
        ):
            await self._llm.remove_lora(found.request.lora_int_id)


# Sleep and wake of one engine: which memory is released, and when generation may resume afterwards.
# vLLM's own `wake_up` resumes its scheduler as soon as all memory is allocated. Here it resumes only if the weights are
# those of one version and the user has not paused: requests that waited through a sleep must not use discarded weights.

ALL = frozenset({"weights", "kv_cache"})


async def sleep(llm: Any, sync: EngineSync, level: int) -> None:
    """Level 1 keeps the weights in host memory; level 2 drops them, and the engine is dirty until a sync."""
    async with sync.lock:
        state = sync.state
        if state.terms is not None:
            raise SyncError(
                f"a sync of version {state.terms.version} is open",
                remedy="wait for its end",
            )
        if "weights" in sync.asleep:
            if level > 1 and not state.discarded:
                raise SyncError(
                    "the engine sleeps at level 1",
                    remedy='pool.wake(["weights"]), then pool.sleep(2)',
                )
            return
        await _release_shadows(sync)
        if level > 1:
            state.discard()  # both are set first, as the call may be interrupted
        sync.asleep = set(ALL)
        await llm.sleep(level)


async def wake(llm: Any, sync: EngineSync, tags: list[str]) -> None:
    """Allocate memory again; tags that are awake already are left out, as vLLM would refuse the whole call."""
    async with sync.lock:
        state = sync.state
        wanted = sync.asleep & (set(tags) or ALL)
        if not wanted:
            return
        if state.terms is None:
            # allocated by a sync during the sleep; the memory is needed now
            await _release_shadows(sync)
        await _vllm.wake(llm, sorted(wanted))
        sync.asleep -= wanted
        if (
            not sync.asleep
            and not sync.user_paused
            and not state.dirty
            and not state.halted
        ):
            await llm.resume_generation()


async def _release_shadows(sync: EngineSync) -> None:
    """Free the shadows of staged syncs; the next such sync allocates new ones."""
    if sync.state.link:
        await sync.ask("jv_release_shadows")


# ----------------------------------------------------------------------------------------------------

CONTEXT = 8  # prompt tokens that a completion is decoded after
CHUNK_BYTES = 4 * 2**20  # bytes of samples in one message, far below the message limit
# requests of one call in the engine, as a multiple of max_num_seqs; the rest waits in `Queue`
QUEUE_FACTOR = 32
QUEUE_TOKENS = 2**24  # of their prompts: about a gigabyte in the engine's own lists
MAX_SAMPLE_INDEX = 2**32


def _chunks(samples: list[pb.Sample]) -> Iterator[list[pb.Sample]]:
    """The samples in messages of limited size: many long ones may finish in one step."""
    chunk: list[pb.Sample] = []
    size = 0
    for sample in samples:
        chunk.append(sample)
        size += sample.ByteSize()
        if size >= CHUNK_BYTES:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


class Engine:
    """Wraps AsyncLLM. All methods run on the loop that the engine was started on."""

    def __init__(
        self,
        arguments: dict[str, Any],
        device: str,
        replica: str,
        start: Callable[[dict[str, Any], _vllm.Meter], Any] = _vllm.start_engine,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self.device = device
        self.replica = replica
        self.meter = _vllm.Meter()
        self.arguments = dict(arguments)
        # on a CPU experts are returned by us (engine/worker/_routes.py), on a GPU by vLLM
        self._captures = device == "cpu" and bool(
            self.arguments.pop("enable_return_routed_experts", False)
        )
        self.llm = start(self.arguments, self.meter)
        facts = _vllm.facts(self.llm)
        if self._captures:
            facts["routed_experts"] = "full"
        self.facts = pb.EngineFacts(**facts)
        self.limits = Limits.resolve(
            limits or {}, facts["max_num_seqs"], facts["max_model_len"]
        )
        self._tokenizer: Any = (
            self.llm.get_tokenizer() if facts["has_tokenizer"] else None
        )
        # samples of one prompt share their context: decoding it once halves the work
        decode = lambda ids, skip: self._tokenizer.decode(
            list(ids), skip_special_tokens=skip
        )
        self._decoded = functools.lru_cache(4096)(decode)
        self._reader = PromptReader(self._tokenizer, self.facts)
        self._ids = itertools.count()
        self._busy: set[asyncio.Task[Any]] = set()
        self._request_groups: set[RequestGroup] = set()
        self.paused = False
        # of a cancelled pause; kept so that it runs
        self._undoing: asyncio.Future[None] | None = None
        self.state = SyncState()
        self._sync = EngineSync(self.llm, self.state, replica)
        self.adapters = EngineAdapters(
            self.llm, facts["max_adapters"], _vllm.adapter_slots(self.llm)
        )
        self._sync.reserve_slot = self.adapters.reserve_slot
        self.linked = self._sync.linked

    @property
    def version(self) -> int:
        """The version of the weights that were committed last."""
        return self.state.version

    def say(self, text: str) -> None:
        """Something that its user should know: `pool.wait()` warns of it, and the log has it."""
        if text:
            print(f"jvlab: {text}", flush=True)
            self.facts.vllm_warning = "\n".join(
                filter(None, [self.facts.vllm_warning, text])
            )

    async def begin(self) -> None:
        """Label the loaded weights as version 0, and warm up: the first request and the first score compile kernels."""
        await self.llm.update_weight_version(str(self.version))
        if self._captures:
            await self._sync.ask("jv_capture_routes")
        for params in (
            _vllm.sampling({"max_tokens": 2, "seed": 0}, False),
            _vllm.scoring(0),
        ):
            await self._final([1, 2], params)
        await self.llm.reset_prefix_cache()
        self.meter.reset()  # nobody asked for those tokens

    # Generate -----------------------------------------------------------------------------------------------------

    def _sampling(self, values: dict[str, Any]) -> Any:
        seed = values.get("seed")
        # sample k uses seed + k
        if isinstance(seed, int) and not -(2**63) <= seed < 2**63 - MAX_SAMPLE_INDEX:
            raise SamplingError(
                f"seed must be a 64-bit number, not {seed if abs(seed) < 10**30 else 'that large'}"
            )
        try:
            return _vllm.sampling(values, self._tokenizer is not None)
        except (*_vllm.client_errors(), OverflowError) as error:
            raise SamplingError(
                f"vLLM refuses these sampling parameters: {error}"
            ) from error

    async def generate(
        self,
        work: Sequence[pb.PromptWork],
        sampling_json: str,
        adapter: pb.Adapter | None = None,
    ) -> AsyncGenerator[list[pb.Sample], None]:
        """Samples as they finish, those of one engine step together. Leaving early aborts the rest in the engine."""
        await self.wait_clean()
        values = read_object(sampling_json, "sampling_json")
        group = RequestGroup(self.llm, self._ids)
        async with self.adapters.use(adapter) as loaded:
            self._check_limits(work, values, {})
            prompts = await self._reader.read(
                [(item.prompt_index, item.prompt) for item in work]
            )
            self._check_limits(work, values, prompts)
            params = self._sampling(values)
            lora = self.linked.request if loaded is None else loaded.request
            linked = loaded is None and lora is not None
            longest = max(map(len, prompts.values()), default=1)
            queue = Queue(work, prompts, self._max_queued(longest))
            self._request_groups.add(group)
            try:
                await queue.feed(group, params, lora)
                while len(group):
                    finished = await group.take()
                    if queue.is_partial and any(
                        output.outputs[0].finish_reason == "abort"
                        for _, output in finished
                    ):
                        # A pause aborts what the engine has. What is still queued ends too, and what the engine got
                        # during the pause, which would otherwise wait until a resume.
                        for part in _chunks(self._aborted(queue.drain())):
                            yield part
                        await group.abort()
                    await queue.feed(group, params, lora)
                    made = [
                        self._sample(output, i, k, params, loaded, linked)
                        for (i, k), output in finished
                    ]
                    for part in _chunks(made):
                        yield part
            finally:
                self._request_groups.discard(group)
                await group.drop()

    def _check_limits(
        self,
        work: Sequence[pb.PromptWork],
        values: dict[str, Any],
        prompts: Mapping[int, Sequence[int]],
    ) -> None:
        """Raise `LimitExceeded` for an order over the limits; `prompts` once they are tokenised."""
        each = new_tokens(values, self.facts.max_model_len)
        counts = [len(item.sample_indexes) for item in work]
        long = [len(prompts.get(item.prompt_index, ())) + each for item in work]
        tokens = sum(n * length for n, length in zip(counts, long, strict=True))
        self.limits.check(
            Asked(max(counts, default=0), len(counts), sum(counts), tokens)
        )

    def _max_queued(self, longest: int) -> int:
        """How many requests of one call the engine holds at once: enough to keep it busy, within a memory bound."""
        seqs = self.facts.max_num_seqs
        return max(2 * seqs, min(QUEUE_FACTOR * seqs, QUEUE_TOKENS // longest))

    def _aborted(self, keys: Sequence[tuple[int, int]]) -> list[pb.Sample]:
        """Samples that were never started."""
        return [
            pb.Sample(
                prompt_index=prompt,
                sample_index=sample,
                finish_reason="abort",
                replica=self.replica,
            )
            for prompt, sample in keys
        ]

    async def wait_clean(self) -> None:
        """Wait while a sync is writing; raises if the engine is dirty without one."""
        while (
            self.state.dirty
            and self.state.terms is not None
            and not self.state.discarded
        ):
            await asyncio.sleep(0.001)
        self.state.need_clean()

    def spawn(self, job: Any) -> asyncio.Task[Any]:
        """Run it as one of the tasks that are dropped when this replica is fenced."""
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
        for group in list(self._request_groups):
            await group.drop()
        await self._cancel(list(self._busy))

    async def _final(self, ids: list[int], params: Any) -> Any:
        last = None
        lora = self.linked.request
        name = f"jv-{next(self._ids)}"
        async for output in self.llm.generate(
            _vllm.prompt(ids), params, name, lora_request=lora
        ):
            last = output
        return last

    def _text(self, output: Any, params: Any) -> str:
        """The completion's text: vLLM's own if it detokenized, else one decode after the last prompt tokens.

        After them, because some tokenizers drop a space in front of a text that begins with a word.
        """
        result = output.outputs[0]
        if params.detokenize or self._tokenizer is None:
            return result.text
        tokens = list(result.token_ids)
        if result.finish_reason == "stop" and not params.include_stop_str_in_output:
            tokens = tokens[:-1]  # the stop token is not part of the text, as in vLLM
        context = tuple(output.prompt_token_ids[-CONTEXT:])
        before = self._decoded(context, params.skip_special_tokens)
        both = self._tokenizer.decode(
            [*context, *tokens], skip_special_tokens=params.skip_special_tokens
        )
        if both.startswith(before):
            return both[len(before) :]
        return self._tokenizer.decode(
            tokens, skip_special_tokens=params.skip_special_tokens
        )

    def _sample(
        self,
        output: Any,
        prompt: int,
        sample: int,
        params: Any,
        adapter: Loaded | None,
        linked: bool,
    ) -> pb.Sample:
        result = output.outputs[0]
        metrics = output.metrics
        text = self._text(output, params)
        spans = [
            pb.VersionSpan(version=version, start=start, stop=stop)
            for version, start, stop in self.linked.spans(
                result.weight_versions or (), linked
            )
        ]
        message = pb.Sample(
            prompt_index=prompt,
            sample_index=sample,
            text=text,
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            finish_reason=result.finish_reason or "abort",
            versions=spans,
            replica=self.replica,
            prompt_token_ids=output.prompt_token_ids,
            cached_tokens=output.num_cached_tokens or 0,
        )
        if metrics is not None and metrics.first_token_ts:
            message.queued_seconds = max(0.0, metrics.scheduled_ts - metrics.queued_ts)
            message.first_token_seconds = max(
                0.0, metrics.first_token_ts - metrics.queued_ts
            )
            message.total_seconds = max(0.0, metrics.last_token_ts - metrics.queued_ts)
        if (found := result.routed_experts) is not None:
            ids, weights = read_routes(
                found, len(output.prompt_token_ids) + len(result.token_ids)
            )
            message.expert_layers, message.experts_chosen = ids.shape[1:]
            message.expert_ids = ids.tobytes()
            message.expert_weights = b"" if weights is None else weights.tobytes()
        if adapter is not None:
            message.adapter.name = adapter.name
            message.adapter.version = adapter.version
        return message

    # Score --------------------------------------------------------------------------------------------------------

    async def score(
        self, sequences: Sequence[Sequence[int]], indexes: Sequence[int], top: int
    ) -> AsyncGenerator[pb.Scored, None]:
        """log P of every token given its prefix, in one prefill pass each, in the order they finish."""
        await self.wait_clean()
        lengths = [len(ids) for ids in sequences]
        self.limits.check(of_prompts(lengths, 1, {"max_tokens": 1}, 0))
        for index, ids in zip(indexes, sequences, strict=True):
            self._reader.check(index, ids)
            await asyncio.sleep(0)
        params = _vllm.scoring(top)
        slots = asyncio.Semaphore(self._max_queued(max(lengths, default=1)))

        async def one(index: int, ids: list[int]) -> pb.Scored:
            try:
                async with slots:
                    return self._scored(await self._final(ids, params), index, top)
            except _vllm.client_errors() as error:
                raise SamplingError(f"sequence {index}: {error}") from error

        tasks = [
            self.spawn(one(index, list(ids)))
            for index, ids in zip(indexes, sequences, strict=True)
        ]
        try:
            # no deadline: the caller has one, and cancels this
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            await self._cancel(tasks)

    def _scored(self, output: Any, index: int, top: int) -> pb.Scored:
        flat = output.prompt_logprobs
        starts = flat.start_indices[1:]  # the first token has no prefix
        spans = output.outputs[0].weight_versions or ()
        scored = pb.Scored(
            index=index,
            logprobs=[math.nan, *(flat.logprobs[s] for s in starts)],
            replica=self.replica,
            weight_version=int(spans[0].version) if spans else self.version,
        )
        if top:
            scored.top_ids.extend(
                [-1] * top
                + [i for s in starts for i in flat.token_ids[s + 1 : s + 1 + top]]
            )
            scored.top_logprobs.extend(
                [math.nan] * top
                + [p for s in starts for p in flat.logprobs[s + 1 : s + 1 + top]]
            )
        return scored

    # Pause, sleep-------------------------------------------------------------------------------------------------

    async def steer(self, order: pb.SteerCall) -> float:
        """Pause, resume, sleep or wake; returns the seconds it took."""
        start = time.perf_counter()
        match order.what:
            case pb.PAUSE:
                await self._pause(order)
            case pb.RESUME:
                self.state.need_clean()
                if self.state.halted:
                    raise SyncError(
                        f"a sync of version {self.state.terms.version if self.state.terms else '?'} holds generation",
                        remedy="it resumes when the sync has committed or is abandoned",
                    )
                if self._sync.asleep:
                    raise SyncError(
                        f"{' and '.join(sorted(self._sync.asleep))} sleep",
                        remedy="pool.wake() lets it continue",
                    )
                await self.llm.resume_generation()
                self.paused = self._sync.user_paused = False
            case pb.SLEEP:
                self._need_sleep()
                await sleep(self.llm, self._sync, order.level)
            case pb.WAKE:
                self._need_sleep()
                await wake(self.llm, self._sync, list(order.tags))
            case other:
                raise Unsupported(f"no such order: {other}")
        return time.perf_counter() - start

    async def _pause(self, order: pb.SteerCall) -> None:
        before = self.paused
        try:
            await _vllm.pause(self.llm, order.mode, order.clear_cache)
        except asyncio.CancelledError:
            # The gateway no longer waits, and counts the pool as running. The engine may still pause later, so a
            # resume is queued after it.
            if not (before or self.state.halted or self._sync.asleep):
                self._undoing = asyncio.ensure_future(self._resume())
            raise
        self.paused = self._sync.user_paused = True

    async def _resume(self) -> None:
        with contextlib.suppress(*_vllm.dead_errors()):
            await self.llm.resume_generation()

    def _need_sleep(self) -> None:
        if self.device == "cpu":
            raise Unsupported(
                "sleep and wake are not supported on CPU: vLLM's CPU worker ignores them",
                remedy="use pool.pause() to stop generation, or pool.close() to free the memory",
            )
        if not self.arguments.get("enable_sleep_mode"):
            raise Unsupported(
                "the engine was started without sleep mode",
                remedy="launch(..., engine={'enable_sleep_mode': True})",
            )

    # Inspection ---------------------------------------------------------------------------------------------------

    async def stats(self) -> pb.ReplicaStats:
        stats = pb.ReplicaStats(
            tokens_per_s=self.meter.tokens_per_s(),
            weight_version=self.version,
            paused=self.paused,
            sleeping=bool(self._sync.asleep),
            dirty=self.state.dirty,
            adapters=self.adapters.listed(),
            draft_version=self._sync.draft_version,
            drafts=[
                pb.DraftCount(version=version, drafted=drafted, accepted=accepted)
                for version, (drafted, accepted) in sorted(self.meter.drafts.items())
            ],
        )
        stats.MergeFrom(self.meter.stats)
        return stats

    async def trace(self, tensors: list[list[Any]]) -> list[dict[str, Any]]:
        """Each rank's layout, as plain values: of the model's tensors, an adapter's or the draft model's."""
        return checked(await self.llm.collective_rpc("jv_trace", args=(tensors,)))

    # Sync ---------------------------------------------------------------------------------------------------------

    async def sync(self, request: pb.RolloutSyncRequest) -> pb.RolloutSyncReply:
        """Phases of a sync, in order; the outcome says what this replica holds now."""
        return await self._sync.run(request)

    async def peek(self, rank: int, parameter: str) -> AsyncIterator[bytes]:
        """The bytes of one live parameter on one rank, in pieces."""
        self._sync.need_weights()
        async for piece in self._pieces(rank, "jv_peek", rank, parameter):
            yield piece

    async def hidden(
        self, tokens: Sequence[int]
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        """(layer, piece of its hidden states) of this sequence. Other requests' would be mixed in."""
        self._sync.need_weights()
        try:
            layers = max(
                answer["layers"] for answer in await self._sync.ask("jv_begin_hidden")
            )
            async for _ in self.score([tokens], [0], 0):
                pass
            for layer in range(layers):
                async for piece in self._pieces(0, "jv_hidden", layer):
                    yield layer, piece
        finally:
            await self._sync.ask("jv_end_hidden")

    async def _pieces(self, rank: int, method: str, *args: Any) -> AsyncIterator[bytes]:
        """One rank's bytes, in pieces."""
        start = 0
        total = 1
        while start < total:
            answers = await self._sync.ask(method, *args, start, CHUNK_BYTES)
            mine = next((a for a in answers if a["rank"] == rank), None)
            if mine is None:
                raise SyncError(
                    f"no rank {rank}: this engine has {len(answers)}",
                    remedy="ranks begin at 0",
                )
            total = mine["total"]
            start += len(mine["data"])
            yield mine["data"]

    @property
    def dead(self) -> bool:
        return bool(self.llm.errored)

    def why_dead(self) -> str:
        """In words, for whoever waits for it. A worker's signal is in the log alone, which the gateway reads."""
        number = _vllm.core_signal(self.llm)
        return (
            f"the engine died: its core died of {signal_name(number)}"
            if number
            else "the engine died"
        )

    def close(self) -> None:
        # a call that was cancelled because we close may fail in the core meanwhile: nobody waits for it
        logging.getLogger("vllm.v1.engine.core_client").addFilter(_is_news)
        self.llm.shutdown(timeout=2.0)


def _is_news(record: logging.LogRecord) -> bool:
    """A filter for vLLM's log: False for a cancelled call that its core refused while it was shut down."""
    text = record.getMessage()
    return not (
        text.startswith("Cancelled call to utility method") and "shutting down" in text
    )


# The replica's gRPC service: checks the epoch, calls the engine.

Context = grpc.aio.ServicerContext
REGISTER_SECONDS = 5.0  # that an order waits for the registration to complete


@reports_errors
class RolloutServicer(rpc.RolloutServicer):
    """Orders from the gateway. One of another epoch is refused: it was sent before this replica was fenced."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.epoch = 0

    async def _check(self, epoch: int) -> None:
        # the gateway's first order may overtake its reply to our registration
        until = time.monotonic() + REGISTER_SECONDS
        while self.epoch == 0 and time.monotonic() < until:
            await asyncio.sleep(0.005)
        if epoch != self.epoch:
            text = f"order of epoch {epoch}, this replica is at epoch {self.epoch}"
            raise CallFailed(grpc.StatusCode.ABORTED, text)

    def explain(self, error: Exception) -> Exception:
        """The error for the gateway: whatever fails while the engine dies is reported as its death."""
        caller_error = isinstance(error, (ConfigError, Unsupported, CallFailed))
        if not caller_error and (
            isinstance(error, _vllm.dead_errors()) or self.engine.dead
        ):
            return CallFailed(grpc.StatusCode.UNAVAILABLE, self.engine.why_dead())
        return error

    async def Generate(
        self, request: pb.RolloutRequest, context: Context
    ) -> AsyncIterator[pb.SampleBatch]:
        await self._check(request.epoch)
        adapter = request.adapter if request.HasField("adapter") else None
        async with contextlib.aclosing(
            self.engine.generate(request.work, request.sampling_json, adapter)
        ) as batches:
            async for batch in batches:
                yield pb.SampleBatch(samples=batch)

    async def Score(
        self, request: pb.RolloutScoreRequest, context: Context
    ) -> AsyncIterator[pb.ScoreBatch]:
        await self._check(request.epoch)
        sequences = [s.ids for s in request.sequences]
        async with contextlib.aclosing(
            self.engine.score(sequences, request.indexes, request.top)
        ) as scores:
            async for scored in scores:
                yield pb.ScoreBatch(scored=[scored])

    async def Steer(
        self, request: pb.RolloutSteerRequest, context: Context
    ) -> pb.SteerReply:
        await self._check(request.epoch)
        return pb.SteerReply(seconds=await self.engine.steer(request.order))

    async def Stats(
        self, request: pb.EpochRequest, context: Context
    ) -> pb.ReplicaStats:
        await self._check(request.epoch)
        return await self.engine.stats()

    async def Trace(
        self, request: pb.RolloutTraceRequest, context: Context
    ) -> AsyncIterator[pb.TraceEvent]:
        await self._check(request.epoch)
        tensors: list[list[Any]] = [
            [t.name, list(t.shape), t.dtype] for t in request.tensors
        ]
        for layout in await self.engine.trace(tensors):
            yield pb.TraceEvent(layout=plain_to_bytes(layout))

    async def Sync(
        self, request: pb.RolloutSyncRequest, context: Context
    ) -> pb.RolloutSyncReply:
        await self._check(request.epoch)
        return await self.engine.sync(request)

    async def SetAdapter(
        self, request: pb.RolloutAdapterRequest, context: Context
    ) -> pb.Empty:
        await self._check(request.epoch)
        change = (
            self.engine.adapters.drop if request.unload else self.engine.adapters.load
        )
        await change(request.adapter)
        return pb.Empty()

    async def Peek(
        self, request: pb.RolloutPeekRequest, context: Context
    ) -> AsyncIterator[pb.PeekEvent]:
        await self._check(request.epoch)
        async for piece in self.engine.peek(request.rank, request.parameter):
            yield pb.PeekEvent(piece=piece)

    async def Hidden(
        self, request: pb.RolloutHiddenRequest, context: Context
    ) -> AsyncIterator[pb.HiddenEvent]:
        await self._check(request.epoch)
        async with contextlib.aclosing(
            self.engine.hidden(request.tokens.ids)
        ) as pieces:
            async for layer, piece in pieces:
                yield pb.HiddenEvent(layer=layer, piece=piece)
