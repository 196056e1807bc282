"""Every kind of parameter, of every architecture that the CPU build runs, changed alone: does the engine compute so?

`arrivals` does the work, in a process of its own; here its findings are held against what must be, and against the
table that is kept (tests/baselines/arrives_cpu.json, written by `python -m tests.live.arrivals --write`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.live.arrival_families import FAMILIES
from tests.live.arrivals import BASELINE, MODES, table

SECONDS = 1500
# the first test waits for all of them
pytestmark = [pytest.mark.engine, pytest.mark.timeout(SECONDS + 60)]


USUAL = ("gpt_oss",)  # experts with biases and sinks, windows
FAMILY = [
    pytest.param(f, marks=[] if f in USUAL else [pytest.mark.soak]) for f in FAMILIES
]


@pytest.fixture(scope="module")
def every(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What was found in each family that this run asks for."""
    items = [
        item
        for item in request.session.items
        if getattr(item, "module", None) is request.module
    ]
    asked = {
        item.callspec.params["family"]  # type: ignore
        for item in items
        if hasattr(item, "callspec")  # type: ignore
    }
    names = [f for f in FAMILIES if f in asked | {"gpt_oss"}]
    out = tmp_path_factory.mktemp("arrivals") / "found.json"
    command = [sys.executable, "-m", "tests.live.arrivals", *names, "--out", str(out)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert out.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("family", FAMILY)
def test_every_kind_arrives(every: dict[str, Any], family: str):
    found = every[family]
    assert "error" not in found, found["error"]
    rows = table(family, found)
    assert {
        k: v
        for k, v in rows.items()
        if v != "moved" and not v.startswith("cannot be seen: ")
    } == {}
    assert rows == json.loads(BASELINE.read_text())["families"][family], (
        "the table that is kept says something else"
    )
    for kind, modes in found["kinds"].items():
        for mode in MODES:
            m = modes[mode]
            assert m["verified"], (kind, mode)
            assert m["holds"], f"link.verify(new) after {kind}, {mode}"
            assert m["old_refused"], f"link.verify(old) after {kind}, {mode}"
            assert not {"unread"} & m["evidence"].keys(), "packed, and not read back"


def test_there_are_enough_architectures():
    assert len([family for family in FAMILIES if "@" not in family]) >= 20


def test_experts_with_biases_and_sinks_have_all_their_kinds(every: dict[str, Any]):
    kinds = {kind.rpartition("layers.*.")[2] for kind in every["gpt_oss"]["kinds"]}
    assert {
        "mlp.experts.down_proj_bias",
        "mlp.experts.gate_up_proj_bias",
        "self_attn.sinks",
    } <= kinds


def test_what_processing_loses_does_not_arrive_unseen(every: dict[str, Any]):
    faults = every["gpt_oss"]["faults"]
    assert len(faults) == 4
    for fault in faults:
        assert fault["differing"], (
            f"{fault['dropped']} was dropped, {fault['mode']}, and the error was: {fault['error']}"
        )
        assert fault["recovered"]
