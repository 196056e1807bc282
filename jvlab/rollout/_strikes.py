"""Faults on the engine's side, for tests of recovery: a replica or a worker dies or stalls in a phase of a sync.

The environment variable JVLAB_STRIKE names a file. While it exists, it holds one JSON object:

    {"who": "worker" | "rollout", "phase": "prepare" | "halt" | "move" | "verify" | "commit", "do": "kill" | "stall",
     "seconds": 3, "rank": 0}

Whoever it means removes the file, so it strikes once, and then kills itself (SIGKILL) or sleeps. Without the variable
nothing is looked at. The trainer's side has `jv.transport.Faults`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

VARIABLE = "JVLAB_STRIKE"


def strike(who: str, phase: str, rank: int = 0) -> None:
    """Die or sleep, if it is our turn."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    file = Path(name)
    try:
        order = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):  # nothing ordered, or it is just being written
        return
    if (order["who"], order["phase"], order.get("rank", 0)) != (who, phase, rank):
        return
    file.unlink(missing_ok=True)
    print(f"jvlab: {who} is struck in {phase}: {order['do']}", flush=True)
    if order["do"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(order.get("seconds", 3.0))
