"""Stages and root causes read from logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jvlab.lab._prompts import launch_remedy
from jvlab.wire.processes._log_causes import (
    death,
    exit_cause,
    root_cause,
    stage_of,
    without_escapes,
)
from jvlab.wire.processes._rollout_process import RolloutProcess

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
        (
            "INFO Starting to load model x...\nINFO Loading weights took 0.1 seconds",
            "warm-up",
        ),
    ],
)
def test_stages(log: str, stage: str):
    assert stage_of(log) == stage


def test_a_terminals_control_sequences_are_left_out():
    log = "\x1b[0;36m(EngineCore pid=7)\x1b[0;0m INFO loaded\x1b[K\n\x1b]0;title\x07 10 %\r 20 %\x1b[1A done"
    assert without_escapes(log) == "(EngineCore pid=7) INFO loaded\n 10 %\n 20 % done"
    assert without_escapes("plain [text] of 100 %") == "plain [text] of 100 %"


def test_a_logs_tail_has_none(tmp_path: Path):
    process = RolloutProcess.__new__(RolloutProcess)
    process.log = tmp_path / "log"
    process.log.write_text("\x1b[31mred\x1b[0m\nlast")
    assert process.tail(5) == "red\nlast"


def test_the_cause_is_not_the_wrapper():
    assert (
        root_cause(WRAPPED) == "ValueError: No available memory for the cache blocks."
    )


def test_any_exception_that_ends_a_traceback_counts():
    log = "Traceback (most recent call last):\n  File 'x'\n    f()\njvlab._errors.MissingDependency: lacks this\n"
    log += "  → install it\n"
    assert (
        root_cause(log) == "jvlab._errors.MissingDependency: lacks this\n  → install it"
    )


def test_details_on_following_lines_are_kept():
    log = (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, unknown model"
    )
    assert "unknown model" in root_cause(log)


# as vLLM 0.32.0 wrote them, from the first traceback on
LOGS = Path(__file__).parent / "logs"
CAPTURED = {
    "head": "RuntimeError: Unsupported CPU attention configuration: head_dim=8 isa=3 kv_cache_idx=0",
    "mla": "ValueError: Head dimension 24 is not supported by MLA.",
}


@pytest.mark.parametrize("name", CAPTURED)
def test_the_cause_in_a_real_log_is_no_frame_and_no_wrapper(name: str):
    """An engine that dies of its first request: three processes write tracebacks, each about the one below it."""
    log = (LOGS / f"{name}.txt").read_text()
    assert root_cause(log) == CAPTURED[name]
    assert exit_cause(1, log) == CAPTURED[name]
    assert "head size" in launch_remedy(CAPTURED[name])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, True),
        ({"modules_to_not_convert": ["lm_head"]}, True),
        ({"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}, False),
        ({"weight_block_size": [4, 4]}, False),  # eight experts are whole blocks
        ({"weight_block_size": None}, False),
    ],
)
def test_a_bare_assertion_about_routers_in_blocks_has_a_remedy(
    change: dict[str, Any], told: bool, tmp_path: Path
):
    """vLLM's kernel for a router of few outputs fails without a word; only config.json tells."""
    given = {"quant_method": "fp8", "weight_block_size": [128, 128], **change}
    (tmp_path / "config.json").write_text(
        json.dumps({"num_experts": 8, "quantization_config": given})
    )
    log = 'Traceback (most recent call last):\n  File "x.py", line 3, in f\n    assert x\nAssertionError\n'
    assert (
        "modules_to_not_convert" in launch_remedy(root_cause(log), str(tmp_path))
    ) is told
    assert "modules_to_not_convert" not in launch_remedy(
        "ValueError: other", str(tmp_path)
    )
    assert "modules_to_not_convert" not in launch_remedy(root_cause(log), "hub/id")


def test_tracebacks_of_several_processes_may_mix():
    one = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "    f()",
        "ValueError: the cause",
    ]
    two = [
        "Traceback (most recent call last):",
        '  File "b.py", line 2, in g',
        "    g()",
    ]
    two.append("RuntimeError: Engine core initialization failed. See root cause above.")
    first = [f"(Worker pid=1) ERROR 11-15 01:00:01 [w.py:1] {line}" for line in one]
    second = [
        f"(EngineCore pid=2) ERROR 11-15 01:00:01 [c.py:2] {line}" for line in two
    ]
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    assert root_cause("\n".join(mixed)) == "ValueError: the cause"
    assert (
        root_cause("\n".join([*second[:2], *first, *second[2:]]))
        == "ValueError: the cause"
    )


def test_a_warning_of_another_process_in_a_traceback_is_not_its_end():
    """As multiprocessing's resource tracker writes it, which has no name before its lines."""
    log = """(EngineCore pid=7) RuntimeError: Available memory on node 0 is less than wanted
Traceback (most recent call last):
  File "/site-packages/jvlab/engine/_process.py", line 59, in run
    asyncio.run(_serve(order, token))
/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: leaked shared_memory objects
  warnings.warn('resource_tracker: There appear to be %d '
  File "/lib/python3.11/asyncio/runners.py", line 190, in run
    return runner.run(main)
RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert (
        root_cause(log)
        == "RuntimeError: Available memory on node 0 is less than wanted"
    )


def test_a_wrapper_alone_still_says_what_it_wraps():
    text = "RuntimeError: Worker failed with error 'no room', please check the stack trace above for the root cause"
    assert root_cause(text) == "no room"
    assert (
        root_cause(
            f"{text}\nvllm.v1.engine.exceptions.EngineDeadError: See stack trace (above)"
        )
        == "no room"
    )


DIED = "(EngineCore pid=7) ERROR 11-18 04:03:11 [multiproc_executor.py:315] Worker proc VllmWorker-1 died unexpectedly"
CANCELLED = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nRuntimeError: cancelled\n'


def test_a_worker_that_a_signal_ended_is_the_cause():
    """What the core then raises, "cancelled", explains nothing."""
    log = (LOGS / "illegal.txt").read_text()
    short = "a worker died of SIGILL (illegal instruction)"
    want = (
        f"{short}: this CPU has no bfloat16; launch with engine={{'dtype': 'float32'}}"
    )
    assert exit_cause(1, log) == want
    assert exit_cause(1, log.replace("torch.bfloat16", "torch.float32")) == short
    assert "jvlab doctor" in launch_remedy(short)
    assert "float32" in launch_remedy(want)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            " (exit code: -11), shutting down executor.",
            "a worker died of SIGSEGV (segmentation fault)",
        ),
        (
            " (exit code: -9), shutting down executor.",
            "a worker died of SIGKILL (killed, or out of memory)",
        ),
        (
            " (exit code: -7), shutting down executor.",
            "a worker died of SIGBUS (bus error: is /dev/shm full?)",
        ),
        (" (exit code: -63), shutting down executor.", "a worker died of signal 63"),
        # it raised, and logged that
        (" (exit code: 1), shutting down executor.", "RuntimeError: cancelled"),
        (" (exit code: None), shutting down executor.", "RuntimeError: cancelled"),
        (", shutting down executor.", "RuntimeError: cancelled"),
    ],
)
def test_the_signal_of_a_worker_is_named(said: str, cause: str):
    assert exit_cause(1, f"{DIED}{said}\n{CANCELLED}") == cause


def test_what_a_dying_process_says_itself_is_read():
    """Python's faulthandler, where vLLM does not know the exit code; and a core that dies at its start."""
    fatal = "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File x line 1 in f\n"
    assert death(f"{fatal}{DIED} (exit code: None), shutting down executor.") == (
        "a worker died of SIGSEGV (segmentation fault)"
    )
    assert (
        death(fatal) == "a process of the engine died of SIGSEGV (segmentation fault)"
    )
    core = "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore': -9}"
    assert death(core) == "the engine's core died of SIGKILL (killed, or out of memory)"
    assert death(WRAPPED) == ""


@pytest.mark.parametrize(
    ("code", "log", "word"),
    [
        (137, WRAPPED, "SIGKILL"),
        (139, "", "SIGSEGV"),
        (1, WRAPPED, "No available memory"),
        (5, "", "code 5"),
    ],
)
def test_exit_causes(code: int, log: str, word: str):
    assert word in exit_cause(code, log)
