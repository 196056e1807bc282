"""One rank's end of an ipc link: the trainer writes its memory; here writes are permitted, digested and swapped in."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import torch

from jvlab._errors import SyncError, Unsupported, VerifyError
from jvlab.engine.worker._ipc_export import IpcExport
from jvlab.engine.worker._live_memory import Addresses, by_name, some
from jvlab.layout._digest import in_sample
from jvlab.layout._plan import TransferPlan
from jvlab.transport._ipc_tables import whole_links


class IpcRank:
    """The memory of one rank while a link is open. Every method returns plain values."""

    def __init__(self, model: torch.nn.Module, plan: TransferPlan, rank: int, index: int) -> None:
        live = by_name(model)
        self.plan, self.rank = plan, rank
        self._names = {t: plan.parameters[int(p)].name for t, p in enumerate(plan.target_parameter)}
        mine = [t for t, r in enumerate(plan.target_rank) if int(r) == rank]
        self._export = IpcExport(plan, rank, index, {t: live.get(self._names[t]) for t in mine})
        self._addresses = Addresses(
            model, {self._names[t]: tensor.data_ptr() for t, tensor in self._export.live.items()}
        )
        self._sums: np.ndarray | None = None  # of the shadows, when they were verified
        self.bytes = sum(link.total_bytes for link in whole_links(plan, rank, index))
        self._shadows_exported = False
        self._version, self._mode, self._verify = 0, "direct", "full"
        self._arrived = False

    def open(self) -> dict[str, Any]:
        """Handles of live memory; if it can't be exported (sleep mode's allocator), why: then only staged syncs."""
        try:
            plain = self._export.export(False)
        except Unsupported as error:
            plain = {"rank": self.rank, "plan": self.plan.digest, "no_direct": error.message}
        names = [self._names[t] for t in self._export.numbers]
        return {"handles": [json.dumps(plain)], "bytes": self.bytes, "names": names}

    def prepare(self, terms: dict[str, Any]) -> dict[str, Any]:
        """Store the terms; the first staged sync of a link also allocates and exports the shadows."""
        self._version, self._mode, self._verify = int(terms["version"]), terms["mode"], terms["verify"]
        self._arrived = False
        if self._mode == "direct" or self._shadows_exported:
            return {"need": 0, "handles": []}
        need = self._export.shadow_bytes
        plain = self._export.export(True)
        self._shadows_exported = True
        return {"need": need, "handles": [json.dumps(plain)]}

    def move(self) -> dict[str, Any]:
        """The device is idle and the trainer may write."""
        start = time.perf_counter()
        self._export.admit(self._version)
        return {"seconds": time.perf_counter() - start}

    def verify(self, wait: float) -> dict[str, Any]:
        """Stop writes; digests of what the memory holds."""
        self._export.revoke(wait=False)  # the trainer is done: only a writer of an abandoned sync could be late
        start = time.perf_counter()
        out: dict[str, Any] = {"done": True, "digests": [], "seconds": {}, "bytes": self.bytes, "missing": ""}
        self._sums = None
        if self._verify != "off" and self._mode == "direct":
            self._check_live_memory()
        if self._verify == "full":  # in the order of the names that `open` returned
            self._sums = self._export.sums(self._mode == "staged")
            out["values"] = self._sums.tobytes()
            out["evidence"] = {"live": len(self._sums)}
        elif self._verify == "sampled":
            found = self._export.digests(self._mode == "staged")
            out["digests"] = self._named({t: v for t, v in found.items() if in_sample(self._names[t], self._version)})
            out["evidence"] = {"live": len(out["digests"])}
        if self._verify != "off":
            out["seconds"] = {"digest": time.perf_counter() - start}
        self._arrived = True
        return out

    def commit(self) -> dict[str, Any]:
        """Staged: swap the shadows in. Direct: the weights are in live memory already."""
        if not self._arrived:
            raise SyncError(f"rank {self.rank}: commit without verify", remedy="verify comes first")
        if self._mode == "staged":
            self._export.swap()
            if self._verify != "off":
                self._check_live_memory()
            if self._sums is not None:
                self._compare(self._export.sums(False), self._sums)
        self._arrived = False
        return {"bytes": self.bytes}

    def _check_live_memory(self) -> None:
        """Raise unless the exported memory is still the model's: a reload or a wake-up may have replaced it."""
        if moved := self._addresses.moved():
            raise VerifyError(
                f"rank {self.rank}: {some(moved)} arrived, but the model computes with other memory",
                remedy="connect again: the engine has replaced its weights' memory since the link was opened",
                parameters=moved,
            )

    def _compare(self, live: np.ndarray, shadows: np.ndarray) -> None:
        """Raise unless live memory after the swap holds what the shadows held when they were verified."""
        if not np.array_equal(live, shadows):
            wrong = [self._names[t] for t, a, b in zip(self._export.numbers, live, shadows, strict=True) if a != b]
            raise VerifyError(
                f"rank {self.rank}: {some(wrong)} did not get from the shadow into live memory",
                remedy="sync again",
                parameters=wrong,
            )

    def abandon(self) -> dict[str, Any]:
        """Stop writes; shadows stay, as the trainer maps them."""
        self._export.revoke()
        self._arrived = False
        return {"closed": False}

    def release_shadows(self) -> None:
        """Free the shadows; the next staged sync allocates and exports new ones."""
        self._export.release_shadows()
        self._shadows_exported = False

    def check(self, midway: bool) -> dict[str, Any]:
        """Digests of live memory, or, midway in a sync, of what it writes."""
        found = self._export.digests(midway and self._mode == "staged")
        return {"digests": self._named(found), "evidence": {"live": len(found)}}

    def _named(self, found: dict[int, int]) -> list[list[Any]]:
        return [[self._names[t], value] for t, value in sorted(found.items())]

    def close(self) -> None:
        """Free what this link allocated."""
        self._export.close()
