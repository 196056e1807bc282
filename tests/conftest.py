"""Shared fixtures: a private home for labs, tiny models, one shared real engine, leak checks."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from _pytest.runner import runtestprotocol
from absl.logging import PythonHandler
from hypothesis import HealthCheck, settings

from jvlab.engine._cpu import lacks
from jvlab.engine._defaults import SPINS
from jvlab.engine._patches import settle_vector_math
from jvlab.engine._warm import HOST
from jvlab.wire.processes._labs import processes_below
from jvlab.wire.processes._supervisor import SCRATCH
from tests.fuzzing import NEW_EXAMPLES
from tests.waiting import stolen_time
from tests.xla_flags import UNOPTIMISED, plain_loops

# Trainer meshes of any size up to 8 on the CPU; must be set before jax is first imported.
# Most programs of a test run once, so that compiling without optimisation is faster. Notebooks and soaks optimise.
XLA = ["--xla_force_host_platform_device_count=8"]
if not NEW_EXAMPLES:
    XLA += [*UNOPTIMISED, *plain_loops()]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *XLA]).strip()

# Two test processes share the cores: torch's threads in them sleep when they wait, as jvlab's engines do.
os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
# Each test compiles what it runs; tests/trainer/test_compile_cache.py asks for the cache. One that all tests share
# gains nothing: they compile different programs (tests/trainer/decoder: 54 CPU seconds without it, 61 with it).
os.environ.setdefault("JVLAB_COMPILE_CACHE", "0")

# At its end absl's handler closes the stderr that it found, unless that is stderr still: while a test has capsys it is
# not. A library that configures logging then (nixl) would close what pytest captures into, for all later tests.
PythonHandler.close = logging.StreamHandler.close

# A shell's background job ignores SIGINT, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, so that only a code change breaks a test; JVLAB_FUZZ=1 explores new ones.
# No deadlines: the machine may be busy.
# How long an example takes says more about what else the machine does.
QUIET: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("steady", derandomize=True, **QUIET)
settings.register_profile("explore", **QUIET)
settings.load_profile("explore" if NEW_EXAMPLES else "steady")

# the beginnings of their ids
SOAKED = tuple(
    line
    for line in (Path(__file__).parent / "soaked.txt").read_text().splitlines()
    if line and not line.startswith("#")
)

LEFT_BY_ENGINES = re.compile(
    r"jvengine-|jvnew-|jvlab-|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
)


@contextlib.contextmanager
def private_temporary_folder() -> Iterator[Path]:
    """A temporary folder for the test session, so that leftover files can be found at its end.

    Its name is short: a socket's path has at most 107 characters. Compiler caches are kept for the next session.
    """
    cache = os.path.join(tempfile.gettempdir(), "torchinductor_tests")
    before = {
        name: os.environ.get(name) for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")
    }
    folder = tempfile.mkdtemp(prefix="t")
    os.environ["TMPDIR"] = folder
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
    tempfile.tempdir = None  # makes tempfile read TMPDIR again
    try:
        yield Path(folder)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = None
        shutil.rmtree(folder, ignore_errors=True)


def left_by_engines(folder: Path) -> list[str]:
    """Sockets, and files with names as jvlab or vLLM choose them, in a temporary folder."""
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if stat.S_ISSOCK(entry.lstat().st_mode) or LEFT_BY_ENGINES.match(entry.name)
    )


def plain_vllm() -> dict[str, str]:
    """Environment for a vLLM that a test starts without jvlab: it may leave files in a folder of its own."""
    folder = os.path.join(tempfile.gettempdir(), "plain")
    os.makedirs(folder, exist_ok=True)
    return {"TMPDIR": folder, "VLLM_RPC_BASE_PATH": folder}


def scratch_of(pids: set[int]) -> set[str]:
    """The temporary folders of the engines among these processes, held open by them or their supervisors."""
    parents = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            parents.add(psutil.Process(pid).ppid())
    found = set()
    for pid in pids | parents:
        with contextlib.suppress(OSError):
            folder = f"/proc/{pid}/fd"
            links = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
            found |= {
                path
                for path in links
                if os.path.basename(path).startswith(SCRATCH) and os.path.isdir(path)
            }
    return found


# one line, or a list over several
MARKS = re.compile(r"^pytestmark = (\[\n.*?^\]|[^\n]*)", re.DOTALL | re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file of which `-m "... not NAME ..."` leaves out every test, or `-m "NAME and ..."` wants none:
    imports take longer than tests."""
    expression = str(config.option.markexpr)
    unwanted = re.findall(r"\bnot (\w+)", expression)
    if (
        unwanted
        and collection_path.suffix == ".py"
        and collection_path.name.startswith("test_")
    ):
        text = collection_path.read_text(encoding="utf-8")
        wanted = re.match(r"(?!not\b)(\w+) and\b", expression)
        if wanted and f"pytest.mark.{wanted[1]}" not in text:
            return True
        marks = " ".join(MARKS.findall(text))
        if "browser" in unwanted and collection_path.parent.name == "browser":
            return True
        if any(re.search(rf"\bpytest\.mark\.{name}\b", marks) for name in unwanted):
            return True
    return None


@pytest.hookimpl(tryfirst=True)  # `-m` selects in another one
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SOAKED):
            item.add_marker(pytest.mark.soak)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Of the workers without vLLM none imports it by mistake: it takes each of them half a minute."""
    if "not vllm" in str(session.config.option.markexpr) and "vllm" in sys.modules:
        raise pytest.UsageError(
            "a test file imports vLLM: mark it with pytest.mark.vllm, or import it in the test"
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """`--dist loadfile`, but all files of tests/browser go to one worker: one server, page, kernel and engine serve
    them. And a worker that crashes fails one test.
    """
    from tests.workers import CrashesFailOnce

    class BrowserTogether(CrashesFailOnce):
        def _split_scope(self, nodeid: str) -> str:
            return (
                "tests/browser"
                if nodeid.startswith("tests/browser/")
                else super()._split_scope(nodeid)
            )

    return (
        BrowserTogether(config, log) if config.getoption("dist") == "loadfile" else None
    )


AGAIN = "failed before"  # a property of the report of a test that then passed
MOST_AGAIN = 3  # in one session: more are no bad luck


def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> bool | None:
    """Run a test that failed once more; the report of the last run counts, and the end of the session names the test.

    One race among thousands of tests does not hide what the others say, and is not hidden either. On a starved
    machine, where any deadline may be missed, it may fail twice: its host gave a third of its processors, or more, to
    others meanwhile. Not one that its own timeout ended: the timer would not be there again.
    """
    if not isinstance(item, pytest.Function):
        return None  # a notebook's cell: it depends on what the cells before it did
    where = {"nodeid": item.nodeid, "location": item.location}
    item.ihook.pytest_runtest_logstart(**where)
    before = ""
    for left in (2, 1, 0):
        began, stolen = time.monotonic(), stolen_time()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        share = (stolen_time() - stolen) / max(time.monotonic() - began, 1e-3)
        failed = [report.longreprtext for report in reports if report.failed]
        allowed = left == 2 or (left == 1 and share > 1 / 3)
        if failed and allowed and not any("Timeout (>" in text for text in failed):
            if not before:
                before = f"the host took {share:.0%} of the processors\n{failed[0]}"
            _close_new_pools(item)
            _forget_failed_fixtures(item)
            continue
        for report in reports:
            if before and not failed and report.when == "call":
                report.user_properties.append((AGAIN, before))
            elif before and report.failed:
                report.sections.append(("the first time", before))
            item.ihook.pytest_runtest_logreport(report=report)
        break
    item.ihook.pytest_runtest_logfinish(**where)
    return True


def pytest_runtest_setup() -> None:
    """References are computed by torch in test processes, too."""
    if "torch" in sys.modules:
        settle_vector_math()


POOLS: pytest.StashKey[list[tuple[Any, set[str]]]] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note which pools its labs have, before it makes some."""
    fixtures = getattr(item, "funcargs", {}).values()
    labs = [fixture for fixture in fixtures if hasattr(fixture, "known_pools")]
    item.stash[POOLS] = [(lab, set(lab.known_pools)) for lab in labs]
    return (yield)


def _close_new_pools(item: pytest.Item) -> None:
    """What a test that failed has launched would be in its way the next time."""
    for lab, before in item.stash.get(POOLS, []):
        with contextlib.suppress(Exception):  # the lab may be what failed
            for name in set(lab.known_pools) - before:
                lab.known_pools[name].close()


def passed_again(config: pytest.Config) -> dict[str, str]:
    """Tests that failed and then passed, and why they had failed."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    reports = terminal.stats.get("passed", []) if terminal else []
    return {
        report.nodeid: why
        for report in reports
        for name, why in report.user_properties
        if name == AGAIN
    }


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for name, why in passed_again(config).items():
        terminalreporter.section(f"failed, then passed: {name}")
        terminalreporter.write_line(why)
        terminalreporter.write_line(f"AGAIN {name}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if len(passed_again(session.config)) > MOST_AGAIN and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _forget_failed_fixtures(item: pytest.Function) -> None:
    """Let fixtures that raised be made again, and the test get new ones of its own."""
    item._initrequest()
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        for definition in definitions:
            if (
                cached := getattr(definition, "cached_result", None)
            ) is not None and cached[2] is not None:
                definition.finish(item._request)  # type: ignore[arg-type]


@pytest.fixture(scope="session", autouse=True)
def private_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A private folder for the session's labs; checks at the end that no process and no file is left."""
    home = tmp_path_factory.mktemp("jvlab-home")
    before, os.environ["JVLAB_HOME"] = os.environ.get("JVLAB_HOME"), str(home)
    with private_temporary_folder() as temporary:
        yield home
        ours = {p.pid for p in jvlab_processes() if str(home) in command_line(p)}
        left = wait_for_exit(ours, 30)
        files = left_by_engines(temporary)
    if before is None:
        del os.environ["JVLAB_HOME"]
    else:
        os.environ["JVLAB_HOME"] = before
    assert not left, f"processes outlived the test session: {left}"
    assert not files, f"the test session left files in its temporary folder: {files}"


def command_line(process: psutil.Process) -> str:
    """The process's command line; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def jvlab_processes() -> list[psutil.Process]:
    """Every process of jvlab, or of an engine it started, on this machine, except this one."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "name", "status"]):
        words = process.info["cmdline"] or []
        ours = any(w in ("gateway", "rollout", "warm") for w in words) and any(
            "jvlab" in w for w in words
        )
        if process.info["name"] == HOST:
            continue  # `jvlab warm`, which outlives labs
        ours = ours or any("_supervisor.py" in w for w in words)
        engine = (process.info["name"] or "").startswith(("VLLM::", "EngineCore"))
        if (
            (ours or engine)
            and process.pid != os.getpid()
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ):
            found.append(process)
    return found


def process_tree(pid: int) -> set[int]:
    """A process and its descendants; of a gateway also those that `jvlab warm` forked for it."""
    try:
        return {pid, *(child.pid for child in processes_below(psutil.Process(pid)))}
    except psutil.NoSuchProcess:
        return set()


def alive(pids: set[int]) -> set[int]:
    """Those that exist and are not zombies."""
    out = set()
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                out.add(pid)
        except psutil.NoSuchProcess:
            continue
    return out


def wait_for_exit(pids: set[int], seconds: float) -> set[int]:
    """Wait until these processes have ended; returns those still alive after the time."""
    deadline = time.monotonic() + seconds
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.fixture(scope="session")
def needs_bf16() -> None:
    """For a test whose engine computes in bfloat16."""
    _skip_without("bfloat16")


@pytest.fixture(scope="session")
def needs_int8() -> None:
    """For a test whose engine multiplies in int8."""
    _skip_without("int8")


def _skip_without(kind: str) -> None:
    if why := lacks(kind):
        pytest.skip(f"this CPU has no {kind}: {why}")


@pytest.fixture(scope="session")
def half() -> str:
    """The dtype of an engine in 16 bits: bfloat16 where the CPU has it."""
    if not lacks("bfloat16"):
        return "bfloat16"
    _skip_without("float16")
    return "float16"


@pytest.fixture(scope="session")
def llama() -> str:
    """A tiny llama with random weights."""
    import jvlab as jv

    return jv.models.tiny("llama")


@pytest.fixture(scope="session")
def lab() -> Iterator[object]:
    """One lab, shared by tests that do not change it."""
    import jvlab as jv

    lab = jv.Lab(lease=120)
    pids = process_tree(lab._gateway.pid)
    yield lab
    pids |= process_tree(lab._gateway.pid)
    lab.close()
    assert not wait_for_exit(pids, 60), "lab.close() left processes"


@pytest.fixture(scope="session")
def pool(lab, llama):
    """One real vLLM engine, shared by tests that do not change it; its limits are higher than the defaults."""
    return lab.launch(
        llama, name="shared", limits={"n": 250_000, "samples": 250_000}
    ).wait()
