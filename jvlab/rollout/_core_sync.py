"""A sync by ipc as the engine core runs it, in one call: stand still, let the trainer write, compare, go on.

Made methods of vLLM's EngineCore by `_scheduler`, which is loaded where the core runs. Between trainer and core lie a
front end and more than a millisecond of sockets, threads and wake-ups; so the core has a door of its own. The trainer
knocks there, then orders a sync there and at the front end at the same time; the core tells it when it may write,
hears that it has, reads what lies there, hears what must, and tells when it generates again. The front end's order
finds it begun or done, and keeps the state; it may be a sync behind.

A trainer that dies hangs up, which ends the call; one that says nothing for PATIENCE ends it too. The replica is dirty
then, as after every direct sync that did not commit.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jvlab.control._door import CLAIMED, DONE, GO, WRITTEN, Door, Line

PATIENCE = 20.0  # seconds for a trainer to write, at most: the core does nothing else meanwhile
LET_IN = 5.0  # seconds for it to have come in at the door
NO_CALL = -1  # a number that no call of the front end has
REMEMBERED = 8  # syncs begun at the door; the front end may be some behind
KNOCKED = 0.002  # seconds in which an order follows a knock; the core waits so long for it


def jv_door(self: Any, wanted: Any) -> Any:
    """Open a door for the trainer of a new link, or close the last one's; `self` is the EngineCore."""
    old: Door | None = self.__dict__.pop("jv_its_door", None)
    if old is not None:
        old.close()
    self.jv_ran, self.jv_begun = {}, deque(maxlen=REMEMBERED)
    if not wanted:
        return []

    def ordered(text: bytes) -> None:  # in the door's thread: the loop of the core takes it like any other call
        self.input_queue.put_nowait((self.jv_utility, (0, NO_CALL, "jv_called", (json.loads(text),))))

    def knocked() -> None:
        self.input_queue.put_nowait((self.jv_utility, (0, NO_CALL, "jv_knocked", ())))

    self.jv_its_door = Door(ordered, knocked)
    return self.jv_its_door.invitation()


def jv_knocked(self: Any) -> Any:
    """A sync is about to be ordered: being awake when it is saves a trainer the time of waking two threads up."""
    since, door = time.perf_counter(), self.__dict__.get("jv_its_door")
    text = door.next_order(KNOCKED) if door is not None else None
    return jv_called(self, json.loads(text), since) if text else Future()


def jv_called(self: Any, order: Any, since: float | None = None) -> Any:
    """A sync that the trainer ordered at the door. The front end orders the same, a little later, and hears of it.

    `since`: when the core began to do nothing but wait for the order.
    """
    answer: Future[Any] = Future()
    if _may_begin(self, order):
        resume = not self.is_scheduler_paused()
        self.jv_begun.append(order["call"])
        self.jv_ran[order["call"]] = answer, resume
        while len(self.jv_ran) > REMEMBERED:
            del self.jv_ran[next(iter(self.jv_ran))]
        try:
            begun = _begin(self, {**order, "resume": resume}, since)
            if isinstance(begun, Future):
                begun.add_done_callback(lambda done: _hand_on(done, answer))
            else:
                answer.set_result(begun)
        except Exception as error:
            answer.set_exception(error)
    return Future()  # never done: nobody waits for an answer to this call


def _may_begin(core: Any, order: dict[str, Any]) -> bool:
    """What the front end would refuse is left to it, to be refused with a reason."""
    if order["call"] in core.jv_begun:  # its order came first
        return False
    version = str(core.get_weight_version())
    newer = not version.isdigit() or int(order["wanted"]["version"]) > int(version)
    kept = core.vllm_config.model_config.is_multimodal_model  # outputs of its encoder, which the front end forgets
    return newer and not kept and "jv_its_door" in core.__dict__ and not core.model_executor.is_sleeping


def _hand_on(done: Future[Any], to: Future[Any]) -> None:
    error = done.exception()
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


def jv_exchange(self: Any, order: Any) -> Any:
    """A whole direct sync. What went wrong is in the answer's "stage": "move", "written" or "verify"."""
    ran: tuple[Future[Any], bool] | None = self.jv_ran.pop(order["call"], None)
    if ran is None:
        self.jv_begun.append(order["call"])
        return _begin(self, order)
    answer, resumed = ran

    def go_on(done: Future[Any]) -> None:  # one that was halted before its trainer called goes on by this order
        if done.exception() is None and not done.result()["stage"]:
            _resume(self)

    if order["resume"] and not resumed:
        answer.add_done_callback(go_on)
    return answer


def jv_finish(self: Any, method: Any, args: Any, version: Any, recompute: Any) -> Any:
    """A worker method, then what a commit tells the engine."""
    answers = self.collective_rpc(method, args=tuple(args))
    label(self, version, recompute)
    return answers


def jv_swap(self: Any, order: Any) -> Any:
    """The last steps of a staged sync: stand still, take the shadows over, go on. "stage" as above, or "commit"."""
    return _when_idle(self, order["pause"], lambda began: swap(self, order, began))


def _begin(core: Any, order: dict[str, Any], since: float | None = None) -> Any:
    return _when_idle(core, order["pause"], lambda began: exchange(core, order, began, since))


def _when_idle(core: Any, pause: str, work: Callable[[float], Any]) -> Any:
    """Stop generation, then do the work, which is told when the stop began; a Future where it takes a while."""
    began = time.perf_counter()
    paused = core.pause_scheduler(mode=pause, clear_cache=False)
    if paused is None:
        return work(began)
    out: Future[Any] = Future()

    def idle(done: Future[Any]) -> None:
        try:
            done.result()
            out.set_result(work(began))
        except Exception as error:  # told to the caller, as vLLM tells what its own methods raise
            out.set_exception(error)

    paused.add_done_callback(idle)
    return out


def swap(core: Any, order: dict[str, Any], began: float) -> dict[str, Any]:
    """Shadows become live memory; nothing runs meanwhile."""
    seconds = {"halt": time.perf_counter() - began}
    start = time.perf_counter()
    out: dict[str, Any] = {"stage": "commit", "seconds": seconds, "answers": core.collective_rpc("jv_commit")}
    if not any(a.get("error") for a in out["answers"]):
        _commit(core, order, int(order["version"]), seconds)
        seconds["commit"] = time.perf_counter() - start
        seconds["pause"], out["stage"] = time.perf_counter() - began, ""
    return out


def exchange(core: Any, order: dict[str, Any], began: float, since: float | None) -> dict[str, Any]:
    """The rest, once nothing runs any more. Generation has stood still `since`; the halt `began` then or later."""
    seconds = {"halt": time.perf_counter() - began}
    out: dict[str, Any] = {"stage": "move", "seconds": seconds, "answers": [], "claimed": b""}
    out["answers"] = core.collective_rpc("jv_move", args=(order["wanted"],))
    if any(a.get("error") for a in out["answers"]):
        return out
    seconds["admit"] = max(a["seconds"] for a in out["answers"])
    version, door = int(order["wanted"]["version"]), core.jv_its_door
    out["stage"] = "written"
    try:
        line = door.line(time.monotonic() + LET_IN)
        until = time.monotonic() + min(float(order["seconds"]), PATIENCE)
        line.say(GO, version)
        _heard(line, WRITTEN, version, until)
        start = time.perf_counter()
        answers = core.collective_rpc("jv_verify", args=(0.0,))
        if any(a.get("error") for a in answers):
            return out | {"stage": "verify", "answers": answers}
        if order["verify"] != "off":
            out["claimed"] = _heard(line, CLAIMED, version, until)  # it told us while we read
    except TimeoutError:
        door.hang_up()
        return out | _failed("the trainer did not say in time that it has written", "DeadlineExceeded")
    except OSError as error:
        door.hang_up()
        return out | _failed(f"the trainer hung up while it wrote: {error}", "TransportError")
    out["stage"], out["answers"], seconds["verify"] = "verify", answers, time.perf_counter() - start
    if order["verify"] != "off":
        found = b"".join(a["values"] for a in sorted(answers, key=lambda a: a["rank"]))
        if found != out["claimed"]:
            return out
    _commit(core, order, version, seconds)
    seconds["digest"] = max(a["seconds"].get("digest", 0.0) for a in answers)
    seconds["pause"] = time.perf_counter() - (began if since is None else since)
    try:
        line.say(DONE, version, json.dumps(seconds).encode())
    except OSError:
        door.hang_up()  # it is gone, and what it wrote stays
    out["stage"] = ""
    return out


def _failed(error: str, kind: str) -> dict[str, Any]:
    """Told as a worker tells what went wrong."""
    return {"answers": [{"rank": 0, "error": error, "kind": kind, "remedy": "sync again"}]}


def _heard(line: Line, kind: bytes, version: int, until: float) -> bytes:
    """Wait for this word about this version, and what it says."""
    while True:
        said, about, payload = line.hear(until)
        if (said, about) == (kind, version):  # else a word about a sync that was given up
            return payload


def label(core: Any, version: str, recompute: bool) -> None:
    """What a commit tells the engine: nothing of older weights is found any more, and tokens are of this version."""
    if not core.reset_prefix_cache(reset_running_requests=recompute):
        raise RuntimeError("vLLM did not reset its prefix cache")
    core.set_weight_version(version)


def _resume(core: Any) -> None:
    core.resume_scheduler()
    core.input_queue.put_nowait((core.jv_wake_up, None))  # its loop may be about to wait for something to do


def _commit(core: Any, order: dict[str, Any], version: int, seconds: dict[str, float]) -> None:
    start = time.perf_counter()
    label(core, str(version), bool(order["recompute"]))
    if order["resume"]:
        _resume(core)
    seconds["commit"] = time.perf_counter() - start
