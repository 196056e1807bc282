"""Ends in other processes, channels, and the check that a test left nothing: names, files, descriptors, threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jvlab.transport import Sender, listen
from jvlab.transport._nixl import installed
from tests.transport.other_end import LABEL, Local, Remote

MAKE = {
    "slot_bytes": 1 << 16,
    "slots": 2,
    "peer": LABEL,
    "label": "the trainer of this test",
}


# processes kept for the next test: two pipes and one thread each
_idle: list[Remote] = []


def _standing() -> dict[str, Any]:
    return {
        "shared memory": sorted(
            n for n in os.listdir("/dev/shm") if "jvlab" in n and "jvlab-test" not in n
        ),
        "descriptors": len(os.listdir("/proc/self/fd")) - 2 * len(_idle),
        "threads": len(os.listdir("/proc/self/task")) - len(_idle),
    }


def _more(after: dict[str, Any], before: dict[str, Any]) -> bool:
    """Less is no leak: a thread of an earlier test may end during this one."""
    gone = set(after["shared memory"]) <= set(before["shared memory"])
    return (
        not gone
        or after["descriptors"] > before["descriptors"]
        or after["threads"] > before["threads"]
    )


@pytest.fixture(scope="session", autouse=True)
def others() -> Iterator[None]:
    """Ends the processes that were kept."""
    yield
    while _idle:
        _idle.pop().stop()


@pytest.fixture(autouse=True)
def nixl_is_here(request: pytest.FixtureRequest) -> None:
    """Skips tests of `nixl` on a machine without it."""
    call = getattr(request.node, "callspec", None)
    if call and call.params.get("transport") == "nixl" and not installed():
        pytest.skip("nixl is not installed: pip could not get it (see make setup)")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the disk transport of a test makes its folders."""
    made = tmp_path / "disk"
    made.mkdir()
    return made


@pytest.fixture
def clean(folder: Path) -> Iterator[None]:
    before = _standing()
    yield
    end = time.monotonic() + 30
    while _more(after := _standing(), before) and time.monotonic() < end:
        # threads and zombies take a moment, on a busy machine seconds
        time.sleep(0.02)
    assert not _more(after, before), f"{after}, before it {before}"
    assert list(folder.iterdir()) == []


@pytest.fixture
def remote(clean: None) -> Iterator[Callable[[], Remote]]:
    """Makes ends in processes of their own."""
    made: list[Remote] = []

    def make() -> Remote:
        made.append(_idle.pop() if _idle else Remote())
        return made[-1]

    yield make
    for other in made:
        if other.reset():
            _idle.append(other)
        else:
            other.stop()


Channel = Callable[..., tuple[Sender, Any]]


@pytest.fixture
def senders(clean: None) -> Iterator[list[Sender]]:
    """Closed at the end."""
    made: list[Sender] = []
    yield made
    for sender in made:
        sender.close()


@pytest.fixture
def channel(
    transport: str, folder: Path, senders: list[Sender], remote: Callable[[], Remote]
) -> Iterator[Channel]:
    """Makes an open channel: our sender, and the other end under control."""
    locals_: list[Local] = []

    def make(**options: Any) -> tuple[Sender, Any]:
        sender = listen(transport, **{**MAKE, "directory": str(folder), **options})
        senders.append(sender)
        other = Local() if transport == "loopback" else remote()
        if isinstance(other, Local):
            locals_.append(other)
        opening = other.start("open", endpoint=sender.endpoint(), deadline=300)
        sender.ready(300)
        opening.result(300).ok()
        return sender, other

    yield make
    for other in locals_:
        other.stop()
