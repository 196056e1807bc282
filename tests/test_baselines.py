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
    for part in ("rollout", "gpu_tests", "sync", "syncs_under_load", "grpo", "nccl", "sleep", "tensor_parallel"):
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


def test_the_sync_result_is_whole_and_its_ratios_are_what_they_say():
    result = H200["sync"]["result"]
    best = min(result["vllm_plain_ms"], result["vllm_packed_ms"])
    assert result["vllm_best_ms"] == best
    assert result["transport"] == "ipc"
    assert set(result["ways"]) == {"direct", "direct_verified", "staged", "staged_verified"}
    assert all(result["tokens_equal"].values()), "tokens are those of an engine that loaded the same weights itself"
    assert "masters" in result["tokens_equal"], "float32 masters too"
    for way in result["ways"].values():
        assert abs(way["vs_vllm_ratio"] - best / way["sync_ms"]) < 1e-9
        assert abs(way["move_vs_ceiling"] - result["ceiling_ms"] / way["move_ms"]) < 1e-9
        assert way["sync_ms"] < way["total_ms"] < way["call_ms"]
        assert way["move_vs_ceiling"] >= 0.8 - 5e-3
    for way in ("staged", "staged_verified"):
        assert result["ways"][way]["pause_ms"] < 5
    assert result["extra_mib"]["direct"] < 64
    load = H200["syncs_under_load"]["result"]
    assert load["syncs"] == 300
    for what in ("fds", "threads", "device_mib"):
        assert load["after"][what] <= load["before"][what]


def test_readme_claims_the_measured_sync():
    ways = H200["sync"]["result"]["ways"]
    row = next((line for line in README.splitlines() if "H200" in line and "ipc" in line and " ms" in line), "")
    for way in ("direct", "direct_verified"):
        assert f"{ways[way]['sync_ms']:.1f} ms" in row, f"README's H200 row on ipc: {way}"
        assert f"{ways[way]['vs_vllm_ratio']:.0f}×" in row


def test_readme_claims_the_measured_nccl():
    result = H200["nccl"]["result"]
    rates = {way: result["bytes"] / min(taken) / 1e9 for way, taken in result["seconds"].items()}
    assert all(abs(result["gb_per_s"][way] - rate) < 1e-9 for way, rate in rates.items())
    ratio = rates["jvlab"] / rates["nccl"]
    assert ratio >= 0.9
    assert [3, 2] in result["bit_exact"]
    row = next((line for line in README.splitlines() if "H200" in line and "bare NCCL" in line), "")
    assert f"{ratio:.2f}" in row
    assert f"{result['killed_receiver_told_s']:.1f} s" in row


def test_a_sleep_gives_memory_back():
    for level in ("level 1", "level 2"):
        assert H200["sleep"]["result"][level]["freed_mib"] > 4000
    row = next((line for line in README.splitlines() if "H200" in line and "sleep" in line and "MiB" in line), "")
    assert f"{H200['sleep']['result']['level 1']['freed_mib']:.0f}" in row


def test_readme_claims_the_measured_loops():
    result = H200["grpo"]["result"]
    runs = result["runs"]
    assert result["device"] == "cuda"
    for name, bound in (("k0", 0), ("k1", 1), ("k2", 2), ("jax", 0)):
        assert runs[name]["max_staleness"] <= bound
        assert runs[name]["reward_last"] > 0.8
    for name in ("k1", "k2"):
        assert abs(result[f"{name}_vs_k0_ratio"] - runs[name]["steps_per_s"] / runs["k0"]["steps_per_s"]) < 1e-9
    assert abs(result["vs_jax_decode_ratio"] - runs["k0"]["steps_per_s"] / runs["jax"]["steps_per_s"]) < 1e-9
    row = next((line for line in README.splitlines() if "H200" in line and "bench grpo" in line), "")
    for key in ("k1_vs_k0_ratio", "k2_vs_k0_ratio", "vs_jax_decode_ratio"):
        assert f"{result[key]:.2f}" in row, f"README's H200 row on bench grpo: {key}"
