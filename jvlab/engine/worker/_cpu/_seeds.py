"""Works around a bug of vLLM 0.32.0's CPU runner: a seeded request with chunked prefill kills the engine.

In a step that prefills only a part of a prompt, the runner samples all the same, discards that token and rewinds the
request's generator with `set_offset`, which CPU generators do not have: RuntimeError, and the engine is dead. Here the
generator's state is saved before sampling and restored after it, so that a seed gives the same tokens however its
prompt was chunked. Remove this when `CPUModelRunner` does so itself.
"""

from __future__ import annotations

import functools
from typing import Any


def patch_cpu_seeds() -> None:
    """Patch vLLM's runner; to be called before it is used."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    patch_runner(CPUModelRunner)


def patch_runner(runner: Any) -> None:
    """Replace the two methods of a runner class: the one that samples, and the one that rewinds."""
    sample = runner._sample
    bookkeeping = runner._bookkeeping_sync

    @functools.wraps(sample)
    def sample_and_restore(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = [(g, g.get_state()) for g in _discarded(self).values()]
        out = sample(self, *args, **kwargs)
        for generator, state in before:
            generator.set_state(state)
        return out

    @functools.wraps(bookkeeping)
    def without_rewinding(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        hidden = _discarded(self)
        for row in hidden:
            del generators[row]
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    runner._sample = sample_and_restore
    runner._bookkeeping_sync = without_rewinding


def _discarded(runner: Any) -> dict[int, Any]:
    """Row → generator of the requests whose token of this step is discarded."""
    rows = (
        runner.discard_request_mask.np[: runner.input_batch.num_reqs]
        .nonzero()[0]
        .tolist()
    )
    generators = runner.input_batch.generators
    return {row: generators[row] for row in rows if row in generators}
