"""Multi-turn tasks: the environment protocol, a driver that runs an episode, an example game, others' environments."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jvlab._errors import ConfigError, MissingDependency
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

    reward: float = math.nan
    loss_mask: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    turns: int = 0
    failure: RewardFailure | None = None


async def run_episode(
    environment: Environment | ToolEnvironment,
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
    tools = isinstance(environment, ToolEnvironment)  # it reads tokens, not a text
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
            turn = await call(environment.step, sample if tools else sample.text)
            total += _reward(turn)
            if turn.done:
                finish = "stop"
                break
            observed = _tokens(turn.observation, encode, False)
            tokens += observed
            if turns == max_turns or full():
                break  # no completion follows, so the observation is not needed
            parts.append(_observation(turn.observation, observed))
        if finish == "length" and isinstance(environment, ToolEnvironment):
            last = await call(environment.last_reward, None)
            total += _reward(EnvironmentTurn(reward=last))
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


# Environments that people have: TRL's, whose public methods are tools, and Gymnasium's.
#
# A turn of TRL's kind: the model's own chat template renders the conversation and the tools once, into the first
# prompt. What the model then generates stays as it was sampled, token for token; its tool calls are read from it and
# made; the template's rendering of their results, up to where the model speaks again, is appended as an observation,
# which is not trained on. An episode ends with a turn that calls nothing, and `get_reward()` says what it was worth.

# how Hermes, Qwen 2.5 and Qwen 3 write a call
TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
MARK = "jvlab-marks-this-call"
NOT_TOOLS = ("reset", "get_reward")
MADE_FOR_TOOLS = (
    "a model that was made for tools, or a tokenizer with a template that is"
)


def adopted(make: Any) -> Any:
    """A function that makes environments as `jv.grpo` plays them; one of TRL's kind is recognised."""
    if make is None:
        return None
    if inspect.isclass(make) and not is_trl(make) and not hasattr(make, "step"):
        raise ConfigError(
            f"environment {make.__name__} has neither step() nor get_reward()",
            remedy="step(completion) for a jv.Environment, get_reward() for one in TRL's style",
        )
    return functools.partial(_made, make)


def _made(make: Any) -> Any:
    environment = make()
    return ToolEnvironment(environment) if is_trl(type(environment)) else environment


def is_trl(kind: type) -> bool:
    """Whether a class is an environment of TRL's kind: its reward comes from `get_reward`, not from steps."""
    has = lambda name: callable(getattr(kind, name, None))
    return has("reset") and has("get_reward")


class ToolEnvironment:
    """One episode of an environment in TRL's style; `bind` gives it the model's tokenizer."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        # its public methods by name
        self.tools: dict[str, Callable[..., Any]] = {
            name: getattr(inner, name)
            for name, _ in inspect.getmembers(type(inner), inspect.isfunction)
            if not name.startswith("_") and name not in NOT_TOOLS
        }
        self._tokenizer: Any = None

    def bind(self, tokenizer: Any) -> None:
        """Before the first call."""
        self._tokenizer = tokenizer

    def reset(self, example: Example) -> list[int]:
        """The tokens of the first prompt: conversation, tools, and what the environment's `reset` adds to them."""
        answer = {} if example.answer is None else {"answer": example.answer}
        row = {"prompt": example.prompt, **answer, **example.info}
        seen = _result(self.inner.reset(**row))
        chat = example.prompt
        if isinstance(chat, str):
            chat = [{"role": "user", "content": chat}]
        if seen is not None:
            last = {**chat[-1], "content": chat[-1]["content"] + str(seen)}
            chat = [*chat[:-1], last]
        return self._first(chat)

    def step(self, sample: Any) -> EnvironmentTurn:
        """Make the calls of a turn; the last turn makes none. They are in tokens: a text has lost its special ones."""
        tokens = [int(t) for t in sample.token_ids]
        calls = [] if sample.finish_reason == "length" else self._calls(tokens)
        if not calls:
            return EnvironmentTurn(reward=self.last_reward(None), done=True)
        answers = [self._answer(call) for call in calls]
        return EnvironmentTurn(observation=self._suffix(answers, tokens))

    def last_reward(self, _: Any) -> float:
        """What the episode was worth; it may have run out of turns."""
        return _result(self.inner.get_reward())

    # Tools --------------------------------------------------------------------------------------------------------

    def _answer(self, call: Any) -> dict[str, Any]:
        """The message with the result of a call, or with why there is none: the model may try again."""
        name = call.get("name") if isinstance(call, Mapping) else None
        try:
            if name not in self.tools:
                known = ", ".join(self.tools)
                raise LookupError(f"no tool {name!r}; there are: {known}")
            given = call.get("arguments", call.get("parameters")) or {}
            if isinstance(given, str):
                given = json.loads(given)
            found = _result(self.tools[name](**given))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        return {"role": "tool", "name": str(name), "content": str(found)}

    def _calls(self, tokens: Sequence[int]) -> list[Any]:
        """The calls in a turn: by the tokenizer's own parser if it has one, or as Hermes, Qwen and Llama write them."""
        tokenizer = self._tokenizer
        parsers = ("response_template", "response_schema")
        if any(getattr(tokenizer, name, None) is not None for name in parsers):
            parsed = tokenizer.parse_response(tokens)
            calls = (parsed or {}).get("tool_calls") or []
            return [call.get("function", call) for call in calls]
        special = set(tokenizer.all_special_ids)
        while tokens and tokens[-1] in special:
            tokens = tokens[:-1]
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        if found := TAGGED.findall(text):
            return [_object(call) for call in found]
        # Llama 3: the whole turn is one
        call = _object(text)
        return [call] if isinstance(call, Mapping) and "name" in call else []

    # The template -------------------------------------------------------------------------------------------------

    def _rendered(self, chat: Sequence[Any], tools: bool) -> str:
        """The conversation up to where the model speaks."""
        schemas = list(self.tools.values()) if tools and self.tools else None
        try:
            return self._tokenizer.apply_chat_template(
                list(chat), tools=schemas, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # jinja2's, and those of what makes schemas
            raise ConfigError(
                f"the model's chat template cannot show these tools: {type(error).__name__}: {error}",
                remedy="each tool needs type hints and a docstring with an Args section, as transformers wants them",
            ) from error

    def _first(self, chat: Sequence[Any]) -> list[int]:
        text = self._rendered(chat, tools=True)
        if self.tools and text == self._rendered(chat, tools=False):
            raise ConfigError(
                "the model's chat template does not show tools", remedy=MADE_FOR_TOOLS
            )
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _suffix(
        self, answers: Sequence[Mapping[str, Any]], turn: Sequence[int]
    ) -> list[int]:
        """The tokens between the model's turn and its next one.

        From a conversation of the same form, so that the turn itself is never tokenised again: what follows the special
        token after a call. If the model did not end with that token, it comes first.
        """
        call = {"name": answers[0]["name"], "arguments": {"mark": MARK}}
        asked = [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call}],
            },
        ]
        text = self._rendered([*asked, *answers], tools=False)
        special = sorted(self._tokenizer.all_special_tokens, key=len, reverse=True)
        ends = re.compile("|".join(map(re.escape, special)) or "$^")
        end = ends.search(text, text.rfind(MARK)) if MARK in text else None
        if end is None:
            raise ConfigError(
                "the model's chat template does not show calls of tools, or no special token ends a turn in it",
                remedy=MADE_FOR_TOOLS,
            )
        encode = lambda part: self._tokenizer.encode(part, add_special_tokens=False)
        closed = list(turn[-1:]) == encode(end[0])
        return encode(text[end.end() if closed else end.start() :])


def _object(text: str) -> Any:
    """A call as JSON; one that is none stays a text, and its answer will say so."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _result(value: Any) -> Any:
    """What a method returned, awaited if it is async: it runs in a thread of its own."""
    if not inspect.isawaitable(value):
        return value

    async def awaited() -> Any:
        return await value

    return asyncio.run(awaited())


class GymEnvironment:
    """One episode of a Gymnasium environment, in texts."""

    def __init__(
        self,
        make: Callable[[], Any],
        show: Callable[[Any], str],
        act: Callable[[str], Any],
        invalid: float,
    ) -> None:
        self._env = make()
        self._show = show
        self._act = act
        self._invalid = invalid

    def reset(self, example: Example) -> str:
        """Begin with the example's seed, so that all samples of a group play the same episode."""
        seen, _ = self._env.reset(seed=example.info.get("seed"))
        return f"{example.prompt}{self._show(seen)}"

    def step(self, completion: str) -> EnvironmentTurn:
        """Do what the completion says."""
        action = self._act(completion)
        if action is None or not self._env.action_space.contains(action):
            self._env.close()
            return EnvironmentTurn(reward=self._invalid, done=True)
        seen, reward, terminated, truncated, _ = self._env.step(action)
        done = bool(terminated or truncated)
        if done:
            self._env.close()
        return EnvironmentTurn(self._show(seen), float(reward), done)


def gym_maker(environment: Any, options: Mapping[str, Any]) -> Callable[[], Any]:
    """A function that makes the environment: an id of Gymnasium's registry, or a function of the user's."""
    if callable(environment):
        return lambda: environment(**options)
    try:
        import gymnasium
    except ImportError as error:
        raise MissingDependency(
            "an environment of Gymnasium needs it", remedy="pip install gymnasium"
        ) from error
    try:
        gymnasium.spec(environment)
    except Exception as error:
        raise ConfigError(
            f"Gymnasium has no environment {environment!r}: {error}",
            remedy="an id of its registry, or a function that makes one",
        ) from error
    return lambda: gymnasium.make(environment, **options)
