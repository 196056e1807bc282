"""A cluster in a box: hosts are network namespaces with names and addresses of their own, joined by a bridge.

It shows addresses, routes, TLS, slow and cut links between real processes and sockets. It does not show other kernels,
other clocks, real network cards or RDMA.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NET = "10.213.7"  # no route leads there: the bridge is in a namespace, too
SECONDS = 60  # for one command, which takes milliseconds


def _ip(*words: str) -> None:
    command = ["ip", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Host:
    """One namespace: processes started in it have its network and its name."""

    def __init__(self, name: str, number: int, switch: str) -> None:
        self.name = name
        self.address = f"{NET}.{number}"
        self._port = f"p{number}"  # at the bridge
        self._switch = switch
        self.processes: list[subprocess.Popen[str]] = []
        _ip("netns", "add", name)
        try:
            _ip("link", "add", "eth0", "netns", name, "type", "veth", *self._peer())
            self._in("addr", "add", f"{self.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._in("link", "set", device, "up")
            _ip("-n", switch, "link", "set", self._port, "master", "bridge0", "up")
        except BaseException:
            _ip("netns", "del", name)
            raise

    def _peer(self) -> tuple[str, ...]:
        return ("peer", "name", self._port, "netns", self._switch)

    def _in(self, *words: str) -> None:
        _ip("-n", self.name, *words)

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """A process of this host, ended with it."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *named, *command],
            env=environment,
            text=True,
            start_new_session=True,
            **options,
        )
        self.processes.append(process)
        return process

    def python(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        return self.start(sys.executable, *arguments, **options)

    # Links ------------------------------------------------------------------------------------------------------------

    def shape(self, rate: str) -> None:
        """Both directions of its link, e.g. "1gbit"."""
        for namespace, device in ((self.name, "eth0"), (self._switch, self._port)):
            words = ["qdisc", "replace", "dev", device, "root", "tbf", "rate", rate]
            words += ["burst", "256kb", "latency", "50ms"]
            command = ["tc", "-n", namespace, *words]
            subprocess.run(command, check=True, timeout=SECONDS)

    def cut(self) -> None:
        """Its cable is pulled; sockets are not told."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def deafen(self, other: Host) -> None:
        """What it sends to `other` still arrives, and nothing comes back: answers go to a card that is not there."""
        other._in(
            *("neigh", "replace", self.address, "lladdr", "02:00:00:00:00:01"),
            *("dev", "eth0", "nud", "permanent"),
        )

    def hear(self, other: Host) -> None:
        """The end of `deafen`."""
        other._in("neigh", "del", self.address, "dev", "eth0")

    def mend(self) -> None:
        _ip("-n", self._switch, "link", "set", self._port, "up")

    def kill(self) -> None:
        """Every process of it, whoever started it."""
        command = ["ip", "netns", "pids", self.name]
        found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS)
        self.kill()
        for process in self.processes:
            process.wait(SECONDS)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe:
                    pipe.close()
        _ip("netns", "del", self.name)


@contextlib.contextmanager
def cluster(count: int) -> Iterator[list[Host]]:
    """`count` hosts that see each other."""
    # not of the process's number: a killed run leaves its names, and numbers come again
    unique = f"jv{secrets.token_hex(4)}"
    switch = f"{unique}-switch"
    hosts: list[Host] = []
    # whatever fails to end, the others are ended
    with contextlib.ExitStack() as ends:
        _ip("netns", "add", switch)
        ends.callback(_ip, "netns", "del", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for number in range(1, count + 1):
            hosts.append(Host(f"{unique}-h{number}", number, switch))
            ends.callback(hosts[-1].close)
        names = "".join(f"{host.address} {host.name}\n" for host in hosts)
        for host in hosts:
            # what `ip netns exec` puts in the place of /etc/hosts
            folder = Path("/etc/netns") / host.name
            folder.mkdir(parents=True)
            ends.callback(shutil.rmtree, folder)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        yield hosts


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where namespaces are not allowed."""
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"no network namespaces: {tool} is not installed")
    try:
        with cluster(1) as (host,):
            done = host.python("-c", "print(1)", stdout=subprocess.DEVNULL).wait(60)
            if done:
                pytest.skip("no network namespaces: a process can't enter one")
            host.shape("1gbit")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no network namespaces: {error}")


@pytest.fixture
def hosts(namespaces: None) -> Iterator[Callable[[int], list[Host]]]:
    with contextlib.ExitStack() as made:
        yield lambda count: made.enter_context(cluster(count))
