"""One side of a comparison as a process of its own: an order as JSON on its stdin, a line of JSON for each result."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jvlab._errors import JvlabError
from jvlab.wire.processes._supervisor import kill_with_descendants

TEARDOWN_S = 90.0  # an engine on a card may hang when it ends
ENDED = {"ended": True}


def rows_of(
    module: str, side: str, order: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[Any]:
    """The results of `python -m module side`, as they come. If it hangs at its end, it is killed with all below it."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", module, side]
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdin=pipe, stdout=pipe, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    ended = False
    try:
        # it died before it read: its exit code says more
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(order))
            process.stdin.close()
        for line in process.stdout:
            row = json.loads(line)
            if ended := row == ENDED:
                break
            yield row
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TEARDOWN_S)
    finally:
        if process.poll() is None:
            kill_with_descendants(process.pid)
        process.wait()  # no deadline: it has ended or was killed
        process.stdout.close()
    if not ended:
        raise JvlabError(
            f"the {side} side ended with {process.returncode}",
            remedy="its own lines above say why",
        )


def read_order() -> dict[str, Any]:
    """In the side's process: what to measure."""
    return json.loads(sys.stdin.read())


def write_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """In the side's process: a line for each result. What libraries print meanwhile goes to stderr."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for row in rows:
            print(json.dumps(row), file=out, flush=True)
        print(json.dumps(ENDED), file=out, flush=True)
