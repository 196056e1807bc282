"""`tcp` and `nixl` between namespaces: TLS by itself, and links that are cut, deaf or slow."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from jvlab.transport._nixl import installed
from tests.hosts.conftest import Host

pytestmark = pytest.mark.slow
LONG = 300.0  # a deadline that must not be waited for
NOTICED = 120.0  # a cut link is noticed in about 10 s; a busy machine may take more
BUCKET = 4 << 20


class End:
    """A process of `tcp_end.py` on a host."""

    def __init__(self, place: Host, **order: Any) -> None:
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        # to UCX both namespaces are one machine, whose processes share memory
        environment = {"UCX_TLS": "tcp,cuda_copy"}  # NIXL wants that beside a GPU
        self.process = place.python(
            "-m", "tests.hosts.tcp_end", env=environment, **streams
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it ended without a word"
        return json.loads(line)

    def until(self, key: str) -> dict[str, Any]:
        """Lines up to one with this key, or an error."""
        while True:
            line = self.line()
            if key in line or "error" in line:
                return line


@pytest.fixture(params=["tcp", "nixl"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl" and not installed():
        pytest.skip("nixl is not installed: pip could not get it (see make setup)")
    return request.param


def channel(
    transport: str,
    hosts: list[Host],
    count: int,
    deadline: float = LONG,
    **options: Any,
) -> tuple[End, End, dict[str, Any]]:
    trainer, rank = hosts[:2]
    sender = End(
        trainer,
        do="send",
        transport=transport,
        host=trainer.address,
        count=count,
        nbytes=BUCKET,
        deadline=deadline,
        **options,
    )
    endpoint = sender.until("endpoint")["endpoint"]
    taker = End(rank, do="take", endpoint=endpoint, count=count, deadline=deadline)
    assert taker.until("open")["open"]
    return sender, taker, endpoint


def test_bytes_arrive(transport: str, hosts: Callable[[int], list[Host]]):
    """Those of tcp encrypted; of nixl, what is said about them."""
    sender, taker, endpoint = channel(transport, hosts(2), count=6)
    assert endpoint["certificate"], "beyond loopback, TLS is the default"
    for k in range(6):
        assert taker.line() == {"taken": k, "right": True}
    assert taker.line() == {"done": 6}
    assert sender.until("done")["done"] == 6


@pytest.mark.parametrize("how", ["cut", "deaf sender", "deaf receiver"])
def test_a_link_that_goes_ends_both_waits(
    how: str, transport: str, hosts: Callable[[int], list[Host]]
):
    pair = hosts(2)
    for host in pair:
        # so that it happens in the middle
        host.shape("80mbit")
    sender, taker, _ = channel(transport, pair, count=200)
    assert taker.until("taken")["right"]
    start = time.monotonic()
    if how == "cut":
        pair[1].cut()
    else:
        one, other = pair if how == "deaf sender" else reversed(pair)
        one.deafen(other)
    for end in (sender, taker):
        line = end.until("done")
        assert line.get("reason") in ("lost", "closed"), line
    assert time.monotonic() - start < NOTICED


def test_deadlines_hold_on_a_link_that_was_cut(
    transport: str, hosts: Callable[[int], list[Host]]
):
    pair = hosts(2)
    sender, taker, _ = channel(transport, pair, count=10_000, deadline=3.0)
    assert taker.until("taken")["right"]
    start = time.monotonic()
    pair[1].cut()
    for end in (sender, taker):
        assert end.until("done")["reason"] == "deadline"
    assert time.monotonic() - start < NOTICED
