"""`bench link`: real processes, a bucket each way."""

from __future__ import annotations

import pytest

from jvlab._errors import ConfigError
from jvlab.bench._link import run_bench_link
from jvlab.cli._cli import main
from jvlab.transport._nixl import installed

pytestmark = pytest.mark.slow


def test_each_way_moves_its_bytes():
    facts = run_bench_link(mib=16)
    ways = {"socket", "gloo", "tcp", "tcp with TLS"}
    assert set(facts["gb_per_s"]) == ways | ({"nixl"} if installed() else set())
    assert all(rate > 0 for rate in facts["gb_per_s"].values())
    assert facts["vs_gloo_ratio"] > 0
    assert not facts["elsewhere"]


def test_less_than_a_bucket_is_refused():
    with pytest.raises(ConfigError, match="15 MiB"):
        run_bench_link(mib=15)


def test_doctor_measures_the_link_to_another_process(
    capsys: pytest.CaptureFixture[str],
):
    assert main(["doctor", "--at", "env"]) == 0
    said = capsys.readouterr().out
    rows = said.partition("\nlink\n")[2].splitlines()
    ways = {row.partition(":")[0].strip() for row in rows if "GB/s" in row}
    assert ways == {"socket", "tcp", "tcp with TLS"} | (
        {"nixl"} if installed() else set()
    )
