"""The folder of compiled programs: the user's own choice is kept. That a second run compiles nothing: test_options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jvlab as jv
from jvlab.trainer._compile_cache import compile_cache_dir

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import jax
import jvlab as jv
jv.Policy.from_pretrained(sys.argv[1])
print(json.dumps({"folder": jax.config.jax_compilation_cache_dir}))
"""


def run(**environment: str) -> dict[str, object]:
    command = [sys.executable, "-c", SCRIPT, jv.models.tiny("llama")]
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_users_choice_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert run(JVLAB_COMPILE_CACHE="0")["folder"] is None
    own = str(tmp_path / "own")
    assert (
        run(JVLAB_COMPILE_CACHE=str(tmp_path), JAX_COMPILATION_CACHE_DIR=own)["folder"]
        == own
    )
    monkeypatch.delenv("JVLAB_COMPILE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = compile_cache_dir()
    assert found is not None
    assert found.is_relative_to(tmp_path / "jvlab" / "xla")
