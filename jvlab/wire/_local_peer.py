"""Who is at the other end of a socket of this host. Abstract Unix sockets have no permissions: anybody may connect."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def same_user(end: socket.socket) -> bool:
    """Whether the process that connected runs as the user that we run as; the kernel says so, not the process."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.getuid()
