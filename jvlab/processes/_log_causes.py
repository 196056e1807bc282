"""Reads a rollout process's log: the stage of its start, and why it exited. Pure functions on text.

The phrases are from vLLM's log (checked against 0.32.0). If one changes, only a stage name is lost.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

STAGES = (  # (phrase in vLLM's log, the stage it begins); the last one seen counts
    ("Starting to load model", "weights"),
    ("Loading weights took", "warm-up"),
    ("Model loading took", "warm-up"),
    ("GPU KV cache size", "warm-up"),
    ("CPU KV cache size", "warm-up"),
)
_PREFIX = re.compile(r"^(\([^)]*pid=\d+\)) ?")  # "(EngineCore pid=123) "
# one space only: the indentation of what follows tells a traceback's frame from an exception
_LEVEL = re.compile(r"^(ERROR|WARNING|INFO|DEBUG|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
_RAISED = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failure|Invalid\w*|NotFound\w*))(:.*)?$")
# Python's warnings, and the line of code below one: multiprocessing's tracker writes them into others' tracebacks
_WARNED = re.compile(r"^(\S+\.py:\d+: \w*Warning: |\s+warnings\.warn\()")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")  # colours, titles, cursor
_WRAPPERS = (
    "Engine core initialization failed",
    "See root cause above",
    "See stack trace",
    "WorkerProc initialization",
    "EngineDeadError",
    "check the stack trace above for the root cause",
)
_WRAPPED = re.compile(r"failed with error '(.*)', please check the stack trace")


def without_escapes(text: str) -> str:
    """The text without a terminal's control sequences, which a notebook and a web page would show as rubbish."""
    return _ESCAPES.sub("", text).replace("\r", "\n")


def stage_of(log: str) -> str:
    """The stage of vLLM's start."""
    stage = "process"
    for phrase, begins in STAGES:
        if phrase in log:
            stage = begins
    return stage


def _plain(line: str) -> tuple[str, str]:
    """(the process that wrote a line, its text)."""
    found = _PREFIX.match(line)
    rest = line[found.end() :] if found else line
    return found[1] if found else "", _LEVEL.sub("", rest).rstrip()


def _raised(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """The exceptions in one process's lines, with their line numbers."""
    in_traceback = False
    for at, (place, line) in enumerate(lines):
        ends_traceback = in_traceback and line != "" and not line.startswith((" ", "Traceback (most recent"))
        in_traceback = line.startswith("Traceback (most recent") or (in_traceback and not ends_traceback)
        if not (_RAISED.match(line) or ends_traceback):
            continue
        # pydantic puts the details on the next lines
        after = (text for _, text in lines[at + 1 : at + 4])
        extra = itertools.takewhile(lambda text: text.startswith("  ") and "For further" not in text, after)
        yield place, "\n".join([line, *extra])


def root_cause(log: str) -> str:
    """The exception that explains an exit: the last that does not only wrap another, if there is one.

    Each process's lines are read separately: tracebacks of several processes are interleaved.
    """
    lines = [_plain(line) for line in log.splitlines()]
    by_writer: dict[str, list[tuple[int, str]]] = {}
    for place, (who, text) in enumerate(lines):
        if not _WARNED.match(text):
            by_writer.setdefault(who, []).append((place, text))
    raised = [text for _, text in sorted(item for own in by_writer.values() for item in _raised(own))]
    wraps = lambda text: any(wrapper in text for wrapper in _WRAPPERS)
    if found := [text for text in raised if not wraps(text)]:
        return found[-1]
    if quoted := [match[1] for text in raised if (match := _WRAPPED.search(text))]:
        return quoted[-1]
    if raised:
        return raised[-1]
    usage = [line for _, line in lines if "error:" in line.lower()]
    return usage[-1] if usage else ""


def exit_cause(code: int, log: str) -> str:
    """Why a rollout process exited, in a few lines at most."""
    if code > 128:
        number = code - 128
        names = {9: "SIGKILL (killed, or out of memory)", 11: "SIGSEGV", 6: "SIGABRT", 15: "SIGTERM", 4: "SIGILL"}
        return f"the rollout process was ended by {names.get(number, f'signal {number}')}"
    cause = root_cause(log)
    return cause or f"the rollout process exited with code {code} and logged no error"
