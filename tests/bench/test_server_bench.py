"""`bench server`: its ratios, and a backend that fails; the sides are made up here."""

from __future__ import annotations

from typing import Any, Self

import pytest

from jvlab._errors import DeadlineExceeded
from jvlab.bench import _server


class MadeUp:
    """Stands for a side: each backend with its time, `nccl` without an end."""

    times = {"jvlab": 5.0, "ipc": 110.0}  # noqa: RUF012

    def __init__(self, side: str, order: dict[str, Any], *_: object) -> None:
        assert hasattr(_server, side.rpartition(":")[2])
        self._backend = order["backend"]

    def receive(self, seconds: float) -> dict[str, Any]:
        if self._backend not in self.times:
            raise DeadlineExceeded(f"nothing for {seconds:g} s")
        ms = self.times[self._backend]
        way = {"send_ms": ms, "worst_ms": ms, "with_pause_ms": 2 * ms}
        way |= {"verified": True, "tokens_equal": True, "tokens_changed": True}
        names = {"jvlab": ["jvlab_direct"], "ipc": ["ipc", "ipc_packed"]}
        return {"bytes": 4, "ways": dict.fromkeys(names[self._backend], way)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


def test_ratios_and_a_backend_that_hangs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_server, "Side", MadeUp)
    found = _server.run_bench_server(2, "a model", None, "cuda")
    assert found["vs_vllm_ipc_ratio"] == pytest.approx(22)
    assert found["vs_vllm_ipc_with_pause_ratio"] == pytest.approx(22)
    assert "vs_vllm_nccl_ratio" not in found
    assert found["errors"] == {"nccl": "nothing for 150 s"}
    assert set(found["ways"]) == {"jvlab_direct", "ipc", "ipc_packed"}
