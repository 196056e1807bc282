"""One worker's side of syncs: open a link, prepare, verify, commit, abandon; plain values in and out."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, Protocol

from jvlab._errors import JvlabError, SyncError
from jvlab.engine.tracing import _lora_slots, _vllm_model
from jvlab.engine.tracing._bare_model import bare_model
from jvlab.engine.tracing._lora_slots import AdapterSlot
from jvlab.engine.worker import _poison
from jvlab.engine.worker._bucket_rank import BucketRank
from jvlab.engine.worker._fault_injection import inject_fault
from jvlab.engine.worker._hidden_states import HiddenStates
from jvlab.engine.worker._live_memory import peek
from jvlab.layout._plan import TransferPlan


class RankLink(Protocol):
    """This rank's end of a link: `BucketRank` receives buckets, `IpcRank` lets the trainer write its memory."""

    def open(self) -> dict[str, Any]: ...

    def prepare(self, terms: dict[str, Any]) -> dict[str, Any]: ...

    def move(self) -> dict[str, Any]: ...

    def verify(self, wait: float) -> dict[str, Any]: ...

    def commit(self) -> dict[str, Any]: ...

    def abandon(self) -> dict[str, Any]: ...

    def release_shadows(self) -> None: ...

    def check(self, midway: bool) -> dict[str, Any]: ...

    def close(self) -> None: ...


def returns_errors(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return errors instead of raising: an exception in a worker reaches the engine only as text, or kills it."""

    @functools.wraps(method)
    def guarded(self: WorkerSync, *args: Any) -> dict[str, Any]:
        try:
            return {"rank": self.rank, **method(self, *args)}
        except JvlabError as error:
            return {"rank": self.rank, "error": error.message, "remedy": error.remedy, "kind": type(error).__name__}
        except Exception as error:  # from vLLM, torch or a transport
            text = f"{type(error).__name__}: {error}"
            return {"rank": self.rank, "error": text, "remedy": "see the replica's log", "kind": "SyncError"}

    return guarded


class WorkerSync:
    """The only link that this worker may have open."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        with _vllm_model.current_config(worker):
            self.rank, _ = _vllm_model.coordinates()
        self._whole = _vllm_model.worker_model(worker)
        self.model = bare_model(self._whole)
        self.slot: AdapterSlot | None = None  # once a link has synced an adapter
        self._adapter: Any = None  # its memory, while the open link is an adapter's
        self._stale = True  # the slot may hold what an earlier link left there
        self._mode = "direct"
        self.link: RankLink | None = None
        self._last: BucketRank | None = None  # kept after its link is closed: it knows what arrived
        self._hidden_states: HiddenStates | None = None  # while they are recorded

    # A link -------------------------------------------------------------------------------------------------------

    @returns_errors
    def open(
        self, transport: str, plan_bytes: bytes, index: int, ranks_json: list[str], seconds: float
    ) -> dict[str, Any]:
        """Open this rank's channels and find every target of the plan; raises if one can't be synced."""
        self._close()
        plan = TransferPlan.from_bytes(plan_bytes)
        model = self._model_of(plan)
        if not self.rank < min(plan.ranks, len(ranks_json)):
            raise SyncError(
                f"this is rank {self.rank}; the plan has {plan.ranks} ranks, {len(ranks_json)} have endpoints",
                remedy="the plan was made for another engine: connect again",
            )
        if transport == "ipc":
            from jvlab.engine.worker._ipc_rank import IpcRank

            self.link = IpcRank(model, plan, self.rank, index)
        else:
            endpoints = json.loads(ranks_json[self.rank])
            of = self._worker, model, plan, self.rank, index, transport, endpoints, seconds
            link = BucketRank(*of, zero_padding=self._adapter is not None)
            if self._last is not None and self._last.plan == plan:
                link.weights.committed = self._last.weights.committed
                link.weights.reloads = self._last.weights.reloads
            self.link = self._last = link
        return {**self.link.open(), "adapter": _lora_slots.NUMBER if self._adapter is not None else 0}

    def _model_of(self, plan: TransferPlan) -> Any:
        """The memory that a plan writes: the model's, or that of an adapter's slot."""
        names = [p.name for p in plan.parameters]
        self._adapter, self._stale = None, True
        if not names or not names[0].startswith(_lora_slots.PREFIX):
            return self.model
        self.slot = self.slot or AdapterSlot(self._worker)
        pairs = zip(plan.target_parameter, plan.target_rank, strict=True)
        mine = {plan.parameters[int(p)].name for p, r in pairs if r == self.rank}
        self._adapter = self.slot.memory(sorted(mine))
        return self._adapter

    @returns_errors
    def trace_adapter(self, tensors: list[list[Any]]) -> dict[str, Any]:
        """Where an adapter's tensors go in a slot of this rank."""
        return _lora_slots.trace_worker_adapter(self._worker, tensors)

    def _close(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    @returns_errors
    def close(self) -> dict[str, Any]:
        """Close the link and free its shadows."""
        self._close()
        return {}

    def _open_link(self) -> RankLink:
        if self.link is None:
            raise SyncError(f"rank {self.rank} has no link", remedy="open the link on this replica first")
        return self.link

    # A sync -------------------------------------------------------------------------------------------------------

    @returns_errors
    def prepare(self, terms: dict[str, Any]) -> dict[str, Any]:
        """Allocate what a sync needs."""
        inject_fault("worker", "prepare", self.rank)
        self._mode = terms["mode"]
        return self._open_link().prepare(terms)

    @returns_errors
    def move(self, terms: dict[str, Any] | None = None) -> dict[str, Any]:
        """Accept weights from now on; returns at once. With `terms`: prepare first."""
        inject_fault("worker", "move", self.rank)
        link = self._open_link()
        if terms is not None:
            self._mode = terms["mode"]
            link.prepare(terms)
        if self._mode == "direct":
            self._clear_slot()
        return link.move()

    @returns_errors
    def verify(self, wait: float) -> dict[str, Any]:
        """Digests of what arrived, by parameter. Waits at most `wait` seconds; "done" says if all had arrived."""
        inject_fault("worker", "verify", self.rank)
        self._check_slot()
        return self._open_link().verify(wait)

    @returns_errors
    def commit(self) -> dict[str, Any]:
        """The model computes with the new weights from now on."""
        inject_fault("worker", "commit", self.rank)
        link = self._open_link()
        if self._mode == "staged":
            self._clear_slot()
        answer = link.commit()
        self._check_slot()
        inject_fault("worker", "committed", self.rank, self.model)
        return answer

    def _check_slot(self) -> None:
        """Raise if the open link is an adapter's, and its slot was given away."""
        if self.slot is not None and self._adapter is not None:
            self.slot.check()

    def _clear_slot(self) -> None:
        """Before this link's first write: clear what an earlier one left in the slot; generation is halted.

        Versions of the base are computed without an adapter; an adapter writes no more than its own modules and rank.
        """
        if self.slot is not None and self._stale:
            self.slot.clear()
            self._stale = False

    @returns_errors
    def abandon(self) -> dict[str, Any]:
        """Abandon the sync. "closed": whether the link must be opened again."""
        return {"closed": True} if self.link is None else self.link.abandon()

    @returns_errors
    def release_shadows(self) -> dict[str, Any]:
        """Free the shadows between syncs; the next staged sync allocates new ones."""
        if self.link is not None:
            self.link.release_shadows()
        return {}

    @returns_errors
    def clear_kv(self) -> dict[str, Any]:
        """Zero all KV memory: it may have held values that are not finite."""
        _poison.clear_kv(self._worker)
        return {}

    @returns_errors
    def clears_new_blocks(self) -> dict[str, Any]:
        """From now on, zero the blocks that the scheduler names before they are used."""
        return {"ready": _poison.clears_new_blocks(self._worker)}

    # Inspection ---------------------------------------------------------------------------------------------------

    @returns_errors
    def check(self, midway: bool) -> dict[str, Any]:
        """Digests of what the engine computes with now, and in "evidence" how they were obtained.

        `midway` in a sync: of the parameters that have arrived so far.
        """
        inject_fault("worker", "check", self.rank, self.model)
        self._check_slot()
        return (self.link or self._last or self._open_link()).check(midway)

    @returns_errors
    def peek(self, rank: int, parameter: str, start: int, count: int) -> dict[str, Any]:
        """Bytes of one live parameter, on the given rank."""
        if rank != self.rank:
            return {"data": b"", "total": 0}
        ours = self._adapter if parameter.startswith(_lora_slots.PREFIX) else None
        data, total = peek(self.model if ours is None else ours, parameter, start, count)
        return {"data": data, "total": total}

    @returns_errors
    def capture_routes(self) -> dict[str, Any]:
        """Return the experts of each token with its request's output; rank 0 only: all choose the same."""
        from jvlab.engine.worker._routes import RouteCapture

        return {"layers": len(RouteCapture(self._worker.model_runner)) if self.rank == 0 else 0}

    @returns_errors
    def begin_hidden(self) -> dict[str, Any]:
        """Record the decoder layers' outputs from now on; returns their number. Rank 0 only: all have the same."""
        self.end_hidden()
        if self.rank == 0:
            self._hidden_states = HiddenStates(self._whole)
        return {"layers": len(self._hidden_states or ())}

    @returns_errors
    def hidden(self, layer: int, start: int, count: int) -> dict[str, Any]:
        """Bytes of a layer's recorded output."""
        data = b"" if self._hidden_states is None else self._hidden_states.rows(layer)
        return {"data": data[start : start + count], "total": len(data)}

    @returns_errors
    def end_hidden(self) -> dict[str, Any]:
        """Stop recording, and drop what was recorded."""
        if self._hidden_states is not None:
            self._hidden_states.end()
        self._hidden_states = None
        return {}
