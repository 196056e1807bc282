"""`Pool`: a set of equal vLLM replicas that generates and scores."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab import _adapters, _colocate, _http, _prompts, _replies, _scaling
from jvlab._errors import ConfigError, ControlError, DeadlineExceeded, LaunchError, ReplicaLost, SamplingError
from jvlab._turns import Turns
from jvlab.control import jvlab_pb2 as pb
from jvlab.control._client import Client, Stream
from jvlab.rollout import _vllm
from jvlab.rollout._batch import RolloutBatch, Sample
from jvlab.rollout._scores import Scores
from jvlab.views._progress import Progress

if TYPE_CHECKING:
    from jvlab._in_process import InProcessPool
    from jvlab._link import Link
    from jvlab.layout._types import CheckpointTensor, RankLayout
    from jvlab.views._faces import Panel

WATCH_SECONDS = 3600.0
STAGES = ("process", "weights", "warm-up", "ready")


class Pool(Turns):
    """Replicas of one model behind one name. Made by `lab.launch(...)`; comes up in the background.

    >>> batch = pool.generate(["Once upon a time"], n=2, max_tokens=8, seed=0, ignore_eos=True)
    >>> batch
    RolloutBatch(2 samples, 1 prompts, 16 tokens, version ..., 2 length, model llama-...)
    >>> pool.score(batch).gap(batch) < 1e-3         # the same tokens, scored in one pass
    True
    >>> for sample in pool.stream(["one", "two"], max_tokens=4, ignore_eos=True):
    ...     assert len(sample.token_ids) == 4       # as they finish
    >>> pool.status()["healthy"]
    1
    """

    _one_process = False  # whether the engine runs in this process

    def __init__(self, client: Client, snapshot: pb.PoolStatus) -> None:
        self._client, self._snapshot = client, snapshot
        self.name: str = snapshot.pool
        self.model: str = snapshot.model
        self._changed = threading.Condition()
        self._why_closed = ""
        self._listeners: list[Callable[[pb.PoolStatus], None]] = []
        self._linked: weakref.WeakSet[Link] = weakref.WeakSet()  # this process's links to it
        self._watching = client.loop.submit(self._watch())

    async def _watch(self) -> None:
        """Keep the last snapshot fresh, so that no repr needs a call."""
        request, metadata = pb.PoolRequest(pool=self.name), self._client.metadata
        open_stream = lambda: self._client.stub.Watch(request, timeout=WATCH_SECONDS, metadata=metadata)
        self._forget(await self._client.follow(open_stream, self._take))

    def _take(self, snapshot: pb.PoolStatus) -> None:
        with self._changed:
            if 0 < snapshot.revision < self._snapshot.revision:  # answers and the watched stream cross on their way
                return
            self._snapshot = snapshot
            self._changed.notify_all()
        for listener in list(self._listeners):
            listener(snapshot)

    def _forget(self, why: str) -> None:
        """The pool is out of reach: wake whoever waits, and say why from now on."""
        self._why_closed = self._why_closed or why
        closed = pb.PoolStatus()
        closed.CopyFrom(self._snapshot)
        closed.closed = True
        self._take(closed)

    @staticmethod
    def in_process(model: str, **options: Any) -> InProcessPool:
        """A pool without a lab: one vLLM engine in this process, ready when this returns. Options as `lab.launch`.

        For one GPU that one process owns, and for quick experiments: no gateway, no ports, weights go by memory.
        `link = pool.connect(params)` takes the place of `lab.connect`. It ends with this process, so it survives no
        kernel restart; it has one replica and no tensor parallelism; a process holds one at a time (`pool.close()`).
        Trainer and engine share the interpreter: while one computes in Python the other waits.
        """
        from jvlab._in_process import open_pool

        return open_pool(model, **options)

    # Coming up ----------------------------------------------------------------------------------------------------

    def wait(self, timeout: float = 900.0, progress: bool | None = None) -> Pool:
        """Wait until every replica is ready; a failed start raises with the engine's own last lines."""
        deadline = time.monotonic() + timeout
        with Progress(len(STAGES), f"{self.name}: process", unit="stage", show=progress) as bar:
            while not self._settled():
                bar.to(min((_stage_number(r) for r in _scaling.staying(self._snapshot)), default=0))
                bar.say(f"{self.name}: {_stage_text(self._snapshot)}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"{self.name} was not ready after {timeout:g} s; it is at {_stage_text(self._snapshot)}",
                        remedy="wait again with a larger timeout, or look at pool.logs()",
                    )
                with self._changed:
                    self._changed.wait(min(left, 0.5))
            bar.to(len(STAGES))
            bar.say(f"{self.name}: ready")
        return self

    async def ready(self, timeout: float = 900.0) -> Pool:
        """The same, awaited."""
        return await asyncio.to_thread(self.wait, timeout, False)

    def _settled(self) -> bool:
        """All ready; raises if one failed or the pool is closed."""
        snapshot = self._snapshot
        if snapshot.closed:
            raise ControlError(
                f"{self.name} is closed: {self._why_closed or 'by another holder'}", remedy="launch a new pool"
            )
        for replica in snapshot.replicas:
            if replica.state == pb.FAILED:
                what = "died" if replica.HasField("facts") else "did not come up"
                raise LaunchError(
                    f"{replica.replica} {what}: {replica.cause}\n--- last log lines ---\n{replica.log_tail}",
                    remedy=_replies.launch_remedy(replica.cause), cause=replica.cause, log=replica.log_tail,
                )  # fmt: skip
        return all(replica.state == pb.READY for replica in snapshot.replicas if replica.state not in _scaling.LEAVING)

    def _facts(self) -> pb.EngineFacts:
        """What the engine said of itself; waits for the pool if it is still coming up."""
        known = [r.facts for r in self._snapshot.replicas if r.state == pb.READY]
        if self._snapshot.closed or not known:
            self.wait()
            known = [r.facts for r in self._snapshot.replicas if r.state == pb.READY]
        return known[0]

    # Generate -----------------------------------------------------------------------------------------------------

    def _start(
        self,
        prompts: Any,
        n: int,
        window: int,
        sampling: Mapping[str, Any],
        routing: str | None = None,
        min_version: int | None = None,
    ) -> pb.GenerateStart:
        _scaling.check_routing(routing)
        least = _scaling.check_version(min_version)
        adapter, sampling = _adapters.split(sampling)
        if not isinstance(n, (int, np.integer)) or n < 1:
            raise SamplingError(f"n must be a whole number of at least 1, not {n!r}")
        listed = [_prompts.to_message(i, p) for i, p in enumerate(_prompts.as_list(prompts))]
        facts = self._facts()
        text = _prompts.check_sampling(sampling, facts.sampling_names, _vllm.RESERVED)
        return pb.GenerateStart(
            pool=self.name, prompts=listed, n=int(n), sampling_json=text, window=window, routing=routing or "",
            min_version=least, adapter=adapter,
        )  # fmt: skip

    def generate(
        self,
        prompts: Any,
        n: int = 1,
        *,
        progress: bool | None = None,
        timeout: float = 3600.0,
        routing: str | None = None,
        min_version: int | None = None,
        **sampling: Any,
    ) -> RolloutBatch:
        """`n` samples of each prompt, all of them, in order.

        prompts     texts, chats (lists of {"role", "content"}) or lists of token ids, mixed if you like
        sampling    vLLM's SamplingParams by name: max_tokens, temperature, seed, stop, ...; sample k uses seed + k
        progress    True, False, or None: only in a terminal or a notebook
        routing     which replica takes a prompt: "least" (in flight), or "prefix" (prompts that begin alike go to one
                    replica, whose KV cache then has them, unless it is too busy); default: as launched
        min_version only replicas that hold this version or a later one, also such as the last sync left behind;
                    default: exactly the pool's version

        `adapter="name"` computes with a LoRA adapter that `load_adapter` loaded.
        """
        start = self._start(prompts, n, 0, sampling, routing, min_version)
        return self._client.loop.run(self._collect(start, _prompts.as_list(prompts), progress, timeout))

    async def agenerate(
        self,
        prompts: Any,
        n: int = 1,
        *,
        timeout: float = 3600.0,
        routing: str | None = None,
        min_version: int | None = None,
        **sampling: Any,
    ) -> RolloutBatch:
        """`generate`, awaited."""
        start = await asyncio.to_thread(self._start, prompts, n, 0, sampling, routing, min_version)
        return await self._client.loop.arun(self._collect(start, _prompts.as_list(prompts), False, timeout))

    def stream(
        self,
        prompts: Any,
        n: int = 1,
        *,
        window: int | None = None,
        timeout: float = 3600.0,
        routing: str | None = None,
        min_version: int | None = None,
        **sampling: Any,
    ) -> Stream[Sample]:
        """Samples as they finish; use `for` or `async for`. Leaving early aborts the rest in the engine.

        At most `window` samples are unfinished or unread at once, so a slow reader slows the pool down instead of
        filling memory; the default keeps every replica full twice over.
        """
        facts = self._facts()
        if window is None:
            window = 2 * facts.max_num_seqs * len(self._snapshot.replicas)
        if window < 1:
            raise SamplingError(f"window must be at least 1, not {window}")
        start = self._start(prompts, n, window, sampling, routing, min_version)
        return Stream(self._client.loop, self._samples(start, _prompts.as_list(prompts), [], timeout))

    async def _samples(
        self, start: pb.GenerateStart, prompts: list[Any], notes: list[str], timeout: float
    ) -> AsyncGenerator[Sample, None]:
        """Samples of one Generate call, on the client's loop; grants credit as they are taken."""
        import grpc

        from jvlab.control._client import translate

        call = self._client.stub.Generate(timeout=timeout, metadata=self._client.metadata)
        try:
            await call.write(pb.GenerateCall(start=start))
            if not start.window:
                await call.done_writing()
            # Samples the gateway may not start before we grant credit; while there are any it cannot have finished.
            withheld = len(start.prompts) * start.n - start.window if start.window else 0
            async for event in call:
                notes.extend(event.notes)
                for message in event.samples:
                    yield _replies.to_sample(message, prompts)
                    if withheld > 0 and not call.done():
                        withheld -= 1
                        await call.write(pb.GenerateCall(credit=1))
        except grpc.aio.AioRpcError as error:
            raise translate(error, "generate", timeout, self._client.address) from None
        finally:
            call.cancel()

    async def _collect(
        self, start: pb.GenerateStart, prompts: list[Any], progress: bool | None, timeout: float
    ) -> RolloutBatch:
        began, notes, samples = time.perf_counter(), [], []
        total = len(start.prompts) * start.n
        with Progress(total, f"{self.name}: generate", unit="sample", show=progress, after=1.0) as bar:
            tokens = 0
            ticking = asyncio.create_task(_tick(bar))
            async for sample in self._samples(start, prompts, notes, timeout):
                samples.append(sample)
                tokens += len(sample.token_ids)
                bar.advance(1, f"{tokens / (time.perf_counter() - began):.0f} tokens/s")
            ticking.cancel()
        samples.sort(key=lambda s: (s.prompt_index, s.sample_index))
        mode = _replies.logprobs_mode(self._snapshot)
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
                f"{len(lost)} of {total} samples were lost: {lost[0].error}. " + " ".join(notes),
                remedy="the finished ones are in this error's .fields['batch']; pool.status() shows the replicas",
                batch=replace(batch, samples=tuple(s for s in samples if not s.error)),
            )  # fmt: skip
        return batch

    # Score --------------------------------------------------------------------------------------------------------

    def score(self, sequences: Any, top: int = 0, *, timeout: float = 3600.0) -> Scores:
        """log P of every token given its prefix, under the raw model, in one prefill pass each.

        sequences    lists of token ids, or a RolloutBatch (its prompts and completions joined)
        top          also the so many most likely tokens at each position
        """
        return self._client.loop.run(self._score(self._score_call(sequences, top), timeout))

    async def ascore(self, sequences: Any, top: int = 0, *, timeout: float = 3600.0) -> Scores:
        """`score`, awaited."""
        call = await asyncio.to_thread(self._score_call, sequences, top)
        return await self._client.loop.arun(self._score(call, timeout))

    def _score_call(self, sequences: Any, top: int) -> pb.ScoreCall:
        if isinstance(sequences, RolloutBatch):
            sequences = [[*s.prompt_token_ids, *s.token_ids] for s in sequences]
        listed = _prompts.as_list(sequences)
        messages = [_prompts.to_message(i, p) for i, p in enumerate(listed)]
        for index, message in enumerate(messages):
            if message.WhichOneof("kind") != "tokens":
                raise SamplingError(f"sequence {index} is not a list of token ids", remedy="tokenize it first")
        self._facts()
        return pb.ScoreCall(pool=self.name, sequences=[m.tokens for m in messages], top=top)

    async def _score(self, request: pb.ScoreCall, timeout: float) -> Scores:
        import grpc

        from jvlab.control._client import translate

        results: dict[int, pb.Scored] = {}
        try:
            async for event in self._client.stub.Score(request, timeout=timeout, metadata=self._client.metadata):
                results |= {scored.index: scored for scored in event.scored}
        except grpc.aio.AioRpcError as error:
            raise translate(error, "score", timeout, self._client.address) from None
        return _replies.to_scores([results[i] for i in range(len(request.sequences))], request.top)

    # Steer --------------------------------------------------------------------------------------------------------

    def pause(self, mode: str = "keep", *, clear_cache: bool = False, timeout: float = 600.0) -> float:
        """Stop generation on every replica; the seconds it took.

        "keep" freezes requests in flight, they go on after resume(); "wait" lets them finish first; "abort" ends them.
        """
        if mode not in ("keep", "wait", "abort"):
            raise ConfigError(f"pause mode must be 'keep', 'wait' or 'abort', not {mode!r}")
        return self._steer(timeout, what=pb.PAUSE, mode=mode, clear_cache=clear_cache)

    def resume(self, *, timeout: float = 60.0) -> float:
        """Go on generating after a pause."""
        return self._steer(timeout, what=pb.RESUME)

    def sleep(self, level: int = 1, *, timeout: float = 120.0) -> float:
        """Give GPU memory back: level 1 keeps the weights in host memory, level 2 drops them. Not on CPU."""
        if level not in (1, 2):
            raise ConfigError(f"sleep level must be 1 or 2, not {level!r}")
        self._let_go_of_shadows()
        return self._steer(timeout, what=pb.SLEEP, level=level)

    def wake(self, tags: Sequence[str] | None = None, *, timeout: float = 120.0) -> float:
        """Take the memory again; tags choose what: "weights", "kv_cache". Not on CPU."""
        unknown = set(tags or ()) - {"weights", "kv_cache"}
        if unknown:
            raise ConfigError(
                f"no such wake tag: {sorted(unknown)}", remedy="'weights', 'kv_cache', or nothing for both"
            )
        self._let_go_of_shadows()
        _colocate.give_back()
        return self._steer(timeout, what=pb.WAKE, tags=list(tags or ()))

    def _let_go_of_shadows(self) -> None:
        for link in list(self._linked):
            link._let_go_of_shadows()

    def _steer(self, timeout: float, **order: Any) -> float:
        self._facts()
        return self._client.call("Steer", pb.SteerCall(pool=self.name, **order), timeout=timeout).seconds

    # Look ---------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """One fresh snapshot: replicas with state, version, requests in flight, KV use, prefix hit rate, tokens/s."""
        from jvlab.views._cards import pool_summary

        snapshot = self._client.call("Status", pb.PoolRequest(pool=self.name))
        self._take(snapshot)
        return pool_summary(snapshot)

    def logs(self, replica: int = 0, lines: int = 50) -> str:
        """The last lines of a replica's log."""
        name = f"{self.name}/{replica}"
        return self._client.call("Logs", pb.LogsRequest(pool=self.name, replica=name, lines=lines)).text

    def trace(
        self, tensors: Sequence[CheckpointTensor] | None = None, *, replica: str = "", timeout: float = 300.0
    ) -> list[RankLayout]:
        """Where the live engine keeps every checkpoint element, rank by rank. Nothing in the engine changes.

        tensors    names and shapes of the checkpoint; default: read from the pool's model folder
        replica    which one is asked; default: the first that is ready
        """
        from jvlab.rollout._checkpoint import checkpoint_tensors

        listed = checkpoint_tensors(self.model) if tensors is None else tensors
        self._facts()
        call = pb.TraceCall(
            pool=self.name,
            replica=replica,
            tensors=[pb.TraceTensor(name=t.name, shape=t.shape, dtype=t.dtype) for t in listed],
        )
        return self._client.loop.run(self._trace(call, timeout))

    def peek(self, parameter: str, rank: int = 0, *, replica: int = 0, timeout: float = 120.0) -> bytes:
        """The raw bytes that one rank of one replica holds of a live parameter."""
        call = pb.PeekCall(pool=self.name, replica=f"{self.name}/{replica}", rank=rank, parameter=parameter)
        return self._client.loop.run(self._peek(call, timeout))

    async def _peek(self, request: pb.PeekCall, timeout: float) -> bytes:
        import grpc

        from jvlab.control._client import translate

        pieces = []
        try:
            async for event in self._client.stub.Peek(request, timeout=timeout, metadata=self._client.metadata):
                pieces.append(event.piece)
        except grpc.aio.AioRpcError as error:
            raise translate(error, "peek", timeout, self._client.address) from None
        return b"".join(pieces)

    def hidden(self, tokens: Sequence[int], *, timeout: float = 600.0) -> np.ndarray:
        """Hidden states after every decoder layer, float32 [layers, tokens, width], of one sequence scored alone.

        Needs one replica, an eager engine and no other request at the same time.
        """
        from jvlab._hidden import hidden_states

        return hidden_states(self, tokens, timeout)

    def restart(self, replica: int = 0, *, timeout: float = 30.0) -> Pool:
        """Start a replica that failed once more; it takes requests after the next sync, if the pool was ever synced."""
        order = pb.RestartRequest(pool=self.name, replica=f"{self.name}/{replica}")
        self._client.call("Restart", order, timeout=timeout)
        self._take(self._client.call("Status", pb.PoolRequest(pool=self.name)))
        return self

    def scale(self, replicas: int, *, wait: bool = True, timeout: float = 900.0) -> Pool:
        """Have so many replicas from now on; returns when those that come are ready and those that go are gone.

        More: new processes start beside the old ones. If the pool was ever synced, a new replica takes no request
        before the next sync commits on it (`link.sync` reaches it by itself). Fewer: replicas that serve nobody go
        first, then those with the highest numbers; they get nothing new, finish what they have, and end. A replica
        that failed counts, until it is restarted or goes. `wait=False` returns at once; `pool.status()` shows it.
        """
        return _scaling.scale(self, replicas, wait, timeout)

    async def _trace(self, request: pb.TraceCall, timeout: float) -> list[RankLayout]:
        import grpc

        from jvlab.control._client import translate
        from jvlab.layout._wire import layout_from_bytes

        layouts = []
        try:
            async for event in self._client.stub.Trace(request, timeout=timeout, metadata=self._client.metadata):
                layouts.append(layout_from_bytes(event.layout))
        except grpc.aio.AioRpcError as error:
            raise translate(error, "trace", timeout, self._client.address) from None
        return sorted(layouts, key=lambda layout: layout.rank)

    # Endings and faces --------------------------------------------------------------------------------------------

    def close(self, timeout: float = 30.0) -> None:
        """End this pool's processes. Can be called twice."""
        if not self._snapshot.closed:
            self._client.call("ClosePool", pb.PoolRequest(pool=self.name), timeout=timeout)
            self._forget("close() was called")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def http_url(self) -> str:
        """Base address of the OpenAI API that routes over the pool: `openai.OpenAI(base_url=pool.http_url, ...)`."""
        return _http.http_url(self._snapshot)

    @property
    def http_token(self) -> str:
        """The lab's token, which every request over HTTP carries: `openai.OpenAI(api_key=pool.http_token, ...)`."""
        return self._client.metadata[0][1].removeprefix("Bearer ")

    @property
    def replicas(self) -> int:
        """How many replicas the pool has; those that are leaving do not count."""
        return len(_scaling.staying(self._snapshot))

    def __repr__(self) -> str:
        from jvlab.views._cards import pool_line

        return pool_line(self._snapshot)

    def _repr_html_(self) -> str:
        from jvlab.views._cards import pool_html

        return pool_html(self._snapshot)

    def panel(self) -> Panel | None:
        """Show the live panel: processes, load, logs, buttons that steer. None where only a table can be shown."""
        from jvlab.views._cards import pool_state
        from jvlab.views._faces import follow, have_widgets, show
        from jvlab.views._lab_panel import PoolPanel

        if not have_widgets():
            return follow(self, lambda: pool_state(self._snapshot).startswith("starting"))
        return show(self, None if self._snapshot.closed else lambda: PoolPanel(self))

    def _ipython_display_(self) -> None:
        self.panel()


async def _tick(bar: Progress) -> None:
    """Keep a bar's clock moving while no sample finishes."""
    while True:
        await asyncio.sleep(0.5)
        bar.tick()


def _stage_number(replica: pb.ReplicaStatus) -> int:
    return STAGES.index(replica.stage) if replica.stage in STAGES else 0


def _stage_text(snapshot: pb.PoolStatus) -> str:
    stages = [replica.stage for replica in _scaling.staying(snapshot)]
    return stages[0] if len(set(stages)) == 1 else ", ".join(f"{r.replica} {r.stage}" for r in snapshot.replicas)
