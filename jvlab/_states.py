"""Every state that a header can show: its words and tone, in one table ordered from the worst to the best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """A state as headers show it. `tone` names a colour of `jvlab.views._palette.TONES`."""

    name: str
    words: str
    tone: str  # "bad", "wait", "idle" or "good"


_NAMES = {  # from the worst to the best
    "bad": ("gone", "lost", "failed", "dirty", "aborted"),
    "wait": (
        "interrupted",
        "restarting",
        "stale",
        "old",
        "process",
        "weights",
        "warm-up",
        "starting",
        "compiling",
        "stopping",
        "paused for a sync",
        "paused",
        "moving",
        "moved",
        "verified",
    ),
    "idle": ("asleep", "draining", "stopped", "closed", "waiting"),
    "good": ("serving", "running", "committed", "holds", "finished", "ready"),
}
_WORDS = {  # where they are not the name
    "dirty": "dirty: sync again",
    "stale": "stale: waits for a sync",
    "old": "old version",
    "process": "starting: process",
    "weights": "starting: weights",
    "warm-up": "starting: warm-up",
    "stopping": "stopping after this step",
    "verified": "digests equal",  # "verified" would claim more
    "waiting": "ready to step",
}
TABLE = tuple(
    State(name, _WORDS.get(name) or name, tone)
    for tone, names in _NAMES.items()
    for name in names
)
_BY_NAME = {state.name: (rank, state) for rank, state in enumerate(TABLE)}


def state(name: str) -> State:
    """A state by name; one that the table does not hold is something on its way."""
    return _BY_NAME[name][1] if name in _BY_NAME else State(name, name, "wait")


def worst(names: Iterable[str]) -> State:
    """The worst of several states; an unknown one counts as starting. "ready" if there are none."""
    return min((state(n) for n in names), key=badness, default=state("ready"))


def badness(found: State) -> int:
    """The place in the table: 0 is the worst."""
    return _BY_NAME.get(found.name, _BY_NAME["starting"])[0]
