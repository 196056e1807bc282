"""Training on the card that an engine uses: long rows beside it, and large steps while it sleeps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gpu.card import run_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]


def test_long_rows_train_beside_an_engine(tmp_path: Path):
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.57"}
    facts = run_script(
        "tests.gpu.long_row_script", "long row", tmp_path / "log", 200, **share
    )
    for row in facts["rows"]:
        assert not any(row["skipped"])
        assert row["compiled"][1:] == [0, 0]
        assert row["synced_verified"]
        assert abs(row["peak_bytes"] / row["estimate_bytes"] - 1) < 0.15


def test_a_step_that_fits_only_while_the_engine_sleeps(tmp_path: Path):
    facts = run_script(
        "tests.gpu.colocated_training_script",
        "colocated training",
        tmp_path / "log",
        300,
    )
    assert "RESOURCE_EXHAUSTED" in facts["without_sleep"]
    assert all(sync["verified"] for sync in facts["syncs"])
    assert facts["engine_holds_the_last"]
    assert facts["jax_peak_bytes"] > facts["trainer_share_bytes"]
    assert abs(facts["jax_peak_bytes"] / facts["memory_bytes"] - 1) < 0.25
