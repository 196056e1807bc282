"""An engine whose quantisation jvlab has no format for: vLLM's own reload in a sync, its report, tokens of a launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import jvlab as jv

pytestmark = pytest.mark.engine
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "ignore_eos": True,
    "max_tokens": 16,
    "progress": False,
}
PROMPTS = [[5, 6, 7], [40, 41, 42, 43]]


def tokens(pool: Any) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in pool.generate(PROMPTS, **GREEDY)]


def held() -> dict[str, tuple[int, bytes]]:
    """Address and bytes of what the engine's quantised layers compute with."""
    from tests.engine.worker.row_quant import RowsMethod

    found = {
        f"{p}.{n}": t
        for p, layer in RowsMethod.made.items()
        for n, t in layer.named_parameters()
    }
    return {
        n: (t.data_ptr(), t.detach().contiguous().numpy().tobytes())
        for n, t in found.items()
    }


def test_tokens_after_a_sync_are_those_of_an_engine_that_loaded_it(
    tmp_path: Path,
) -> None:
    from tests.engine.worker import row_quant

    one, other = (
        str(jv.models.tiny("llama", tmp_path / str(seed), seed=seed, **SIZES))
        for seed in (0, 1)
    )
    launch = lambda folder: jv.Pool.in_process(
        folder, name="rows", engine={"quantization": row_quant.NAME}
    )
    trees = {
        folder: jv.Policy.from_pretrained(folder).params for folder in (one, other)
    }
    pool = launch(one)
    try:
        first, loaded = tokens(pool), held()
        assert len(loaded) == 8, "weight and scale of two layers, twice"
        link = pool.connect(trees[one], rules="policy")
        assert (
            sum("vLLM's own reload" in note for note in link.mapping.notes.values())
            == 4
        )
        for mode in ("direct", "staged"):
            report = link.sync(trees[other], mode=mode, progress=False)
            assert report.verified
            assert report.reloaded.keys() == row_quant.RowsMethod.made.keys()
            assert all(0 < seconds < 60 for seconds in report.reloaded.values())
            assert report.seconds["reload"] == pytest.approx(
                sum(report.reloaded.values())
            )
            assert report.evidence["reloaded"] == 4
            assert "4 layers through vLLM's reload" in repr(report)
            assert "model.layers.1.mlp.down_proj" in report._repr_html_()
            synced, now = tokens(pool), held()
            assert synced != first
            assert {n: at for n, (at, _) in now.items()} == {
                n: at for n, (at, _) in loaded.items()
            }
            assert link.verify(trees[other]).ok
            assert not link.verify(trees[one]).ok
            assert link.sync(trees[one], mode=mode, progress=False).verified
            assert held() == loaded
            assert tokens(pool) == first
        row_quant.RowsMethod.made["model.layers.0.mlp.down_proj"].weight_scale.data[
            0
        ] *= 2
        assert [n.partition(" ")[0] for n in link.verify().outcomes[0].differing] == [
            "model.layers.0.mlp.down_proj.weight"
        ]
    finally:
        pool.close()
    fresh = launch(other)
    try:
        assert tokens(fresh) == synced
        assert {n: b for n, (_, b) in held().items()} == {
            n: b for n, (_, b) in now.items()
        }
    finally:
        fresh.close()
