"""How the bytes of a plan move: one small interface and its implementations.

May import layout, checkpoint and the root modules.
"""

from __future__ import annotations

from jvlab.transport._channel import Bucket, Header, Receiver, Sender
from jvlab.transport._choose import NAMES, SLOT_BYTES, SLOTS, choose, listen, open_receiver
from jvlab.transport._faults import Faults, Fired
from jvlab.transport._loopback import pair

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
