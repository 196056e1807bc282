"""A process that has imported vLLM and forks rollout processes with their supervisors, on orders of its gateway.

It stays single-threaded and computes nothing: threads do not survive a fork. Each fork gets the environment as the
gateway passed it; `wire/processes/_warm.py` says what may be ordered, and shows the processes.

`jvlab warm` is one for all labs of a user on this machine, until it is interrupted:

    gateway ──socket──▶ jvlab warm ──fork──▶ warm process of that gateway ──fork──▶ supervisors

A kernel that is restarted, a second notebook, a test: each makes a lab of its own, and none has to import vLLM again.
What the imports depend on must be equal on both sides, else the gateway is refused and told why; it then starts a warm
process of its own. Whoever can write to the socket can run code as this user, so that only they may.
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
import traceback
from pathlib import Path
from typing import Any, NoReturn

from jvlab._errors import ConfigError
from jvlab.engine import _process, _vllm_versions
from jvlab.wire.processes import _supervisor
from jvlab.wire.processes import _warm as processes
from jvlab.wire.processes._identity import read_secret

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


HOST = "jv-warm-host"  # process name
REQUEST_SECONDS = 10.0
MAX_SOCKET_PATH = 107
ROOT = Path(processes.__file__).parents[2]
# Read while modules are imported, or by the dynamic linker; the rest of an environment is the gateway's own in a fork.
IMPORTS_READ = (
    *("VLLM_", "HF_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "TRITON_", "NCCL_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "LD_"),
)
AND = {"PYTHONPATH", "PYTHONHOME"}
# read later, or compared by the key
BUT = {"TORCHINDUCTOR_CACHE_DIR", "VLLM_RPC_BASE_PATH", "HF_HUB_OFFLINE"}


def run_warm() -> int:
    """Import, then fork until the gateway is gone. Never returns in a child."""
    _end_with_parent()
    _find_title()
    first = _process.Order(**json.loads(os.environ.pop("JVLAB_ORDER")))
    given = dict(os.environ)
    connection = socket.socket(fileno=os.dup(0))
    import_engine(first)
    return serve(connection, given)


def _end_with_parent() -> None:
    """Also in the middle of an import; signals of the terminal are the parent's."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def import_engine(order: _process.Order) -> None:
    """Import what the processes of an engine import."""
    _process.set_environment(order)
    _vllm_versions.check()
    for name in (*IMPORTED, WORKERS[order.device]):
        importlib.import_module(name)
    import torch

    # it would not survive a fork: without this process, launches start cold and their logs say so
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "importing vLLM has initialised CUDA, so this process cannot fork engines"
        )
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
            message, descriptors, _, _ = socket.recv_fds(
                connection, processes.MAX_ORDER_BYTES, 2
            )
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


def _find_title() -> None:
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
        start = lambda scratch, held: _ForkedRollout(
            message["order"], message["log"], scratch, held
        )
        code = _supervisor.supervise(message["grace"], start, f"{os.getpid()} ")
        os.write(1, f"{code}\n".encode())
    except BrokenPipeError:
        pass  # ended before it started
    finally:
        os._exit(code)


class _ForkedRollout:
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
        code = 1
        try:
            os.close(write)
            if held is not None:
                os.close(held)
            code = _run_rollout(order, log, scratch, read)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

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


def _run_rollout(order: dict[str, Any], log: str, scratch: str, stdin: int) -> int:
    """In the fork: run the rollout process; its exit code."""
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
    return code


# `jvlab warm` ---------------------------------------------------------------------------------------------------------


def run_host(device: str) -> NoReturn:
    """Listen, import, and fork a warm process for each gateway that connects. Ends this process when interrupted."""
    path = processes.shared_socket()
    if path is None:
        raise ConfigError(
            f"JVLAB_WARM={os.environ['JVLAB_WARM']} says not to", remedy="unset it"
        )
    given = dict(os.environ)
    began = time.time()
    _find_title()
    _supervisor.name_process(HOST)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _listen(path) as listener:
        try:
            # what is imported does not depend on which local model is ordered
            import_engine(
                _process.Order(
                    replica="warm/0",
                    index=0,
                    gateway="",
                    model=str(ROOT),
                    replicas=1,
                    tensor_parallel=1,
                    load="auto",
                    device=device,
                    engine={},
                    env={},
                )
            )
            print(
                f"jvlab warm: vLLM is imported; labs on this machine fork from {path}",
                flush=True,
            )
            _accept(listener, _Facts(device, given, began))
        except KeyboardInterrupt:
            path.unlink(missing_ok=True)
            sys.stdout.flush()
            os._exit(0)  # without the finalisers of what was imported, which complain
        finally:
            path.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    """The socket at this path, which only its owner can write to."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"{path} is too long for a socket",
            remedy="set JVLAB_WARM to a shorter path",
        )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.is_socket():
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other,
            contextlib.suppress(ConnectionRefusedError),
        ):
            other.setblocking(False)
            # its queue is full: it listens, and is stopped
            with contextlib.suppress(BlockingIOError):
                other.connect(str(path))  # no deadline: it does not block
            raise ConfigError(
                f"another `jvlab warm` listens at {path}",
                remedy="end it, or set JVLAB_WARM to a path",
            )
        path.unlink()  # left by one that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at {path}: {error}", remedy="set JVLAB_WARM to another path"
        ) from error
    finally:
        os.umask(mask)
    listener.listen(64)
    return listener


def _accept(listener: socket.socket, facts: _Facts) -> NoReturn:
    while True:
        if select.select([listener], [], [], 5.0)[0]:
            connection, _ = listener.accept()  # no deadline: there is one
            if os.fork() == 0:
                listener.close()
                _run_for_a_lab(connection, facts)
            connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue


def _run_for_a_lab(connection: socket.socket, facts: _Facts) -> NoReturn:
    """In a fork: answer one gateway, and be its warm process. Never returns."""
    code = 1
    try:
        _end_with_parent()
        os.setsid()
        _supervisor.name_process(processes.OF_A_LAB)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        connection.settimeout(REQUEST_SECONDS)
        # no deadline: the socket has a timeout
        request = json.loads(connection.recv(processes.MAX_ORDER_BYTES) or b"{}")
        if refused := facts.difference(request, processes.user_of(connection)):
            connection.send(json.dumps({"refused": refused}).encode())
        elif request:
            os.chdir(request["folder"])
            os.sched_setaffinity(0, request["cores"])
            log = os.open(request["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            for number in (1, 2):
                os.dup2(log, number)
            os.close(log)
            connection.send(json.dumps({"pid": os.getpid()}).encode())
            connection.settimeout(None)
            code = serve(connection, request["environment"])
    finally:
        sys.stderr.flush()
        os._exit(code)


class _Facts:
    """What this process imported, and under which circumstances."""

    def __init__(self, device: str, environment: dict[str, str], began: float) -> None:
        self._key = [device, True]
        self._began = began
        self._files = _vllm_versions.build()
        # vLLM sets some itself when imported: whoever has imported it in their own process passes them on
        self._before = _relevant(environment)
        self._after = _relevant(dict(os.environ))

    def difference(self, request: dict[str, Any], user: int) -> str:
        """Why a gateway must not use these imports; empty if it may."""
        if not request:
            # `_listen` of another one, which only looks whether somebody is here
            return ""
        if user != os.getuid():
            return f"it belongs to user {os.getuid()}, not {user}"
        if request["key"] != self._key:
            return f"it serves local models on {self._key[0]}"
        if (request["python"], request["package"]) != (
            sys.executable,
            processes.__file__,
        ):
            return f"it runs {sys.executable} with jvlab from {ROOT}"
        if request["namespaces"] != processes.namespaces():
            return "it is in another container, or namespace"
        if _vllm_versions.build() != self._files or any(
            p.stat().st_mtime > self._began for p in ROOT.rglob("*.py")
        ):
            return "jvlab or vLLM has changed since it imported them; start it again"
        theirs = _relevant(request["environment"])
        known = dict(self._before)
        for name, value in theirs.items():
            if self._after.get(name) == value:
                known[name] = value
        differ = sorted({name for name, _ in known.items() ^ theirs.items()})
        return f"other values of {', '.join(differ)}" if differ else ""


def _relevant(environment: dict[str, str]) -> dict[str, str]:
    """The variables that imports may have read. In a search path, what is there twice counts once: OpenCV's import
    puts its folder in front each time, also of what it inherits."""
    found = {
        k: v
        for k, v in environment.items()
        if k not in BUT and (k in AND or k.startswith(IMPORTS_READ))
    }
    if "LD_LIBRARY_PATH" in found:
        found["LD_LIBRARY_PATH"] = ":".join(
            dict.fromkeys(filter(None, found["LD_LIBRARY_PATH"].split(":")))
        )
    return found
