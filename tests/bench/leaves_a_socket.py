"""What vLLM's front end does when it is killed: the files of its sockets stay where it made them."""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from typing import Any

from jvlab.bench._side import Lines


def socket_side(order: dict[str, Any], lines: Lines) -> None:
    """Make two sockets, say where, and wait for a word to end."""
    places = [
        os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir(),
        tempfile.gettempdir(),
    ]
    for place in places:
        socket.socket(socket.AF_UNIX).bind(f"{place}/{uuid.uuid4()}")
    print("what a library prints is no line")
    lines.send({"pid": os.getpid(), "places": places, "asked": order["rounds"]})
    if lines.receive() == "hang":
        lines.receive()
    raise SystemExit(3)
