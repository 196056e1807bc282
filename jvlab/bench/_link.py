"""`jvlab bench link`: bytes from this process to another one over TCP.

The other process is on this host, or wherever `--at "COMMAND"` starts it (`ip netns exec far`, `ssh far`), and reaches
this one at `--host`. Floor: one bare socket. Peer: torch's gloo. Buckets of 16 MiB; the first few are not counted. One
after the other, twice, in turn; the better of the two counts. `nixl` is measured too where both sides have it.

(a) vs_socket_ratio: our tcp over the bare socket.
(b) vs_gloo_ratio: our tcp over gloo.
(c) tls_ratio: our tcp with TLS over the same without.
(d) nixl_ratio: nixl over our tcp.
"""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from jvlab._errors import ConfigError
from jvlab._files import Plain
from jvlab.bench._side import Lines, Side
from jvlab.transport import Header, listen, open_receiver
from jvlab.transport._nixl import installed
from jvlab.wire._channels import address_towards

BUCKET = 16 << 20
WARM = 4  # buckets that are not counted
SECONDS = 600.0  # deadline of every wait
LIMIT = timedelta(seconds=SECONDS)
ROUNDS = 2


def run_bench_link(mib: int = 1024, host: str = "127.0.0.1", at: str = "") -> Plain:
    """Measure; prints a line for each way, returns the facts."""
    ways = ("socket", "gloo", "tcp", "tcp with TLS", "nixl")
    rates = measure_link(host, at, mib, ways)
    for way, rate in rates.items():
        print(f"{way}: {rate:.3f} GB/s", flush=True)
    return {
        "vs_socket_ratio": rates["tcp"] / rates["socket"],
        "vs_gloo_ratio": rates["tcp"] / rates["gloo"],
        "tls_ratio": rates["tcp with TLS"] / rates["tcp"],
        "nixl_ratio": rates["nixl"] / rates["tcp"] if "nixl" in rates else None,
        "gb_per_s": rates,
        "mib": mib,
        "host": "loopback" if host == "127.0.0.1" else "another address",
        "elsewhere": bool(at),
        "cores": os.cpu_count(),
    }


def measure_link(
    host: str,
    at: str,
    mib: int = 256,
    ways: Sequence[str] = ("socket", "tcp", "tcp with TLS", "nixl"),
) -> dict[str, float]:
    """GB/s of each way; without `nixl` where a side lacks it."""
    count = mib * (1 << 20) // BUCKET
    if count < 1:
        raise ConfigError(f"{mib} MiB", remedy="at least 16: a bucket")
    order = {"count": count + WARM, "host": host}
    gloo = {"gloo": "gloo" in ways}
    with Side("jvlab.bench._link:taking_side", gloo, prefix=shlex.split(at)) as far:
        both = far.receive() and installed()
        rates = {way: 0.0 for way in ways if way != "nixl" or both}
        for _ in range(ROUNDS):
            for way in rates:
                seconds = _SENDERS[way.split()[0]](far, {**order, "way": way})
                rates[way] = max(rates[way], count * BUCKET / seconds / 1e9)
    return rates


# Here -----------------------------------------------------------------------------------------------------------------


def _by_socket(far: Side, order: Plain) -> float:
    with socket.create_server((order["host"], 0)) as listener:
        far.send({**order, "port": listener.getsockname()[1]})
        listener.settimeout(SECONDS)
        with listener.accept()[0] as sock:  # no deadline: it has a timeout
            sock.settimeout(SECONDS)
            data = memoryview(bytes(BUCKET))
            start = time.perf_counter()
            for k in range(order["count"]):
                if k == WARM:
                    sock.recv(1)  # no deadline: it has a timeout
                    start = time.perf_counter()
                sock.sendall(data)
            sock.recv(1)  # no deadline: it has a timeout
            seconds = time.perf_counter() - start
    far.receive()
    return seconds


def _by_gloo(far: Side, order: Plain) -> float:
    import torch

    store = _store(order["host"], 0)
    far.send({**order, "port": store.port})
    group = _gloo(0, store, order["host"])
    data = torch.zeros(BUCKET, dtype=torch.uint8)
    answer = torch.zeros(1, dtype=torch.uint8)
    start = time.perf_counter()
    for k in range(order["count"]):
        if k == WARM:
            group.recv([answer], 1, 0).wait(LIMIT)
            start = time.perf_counter()
        group.send([data], 1, 0).wait(LIMIT)
    group.recv([answer], 1, 0).wait(LIMIT)
    seconds = time.perf_counter() - start
    far.receive()
    return seconds


def _by_ours(far: Side, order: Plain) -> float:
    tls = "TLS" in order["way"]
    name = order["way"].split()[0]
    sender = listen(name, slot_bytes=BUCKET, host=order["host"], tls=tls)
    try:
        far.send({**order, "endpoint": sender.endpoint()})
        sender.ready(SECONDS)
        start = time.perf_counter()
        for k in range(order["count"]):
            if k == WARM:
                sender.flush(SECONDS)
                start = time.perf_counter()
            # what a slot holds is sent: nothing is packed here
            sender.send(Header(1, 0, k, BUCKET), lambda view: None, SECONDS)
        sender.flush(SECONDS)
        seconds = time.perf_counter() - start
    finally:
        sender.close()
    far.receive()
    return seconds


_SENDERS = {
    "socket": _by_socket,
    "gloo": _by_gloo,
    "tcp": _by_ours,
    "nixl": _by_ours,
}


def _store(host: str, port: int) -> Any:
    """Where two processes of gloo find each other; port 0 makes it, on a port that nobody else can take."""
    import torch.distributed

    # without waiting for the other, who is told the port afterwards
    return torch.distributed.TCPStore(host, port, 2, not port, LIMIT, False)


def _gloo(rank: int, store: Any, own: str) -> Any:
    import torch.distributed

    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = LIMIT
    options._devices = [gloo.create_device(hostname=own)]
    return gloo(store, rank, 2, options)


# There ----------------------------------------------------------------------------------------------------------------


def taking_side(wanted: Plain, lines: Lines) -> None:
    if wanted["gloo"]:
        import torch.distributed  # noqa: F401  # before anything is timed

    lines.send(installed())
    while True:
        order = lines.receive()
        way = order["way"]
        if way == "socket":
            _take_by_socket(order)
        elif way == "gloo":
            _take_by_gloo(order)
        else:
            _take_by_ours(order)
        lines.send("taken")


def _take_by_socket(order: Plain) -> None:
    address = (order["host"], order["port"])
    memory = memoryview(bytearray(BUCKET))
    with socket.create_connection(address, SECONDS) as sock:
        for k in range(order["count"]):
            if k == WARM:
                sock.sendall(b"1")
            have = 0
            while have < BUCKET:
                # no deadline: it has a timeout
                got = sock.recv_into(memory[have:])
                if not got:
                    raise ConnectionError("the sender ended")
                have += got
        sock.sendall(b"1")


def _take_by_gloo(order: Plain) -> None:
    import torch

    host = order["host"]
    group = _gloo(1, _store(host, order["port"]), address_towards(host))
    data = torch.zeros(BUCKET, dtype=torch.uint8)
    answer = torch.zeros(1, dtype=torch.uint8)
    for k in range(order["count"]):
        if k == WARM:
            group.send([answer], 0, 0).wait(LIMIT)
        group.recv([data], 0, 0).wait(LIMIT)
    group.send([answer], 0, 0).wait(LIMIT)


def _take_by_ours(order: Plain) -> None:
    receiver = open_receiver(order["endpoint"], SECONDS)
    for _ in range(order["count"]):
        bucket = receiver.recv(SECONDS)  # no deadline: this is one
        receiver.release(bucket)
    receiver.close()
