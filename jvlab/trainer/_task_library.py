"""`jv.tasks`: built-in tasks, small enough to learn on a CPU from random weights, and tasks from a JSONL file.

>>> jv.tasks.names
('digits', 'repeat-letter', 'sort-digits', 'add', 'guess-number')
>>> jv.tasks.add(places=2).next(2)[0].prompt
'85+63='

A task of your own is `jv.Task(prompts, reward)`.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import ConfigError, UnknownName, module_names
from jvlab.trainer._datasets import json_lines
from jvlab.trainer._environment import GuessNumber, GymEnvironment, gym_maker
from jvlab.trainer._reward_library import compiled, last_match
from jvlab.trainer._tasks import Example, Task

__all__ = [
    "add",
    "digits",
    "guess_number",
    "gymnasium",
    "jsonl",
    "named",
    "names",
    "repeat_letter",
    "sort_digits",
]


_INSTEAD = "your own: jv.Task(prompts, reward), jv.tasks.jsonl(path)"

if not TYPE_CHECKING:  # a type checker knows the names by itself
    __dir__, __getattr__ = module_names(__name__, __all__, "name of jv.tasks", _INSTEAD)


def digits(seed: int = 0, max_tokens: int = 16) -> Task:
    """Produce digits and nothing else. Reward: the share of the completion's characters that are digits; a completion
    shorter than `max_tokens` characters counts as that long, so that stopping early does not pay.

    The easiest task, for demos: a random model with the tiny tokenizer produces a digit now and then (each is a token
    of its own), so that the first step already has a learning signal.

    >>> jv.tasks.digits()
    Task('digits', unlimited prompts, reward, position 0)
    """
    return Task(
        lambda index: Example("Digits: "),
        partial(_share, max_tokens, "0123456789"),
        name="digits",
        seed=seed,
        sampling={"max_tokens": max_tokens},
    )


def _share(min_length: int, wanted: str | None, sample: Any, example: Example) -> float:
    """The share of `wanted` characters in a text of at least `min_length`; None: those of the example's answer."""
    wanted = example.answer if wanted is None else wanted
    return sum(c in wanted for c in sample.text) / max(len(sample.text), min_length)


def repeat_letter(letters: str = "Z", seed: int = 0, max_tokens: int = 16) -> Task:
    """Repeat one letter. Reward: the share of the completion's characters that are that letter, as in `digits`.

    With several letters the prompt names the one, so that the model must learn to read it. A letter that is part of
    many tokens is a local optimum: "le" earns a half, and a policy may settle for it.

    >>> [example.prompt for example in jv.tasks.repeat_letter("abc").next(3)]
    ['Repeat c: ', 'Repeat b: ', 'Repeat c: ']
    """
    if not letters or any(len(c.strip()) != 1 for c in letters):
        raise ConfigError(
            f"letters={letters!r}",
            remedy='give one or more visible characters, e.g. "abc"',
        )

    def prompt(index: int) -> Example:
        letter = letters[_rng(seed, index).integers(len(letters))]
        return Example(f"Repeat {letter}: ", letter)

    return Task(
        prompt,
        partial(_share, max_tokens, None),
        name="repeat-letter",
        seed=seed,
        sampling={"max_tokens": max_tokens},
    )


def sort_digits(count: int = 4, seed: int = 0) -> Task:
    """Sort some digits. Reward: the share of positions with the right digit; extra text lowers it.

    >>> example = jv.tasks.sort_digits(4).example(0)
    >>> example.prompt, example.answer
    ('Sort 8652: ', '2568')
    """
    if count < 1:
        raise ConfigError(f"count={count}", remedy="sort at least one digit")

    def prompt(index: int) -> Example:
        digits = _rng(seed, index).integers(0, 10, count)
        text = "".join(map(str, digits))
        return Example(f"Sort {text}: ", "".join(sorted(text)))

    return Task(
        prompt,
        _places,
        name="sort-digits",
        seed=seed,
        sampling={"max_tokens": count + 1},
    )


def add(places: int = 1, seed: int = 0) -> Task:
    """Add two numbers. Reward: the share of the sum's digits that are right, position by position.

    >>> example = jv.tasks.add(places=1).example(0)
    >>> example.prompt, example.answer
    ('8+6=', '14')
    """
    if places < 1:
        raise ConfigError(f"places={places}", remedy="numbers have at least one digit")

    def prompt(index: int) -> Example:
        a, b = _rng(seed, index).integers(0, 10**places, 2).tolist()
        return Example(f"{a}+{b}=", str(a + b))

    return Task(
        prompt,
        _places,
        name="add",
        seed=seed,
        sampling={"max_tokens": places + 2},
    )


def _places(sample: Any, example: Example) -> float:
    """The share of positions that agree, out of the longer of text and answer."""
    answered = sample.text.strip()
    answer = example.answer
    right = sum(a == b for a, b in zip(answered, answer, strict=False))
    return right / max(len(answered), len(answer))


def guess_number(low: int = 0, high: int = 9, guesses: int = 4, seed: int = 0) -> Task:
    """A multi-turn game: find the hidden number; every wrong guess is answered with "higher" or "lower".

    >>> task = jv.tasks.guess_number(0, 9)
    >>> task.example(0).prompt
    'Guess a number from 0 to 9: '
    """
    if not 0 <= low < high or guesses < 1:
        raise ConfigError(
            f"low={low}, high={high}, guesses={guesses}",
            remedy="0 <= low < high, at least one guess",
        )

    def prompt(index: int) -> Example:
        hidden = int(_rng(seed, index).integers(low, high + 1))
        return Example(f"Guess a number from {low} to {high}: ", hidden)

    return Task(
        prompt,
        environment=partial(GuessNumber, low, high, guesses),
        name="guess-number",
        seed=seed,
        sampling={"max_tokens": len(str(high)) + 1},
    )


def gymnasium(
    environment: str | Callable[..., Any],
    prompt: str = "",
    *,
    show: Callable[[Any], str] = str,
    act: Callable[[str], Any] | None = None,
    invalid: float = 0.0,
    seed: int = 0,
    max_tokens: int = 16,
    **options: Any,
) -> Task:
    """Episodes of a Gymnasium environment, by its id or a function that makes it; `options` go to either.

    `show` makes a text of an observation, which follows the prompt or the model's last turn; `act` makes an action of a
    completion, by default its first whole number. One that is no action ends the episode with the reward `invalid`. The
    rewards of an episode are added; all samples of a prompt begin with the same seed. `jv.grpo(max_turns=...)` bounds
    an episode.

    >>> task = jv.tasks.gymnasium("FrozenLake-v1", "0 left, 1 down, 2 right, 3 up. ", show="You are at {}: ".format)
    >>> task.example(0).info
    {'seed': 0}
    """
    make = gym_maker(environment, options)
    name = environment if isinstance(environment, str) else "gymnasium"
    return Task(
        lambda index: Example(prompt, info={"seed": seed + index}),
        environment=partial(GymEnvironment, make, show, act or _number, invalid),
        name=name,
        seed=seed,
        sampling={"max_tokens": max_tokens},
    )


def _number(completion: str) -> int | None:
    found = re.search(r"-?\d{1,9}", completion)
    return int(found[0]) if found else None


def jsonl(
    path: str | os.PathLike[str],
    check: str | Callable[[Any, Example], float] = "equals",
    *,
    prompt: str = "prompt",
    answer: str = "answer",
    shuffle: bool = False,
    seed: int = 0,
    timeout: float = 30.0,
    processes: int = 0,
) -> Task:
    """One task item per line of a JSON Lines file: an object with a prompt, and an answer if the check needs one.

    `check` is "equals" (the text equals the answer, ignoring leading and trailing spaces), a regular expression whose
    first group, or whole match, is compared with the answer ("regex:(-?[0-9]+)"; without an answer a match is enough),
    a Python function as "module:function", or the function itself: `check(sample, example) -> number`. The other
    fields of a line are in `example.info`.

    >>> import json, pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp(), "sums.jsonl")
    >>> file.write_text(json.dumps({"prompt": "2 + 2 = ", "answer": "4", "level": 1}))
    49
    >>> task = jv.tasks.jsonl(file, "regex:(-?[0-9]+)")
    >>> task.example(0).answer, task.example(0).info
    ('4', {'level': 1})
    """
    items = []
    try:
        file = Path(path)
        for number, item in json_lines(file):
            if not isinstance(item, dict) or prompt not in item:
                raise ConfigError(
                    f"{file} line {number} has no field {prompt!r}",
                    remedy="give the field's name: jsonl(path, prompt=...)",
                )
            rest = {k: v for k, v in item.items() if k not in (prompt, answer)}
            items.append(Example(item[prompt], item.get(answer), rest))
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"cannot read {path}: {getattr(error, 'strerror', error)}",
            remedy="give a JSON Lines file",
            path=str(path),
        ) from error
    if not items:
        raise ConfigError(
            f"{file} has no lines", remedy="one JSON object per line", path=str(file)
        )
    return Task(
        items,
        _checker(check),
        name=file.stem,
        shuffle=shuffle,
        seed=seed,
        timeout=timeout,
        processes=processes,
    )


def _checker(check: str | Callable[[Any, Example], float]) -> Callable[..., Any]:
    if callable(check):
        return check
    if check == "equals":
        return _equals
    kind, _, rest = check.partition(":")
    if kind == "regex":
        return partial(_matches, compiled(rest))
    try:
        found = getattr(importlib.import_module(kind), rest)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"check={check!r}: {error}",
            remedy='"equals", "regex:…", "module:function" or a function',
            check=check,
        ) from error
    return found  # `Task` raises if it is no function


def _equals(sample: Any, example: Example) -> float:
    if example.answer is None:
        raise ValueError(f"item {example.index} has no answer to compare with")
    return float(sample.text.strip() == str(example.answer).strip())


def _matches(pattern: re.Pattern[str], sample: Any, example: Example) -> float:
    if example.answer is None:
        return float(pattern.search(sample.text) is not None)
    return last_match(pattern, sample.text, example.answer)


def _rng(seed: int, index: int) -> np.random.Generator:
    """A new generator for each index, so that examples can be drawn in any order."""
    return np.random.default_rng([seed, index])


_TASKS: dict[str, Callable[..., Task]] = {
    "digits": digits,
    "repeat-letter": repeat_letter,
    "sort-digits": sort_digits,
    "add": add,
    "guess-number": guess_number,
}
names = tuple(_TASKS)


def named(name: str, **options: Any) -> Task:
    """A built-in task by name: digits, repeat-letter, sort-digits, add or guess-number.

    >>> jv.tasks.named("add", places=2).name
    'add'
    """
    if name not in _TASKS:
        raise UnknownName.of("task", name, _TASKS, "jv.tasks.jsonl(path) reads a file")
    try:
        return _TASKS[name](**options)
    except TypeError as error:
        raise ConfigError(
            f"task {name!r}: {error}",
            remedy=f"see help(jv.tasks.{name.replace('-', '_')})",
        ) from error
