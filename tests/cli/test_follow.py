"""`jvlab rollout --follow`: what it refuses and prints; tests/live/test_storage.py has engines."""

from __future__ import annotations

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
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_cli, "LOOK_SECONDS", 0.01)
    follower: Any = SimpleNamespace(closed=False, last=None, error=None)
    thread = threading.Thread(target=_cli.report_follower, args=(follower,))
    thread.start()
    out = ""
    err = ""

    def shown(words: str) -> bool:
        nonlocal out, err
        found = capsys.readouterr()
        out += found.out
        err += found.err
        return words in out + err

    try:
        for version in (1, 4):
            follower.last = SimpleNamespace(version=version, seconds={"total": 0.5})
            until(lambda text=f"version {version} served": shown(text), "the line", 20)
        follower.error = errors.StorageError("weight_v000005 is damaged", remedy="wait")
        until(lambda: shown("is damaged"), "the problem", 20)
    finally:
        follower.closed = True
        thread.join(20)
    shown("")
    assert out.count("served") == 2
    assert err.count("damaged") == 1
    assert "wait" in err
