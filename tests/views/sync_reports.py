"""Sync reports as a link makes them, for panels that show measured seconds."""

from __future__ import annotations

from jvlab.sync._transaction import Outcome, SyncReport


def report(version: int = 1, move: float = 0.01, nbytes: int = 14_200) -> SyncReport:
    seconds = {
        "pack": 0.004,
        "move": move,
        "scatter": 0.002,
        "digest": 0.001,
        "pause": move + 0.01,
        "total": move + 0.02,
    }
    spans = {
        "prepare": (0.0, 0.005),
        "move": (0.005, 0.005 + move),
        "finish": (0.005 + move, 0.02 + move),
    }
    outcomes = (Outcome("r0", "committed", version, nbytes),)
    return SyncReport(version, nbytes, seconds, outcomes, transport="shm", spans=spans)
