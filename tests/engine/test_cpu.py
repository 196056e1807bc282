"""What the CPU can compute: tried in a process that may die, kept for the next one, and never guessed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jvlab import errors
from jvlab.engine import _cpu
from jvlab.engine._cpu import KINDS, Tried, check_dtype, cpu_support, instead_of, lacks
from jvlab.engine._defaults import engine_arguments, kv_cache_bytes

ROOT = Path(__file__).parents[2]
ALL = dict.fromkeys(KINDS, Tried(True))
NONE = {**ALL, "bfloat16": Tried(False, "vLLM's kernel dies of SIGILL")}


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch):
    """A CPU described by hand."""
    monkeypatch.delenv(_cpu.WITHOUT, raising=False)

    def describe(found: dict[str, Tried]) -> None:
        monkeypatch.setattr(_cpu, "_tried", lambda: found)

    return describe


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(_cpu.WITHOUT, raising=False)
    _cpu._tried.cache_clear()
    yield tmp_path
    _cpu._tried.cache_clear()


def checkpoint(folder: Path, **config: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def die() -> None:
    os.kill(os.getpid(), signal.SIGILL)


def misuse() -> None:
    raise TypeError("another vLLM takes other arguments")


def trials_in_forks() -> str:
    """In a process of its own: one with JAX's threads, as this may be, must not be forked."""
    forked = (_cpu._in_a_fork(trial) for trial in (die, int, misuse))  # type: ignore
    return json.dumps([(found.works, found.why) for found in forked])


def test_only_a_death_says_that_the_cpu_cannot():
    code = "from tests.engine import test_cpu; print(test_cpu.trials_in_forks())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    died, worked, unknown = json.loads(done.stdout.splitlines()[-1])
    assert died == [False, "vLLM's kernel dies of SIGILL"]
    assert worked == [True, ""]
    assert unknown == [None, "TypeError: another vLLM takes other arguments"]


def test_what_was_found_is_kept_for_the_next_process(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []
    said = json.dumps(
        {kind: {"works": kind != "bfloat16", "why": "x"} for kind in KINDS}
    )
    monkeypatch.setattr(_cpu, "_ask_a_child", lambda: asked.append(1) or said)
    assert lacks("bfloat16") == "x"
    _cpu._tried.cache_clear()  # as in another process
    assert lacks("bfloat16") == "x"
    assert not lacks("int8")
    assert len(asked) == 1
    (file,) = (empty_cache / "jvlab").iterdir()
    file.write_text('{"bfloat16": 3')
    _cpu._tried.cache_clear()
    assert lacks("bfloat16") == "x", "a broken file is written again"
    assert len(asked) == 2


def test_a_trial_that_does_not_answer_accuses_nobody_and_is_not_kept(
    empty_cache: Path, monkeypatch
):
    def fail() -> str:
        raise OSError("no vLLM here")

    monkeypatch.setattr(_cpu, "_ask_a_child", fail)
    assert cpu_support() == dict.fromkeys(KINDS, Tried(None, "no vLLM here"))
    assert not lacks("bfloat16")
    assert not list(empty_cache.rglob("*.json"))


def test_a_machine_can_act_as_if_it_had_less(cpu, monkeypatch: pytest.MonkeyPatch):
    cpu(ALL)
    assert not any(map(lacks, KINDS))
    monkeypatch.setenv("JVLAB_CPU_WITHOUT", "bfloat16, int8")
    assert [kind for kind in KINDS if lacks(kind)] == ["bfloat16", "int8"]
    assert cpu_support()["int8"] == Tried(False, "JVLAB_CPU_WITHOUT says so")
    assert cpu_support()["float16"].works
    monkeypatch.setenv("JVLAB_CPU_WITHOUT", "bf16")
    with pytest.raises(errors.ConfigError, match="names bf16") as caught:
        lacks("int8")
    assert "bfloat16" in caught.value.remedy


@pytest.mark.parametrize("given", ["bfloat16", "torch.bfloat16", "BFLOAT16"])
def test_a_dtype_that_was_asked_for_by_name_is_refused(cpu, given: str):
    cpu(NONE)
    with pytest.raises(
        errors.Unsupported,
        match=r"this CPU has no bfloat16 \(vLLM's kernel dies of SIGILL\)",
    ) as caught:
        check_dtype({"dtype": given})
    assert "'dtype': 'float32'" in caught.value.remedy
    for fine in (
        {},
        {"dtype": "auto"},
        {"dtype": "half"},
        {"dtype": "float32"},
        {"dtype": None},
    ):
        check_dtype(fine)
    cpu(ALL)
    check_dtype({"dtype": given})


def test_auto_computes_in_float32_and_says_so(cpu, tmp_path: Path):
    cpu(NONE)
    sizes = {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "hidden_size": 128,
        "max_position_embeddings": 2048,
    }
    bf16 = checkpoint(tmp_path / "a", dtype="bfloat16", **sizes)
    for given in ({}, {"dtype": "auto"}):
        found = engine_arguments(bf16, "cpu", 1, "auto", given)
        assert found["dtype"] == "float32"
    assert kv_cache_bytes(bf16, {"dtype": "float32"}, 1) == 2 * kv_cache_bytes(
        bf16, {}, 1
    ), "four bytes each"
    assert engine_arguments(bf16, "cuda", 1, "auto", {}).get("dtype") is None
    assert instead_of("bfloat16")[1].startswith(
        "the engine computes in float32: this CPU has no bfloat16"
    )
    assert engine_arguments("hub/model", "cpu", 1, "auto", {})["dtype"] == "float32", (
        "vLLM takes bfloat16 for these"
    )
    f32 = checkpoint(tmp_path / "b", dtype="float32")
    assert (
        engine_arguments(f32, "cpu", 1, "auto", {"dtype": "auto"})["dtype"] == "float32"
    ), "of these too"
    f16 = checkpoint(tmp_path / "c", dtype="float16")
    assert engine_arguments(f16, "cpu", 1, "auto", {}).get("dtype") is None, (
        "it has float16"
    )
    with pytest.raises(errors.Unsupported):
        engine_arguments(f32, "cpu", 1, "auto", {"dtype": "bfloat16"})
    cpu(ALL)
    assert engine_arguments(bf16, "cpu", 1, "auto", {}).get("dtype") is None
    assert instead_of("bfloat16") == ("", "")


def test_a_quantisation_that_vllm_does_not_compute_in_float32(cpu, tmp_path: Path):
    cpu(NONE)
    gptq = checkpoint(
        tmp_path / "a", dtype="bfloat16", quantization_config={"quant_method": "gptq"}
    )
    assert engine_arguments(gptq, "cpu", 1, "auto", {})["dtype"] == "float16"
    ints = checkpoint(
        tmp_path / "b",
        dtype="bfloat16",
        quantization_config={"quant_method": "compressed-tensors"},
    )
    assert engine_arguments(ints, "cpu", 1, "auto", {})["dtype"] == "float32"


@pytest.mark.slow  # imports vLLM's kernels in a child
def test_this_cpu_is_tried_for_real(empty_cache: Path):
    """Whatever the answer is, it is one: the trials fit this vLLM, and this process lives."""
    found = cpu_support()
    assert {kind for kind, tried in found.items() if tried.works is None} == set(), (
        found
    )
    assert all(tried.works or tried.why for tried in found.values())
    assert [
        file.name.startswith("cpu-") for file in (empty_cache / "jvlab").iterdir()
    ] == [True]
