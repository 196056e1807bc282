"""A lab ends with the script that made it: real gateways, real signals. (With an engine: test_endings.py.)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.lab import _script_end
from jvlab.wire.processes import _labs
from tests.conftest import wait_for_exit
from tests.waiting import until

pytestmark = pytest.mark.slow
ENDS = 60.0  # seconds, for what takes one or two on a machine of its own
Start = Callable[..., tuple["subprocess.Popen[str]", int]]

SHOW = "print(lab._gateway.pid, flush=True)\n"
BARE = "import sys, time, jvlab as jv\nlab = jv.Lab(name=sys.argv[1])\n" + SHOW
SLEEP = "time.sleep(600)\n"
WITH = f"import sys, time, jvlab as jv\nwith jv.Lab(name=sys.argv[1], lease=600) as lab:\n    {SHOW}    {SLEEP}"
OWN_HANDLER = (
    "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    + BARE
    + SLEEP
)
SWALLOWS = f"""
import sys, time, jvlab as jv, jvlab.lab._script_end as ending
ending.UNWIND_SECONDS = 0.5
lab = jv.Lab(name=sys.argv[1])
while True:
    try:
        {SHOW}        {SLEEP}
    except BaseException:
        print("going on", flush=True)
"""
THREAD = """
import threading, time, jvlab.lab._script_end as ending
ending.THREAD_SECONDS = 0.5
threading.Thread(target=time.sleep, args=(600,)).start()
"""
FORK = """
import multiprocessing
process = multiprocessing.get_context("fork").Process
for seconds in (*[0.01] * 12, 600):
    child = process(target=time.sleep, args=(seconds,))
    child.start()
    if seconds == 600:
        child.terminate()
    child.join(60)
    print(child.exitcode, flush=True)
print(lab.status()["holders"], flush=True)
"""
FOREIGN = """
import ctypes, signal
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)
ctypes.CDLL(None).signal(signal.SIGTERM, handler)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a script with a lab; returns its process and its gateway's pid."""
    monkeypatch.setenv("JVLAB_HOME", str(tmp_path))
    started = []

    def run(code: str, *words: str) -> tuple[subprocess.Popen[str], int]:
        command = [sys.executable, *words, "-c", code, f"lab-{len(started)}"]
        # a line of input that no test writes does not come: /dev/null would end at once
        script = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(script)
        assert script.stdout is not None
        return script, int(script.stdout.readline())

    yield run
    for script in started:
        script.kill()
        script.wait(ENDS)
        script.stdin.close()
        script.stdout.close()
    for info in _labs.list_labs(query=False):
        _labs.stop_lab(info.name)


def ended_by(number: int, script: subprocess.Popen[str]) -> int:
    """Its exit status after this signal."""
    script.send_signal(number)
    return script.wait(ENDS)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (BARE + SLEEP, 143),
        (WITH, 143),
        (OWN_HANDLER, 7),
        (THREAD + BARE + SLEEP, -signal.SIGTERM),
    ],
    ids=["bare", "with", "own handler", "a thread that does not end"],
)
def test_sigterm_closes_the_lab(start: Start, code: str, status: int):
    script, gateway = start(code)
    assert ended_by(signal.SIGTERM, script) == status
    assert not wait_for_exit({gateway}, ENDS)


def test_sigterm_closes_the_lab_of_a_script_that_goes_on(start: Start):
    script, gateway = start(SWALLOWS)
    script.send_signal(signal.SIGTERM)
    assert script.stdout is not None
    assert script.stdout.readline() == "going on\n"
    assert not wait_for_exit({gateway}, ENDS)
    assert script.poll() is None
    assert ended_by(signal.SIGTERM, script) == -signal.SIGTERM, (
        "a second one is not caught"
    )


@pytest.mark.parametrize(
    "code", [BARE, BARE + "raise ValueError('mine')"], ids=["its end", "an error"]
)
def test_exit_closes_the_lab(start: Start, code: str):
    script, gateway = start(code)
    assert script.wait(ENDS) == (1 if "ValueError" in code else 0)
    assert not wait_for_exit({gateway}, 0), "the next script may need its device"


def test_sigkill_leaves_the_lab_for_seconds(start: Start):
    assert 5 < _script_end.SCRIPT_LEASE < 30
    script, gateway = start(
        "import jvlab.lab._script_end as ending\nending.SCRIPT_LEASE = 2.0\n"
        + BARE
        + SLEEP
    )
    assert ended_by(signal.SIGKILL, script) == -signal.SIGKILL
    assert not wait_for_exit({gateway}, ENDS)


def test_a_lease_that_was_given_stays_in_force(start: Start):
    code = BARE.replace("name=", "lease=300, name=")
    script, gateway = start(code + SLEEP)
    assert ended_by(signal.SIGTERM, script) == 143
    other, second = start(code)
    assert other.wait(ENDS) == 0
    assert psutil.pid_exists(gateway)
    assert psutil.pid_exists(second)
    for name in ("lab-0", "lab-1"):
        lab = jv.Lab.attach(name)
        assert lab.status()["lease_seconds"] == 300
        lab.close()


def test_detached_and_held_labs_outlive_their_script(start: Start):
    script, detached = start(BARE + "lab.detach()")
    assert script.wait(ENDS) == 0
    script, _ = start(BARE + "sys.stdin.readline()")
    script.kill()  # within its lease somebody else may take it over
    with jv.Lab.attach("lab-1") as lab:
        script, held = start(BARE + SLEEP)
        other = jv.Lab.attach("lab-2")
        assert ended_by(signal.SIGTERM, script) == 143
        until(lambda: other.status()["holders"] == [other._holder])
        until(lambda: lab.status()["holders"] == [lab._holder])
        other.close()
    assert not wait_for_exit({held}, ENDS)
    assert psutil.pid_exists(detached)
    assert _labs.stop_lab("lab-0")["stopped"] == "lab-0"


def test_forks_run_and_end_without_the_lab(start: Start):
    script, _ = start(BARE + FORK + SLEEP)
    assert script.stdout is not None
    codes = [int(script.stdout.readline()) for _ in range(13)]
    assert codes == [0] * 12 + [-signal.SIGTERM]
    assert script.stdout.readline().startswith(f"['python {script.pid} on ")
    assert ended_by(signal.SIGTERM, script) == 143


@pytest.mark.parametrize("how", ["stopped", "no GIL"])
def test_a_script_that_stands_still_keeps_its_lab(start: Start, how: str):
    """For longer than its lease."""
    lease = 1.0
    blocked = (
        "import ctypes\nctypes.PyDLL(None).sleep(4)\n"
        if how == "no GIL"
        else "sys.stdin.readline()\n"
    )
    code = (
        BARE.replace("name=", f"lease={lease}, name=")
        + blocked
        + "print(lab.status()['holders'], flush=True)\n"
    )
    script, gateway = start(code + SLEEP)
    if how == "stopped":
        script.send_signal(signal.SIGSTOP)
        time.sleep(4)
        script.send_signal(signal.SIGCONT)
        assert script.stdin is not None
        script.stdin.write("\n")
        script.stdin.flush()
    assert script.stdout is not None
    assert (
        script.stdout.readline()
        == f"['python {script.pid} on {os.uname().nodename}']\n"
    )
    assert psutil.pid_exists(gateway)
    script.kill()
    assert not wait_for_exit({gateway}, ENDS)


@pytest.mark.soak
def test_a_script_that_was_stopped_for_minutes_keeps_its_lab(start: Start):
    """Longer than gRPC's keep-alive, which would close its connection, and the lease."""
    script, gateway = start(BARE + SLEEP)
    script.send_signal(signal.SIGSTOP)
    time.sleep(90)
    assert psutil.pid_exists(gateway)
    script.send_signal(signal.SIGCONT)
    assert ended_by(signal.SIGTERM, script) == 143
    assert not wait_for_exit({gateway}, ENDS)


def test_a_library_s_own_handler_is_left_in_place(start: Start):
    check = "import jvlab.lab._script_end as e\nprint(e._caught_in_c(15), signal.getsignal(15) == 0, flush=True)\n"
    script, _ = start(FOREIGN + BARE + check)
    assert script.stdout is not None
    assert script.stdout.readline() == "True True\n"


def test_ipython_keeps_a_lab_for_ten_minutes(start: Start):
    code = (
        "import jvlab as jv\nlab = jv.Lab(name='ipython')\n"
        + SHOW
        + "print(lab.status()['lease_seconds'])"
    )
    command = [
        sys.executable,
        "-m",
        "IPython",
        "--no-banner",
        "--colors=NoColor",
        "-c",
        code,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    )
    gateway, lease = done.stdout.split()
    assert float(lease) == 600
    assert psutil.pid_exists(int(gateway))
    jv.Lab.attach("ipython").close()


def test_only_the_main_thread_sets_a_handler(monkeypatch: pytest.MonkeyPatch):
    import threading

    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        thread = threading.Thread(target=_script_end.unwind_at_sigterm)
        thread.start()
        thread.join(ENDS)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        monkeypatch.setattr(_script_end, "in_session", lambda: True)
        _script_end.unwind_at_sigterm()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, (
            "a kernel's signals are Jupyter's"
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(errors.ConfigError, match="lease"):
        jv.Lab(lease=0)
    until(lambda: not thread.is_alive())
