"""Fault injection in the engine, for tests of recovery: a replica or a worker dies, stalls or corrupts a weight.

The environment variable JVLAB_FAULT names a file. While it exists, it holds one JSON object:

    {"who": "worker" | "rollout", "phase": "prepare" | "halt" | "move" | "verify" | "commit" | "committed" | "check",
     "do": "kill" | "stall" | "negate" | "flip", "seconds": 3, "rank": 0, "parameter": "model.norm.weight"}

The process it names removes the file, so that a fault happens once, and then kills itself (SIGKILL), sleeps, or (a
worker, in "committed" and "check") changes a live parameter: "negate" flips every sign, "flip" one bit, and a second
fault flips it back. "committed" is after a commit, whose digests were right: only reading memory back shows the change.
Without the variable nothing is read. On the trainer's side there is `jv.transport.Faults`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

VARIABLE = "JVLAB_FAULT"


def inject_fault(who: str, phase: str, rank: int = 0, model: Any = None) -> None:
    """Die, sleep or corrupt a weight of `model`, if the file says so."""
    file = Path(os.environ[VARIABLE])
    try:
        order = json.loads(file.read_text())
    # no fault ordered, or the file is being written
    except (FileNotFoundError, ValueError):
        return
    if (order["who"], order["phase"], order.get("rank", 0)) != (who, phase, rank):
        return
    file.unlink(missing_ok=True)
    print(f"jvlab: injected fault in {who}, {phase}: {order['do']}", flush=True)
    if order["do"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if order["do"] in ("negate", "flip"):
        import torch

        live = model.get_parameter(order["parameter"]).data
        if order["do"] == "negate":
            live.neg_()
        else:
            live.as_strided((1,), (1,)).view(torch.uint8)[:1].bitwise_xor_(1)
        return
    time.sleep(order.get("seconds", 3.0))
