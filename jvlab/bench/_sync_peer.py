"""vLLM's own ways to load new weights, timed inside plain vLLM: the peer of `jvlab bench sync`."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jvlab.engine.worker._extension import WorkerExtension


class VllmPeer(WorkerExtension):
    """Mixed into vLLM's worker; has jvlab's switch between live and packed weights."""

    def peer_reload(self, folder: str) -> float:
        """vLLM's layerwise reload of a checkpoint; the seconds it took."""
        start = time.perf_counter()
        self.model_runner.reload_weights(weights_path=folder)  # type: ignore[attr-defined]
        return time.perf_counter() - start

    def peer_feed(self, folder: str) -> float:
        """The same from tensors already in this process's memory: the fastest possible peer."""
        from safetensors.torch import load_file

        files = sorted(Path(folder).glob("*.safetensors"))
        tensors = [
            (name, t.clone()) for file in files for name, t in load_file(file).items()
        ]
        start = time.perf_counter()
        self.model_runner.reload_weights(weights_iterator=iter(tensors))  # type: ignore[attr-defined]
        return time.perf_counter() - start


def serve(pipe: Connection, order: dict[str, Any]) -> None:
    """Plain vLLM, driven over the pipe, until it is killed."""
    from vllm import LLM

    llm = LLM(
        **{
            **order["arguments"],
            "worker_extension_cls": "jvlab.bench._sync_peer.VllmPeer",
        }
    )
    pipe.send("ready")
    while True:
        # no deadline: it is killed, or the pipe's other end closes
        method, folder = pipe.recv()
        start = time.perf_counter()
        inside = llm.collective_rpc(method, args=(folder,))
        pipe.send((time.perf_counter() - start, max(inside)))
