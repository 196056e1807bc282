"""What every transport promises, tried on each: real processes for shm, tcp and disk."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jvlab._errors import ConfigError, TransportError
from jvlab.transport import Header, Sender, listen, open_receiver
from jvlab.transport._nccl import DeviceBytes
from jvlab.transport._nixl import NixlReceiver, NixlSender
from jvlab.transport._peer import Clock
from tests.fuzzing import in_turn
from tests.transport.conftest import MAKE, Channel
from tests.transport.fake_gpu import FakeGpu, Hub
from tests.transport.other_end import LABEL, Remote, pattern

pytestmark = pytest.mark.slow

BETWEEN = ["shm", "tcp", "disk", "nixl"]  # processes
SLOT = MAKE["slot_bytes"]


@pytest.fixture(params=["loopback", *BETWEEN])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


between = pytest.mark.parametrize("transport", BETWEEN, indirect=False)


# seconds that a machine with other work may take more; deadlines that must not be waited for are longer
BUSY = 15.0


def send(
    sender: Sender, bucket: int, nbytes: int = 100, deadline: float = 30.0
) -> None:
    data = pattern(bucket, nbytes)
    sender.send(
        Header(7, 2, bucket, nbytes),
        lambda view: view.__setitem__(slice(None), data),
        deadline,
    )


@contextlib.contextmanager
def raises(
    reason: str, *words: str, within: float, at_least: float = 0.0
) -> Iterator[None]:
    """A TransportError of this kind, in this time, with these words."""
    started = time.monotonic()
    with pytest.raises(TransportError) as caught:
        yield
    seconds = time.monotonic() - started
    assert caught.value.fields["reason"] == reason, str(caught.value)
    assert at_least <= seconds < within + BUSY, f"took {seconds:.2f} s"
    for word in words:
        assert word in str(caught.value)


def test_the_same_bytes_in_the_same_order(channel: Channel) -> None:
    sender, other = channel()
    sizes = [0, 1, 3, 16, 4095, 4096, 4097, 0, SLOT - 1, SLOT, 2]
    participants = other.start("take", count=len(sizes), deadline=30)
    for bucket, nbytes in enumerate(sizes):
        send(sender, bucket, nbytes)
    sender.flush(30)
    taken = participants.result(60).ok()
    assert [t["header"] for t in taken] == [
        [7, 2, bucket, nbytes] for bucket, nbytes in enumerate(sizes)
    ]
    assert all(t["right"] and t["readonly"] for t in taken)
    assert sender.arrived() == len(sizes)


def test_negative_and_large_numbers_of_a_header(channel: Channel) -> None:
    sender, other = channel()
    sender.send(Header(2**53, 2**31, 2**40, 0), lambda view: None, 10)
    assert other.call("recv", deadline=30).ok()["header"] == [2**53, 2**31, 2**40, 0]


def test_room_is_bounded(channel: Channel, folder: Path, transport: str) -> None:
    sender, other = channel()
    send(sender, 0)
    send(sender, 1)
    with raises("deadline", LABEL, "bucket 2", within=2.5, at_least=0.3):
        send(sender, 2, deadline=0.3)
    if transport == "disk":
        assert len(list(folder.rglob("*.safetensors"))) == 2
    assert not list(folder.rglob("*.part"))
    other.call("take", count=1, deadline=30).ok()
    send(sender, 2)
    assert [t["header"][2] for t in other.call("take", count=2, deadline=30).ok()] == [
        1,
        2,
    ]
    sender.flush(30)


def test_a_bucket_larger_than_a_slot_is_refused_before_it_is_filled(
    channel: Channel,
) -> None:
    sender, _ = channel()
    with pytest.raises(
        ConfigError, match=f"{SLOT + 1} bytes does not fit into a slot of {SLOT}"
    ):
        sender.send(Header(1, 0, 0, SLOT + 1), lambda view: pytest.fail("filled"), 1)


def test_flush_waits_for_the_release(channel: Channel) -> None:
    sender, other = channel()
    send(sender, 0)
    other.call("recv", deadline=30).ok()
    with raises("deadline", LABEL, "release", within=2.5, at_least=0.3):
        sender.flush(0.3)
    assert sender.arrived() == 0
    other.call("release").ok()
    sender.flush(30)
    assert sender.arrived() == 1


def test_flush_of_nothing(channel: Channel) -> None:
    channel()[0].flush(1)


def test_deadlines_name_who_was_waited_for(
    transport: str, channel: Channel, folder: Path, senders: list[Sender]
) -> None:
    alone = listen(transport, **{**MAKE, "directory": str(folder)})
    senders.append(alone)
    with raises("deadline", LABEL, "open its end", "0.3 s", within=2.5, at_least=0.3):
        alone.ready(0.3)
    _, other = channel()
    answer = other.call("recv", deadline=0.3)
    assert answer["reason"] == "deadline"
    assert "the trainer of this test" in answer["error"]
    assert 0.3 <= answer["seconds"] < 2.5 + BUSY
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="deadline"):
            alone.ready(wrong)


def test_a_failure_arrives_with_its_words(channel: Channel) -> None:
    sender, other = channel()
    send(sender, 0)
    other.call("recv", deadline=30).ok()
    other.call("fail", message="shapes differ in 'model.norm.weight' — größer").ok()
    with raises(
        "failed", "shapes differ in 'model.norm.weight' — größer", LABEL, within=1
    ):
        sender.flush(30)
    with raises("failed", "shapes differ", within=1):
        send(sender, 1)


def test_a_failure_ends_a_wait_for_room(channel: Channel) -> None:
    sender, other = channel()
    send(sender, 0)
    send(sender, 1)
    threading.Timer(0.3, lambda: other.start("fail", message="no memory")).start()
    with raises("failed", "no memory", within=2.5):
        send(sender, 2)


def test_the_receiver_closes(channel: Channel) -> None:
    sender, other = channel()
    send(sender, 0)
    threading.Timer(0.3, lambda: other.start("close")).start()
    with raises("closed", LABEL, within=2):
        sender.flush(20)


def test_a_receiver_that_closes_after_its_last_release(channel: Channel) -> None:
    """All arrived, so flush is content; only a further bucket is not."""
    sender, other = channel()
    send(sender, 0)
    send(sender, 1)
    other.call("take", count=2, deadline=30).ok()
    other.call("close").ok()
    sender.flush(30)
    sender.flush(30)
    assert sender.arrived() == 2
    with raises("closed", LABEL, within=1):
        send(sender, 2)


def test_the_sender_closes(channel: Channel) -> None:
    sender, other = channel()
    waiting = other.start("recv", deadline=20)
    time.sleep(0.2)
    sender.close()
    answer = waiting.result(60)
    assert answer["reason"] == "closed"
    assert "the trainer of this test" in answer["error"]
    assert answer["seconds"] < 2 + BUSY


def test_close_of_another_thread_ends_our_wait(channel: Channel) -> None:
    sender, _ = channel()
    send(sender, 0)
    threading.Timer(0.3, sender.close).start()
    with raises("closed here", within=2.5):
        sender.flush(20)
    sender.close()
    with raises("closed here", within=0.5):
        send(sender, 1)


def test_close_of_another_thread_ends_recv(
    transport: str, folder: Path, senders: list[Sender], remote: Callable[[], Remote]
) -> None:
    sender: Any = None
    if transport == "loopback":
        sender = listen(transport, **MAKE)
        senders.append(sender)
        endpoint = sender.endpoint()
    else:
        other = remote()
        endpoint = other.call(
            "listen", transport=transport, directory=str(folder), **MAKE
        ).ok()
        ready = other.start("ready", deadline=300)
    receiver = open_receiver(endpoint, 300)
    if transport != "loopback":
        ready.result(300).ok()
    threading.Timer(0.3, receiver.close).start()
    with raises("closed here", within=2.5):
        receiver.recv(20)
    receiver.close()


def test_two_channels_at_once(channel: Channel) -> None:
    (first, one), (second, two) = channel(), channel()
    for bucket in range(2):
        send(first, bucket, 1000)
        send(second, 10 + bucket, 2000)
    assert [t["header"][2:] for t in two.call("take", count=2, deadline=30).ok()] == [
        [10, 2000],
        [11, 2000],
    ]
    second.flush(30)
    first_taken = one.call("take", count=2, deadline=30).ok()
    assert [t["header"][2:] for t in first_taken] == [[0, 1000], [1, 1000]]
    assert all(t["right"] for t in first_taken)
    first.flush(30)


def test_misuse_is_told(
    channel: Channel, transport: str, folder: Path, senders: list[Sender]
) -> None:
    unopened = listen(transport, **{**MAKE, "directory": str(folder)})
    senders.append(unopened)
    with pytest.raises(TransportError, match=r"ready\(\) first"):
        send(unopened, 0)
    sender, other = channel()
    send(sender, 0)
    other.call("recv", deadline=30).ok()
    assert "released already" in other.call("release_again")["error"]
    for slots, size in ((0, 10), (1, 0)):
        with pytest.raises(ConfigError, match="slots of"):
            listen(transport, slots=slots, slot_bytes=size)


def test_a_filler_that_fails(channel: Channel, folder: Path) -> None:
    sender, _ = channel()

    def fill(view: memoryview) -> None:
        view[:1] = b"x"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sender.send(Header(1, 0, 0, 10), fill, 5)
    assert sender.arrived() == 0
    assert not list(folder.rglob("*.part"))


def test_an_endpoint_is_plain_values(channel: Channel) -> None:
    endpoint = channel()[0].endpoint()
    assert json.loads(json.dumps(endpoint)) == endpoint


# ---- endings of processes -------------------------------------------------------------------------------------------


@between
def test_a_killed_receiver_ends_flush(channel: Channel) -> None:
    sender, other = channel()
    send(sender, 0)
    threading.Timer(0.3, other.kill).start()
    with raises("lost", LABEL, str(other.pid), within=2):
        sender.flush(20)


@between
def test_a_killed_receiver_ends_a_wait_for_room(channel: Channel) -> None:
    sender, other = channel()
    send(sender, 0)
    send(sender, 1)
    threading.Timer(0.3, other.kill).start()
    with raises("lost", LABEL, within=2):
        send(sender, 2, deadline=20)


@between
def test_a_killed_receiver_whose_forked_child_lives(channel: Channel) -> None:
    sender, other = channel()
    child = other.call("fork").ok()
    try:
        send(sender, 0)
        threading.Timer(0.2, other.kill).start()
        with raises("lost", LABEL, within=2):
            sender.flush(20)
    finally:
        os.kill(child, signal.SIGKILL)


@between
def test_a_killed_sender_ends_recv(
    transport: str, folder: Path, clean: None, remote: Callable[[], Remote]
) -> None:
    other = remote()
    endpoint = other.call(
        "listen", transport=transport, directory=str(folder), **MAKE
    ).ok()
    ready = other.start("ready", deadline=300)
    receiver = open_receiver(endpoint, 300)
    try:
        ready.result(300).ok()
        threading.Timer(0.3, other.kill).start()
        with raises("lost", "the trainer of this test", str(other.pid), within=2):
            receiver.recv(20)
    finally:
        receiver.close()


# tcp and nixl: the next test
@pytest.mark.parametrize("transport", ["shm", "disk"])
def test_what_was_sent_before_the_kill_is_whole(
    transport: str, folder: Path, clean: None, remote: Callable[[], Remote]
) -> None:
    other = remote()
    endpoint = other.call(
        "listen", transport=transport, directory=str(folder), **MAKE
    ).ok()
    ready = other.start("ready", deadline=300)
    receiver = open_receiver(endpoint, 300)
    try:
        ready.result(300).ok()
        other.call("send", bucket=3, nbytes=5000, deadline=30).ok()
        other.kill()
        other.process.wait()
        assert bytes(receiver.recv(5).data) == pattern(3, 5000)
        with raises("lost", within=2):
            receiver.recv(20)
    finally:
        receiver.close()


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_bytes_announced_and_never_sent(
    transport: str, folder: Path, clean: None, remote: Callable[[], Remote]
) -> None:
    other = remote()
    endpoint = other.call(
        "listen", transport=transport, **{**MAKE, "slot_bytes": 64 << 20}
    ).ok()
    ready = other.start("ready", deadline=300)
    receiver = open_receiver(endpoint, 300)
    try:
        ready.result(300).ok()
        other.call("send", bucket=3, nbytes=64 << 20, deadline=30).ok()
        other.kill()
        other.process.wait()
        with raises("lost", within=2):
            receiver.recv(20)
    finally:
        receiver.close()


@between
def test_a_sender_that_died_before_it_was_reached(
    transport: str, folder: Path, clean: None, remote: Callable[[], Remote]
) -> None:
    other = remote()
    endpoint = other.call(
        "listen", transport=transport, directory=str(folder), **MAKE
    ).ok()
    other.kill()
    other.process.wait()
    with contextlib.ExitStack() as closing, raises("lost", within=2):
        # the folder of `disk` is still there: its recv notices
        receiver = open_receiver(endpoint, 20)
        closing.callback(receiver.close)
        receiver.recv(20)


@between
def test_both_killed_leaves_nothing(
    transport: str, folder: Path, clean: None, remote: Callable[[], Remote]
) -> None:
    trainer, rank = remote(), remote()
    endpoint = trainer.call(
        "listen", transport=transport, directory=str(folder), **MAKE
    ).ok()
    opening = rank.start("open", endpoint=endpoint, deadline=300)
    trainer.call("ready", deadline=300).ok()
    opening.result(300).ok()
    trainer.call("send", bucket=0, nbytes=5000, deadline=30).ok()
    for other in (trainer, rank):
        other.kill()
        other.process.wait()
    if transport == "disk":  # a folder has a name: the next sender there removes it
        assert len(list(folder.iterdir())) == 1
        listen("disk", directory=str(folder)).close()


@between
def test_a_sweep_spares_the_living(
    transport: str, channel: Channel, folder: Path
) -> None:
    sender, other = channel()
    listen(transport, **{**MAKE, "directory": str(folder)}).close()
    send(sender, 0)
    assert other.call("take", count=1, deadline=30).ok()[0]["right"]
    sender.flush(30)


@between
def test_a_stopped_receiver_meets_the_deadline(channel: Channel) -> None:
    sender, other = channel()
    other.signal(signal.SIGSTOP)
    try:
        send(sender, 0)
        with raises("deadline", LABEL, within=2.5, at_least=0.5):
            sender.flush(0.5)
        started = time.monotonic()
        sender.close()
        assert time.monotonic() - started < BUSY
    finally:
        other.signal(signal.SIGCONT)


@pytest.mark.parametrize(("transport", "tidy"), in_turn(BETWEEN, [True, False]))
def test_an_interrupt_while_sending(
    transport: str, tidy: bool, folder: Path, clean: None, remote: Callable[[], Remote]
) -> None:
    """Ctrl-C in a sender that waits for room: it raises at once, and its process leaves nothing."""
    trainer, rank = remote(), remote()
    endpoint = trainer.call(
        "listen", transport=transport, directory=str(folder), **{**MAKE, "slots": 1}
    ).ok()
    opening = rank.start("open", endpoint=endpoint, deadline=300)
    trainer.call("ready", deadline=300).ok()
    opening.result(300).ok()
    if not tidy:
        trainer.call("untidy").ok()
    trainer.call("send", bucket=0, nbytes=64, deadline=30).ok()
    full = trainer.start("send", bucket=1, nbytes=64, deadline=60)
    time.sleep(0.2)
    assert not full.done()
    trainer.spoilt = True
    trainer.signal(signal.SIGINT)
    assert trainer.process.wait(60) == -signal.SIGINT
    answer = rank.call("take", count=3, deadline=60)
    assert answer["reason"] in ("closed", "lost"), answer
    assert answer["seconds"] < 2 + BUSY


@pytest.mark.parametrize("transport", ["shm", "tcp", "nixl"])
def test_a_visitor_without_the_token_is_turned_away(
    transport: str, folder: Path, senders: list[Sender], remote: Callable[[], Remote]
) -> None:
    sender = listen(transport, **MAKE)
    senders.append(sender)
    thief, rank = remote(), remote()
    stolen = thief.start(
        "open", endpoint={**sender.endpoint(), "token": "0" * 32}, deadline=300
    )
    true = rank.start("open", endpoint=sender.endpoint(), deadline=300)
    sender.ready(300)
    true.result(300).ok()
    assert stolen.result(300)["reason"] in ("lost", "closed")
    send(sender, 0)
    assert rank.call("take", count=1, deadline=30).ok()[0]["right"]


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_on_loopback_nothing_listens_elsewhere(
    transport: str, clean: None, remote: Callable[[], Remote]
) -> None:
    other = remote()
    endpoint = other.call("listen", transport=transport, **MAKE).ok()
    ready = other.start("ready", deadline=300)
    seen = set()
    receiver = open_receiver(endpoint, 300)
    ready.result(300).ok()
    for process in (psutil.Process(other.pid), psutil.Process()):
        seen |= {
            c.laddr.ip
            for c in process.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        }
    receiver.close()
    assert seen <= {"127.0.0.1", "::1"}, seen
    assert bool(seen) is (transport == "nixl"), "tcp stops when its end is open"


@pytest.mark.parametrize("transport", ["nixl"])
@pytest.mark.parametrize("end", ["killed", "closed", "stopped"])
def test_a_receiver_that_goes_in_the_middle_of_a_write(
    end: str, transport: str, senders: list[Sender], remote: Callable[[], Remote]
) -> None:
    """NIXL's own deadlines are long: ours, or the control socket, end the wait; and closing waits for no write."""
    size = 256 << 20
    sender = listen(transport, **{**MAKE, "slot_bytes": size})
    senders.append(sender)
    other = remote()
    opening = other.start("open", endpoint=sender.endpoint(), deadline=300)
    sender.ready(300)
    opening.result(300).ok()
    # nobody takes it, so that it can't end
    sender.send(Header(7, 2, 0, size), lambda view: None, 30)
    time.sleep(0.3)
    if end == "killed":
        other.kill()
    elif end == "closed":
        other.call("close").ok()
    else:
        other.signal(signal.SIGSTOP)
    try:
        reason = {"killed": "lost", "closed": "closed", "stopped": "deadline"}[end]
        deadline = 1.0 if end == "stopped" else 60.0
        with raises(reason, LABEL, within=4):
            sender.flush(deadline)
        started = time.monotonic()
        sender.close()
        assert time.monotonic() - started < 5 + BUSY
    finally:
        other.signal(signal.SIGCONT)


@pytest.mark.parametrize("transport", ["nixl"])
def test_a_write_that_fails_is_told_and_ends_both_waits(
    transport: str, senders: list[Sender], remote: Callable[[], Remote]
) -> None:
    sender: Any = listen(transport, **MAKE)
    senders.append(sender)
    other = remote()
    opening = other.start("open", endpoint=sender.endpoint(), deadline=300)
    sender.ready(300)
    opening.result(300).ok()
    taking = other.start("take", count=1, deadline=60)
    sender._writer._there.clear()  # NIXL is given no place to write to
    send(sender, 0)
    with raises("failed", LABEL, "could not be written", within=4):
        sender.flush(30)
    with raises("failed", "could not be written", within=1):
        send(sender, 1)
    assert taking.result(60)["reason"] == "lost"


@pytest.mark.parametrize("transport", ["nixl"])
def test_slots_in_device_memory(transport: str, senders: list[Sender]) -> None:
    """GPUs of numpy arrays: a slot is written once its stream has filled it, and released once it is emptied."""
    near: Any = FakeGpu(Hub())
    sender = NixlSender(1 << 16, 2, LABEL, "trainer", "127.0.0.1", None, True, near)
    senders.append(sender)
    made: list[NixlReceiver] = []
    far: Any = FakeGpu(Hub())
    arguments = sender.endpoint(), Clock(60.0), "rank", far
    opening = threading.Thread(target=lambda: made.append(NixlReceiver(*arguments)))
    opening.start()
    sender.ready(60)
    opening.join(60)
    (receiver,) = made
    try:
        for bucket in range(5):
            gate = threading.Event()

            def fill(view: Any, bucket: int = bucket, gate: Any = gate) -> None:
                def kernel() -> bool:
                    if gate.is_set():
                        near.put(view.pointer, pattern(bucket, 5000), None)
                    return gate.is_set()

                view.stream.give(kernel)

            sender.send(Header(1, 0, bucket, 5000), fill, 30)
            time.sleep(0.05)
            agent = receiver._agent
            assert agent
            assert not agent.heard(receiver._sender_agent), "written too early"
            gate.set()
            received = receiver.recv(30)
            assert isinstance(received.data, DeviceBytes)
            assert bytes(received.data) == pattern(bucket, 5000)
            emptied: list[int] = []
            received.data.stream.give(lambda emptied=emptied: not emptied.append(1))
            receiver.release(received)
            assert emptied, "released while its scatter was still to run"
        sender.flush(30)
        assert not sender._memory, "host memory beside the GPU's"
        slots = [
            weakref.ref(memory)
            for end in (sender, receiver)
            for memory in (end._device.memory if end._device else ())
        ]
        assert len(slots) == 4
    finally:
        receiver.close()
    sender.close()
    del received, agent
    gc.collect()
    assert not any(slot() for slot in slots), "a closed end keeps device memory"
