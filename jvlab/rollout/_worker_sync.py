"""One worker's part in syncs: opens channels, receives, verifies, commits; plain values in and out."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable
from typing import Any

from jvlab._errors import JvlabError, SyncError, TransportError, Unsupported
from jvlab.layout._plan import LinkPlan, TransferPlan
from jvlab.layout._wire_order import source_order
from jvlab.rollout import _hidden
from jvlab.rollout._receive import Channel, Intake, Ledger, describe_missing
from jvlab.rollout._strikes import strike
from jvlab.rollout._weights import Weights, peek
from jvlab.transport._host_memory import available_bytes

STOP_SECONDS = 10.0
HOST_ONLY = ("loopback", "shm", "gloo", "disk")  # transports whose buckets are scattered in host memory
OpenReceiver = Callable[[dict[str, Any], float], Any]


def told(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """What goes wrong is returned, not raised: an exception in a worker reaches the engine as text, or ends it."""

    @functools.wraps(method)
    def guarded(self: WorkerSync, *args: Any) -> dict[str, Any]:
        try:
            return {"rank": self.rank, **method(self, *args)}
        except JvlabError as error:
            return {"rank": self.rank, "error": error.message, "remedy": error.remedy, "kind": type(error).__name__}
        except Exception as error:  # vLLM, torch or a transport: named, so that it can be found
            text = f"{type(error).__name__}: {error}"
            return {"rank": self.rank, "error": text, "remedy": "see the replica's log", "kind": "SyncError"}

    return guarded


class WorkerSync:
    """The state of the one link that this worker knows."""

    def __init__(self, worker: Any, open_receiver: OpenReceiver | None = None) -> None:
        from jvlab.rollout import _vllm_model

        self._worker, self._vllm = worker, _vllm_model
        self._open_receiver = open_receiver
        with _vllm_model.current_config(worker):
            self.rank, _ = _vllm_model.coordinates()
        self.model = _vllm_model.worker_model(worker)
        self._cores = cores_of_process()
        self.intake: Intake | None = None
        self.weights: Weights | None = None
        self.ipc: Any = None  # IpcRank, while a link by ipc is open
        self._listener: _hidden.Listener | None = None  # while somebody looks at hidden states
        self._version = 0
        self._bucket_seconds = 30.0

    # A link -------------------------------------------------------------------------------------------------------

    @told
    def open(
        self, transport: str, plan_bytes: bytes, index: int, ranks_json: list[str], seconds: float
    ) -> dict[str, Any]:
        """Open this rank's channels and find every destination of the plan; refuses what can't be synced."""
        self._shut()
        plan = TransferPlan.from_bytes(plan_bytes)
        if not self.rank < min(plan.ranks, len(ranks_json)):
            raise SyncError(
                f"this is rank {self.rank}; the plan has {plan.ranks} ranks, {len(ranks_json)} have endpoints",
                remedy="the plan was made for another engine: connect again",
            )
        if transport == "ipc":
            from jvlab.rollout._worker_ipc import IpcRank

            self.ipc = IpcRank(self.model, plan, self.rank, index)
            return self.ipc.open()
        kind = next((t.device.type for t in self.model.parameters()), "cpu")
        if kind != "cpu" and transport in HOST_ONLY:
            raise Unsupported(
                f"transport {transport!r} writes host memory, this engine's is on {kind}",
                remedy='connect with transport="auto", or launch with device="cpu"',
            )
        table = plan.links(index)
        devices = sorted(table.device[table.rank == self.rank].tolist())
        links = [source_order(plan.link(device, self.rank, index)) for device in devices]
        ledger = Ledger(links)
        committed = self.weights.committed if self.weights is not None and self.weights.plan == plan else {}
        weights = Weights(
            self.model, plan, self.rank, ledger, self._vllm.staged_layers(self.model),
            refuse=self._vllm.not_repackable, experts=self._vllm.moe_method, load=self._load, derive=self._derive,
            swaps=self._vllm.may_swap(self._worker),
            digest=self._device_digest(plan, links) if kind == "cuda" else None,
        )  # fmt: skip
        weights.committed = committed
        channels = self._channels(plan, devices, json.loads(ranks_json[self.rank]), transport, seconds)
        self.weights = weights
        self.intake = Intake(channels, ledger, weights.scatter, weights.finish, weights.end, self._unbind)
        return {"handles": [], "bytes": sum(b.nbytes for b in ledger.buckets.values())}

    @staticmethod
    def _device_digest(plan: TransferPlan, links: list[LinkPlan]) -> Callable[[int, Any], int]:
        import torch

        from jvlab.rollout._device_digest import DeviceDigest

        return DeviceDigest(plan, links, torch.cuda.current_device())

    def _channels(
        self, plan: TransferPlan, devices: list[int], endpoints: list[dict[str, Any]], transport: str, seconds: float
    ) -> list[Channel]:
        """One per trainer process, in the order of their numbers; those that send nothing to this rank are left out."""
        open_receiver = self._open_receiver
        if open_receiver is None:
            from jvlab.transport._choose import open_receiver
        processes = sorted({int(p) for p in plan.processes})
        if len(endpoints) == 1:
            groups = [(processes[0], devices)]
        elif len(endpoints) == len(processes):
            groups = [(p, [d for d in devices if plan.process_of(d) == p]) for p in processes]
        else:
            raise SyncError(
                f"{len(endpoints)} endpoints for {len(processes)} trainer processes", remedy="connect again"
            )
        deadline = time.monotonic() + seconds
        channels: list[Channel] = []
        try:
            for (process, mine), endpoint in zip(groups, endpoints, strict=True):
                if endpoint.get("transport", transport) != transport:
                    raise TransportError(f"an endpoint of {endpoint.get('transport')!r} on a link by {transport!r}")
                receiver = open_receiver(endpoint, max(0.1, deadline - time.monotonic()))
                channels.append(Channel(receiver, tuple(mine), process))
        except BaseException:
            for channel in channels:
                channel.receiver.close()
            raise
        return channels

    def _unbind(self) -> None:
        """vLLM ties its main thread to one core, and threads inherit that: ours may use all that the process may."""
        if self._cores:
            os.sched_setaffinity(0, self._cores)
        if self.weights is not None and self.weights.device.type == "cuda":
            import torch

            torch.cuda.set_device(self.weights.device)  # a new thread begins with device 0

    def _load(self, tensors: list[tuple[str, Any]]) -> None:
        with self._vllm.current_config(self._worker):
            self.model.load_weights(iter(tensors))  # type: ignore[operator]

    def _derive(self, layer: Any) -> None:
        with self._vllm.current_config(self._worker):
            layer.process_weights_after_loading(self._worker.model_config.dtype)

    def _shut(self) -> None:
        if self.ipc is not None:
            self.ipc.close()
            self.ipc = None
        if self.intake is not None:
            self.intake.close()
            if not self.intake.stop(STOP_SECONDS):
                raise SyncError(
                    f"rank {self.rank}: a receive thread of the link before did not end within {STOP_SECONDS:g} s",
                    remedy="restart the replica",
                )
            self.intake = None
        if self.weights is not None:
            self.weights.abandon()

    @told
    def close(self) -> dict[str, Any]:
        """End the link; the memory of shadows is given back."""
        self._shut()
        return {}

    def _need(self) -> tuple[Intake, Weights]:
        if self.intake is None or self.weights is None:
            raise SyncError(f"rank {self.rank} has no link", remedy="open the link on this replica first")
        return self.intake, self.weights

    # A sync -------------------------------------------------------------------------------------------------------

    @told
    def prepare(self, terms: dict[str, Any]) -> dict[str, Any]:
        """Make room for a sync."""
        strike("worker", "prepare", self.rank)
        if self.ipc is not None:
            return self.ipc.prepare(terms)
        intake, weights = self._need()
        if intake.closed:
            raise TransportError("the channels were closed by an earlier failure", remedy="open the link again")
        if intake.running:
            raise SyncError(f"rank {self.rank}: an earlier move is still running", remedy="abandon it first")
        self._version, self._bucket_seconds = int(terms["version"]), float(terms["bucket_seconds"])
        if weights.device.type == "cuda":
            import torch

            free = torch.cuda.mem_get_info(weights.device)[0]
        else:  # ranks on a CPU share one memory, and each asks for its own part
            free = available_bytes() // max(1, weights.plan.ranks)
        return {"need": weights.prepare(self._version, terms["mode"], terms["verify"], free)}

    @told
    def move(self, terms: dict[str, Any] | None = None) -> dict[str, Any]:
        """Take buckets from now on; returns at once. With `terms` it is a prepare too."""
        strike("worker", "move", self.rank)
        if self.ipc is not None:
            if terms is not None:
                self.ipc.prepare(terms)
            return self.ipc.move()
        intake, weights = self._need()
        if weights.device.type == "cuda" and weights.mode == "direct":
            import torch

            torch.cuda.synchronize(weights.device)  # the last step may still be reading what is written now
        intake.start(self._version, self._bucket_seconds)
        return {}

    @told
    def verify(self, wait: float) -> dict[str, Any]:
        """What arrived: digests by parameter. Waits no longer than `wait`; "done" says if it was long enough."""
        strike("worker", "verify", self.rank)
        if self.ipc is not None:
            return self.ipc.verify()
        intake, weights = self._need()
        end = time.monotonic() + wait
        while not intake.done and time.monotonic() < end:
            time.sleep(0.0005)
        if intake.error is not None:
            raise intake.error
        return {
            "done": intake.done, "digests": weights.digests(weights.found) if intake.done else [],
            "seconds": {**intake.clock.seconds, **weights.clock.seconds}, "bytes": intake.ledger.bytes,
            "missing": describe_missing(intake.ledger.missing()), "dropped": intake.dropped,
        }  # fmt: skip

    @told
    def commit(self) -> dict[str, Any]:
        """The model computes with the new weights from now on."""
        strike("worker", "commit", self.rank)
        if self.ipc is not None:
            return self.ipc.commit()
        intake, weights = self._need()
        if not intake.done or intake.error is not None:
            missing = describe_missing(intake.ledger.missing())
            raise SyncError(f"rank {self.rank}: commit without all weights: {missing} did not arrive")
        weights.commit()
        return {"bytes": intake.ledger.bytes}

    @told
    def abandon(self) -> dict[str, Any]:
        """Give the sync up: threads end, shadows are freed. Channels that were in use are closed."""
        if self.ipc is not None:
            return self.ipc.abandon()
        if self.intake is None or self.weights is None:
            return {"closed": True}
        if not self.intake.stop(STOP_SECONDS):
            raise SyncError(
                f"rank {self.rank}: a receive thread did not end within {STOP_SECONDS:g} s",
                remedy="restart the replica",
            )
        self.weights.abandon()
        return {"closed": self.intake.closed}

    @told
    def shed(self) -> dict[str, Any]:
        """Give the memory of shadows back, between syncs: the next staged one makes them anew."""
        if self.ipc is not None:
            self.ipc.shed()
        elif self.weights is not None and not (self.intake is not None and self.intake.running):
            self.weights.abandon()
            if self.weights.device.type == "cuda":
                import torch

                torch.cuda.empty_cache()
        return {}

    # Looking ------------------------------------------------------------------------------------------------------

    @told
    def check(self, midway: bool) -> dict[str, Any]:
        """Digests of live memory now. Those named in "packed" were taken of the raw weights when they were packed.

        `midway` in a sync: those of the parameters that have arrived so far.
        """
        strike("worker", "check", self.rank, self.model)
        if self.ipc is not None:
            return self.ipc.check(midway)
        if self.weights is None:
            raise SyncError(f"rank {self.rank} has no link", remedy="open the link on this replica first")
        if midway:
            return {"digests": self.weights.digests(dict(self.weights.found)), "packed": []}
        found, packed = self.weights.check()
        return {"digests": self.weights.digests(found), "packed": packed}

    @told
    def peek(self, rank: int, parameter: str, start: int, count: int) -> dict[str, Any]:
        """Bytes of one live parameter, on the rank that is asked."""
        if rank != self.rank:
            return {"data": b"", "total": 0}
        if parameter.startswith(_hidden.MARK):
            self._listener, told = _hidden.answer(self._listener, self.model, parameter)
            return {"data": told[start : start + count], "total": len(told)}
        data, total = peek(self.model, parameter, start, count)
        return {"data": data, "total": total}


def cores_of_process() -> set[int]:
    """Cores of all threads of this process together: OpenMP has bound each of its own to one."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    cores: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            cores |= os.sched_getaffinity(int(thread))
    return cores
