"""Runs one command so that nothing of it outlives it or its starter: `python _supervisor.py LOG GRACE COMMAND...`.

    starter ──pipe──▶ supervisor ──pipe──▶ command (own session, output to LOG)

The starter's pipe closing, for whatever reason, ends the command; the command's ending, for whatever reason, ends
every process it left; the supervisor's own sudden death closes the command's pipe, which the command must watch.
Shared memory that a killed tree leaves behind is unlinked. Standard library only: it starts in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
SCAN_SECONDS = (0.4, 5.0)  # while the command is young and makes its segments, and later
YOUNG_SECONDS = 180.0


def _adopt_orphans() -> None:
    """On Linux, grandchildren whose parent dies become our children, so none can slip away."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Every living process below `root`, by /proc; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, stack = [], [root]
    while stack:
        below = children.get(stack.pop(), [])
        found += below
        stack += below
    return found


def shared_memory(pids: list[int]) -> set[str]:
    """Names under /dev/shm that these processes have mapped.

    By inode: a POSIX semaphore is made under another name than the one it keeps, and /proc shows only the first.
    """
    inodes = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        inodes |= {int(line.split(None, 5)[4]) for line in maps.splitlines() if " /dev/shm/" in line}
    if not inodes:
        return set()
    with os.scandir("/dev/shm") as entries:
        return {entry.path for entry in entries if entry.inode() in inodes}


def unlink_segments(names: set[str]) -> None:
    """Unlink what is left, unless somebody outside the tree has it mapped."""
    left = {name for name in names if os.path.exists(name)}
    if not left:
        return
    others = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    for name in left - shared_memory(others):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _kill_all(group: int) -> None:
    """SIGKILL for the command's group and for everything below us, until nothing is left."""
    for _ in range(100):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        below = descendants(os.getpid())
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while True:  # reap what is dead
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                return
        time.sleep(0.02)


def main(argv: list[str]) -> int:
    log, grace, command = argv[0], float(argv[1]), argv[2:]
    _adopt_orphans()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C in the starter's terminal is the starter's business
    ended: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    with open(log, "ab", buffering=0) as out:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    print(child.pid, flush=True)
    names: set[str] = set()
    began, scanned = time.monotonic(), 0.0
    while child.poll() is None and not ended:
        readable, _, _ = select.select([sys.stdin], [], [], 0.2)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            break
        now = time.monotonic()
        if now - scanned > SCAN_SECONDS[now - began > YOUNG_SECONDS]:
            scanned = now
            names |= shared_memory(descendants(os.getpid()))
    names |= shared_memory(descendants(os.getpid()))
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
        names |= shared_memory(descendants(os.getpid()))
    code = child.poll()
    _kill_all(child.pid)
    unlink_segments(names)
    if code is None:
        return 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
