"""What vLLM's front end does when it is killed: the files of its sockets stay where it made them."""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from multiprocessing.connection import Connection
from typing import Any


def serve(pipe: Connection, order: dict[str, Any]) -> None:
    """Make two sockets, say where, and wait for a word to end."""
    places = [
        os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir(),
        tempfile.gettempdir(),
    ]
    for place in places:
        socket.socket(socket.AF_UNIX).bind(f"{place}/{uuid.uuid4()}")
    pipe.send({"pid": os.getpid(), "places": places, "asked": order["rounds"]})
    pipe.recv()
    raise SystemExit(3)
