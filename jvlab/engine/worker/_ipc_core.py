"""An ipc sync as the engine core runs it: pause, let the trainer write, compare digests, resume.

`_patches` makes those in METHODS methods of vLLM's EngineCore, in the core's process. The way through
gateway and front end takes some milliseconds of sockets, threads and wake-ups, so the core has a socket of its own
(`CoreChannelServer`). The trainer sends an order there, and the same order to the gateway at the same time. A direct
sync is one order, after a wake-up; a staged one is two, to prepare and to swap, and generation goes on in between.
Trainer and core then exchange signals:

    core → trainer   GO        write now; direct: generation has stopped; prepare: with the handles of new shadows
    trainer → core   WRITTEN   direct: all bytes are in the engine's memory
    trainer → core   CLAIMED   direct: the digests of what was written; those of a swap come with its order
    core → trainer   DONE      direct, swap: the digests agree, generation goes on

When the front end's order arrives, the core has carried it out or is about to; the front end keeps the state, maybe an
order behind. A trainer that dies closes its socket, which ends the call, as does one that is silent for WRITE_SECONDS.
The replica is dirty then, as after every direct sync that did not commit. A trainer that dies before the gateway has
its order leaves a result that no front end asks for: that is found when the channel is closed.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jvlab._files import Plain
from jvlab.wire._core_channel import (
    CLAIMED,
    DONE,
    GO,
    NON_FINITE,
    WRITTEN,
    CoreChannel,
    CoreChannelServer,
)

# for a trainer to write, at most: the core does nothing else meanwhile
WRITE_SECONDS = 20.0
CONNECT_SECONDS = 5.0  # for the trainer to have connected
SIGNAL_SECONDS = 0.1  # the same, while generation goes on
NO_CALL = -1  # a call id that the front end never uses
# syncs started by a trainer's own order; the front end may be some behind
MAX_REMEMBERED = 8
METHODS = (
    "jv_open_core_channel",
    "jv_woken",
    "jv_called",
    "jv_core_order",
    "jv_finish",
)
WOKEN_SECONDS = 0.002  # that the core waits for the order after a wake-up


def jv_open_core_channel(self: Any, wanted: Any) -> Any:
    """Listen for the trainer of a new link, or stop listening for the previous one's; `self` is the EngineCore.

    Returns an invitation, and whether the previous trainer gave an order that the front end did not.
    """
    old: CoreChannelServer | None = self.__dict__.pop("jv_core_channel", None)
    if old is not None:
        old.close()
    unheard = bool(self.__dict__.get("jv_results"))
    self.jv_results = {}
    self.jv_started = deque(maxlen=MAX_REMEMBERED)
    self.jv_prepared = 0
    if not wanted:
        return [], unheard

    # in the server's thread: the core's loop runs it like any other call
    def on_order(text: bytes) -> None:
        self.input_queue.put_nowait(
            (self.jv_utility, (0, NO_CALL, "jv_called", (json.loads(text),)))
        )

    def on_wake() -> None:
        self.input_queue.put_nowait((self.jv_utility, (0, NO_CALL, "jv_woken", ())))

    self.jv_core_channel = CoreChannelServer(on_order, on_wake)
    return self.jv_core_channel.invitation(), unheard


def jv_woken(self: Any) -> Any:
    """A sync is about to be ordered: waiting for it here saves two thread switches."""
    since = time.perf_counter()
    core_channel = self.__dict__.get("jv_core_channel")
    text = core_channel.next_order(WOKEN_SECONDS) if core_channel is not None else None
    return jv_called(self, json.loads(text), since) if text else Future()


def jv_called(self: Any, order: Any, since: float | None = None) -> Any:
    """An order straight from the trainer. The front end gives the same a little later, and gets its result.

    `since`: when the core began to wait for the order, doing nothing else.
    """
    answer: Future[Any] = Future()
    if _may_start(self, order):
        resume = not self.is_scheduler_paused()
        self.jv_started.append(order["call"])
        self.jv_results[order["call"]] = answer, resume
        while len(self.jv_results) > MAX_REMEMBERED:
            del self.jv_results[next(iter(self.jv_results))]
        try:
            result = _start(self, {**order, "resume": resume}, since)
            if isinstance(result, Future):
                result.add_done_callback(lambda done: _copy_result(done, answer))
            else:
                answer.set_result(result)
        except Exception as error:
            answer.set_exception(error)
    return Future()  # never done: this call has no reply


def _may_start(core: Any, order: Plain) -> bool:
    """Orders that the front end would refuse are left to it, so that it can say why."""
    if order["call"] in core.jv_started:  # the front end's order came first
        return False
    held = str(core.get_weight_version())
    version = int(order["wanted"]["version"])
    newer = not held.isdigit() or version > int(held)
    if order["kind"] == "swap" and core.jv_prepared != version:
        return False
    # the front end resets its encoder cache
    encoder = core.vllm_config.model_config.is_multimodal_model
    return (
        newer
        and not encoder
        and "jv_core_channel" in core.__dict__
        and not core.model_executor.is_sleeping
    )


def _copy_result(done: Future[Any], to: Future[Any]) -> None:
    error = done.exception(0)
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result(0))


def jv_core_order(self: Any, order: Any) -> Any:
    """An order of the front end's; carried out unless the trainer gave the same (`call`): then this gets its result.

    If it failed, the result's "stage" says where: "prepare", "move", "written", "verify" or "commit".
    """
    results = self.__dict__.get("jv_results", {})
    started: tuple[Future[Any], bool] | None = results.pop(order["call"], None)
    if started is None:
        if order["call"]:
            self.jv_started.append(order["call"])
        return _start(self, order)
    answer, resumed = started

    # it was paused before the trainer's order: only this order may resume it
    def go_on(done: Future[Any]) -> None:
        if done.exception(0) is None and not done.result(0)["stage"]:
            _resume(self)

    if order["resume"] and not resumed:
        answer.add_done_callback(go_on)
    return answer


def jv_finish(self: Any, version: Any, recompute: Any, nonfinite: Any) -> Any:
    """Commit in the workers, then apply it to the engine (`label`)."""
    answers = self.collective_rpc("jv_commit")
    label(self, version, recompute, nonfinite)
    return answers


def _start(core: Any, order: Plain, since: float | None = None) -> Any:
    match order["kind"]:
        case "direct":
            return _when_idle(
                core,
                order["pause"],
                lambda began: direct_sync(core, order, began, since),
            )
        case "prepare":
            return prepare(core, order)
        case "swap":
            return swap(core, order)
    raise ValueError(f"no such order: {order['kind']}")


def _when_idle(core: Any, pause: str, work: Callable[[float], Any]) -> Any:
    """Pause generation, then do the work, given the time at which the pause began; a Future if pausing takes time."""
    began = time.perf_counter()
    paused = core.pause_scheduler(mode=pause, clear_cache=False)
    if paused is None:
        return work(began)
    out: Future[Any] = Future()

    def idle(done: Future[Any]) -> None:
        try:
            done.result(0)
            out.set_result(work(began))
        # reported to the caller, like those of vLLM's own methods
        except Exception as error:
            out.set_exception(error)

    paused.add_done_callback(idle)
    return out


def prepare(core: Any, order: Plain) -> Plain:
    """The beginning of a staged sync: the ranks make and export their shadows, and let the trainer write them."""
    wanted = order["wanted"]
    seconds: dict[str, float] = {}
    out: Plain = {"stage": "prepare", "seconds": seconds, "handles": []}
    for stage in ("prepare", "move"):
        start = time.perf_counter()
        out["stage"] = stage
        out["answers"] = core.collective_rpc(f"jv_{stage}", args=(wanted,))
        seconds[stage] = time.perf_counter() - start
        if _has_error(out["answers"]):
            return out
        out["handles"] += handles_of(out["answers"])
    core.jv_prepared = int(wanted["version"])
    out["stage"] = ""
    exported = {"handles": out["handles"], "seconds": seconds}
    _signal(core, GO, core.jv_prepared, json.dumps(exported).encode())
    return out


def swap(core: Any, order: Plain) -> Any:
    """The end of a staged sync: compare digests of the shadows, pause, swap them in, resume.

    `claimed`: the trainer's digests in hexadecimal; None if the front end has compared them.
    """
    seconds: dict[str, float] = {}
    out: Plain = {"stage": "verify", "seconds": seconds, "answers": []}
    if order["claimed"] is not None:
        core.jv_prepared = 0
        start = time.perf_counter()
        out["answers"] = core.collective_rpc("jv_verify", args=(0.0,))
        out["claimed"] = bytes.fromhex(order["claimed"])
        if _has_error(out["answers"]):
            return out
        seconds["verify"] = time.perf_counter() - start
        seconds["digest"] = _digest_seconds(out["answers"])
        if order["verify"] != "off" and values_of(out["answers"]) != out["claimed"]:
            return out
    return _when_idle(
        core, order["pause"], lambda began: _swap_in(core, order, out, began)
    )


def _swap_in(core: Any, order: Plain, out: Plain, began: float) -> Plain:
    """Swap the shadows into live memory while nothing runs."""
    seconds = out["seconds"]
    seconds["halt"] = time.perf_counter() - began
    start = time.perf_counter()
    out["stage"] = "commit"
    committed = core.collective_rpc("jv_commit")
    if _has_error(committed):
        return out | {"answers": committed}
    version = int(order["wanted"]["version"])
    _commit(core, order, version, seconds, order["nonfinite"])
    seconds["commit"] = time.perf_counter() - start
    seconds["pause"] = time.perf_counter() - began
    out["stage"] = ""
    if order["call"]:
        _signal(core, DONE, version, json.dumps(seconds).encode())
    return out


def _signal(core: Any, kind: bytes, version: int, payload: bytes) -> None:
    """To the trainer, if it is there: else the front end's reply tells it."""
    server: CoreChannelServer = core.jv_core_channel
    try:
        server.channel(time.monotonic() + SIGNAL_SECONDS).send(kind, version, payload)
    except OSError:
        server.disconnect()


def direct_sync(core: Any, order: Plain, began: float, since: float | None) -> Plain:
    """The rest of a direct sync, once the engine is idle since the halt `began`; `since` as in `jv_called`."""
    seconds = {"halt": time.perf_counter() - began}
    out: Plain = {
        "stage": "move",
        "seconds": seconds,
        "answers": [],
        "claimed": b"",
    }
    out["answers"] = core.collective_rpc("jv_move", args=(order["wanted"],))
    if _has_error(out["answers"]):
        return out
    seconds["admit"] = max(a["seconds"] for a in out["answers"])
    version = int(order["wanted"]["version"])
    core_channel = core.jv_core_channel
    out["stage"] = "written"
    try:
        channel = core_channel.channel(time.monotonic() + CONNECT_SECONDS)
        until = time.monotonic() + min(float(order["seconds"]), WRITE_SECONDS)
        channel.send(GO, version)
        message = _await_message(channel, WRITTEN, version, until)
        start = time.perf_counter()
        answers = core.collective_rpc("jv_verify", args=(0.0,))
        if _has_error(answers):
            return out | {"stage": "verify", "answers": answers}
        if order["verify"] != "off":
            # sent while the digests were computed
            message = _await_message(channel, CLAIMED, version, until)
            out["claimed"] = message[1:]
    except OSError as error:
        core_channel.disconnect()
        why = f"the trainer closed its connection while it wrote: {error}"
        kind = "TransportError"
        if isinstance(error, TimeoutError):
            why = "the trainer did not report in time that it has written"
            kind = "DeadlineExceeded"
        failed = {"rank": 0, "error": why, "kind": kind, "remedy": "sync again"}
        return out | {"answers": [failed]}
    out["stage"] = "verify"
    out["answers"] = answers
    seconds["verify"] = time.perf_counter() - start
    if order["verify"] != "off" and values_of(answers) != out["claimed"]:
        return out
    _commit(core, order, version, seconds, message[:1] == NON_FINITE)
    seconds["digest"] = _digest_seconds(answers)
    seconds["pause"] = time.perf_counter() - (began if since is None else since)
    try:
        channel.send(DONE, version, json.dumps(seconds).encode())
    except OSError:
        core_channel.disconnect()  # the trainer is gone; its commit stands
    out["stage"] = ""
    return out


def _has_error(answers: list[Plain]) -> bool:
    return any(a.get("error") for a in answers)


def _by_rank(answers: list[Plain]) -> list[Plain]:
    return sorted(answers, key=lambda a: a["rank"])


def handles_of(answers: list[Plain]) -> list[str]:
    """The ranks' exports, in order of ranks."""
    return [text for a in _by_rank(answers) for text in a.get("handles", ())]


def values_of(answers: list[Plain]) -> bytes:
    """Digests of ranks that returned bare values, in order of ranks."""
    return b"".join(a.get("values", b"") for a in _by_rank(answers))


def _digest_seconds(answers: list[Plain]) -> float:
    return max(a["seconds"].get("digest", 0.0) for a in answers)


def _await_message(
    channel: CoreChannel, kind: bytes, version: int, until: float
) -> bytes:
    """The payload of the next message of this kind about this version."""
    while True:
        received, about, payload = channel.receive(until)
        if (received, about) == (kind, version):  # else it belongs to an abandoned sync
            return payload


def label(core: Any, version: str, recompute: bool, nonfinite: bool) -> None:
    """Apply a commit to the engine: older KV is no longer found, and tokens are labelled with this version."""
    if not core.reset_prefix_cache(reset_running_requests=recompute):
        raise RuntimeError("vLLM did not reset its prefix cache")
    core.set_weight_version(version)
    if nonfinite:
        core.jv_poison()


def _resume(core: Any) -> None:
    core.resume_scheduler()
    # its loop may be blocked waiting for input
    core.input_queue.put_nowait((core.jv_wake_up, None))


def _commit(
    core: Any,
    order: Plain,
    version: int,
    seconds: dict[str, float],
    nonfinite: bool,
) -> None:
    start = time.perf_counter()
    label(core, str(version), bool(order["recompute"]), nonfinite)
    if order["resume"]:
        _resume(core)
    seconds["commit"] = time.perf_counter() - start
