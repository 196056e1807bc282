"""The process in which a bench runs a side of it: lines both ways, and what it leaves when it is killed is gone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil
import pytest

from jvlab import errors
from jvlab.bench._side import Side
from tests.conftest import left_by_engines

SIDE = "tests.bench.leaves_a_socket:socket_side"


def test_nothing_is_left_and_its_end_is_an_error():
    usual = Path(tempfile.gettempdir())
    before = left_by_engines(usual)
    with Side(SIDE, {"rounds": 7}) as peer:
        told = peer.receive()
        assert told["asked"] == 7
        assert len(list(Path(told["places"][0]).iterdir())) == 2
        assert usual.resolve() not in [
            Path(place).resolve() for place in told["places"]
        ]
        assert psutil.pid_exists(told["pid"])
        with pytest.raises(errors.LaunchError, match="the socket side ended with 3"):
            peer.ask("end")
    assert left_by_engines(usual) == before
    assert not psutil.pid_exists(told["pid"])


def test_one_that_is_still_busy_is_killed():
    with Side(SIDE, {"rounds": 1}) as peer:
        told = peer.receive()
        peer.send("hang")
        assert psutil.pid_exists(told["pid"])
    assert not psutil.pid_exists(told["pid"])
    assert not Path(told["places"][0]).exists()


def test_a_side_that_is_not_there_is_an_error():
    with (
        Side("tests.bench.no_such_file:socket_side", {}) as peer,
        pytest.raises(errors.LaunchError, match="ended with 1"),
    ):
        peer.receive()
