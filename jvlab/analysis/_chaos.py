"""`jv.chaos`: faults by a schedule while a pool works; what came of every request, and how soon all was well again.

    workers   ask without a pause, each request with a deadline
    caller    for each planned fault: inject it, let go, wait for the pool's size, sync until all replicas hold it
    after     what each answer says is compared with what was served while it was made

Two sets of weights take turns: what the pool served, and slightly changed ones. At the end it serves the first again.
"""

from __future__ import annotations

import math
import os
import platform
import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._deadline import Deadline, check_timeout
from jvlab._errors import ConfigError, DeadlineExceeded, JvlabError, Unsupported
from jvlab._progress import Progress
from jvlab._tracebacks import brief, shorten
from jvlab._units import human_seconds
from jvlab.layout._tree import flatten
from jvlab.transport._faults import Faults
from jvlab.views._style import BAD, BOX, FAINT, GOOD, IDLE, dot, table
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire.processes._identity import Identity

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.record._batch import RolloutBatch
    from jvlab.record._sample import Sample
    from jvlab.sync._link import Link

KINDS: dict[str, str] = {  # name -> what happens
    "kill": "a replica's process is killed",
    "freeze replica": "all processes of a replica stand still",
    "freeze engine": "a replica's engine stands still, its own process goes on",
    "freeze gateway": "the gateway stands still",
    "flip": "a bit of a sync flips on its way",
    "drop": "a bucket of a sync never arrives",
    "delay": "a bucket of a sync comes late",
    "fail": "a channel of a sync breaks",
    "abandon": "a sync is given up half-way",
}
BYTES = ("flip", "drop", "delay", "fail")  # by jv.transport.Faults
EVERY_SECONDS = 15.0  # a fault, on average
GRACE_SECONDS = 5.0  # for a call to end after its own deadline
ANSWER_SECONDS = 5.0  # for the gateway to say how the pool is
NOTICE_SECONDS = 20.0  # for the gateway to see that a process died
DROP_SECONDS = 6.0  # deadline of a sync of which a part never arrives, at least
REST_SECONDS = 0.2  # after a refusal
PROMPTS = ((5, 6, 7, 8), (9, 8, 7, 6, 5), (11, 12, 13), (21, 5, 21, 5, 21, 5))
SAMPLING: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
NAMED = 20  # lost and wrong requests that a report names

# The schedule -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """One fault to come."""

    kind: str
    at: float  # seconds since the beginning; later if the pool has not recovered from the one before
    replica: int  # modulo those that can be reached
    seconds: float  # how long something stands still, or is late
    mode: str  # of a sync


def schedule(seed: int, minutes: float, kinds: Sequence[str]) -> tuple[Planned, ...]:
    """The faults of a seed: every kind once, in a drawn order, before any of them comes again.

    >>> schedule(0, 5, ["kill", "flip"]) == schedule(0, 5, ["kill", "flip"])
    True
    """
    drawn = random.Random(seed)
    order: list[str] = []
    count = max(len(kinds), round(60 * minutes / EVERY_SECONDS))
    while len(order) < count:
        order += drawn.sample(list(kinds), len(kinds))
    step = 60 * minutes / count
    return tuple(
        Planned(
            kind,
            round(step * (i + 0.5 * drawn.random()), 2),
            drawn.randrange(64),
            round(drawn.uniform(1.0, 6.0), 2),
            drawn.choice(("direct", "staged")),
        )
        for i, kind in enumerate(order[:count])
    )


# The report ---------------------------------------------------------------------------------------------------------

RECOVERED = "recovered"
NOT_RECOVERED = "not recovered"
SKIPPED = "skipped"
NOT_REACHED = "not reached"
DOTS = {RECOVERED: GOOD, NOT_RECOVERED: BAD, SKIPPED: IDLE, NOT_REACHED: IDLE}


@dataclass(frozen=True)
class ChaosRow:
    """One fault: what it was, how it ended, and how long it took until all was well."""

    kind: str  # of KINDS
    at: float  # seconds since the beginning
    state: str  # "recovered", "not recovered", "skipped" or "not reached"
    ended: str = ""  # "old", "committed" or "dirty"; "died"; "lost" or "unnoticed"
    said: str = ""  # the named error, or why it was skipped
    # seconds from the fault until a later request was answered, and until all replicas held a verified sync
    answered: float | None = None
    synced: float | None = None


@dataclass(frozen=True, repr=False)
class ChaosReport:
    """What `jv.chaos` did to a pool and what came of it; true if nothing was lost or wrong and all recovered.

    >>> report = jv.chaos(pool, link, minutes=0.1, faults=["flip"])
    >>> report.ok, report.lost, report.wrong
    (True, (), ())
    >>> report.rows[0].said.partition(":")[0]
    'VerifyError'
    """

    pool: str
    seed: int
    rows: tuple[ChaosRow, ...]
    asked: int
    answered: int
    refused: Mapping[str, int]  # by the error's name
    lost: tuple[str, ...]  # no answer and no reason before the deadline
    wrong: tuple[
        str, ...
    ]  # answers of weights that were not served, or of others than they name
    restored: bool  # the pool holds the weights and has the size of the beginning
    syncs: int
    seconds: float
    notes: tuple[str, ...] = ()
    # (second, "answered", "refused" or "lost") of each request's end
    ends: tuple[tuple[float, str], ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Did faults happen, was nothing lost or wrong, and is everything as it was?"""
        states = {row.state for row in self.rows}
        clean = not self.lost and not self.wrong and NOT_RECOVERED not in states
        return clean and self.restored and self.answered > 0 and RECOVERED in states

    @property
    def worst(self) -> float:
        """The longest time in seconds until the pool answered again, or a sync was verified."""
        seconds = [s for row in self.rows for s in (row.answered, row.synced) if s]
        return max(seconds, default=0.0)

    def __bool__(self) -> bool:
        return self.ok

    def to_dict(self) -> dict[str, Any]:
        """Everything but the requests' times as plain values."""
        plain = asdict(self)
        del plain["ends"]
        return {**plain, "ok": self.ok, "worst": round(self.worst, 3)}

    def __repr__(self) -> str:
        states = Counter(row.state for row in self.rows)
        faults = ", ".join(f"{count} {state}" for state, count in states.items())
        return (
            f"ChaosReport({self.pool}: faults {faults}; {self.asked} requests, {len(self.lost)} lost, "
            f"{len(self.wrong)} wrong; {'as before' if self.restored else 'NOT RESTORED'})"
        )

    def _facts(self) -> list[str]:
        why = "".join(f", {n} × {name}" for name, n in sorted(self.refused.items()))
        lines = [
            f"{self.asked} requests: {self.answered} answered, {sum(self.refused.values())} refused{why}, "
            f"{len(self.lost)} lost, {len(self.wrong)} wrong; {self.syncs} syncs committed; "
            f"worst recovery {human_seconds(self.worst)}; seed {self.seed}, {human_seconds(self.seconds)}"
        ]
        lines += [f"lost: {said}" for said in self.lost[:NAMED]]
        lines += [f"wrong: {said}" for said in self.wrong[:NAMED]]
        return lines + [f"note: {note}" for note in self.notes]

    def _cells(self) -> Iterator[tuple[str, ...]]:
        took = lambda s: "" if s is None else human_seconds(s)
        for row in self.rows:
            times = took(row.answered), took(row.synced)
            yield (
                f"{row.at:.1f} s",
                KINDS[row.kind],
                row.state,
                row.ended,
                *times,
                row.said,
            )

    def __str__(self) -> str:
        rows = ["  " + "  ".join(filter(None, cells)) for cells in self._cells()]
        return "\n".join([repr(self), *rows, *self._facts()])

    def _repr_html_(self) -> str:
        rows = [
            [f"{dot(DOTS[cells[2]])} {cells[2]}", *map(escape, cells)]
            for cells in self._cells()
        ]
        for row in rows:
            del row[3]  # the state, which is in front
        heads = ("result", "at", "fault", "ended", "answered", "synced", "said")
        facts = "".join(f"<div>{escape(line)}</div>" for line in self._facts())
        return (
            f'<div style="{BOX}"><b>{escape(repr(self))}</b>{table(heads, rows, numbers=(1, 4, 5))}'
            f'<div style="color:{FAINT}">{facts}</div></div>'
        )


# Requests -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One request and its end."""

    prompt: int  # of PROMPTS
    begun: float
    ended: float
    outcome: str  # "answered", "refused" or "lost"
    said: str = ""
    sample: Sample | None = None


class Load:
    """Workers that ask a pool all the time; each request has a deadline, and `close` waits for the last ones."""

    def __init__(self, pool: Pool, workers: int, seconds: float) -> None:
        self._pool = pool
        self.seconds = seconds
        self.asked: list[Asked] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._work, args=(n,), name=f"jvlab-chaos-{n}", daemon=True
            )
            for n in range(workers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def generate(self, prompts: Sequence[Sequence[int]]) -> RolloutBatch:
        """Ask as the workers do."""
        listed = [list(prompt) for prompt in prompts]
        seconds = self.seconds
        return self._pool.generate(listed, timeout=seconds, progress=False, **SAMPLING)

    def answered(self, begun: float) -> float | None:
        """Seconds until a request was answered that began after this moment; waits for the first."""
        limit = Deadline(self.seconds)
        while True:
            late = limit.over
            for one in list(self.asked):
                if one.begun >= begun and one.outcome == "answered":
                    return one.ended - begun
            if late:
                return None
            time.sleep(limit.within(0.05))

    def ask(self, prompt: int) -> Asked:
        """One request; whatever comes of it is an outcome."""
        begun = time.monotonic()
        end = lambda outcome, said="", sample=None: Asked(
            prompt, begun, time.monotonic(), outcome, said, sample
        )
        try:
            batch = self.generate([PROMPTS[prompt]])
        except DeadlineExceeded as error:
            return end("lost", f"after {self.seconds:g} s: {error.message}")
        except JvlabError as error:
            return end("refused", type(error).__name__)
        except Exception as error:
            return end("lost", f"no reason, but {type(error).__name__}: {error}")
        if len(batch) != 1 or len(batch[0].token_ids) != SAMPLING["max_tokens"]:
            return end("lost", f"an answer without its tokens: {batch!r}")
        return end("answered", sample=batch[0])

    def _work(self, turn: int) -> None:
        while not self._stop.is_set():
            self.asked.append(self.ask(turn % len(PROMPTS)))
            turn += 1
            if self.asked[-1].outcome != "answered":
                self._stop.wait(REST_SECONDS)

    def close(self) -> int:
        """Ask no more; returns how many requests did not end though their deadline is over."""
        self._stop.set()
        limit = Deadline(self.seconds + GRACE_SECONDS)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(limit.left())
        return sum(thread.is_alive() for thread in self._threads)


@dataclass
class Served:
    """A version, which of the two trees it is, and the time in which an answer may name it."""

    version: int
    tree: int
    since: float
    until: float = math.inf


class Judge:
    """Whether an answer is what was served: by the versions it names, and by its log-probabilities.

    `alone` has each tree's answer to each prompt, `beside` the same again in one batch: how far those are apart is what
    batching changes. An answer is of the other tree if it is as close to that one as this, and not to its own.
    """

    def __init__(
        self, alone: Sequence[Sequence[Sample]], beside: Sequence[Sequence[Sample]]
    ) -> None:
        self._alone = alone
        noise = [
            apart(a, b)
            for tree in (0, 1)
            for a, b in zip(alone[tree], beside[tree], strict=True)
        ]
        self._near = 1e-6 + 4 * max(n for n in (*noise, 0.0) if n is not None)
        between = [apart(a, b) for a, b in zip(*alone, strict=True)]
        self.blind = [
            p
            for p, gap in enumerate(between)
            if gap is not None and gap <= 2 * self._near
        ]

    def wrong(self, one: Asked, served: Sequence[Served]) -> str:
        """What is wrong with an answer; empty if nothing is."""
        sample = one.sample
        if sample is None:
            return ""
        named = sorted({int(version) for version in sample.versions})
        for version in named:
            # the newest of that number; before the first sync of all there is one without
            times = [s for s in served if s.version == version]
            if not any(s.since <= one.ended and s.until >= one.begun for s in times):
                now = ", ".join(
                    str(s.version)
                    for s in served
                    if s.since <= one.ended and s.until >= one.begun
                )
                return f"prompt {one.prompt}: it names version {version} while {now} was served"
        if len(named) != 1 or one.prompt in self.blind:
            return ""  # of two versions, and says so: its KV is of both
        tree = next(s.tree for s in served if s.version == named[0])
        own = apart(sample, self._alone[tree][one.prompt])
        other = apart(sample, self._alone[1 - tree][one.prompt])
        if (
            other is not None
            and other <= self._near
            and (own is None or own > self._near)
        ):
            return f"prompt {one.prompt}: it names version {named[0]} alone, and has the other weights' probabilities"
        return ""


def apart(one: Any, other: Any) -> float | None:
    """Mean difference of two samples' log-probabilities, up to the first token that differs; None if at once."""
    same = np.asarray(one.token_ids) == np.asarray(other.token_ids)
    count = len(same) if same.all() else int(np.argmin(same))
    gap = np.abs(np.asarray(one.logprobs)[:count] - np.asarray(other.logprobs)[:count])
    return float(gap.mean()) if count else None


def changed(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The same tree, with every second leaf a sixteenth larger and the others smaller."""
    out: dict[str, Any] = {}
    for n, (path, array) in enumerate(arrays.items()):
        if not hasattr(array, "astype"):
            raise ConfigError(
                f"chaos cannot make other weights from {path}, which is {type(array).__name__}",
                remedy="pass some: jv.chaos(pool, link, params=tree)",
            )
        factor = 1 + (1 if n % 2 else -1) / 16
        out[path] = (
            (array * factor).astype(array.dtype)
            if "float" in str(array.dtype)
            else array
        )
    return out


# Processes ----------------------------------------------------------------------------------------------------------


@contextmanager
def frozen(pids: Sequence[int]) -> Iterator[None]:
    """Inside they stand still; a second process lets them go when its input ends, and so also if this one is killed."""
    letting_go = f"read _; kill -CONT {' '.join(map(str, pids))}"
    guard = subprocess.Popen(
        ["sh", "-c", letting_go],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _tell(pids, signal.SIGSTOP)
        yield
    finally:
        _tell(pids, signal.SIGCONT)
        guard.communicate(timeout=GRACE_SECONDS)


def _tell(pids: Sequence[int], what: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)


class Skipped(Exception):
    """This fault cannot be injected, or not without doing harm; the words say why."""


# The run ------------------------------------------------------------------------------------------------------------


class Chaos:
    """One run: the pool, the two trees, what was served when, and the rows so far."""

    def __init__(
        self, pool: Pool, link: Link, trees: Any, load: Load, recovery: float
    ) -> None:
        self.pool = pool
        self.link = link
        self.trees = trees
        self.load = load
        self.recovery = recovery
        self.size = pool.replicas
        self.began = time.monotonic()
        self.served = [Served(link.version, 0, -math.inf)]
        self.rows: list[ChaosRow] = []
        self.notes: list[str] = []
        self._usual = link.inject(None)  # faults that its user gave it

    # Syncs ----------------------------------------------------------------------------------------------------------

    @property
    def other(self) -> int:
        """The tree that is not served."""
        return 1 - self.served[-1].tree

    def sync(self, tree: int, seconds: float, mode: str | None = None) -> None:
        """Sync one of the trees; whether it committed is asked of the pool, whatever the call said."""
        since = time.monotonic()
        try:
            self.link.sync(self.trees[tree], mode=mode, timeout=seconds, progress=False)
        finally:
            with suppress(JvlabError):
                self._look()
            if self.link.version > self.served[-1].version:
                self.served[-1].until = time.monotonic()
                self.served.append(Served(self.link.version, tree, since))

    def _look(self) -> dict[str, Any]:
        return self.pool.status(timeout=ANSWER_SECONDS)

    def reference(self) -> Judge:
        """Both trees' answers to all prompts, before anything fails."""
        alone: list[list[Sample]] = []
        beside: list[list[Sample]] = []
        for tree in (1, 0):
            self.sync(tree, self.recovery)
            alone.insert(0, [self.load.generate([p])[0] for p in PROMPTS])
            beside.insert(0, list(self.load.generate(PROMPTS)))
        return Judge(alone, beside)

    def recover(self, tree: int | None = None) -> str:
        """Sync until all replicas of the beginning hold it; what was said last if that does not come about in time."""
        limit = Deadline(self.recovery)
        said = "no time was left"
        while not limit.over:
            try:
                self.pool.wait(limit, progress=False)
                self.sync(self.other if tree is None else tree, limit.left())
                if self._look()["healthy"] >= self.size:
                    return ""
                said = repr(self.pool)
            except JvlabError as error:
                said = named(error)
            time.sleep(limit.within(REST_SECONDS))
        return said

    # Faults ---------------------------------------------------------------------------------------------------------

    def one(self, planned: Planned) -> None:
        """Inject a fault, and wait until all is well again."""
        begun = time.monotonic()
        row = ChaosRow(planned.kind, begun - self.began, RECOVERED)
        try:
            ended, said = self._inject(planned)
        except Skipped as why:
            self.rows.append(replace(row, state=SKIPPED, said=str(why)))
            return
        row = replace(row, ended=ended, said=said)
        problem = self.recover()
        if not problem:
            row = replace(row, synced=time.monotonic() - begun)
            row = replace(row, answered=self.load.answered(begun))
        if problem or row.answered is None:
            row = replace(row, state=NOT_RECOVERED, said=problem or "no answers")
        self.rows.append(row)

    def _inject(self, planned: Planned) -> tuple[str, str]:
        """How it ended, and the error that was raised."""
        if planned.kind == "abandon":
            return self._abandoned(planned)
        if planned.kind in BYTES:
            return self._damaged(planned)
        if self.pool.one_process:
            raise Skipped("the engine runs in this process")
        if planned.kind == "freeze gateway":
            return self._frozen_gateway(planned)
        replica = self._reachable(planned)
        if planned.kind == "kill":
            return self._killed(replica)
        return self._frozen(planned, replica)

    def _damaged(self, planned: Planned) -> tuple[str, str]:
        if self.link.transport == "ipc":
            raise Skipped("ipc writes the engine's memory: it has no buckets to damage")
        bucket: Any = (0, planned.seconds) if planned.kind == "delay" else 0
        faults = Faults(**{planned.kind: bucket})
        seconds = self.recovery
        if planned.kind == "drop":
            usual = self.link.last.seconds["total"] if self.link.last else 0.0
            seconds = max(DROP_SECONDS, 4 * usual)
        self.link.inject(faults.wrap)
        try:
            self.sync(self.other, seconds, planned.mode)
        except JvlabError as error:
            outcomes: Any = error.fields.get("outcomes") or {}
            held = ", ".join(sorted(set(outcomes.values())))
            return held or self._held(), named(error)
        finally:
            self.link.inject(None)
        if not faults.fired:
            raise Skipped("no bucket was sent, so none could be damaged")
        return "committed", ""

    def _abandoned(self, planned: Planned) -> tuple[str, str]:
        with self.link.stepper(
            self.trees[self.other],
            mode=planned.mode,
            unit="bucket",
            timeout=self.recovery,
        ) as stepper:
            for _ in range(max(1, len(stepper.units) // 2)):
                stepper.step()
        return self._held(), ""

    def _held(self) -> str:
        """Whether replicas went on with their old version, or hold parts of two."""
        replicas = self._look()["replicas"]
        return "dirty" if any(replica["dirty"] for replica in replicas) else "old"

    def _reachable(self, planned: Planned) -> pb.ReplicaStatus:
        """A replica whose processes are this machine's, run by this lab's gateway."""
        self._look()
        here = [
            r
            for r in self.pool.snapshot.replicas
            if r.state == pb.READY
            and not r.elsewhere
            and r.facts.host in ("", platform.node())
        ]
        if not here:
            raise Skipped(
                "its replicas were started elsewhere: their processes are not this lab's"
            )
        return here[planned.replica % len(here)]

    def _now(self, replica: pb.ReplicaStatus) -> pb.ReplicaStatus:
        """The same replica as the gateway saw it last."""
        listed = self.pool.snapshot.replicas
        return next(r for r in listed if r.replica == replica.replica)

    def _killed(self, replica: pb.ReplicaStatus) -> tuple[str, str]:
        if not replica.restarts_left:
            raise Skipped(
                f"no restarts are left: {replica.replica} would not be started again"
            )
        os.kill(replica.pid, signal.SIGKILL)
        limit = Deadline(NOTICE_SECONDS)
        while self._now(replica).epoch == replica.epoch:
            if limit.over:
                return "unnoticed", ""
            time.sleep(0.05)
        return "died", self._now(replica).cause

    def _frozen(self, planned: Planned, replica: pb.ReplicaStatus) -> tuple[str, str]:
        import psutil

        whole = psutil.Process(replica.pid)
        pids = [child.pid for child in whole.children(recursive=True)]
        if planned.kind == "freeze replica":
            pids.insert(0, replica.pid)
        with frozen(pids):
            time.sleep(planned.seconds)
            self._look()
        now = self._now(replica)
        return ("unnoticed" if now.epoch == replica.epoch else "lost"), now.cause

    def _frozen_gateway(self, planned: Planned) -> tuple[str, str]:
        lab = self.pool.client.describe(ANSWER_SECONDS)
        gateway = Identity(lab.pid, lab.host, lab.started).process()
        if gateway is None or gateway.uids().real != os.getuid():
            raise Skipped(f"the gateway runs on {lab.host}, or is somebody else's")
        with frozen([gateway.pid]):
            time.sleep(planned.seconds)
            try:
                self.pool.status(timeout=1.0)
            except JvlabError as error:
                return "silent", named(error)
        return "unnoticed", ""

    # The end --------------------------------------------------------------------------------------------------------

    def restore(self) -> bool:
        """The weights of the beginning, verified, on as many replicas; a note says what is missing."""
        try:
            self.link.inject(None)
            said = self.recover(tree=0)
            if not said and not self.link.verify(self.trees[0], timeout=self.recovery):
                said = "its digests differ"
            self.link.inject(self._usual)
        except JvlabError as error:
            said = named(error)
        if said:
            self.notes.append(
                f"{self.pool.name} does not serve the weights of the beginning: {said}; sync yours again"
            )
        return not said


def named(error: JvlabError) -> str:
    """An error's name and first line, without a port: reports are compared and shared."""
    said = re.sub(r" at [\w.:\[\]-]+:\d+", "", error.message.splitlines()[0])
    return f"{type(error).__name__}: {said}"


@brief
def chaos(
    pool: Pool,
    link: Link,
    *,
    minutes: float = 5.0,
    seed: int = 0,
    faults: Sequence[str] | None = None,
    params: Any = None,
    served: Any = None,
    workers: int = 3,
    deadline: float = 120.0,
    recovery: float = 300.0,
    progress: bool | None = None,
) -> ChaosReport:
    """Break a pool that works, on purpose: what gets lost, what is wrong, how soon does it recover?

    minutes    about four faults a minute; every kind comes once, however long that takes, and then no fault begins
               after this time
    seed       of the schedule: the same seed, the same faults
    faults     which kinds: "kill", "freeze replica", "freeze engine", "freeze gateway", "flip", "drop", "delay",
               "fail", "abandon"; default: all
    params     other weights, synced in between; default: those of the pool, slightly changed
    served     the weights that the pool serves, and serves again at the end; default: those that the link was
               connected with. They are compared with the engines' first
    workers    threads that ask without a pause, each request within `deadline` seconds; give it longer than a replica
               takes to start
    recovery   seconds until the pool must be well again after a fault

    A request is *lost* if neither an answer nor a reason came before its deadline, and *wrong* if it names a version
    that was not served then, or if its log-probabilities are those of the other weights. Faults that a pool could not
    recover from are skipped, and the report says why: no kill without a restart left, no signal to processes that
    this lab's gateway did not start here.

    The weights take memory twice. Versions go on counting, and kills use up restarts. No other trainer can sync
    meanwhile. Ctrl-C lets everything go and syncs the weights of the beginning before it is raised.

    >>> report = jv.chaos(pool, link, minutes=0.1, faults=["abandon"])
    >>> report
    ChaosReport(...: faults 1 recovered; ... requests, 0 lost, 0 wrong; as before)
    """
    kinds = list(dict.fromkeys(faults or KINDS))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(
            f"no fault is called {unknown[0]!r}", remedy=f"faults: {', '.join(KINDS)}"
        )
    for name, value in (
        ("minutes", minutes),
        ("deadline", deadline),
        ("recovery", recovery),
    ):
        check_timeout(value, name)
    trees = _trees(pool, link, params, served, recovery)
    run = Chaos(pool, link, trees, Load(pool, workers, deadline), recovery)
    plan = schedule(seed, minutes, kinds)
    restored = False
    hung = 0
    try:
        judge = run.reference()
        run.began = time.monotonic()
        run.load.start()
        with Progress(
            len(plan), f"{pool.name}: chaos", unit="fault", show=progress
        ) as bar:
            for number, planned in enumerate(plan):
                time.sleep(max(0.0, run.began + planned.at - time.monotonic()))
                over = time.monotonic() - run.began > 60 * minutes
                if (over and number >= len(kinds)) or any(
                    row.state == NOT_RECOVERED for row in run.rows
                ):
                    run.rows.append(ChaosRow(planned.kind, planned.at, NOT_REACHED))
                else:
                    bar.remark(planned.kind)
                    run.one(planned)
                bar.advance(1, planned.kind)
        hung = run.load.close()
        restored = run.restore()
    except BaseException as error:
        run.load.close()
        as_before = run.restore()
        if isinstance(error, KeyboardInterrupt):
            held = "as they were, verified" if as_before else run.notes[-1]
            error.args = (f"chaos was interrupted; all is let go, the weights: {held}",)
            shorten(error)
        raise
    return _report(run, judge, seed, restored, hung)


def _trees(
    pool: Pool, link: Link, params: Any, served: Any, seconds: float
) -> tuple[Any, Any]:
    """What the pool serves, as its digests show, and other weights; raises for what chaos could not restore."""
    if link.pool is not pool:
        raise ConfigError(
            f"this link writes {link.pool.name}, not {pool.name}",
            remedy=f"link = lab.connect(params, lab.pools[{pool.name!r}])",
        )
    if link.part != "model":
        raise Unsupported(
            f"chaos syncs a model, and this link writes a {link.part}",
            remedy="pass the model's link",
        )
    link.require_one_process(
        "chaos", "connect from one process that holds all parameters"
    )
    first = (
        link.remembered.arrays()
        if served is None
        else flatten(getattr(served, "params", served)).arrays
    )
    if first is None:
        raise ConfigError(
            "the weights that this link was connected with are gone, so they could not be put back",
            remedy="pass what the pool serves: jv.chaos(pool, link, served=policy.params)",
        )
    pool.wait(seconds, progress=False)
    if not link.verify(first, timeout=seconds):
        raise ConfigError(
            f"{pool.name} does not serve the weights that would be put back at the end",
            remedy="link.sync(params) first; then jv.chaos(pool, link, served=params)",
        )
    return first, changed(first) if params is None else params


def _report(
    run: Chaos, judge: Judge, seed: int, restored: bool, hung: int
) -> ChaosReport:
    asked = run.load.asked
    lost = [one.said for one in asked if one.outcome == "lost"]
    lost += [f"a call did not end, {GRACE_SECONDS:g} s after its deadline"] * hung
    wrong = [said for one in asked if (said := judge.wrong(one, run.served))]
    if judge.blind:
        run.notes.append(
            f"of {len(judge.blind)} of {len(PROMPTS)} prompts the probabilities of both weights are too close to "
            "tell them apart, so only the versions that answers name were checked; params= takes others"
        )
    if killed := sum(row.ended == "died" for row in run.rows):
        run.notes.append(
            f"{killed} restarts were used; pool.status() says what is left"
        )
    return ChaosReport(
        run.pool.name,
        seed,
        tuple(run.rows),
        len(asked) + hung,
        sum(one.outcome == "answered" for one in asked),
        Counter(one.said for one in asked if one.outcome == "refused"),
        tuple(lost),
        tuple(wrong),
        restored,
        len(run.served) - 1,
        time.monotonic() - run.began,
        tuple(run.notes),
        tuple((one.ended - run.began, one.outcome) for one in asked),
    )
