"""One target of a plan on a rank, and the layer that must be processed again once its targets have arrived."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from jvlab.engine.worker import _live_memory
from jvlab.engine.worker._receivers import ReceivedBox
from jvlab.engine.worker._scatter import flat
from jvlab.layout._boxes import storage_elements
from jvlab.layout._plan_types import TargetInfo, item_bytes


@dataclass(eq=False)
class PackGroup:
    """A layer to reprocess once all of its staged parameters have arrived."""

    layer: torch.nn.Module
    derived: bool
    reloaded: bool = False  # by vLLM's own reload
    names: dict[str, int] = field(default_factory=dict)  # name within the layer -> target
    left: set[int] = field(default_factory=set)


@dataclass(eq=False)
class WeightSlot:
    """One target of the plan on this rank."""

    number: int
    info: TargetInfo
    kind: int
    padded: bool
    boxes: list[ReceivedBox]
    live: torch.Tensor | None  # memory in the format of the plan, if the engine has it
    groups: list[PackGroup] = field(default_factory=list)
    shadow: torch.Tensor | None = None
    raw: torch.Tensor | None = None
    device: torch.device | str = "cpu"
    holders: list[torch.Tensor] | None = None  # all tensors that share live memory; None: unknown
    transposed: dict[ReceivedBox, ReceivedBox] = field(default_factory=dict)  # boxes of a transposed raw copy

    @property
    def reloaded(self) -> bool:
        return any(g.reloaded for g in self.groups)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.info.dtype)

    @property
    def format(self) -> _live_memory.Format:
        return self.info.shape, self.info.dtype, self.info.strides

    @property
    def nbytes(self) -> int:
        return storage_elements(self.info.shape, self.info.strides) * item_bytes(self.info.dtype)

    def allocate(self, like: torch.Tensor | None = None) -> torch.Tensor:
        """New memory of this format; elements that no box fills are copied from `like`, or zero."""
        strides = (1, self.info.shape[0]) if self.transposed else self.info.strides
        memory = torch.empty_strided(self.info.shape, strides, dtype=self.dtype, device=self.device)
        if self.padded:
            flat(memory).copy_(flat(like)) if like is not None else flat(memory).zero_()
        return memory
