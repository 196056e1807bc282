"""Digests of a rank's targets, computed on the GPU one target at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import LinkPlan
from jvlab.transport._ipc_kernels import Launcher, cupy
from jvlab.transport._ipc_tables import Table, digest_pieces, tables


class DeviceDigest:
    """Digests by target number; the kernel tables are built once per target and kept on the device."""

    def __init__(self, plan: TransferPlan, links: Sequence[LinkPlan], device: int) -> None:
        numbers = sorted({int(t) for link in links for t in link.target})
        self._pieces: dict[int, list[Any]] = {t: [] for t in numbers}
        for piece in digest_pieces(plan, links, {t: t for t in numbers}):
            self._pieces[piece.slot].append(piece)
        self._device = device
        self._launchers: dict[tuple[int, bool], Launcher] = {}
        with cupy().cuda.Device(device):
            self._stream = cupy().cuda.Stream(non_blocking=True)
        for number in numbers:  # compile now, not in the first sync
            self._launcher(number, True).warm(digests=(True,))

    def __call__(self, number: int, memory: torch.Tensor) -> int:
        """Of the elements that boxes write, which must have arrived: the bucket was released."""
        pointer = memory.data_ptr()
        launcher = self._launcher(number, pointer % 16 == 0)
        cp = cupy()
        with cp.cuda.Device(self._device), self._stream:
            where = cp.empty(1, np.uint64)
            where.set(np.array([pointer], np.uint64), stream=self._stream)
        launcher.launch(self._stream, where, where)
        return int(launcher.sums(self._stream)[0])

    def _launcher(self, number: int, aligned: bool) -> Launcher:
        if (number, aligned) not in self._launchers:
            made: list[Table] = tables(self._pieces_of(number), aligned)
            self._launchers[number, aligned] = Launcher(self._device, made, 1, write=False, look=False)
        return self._launchers[number, aligned]

    def _pieces_of(self, number: int) -> list[Any]:
        return [replace(p, source=0, target=0, slot=0) for p in self._pieces[number]]
