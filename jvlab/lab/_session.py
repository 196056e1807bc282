"""`Session`: a multi-turn dialogue with one replica, whose KV cache keeps the earlier turns."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jvlab import _faces
from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, ReplicaLost, SamplingError
from jvlab._progress import Progress
from jvlab._units import how_many
from jvlab.lab import _prompts
from jvlab.record._batch import RolloutBatch
from jvlab.record._sample import Sample

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.wire import jvlab_pb2 as pb


# Token counts, prefill time and KV cache savings of sessions.


@dataclass(frozen=True)
class SessionStats:
    """Counts over the turns of one or several sessions.

    Each turn sends the engine all tokens so far: `prompt_tokens` is their sum, of which `cached_tokens` were in the KV
    cache. `seconds_saved` is an estimate: cached tokens times the average time of a computed one.
    """

    turns: int
    generated_tokens: int
    given_tokens: int  # prompt and observations
    prompt_tokens: int
    cached_tokens: int
    seconds_per_prefill_token: float
    moves: int  # turns on a different replica than the one before
    versions: tuple[int, ...]

    @classmethod
    def of(cls, sessions: Sequence[Session]) -> SessionStats:
        turns: list[Sample] = [turn for s in sessions for turn in s.turns]
        computed = sum(len(t.prompt_token_ids) - t.cached_tokens for t in turns)
        return cls(
            turns=len(turns),
            generated_tokens=sum(len(t.token_ids) for t in turns),
            given_tokens=sum(len(s.token_ids) - s.generated for s in sessions),
            prompt_tokens=sum(len(t.prompt_token_ids) for t in turns),
            cached_tokens=sum(t.cached_tokens for t in turns),
            seconds_per_prefill_token=sum(
                max(0.0, _prefill(t) - _step(t)) for t in turns
            )
            / max(1, computed),
            moves=sum(
                turn.moved_from is not None for s in sessions for turn in s.turns
            ),
            versions=tuple(sorted({v for t in turns for v in t.versions.tolist()})),
        )

    @property
    def hit_rate(self) -> float:
        """Fraction of all prompt tokens that were in the KV cache; usually 0 for a first turn."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def seconds_saved(self) -> float:
        """Roughly how long the prefill of the cached tokens would have taken."""
        return self.cached_tokens * self.seconds_per_prefill_token

    def words(self, turns: int) -> str:
        """A one-line summary, without anything that varies between runs."""
        match self.versions:
            case ():
                version = "no version"
            case (only,):
                version = f"version {only}"
            case _:
                version = f"versions {self.versions[0]} to {self.versions[-1]}"
        moved = f", moved {self.moves} times" if self.moves else ""
        return (
            f"{how_many(turns, 'turn')}, {self.generated_tokens} tokens generated, {self.given_tokens} given, "
            f"{version}, "
            f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens from the KV cache{moved}"
        )


def _prefill(turn: Sample) -> float:
    """Seconds from scheduling to the first token."""
    return max(
        0.0, turn.seconds.get("first_token", 0.0) - turn.seconds.get("queued", 0.0)
    )


def _step(turn: Sample) -> float:
    """Seconds of one decode step, which even an empty prefill takes."""
    rest = turn.seconds.get("total", 0.0) - turn.seconds.get("first_token", 0.0)
    return (
        max(0.0, rest) / (len(turn.token_ids) - 1) if len(turn.token_ids) > 1 else 0.0
    )


# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Turn(Sample):
    """One turn of the model: a `Sample` whose prompt is all tokens before it."""

    # the previous turn's replica, if this one went to another
    moved_from: str | None = None
    notes: tuple[str, ...] = ()  # incidents: a replica lost, a retry

    @classmethod
    def of(cls, sample: Sample, moved_from: str | None, notes: Sequence[str]) -> Turn:
        values = {f.name: getattr(sample, f.name) for f in fields(Sample)}
        return cls(**values, moved_from=moved_from, notes=tuple(notes))

    def __repr__(self) -> str:
        moved = (
            f", moved from {self.moved_from} to {self.replica}"
            if self.moved_from
            else ""
        )
        return f"{super().__repr__().replace('Sample(', 'Turn(', 1)[:-1]}{moved})"


class Session:
    """Several turns that form one sequence of tokens. Made by `pool.session(prompt, **sampling)`.

    Nothing is tokenised twice: each turn's prompt is the tokens of the turns before it and what was appended. All turns
    go to one replica, which computes only what is not in its prefix cache; if that replica is lost, another one gets
    the whole sequence (`turn.moved_from` names the old one). A sync between or within turns shows in `versions`.

    >>> s = pool.session("2 + 2 = ", temperature=0.0, ignore_eos=True)
    >>> s.generate(4)                               # 4 tokens, then control is back here
    Turn(prompt 0, sample 0: 4 tokens, length, version ..., ...)
    >>> s.append(" Are you sure?").generate(6)      # an observation: text or token ids
    Turn(prompt 0, sample 0: 6 tokens, length, version ..., ...)
    >>> s
    Session(2 turns, 10 tokens generated, ... given, version ..., ... of ... prompt tokens from the KV cache)
    >>> len(s.token_ids[s.mask]) == len(s.logprobs) == len(s.versions) == 10
    True
    >>> jv.RolloutBatch.from_sessions([s]).tokens    # to train on: one row, the model's tokens marked
    10

    Calling `generate` repeatedly without `append` generates in segments: greedy tokens equal those of one long run.
    With a seed they do not: each turn's seed is derived from the session's seed and the number of tokens generated
    before it, so the same calls give the same tokens, but other segment lengths give different ones.
    """

    def __init__(
        self,
        pool: Pool,
        prompt: Any,
        sampling: Mapping[str, Any],
        *,
        routing: str | None = None,
        prompt_index: int = 0,
        sample_index: int = 0,
    ) -> None:
        # raises here for a bad prompt, not at the first turn
        _prompts.to_message(prompt_index, prompt)
        self.pool = pool
        self.prompt = prompt
        self.sampling = dict(sampling)
        self.prompt_index = prompt_index
        self.sample_index = sample_index
        self.turns: list[Turn] = []
        self._routing = routing
        self._tokens: list[int] = []
        self._mask: list[bool] = []
        # appended, and not yet sent to the engine
        self._pending: list[str | list[int]] = []
        self._texts: list[str] = []  # after the prompt
        self._busy = False

    # Turns --------------------------------------------------------------------------------------------------------

    def append(self, observation: str | Sequence[int]) -> Session:
        """Add an observation: text (tokenised by the engine, no special tokens added) or token ids."""
        if isinstance(observation, str):
            if observation:
                self._pending.append(observation)
            return self
        message = _prompts.to_message(self.prompt_index, observation)
        if message.WhichOneof("kind") != "tokens":
            raise SamplingError(
                "a chat cannot be appended: its template needs the whole conversation",
                remedy="append the text of the new messages, with the template's own markers, or token ids",
            )
        self._pending.append(list(message.tokens.ids))
        return self

    def generate(
        self, max_tokens: int | None = None, *, timeout: float = 3600.0, **sampling: Any
    ) -> Turn:
        """The model's next turn, of at most `max_tokens`; `sampling` overrides the session's.

        If it fails, the session is unchanged, and `generate` can be called again.
        """
        deadline = Deadline.of(timeout)
        request = self._request(max_tokens, sampling, deadline)
        return self.pool.client.loop.run(_told_turns([self], [request], deadline))[0]

    async def agenerate(
        self, max_tokens: int | None = None, *, timeout: float = 3600.0, **sampling: Any
    ) -> Turn:
        """`generate`, awaited."""
        deadline = Deadline.of(timeout)
        request = await asyncio.to_thread(self._request, max_tokens, sampling, deadline)
        return await self.pool.client.loop.arun(self._run_turn(request, deadline))

    def _request(
        self, max_tokens: int | None, sampling: Mapping[str, Any], deadline: Deadline
    ) -> tuple[pb.GenerateStart, int]:
        """The next turn's request, and how many observations it includes: more may be appended while it runs."""
        chosen = {**self.sampling, **sampling}
        if max_tokens is not None:
            chosen["max_tokens"] = max_tokens
        if isinstance(chosen.get("seed"), (int, np.integer)) and self.generated:
            chosen["seed"] = turn_seed(int(chosen["seed"]), self.generated)
        first: Any = list(self._tokens) if self.turns else self.prompt
        new = list(self._pending)
        prompt = _prompts.Joined((first, *new)) if new else first
        start = self.pool._start(
            [prompt],
            1,
            chosen,
            deadline=deadline,
            routing=self._routing,
            home=self.replica or "",
        )
        start.settles = self.replica is None
        return start, len(new)

    async def _run_turn(
        self, request: tuple[pb.GenerateStart, int], deadline: Deadline
    ) -> Turn:
        if self._busy:
            raise ConfigError(
                "this session is in the middle of a turn",
                remedy="wait for it, or use another session",
            )
        self._busy = True
        try:
            notes: list[str] = []
            found = [
                sample
                async for sample in self.pool._samples(
                    request[0], [self.prompt], notes, deadline
                )
            ]
            sample = found[0]
            if sample.error:
                raise ReplicaLost(
                    f"the turn was lost: {sample.error}. {' '.join(notes)}",
                    remedy="the session is unchanged; generate() again once pool.status() shows a replica",
                )
            return self._add_turn(sample, request[1], notes)
        finally:
            self._busy = False

    def _add_turn(self, sample: Sample, sent: int, notes: Sequence[str]) -> Turn:
        seen = sample.prompt_token_ids.tolist()
        if seen[: len(self._tokens)] != self._tokens:
            raise ConfigError(
                "another turn of this session ended first",
                remedy="one turn at a time; pool.sessions for several",
            )
        moved = self.replica if self.replica not in (None, sample.replica) else None
        sample = replace(
            sample, prompt_index=self.prompt_index, sample_index=self.sample_index
        )
        turn = Turn.of(sample, moved, notes)
        given = seen[len(self._tokens) :]
        made = sample.token_ids.tolist()
        self._tokens += given + made
        self._mask += [False] * len(given) + [True] * len(made)
        self._texts += [
            p if isinstance(p, str) else "" for p in self._pending[:sent]
        ] + [sample.text]
        del self._pending[:sent]
        self.turns.append(turn)
        return turn

    # Contents -----------------------------------------------------------------------------------------------------

    @property
    def logprobs_mode(self) -> Literal["processed_logprobs", "raw_logprobs"]:
        """How the pool's engines report log-probabilities."""
        return _prompts.logprobs_mode(self.pool.snapshot)

    @property
    def replica(self) -> str | None:
        """The replica with the session's KV cache; None before the first turn."""
        return self.turns[-1].replica if self.turns else None

    @property
    def generated(self) -> int:
        """The number of tokens that the model generated."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def finished(self) -> bool:
        """Did the model end its last turn itself (end token or stop string), with nothing appended since?"""
        return (
            bool(self.turns)
            and self.turns[-1].finish_reason == "stop"
            and not self._pending
        )

    @property
    def token_ids(self) -> np.ndarray:
        """All tokens so far, int32: prompt, turns, and observations once a turn has followed them."""
        return np.array(self._tokens, np.int32)

    @property
    def tokens(self) -> np.ndarray:
        """The same as `token_ids`."""
        return self.token_ids

    @property
    def mask(self) -> np.ndarray:
        """Which of `token_ids` the model generated, bool."""
        return np.array(self._mask, bool)

    @property
    def logprobs(self) -> np.ndarray:
        """Log-probabilities of `token_ids[mask]`, float32."""
        return np.concatenate(
            [np.zeros(0, np.float32), *(turn.logprobs for turn in self.turns)]
        )

    @property
    def versions(self) -> np.ndarray:
        """The weight version of each token of `token_ids[mask]`, int64."""
        return np.concatenate(
            [np.zeros(0, np.int64), *(turn.versions for turn in self.turns)]
        )

    @property
    def text(self) -> str:
        """Everything after the prompt as text, without observations given as token ids."""
        return "".join(self._texts)

    @property
    def stats(self) -> SessionStats:
        """Turns, tokens, and KV cache hits."""
        return SessionStats.of([self])

    def sample(self, reward: float | None = None) -> Sample:
        """The session as one sample for training: see `RolloutBatch.from_sessions`."""
        if not self.turns:
            raise ConfigError(
                "a session without a turn has no sample", remedy="generate() first"
            )
        first = self.turns[0]
        last = self.turns[-1]
        start = len(first.prompt_token_ids)
        own = self.mask[start:]
        logprobs = np.zeros(len(own), np.float32)
        versions = np.full(len(own), -1, np.int64)
        logprobs[own] = self.logprobs
        versions[own] = self.versions
        totals = {
            k: sum(t.seconds.get(k, 0.0) for t in self.turns)
            for k in ("queued", "total")
        }
        return Sample(
            self.prompt_index,
            self.sample_index,
            first.prompt_token_ids,
            self.token_ids[start:],
            logprobs,
            prompt=self.prompt if isinstance(self.prompt, str) else None,
            text=self.text,
            finish_reason=last.finish_reason,
            versions=versions,
            replica=last.replica,
            retried=sum(t.retried for t in self.turns),
            reward=reward,
            loss_mask=own,
            adapter=last.adapter,
            seconds={**totals, "first_token": first.seconds.get("first_token", 0.0)},
            cached_tokens=sum(t.cached_tokens for t in self.turns),
        )

    def __repr__(self) -> str:
        return f"Session({self.stats.words(len(self.turns))})"

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


class Sessions(Sequence[Session]):
    """Concurrent sessions. Made by `pool.sessions(prompts, n=1, **sampling)`.

    >>> group = pool.sessions(["one, two,", "a, b,"], n=2, max_tokens=3, ignore_eos=True, seed=0)
    >>> len(group.generate())
    4
    >>> group[0].append(" and then")
    Session(1 turn, ...)
    >>> group.generate(2, only=group[:1])
    [Turn(prompt 0, sample 0: 2 tokens, ...)]
    >>> group.batch()
    RolloutBatch(4 samples, 2 prompts, 14 tokens, version ..., 4 length, model llama)
    """

    def __init__(self, members: Iterable[Session]) -> None:
        self._members = list(members)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: Any) -> Any:
        return self._members[index]

    def __iter__(self) -> Iterator[Session]:
        return iter(self._members)

    def generate(
        self,
        max_tokens: int | None = None,
        *,
        only: Iterable[Session] | None = None,
        timeout: float = 3600.0,
        **sampling: Any,
    ) -> list[Turn]:
        """One turn of every session, or of those in `only`, concurrently; returned in order.

        If one fails, the others still finish and keep their turns; then the first error is raised.
        """
        chosen = self._members if only is None else list(only)
        deadline = Deadline.of(timeout)
        requests = [s._request(max_tokens, sampling, deadline) for s in chosen]
        if not chosen:
            return []
        return chosen[0].pool.client.loop.run(_told_turns(chosen, requests, deadline))

    async def agenerate(
        self,
        max_tokens: int | None = None,
        *,
        only: Iterable[Session] | None = None,
        timeout: float = 3600.0,
        **sampling: Any,
    ) -> list[Turn]:
        """`generate`, awaited."""
        chosen = self._members if only is None else list(only)
        deadline = Deadline.of(timeout)
        requests = await asyncio.to_thread(
            lambda: [s._request(max_tokens, sampling, deadline) for s in chosen]
        )
        if not chosen:
            return []
        return await chosen[0].pool.client.loop.arun(
            _all_turns(chosen, requests, deadline)
        )

    def batch(self, rewards: Sequence[float | None] | None = None) -> RolloutBatch:
        """One training sample per session."""
        return RolloutBatch.from_sessions(self, rewards)

    @property
    def stats(self) -> SessionStats:
        """The totals over all sessions."""
        return SessionStats.of(self._members)

    def __repr__(self) -> str:
        stats = self.stats
        return f"Sessions({how_many(len(self), 'session')}, {stats.words(stats.turns)})"

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


async def _told_turns(
    chosen: Sequence[Session], requests: Sequence[Any], deadline: Deadline
) -> list[Turn]:
    """`_all_turns`, with a bar only while something holds them up."""
    pool = chosen[0].pool
    began = time.monotonic()
    with Progress(
        len(chosen), f"{pool.name}: turns", unit="turn", only_waiting=True
    ) as bar:
        async with pool._explained(bar, lambda: began):
            return await _all_turns(chosen, requests, deadline)


async def _all_turns(
    chosen: Sequence[Session], requests: Sequence[Any], deadline: Deadline
) -> list[Turn]:
    jobs = (
        session._run_turn(request, deadline)
        for session, request in zip(chosen, requests, strict=True)
    )
    results = await asyncio.gather(*jobs, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Turn)]


def open_sessions(
    pool: Pool, prompts: Any, n: int, routing: str | None, sampling: Mapping[str, Any]
) -> Sessions:
    """`n` sessions for each prompt; like samples, session k of a prompt uses seed + k."""
    made = []
    for index, prompt in enumerate(_prompts.as_list(prompts)):
        for k in range(_prompts.check_whole("n", n)):
            own = dict(sampling)
            if own.get("seed") is not None:
                own["seed"] = own["seed"] + k
            made.append(
                Session(
                    pool,
                    prompt,
                    own,
                    routing=routing,
                    prompt_index=index,
                    sample_index=k,
                )
            )
    return Sessions(made)


def turn_seed(seed: int, generated: int) -> int:
    """The seed of a later turn, from the session's seed and the number of tokens generated before it."""
    digest = hashlib.blake2b(f"{seed} {generated}".encode(), digest_size=8).digest()
    # vLLM adds small numbers, and torch takes 63 bits
    return int.from_bytes(digest, "little") >> 2
