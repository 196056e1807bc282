"""One worker's side of syncs: open a link, prepare, verify, commit, abandon; plain values in and out."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jvlab._errors import JvlabError, SyncError, Unsupported
from jvlab._files import Plain
from jvlab.engine.tracing import _lora_slots, _vllm_model
from jvlab.engine.tracing._lora_slots import AdapterSlot
from jvlab.engine.tracing._trace import trace_worker
from jvlab.engine.tracing._vllm_model import DRAFT, DraftWeights, bare_model
from jvlab.engine.worker import _fault_injection, _poison
from jvlab.engine.worker._live_memory import peek
from jvlab.engine.worker._receivers import (
    Ledger,
    Receivers,
    ReceivingChannel,
    describe_missing,
)
from jvlab.engine.worker._weights import Weights
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import LinkPlan, source_order
from jvlab.transport._choose import open_receiver
from jvlab.transport._ipc_kernels import Launcher, cupy
from jvlab.transport._ipc_tables import Table, digest_pieces, tables
from jvlab.transport._shm import available_bytes

if TYPE_CHECKING:
    from jvlab.engine.worker._ipc_rank import IpcRank


# Hidden states of a live engine: hooks on its decoder layers while one sequence is scored, for `link.bisect`.


class HiddenStates:
    """Records the output of each decoder layer."""

    def __init__(self, model: Any) -> None:
        self._layers = decoder_layers(model)
        self._rows: list[list[Any]] = [[] for _ in self._layers]
        self._hooks = [
            layer.register_forward_hook(partial(self._keep, i))
            for i, layer in enumerate(self._layers)
        ]

    def __len__(self) -> int:
        return len(self._layers)

    def _keep(self, index: int, _module: Any, _inputs: Any, output: Any) -> None:
        states, *rest = output if isinstance(output, tuple) else (output,)
        # vLLM adds a layer's output to the residual in the next layer's norm
        if rest and rest[0] is not None:
            states = states + rest[0]
        self._rows[index].append(states.detach().float().cpu())

    def rows(self, index: int) -> bytes:
        """The layer's output so far, float32 [tokens, width]."""
        kept = self._rows[index]
        return torch.cat(kept).numpy().tobytes() if kept else b""

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


def decoder_layers(model: Any) -> list[Any]:
    """The decoder's layers: the only module list called `layers` (gpt2: `h`)."""
    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and name.rpartition(".")[2] in ("layers", "h")
    ]
    if len(found) != 1:
        raise Unsupported(
            f"{len(found)} lists of layers in this model",
            remedy="only plain decoders have hidden states to read",
        )
    return list(found[0])


# One rank's end of a link that sends buckets: channels to the trainer, receive threads, and the weights they write.

STOP_SECONDS = 10.0
# transports whose buckets are scattered in host memory
HOST_ONLY = ("loopback", "shm", "tcp", "disk")


class BucketRank:
    """The channels and weights of one rank while a link is open. Every method returns plain values."""

    def __init__(
        self,
        worker: Any,
        model: torch.nn.Module,
        plan: TransferPlan,
        rank: int,
        index: int,
        *,
        transport: str,
        endpoints: list[Plain],
        seconds: float,
        zero_padding: bool,
    ) -> None:
        self.plan = plan
        self.rank = rank
        kind = next((t.device.type for t in model.parameters()), "cpu")
        if kind != "cpu" and transport in HOST_ONLY:
            raise Unsupported(
                f"transport {transport!r} writes host memory, this engine's is on {kind}",
                remedy='connect with transport="auto", or launch with device="cpu"',
            )
        table = plan.links(index)
        devices = sorted(table.device[table.rank == rank].tolist())
        links = [source_order(plan.link(device, rank, index)) for device in devices]
        ledger = Ledger(links)
        digest = None
        if kind == "cuda":
            digest = DeviceDigest(plan, links, torch.cuda.current_device())
        self.weights = Weights(
            worker,
            model,
            plan,
            rank,
            ledger,
            zero_padding=zero_padding,
            digest=digest,
        )
        self._cores = cores_of_process()
        channels = _open_channels(plan, devices, endpoints, seconds)
        self._receivers = Receivers(
            channels,
            ledger,
            self.weights.scatter,
            self.weights.finish,
            self.weights.end,
            self._unbind,
            self.weights.patch,
        )
        self._version = 0
        self._bucket_seconds = 30.0

    def _unbind(self) -> None:
        """Let this thread use all cores of the process: vLLM binds its main thread to one, and threads inherit that."""
        os.sched_setaffinity(0, self._cores)
        if self.weights.device.type == "cuda":
            # a new thread starts with device 0
            torch.cuda.set_device(self.weights.device)

    def prepare(self, terms: Plain) -> Plain:
        """Allocate what a sync needs."""
        self._receivers.check()
        self._version = int(terms["version"])
        self._bucket_seconds = float(terms["bucket_seconds"])
        if self.weights.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.weights.device)[0]
        else:  # ranks on a CPU share one memory
            free = available_bytes() // max(1, self.plan.ranks)
        self.weights.prepare(
            self._version,
            terms["mode"],
            terms["verify"],
            free,
            terms["base"],
            terms["mark"],
        )
        if not terms["mark"]:
            return {}
        holds = {"rank": self.rank, "holds_base": self.weights.sparse}
        return {"handles": [json.dumps(holds)]}

    def move(self) -> None:
        """Receive buckets from now on; returns at once."""
        if self.weights.device.type == "cuda" and self.weights.mode == "direct":
            # the last step may still be reading
            torch.cuda.synchronize(self.weights.device)
        self.weights.move()
        self._receivers.start(self._version, self._bucket_seconds, self.weights.sparse)

    def verify(self, wait: float) -> Plain:
        """Digests of what arrived; "done" is false if not all did within `wait` seconds."""
        receivers = self._receivers
        weights = self.weights
        end = time.monotonic() + wait
        while not receivers.done and time.monotonic() < end:
            time.sleep(0.0005)
        if receivers.error is not None:
            raise receivers.error
        done = receivers.done and weights.confirm(end)
        return {
            "done": done,
            "digests": weights.digests(weights.found) if done else [],
            "evidence": dict(Counter(weights.how.values())) if done else {},
            "seconds": {**receivers.clock.seconds, **weights.clock.seconds},
            "bytes": receivers.ledger.bytes,
            "missing": describe_missing(receivers.ledger.missing()),
        }

    def commit(self) -> Plain:
        """The model computes with the new weights from now on."""
        receivers = self._receivers
        if not receivers.done or receivers.error is not None:
            missing = describe_missing(receivers.ledger.missing())
            raise SyncError(
                f"rank {self.rank}: commit without all weights: {missing} did not arrive"
            )
        self.weights.commit()
        return {"reloaded": self.weights.reloads.seconds}

    def abandon(self) -> None:
        """End the threads and free the shadows; channels in use are closed."""
        self._stop()

    def release_shadows(self) -> None:
        """Free the shadows; the next staged sync allocates new ones."""
        if not self._receivers.running:
            self.weights.abandon()
            if self.weights.device.type == "cuda":
                torch.cuda.empty_cache()

    def check(self, midway: bool) -> Plain:
        """Digests of what the engine computes with now, or, midway in a sync, of what has arrived so far."""
        found, how = (self.weights.midway(), {}) if midway else self.weights.check()
        return {
            "digests": self.weights.digests(found),
            "evidence": dict(Counter(how.values())),
        }

    def close(self) -> None:
        """Close the channels and free the shadows; `check` still works."""
        self._receivers.close()
        self._stop()
        if self.weights.keeps():
            self.weights.forget_base()

    def _stop(self) -> None:
        if not self._receivers.stop(STOP_SECONDS):
            raise SyncError(
                f"rank {self.rank}: a receive thread did not end within {STOP_SECONDS:g} s",
                remedy="restart the replica",
            )
        self.weights.abandon()


def _open_channels(
    plan: TransferPlan,
    devices: list[int],
    endpoints: list[Plain],
    seconds: float,
) -> list[ReceivingChannel]:
    """One per trainer process, in order; processes that send nothing to this rank are left out."""
    processes = sorted({int(p) for p in plan.processes})
    if len(endpoints) == 1:
        groups = [(processes[0], devices)]
    else:
        groups = [
            (p, [d for d in devices if plan.process_of(d) == p]) for p in processes
        ]
    deadline = time.monotonic() + seconds
    channels: list[ReceivingChannel] = []
    try:
        for (process, mine), endpoint in zip(groups, endpoints, strict=True):
            receiver = open_receiver(endpoint, max(0.1, deadline - time.monotonic()))
            channels.append(ReceivingChannel(receiver, tuple(mine), process))
    except BaseException:
        for channel in channels:
            channel.receiver.close()
        raise
    return channels


def cores_of_process() -> set[int]:
    """The cores of all threads of this process: OpenMP has bound each of its threads to one."""
    cores: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            cores |= os.sched_getaffinity(int(thread))
    return cores


# Digests of a rank's targets, computed on the GPU one target at a time.


class DeviceDigest:
    """Digests by target number; the kernel tables are built once per target and kept on the device."""

    def __init__(
        self, plan: TransferPlan, links: Sequence[LinkPlan], device: int
    ) -> None:
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
            pieces = [
                replace(p, source=0, target=0, slot=0) for p in self._pieces[number]
            ]
            made: list[Table] = tables(pieces, aligned)
            self._launchers[number, aligned] = Launcher(
                self._device, made, 1, write=False, look=False
            )
        return self._launchers[number, aligned]


# ----------------------------------------------------------------------------------------------------


def returns_errors(method: Callable[..., Plain | None]) -> Callable[..., Plain]:
    """Return errors instead of raising: an exception in a worker reaches the engine only as text, or kills it."""

    @functools.wraps(method)
    def guarded(self: WorkerSync, *args: Any) -> Plain:
        try:
            return {"rank": self.rank, **(method(self, *args) or {})}
        except Exception as error:  # ours, or from vLLM, torch or a transport
            if not isinstance(error, JvlabError):
                text = f"{type(error).__name__}: {error}"
                error = SyncError(text, remedy="see the replica's log")
            return {
                "rank": self.rank,
                "error": error.message,
                "remedy": error.remedy,
                "kind": type(error).__name__,
            }

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
        self._drafts = False  # whether the open link is the draft model's
        self._stale = True  # the slot may hold what an earlier link left there
        self._mode = "direct"
        self.link: BucketRank | IpcRank | None = None
        # kept after its link is closed: it knows what arrived. By whether it is the draft model's
        self._lasts: dict[bool, BucketRank] = {}
        self._hidden_states: HiddenStates | None = None  # while they are recorded

    # A link -------------------------------------------------------------------------------------------------------

    @returns_errors
    def open(
        self,
        transport: str,
        plan_bytes: bytes,
        index: int,
        ranks_json: list[str],
        seconds: float,
    ) -> Plain:
        """Open this rank's channels and find every target of the plan; raises if one can't be synced."""
        self._close()
        plan = TransferPlan.from_bytes(plan_bytes)
        model = self._model_of(plan)
        last = self._last
        answer: Plain = {"drafts": self._drafts}
        if self._adapter is not None:
            answer["adapter"] = _lora_slots.NUMBER
        if transport == "ipc":
            from jvlab.engine.worker._ipc_rank import IpcRank

            self.link = link = IpcRank(model, plan, self.rank, index)
            answer |= link.open()
            if last is not None:
                last.weights.forget_base()
        else:
            link = BucketRank(
                self._worker,
                model,
                plan,
                self.rank,
                index,
                transport=transport,
                endpoints=json.loads(ranks_json[self.rank]),
                seconds=seconds,
                zero_padding=self._adapter is not None,
            )
            if last is not None and last.plan == plan:
                link.weights.committed = last.weights.committed
                link.weights.reloads = last.weights.reloads
                if self._adapter is None:  # an adapter's slot is cleared at first
                    link.weights.base = last.weights.base
            self.link = self._lasts[self._drafts] = link
        return answer

    @property
    def _last(self) -> BucketRank | None:
        """The last link of the same kind as the open one, or as the one that was open last."""
        return self._lasts.get(self._drafts)

    def _model_of(self, plan: TransferPlan) -> Any:
        """The memory that a plan writes: the model's, the draft model's, or that of an adapter's slot."""
        names = [p.name for p in plan.parameters]
        self._adapter = None
        self._drafts = any(name.startswith(DRAFT) for name in names)
        # drafts leave the model as it is, and its adapter too
        self._stale = not self._drafts
        if self._drafts:
            return self._drafter
        if not names or not names[0].startswith(_lora_slots.PREFIX):
            return self.model
        self.slot = self.slot or AdapterSlot(self._worker)
        pairs = zip(plan.target_parameter, plan.target_rank, strict=True)
        mine = {plan.parameters[int(p)].name for p, r in pairs if r == self.rank}
        self._adapter = self.slot.memory(sorted(mine))
        return self._adapter

    @functools.cached_property
    def _drafter(self) -> DraftWeights:
        """The draft model's weights, once a link has asked for them."""
        return DraftWeights(_vllm_model.draft_model(self._worker))

    @returns_errors
    def trace(self, tensors: list[list[Any]]) -> Plain:
        """Where this rank's loader puts every checkpoint element; moves nothing.

        The names say whether they are the model's tensors, an adapter's or the draft model's.
        """
        if _lora_slots.is_adapter([tensor[0] for tensor in tensors]):
            return _lora_slots.trace_worker_adapter(self._worker, tensors)
        return trace_worker(self._worker, tensors)

    def _close(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    @returns_errors
    def close(self) -> None:
        """Close the link and free its shadows."""
        self._close()

    def _open_link(self) -> BucketRank | IpcRank:
        if self.link is None:
            raise SyncError(
                f"rank {self.rank} has no link",
                remedy="open the link on this replica first",
            )
        return self.link

    # A sync -------------------------------------------------------------------------------------------------------

    @returns_errors
    def prepare(self, terms: Plain) -> Plain:
        """Allocate what a sync needs."""
        self._fault("prepare")
        self._mode = terms["mode"]
        return self._open_link().prepare(terms)

    @returns_errors
    def move(self, terms: Plain | None = None) -> Plain | None:
        """Accept weights from now on; returns at once. With `terms`: prepare first."""
        self._fault("move")
        link = self._open_link()
        if terms is not None:
            self._mode = terms["mode"]
            link.prepare(terms)
        if self._mode == "direct":
            self._clear_slot()
        return link.move()

    @returns_errors
    def verify(self, wait: float) -> Plain:
        """Digests of what arrived, by parameter. Waits at most `wait` seconds; "done" says if all had arrived."""
        self._fault("verify")
        self._check_slot()
        return self._open_link().verify(wait)

    @returns_errors
    def commit(self) -> Plain | None:
        """The model computes with the new weights from now on."""
        self._fault("commit")
        link = self._open_link()
        if self._mode == "staged":
            self._clear_slot()
        answer = link.commit()
        self._check_slot()
        self._fault("committed", self._written)
        return answer

    @property
    def _written(self) -> Any:
        """The weights that the open link writes, or that the last one wrote; an adapter's count as the model's."""
        return self._drafter if self._drafts else self.model

    def _fault(self, phase: str, model: Any = None) -> None:
        if _fault_injection.VARIABLE in os.environ:
            _fault_injection.inject_fault("worker", phase, self.rank, model)

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
    def abandon(self) -> None:
        """Abandon the sync, if there is one."""
        if self.link is not None:
            self.link.abandon()

    @returns_errors
    def release_shadows(self) -> None:
        """Free the shadows between syncs; the next staged sync allocates new ones."""
        if self.link is not None:
            self.link.release_shadows()

    @returns_errors
    def clear_kv(self) -> None:
        """Zero all KV memory: it may have held values that are not finite."""
        _poison.clear_kv(self._worker)

    @returns_errors
    def clears_new_blocks(self) -> Plain:
        """From now on, zero the blocks that the scheduler names before they are used."""
        return {"ready": _poison.clears_new_blocks(self._worker)}

    # Inspection ---------------------------------------------------------------------------------------------------

    @returns_errors
    def check(self, midway: bool) -> Plain:
        """Digests of what the engine computes with now, and in "evidence" how they were obtained.

        `midway` in a sync: of the parameters that have arrived so far.
        """
        self._fault("check", self._written)
        self._check_slot()
        return (self.link or self._last or self._open_link()).check(midway)

    @returns_errors
    def peek(self, rank: int, parameter: str, start: int, count: int) -> Plain:
        """Bytes of one live parameter, on the given rank."""
        if rank != self.rank:
            return {"data": b"", "total": 0}
        ours = self._adapter if parameter.startswith(_lora_slots.PREFIX) else None
        if parameter.startswith(DRAFT):
            ours = self._drafter
        data, total = peek(
            self.model if ours is None else ours, parameter, start, count
        )
        return {"data": data, "total": total}

    @returns_errors
    def capture_routes(self) -> None:
        """Return the experts of each token with its request's output; rank 0 only: all choose the same."""
        from jvlab.engine.worker._routes import RouteCapture

        if self.rank == 0:
            RouteCapture(self._worker.model_runner)

    @returns_errors
    def begin_hidden(self) -> Plain:
        """Record the decoder layers' outputs from now on; returns their number. Rank 0 only: all have the same."""
        self.end_hidden()
        if self.rank == 0:
            self._hidden_states = HiddenStates(self._whole)
        return {"layers": len(self._hidden_states or ())}

    @returns_errors
    def hidden(self, layer: int, start: int, count: int) -> Plain:
        """Bytes of a layer's recorded output."""
        data = b"" if self._hidden_states is None else self._hidden_states.rows(layer)
        return {"data": data[start : start + count], "total": len(data)}

    @returns_errors
    def end_hidden(self) -> None:
        """Stop recording, and drop what was recorded."""
        if self._hidden_states is not None:
            self._hidden_states.end()
            self._hidden_states = None
