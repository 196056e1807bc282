"""Shares of one GPU, and trees that are flattened again and again."""

from __future__ import annotations

import os

import jax.numpy as jnp
import numpy as np
import pytest

from jvlab._errors import ConfigError, EngineDirty
from jvlab.engine._engine_sync import SyncState
from jvlab.lab import _launch_settings
from jvlab.layout._tree import Flattener, flatten


def test_shares_leave_room_for_both():
    given = _launch_settings.engine_arguments({"max_model_len": 64})
    assert given["enable_sleep_mode"]
    assert (
        given["gpu_memory_utilization"]
        + _launch_settings.trainer_share(given["gpu_memory_utilization"])
        < 1
    )
    assert (
        _launch_settings.engine_arguments({"gpu_memory_utilization": 0.3})[
            "gpu_memory_utilization"
        ]
        == 0.3
    )
    for engine in (0.0, 0.9, 1.0):
        with pytest.raises(ConfigError, match="leaves"):
            _launch_settings.trainer_share(engine)


def test_jax_that_has_not_started_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_launch_settings, "jax_has_started", lambda: False)
    for name in (
        _launch_settings.FRACTION,
        _launch_settings.OLD_FRACTION,
        _launch_settings.ALLOCATOR,
    ):
        # so that it is put back afterwards, whatever is set meanwhile
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    _launch_settings.share_card(0.45)
    assert os.environ[_launch_settings.FRACTION] == "0.47"
    assert os.environ[_launch_settings.ALLOCATOR] == "cuda_async", (
        "the one that takes more and gives it back"
    )
    _launch_settings.share_card(0.6)
    assert os.environ[_launch_settings.FRACTION] == "0.47", (
        "what the user or an earlier launch set stays"
    )
    monkeypatch.delenv(_launch_settings.FRACTION)
    monkeypatch.setenv(_launch_settings.OLD_FRACTION, "0.3")
    _launch_settings.share_card(0.45)
    assert _launch_settings.FRACTION not in os.environ, (
        "JAX refuses to start with both names"
    )


def test_what_was_set_is_what_jax_reads(monkeypatch: pytest.MonkeyPatch):
    """The names are JAX's: its own reader of them knows the values."""
    from jaxlib import xla_client

    monkeypatch.delenv(_launch_settings.OLD_FRACTION, raising=False)
    monkeypatch.setenv(_launch_settings.FRACTION, "0.47")
    monkeypatch.setenv(_launch_settings.ALLOCATOR, _launch_settings.ELASTIC)
    options = xla_client.generate_pjrt_gpu_plugin_options()
    assert (options["memory_fraction"], options["allocator"]) == (0.47, "cuda_async")


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
        now = {
            "a": {"w": tree["a"]["w"] * scale, "b": None},
            "c": [x * scale for x in tree["c"]],
        }
        got, wanted = flattener.arrays(now), flatten(now).arrays
        assert list(got) == list(wanted)
        assert all(got[path] is wanted[path] for path in wanted)
    dicts = {"a": {"w": jnp.ones((2, 3)), "b": jnp.ones(1)}, "c": jnp.zeros(4)}
    plain = Flattener()
    plain.arrays(dicts)
    # in another order
    changed = {
        "c": dicts["c"] + 1,
        "a": {"b": dicts["a"]["b"] + 1, "w": dicts["a"]["w"] + 1},
    }
    for now in (
        changed,
        {"a": dicts["a"]},
        {**dicts, "d": jnp.ones(1)},
        {"a": dicts["c"], "c": dicts["c"]},
        {"a": dicts["a"], "c": {"deeper": dicts["c"]}},
        dicts,
    ):
        got, wanted = plain.arrays(now), flatten(now).arrays
        assert got.keys() == wanted.keys()
        assert all(got[path] is wanted[path] for path in wanted)
    other = {"a": {"w": jnp.ones((2, 3)), "x": jnp.ones(2)}, "c": []}
    assert list(flattener.arrays(other)) == list(flatten(other).arrays), (
        "another tree is seen as another"
    )
    shared = jnp.ones(2)
    twice = {"p": shared, "q": shared}
    assert all(np.array_equal(flattener.arrays(twice)[k], shared) for k in "pq")
    apart = {"p": jnp.zeros(2), "q": shared}
    assert np.array_equal(flattener.arrays(apart)["p"], jnp.zeros(2)), (
        "leaves that were one are not taken for one"
    )
