"""The pure choice, in a table; and fault injection on a loopback channel."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from jvlab._errors import ConfigError, TransportError
from jvlab.transport import Faults, Header, choose, listen, open_receiver, pair
from tests.transport.other_end import pattern

MIB = 1 << 20


@pytest.mark.parametrize(
    ("wanted", "same_host", "free", "name", "reason"),
    [
        ("auto", True, 100, "shm", "one host, which has 100 MiB free"),
        ("auto", True, 10, "tcp", "need 48 MiB of memory and 10 MiB are free"),
        ("auto", False, 100, "tcp", "different hosts"),
        ("shm", True, 48, "shm", "asked for"),
        ("tcp", True, 0, "tcp", "asked for"),
        ("disk", False, 0, "disk", "both hosts see"),
    ],
)
def test_choice(
    wanted: str, same_host: bool, free: int, name: str, reason: str
) -> None:
    got, why = choose(wanted, same_host, "cpu", free * MIB, 48 * MIB)
    assert got == name
    assert reason in why


@pytest.mark.parametrize(
    ("wanted", "same_host", "free", "problem", "remedy"),
    [
        ("shm", False, 100, "different hosts", "tcp"),
        ("shm", True, 10, "need 48 MiB of memory and 10 MiB", "smaller slots"),
        ("loopback", True, 100, "one process", "pair()"),
        ("pigeon", True, 100, "'pigeon'", "shm"),
        ("gloo", True, 100, "'gloo'", "tcp"),
    ],
)
def test_impossible_choice(
    wanted: str, same_host: bool, free: int, problem: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=problem.replace("(", r"\(")) as caught:
        choose(wanted, same_host, "cpu", free * MIB, 48 * MIB)
    assert remedy in caught.value.remedy


def test_nixl_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jvlab.transport._nixl.PACKAGES", ("nixl_of_nobody",))
    endpoint = {"transport": "nixl"}
    for use in (
        lambda: choose("nixl", True, "cpu", MIB, MIB),
        lambda: listen("nixl"),
        lambda: open_receiver(endpoint, 1),
    ):
        with pytest.raises(ConfigError, match="not installed here") as caught:
            use()
        assert 'pip install "jvlab[nixl]"' in caught.value.remedy
        assert 'transport="tcp"' in caught.value.remedy


def test_nixl_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jvlab.transport._nixl.installed", lambda: "nixl_cu13")
    name, why = choose("nixl", False, "gpu", MIB, MIB, "cuda")
    assert (name, "GPU memory to GPU memory" in why) == ("nixl", True)
    with pytest.raises(ConfigError, match="nixl: the parameters are on cpu"):
        choose("nixl", False, "cpu", MIB, MIB, "cuda")


def test_bytes_of_a_gpu_cross_host_memory() -> None:
    assert "cuda cross host memory" in choose("auto", True, "cuda", 100 * MIB, MIB)[1]


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="pigeon"):
        listen("pigeon")
    with pytest.raises(ConfigError, match="pigeon"):
        open_receiver({"transport": "pigeon"}, 1)
    with pytest.raises(TransportError, match="no sender of this process"):
        open_receiver({"transport": "loopback", "key": "x"}, 1)


def test_the_package_needs_no_heavy_import() -> None:
    code = "import sys, jvlab.transport; print([m for m in ('torch', 'jax', 'vllm') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


# ---- faults ---------------------------------------------------------------------------------------------------------


def through(
    faults: Faults, buckets: int = 3, nbytes: int = 64
) -> list[tuple[int, bytes]]:
    """What arrives of buckets 0, 1, …"""
    inner, receiver = pair(slots=2 * buckets)
    sender, out = faults.wrap(inner), []
    sender.ready(30)
    for bucket in range(buckets):
        data = pattern(bucket, nbytes)
        sender.send(
            Header(1, 0, bucket, nbytes),
            lambda view, data=data: view.__setitem__(slice(None), data),
            30,
        )
    for _ in range(inner.sent):
        received = receiver.recv(30)
        out.append((received.header.bucket, bytes(received.data)))
        receiver.release(received)
    sender.flush(30)
    assert sender.arrived() == len(out)
    sender.close()
    return out


RIGHT = [(bucket, pattern(bucket, 64)) for bucket in range(3)]


def test_no_fault() -> None:
    faults = Faults()
    assert through(faults) == RIGHT
    assert faults.fired == []


def test_flip_turns_one_bit_once() -> None:
    faults = Faults(flip=1)
    got = through(faults)
    assert [got[0], got[2]] == [RIGHT[0], RIGHT[2]]
    differing = [a ^ b for a, b in zip(got[1][1], RIGHT[1][1], strict=True) if a != b]
    assert len(differing) == 1
    assert differing[0].bit_count() == 1
    assert [(f.fault, f.header.bucket) for f in faults.fired] == [("flip", 1)]
    assert through(faults) == RIGHT  # a second sync shows the recovery
    assert repr(faults) == "Faults(flip at bucket 1)"


def test_flip_of_nothing_does_not_count() -> None:
    faults = Faults(flip=1)
    through(faults, nbytes=0)
    assert faults.fired == []


def test_drop_and_twice() -> None:
    assert through(Faults(drop=1)) == [RIGHT[0], RIGHT[2]]
    assert through(Faults(twice=1)) == [RIGHT[0], RIGHT[1], RIGHT[1], RIGHT[2]]


def test_delay() -> None:
    started = time.monotonic()
    assert through(Faults(delay=(2, 0.2))) == RIGHT
    assert time.monotonic() - started >= 0.2


def test_fail_and_hook() -> None:
    seen: list[Any] = []
    assert through(Faults(hook=(1, seen.append))) == RIGHT
    assert [h.bucket for h in seen] == [1]
    with pytest.raises(TransportError, match="bucket 2 fails"):
        through(Faults(fail=2))


def test_times() -> None:
    faults = Faults(drop=0, times=2)
    assert [len(through(faults)) for _ in range(3)] == [2, 2, 3]
    with pytest.raises(ConfigError):
        Faults(drop=0, times=0)
