"""One end of a channel, in a process of its own: `tcp_end.py send|take`, endpoints and results as lines of JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from jvlab._errors import TransportError
from jvlab.transport import Header, listen, open_receiver

OPENING = 300.0  # seconds


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def send(
    transport: str, host: str, count: int, nbytes: int, deadline: float, **options: Any
) -> None:
    sender = listen(transport, slot_bytes=nbytes, slots=3, host=host, **options)
    say(endpoint=sender.endpoint())
    sender.ready(OPENING)
    data = bytes(range(256)) * (nbytes // 256)
    start = time.monotonic()
    for k in range(count):
        sender.send(Header(1, 0, k, nbytes), lambda view: fill(view, data), deadline)
        say(sent=k)
    sender.flush(deadline)
    say(done=count, seconds=time.monotonic() - start)
    sender.close()


def fill(view: memoryview, data: bytes) -> None:
    view[:] = data


def take(endpoint: dict[str, Any], count: int, deadline: float) -> None:
    receiver = open_receiver(endpoint, OPENING)
    say(open=True)
    for k in range(count):
        bucket = receiver.recv(deadline)
        right = bytes(bucket.data) == bytes(range(256)) * (len(bucket.data) // 256)
        receiver.release(bucket)
        say(taken=k, right=right)
    say(done=count)
    receiver.close()


if __name__ == "__main__":
    order = json.loads(sys.stdin.readline())
    last = time.monotonic()
    try:
        {"send": send, "take": take}[order.pop("do")](**order)
    except TransportError as error:
        say(error=str(error), reason=error.fields.get("reason"))
