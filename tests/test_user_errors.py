"""What a user who mistypes sees: an error of jvlab's own with a remedy, a clean `dir()`, a short traceback."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jvlab as jv
from jvlab.cli._cli import COMMANDS, main
from jvlab.lab._lab import PoolTable
from jvlab.lab._launch_settings import LaunchOptions
from jvlab.sync._connections import check_options, check_pool
from jvlab.sync.diagnose._bisect import bisect
from tests.trainer.fake_pool import fresh_params, logprobs_fn, world

MODULES = ("errors", "models", "tasks", "transport")
FAKE = SimpleNamespace(
    name="demo", snapshot=SimpleNamespace(replicas=[SimpleNamespace(replica="demo/0")])
)
LINK = SimpleNamespace(part="model", sync=jv.Link.sync)
PAIR = (fresh_params, logprobs_fn)


def train(task: Any, **options: Any) -> Any:
    link: Any = world()[1]  # fakes
    return jv.grpo((fresh_params(), logprobs_fn), link.pool, link, task, **options)


def look_for(prompt: Any, policy: Any = None, **options: Any) -> Any:
    return bisect(SimpleNamespace(), prompt, policy, **options)  # type: ignore[arg-type]  # refused before it is asked


MISTAKES: dict[str, tuple[Callable[[], Any], type[jv.JvlabError], str]] = {
    # what is typed: the call, the error, words of its remedy
    "jv.Polcy": (lambda: jv.Polcy, jv.errors.UnknownName, "did you mean 'Policy'"),
    "jv.tasks.gsm8k": (
        lambda: jv.tasks.gsm8k,  # type: ignore
        jv.errors.UnknownName,
        "jv.Task(prompts, reward)",
    ),
    "jv.models.llama": (
        lambda: jv.models.llama,  # type: ignore
        jv.errors.UnknownName,
        "jv.models.tiny('llama')",
    ),
    "jv.transport.rdma": (
        lambda: jv.transport.rdma,  # type: ignore
        jv.errors.UnknownName,
        'transport="shm"',
    ),
    "jv.errors.EngineDirt": (
        lambda: jv.errors.EngineDirt,  # type: ignore
        jv.errors.UnknownName,
        "'EngineDirty'",
    ),
    "jv.tasks.named('gsm8k')": (
        lambda: jv.tasks.named("gsm8k"),
        jv.errors.UnknownName,
        "jv.tasks.jsonl(path)",
    ),
    "task='gsm8k'": (lambda: train("gsm8k"), jv.errors.UnknownName, "digits"),
    "task=None": (
        lambda: train(None),
        jv.errors.ConfigError,
        "jv.Task(prompts, reward)",
    ),
    "grpo(lr=)": (
        lambda: train("digits", lr=1e-3),
        jv.errors.ConfigError,
        "'learning_rate'",
    ),
    "grpo(steps='5')": (
        lambda: train("digits", steps="5"),
        jv.errors.ConfigError,
        "whole number",
    ),
    "grpo(pool=None)": (
        lambda: jv.grpo(PAIR, None, None, "digits"),  # type: ignore
        jv.errors.ConfigError,
        "lab.launch",
    ),
    "grpo(link=pool)": (
        lambda: jv.grpo(PAIR, world()[0], {}, "digits"),  # type: ignore
        jv.errors.ConfigError,
        "lab.connect",
    ),
    "lab.pools['x']": (
        lambda: PoolTable({"demo": None})["demos"],  # type: ignore
        jv.errors.UnknownName,
        "did you mean 'demo'",
    ),
    "lab.pools[0]": (
        lambda: PoolTable({})[0],  # type: ignore
        jv.errors.UnknownName,
        "lab.launch(model",
    ),
    "connect(params, 'demo')": (
        lambda: check_pool("demo", ""),
        jv.errors.ConfigError,
        "lab.pools['demo']",
    ),
    "connect(pool, params)": (
        lambda: check_pool({}, "lab.connect(params, pool)"),
        jv.errors.ConfigError,
        "this order",
    ),
    "bisect(params)": (
        lambda: look_for({"a": 1}),
        jv.errors.ConfigError,
        'link.bisect("a prompt", policy)',
    ),
    "bisect(prompt, params)": (
        lambda: look_for("x", {"a": 1}),
        jv.errors.ConfigError,
        "params=params",
    ),
    "bisect(policy)": (
        lambda: look_for(SimpleNamespace(params={})),
        jv.errors.ConfigError,
        "a prompt",
    ),
    "Task(reward='equals')": (
        lambda: jv.Task(["a"], "equals"),  # type: ignore
        jv.errors.ConfigError,
        "jv.tasks.jsonl",
    ),
    "Rules.parse(lines)": (
        lambda: jv.Rules.parse(["a -> b"]),  # type: ignore
        jv.errors.ConfigError,
        "one rule per line",
    ),
    "Rules(7)": (lambda: jv.Rules(7), jv.errors.ConfigError, "help(jv.Rules)"),  # type: ignore[arg-type]
    "Rules.named('polcy')": (
        lambda: jv.Rules.named("polcy"),
        jv.errors.ConfigError,
        "did you mean 'policy'",
    ),
    "mesh('fsdp')": (lambda: jv.mesh("fsdp"), jv.errors.ConfigError, "fsdp=4,tp=2"),
    "mesh('fdsp=4')": (lambda: jv.mesh("fdsp=4"), jv.errors.ConfigError, "fsdp"),
    "mesh(4)": (lambda: jv.mesh(4), jv.errors.ConfigError, 'jv.mesh("fsdp=4,tp=2")'),  # type: ignore[arg-type]
    "mesh('fsdp=1', tp=1)": (
        lambda: jv.mesh("fsdp=1", tp=1),
        jv.errors.ConfigError,
        "jv.mesh(fsdp=4, tp=2)",
    ),
    "Record('folder')": (
        lambda: jv.Record("folder"),  # type: ignore
        jv.errors.ConfigError,
        "jv.Record.open",
    ),
    "grpo(sync=)": (
        lambda: jv.grpo(PAIR, world()[0], LINK, "digits", sync={"modus": 1}),  # type: ignore
        jv.errors.ConfigError,
        "kv",
    ),
    "grpo(evaluate='gsm8k')": (
        lambda: train("digits", evaluate="gsm8k"),
        jv.errors.UnknownName,
        "digits",
    ),
    "connect(None, pool)": (
        lambda: check_options(None, {}),
        jv.errors.ConfigError,
        "pytree",
    ),
    "connect(hots=)": (
        lambda: check_options({}, {"hots": ""}),
        jv.errors.ConfigError,
        "host, directory",
    ),
    "pool.logs(7)": (
        lambda: jv.Pool._replica_name(FAKE, 7),  # type: ignore
        jv.errors.UnknownName,
        "demo/0",
    ),
    "batch['text']": (
        lambda: jv.RolloutBatch([])["text"],  # type: ignore
        jv.errors.ConfigError,
        "batch.arrays()",
    ),
    "launch(engine='x')": (
        lambda: LaunchOptions(model="m", engine="x").check_counts(),  # type: ignore[arg-type]
        jv.errors.ConfigError,
        "a dict",
    ),
    "Record.open(5)": (lambda: jv.Record.open(5), jv.errors.ConfigError, "path"),  # type: ignore[arg-type]
    "Lab.attach(5)": (lambda: jv.Lab.attach(5), jv.errors.ConfigError, "jv.Lab.list()"),  # type: ignore[arg-type]
    "Lab(lease='x')": (lambda: jv.Lab(lease="x"), jv.errors.ConfigError, "lease"),  # type: ignore[arg-type]
    "resolve(None)": (lambda: jv.models.resolve(None), jv.errors.ModelError, "hub id"),  # type: ignore[arg-type]
    "jsonl(None)": (lambda: jv.tasks.jsonl(None), jv.errors.ConfigError, "JSON Lines"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(
    "written", ["fsdp=2,tp=1", " fsdp=2, tp=1 ", {"fsdp": 2, "tp": 1}]
)
def test_a_mesh_as_it_is_written_elsewhere(written: Any):
    assert jv.mesh(written) == jv.mesh(fsdp=2, tp=1)
    policy = jv.Policy.from_pretrained(jv.models.tiny("llama"), mesh=written)
    assert dict(policy.mesh.shape) == {"fsdp": 2, "tp": 1}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_an_error_with_a_remedy(typed: str):
    call, kind, words = MISTAKES[typed]
    with pytest.raises(kind) as caught:
        call()
    assert words in caught.value.remedy
    assert f"\n  → {caught.value.remedy}" in str(caught.value), (
        "as KeyError prints it, quoted"
    )


def test_unknown_names_are_what_python_expects():
    assert not hasattr(jv, "Polcy")
    assert getattr(jv.tasks, "gsm8k", None) is None
    assert PoolTable({}).get("x") is None
    assert "x" not in PoolTable({})
    with pytest.raises(KeyError):
        PoolTable({})["x"]
    with pytest.raises(ImportError):
        exec("from jvlab import Polcy")


@pytest.mark.parametrize("name", MODULES)
def test_dir_shows_the_public_names_and_nothing_else(name: str):
    module = getattr(jv, name)
    assert dir(module) == sorted(module.__all__)
    assert not [member for member in module.__all__ if not hasattr(module, member)]


def test_no_package_shows_what_it_imports():
    for found in pkgutil.iter_modules(jv.__path__):
        if not found.name.startswith("_"):
            module = import_module(f"jvlab.{found.name}")
            leaked = [
                n
                for n in dir(module)
                if not n.startswith("_") and n not in getattr(module, "__all__", ())
            ]
            ours = [
                n
                for n in leaked
                if getattr(getattr(module, n), "__package__", "").startswith(
                    module.__name__
                )
            ]
            assert leaked == ours


def test_the_version_on_the_command_line():
    command = [sys.executable, "-m", "jvlab", "--version"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == f"jvlab {jv.__version__}\n"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_says_what_it_takes(
    name: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: jvlab {name}" in capsys.readouterr().out


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    config = Config()
    config.HistoryManager.enabled = False
    InteractiveShell.clear_instance()
    yield InteractiveShell.instance(config=config, colors="nocolor")
    InteractiveShell.clear_instance()


CELL = """
import asyncio
from concurrent.futures import ThreadPoolExecutor

import jvlab as jv

def ask():
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(jv.tasks.named, "gsm8k").result()

ask()
"""


def test_a_traceback_in_a_notebook_shows_the_users_lines_and_the_remedy(
    shell: Any, capsys: pytest.CaptureFixture
):
    shell.run_cell(CELL, store_history=True)
    shown = capsys.readouterr().out
    assert "Cell In[1], line 10" in shown
    assert "---> 10 ask()" in shown
    assert "line 8, in ask" in shown
    assert "UnknownName: no task is called 'gsm8k'\n  → there are: add, digits" in shown
    assert "raised at jvlab/trainer/_task_library.py" in shown
    for hidden in ("futures", "thread.py", "_base.py", "__get_result"):
        assert hidden not in shown
    assert len(shown.splitlines()) < 20


def test_all_frames_are_shown_to_those_who_ask(
    shell: Any, capsys: pytest.CaptureFixture
):
    shell.run_cell(CELL)
    capsys.readouterr()
    shell.run_line_magic("tb", "Verbose")
    shown = capsys.readouterr().out
    assert "_base.py" in shown
    assert "__get_result" in shown
    assert "UnknownName" in shown


def test_ctrl_c_in_a_notebook_shows_no_frame_of_ours(
    shell: Any, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    from jvlab.sync._mapping import Mapping

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Mapping, "of", interrupted)
    shell.run_cell("import jvlab as jv\n\njv.plan({}, 'model')", store_history=True)
    shown = capsys.readouterr().out
    assert "Cell In[1], line 3" in shown
    assert "---> 3 jv.plan({}, 'model')" in shown
    assert "KeyboardInterrupt\n%tb Verbose shows the" in shown
    for hidden in ("_mapping.py", "_tracebacks", "in plan", "in call"):
        assert hidden not in shown
    shell.run_line_magic("tb", "Verbose")
    assert "_mapping.py" in capsys.readouterr().out, "those who ask see where"


def test_an_interrupt_says_what_it_left_behind(
    shell: Any, capsys: pytest.CaptureFixture
):
    from jvlab._tracebacks import shorten

    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            shorten(error, "p is dirty")
            raise

    shell.push({"interrupted": interrupted})
    shell.run_cell("interrupted()")
    assert "KeyboardInterrupt: p is dirty" in capsys.readouterr().out


def test_a_cause_is_named(shell: Any, capsys: pytest.CaptureFixture, tmp_path: Path):
    shell.run_cell(
        f"import jvlab as jv\njv.tasks.jsonl({str(tmp_path / 'none.jsonl')!r})"
    )
    assert "caused by FileNotFoundError" in capsys.readouterr().out
