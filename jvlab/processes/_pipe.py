"""A secret through the pipe that is a process's standard input, whose other end its starter holds."""

from __future__ import annotations

import os

from jvlab._errors import ConfigError

LONGEST = 64 << 10


def read_secret(descriptor: int = 0) -> str:
    """The first line, and not a byte more: what follows, and the pipe's end, is for whoever reads it next."""
    line = bytearray()
    while len(line) < LONGEST:
        byte = os.read(descriptor, 1)
        if byte == b"\n":
            return line.decode()
        if not byte:
            break
        line += byte
    raise ConfigError("no token came through standard input", remedy="a gateway passes it; use jv.Lab().launch(...)")
