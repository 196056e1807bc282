"""Reads a secret from standard input, a pipe from the parent process."""

from __future__ import annotations

import os

from jvlab._errors import ConfigError

MAX_BYTES = 64 << 10


def read_secret(descriptor: int = 0) -> str:
    """The first line; reads not a byte more, so that others can read on or wait for the pipe's end."""
    line = bytearray()
    while len(line) < MAX_BYTES:
        byte = os.read(descriptor, 1)
        if byte == b"\n":
            return line.decode()
        if not byte:
            break
        line += byte
    raise ConfigError(
        "no token came through standard input",
        remedy="a gateway passes it; use jv.Lab().launch(...)",
    )
