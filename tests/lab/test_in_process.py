"""What an in-process pool refuses, before it loads anything."""

from __future__ import annotations

from typing import Any

import pytest

import jvlab as jv
from jvlab import errors
from jvlab.lab import _in_process
from jvlab.transport._choose import in_one_process


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 2}, "one engine, not 2 replicas"),
        ({"tensor_parallel": 2}, "a process for each rank"),
        ({"http": True}, "serves no port"),
        ({"place": "join"}, "placed elsewhere"),
    ],
)
def test_what_one_process_cannot_be(options: dict[str, Any], message: str):
    with pytest.raises(errors.Unsupported, match=message) as caught:
        jv.Pool.in_process("tiny:llama", **options)
    assert "launch" in caught.value.remedy


def test_wrong_arguments_start_nothing():
    with pytest.raises(errors.ConfigError, match="load must be"):
        jv.Pool.in_process("tiny:llama", load="fast")
    with pytest.raises(errors.ModelError, match="no model at"):
        jv.Pool.in_process("./no-such-model")
    with pytest.raises(errors.ConfigError, match="colour") as caught:
        jv.Pool.in_process("tiny:llama", colour="red")  # type: ignore[call-arg]
    assert "replicas, restarts, routing" in caught.value.remedy
    assert not _in_process._open


@pytest.mark.parametrize(
    ("wanted", "device", "engine", "found"),
    [
        ("auto", "cpu", "cpu", "loopback"),
        ("loopback", "gpu", "cpu", "loopback"),
        ("auto", "gpu", "cuda", "ipc"),
    ],
)
def test_weights_go_by_this_processs_memory(
    wanted: str, device: str, engine: str, found: str
):
    name, why = in_one_process(wanted, device, engine)
    assert name == found
    assert "one process" in why


@pytest.mark.parametrize(
    ("wanted", "device", "engine", "message"),
    [
        ("shm", "cpu", "cpu", "nearer than any wire"),
        ("ipc", "cpu", "cpu", "nearer than any wire"),
        ("auto", "cpu", "cuda", "the parameters are on cpu"),
    ],
)
def test_other_transports_are_refused_with_a_remedy(
    wanted: str, device: str, engine: str, message: str
):
    with pytest.raises(errors.ConfigError, match=message) as caught:
        in_one_process(wanted, device, engine)
    assert caught.value.remedy


def test_the_head_of_an_engine_is_a_change_of_its_config():
    from jvlab.lab._launch_settings import LaunchOptions

    model = jv.models.tiny("llama")
    make = lambda engine: (
        LaunchOptions(model=model, device="cpu", engine=engine).settings().engine
    )
    assert make({"head_dtype": "float32"}) == {
        "hf_overrides": {"head_dtype": "float32"}
    }
    assert make({"head_dtype": "float32", "hf_overrides": {"a": 1}})[
        "hf_overrides"
    ] == {
        "a": 1,
        "head_dtype": "float32",
    }
    with pytest.raises(errors.ConfigError, match="hf_overrides"):
        make({"head_dtype": "float32", "hf_overrides": lambda config: config})
