"""Tasks: positions, built-in ones, JSONL files, and environments of several turns."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvlab._errors import ConfigError
from jvlab.record._sample import Sample
from jvlab.trainer import _task_library as tasks
from jvlab.trainer._batching import train_batch
from jvlab.trainer._environment import (
    Environment,
    EnvironmentTurn,
    Episode,
    GuessNumber,
    run_episode,
)
from jvlab.trainer._tasks import Example, Task


def zero(sample, example) -> float:
    return 0.0


def prompts(task: Task, count: int) -> list:
    return [e.prompt for e in task.next(count)]


def completed(text: str) -> SimpleNamespace:
    return SimpleNamespace(text=text)


# ---------------------------------------------------------------------------------------------------- positions


@given(
    st.integers(1, 7),
    st.integers(0, 20),
    st.integers(0, 20),
    st.sampled_from(["list", "shuffled", "iterator", "function"]),
)
def test_a_saved_position_goes_on_where_it_was(
    size: int, before: int, after: int, kind: str
):
    def make() -> Task:
        items = [f"p{i}" for i in range(size)]
        match kind:
            case "list":
                return Task(items, zero)
            case "shuffled":
                return Task(items, zero, shuffle=True, seed=3)
            case "iterator":
                return Task((x for x in items), zero)
            case _:
                return Task(lambda i: f"p{i % size}", zero)

    whole, first, second = make(), make(), make()
    expected = prompts(whole, before + after)
    start = prompts(first, before)
    second.load_state(json.loads(json.dumps(first.state_dict())))
    assert start + prompts(second, after) == expected
    if kind != "shuffled":
        assert expected == [f"p{i % size}" for i in range(before + after)]


def test_shuffled_rounds_are_permutations_and_differ():
    task = Task(list(range(50)), zero, shuffle=True, seed=1)
    one, two = prompts(task, 50), prompts(task, 50)
    assert sorted(one) == sorted(two) == list(range(50))
    assert one != two
    assert one != list(range(50))
    assert one != prompts(Task(list(range(50)), zero, shuffle=True, seed=2), 50)


def test_endless_iterators_are_read_as_far_as_needed():
    task = Task(itertools.count(), zero)
    assert prompts(task, 3) == [0, 1, 2]
    task.load_state({**task.state_dict(), "position": 1})
    assert prompts(task, 3) == [1, 2, 3]


def test_items_may_carry_answers():
    task = Task(
        [{"prompt": "1+1=", "answer": 2, "level": "easy"}, Example("x", 3), [5, 6]],
        zero,
    )
    first, second, third = task.next(3)
    assert (first.prompt, first.answer, first.info, first.index) == (
        "1+1=",
        2,
        {"level": "easy"},
        0,
    )
    assert (second.answer, second.index, third.prompt, third.index) == (3, 1, [5, 6], 2)


def test_errors_of_tasks():
    with pytest.raises(ConfigError, match="neither a reward function"):
        Task(["a"])
    with pytest.raises(ConfigError, match="both a reward function"):
        Task(["a"], zero, environment=GuessNumber)
    with pytest.raises(ConfigError, match="no prompts"):
        Task([], zero)
    with pytest.raises(ConfigError, match="no prompts"):
        Task(iter([]), zero).next(1)
    with pytest.raises(ConfigError, match="prompts of task 'task' are str"):
        Task("hello", zero)
    with pytest.raises(ConfigError, match="has no 'prompt', only question"):
        Task([{"question": "?"}], zero).next(1)
    with pytest.raises(ConfigError, match="cannot shuffle"):
        Task(lambda i: "x", zero, shuffle=True)
    with pytest.raises(ConfigError, match="seed: 4, here 0"):
        Task(["a"], zero).load_state({**Task(["a"], zero).state_dict(), "seed": 4})
    with pytest.raises(ConfigError, match="position -1"):
        Task(["a"], zero).load_state({**Task(["a"], zero).state_dict(), "position": -1})
    with pytest.raises(ConfigError, match="returns the reward itself"):
        tasks.guess_number().rewarder()


def test_repr_is_stable():
    assert repr(tasks.add()) == "Task('add', unlimited prompts, reward, position 0)"
    assert (
        repr(Task(["a", "b"], zero, processes=2))
        == "Task('task', 2 prompts, reward in 2 processes, position 0)"
    )
    assert (
        repr(tasks.guess_number())
        == "Task('guess-number', unlimited prompts, environment, position 0)"
    )


# ---------------------------------------------------------------------------------------------------- built-in tasks


@pytest.mark.parametrize("name", tasks.names)
def test_built_in_tasks_repeat_by_seed(name: str):
    one, same, other = (
        tasks.named(name, seed=1),
        tasks.named(name, seed=1),
        tasks.named(name, seed=2),
    )
    first = one.next(30)
    assert first == same.next(30)
    assert name == one.name
    if name not in ("digits", "repeat-letter"):  # these have one prompt
        assert first != other.next(30)


def reward(task: Task, example: Example, text: str) -> float:
    with task.rewarder() as rewarder:
        result = rewarder.score([completed(text)], [example])
    assert not result.failures
    return float(result.rewards[0])


def test_digits():
    task = tasks.digits(max_tokens=4)
    assert [
        reward(task, task.example(0), t)
        for t in ("0123", "1a2b", "²x", "", "7", "01234xxx")
    ] == [
        1,
        0.5,
        0,
        0,
        0.25,
        0.625,
    ]


def test_repeat_letter():
    task = tasks.repeat_letter("ab", max_tokens=4)
    examples = task.next(20)
    assert {e.answer for e in examples} == {"a", "b"}
    assert all(e.answer in e.prompt for e in examples)
    example = Example("", "a")
    assert [reward(task, example, t) for t in ("aaaa", "abab", "zz", "", "a a ")] == [
        1,
        0.5,
        0,
        0,
        0.5,
    ]


def test_sort_digits_and_add():
    task = tasks.sort_digits(4)
    example = task.example(3)
    digits = example.prompt.removeprefix("Sort ").removesuffix(": ")
    assert example.answer == "".join(sorted(digits))
    right = Example("", "0129")
    assert [
        reward(task, right, t)
        for t in ("0129", " 0129\n", "0192", "01", "01290129", "")
    ] == [
        1,
        1,
        0.5,
        0.5,
        0.5,
        0,
    ]
    task = tasks.add(places=2)
    for example in task.next(10):
        a, b = example.prompt.removesuffix("=").split("+")
        assert example.answer == str(int(a) + int(b))
    assert reward(task, Example("", "12"), "13") == 0.5


def test_unknown_task_lists_the_known():
    with pytest.raises(
        ConfigError,
        match=r"(?s)'sums'.*add, digits, guess-number, repeat-letter, sort-digits",
    ):
        tasks.named("sums")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'size'"):
        tasks.named("add", size=3)
    with pytest.raises(ConfigError, match="letters=''"):
        tasks.repeat_letter("")


# ---------------------------------------------------------------------------------------------------- JSONL


def half(sample, example) -> float:
    return 0.5 if example.info["kind"] in sample.text else 0.0


def written(path, *lines: object) -> str:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        + "\n"
    )
    return str(path)


def test_jsonl_checks(tmp_path):
    path = written(
        tmp_path / "sums.jsonl",
        {"prompt": "2+2", "answer": 4, "kind": "sum"},
        "",
        {"prompt": "hi"},
    )
    task = tasks.jsonl(path)
    first, second = task.next(2)
    assert (task.name, first.answer, first.info, second.answer) == (
        "sums",
        4,
        {"kind": "sum"},
        None,
    )
    assert [reward(task, first, t) for t in (" 4\n", "5")] == [1, 0]
    # nothing to compare with is a failure, not a zero
    with task.rewarder() as rewarder:
        assert rewarder.score([completed("4")], [second]).counts == {"raised": 1}
    number = tasks.jsonl(path, r"regex:answer: (-?\d+)")
    assert [
        reward(number, first, t)
        for t in ("answer: 3, no, answer: 4", "answer: 44", "4")
    ] == [1, 0, 0]
    assert reward(number, second, "answer: 9") == 1
    assert reward(tasks.jsonl(path, half), first, "a sum") == 0.5
    assert (
        reward(tasks.jsonl(path, f"{__name__}:half", processes=1), first, "a sum")
        == 0.5
    )


def test_jsonl_errors(tmp_path):
    good = {"prompt": "x"}
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        tasks.jsonl(written(tmp_path / "a.jsonl", good, "{"))
    with pytest.raises(ConfigError, match="line 1 has no field 'question'"):
        tasks.jsonl(written(tmp_path / "b.jsonl", good), prompt="question")
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        tasks.jsonl(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="has no lines"):
        tasks.jsonl(written(tmp_path / "c.jsonl", ""))
    path = written(tmp_path / "d.jsonl", good)
    with pytest.raises(ConfigError, match="regular expression"):
        tasks.jsonl(path, "regex:(")
    for wrong in ("exact", "math:nothing", "nomodule:check"):
        with pytest.raises(ConfigError, match="check="):
            tasks.jsonl(path, wrong)
    with pytest.raises(ConfigError, match="is float, not a function"):
        tasks.jsonl(path, "math:pi")


# ---------------------------------------------------------------------------------------------------- environments


def encode(text: str, special: bool = False) -> list[int]:
    return [ord(c) for c in text]


class Player:
    """A `generate` that returns what it was given, and remembers the prompts it saw."""

    def __init__(self, *lines: str, finish: str = "stop") -> None:
        self.lines, self.seen, self.finish = iter(lines), [], finish

    async def __call__(self, token_ids: list[int]) -> Sample:
        self.seen.append(list(token_ids))
        text = next(self.lines)
        n = len(text)
        return Sample(
            prompt_index=0,
            sample_index=0,
            prompt_token_ids=np.array(token_ids),
            token_ids=np.array(encode(text)),
            logprobs=np.full(n, -0.5),
            text=text,
            versions=((len(self.seen), 0, n),),
            finish_reason=self.finish,
        )


def play(
    environment: Environment, player: Player, example: Example, **options
) -> Episode:
    return asyncio.run(run_episode(environment, example, player, encode, **options))


def test_a_game_of_three_turns():
    player = Player("3", "8", "6")
    episode = play(
        GuessNumber(), player, Example("Guess: ", 6, index=5), sample_index=2
    )
    whole = "Guess: 3\nhigher: 8\nlower: 6"
    assert "".join(map(chr, [*episode.prompt_token_ids, *episode.token_ids])) == whole
    own = [c for c, mine in zip(episode.text, episode.loss_mask, strict=True) if mine]
    assert (own, episode.turns, episode.finish_reason) == (["3", "8", "6"], 3, "stop")
    assert episode.reward == pytest.approx(0.5 * 0.7 / 4 + 0.5 * 0.8 / 4 + 2 / 4)
    assert episode.token_versions[episode.loss_mask].tolist() == [1, 2, 3]
    assert (episode.token_versions[~episode.loss_mask] == -1).all()
    assert (episode.prompt_index, episode.sample_index, episode.failure) == (5, 2, None)
    # so the engine finds the prefix in its KV cache
    for earlier, later in itertools.pairwise(player.seen):
        assert later[: len(earlier)] == earlier
    batch = train_batch([episode], [episode.reward])
    assert batch.loss_mask.sum() == 3
    np.testing.assert_array_equal(batch.tokens[batch.loss_mask], encode("386"))
    np.testing.assert_allclose(batch.engine_logprobs[batch.loss_mask], -0.5)


def test_games_end_without_an_answer():
    episode = play(
        GuessNumber(guesses=9), Player("1", "2", "3"), Example("?", 9), max_turns=3
    )
    assert (episode.turns, episode.finish_reason, episode.text[-1]) == (
        3,
        "length",
        "3",
    )
    episode = play(GuessNumber(), Player("1", "2"), Example("?", 9), max_length=5)
    assert (episode.turns, episode.finish_reason) == (1, "length")
    episode = play(GuessNumber(guesses=2), Player("dunno", "x"), Example("?", 9))
    assert (episode.turns, episode.finish_reason, episode.reward) == (2, "stop", 0.0)
    episode = play(GuessNumber(), Player("1", finish="abort"), Example("?", 9))
    assert episode.finish_reason == "abort"
    assert len(train_batch([episode], [episode.reward])) == 0


class Odd:
    """Does what its example's answer says."""

    async def reset(self, example: Example):
        self.what = example.answer
        return [1, 2]

    async def step(self, completion: str):
        match self.what:
            case "raise":
                raise KeyError("lost")
            case "hang":
                await asyncio.sleep(600)
            case "nan":
                return EnvironmentTurn(reward=math.nan, done=True)
            case "none":
                return None
        return EnvironmentTurn([7, 8], 1.0, completion == "end")


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("raise", "raised", r"step\(\): KeyError: 'lost'"),
        ("hang", "timeout", r"step\(\) did not return within 1.5 s"),
        ("nan", "not a number", "reward nan"),
        ("none", "not a number", "NoneType, not an EnvironmentTurn"),
    ],
)
def test_an_environment_that_fails_is_reported(what: str, kind: str, message: str):
    episode = play(
        Odd(), Player("go"), Example("", what), timeout=1.5 if what == "hang" else 60
    )
    assert episode.failure is not None
    assert episode.failure.kind == kind
    assert math.isnan(episode.reward)
    assert re.search(message, episode.failure.message)
    batch = train_batch([episode], [episode.reward])
    assert (len(batch), batch.excluded) == (0, 1)


def test_async_environment_with_token_observations():
    episode = play(Odd(), Player("go", "end"), Example("", "fine"))
    assert episode.prompt_token_ids.tolist() == [1, 2]
    assert episode.token_ids.tolist() == [*encode("go"), 7, 8, *encode("end")]
    assert episode.loss_mask.tolist() == [True, True, False, False, True, True, True]
    assert episode.reward == 2.0
    assert isinstance(Odd(), Environment)


def test_a_sync_environment_that_raises_or_hangs():
    class Sync(GuessNumber):
        def step(self, completion: str) -> EnvironmentTurn:
            import time

            time.sleep(600 if completion == "hang" else 0)
            raise RuntimeError("broken")

    assert play(Sync(), Player("x"), Example("?", 1)).failure.kind == "raised"  # type: ignore[union-attr]
    assert (
        play(Sync(), Player("hang"), Example("?", 1), timeout=0.3).failure.kind  # type: ignore
        == "timeout"
    )
