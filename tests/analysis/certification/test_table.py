"""The committed certificates of tiny architectures on a CPU, written by `python -m tests.live.certified --write`."""

from __future__ import annotations

import json
from pathlib import Path

from jvlab.analysis.certification._certificate import CHECKS

TABLE = json.loads(
    (Path(__file__).parents[2] / "baselines" / "certify_cpu.json").read_text()
)
STATES = {"pass", "fail", "not applicable"}
SINCE = {"unchanged", "reference"}  # checks that are newer than the table
NEVER_ON_A_CPU = {"graphs", "sleep 1", "sleep 2"}
ALWAYS = {
    "scored",
    "arrives direct",
    "arrives staged",
    "failed staged",
    "failed direct",
    "restored",
}


def test_the_table_says_how_it_was_made():
    assert TABLE["command"] == "python -m tests.live.certified --write"
    assert TABLE["versions"].keys() == {"vllm", "transformers", "torch"}


def test_twenty_architectures_passed_what_applies_to_a_cpu():
    families = TABLE["families"]
    assert len({row["architecture"] for row in families.values()}) >= 20
    for family, row in families.items():
        checks = row["checks"]
        assert list(checks) == [name for name in CHECKS if name not in SINCE], family
        assert set(checks.values()) <= STATES, family
        assert row["ok"] == ("fail" not in checks.values()), family
        assert row["ok"], (family, row["why"])
        assert {
            name for name in NEVER_ON_A_CPU if checks[name] != "not applicable"
        } == set(), family
        assert {name for name in ALWAYS if checks[name] != "pass"} == set(), family
        assert set(row["why"]) == {
            name for name, state in checks.items() if state != "pass"
        }, "with the reason"
        assert all(row["why"].values()), family
        assert 0 < row["seconds"] < 600


def test_sixteen_bits_and_experts_are_among_them():
    families = TABLE["families"]
    assert families["llama@bfloat16"]["dtype"] == "bfloat16"
    assert {"mixtral", "qwen3_moe", "gpt_oss"} <= families.keys()
