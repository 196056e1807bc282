"""Runs a command so that none of its processes outlives it or its parent: `python _supervisor.py LOG GRACE COMMAND...`.

    parent ──pipe──▶ supervisor ──pipe──▶ command (own session, output to LOG)

What the parent writes into its pipe is forwarded, so a secret needs no environment variable. When the pipe closes, the
command is ended; when the command exits, every process it left is killed; if the supervisor itself is killed, that
closes the command's pipe, which the command must watch. Shared memory that a killed tree leaves behind is unlinked. The
command gets a temporary folder, removed with it: vLLM does not remove its sockets. Standard library only, so that it
starts in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import getpass
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
NAME = "jv-supervisor"  # process name, which tells it from what it supervises
KILLED = 128 + signal.SIGKILL
# between two listings of /dev/shm during start-up, which cost almost nothing
LIST_SECONDS = 0.4
# between two scans of what the command's processes have mapped, which cost milliseconds
SCAN_SECONDS = 5.0
START_UP_SECONDS = 180.0
SCRATCH = "jvengine-"  # prefix of the temporary folders
UNLOCKED = "jvnew-"  # of one that its owner has not locked yet
SCRATCH_NAME = "JVLAB_SCRATCH"  # environment variable with the command's folder
# a socket's path has at most 107 characters; vLLM's are named by a UUID
MAX_SCRATCH = 107 - 37
SWEEP_SECONDS = 60.0  # in which an owner has locked its folder, or is dead


def _adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that none escapes."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def name_process(name: str) -> None:
    """Set the name that `ps` and psutil show."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Every living process below `root`, by /proc."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split(None, 2)[1])
        except OSError:
            continue  # it has exited
        children.setdefault(parent, []).append(int(name))
    found = []
    stack = [root]
    while stack:
        below = children.get(stack.pop(), [])
        found += below
        stack += below
    return found


def kill_with_descendants(root: int) -> None:
    """SIGKILL a process and every one below it."""
    for pid in [*descendants(root), root]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def shared_memory(pids: list[int]) -> set[str]:
    """Names under /dev/shm that these processes have mapped.

    By inode: a POSIX semaphore is created under a temporary name, and /proc shows only that one.
    """
    inodes = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        inodes |= {
            int(line.split(None, 5)[4])
            for line in maps.splitlines()
            if " /dev/shm/" in line
        }
    if not inodes:
        return set()
    with os.scandir("/dev/shm") as entries:
        return {entry.path for entry in entries if entry.inode() in inodes}


class Segments:
    """The shared memory that this process's descendants have mapped, collected while they live.

    A new name under /dev/shm triggers a scan at once, and a second one, as it may be mapped a little later.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._began = time.monotonic()
        self._scanned = -SCAN_SECONDS
        self._seen: set[str] = set()
        self._settled: set[str] = set()

    @property
    def pause(self) -> float:
        """Seconds until the next `update`."""
        return (
            LIST_SECONDS
            if time.monotonic() - self._began < START_UP_SECONDS
            else SCAN_SECONDS
        )

    def update(self) -> None:
        listed = set(os.listdir("/dev/shm"))
        fresh = listed - self._settled
        self._settled = self._settled & listed | self._seen & listed
        self._seen = listed
        if fresh or time.monotonic() - self._scanned >= SCAN_SECONDS:
            self.scan()

    def scan(self) -> None:
        self._scanned = time.monotonic()
        self.names |= shared_memory(descendants(os.getpid()))


def unlink_segments(names: set[str]) -> None:
    """Unlink what is left, unless a process outside the tree has it mapped."""
    left = {name for name in names if os.path.exists(name)}
    if not left:
        return
    others = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    for name in left - shared_memory(others):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def temporary_folders() -> list[str]:
    """The usual one, then those with a short name."""
    return list(dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")))


def make_scratch() -> tuple[str, int | None]:
    """A new temporary folder, readable by the owner alone, with a name short enough for sockets in it; and the
    descriptor that locks it for as long as this process lives."""
    for parent in temporary_folders():
        if len(parent) + len(SCRATCH) + 9 <= MAX_SCRATCH:
            with contextlib.suppress(OSError):
                return make_locked(parent)
    # too long for sockets: vLLM will report it
    return make_locked(tempfile.gettempdir())


def make_locked(parent: str) -> tuple[str, int | None]:
    """A new folder and its lock. It is named once it is locked: an unlocked one under that name has no owner."""
    made = tempfile.mkdtemp(prefix=UNLOCKED, dir=parent)
    handle = lock_scratch(made)
    folder = os.path.join(
        parent, SCRATCH + os.path.basename(made).removeprefix(UNLOCKED)
    )
    os.rename(made, folder)
    return folder, handle


def lock_scratch(folder: str) -> int | None:
    """Lock a folder for as long as this process lives; None if another one has it locked, or it is gone."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def sweep_scratch(
    parent: str | os.PathLike[str] | None = None, age: float = SWEEP_SECONDS
) -> None:
    """Remove folders whose supervisor and its parent were killed before they could.

    `age`: of those that have no lock yet, younger ones stay.
    """
    parents = [Path(parent)] if parent is not None else map(Path, temporary_folders())
    for folder in [
        f for at in parents for name in (SCRATCH, UNLOCKED) for f in at.glob(f"{name}*")
    ]:
        with contextlib.suppress(OSError):
            found = folder.lstat()
            old = folder.name.startswith(SCRATCH) or time.time() - found.st_ctime >= age
            ours = found.st_uid == os.getuid() and old
            if (
                ours
                and not folder.is_symlink()
                and (handle := lock_scratch(str(folder))) is not None
            ):
                shutil.rmtree(folder, ignore_errors=True)
                os.close(handle)


def command_environment(scratch: str) -> dict[str, str]:
    """The command's environment: temporary files in its own folder, the compiler's cache in the usual one."""
    own = {"TMPDIR": scratch, "VLLM_RPC_BASE_PATH": scratch, SCRATCH_NAME: scratch}
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    # torch's own default
    cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    return {"TORCHINDUCTOR_CACHE_DIR": cache, **os.environ, **own}


def _kill_all(group: int) -> None:
    """SIGKILL the command's process group and all our descendants, until none is left."""
    for _ in range(100):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        below = descendants(os.getpid())
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while True:  # reap
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                return
        time.sleep(0.02)


class Command(Protocol):
    """What is supervised: a `subprocess.Popen`, or a fork with the same interface."""

    pid: int

    @property
    def stdin(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def wait(self, timeout: float) -> int: ...


def main(argv: list[str]) -> int:
    log = argv[0]
    grace = float(argv[1])
    command = argv[2:]

    def start(scratch: str, held: int | None) -> Command:
        with open(log, "ab", buffering=0) as out:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=command_environment(scratch),
            )

    return supervise(grace, start)


def supervise(
    grace: float, start: Callable[[str, int | None], Command], prefix: str = ""
) -> int:
    """Start a command with a temporary folder, print its pid and the folder, and run until all of it has ended.

    `start` gets the folder and the descriptor that locks it, which the command must not keep.
    """
    _adopt_orphans()
    name_process(NAME)
    for number in (signal.SIGINT, signal.SIGHUP):
        # Ctrl-C in a terminal is for the parent to handle
        signal.signal(number, signal.SIG_IGN)
    ended: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop
    scratch, held = make_scratch()
    try:
        child = start(scratch, held)
        os.write(1, f"{prefix}{child.pid} {scratch}\n".encode())
        return _watch(child, grace, ended)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _watch(child: Command, grace: float, ended: list[bool]) -> int:
    """Wait for the command or end it, then kill what it left; its exit code, as a shell reports it."""
    segments = Segments()
    signalled, wake = os.pipe()
    for end in (signalled, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while child.poll() is None and not ended:
        readable, _, _ = select.select([0, signalled], [], [], segments.pause)
        if signalled in readable:
            os.read(signalled, 4096)
        if 0 in readable:
            if not (data := os.read(0, 4096)):
                break
            assert child.stdin is not None
            # it exited, or has closed its input
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(data)
                child.stdin.flush()
        segments.update()
    segments.scan()
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
        segments.scan()
    code = child.poll()
    _kill_all(child.pid)
    unlink_segments(segments.names)
    if code is None:
        return KILLED
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
