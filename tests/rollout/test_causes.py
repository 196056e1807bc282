"""Stages and root causes read from logs."""

from __future__ import annotations

import pytest

from jvlab.rollout._causes import exit_cause, root_cause, stage_of

WRAPPED = """\
(EngineCore pid=42) INFO 11-15 01:00:00 [core.py:100] Initializing a V1 LLM engine
(EngineCore pid=42) ERROR 11-15 01:00:01 [core.py:900] EngineCore failed to start.
(EngineCore pid=42) ERROR 11-15 01:00:01 [core.py:900] Traceback (most recent call last):
(EngineCore pid=42) ERROR 11-15 01:00:01 [core.py:900]   File "x.py", line 3, in f
(EngineCore pid=42) ERROR 11-15 01:00:01 [core.py:900] ValueError: No available memory for the cache blocks.
Traceback (most recent call last):
  File "y.py", line 1, in g
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.mark.parametrize(
    ("log", "stage"),
    [
        ("", "process"),
        ("INFO Starting to load model x...", "weights"),
        ("INFO Starting to load model x...\nINFO Loading weights took 0.1 seconds", "warm-up"),
    ],
)
def test_stages(log: str, stage: str):
    assert stage_of(log) == stage


def test_the_cause_is_not_the_wrapper():
    assert root_cause(WRAPPED) == "ValueError: No available memory for the cache blocks."


def test_any_exception_that_ends_a_traceback_counts():
    log = "Traceback (most recent call last):\n  File 'x'\n    f()\njvlab._errors.MissingDependency: lacks this\n"
    log += "  → install it\n"
    assert root_cause(log) == "jvlab._errors.MissingDependency: lacks this\n  → install it"


def test_details_on_following_lines_are_kept():
    log = (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, unknown model"
    )
    assert "unknown model" in root_cause(log)


@pytest.mark.parametrize(
    ("code", "log", "word"),
    [(137, WRAPPED, "SIGKILL"), (139, "", "SIGSEGV"), (1, WRAPPED, "No available memory"), (5, "", "code 5")],
)
def test_exit_causes(code: int, log: str, word: str):
    assert word in exit_cause(code, log)
