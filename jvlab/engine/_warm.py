"""A process that has imported vLLM and forks rollout processes with their supervisors, on orders of its gateway.

It stays single-threaded and computes nothing: threads do not survive a fork. Each fork gets the environment as the
gateway passed it; `wire/processes/_warm.py` says what may be ordered, and shows the processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from jvlab.engine import _process
from jvlab.wire.processes import _supervisor
from jvlab.wire.processes._pipe import read_secret
from jvlab.wire.processes._warm import MAX_ORDER_BYTES

IDLE_SECONDS = 900.0  # without children and orders for this long, end
PR_SET_PDEATHSIG = 1
# by front end, core or worker, besides what `_vllm_versions.check` imports
IMPORTED = (
    "jvlab.engine._engine",
    "jvlab.engine.worker._scheduler",
    "transformers.models.auto.tokenization_auto",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.llama",
    "vllm.tokenizers",
)
WORKERS = {"cpu": "vllm.v1.worker.cpu_worker", "cuda": "vllm.v1.worker.gpu_worker"}


def run_warm() -> int:
    """Import, then fork until the gateway is gone. Never returns in a child."""
    # also in the middle of an import
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    find_title()
    first = _process.Order(**json.loads(os.environ.pop("JVLAB_ORDER")))
    given = dict(os.environ)
    connection = socket.socket(fileno=os.dup(0))
    import_engine(first)
    return serve(connection, given)


def import_engine(order: _process.Order) -> None:
    """Import what the processes of an engine import."""
    _process.set_environment(order)
    from jvlab.engine import _vllm_versions

    _vllm_versions.check()
    for name in (*IMPORTED, WORKERS[order.device]):
        importlib.import_module(name)
    _refuse_cuda_context()
    gc.collect()
    gc.freeze()  # else garbage collection in children would copy these pages
    # vLLM undoes it before it collects garbage at its end: a second of copying in processes that exit right after
    gc.unfreeze = lambda: None


def serve(connection: socket.socket, environment: dict[str, str]) -> int:
    """Fork a supervisor for each order until the connection closes, or it has been idle for long."""
    children: set[int] = set()
    used = time.monotonic()
    while children or time.monotonic() - used < IDLE_SECONDS:
        if select.select([connection], [], [], 5.0)[0]:
            message, descriptors, _, _ = socket.recv_fds(connection, MAX_ORDER_BYTES, 2)
            if not message:
                return 0
            used = time.monotonic()
            children.add(
                _fork(json.loads(message), descriptors, connection, environment)
            )
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                children.discard(ended)
                used = time.monotonic()
    return 0


def _refuse_cuda_context() -> None:
    """A CUDA context does not survive a fork: without this process, launches start cold and their logs say so."""
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError(
            "importing vLLM has initialised CUDA, so this process cannot fork engines"
        )


def find_title() -> None:
    """Let setproctitle find the process title in memory, before environment variables are set or cleared.

    vLLM sets its processes' titles, and views and leak checks recognise them by these.
    """
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.getproctitle()


def _fork(
    message: dict[str, Any],
    descriptors: list[int],
    connection: socket.socket,
    environment: dict[str, str],
) -> int:
    """Fork a supervisor for this order; returns its pid."""
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    code = 1
    try:
        connection.close()
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(environment)
        start = lambda scratch, held: _Forked(
            message["order"], message["log"], scratch, held
        )
        code = _supervisor.supervise(message["grace"], start, f"{os.getpid()} ")
        os.write(1, f"{code}\n".encode())
    except BrokenPipeError:
        pass  # ended before it started
    finally:
        os._exit(code)


class _Forked:
    """A forked rollout process, with the interface of `subprocess.Popen`."""

    def __init__(
        self, order: dict[str, Any], log: str, scratch: str, held: int | None
    ) -> None:
        self._code: int | None = None
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(read)
            self.stdin = os.fdopen(write, "wb", 0)
            return
        try:
            os.close(write)
            if held is not None:
                os.close(held)
            _run_rollout(order, log, scratch, read)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(1)

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rollout", timeout)
            time.sleep(0.01)
        return code


def _run_rollout(order: dict[str, Any], log: str, scratch: str, stdin: int) -> None:
    """Run the rollout process; never returns."""
    os.setsid()
    _supervisor.name_process("jv-rollout")
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for source, number in ((stdin, 0), (out, 1), (out, 2)):
        os.dup2(source, number)
    os.close(stdin)
    os.close(out)
    os.environ.update(_supervisor.command_environment(scratch))
    tempfile.tempdir = None  # so that it is looked up again
    code = _process.run(_process.Order(**order), read_secret(), supervised=True)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
