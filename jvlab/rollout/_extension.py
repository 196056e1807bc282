"""Methods that jvlab adds to every vLLM worker, called with collective_rpc: plain lists, dicts and numbers only."""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker class; `self` is the worker. Names start with jv_ so that they can't collide."""

    def jv_trace(self, tensors: list[list[Any]]) -> dict[str, Any]:
        """Where this rank's loader puts every checkpoint element; moves nothing."""
        from jvlab.rollout._trace import trace_worker

        return trace_worker(self, tensors)

    def jv_digest(self) -> str:
        """A digest over every parameter and buffer of the live model."""
        from jvlab.rollout._trace import model_digest

        return model_digest(self.get_model())  # type: ignore[attr-defined]
