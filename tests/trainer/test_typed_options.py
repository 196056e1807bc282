"""A type checker knows every option of `jv.grpo`: its name, its type; and at run time the options are the same."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jvlab.trainer._grpo import grpo
from jvlab.trainer._grpo_config import GrpoConfig, GrpoOptions

ROOT = Path(__file__).resolve().parents[2]
# each line after the first four is one call; what pyright says of it, "" if nothing
CALLS = {
    "jv.grpo(policy, pool, link, 'add', 4, learning_rate=1e-5, folder='x')": "",
    "jv.grpo(policy, pool, link, 'add', steps=4, sinks=[print], progress=print)": "",
    "jv.grpo(policy, pool, link, 'add', learnin_rate=1e-5)": "learnin_rate",
    "jv.grpo(policy, pool, link, 'add', group_size='eight')": "group_size",
    "jv.grpo(policy, pool, link, 'add', steps='many')": "steps",
    "jv.grpo(policy, link, pool, 'add')": "pool",
    "jv.grpo(policy, pool, link, 'add').wait().status.stepp": "stepp",
}


@pytest.mark.slow
def test_pyright_sees_an_option_that_is_unknown_or_mistyped(tmp_path: Path):
    script = tmp_path / "calls.py"
    head = [
        "import jvlab as jv",
        "def calls(policy: jv.Policy, pool: jv.Pool, link: jv.Link) -> None:",
    ]
    script.write_text("\n".join([*head, *(f"    {call}" for call in CALLS)]) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    said: dict[int, list[str]] = {}
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        if found["severity"] == "error":
            line = found["range"]["start"]["line"] - len(head)
            said.setdefault(line, []).append(found["message"])
    for number, (call, name) in enumerate(CALLS.items()):
        messages = said.pop(number, [])
        assert bool(messages) == bool(name), (call, messages)
        assert not name or f'"{name}"' in messages[0], (call, messages)
    assert not said


def test_options_have_the_types_and_names_of_the_settings_made_of_them():
    settings = {field.name: field for field in dataclasses.fields(GrpoConfig)}
    for own in ("steps", "max_staleness"):  # which are arguments of their own
        del settings[own]
    assert {name: field.type for name, field in settings.items()} == {
        name: hint.__forward_arg__ for name, hint in GrpoOptions.__annotations__.items()
    }
    assert not GrpoOptions.__required_keys__


def test_help_shows_every_option_with_its_default():
    shown = inspect.signature(grpo).parameters
    for field in dataclasses.fields(GrpoConfig):
        assert shown[field.name].default == field.default, field.name
        assert field.name in (grpo.__doc__ or ""), field.name
