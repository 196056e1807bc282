"""Multi-turn tasks: the environment protocol, a driver that runs an episode, and an example game."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jvlab._tracebacks import own_lines
from jvlab.record._sample import Sample
from jvlab.trainer._batching import FAILED
from jvlab.trainer._datasets import Example
from jvlab.trainer._rewards import CallClock, InThread, RewardFailure, UserCallFailed


@dataclass(frozen=True)
class EnvironmentTurn:
    """What `Environment.step` returns: the next observation, or the end. An episode's reward is the sum over turns.

    >>> jv.EnvironmentTurn("higher: ").done, jv.EnvironmentTurn(reward=1.0, done=True).reward
    (False, 1.0)
    """

    observation: str | Sequence[int] = ""
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One episode of a task. Both methods may be async; each has the task's timeout.

    >>> class SayYes:
    ...     def reset(self, example):
    ...         return example.prompt
    ...
    ...     def step(self, completion):
    ...         return jv.EnvironmentTurn(reward=float("yes" in completion), done=True)
    >>> isinstance(SayYes(), jv.Environment), jv.Task(["Say yes: "], environment=SayYes)
    (True, Task('task', 1 prompt, environment, position 0))
    """

    def reset(self, example: Example) -> Any:
        """Start; returns the first prompt, as text or token ids."""
        ...

    def step(self, completion: str) -> Any:
        """Take the policy's completion; returns an `EnvironmentTurn`."""
        ...


@dataclass(frozen=True, eq=False, repr=False)
class Episode(Sample):
    """All turns of one episode as one sample: `token_ids` holds completions and observations after the first prompt.

    `loss_mask` is True for tokens that the policy generated; observation tokens have logprob 0 and version -1.
    `reward` is NaN if there is none; `failure` then says why. `finish_reason` is "length" if it ran out of turns or
    tokens.
    """

    turns: int = 0
    failure: RewardFailure | None = None


async def run_episode(
    environment: Environment,
    example: Example,
    generate: Callable[[list[int]], Awaitable[Any]],
    encode: Callable[[str, bool], Sequence[int]],
    *,
    max_turns: int = 8,
    max_length: int | None = None,
    timeout: float = 30.0,
    sample_index: int = 0,
    clock: CallClock | None = None,
) -> Episode:
    """Run one episode. `generate(token_ids)` returns a `Sample` (text, token_ids, logprobs, token_versions).

    Each turn's prompt is the previous prompt, its completion and the observation, token for token: nothing is tokenised
    twice. An episode that is not done after `max_turns`, or exceeds `max_length` tokens, ends with "length" and the
    reward so far. If the environment raises, exceeds `timeout` or returns no finite reward, `failure` says so.
    `clock` knows how long a call of the environment runs. `encode(text, special)` adds special tokens for the first
    prompt alone, as an engine would.
    """
    call = functools.partial(_call, timeout=timeout, clock=clock or CallClock())
    parts: list[Sample] = []  # turns of the policy, and observations between them
    prompt: list[int] = []
    tokens: list[int] = []
    total = 0.0
    turns = 0
    finish = "length"
    failure = None
    try:
        prompt = _tokens(await call(environment.reset, example), encode, True)
        tokens = list(prompt)
        full = lambda: max_length is not None and len(tokens) >= max_length
        while turns < max_turns and not full():
            sample = await generate(list(tokens))
            parts.append(sample)
            tokens += sample.token_ids.tolist()
            turns += 1
            if sample.finish_reason in FAILED:
                finish = sample.finish_reason
                break
            # one that reads tokens, not the text
            by_tokens = getattr(environment, "step_sample", None)
            turn = await (
                call(by_tokens, sample)
                if by_tokens is not None
                else call(environment.step, sample.text)
            )
            total += _reward(turn)
            if turn.done:
                finish = "stop"
                break
            observed = _tokens(turn.observation, encode, False)
            tokens += observed
            if turns == max_turns or full():
                break  # no completion follows, so the observation is not needed
            parts.append(_observation(turn.observation, observed))
        asked = getattr(environment, "last_reward", None)
        if finish == "length" and asked is not None:
            total += _reward(EnvironmentTurn(reward=await call(asked, None)))
    except UserCallFailed as error:
        failure = RewardFailure(sample_index, error.kind, error.message, error.trace)
        total = math.nan
        finish = "error"
    joined = lambda name: [value for part in parts for value in getattr(part, name)]
    return Episode(
        prompt_index=example.index,
        sample_index=sample_index,
        prompt_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(joined("token_ids"), np.int32),
        logprobs=np.array(joined("logprobs"), np.float32),
        versions=joined("versions"),
        loss_mask=np.array(joined("own"), bool),
        reward=total,
        turns=turns,
        text="".join(part.text for part in parts),
        finish_reason=finish,
        failure=failure,
    )


def _observation(given: Any, tokens: list[int]) -> Sample:
    count = len(tokens)
    return Sample(
        prompt_index=0,
        sample_index=0,
        prompt_token_ids=np.zeros(0, np.int32),
        token_ids=np.array(tokens, np.int32),
        logprobs=np.zeros(count, np.float32),
        versions=[-1] * count,
        loss_mask=np.zeros(count, bool),
        text=given if isinstance(given, str) else "",
    )


async def _call(
    method: Callable[[Any], Any], value: Any, timeout: float, clock: CallClock
) -> Any:
    """One call of the environment within `timeout`; in a thread unless it is async."""
    name = getattr(method, "__name__", "environment")
    try:
        with clock.running():
            if inspect.iscoroutinefunction(method):
                return await asyncio.wait_for(method(value), timeout)
            once = InThread(lambda given, _: method(given))
            return await asyncio.to_thread(once.call, value, None, timeout)
    except (TimeoutError, UserCallFailed) as error:
        kind = error.kind if isinstance(error, UserCallFailed) else "timeout"
        late = f"{name}() did not return within {timeout:g} s"
        told = late if kind == "timeout" else f"{name}(): {error}"
        raise UserCallFailed(kind, told, getattr(error, "trace", "")) from error
    except Exception as error:
        told = f"{name}(): {type(error).__name__}: {error}"
        raise UserCallFailed("raised", told, own_lines(error)) from error


def _reward(turn: Any) -> float:
    if not isinstance(turn, EnvironmentTurn):
        raise UserCallFailed(
            "not a number",
            f"step() returned {type(turn).__name__}, not an EnvironmentTurn",
        )
    if not isinstance(turn.reward, (int, float, np.number)) or not math.isfinite(
        turn.reward
    ):
        raise UserCallFailed(
            "not a number", f"step() returned the reward {turn.reward!r}"
        )
    return float(turn.reward)


def _tokens(
    value: Any, encode: Callable[[str, bool], Sequence[int]], special: bool
) -> list[int]:
    found = encode(value, special) if isinstance(value, str) else value
    return [int(t) for t in found]


class GuessNumber:
    """The example: find a hidden number, `example.answer`, from the hints "higher" and "lower".

    Each guess is rewarded by how close it is, and the right one ends the game; so a policy that cannot yet find the
    number still gets a signal. The reward is the mean over `guesses` turns, with 1 for each turn not needed.
    """

    def __init__(self, low: int = 0, high: int = 9, guesses: int = 4) -> None:
        self.low = low
        self.high = high
        self.guesses = guesses
        self._answer = low
        self._left = guesses

    def reset(self, example: Example) -> Any:
        """Hide the number."""
        self._answer = int(example.answer)
        self._left = self.guesses
        return example.prompt

    def step(self, completion: str) -> EnvironmentTurn:
        """Compare the first number in the completion with the hidden one."""
        self._left -= 1
        number = re.search(r"\d{1,9}", completion)
        if number is None:
            return EnvironmentTurn("\nA number, please: ", 0.0, self._left == 0)
        guess = int(number[0])
        if guess == self._answer:
            return EnvironmentTurn("", (1 + self._left) / self.guesses, True)
        closeness = max(0.0, 1 - abs(guess - self._answer) / (self.high - self.low + 1))
        hint = "higher" if guess < self._answer else "lower"
        return EnvironmentTurn(
            f"\n{hint}: ", 0.5 * closeness / self.guesses, self._left == 0
        )
