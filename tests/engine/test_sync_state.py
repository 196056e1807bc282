"""The replica's own state in a sync: which phase may follow which, and when it is dirty. A table and random walks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvlab._errors import ConfigError, EngineDirty, SyncError
from jvlab.engine._engine_sync import SyncState
from jvlab.wire._sync_words import ORDER as PHASE_ORDER
from jvlab.wire._sync_words import Terms

ORDER = {mode: [phase.word for phase in phases] for mode, phases in PHASE_ORDER.items()}
PHASES = ["prepare", "halt", "move", "verify", "commit", "go_on"]


def step(state: SyncState, phase: str, terms: Terms | None = None) -> None:
    state.check(phase, terms)
    state.enter(phase)
    state.did(phase, terms)


def walk(state: SyncState, terms: Terms, until: str) -> None:
    for phase in ORDER[terms.mode]:
        step(state, phase, terms if phase == "prepare" else None)
        if phase == until:
            return


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_a_whole_sync(mode: str):
    state, terms = SyncState(), Terms(version=7, mode=mode)
    stages, dirty = [], []
    for phase in ORDER[mode]:
        step(state, phase, terms if phase == "prepare" else None)
        stages.append(state.stage)
        dirty.append(state.dirty)
    assert stages[-2:] == ["committed", "idle"]
    assert (state.version, state.dirty, state.halted, state.standing) == (
        7,
        False,
        False,
        "old",
    )
    assert dirty == (
        [False, False, True, True, False, False] if mode == "direct" else [False] * 6
    )


@pytest.mark.parametrize(
    ("mode", "until", "dirty", "go_on"),
    [
        ("direct", "prepare", False, False),
        ("direct", "halt", False, True),
        ("direct", "move", True, False),
        ("direct", "verify", True, False),
        ("direct", "commit", False, True),
        ("staged", "prepare", False, False),
        ("staged", "move", False, False),
        ("staged", "verify", False, False),
        ("staged", "halt", False, True),
        ("staged", "commit", False, True),
    ],
)
def test_abandoned_after(mode: str, until: str, dirty: bool, go_on: bool):
    state = SyncState()
    walk(state, Terms(version=1, mode=mode), until)
    assert state.abandoned() is go_on
    assert state.dirty is dirty
    assert state.stage == "idle"
    assert state.halted is dirty, "a dirty replica stays halted, any other does not"
    assert state.standing == ("dirty" if dirty else "old")
    if dirty:
        with pytest.raises(EngineDirty, match=r"dirty: .*version 0"):
            state.need_clean()
    else:
        state.need_clean()


def test_a_commit_that_breaks_in_staged_mode_is_dirty():
    state = SyncState()
    walk(state, Terms(version=1, mode="staged"), "halt")
    state.check("commit")
    state.enter("commit")  # and the worker fails in the middle of the exchange
    assert state.dirty
    assert state.abandoned() is False
    assert state.halted
    walk(state, Terms(version=1, mode="staged"), "go_on")
    assert (state.version, state.dirty, state.halted) == (1, False, False)


def test_go_on_said_again():
    state = SyncState()
    walk(state, Terms(version=1), "commit")
    assert state.abandoned() is True, (
        "the commit's answer was lost, and the gateway gave up"
    )
    step(state, "go_on")
    assert (state.version, state.stage, state.halted) == (1, "idle", False)
    walk(state, Terms(version=2), "move")
    state.abandoned()
    with pytest.raises(SyncError, match="without a prepare"):
        state.check("go_on")


def test_refusals_change_nothing():
    state = SyncState(version=4)
    for phase, terms, words in [
        ("halt", None, "without a prepare"),
        ("prepare", Terms(version=4), "not newer than the 4"),
    ]:
        with pytest.raises(SyncError, match=words):
            state.check(phase, terms)
    walk(state, Terms(version=5), "prepare")
    state.check("check")  # may come at any time: it changes nothing
    for phase, words in [("move", "halt is next"), ("prepare", "still prepared")]:
        with pytest.raises(SyncError, match=words):
            state.check(phase, Terms(version=6))
    assert (state.version, state.stage) == (4, "prepared")
    for field, value in [
        ("mode", "sideways"),
        ("verify", "maybe"),
        ("pause", "nap"),
        ("kv", "lose"),
        ("bucket_seconds", 0),
    ]:
        with pytest.raises(ConfigError, match=field):
            Terms(version=1, **{field: value}).check()
    with pytest.raises(SyncError, match="linked to nobody"):
        state.check_link("a")
    state.link = "a"
    state.check_link("a")
    state.link = "b"
    with pytest.raises(SyncError, match="linked to b"):
        state.check_link("a")


@given(
    st.lists(st.sampled_from([*PHASES, "abandon", "break"]), max_size=40),
    st.sampled_from(["direct", "staged"]),
)
def test_never_generates_a_mixture(orders: list[str], mode: str):
    """A model of the memory: -1, mixed, between the first write and the commit. Dirty whenever it is mixed."""
    state, memory, next_version = SyncState(), 0, 1
    for order in orders:
        if order == "abandon":
            state.abandoned()
            continue
        broken = order == "break"
        phase = (
            ORDER[state.terms.mode][state.done]
            if broken and state.terms
            else ("prepare" if broken else order)
        )
        terms = Terms(version=next_version, mode=mode) if phase == "prepare" else None
        try:
            state.check(phase, terms)
        except SyncError:
            continue
        state.enter(phase)
        writes = state.terms is not None and phase == (
            "move" if state.terms.mode == "direct" else "commit"
        )
        if writes:
            memory = -1
        if broken:
            continue
        if phase == "commit" and state.terms is not None:
            memory, next_version = state.terms.version, state.terms.version + 1
        state.did(phase, terms)
        assert state.dirty == (memory == -1)
        assert state.dirty or memory == state.version
        assert not state.dirty or state.halted, "a mixture is never served"
