"""`bench link`: real processes, a bucket each way."""

from __future__ import annotations

import pytest

from jvlab._errors import ConfigError
from jvlab.bench._link import run_bench_link

pytestmark = pytest.mark.slow


def test_each_way_moves_its_bytes():
    facts = run_bench_link(mib=16)
    assert set(facts["gb_per_s"]) == {"socket", "gloo", "tcp", "tcp with TLS"}
    assert all(rate > 0 for rate in facts["gb_per_s"].values())
    assert facts["vs_gloo_ratio"] > 0
    assert not facts["elsewhere"]


def test_less_than_a_bucket_is_refused():
    with pytest.raises(ConfigError, match="15 MiB"):
        run_bench_link(mib=15)
