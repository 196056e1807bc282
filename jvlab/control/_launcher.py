"""Starts a gateway, as the `jvlab gateway` command or as a process of its own, and finds those that run."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError, GatewayUnreachable, LabNotFound
from jvlab.control import _security as security

if TYPE_CHECKING:
    import psutil

START_DEADLINE = 30.0


def home() -> Path:
    """Where labs keep their state: $JVLAB_HOME, or the user's state folder."""
    if given := os.environ.get("JVLAB_HOME"):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "jvlab"


def run_gateway(arguments: Any) -> dict[str, Any]:
    """The body of `jvlab gateway`: serves until the lab ends."""
    from jvlab.control import _channels
    from jvlab.control._gateway import serve

    tls = None
    if arguments.tls_cert or arguments.tls_key:
        if not (arguments.tls_cert and arguments.tls_key):
            raise ConfigError("TLS needs both --tls-cert and --tls-key")
        tls = security.Tls(arguments.tls_cert, arguments.tls_key)
    if arguments.tls_dir:
        tls = _channels.tls_folder(Path(arguments.tls_dir), arguments.host)
    if arguments.lease <= 0 or arguments.beat <= 0 or arguments.missed_beats < 1:
        raise ConfigError("--lease, --beat and --missed-beats must be positive")
    lab = arguments.lab or f"lab-{os.getpid()}"
    folder = Path(arguments.folder) if arguments.folder else home() / "labs" / lab
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    token = os.environ.pop("JVLAB_TOKEN", None) or security.new_token()
    if arguments.token_file:
        if not Path(arguments.token_file).exists():
            _channels.write_private(arguments.token_file, token + "\n")
        token = _channels.read_token(arguments.token_file)
    try:
        asyncio.run(
            serve(
                folder, lab, arguments.host, arguments.port, token, arguments.lease, arguments.beat,
                arguments.missed_beats, tls, metrics_port=arguments.metrics_port, place=arguments.place,
            )
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        if "bind" not in str(error).lower():
            raise
        raise ConfigError(
            f"cannot listen on {arguments.host}:{arguments.port}: {error}",
            remedy="is the port taken? leave --port out to take a free one",
        ) from error
    return {"lab": lab}


def start_gateway(
    lease: float,
    beat: float,
    missed_beats: int,
    host: str,
    port: int,
    tls: security.Tls | None,
    metrics_port: int | None = None,
) -> tuple[dict[str, Any], int]:
    """Start a gateway in a session of its own, so that it outlives this process. (its lab file, its pid)."""
    lab = f"lab-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    folder = home() / "labs" / lab
    folder.mkdir(parents=True, mode=0o700)
    command = [
        sys.executable, "-m", "jvlab", "gateway", "--lab", lab, "--folder", str(folder), "--lease", str(lease),
        "--beat", str(beat), "--missed-beats", str(missed_beats), "--host", host, "--port", str(port),
    ]  # fmt: skip
    if metrics_port is not None:
        command += ["--metrics-port", str(metrics_port)]
    if tls:
        command += ["--tls-cert", tls.certificate, "--tls-key", tls.key]
    log = folder / "gateway.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            env={**os.environ, "JVLAB_TOKEN": security.new_token()},
        )  # fmt: skip
    deadline = time.monotonic() + START_DEADLINE
    while not (folder / "lab.json").exists():
        if process.poll() is not None:
            raise GatewayUnreachable(f"the gateway did not start:\n{log.read_text()[-2000:]}")
        if time.monotonic() > deadline:
            process.kill()
            raise GatewayUnreachable(f"the gateway did not start within {START_DEADLINE:g} s; its log: {log}")
        time.sleep(0.02)
    _REAPED.append(process)
    return json.loads((folder / "lab.json").read_text()), process.pid


_REAPED: list[subprocess.Popen[bytes]] = []  # kept so that `reap` can collect our own children's exit status


def reap() -> None:
    """Collect gateways that we started and that have ended, so that none stays a zombie."""
    _REAPED[:] = [process for process in _REAPED if process.poll() is None]


@dataclass(frozen=True)
class Identity:
    """One gateway process, told apart from any other that may get the same id, here or on another machine."""

    pid: int
    host: str
    started: float

    @classmethod
    def own(cls) -> Identity:
        import psutil

        return cls(os.getpid(), platform.node(), psutil.Process().create_time())

    def process(self) -> psutil.Process | None:
        """It, if it is on this machine and alive; never another one."""
        import psutil

        reap()
        try:
            found = psutil.Process(self.pid)
            same = self.host == platform.node() and abs(found.create_time() - self.started) < 2.0
            if same and found.status() != psutil.STATUS_ZOMBIE:
                return found
        except psutil.NoSuchProcess:
            return None
        reap()  # it may have ended since the first look
        return None


def last_lab() -> dict[str, Any]:
    """The lab file of the newest lab whose gateway is alive; stale ones are cleared away."""
    files = sorted((home() / "labs").glob("*/lab.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        content = json.loads(file.read_text())
        if Identity(content["pid"], content["host"], content["started"]).process() is not None:
            return content
        file.unlink(missing_ok=True)
    raise LabNotFound(f"no lab is running under {home()}", remedy="start one: lab = jv.Lab()")
