"""The gateway's side of a warm process: one that has imported vLLM and forks rollout processes.

    gateway ──socket──▶ warm process ──fork──▶ supervisor ──fork──▶ rollout process
       └────────────────pipes─────────────────────▲

The first launch of a lab starts it and waits for its imports; later launches, and further replicas, only fork. A
supervisor gets its pipes from the gateway with its order and is then independent of the warm process: the rules of
`_supervisor.py` hold unchanged. The warm process ends with the gateway, or after a while without an order. Its other
half is `engine/_warm.py`.

A user may keep one for all labs: `jvlab warm` listens on a socket, and forks a warm process for each gateway that asks.
JVLAB_WARM says what a gateway does:

    unset     ask at the usual socket; if nobody listens there, or refuses, start a warm process of its own
    a path    the same, with this socket
    lab       always one of its own
    0         none: every launch starts cold
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from pathlib import Path

from jvlab._files import Plain
from jvlab.wire import _security
from jvlab.wire._security import user_of
from jvlab.wire.processes._identity import home
from jvlab.wire.processes._supervisor import KILLED

MAX_ORDER_BYTES = 128 << 10  # one message of the socket
OF_A_LAB = "jv-warm"  # name of a process that `jvlab warm` forked for a gateway
SHARED_SECONDS = 90.0  # for the reply of `jvlab warm`, which may be importing


def shared_socket() -> Path | None:
    """Where `jvlab warm` listens; None if each lab has its own warm process, or none."""
    given = os.environ.get("JVLAB_WARM", "1")
    if given in ("0", "lab"):
        return None
    return Path(given) if os.sep in given else home() / "warm.socket"


def can_fork(order: Plain) -> bool:
    """Whether a fork of a warm process can carry out this order.

    Not with variables other than jvlab's own, which imports may have read, nor with Ray, an import of its own.
    """
    return (
        os.environ.get("JVLAB_WARM", "1") != "0"
        and all(name.startswith("JVLAB_") for name in order["env"])
        and order["engine"].get("distributed_executor_backend") != "ray"
        and len(json.dumps(order)) < MAX_ORDER_BYTES
    )


def namespaces() -> list[str]:
    """Which network, processes and files this process sees: a fork sees what its parent does."""
    return [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "mnt")]


class ForkedSupervisor:
    """A supervisor forked by a warm process, with the interface of `asyncio.subprocess.Process`."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.stdin = os.fdopen(stdin, "wb", 0)
        self._stdout = stdout
        self._started = False
        self._end: asyncio.Task[bytes] | None = None
        self.stdout = asyncio.StreamReader()

    async def connect(self) -> None:
        file = os.fdopen(self._stdout, "rb", 0)
        factory = lambda: asyncio.StreamReaderProtocol(self.stdout)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            factory, file
        )

    async def started(self) -> str:
        """Its first line: the command's pid and temporary folder; empty if it was never started."""
        # no deadline: the supervisor's first act; `end` closes its input, and `Pool.wait` has one
        line = (await self.stdout.readline()).decode().strip()
        own, _, rest = line.partition(" ")
        if own.isdigit():
            self.pid = int(own)
            self._started = True
        return rest

    async def wait(self) -> int:
        """Its exit code, which it prints last; KILLED if it printed none, or was ended before it started."""
        if self.stdin.closed and not self._started:
            self.returncode = KILLED
        if self.returncode is None:
            # shared by all waiters
            self._end = self._end or asyncio.create_task(self.stdout.read())
            last = (await asyncio.shield(self._end)).decode().split()
            self.returncode = int(last[-1]) if last else KILLED
        self._transport.close()
        self.stdin.close()
        return self.returncode


class _Warm:
    """A warm process: `process`, if this gateway started it; else one that `jvlab warm` forked for this gateway.

    That one ends when the connection closes.
    """

    def __init__(
        self,
        connection: socket.socket,
        process: asyncio.subprocess.Process | None = None,
    ) -> None:
        self.connection = connection
        self._process = process

    @property
    def alive(self) -> bool:
        try:
            # no deadline: the socket does not block
            return self.connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def end(self) -> None:
        self.connection.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()  # no deadline: it was killed


class WarmProcesses:
    """The warm processes of one gateway: one per device, and for local models and those of a hub.

    A host that joined a gateway has one replica at most: it asks `jvlab warm`, and starts no process of its own.
    """

    def __init__(self, folder: Path, joined: bool = False) -> None:
        self._folder, self._starting = folder, asyncio.Lock()
        self._joined = joined
        self._known: dict[tuple[str, bool], _Warm] = {}

    async def fork(self, order: Plain, log: Path, grace: float) -> ForkedSupervisor:
        """A supervisor for this order, forked as soon as the imports are done. Raises OSError if that fails."""
        async with self._starting:
            connection = await self._connection(order)
        stdin, stdin_writer = os.pipe()
        stdout_reader, stdout = os.pipe()
        supervisor = ForkedSupervisor(stdin_writer, stdout_reader)
        try:
            message = json.dumps(
                {"order": order, "log": str(log), "grace": grace}
            ).encode()
            socket.send_fds(connection, [message], [stdin, stdout])
        except OSError:
            for end in (stdin_writer, stdout_reader):
                os.close(end)
            raise
        finally:
            for end in (stdin, stdout):
                os.close(end)
        await supervisor.connect()
        return supervisor

    async def _connection(self, order: Plain) -> socket.socket:
        """The socket of the warm process for this order, which is started if there is none."""
        # for a local model, vLLM is imported with the hub switched off
        key = order["device"], Path(order["model"]).is_dir()
        if (known := self._known.get(key)) is not None:
            if known.alive:
                return known.connection
            await known.end()
        if (known := await self._ask(key)) is None:
            if self._joined:
                raise ConnectionRefusedError("`jvlab warm` refused")
            known = await self._start(order)
        self._known[key] = known
        return known.connection

    async def _ask(self, key: tuple[str, bool]) -> _Warm | None:
        """The one that `jvlab warm` forks for us; None if it does not run or refuses, which is logged."""
        path = shared_socket()
        loop = asyncio.get_running_loop()
        if path is None or not path.is_socket():
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        request = {
            "key": key,
            "environment": _security.child_environment(),
            "folder": os.getcwd(),
            "cores": sorted(os.sched_getaffinity(0)),
            "log": str(self._folder / "warm.log"),
            "python": sys.executable,
            "package": __file__,
            "namespaces": namespaces(),
        }
        try:
            async with asyncio.timeout(SHARED_SECONDS):
                await loop.sock_connect(connection, str(path))
                # an environment holds secrets
                if (user := user_of(connection)) != os.getuid():
                    raise PermissionError(f"it belongs to user {user}")
                await loop.sock_sendall(connection, json.dumps(request).encode())
                received = await loop.sock_recv(connection, MAX_ORDER_BYTES)
                reply: Plain = json.loads(received or b'{"refused": "it ended"}')
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            reply = {"refused": str(error) or type(error).__name__}
        except BaseException:  # cancelled
            connection.close()
            raise
        if "pid" in reply:
            return _Warm(connection)
        connection.close()
        with (self._folder / "warm.log").open("a") as log:
            log.write(
                f"jvlab warm ({path}) is not used, this lab imports vLLM itself: {reply['refused']}\n"
            )
        return None

    async def _start(self, order: Plain) -> _Warm:
        """Start our own; it imports vLLM first."""
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        log = os.open(
            self._folder / "warm.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "jvlab", "rollout", "--warm"),
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env=_security.child_environment(JVLAB_ORDER=json.dumps(order)),
                start_new_session=True,
            )
        finally:
            os.close(log)
            theirs.close()
        return _Warm(connection, process)

    async def close(self) -> None:
        for warm in self._known.values():
            await warm.end()
