"""The log file: whole lines only, one writer, and kill -9 at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvlab._errors import ConfigError
from jvlab.record._events import RolloutEvent, StepEvent
from jvlab.record._log import EVENTS, LogReader, LogWriter, decode, encode, is_locked
from jvlab.record._record import Record
from jvlab.record._writer import RecordWriter

# what could upset a line format; quick to draw
TEXT = st.text('ab01"\\\n,{}=: é☃\x00\u2028', max_size=12)
ROOT = Path(__file__).parents[2]

WRITER = """
import sys
from jvlab.record._events import RolloutEvent
from jvlab.record._writer import RecordWriter
writer = RecordWriter(sys.argv[1], run="victim", fsync_s=None)
print("ready", flush=True)
i = 0
while True:
    writer.write(RolloutEvent(actor="pool/0", samples=i, tokens=i * 7, groups=tuple(range(200)), start=i, stop=i + 1))
    i += 1
"""


def start_victim(folder: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_lines_are_plain_json_with_a_checksum() -> None:
    line = encode({"kind": "step", "text": 'a "quoted" ,"crc":" line\n'})
    assert json.loads(line)["text"] == 'a "quoted" ,"crc":" line\n'
    assert decode(line) == {"kind": "step", "text": 'a "quoted" ,"crc":" line\n'}
    assert line.count(b"\n") == 1


@given(
    st.dictionaries(TEXT, TEXT | st.integers() | st.lists(TEXT), min_size=1), st.data()
)
def test_a_changed_byte_is_noticed(fields: dict, data: st.DataObject) -> None:
    line = encode(fields)
    assert decode(line) == fields
    at = data.draw(st.integers(0, len(line) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda b: b != line[at]))
    assert decode(line[:at] + bytes([other]) + line[at + 1 :]) is None


def test_half_a_surrogate_pair_survives() -> None:
    assert decode(encode({"text": "cut \ud83d"})) == {"text": "cut \ud83d"}


def test_nan_is_refused_by_the_file() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"x": float("nan")})


def test_a_torn_last_line_is_passed_by_and_then_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    whole = encode({"n": 1}) + encode({"n": 2})
    for cut in range(len(whole) + 1):  # killed after any number of bytes
        path.write_bytes(whole[:cut])
        expected = [{"n": i} for i in (1, 2) if cut >= len(encode({"n": 1})) * i]
        reader = LogReader(path)
        assert list(reader.read()) == expected
        assert reader.damaged == 0
        writer = LogWriter(path)
        writer.append({"n": 3})
        writer.close()
        assert list(reader.read()) == [{"n": 3}]  # the same reader goes on
        assert list(LogReader(path).read()) == [*expected, {"n": 3}]


def test_a_long_torn_line_is_cut_off_too(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(encode({"n": 1}) + b"x" * (3 << 20))
    LogWriter(path).close()
    assert path.read_bytes() == encode({"n": 1})


def test_a_damaged_line_in_the_middle_is_counted(tmp_path: Path) -> None:
    path = tmp_path / EVENTS
    with RecordWriter(tmp_path) as writer:
        for i in range(3):
            writer.write(RolloutEvent(samples=i))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"samples":1', b'"samples":9')
    path.write_bytes(b"".join(lines))
    record = Record.open(tmp_path)
    assert [e.samples for e in record.events("rollout")] == [0, 2]  # type: ignore[attr-defined]
    assert record.damaged == 1
    assert "1 damaged" in repr(record)


def grown(path: Path, more: int) -> None:
    """Wait until the file has so many bytes more."""
    goal, deadline = path.stat().st_size + more, time.monotonic() + 200
    while path.stat().st_size < goal:
        assert time.monotonic() < deadline, "nothing is written"
        time.sleep(0.001)


def test_kill_9_in_the_middle_of_writing_leaves_a_readable_record(
    tmp_path: Path,
) -> None:
    for round_ in range(4):
        victim = start_victim(tmp_path)
        grown(tmp_path / EVENTS, 50_000 + 10_000 * round_)
        assert is_locked(tmp_path)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        victim.stdout.close()  # type: ignore[union-attr]
        record = Record.open(tmp_path)
        rollouts = record.events("rollout")
        sessions = [i for i, e in enumerate(record.events()) if e.kind == "run_start"]
        assert len(sessions) == round_ + 1
        last = [e.samples for e in record.events()[sessions[-1] + 1 :]]  # type: ignore[attr-defined]
        assert last == list(range(len(last)))  # none lost before the last, none twice
        assert all(e.tokens == 7 * e.samples and len(e.groups) == 200 for e in rollouts)  # type: ignore[attr-defined]
        assert record.damaged == 0
        assert not record.running
    assert len(rollouts) > 100


def test_a_reader_never_sees_half_an_event(tmp_path: Path) -> None:
    victim = start_victim(tmp_path)
    try:
        record, seen = Record.open(tmp_path), 0
        began = time.monotonic()
        while time.monotonic() < began + (1.0 if seen > 100 else 60.0):
            found = [e.samples for e in record.events("rollout")]  # type: ignore[attr-defined]
            assert found[seen:] == list(range(seen, len(found)))
            seen = len(found)
        assert seen > 100
        assert record.damaged == 0
        assert record.running
    finally:
        victim.kill()
        victim.wait()
        victim.stdout.close()  # type: ignore[union-attr]


def test_a_writer_faster_than_its_reader(tmp_path: Path) -> None:
    """Once a reader that could not keep up read until memory was full."""
    path = tmp_path / "log.jsonl"
    writer, reader = LogWriter(path), LogReader(path)
    writer.append({"n": 0})
    for fields in reader.read():
        assert fields["n"] < 5
        writer.append({"n": fields["n"] + 1})
    assert [fields["n"] for fields in reader.read()] == [1]
    writer.close()


def test_two_writers_on_one_folder(tmp_path: Path) -> None:
    victim = start_victim(tmp_path)
    try:
        with pytest.raises(
            ConfigError, match=f"being written by process {victim.pid} on "
        ) as caught:
            RecordWriter(tmp_path)
        assert "another folder" in caught.value.remedy
    finally:
        victim.kill()
        victim.wait()
        victim.stdout.close()  # type: ignore[union-attr]
    RecordWriter(tmp_path).close()  # its death freed the folder
    with (
        RecordWriter(tmp_path),
        pytest.raises(ConfigError, match=f"process {os.getpid()} on "),
    ):
        RecordWriter(tmp_path)
    assert not is_locked(tmp_path)


def test_readers_that_ask_whether_it_runs_do_not_keep_a_writer_out(
    tmp_path: Path,
) -> None:
    RecordWriter(tmp_path).close()
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            is_locked(tmp_path)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(20):
            RecordWriter(tmp_path, fsync_s=None).close()
    finally:
        done.set()
        thread.join()


def test_many_threads_write_whole_lines(tmp_path: Path) -> None:
    with RecordWriter(tmp_path, fsync_s=None) as writer:

        def work(k: int) -> None:
            for i in range(200):
                writer.write(StepEvent(step=i, version=k, groups=tuple(range(50))))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    found: dict[int, list[int]] = {}
    for event in Record.open(tmp_path).events("step"):
        assert isinstance(event, StepEvent)
        found.setdefault(event.version, []).append(event.step)
    assert found == {k: list(range(200)) for k in range(6)}


def test_a_full_disk_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LogWriter(tmp_path / "log.jsonl")
    writer.append({"n": 1})
    real, calls = os.write, []

    def short_then_full(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real(fd, data[:4])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", short_then_full)
    with pytest.raises(OSError, match="No space"):
        writer.append({"n": 2})
    monkeypatch.setattr(os, "write", real)
    writer.append({"n": 3})
    writer.close()
    assert list(LogReader(tmp_path / "log.jsonl").read()) == [{"n": 1}, {"n": 3}]


FORKER = """
import os, signal, sys, time
from jvlab._errors import ConfigError
from jvlab.record._events import FaultEvent
from jvlab.record._writer import RecordWriter
say = lambda text: os.write(1, f"{text}\\n".encode())  # whole lines, from either process
writer = RecordWriter(sys.argv[1])
child = os.fork()
if not child:
    try:
        writer.write(FaultEvent(fault="from the child"))
        say("wrote")
    except ConfigError as e:
        say(e.message)
    os.close(1)
    time.sleep(600)
    os._exit(0)
writer.write(FaultEvent(fault="from the parent"))
say(child)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_neither_writes_nor_holds_the_lock_after_its_parent(
    tmp_path: Path,
) -> None:
    """In a process of its own: forking this one, with threads of other tests' libraries, would warn."""
    command, environment = (
        [sys.executable, "-c", FORKER, str(tmp_path)],
        {**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        said = sorted(parent.stdout.readline().strip() for _ in range(2))
        child = int(said[0])
        try:
            assert said[1] == "events.jsonl is closed"
            assert is_locked(tmp_path)
            parent.communicate("die\n", timeout=60)
            assert parent.returncode == -signal.SIGKILL
            os.kill(child, 0)  # still there
            assert not is_locked(tmp_path)
        finally:
            os.kill(child, signal.SIGKILL)
    assert [e.fault for e in Record.open(tmp_path).events("fault")] == [  # type: ignore
        "from the parent"
    ]


def test_writing_after_the_end_is_an_error_and_closing_twice_is_not(
    tmp_path: Path,
) -> None:
    writer = RecordWriter(tmp_path)
    writer.close("stopped")
    writer.close()
    with pytest.raises(ConfigError, match="closed"):
        writer.write(RolloutEvent())
    assert [e.reason for e in Record.open(tmp_path).events("run_stop")] == ["stopped"]  # type: ignore[attr-defined]
