"""A pool and a link without engines: a bigram model in numpy, replicas that can die, syncs that can fail."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvlab._errors import ReplicaLost, SyncError
from jvlab._names import LostNote
from jvlab.lab._session import Turn
from jvlab.record._batch import RolloutBatch, Scores
from jvlab.record._sample import Sample
from jvlab.sync._transaction import Outcome, SyncReport
from jvlab.trainer._tasks import Example, Task
from jvlab.wire import jvlab_pb2 as pb

VOCAB, END = 12, 0
WANTED = 7  # the token that is rewarded


def logprobs_fn(params: Any, tokens: Any, mask: Any) -> Any:
    """A bigram model: the token before says it all."""
    scores = jax.nn.log_softmax(params["table"][tokens[:, :-1]])
    found = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(found, ((0, 0), (1, 0)))


def fresh_params(seed: int = 0) -> dict[str, Any]:
    return {
        "table": jnp.asarray(
            np.random.default_rng(seed).normal(0, 0.3, (VOCAB, VOCAB)), jnp.float32
        )
    }


def share(sample: Any, example: Example) -> float:
    """The reward: the share of wanted tokens."""
    return float(np.mean(np.asarray(sample.token_ids) == WANTED))


def task(reward: Any = share, **options: Any) -> Task:
    return Task(
        lambda index: [1 + index % (VOCAB - 1)],
        reward,
        name="wanted",
        sampling={"max_tokens": 6},
        **options,
    )


class FakePool:
    """Samples token by token from the parameters it holds at that moment, so that a sync can fall into a rollout."""

    name, model = "fake", "fake"
    client: Any = None
    colocated = False
    snapshot: Any = pb.PoolStatus(pool="fake")

    def __init__(
        self, replicas: int = 1, delay: float = 0.0, jitter: int | None = None
    ) -> None:
        self.alive = {f"fake/{i}": True for i in range(replicas)}
        self.delay, self.version, self.scores = delay, 0, np.zeros((VOCAB, VOCAB))
        self._jitter = None if jitter is None else np.random.default_rng(jitter)
        self.lock = threading.Lock()
        self.calls = self.flying = self.most_flying = 0
        # calls whose first sample waits for a sync after its first token
        self.crossing: set[int] = set()
        # added to every log-probability: an engine that computes something else
        self.offset = 0.0
        self.on_call: Any = lambda call: None
        self.gone = "failed"  # the state of those that are not alive
        self.awaited = False  # a gateway that was started again expects it
        self.stale: set[str] = set()  # alive again, without the weights
        self.steered: list[Any] = []  # sleeps and wakes, and the syncs between them
        self.asleep: set[str] = set()

    def hold(self, params: Any, version: int) -> None:
        table = np.asarray(params["table"], np.float64)
        with self.lock:
            self.scores = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
            self.version = version

    def status(self, **_: Any) -> dict[str, Any]:
        replicas = [
            {
                "replica": r,
                "state": "ready" if up else self.gone,
                "ready": up and r not in self.stale,
                "health": "stale" if r in self.stale else "ready" if up else self.gone,
                "cause": None if up else "killed",
                "deaths": [] if up else ["killed"],
                "restarts_left": 0,
                "awaited": not up and self.awaited,
            }
            for r, up in self.alive.items()
        ]
        return {
            "healthy": sum(self.alive.values()),
            "replicas": replicas,
            "dtype": "float32",
        }

    def facts(self) -> pb.EngineFacts:
        return pb.EngineFacts()

    def session(self, tokens: list[int], **sampling: Any) -> FakeSession:
        return FakeSession(self, list(tokens), sampling)

    def _pick(self) -> str:
        up = [r for r, alive in self.alive.items() if alive and r not in self.stale]
        if not up:
            raise ReplicaLost("no replica is ready")
        return up[self.calls % len(up)]

    async def agenerate(
        self,
        prompts: Any,
        n: int = 1,
        *,
        seed: int = 0,
        max_tokens: int = 4,
        temperature: float = 1.0,
        on_sample: Callable[[Sample], None] = lambda sample: None,
    ) -> RolloutBatch:
        assert not self.asleep, "asked to generate while it sleeps"
        self.calls += 1
        self.on_call(self.calls)
        replica, notes = self._pick(), []
        self.flying += 1
        self.most_flying = max(self.most_flying, self.flying)
        try:
            made = []
            for k in range(n):
                made.append(
                    await self._sample(prompts[0], k, seed + k, max_tokens, replica)
                )
                if self.alive[replica]:
                    on_sample(made[-1])
            if not self.alive[replica]:
                text = f"replica {replica} was lost (killed); {n} unfinished part(s) handed back"
                notes.append(LostNote(text, replica))
                replica = self._pick()
                made = [
                    await self._sample(prompts[0], k, seed + k, max_tokens, replica)
                    for k in range(n)
                ]
                list(map(on_sample, made))
        finally:
            self.flying -= 1
        return RolloutBatch(made, notes=notes)

    async def _sample(
        self, prompt: Any, index: int, seed: int, length: int, replica: str
    ) -> Sample:
        rng, tokens, logprobs, versions = np.random.default_rng(seed), [], [], []
        last, crosses = int(prompt[-1]), index == 0 and self.calls in self.crossing
        for _ in range(length):
            if self.delay:
                await asyncio.sleep(
                    self.delay
                    * (
                        1.0
                        if self._jitter is None
                        else float(self._jitter.exponential())
                    )
                )
            while crosses and versions and versions[0] == self.version:
                await asyncio.sleep(0.001)
            with self.lock:
                scores, version = self.scores[last], self.version
            last = int(rng.choice(VOCAB, p=np.exp(scores) / np.exp(scores).sum()))
            tokens.append(last)
            logprobs.append(scores[last] + self.offset)
            versions.append(version)
            if last == END:
                break
        edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
        spans = tuple((versions[a], a, b) for a, b in itertools.pairwise(edges))
        return Sample(
            prompt_index=0,
            sample_index=index,
            prompt_token_ids=prompt,
            token_ids=np.array(tokens),
            logprobs=np.array(logprobs),
            versions=spans,
            text=" ".join(map(str, tokens)),
            finish_reason="stop" if last == END else "length",
            replica=replica,
        )

    def generate(
        self,
        prompts: Any,
        n: int = 1,
        *,
        temperature: float,
        max_tokens: int,
        progress: bool,
    ) -> Any:
        """Greedy, as an evaluation asks."""
        assert (n, temperature, progress, self.asleep) == (1, 0.0, False, set())
        made = []
        for index, prompt in enumerate(prompts):
            tokens, last = [], int(prompt[-1])
            while len(tokens) < max_tokens and (not tokens or last != END):
                last = int(self.scores[last].argmax())
                tokens.append(last)
            more: dict[str, Any] = {
                "logprobs": np.zeros(len(tokens)),
                "versions": ((self.version, 0, len(tokens)),),
            }
            made.append(
                Sample(
                    prompt_index=index,
                    sample_index=0,
                    prompt_token_ids=prompt,
                    token_ids=np.array(tokens),
                    **more,
                )
            )
        return RolloutBatch(made)

    def sleep(self, level: int = 1) -> float:
        assert not self.flying, "put to sleep while it generates"
        self.steered.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}
        return 0.0

    def wake(self, tags: Any = None) -> float:
        self.steered.append(f"wake {' '.join(tags or ['all'])}")
        self.asleep -= set(tags or self.asleep)
        return 0.0

    def score(self, sequences: Any) -> Scores:
        with self.lock:
            found = [
                np.array(
                    [
                        np.nan,
                        *(
                            self.scores[a][b] + self.offset
                            for a, b in itertools.pairwise(s)
                        ),
                    ]
                )
                for s in sequences
            ]
            return Scores(found, np.full(len(found), self.version))


class FakeSession:
    """Turns that form one sequence."""

    def __init__(self, pool: FakePool, tokens: list[int], sampling: Any) -> None:
        self.pool, self.token_ids, self.sampling = pool, tokens, sampling

    def append(self, tokens: list[int]) -> None:
        self.token_ids += tokens

    async def agenerate(self, seed: int) -> Turn:
        batch = await self.pool.agenerate(
            [self.token_ids], n=1, seed=seed, **self.sampling
        )
        self.token_ids += batch[0].token_ids.tolist()
        return Turn.of(batch[0], None, batch.notes)


class FakeLink:
    """Brings parameters into the fake pool; `fail` of the next syncs do not commit."""

    part = "model"

    def __init__(self, pool: FakePool, fail: int = 0) -> None:
        self.pool, self.version, self.fail = pool, 0, fail
        self.on_sync: Any = lambda version: None
        self.unknown = False  # whether catching up is impossible

    def lend_scores(self, policy: Any) -> None: ...

    def sync(
        self, params: Any, version: int, *, progress: bool = False, **options: Any
    ) -> SyncReport:
        assert "weights" not in self.pool.asleep, "a sync into memory that is not there"
        self.pool.steered.append(f"sync {version}")
        self.on_sync(version)
        if self.fail:
            self.fail -= 1
            raise SyncError("a replica died in the middle")
        assert version > self.version
        self.pool.stale.clear()
        self.pool.hold(params, version)
        self.version = version
        outcomes = tuple(
            Outcome(r, "committed", version) for r, up in self.pool.alive.items() if up
        )
        return SyncReport(
            version, 576, {"total": 0.001, "pause": 0.0005, "move": 0.0005}, outcomes
        )

    def catch_up(self, params: Any) -> SyncReport | None:
        """Only for replicas that returned; the version stays."""
        if not self.pool.stale:
            return None
        self.pool.steered.append(f"catch up {self.version}")
        if self.unknown:
            raise SyncError("not those of the last sync")
        late = sorted(self.pool.stale)
        self.pool.hold(params, self.version)
        self.pool.stale.clear()
        outcomes = tuple(Outcome(r, "committed", self.version) for r in late)
        return SyncReport(self.version, 576, {"total": 0.001}, outcomes)


def world(**options: Any) -> tuple[FakePool, FakeLink]:
    pool = FakePool(**options)
    return pool, FakeLink(pool)
