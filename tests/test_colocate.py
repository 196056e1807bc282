"""Shares of one GPU, and trees that are flattened again and again."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jvlab import _colocate
from jvlab._errors import ConfigError, EngineDirty
from jvlab.layout._tree import Flattener, flatten
from jvlab.rollout._sync_state import SyncState


def test_shares_leave_room_for_both():
    given = _colocate.engine_arguments({"max_model_len": 64})
    assert given["enable_sleep_mode"]
    assert given["gpu_memory_utilization"] + _colocate.trainer_share(given["gpu_memory_utilization"]) < 1
    assert _colocate.engine_arguments({"gpu_memory_utilization": 0.3})["gpu_memory_utilization"] == 0.3
    for engine in (0.0, 0.9, 1.0):
        with pytest.raises(ConfigError, match="leaves"):
            _colocate.trainer_share(engine)


def test_jax_that_has_not_started_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_colocate, "jax_has_started", lambda: False)
    monkeypatch.setenv(_colocate.FRACTION, "")
    monkeypatch.delenv(_colocate.FRACTION)
    _colocate.share_card(0.45)
    assert _colocate.os.environ[_colocate.FRACTION] == "0.47"
    _colocate.share_card(0.6)
    assert _colocate.os.environ[_colocate.FRACTION] == "0.47", "what the user or an earlier launch set stays"


def test_weights_that_a_sleep_discarded_are_never_served():
    state = SyncState(version=3)
    state.discard()
    with pytest.raises(EngineDirty, match="level 2 discarded the weights of version 3"):
        state.need_clean()
    assert state.standing == "dirty"


def test_flattening_again():
    tree = {"a": {"w": jnp.ones((2, 3)), "b": None}, "c": [jnp.zeros(4), jnp.ones(1)]}
    flattener = Flattener()
    for scale in (1, 2):
        now = {"a": {"w": tree["a"]["w"] * scale, "b": None}, "c": [x * scale for x in tree["c"]]}
        got, wanted = flattener.arrays(now), flatten(now).arrays
        assert list(got) == list(wanted)
        assert all(got[path] is wanted[path] for path in wanted)
    other = {"a": {"w": jnp.ones((2, 3)), "x": jnp.ones(2)}, "c": []}
    assert list(flattener.arrays(other)) == list(flatten(other).arrays), "another tree is seen as another"
    shared = jnp.ones(2)
    twice = {"p": shared, "q": shared}
    assert all(np.array_equal(flattener.arrays(twice)[k], shared) for k in "pq")
    apart = {"p": jnp.zeros(2), "q": shared}
    assert np.array_equal(flattener.arrays(apart)["p"], jnp.zeros(2)), "leaves that were one are not taken for one"
