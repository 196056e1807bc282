"""The committed GPU results: their shape, and that README claims what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
H200 = json.loads((ROOT / "tests" / "baselines" / "h200.json").read_text())
README = (ROOT / "README.md").read_text()


def test_each_result_names_card_date_and_command():
    assert H200["card"] == "NVIDIA H200"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", H200["date"])
    for part in ("rollout", "gpu_tests"):
        assert H200[part]["command"]
        assert H200[part]["result"]


def test_readme_claims_the_measured_ratios():
    result = H200["rollout"]["result"]
    assert result["device"] == "cuda"
    assert len(result["batch_samples"]["plain"]) == len(result["batch_samples"]["jvlab"]) == result["rounds"]
    assert abs(result["batch_ratio"] - result["batch_jvlab_tokens_per_s"] / result["batch_plain_tokens_per_s"]) < 1e-9
    row = next(line for line in README.splitlines() if "H200" in line and "64 prompts" in line)
    assert f"{result['batch_ratio']:.2f}" in row
    assert f"{result['single_ratio']:.2f}" in row
