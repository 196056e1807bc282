"""The examples in the docstrings of public names, executed; those that need an engine share the one of Lab's."""

from __future__ import annotations

import doctest
import inspect
import os
import types
from collections.abc import Iterator
from typing import Any

import pytest

import jvlab as jv
from jvlab.trainer import _code_sandbox

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.FAIL_FAST
# What an example may start from, as in a notebook that has run the example of `Lab`.
NEEDS_ENGINE = (
    "Pool",
    "Link",
    "Stepper",
    "SyncReport",
    "CheckReport",
    "Scores",
    "Session",
    "Sessions",
    "DeterminismReport",
    "certify",
    "Certificate",
    "chaos",
    "ChaosReport",
    "grpo",
    "Meaning",
    "Bisection",
    "Run",
    "whatif",
)
# They end the notebook's link, so they come last.
ENDS_THE_LINK = ("Follower",)
NEEDS_VLLM = ("Mapping", "TransferPlan", "plan")
PLAIN = (
    "Sample",
    "RolloutBatch",
    "Policy",
    "mesh",
    "Rules",
    "Algorithm",
    "Task",
    "Record",
    "JvlabError",
    "Environment",
    "EnvironmentTurn",
    "Publisher",
    "PublishReport",
)
MODULES = ("errors", "integrations", "models", "rewards", "tasks", "transport")
# Of the errors the module, the root and one class show how to use them; the others differ in what they are about.
# Integrations import the trainers that they are for, which may be absent.
SHOWN = {name: tuple(getattr(jv, name).__all__) for name in MODULES} | {
    "errors": ("JvlabError", "UnknownName"),
    "integrations": (),
}


def examples(name: str) -> list[doctest.DocTest]:
    """Those of the object itself and of its own methods."""
    thing = getattr(jv, name)
    finder = doctest.DocTestFinder(recurse=not inspect.ismodule(thing))
    found = finder.find(thing, name, globs={})
    # a module's own functions are often defined in a private one
    for member in SHOWN.get(name, ()):
        if callable(value := getattr(thing, member)):
            found += finder.find(
                value, f"{name}.{member}", module=inspect.getmodule(value), globs={}
            )
    return [test for test in found if test.examples]


def run(name: str, globs: dict[str, Any]) -> int:
    """Execute them, each in a copy of `globs`; how many lines there were."""
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    count, report = 0, []
    for test in examples(name):
        if test.name == "rewards.code" and _code_sandbox.missing():
            continue  # this kernel can't isolate a program, which is an error of its own
        test.globs = {**globs}
        assert not any(doctest.SKIP in e.options for e in test.examples), (
            f"{test.name} is not executed"
        )
        result = runner.run(test, out=report.append, clear_globs=False)
        count += result.attempted
        if name == "Lab":
            globs |= test.globs
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
    assert count, f"{name} has no example"
    return count


@pytest.fixture
def plain() -> dict[str, Any]:
    return {"jv": jv, "model": jv.models.tiny("llama")}


@pytest.mark.parametrize("name", PLAIN)
def test_examples_that_need_nothing(name: str, plain: dict[str, Any]):
    if name == "Policy":  # its methods' examples start from what its own example made
        plain["policy"] = jv.Policy.from_pretrained(plain["model"])
    assert run(name, plain) > 0


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_public_modules(name: str, plain: dict[str, Any]):
    """Of the module itself, and of everything callable in it."""
    assert run(name, plain) > 0
    shown = {test.name for test in examples(name)}
    members = {
        f"{name}.{member}"
        for member in SHOWN[name]
        if callable(getattr(getattr(jv, name), member))
    }
    assert shown == {name, *members}


@pytest.mark.vllm
@pytest.mark.parametrize("name", NEEDS_VLLM)
def test_examples_that_trace_vllms_loader(name: str, plain: dict[str, Any]):
    policy = jv.Policy.from_pretrained(plain["model"])
    mapping = jv.Mapping.of(policy.params, plain["model"])
    assert run(name, {**plain, "policy": policy, "mapping": mapping}) > 0


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What stands in a notebook after the example of `Lab` was run."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("notebook"))  # a run writes its folder here
    globs: dict[str, Any] = {"jv": jv}
    try:
        run("Lab", globs)
        yield globs
    finally:
        if "lab" in globs:
            globs["lab"].close()
        os.chdir(before)


@pytest.mark.engine
@pytest.mark.parametrize("name", NEEDS_ENGINE)
def test_examples_that_need_an_engine(name: str, notebook: dict[str, Any]):
    assert run(name, notebook) > 0


@pytest.mark.engine
def test_magics_on_a_real_pool(
    notebook: dict[str, Any], tmp_path, monkeypatch: pytest.MonkeyPatch
):
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    config = Config()
    config.HistoryManager.enabled = False
    InteractiveShell.clear_instance()
    shell: Any = InteractiveShell.instance(config=config)
    shell.run_line_magic("load_ext", "jvlab")
    shell.user_ns.update(
        {k: v for k, v in notebook.items() if k in ("lab", "pool", "link", "policy")}
    )
    batch = shell.run_cell_magic(
        "rollout", "n=2 max_tokens=4 ignore_eos=True", "one\ntwo\n"
    )
    assert [len(s.token_ids) for s in batch] == [4] * 4
    assert shell.run_line_magic("jv", "sync").verified
    shell.run_line_magic("jv", "status")
    assert shell.run_line_magic("jv", "bisect Once upon a time").agrees
    InteractiveShell.clear_instance()


@pytest.mark.engine
@pytest.mark.parametrize("name", ENDS_THE_LINK)
def test_examples_after_which_the_link_is_closed(name: str, notebook: dict[str, Any]):
    assert run(name, notebook) > 0


def test_every_public_name_says_what_it_is():
    for name in jv.__all__:
        thing = getattr(jv, name)
        assert inspect.getdoc(thing), name
        if inspect.isclass(thing):
            for method, value in vars(thing).items():
                public = not method.startswith("_") and isinstance(
                    value, (types.FunctionType, property, classmethod)
                )
                told = inspect.getdoc(getattr(thing, method)) if public else "private"
                assert told, f"{name}.{method} has no docstring"


def test_every_public_name_has_an_example_that_is_run():
    engine = {*NEEDS_ENGINE, *ENDS_THE_LINK, "Lab"}
    assert {*PLAIN, *MODULES, *NEEDS_VLLM, *engine} == set(jv.__all__)
    for name in jv.__all__:
        own = name if inspect.ismodule(getattr(jv, name)) else ""
        assert any(test.name == own or not own for test in examples(name)), name


def test_the_examples_of_the_package_itself():
    (test,) = doctest.DocTestFinder(recurse=False).find(jv, "jvlab", globs={})
    assert test.examples
    assert doctest.DocTestRunner(optionflags=FLAGS).run(test).failed == 0


def test_a_name_without_an_example_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jv.EnvironmentTurn, "__doc__", "What a step returns.")
    assert not examples("EnvironmentTurn")
    with pytest.raises(AssertionError, match="no example"):
        run("EnvironmentTurn", {"jv": jv})
