"""Launches that fail on real vLLM: each error carries the root cause, soon after it happened."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

import jvlab as jv
from jvlab import errors

pytestmark = pytest.mark.engine


def test_root_causes(lab: jv.Lab, llama: str, tmp_path: Path):
    strange = tmp_path / "strange"
    shutil.copytree(llama, strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModelForCausalLM"]}))
    cases = {
        "architecture": (str(strange), {}, {}, "NoSuchModelForCausalLM"),
        "argument": (llama, {"max_modle_len": 64}, {}, "did you mean 'max_model_len'"),
        "memory": (llama, {}, {"VLLM_CPU_KVCACHE_SPACE": "4000"}, "memory|Memory"),
    }
    pools = {
        name: lab.launch(model, engine=engine, env=env, name=name) for name, (model, engine, env, _) in cases.items()
    }
    for name, pool in pools.items():
        with pytest.raises(errors.LaunchError, match=cases[name][3]) as caught:
            pool.wait(240)
        assert caught.value.remedy
        assert caught.value.fields["log"]
        assert "failed" in repr(pool)
        pool.close()
    assert not [name for name in lab.pools if name in cases]


def test_closing_a_pool_that_is_coming_up(lab: jv.Lab, llama: str):
    pool = lab.launch(llama, name="brief")
    time.sleep(1.0)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 100
    with pytest.raises(errors.ControlError, match="closed"):
        pool.generate("x")
