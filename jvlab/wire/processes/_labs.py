"""The labs of this user: list, find and stop them. For `Lab.list`, `jvlab ps` and `jvlab stop`."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from jvlab._deadline import check_timeout
from jvlab._errors import ConfigError, ControlError, JvlabError, LabNotFound
from jvlab._files import read_json_object
from jvlab._states import badness, state
from jvlab._units import human_seconds
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import Client
from jvlab.wire._pool_summary import replica_state
from jvlab.wire.processes._identity import Identity, home
from jvlab.wire.processes._supervisor import NAME
from jvlab.wire.processes._warm import OF_A_LAB

QUERY_SECONDS = 3.0  # for a gateway's reply, after which it is shown as silent
KILL_SECONDS = 10.0  # of a stop's timeout, at most, for killing
KILLED_SECONDS = 1.5  # for killed processes to be gone
STATE_BYTES = 1 << 20  # limit of a lab's state file, which has a few hundred
given: LabInfo | None = None  # the lab whose `train` started this process


@dataclass(frozen=True)
class LabInfo:
    """A lab as its state file and its gateway describe it.

    `state` is "running", "silent" (its process is alive but does not reply), "elsewhere" (on another host, under the
    same home) or "unreadable" (its state file is damaged). `pools` has the state of each replica, by pool.
    """

    name: str
    state: str
    address: str = ""
    pid: int = 0
    host: str = ""
    started: float = 0.0
    holders: tuple[str, ...] = ()
    detached: bool = False
    lease: float = 0.0
    pools: dict[str, list[str]] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    token: str = field(default="", repr=False)
    # of the certificate of a lab elsewhere
    fingerprint: str = field(default="", repr=False)

    def __repr__(self) -> str:
        pools = ", ".join(self.pools) or "no pools"
        return f"LabInfo({self.name!r}, {self.state}, {pools})"

    @property
    def words(self) -> str:
        """One line: what it runs, who holds it, for how long."""
        if self.state in ("elsewhere", "unreadable"):
            return {"elsewhere": f"on {self.host}"}.get(
                self.state, f"its state file in {self.folder} is damaged"
            )
        pools = "; ".join(
            f"{pool}: {Path(self.models.get(pool, '')).name}, {_count(states)}"
            for pool, states in self.pools.items()
        )
        held = (
            "detached"
            if self.detached
            else f"held by {', '.join(self.holders) or 'nobody'}"
        )
        up = human_seconds(max(0.0, time.time() - self.started))
        return f"{pools or 'no pools'}; {held}; up {up}; pid {self.pid}"

    def plain(self) -> dict[str, Any]:
        """For JSON, without the token."""
        hidden = ("token", "fingerprint", "models")
        return {k: v for k, v in vars(self).items() if k not in hidden} | {
            "models": self.models
        }


def _count(states: list[str]) -> str:
    """How many replicas are in each state, the worst first."""
    kinds = sorted(set(states), key=lambda name: (badness(state(name)), name))
    return ", ".join(f"{states.count(name)} × {name}" for name in kinds)


def list_labs(query: bool = True) -> list[LabInfo]:
    """The labs under this user's home, newest first. State files of dead labs are removed.

    query    ask each gateway what it runs; else only its state file is read
    """
    found = []
    for file in (home() / "labs").glob("*/lab.json"):
        info = _read(file)
        if info is not None:
            found.append(_queried(info) if query else info)
    return sorted(found, key=lambda info: (-info.started, info.name))


def _read(file: Path) -> LabInfo | None:
    """The lab of a state file; None if it is another user's, or dead: then the file is removed."""
    folder = str(file.parent)
    try:
        if file.stat().st_uid != os.getuid():
            return None  # another user's, and not to be trusted
        content = read_json_object(file, STATE_BYTES, "a lab's state file")
        info = LabInfo(
            str(content["lab"]),
            "running",
            str(content["address"]),
            int(content["pid"]),
            str(content["host"]),
            float(content["started"]),
            folder=folder,
            token=str(content["token"]),
        )
    except FileNotFoundError:
        return None  # it has just ended
    except (JvlabError, OSError, KeyError, TypeError, ValueError, OverflowError):
        return LabInfo(file.parent.name, "unreadable", folder=folder)
    if info.host != platform.node():
        return replace(info, state="elsewhere")
    if (
        not 0 < info.pid < 1 << 22
        or Identity(info.pid, info.host, info.started).process() is None
    ):
        file.unlink(missing_ok=True)
        return None
    return info


def _queried(info: LabInfo) -> LabInfo:
    """A running lab with what its gateway reports; "silent" if it does not reply in time."""
    if info.state != "running":
        return info
    client = None
    try:
        client = Client(info.address, info.token)
        status = client.call("Describe", pb.DescribeRequest(), timeout=QUERY_SECONDS)
    except ControlError:
        return replace(info, state="silent")
    finally:
        if client is not None:
            client.close()
    pools = [p for p in status.pools if not p.closed]
    known = {
        "holders": tuple(status.holders),
        "detached": status.detached,
        "lease": status.lease_seconds,
        "pools": {p.pool: [_state(r, p.sync) for r in p.replicas] for p in pools},
        "models": {p.pool: p.model for p in pools},
    }
    return replace(info, **known)


def _state(replica: Any, sync: str) -> str:
    """One word: "starting", "failed", …; of one that is up the worst that is true, such as "dirty"."""
    return (
        replica_state(replica, sync).name
        if replica.state == pb.READY
        else pb.ReplicaState.Name(replica.state).lower()
    )


def find_lab(name: str | None = None) -> LabInfo:
    """The lab of this name or address, or the only one running; LabNotFound lists those that exist."""
    if not (name is None or isinstance(name, str)):
        raise ConfigError(
            f"a lab is named by a text, not by {type(name).__name__}",
            remedy="jv.Lab.list() shows the names",
        )
    if given is not None and name in (None, given.name, given.address):
        return given
    labs = list_labs(query=False)
    running = [info for info in labs if info.state == "running"]
    chosen = (
        running
        if name is None
        else [info for info in running if name in (info.name, info.address)]
    )
    if len(chosen) == 1:
        return chosen[0]
    names = [info.name for info in labs]
    listed = "".join(
        f"\n  {info.name}: {info.words}"
        for info in map(_queried, chosen if name is None else labs)
    )
    if len(chosen) > 1:
        raise LabNotFound(
            f"{len(chosen)} labs are running, so name the one you mean:{listed}",
            remedy=f"jv.Lab.attach({chosen[0].name!r}); `jvlab ps` shows them, `jvlab stop NAME` ends one",
            labs=names,
        )
    if name is not None and labs:
        text = f"no lab called {name!r} is running; there are:{listed}"
        raise LabNotFound(text, remedy="pass one of these", labs=names)
    what = f"no lab called {name!r}, and no other," if name is not None else "no lab"
    raise LabNotFound(
        f"{what} is running under {home()}",
        remedy="start one: lab = jv.Lab()",
        labs=names,
    )


def stop_lab(name: str, timeout: float = 30.0) -> dict[str, Any]:
    """End a lab, whoever holds it, and wait until none of its processes is left, all within the timeout.

    Shortly before the timeout, what is left is killed: first the gateway, whose supervisors then end their processes
    and remove temporary folders and shared memory; then the rest.
    """
    timeout = check_timeout(timeout)
    info = find_lab(name)
    started = time.monotonic()
    end = started + timeout
    reserve = min(KILL_SECONDS, timeout / 3)
    gateway = Identity(info.pid, info.host, info.started).process()
    alive: list[psutil.Process] = []
    if gateway is not None:
        with contextlib.suppress(psutil.Error):
            alive = [gateway, *processes_below(gateway)]
    count = len(alive)
    with (
        contextlib.suppress(ControlError),
        contextlib.closing(Client(info.address, info.token)) as client,
    ):
        client.call(
            "Close", pb.CloseRequest(reason="jvlab stop"), timeout=min(timeout / 4, 5.0)
        )
    _, alive = psutil.wait_procs(
        alive, timeout=max(0.0, end - reserve - time.monotonic())
    )
    killed = [process.pid for process in alive]
    first = [process for process in alive if process == gateway] or alive
    for victims, until in ((first, end - reserve / 3), (alive, end)):
        for process in victims:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(alive, timeout=max(0.0, until - time.monotonic()))
    if alive:
        left = [process.pid for process in alive]
        raise ControlError(
            f"processes of {info.name} do not end: {left}",
            remedy="they may be waiting for a device; end them by hand",
            pids=left,
        )
    (Path(info.folder) / "lab.json").unlink(missing_ok=True)
    seconds = round(time.monotonic() - started, 3)
    return {
        "stopped": info.name,
        "processes": count,
        "killed": killed,
        "seconds": seconds,
    }


def processes_below(gateway: psutil.Process) -> list[psutil.Process]:
    """A gateway's descendants, and those of a warm process that `jvlab warm` forked for it, known by its log."""
    found = gateway.children(recursive=True)
    words = gateway.cmdline()
    log = (
        str(Path(words[words.index("--folder") + 1]) / "warm.log")
        if "--folder" in words[:-1]
        else ""
    )
    for process in psutil.process_iter(["name"]) if log else ():
        with contextlib.suppress(psutil.Error, OSError):
            if process.name() == OF_A_LAB and os.readlink(
                f"/proc/{process.pid}/fd/1"
            ) == os.path.realpath(log):
                found += [process, *process.children(recursive=True)]
    return found


def kill_tree(gateway: psutil.Process) -> None:
    """Kill a gateway that does not end, and its descendants, stopped ones included.

    Not the supervisors: they notice, clean up what was left (shared memory) and end themselves.
    """
    try:
        children = processes_below(gateway)
        gateway.kill()
    except psutil.NoSuchProcess:
        return
    for child in children:
        with contextlib.suppress(psutil.Error):
            if child.name() != NAME:
                child.kill()
    psutil.wait_procs([gateway, *children], timeout=KILLED_SECONDS)
