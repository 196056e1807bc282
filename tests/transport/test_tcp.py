"""`tcp` beyond the contract: TLS, visitors, a man in the middle, a stream that breaks."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvlab._errors import ConfigError, TransportError
from jvlab.transport import Header, Sender, listen, open_receiver
from jvlab.transport._slots import HELLO, LONGEST, frame
from jvlab.transport._tcp import SMALL, _server_context, stripes
from jvlab.wire._channels import make_certificate
from tests.transport.conftest import MAKE
from tests.transport.other_end import Remote, pattern

pytestmark = pytest.mark.slow
BIG = {**MAKE, "slot_bytes": 4 * SMALL}


class Middle:
    """A relay between receiver and sender: keeps what passes, and can cut a connection."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.seen = bytearray()
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        other: dict[socket.socket, socket.socket] = {}
        while not self._stop.is_set():
            ready = select.select([self._listener, *other], [], [], 0.05)[0]
            for sock in ready:
                if sock is self._listener:
                    ours = sock.accept()[0]
                    theirs = socket.create_connection(("127.0.0.1", self._to), 10)
                    self.pairs.append((ours, theirs))
                    other[ours] = theirs
                    other[theirs] = ours
                elif sock in other:
                    try:
                        data = sock.recv(1 << 20)
                        # before it goes on: what has arrived was seen
                        self.seen += data
                        other[sock].sendall(data)
                    except OSError:
                        data = b""
                    if data:
                        continue
                    end = other.pop(sock)
                    other.pop(end, None)
                    sock.close()
                    end.close()

    def cut(self, index: int) -> None:
        for sock in self.pairs[index]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        for sock in (self._listener, *(s for pair in self.pairs for s in pair)):
            sock.close()


@pytest.fixture
def middle(clean: None) -> Iterator[Callable[[dict[str, Any]], Middle]]:
    made: list[Middle] = []

    def make(endpoint: dict[str, Any]) -> Middle:
        made.append(Middle(endpoint["port"]))
        endpoint["port"] = made[-1].port
        return made[-1]

    yield make
    for relay in made:
        relay.close()


def put(sender: Sender, bucket: int, data: bytes) -> None:
    header = Header(1, 0, bucket, len(data))
    sender.send(header, lambda view: view.__setitem__(slice(None), data), 30)


def put_all(sender: Sender, data: list[bytes]) -> None:
    for k, part in enumerate(data):
        put(sender, k, part)
    sender.flush(60)


@given(
    st.integers(0, 4 * SMALL) | st.sampled_from([SMALL - 1, SMALL]), st.integers(1, 64)
)
def test_stripes_cover_a_bucket_once(nbytes: int, streams: int) -> None:
    parts = stripes(nbytes, streams)
    assert 1 <= len(parts) <= streams
    assert parts[0].start == 0
    assert parts[-1].stop == nbytes
    for a, b in itertools.pairwise(parts):
        assert a.stop == b.start
        assert a.start < a.stop


@pytest.mark.parametrize("tls", [True, False])
def test_what_a_listener_in_the_middle_reads(
    tls: bool,
    senders: list[Sender],
    remote: Callable[[], Remote],
    middle: Callable[[dict[str, Any]], Middle],
) -> None:
    sender = listen("tcp", **BIG, tls=tls)
    senders.append(sender)
    endpoint = sender.endpoint()
    assert bool(endpoint["certificate"]) is tls
    relay = middle(endpoint)
    rank = remote()
    opening = rank.start("open", endpoint=endpoint, deadline=60)
    sender.ready(60)
    opening.result(60).ok()
    data = [pattern(k, n) for k, n in enumerate((100, SMALL, 4 * SMALL - 1, 0))]
    taking = rank.start("take", count=len(data), deadline=60)
    put_all(sender, data)
    assert all(bucket["right"] for bucket in taking.result(60).ok())
    # without TLS everything is there to be read: the check can fail
    assert (endpoint["token"].encode() in relay.seen) is not tls
    assert (data[0] in relay.seen) is not tls


def test_beyond_loopback_it_is_tls_unless_one_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, senders: list[Sender]
) -> None:
    monkeypatch.setattr("jvlab.transport._tcp.is_loopback", lambda host: False)
    for tls, secured in ((None, True), (False, False)):
        sender = listen("tcp", **MAKE, tls=tls)
        senders.append(sender)
        assert bool(sender.endpoint()["certificate"]) is secured


def test_another_certificate_is_refused(senders: list[Sender]) -> None:
    sender = listen("tcp", **MAKE, tls=True)
    senders.append(sender)
    endpoint = {**sender.endpoint(), "certificate": make_certificate(["127.0.0.1"])[0]}
    waited: list[TransportError] = []

    def wait() -> None:
        with pytest.raises(TransportError) as caught:
            sender.ready(120)
        waited.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        with pytest.raises(TransportError, match="secure the connection") as refused:
            open_receiver(endpoint, 60)
        assert thread.is_alive(), "it waits for the right one"
    finally:
        sender.close()
        thread.join(60)
    assert "certificate" in str(refused.value)
    assert waited[0].fields["reason"] == "closed here"


@pytest.mark.parametrize("tls", [True, False])
def test_visitors_do_not_keep_the_right_one_out(
    tls: bool, senders: list[Sender], remote: Callable[[], Remote]
) -> None:
    """One that says nothing, one that speaks something else, one with a wrong token on a stream."""
    sender = listen("tcp", **MAKE, tls=tls)
    senders.append(sender)
    address = ("127.0.0.1", sender.endpoint()["port"])
    visitors = [socket.create_connection(address, 10) for _ in range(3)]
    try:
        visitors[1].sendall(b"GET / HTTP/1.1\r\n\r\n" + b"0" * 64)
        visitors[2].sendall(frame(HELLO, b"[" * LONGEST))  # too deep for JSON
        rank = remote()
        opening = rank.start("open", endpoint=sender.endpoint(), deadline=120)
        sender.ready(120)
        opening.result(120).ok()
        put(sender, 0, pattern(0, 100))
        assert rank.call("take", count=1, deadline=30).ok()[0]["right"]
    finally:
        for visitor in visitors:
            visitor.close()


def test_a_visitor_that_is_slow_has_the_time_of_one_greeting(
    senders: list[Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jvlab.transport._tcp.HELLO_SECONDS", 0.5)
    sender = listen("tcp", **MAKE)
    senders.append(sender)
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.3):
                theirs.sendall(b"0")

    thread = threading.Thread(target=drip)
    thread.start()
    start = time.monotonic()
    with ours, theirs:
        assert sender._greeted(ours) is None  # type: ignore[attr-defined]
        took = time.monotonic() - start
        over.set()
        thread.join(30)
    assert took < 5, "33 bytes at that rate take 10 s"


def test_streams_stay_known_between_two_syncs(
    senders: list[Sender], remote: Callable[[], Remote]
) -> None:
    """Firewalls forget a connection that is silent for minutes. A window may stay closed for as long as it takes."""
    sender: Any = listen("tcp", **MAKE)
    senders.append(sender)
    rank = remote()
    opening = rank.start("open", endpoint=sender.endpoint(), deadline=60)
    sender.ready(60)
    opening.result(60).ok()
    for stream in sender._streams:
        option = partial(stream._sock.getsockopt, socket.IPPROTO_TCP)
        assert option(socket.TCP_KEEPIDLE) < 60
        assert option(socket.TCP_USER_TIMEOUT) == 0


@pytest.mark.parametrize("cut", [0, 2])
def test_a_connection_that_breaks_ends_both_waits_at_once(
    cut: int,
    senders: list[Sender],
    remote: Callable[[], Remote],
    middle: Callable[[dict[str, Any]], Middle],
) -> None:
    """0: the control socket; 2: one of the streams, in the middle of a bucket."""
    sender = listen("tcp", **BIG)
    senders.append(sender)
    endpoint = sender.endpoint()
    relay = middle(endpoint)
    rank = remote()
    opening = rank.start("open", endpoint=endpoint, deadline=60)
    sender.ready(60)
    opening.result(60).ok()
    # all of a bucket may be on its way when its stream breaks: then the sender learns it from the rank alone
    taking = rank.start("take_as_a_rank", count=2, deadline=60)
    put(sender, 0, pattern(0, 4 * SMALL))
    relay.cut(cut)
    start = time.monotonic()
    with pytest.raises(TransportError) as caught:
        put_all(sender, [pattern(k, 4 * SMALL) for k in (1, 2)])
    assert caught.value.fields["reason"] in ("lost", "closed", "failed")
    sender.close()
    answer = taking.result(60)
    assert answer["reason"] in ("lost", "closed")
    assert time.monotonic() - start < 50


@pytest.mark.parametrize("streams", [0, 65])
def test_a_silly_number_of_streams(streams: int) -> None:
    with pytest.raises(ConfigError, match=f"streams={streams}"):
        listen("tcp", streams=streams)


def test_nothing_of_the_key_stays(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    context, certificate = _server_context("127.0.0.1")
    assert "BEGIN CERTIFICATE" in certificate
    assert "PRIVATE" not in certificate
    assert os.listdir(tmp_path) == []
    assert context.num_tickets == 0
