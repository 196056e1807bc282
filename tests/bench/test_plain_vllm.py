"""The process in which benchmarks run vLLM without jvlab: what it leaves when it is killed is gone with it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil
import pytest

from jvlab import errors
from jvlab.bench import _sync_gpu_peer
from jvlab.bench._sync_gpu import GpuPeer
from tests.bench import leaves_a_socket
from tests.conftest import left_by_engines


def test_nothing_is_left_and_its_end_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(_sync_gpu_peer, "serve", leaves_a_socket.serve)
    usual = Path(tempfile.gettempdir())
    before = left_by_engines(usual)
    with GpuPeer(tmp_path, 7, {}) as peer:
        told = peer.receive()
        assert told["asked"] == 7
        assert len(list(Path(told["places"][0]).iterdir())) == 2
        assert usual.resolve() not in [
            Path(place).resolve() for place in told["places"]
        ]
        assert psutil.pid_exists(told["pid"])
        peer.pipe.send("end")
        with pytest.raises(errors.LaunchError, match="plain vLLM ended"):
            peer.receive()
    assert left_by_engines(usual) == before
    assert not psutil.pid_exists(told["pid"])
