"""What is shm's own: bytes are written and read in place, nothing has a name, room is known before it is taken."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from jvlab._errors import TransportError
from jvlab.transport import Header, Sender, listen, open_receiver
from jvlab.transport import _shm as shm


def address(view: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def both(sender: Sender) -> Any:
    opened: list[Any] = []
    thread = threading.Thread(
        target=lambda: opened.append(open_receiver(sender.endpoint(), 60))
    )
    thread.start()
    sender.ready(60)
    thread.join()
    return opened[0]


def test_a_bucket_is_filled_inside_of_the_ring(clean: None) -> None:
    sender: Any = listen("shm", slot_bytes=5000, slots=3)
    receiver = both(sender)
    base, places = address(sender._memory), []
    for bucket in range(3):
        sender.send(
            Header(1, 0, bucket, 5000),
            lambda view: places.append(address(view) - base),
            5,
        )
        receiver.release(receiver.recv(5))
    assert places == [0, 8192, 16384]  # each slot starts on a page
    sender.flush(5)
    receiver.close()
    sender.close()


def test_bytes_are_read_where_they_were_written(clean: None) -> None:
    sender: Any = listen("shm", slot_bytes=64, slots=1)
    receiver = both(sender)
    sender.send(
        Header(1, 0, 0, 4), lambda view: view.__setitem__(slice(None), b"abcd"), 5
    )
    received = receiver.recv(5)
    # no copy was made, so a write that should not be is seen
    sender._memory[:4] = b"efgh"
    assert bytes(received.data) == b"efgh"
    del received
    receiver.close()
    sender.close()


def test_a_view_in_use_outlives_the_channel(clean: None) -> None:
    sender: Any = listen("shm", slot_bytes=64, slots=1)
    receiver = both(sender)
    sender.send(
        Header(1, 0, 0, 4), lambda view: view.__setitem__(slice(None), b"abcd"), 5
    )
    data = receiver.recv(5).data
    sender.close()
    receiver.close()
    assert bytes(data) == b"abcd"  # not a segmentation fault


def test_memory_has_no_name_and_is_given_back(clean: None) -> None:
    before = sorted(os.listdir("/dev/shm"))
    sender: Any = listen("shm", slot_bytes=1 << 20, slots=3)
    assert [n for n in os.listdir("/dev/shm") if n not in before and "jvlab" in n] == []
    # other rings of this process may wait for the garbage collector
    inode = os.fstat(sender._fd).st_ino
    mapped = f" {inode} "
    assert any(
        mapped in line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "jvlab-ring" in line
    )
    sender.close()
    assert not any(
        mapped in line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "jvlab-ring" in line
    )


def test_too_little_memory_names_both_sizes(
    clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "available_bytes", lambda: 10 << 20)
    with pytest.raises(
        TransportError, match=r"needs 24\.0 MiB of memory, but 10\.0 MiB are free"
    ) as caught:
        listen("shm", slot_bytes=8 << 20, slots=3)
    assert caught.value.fields["need_bytes"] == 24 << 20


def test_available_bytes_is_a_size_of_this_machine() -> None:
    assert 1 << 20 < shm.available_bytes() < 1 << 50


def test_another_host_is_refused(clean: None) -> None:
    sender = listen("shm", slot_bytes=64, slots=1)
    endpoint = sender.endpoint()
    endpoint["sender"]["place"] = "elsewhere"
    with pytest.raises(TransportError, match="another host") as caught:
        open_receiver(endpoint, 1)
    assert "tcp" in caught.value.remedy
    sender.close()
