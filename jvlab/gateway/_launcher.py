"""Starts a gateway, in the `jvlab gateway` command or as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from jvlab._errors import ConfigError, GatewayUnreachable
from jvlab._files import Plain
from jvlab._names import check_name
from jvlab.gateway._serve import GatewayOptions
from jvlab.wire import _security as security
from jvlab.wire.processes._identity import _CHILDREN, home, read_secret
from jvlab.wire.processes._labs import list_labs

START_DEADLINE = 30.0


def run_gateway(arguments: Any) -> Plain:
    """The body of `jvlab gateway`: serves until the lab ends."""
    from jvlab.gateway._serve import StateFile, serve
    from jvlab.wire import _channels

    tls = None
    if arguments.tls_cert or arguments.tls_key:
        if not (arguments.tls_cert and arguments.tls_key):
            raise ConfigError("TLS needs both --tls-cert and --tls-key")
        tls = security.Tls(arguments.tls_cert, arguments.tls_key)
    if arguments.tls_dir:
        tls = _channels.tls_folder(Path(arguments.tls_dir), arguments.host)
    options = GatewayOptions(
        lease=arguments.lease,
        beat=arguments.beat,
        missed_beats=arguments.missed_beats,
        host=arguments.host,
        port=arguments.port,
        tls=tls,
        metrics_port=arguments.metrics_port,
        place=arguments.place,
        away=arguments.away,
    ).check()
    state = StateFile(arguments.state) if arguments.state else None
    default = f"lab-{os.getpid()}"
    lab = check_name("lab", arguments.lab or default)
    if state is not None:
        lab = state.agree("lab", lab, default)
        state.agree("host", options.host)
        state.agree("port", options.port, 0)
    folder = Path(arguments.folder) if arguments.folder else home() / "labs" / lab
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    exported = os.environ.pop(security.TOKEN_VARIABLE, None)
    fresh = security.new_token()
    token = read_secret() if arguments.token_stdin else exported or fresh
    if arguments.token_file:
        if not Path(arguments.token_file).exists():
            _channels.write_private(arguments.token_file, token + "\n")
        token = _channels.read_token(arguments.token_file)
    if state is not None:
        token = state.agree("token", token, fresh)
    asyncio.run(serve(folder, lab, token, options, state=state))
    return {"lab": lab}


def start_gateway(
    options: GatewayOptions, name: str | None = None
) -> tuple[Plain, int]:
    """Start a gateway in a session of its own, so that it outlives this process; (its lab file, its pid)."""
    with _claimed(name) as folder:
        return _start_in(folder, options)


@contextlib.contextmanager
def _claimed(name: str | None) -> Iterator[Path]:
    """The folder of a new lab, named after it; raises if a lab of that name is running."""
    parent = home() / "labs"
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if name is None:
        for _ in range(100):
            folder = parent / new_name()
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                yield folder
                return
        raise ConfigError(
            f"no free name for a lab in {parent}",
            remedy="pass name=, or remove old folders there",
        )
    folder = parent / name
    with open(parent / ".names", "ab") as file:
        # until the lab is up: of two starting under one name, one is refused
        _lock(file, name)
        if taken(name):
            raise ConfigError(
                f"a lab called {name!r} is running",
                remedy=f"jv.Lab.attach({name!r}) joins it, `jvlab stop {name}` ends it; or choose another name",
            )
        # logs of an earlier lab: moved away, as stages and causes are read from logs
        if folder.exists():
            shutil.rmtree(parent / f"{name}.old", ignore_errors=True)
            folder.rename(parent / f"{name}.old")
        folder.mkdir(mode=0o700)
        yield folder


def _lock(file: IO[bytes], name: str) -> None:
    """Wait for labs that are just starting under a name of their own; another process may be stopped meanwhile."""
    deadline = time.monotonic() + 2 * START_DEADLINE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise GatewayUnreachable(
                    f"waited {2 * START_DEADLINE:g} s for another lab that is just starting, to start {name!r}",
                    remedy=f"`lsof {file.name}` shows the process that starts it: end it if it is stopped",
                ) from None
        time.sleep(0.05)


def taken(name: str) -> bool:
    """Whether a lab of this name runs, or may run on another host."""
    return any(
        info.name == name and info.state != "unreadable"
        for info in list_labs(query=False)
    )


def new_name() -> str:
    """A readable random name, one of about 300,000."""
    return f"{secrets.choice(_HOW.split())}-{secrets.choice(_WHO.split())}-{secrets.randbelow(100):02d}"


_HOW = (
    "amber brave bright brisk calm clear clever cosy crisp daring deft eager early fair fast fine fond frank fresh "
    "gentle glad golden grand happy hardy honest jolly keen kind light lively lucky merry mild neat noble plucky proud "
    "quick quiet ready silver snug solid spry steady sunny swift tidy true warm wise witty"
)
_WHO = (
    "badger beaver bison crane dingo dove eagle falcon ferret finch fox gecko goose hare hawk heron ibex ibis jackal "
    "koala lark lemur lion llama lynx magpie marten mole moose newt ocelot orca otter owl panda petrel puffin quail "
    "raven robin seal shrew sparrow stoat stork swan tapir tern tiger toad trout vole walrus weasel wombat wren yak"
)


def _start_in(folder: Path, options: GatewayOptions) -> tuple[Plain, int]:
    command = [
        sys.executable,
        "-m",
        "jvlab",
        "gateway",
        "--lab",
        folder.name,
        "--folder",
        str(folder),
    ]
    command += [*options.command_line(), "--token-stdin"]
    log = folder / "gateway.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=security.child_environment(),
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended at once: handled below
        process.stdin.write(f"{security.new_token()}\n".encode())
        process.stdin.close()
    deadline = time.monotonic() + START_DEADLINE
    while not (folder / "lab.json").exists():
        if process.poll() is not None:
            raise GatewayUnreachable(
                f"the gateway did not start:\n{log.read_text()[-2000:]}"
            )
        if time.monotonic() > deadline:
            process.kill()
            raise GatewayUnreachable(
                f"the gateway did not start within {START_DEADLINE:g} s; its log: {log}"
            )
        time.sleep(0.02)
    _CHILDREN.append(process)
    return json.loads((folder / "lab.json").read_text()), process.pid
