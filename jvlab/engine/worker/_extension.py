"""Methods that jvlab adds to every vLLM worker, called with collective_rpc: plain lists, dicts and numbers only.

vLLM imports this module in each worker before it builds the model, so patches that must come first are applied here.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jvlab.engine.worker._rank_sync import WorkerSync


# Works around vLLM 0.32.0's output head with LoRA, which can't compute log-probabilities of prompts.
# It adapts one row for each request that samples a token. Given the rows of several prompts, as `pool.score`
# asks for, it fails, on a CPU with an error that ends the engine, also if no request has an adapter. Scores are
# of the base or of a linked adapter, neither of which adapts the head: such rows are computed without. Remove
# this when vLLM's LogitsProcessorWithLoRA takes rows of prompts.


class NoHeadAdapter:
    """In place of vLLM's kernels: the output head without adapters."""

    def add_lora_logits(self, y: Any, *_: Any) -> Any:
        return y


def patch_prompt_scores() -> None:
    """Patch vLLM's layer; to be called before a model is built."""
    from vllm.lora.layers import LogitsProcessorWithLoRA

    LogitsProcessorWithLoRA._get_logits = adapting_sampled_rows(
        LogitsProcessorWithLoRA._get_logits
    )


def adapting_sampled_rows(original: Any) -> Any:
    """The layer's method; rows other than one for each request are computed without adapters."""

    @functools.wraps(original)
    def get_logits(self: Any, hidden_states: Any, *args: Any, **options: Any) -> Any:
        kernels = self.punica_wrapper
        if hidden_states.shape[0] == kernels.sampler_indices.shape[0]:
            return original(self, hidden_states, *args, **options)
        self.punica_wrapper = NoHeadAdapter()
        try:
            return original(self, hidden_states, *args, **options)
        finally:
            self.punica_wrapper = kernels

    return get_logits


# ----------------------------------------------------------------------------------------------------


def compute_from_live_weights() -> None:
    """Make CPU linear layers compute from `layer.weight` itself, not a packed copy; call before the model is built."""
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as layers

    ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda n, k, dtype: False


if os.environ.get("JVLAB_LIVE_WEIGHTS") == "1":
    compute_from_live_weights()

patch_prompt_scores()

if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
    from jvlab.engine.worker._cpu._experts import patch_cpu_experts
    from jvlab.engine.worker._cpu._lora import patch_cpu_lora
    from jvlab.engine.worker._cpu._seeds import patch_cpu_seeds

    patch_cpu_seeds()
    patch_cpu_lora()
    patch_cpu_experts()


class WorkerExtension:
    """Mixed into vLLM's worker class; `self` is the worker. Names start with jv_ so that they can't collide."""

    def jv_trace(self, tensors: list[list[Any]]) -> dict[str, Any]:
        """Where this rank's loader puts every checkpoint element; moves nothing. Of an adapter: errors as below."""
        from jvlab.engine.tracing._lora_slots import is_adapter
        from jvlab.engine.tracing._trace import trace_worker

        return (
            self._jv().trace_adapter(tensors)
            if is_adapter([t[0] for t in tensors])
            else trace_worker(self, tensors)
        )

    def jv_digest(self) -> str:
        """A digest over every parameter and buffer of the live model."""
        from jvlab.engine.tracing._trace import model_digest

        return model_digest(self.get_model())  # type: ignore[attr-defined]

    # Weight sync; each returns a dict with "rank", and "error", "remedy", "kind" if it failed ---------------------

    def _jv(self) -> WorkerSync:
        from jvlab.engine.worker._rank_sync import WorkerSync

        found = self.__dict__.get("_jv_sync")
        if found is None:
            found = self.__dict__["_jv_sync"] = WorkerSync(self)
        return found

    def jv_open(
        self,
        transport: str,
        plan: bytes,
        index: int,
        ranks_json: list[str],
        seconds: float,
    ) -> dict[str, Any]:
        """Open this rank's channels."""
        return self._jv().open(transport, plan, index, ranks_json, seconds)

    def jv_prepare(self, terms: dict[str, Any]) -> dict[str, Any]:
        """Allocate what the sync needs."""
        return self._jv().prepare(terms)

    def jv_move(self, terms: dict[str, Any] | None = None) -> dict[str, Any]:
        """Start the receive threads, or let the trainer write; returns at once. With terms: prepare first."""
        return self._jv().move(terms)

    def jv_verify(self, wait: float) -> dict[str, Any]:
        """Digests of what arrived, or "done": False after `wait` seconds."""
        return self._jv().verify(wait)

    def jv_commit(self) -> dict[str, Any]:
        """Compute with the new weights from now on."""
        return self._jv().commit()

    def jv_abandon(self) -> dict[str, Any]:
        """Abandon the sync."""
        return self._jv().abandon()

    def jv_check(self, midway: bool) -> dict[str, Any]:
        """Digests of live memory now, or, midway in a sync, of what has arrived."""
        return self._jv().check(midway)

    def jv_peek(
        self, rank: int, parameter: str, start: int, count: int
    ) -> dict[str, Any]:
        """Bytes of a live parameter."""
        return self._jv().peek(rank, parameter, start, count)

    def jv_begin_hidden(self) -> dict[str, Any]:
        """Record hidden states from now on; returns the number of layers."""
        return self._jv().begin_hidden()

    def jv_hidden(self, layer: int, start: int, count: int) -> dict[str, Any]:
        """Bytes of a layer's hidden states."""
        return self._jv().hidden(layer, start, count)

    def jv_end_hidden(self) -> dict[str, Any]:
        """Stop recording hidden states."""
        return self._jv().end_hidden()

    def jv_capture_routes(self) -> dict[str, Any]:
        """From now on, return the experts that each token was given with its request's output."""
        return self._jv().capture_routes()

    def jv_release_shadows(self) -> dict[str, Any]:
        """Free the shadow buffers; the link stays open."""
        return self._jv().release_shadows()

    def jv_clear_kv(self) -> dict[str, Any]:
        """Zero all KV memory."""
        return self._jv().clear_kv()

    def jv_clears_new_blocks(self) -> dict[str, Any]:
        """From now on, zero the blocks that the scheduler names before they are used."""
        return self._jv().clears_new_blocks()

    def jv_close(self) -> dict[str, Any]:
        """Close the link."""
        return self._jv().close()
