"""The order and the wording of a bisection, over a fake engine: no vLLM. The real thing is in tests/live."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab._errors import ConfigError, Unsupported
from jvlab.sync._transaction import CheckReport, Outcome
from jvlab.sync.diagnose._bisect import CAUSES, Check, bisect, compare_layers

IDS = np.array([5, 6, 7, 8], np.int32)


class FakePool:
    """An engine whose log-probability of token t at place p is known; `wrong` adds to it where something is amiss."""

    def __init__(self) -> None:
        self.cache_off = 0.0  # what a stale cache adds
        self.flags: dict[str, Any] = {}
        self.states: np.ndarray | None = None  # hidden states, where they can be had
        self.version, self.dtype, self.mode = 3, "float32", "processed_logprobs"

    def status(self, timeout: Any = None) -> dict[str, Any]:
        flags = {
            "dirty": False,
            "stale": False,
            "sleeping": False,
            "paused": False,
            **self.flags,
        }
        return {
            "dtype": self.dtype,
            "replicas": [
                {"replica": "p/0", "state": "ready", "version": self.version, **flags}
            ],
        }

    def facts(self, timeout: Any = None) -> Any:
        return SimpleNamespace(prefix_caching=True, logprobs_mode=self.mode)

    def generate(
        self, prompts: Any, progress: bool, timeout: float, **settings: Any
    ) -> list[jv.Sample]:
        tokens = np.arange(10, 10 + settings["max_tokens"], dtype=np.int32)
        row = (
            true_logprobs(np.concatenate([IDS, tokens]))[len(IDS) :]
            / settings["temperature"]
        )
        if not settings.get("skip_reading_prefix_cache"):
            row = row + self.cache_off
        if "top_p" in settings:
            row = row * settings["top_p"]
        return [
            jv.Sample(
                0,
                0,
                IDS,
                tokens,
                row,
                text="x",
                versions=((self.version, 0, len(tokens)),),
            )
        ]

    def hidden(self, tokens: Any, timeout: float) -> np.ndarray:
        if self.states is None:
            raise Unsupported("this engine runs a compiled graph")
        return self.states

    def score(self, sequences: Any, timeout: float) -> list[np.ndarray]:
        return [true_logprobs(np.array(s)) for s in sequences]


def true_logprobs(tokens: np.ndarray) -> np.ndarray:
    row = -0.1 * (tokens % 7 + 1).astype(np.float32)
    row[0] = np.nan
    return row


class FakePolicy:
    """A trainer that is `off` by so much from a place on."""

    compute_dtype = "float32"

    def __init__(self, off: float = 0.0, start: int = 1) -> None:
        self.params, self.off, self.start = {"w": 1}, off, start

    def logprobs(self, params: Any, tokens: np.ndarray) -> np.ndarray:
        row = true_logprobs(tokens[0])
        row[0] = 0.0
        row[self.start :] += self.off
        return row[None, :]

    def hidden(self, params: Any, tokens: np.ndarray) -> np.ndarray:
        return np.ones((4, 1, tokens.shape[1], 3), np.float32)


class FakeLink:
    """A link whose digests may differ from the last commit, or from the trainer's parameters."""

    def __init__(self) -> None:
        self.pool, self.version = FakePool(), 3
        self.spoilt: tuple[str, ...] = ()
        self.moved: tuple[str, ...] = ()
        self.mapping = SimpleNamespace(summary=lambda: {"staged": 0}, _origin=None)
        self.meaning = SimpleNamespace(state="checked", why="")

    def verify(self, params: Any = None, timeout: float = 0.0) -> CheckReport:
        differing = self.spoilt if params is None else (*self.spoilt, *self.moved)
        return CheckReport(
            3,
            (Outcome("p/0", "holds", 3, differing=differing),),
            {("a", 0): 1, ("b", 0): 2},
        )

    def diff(self, name: str, params: Any) -> list[Any]:
        from jvlab.sync._diff import TensorDiff

        return [TensorDiff(name, 0, (2,), 1.0, 1.0, 0.5, 0.25, 1.0)]


def ask(link: Any, policy: Any = None, prompt: Any = "text", **options: Any) -> Any:
    return bisect(link, prompt, policy or FakePolicy(), **options)


def test_they_agree():
    found = ask(FakeLink())
    assert found.agrees
    assert [c.name for c in found.checks] == list(CAUSES)
    assert [c.state for c in found.checks] == [
        "ok",
        "ok",
        "ok",
        "ok",
        "skipped",
        "ok",
        "ok",
        "ok",
    ]
    assert (found.gap or 0.0) < 1e-6
    assert "\n" not in repr(found)
    assert str(found).count("\n") == len(CAUSES)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["cause"] == ""


def link_with(**wrong: Any) -> FakeLink:
    link = FakeLink()
    for name, value in wrong.items():
        setattr(
            link if hasattr(link, name) and name != "version" else link.pool,
            name,
            value,
        )
    return link


CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("state", {"flags": {"dirty": True}}, {}, "dirty"),
    ("state", {"flags": {"paused": True}}, {}, "paused"),
    ("tensor", {"spoilt": ("a (rank 0)",)}, {}, "a (rank 0)"),
    ("version", {"version": 2}, {}, "p/0 holds 2"),
    ("version", {"moved": ("b (rank 0)",)}, {}, "moved on since version 3"),
    ("prefix cache", {"cache_off": 0.1}, {}, "stale prefix cache"),
    ("sampler", {}, {"temperature": 0.5}, "temperature=0.5"),
    ("sampler", {}, {"temperature": 0.5, "top_p": 0.9}, "temperature=0.5, top_p=0.9"),
    ("model", {}, {"policy": FakePolicy(0.1)}, "first prediction"),
    ("model", {}, {"policy": FakePolicy(0.1, start=9)}, "from position 9 on"),
]


@pytest.mark.parametrize(("cause", "wrong", "options", "words"), CASES)
def test_each_cause_is_named_with_its_evidence(
    cause: str, wrong: Any, options: Any, words: str
):
    found = ask(link_with(**wrong), **options)
    assert found.cause == cause, found
    assert words in found.verdict
    assert found.remedy
    place = CAUSES.index(cause)
    assert found.checks[place].state == "cause"
    assert all(c.state != "cause" for c in found.checks[:place])
    assert all(c.state == "skipped" for c in found.checks[place + 1 :])


def test_the_first_cause_wins():
    link = link_with(spoilt=("a (rank 0)",), moved=("b (rank 0)",), cache_off=1.0)
    assert ask(link, FakePolicy(1.0), temperature=0.5).cause == "tensor"
    link.spoilt = ()
    assert ask(link, FakePolicy(1.0), temperature=0.5).cause == "version"
    link.moved = ()
    assert ask(link, FakePolicy(1.0), temperature=0.5).cause == "prefix cache"


def test_a_sample_of_another_version_and_one_with_other_numbers():
    link = FakeLink()
    drawn = link.pool.generate(["x"], False, 1.0, temperature=1.0, max_tokens=4)[0]
    assert ask(link, prompt=drawn).agrees
    cold = link.pool.generate(["x"], False, 1.0, temperature=0.5, max_tokens=4)[0]
    assert ask(link, prompt=cold).cause == "sampler"
    old = jv.Sample(0, 0, IDS, np.array([9], np.int32), text="x", versions=((1, 0, 1),))
    assert ask(link, prompt=old).cause == "version"


def test_without_a_trainer_the_engine_alone_is_judged():
    found = bisect(FakeLink(), "text", params={"w": 1})  # type: ignore[arg-type]
    assert found.agrees
    assert "not compared" in found.verdict
    assert [c.state for c in found.checks][-3:] == ["skipped", "skipped", "skipped"]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="tolerance"):
        ask(FakeLink(), tolerance=0)
    with pytest.raises(ConfigError, match="0 samples"):
        ask(FakeLink(), prompt=jv.RolloutBatch([]))


def test_the_layer_in_which_two_models_part():
    link = FakeLink()
    states = np.ones((4, len(IDS) + 16, 3), np.float32)
    states[0] += 1e-6
    states[2:] += 0.3
    link.pool.states = states
    found = ask(link, FakePolicy(0.1))
    assert found.cause == "model"
    assert "starting in layer 2" in found.verdict
    assert (
        "after layer 1 they are 0 apart, after layer 2 0.3" in found.checks[-1].evidence
    )
    one = np.ones((3, 2, 2), np.float32)
    assert (
        compare_layers(
            one + np.array([0.5, 0.6, 0.7], np.float32).reshape(3, 1, 1), one
        ).layer
        == 0
    )
    assert (
        compare_layers(
            one + np.array([1e-6, 2e-6, 5e-6], np.float32).reshape(3, 1, 1), one
        ).layer
        == 2
    ), "else the largest"


def test_a_wrong_rule_in_words_and_html_meaning():
    rules = jv.Rules.parse("a -> b : x y -> y x")
    facts = {"now": ["a -> b"], "write": [str(rules.rules[0])], "how": "function"}
    found = jv.Bisection(
        "rule",
        "wrong rule",
        "write it",
        (Check("rule", "cause", "with it", facts),),
        IDS,
        rules=rules,
    )
    page = found._repr_html_()
    assert "a -&gt; b : x y -&gt; y x" in page
    assert json.loads(json.dumps(found.to_dict()))["rules"] == rules.to_text()
    link = link_with(flags={"dirty": True})
    link.meaning = SimpleNamespace(state="failed", why="3 nats apart")
    dirty = ask(link)
    assert dirty.cause == "rule"
    assert "3 nats apart" in dirty.verdict
    assert [c.state for c in dirty.checks] == ["skipped"] * 5 + ["cause"] + [
        "skipped"
    ] * 2
