"""`launch(colocate=True)`: one card for JAX and vLLM; see colocate_script.py, which runs in a fresh process."""

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
SECONDS = 400


def test_sleep_lends_the_card_and_wake_is_never_on_old_weights(tmp_path: Path) -> None:
    facts = run_script(
        "tests.gpu.colocate_script", "colocate", tmp_path / "log", SECONDS
    )
    for level in ("level_1", "level_2"):
        assert facts[level]["freed_bytes"] > facts["weights_bytes"]
        assert (
            facts[level]["jax_beyond_share_bytes"] > 0.8 * facts[level]["freed_bytes"]
        )
