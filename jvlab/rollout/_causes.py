"""What a rollout process's log says: how far it came, and why it ended. Pure text in, text out.

The phrases are vLLM's own log lines (checked against 0.32.0). A phrase that changes costs a stage name, nothing else.
"""

from __future__ import annotations

import itertools
import re

STAGES = (  # (phrase in vLLM's log, the stage it begins); the last one seen counts
    ("Starting to load model", "weights"),
    ("Loading weights took", "warm-up"),
    ("Model loading took", "warm-up"),
    ("GPU KV cache size", "warm-up"),
    ("CPU KV cache size", "warm-up"),
)
_PREFIX = re.compile(r"^\([^)]*pid=\d+\)\s*")  # "(EngineCore pid=123) "
_LEVEL = re.compile(r"^(ERROR|WARNING|INFO|DEBUG|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*")
_RAISED = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failure|Invalid\w*|NotFound\w*))(:.*)?$")
_WRAPPERS = (
    "Engine core initialization failed",
    "See root cause above",
    "See stack trace",
    "WorkerProc initialization",
)


def stage_of(log: str) -> str:
    """How far vLLM's start has come."""
    stage = "process"
    for phrase, begins in STAGES:
        if phrase in log:
            stage = begins
    return stage


def _plain(line: str) -> str:
    return _LEVEL.sub("", _PREFIX.sub("", line)).rstrip()


def root_cause(log: str) -> str:
    """The exception line that explains an end: the last one that is no mere wrapper around another, if there is one."""
    lines = [_plain(line) for line in log.splitlines()]
    found: list[str] = []
    wrappers: list[str] = []
    in_traceback = False
    for at, line in enumerate(lines):
        ends_traceback = in_traceback and line != "" and not line.startswith((" ", "Traceback (most recent"))
        in_traceback = line.startswith("Traceback (most recent") or (in_traceback and not ends_traceback)
        if not (_RAISED.match(line) or ends_traceback):
            continue
        if any(wrapper in line for wrapper in _WRAPPERS):
            wrappers.append(line)
            continue
        # pydantic puts the substance on the lines right after
        extra = itertools.takewhile(
            lambda text: text.startswith("  ") and "For further" not in text, lines[at + 1 : at + 4]
        )
        found.append("\n".join([line, *extra]))
    if found:
        return found[-1]
    if wrappers:
        return wrappers[-1]
    usage = [line for line in lines if "error:" in line.lower()]
    return usage[-1] if usage else ""


def exit_cause(code: int, log: str) -> str:
    """Why a rollout process is gone, in a line or a few."""
    if code > 128:
        number = code - 128
        names = {9: "SIGKILL (killed, or out of memory)", 11: "SIGSEGV", 6: "SIGABRT", 15: "SIGTERM", 4: "SIGILL"}
        return f"the rollout process was ended by {names.get(number, f'signal {number}')}"
    cause = root_cause(log)
    return cause or f"the rollout process exited with code {code} and said nothing more"
