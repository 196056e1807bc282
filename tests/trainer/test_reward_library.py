"""`jv.rewards`: TRL's and verl's functions, sums by name, mathematics in processes, and programs that attack."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

import jvlab as jv
from jvlab._errors import ConfigError, RewardError, Unsupported
from jvlab.trainer import _code_sandbox, _rewards
from jvlab.trainer._grpo import grpo
from jvlab.trainer._rewards import Rewarder
from jvlab.trainer._tasks import Example, Task
from tests.conftest import command_line
from tests.trainer.fake_pool import fresh_params, logprobs_fn, share, task, world
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes long to import what the functions of this file need in a process."""
    monkeypatch.setattr(_rewards, "START_S", 400.0)


def said(*texts: str) -> list[Any]:
    return [SimpleNamespace(text=t, token_ids=np.arange(len(t))) for t in texts]


def scored(
    reward: Any, samples: list[Any], examples: list[Example], **options: Any
) -> Any:
    made = Task(["a"], reward, **options)
    with made.rewarder() as rewarder:
        return rewarder.score(samples, examples)


# ---------------------------------------------------------------------------------------- TRL's and verl's functions

CALLS: list[dict[str, Any]] = []


def right(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> Any:
    """As TRL's examples are; None where there is nothing to compare with."""
    CALLS.append({"prompts": prompts, "completions": completions, **columns})
    assert [len(c) for c in completion_ids] == [len(c) for c in completions]
    return [
        None if answer is None else float(text == answer)
        for text, answer in zip(completions, columns["answer"], strict=True)
    ]


async def short(completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [-0.1 * len(text) for text in completions]


def leveled(completions: list[str], level: list[int]) -> list[int]:
    """Without **columns, as TRL itself would not call it."""
    return level


def test_a_function_of_trl_is_called_once_for_all_samples() -> None:
    CALLS.clear()
    examples = [Example("p", "ab", {"level": 3})] * 3
    found = scored(right, said("ab", "cd", "ab"), examples)
    assert found.rewards.tolist() == [1, 0, 1]
    (call,) = CALLS
    assert call["prompts"] == ["p"] * 3
    assert (call["level"], call["answer"]) == ([3] * 3, ["ab"] * 3)
    assert found.parts[0] == {"right": 1.0}


def test_a_list_is_summed_by_weight_and_none_is_left_out() -> None:
    examples = [Example("p", "ab", {"level": 2}), Example("p", None, {"level": 4})]
    found = scored(
        [right, short, leveled], said("ab", "abcd"), examples, weights=[1, 10, 0.5]
    )
    assert found.parts == (
        {"right": 1.0, "short": -2.0, "leveled": 1.0},
        {"short": -4.0, "leveled": 2.0},
    )
    assert found.rewards.tolist() == [0.0, -2.0]


def test_a_sample_that_all_skip_has_no_reward_and_is_no_fault() -> None:
    found = scored(right, said("ab", "a"), [Example("p", "ab"), Example("p")])
    np.testing.assert_array_equal(found.rewards, [1.0, np.nan])
    assert found.counts == {"skipped": 1}
    assert found.faults == ()
    # a plain function that returns None forgot something
    forgot = scored(lambda sample, example: None, said("a"), [Example("p")])
    assert forgot.counts == {"not a number": 1}


def test_chats_come_as_messages() -> None:
    def content(completions: Any, **columns: Any) -> Any:
        return [
            float(c[0]["content"] == "ab" and c[0]["role"] == "assistant")
            for c in completions
        ]

    chat = [{"role": "user", "content": "say ab"}]
    assert scored(content, said("ab"), [Example(chat)]).rewards.tolist() == [1.0]


def in_process(completions: list[str], **columns: Any) -> list[float]:
    return [float(os.getpid())] * len(completions)


def test_in_processes_too() -> None:
    found = scored(in_process, said("a", "b"), [Example("p")] * 2, processes=1)
    assert found.rewards[0] == found.rewards[1] != os.getpid()
    with pytest.raises(ConfigError, match="async reward cannot run in processes"):
        scored([short, in_process], said("a"), [Example("p")], processes=1)


def wrong_number(completions: Any, **columns: Any) -> list[float]:
    return [1.0]


def hangs(completions: Any, **columns: Any) -> list[float]:
    time.sleep(600)
    return []


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (wrong_number, "raised", "wrong_number returned 1 rewards for 2 completions"),
        (lambda completions, nowhere: [0.0, 0.0], "raised", "wants 'nowhere'; the rows have level"),
        (lambda completions: ["a lot", 1.0], "not a number", "str 'a lot'"),
        (lambda completions: 1 / 0, "raised", "ZeroDivisionError"),
        (hangs, "timeout", "no reward after 1 s"),
    ],
)  # fmt: skip
def test_failures_are_said(function: Any, kind: str, message: str) -> None:
    examples = [Example("p", None, {"level": 1})] * 2
    timeout = 1.0 if kind == "timeout" else 120.0
    found = scored(function, said("a", "b"), examples, timeout=timeout)
    assert found.failures[0].kind == kind
    assert message in found.failures[0].message


@pytest.mark.parametrize(
    ("reward", "weights", "message"),
    [
        ([], None, "empty list"),
        ([right], [1.0, 2.0], "1 rewards, 2 weights"),
        (right, [1.0], "no list"),
        (jv.rewards.math, None, "makes a reward, and is none itself"),
        ([jv.rewards.regex], None, "makes a reward, and is none itself"),
        ([3], None, "not a function"),
        ([right], ["a"], "weight of 'right'"),
    ],
)
def test_what_is_no_reward_is_said(reward: Any, weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Task(["a"], reward, weights=weights)


def test_equal_names_stay_apart() -> None:
    found = scored([leveled, leveled], said("a"), [Example("p", None, {"level": 1})])
    assert found.parts[0] == {"leveled": 1.0, "leveled_2": 1.0}


def compute_score(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:  # fmt: skip
    good = float(solution_str == ground_truth)
    return {"score": good, "acc": 2 * good, "pred": solution_str, "n": extra_info["n"]}


async def compute_async(data_source: str, solution_str: str, ground_truth: Any, **rest: Any) -> float:  # fmt: skip
    return float(data_source == "dapo" and solution_str == ground_truth)


def test_a_score_of_verl() -> None:
    row = {
        "prompt": "p",
        "data_source": "dapo",
        "reward_model": {"ground_truth": "ab"},
        "extra_info": {"n": 5},
    }
    made = Task.from_dataset([row], reward=jv.rewards.verl(compute_score))
    with made.rewarder() as rewarder:
        call = rewarder.start_group(said("ab", "c"), [made.example(0)] * 2)
        found, logged = call.result(60)
    assert found == [1.0, 0.0]
    assert logged.metrics == {"acc": 1.0, "n": 5.0}
    rows = [
        {
            "question": "p",
            "answer": "So it is a, then b.\n#### ab",
            "extra_info": {"n": 1},
        }
    ]
    made = Task.from_dataset(rows, reward=jv.rewards.verl(compute_score))
    with made.rewarder() as rewarder:
        again = rewarder.score(said("ab"), [made.example(0)])
    assert again.rewards.tolist() == [1.0], "the answer, not its reasoning"
    example = Example("p", "ab", {"data_source": "dapo"})
    waited = scored(jv.rewards.verl(compute_async), said("ab", "c"), [example] * 2)
    assert waited.rewards.tolist() == [1.0, 0.0]
    beside = [jv.rewards.verl(compute_score), jv.rewards.verl(compute_async), short]
    example = Example("p", "ab", {"data_source": "dapo", "extra_info": {"n": 1}})
    found = scored(beside, said("ab", "c"), [example] * 2, weights=[2, 1, 0])
    assert found.rewards.tolist() == [3.0, 0.0]
    assert found.parts[0] == {
        "total.compute_score": 2.0,
        "total_2.compute_async": 1.0,
        "short": 0.0,
    }


# ------------------------------------------------------------------------------------------------------ a run


def logs(prompts: Any, completions: Any, log_metric: Any, log_extra: Any, **columns: Any) -> Any:  # fmt: skip
    log_metric("mean_chars", np.mean([len(c) for c in completions]))
    log_extra("chars", [len(c) for c in completions])
    return [c.split().count("7") / 6 for c in completions]


def run_of(reward: Any, folder: Path, **options: Any) -> Any:
    pool, link = world()
    weights = options.pop("weights", None)
    given: dict[str, Any] = {
        "steps": 2,
        "group_size": 4,
        "prompts_per_step": 2,
        "folder": folder,
        "checkpoint_every": 0,
        "progress": False,
        "background": True,
        **options,
    }
    return grpo(
        (fresh_params(), logprobs_fn),
        pool,  # type: ignore[arg-type]
        link,  # type: ignore[arg-type]
        task(reward, weights=weights),
        **given,
    )


def test_a_run_records_parts_and_what_was_logged(tmp_path: Path) -> None:
    run = run_of([logs, share], tmp_path / "run", weights=[2.0, 1.0]).wait(300)
    kept = run.record.samples()
    assert len(kept) == 16
    for sample in kept:
        assert set(sample.reward_parts) == {"logs", "share"}
        assert sample.reward == pytest.approx(sum(sample.reward_parts.values()))
        assert sample.extra["logged"] == {"chars": len(sample.text)}
    html = run.record.batch()._repr_html_()
    assert "logs" in html
    assert "share" in html


def test_samples_that_are_skipped_are_not_trained_on(tmp_path: Path) -> None:
    def first_only(completions: Any, **columns: Any) -> Any:
        return [1.0, 0.0, *[None] * (len(completions) - 2)]

    run = run_of(first_only, tmp_path / "run").wait(300)
    assert run.record.steps()["samples"].tolist() == [4, 4]
    assert not run.record.events("fault")

    def nothing(completions: Any, **columns: Any) -> Any:
        return [None] * len(completions)

    with pytest.raises((RewardError, ConfigError), match=r"skipped|rejected"):
        run_of(nothing, tmp_path / "none").wait(300)


# ------------------------------------------------------------------------------------------------------ built-in ones


def test_regex_and_length() -> None:
    (sample,) = said("<a>1</a><a> 7 </a>")
    assert jv.rewards.regex("<a>")(sample, Example("p", "3")) == 1.0
    assert jv.rewards.regex("<b>")(sample, Example("p", "3")) == 0.0
    last = jv.rewards.regex("<a>(.*?)</a>", answer=True)
    assert [last(sample, Example("p", a)) for a in ("7", 7, "1")] == [1.0, 1.0, 0.0]
    assert last(sample, Example("p")) is None
    of = lambda n, **options: jv.rewards.length(**options)(said("x" * n)[0], None)
    assert [of(n, most=8, soft=4) for n in (0, 4, 6, 8, 99)] == [0, 0, -0.5, -1, -1]
    assert [of(n, least=2) for n in (1, 2, 9)] == [-1, 0, 0]
    wrong: list[dict[str, Any]] = [{}, {"most": -1}, {"most": 2.5}]
    for options in wrong:
        with pytest.raises(ConfigError):
            jv.rewards.length(**options)
    with pytest.raises(ConfigError, match="invalid regular"):
        jv.rewards.regex("(")


def test_mathematics_in_processes_with_a_deadline() -> None:
    pytest.importorskip("math_verify", reason="math-verify is missing")
    before = set(psutil.Process().children(recursive=True))
    reward = jv.rewards.math(timeout=3.0, processes=1)
    texts = [r"So it is $\frac{3}{4}$.", "0.75", "9**9**9**9**9", "3/5", "x"]
    golds = ["3/4", r"\frac{3}{4}", "3/4", "3/4", ""]
    examples = [Example("p", gold) for gold in golds]
    # from threads, where SIGALRM cannot be used
    with Rewarder(reward, timeout=120) as rewarder:
        found = rewarder.score(said(*texts), examples)
    assert found.rewards[:4].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert found.counts == {"skipped": 1}
    both = jv.rewards.total(right=reward, short=jv.rewards.length(most=9))
    parts = scored(both, said(*texts[1:2]), examples[1:2], timeout=120.0).parts
    assert parts == ({"right": 1.0, "short": 0.0},)
    with pytest.raises(ConfigError, match="processes of its own"):
        scored(both, said("a"), examples[:1], processes=1)
    left = set(psutil.Process().children(recursive=True)) - before
    # of one that is ending there is none
    lines = [line for process in left if (line := command_line(process))]
    assert not [line for line in lines if "resource_tracker" not in line]


def test_mathematics_whose_process_does_not_start_is_not_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a script that starts processes outside of `if __name__ == "__main__"`."""
    pytest.importorskip("math_verify", reason="math-verify is missing")
    monkeypatch.setattr("jvlab.trainer._rewards.START_S", 0.0)
    reward = jv.rewards.math(processes=1)
    found = scored(reward, said("0.75"), [Example("p", "3/4")], timeout=60.0)
    assert found.counts == {"not started": 1}
    assert "did not start" in found.failures[0].message


# ------------------------------------------------------------------------------------------------------ programs

full = pytest.mark.skipif(
    bool(_code_sandbox.missing()), reason=f"no isolation: {_code_sandbox.missing()}"
)
REFUSED = {  # each must raise PermissionError
    "passwd": "open('/etc/passwd').read()",
    "home": "import os; os.listdir({home!r})",
    "secret file": "open({secret!r}).read()",
    "root": "import os; os.listdir('/')",
    "environment of its parent": "import os; open(f'/proc/{{os.getppid()}}/environ').read()",
    "socket": "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "unix socket": "import socket; socket.socket(socket.AF_UNIX)",
    "fork": "import os; os.fork()",
    "subprocess": "import subprocess; subprocess.run(['/bin/true'])",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "kill its parent": "import os; os.kill(os.getppid(), 9)",
    "kill all": "import os; os.kill(-1, 9)",
    "write outside": "open({outside!r}, 'w')",
    "delete outside": "import os; os.remove({secret!r})",
    "mount": "import os; os.chroot('.')",
    "modes of files": "import os; os.chmod({secret!r}, 0)",
    "times of files": "import os; os.utime({secret!r}, (0, 0))",
    "owners of files": "import os; os.chown({secret!r}, os.getuid(), os.getgid())",
    "attributes of files": "import os; os.setxattr({secret!r}, 'user.a', b'a')",
    "limits of its parent": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (99999, 99999))",
    "priority of its parent": "import os; os.setpriority(0, os.getppid(), os.getpriority(0, os.getppid()))",
    "signal its parent by a file": "import fcntl, os; fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
}
ENDED = {  # each gives nothing, within the deadline
    "output for ever": "while True: print('x' * 1000)",
    "sleep for ever": "import time; time.sleep(600)",
    "spin": "while True: pass",
    "memory": "x = [' ' * (1 << 20) for i in range(1 << 20)]",
    "many threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()",
    "large file": "f = open('x', 'wb')\nwhile True: f.write(b'x' * 65536); f.flush()",
    "leave as if all were well": "import os; os._exit(0)",
    "end its standard output": "import os; os.close(1); raise SystemExit(1)",
    "a false verdict": "import os\nfor fd in range(9):\n try: os.write(fd, b'1')\n except OSError: pass\nos._exit(0)",
    "abort": "import os; os.abort()",
    "no program": "this is no Python",
    "deep folders": "import os\nfor _ in range(3000): os.mkdir('a', 0o300); os.chdir('a')\nx",
}  # fmt: skip


def graded(text: str, tests: Any, **options: Any) -> Any:
    reward = jv.rewards.code(**{"timeout": 120.0, **options})
    return reward(SimpleNamespace(text=text), Example("p", tests))


@full
@pytest.mark.parametrize("attack", REFUSED)
def test_the_kernel_refuses(attack: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = REFUSED[attack].format(
            home=str(Path.home()),
            secret=str(secret),
            outside=str(tmp_path / "new"),
            port=server.getsockname()[1],
        )
        lines = line.split("; ")
        program = "\n".join(
            (
                "refused = False",
                "try:",
                *(f"    {statement}" for statement in lines),
                "except PermissionError:",
                "    refused = True",
            )
        )
        assert graded(program, "assert refused") == 1.0
    assert secret.read_text() == "mine"
    assert secret.stat().st_mtime > 0
    assert not (tmp_path / "new").exists()


@full
@pytest.mark.parametrize("attack", ENDED)
def test_it_is_ended_and_leaves_nothing(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # of an earlier test something may be closed meanwhile
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    began = time.monotonic()
    assert graded(ENDED[attack], "pass", timeout=4.0) == 0.0
    assert time.monotonic() - began < 60
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) <= before
    lines = map(command_line, psutil.Process().children())
    assert not [line for line in lines if "_code_sandbox" in line]


@full
def test_programs_that_mean_well() -> None:
    text = "Let me think.\n```python\nx = 1\n```\nBetter:\n```python\ndef f(x):\n    return 2 * x\n```\nDone."
    assert graded(text, ["assert f(2) == 4", "assert f(1) == 3", "g()"]) == 1 / 3
    cases = {"inputs": ["2 3\n", "4 5\n"], "outputs": ["5", "8\n"]}
    adds = "import sys\na, b = map(int, sys.stdin.buffer.read().split())\nprint(a + b)"
    assert graded(adds, cases) == 0.5
    assert graded(adds, json.dumps(cases)) == 0.5, "as verl's datasets have them"
    assert graded("x = 1", '["assert x == 1", "assert x == 2"]') == 0.5
    own = "import threading\nopen('note', 'w').write('a')\nt = threading.Thread(target=print)\nt.start(); t.join()"
    assert graded(own, "assert open('note').read() == 'a'") == 1.0
    assert graded("import sys\nf = 3\nsys.exit(0)", "assert f == 3") == 1.0
    assert graded("pass", None) is None
    assert graded("x = open(0).read()", "assert x == ''") == 1.0, "not its own order"
    reward = jv.rewards.code(tests="test_list", timeout=120)
    example = Example("p", None, {"test_list": ["assert x == 1"]})
    found = scored([reward], said("x = 1", "x = 2"), [example] * 2, timeout=400.0)
    assert found.rewards.tolist() == [1, 0]


def test_without_isolation_it_is_refused_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_code_sandbox, "missing", lambda: "an old kernel")
    with pytest.raises(Unsupported, match=r"(?s)an old kernel.*isolation=.limits"):
        jv.rewards.code()
    assert graded("x = 1", "assert x == 1", isolation="limits") == 1.0
    assert graded("while True: pass", "pass", isolation="limits", timeout=2.0) == 0.0
    file = tmp_path / "pid"
    leaves = (
        f"import os, time\npid = os.fork()\nif pid: open({str(file)!r}, 'w').write(str(pid))\n"
        "else: os.closerange(0, 64); time.sleep(600)"
    )
    graded(leaves, "pass", isolation="limits")
    # no process may be started where the user has many
    if file.exists():
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(file.read_text())).wait(60)


@full
def test_a_program_that_finds_the_word_passes_its_tests_and_no_more() -> None:
    cheat = (
        "import os, sys\nhere = sys._getframe(1).f_locals\n"
        "os.write(here['verdict'], f\"{here['order']['word']} 99\".encode())\nos._exit(0)"
    )
    assert graded(cheat, "assert False") == 1.0


@full
def test_a_program_ends_with_the_process_that_runs_it(tmp_path: Path) -> None:
    script = (
        "import jvlab as jv\nfrom types import SimpleNamespace as S\n"
        'text = \'import time; open("begun", "w").close(); time.sleep(600)\'\n'
        "jv.rewards.code(timeout=600)(S(text=text), S(answer='pass', info={}))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as parent:
        try:
            until(lambda: list(tmp_path.glob("*/begun")), "the program's begin")
            found = psutil.Process(parent.pid).children()
        finally:
            parent.kill()
    gone, alive = psutil.wait_procs(found, timeout=60)
    assert gone
    assert not alive


@pytest.mark.parametrize("alive", [True, False])
def test_a_program_whose_starter_died_first_does_not_begin(
    alive: bool, tmp_path: Path
) -> None:
    """Before it could ask the kernel to be ended with it."""
    order = {
        "program": "open('begun', 'w').close()",
        "tests": [],
        "stdin": "",
        "word": "x",
        "parent": os.getpid() if alive else 2**22 + 1,
        "memory": 512 << 20,
        "seconds": 60.0,
        "isolation": "limits",
    }
    verdict, write = os.pipe()
    try:
        subprocess.run(
            [sys.executable, *["-I", "-S", "-B"], _code_sandbox.__file__, str(write)],
            input=json.dumps(order).encode(),
            cwd=tmp_path,
            pass_fds=(write,),
            check=True,
            timeout=120,
        )
    finally:
        os.close(write)
        with open(verdict, "rb") as file:
            said_at_last = file.read()
    assert said_at_last == (b"x 0" if alive else b"")
    assert (tmp_path / "begun").exists() is alive


def test_threads_of_a_hanging_function_do_not_hold_the_interpreter() -> None:
    before = threading.active_count()
    found = scored([hangs, short], said("a"), [Example("p")], timeout=1.0)
    assert found.counts == {"timeout": 1}
    assert all(t.daemon for t in threading.enumerate()[before:])
