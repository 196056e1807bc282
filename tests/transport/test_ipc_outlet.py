"""What a trainer lets go of before engines sleep: mappings of shadows, and of nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jvlab._errors import TransportError
from jvlab.transport._ipc_lanes import Lane, Port
from jvlab.transport._ipc_outlet import IpcOutlet


def test_shadows_are_unmapped_once_nothing_runs() -> None:
    order: list[str] = []
    mapped = lambda name: SimpleNamespace(mapped=SimpleNamespace(close=lambda: order.append(name)))
    lane = Lane(0, 0, [], [], [], 0)
    port = Port("p/0", 0, [lane])
    live: Any = mapped("live")
    port.into.update({(False, 0): live, (True, 0): mapped("shadow")})  # type: ignore[dict-item]
    outlet: Any = IpcOutlet.__new__(IpcOutlet)
    outlet._streams = {0: SimpleNamespace(synchronize=lambda: order.append("idle"))}
    outlet.channels = [port]
    outlet.let_go_of_shadows()
    outlet.let_go_of_shadows()
    assert order == ["idle", "shadow", "idle"], "not while a kernel may write there, and once"
    assert outlet._destinations(port, False) == [live]
    with pytest.raises(TransportError, match="shadow memory"):
        outlet._destinations(port, True)
