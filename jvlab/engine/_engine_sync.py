"""Runs the phases of a sync on one replica, in order and timed, and keeps the replica's sync state."""

from __future__ import annotations

import asyncio
import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jvlab import _errors as errors
from jvlab._errors import (
    DeadlineExceeded,
    EngineDirty,
    JvlabError,
    SyncError,
    Unsupported,
)
from jvlab._files import Plain
from jvlab.engine import _vllm
from jvlab.engine.worker import _fault_injection
from jvlab.engine.worker._ipc_core import handles_of, values_of
from jvlab.wire import _core_channel
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._sync_words import (
    AFTER_VERIFY,
    BEFORE_BYTES,
    ORDER,
    STAGE_AFTER,
    Phase,
    Stage,
    Terms,
    for_workers,
)

# The sync state of one replica: which phase may come next, what it holds, whether it may generate. No I/O.
# The order of phases is that of `jvlab.wire._sync_words`. In direct mode live memory is written from MOVE on:
# the replica is dirty until COMMIT, and an abandoned one stays dirty and halted until a later sync commits. In
# staged mode only COMMIT itself writes live memory, so it is dirty for that moment, and stays so if the swap
# fails midway. A failed phase changes nothing else here: the gateway then sends ABANDON.


@dataclass
class SyncState:
    """The replica's own state; the engine changes it only through these methods."""

    version: int = 0
    dirty: bool = False
    link: str = ""
    terms: Terms | None = None
    done: int = 0  # phases of this sync that are done
    # generation is paused for a sync, or because the replica is dirty
    halted: bool = False
    discarded: bool = False  # a sleep discarded the weights

    @property
    def stage(self) -> str:
        """idle, prepared, halted, moving, verified or committed."""
        stage = (
            Stage.IDLE
            if self.terms is None
            else STAGE_AFTER[ORDER[self.terms.mode][self.done - 1]]
        )
        return stage.value

    @property
    def standing(self) -> str:
        """What is reported to the gateway: ready for the next phase, committed, old or dirty."""
        if self.stage == "committed":
            return "committed"
        if self.terms is not None:
            return "ready"
        return "dirty" if self.dirty else "old"

    def check_link(self, link: str) -> None:
        """Refuse orders of a link that is not this replica's."""
        if link != self.link:
            raise SyncError(
                f"order of link {link or '(none)'}; this replica is linked to {self.link or 'nobody'}",
                remedy="open the link on this replica first",
            )

    def check(self, phase: str, terms: Terms | None = None) -> None:
        """Raise unless `phase` may run now."""
        if phase in ("abandon", "check"):
            return
        if phase == "prepare":
            if self.terms is not None:
                raise SyncError(
                    f"version {self.terms.version} is still {self.stage}",
                    remedy="commit or abandon that sync first",
                )
            assert terms is not None
            if terms.version <= self.version:
                raise SyncError(
                    f"version {terms.version} is not newer than the {self.version} that this replica holds",
                    remedy=f"use {self.version + 1} or above",
                )
            return
        if self.terms is None and phase == "go_on" and not self.dirty:
            return  # repeated by a gateway that missed our answer
        if self.terms is None:
            raise SyncError(
                f"{phase} without a prepare", remedy="a sync begins with prepare"
            )
        wanted = ORDER[self.terms.mode][self.done].word
        if phase != wanted:
            raise SyncError(
                f"{phase} cannot follow {self.stage} in {self.terms.mode} mode",
                remedy=f"{wanted} is next",
            )

    def enter(self, phase: str) -> None:
        """The phase is about to run: mark what it may break before it begins.

        A halt too: a cancelled one may still take effect, and an abandon must undo it.
        """
        if phase == "halt":
            self.halted = True
        if self.terms is not None and phase == (
            "move" if self.terms.mode == "direct" else "commit"
        ):
            self.dirty = True

    def did(self, phase: str, terms: Terms | None = None) -> None:
        """The phase is done."""
        if phase in ("check", "abandon"):
            return
        if phase == "prepare":
            self.terms = terms
            self.done = 0
        self.done += 1
        if phase == "commit":
            assert self.terms is not None
            self.version = self.terms.version
            self.dirty = False
            self.discarded = False
        elif phase == "go_on":
            self.terms = None
            self.done = 0
            self.halted = False

    def abandoned(self) -> bool:
        """The sync is abandoned; True if generation is to resume (with the committed version)."""
        self.terms = None
        self.done = 0
        go_on = self.halted and not self.dirty
        self.halted = self.halted and self.dirty
        return go_on

    def unheard(self) -> None:
        """The core began a sync that we know nothing of: it may have halted, and written part of it."""
        self.dirty = True
        self.halted = True

    def discard(self) -> None:
        """The weights are gone (sleep level 2): what memory holds after a wake is not a version."""
        self.dirty = True
        self.discarded = True

    def need_clean(self) -> None:
        """Raise if generation would read parts of two versions, or no weights at all."""
        if self.discarded:
            raise EngineDirty(
                f"dirty: a sleep at level 2 discarded the weights of version {self.version}",
                remedy='pool.wake(["weights"]), sync, then pool.wake(["kv_cache"])',
                version=self.version,
            )
        if self.dirty:
            raise EngineDirty(
                f"dirty: a sync after version {self.version} did not commit, so the weights are parts of two versions",
                remedy="sync again; generation resumes when a sync commits",
                version=self.version,
            )


# The front end's side of ipc syncs: the core carries out a whole direct sync, or the beginning and the end of a
# staged one (`_ipc_core`). The front end keeps their state.

SWAP = AFTER_VERIFY["staged"]
SECONDS = 60.0
Digests = dict[tuple[str, int], int]  # by parameter and rank


def is_swap(sync: EngineSync, request: pb.RolloutSyncRequest) -> bool:
    """Whether the core runs the rest in one call. Not if requests are to finish first: that can be abandoned."""
    last = tuple(request.phases[-len(SWAP) :])
    soon = sync.state.terms is not None and sync.state.terms.pause != "wait"
    return (
        last == SWAP
        and soon
        and sync.llm.vllm_config.parallel_config.data_parallel_size == 1
    )


async def core_order(sync: EngineSync, request: pb.RolloutSyncRequest) -> None:
    """An order that the trainer gave the core too. Raises on failure; `sync.at` names the phase."""
    phases = tuple(request.phases)
    if phases == (Phase.VERIFY, *SWAP):
        await verify_and_swap(sync, request)
        return
    terms = Terms.read(request.terms).check()
    if phases not in (ORDER["direct"], BEFORE_BYTES["staged"]):
        raise SyncError("the core takes no such order", remedy="sync again")
    for phase in BEFORE_BYTES[terms.mode]:
        await sync.enter(phase.word, terms)
        if phase == Phase.PREPARE:
            sync.begin(terms)
        sync.state.did(phase.word, terms)
    if terms.mode == "direct":
        await sync.run_to_completion(_core_sync(sync, terms, request))
        return
    reply = await _ask_core(sync, "prepare", terms, request)
    sync.at = reply["stage"] or sync.at
    checked(reply["answers"])
    sync.exports = reply["handles"]


async def _ask_core(
    sync: EngineSync,
    kind: str,
    terms: Terms,
    request: pb.RolloutSyncRequest,
    **more: Any,
) -> Plain:
    order = _core_channel.order(
        kind, terms, request.seconds or SECONDS, request.call, **more
    )
    order["resume"] = sync.core_may_resume
    reply = await sync.llm.engine_core.call_utility_async("jv_core_order", order)
    sync.note(reply["seconds"])
    return reply


async def verify_and_swap(sync: EngineSync, request: pb.RolloutSyncRequest) -> None:
    """VERIFY of a staged sync, and the swap."""
    before = replace(sync.state)
    await sync.enter("verify")
    sync.state.did("verify")
    claimed = in_order(claimed_digests(request.digests), sync.names)
    await swap(sync, request, claimed, before)


async def swap(
    sync: EngineSync,
    request: pb.RolloutSyncRequest,
    claimed: bytes | None = None,
    before: SyncState | None = None,
) -> None:
    """Pause generation, swap the shadows in, resume; with `claimed`, compare these digests of the shadows first.

    `before`: the state before VERIFY, for when they differ.
    """
    await sync.enter("halt")
    sync.state.did("halt")
    await sync.enter("commit")
    await sync.run_to_completion(_core_swap(sync, request, claimed, before))


async def _core_swap(
    sync: EngineSync,
    request: pb.RolloutSyncRequest,
    claimed: bytes | None,
    before: SyncState | None,
) -> None:
    terms = sync.state.terms
    assert terms is not None  # checked before
    resume = sync.core_may_resume
    reply = await _ask_core(
        sync,
        "swap",
        terms,
        request,
        claimed=None if claimed is None else claimed.hex(),
        nonfinite=sync.nonfinite,
    )
    if before is not None:
        if reply["stage"] == "verify":
            # nothing was halted, and the sync is still open
            sync.at = "verify"
            vars(sync.state).update(vars(before))
        _take_claimed(sync, terms, reply)
    else:
        checked(reply["answers"])
    await _go_on(sync, resume)


def _take_claimed(sync: EngineSync, terms: Terms, reply: Plain) -> None:
    """Compare what the core found with what the trainer told it; raises if they differ."""
    answers = checked(reply["answers"])
    sync.at = "verify"
    claimed: bytes = reply["claimed"]
    sync.take(
        answers,
        None if terms.verify == "off" else lambda: claims(claimed, sync.names),
        claimed,
    )


async def _go_on(sync: EngineSync, resumed: bool) -> None:
    """The commit is done; resume generation, unless the core has."""
    sync.at = "commit"
    sync.state.did("commit")
    sync.committed()
    await sync.enter("go_on")
    start = time.perf_counter()
    if not resumed:
        if _vllm.is_multimodal(sync.llm):
            await sync.llm.reset_encoder_cache()
        await sync.resume()
    sync.note({"go_on": time.perf_counter() - start})
    sync.state.did("go_on")


async def _core_sync(
    sync: EngineSync, terms: Terms, request: pb.RolloutSyncRequest
) -> None:
    """All of a direct sync, in the core. Raises on failure; `sync.at` names the phase."""
    resume = sync.core_may_resume
    reply = await _ask_core(sync, "direct", terms, request)
    sync.at = "verify" if reply["stage"] == "verify" else "move"
    _take_claimed(sync, terms, reply)
    sync.state.did("verify")
    await _go_on(sync, resume)


def _keys(names: dict[int, list[str]]) -> list[tuple[str, int]]:
    return [(name, rank) for rank in sorted(names) for name in names[rank]]


def claims(claimed: bytes, names: dict[int, list[str]]) -> Digests:
    """The trainer's digests of what it wrote, by parameter and rank; sent in the order of the ranks' names."""
    keys = _keys(names)
    values = np.frombuffer(claimed, np.uint64).tolist()
    if len(values) != len(keys):
        raise SyncError(
            f"the trainer sent {len(values)} digests, this engine has {len(keys)} parameters",
            remedy="connect again",
        )
    return dict(zip(keys, values, strict=True))


def in_order(digests: Digests, names: dict[int, list[str]]) -> bytes:
    """Digests in the order of the ranks' names; those that are missing are left out."""
    keys = _keys(names)
    return np.array([digests[k] for k in keys if k in digests], np.uint64).tobytes()


# The adapter that a link syncs into this engine: which requests use it, and which versions are its own.

# of an adapter's memory in a plan; as in engine/tracing/_lora_slots.py, which imports torch
LINKED_PREFIX = "adapter."
NAME = "jvlab-link"


class LinkedAdapter:
    """Once an adapter's link was opened, requests that name no adapter use it. It is zero until its first sync.

    So a request in flight goes on with each version that a sync commits, and its spans say so, as with base weights. A
    request that began before the link was opened, or that names an adapter of a folder, computes without it:
    `spans` gives it the version of the base. A sync of the base makes the adapter zero again.
    """

    def __init__(self) -> None:
        self.request: Any = None  # vLLM's LoRARequest
        # whether the open link leaves the base as it is: an adapter's, or the draft model's
        self.open = False
        # versions of the base; those in between are the adapter's
        self._base_versions = [0]

    def opened(self, number: int, version: int) -> None:
        """A link to the adapter was opened, while the engine holds this version."""
        if self.request is None:
            self.request = _vllm.lora_request(NAME, number, NAME)
            self._base_versions = [version]
        self.open = True

    def committed(self, version: int) -> None:
        """A sync of the open link made this version."""
        if self.request is not None and not self.open:
            self._base_versions.append(version)

    def spans(self, found: Iterable[Any], adapted: bool) -> list[tuple[int, int, int]]:
        """(version, start, stop) of a sample, given vLLM's spans, and whether it was made with the linked adapter."""
        out: list[tuple[int, int, int]] = []
        for span in found:
            version = (
                int(span.version)
                if adapted or self.request is None
                else self._base(int(span.version))
            )
            if out and out[-1][0] == version and out[-1][2] == span.start:
                out[-1] = version, out[-1][1], span.end
            else:
                out.append((version, span.start, span.end))
        return out

    def _base(self, version: int) -> int:
        at = bisect_right(self._base_versions, version)
        return self._base_versions[at - 1] if at else version


# ----------------------------------------------------------------------------------------------------

OPEN_SECONDS = 20.0
VERIFY_SECONDS = 60.0
DYING_SECONDS = 2.0
POLL_SECONDS = 0.02  # that a worker may wait inside one call: no generation meanwhile


class EngineSync:
    """Runs the phases on an AsyncLLM. One call at a time."""

    def __init__(self, llm: Any, state: SyncState, replica: str) -> None:
        self.llm = llm
        self.state = state
        self._replica = replica
        # path and key of the engine core's channel, while an ipc link is open
        self.core_channel: list[str] = []
        self.lock = asyncio.Lock()
        # what the last commit left, by whether it is the draft model's
        self._committed: dict[bool, Callable[[], Digests]] = {}
        self.drafts = False  # whether the open link is the draft model's
        self.draft_version = 0  # whose sync wrote the draft model last
        self._moved: Callable[[], Digests] = dict
        self._bytes = 0
        self._committing: asyncio.Task[None] | None = None
        self.user_paused = False
        self._halted = 0.0  # when generation was paused for this sync
        self.asleep: set[str] = set()  # "weights", "kv_cache": released memory
        self._ipc = False
        self.wanted: Plain = {}
        # of each rank's digests, where it returns bare values
        self.names: dict[int, list[str]] = {}
        self.linked = LinkedAdapter()
        # raises if adapters of folders leave no slot for a link's
        self.reserve_slot: Callable[[], None] = lambda: None
        self._begin_call(False)

    def _begin_call(self, nonfinite: bool) -> None:
        """`nonfinite`: this sync's weights are not all finite, and the trainer allows it."""
        self.at = "open"  # the current phase
        self.nonfinite = nonfinite
        # what the ranks exported, for the trainer to attach
        self.exports: list[str] = []
        self._found: Digests = {}
        self._differing: list[str] = []
        # number of parameters by evidence
        self._evidence: Counter[str] = Counter()
        # seconds of layers that vLLM's own reload processed
        self._reloaded: dict[str, float] = {}
        self._seconds: list[tuple[str, float]] = []

    async def run(self, request: pb.RolloutSyncRequest) -> pb.RolloutSyncReply:
        """Open, close, or phases; a failure is reported in the outcome, with the phase in which it happened."""
        async with self.lock:
            # its caller was cancelled: let it finish first
            if self._committing is not None:
                await asyncio.gather(self._committing, return_exceptions=True)
                self._committing = None
            self._begin_call(request.nonfinite)
            failure: dict[str, str] = {}
            try:
                if request.HasField("open"):
                    await self._open(
                        request.link, request.open, request.seconds or OPEN_SECONDS
                    )
                elif request.close:
                    self.at = "close"
                    await self._close(request.link)
                if self._ipc and request.call:
                    self.state.check_link(request.link)
                    await core_order(self, request)
                else:
                    swaps = self._ipc and is_swap(self, request)
                    steps = request.phases[: -len(SWAP)] if swaps else request.phases
                    for number in steps:
                        await self._phase(Phase(number).word, request)
                    if swaps:
                        self.state.check_link(request.link)
                        await swap(self, request)
            except JvlabError as error:
                kind = type(error).__name__
                failure = {"failed": self.at, "error": str(error), "kind": kind}
            except Exception as error:
                if isinstance(error, _vllm.dead_errors()) or await self._is_dying():
                    raise  # reported as a lost replica, not as a phase that failed
                text = f"{type(error).__name__}: {error}"
                failure = {"failed": self.at, "error": text}
            committed = pb.COMMIT in request.phases and not failure
            # if nothing differs, they equal the trainer's
            told = pb.CHECK in request.phases or self._differing
            found = sorted(self._found.items()) if told else []
            outcome = pb.ReplicaOutcome(
                replica=self._replica,
                state="committed" if committed else self.state.standing,
                version=self.state.version,
                bytes=self._bytes,
                seconds=[pb.PhaseSeconds(name=n, seconds=s) for n, s in self._seconds],
                found=pb.ReplicaDigests(
                    replica=self._replica,
                    parameters=[name for (name, _), _ in found],
                    ranks=[rank for (_, rank), _ in found],
                    values=[value for _, value in found],
                ),
                exports_json=self.exports,
                core_channel=self.core_channel if request.HasField("open") else [],
                differing=self._differing,
                evidence=self._evidence,
                reloaded=self._reloaded,
                **failure,
            )
            return pb.RolloutSyncReply(outcome=outcome)

    async def _is_dying(self) -> bool:
        """Whether the engine is dying: vLLM's calls fail shortly before it reports that."""
        end = time.monotonic() + DYING_SECONDS
        while not self.llm.errored and time.monotonic() < end:
            await asyncio.sleep(0.05)
        return bool(self.llm.errored)

    def need_weights(self) -> None:
        """Raise if the weights have no memory: a kernel that reads or writes there would kill the engine."""
        if "weights" in self.asleep:
            raise SyncError(
                f"{self._replica} sleeps: its weights have no memory",
                remedy='pool.wake(["weights"]), sync, pool.wake(["kv_cache"])',
            )

    async def ask(self, method: str, *args: Any) -> list[Plain]:
        """Call every worker; raises the first error that one of them returns, as its own class."""
        return checked(await self.llm.collective_rpc(method, args=args))

    # A link -------------------------------------------------------------------------------------------------------

    async def _open(self, link: str, order: pb.RolloutOpen, seconds: float) -> None:
        if not _vllm.has_our_scheduler(self.llm):
            raise Unsupported(
                "this engine has its own scheduler (scheduler_cls), which may serve KV of older weights",
                remedy="launch without engine={'scheduler_cls': ...}",
            )
        if self.state.terms is not None:
            await self._abandon()  # the previous link did not end its sync
        self.need_weights()
        await self._open_core_channel(False)  # close the previous trainer's first
        self.linked.open = False
        if _vllm.adapter_slots(self.llm) and _is_adapters(order.plan):
            self.reserve_slot()
        work = self.ask(
            "jv_open",
            order.transport,
            order.plan,
            order.index,
            list(order.ranks_json),
            seconds,
        )
        answers = await self._timed("open", work)
        self.exports = handles_of(answers)
        self.names = {a["rank"]: a["names"] for a in answers if "names" in a}
        if number := max(a.get("adapter", 0) for a in answers):
            self.linked.opened(number, self.state.version)
        self.drafts = any(a.get("drafts", False) for a in answers)
        self.linked.open = self.linked.open or self.drafts
        self._ipc = order.transport == "ipc"
        await self._open_core_channel(self._ipc)
        self.state.link = link

    async def _close(self, link: str) -> None:
        self.state.check_link(link)
        if self.state.terms is not None:
            await self._abandon()
        await self._open_core_channel(False)
        await self.ask("jv_close")
        self.state.link = ""

    async def _open_core_channel(self, wanted: bool) -> None:
        if wanted or self.core_channel:
            self.core_channel, unheard = await _vllm.core_channel(self.llm, wanted)
            if unheard:
                self.state.unheard()

    # Phases -------------------------------------------------------------------------------------------------------

    async def _timed(self, name: str, work: Any) -> Any:
        start = time.perf_counter()
        try:
            return await work
        finally:
            self._seconds.append((name, time.perf_counter() - start))

    async def _phase(self, phase: str, request: pb.RolloutSyncRequest) -> None:
        self.at = phase
        if phase == "abandon":  # also from a gateway that lost track of the link
            await self._timed(phase, self._abandon())
            return
        self.state.check_link(request.link)
        terms = Terms.read(request.terms).check() if phase == "prepare" else None
        run = {
            "prepare": lambda: self._prepare(terms),
            "halt": self._halt,
            "move": self._move,
            "verify": lambda: self._verify(
                request.digests, request.seconds or VERIFY_SECONDS
            ),
            "commit": lambda: self.run_to_completion(self._commit()),
            "go_on": self._go_on,
            "check": lambda: self._check(request.digests),
        }
        await self.enter(phase, terms)
        await self._timed(phase, run[phase]())
        if phase != "commit":
            self.state.did(phase, terms)

    async def enter(self, phase: str, terms: Terms | None = None) -> None:
        """Called before the phase runs; raises if it may not."""
        self.at = phase
        self.state.check(phase, terms)
        self.state.enter(phase)
        if _fault_injection.VARIABLE in os.environ:
            await asyncio.to_thread(_fault_injection.inject_fault, "rollout", phase)

    def begin(self, terms: Terms) -> None:
        """A new sync: raises if the weights have no memory."""
        self.need_weights()
        self._bytes = 0
        self.wanted = for_workers(terms)
        if self.state.dirty:  # it holds no base that changes could be added to
            self.wanted["base"] = ""

    async def _prepare(self, terms: Terms | None) -> None:
        assert terms is not None  # checked before
        self.begin(terms)
        # a direct ipc sync allocates nothing, and MOVE carries the terms
        if not self._ipc or terms.mode == "staged":
            self.exports = handles_of(await self.ask("jv_prepare", self.wanted))

    async def _halt(self) -> None:
        assert self.state.terms is not None
        self._halted = time.perf_counter()
        await _vllm.pause(self.llm, self.state.terms.pause, False)

    async def _move(self) -> None:
        await self.ask("jv_move", *([self.wanted] if self._ipc else []))

    async def _verify(self, expected: pb.ReplicaDigests, seconds: float) -> None:
        """Collect the workers' digests. Polls: a worker that waits keeps the engine from generating."""
        terms = self.state.terms
        assert terms is not None
        answers = await self._verified(seconds)
        parts = ("scatter", "digest", "repack", "load")
        self.note(
            {
                part: max((a["seconds"].get(part, 0.0) for a in answers), default=0.0)
                for part in parts
            }
        )
        self.take(
            answers,
            None if terms.verify == "off" else lambda: claimed_digests(expected),
        )

    async def _verified(self, seconds: float) -> list[Plain]:
        end = time.monotonic() + seconds
        while True:
            answers = await self.ask("jv_verify", POLL_SECONDS)
            late = [a for a in answers if not a["done"]]
            if not late:
                return answers
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"{self._replica} rank {late[0]['rank']}: not complete after {seconds:g} s "
                    f"({late[0]['missing']} did not arrive)",
                    remedy="sync again",
                )
            await asyncio.sleep(0.002)

    def take(
        self,
        answers: list[Plain],
        expected: Callable[[], Digests] | None,
        values: bytes = b"",
    ) -> None:
        """Compare the workers' digests with the trainer's; `values`: the trainer's, in the order of ranks."""
        self._bytes = sum(a["bytes"] for a in answers)
        self._note_evidence(answers)
        if expected is not None and not (values and values == values_of(answers)):
            self._found = digests_of(answers, self.names)
            self._compare(expected(), whole=True)
        self._moved = lambda: digests_of(answers, self.names)

    def _note_evidence(self, answers: list[Plain]) -> None:
        for answer in answers:
            self._evidence.update(answer.get("evidence", {}))

    def _compare(self, expected: Digests, whole: bool) -> None:
        wrong = [k for k, value in expected.items() if self._found.get(k) != value]
        if whole:
            wrong += [k for k in self._found if k not in expected]
        self._differing = [f"{name} (rank {rank})" for name, rank in sorted(set(wrong))]
        if self._differing:
            raise errors.VerifyError(
                f"{self._replica} does not hold the trainer's bits: {first_names(self._differing)} differ",
                remedy="sync again; if it differs again, look at report.differing and pool.peek",
            )

    async def run_to_completion(self, work: Any) -> None:
        """Run it even if the caller is cancelled: half a commit would leave the replica dirty for nothing."""
        self._committing = asyncio.create_task(work)
        await asyncio.shield(self._committing)
        self._committing = None

    # Where the core runs a sync ---------------------------------------------------------------------

    def note(self, seconds: dict[str, float]) -> None:
        """Add parts of this call's time."""
        self._seconds.extend((name, value) for name, value in seconds.items() if value)

    def committed(self) -> None:
        """The verified digests are now those that this replica holds."""
        self._committed[self.drafts] = self._moved
        if self.drafts:
            self.draft_version = self.state.version
        self.linked.committed(self.state.version)

    @property
    def core_may_resume(self) -> bool:
        """Whether the core may resume generation by itself after a commit."""
        return not (self.user_paused or self.asleep or _vllm.is_multimodal(self.llm))

    async def resume(self) -> None:
        """Generation goes on, unless the user has paused it or put memory to sleep."""
        if not self.user_paused and not self.asleep:
            await self.llm.resume_generation()

    async def _commit(self) -> None:
        terms = self.state.terms
        assert terms is not None
        recompute = terms.kv == "recompute"
        if self._ipc:
            # in one round trip
            finish = _vllm.finish(self.llm, terms.version, recompute, self.nonfinite)
            checked(await finish)
        else:
            for answer in await self.ask("jv_commit"):
                for layer, seconds in answer["reloaded"].items():
                    self._reloaded[layer] = max(seconds, self._reloaded.get(layer, 0.0))
            self.note({"reload": sum(self._reloaded.values())})
            await _vllm.invalidate_kv(self.llm, recompute)
            await self.llm.update_weight_version(str(terms.version))
            if self.nonfinite:
                await _vllm.poison(self.llm)
        self.state.did("commit")
        self.committed()

    async def _go_on(self) -> None:
        await self.resume()
        if self._halted:
            self._seconds.append(("pause", time.perf_counter() - self._halted))
        self._halted = 0.0

    async def _abandon(self) -> None:
        go_on = self.state.abandoned()
        try:
            await self.ask("jv_abandon")
        finally:
            if go_on:
                await self.resume()

    async def _check(self, expected: pb.ReplicaDigests) -> None:
        """Digests of live memory, compared with those given, or with those of the last commit.

        In the middle of a sync: of what has arrived so far, in live memory or the shadow.
        """
        self.need_weights()
        given = claimed_digests(expected)
        end = time.monotonic() + VERIFY_SECONDS
        midway = self.state.terms is not None
        while True:
            answers = await self.ask("jv_check", midway)
            self._found = digests_of(answers, self.names)
            if (
                not midway
                or given.keys() <= self._found.keys()
                or time.monotonic() > end
            ):
                break  # else the last digest is still being computed
            await asyncio.sleep(0.01)
        self._note_evidence(answers)
        committed = self._committed.get(self.drafts, dict)
        self._compare(given or ({} if midway else committed()), whole=False)


def _is_adapters(plan: bytes) -> bool:
    """Whether a plan writes an adapter's slot."""
    from jvlab.layout._plan import TransferPlan

    parameters = TransferPlan.from_bytes(plan).parameters
    return any(p.name.startswith(LINKED_PREFIX) for p in parameters)


def checked(answers: list[Plain]) -> list[Plain]:
    """The answers; raises the first error that a worker returned, as its own class."""
    failed = [a for a in answers if a.get("error")]
    if failed:
        kind = getattr(errors, failed[0].get("kind", ""), None)
        if not (isinstance(kind, type) and issubclass(kind, JvlabError)):
            kind = SyncError
        text = "; ".join(dict.fromkeys(a["error"] for a in failed))
        raise kind(
            text, remedy=failed[0].get("remedy", ""), ranks=[a["rank"] for a in failed]
        )
    return answers


def first_names(names: list[str]) -> str:
    """The first three, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def digests_of(answers: list[Plain], names: dict[int, list[str]]) -> Digests:
    out: Digests = {}
    for a in answers:
        rank = a["rank"]
        if values := a.get("values"):
            pairs = zip(
                names[rank], np.frombuffer(values, np.uint64).tolist(), strict=True
            )
        else:
            pairs = a["digests"]
        out |= {(name, rank): value for name, value in pairs}
    return out


def claimed_digests(message: pb.ReplicaDigests) -> Digests:
    columns = zip(message.parameters, message.ranks, message.values, strict=True)
    return {(name, rank): value for name, rank, value in columns}
