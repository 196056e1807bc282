"""One rank's end of an ipc link: the trainer writes its memory; here writes are permitted, digested and swapped in."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import numpy as np
import torch

from jvlab._errors import Unsupported, VerifyError
from jvlab._files import Plain
from jvlab.engine.worker._live_memory import (
    Addresses,
    by_name,
    check_format,
    flat,
    some,
)
from jvlab.layout._digest import in_sample
from jvlab.layout._plan import TransferPlan
from jvlab.transport._ipc_kernels import Launcher, cupy
from jvlab.transport._ipc_memory import Exports
from jvlab.transport._ipc_tables import (
    Table,
    digest_pieces,
    refuse_other_kinds,
    tables,
    whole_links,
)

# A rank's side of the ipc transport: exports its memory for a trainer to write, computes digests, and swaps.
#     open     IpcExport(plan, rank, index, live) · .export(staged=False) → handles, to the trainer
#     MOVE     .admit(version)            the device is idle, writers of this version may write
#     VERIFY   .revoke() · .digests()     no more writes; digests of what the memory holds
#     COMMIT   .swap()                    staged: copies shadows into live memory, whose addresses never change
#     close    .close()
#
# A writer checks a permit in our memory in every block, so one that is late (suspended, or thought dead) writes
# nothing. Shadows are one buffer, allocated at the first staged export and kept until `release_shadows` or
# `close`: a trainer maps it.

ALIGN = 256  # bytes: where each shadow starts in their buffer


class IpcExport:
    """The live memory of one rank's targets of a plan, by target number."""

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        index: int,
        live: dict[int, torch.Tensor | None],
    ) -> None:
        self.plan = plan
        self.rank = rank
        links = whole_links(plan, rank, index)
        self.numbers = sorted({int(t) for link in links for t in link.target})
        refuse_other_kinds(plan, self.numbers)
        self.live = {t: self._checked(t, live.get(t)) for t in self.numbers}
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
        self._reader = Launcher(
            self.device, self._tables, len(self.numbers), write=False, look=False
        )
        self._writer = Launcher(
            self.device, self._tables, len(self.numbers), look=False
        )
        self._token = secrets.randbits(61)
        self._pinned = cupy().cuda.alloc_pinned_memory(8)
        self._permit_value = np.frombuffer(self._pinned, np.uint64, 1)
        self._permit = torch.zeros(1, dtype=torch.int64, device=f"cuda:{self.device}")
        self._room: torch.Tensor | None = None
        self._shadows: dict[int, torch.Tensor] = {}
        self._pointers: dict[bool, Any] = {}
        self._reader.warm()
        self._writer.warm()

    def _checked(self, number: int, tensor: torch.Tensor | None) -> torch.Tensor:
        info = self.plan.parameters[int(self.plan.target_parameter[number])]
        check_format(tensor, info, self.rank)
        assert tensor is not None
        return tensor.detach()

    def _name(self, number: int) -> str:
        return self.plan.parameters[int(self.plan.target_parameter[number])].name

    # Export -------------------------------------------------------------------------------------------------------

    def export(self, staged: bool) -> Plain:
        """Handles and offsets of live memory, or of the shadows; plain values only."""
        memory = self._memory(staged)
        exports = Exports(self.device)
        targets = [
            [
                t,
                *exports.add(
                    memory[t].data_ptr(), flat(memory[t]).nbytes, self._name(t)
                ),
            ]
            for t in self.numbers
        ]
        permit = exports.add(self._permit.data_ptr(), 8, "the permit")
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
        sizes = {t: flat(tensor).nbytes for t, tensor in self.live.items()}
        need = sum(-(-size // ALIGN) * ALIGN for size in sizes.values())
        free, _ = torch.cuda.mem_get_info(self.device)
        try:
            self._room = torch.empty(
                need, dtype=torch.uint8, device=f"cuda:{self.device}"
            )
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
            size = sizes[t]
            room = self._room[at : at + size].view(tensor.dtype)
            self._shadows[t] = torch.as_strided(
                room, tensor.size(), tensor.stride(), room.storage_offset()
            )
            at += -(-size // ALIGN) * ALIGN

    # One sync -----------------------------------------------------------------------------------------------------

    def admit(self, version: int) -> None:
        """Writers of this version may write from now on; our own kernels on the device have ended."""
        torch.cuda.synchronize(self.device)
        self._grant(self._token + version)
        self._stream.synchronize()

    def revoke(self, wait: bool = True) -> None:
        """No writer may write from now on; without `wait`, from before the digests on."""
        self._grant(0)
        if wait:
            self._stream.synchronize()

    def _grant(self, value: int) -> None:
        """By a copy, not a kernel: that would need a context switch from the trainer's process to ours."""
        self._permit_value[0] = value
        runtime = cupy().cuda.runtime
        with cupy().cuda.Device(self.device):
            runtime.memcpyAsync(
                self._permit.data_ptr(),
                self._pinned.ptr,
                8,
                runtime.memcpyHostToDevice,
                self._stream.ptr,
            )

    def digests(self, staged: bool = False) -> dict[int, int]:
        """Digests by target, of live memory or of the shadows; elements that no box writes are left out."""
        return dict(zip(self.numbers, self.sums(staged).tolist(), strict=True))

    def sums(self, staged: bool = False) -> np.ndarray:
        """The digests alone, in the order of `numbers`."""
        pointers = self._pointers_of(staged)
        self._reader.launch(self._stream, pointers, pointers)
        return self._reader.sums(self._stream)

    def swap(self) -> None:
        """Copy the shadows into live memory: the addresses that CUDA graphs hold stay valid."""
        torch.cuda.synchronize(self.device)
        self._writer.launch(
            self._stream,
            self._pointers_of(True),
            self._pointers_of(False),
            digest=False,
        )
        self._stream.synchronize()

    def _pointers_of(self, staged: bool) -> Any:
        if staged not in self._pointers:
            memory = self._memory(staged)
            with cupy().cuda.Device(self.device):
                table = np.array(
                    [memory[t].data_ptr() for t in self.numbers], np.uint64
                )
                self._pointers[staged] = cupy().asarray(table)
                cupy().cuda.get_current_stream().synchronize()
        return self._pointers[staged]

    def close(self) -> None:
        """Stop writers and free the shadows. Can be called twice."""
        self.revoke()
        self.release_shadows()

    def release_shadows(self) -> None:
        """Return the shadows to the driver; a trainer that maps them gets new ones before it writes again."""
        self._shadows = {}
        self._pointers.pop(True, None)
        if self._room is not None:
            self._room = None
            torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------------------


class IpcRank:
    """The memory of one rank while a link is open. Every method returns plain values."""

    def __init__(
        self, model: torch.nn.Module, plan: TransferPlan, rank: int, index: int
    ) -> None:
        live = by_name(model)
        self.plan = plan
        self.rank = rank
        self._names = {
            t: plan.parameters[int(p)].name for t, p in enumerate(plan.target_parameter)
        }
        mine = [t for t, r in enumerate(plan.target_rank) if int(r) == rank]
        self._export = IpcExport(
            plan, rank, index, {t: live.get(self._names[t]) for t in mine}
        )
        exported = self._export.live.items()
        pointers = {self._names[t]: tensor.data_ptr() for t, tensor in exported}
        self._addresses = Addresses(model, pointers)
        self._sums: np.ndarray | None = None  # of the shadows, when they were verified
        self.bytes = sum(link.total_bytes for link in whole_links(plan, rank, index))
        self._shadows_exported = False
        self._version = 0
        self._mode = "direct"
        self._verify = "full"

    def open(self) -> Plain:
        """Handles of live memory; if it can't be exported (sleep mode's allocator), why: then only staged syncs."""
        try:
            plain = self._export.export(False)
        except Unsupported as error:
            plain = {
                "rank": self.rank,
                "plan": self.plan.digest,
                "no_direct": error.message,
            }
        names = [self._names[t] for t in self._export.numbers]
        return {"handles": [json.dumps(plain)], "names": names}

    def prepare(self, terms: Plain) -> Plain:
        """Store the terms; the first staged sync of a link also allocates and exports the shadows."""
        self._version = int(terms["version"])
        self._mode = terms["mode"]
        self._verify = terms["verify"]
        if self._mode == "direct" or self._shadows_exported:
            return {}
        plain = self._export.export(True)
        self._shadows_exported = True
        return {"handles": [json.dumps(plain)]}

    def move(self) -> Plain:
        """The device is idle and the trainer may write."""
        start = time.perf_counter()
        self._export.admit(self._version)
        return {"seconds": time.perf_counter() - start}

    def verify(self, wait: float) -> Plain:
        """Stop writes; digests of what the memory holds."""
        # the trainer is done: only a writer of an abandoned sync could be late
        self._export.revoke(wait=False)
        start = time.perf_counter()
        out: Plain = {
            "done": True,
            "digests": [],
            "seconds": {},
            "bytes": self.bytes,
        }
        self._sums = None
        if self._verify != "off" and self._mode == "direct":
            self._check_live_memory()
        if self._verify == "full":  # in the order of the names that `open` returned
            self._sums = self._export.sums(self._mode == "staged")
            out["values"] = self._sums.tobytes()
            out["evidence"] = {"live": len(self._sums)}
        elif self._verify == "sampled":
            out["digests"] = [
                [name, value]
                for name, value in self._digests(self._mode == "staged")
                if in_sample(name, self._version)
            ]
            out["evidence"] = {"live": len(out["digests"])}
        if self._verify != "off":
            out["seconds"] = {"digest": time.perf_counter() - start}
        return out

    def commit(self) -> None:
        """Staged: swap the shadows in. Direct: the weights are in live memory already."""
        if self._mode == "staged":
            self._export.swap()
            if self._verify != "off":
                self._check_live_memory()
            if self._sums is not None:
                self._compare(self._export.sums(False), self._sums)

    def _check_live_memory(self) -> None:
        """Raise unless the exported memory is still the model's: a reload or a wake-up may have replaced it."""
        if moved := self._addresses.moved():
            raise VerifyError(
                f"rank {self.rank}: {some(moved)} arrived, but the model computes with different memory",
                remedy="connect again: the engine has replaced its weights' memory since the link was opened",
                parameters=moved,
            )

    def _compare(self, live: np.ndarray, shadows: np.ndarray) -> None:
        """Raise unless live memory after the swap holds what the shadows held when they were verified."""
        if not np.array_equal(live, shadows):
            wrong = [
                self._names[t]
                for t, a, b in zip(self._export.numbers, live, shadows, strict=True)
                if a != b
            ]
            raise VerifyError(
                f"rank {self.rank}: {some(wrong)} did not get from the shadow into live memory",
                remedy="sync again",
                parameters=wrong,
            )

    def abandon(self) -> None:
        """Stop writes; shadows stay, as the trainer maps them."""
        self._export.revoke()

    def release_shadows(self) -> None:
        """Free the shadows; the next staged sync allocates and exports new ones."""
        self._export.release_shadows()
        self._shadows_exported = False

    def check(self, midway: bool) -> Plain:
        """Digests of live memory, or, midway in a sync, of what it writes."""
        found = self._digests(midway and self._mode == "staged")
        return {"digests": found, "evidence": {"live": len(found)}}

    def _digests(self, staged: bool) -> list[list[Any]]:
        """[name, value] of each target, as plain values."""
        found = self._export.digests(staged)
        return [[self._names[t], value] for t, value in sorted(found.items())]

    def close(self) -> None:
        """Free what this link allocated."""
        self._export.close()
