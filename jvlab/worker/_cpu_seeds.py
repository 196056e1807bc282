"""A fault of vLLM's CPU runner, mended: a seeded request whose prompt is read in parts ends the engine. Of 0.32.0.

Of a prompt that does not fit into one step only a part is read; the runner samples all the same, throws that token away
and winds the request's generator back with `set_offset`, which CPU generators do not have: RuntimeError, and the engine
is dead. Here their state is kept before sampling and put back after it, so that a seed gives the same tokens however
its prompt was cut. Remove this when `CPUModelRunner` does the like.
"""

from __future__ import annotations

import functools
from typing import Any


def wind_back_seeds() -> None:
    """Mend vLLM's runner; before it is used."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    mend(CPUModelRunner)


def mend(runner: Any) -> None:
    """Replace the two methods of a runner class: the one that samples, and the one that winds back."""
    sample, bookkeeping = runner._sample, runner._bookkeeping_sync

    @functools.wraps(sample)
    def sample_and_undo(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = [(g, g.get_state()) for g in _thrown_away(self).values()]
        out = sample(self, *args, **kwargs)
        for generator, state in before:
            generator.set_state(state)
        return out

    @functools.wraps(bookkeeping)
    def without_winding(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, hidden = self.input_batch.generators, _thrown_away(self)
        for row in hidden:
            del generators[row]
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    runner._sample, runner._bookkeeping_sync = sample_and_undo, without_winding


def _thrown_away(runner: Any) -> dict[int, Any]:
    """Row → generator of the requests whose token of this step will not count."""
    thrown = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
    generators = runner.input_batch.generators
    return {row: generators[row] for row in thrown if row in generators}
