"""`.ci/checks.py` finds every kind of wait without a deadline, and nothing else; the package has none left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.ci_scripts import ci_script

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checks() -> ModuleType:
    return ci_script("checks")


WAITS = """
lock.acquire()
lock.acquire(True)
thread.join()
thread.join(None)
event.wait()
event.wait(timeout=None)
process.wait()
process.communicate()
condition.wait_for(ready)
queue.get()
queue.get(block=True)
future.result()
future.result(10 if hurried else None)
future.exception()
wait(futures)
wait(futures, None)
for future in as_completed(futures): pass
executor.shutdown()
executor.shutdown(wait=True)
with ThreadPoolExecutor(2) as threads: pass
subprocess.run(command)
subprocess.check_output(command, text=True)
listener.accept()
sock.recv(4096)
sock.recv_into(buffer)
sock.connect(address)
pipe.recv()
select.select([sock], [], [])
watch.poll(None)
selector.select()
os.waitpid(pid, 0)
fcntl.flock(file, fcntl.LOCK_EX)
async def f(): await event.wait()
async def f(): await queue.get()
async def f(): await asyncio.wait(tasks)
async def f(): await asyncio.wait_for(task, None)
async def f(): await stream.read()
async def f(): await reader.readexactly(4)
"""

HARMLESS = """
lock.acquire(timeout=5)
lock.acquire(False)
lock.acquire(blocking=False)
with lock: pass
thread.join(5)
", ".join(words)
os.path.join(a, b)
event.wait(5)
pool.wait()
lab.launch(model).wait()
process.communicate(timeout=5)
condition.wait_for(ready, 5)
queue.get(timeout=5)
queue.get(False)
options.get("name")
framed.put(message)
future.result(0)
wait(futures, 5)
for future in as_completed(futures, 5): pass
executor.shutdown(wait=False)
sock.shutdown(socket.SHUT_RDWR)
subprocess.run(command, timeout=5)
receiver.recv(seconds)
lab.connect(params, pool)
select.select([sock], [], [], 5)
process.poll()
os.waitpid(pid, os.WNOHANG)
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
file.read()
waiting = asyncio.create_task(event.wait())
async def f(): await asyncio.wait_for(event.wait(), 5)
async def f(): await asyncio.wait(tasks, timeout=5)
"""


@pytest.mark.parametrize("line", WAITS.strip().splitlines())
def test_a_wait_without_a_deadline_is_found_unless_it_gives_a_reason(
    checks: ModuleType, line: str
):
    (found,) = checks.waits("a.py", line)
    assert (found.path, found.line) == ("a.py", 1)
    assert "without a deadline" in found.text
    assert not list(checks.waits("a.py", f"{line}  # no deadline: it was killed"))
    assert not list(
        checks.waits(
            "a.py", f"# no deadline: `close` ends it, which\n# is always called\n{line}"
        )
    )
    assert list(checks.waits("a.py", f"{line}  # no deadline:")), "a reason is wanted"
    assert list(checks.waits("a.py", f"{line}\n# no deadline: at another line"))


@pytest.mark.parametrize("line", HARMLESS.strip().splitlines())
def test_other_calls_are_not(checks: ModuleType, line: str):
    assert not list(checks.waits("a.py", line))


def test_a_put_waits_only_if_a_queue_has_a_bound(checks: ModuleType):
    assert not list(checks.waits("a.py", "queue = Queue()\nqueue.put(1)"))
    (found,) = checks.waits(
        "a.py", "queue = Queue(maxsize=3)\nqueue.put(1)\nqueue.put(1, timeout=5)"
    )
    assert found.line == 2


def test_what_stands_within_a_timeout_has_one(checks: ModuleType):
    within = "async def f():\n    async with asyncio.timeout(5):\n        await queue.get()\n"
    assert not list(checks.waits("a.py", within))
    assert len(list(checks.waits("a.py", within + "    await queue.get()\n"))) == 1
    later = "async def f():\n    async with asyncio.timeout(5):\n        def later():\n            event.wait()\n"
    assert len(list(checks.waits("a.py", later))) == 1, "it is called elsewhere"


def test_a_reason_that_is_no_longer_needed_is_found(checks: ModuleType):
    (found,) = checks.waits("a.py", "event.wait(5)  # no deadline: it was killed")
    assert "remove it" in found.text


def test_the_command_names_file_and_line_and_fails(tmp_path: Path):
    """And the package passes it: `make lint` runs this."""
    command = [sys.executable, str(ROOT / ".ci" / "checks.py")]
    clean = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False
    )
    assert clean.returncode == 0, clean.stdout
    planted = ROOT / "jvlab" / "sync" / "_senders.py"
    bad = tmp_path / "planted.py"
    bad.write_text(f"{planted.read_text()}\npending_digests.acquire()\n")
    wrong = subprocess.run(
        [*command, str(bad)], capture_output=True, text=True, timeout=500, check=False
    )
    assert wrong.returncode == 1, wrong.stderr
    last = len(bad.read_text().splitlines())
    assert f"planted.py:{last}: acquire waits without a deadline" in wrong.stdout
