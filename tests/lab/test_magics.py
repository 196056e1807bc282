"""`%load_ext jvlab` in a real IPython shell: commands, prompts in a cell, completion, and clear refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import jvlab as jv
from jvlab.lab import _magics
from jvlab.lab._magics import MagicError
from jvlab.wire import jvlab_pb2 as pb


class FakePool(jv.Pool):
    """A pool that remembers what it was asked; no gateway behind it."""

    def __init__(self, name: str = "p") -> None:
        replica = pb.ReplicaStatus(replica=f"{name}/0", stage="ready", state=pb.READY)
        replica.facts.sampling_names.extend(["temperature", "min_p"])
        self.snapshot = pb.PoolStatus(
            pool=name,
            model="/m/tiny",
            device="cpu",
            tensor_parallel=1,
            replicas=[replica],
        )
        self.name, self.model, self.asked = name, "/m/tiny", []

    def status(self) -> dict[str, Any]:
        self.asked.append("status")
        return {}

    def generate(self, prompts: Any, n: int = 1, **sampling: Any) -> Any:  # type: ignore[override]
        self.asked.append((prompts, n, sampling))
        return jv.RolloutBatch(
            [
                jv.Sample(
                    i,
                    k,
                    np.array([5]),
                    np.array([6]),
                    np.array([-0.5]),
                    text="x",
                    versions=((1, 0, 1),),
                )
                for i in range(len(prompts))
                for k in range(n)
            ]
        )


class FakeLink(jv.Link):
    """A link that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def sync(self, params: Any, version: int | None = None, **options: Any) -> Any:  # type: ignore[override]
        self.asked.append((params, options))
        return "report"

    def bisect(self, prompt: Any, policy: Any = None, **options: Any) -> Any:  # type: ignore[override]
        self.asked.append((prompt, policy))
        return "found"

    def close(self) -> None:
        return


class FakePolicy(jv.Policy):
    """A policy without a model."""

    def __init__(self) -> None:
        self.params = {"w": 1}


@pytest.fixture
def shell(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    config = Config()
    config.HistoryManager.enabled = False
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=config)
    shell.run_line_magic("load_ext", "jvlab")
    yield shell
    shell.restore_sys_module_state()
    InteractiveShell.clear_instance()


def test_rollout_takes_prompts_from_a_cell(shell: Any):
    pool = shell.user_ns["pool"] = FakePool()
    shell.user_ns["same"] = pool
    batch = shell.run_cell_magic(
        "rollout",
        "n=2 max_tokens=16 stop='a b' logprob=None -o kept",
        "one prompt\n\n  two\n",
    )
    assert isinstance(batch, jv.RolloutBatch)
    assert len(batch) == 4
    assert shell.user_ns["kept"] is batch
    assert pool.asked == [
        (["one prompt", "  two"], 2, {"max_tokens": 16, "stop": "a b", "logprob": None})
    ]
    result = shell.run_cell("%%rollout same n=1\nhello")
    assert result.success
    assert isinstance(result.result, jv.RolloutBatch)


def test_rollout_says_what_is_missing(shell: Any):
    with pytest.raises(MagicError, match="no Pool in this notebook") as error:
        shell.run_cell_magic("rollout", "", "hello")
    assert "launch" in error.value.remedy
    shell.user_ns.update(a=FakePool("a"), b=FakePool("b"))
    with pytest.raises(MagicError, match="a, b"):
        shell.run_cell_magic("rollout", "n=2", "hello")
    assert len(shell.run_cell_magic("rollout", "b n=2", "hello")) == 2
    with pytest.raises(MagicError, match="not a Pool of this notebook"):
        shell.run_cell_magic("rollout", "c", "hello")
    with pytest.raises(MagicError, match="no prompts"):
        shell.run_cell_magic("rollout", "b", " \n ")
    with pytest.raises(MagicError, match="-o needs a name"):
        shell.run_cell_magic("rollout", "b -o 3", "hello")
    with pytest.raises(MagicError, match="quotation"):
        shell.run_cell_magic("rollout", "b stop='", "hello")
    with capture_output() as shown:
        shell.run_cell("%%rollout zzz\nhello")
    assert "Traceback" not in shown.stdout + shown.stderr
    assert "is not a Pool of this notebook" in shown.stdout + shown.stderr


def test_status_sync_bisect_help(shell: Any):
    with pytest.raises(MagicError, match="no Lab, Pool or Link"):
        shell.run_line_magic("jv", "status")
    pool = shell.user_ns["pool"] = FakePool()
    with capture_output() as shown:
        shell.run_line_magic("jv", "status")
    assert pool.asked == ["status"]
    assert "Pool('p', 'tiny'" in shown.outputs[0].data["text/plain"]
    assert "<table" in shown.outputs[0].data["text/html"]
    with pytest.raises(MagicError, match="no Link"):
        shell.run_line_magic("jv", "sync")
    link, policy = FakeLink(), FakePolicy()
    shell.user_ns.update(link=link, policy=policy, tree={"w": 2})
    assert shell.run_line_magic("jv", "sync") == "report"
    shell.run_line_magic("jv", "sync mode=staged")
    shell.run_line_magic("jv", "sync policy")
    shell.run_line_magic("jv", "sync tree verify=off")
    want = [
        ({"w": 1}, {}),
        ({"w": 1}, {"mode": "staged"}),
        ({"w": 1}, {}),
        ({"w": 2}, {"verify": "off"}),
    ]
    assert link.asked == want
    assert shell.run_line_magic("jv", "bisect once upon a time") == "found"
    assert link.asked[-1] == ("once upon a time", policy)
    with capture_output() as shown:
        shell.run_line_magic("jv", "help")
    assert all(f"%jv {command}" in shown.stdout for command in _magics.COMMANDS)
    with pytest.raises(MagicError, match="did you mean %jv status"):
        shell.run_line_magic("jv", "statsu")
    shell.user_ns.clear()


def test_loading_is_light():
    script = (
        "import sys, jvlab\nfrom IPython.core.interactiveshell import InteractiveShell\n"
        "jvlab.load_ipython_extension(InteractiveShell())\n"
        "print([m for m in ('vllm', 'torch', 'jax', 'ipywidgets', 'anywidget', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    assert done.stdout.strip().splitlines()[-1] == "[]"
