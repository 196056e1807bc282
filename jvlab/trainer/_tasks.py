"""`jv.Task`: prompts with a reproducible position, and a reward function or an environment."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jvlab._deadline import check_timeout
from jvlab._errors import ConfigError
from jvlab._units import how_many
from jvlab.trainer._checks import check_choice, check_sampling, check_whole
from jvlab.trainer._datasets import Column, Example, examples
from jvlab.trainer._environment import adopted as adopted_environment
from jvlab.trainer._reward_library import as_reward
from jvlab.trainer._rewards import Rewarder


class Task:
    """What to learn: prompts, and how good a completion is.

    `prompts` is a list (repeated endlessly; `shuffle` draws a new order each round from `seed`), any other iterable
    (read as needed, then repeated), or a function of an index. An item is a prompt (text, token ids or a chat), a
    mapping with "prompt" and optionally "answer" and more, or an `Example`.

    `reward(sample, example) -> number`, sync or async: `sample` has `text` and `token_ids`. It may return a mapping of
    names to numbers: their sum is the reward, and the viewer shows the parts. It has `timeout` seconds (30 unless
    given), and runs in `processes` child processes if that is given. If it raises or times out, that sample is reported
    and excluded from training; if it does so for the whole first group, the run ends. For multi-turn tasks give
    `environment` instead, a function that makes an `Environment`, or a class in TRL's style: `reset(**row)` begins, its
    other public methods are tools that the model calls by its own chat template, `get_reward()` ends.

    A function in TRL's signature (`prompts, completions, completion_ids, **columns`) works as it is, and so does a list
    of rewards, with `weights`: see `jv.rewards`. `Task.from_dataset` reads datasets of many kinds.

    `sampling` holds the task's sampling parameters, e.g. max_tokens; a caller's take precedence.

    >>> right = lambda sample, example: float(sample.text.strip() == example.answer)
    >>> jv.Task([{"prompt": "2 + 2 = ", "answer": "4"}], right)
    Task('task', 1 prompt, reward, position 0)
    """

    def __init__(
        self,
        prompts: Iterable[Any] | Callable[[int], Any],
        reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        *,
        weights: Sequence[float] | None = None,
        name: str = "task",
        environment: Callable[[], Any] | None = None,
        timeout: float = 30.0,
        processes: int = 0,
        workers: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.timeout = check_timeout(timeout)
        if not isinstance(name, str):
            raise ConfigError(f"name={name!r}", remedy="the name of a task is a text")
        if (reward is None) == (environment is None):
            has = "neither" if reward is None else "both"
            word = "nor" if reward is None else "and"
            raise ConfigError(
                f"task {name!r} has {has} a reward function {word} an environment",
                remedy="pass reward=function(sample, example) or environment=function that makes an Environment",
            )
        adopted = None if reward is None else as_reward(reward, weights)
        if adopted is not None:
            _check_call(name, "reward", adopted, ("sample", "example"))
        if environment is not None:
            _check_call(name, "environment", environment, ())
        check_whole("processes", processes, least=0)
        if workers is not None:
            check_whole("workers", workers)
        check_whole("seed", seed, least=0)
        check_choice("shuffle", shuffle, (True, False))
        check_sampling(sampling)
        if isinstance(prompts, (str, bytes)) or not (
            callable(prompts) or isinstance(prompts, Iterable)
        ):
            raise ConfigError(
                f"prompts of task {name!r} are {type(prompts).__name__}",
                remedy="pass a list of prompts, or a function of an index",
            )
        self.name = name
        self.reward = adopted
        self.environment: Any = adopted_environment(environment)
        self.processes = processes
        self.workers = workers
        self.seed = seed
        self.sampling = dict(sampling or {})
        self.position = 0
        self._function = prompts if callable(prompts) else None
        self._items: Sequence[Any] = []
        self._rest: Iterator[Any] | None = None
        self._broken: Exception | None = None  # what it raised last
        if isinstance(prompts, Sequence):
            self._items = prompts
            self._check_some()
        elif not callable(prompts):
            self._rest = iter(prompts)
        self.shuffle = shuffle
        if shuffle and (self._function is not None or self._rest is not None):
            raise ConfigError(
                f"task {name!r} cannot shuffle prompts of unknown number",
                remedy="pass a list; a function can draw its own order from the index",
            )
        # the round that was drawn last
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    @classmethod
    def from_dataset(
        cls,
        source: Any,
        prompt: Column | None = None,
        answer: Column | None = None,
        reward: Any = None,
        chat_template: Any = None,
        *,
        split: str = "train",
        config: str | None = None,
        streaming: bool = False,
        unique: bool = False,
        **options: Any,
    ) -> Task:
        """A task from a dataset: a name on the hub, a JSON Lines or Parquet file, a folder, rows, a DataFrame, ...

        source         also an object of the datasets library, streaming ones too: they are read as far as is needed.
                       `split`, `config` (a hub dataset's part, "main" of GSM8K) and `streaming` are for names and files
        prompt         its column, or a function of the row; by default `prompt`, `question` or `problem`: a text, a
                       chat, which goes through the model's chat template, or token ids
        answer         its column, or a function of the row; by default verl's reward_model.ground_truth, or `answer`,
                       `label`, `solution`, `ground_truth` or `target`; of GSM8K's "#### 42" the 42. All columns
                       but the prompt are in `example.info`, as they are, and reach functions in TRL's signature
        reward         as of `jv.Task`: for instance jv.rewards.math(), or a list of TRL's functions with `weights`
        chat_template  True: texts become a user's message, and so go through the model's template; a Jinja text, or a
                       tokenizer, that renders them here
        unique         leave out rows whose prompt and answer an earlier one has; by default they stay, as weights

        `options` are those of `jv.Task`. Prompts are checked now, those of a stream as they come. A row without an
        answer stays: rewards of `jv.rewards` skip it.

        >>> rows = [{"question": "6 * 7?", "answer": "6 * 7 = 42\\n#### 42", "level": 1}]
        >>> task = jv.Task.from_dataset(rows, reward=jv.rewards.regex("[0-9]+", answer=True))
        >>> task.example(0).answer, task.example(0).info["level"]
        ('42', 1)
        """
        name, found = examples(
            source,
            prompt=prompt,
            answer=answer,
            chat_template=chat_template,
            split=split,
            config=config,
            streaming=streaming,
            unique=unique,
        )
        if reward is None and options.get("environment") is None:
            raise ConfigError(
                f"{name} says what is asked, but not how good an answer is",
                remedy="reward=jv.rewards.math(), or your function(sample, example), or TRL's",
            )
        return cls(found, reward, **{"name": name, **options})

    def example(self, index: int) -> Example:
        """The example at a position: the same for the same index, in every session."""
        if self._function is not None:
            return _example(self._function(index), index, self.name)
        while self._rest is not None and len(self._items) <= index:
            try:
                self._items.append(next(self._rest))  # type: ignore[attr-defined]  # a list of our own
            except StopIteration:
                # a generator that raised is over, which is not its end
                if self._broken is not None:
                    raise self._broken from None
                self._rest = None
                self._check_some()
            except Exception as error:
                self._broken = error
                raise
            else:
                self._broken = None
        turn, at = divmod(index, len(self._items))
        if self.shuffle:
            if self._order[0] != turn:
                drawn = np.random.default_rng([self.seed, turn])
                self._order = turn, drawn.permutation(len(self._items))
            at = int(self._order[1][at])
        return _example(self._items[at], index, self.name)

    def next(self, count: int) -> list[Example]:
        """The next `count` examples; moves the position."""
        found = [self.example(self.position + i) for i in range(count)]
        self.position += count
        return found

    def first(self, count: int) -> list[Example]:
        """At most `count` examples from the first on, each once; the position does not move.

        A list is not started again; examples that a function has given before are left out.
        """
        if self._function is None:
            found = []
            for index in range(count):
                example = self.example(index)  # reads so far, if they are read
                if index < len(self._items):
                    found.append(example)
            return found
        different: dict[bytes, Example] = {}
        for index in range(count):
            example = self.example(index)
            try:
                content = pickle.dumps(replace(example, index=0))
            # something of the user's that cannot be compared: another one each time
            except Exception:
                content = str(index).encode()
            different.setdefault(content, example)
        return list(different.values())

    def rewarder(self) -> Rewarder:
        """A `Rewarder` for the reward function; close it after use."""
        if self.reward is None:
            raise ConfigError(
                f"task {self.name!r} has an environment, which returns the reward itself",
                remedy="jv.grpo runs its episodes; for a reward function use jv.Task(prompts, reward)",
            )
        return Rewarder(self.reward, self.timeout, self.processes, self.workers)

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values for a checkpoint."""
        return {
            "name": self.name,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken. A state of another task is rejected."""
        mine = self.state_dict()
        wrong = [
            f"{k}: {state.get(k)!r}, here {mine[k]!r}"
            for k in mine
            if k != "position" and state.get(k) != mine[k]
        ]
        position = state.get("position")
        if wrong or not isinstance(position, int) or position < 0:
            raise ConfigError(
                f"this state is not of task {self.name!r}: {'; '.join(wrong) or f'position {position!r}'}",
                remedy="resume with the task, seed and order that the run was started with",
            )
        self.position = position

    def __repr__(self) -> str:
        if self._function is not None:
            count = "unlimited prompts"
        elif self._rest is not None:
            count = "prompts from an iterator"
        else:
            count = how_many(len(self._items), "prompt")
            count += ", shuffled" if self.shuffle else ""
        kind = "environment" if self.environment is not None else "reward"
        where = f" in {self.processes} processes" if self.processes else ""
        return f"Task({self.name!r}, {count}, {kind}{where}, position {self.position})"

    def _check_some(self) -> None:
        if not len(self._items):
            raise ConfigError(
                f"task {self.name!r} has no prompts", remedy="pass at least one"
            )


# Checks and conversions ---------------------------------------------------------------------------------------------


def _check_call(task: str, what: str, function: Any, arguments: Sequence[str]) -> None:
    """Raise ConfigError if the user's function cannot be called with so many arguments."""
    if not callable(function):
        raise ConfigError(
            f"the {what} of task {task!r} is {type(function).__name__}, not a function",
            remedy=f"{what}({', '.join(arguments)}); jv.tasks.jsonl(path, check) knows rewards by name",
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions do not tell
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"the {what} of task {task!r} is called as {what}({', '.join(arguments)}), but it is {name}{signature}",
            remedy=f"def {name}({', '.join(arguments)}): ...",
        ) from error


def _example(item: Any, index: int, task: str) -> Example:
    """An item of the user's prompts as an `Example`."""
    if isinstance(item, Example):
        return replace(item, index=index)
    if isinstance(item, Mapping):
        if "prompt" not in item:
            raise ConfigError(
                f"item {index} of task {task!r} has no 'prompt', only {', '.join(map(str, item)) or 'nothing'}",
                remedy="give each mapping a 'prompt'",
                index=index,
            )
        rest = {k: v for k, v in item.items() if k not in ("prompt", "answer")}
        return Example(item["prompt"], item.get("answer"), rest, index)
    return Example(item, index=index)
