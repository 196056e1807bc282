"""Seeded requests whose prompt is read in parts: nothing breaks, and the seed gives what it gives in one go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jvlab.engine.worker._cpu._seeds import patch_runner

torch = pytest.importorskip("torch")


def runner_class() -> Any:
    """A class that samples and winds back just as vLLM's runner does."""

    class Runner:
        def __init__(self, seeds: dict[int, int], rows: int) -> None:
            generators = {
                row: torch.Generator("cpu").manual_seed(seed)
                for row, seed in seeds.items()
            }
            self.input_batch = SimpleNamespace(generators=generators, num_reqs=rows)
            self.discard_request_mask = SimpleNamespace(np=np.zeros(8, bool))

        def _sample(self) -> dict[int, float]:
            return {
                row: float(torch.rand(1, generator=g))
                for row, g in self.input_batch.generators.items()
            }

        def _bookkeeping_sync(self) -> list[int]:
            for row in np.nonzero(
                self.discard_request_mask.np[: self.input_batch.num_reqs]
            )[0]:
                generator = self.input_batch.generators.get(int(row))
                if generator is not None:
                    generator.set_offset(generator.get_offset() - 4)
            return sorted(self.input_batch.generators)

        def step(self, thrown: list[int]) -> dict[int, float]:
            self.discard_request_mask.np[:] = False
            self.discard_request_mask.np[thrown] = True
            out = self._sample()
            self._bookkeeping_sync()
            return out

    return Runner


def test_unmended_it_raises():
    with pytest.raises(RuntimeError, match="offset"):
        runner_class()({0: 5}, 1).step([0])


def test_a_token_that_does_not_count_leaves_no_trace():
    cls = runner_class()
    patch_runner(cls)
    whole, parts = cls({0: 5, 1: 6}, 3), cls({0: 5, 1: 6}, 3)
    wanted = [whole.step([]) for _ in range(3)]
    first = parts.step([0, 2])  # row 2 has no seed
    assert first[1] == wanted[0][1], "the row that counts goes on"
    assert sorted(parts.input_batch.generators) == [0, 1]
    assert parts.step([0])[1] == wanted[1][1]
    assert parts.step([])[0] == wanted[0][0], (
        "the row whose prompt was cut begins where it would have begun"
    )


@pytest.mark.vllm
def test_vllm_still_has_what_is_mended():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    assert CPUModelRunner._sample
    assert CPUModelRunner._bookkeeping_sync
