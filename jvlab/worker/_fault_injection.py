"""Faults on the engine's side, for tests of recovery: a replica or a worker dies, stalls or spoils a weight in a phase.

The environment variable JVLAB_STRIKE names a file. While it exists, it holds one JSON object:

    {"who": "worker" | "rollout", "phase": "prepare" | "halt" | "move" | "verify" | "commit" | "check",
     "do": "kill" | "stall" | "negate", "seconds": 3, "rank": 0, "parameter": "model.norm.weight"}

Whoever it means removes the file, so a fault happens once, and then kills itself (SIGKILL), sleeps, or (a worker,
"negate") flips the sign of a live parameter, which a second fault flips back. Without the variable nothing is read. The
trainer's side has `jv.transport.Faults`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

VARIABLE = "JVLAB_STRIKE"


def inject_fault(who: str, phase: str, rank: int = 0, model: Any = None) -> None:
    """Die, sleep or spoil a weight of `model`, if it is our turn."""
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
    if order["do"] == "negate":
        model.get_parameter(order["parameter"]).data.neg_()
        return
    time.sleep(order.get("seconds", 3.0))
