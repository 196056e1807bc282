"""A sync by ipc as the engine core runs it, in one call: stand still, let the trainer write, compare, go on.

`_scheduler`, which is loaded where the core runs, makes these functions methods of vLLM's EngineCore. Between trainer
and core lie a front end and more than a millisecond of sockets, threads and wake-ups, so the core has a socket of its
own (`CoreChannelServer`). The trainer sends a wake-up there, then the order for a sync, and the same order to the front
end at the same time. From then on trainer and core exchange messages:

    core → trainer   GO        generation has stopped, write now
    trainer → core   WRITTEN   all bytes are in the engine's memory
    trainer → core   CLAIMED   the digests of what was written
    core → trainer   DONE      the digests agree, generation goes on

The front end's order finds the sync begun or done; the front end keeps the state, and may be a sync behind. A trainer
that dies closes its socket, which ends the call; one that is silent for PATIENCE ends it too. The replica is dirty
then, as after every direct sync that did not commit.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jvlab.wire._core_channel import CLAIMED, DONE, GO, NON_FINITE, WRITTEN, CoreChannel, CoreChannelServer

PATIENCE = 20.0  # seconds for a trainer to write, at most: the core does nothing else meanwhile
CONNECT_SECONDS = 5.0  # for the trainer to have connected
NO_CALL = -1  # a number that no call of the front end has
REMEMBERED = 8  # syncs begun by a trainer's own order; the front end may be some behind
WOKEN_SECONDS = 0.002  # seconds that the core waits for the order that follows a wake-up


def jv_open_core_channel(self: Any, wanted: Any) -> Any:
    """Listen for the trainer of a new link, or stop listening for the last one's; `self` is the EngineCore."""
    old: CoreChannelServer | None = self.__dict__.pop("jv_core_channel", None)
    if old is not None:
        old.close()
    self.jv_ran, self.jv_begun = {}, deque(maxlen=REMEMBERED)
    if not wanted:
        return []

    def ordered(text: bytes) -> None:  # in the server's thread: the core's loop takes it like any other call
        self.input_queue.put_nowait((self.jv_utility, (0, NO_CALL, "jv_called", (json.loads(text),))))

    def woken() -> None:
        self.input_queue.put_nowait((self.jv_utility, (0, NO_CALL, "jv_woken", ())))

    self.jv_core_channel = CoreChannelServer(ordered, woken)
    return self.jv_core_channel.invitation()


def jv_woken(self: Any) -> Any:
    """A sync is about to be ordered: waiting for it here saves the time of waking two threads."""
    since, core_channel = time.perf_counter(), self.__dict__.get("jv_core_channel")
    text = core_channel.next_order(WOKEN_SECONDS) if core_channel is not None else None
    return jv_called(self, json.loads(text), since) if text else Future()


def jv_called(self: Any, order: Any, since: float | None = None) -> Any:
    """A sync that the trainer ordered directly. The front end orders the same a little later, and gets its result.

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
    return newer and not kept and "jv_core_channel" in core.__dict__ and not core.model_executor.is_sleeping


def _hand_on(done: Future[Any], to: Future[Any]) -> None:
    error = done.exception()
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


def jv_direct_sync(self: Any, order: Any) -> Any:
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


def jv_finish(self: Any, method: Any, args: Any, version: Any, recompute: Any, nonfinite: Any = False) -> Any:
    """A worker method, then what a commit changes in the engine (`label`)."""
    answers = self.collective_rpc(method, args=tuple(args))
    label(self, version, recompute, nonfinite)
    return answers


def jv_swap(self: Any, order: Any) -> Any:
    """The last steps of a staged sync: stand still, take the shadows over, go on. "stage" as above, or "commit"."""
    return _when_idle(self, order["pause"], lambda began: swap(self, order, began))


def _begin(core: Any, order: dict[str, Any], since: float | None = None) -> Any:
    return _when_idle(core, order["pause"], lambda began: direct_sync(core, order, began, since))


def _when_idle(core: Any, pause: str, work: Callable[[float], Any]) -> Any:
    """Stop generation, then do the work, given the time the stop began; a Future where stopping takes a while."""
    began = time.perf_counter()
    paused = core.pause_scheduler(mode=pause, clear_cache=False)
    if paused is None:
        return work(began)
    out: Future[Any] = Future()

    def idle(done: Future[Any]) -> None:
        try:
            done.result()
            out.set_result(work(began))
        except Exception as error:  # reported to the caller, as vLLM reports what its own methods raise
            out.set_exception(error)

    paused.add_done_callback(idle)
    return out


def swap(core: Any, order: dict[str, Any], began: float) -> dict[str, Any]:
    """Shadows become live memory; nothing runs meanwhile."""
    seconds = {"halt": time.perf_counter() - began}
    start = time.perf_counter()
    out: dict[str, Any] = {"stage": "commit", "seconds": seconds, "answers": core.collective_rpc("jv_commit")}
    if not any(a.get("error") for a in out["answers"]):
        _commit(core, order, int(order["version"]), seconds, order["nonfinite"])
        seconds["commit"] = time.perf_counter() - start
        seconds["pause"], out["stage"] = time.perf_counter() - began, ""
    return out


def direct_sync(core: Any, order: dict[str, Any], began: float, since: float | None) -> dict[str, Any]:
    """The rest, once nothing runs any more. Generation has stood still `since`; the halt `began` then or later."""
    seconds = {"halt": time.perf_counter() - began}
    out: dict[str, Any] = {"stage": "move", "seconds": seconds, "answers": [], "claimed": b""}
    out["answers"] = core.collective_rpc("jv_move", args=(order["wanted"],))
    if any(a.get("error") for a in out["answers"]):
        return out
    seconds["admit"] = max(a["seconds"] for a in out["answers"])
    version, core_channel = int(order["wanted"]["version"]), core.jv_core_channel
    out["stage"] = "written"
    try:
        channel = core_channel.channel(time.monotonic() + CONNECT_SECONDS)
        until = time.monotonic() + min(float(order["seconds"]), PATIENCE)
        channel.send(GO, version)
        message = _await_message(channel, WRITTEN, version, until)
        start = time.perf_counter()
        answers = core.collective_rpc("jv_verify", args=(0.0,))
        if any(a.get("error") for a in answers):
            return out | {"stage": "verify", "answers": answers}
        if order["verify"] != "off":
            message = _await_message(channel, CLAIMED, version, until)  # sent while we read
            out["claimed"] = message[1:]
    except TimeoutError:
        core_channel.disconnect()
        return out | _failed("the trainer did not report in time that it has written", "DeadlineExceeded")
    except OSError as error:
        core_channel.disconnect()
        return out | _failed(f"the trainer closed its connection while it wrote: {error}", "TransportError")
    out["stage"], out["answers"], seconds["verify"] = "verify", answers, time.perf_counter() - start
    if order["verify"] != "off":
        found = b"".join(a["values"] for a in sorted(answers, key=lambda a: a["rank"]))
        if found != out["claimed"]:
            return out
    _commit(core, order, version, seconds, message[:1] == NON_FINITE)
    seconds["digest"] = max(a["seconds"].get("digest", 0.0) for a in answers)
    seconds["pause"] = time.perf_counter() - (began if since is None else since)
    try:
        channel.send(DONE, version, json.dumps(seconds).encode())
    except OSError:
        core_channel.disconnect()  # it is gone, and what it wrote stays
    out["stage"] = ""
    return out


def _failed(error: str, kind: str) -> dict[str, Any]:
    """In the form in which a worker reports an error."""
    return {"answers": [{"rank": 0, "error": error, "kind": kind, "remedy": "sync again"}]}


def _await_message(channel: CoreChannel, kind: bytes, version: int, until: float) -> bytes:
    """The payload of the next message of this kind about this version."""
    while True:
        received, about, payload = channel.receive(until)
        if (received, about) == (kind, version):  # else it is about a sync that was given up
            return payload


def label(core: Any, version: str, recompute: bool, nonfinite: bool) -> None:
    """What a commit changes in the engine: no KV of older weights is found any more, and tokens are of this version."""
    if not core.reset_prefix_cache(reset_running_requests=recompute):
        raise RuntimeError("vLLM did not reset its prefix cache")
    core.set_weight_version(version)
    if nonfinite:
        core.jv_poison()


def _resume(core: Any) -> None:
    core.resume_scheduler()
    core.input_queue.put_nowait((core.jv_wake_up, None))  # its loop may be about to wait for something to do


def _commit(core: Any, order: dict[str, Any], version: int, seconds: dict[str, float], nonfinite: bool) -> None:
    start = time.perf_counter()
    label(core, str(version), bool(order["recompute"]), nonfinite)
    if order["resume"]:
        _resume(core)
    seconds["commit"] = time.perf_counter() - start
