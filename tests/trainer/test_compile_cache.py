"""The persistent compilation cache: a second run compiles nothing, and the user's own choice is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jvlab as jv
from jvlab.trainer._compile_cache import compile_cache_bytes, compile_cache_dir

SCRIPT = """
import json, sys
import jax
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name))
import jvlab as jv
policy = jv.Policy.from_pretrained(sys.argv[1])
policy.logprobs(policy.params, [[5, 6, 7, 8]]).block_until_ready()
print(json.dumps({"folder": jax.config.jax_compilation_cache_dir, "misses": sum("cache_miss" in n for n in seen),
                  "hits": sum("cache_hit" in n for n in seen)}))
"""


def run(**environment: str) -> dict[str, object]:
    command = [sys.executable, "-c", SCRIPT, jv.models.tiny("llama")]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_run_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "programs"
    first, second = (run(JVLAB_COMPILE_CACHE=str(folder)) for _ in range(2))
    assert first["folder"] == second["folder"] == str(folder)
    assert first["misses"]
    assert second["hits"] == first["misses"]
    assert not second["misses"]
    monkeypatch.setenv("JVLAB_COMPILE_CACHE", str(folder))
    assert compile_cache_bytes() > 1000


def test_the_users_choice_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert run(JVLAB_COMPILE_CACHE="0")["folder"] is None
    own = str(tmp_path / "own")
    assert run(JVLAB_COMPILE_CACHE=str(tmp_path), JAX_COMPILATION_CACHE_DIR=own)["folder"] == own
    monkeypatch.delenv("JVLAB_COMPILE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = compile_cache_dir()
    assert found is not None
    assert found.is_relative_to(tmp_path / "jvlab" / "xla")
