"""Identifies the peer of a local socket. Abstract Unix sockets have no permissions: any local user may connect."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def same_user(end: socket.socket) -> bool:
    """Whether the peer runs as our own user, according to the kernel (SO_PEERCRED)."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.getuid()
