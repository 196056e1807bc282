"""Options that are written once: type checkers, `help` and error messages know them all."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import jvlab as jv
from jvlab.lab._launch_settings import LaunchArguments, LaunchOptions
from jvlab.lab._pool import InProcessPool
from jvlab.sync._connections import TRANSPORT_OPTIONS, Connections, ConnectOptions

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import jvlab as jv

lab = jv.Lab()
pool = lab.launch("tiny:llama", replicas=2, engine={"max_num_seqs": 4}, http=8000)
alone = jv.Pool.in_process("tiny:llama", device="cpu", limits={"n": 4, "tokens": None})
link = lab.connect({}, pool, mode="staged", bucket_mib=4, host="10.0.0.1")
same = alone.connect({}, meaning="off", timeout=5.0)
link.pool.generate(["a"], n=2)

lab.launch("tiny:llama", replica=2)  # wrong: launch, no such option
lab.launch("tiny:llama", replicas="2")  # wrong: launch, a text
jv.Pool.in_process("tiny:llama", colour="red")  # wrong: in_process, no such option
jv.Pool.in_process("tiny:llama", colocate="no")  # wrong: in_process, a text
lab.connect({}, pool, bucket="4")  # wrong: connect, no such option
alone.connect({}, timeout="5")  # wrong: connect, a text
"""


@pytest.mark.slow
def test_a_type_checker_sees_unknown_and_mistyped_options(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    settings = {"extraPaths": [str(ROOT)], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["pyright", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--outputjson"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = {d["range"]["start"]["line"] for d in found if d["severity"] == "error"}
    wrong = {i for i, line in enumerate(PROGRAM.splitlines()) if "# wrong" in line}
    assert lines == wrong, [d["message"] for d in found]


def test_launch_options_for_type_checkers_are_those_of_the_dataclass():
    options = get_type_hints(LaunchOptions)
    assert options.pop("model") is str
    assert get_type_hints(LaunchArguments) == options
    assert all(f.default is not MISSING for f in fields(LaunchOptions)[1:])


def test_connect_options_for_type_checkers_are_those_of_the_function():
    names = {"Pool": jv.Pool, "Link": jv.Link}
    hints = get_type_hints(Connections.connect, localns=names)
    known = inspect.signature(Connections.connect).parameters.values()
    named = {p.name: hints[p.name] for p in known if p.kind is p.KEYWORD_ONLY}
    told = get_type_hints(ConnectOptions)
    assert {name: told.pop(name) for name in named} == named
    assert set(told) == set(TRANSPORT_OPTIONS)


@pytest.mark.parametrize("call", [jv.Lab.launch, jv.Pool.in_process])
def test_help_shows_every_launch_option_with_its_default(call: Any):
    shown = inspect.signature(call).parameters
    for field in fields(LaunchOptions)[1:]:
        assert shown[field.name].default == field.default
        assert shown[field.name].kind is inspect.Parameter.KEYWORD_ONLY
    assert "options" not in shown


@pytest.mark.parametrize("call", [jv.Lab.connect, InProcessPool.connect])
def test_help_shows_every_connect_option_with_its_default(call: Any):
    shown = inspect.signature(call).parameters
    for name, told in inspect.signature(Connections.connect).parameters.items():
        if told.kind is told.KEYWORD_ONLY:
            assert shown[name].default == told.default


def test_an_unknown_option_is_an_error_that_names_the_right_one():
    with pytest.raises(
        jv.errors.ConfigError, match=r"no option of lab\.launch"
    ) as found:
        LaunchOptions.of("lab.launch", "tiny:llama", {"replica": 2})
    assert "did you mean 'replicas'?" in found.value.remedy


def test_what_other_rooms_know_of_a_pool_is_locked():
    """`PoolView`, and with it the public names of a pool that are not for a notebook."""
    from jvlab.wire._pool_view import PoolView

    known = {name for name in vars(PoolView) if not name.startswith("_")}
    known |= PoolView.__annotations__.keys()
    assert known == {
        *("name", "model", "client", "snapshot", "listeners", "links", "one_process"),
        *("replicas", "facts", "renew", "trace", "peek", "score", "status"),
    }
    public = {name for name in vars(jv.Pool) if not name.startswith("_")}
    assert public == {
        *("in_process", "colocated", "one_process", "renew", "forget", "facts"),
        *("wait", "ready", "generate", "agenerate", "stream", "score", "ascore"),
        *("session", "sessions", "check_determinism", "load_adapter"),
        *("unload_adapter", "pause", "resume", "sleep", "wake", "tokenizer"),
        *("status", "logs", "trace", "peek", "look", "hidden", "restart", "scale"),
        "close",
        *("limits", "http_url", "http_key_url", "http_token", "replicas", "panel"),
    }
