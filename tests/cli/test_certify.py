"""`jvlab certify`: what it launches, what it prints, and its exit status."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

import jvlab as jv
from jvlab.analysis.certification._certificate import CertificateRow
from jvlab.cli._cli import main

GOOD = CertificateRow("scored", "equal?", "pass", "fine", "", 0.5)
BAD = CertificateRow(
    "arrives direct", "equal?", "fail", "one differs", "model.norm.weight (rank 0)", 0.5
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A lab that starts nothing; what was asked of it, and the rows that it finds."""
    seen: dict[str, Any] = {"rows": (GOOD,)}

    class Lab:
        def __enter__(self) -> Lab:
            return self

        def __exit__(self, *_: object) -> None:
            seen["closed"] = True

        def launch(self, model: str, **options: Any) -> Any:
            seen.update(model=model, options=options)
            return SimpleNamespace(wait=lambda: "the pool")

    def certify(pool: Any, checks: Any, seed: int) -> jv.Certificate:
        seen.update(pool=pool, checks=checks, seed=seed)
        return jv.Certificate("llama", {"device": "cpu"}, seen["rows"], 2, 1.0)

    monkeypatch.setattr(jv, "Lab", Lab)
    monkeypatch.setattr(jv, "certify", certify)
    return seen


def test_a_table_or_json_and_the_exit_status(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    given = [
        "--engine",
        '{"enable_lora": true}',
        "--tensor-parallel",
        "2",
        "--check",
        "scored",
        "--seed",
        "3",
    ]
    assert main(["certify", "--model", "tiny:llama", *given]) == 0
    assert "scored  pass" in capsys.readouterr().out
    assert asked["model"] == "tiny:llama"
    assert asked["options"]["engine"] == {"enable_lora": True}
    assert asked["options"]["tensor_parallel"] == 2
    assert (asked["pool"], asked["checks"], asked["seed"], asked["closed"]) == (
        "the pool",
        ["scored"],
        3,
        True,
    )
    asked["rows"] = (GOOD, BAD)
    assert main(["certify", "--model", "tiny:llama", "--json"]) == 1, "a check failed"
    plain = json.loads(capsys.readouterr().out)
    assert plain["ok"] is False
    assert plain["checks"][1]["first_wrong"] == "model.norm.weight (rank 0)"


def test_an_engine_that_is_no_json_object_is_refused(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    for text in ("{", "[1]"):
        assert main(["certify", "--model", "tiny:llama", "--engine", text]) == 1
        said = capsys.readouterr().err
        assert "--engine is" in said
        assert "objects" in said
    assert "model" not in asked, "nothing was launched"
