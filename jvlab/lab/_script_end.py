"""How a lab ends with the process that made it.

    a script        its lab ends with it: closed at its exit and at SIGTERM; after SIGKILL by a lease of seconds
    a notebook      its lab stays for ten minutes, so that a restarted kernel finds it again
    lease=... given the lab stays that long after the process, whatever the process is

A lab that another process holds too is only left. The gateway sees the end of a process by its connection, which a
process that is stopped, or whose threads all wait for the GIL, keeps open: the lease covers no silence, only the time
to connect again.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jvlab._deadline import Deadline
from jvlab._errors import JvlabError
from jvlab._progress import in_marimo

if TYPE_CHECKING:
    from jvlab.lab._lab import Lab

NOTEBOOK_LEASE = 600.0
SCRIPT_LEASE = 15.0
CLUSTER_LEASE = 60.0  # of a script whose gateway may be at the other end of a network
# after SIGTERM, for the script's own end; SLURM and Kubernetes kill after 30
UNWIND_SECONDS = 20.0
THREAD_SECONDS = 5.0  # after the main thread's end, for threads that Python waits for
DESCRIBE_SECONDS = 3.0
open_labs: weakref.WeakSet[Lab] = weakref.WeakSet()
_ending = threading.Lock()


def in_session() -> bool:
    """Whether somebody works in this process by hand: a notebook's kernel, or IPython."""
    module = sys.modules.get("IPython")
    shell = (
        module.get_ipython()
        if module is not None and hasattr(module, "get_ipython")
        else None
    )
    return shell is not None or in_marimo()


def default_lease(cluster: str | None) -> float:
    """The lease of a lab that was made without one."""
    if in_session():
        return NOTEBOOK_LEASE
    return SCRIPT_LEASE if cluster is None else CLUSTER_LEASE


def unwind_at_sigterm() -> None:
    """Let SIGTERM end this script as sys.exit() does, so that `with` blocks and exit handlers close its labs.

    Only where SIGTERM has no handler yet: neither the user's, nor one of a library (`jax.distributed` has one in C++,
    which Python does not know of).
    """
    if threading.current_thread() is not threading.main_thread() or in_session():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and not _caught_in_c(
        signal.SIGTERM
    ):
        signal.signal(signal.SIGTERM, _unwind)


def _caught_in_c(number: int) -> bool:
    """Whether the system calls a handler at this signal, which then is not Python's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    masks = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)


def _unwind(number: int, _: Any) -> None:
    """The handler of SIGTERM."""
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
    # Not threading.Thread: the main thread may have been interrupted while it holds the lock of its start().
    _thread.start_new_thread(_watch_the_end, (number,))
    raise SystemExit(128 + number)


# A fork (multiprocessing makes some) has no labs, and SIGTERM ends it as if there were no handler. While it is made the
# signal waits: Python drops one that comes before its own part of the fork is done.


def _before_fork() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    open_labs.clear()
    if signal.getsignal(signal.SIGTERM) is _unwind:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


_forking = threading.local()
os.register_at_fork(
    before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child
)


def _watch_the_end(number: int) -> None:
    """See to it that labs end soon after SIGTERM: the script may catch SystemExit, or its end take long."""
    unwound = Deadline(UNWIND_SECONDS)
    joining: Deadline | None = None
    while not unwound.over:
        threads = [
            thread
            for thread in threading.enumerate()
            if thread is not threading.main_thread()
        ]
        if not threading.main_thread().is_alive() and not all(
            thread.daemon for thread in threads
        ):
            joining = joining or Deadline(THREAD_SECONDS)
            if joining.over:
                close_labs()
                # SIGTERM would have ended these threads too
                os.kill(os.getpid(), number)
                return
        time.sleep(0.05)
    close_labs()


@atexit.register
def _at_exit() -> None:
    close_labs()
    for lab in list(open_labs):
        lab._leave()


def close_labs() -> None:
    """Close the labs that end with this script, unless others hold them."""
    with _ending:
        for lab in list(open_labs):
            if lab._ends_with_script and not _held_by_others(lab):
                try:
                    lab.close()
                except JvlabError as error:
                    print(f"jvlab: {lab.name} was not closed: {error}", file=sys.stderr)


def _held_by_others(lab: Lab) -> bool:
    from jvlab.wire import jvlab_pb2 as pb

    with contextlib.suppress(JvlabError):
        holders = lab.client.call(
            "Describe", pb.DescribeRequest(), DESCRIBE_SECONDS
        ).holders
        return any(holder != lab._holder for holder in holders)
    return False
