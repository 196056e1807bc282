"""A rank's side of the ipc transport: exports its memory for a trainer to write, computes digests, and swaps.

    open     IpcExport(plan, rank, index, live) · .export(staged=False) → handles, to the trainer
    MOVE     .admit(version)            the device is idle, writers of this version may write
    VERIFY   .revoke() · .digests()     no more writes; digests of what the memory holds
    COMMIT   .swap()                    staged: copies shadows into live memory, whose addresses never change
    close    .close()

A writer checks a permit in our memory in every block, so one that is late (suspended, or thought dead) writes nothing.
Shadows are one buffer, allocated at the first staged export and kept until `release_shadows` or `close`: a trainer maps
it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from jvlab._errors import LayoutError, SyncError, Unsupported
from jvlab.engine.worker._scatter import flat
from jvlab.layout._plan import TransferPlan
from jvlab.transport._ipc_kernels import Launcher, cupy
from jvlab.transport._ipc_memory import Exports
from jvlab.transport._ipc_tables import Table, digest_pieces, program_of, refuse_other_kinds, tables, whole_links

ALIGN = 256  # bytes: where each shadow starts in their buffer


class IpcExport:
    """The live memory of one rank's targets of a plan, by target number."""

    def __init__(self, plan: TransferPlan, rank: int, index: int, live: dict[int, torch.Tensor | None]) -> None:
        self.plan, self.rank = plan, rank
        links = whole_links(plan, rank, index)
        self.numbers = sorted({int(t) for link in links for t in link.target})
        refuse_other_kinds(plan, self.numbers)
        self.live = {t: self._checked(t, live.get(t)) for t in self.numbers}
        for transform in {plan.transforms[int(k)] for link in links for k in np.unique(link.transform).tolist()}:
            program_of(transform, "rows")  # raises at connect if no kernel can convert it
        devices = {tensor.device for tensor in self.live.values()}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            raise Unsupported(
                f"rank {rank} keeps its parameters on {', '.join(sorted(map(str, devices))) or 'no device'}: ipc "
                "needs one GPU",
                remedy='connect with transport="shm"',
            )
        self.device: int = next(iter(devices)).index or 0
        slot = {t: k for k, t in enumerate(self.numbers)}
        pieces = digest_pieces(plan, links, slot)
        aligned = all(tensor.data_ptr() % 16 == 0 for tensor in self.live.values())
        self._tables: list[Table] = tables(pieces, aligned)
        with cupy().cuda.Device(self.device):
            self._stream = cupy().cuda.Stream(non_blocking=True)
        self._reader = Launcher(self.device, self._tables, len(self.numbers), write=False, look=False)
        self._writer = Launcher(self.device, self._tables, len(self.numbers), look=False)
        self._token = secrets.randbits(61)
        self._pinned = cupy().cuda.alloc_pinned_memory(8)
        self._permit_value = np.frombuffer(self._pinned, np.uint64, 1)
        self._permit: torch.Tensor | None = torch.zeros(1, dtype=torch.int64, device=f"cuda:{self.device}")
        self._room: torch.Tensor | None = None
        self._shadows: dict[int, torch.Tensor] = {}
        self._pointers: dict[bool, Any] = {}
        self._reader.warm()
        self._writer.warm()

    def _checked(self, number: int, tensor: torch.Tensor | None) -> torch.Tensor:
        info = self.plan.parameters[int(self.plan.target_parameter[number])]
        have = None
        if tensor is not None:
            have = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tuple(tensor.stride())
        if tensor is None or have != (info.shape, info.dtype, info.strides):
            raise LayoutError(
                f"rank {self.rank}: the plan writes {info.name} {info.shape} {info.dtype} {info.strides}; this engine "
                f"has {have or 'no such live memory'}",
                remedy="the plan was made for another engine: connect again",
                parameter=info.name,
            )
        return tensor.detach()

    def _name(self, number: int) -> str:
        return self.plan.parameters[int(self.plan.target_parameter[number])].name

    # Export -------------------------------------------------------------------------------------------------------

    @property
    def shadow_bytes(self) -> int:
        """Bytes that the shadows would take; 0 once they are allocated."""
        return 0 if self._room is not None else sum(-(-flat(t).nbytes // ALIGN) * ALIGN for t in self.live.values())

    def export(self, staged: bool) -> dict[str, Any]:
        """Handles and offsets of live memory, or of the shadows; plain values only."""
        memory = self._memory(staged)
        exports = Exports(self.device)
        targets = [[t, *exports.add(memory[t].data_ptr(), flat(memory[t]).nbytes, self._name(t))] for t in self.numbers]
        permit = exports.add(self._own_permit().data_ptr(), 8, "the permit")
        torch.cuda.synchronize(self.device)
        return {
            **exports.plain(),
            "rank": self.rank,
            "plan": self.plan.digest,
            "staged": staged,
            "targets": targets,
            "permit": permit,
            "token": self._token,
        }

    def _memory(self, staged: bool) -> dict[int, torch.Tensor]:
        if not staged:
            return self.live
        if self._room is None:
            self._make_shadows()
        return self._shadows

    def _make_shadows(self) -> None:
        need, (free, _) = self.shadow_bytes, torch.cuda.mem_get_info(self.device)
        try:
            self._room = torch.empty(need, dtype=torch.uint8, device=f"cuda:{self.device}")
        except torch.OutOfMemoryError as e:
            raise Unsupported(
                f"rank {self.rank}: a staged sync needs {need / 2**30:.2f} GiB more on the GPU, {free / 2**30:.2f} GiB "
                "are free",
                remedy='sync with mode="direct", or launch with a smaller gpu_memory_utilization',
                need=need,
                available=free,
            ) from e
        at = 0
        for t, tensor in self.live.items():
            size = flat(tensor).nbytes
            room = self._room[at : at + size].view(tensor.dtype)
            self._shadows[t] = torch.as_strided(room, tensor.size(), tensor.stride(), room.storage_offset())
            at += -(-size // ALIGN) * ALIGN

    def _own_permit(self) -> torch.Tensor:
        if self._permit is None:
            raise SyncError(f"rank {self.rank}: this export is closed", remedy="open the link again")
        return self._permit

    # One sync -----------------------------------------------------------------------------------------------------

    def admit(self, version: int) -> None:
        """Writers of this version may write from now on; our own kernels on the device have ended."""
        torch.cuda.synchronize(self.device)
        self._grant(self._own_permit(), self._token + version)
        self._stream.synchronize()

    def revoke(self, wait: bool = True) -> None:
        """No writer may write from now on; without `wait`, from before the digests on."""
        if self._permit is not None:
            self._grant(self._permit, 0)
            if wait:
                self._stream.synchronize()

    def _grant(self, permit: torch.Tensor, value: int) -> None:
        """By a copy, not a kernel: that would need a context switch from the trainer's process to ours."""
        self._permit_value[0] = value
        runtime = cupy().cuda.runtime
        with cupy().cuda.Device(self.device):
            runtime.memcpyAsync(permit.data_ptr(), self._pinned.ptr, 8, runtime.memcpyHostToDevice, self._stream.ptr)

    def digests(self, staged: bool = False, chosen: Iterable[int] | None = None) -> dict[int, int]:
        """Digests by target, of live memory or of the shadows; elements that no box writes are left out."""
        found = dict(zip(self.numbers, self.sums(staged).tolist(), strict=True))
        return found if chosen is None else {t: found[t] for t in chosen}

    def sums(self, staged: bool = False) -> np.ndarray:
        """The digests alone, in the order of `numbers`."""
        pointers = self._pointers_of(staged)
        self._reader.launch(self._stream, pointers, pointers)
        return self._reader.sums(self._stream)

    def swap(self) -> None:
        """Copy the shadows into live memory: the addresses that CUDA graphs hold stay valid."""
        if self._room is None:
            raise SyncError(f"rank {self.rank}: no shadow to swap in", remedy="export with staged=True, then move")
        torch.cuda.synchronize(self.device)
        self._writer.launch(self._stream, self._pointers_of(True), self._pointers_of(False), digest=False)
        self._stream.synchronize()

    def _pointers_of(self, staged: bool) -> Any:
        if staged not in self._pointers:
            memory = self._memory(staged)
            with cupy().cuda.Device(self.device):
                table = np.array([memory[t].data_ptr() for t in self.numbers], np.uint64)
                self._pointers[staged] = cupy().asarray(table)
                cupy().cuda.get_current_stream().synchronize()
        return self._pointers[staged]

    def close(self) -> None:
        """Stop writers and free the shadows. Can be called twice."""
        self.revoke()
        self._permit = None
        self.release_shadows()

    def release_shadows(self) -> None:
        """Return the shadows to the driver; a trainer that maps them gets new ones before it writes again."""
        self._shadows = {}
        self._pointers.pop(True, None)
        if self._room is not None:
            self._room = None
            torch.cuda.empty_cache()
