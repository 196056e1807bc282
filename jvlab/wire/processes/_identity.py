"""Where labs keep their state, how a gateway's process is recognised, and the secret that a process is given."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jvlab._errors import ConfigError

if TYPE_CHECKING:
    import psutil

SECRET_BYTES = 64 << 10  # at most


def home() -> Path:
    """Where labs keep their state: $JVLAB_HOME, or the user's state folder."""
    if given := os.environ.get("JVLAB_HOME"):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "jvlab"


# a process is a zombie once its first thread has ended, and can be reaped after the last
ZOMBIE_SECONDS = 5.0
# kept so that `reap` can collect their exit status
_CHILDREN: list[subprocess.Popen[bytes]] = []


def reap(zombie: int | None = None) -> None:
    """Reap gateways that this process started and that have ended; of a zombie, also when its last thread has."""
    for process in list(_CHILDREN):
        if process.pid == zombie:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ZOMBIE_SECONDS)
    _CHILDREN[:] = [process for process in _CHILDREN if process.poll() is None]


@dataclass(frozen=True)
class Identity:
    """One gateway process, told apart from another with the same pid, here or on another machine."""

    pid: int
    host: str
    started: float

    @classmethod
    def own(cls) -> Identity:
        import psutil

        return cls(os.getpid(), platform.node(), psutil.Process().create_time())

    def process(self) -> psutil.Process | None:
        """The process, if it is on this machine and alive."""
        import psutil

        reap()
        try:
            found = psutil.Process(self.pid)
            same = (
                self.host == platform.node()
                and abs(found.create_time() - self.started) < 2.0
            )
            if same and found.status() != psutil.STATUS_ZOMBIE:
                return found
        except psutil.NoSuchProcess:
            return None
        reap(self.pid if same else None)
        return None


def read_secret(descriptor: int = 0) -> str:
    """The first line of standard input, a pipe from the parent process.

    Reads not a byte more, so that others can read on or wait for the pipe's end.
    """
    line = bytearray()
    while len(line) < SECRET_BYTES:
        byte = os.read(descriptor, 1)
        if byte == b"\n":
            return line.decode()
        if not byte:
            break
        line += byte
    raise ConfigError(
        "no token came through standard input",
        remedy="a gateway passes it; use jv.Lab().launch(...)",
    )
