"""A deadline is a deadline: every public call with a timeout, whoever is frozen, lost or paused, over real gRPC."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

import jvlab as jv
from jvlab import errors
from jvlab._deadline import Deadline
from jvlab.lab._pool import InProcessPool
from jvlab.lab._session import Session, Sessions
from jvlab.sync._connections import Connections
from jvlab.sync._link import SyncHandle
from jvlab.sync._stepper import Stepper
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import LinkStream
from jvlab.wire.processes._labs import stop_lab
from tests.gateway.fake_lab import FakeLab
from tests.waiting import own_time, until

pytestmark = pytest.mark.slow

SECONDS = 0.4
MARGIN = 2.0
TOKENS = [1, 2, 3]
Call = Callable[[jv.Pool, float], Any]


def _stream(pool: jv.Pool, timeout: float) -> list[Any]:
    return list(pool.stream(["a"], timeout=timeout, max_tokens=2))


def _link(pool: jv.Pool, timeout: float, *phases: int) -> None:
    """A link's stream: opened, then one order; as `Link` does it."""
    stream, deadline = LinkStream(pool.client), Deadline(timeout)
    names = [r.replica for r in pool.snapshot.replicas]
    ends = [
        pb.Endpoint(replica=n, index=i, ranks_json=[json.dumps([n])])
        for i, n in enumerate(names)
    ]
    request = pb.LinkOpen(
        pool=pool.name,
        holder="a trainer",
        transport="loopback",
        plan=b"plan",
        endpoints=ends,
        lease_seconds=30,
    )
    try:
        stream.open(request, deadline.left())
        for order in phases:
            stream.steps([order], deadline.left())  # type: ignore[list-item]
    finally:
        stream.close()


LOOK: dict[str, Call] = {  # these can be asked at the same time
    "wait": lambda pool, t: pool.wait(t, progress=False),
    "ready": lambda pool, t: asyncio.run(pool.ready(t)),
    "generate": lambda pool, t: pool.generate(["a"], timeout=t, max_tokens=2),
    "agenerate": lambda pool, t: asyncio.run(
        pool.agenerate(["a"], timeout=t, max_tokens=2)
    ),
    "stream": _stream,
    "score": lambda pool, t: pool.score([TOKENS], timeout=t),
    "ascore": lambda pool, t: asyncio.run(pool.ascore([TOKENS], timeout=t)),
    "status": lambda pool, t: pool.status(timeout=t),
    "trace": lambda pool, t: pool.trace([], timeout=t),
    "peek": lambda pool, t: pool.peek("w", timeout=t),
    "session": lambda pool, t: pool.session("a").generate(2, timeout=t),
    "session, awaited": lambda pool, t: asyncio.run(
        pool.session("a").agenerate(2, timeout=t)
    ),
    "sessions": lambda pool, t: pool.sessions(["a", "b"]).generate(2, timeout=t),
    "determinism": lambda pool, t: pool.check_determinism(
        [TOKENS], timeout=t, max_tokens=2, repeats=1, batches=(1,)
    ),
    "restart": lambda pool, t: pool.restart(0, timeout=t),
    "scale": lambda pool, t: pool.scale(2, timeout=t),
}
GENERATING = {
    "generate",
    "agenerate",
    "stream",
    "score",
    "ascore",
    "session",
    "session, awaited",
    "sessions",
}
STEER: dict[str, Call] = {  # one after the other
    "pause": lambda pool, t: pool.pause(timeout=t),
    "resume": lambda pool, t: pool.resume(timeout=t),
    "sleep": lambda pool, t: pool.sleep(timeout=t),
    "wake": lambda pool, t: pool.wake(timeout=t),
    "link open": lambda pool, t: _link(pool, t),
    "link check": lambda pool, t: _link(pool, t, pb.CHECK),
}


def ask(pool: jv.Pool, call: Call, seconds: float = SECONDS) -> tuple[float, str]:
    """(how long it took, what it raised); nothing but our own errors may come out."""
    began = own_time()
    try:
        call(pool, seconds)
    except errors.JvlabError as error:
        return own_time() - began, f"{type(error).__name__}: {error}"
    return own_time() - began, ""


def table(pool: jv.Pool) -> dict[str, tuple[float, str]]:
    with ThreadPoolExecutor(len(LOOK)) as threads:
        asked = {name: threads.submit(ask, pool, call) for name, call in LOOK.items()}
        found = {name: future.result() for name, future in asked.items()}
    found |= {name: ask(pool, call) for name, call in STEER.items()}
    late = {name: cell for name, cell in found.items() if cell[0] > SECONDS + MARGIN}
    assert not late, "these calls did not keep their deadline"
    return found


def report(pool: jv.Pool, name: str, said: str, who: str) -> str:
    """What was said; asked again, up to three times, if it is the client's own timeout where `who` was expected.

    On a busy machine the gateway's report may come after the client's last second of waiting for it.
    """
    for _ in range(3):
        if re.search(who, said) or not re.search(CELLS["frozen gateway"][1], said):
            break
        _, said = ask(pool, (LOOK | STEER)[name])
    return said


@contextmanager
def lost(lab: FakeLab) -> Iterator[None]:
    for name in ("p/0", "p/1"):
        lab.silence(name)
    yield
    for fake in lab.fakes.values():
        fake.silent = False


@contextmanager
def paused(pool: jv.Pool) -> Iterator[None]:
    pool.pause()
    yield
    pool.resume()


def works(pool: jv.Pool, lab: FakeLab) -> None:
    """Whatever happened is over, and nobody was left standing still."""
    until = time.monotonic() + 60
    while pool.status()["healthy"] < 2 or any(
        fake.paused for fake in lab.fakes.values()
    ):
        assert time.monotonic() < until, pool.status()
        time.sleep(0.05)
    assert len(pool.generate(["a", "b"], n=2, timeout=30)) == 4
    _link(pool, 30.0, pb.CHECK)


CELLS: dict[
    str, tuple[Callable[[FakeLab, jv.Pool], AbstractContextManager[None]], str]
] = {
    "frozen engines": (lambda lab, pool: lab.frozen_engines(), r"p/[01]"),
    "frozen gateway": (
        lambda lab, pool: lab.frozen(),
        r"the gateway at 127\.0\.0\.1:\d+ did not answer",
    ),
    "lost replicas": (lambda lab, pool: lost(lab), r"p/0"),
}


@pytest.mark.parametrize("cell", CELLS)
def test_deadline_of_every_call(fake_lab: FakeLab, pool: jv.Pool, cell: str):
    make, who = CELLS[cell]
    with make(fake_lab, pool):
        found = table(pool)
        # Nobody can have generated; and without the gateway nobody knows anything, whatever it said before.
        silent = [
            name
            for name in (found if cell == "frozen gateway" else GENERATING)
            if not found[name][1]
        ]
        assert not silent, found
        for name, (_, said) in found.items():
            said = report(pool, name, said, who)
            assert not said or re.search(who, said), (
                f"{name} does not name who was waited for: {said}"
            )
    works(pool, fake_lab)


def test_deadline_in_a_paused_pool_says_that_it_is_paused(
    fake_lab: FakeLab, pool: jv.Pool
):
    with paused(pool):
        found = {name: ask(pool, LOOK[name]) for name in sorted(GENERATING)}
        for name, (took, said) in found.items():
            assert took < SECONDS + MARGIN, name
            said = report(pool, name, said, "the pool is paused")
            assert "the pool is paused" in said, f"{name}: {said}"
            assert "p/" in said, "who has the work"
            assert "larger timeout" not in said, name
            assert "pool.resume()" in said, name
        assert ask(pool, STEER["link check"])[1] == "", (
            "a paused pool can be synced and checked"
        )
    works(pool, fake_lab)


def test_deadline_while_no_replica_is_ready(
    fake_lab: FakeLab, client: jv.Lab, llama: str, monkeypatch
):
    """Today's code waited 900 s for the pool, whatever the timeout."""

    async def never(self: Any, replica: str, spec: Any) -> None:
        """It is starting, for ever."""

    monkeypatch.setattr("tests.gateway.fake_lab.FakeGateway._start_process", never)
    pool = client.launch(llama, replicas=2, name="p")
    for name, (took, said) in table(pool).items():
        assert took < SECONDS + MARGIN
        if name not in (
            "status",
            "restart",
            "peek",
            "scale",
            "link open",
            "link check",
        ):
            said = report(pool, name, said, "p/0, which is at process")
            assert "p/0, which is at process" in said, f"{name}: {said}"


def test_deadline_of_closing_and_attaching(fake_lab: FakeLab, pool: jv.Pool):
    with fake_lab.frozen():
        began = own_time()
        with pytest.raises(errors.DeadlineExceeded, match="the gateway at"):
            jv.Lab.attach(fake_lab.address, fake_lab.token, timeout=SECONDS)
        assert own_time() - began < SECONDS + MARGIN
        began = own_time()
        with pytest.raises(errors.DeadlineExceeded, match="the gateway at"):
            pool.close(timeout=SECONDS)
        assert own_time() - began < SECONDS + MARGIN
    # it had not answered; once it goes on it may still read what it was asked
    if pool.status()["state"] != "closed":
        works(pool, fake_lab)


def test_deadline_of_a_pause_is_undone_everywhere(fake_lab: FakeLab, pool: jv.Pool):
    fake = fake_lab.fakes["p/1"]
    fake_lab.do(fake.thawed.clear)
    with pytest.raises(errors.DeadlineExceeded, match="waited for replica p/1"):
        pool.pause(timeout=SECONDS)
    fake_lab.do(fake.thawed.set)
    works(pool, fake_lab)


def test_a_sleep_that_one_replica_refuses_is_undone_on_the_others(
    fake_lab: FakeLab, pool: jv.Pool
):
    one, two = (fake_lab.fakes[name] for name in ("p/0", "p/1"))
    two.unable = pb.SLEEP
    with pytest.raises(errors.Unsupported, match="not this one"):
        pool.sleep(timeout=60)
    assert one.steered == [pb.SLEEP, pb.WAKE]
    assert not one.sleeping
    assert not two.sleeping
    assert fake_lab.gateway.steering.why("p") == ""
    two.unable = 0
    pool.sleep(timeout=60)
    two.unable = pb.SLEEP
    with pytest.raises(errors.Unsupported):
        pool.sleep(timeout=60)
    assert one.sleeping, "the pool slept before"
    pool.wake(timeout=60)
    works(pool, fake_lab)


def test_deadline_of_a_sleep_is_undone_everywhere(fake_lab: FakeLab, pool: jv.Pool):
    one, two = (fake_lab.fakes[name] for name in ("p/0", "p/1"))
    fake_lab.do(two.thawed.clear)
    with pytest.raises(errors.DeadlineExceeded, match="waited for replica p/1"):
        pool.sleep(timeout=SECONDS)
    fake_lab.do(two.thawed.set)
    two.sleeping = True  # it fell asleep after nobody waited for it any more
    until(lambda: not (one.sleeping or two.sleeping))
    works(pool, fake_lab)


def test_deadline_a_replica_that_missed_a_resume_goes_on(
    fake_lab: FakeLab, pool: jv.Pool
):
    """Lost while the pool is paused, resumed without it, back again: it stood still for ever."""
    pool.pause()
    fake_lab.silence("p/1")
    pool.resume()
    assert fake_lab.fakes["p/1"].paused
    fake_lab.fakes["p/1"].silent = False
    works(pool, fake_lab)


def test_deadline_a_replica_that_missed_a_pause_stands_still(
    fake_lab: FakeLab, pool: jv.Pool
):
    fake_lab.silence("p/1")
    pool.pause()
    fake_lab.fakes["p/1"].silent = False
    until = time.monotonic() + 60
    while not fake_lab.fakes["p/1"].paused:
        assert time.monotonic() < until, "it came back into a paused pool, and runs"
        time.sleep(0.02)
    pool.resume()
    works(pool, fake_lab)


BAD = (0, 0.0, -1, float("-inf"), float("nan"), True, "3", [1])
PUBLIC = (
    jv.Lab,
    jv.Pool,
    InProcessPool,
    jv.Link,
    jv.Run,
    jv.Record,
    jv.Task,
    Session,
    Sessions,
    SyncHandle,
    Stepper,
)
FUNCTIONS = (jv.certify, jv.tasks.jsonl, stop_lab)


def with_timeout() -> dict[str, Callable[..., Any]]:
    """Every public function and method that takes a timeout, by name."""
    found: dict[str, Callable[..., Any]] = {
        function.__name__: function for function in FUNCTIONS
    }
    for kind in PUBLIC:
        for name, member in inspect.getmembers(kind, callable):
            if name == "__init__" or not name.startswith("_"):
                found[f"{kind.__name__}.{name}"] = member
    return {
        name: call
        for name, call in found.items()
        if "timeout" in inspect.signature(call).parameters
    }


def done(returned: Any) -> None:
    if inspect.isawaitable(returned):
        asyncio.run(returned)  # type: ignore[arg-type]


CALLS = with_timeout()


def test_deadline_calls_are_found():
    assert len(CALLS) > 40
    assert {
        "Pool.generate",
        "Pool.load_adapter",
        "Lab.close",
        "Link.sync",
        "Run.wait",
        "Record.follow",
    } < CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_deadline_must_be_a_positive_number(name: str, tmp_path: Path):
    """Refused before anything else is done with what is given."""
    call = CALLS[name]
    if name in ("InProcessPool.restart", "InProcessPool.scale"):
        return  # neither waits
    needed = [
        p for p in inspect.signature(call).parameters.values() if p.default is p.empty
    ]
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    me = MagicMock(_connections=Connections())
    known = {"self": me, "path": file, "reward": len, "replicas": 1}
    if name == "Lab.connect":
        known["pool"] = MagicMock()
    values = {
        p.name: known.get(p.name, "x")
        for p in needed
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    if name == "Task.__init__":
        values |= {"prompts": ["a"], "reward": len}
    for bad in BAD:
        with pytest.raises(
            errors.ConfigError,
            match=r"timeout must be (positive|a number of seconds), not",
        ) as caught:
            done(call(**values, timeout=bad))
        assert "timeout=60" in caught.value.remedy


@pytest.mark.parametrize(
    "good", [1, 0.5, np.float32(2.0), np.int64(3), float("inf"), None]
)
def test_deadline_of_any_positive_number(good: Any):
    assert not Deadline.of(good).over


def test_deadline_is_shared_not_started_anew():
    whole = Deadline(5.0)
    time.sleep(0.05)
    assert Deadline.of(whole) is whole
    assert whole.left() < 4.96
    assert whole.within(1.0) == 1.0
    assert not whole.over
    assert Deadline(-1).over
    assert Deadline(-1).left() == 0.0
    assert Deadline.of(None).left() > 1e6
