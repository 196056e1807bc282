"""Prompts and sampling parameters as users write them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jvlab import errors
from jvlab.lab import _prompts

CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("text", 1),
        ([1, 2, 3], 1),
        (np.array([1, 2]), 1),
        (CHAT, 1),
        (["a", "b"], 2),
        ([[1], [2, 3]], 2),
        ([CHAT, "a", [1, 2], np.array([3])], 4),
        (np.array([[1, 2], [3, 4]]), 2),
    ],
)
def test_one_or_many(prompts, count: int):
    assert len(_prompts.as_list(prompts)) == count


def test_kinds():
    kinds = [
        _prompts.to_message(i, p).WhichOneof("kind")
        for i, p in enumerate(["a", CHAT, [1, 2], np.array([3])])
    ]
    assert kinds == ["text", "chat_json", "tokens", "tokens"]


@pytest.mark.parametrize("prompts", [[], {"a": 1}, 7, None])
def test_no_list(prompts):
    with pytest.raises(errors.SamplingError):
        _prompts.as_list(prompts)


@pytest.mark.parametrize("prompt", ["", [], [1.5], [None], {"role": "user"}])
def test_bad_prompts_are_named(prompt):
    with pytest.raises(errors.SamplingError, match="prompt 4"):
        _prompts.to_message(4, prompt)


def test_sampling_names():
    known = ["max_tokens", "temperature"]
    assert json.loads(
        _prompts.check_sampling({"temperature": np.float64(0.5)}, known, {})
    ) == {"temperature": 0.5}
    with pytest.raises(errors.SamplingError, match="did you mean 'temperature'"):
        _prompts.check_sampling({"temprature": 1}, known, {})
    with pytest.raises(errors.SamplingError, match="known: max_tokens"):
        _prompts.check_sampling({"zzz": 1}, known, {})
    with pytest.raises(errors.SamplingError, match="set by jvlab"):
        _prompts.check_sampling({"n": 1}, known, {"n": "use the argument n"})
    with pytest.raises(errors.SamplingError, match="plain value"):
        _prompts.check_sampling({"max_tokens": object()}, known, {})
