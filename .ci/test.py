"""`make test`: every stage runs, also after one that failed; the end says how long each took and what failed in it.

    python .ci/test.py                  all stages
    python .ci/test.py units engines    some
    python .ci/test.py soak             what `make test` leaves out: full products, long runs, Ray, real weights,
                                        two long notebooks

Lint, types and the tests that import vLLM (in one process, which alone pays for it) run beside the tests without
engines. Notebooks do not run beside those with engines: on two cores that took a quarter more time than one after the
other. `jvlab warm` is started first: vLLM is imported once, not by every lab.

No stage hangs for ever: one that prints nothing for JVLAB_SILENT_SECONDS shows its processes and their Python stacks,
is ended, and has failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.xla_flags import UNOPTIMISED, plain_loops  # noqa: E402

CHOICE = shlex.split(os.environ.get("PYTEST_ARGS", ""))
NONE_CHOSEN = (
    5  # pytest's exit status if no test was: of a choice, not every stage has one
)
PYTEST = [sys.executable, "-m", "pytest", "-p", "tests.workers", *CHOICE]
RUFF = [sys.executable, "-m", "ruff"]
ROOMS = [
    "-c",
    "from importlinter.cli import lint_imports_command as rooms; rooms()",
]  # pyproject.toml: the order of rooms
# Three workers on two cores: tests wait for processes, engines, browsers and deadlines, and the third works meanwhile.
FILES = ["-n", "3", "--dist", "loadfile"]
# importing nbval takes each process seconds
TESTS = [*PYTEST, "-p", "no:nbval", *FILES]
ONE = [*PYTEST, "-p", "no:nbval", "-n", "1", "--dist", "loadfile"]
NOTEBOOKS = ["-n", "2", "--dist", "loadfile"]
NO_ENGINE = "not engine and not browser and not soak"
# Files with engines, as measured; not by the number of tests: some have few and long ones, and would be left to one
# worker at the end.
LONGEST_LIVE = (
    *("sync", "grpo", "lora_sync", "sync_faults", "tunix"),
    *("many_trainers", "every_parameter_arrives", "certify", "launch_errors"),
    *("pool", "in_process", "deadlines", "http", "bisect", "meaning_bisect"),
    *("endings", "experts", "scale", "pages"),
)
# notebooks, as measured
LONGEST_FIRST = (
    *("12", "11", "16", "07", "04", "09", "02"),
    *("03", "08", "06", "15", "01", "14", "10"),
)
LONG = ("05", "13")  # notebooks of several minutes: in the soak stage
LONG_CELL_S = 3600  # of such a notebook; pyproject.toml's timeout is for tests
# Without a byte of output. More than pyproject.toml's timeout of a test, which ends a test that hangs, by name.
SILENT_S = float(os.environ.get("JVLAB_SILENT_SECONDS", "900"))
STACKS_S = 5.0  # in which a process writes its stacks
STACK_PAUSE_S = 0.5  # without a byte: it has written them
EXPLORE = ["env", "JVLAB_FUZZ=1"]  # all examples of a property test, and new ones
# no engine on a CPU is compiled; vLLM in a test's own process would start it
EAGER = {"TORCH_COMPILE_DISABLE": "1"}
PR_SET_PDEATHSIG = 1
# the title that a worker gives itself
RUNNING = re.compile(r"\[pytest-xdist running\] (\S.*)")
# A test's name without its group. AGAIN, of tests/conftest.py: it failed, and passed when it was run once more.
NAMED = re.compile(r"^(FAILED|ERROR|AGAIN) (\S.*?)(?:@[\w/]+)?(?: - .*)?$")


@dataclass
class Stage:
    """Commands run one after the other; the stage has failed if one of them did."""

    name: str
    commands: list[list[str]]
    usual: bool = True  # runs without being asked for
    beside: bool = False  # runs in the background of the stages after it
    warm: bool = False  # makes labs
    seconds: float = 0.0
    # share of this machine's processor time that its host gave to others meanwhile
    taken: float = 0.0
    failed: bool = False
    names: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    silent: float = SILENT_S  # seconds without output after which it is ended

    def run(self) -> None:
        began, before = time.monotonic(), processor_time()
        for command in self.commands:
            self._one(command)
        self.seconds = time.monotonic() - began
        stolen, total = (
            now - then for now, then in zip(processor_time(), before, strict=True)
        )
        self.taken = stolen / total if total else 0.0

    @property
    def note(self) -> str:
        return (
            f", the host took {self.taken:.0%} of the processors"
            if self.taken >= 0.05
            else ""
        )

    def _one(self, command: list[str]) -> None:
        environment = {**os.environ, **self.environment}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd=ROOT, env=environment, **streams) as process:
            held = []
            line = b""
            for part in self._output(process):
                if self.beside:
                    held.append(part)
                else:
                    _print(part)
                *whole, line = (line + part).split(b"\n")
                for text in whole:
                    if found := NAMED.match(text.decode(errors="replace").rstrip()):
                        names = self.again if found[1] == "AGAIN" else self.names
                        names.append(found[2])
        code = process.wait()
        _print(b"".join(held))
        if code and not (code == NONE_CHOSEN and CHOICE):
            self.failed = True
            if not self.names:
                self.names.append(f"{shlex.join(command)}: exit {code}")

    def _output(self, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
        """What it prints, as it comes. A process that is silent for too long is ended, with all below it."""
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        while select.select([pipe], [], [], self.silent)[0]:
            if not (part := os.read(pipe, 1 << 16)):
                return
            yield part
        yield f"\n=== {self.name}: no output for {self.silent:g} s. Its processes, and their stacks:\n".encode()
        tree = process_tree(process.pid)
        for below in tree:
            yield f"{below.pid:8} {command_of(below)}\n".encode()
        self.failed = True
        self.names.append(f"{self.name}: ended, no output for {self.silent:g} s")
        self.names += [
            f"{running[1]}: was running then"
            for p in tree
            if (running := RUNNING.search(command_of(p)))
        ]
        # one after the other: stacks that are written at the same moment are mixed letter by letter
        for below in tree:
            if not ask_for_stacks(below):
                continue
            until = time.monotonic() + STACKS_S
            pause = STACKS_S  # until it begins: on a busy machine not at once
            while select.select([pipe], [], [], min(pause, _left(until)))[0]:
                if not (part := os.read(pipe, 1 << 16)):
                    break
                yield part
                pause = STACK_PAUSE_S
        for below in tree:
            with contextlib.suppress(psutil.Error):
                below.kill()


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; empty if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def command_of(process: psutil.Process) -> str:
    """Its command line: of a worker of pytest-xdist the test that it runs."""
    try:
        return " ".join(process.cmdline()).strip() or process.name()
    except psutil.Error:
        return "(ended)"


def ask_for_stacks(process: psutil.Process) -> bool:
    """Send it the signal of tests/workers.py, if it waits for that: others would die of it, and node would open its
    debugger. False: not sent."""
    with contextlib.suppress(OSError, psutil.Error, StopIteration):
        if "python" not in process.name() and "pytest" not in command_of(process):
            return False
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:")).split()[1]
        if int(caught, 16) >> (signal.SIGUSR1 - 1) & 1:
            process.send_signal(signal.SIGUSR1)
            return True
    return False


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def processor_time() -> tuple[int, int]:
    """(stolen, all) of this machine since it booted: a virtual machine may wait for its host. Zero where unknown."""
    try:
        numbers = [
            int(word)
            for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        ]
    except (OSError, ValueError):
        return 0, 0
    return numbers[7], sum(numbers)


def _print(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def engine_files() -> list[str]:
    """All files that start an engine or a browser, so that the rest need not be imported; the longest come first."""
    known = {f"test_{name}": at for at, name in enumerate(LONGEST_LIVE)}
    live = sorted(
        sorted((ROOT / "tests" / "live").glob("test_*.py")),
        key=lambda path: known.get(path.stem, len(known)),
    )
    files = [str(path.relative_to(ROOT)) for path in live]
    return ["tests/browser", *files, "tests/hosts", "tests/test_examples.py"]


def notebooks(long: bool = False) -> list[str]:
    """Those of `make test`, or those too `long` for it. Of the first, the longest come first, and those whose length
    is not known: the workers then end at about the same time."""
    found = sorted(
        path
        for path in (ROOT / "notebooks").glob("*.ipynb")
        if path.name.startswith(LONG) == long
    )
    known = {number: at for at, number in enumerate(LONGEST_FIRST)}
    return [
        str(path.relative_to(ROOT))
        for path in sorted(found, key=lambda path: known.get(path.name[:2], -1))
    ]


def compared(*options: str, optimised: bool = False) -> list[str]:
    """The command that runs notebooks and compares what they put out.

    Compiling programs that are not `optimised` saves more than the few runs of each lose.
    """
    flags = [] if optimised else [*UNOPTIMISED, *plain_loops()]
    flags = [*os.environ.get("XLA_FLAGS", "").split(), *flags]
    environment = ["JVLAB_IMPORTS=quiet", f"XLA_FLAGS={' '.join(flags)}"]
    nbval = ["--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "-W", "ignore"]
    return ["env", *environment, *PYTEST, *nbval, *options]


def stages() -> list[Stage]:
    python = sys.executable
    return [
        Stage(
            "lint",
            [
                [*RUFF, "check", "."],
                [*RUFF, "format", "--check", "."],
                [python, *ROOMS],
                [python, ".ci/checks.py"],
                [python, ".ci/weigh.py"],
            ],
            beside=True,
        ),
        # pyright prints nothing before its end, which comes late on a machine that is busy with the tests beside it
        Stage("types", [[python, "-m", "pyright"]], beside=True, silent=3 * SILENT_S),
        Stage("vllm", [[*ONE, "-m", f"vllm and {NO_ENGINE}"]], beside=True),
        Stage("units", [[*TESTS, "-m", f"{NO_ENGINE} and not vllm"]]),
        Stage(
            "notebooks",
            [compared(*NOTEBOOKS, "--no-loadscope-reorder", *notebooks())],
            warm=True,
        ),
        Stage(
            "engines",
            [
                [python, ".ci/browser.py"],
                [
                    *PYTEST,
                    *("-p", "no:nbval"),
                    *FILES,
                    "--no-loadscope-reorder",
                    "-m",
                    "(engine or browser) and not soak",
                    *engine_files(),
                ],
            ],
            warm=True,
        ),
        Stage(
            "soak",
            [
                [python, "-m", "pyright", "tests"],
                [*TESTS, "-m", "soak"],
                [*EXPLORE, *TESTS, "-m", "hypothesis"],
                compared(
                    *("--timeout", str(LONG_CELL_S)),
                    *notebooks(long=True),
                    optimised=True,
                ),
            ],
            usual=False,
            warm=True,
            silent=max(SILENT_S, LONG_CELL_S + 600),
        ),
    ]


@contextlib.contextmanager
def warm_process() -> Iterator[str]:
    """`jvlab warm`, for all labs that the commands make; yields its socket, which is for JVLAB_WARM."""
    with tempfile.TemporaryDirectory(prefix="jvwarm-") as folder:
        path = f"{folder}/socket"
        with open(f"{folder}/log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "jvlab", "warm"],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, **EAGER, "JVLAB_WARM": path},
                preexec_fn=_end_with_parent,
            )
        try:
            yield path
        finally:
            # labs then imported vLLM themselves: slower, and worth a line
            if process.poll() is not None:
                print(
                    f"jvlab warm ended with {process.returncode}:\n{Path(folder, 'log').read_text()[-2000:]}"
                )
            process.terminate()
            process.wait(30)


def _end_with_parent() -> None:
    """In a child, on Linux: a killed `make test` leaves no `jvlab warm` behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def main(wanted: list[str]) -> int:
    every = stages()
    names = [s.name for s in every]
    if unknown := sorted(set(wanted) - set(names)):
        print(
            f"no stage is called {', '.join(unknown)}\n  -> there are: {', '.join(names)}",
            file=sys.stderr,
        )
        return 2
    chosen = [s for s in every if s.name in wanted or (s.usual and not wanted)]
    began = time.monotonic()
    aside = []
    with contextlib.ExitStack() as background:
        # from the beginning: it imports while other tests run
        path = (
            background.enter_context(warm_process())
            if any(s.warm for s in chosen)
            else ""
        )
        for stage in chosen:
            print(f"\n=== {stage.name}", flush=True)
            stage.environment = {**EAGER, "JVLAB_WARM": path} if stage.warm else {}
            if stage.beside:
                thread = threading.Thread(target=stage.run, name=stage.name)
                thread.start()
                aside.append(thread)
            else:
                stage.run()
        for thread in aside:
            thread.join()
    print("\n=== in short")
    for stage in chosen:
        print(
            f"{stage.name:10} {'FAILED' if stage.failed else 'passed':7} {stage.seconds:7.0f} s{stage.note}"
        )
        for name in stage.names:
            print(f"    {name}")
        for name in stage.again:
            print(f"    failed, then passed: {name}")
    print(f"{'together':18} {time.monotonic() - began:7.0f} s")
    return int(any(s.failed for s in chosen))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
