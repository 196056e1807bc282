"""The calls of every pool: generate, score, stream, control, inspect; wherever its engines run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from jvlab import _faces
from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, ReplicaLost, SamplingError
from jvlab._names import own_name
from jvlab._progress import Progress
from jvlab.engine import _vllm
from jvlab.lab import _adapters, _launch_settings, _prompts, _scaling
from jvlab.lab._pool_table import replica_name
from jvlab.lab._pool_turns import Turns
from jvlab.lab._pool_watch import WatchedPool
from jvlab.record import _calls
from jvlab.record._batch import RolloutBatch, Scores
from jvlab.record._calls import RolloutTally
from jvlab.record._events import ScoreEvent, clock
from jvlab.record._sample import Sample
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import Stream
from jvlab.wire._limits import Asked, Limits
from jvlab.wire._sync_words import CHOICES

if TYPE_CHECKING:
    from jvlab.layout._types import CheckpointTensor, RankLayout
    from jvlab.views.panels._live import Panel


class PoolCalls(WatchedPool, Turns):
    """Replicas of one model behind one name, reached through a client."""

    # Generate -----------------------------------------------------------------------------------------------------

    def _start(
        self,
        prompts: Any,
        n: int,
        window: int,
        sampling: Mapping[str, Any],
        routing: str | None = None,
        min_version: int | None = None,
        *,
        deadline: Deadline,
    ) -> pb.GenerateStart:
        self._refuse_own_stepper("generate")
        _scaling.check_routing(routing)
        least = _scaling.check_version(min_version)
        adapter, sampling = _adapters.split(sampling)
        if not isinstance(n, (int, np.integer)) or n < 1:
            raise SamplingError(f"n must be a whole number of at least 1, not {n!r}")
        given = _prompts.as_list(prompts)
        facts = self._facts(deadline)
        self._check_limits(len(given), int(n))
        listed = [_prompts.to_message(i, p) for i, p in enumerate(given)]
        text = _prompts.check_sampling(sampling, facts.sampling_names, _vllm.RESERVED)
        return pb.GenerateStart(
            pool=self.name,
            prompts=listed,
            n=int(n),
            sampling_json=text,
            window=window,
            routing=routing or "",
            min_version=least,
            adapter=adapter,
        )

    def _check_limits(self, prompts: int, n: int) -> None:
        """Check before sending; gateway and replica check again, and count tokens too."""
        if self._snapshot.HasField("limits"):
            Limits(**self.limits).check(Asked(n, prompts, n * prompts, 0))

    def generate(
        self,
        prompts: Any,
        n: int = 1,
        *,
        progress: bool | None = None,
        timeout: float | Deadline = 3600.0,
        routing: str | None = None,
        min_version: int | None = None,
        **sampling: Any,
    ) -> RolloutBatch:
        """`n` samples of each prompt, in order.

        prompts     texts, chats (lists of {"role", "content"}) or lists of token ids, also mixed
        sampling    vLLM's SamplingParams by name: max_tokens, temperature, seed, stop, ...; sample k uses seed + k
        progress    False: nothing is shown; else a bar in a terminal or a notebook, in a log a line if it takes long
        routing     which replica gets a prompt: "least" (in flight), or "prefix" (prompts with a common prefix go to
                    one replica, to reuse its KV cache, unless it is too busy); default: as launched
        min_version use any replica with this version or a later one, including those the last sync left behind;
                    default: exactly the pool's version

        `adapter="name"` uses a LoRA adapter loaded with `load_adapter`.
        """
        deadline = Deadline.of(timeout)
        start = self._start(
            prompts, n, 0, sampling, routing, min_version, deadline=deadline
        )
        return self._client.loop.run(
            self._collect(start, _prompts.as_list(prompts), progress, deadline)
        )

    async def agenerate(
        self,
        prompts: Any,
        n: int = 1,
        *,
        timeout: float | Deadline = 3600.0,
        routing: str | None = None,
        min_version: int | None = None,
        on_sample: Callable[[Sample], None] | None = None,
        **sampling: Any,
    ) -> RolloutBatch:
        """`generate`, awaited. `on_sample(sample)` is called with each sample as it ends; it must return at once."""
        deadline = Deadline.of(timeout)
        start = await asyncio.to_thread(
            self._start,
            prompts,
            n,
            0,
            sampling,
            routing,
            min_version,
            deadline=deadline,
        )
        listed = _prompts.as_list(prompts)
        return await self._client.loop.arun(
            self._collect(start, listed, False, deadline, on_sample)
        )

    def stream(
        self,
        prompts: Any,
        n: int = 1,
        *,
        window: int | None = None,
        timeout: float | Deadline = 3600.0,
        routing: str | None = None,
        min_version: int | None = None,
        **sampling: Any,
    ) -> Stream[Sample]:
        """Samples as they finish; use `for` or `async for`. Leaving the loop early aborts the rest in the engine.

        At most `window` samples are unfinished or unread at once, so a slow reader slows the pool down instead of
        filling memory; the default is twice what fills all replicas. `timeout` covers everything, reading included.
        """
        deadline = Deadline.of(timeout)
        facts = self._facts(deadline)
        if window is None:
            window = 2 * facts.max_num_seqs * len(self._snapshot.replicas)
        if window < 1:
            raise SamplingError(f"window must be at least 1, not {window}")
        start = self._start(
            prompts, n, window, sampling, routing, min_version, deadline=deadline
        )
        samples = self._samples(start, _prompts.as_list(prompts), [], deadline)
        told = self._told(samples, len(start.prompts) * start.n)
        return Stream(
            self._client.loop, told, lambda: self._refuse_own_stepper("the stream")
        )

    async def _told(
        self, samples: AsyncGenerator[Sample, None], total: int
    ) -> AsyncGenerator[Sample, None]:
        """The samples, with a bar only while the reader waits for one that something holds up."""
        reading = False  # the caller works on a sample, and waits for none
        asked = time.monotonic()  # when the caller began to wait for the next
        with Progress(
            total, f"{self.name}: stream", unit="sample", only_waiting=True
        ) as bar:
            async with (
                self._explained(bar, lambda: time.monotonic() if reading else asked),
                contextlib.aclosing(samples),
            ):
                async for sample in samples:
                    bar.advance(1)
                    reading = True
                    yield sample
                    reading = False
                    asked = time.monotonic()

    async def _samples(
        self,
        start: pb.GenerateStart,
        prompts: list[Any],
        notes: list[str],
        deadline: Deadline,
    ) -> AsyncGenerator[Sample, None]:
        """Samples of one Generate call, on the client's loop; grants credit as they are consumed."""
        import grpc

        from jvlab.wire._client import translate

        call = self._client.begin("Generate", deadline=deadline)
        tally = RolloutTally()
        try:
            await call.write(pb.GenerateCall(start=start))
            if not start.window:
                await call.done_writing()
            # Samples the gateway may not start before we grant credit; while there are any, it can't have finished.
            withheld = (
                len(start.prompts) * start.n - start.window if start.window else 0
            )
            async for event in call:
                notes.extend(event.notes)
                for message in event.samples:
                    sample = _prompts.to_sample(message, prompts)
                    tally.add(sample)
                    yield sample
                    if withheld > 0 and not call.done():
                        withheld -= 1
                        await call.write(pb.GenerateCall(credit=1))
        except grpc.aio.AioRpcError as error:
            raise translate(
                error, "generate", deadline.seconds, self._client.address
            ) from None
        finally:
            call.cancel()
            _calls.note(self._client, *tally.events())

    async def _collect(
        self,
        start: pb.GenerateStart,
        prompts: list[Any],
        progress: bool | None,
        deadline: Deadline,
        on_sample: Callable[[Sample], None] | None = None,
    ) -> RolloutBatch:
        began = time.perf_counter()
        notes = []
        samples = []
        total = len(start.prompts) * start.n
        tokens = 0
        arrived = time.monotonic()
        with Progress(
            total, f"{self.name}: generate", unit="sample", show=progress, after=1.0
        ) as bar:
            async with self._explained(bar, lambda: arrived):
                async for sample in self._samples(start, prompts, notes, deadline):
                    samples.append(sample)
                    arrived = time.monotonic()
                    if on_sample is not None and not sample.error:
                        on_sample(sample)
                    tokens += len(sample.token_ids)
                    bar.advance(
                        1, f"{tokens / (time.perf_counter() - began):,.0f} tokens/s"
                    )
        samples.sort(key=lambda s: (s.prompt_index, s.sample_index))
        mode = _prompts.logprobs_mode(self._snapshot)
        batch = RolloutBatch(
            tuple(samples),
            logprobs_mode=mode,
            model=self.model,
            notes=tuple(notes),
            seconds=time.perf_counter() - began,
        )
        lost = [s for s in samples if s.error]
        if lost:
            raise ReplicaLost(
                f"{len(lost)} of {total} samples were lost: {lost[0].error}. "
                + " ".join(notes),
                remedy="the finished ones are in this error's .fields['batch']; pool.status() shows the replicas",
                batch=replace(batch, samples=tuple(s for s in samples if not s.error)),
            )
        return batch

    # Score --------------------------------------------------------------------------------------------------------

    def score(
        self, sequences: Any, top: int = 0, *, timeout: float | Deadline = 3600.0
    ) -> Scores:
        """log P of every token given its prefix, under the raw model, in one prefill pass per sequence.

        sequences    texts, which `pool.tokenizer` splits as for `generate`; lists of token ids; or a RolloutBatch (its
                     prompts and completions joined)
        top          also return this many most likely tokens at each position
        """
        deadline = Deadline.of(timeout)
        self._refuse_own_stepper("score")
        return self._client.loop.run(
            self._score(self._score_call(sequences, top, deadline), deadline, True)
        )

    async def ascore(
        self, sequences: Any, top: int = 0, *, timeout: float | Deadline = 3600.0
    ) -> Scores:
        """`score`, awaited."""
        deadline = Deadline.of(timeout)
        call = await asyncio.to_thread(self._score_call, sequences, top, deadline)
        return await self._client.loop.arun(self._score(call, deadline))

    def _score_call(self, sequences: Any, top: int, deadline: Deadline) -> pb.ScoreCall:
        if isinstance(sequences, RolloutBatch):
            sequences = [[*s.prompt_token_ids, *s.token_ids] for s in sequences]
        listed = _prompts.as_list(sequences)
        self._facts(deadline)
        self._check_limits(len(listed), 1)
        if (
            isinstance(top, bool)
            or not isinstance(top, (int, np.integer))
            or not 0 <= top < 2**31
        ):
            raise SamplingError(
                f"top must be a whole number of at least 0, not {top!r}"
            )
        messages = [
            _prompts.to_message(i, self._tokens_of(i, p)) for i, p in enumerate(listed)
        ]
        return pb.ScoreCall(
            pool=self.name, sequences=[m.tokens for m in messages], top=top
        )

    def _tokens_of(self, index: int, sequence: Any) -> Any:
        """A sequence to score as token ids: a text is tokenised as the engine does with a prompt."""
        _prompts.to_message(index, sequence)  # refuses what is no prompt at all
        if isinstance(sequence, str):
            return self.tokenizer(sequence)["input_ids"]
        if not _prompts.is_tokens(sequence):
            raise SamplingError(
                f"sequence {index} is a chat, and a chat has no tokens before it is rendered",
                remedy="pool.tokenizer.apply_chat_template(messages, return_dict=False) gives them",
            )
        return sequence

    async def _score(
        self, request: pb.ScoreCall, deadline: Deadline, told: bool = False
    ) -> Scores:
        start = clock()
        count = len(request.sequences)
        began = time.monotonic()
        with Progress(
            count, f"{self.name}: score", unit="sequence", show=told, only_waiting=True
        ) as bar:
            async with self._explained(bar, lambda: began):
                events = await self._client.gather("Score", request, deadline)
        results: dict[int, pb.Scored] = {
            scored.index: scored for event in events for scored in event.scored
        }
        scores = _prompts.to_scores(
            [results[i] for i in range(len(request.sequences))], request
        )
        tokens = sum(len(s.ids) for s in request.sequences)
        done = ScoreEvent(
            start=start, stop=clock(), what="score", samples=len(scores), tokens=tokens
        )
        _calls.note(self._client, done)
        return scores

    # Control ------------------------------------------------------------------------------------------------------

    def pause(
        self,
        mode: str = "keep",
        *,
        clear_cache: bool = False,
        timeout: float | Deadline = 600.0,
    ) -> float:
        """Stop generation on every replica; returns the seconds it took.

        Requests in flight: "keep" freezes them until resume(), "wait" lets them finish first, "abort" ends them.
        """
        deadline = Deadline.of(timeout)
        if mode not in CHOICES["pause"]:
            raise ConfigError(
                f"pause mode must be 'keep', 'wait' or 'abort', not {mode!r}"
            )
        return self._steer(deadline, what=pb.PAUSE, mode=mode, clear_cache=clear_cache)

    def resume(self, *, timeout: float | Deadline = 60.0) -> float:
        """Resume generation after a pause."""
        return self._steer(Deadline.of(timeout), what=pb.RESUME)

    def sleep(self, level: int = 1, *, timeout: float | Deadline = 120.0) -> float:
        """Free GPU memory: level 1 keeps the weights in host memory, level 2 drops them. Not on CPU."""
        if level not in (1, 2):
            raise ConfigError(f"sleep level must be 1 or 2, not {level!r}")
        deadline = Deadline.of(timeout)
        self._release_shadows(deadline)
        return self._steer(deadline, what=pb.SLEEP, level=level)

    def wake(
        self, tags: Sequence[str] | None = None, *, timeout: float | Deadline = 120.0
    ) -> float:
        """Allocate the memory again; tags choose what: "weights", "kv_cache". Not on CPU."""
        unknown = set(tags or ()) - {"weights", "kv_cache"}
        if unknown:
            raise ConfigError(
                f"no such wake tag: {sorted(unknown)}",
                remedy="'weights', 'kv_cache', or nothing for both",
            )
        deadline = Deadline.of(timeout)
        self._release_shadows(deadline)
        _launch_settings.give_back()
        return self._steer(deadline, what=pb.WAKE, tags=list(tags or ()))

    def _release_shadows(self, deadline: Deadline) -> None:
        for link in list(self._linked):
            link.release_shadows(deadline)

    def _steer(self, deadline: Deadline, **order: Any) -> float:
        self._facts(deadline)
        return self._client.call(
            "Steer", pb.SteerCall(pool=self.name, by=own_name(), **order), deadline
        ).seconds

    # Inspect ------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the pool's model, as transformers loads it: what the engine reads prompts with.

        `pool.tokenizer.decode(sample.token_ids)`, `pool.tokenizer("text")["input_ids"]`. Needs the model's folder on
        this machine; of an engine launched with another one (engine={"tokenizer": …}), load that.
        """
        return _prompts.tokenizer_of(self.model)

    def status(self, *, timeout: float | Deadline = 30.0) -> dict[str, Any]:
        """One fresh snapshot: replicas with state, version, requests in flight, KV use, prefix hit rate, tokens/s."""
        from jvlab.wire._pool_summary import pool_summary

        return pool_summary(self._refresh(Deadline.of(timeout)))

    def _refresh(self, deadline: Deadline) -> pb.PoolStatus:
        """Fetch and store a fresh snapshot."""
        snapshot = self._client.call("Status", pb.PoolRequest(pool=self.name), deadline)
        self._take(snapshot)
        return snapshot

    def logs(self, replica: int = 0, lines: int = 50) -> str:
        """The last lines of a replica's log."""
        name = replica_name(self, replica)
        return self._client.call(
            "Logs", pb.LogsRequest(pool=self.name, replica=name, lines=lines)
        ).text

    def trace(
        self,
        tensors: Sequence[CheckpointTensor] | None = None,
        *,
        replica: str = "",
        timeout: float | Deadline = 300.0,
    ) -> list[RankLayout]:
        """Where the live engine stores every checkpoint element, rank by rank. Nothing in the engine changes.

        tensors    names and shapes of the checkpoint; default: read from the pool's model folder
        replica    which replica to trace; default: the first that is ready
        """
        from jvlab.layout._checkpoint import checkpoint_tensors

        deadline = Deadline.of(timeout)
        listed = checkpoint_tensors(self.model) if tensors is None else tensors
        self._facts(deadline)
        call = pb.TraceCall(
            pool=self.name,
            replica=replica,
            tensors=[
                pb.TraceTensor(name=t.name, shape=t.shape, dtype=t.dtype)
                for t in listed
            ],
        )
        return self._client.loop.run(self._trace(call, deadline))

    def peek(
        self,
        parameter: str,
        rank: int = 0,
        *,
        replica: int = 0,
        timeout: float | Deadline = 120.0,
    ) -> bytes:
        """The raw bytes of a live parameter on one rank of one replica."""
        deadline = Deadline.of(timeout)
        call = pb.PeekCall(
            pool=self.name,
            replica=replica_name(self, replica),
            rank=rank,
            parameter=parameter,
        )
        return self._client.loop.run(self._peek(call, deadline))

    async def _peek(self, request: pb.PeekCall, deadline: Deadline) -> bytes:
        return b"".join(
            [
                event.piece
                for event in await self._client.gather("Peek", request, deadline)
            ]
        )

    def hidden(
        self, tokens: Sequence[int], *, timeout: float | Deadline = 600.0
    ) -> np.ndarray:
        """Hidden states after every decoder layer, float32 [layers, tokens, width], for one sequence.

        Needs one replica, an eager engine and no other request at the same time.
        """
        from jvlab.lab._hidden import hidden_states

        return hidden_states(self, tokens, Deadline.of(timeout))

    def restart(self, replica: int = 0, *, timeout: float | Deadline = 30.0) -> Self:
        """Restart a failed replica; if the pool was ever synced, it gets requests again after the next sync."""
        deadline = Deadline.of(timeout)
        order = pb.RestartRequest(pool=self.name, replica=replica_name(self, replica))
        self._client.call("Restart", order, deadline)
        self._refresh(deadline)
        return self

    def scale(
        self, replicas: int, *, wait: bool = True, timeout: float | Deadline = 900.0
    ) -> Self:
        """Set the number of replicas; returns when new ones are ready and surplus ones have ended.

        More: new processes start next to the old ones. If the pool was ever synced, a new replica gets no requests
        until the next sync commits on it (`link.sync` includes it automatically). Fewer: idle replicas go first, then
        those with the highest numbers; they get no new requests, finish those in flight, and end. A failed replica
        counts until it is restarted or removed. `wait=False` returns at once; `pool.status()` shows progress.
        """
        _scaling.scale(self, replicas, wait, timeout)
        return self

    async def _trace(
        self, request: pb.TraceCall, deadline: Deadline
    ) -> list[RankLayout]:
        from jvlab.layout._layout_codec import layout_from_bytes

        layouts = [
            layout_from_bytes(event.layout)
            for event in await self._client.gather("Trace", request, deadline)
        ]
        return sorted(layouts, key=lambda layout: layout.rank)

    # Closing and display ------------------------------------------------------------------------------------------

    def close(self, timeout: float | Deadline = 30.0) -> None:
        """End this pool's processes. Can be called twice."""
        deadline = Deadline.of(timeout)
        if not self._snapshot.closed:
            self._client.call("ClosePool", pb.PoolRequest(pool=self.name), deadline)
            self._forget("close() was called")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def limits(self) -> dict[str, int]:
        """The maxima for one call: `n` samples per prompt, `prompts`, `samples`, `tokens`; see `launch`.

        Empty before the first engine is up, which determines the defaults.
        """
        if not self._snapshot.HasField("limits"):
            return {}
        known = self._snapshot.limits
        return {
            field.name: getattr(known, field.name) for field in known.DESCRIPTOR.fields
        }

    @property
    def http_url(self) -> str:
        """Base URL of the pool's OpenAI API: `openai.OpenAI(base_url=pool.http_url, ...)`."""
        return _launch_settings.http_url(self._snapshot)

    @property
    def http_token(self) -> str:
        """The lab's token, required by every HTTP request: `openai.OpenAI(api_key=pool.http_token, ...)`."""
        return self._client.metadata[0][1].removeprefix("Bearer ")

    @property
    def replicas(self) -> int:
        """The number of replicas, without those that are leaving."""
        return len(_scaling.staying(self._snapshot))

    def __repr__(self) -> str:
        return _faces.draw(self, "text")

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html", lost="went away" in self._why_closed)

    def panel(self) -> Panel | None:
        """Show the live panel: processes, load, logs, control buttons. None where only a table can be shown."""
        return _faces.draw(self, "panel")

    def _ipython_display_(self) -> None:
        self.panel()
