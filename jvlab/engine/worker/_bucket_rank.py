"""One rank's end of a link that sends buckets: channels to the trainer, receive threads, and the weights they write."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from jvlab._errors import SyncError, TransportError, Unsupported
from jvlab.engine.tracing import _vllm_model
from jvlab.engine.worker._receivers import Ledger, Receivers, ReceivingChannel, describe_missing
from jvlab.engine.worker._weights import Weights
from jvlab.layout._element_order import source_order
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import LinkPlan
from jvlab.transport._choose import open_receiver
from jvlab.transport._host_memory import available_bytes

STOP_SECONDS = 10.0
HOST_ONLY = ("loopback", "shm", "gloo", "disk")  # transports whose buckets are scattered in host memory


class BucketRank:
    """The channels and weights of one rank while a link is open. Every method returns plain values."""

    def __init__(
        self,
        worker: Any,
        model: torch.nn.Module,
        plan: TransferPlan,
        rank: int,
        index: int,
        transport: str,
        endpoints: list[dict[str, Any]],
        seconds: float,
        zero_padding: bool = False,  # what no tensor fills is zero, whatever live memory holds there
    ) -> None:
        self._worker, self._model, self.plan, self.rank = worker, model, plan, rank
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
        self.weights = Weights(
            model,
            plan,
            rank,
            ledger,
            _vllm_model.staged_layers(model),
            refuse=_vllm_model.not_repackable,
            experts=_vllm_model.moe_method,
            load=self._load,
            derive=self._derive,
            derived_well=_vllm_model.derived_well,
            swaps=_vllm_model.may_swap(worker),
            zero_padding=zero_padding,
            config=lambda: _vllm_model.current_config(worker),
            digest=_device_digest(plan, links) if kind == "cuda" else None,
        )
        self._cores = cores_of_process()
        channels = _open_channels(plan, devices, endpoints, transport, seconds)
        self._receivers = Receivers(
            channels, ledger, self.weights.scatter, self.weights.finish, self.weights.end, self._unbind
        )
        self._version, self._bucket_seconds = 0, 30.0

    def _unbind(self) -> None:
        """Let this thread use all cores of the process: vLLM binds its main thread to one, and threads inherit that."""
        if self._cores:
            os.sched_setaffinity(0, self._cores)
        if self.weights.device.type == "cuda":
            torch.cuda.set_device(self.weights.device)  # a new thread starts with device 0

    def _load(self, tensors: list[tuple[str, Any]]) -> None:
        with _vllm_model.current_config(self._worker):
            self._model.load_weights(iter(tensors))  # type: ignore[operator]

    def _derive(self, layer: Any) -> None:
        with _vllm_model.current_config(self._worker):
            _vllm_model.derive(layer, self._worker.model_config.dtype)

    def open(self) -> dict[str, Any]:
        """The number of bytes that a sync moves to this rank."""
        return {"handles": [], "bytes": sum(b.nbytes for b in self._receivers.ledger.buckets.values())}

    def prepare(self, terms: dict[str, Any]) -> dict[str, Any]:
        """Allocate what a sync needs."""
        if self._receivers.closed:
            raise TransportError("the channels were closed by an earlier failure", remedy="open the link again")
        if self._receivers.running:
            raise SyncError(f"rank {self.rank}: an earlier move is still running", remedy="abandon it first")
        self._version, self._bucket_seconds = int(terms["version"]), float(terms["bucket_seconds"])
        if self.weights.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.weights.device)[0]
        else:  # ranks on a CPU share one memory
            free = available_bytes() // max(1, self.plan.ranks)
        return {"need": self.weights.prepare(self._version, terms["mode"], terms["verify"], free)}

    def move(self) -> dict[str, Any]:
        """Receive buckets from now on; returns at once."""
        if self.weights.device.type == "cuda" and self.weights.mode == "direct":
            torch.cuda.synchronize(self.weights.device)  # the last step may still be reading
        self._receivers.start(self._version, self._bucket_seconds)
        return {}

    def verify(self, wait: float) -> dict[str, Any]:
        """Digests of what arrived; "done" is false if not all did within `wait` seconds."""
        receivers, weights = self._receivers, self.weights
        end = time.monotonic() + wait
        while not receivers.done and time.monotonic() < end:
            time.sleep(0.0005)
        if receivers.error is not None:
            raise receivers.error
        done = receivers.done and weights.confirm(end)
        return {
            "done": done,
            "digests": weights.digests(weights.found) if done else [],
            "evidence": weights.evidence.counts() if done else {},
            "seconds": {**receivers.clock.seconds, **weights.clock.seconds},
            "bytes": receivers.ledger.bytes,
            "missing": describe_missing(receivers.ledger.missing()),
            "dropped": receivers.dropped,
        }

    def commit(self) -> dict[str, Any]:
        """The model computes with the new weights from now on."""
        receivers = self._receivers
        if not receivers.done or receivers.error is not None:
            missing = describe_missing(receivers.ledger.missing())
            raise SyncError(f"rank {self.rank}: commit without all weights: {missing} did not arrive")
        self.weights.commit()
        return {"bytes": receivers.ledger.bytes, "reloaded": self.weights.reloads.seconds}

    def abandon(self) -> dict[str, Any]:
        """End the threads and free the shadows; channels in use are closed."""
        self._stop()
        return {"closed": self._receivers.closed}

    def release_shadows(self) -> None:
        """Free the shadows; the next staged sync allocates new ones."""
        if not self._receivers.running:
            self.weights.abandon()
            if self.weights.device.type == "cuda":
                torch.cuda.empty_cache()

    def check(self, midway: bool) -> dict[str, Any]:
        """Digests of what the engine computes with now, or, midway in a sync, of what has arrived so far."""
        found, how = (self.weights.midway(), {}) if midway else self.weights.check()
        return {"digests": self.weights.digests(found), "evidence": dict(Counter(how.values()))}

    def close(self) -> None:
        """Close the channels and free the shadows; `check` still works."""
        self._receivers.close()
        self._stop()

    def _stop(self) -> None:
        if not self._receivers.stop(STOP_SECONDS):
            raise SyncError(
                f"rank {self.rank}: a receive thread did not end within {STOP_SECONDS:g} s",
                remedy="restart the replica",
            )
        self.weights.abandon()


def _device_digest(plan: TransferPlan, links: list[LinkPlan]) -> Callable[[int, Any], int]:
    from jvlab.engine.worker._device_digest import DeviceDigest

    return DeviceDigest(plan, links, torch.cuda.current_device())


def _open_channels(
    plan: TransferPlan, devices: list[int], endpoints: list[dict[str, Any]], transport: str, seconds: float
) -> list[ReceivingChannel]:
    """One per trainer process, in order; processes that send nothing to this rank are left out."""
    processes = sorted({int(p) for p in plan.processes})
    if len(endpoints) == 1:
        groups = [(processes[0], devices)]
    elif len(endpoints) == len(processes):
        groups = [(p, [d for d in devices if plan.process_of(d) == p]) for p in processes]
    else:
        raise SyncError(f"{len(endpoints)} endpoints for {len(processes)} trainer processes", remedy="connect again")
    deadline = time.monotonic() + seconds
    channels: list[ReceivingChannel] = []
    try:
        for (process, mine), endpoint in zip(groups, endpoints, strict=True):
            if endpoint.get("transport", transport) != transport:
                raise TransportError(f"an endpoint of {endpoint.get('transport')!r} on a link by {transport!r}")
            receiver = open_receiver(endpoint, max(0.1, deadline - time.monotonic()))
            channels.append(ReceivingChannel(receiver, tuple(mine), process))
    except BaseException:
        for channel in channels:
            channel.receiver.close()
        raise
    return channels


def cores_of_process() -> set[int]:
    """The cores of all threads of this process: OpenMP has bound each of its threads to one."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    cores: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            cores |= os.sched_getaffinity(int(thread))
    return cores
