"""`Pool`: a set of identical vLLM replicas that generate and score; `InProcessPool`: one engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from jvlab import _faces
from jvlab._deadline import Deadline
from jvlab._errors import (
    ConfigError,
    ControlError,
    DeadlineExceeded,
    JvlabError,
    ReplicaLost,
    SamplingError,
    SyncError,
    UnknownName,
    Unsupported,
)
from jvlab._names import LostNote, check_name, own_name
from jvlab._progress import Progress
from jvlab._tracebacks import brief
from jvlab.engine import _vllm
from jvlab.gateway._routing import check_policy
from jvlab.lab import _adapters, _launch_settings, _prompts
from jvlab.lab._in_process import (
    INSTEAD,
    EngineHost,
    claim,
    open_pool,
    refuse_restarts,
    release,
)
from jvlab.lab._launch_settings import LaunchArguments, LaunchOptions, shows_options
from jvlab.lab._session import Session, Sessions, open_sessions
from jvlab.record._batch import RolloutBatch, Scores
from jvlab.record._events import RolloutTally, ScoreEvent, clock, note
from jvlab.record._sample import Sample
from jvlab.sync._connections import Connections, ConnectOptions
from jvlab.wire import _security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import Client, Stream
from jvlab.wire._limits import Asked, Limits
from jvlab.wire._local_calls import LocalClient
from jvlab.wire._pool_summary import (
    LEAVING,
    absent,
    model_name,
    out_of_sight,
    pool_health,
    pool_summary,
    staying,
    waiting_for,
)
from jvlab.wire._sync_words import CHOICES
from jvlab.wire.processes._pool_spec import MAX_REPLICAS

if TYPE_CHECKING:
    from jvlab.lab._determinism import DeterminismReport
    from jvlab.layout._types import CheckpointTensor, RankLayout
    from jvlab.sync._link import Link
    from jvlab.views.panels._live import Panel

WATCH_SECONDS = 3600.0
# seconds; a gateway that takes longer is named while the wait goes on
ANSWER_WITHIN = 5.0
# of the log's last line, while a pool starts
LOG_SECONDS = 2.0
LOG_CHARACTERS = 120
LOOK_SECONDS = 0.5  # between two looks at what a call waits for
SILENT_SECONDS = 1.0  # without a result, until a bar says what is waited for
RATE_SECONDS = 2.0  # between two questions for a pool's tokens/s
STAGES = ("process", "weights", "warm-up", "ready")


class Pool:
    """Replicas of one model behind one name. Made by `lab.launch(...)`; starts in the background.

    >>> batch = pool.generate(["Once upon a time"], n=2, max_tokens=8, seed=0, ignore_eos=True)
    >>> batch
    RolloutBatch(2 samples, 1 prompt, 16 tokens, version ..., 2 length, model llama)
    >>> pool.score(batch).gap(batch) < 1e-3         # the same tokens, scored in one pass
    True
    >>> for sample in pool.stream(["one", "two"], max_tokens=4, ignore_eos=True):
    ...     assert len(sample.token_ids) == 4       # as they finish
    >>> pool.status()["healthy"]
    1
    """

    one_process = False  # whether the engine runs in this process
    # launched with colocate=True by this process: it may sleep while an on-policy run trains
    colocated = False
    _why_closed = ""
    _lost = False  # closed because its gateway died

    @staticmethod
    @shows_options(LaunchOptions)
    def in_process(model: str, **options: Unpack[LaunchArguments]) -> InProcessPool:
        """A pool without a lab: one vLLM engine in this process, ready when this returns. Options as `lab.launch`.

        For one GPU that one process owns, and for quick experiments: no gateway, no ports, weights move in memory.
        `link = pool.connect(params)` replaces `lab.connect`. The pool ends with this process, so it does not survive a
        kernel restart; it has one replica and no tensor parallelism; a process can have one at a time (`pool.close()`).
        Trainer and engine share the interpreter: while one runs Python code the other waits.
        """
        asked = LaunchOptions.of("Pool.in_process", model, options)
        refuse_restarts(options.get("restarts", 0))
        pool = InProcessPool(*open_pool(asked))
        claim(pool)
        pool.colocated = asked.colocate
        return pool

    def __init__(self, client: Client, snapshot: pb.PoolStatus) -> None:
        self.client = client
        self.snapshot = snapshot
        self.name: str = snapshot.pool
        self.model: str = snapshot.model
        self._changed = threading.Condition()
        self._warned: set[str] = set()  # what `wait` has warned of
        # written for `load_adapter`; removed with the pool
        self._adapter_folders: dict[str, weakref.finalize] = {}
        # close() and the watching thread both remove; close() waits for the other
        self._removing = threading.Lock()
        self.listeners: list[Callable[[pb.PoolStatus], None]] = []
        # this process's links to the pool
        self.links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._watching = client.loop.submit(self._watch())

    async def _watch(self) -> None:
        """Keep the snapshot up to date, so that a repr needs no RPC."""
        request = pb.PoolRequest(pool=self.name)
        metadata = self.client.metadata
        open_stream = lambda: self.client.stub.Watch(
            request, timeout=WATCH_SECONDS, metadata=metadata
        )
        lost = await self.client.follow(open_stream, self.renew, self._lose_sight)
        self._lost = bool(lost)
        self.forget(lost or "it was ended")

    def _lose_sight(self) -> None:
        if self.client.away:
            self.renew(out_of_sight(self.snapshot))

    def look(self, seconds: float) -> pb.LabStatus:
        """What the gateway says now of the whole lab, within a time; for displays."""
        status = self.client.describe(seconds)
        for found in status.pools:
            if found.pool == self.name:
                self.renew(found)
        return status

    def renew(self, snapshot: pb.PoolStatus) -> None:
        """Store a newer snapshot that somebody asked the gateway for, and tell everyone who waits or listens."""
        with self._changed:
            # replies may overtake the watched stream
            if 0 < snapshot.revision < self.snapshot.revision:
                return
            self.snapshot = snapshot
            self._changed.notify_all()
        for listener in list(self.listeners):
            listener(snapshot)

    def forget(self, why: str) -> None:
        """Mark the pool as closed for this reason, and wake all waiters."""
        self._why_closed = self._why_closed or why
        closed = pb.PoolStatus()
        closed.CopyFrom(self.snapshot)
        closed.closed = True
        self.renew(closed)
        with self._removing:
            for remove in list(self._adapter_folders.values()):
                remove()

    # Starting -----------------------------------------------------------------------------------------------------

    @brief
    def wait(
        self, timeout: float | Deadline = 900.0, progress: bool | None = None
    ) -> Self:
        """Wait until every replica is ready; a failed start raises with the last lines of the engine's log.

        Warns once per pool if jvlab was not tested with this vLLM, and names what it lacks; and if the CPU cannot
        compute in the checkpoint's dtype.
        """
        self._wait_until(Deadline.of(timeout), progress, self._all_ready, confirm=True)
        said = (
            {r.facts.vllm_warning for r in self.snapshot.replicas} - self._warned - {""}
        )
        self._warned |= said
        for text in sorted(said):
            warnings.warn(text, stacklevel=3)  # of the caller, above `brief`
        return self

    def _wait_until(
        self,
        deadline: Deadline,
        progress: bool | None,
        done: Callable[[], Any],
        confirm: bool = False,
    ) -> None:
        """Wait for `done`, with a progress bar. `confirm`: of what the gateway says now, not when it was last heard."""
        title = _stage_text(self.snapshot)
        with Progress(
            len(STAGES), title, unit="stage", show=progress, stages=STAGES
        ) as bar:
            while not (
                done()
                and (not confirm or (self._gateway_answers(deadline, bar) and done()))
            ):
                stages = [r.stage for r in staying(self.snapshot)]
                bar.to(
                    min(
                        (STAGES.index(s) if s in STAGES else 0 for s in stages),
                        default=0,
                    )
                )
                bar.describe(_stage_text(self.snapshot))
                if not done():
                    said = self._last_log_line() if bar.shown else ""
                    bar.remark(said or ("it imports vLLM" if bar.done == 0 else ""))
                bar.waits(absent(self.snapshot))
                if deadline.over:
                    # raises if it is the gateway that is late
                    self._ask_gateway(deadline, 0.0)
                    raise DeadlineExceeded(
                        f"{self.name} was not ready after {deadline.seconds:g} s: waited for "
                        + _not_ready(self.snapshot),
                        remedy="wait again with a larger timeout, or look at pool.logs()",
                    )
                with self._changed:
                    self._changed.wait(deadline.within(0.5))
            bar.to(len(STAGES))
            bar.remark("")
            bar.describe(_stage_text(self.snapshot))

    def _gateway_answers(self, deadline: Deadline, bar: Progress) -> bool:
        """Fetch a fresh snapshot: the last may be of a gateway that is stopped or gone since."""
        try:
            self._ask_gateway(deadline, deadline.within(ANSWER_WITHIN))
        except DeadlineExceeded as error:
            if deadline.over:
                raise
            bar.remark(error.message)
            return False
        return True

    def _ask_gateway(self, deadline: Deadline, seconds: float) -> None:
        """Fetch a fresh snapshot; raises, naming the gateway, if it does not answer within this part of the time."""
        request = pb.PoolRequest(pool=self.name)

        async def ask() -> pb.PoolStatus:
            waited = round(deadline.seconds - deadline.left() + seconds, 1)
            with self.client.translating(f"waiting for pool {self.name!r}", waited):
                return await self.client.begin(
                    "Status", request, deadline=Deadline(seconds)
                )

        self.renew(self.client.loop.run(ask()))

    def _last_log_line(self) -> str:
        """What a starting engine said last, of the first replica that is not ready; empty if nothing can be read."""
        late = next(
            (r.replica for r in self.snapshot.replicas if r.stage != "ready"), ""
        )
        if not late:
            return ""
        try:
            reply = self.client.call(
                "Logs",
                pb.LogsRequest(pool=self.name, replica=late, lines=1),
                LOG_SECONDS,
            )
        except ControlError:  # the wait itself says what is wrong
            return ""
        return reply.text.strip()[-LOG_CHARACTERS:]

    async def ready(self, timeout: float | Deadline = 900.0) -> Self:
        """`wait`, awaited."""
        return await asyncio.to_thread(self.wait, Deadline.of(timeout), False)

    def _all_ready(self) -> bool:
        """Are all replicas ready? Raises if one failed or the pool is closed."""
        snapshot = self.snapshot
        if snapshot.closed:
            raise ControlError(
                f"{self.name} is closed: {self._why_closed or 'by another holder'}",
                remedy="launch a new pool",
            )
        for replica in snapshot.replicas:
            if replica.state == pb.FAILED:
                died = replica.HasField("facts") or len(replica.deaths) > 0
                what = "died" if died else "did not come up"
                raise _prompts.launch_error(
                    f"{replica.replica} {what}",
                    replica.cause,
                    snapshot.model,
                    replica.log_tail,
                    here=not replica.elsewhere,
                )
        return all(replica.state == pb.READY for replica in staying(snapshot))

    def facts(self, timeout: float | Deadline = 900.0) -> pb.EngineFacts:
        """The engine's facts; waits for the pool if it is still starting."""

        def up() -> list[pb.EngineFacts]:
            snapshot = self.snapshot
            found = [
                r.facts
                for r in snapshot.replicas
                if r.state == pb.READY and not snapshot.closed
            ]
            if not found:
                self._all_ready()  # raises if none will become ready
            return found

        deadline = Deadline.of(timeout)
        while not (found := up()):
            self._wait_until(deadline, None, up)
        return found[0]

    # Generate -----------------------------------------------------------------------------------------------------

    def _start(
        self,
        prompts: Any,
        n: int,
        sampling: Mapping[str, Any],
        *,
        deadline: Deadline,
        window: int = 0,
        routing: str | None = None,
        min_version: int | None = None,
        home: str = "",
    ) -> pb.GenerateStart:
        """The request, checked.

        window    samples that may be unfinished or unread at once; 0 for all
        home      the replica that gets the prompts, if it still serves
        """
        self._refuse_own_stepper("generate")
        if routing is not None:
            check_policy(routing)
        least = 0  # the pool's current version
        if min_version is not None:
            remedy = "versions start with the first sync; leave it out for the pool's current one"
            least = _prompts.check_whole(
                "min_version", min_version, ConfigError, remedy
            )
        adapter, sampling = _adapters.split(sampling)
        n = _prompts.check_whole("n", n)
        given = _prompts.as_list(prompts)
        facts = self.facts(deadline)
        self._check_limits(len(given), n)
        listed = [_prompts.to_message(i, p) for i, p in enumerate(given)]
        text = _prompts.check_sampling(sampling, facts.sampling_names, _vllm.RESERVED)
        return pb.GenerateStart(
            pool=self.name,
            prompts=listed,
            n=n,
            sampling_json=text,
            window=window,
            routing=routing or "",
            min_version=least,
            adapter=adapter,
            home=home,
        )

    def _home(self, replica: int | str | None) -> str:
        return "" if replica is None else self._replica_name(replica)

    def _check_limits(self, prompts: int, n: int) -> None:
        """Check before sending; gateway and replica check again, and count tokens too."""
        if self.snapshot.HasField("limits"):
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
        replica: int | str | None = None,
        **sampling: Any,
    ) -> RolloutBatch:
        """`n` samples of each prompt, in order.

        prompts     texts, chats (lists of {"role", "content"}) or lists of token ids; they may be mixed
        sampling    vLLM's SamplingParams by name: max_tokens, temperature, seed, stop, ...; sample k uses seed + k
        progress    False: nothing is shown; else a bar in a terminal or a notebook, in a log a line if it takes long
        routing     which replica gets a prompt: "least" (in flight), or "prefix" (prompts with a common prefix go to
                    one replica, to reuse its KV cache, unless it is too busy); default: as launched
        min_version use any replica with this version or a later one, including those the last sync left behind;
                    default: exactly the pool's version
        replica     send all to this one, by its number or name ("demo/0"); default: by `routing`

        `adapter="name"` uses a LoRA adapter loaded with `load_adapter`.
        """
        deadline = Deadline.of(timeout)
        start = self._start(
            prompts,
            n,
            sampling,
            deadline=deadline,
            routing=routing,
            min_version=min_version,
            home=self._home(replica),
        )
        return self.client.loop.run(
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
        replica: int | str | None = None,
        on_sample: Callable[[Sample], None] | None = None,
        **sampling: Any,
    ) -> RolloutBatch:
        """`generate`, awaited. `on_sample(sample)` is called with each sample as it ends; it must return at once."""
        deadline = Deadline.of(timeout)
        start = await asyncio.to_thread(
            self._start,
            prompts,
            n,
            sampling,
            deadline=deadline,
            routing=routing,
            min_version=min_version,
            home=self._home(replica),
        )
        listed = _prompts.as_list(prompts)
        return await self.client.loop.arun(
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
        facts = self.facts(deadline)
        if window is None:
            window = 2 * facts.max_num_seqs * len(self.snapshot.replicas)
        if window < 1:
            raise SamplingError(f"window must be at least 1, not {window}")
        start = self._start(
            prompts,
            n,
            sampling,
            deadline=deadline,
            window=window,
            routing=routing,
            min_version=min_version,
        )
        samples = self._samples(start, _prompts.as_list(prompts), [], deadline)
        told = self._told(samples, len(start.prompts) * start.n)
        return Stream(
            self.client.loop, told, lambda: self._refuse_own_stepper("the stream")
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
        await self.client.back(deadline)
        call = self.client.begin("Generate", deadline=deadline)
        tally = RolloutTally()
        try:
            with self.client.translating("generate", deadline.seconds):
                await call.write(pb.GenerateCall(start=start))
                if not start.window:
                    await call.done_writing()
                # Samples the gateway may not start before we grant credit; while there are any, it can't have finished.
                total = len(start.prompts) * start.n
                withheld = total - start.window if start.window else 0
                async for event in call:
                    lost = event.lost
                    notes.extend(LostNote(n, lost) if lost else n for n in event.notes)
                    for message in event.samples:
                        sample = _prompts.to_sample(message, prompts)
                        tally.add(sample)
                        yield sample
                        if withheld > 0 and not call.done():
                            withheld -= 1
                            await call.write(pb.GenerateCall(credit=1))
        finally:
            call.cancel()
            note(self.client, *tally.events())

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
        mode = _prompts.logprobs_mode(self.snapshot)
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
        return self.client.loop.run(
            self._score(self._score_call(sequences, top, deadline), deadline, True)
        )

    async def ascore(
        self, sequences: Any, top: int = 0, *, timeout: float | Deadline = 3600.0
    ) -> Scores:
        """`score`, awaited."""
        deadline = Deadline.of(timeout)
        call = await asyncio.to_thread(self._score_call, sequences, top, deadline)
        return await self.client.loop.arun(self._score(call, deadline))

    def _score_call(self, sequences: Any, top: int, deadline: Deadline) -> pb.ScoreCall:
        if isinstance(sequences, RolloutBatch):
            sequences = [[*s.prompt_token_ids, *s.token_ids] for s in sequences]
        listed = _prompts.as_list(sequences)
        self.facts(deadline)
        self._check_limits(len(listed), 1)
        top = _prompts.check_whole("top", top, least=0, below=2**31)
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
                events = await self.client.gather("Score", request, deadline)
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
        note(self.client, done)
        return scores

    # Waiting for work ---------------------------------------------------------------------------------------------

    def _refuse_own_stepper(self, what: str) -> None:
        """Raise if this thread has the engines halted with a stepper: it would wait for itself, for ever."""
        for link in list(self.links):
            stepper = link.open_stepper
            if stepper is not None and stepper.blocks_this_thread:
                raise SyncError(
                    f"{what} would wait for ever: {self.name} is halted by a stepper that this thread opened and has "
                    f"not finished (version {stepper.version}, next: {stepper.upcoming})",
                    remedy="finish it with stepper.run(), or give it up with stepper.abort()",
                    stepper=stepper,
                )

    @contextlib.asynccontextmanager
    async def _explained(
        self, bar: Progress, arrived: Callable[[], float]
    ) -> AsyncIterator[None]:
        """Inside, the bar says what is waited for once nothing has arrived for a while. On the client's loop.

        `arrived()`: when something arrived last, by `time.monotonic()`.
        """
        task = asyncio.create_task(self._explain(bar, arrived)) if bar.wanted else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _explain(self, bar: Progress, arrived: Callable[[], float]) -> None:
        me = own_name()
        asked = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            silent = now - arrived() >= SILENT_SECONDS
            bar.waits(waiting_for(self.snapshot, me) if silent else "")
            if silent and bar.shown and now - asked >= RATE_SECONDS:
                asked = now
                await self._show_rate(bar)

    async def _show_rate(self, bar: Progress) -> None:
        """The pool's tokens/s: while no sample ends, nothing tells a rate of the call's own."""
        try:
            snapshot = await self.client.acall(
                "Status", pb.PoolRequest(pool=self.name), RATE_SECONDS
            )
        except JvlabError:  # the call itself says what is wrong
            return
        self.renew(snapshot)
        rate = sum(replica.stats.tokens_per_s for replica in snapshot.replicas)
        bar.remark(f"{rate:,.0f} tokens/s" if rate else "")

    # Sessions, determinism, adapters ------------------------------------------------------------------------------

    def session(
        self, prompt: Any, *, routing: str | None = None, **sampling: Any
    ) -> Session:
        """A multi-turn session with one replica: `s.generate(8)`, `s.append(observation)`, `s.generate(8)`, ..."""
        return Session(self, prompt, sampling, routing=routing)

    def sessions(
        self, prompts: Any, n: int = 1, *, routing: str | None = None, **sampling: Any
    ) -> Sessions:
        """`n` sessions for each prompt, whose turns run concurrently: `group.generate(8)`."""
        return open_sessions(self, prompts, n, routing, sampling)

    def check_determinism(
        self, prompts: Any = None, **options: Any
    ) -> DeterminismReport:
        """Measure determinism: the same prompts alone, again, in batches of several sizes and orders, on each replica.

        prompts    default: 8 prompts of token ids, 5 to 300 long
        options    max_tokens=32, batches=(2, 4, 8), repeats=2, and sampling by name; default temperature=1.0, seed=0
        """
        from jvlab.lab._determinism import check

        return check(self, prompts, **options)

    def load_adapter(
        self,
        name: str,
        source: Any,
        *,
        config: Mapping[str, Any] | None = None,
        version: int | None = None,
        timeout: float | Deadline = 300.0,
    ) -> int:
        """Load a LoRA adapter, or a newer version of it, on every replica. Returns its version.

        source     a folder in PEFT's format that the replicas can read, or tensors by their PEFT names
        config     with tensors: PEFT's config; lora_alpha is required, r defaults to the shapes'
        version    default: one more than the last
        """
        deadline = Deadline.of(timeout)
        check_name("adapter", name)
        if not self.facts(deadline).max_adapters:
            raise Unsupported(
                f"{self.name} was launched without LoRA",
                remedy="launch(..., engine={'enable_lora': True, 'max_loras': 4, 'max_lora_rank': 16})",
            )
        if version is None:
            loaded = [
                adapter.version
                for replica in self._refresh(deadline).replicas
                for adapter in replica.stats.adapters
                if adapter.name == name
            ]
            version = 1 + max(loaded, default=0)
        else:
            _prompts.check_whole("version", version, ConfigError, "or leave it out")
        folder, ours = _adapters.folder_of(source, config)
        try:
            _adapters.check_folder(folder, self.model)
            adapter = pb.Adapter(name=name, version=version, path=str(folder))
            self._set_adapter(deadline, adapter=adapter)
        except BaseException:
            if ours:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._remove_adapter_folder(name)
        if ours:  # kept for replicas that join later; removed with this pool object
            self._adapter_folders[name] = weakref.finalize(
                self, shutil.rmtree, folder, ignore_errors=True
            )
        return version

    def unload_adapter(self, name: str, *, timeout: float | Deadline = 300.0) -> None:
        """Unload an adapter; requests in flight that use it still finish."""
        check_name("adapter", name)
        adapter = pb.Adapter(name=name)
        self._set_adapter(Deadline.of(timeout), adapter=adapter, unload=True)
        self._remove_adapter_folder(name)

    def _set_adapter(self, deadline: Deadline, **order: Any) -> None:
        call = pb.AdapterCall(pool=self.name, **order)
        self.client.call("SetAdapter", call, deadline)

    def _remove_adapter_folder(self, name: str) -> None:
        """The folder that was written for an older version of it, if there is one."""
        if (remove := self._adapter_folders.pop(name, None)) is not None:
            remove()

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
        for link in list(self.links):
            link.release_shadows(deadline)

    def _steer(self, deadline: Deadline, **order: Any) -> float:
        self.facts(deadline)
        return self.client.call(
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
        return pool_summary(self._refresh(Deadline.of(timeout)))

    def _refresh(self, deadline: Deadline) -> pb.PoolStatus:
        """Fetch and store a fresh snapshot."""
        snapshot = self.client.call("Status", pb.PoolRequest(pool=self.name), deadline)
        self.renew(snapshot)
        return snapshot

    def logs(self, replica: int = 0, lines: int = 50) -> str:
        """The last lines of a replica's log."""
        name = self._replica_name(replica)
        return self.client.call(
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
        from jvlab.layout._layout_codec import layout_from_bytes

        deadline = Deadline.of(timeout)
        listed = checkpoint_tensors(self.model) if tensors is None else tensors
        self.facts(deadline)
        call = pb.TraceCall(
            pool=self.name,
            replica=replica,
            tensors=[
                pb.TraceTensor(name=t.name, shape=t.shape, dtype=t.dtype)
                for t in listed
            ],
        )
        events = self._gather("Trace", call, deadline)
        layouts = [layout_from_bytes(event.layout) for event in events]
        return sorted(layouts, key=lambda layout: layout.rank)

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
            replica=self._replica_name(replica),
            rank=rank,
            parameter=parameter,
        )
        events = self._gather("Peek", call, deadline)
        return b"".join(event.piece for event in events)

    def _gather(self, method: str, request: Any, deadline: Deadline) -> list[Any]:
        return self.client.loop.run(self.client.gather(method, request, deadline))

    def hidden(
        self, tokens: Sequence[int], *, timeout: float | Deadline = 600.0
    ) -> np.ndarray:
        """Hidden states after every decoder layer, float32 [layers, tokens, width], for one sequence.

        Needs one replica, an eager engine and no other request at the same time.
        """
        deadline = Deadline.of(timeout)
        if self.replicas != 1:
            raise Unsupported(
                f"{self.name} has {self.replicas} replicas, and a score may go to any of them",
                remedy="launch a pool of one replica for this",
            )
        sequence = self._score_call([list(tokens)], 0, deadline).sequences[0]
        call = pb.HiddenCall(pool=self.name, replica=f"{self.name}/0", tokens=sequence)
        found: dict[int, bytes] = defaultdict(bytes)
        for event in self._gather("Hidden", call, deadline):
            found[event.layer] += event.piece
        rows = [np.frombuffer(found[layer], np.float32) for layer in sorted(found)]
        if not all(len(row) for row in rows):
            raise Unsupported(
                "no layer returned hidden states: this engine runs a compiled graph",
                remedy='launch with engine={"enforce_eager": True}',
            )
        if any(len(row) % len(tokens) for row in rows):
            raise Unsupported(
                "other requests ran at the same time",
                remedy="try again when the pool is idle",
            )
        return np.stack([row.reshape(len(tokens), -1) for row in rows])

    def _replica_name(self, replica: Any) -> str:
        """ "pool/number" of one of the pool's replicas, given that or only its number."""
        known = [status.replica for status in self.snapshot.replicas]
        name = replica if replica in known else f"{self.name}/{replica}"
        if name not in known:
            raise UnknownName.of(
                f"replica of {self.name!r}",
                name,
                known,
                "by its number, beginning at 0",
            )
        return name

    # Restart and scale --------------------------------------------------------------------------------------------

    def restart(self, replica: int = 0, *, timeout: float | Deadline = 30.0) -> Self:
        """Restart a failed replica; if the pool was ever synced, it gets requests again after the next sync.

        One that is to be restarted by itself is started at once. It may be restarted as often again as after `launch`.
        """
        deadline = Deadline.of(timeout)
        order = pb.RestartRequest(pool=self.name, replica=self._replica_name(replica))
        self.client.call("Restart", order, deadline)
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
        deadline = Deadline.of(timeout)
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
            raise ConfigError(
                f"a pool has at least 1 replica, so scale({replicas!r}) makes no sense",
                remedy="pass a whole number of at least 1; pool.close() ends the pool",
            )
        if replicas > MAX_REPLICAS:
            raise ConfigError(
                f"scale({replicas}) is more than one pool takes",
                remedy=f"at most {MAX_REPLICAS}",
            )
        order = pb.ScaleRequest(pool=self.name, replicas=replicas)
        self.renew(self.client.call("Scale", order, deadline))
        if not wait:
            return self
        while leaving := [r for r in self.snapshot.replicas if r.stage in LEAVING]:
            if self.snapshot.closed:
                break  # `wait` says why
            if deadline.over:
                words = ", ".join(
                    f"{r.replica} is {r.stage} with {r.routed} in flight"
                    for r in leaving
                )
                paused = any(r.stats.paused for r in leaving)
                raise DeadlineExceeded(
                    f"{self.name} did not remove all within {deadline.seconds:g} s: {words}"
                    + ("; the pool is paused" if paused else ""),
                    remedy="pool.resume() lets them finish"
                    if paused
                    else "they still end when their work is done; is the pool paused? pool.resume() lets them finish",
                )
            with self._changed:
                self._changed.wait(deadline.within(0.5))
        return self.wait(deadline)

    # Closing and display ------------------------------------------------------------------------------------------

    def close(self, timeout: float | Deadline = 30.0) -> None:
        """End this pool's processes. Can be called twice."""
        deadline = Deadline.of(timeout)
        if not self.snapshot.closed:
            self.client.call("ClosePool", pb.PoolRequest(pool=self.name), deadline)
            self.forget("close() was called")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def limits(self) -> dict[str, int]:
        """The maxima for one call: `n` samples per prompt, `prompts`, `samples`, `tokens`; see `launch`.

        Empty before the first engine is up, which determines the defaults.
        """
        if not self.snapshot.HasField("limits"):
            return {}
        known = self.snapshot.limits
        return {
            field.name: getattr(known, field.name) for field in known.DESCRIPTOR.fields
        }

    @property
    def http_url(self) -> str:
        """Base URL of the pool's OpenAI API: `openai.OpenAI(base_url=pool.http_url, ...)`; https, from another host."""
        if not self.snapshot.http_url:
            raise ConfigError(
                f"pool {self.name!r} serves no HTTP: it was launched without it, or is closed",
                remedy="pool = lab.launch(..., http=True)",
            )
        host = self.client.address.rpartition(":")[0]
        if _security.is_loopback(host):
            return self.snapshot.http_url
        return f"https://{host}:{self.snapshot.https_port}/v1"

    @property
    def http_key_url(self) -> str:
        """Address with a key in it, `http://jvlab:KEY@127.0.0.1:PORT`, for clients that send no token, as TRL's.

        They add `/v1/...` themselves, and send the key as HTTP's basic authentication. Treat it as a secret that leaks:
        trainers write their arguments to logs, checkpoints and trackers. So the key can generate and tokenize on
        this machine until the pool is closed; weights, status and metrics need the lab's token.
        """
        if not self.snapshot.http_key:
            raise ConfigError(
                f"pool {self.name!r} takes no key: it was launched without http_key, or is closed",
                remedy="pool = lab.launch(..., http=True, http_key=True)",
            )
        base = self.snapshot.http_url.removesuffix("/v1")
        key = _security.pool_key(self.http_token, base)
        return base.replace("://", f"://jvlab:{key}@")

    @property
    def http_token(self) -> str:
        """The lab's token, required by every HTTP request: `openai.OpenAI(api_key=pool.http_token, ...)`."""
        return self.client.metadata[0][1].removeprefix("Bearer ")

    @property
    def replicas(self) -> int:
        """The number of replicas, without those that are leaving."""
        return len(staying(self.snapshot))

    def __repr__(self) -> str:
        return _faces.draw(self, "text")

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html", lost=self._lost)

    def panel(self) -> Panel | None:
        """Show the live panel: processes, load, logs, control buttons. None where only a table can be shown."""
        return _faces.draw(self, "panel")

    def _ipython_display_(self) -> None:
        self.panel()


def _not_ready(snapshot: pb.PoolStatus) -> str:
    """The replicas that are not ready, and the stage of each."""
    late = [r for r in staying(snapshot) if r.state != pb.READY]
    words = [
        f"{r.replica}, which is at {r.stage}" + (f" ({r.cause})" if r.cause else "")
        for r in late
    ]
    return "; ".join(words) or f"a replica of {snapshot.pool}"


def _stage_text(snapshot: pb.PoolStatus) -> str:
    """The pool's name; with replicas in different stages, also the stage of each."""
    stages = [replica.stage for replica in staying(snapshot)]
    if len(set(stages)) <= 1:
        return snapshot.pool
    return f"{snapshot.pool}: " + ", ".join(
        f"{r.replica} {r.stage}" for r in snapshot.replicas
    )


class InProcessPool(Pool):
    """A pool with one engine in this process: the API of `Pool`, with `connect` instead of `lab.connect`."""

    one_process = True

    def __init__(
        self, client: LocalClient, snapshot: pb.PoolStatus, host: EngineHost
    ) -> None:
        super().__init__(client, snapshot)
        self._host = host
        self._connections = Connections()
        self._ending = threading.RLock()

    @shows_options(Connections.connect)
    def connect(
        self,
        params: Any,
        rules: Any = "auto",
        transport: str = "auto",
        mode: str = "direct",
        **options: Unpack[ConnectOptions],
    ) -> Link:
        """Connect a tree of parameters to this pool; arguments and result as for `lab.connect`."""
        return self._connections.connect(
            params, self, rules, transport, mode, **options
        )

    def restart(self, replica: int = 0, *, timeout: float = 30.0) -> InProcessPool:
        raise Unsupported(
            "an engine in this process can't be restarted: it ends with its process",
            remedy="pool.close(), then jv.Pool.in_process(...) again",
        )

    def scale(
        self, replicas: int, *, wait: bool = True, timeout: float = 900.0
    ) -> InProcessPool:
        if replicas == 1:
            return self
        raise Unsupported(
            f"this pool has one engine, in this process; it can't have {replicas}",
            remedy=INSTEAD,
        )

    def logs(self, replica: int = 0, lines: int = 50) -> str:
        raise Unsupported(
            "an engine in this process has no log of its own: it prints where this process prints",
            remedy="env={'VLLM_LOGGING_LEVEL': 'INFO'} makes it log more",
        )

    def close(self, timeout: float = 30.0) -> None:
        """End the engine and free its memory; another in-process pool can be made then. Can be called twice."""
        deadline = Deadline.of(timeout)
        with self._ending:
            if self.client.loop.stopping:
                return
            self._connections.close()
            super().close(deadline)
            try:
                self.client.loop.run(self._host.tear_down())
            finally:
                self.client.close()
                release(self)

    def __enter__(self) -> InProcessPool:
        return self

    def __repr__(self) -> str:
        now = self.snapshot
        return f"Pool({now.pool!r}, {model_name(now)!r}, in process on {now.device}, {pool_health(now)[0]})"

    def _repr_html_(self) -> str:
        return f"<div>{escape(repr(self))}</div>{_faces.draw(self, 'html')}"
