"""`jvlab warm`: one process that has imported vLLM, for all labs of a user on this machine, until it is interrupted.

    gateway ──socket──▶ jvlab warm ──fork──▶ warm process of that gateway ──fork──▶ supervisors, as in `_warm.py`

A kernel that is restarted, a second notebook, a test: each makes a lab of its own, and none has to import vLLM again.
What the imports depend on must be equal on both sides, else the gateway is refused and told why; it then starts a warm
process of its own. Whoever can write to the socket can run code as this user, so that only they may.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from jvlab._errors import ConfigError
from jvlab.engine import _process, _warm
from jvlab.wire.processes import _warm as processes
from jvlab.wire.processes._supervisor import name_process

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


def run_host(device: str) -> NoReturn:
    """Listen, import, and fork a warm process for each gateway that connects. Ends this process when interrupted."""
    path = processes.shared_socket()
    if path is None:
        raise ConfigError(
            f"JVLAB_WARM={os.environ['JVLAB_WARM']} says not to", remedy="unset it"
        )
    given = dict(os.environ)
    began = time.time()
    _warm.find_title()
    name_process(HOST)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _listen(path) as listener:
        try:
            _warm.import_engine(_order(device))
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


def _order(device: str) -> _process.Order:
    """An order for any local model: what is imported does not depend on which."""
    return _process.Order(
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
        ctypes.CDLL(None).prctl(_warm.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        name_process(processes.OF_A_LAB)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
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
            code = _warm.serve(connection, request["environment"])
    finally:
        sys.stderr.flush()
        os._exit(code)


class _Facts:
    """What this process imported, and under which circumstances."""

    def __init__(self, device: str, environment: dict[str, str], began: float) -> None:
        self._key, self._began, self._files = [device, True], began, _installed()
        # vLLM sets some itself when imported: whoever has imported it in their own process passes them on
        self._environments = _relevant(environment), _relevant(dict(os.environ))

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
        if _installed() != self._files or any(
            p.stat().st_mtime > self._began for p in ROOT.rglob("*.py")
        ):
            return "jvlab or vLLM has changed since it imported them; start it again"
        before, after = self._environments
        theirs = _relevant(request["environment"])
        known = before | {
            name: value for name, value in theirs.items() if after.get(name) == value
        }
        differ = sorted(
            name
            for name in known.keys() | theirs.keys()
            if known.get(name) != theirs.get(name)
        )
        return f"other values of {', '.join(differ)}" if differ else ""


def _installed() -> tuple[str, str]:
    from jvlab.engine import _vllm_versions

    return _vllm_versions.build()


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
