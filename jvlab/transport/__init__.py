"""How the bytes of a plan move: one small interface and its implementations.

>>> jv.transport.NAMES
('loopback', 'shm', 'tcp', 'disk', 'ipc', 'nccl', 'nixl')
>>> sender, receiver = jv.transport.pair()                     # both ends in this process
>>> header = jv.transport.Header(version=1, device=0, bucket=0, nbytes=4)
>>> sender.send(header, lambda memory: memory.__setitem__(slice(None), b"abcd"), deadline=5)
>>> bucket = receiver.recv(deadline=5)
>>> bytes(bucket.data)
b'abcd'
>>> receiver.release(bucket)
>>> sender.flush(deadline=5)

May import wire and below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvlab._errors import module_names
from jvlab.transport._choose import (
    NAMES,
    SLOT_BYTES,
    SLOTS,
    choose,
    listen,
    open_receiver,
)
from jvlab.transport._faults import Faults, Fired
from jvlab.transport._peer import Bucket, Header, Receiver, Sender, pair

__all__ = [
    "NAMES",
    "SLOTS",
    "SLOT_BYTES",
    "Bucket",
    "Faults",
    "Fired",
    "Header",
    "Receiver",
    "Sender",
    "choose",
    "listen",
    "open_receiver",
    "pair",
]

_INSTEAD = f'transports are chosen by name: lab.connect(..., transport="shm"); names: {", ".join(NAMES)}'

if not TYPE_CHECKING:  # a type checker knows the names by itself
    __dir__, __getattr__ = module_names(
        __name__, __all__, "name of jv.transport", _INSTEAD
    )
