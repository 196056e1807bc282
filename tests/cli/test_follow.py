"""`jvlab rollout --follow`: what it refuses and prints; tests/live/test_storage.py has engines."""

from __future__ import annotations

import io
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from jvlab import _errors as errors
from jvlab.cli import _cli
from tests.waiting import until


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--follow", "x"], "--model DIR"),
        (["--follow", "x", "--model", "m", "--gateway", "h:1"], "lab.follow"),
    ],
)
def test_what_it_refuses(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert _cli.main(["rollout", *given]) == 1
    assert words in capsys.readouterr().err


def test_each_version_and_each_problem_is_printed_once(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_cli, "LOOK_SECONDS", 0.01)
    # pytest's own forget what is printed by a thread in the moment in which they are read
    out = io.StringIO()
    err = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    follower: Any = SimpleNamespace(closed=False, last=None, error=None)
    thread = threading.Thread(target=_cli.report_follower, args=(follower,))
    thread.start()

    def shown(words: str) -> bool:
        return words in out.getvalue() + err.getvalue()

    try:
        for version in (1, 4):
            follower.last = SimpleNamespace(version=version, seconds={"total": 0.5})
            until(lambda text=f"version {version} served": shown(text), "the line")
        follower.error = errors.StorageError("weight_v000005 is damaged", remedy="wait")
        until(lambda: shown("is damaged"), "the problem")
    finally:
        follower.closed = True
        thread.join(60)
    assert out.getvalue().count("served") == 2
    assert err.getvalue().count("damaged") == 1
    assert "wait" in err.getvalue()
