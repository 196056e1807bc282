"""`jv.rewards`: rewards that people bring from other trainers, and built-in ones.

>>> jv.Task([{"prompt": "1/2 + 1/4 = ", "answer": "3/4"}], jv.rewards.math())
Task('task', 1 prompt, reward, position 0)
>>> right = jv.rewards.total(accuracy=jv.rewards.math(), form=(jv.rewards.regex(r"</think>"), 0.2))

A function in TRL's signature needs nothing: `jv.Task(rows, function)`, or a list of them with `weights`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any

from jvlab._errors import (
    ConfigError,
    MissingDependency,
    Unsupported,
    module_names,
)
from jvlab.record._batch import NUMBERS, is_parted
from jvlab.trainer import _code_sandbox
from jvlab.trainer._checks import check_choice, check_number, check_whole
from jvlab.trainer._rewards import (
    GroupScores,
    Rewarder,
    RewardFailure,
    UserCallFailed,
    in_daemon,
    is_async,
)

__all__ = ["code", "length", "math", "regex", "total", "trl", "verl"]

_INSTEAD = "your own: a function(sample, example), or one in TRL's signature"

if not TYPE_CHECKING:  # a type checker knows the names by itself
    __dir__, __getattr__ = module_names(
        __name__, __all__, "name of jv.rewards", _INSTEAD
    )

Reward = Callable[..., Any]


def is_trl(function: Any) -> bool:
    """Whether a function takes TRL's arguments: it has a parameter called `completions`."""
    try:
        return "completions" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions do not tell
        return False


def as_reward(given: Any, weights: Any = None) -> Any:
    """What a task was given as its reward, as jvlab calls it: TRL's signature is recognised, a list becomes a sum."""
    if isinstance(given, (list, tuple)):
        return _listed(given, weights)
    if weights is not None:
        raise ConfigError(
            "weights of a reward that is no list",
            remedy="reward=[first, second], weights=[1.0, 0.5]",
        )
    _check_made(given)
    return trl(given) if is_trl(given) else given


def _check_made(given: Any) -> None:
    """Raise for `jv.rewards.math` in place of `jv.rewards.math()`."""
    name = getattr(given, "__name__", "")
    if name in __all__ and given is globals()[name]:
        raise ConfigError(
            f"jv.rewards.{name} makes a reward, and is none itself",
            remedy=f"call it: jv.rewards.{name}(...)",
        )


def _listed(given: Sequence[Any], weights: Any) -> Any:
    if not given:
        raise ConfigError("an empty list of rewards", remedy="give at least one")
    weighed = [1.0] * len(given) if weights is None else list(weights)
    if len(weighed) != len(given):
        raise ConfigError(
            f"{len(given)} rewards, {len(weighed)} weights",
            remedy="one weight for each reward",
        )
    parts: dict[str, Any] = {}
    for pair in zip(given, weighed, strict=True):
        name = _name(pair[0])
        same = (f"{name}_{i}" for i in itertools.count(2))
        while name in parts:
            name = next(same)
        parts[name] = pair
    return total(**parts)


def _name(reward: Any) -> str:
    return getattr(reward, "__name__", type(reward).__name__)


# Functions of other trainers ------------------------------------------------------------------------------------------


def trl(function: Reward) -> Reward:
    """A reward function in TRL's signature, as `jv.Task` adopts it by itself: sync or async, None skips a sample.

    It is called once for the samples of a prompt: `prompts`, `completions` (texts, or lists of messages where the
    prompt is a chat), `completion_ids`, the row's other columns as lists, and `log_extra` and `log_metric`, as far as
    it has parameters for them.

    >>> def short(completions, **columns):
    ...     return [-len(text) / 100 for text in completions]
    >>> jv.Task(["Hi"], short)
    Task('task', 1 prompt, reward, position 0)
    """
    if not is_trl(function):
        raise ConfigError(
            f"{_name(function)} has no parameter `completions`",
            remedy="def reward(prompts, completions, completion_ids, **columns): return one number for each",
        )
    return total(**{_name(function): function})


class _Part:
    """A reward as a part of a sum, for the samples of a prompt at once: here one that is called for each of them."""

    whole_groups = False

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = _name(function)
        self.waits = is_async(function)

    def call(self, samples: Sequence[Any], examples: Sequence[Any], log: _Log) -> Any:
        """What it says of each, to be awaited if it `waits`."""
        if hasattr(self.function, "many"):
            return self.function.many(samples, examples)
        return self._all(
            self.function(*pair) for pair in zip(samples, examples, strict=True)
        )

    def _all(self, calls: Iterable[Any]) -> Any:
        return asyncio.gather(*calls) if self.waits else list(calls)

    def values(self, found: Any, log: _Log) -> list[Any]:
        """What it said, one value for each sample."""
        return list(found)


class _Trl(_Part):
    """A function in TRL's signature."""

    whole_groups = True

    def call(self, samples: Sequence[Any], examples: Sequence[Any], log: _Log) -> Any:
        prompts = [e.prompt for e in examples]
        given: dict[str, Any] = {
            **_columns(examples),
            "prompts": prompts,
            "completions": [
                s.text if _is_text(p) else [{"role": "assistant", "content": s.text}]
                for s, p in zip(samples, prompts, strict=True)
            ],
            "completion_ids": [[int(t) for t in s.token_ids] for s in samples],
            "log_extra": log.extra,
            "log_metric": log.metric,
        }
        wanted = inspect.signature(self.function).parameters
        if any(p.kind is p.VAR_KEYWORD for p in wanted.values()):
            return self.function(**given)
        missing = [
            name
            for name, p in wanted.items()
            if name not in given
            and p.default is p.empty
            and p.kind is not p.VAR_POSITIONAL
        ]
        if missing:
            raise LookupError(
                f"{self.__name__} wants {missing[0]!r}; the rows have {', '.join(_columns(examples)) or 'no column'}"
            )
        return self.function(**{n: given[n] for n in wanted if n in given})

    def values(self, found: Any, log: _Log) -> list[Any]:
        values = list(found.tolist() if hasattr(found, "tolist") else found)
        if len(values) != log.count:
            raise ValueError(
                f"{self.__name__} returned {len(values)} rewards for {log.count} completions"
            )
        return values


class _Verl(_Part):
    """verl's `compute_score`, which is called for each sample."""

    whole_groups = True

    def __init__(self, function: Any, options: Mapping[str, Any]) -> None:
        super().__init__(function)
        self._options = options

    def call(self, samples: Sequence[Any], examples: Sequence[Any], log: _Log) -> Any:
        return self._all(
            self.function(
                data_source=example.info.get("data_source"),
                solution_str=sample.text,
                ground_truth=_truth(example),
                extra_info=example.info.get("extra_info"),
                **self._options,
            )
            for sample, example in zip(samples, examples, strict=True)
        )

    def values(self, found: Any, log: _Log) -> list[Any]:
        values = []
        for one in found:
            if isinstance(one, Mapping):
                for name, value in one.items():
                    if name != "score" and isinstance(value, NUMBERS):
                        log.metric(str(name), float(value))
                one = one["score"]
            values.append(one)
        return values


def _truth(example: Any) -> Any:
    """The row's answer, which is not its column: GSM8K's "answer" has the reasoning too."""
    if example.answer is not None:
        return example.answer
    graded = example.info.get("reward_model")
    if isinstance(graded, Mapping):
        return graded["ground_truth"]
    return example.info.get("ground_truth")


def _columns(examples: Sequence[Any]) -> dict[str, list[Any]]:
    """The rows' other columns as lists; None where a row has none."""
    rows = [
        {**({} if e.answer is None else {"answer": e.answer}), **e.info}
        for e in examples
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _is_text(prompt: Any) -> bool:
    """Whether completions of this prompt are texts: it is one, or token ids; not a chat."""
    return isinstance(prompt, str) or not isinstance(next(iter(prompt), None), Mapping)


class _Log:
    """`log_extra` and `log_metric` of one call."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._numbers: dict[str, list[float]] = {}
        self.columns: dict[str, list[Any]] = {}

    def extra(self, column: str, values: Sequence[Any]) -> None:
        if len(values) != self.count:
            raise ValueError(
                f"log_extra({column!r}): {len(values)} values for {self.count} completions"
            )
        self.columns[column] = list(values)

    def metric(self, name: str, value: float) -> None:
        self._numbers.setdefault(name, []).append(float(value))

    @property
    def metrics(self) -> dict[str, float]:
        return {name: sum(v) / len(v) for name, v in self._numbers.items()}


def verl(compute_score: Reward, **options: Any) -> Reward:
    """verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` as a reward; `options` go to it too.

    `data_source` and `extra_info` are columns of the row, `ground_truth` is the answer. Of a dict its "score" is the
    reward, and its other numbers are logged as metrics.

    >>> def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    ...     return {"score": float(solution_str == ground_truth), "chars": len(solution_str)}
    >>> jv.Task([{"prompt": "2 + 2 = ", "answer": "4"}], jv.rewards.verl(compute_score))
    Task('task', 1 prompt, reward, position 0)
    """
    if not callable(compute_score):
        raise ConfigError(
            f"compute_score is {type(compute_score).__name__}",
            remedy="jv.rewards.verl(compute_score), with the function itself",
        )
    return total(**{_name(compute_score): _Verl(compute_score, options)})


# Sums -----------------------------------------------------------------------------------------------------------------


def total(**parts: Any) -> Reward:
    """The sum of several rewards by name, each a reward or (reward, weight). The record and the viewer show each part.

    A part that skips a sample is left out of its sum; a sample that all parts skip is not trained on.

    >>> jv.rewards.total(form=(jv.rewards.regex("[0-9]+"), 0.5), short=jv.rewards.length(most=8))
    jv.rewards.total(form=(regex, 0.5), short=(length, 1))
    """
    if not parts:
        raise ConfigError("a sum of nothing", remedy="total(name=reward, ...)")
    made: dict[str, tuple[_Part, float]] = {}
    for name, given in parts.items():
        reward, weight = given if isinstance(given, tuple) else (given, 1.0)
        if isinstance(weight, bool) or not isinstance(weight, NUMBERS):
            raise ConfigError(
                f"the weight of {name!r} is {weight!r}", remedy="a number"
            )
        if not isinstance(reward, _Part) and not callable(reward):
            raise ConfigError(
                f"the reward {name!r} is {type(reward).__name__}, not a function",
                remedy="a function(sample, example), or one in TRL's signature",
            )
        _check_made(reward)
        if isinstance(reward, _Total):  # a sum of sums is one sum
            for inner, (part, own) in reward.parts.items():
                made[f"{name}.{inner}"] = (part, own * float(weight))
            continue
        if not isinstance(reward, _Part):
            reward = (_Trl if is_trl(reward) else _Part)(reward)
        made[name] = (reward, float(weight))
    waits = any(part.waits for part, _ in made.values())
    return _AsyncTotal(made) if waits else _Total(made)


class _Total:
    """A sum of rewards. With a part in TRL's signature it is called for all samples of a prompt at once."""

    may_skip = True
    __name__ = "total"

    def __init__(self, parts: Mapping[str, tuple[_Part, float]]) -> None:
        self.parts = parts
        every = [part for part, _ in parts.values()]
        self.whole_groups = any(part.whole_groups for part in every)
        self.own_processes = any(
            getattr(part.function, "own_processes", False) for part in every
        )

    @property
    def weights(self) -> dict[str, float]:
        """Each part's weight; the parts of a reward are weighed already."""
        return {name: weight for name, (_, weight) in self.parts.items()}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """While it is entered, the processes of its parts stay."""
        with contextlib.ExitStack() as stack:
            for part, _ in self.parts.values():
                if hasattr(part.function, "opened"):
                    stack.enter_context(part.function.opened())
            yield

    def __call__(self, samples: Any, examples: Any) -> Any:
        if not self.whole_groups:
            parts = self.parts.values()
            return self._sum([p.function(samples, examples) for p, _ in parts])
        log = _Log(len(samples))
        found = [part.call(samples, examples, log) for part, _ in self.parts.values()]
        return self._scores(found, log)

    def _scores(self, found: Sequence[Any], log: _Log) -> GroupScores:
        """From what each part said."""
        parts = zip(self.parts.values(), found, strict=True)
        columns = [part.values(said, log) for (part, _), said in parts]
        rows = [self._sum(row) for row in zip(*columns, strict=True)]
        return GroupScores(rows, log.metrics, log.columns)

    def _sum(self, row: Sequence[Any]) -> Any:
        """The weighed parts by name; None if all are; the first that is no number, as it is."""
        out: dict[str, float] = {}
        for (name, (_, weight)), value in zip(self.parts.items(), row, strict=True):
            if is_parted(value):
                out |= {f"{name}.{k}": weight * float(v) for k, v in value.items()}
            elif isinstance(value, NUMBERS):
                out[name] = weight * float(value)
            elif value is not None:
                return value
        return out or None

    def __repr__(self) -> str:
        parts = (f"{n}=({p.__name__}, {w:g})" for n, (p, w) in self.parts.items())
        return f"jv.rewards.total({', '.join(parts)})"


class _AsyncTotal(_Total):
    """One with async parts: they run at once, on the event loop of its `Rewarder`; others in threads."""

    def __init__(self, parts: Mapping[str, tuple[_Part, float]]) -> None:
        super().__init__(parts)
        self.whole_groups = True

    async def __call__(self, samples: Any, examples: Any) -> Any:
        log = _Log(len(samples))
        calls = (_said(part, samples, examples, log) for part, _ in self.parts.values())
        return self._scores(await asyncio.gather(*calls), log)


async def _said(
    part: _Part, samples: Sequence[Any], examples: Sequence[Any], log: _Log
) -> Any:
    """Not by `asyncio.to_thread`: its threads keep the interpreter alive if a call never returns."""
    if part.waits:
        return await part.call(samples, examples, log)
    done: Future[Any] = Future()
    in_daemon(lambda: part.call(samples, examples, log), done)
    return await asyncio.wrap_future(done)


# Built-in ones --------------------------------------------------------------------------------------------------------


class _BuiltIn:
    """A reward of one sample, by a name that records show."""

    may_skip = True

    def __init__(self, name: str, judge: Callable[[Any, Any], Any]) -> None:
        self.__name__ = name
        self._judge = judge

    def __call__(self, sample: Any, example: Any) -> Any:
        return self._judge(sample, example)

    def __repr__(self) -> str:
        return f"jv.rewards.{self.__name__}"


def regex(pattern: str, *, answer: bool = False, flags: int = 0) -> Reward:
    """1.0 if the pattern is found in the completion, else 0.0.

    With `answer=True` the last match, or its first group, must equal the row's answer; rows without one are skipped.
    `flags` are those of Python's `re`.

    >>> from types import SimpleNamespace as Some
    >>> tagged = jv.rewards.regex("<answer>(.*?)</answer>", answer=True)
    >>> tagged(Some(text="<answer>7</answer>"), Some(answer="7"))
    1.0
    """
    wanted = compiled(pattern, flags)

    def judge(sample: Any, example: Any) -> float | None:
        if not answer:
            return float(wanted.search(sample.text) is not None)
        if example.answer is None:
            return None
        return last_match(wanted, sample.text, example.answer)

    return _BuiltIn("regex", judge)


def compiled(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """A regular expression of the user's."""
    try:
        return re.compile(pattern, flags)
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"invalid regular expression {pattern!r}: {error}", remedy="see Python's re"
        ) from error


def last_match(pattern: re.Pattern[str], text: str, answer: Any) -> float:
    """1.0 if the last match, or its first group, is the answer: a model may reason before."""
    matches = list(pattern.finditer(text))
    if not matches:
        return 0.0
    found = matches[-1][1 if pattern.groups else 0] or ""
    return float(found.strip() == str(answer).strip())


def length(
    *, most: int | None = None, least: int | None = None, soft: int = 0
) -> Reward:
    """0 for completions of `least` to `most` tokens, -1 for others; within `soft` tokens of a bound it falls linearly.

    `most=4096, soft=512` is DAPO's overlong punishment: 0 up to 3584 tokens, -1 from 4096 on.

    >>> from types import SimpleNamespace as Some
    >>> jv.rewards.length(most=10, soft=4)(Some(token_ids=range(8)), None)
    -0.5
    """
    if most is None and least is None:
        raise ConfigError("no length is given", remedy="length(most=512, soft=64)")
    for name, value in (("most", most), ("least", least), ("soft", soft)):
        if value is not None:
            check_whole(name, value, least=0)

    def judge(sample: Any, example: Any) -> float:
        tokens = len(sample.token_ids)
        over = 0.0 if most is None else _excess(tokens - (most - soft), soft)
        under = 0.0 if least is None else _excess((least + soft) - tokens, soft)
        return -max(over, under) + 0.0

    return _BuiltIn("length", judge)


def _excess(beyond: int, soft: int) -> float:
    """From 0 at the soft bound to 1 at the hard one."""
    if beyond <= 0:
        return 0.0
    return min(1.0, beyond / soft) if soft else 1.0


def math(*, timeout: float = 10.0, processes: int = 2) -> Reward:
    """1.0 if math-verify finds the completion's last answer equal to the row's, else 0.0.

    It runs in `processes` child processes, since math-verify limits itself by SIGALRM, which only a main thread can
    use, and some expressions cannot be interrupted: one that takes longer than `timeout` seconds is ended with its
    process and counts as wrong. Rows without an answer, or with one that is no mathematics, are skipped.

    >>> reward = jv.rewards.math(timeout=5.0)      # needs: pip install math-verify
    """
    from importlib.util import find_spec

    check_number("timeout", timeout, above=0.0)
    check_whole("processes", processes)
    if find_spec("math_verify") is None:
        raise MissingDependency(
            "jv.rewards.math needs math-verify", remedy="pip install math-verify"
        )
    return _Math(timeout, processes)


class _Math(_BuiltIn):
    own_processes = True

    def __init__(self, timeout: float, processes: int) -> None:
        super().__init__("math", self._one)
        self._make = lambda: Rewarder(_Verifier(), timeout, processes)
        self._lock = threading.Lock()
        self._users = 0
        self._rewarder: Rewarder | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[Rewarder]:
        """While it is entered, by one or several, its processes stay."""
        with self._lock:
            self._users += 1
            rewarder = self._rewarder = self._rewarder or self._make()
        try:
            yield rewarder
        finally:
            with self._lock:
                self._users -= 1
                ended = not self._users
                if ended:
                    self._rewarder = None
            if ended:
                rewarder.close()

    def many(self, samples: Sequence[Any], examples: Sequence[Any]) -> list[Any]:
        with self.opened() as rewarder:
            calls = [
                None
                if example.answer is None
                else rewarder.start(0, sample.text, str(example.answer))
                for sample, example in zip(samples, examples, strict=True)
            ]
            # no deadline: each call has one
            return [call if call is None else _verdict(call.result()) for call in calls]

    def _one(self, sample: Any, example: Any) -> float | None:
        return self.many([sample], [example])[0]


def _verdict(found: float | RewardFailure) -> float | None:
    if not isinstance(found, RewardFailure):
        return found
    if found.kind in ("raised", "not started"):
        raise UserCallFailed(found.kind, found.message, found.traceback)
    # one that takes too long, or ends its process, no one can check
    return None if found.kind == "skipped" else 0.0


class _Verifier:
    """Runs in a process of its own; what is slow at first happens before its first call, whose time is limited."""

    may_skip = True

    def __reduce__(self) -> tuple[Callable[[], _Verifier], tuple[()]]:
        return _warm_verifier, ()

    def __call__(self, text: str, gold: str) -> float | None:
        from math_verify import parse, verify

        wanted = parse(gold) or parse(f"${gold}$")
        if not wanted:
            return None
        return float(verify(wanted, parse(text)))


def _warm_verifier() -> _Verifier:
    made = _Verifier()
    made(r"$\frac{1}{2}$", "0.5")
    return made


# Code -----------------------------------------------------------------------------------------------------------------

OUTPUT_BYTES = 1 << 16  # that a program may print
EXITED = os.WEXITED | os.WNOHANG | os.WNOWAIT
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def code(
    *,
    tests: str = "answer",
    timeout: float = 10.0,
    memory_mb: int = 512,
    isolation: str = "full",
) -> Reward:
    """The share of tests that the completion's last Python block passes; the whole text, if it has no block.

    `tests` names the column with them: Python text, run after the program in its namespace, which passes if it raises
    nothing; a list of such texts (MBPP's `test_list`); or `{"inputs": [...], "outputs": [...]}`, for each of which the
    program runs with that input and must print that output; either may be JSON. Rows without tests are skipped.

    Each program runs in an interpreter of its own, with the standard library alone, in an empty folder that is deleted,
    for at most `timeout` seconds; one that prints more than 64 KiB has failed. The kernel refuses it other processes,
    signals to others, sockets and files outside that folder (seccomp, Landlock, no capabilities), more than `memory_mb`
    of address space, large files, and CPU time beyond the timeout. `isolation="limits"` is for systems without those
    two: time, memory and output are limited, but such a program may read your files and use the network.

    What it does not stop: a program that sees through the tests. They run in its own interpreter, so one that is out to
    cheat can change what `assert` compares with, or read the tests from memory. Nor does it stop a bug in the kernel,
    timing of shared caches, or many files from filling the disk until its time is over. For code by strangers use a
    virtual machine.

    >>> from types import SimpleNamespace as Some
    >>> reward = jv.rewards.code(timeout=20)
    >>> text = "Here it is:\\n```python\\ndef double(x):\\n    return 2 * x\\n```"
    >>> reward(Some(text=text), Some(answer=["assert double(2) == 4", "assert double(1) == 3"], info={}))
    0.5
    """
    check_number("timeout", timeout, above=0.0)
    check_whole("memory_mb", memory_mb, least=64)
    check_choice("isolation", isolation, ("full", "limits"))
    if isolation == "full" and (why := _code_sandbox.missing()):
        raise Unsupported(
            f"programs cannot be isolated here: {why}",
            remedy='a Linux kernel from 5.13 on; or isolation="limits", which does not protect your files',
        )
    return _Code(tests, timeout, memory_mb, isolation)


class _Code(_BuiltIn):
    def __init__(
        self, tests: str, timeout: float, memory_mb: int, isolation: str
    ) -> None:
        super().__init__("code", self._grade)
        self._tests = tests
        self._timeout = timeout
        self._limits = {
            "memory": memory_mb << 20,
            "seconds": timeout,
            "isolation": isolation,
        }

    def _grade(self, sample: Any, example: Any) -> float | None:
        named = example.info.get(self._tests)
        tests = example.answer if self._tests == "answer" and named is None else named
        if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
            # many datasets keep them so; as Python this would pass
            with contextlib.suppress(ValueError):
                tests = json.loads(tests)
        if tests is None or len(tests) == 0:
            return None
        blocks = BLOCK.findall(sample.text)
        program = blocks[-1] if blocks else sample.text
        deadline = time.monotonic() + self._timeout
        if isinstance(tests, Mapping):
            inputs = list(tests["inputs"])
            pairs = zip(inputs, tests["outputs"], strict=True)
            right = [self._prints(program, *pair, deadline) for pair in pairs]
            return sum(right) / len(right) if right else None
        texts = [tests] if isinstance(tests, str) else [str(t) for t in tests]
        passed, _ = self._run(program, texts, "", deadline)
        return passed / len(texts)

    def _prints(self, program: str, given: Any, wanted: Any, deadline: float) -> bool:
        passed, output = self._run(program, [""], str(given), deadline)
        lines = lambda text: [line.rstrip() for line in str(text).strip().splitlines()]
        return bool(passed) and lines(output) == lines(wanted)

    def _run(
        self, program: str, tests: Sequence[str], given: str, deadline: float
    ) -> tuple[int, str]:
        """How many tests passed, and what the program printed."""
        word = secrets.token_hex(16)
        order = {
            "program": program,
            "tests": list(tests),
            "stdin": given,
            "word": word,
            "parent": os.getpid(),
            **self._limits,
        }
        file = tempfile.TemporaryFile
        with _folder() as folder, file() as orders, file() as verdict, file() as output:
            orders.write(json.dumps(order).encode())
            orders.seek(0)
            child = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-B"),
                    *(_code_sandbox.__file__, str(verdict.fileno())),
                ],
                stdin=orders,
                stdout=output,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"HOME": folder, "LANG": "C.UTF-8", "PATH": ""},
                pass_fds=(verdict.fileno(),),
                start_new_session=True,
            )
            try:
                # not reaped yet: its number is also that of its group
                while os.waitid(os.P_PID, child.pid, EXITED) is None:
                    if time.monotonic() > deadline:
                        return 0, ""
                    time.sleep(0.005)
            finally:
                # with isolation="limits" it may have children
                os.killpg(child.pid, signal.SIGKILL)
                child.wait(10)
            said = _read(verdict)
            printed = _read(output)
        if len(printed) > OUTPUT_BYTES:
            return 0, ""
        right = re.fullmatch(f"{word} ([0-9]{{1,9}})", said)
        # a program that finds the word can pass, and no more
        return (min(int(right[1]), len(tests)) if right else 0), printed

    def many(self, samples: Sequence[Any], examples: Sequence[Any]) -> list[Any]:
        # no deadline: each call has one
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            return list(threads.map(self, samples, examples))


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """An empty folder, deleted with all that a program left in it."""
    with tempfile.TemporaryDirectory(prefix="jvlab-code-") as folder:
        try:
            yield folder
        finally:
            # folders in folders may be deeper than shutil.rmtree can recurse
            left = [folder]
            while left:
                for entry in list(os.scandir(left.pop())):
                    if entry.is_dir(follow_symlinks=False):
                        os.chmod(entry.path, 0o700)
                        moved = os.path.join(folder, secrets.token_hex())
                        os.rename(entry.path, moved)
                        left.append(moved)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(OUTPUT_BYTES + 1).decode("utf-8", "replace")
