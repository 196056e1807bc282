"""How the bytes of a plan move: one small interface, and the ways that implement it."""

from __future__ import annotations

from jvlab.transport._channel import Header, Parcel, Receiver, Sender
from jvlab.transport._choose import NAMES, SLOT_BYTES, SLOTS, choose, listen, open_receiver
from jvlab.transport._faults import Faults, Fired
from jvlab.transport._loopback import pair

__all__ = [
    "NAMES",
    "SLOTS",
    "SLOT_BYTES",
    "Faults",
    "Fired",
    "Header",
    "Parcel",
    "Receiver",
    "Sender",
    "choose",
    "listen",
    "open_receiver",
    "pair",
]
