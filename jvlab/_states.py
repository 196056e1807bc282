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


TABLE = (
    State("gone", "gone", "bad"),
    State("lost", "lost", "bad"),
    State("failed", "failed", "bad"),
    State("dirty", "dirty: sync again", "bad"),
    State("aborted", "aborted", "bad"),
    State("interrupted", "interrupted", "wait"),
    State("restarting", "restarting", "wait"),
    State("stale", "stale: waits for a sync", "wait"),
    State("old", "old version", "wait"),
    State("process", "starting: process", "wait"),
    State("weights", "starting: weights", "wait"),
    State("warm-up", "starting: warm-up", "wait"),
    State("starting", "starting", "wait"),
    State("compiling", "compiling", "wait"),
    State("stopping", "stopping after this step", "wait"),
    State("paused for a sync", "paused for a sync", "wait"),
    State("paused", "paused", "wait"),
    State("moving", "moving", "wait"),
    State("moved", "moved", "wait"),
    State("verified", "digests equal", "wait"),  # "verified" would claim more
    State("asleep", "asleep", "idle"),
    State("draining", "draining", "idle"),
    State("stopped", "stopped", "idle"),
    State("closed", "closed", "idle"),
    State("waiting", "ready to step", "idle"),
    State("serving", "serving", "good"),
    State("running", "running", "good"),
    State("committed", "committed", "good"),
    State("holds", "holds", "good"),
    State("finished", "finished", "good"),
    State("ready", "ready", "good"),
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
