"""A device without free memory: who holds it is said, from what drivers, XLA, PyTorch and vLLM write. No GPU here."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jvlab as jv
from jvlab import errors
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire.processes import _device_memory as memory
from jvlab.wire.processes._labs import stop_lab

GIB = 2**30
XLA = (
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16.05GiB.\nBufferAssignment OOM Debugging.\n"
    "\tpeak buffers: ..."
)
FULL = (
    XLA,
    "INTERNAL: failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB",
    "RuntimeError: CUDA error: out of memory",
    "ValueError: Free memory on device cuda:0 (3.1/139.8 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 125.82 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when ...",
)


class JaxRuntimeError(RuntimeError):
    """Of the name that jax's own has."""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An nvidia-smi that lists these processes: (pid, MiB)."""

    def install(*rows: tuple[int, object], code: str = "") -> None:
        tool = tmp_path / "nvidia-smi"
        lines = "".join(f"echo '{pid}, {mib}'\n" for pid, mib in rows)
        tool.write_text(f"#!/bin/sh\n{code}{lines}")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


@pytest.mark.parametrize("text", FULL)
def test_texts_of_a_full_device(text: str):
    assert memory.is_full(text)


def test_other_texts():
    assert not memory.is_full(
        "RuntimeError: Not enough memory for the KV cache on this CPU"
    )
    assert not memory.is_full(
        "the rollout process was ended by SIGKILL (killed, or out of memory)"
    )


def test_what_drivers_list():
    assert memory.parse_compute_apps("12, 100\n 12, 28\n7, [N/A]\n") == {
        12: 128 * 2**20,
        7: 0,
    }
    assert (
        memory.parse_compute_apps("")
        == memory.parse_compute_apps("No running processes found\n")
        == {}
    )
    assert (
        memory.parse_compute_apps(
            "Failed to initialize NVML: Driver/library version mismatch"
        )
        == {}
    )


def test_labs_come_first_and_this_process_last():
    labs = {3: ("swift-otter-07", False), 4: ("mine", True)}
    found = memory.name_holders(
        {os.getpid(): GIB, 4: 2 * GIB, 2**22: 50 * GIB, 3: 0}, labs
    )
    assert [holder.pid for holder in found] == [3, 2**22, 4, os.getpid()]
    assert [str(holder) for holder in found] == [
        "lab swift-otter-07 (pid 3)",
        f"a process (pid {2**22}, 53.7 GB)",
        "lab mine, of this process (pid 4, 2.1 GB)",
        f"this process (pid {os.getpid()}, 1.1 GB)",
    ]


def test_an_error_of_xla_names_another_process(driver: Any):
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as other:
        driver((other.pid, 40960), (os.getpid(), "[N/A]"))
        with pytest.raises(errors.DeviceMemoryError) as caught, memory.explaining():
            raise JaxRuntimeError(XLA)
        other.kill()
    told = caught.value
    assert isinstance(told.__cause__, JaxRuntimeError)
    assert isinstance(told, MemoryError)
    assert "Out of memory while trying to allocate 16.05GiB" in told.message
    assert "BufferAssignment" not in told.message
    assert (
        f"(pid {other.pid}, 42.9 GB); this process (pid {os.getpid()})" in told.message
    )
    assert f"kill {other.pid};" in told.remedy
    assert [holder.pid for holder in told.fields["holders"]] == [other.pid, os.getpid()]  # type: ignore[attr-defined]


def test_without_a_driver_the_error_still_has_a_remedy(driver: Any):
    driver(code="exit 9\n")
    told = memory.explained(JaxRuntimeError(XLA))
    assert isinstance(told, errors.DeviceMemoryError)
    assert "held by" not in told.message
    assert "smaller batch" in told.remedy


def test_other_errors_are_left_as_they_are():
    for error in (
        JaxRuntimeError("INVALID_ARGUMENT: shapes"),
        RuntimeError(XLA),
        KeyboardInterrupt(),
    ):
        assert memory.explained(error) is error


@pytest.mark.slow
def test_a_launch_without_memory_names_the_lab_that_holds_it(
    driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The lab of another script, which is real; what the driver lists of it is not."""
    monkeypatch.setenv("JVLAB_HOME", str(tmp_path))
    code = "import jvlab as jv\nlab = jv.Lab(name='left-over', lease=300)\nprint(lab._gateway.pid, flush=True)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    try:
        driver((int(done.stdout), 100_000))
        replica = pb.ReplicaStatus(
            replica="p/0", state=pb.FAILED, cause=FULL[4], log_tail="..."
        )
        pool: Any = SimpleNamespace(
            snapshot=pb.PoolStatus(pool="p", replicas=[replica]), name="p"
        )
        with pytest.raises(jv.errors.LaunchError) as caught:
            jv.Pool._all_ready(pool)
        assert (
            f"The GPU's memory is held by lab left-over (pid {done.stdout.strip()}, 104.9 GB)"
            in str(caught.value)
        )
        assert caught.value.remedy.startswith("`jvlab stop left-over` ends that lab; ")
    finally:
        stop_lab("left-over")
