"""Reads a rollout process's log: the stage of its start, and why it exited. Pure functions on text.

The phrases are from vLLM's log (checked against 0.32.0). If one changes, only a stage name is lost.
"""

from __future__ import annotations

import itertools
import re
import signal
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
_LEVEL = re.compile(
    r"^(ERROR|WARNING|INFO|DEBUG|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?"
)
_RAISED = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failure|Invalid\w*|NotFound\w*))(:.*)?$"
)
# Python's warnings, and the line of code below one: multiprocessing's tracker writes them into others' tracebacks
_WARNED = re.compile(r"^(\S+\.py:\d+: \w*Warning: |\s+warnings\.warn\()")
# colours, titles, cursor
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])"
)
_WRAPPERS = (
    "Engine core initialization failed",
    "See root cause above",
    "See stack trace",
    "WorkerProc initialization",
    "EngineDeadError",
    "check the stack trace above for the root cause",
)
# A process of the engine that a signal ended: as vLLM logs it, and Python, which a worker asks for it.
_DIED = re.compile(
    r"Worker proc (\S+) died unexpectedly(?: \(exit code: (-?\d+|None)\))?"
)
_CORE_DIED = re.compile(r"Failed core proc\(s\): \{[^}]*'(EngineCore\w*)': (-\d+)")
_FATAL = re.compile(
    r"^Fatal Python error: (Illegal instruction|Segmentation fault|Bus error|Aborted|Floating-point)"
)
_FATAL_SIGNALS = {
    "Illegal instruction": signal.SIGILL,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Aborted": signal.SIGABRT,
    "Floating-point": signal.SIGFPE,
}
_MEANINGS = {
    signal.SIGILL: "illegal instruction",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error: is /dev/shm full?",
    signal.SIGABRT: "abort",
    signal.SIGFPE: "arithmetic error",
    signal.SIGKILL: "killed, or out of memory",
}
NO_BFLOAT16 = "this CPU has no bfloat16; launch with engine={'dtype': 'float32'}"
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
        ends_traceback = (
            in_traceback
            and line != ""
            and not line.startswith((" ", "Traceback (most recent"))
        )
        in_traceback = line.startswith("Traceback (most recent") or (
            in_traceback and not ends_traceback
        )
        if not (_RAISED.match(line) or ends_traceback):
            continue
        # pydantic puts the details on the next lines
        after = (text for _, text in lines[at + 1 : at + 4])
        extra = itertools.takewhile(
            lambda text: text.startswith("  ") and "For further" not in text, after
        )
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
    raised = [
        text
        for _, text in sorted(
            item for own in by_writer.values() for item in _raised(own)
        )
    ]
    wraps = lambda text: any(wrapper in text for wrapper in _WRAPPERS)
    if found := [text for text in raised if not wraps(text)]:
        return found[-1]
    if quoted := [match[1] for text in raised if (match := _WRAPPED.search(text))]:
        return quoted[-1]
    if raised:
        return raised[-1]
    usage = [line for _, line in lines if "error:" in line.lower()]
    return usage[-1] if usage else ""


def signal_name(number: int) -> str:
    """A signal with what it means: "SIGILL (illegal instruction)"."""
    try:
        found = signal.Signals(number)
    except ValueError:
        return f"signal {number}"
    return f"{found.name} ({_MEANINGS[found]})" if found in _MEANINGS else found.name


def death(log: str) -> str:
    """Which process of the engine a signal ended, and which signal; empty if the log tells of none."""
    who = ""
    number = 0
    for line in log.splitlines():
        text = _plain(line)[1]
        if found := _FATAL.match(text):
            who = who or "a process of the engine"
            number = number or _FATAL_SIGNALS[found[1]]
        elif found := _DIED.search(text):
            if found[2] not in (None, "None"):
                number = number or max(0, -int(found[2]))
            who = "a worker"
        elif found := _CORE_DIED.search(text):
            who = who or "the engine's core"
            number = number or -int(found[2])
    if not who:
        return ""
    # vLLM asked before the process had quite ended, or it left by itself
    if not number:
        return ""
    return killed(who, number, log)


def killed(who: str, number: int, log: str) -> str:
    """The sentence for a process that a signal ended; `log` tells what it computed in."""
    advice = (
        f": {NO_BFLOAT16}"
        if number == signal.SIGILL and "dtype=torch.bfloat16" in log
        else ""
    )
    return f"{who} died of {signal_name(number)}{advice}"


def exit_cause(code: int, log: str) -> str:
    """Why a rollout process exited, in a few lines at most."""
    if code > 128:
        return killed("the rollout process", code - 128, log)
    cause = death(log) or root_cause(log)
    return cause or f"the rollout process exited with code {code} and logged no error"
