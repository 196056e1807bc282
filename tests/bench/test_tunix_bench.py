"""`bench tunix`: its ratios, its model folders, and what it refuses; the two sides are made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jvlab._errors import ConfigError, MissingDependency
from jvlab.bench import _tunix
from jvlab.cli._cli import main


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The orders that the two sides get."""
    orders: list[dict[str, Any]] = []
    speed = {"jvlab": (900.0, 2.0), "vanilla": (100.0, 5.0)}

    def row(who: str, order: dict[str, Any]) -> dict[str, Any]:
        orders.append({**order, "who": who})
        return {"who": who, "tokens_per_s": speed[who][0], "step_s": speed[who][1]}

    monkeypatch.setattr(_tunix, "_row", row)
    monkeypatch.setattr(_tunix, "find_spec", lambda name: object())
    return orders


def test_ratios_are_against_the_vanilla_sampler(
    sides: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", "tunix", "--device", "cpu", "--tokens", "48", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["vs_vanilla_tokens_ratio"] == 9.0
    assert facts["vs_vanilla_step_ratio"] == 2.5
    assert [order["who"] for order in sides] == ["jvlab", "vanilla"]
    assert {order["tokens"] for order in sides} == {48}
    assert {order["train"] for order in sides} == {True}
    config = json.loads(Path(sides[0]["model"], "config.json").read_text())
    assert config["rope_theta"] == _tunix.THETA, "by which Tunix' Qwen3 rotates"


def test_rollouts_alone_have_no_seconds_of_a_step(
    sides: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
):
    command = ["bench", "tunix", "--device", "cpu", "--rollouts-only", "--json"]
    assert main(command) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["vs_vanilla_tokens_ratio"] == 9.0
    assert facts["vs_vanilla_step_ratio"] is None
    assert {order["train"] for order in sides} == {False}


def test_what_is_refused(sides: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="1 steps"):
        # a step ends with the generation of the next
        _tunix.run_bench_tunix(steps=1, device="cpu")
    with pytest.raises(ConfigError, match="tokens"):
        _tunix.run_bench_tunix(tokens=(16, 32), device="cpu")
    with pytest.raises(ConfigError, match="gpt-5"):
        _tunix.run_bench_tunix(shape="gpt-5", device="cpu")
    monkeypatch.setattr(_tunix, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="needs Tunix") as caught:
        _tunix.run_bench_tunix(device="cpu")
    assert "--no-deps google-tunix==0.1.7" in caught.value.remedy
    assert not sides
