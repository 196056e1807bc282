"""A run of `jv.grpo` in several trainer processes: process 0 decides, the others do what it says on their shards.

    process 0: loop, producer, rewards, record                    others: `Follower`
    checks that all were asked for the same    ◀───── hello ─────
    begin     folder, checkpoint to resume     ─────────────────▶  load their shards of it
    sync      version                          ─────────────────▶  link.sync, in all
    batch     the step's arrays                ─────────────────▶  score it, if the reference is a tree
    train                                      ─────────────────▶  the same compiled programs, in all
    save, gather                               ─────────────────▶  write, or hand over, the shards they hold
    end, failed                                ─────────────────▶  done

Orders go through the gateway, over a stream beside that of the syncs. It reports at once that a process has gone, and
every process says every few seconds that it is there, which a stopped one does not. Work that needs all processes runs
in a thread of its own: a collective may wait for ever for one that died, and on some devices nothing ends it.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from jvlab._deadline import Deadline
from jvlab._errors import (
    ConfigError,
    DeadlineExceeded,
    JvlabError,
    SyncError,
    TrainerLost,
    Unsupported,
)
from jvlab.trainer._batching import Buckets, TrainBatch
from jvlab.trainer._loop import Control

if TYPE_CHECKING:
    from jvlab.trainer._grpo_config import GrpoConfig
    from jvlab.trainer._losses import Algorithm
    from jvlab.trainer._run_checkpoint import Checkpoints
    from jvlab.trainer._step import Pending, TrainState, TrainStep
    from jvlab.wire._client import Message, TeamStream

JOIN_SECONDS = 120.0  # for the other processes to call jv.grpo
BEAT_SECONDS = 5.0  # between two signs of life
# jax ends the processes of a job of which one is silent for 100 seconds, and says less about it
SILENT_SECONDS = 75.0
# after work failed because another process did, for its reason to arrive
CAUSE_SECONDS = 5.0
# for work that needs all processes to fail by itself once one of them has gone
GRACE_SECONDS = 5.0
PART = (
    8 << 20
)  # bytes of a batch in one message: the gateway relays other messages between two of them
RESTART = "start all its processes again, with jv.grpo(..., resume=True) in every one"


class Crew:
    """This process's view of the run's processes: orders of process 0, and who is still there."""

    def __init__(self, stream: TeamStream, member: int, processes: list[int]) -> None:
        """`processes` are jax's indices, the leader's first; `member` is this one's place among them."""
        self.member = member
        self.processes = processes
        # called in another thread when something has arrived
        self.on_news: Callable[[], None] = lambda: None
        self._stream = stream
        self._heard = dict.fromkeys(self._others(), time.monotonic())
        self._received: dict[str, list[tuple[int, Message]]] = {}
        self._orders: list[Message] = []
        self._closing = threading.Event()
        self._ended = False
        stream.on_news = self._sort
        self._sort()

    @classmethod
    def of(cls, link: Any, params: Any) -> Crew | None:
        """The crew of the processes that hold shards of these parameters; None if it is this one alone."""
        import jax

        leaves = jax.tree.leaves(params)
        devices = {d for x in leaves for d in getattr(x.sharding, "device_set", ())}
        processes = sorted({d.process_index for d in devices})
        if len(processes) < 2:
            return None
        if len(processes) < jax.process_count():
            raise Unsupported(
                f"the policy spans processes {processes} of {jax.process_count()}",
                remedy="a mesh over all devices of jax.distributed, or over those of one process",
            )
        stream = link.stream_beside("grpo")
        if stream is None:
            raise ConfigError(
                f"the policy spans processes {processes}, the link was connected from one alone",
                remedy="link = lab.connect(policy, pool), in every process, with the policy that is trained",
            )
        member = processes.index(jax.process_index())
        crew = cls(stream, member, processes)
        try:
            crew._assemble()
        except BaseException:
            crew.close()
            raise
        threading.Thread(target=crew._beat, name="jvlab-crew", daemon=True).start()
        return crew

    @property
    def leads(self) -> bool:
        return self.member == 0

    def _others(self) -> list[int]:
        """The members that this one hears of: a follower hears the leader alone."""
        return [*range(1, len(self.processes))] if self.leads else [0]

    def _who(self, member: int) -> str:
        name = self._stream.names[member]
        return f"trainer process {self.processes[member]}" + (
            f" ({name})" if name else ""
        )

    def _assemble(self) -> None:
        stream = self._stream
        if not stream.wait(lambda: stream.complete, JOIN_SECONDS):
            self.check()
            raise DeadlineExceeded(
                f"not all of trainer processes {self.processes} called jv.grpo within {JOIN_SECONDS:g} s",
                remedy="call it in every process, with the same arguments",
            )
        with stream.changed:
            self._heard = dict.fromkeys(self._others(), time.monotonic())

    # Messages -----------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_SECONDS):
            # a gateway that is busy; `check` finds out if it is more
            with suppress(JvlabError):
                self._stream.send({"kind": "alive"})

    def _sort(self) -> None:
        """Take what has arrived: orders in order, the rest by kind."""
        with self._stream.changed:
            for member in self._others():
                queue = self._stream.messages(member)
                while queue:
                    message = queue.popleft()
                    self._heard[member] = time.monotonic()
                    kind = message["kind"]
                    if kind == "order":
                        self._orders.append(message)
                    elif kind != "alive":
                        self._received.setdefault(kind, []).append((member, message))
            self._stream.changed.notify_all()
        self.on_news()

    def _take(self, kind: str) -> list[tuple[int, Message]]:
        with self._stream.changed:
            return self._received.pop(kind, [])

    def tell(self, kind: str, **body: Any) -> None:
        """Something to the leader; from the leader, to all."""
        self._stream.send({"kind": kind, **body})

    def order(self, do: str, **body: Any) -> None:
        """The leader: what all do next. Raises if one of them cannot."""
        self.check()
        self._stream.send({"kind": "order", "do": do, **body})

    def next(self) -> Message:
        """A follower: the next order; waits as long as the leader is there."""

        def found() -> Message | None:
            return self._orders.pop(0) if self._orders else None

        # no deadline while the leader gives signs of life: its rollouts may take hours
        while True:
            self.check()
            order = self._stream.wait(found, 1.0)
            if order is not None:
                return order

    def asked(self) -> list[Message]:
        """The leader: what the owners of other processes ask for."""
        return [message for _, message in self._take("ask")]

    def hello(self, facts: Mapping[str, str]) -> None:
        """Say what this process was asked to do; the leader raises if it is not the same everywhere."""
        if not self.leads:
            self.tell("hello", facts=dict(facts))
            return
        for member, message in self._gather("hello", JOIN_SECONDS):
            theirs = message["facts"]
            names = sorted(facts.keys() | theirs.keys())
            if differing := [n for n in names if facts.get(n) != theirs.get(n)]:
                told = ", ".join(
                    f"{n} is {theirs.get(n)} and {facts.get(n)}" for n in differing
                )
                raise ConfigError(
                    f"{self._who(member)} and process {self.processes[0]} ask for different runs: {told}",
                    remedy="call jv.grpo with the same arguments in every process",
                )

    def _gather(self, kind: str, seconds: float) -> list[tuple[int, Message]]:
        """The leader: one message of this kind from every other process."""
        deadline = Deadline(seconds)
        count = len(self.processes) - 1
        complete = lambda: len(self._received.get(kind, ())) >= count
        while not self._stream.wait(complete, deadline.within(1.0)):
            self.check()
            if deadline.over:
                with self._stream.changed:
                    there = {member for member, _ in self._received.get(kind, ())}
                late = [self._who(m) for m in self._others() if m not in there]
                raise DeadlineExceeded(
                    f"{', '.join(late)} sent no {kind} within {seconds:g} s",
                    remedy="call jv.grpo in every process, with the same arguments",
                )
        return sorted(self._take(kind), key=lambda found: found[0])

    # Batches ------------------------------------------------------------------------------------------------------

    def order_batch(self, batch: TrainBatch, version: int) -> None:
        """The leader: the arrays of a step, in parts."""
        data = base64.b64encode(batch_bytes(batch)).decode()
        parts = [data[at : at + PART] for at in range(0, len(data), PART)]
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            self.order("batch", version=version, data=part, left=left)

    def batch(self, first: Message) -> TrainBatch:
        """A follower: the batch of which this is the first part."""
        parts = [first]
        while parts[-1]["left"]:
            parts.append(self.next())
        return batch_of(base64.b64decode("".join(p["data"] for p in parts)))

    # Who is there -------------------------------------------------------------------------------------------------

    def lost(self) -> TrainerLost | None:
        """Why this run cannot go on: a process has gone, is silent, or gave up. A run that is over loses nobody."""
        with self._stream.changed:
            if self._ended or any(order["do"] == "end" for order in self._orders):
                return None
            if failed := self._received.get("failed"):
                member, report = failed[0]
                return TrainerLost(
                    f"{self._who(member)} gave up: {report['message']}",
                    remedy=report["remedy"] or RESTART,
                )
            if self._stream.over:
                return TrainerLost(
                    f"the run's processes are no longer connected: {self._stream.over}",
                    remedy=RESTART,
                )
            now = time.monotonic()
            for member, heard in self._heard.items():
                if self._stream.complete and now - heard > SILENT_SECONDS:
                    return TrainerLost(
                        f"{self._who(member)} gave no sign of life for {now - heard:.0f} s",
                        remedy=f"is it stopped, or its machine overloaded? {RESTART}",
                    )
        return None

    def check(self) -> None:
        """Raise if this run cannot go on."""
        if (found := self.lost()) is not None:
            raise found

    def together(self, work: Callable[[], Any]) -> Any:
        """What `work` returns, which needs all processes; raises TrainerLost soon after one of them has gone."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        # a daemon: if a collective never ends, neither does this thread
        threading.Thread(target=run, name="jvlab-collective", daemon=True).start()
        grace: Deadline | None = None
        # no deadline while all processes are there: a step takes as long as it takes
        while not wait([done], 1.0).done:
            if grace is None and self.lost() is not None:
                grace = Deadline(GRACE_SECONDS)
            if grace is not None and grace.over:
                self.check()
        try:
            return done.result(0)
        except BaseException as error:
            self._explain(error)

    def _explain(self, error: BaseException) -> NoReturn:
        """Raise why a process could not do its part, which is often that another one has gone."""
        known = isinstance(error, (JvlabError, KeyboardInterrupt))
        cause = None if known else self._stream.wait(self.lost, CAUSE_SECONDS)
        # `wait` ends at once if the stream is over
        cause = cause or (None if known else self.lost())
        if cause is None:
            raise error
        raise cause from error

    # The end ------------------------------------------------------------------------------------------------------

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """An error inside ends the run in every process."""
        try:
            yield
        except BaseException as error:
            self.end("failed", error)
            self.close()
            raise

    def end(self, reason: str, error: BaseException | None) -> None:
        """The run is over here: tell the others, and (the leader) wait until they have done their part."""
        if self._ended:
            return
        with suppress(JvlabError):  # they see the stream end
            # who is lost is known to all, or learns it from its stream
            if error is not None and not self._is_echo(error):
                known = isinstance(error, JvlabError)
                report = {
                    "message": error.message
                    if known
                    else f"{type(error).__name__}: {error}",
                    "remedy": error.remedy if known else "",
                }
                self.tell("failed", **report)
            elif error is None and self.leads:
                self.order("end", reason=reason)
                self._gather("done", JOIN_SECONDS)
            elif error is None:
                self.tell("done")
        self._ended = True

    def _is_echo(self, error: BaseException) -> bool:
        """Is it what this process was told? The leader tells all the same: they may not have heard of it."""
        return isinstance(error, TrainerLost) and not self.leads

    def close(self) -> None:
        """Leave; the others are told. Can be called twice."""
        self._closing.set()
        self._stream.close()


def batch_bytes(batch: TrainBatch) -> bytes:
    """A batch as bytes; `batch_of` reads them."""
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    arrays = {n: v for n, v in fields.items() if isinstance(v, np.ndarray)}
    plain = {
        "buckets": dataclasses.asdict(batch.buckets),
        "excluded": batch.excluded,
        "dropped": batch.dropped,
    }
    text = np.frombuffer(json.dumps(plain).encode(), np.uint8)
    file = io.BytesIO()
    content: dict[str, Any] = {"plain": text, **arrays}
    np.savez(file, **content)
    return zlib.compress(file.getvalue(), 1)


def batch_of(data: bytes) -> TrainBatch:
    with np.load(io.BytesIO(zlib.decompress(data)), allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    plain = json.loads(arrays.pop("plain").tobytes())
    buckets = Buckets(**plain.pop("buckets"))
    return TrainBatch(**arrays, **plain, buckets=buckets)


def facts_of(
    config: GrpoConfig, algorithm: Algorithm, task: str, params: Any, budget: int | None
) -> dict[str, str]:
    """What must be the same in every process, as text. Functions are compared by name."""
    import jax

    def plain(value: Any) -> str:
        if callable(value):
            return getattr(value, "__qualname__", type(value).__name__)
        return str(value)

    # what each process may have its own of
    own = ("background", "progress", "sinks", "report_to", "reference", "evaluate")
    fields = [f.name for f in dataclasses.fields(config) if f.name not in own]
    described = [
        f"{jax.tree_util.keystr(path)} {leaf.dtype}{tuple(leaf.shape)} {leaf.sharding.spec}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if hasattr(leaf.sharding, "spec")
    ]
    return {
        **{name: plain(getattr(config, name)) for name in fields},
        "optimizer": type(config.optimizer).__name__,
        "algorithm": str(algorithm),
        "task": task,
        "tokens of a micro-batch": str(budget),
        "parameters": f"crc {zlib.crc32(' '.join(described).encode()):08x}",
    }


def whole(params: Any) -> Any:
    """The parameters as arrays of this host. Called in every process; one leaf at a time is whole on the devices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    def gathered(leaf: Any) -> np.ndarray:
        everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())
        return np.asarray(jax.jit(lambda x: x, out_shardings=everywhere)(leaf))

    return jax.tree.map(gathered, params)


# Followers ------------------------------------------------------------------------------------------------------------


class _Asking(Control):
    """What the owner of a follower asks for, which the leader does."""

    def __init__(self, crew: Crew) -> None:
        super().__init__()
        self._crew = crew

    def set(self, *, pausing: bool | None = None, stopping: bool | None = None) -> None:
        with suppress(JvlabError):  # the run is ending
            self._crew.tell("ask", pausing=pausing, stopping=stopping)
        super().set(pausing=pausing, stopping=stopping)


class NoProducer:
    """Of a follower: groups are made in process 0."""

    def snapshot(self) -> dict[str, Any]:
        return {}

    def limit(self, max_staleness: int) -> None:
        raise Unsupported(
            "a run of several processes is steered in process 0",
            remedy="set run.max_staleness there",
        )

    def close(self) -> None: ...


@dataclasses.dataclass(kw_only=True, eq=False)
class Follower:
    """What `Run` drives in every process but the first. It makes, records and decides nothing."""

    crew: Crew
    config: GrpoConfig
    algorithm: Algorithm
    reference: Any
    train: TrainStep
    state: TrainState
    link: Any
    checkpoints: Checkpoints
    keep: Callable[[Any], None]  # takes each step's new parameters
    step: int
    version: int
    max_gap: float = 0.0
    producer: Any = None
    last: Any = None
    extremes: Any = None
    on_step: list[Callable[[Any], None]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.control: Control = _Asking(self.crew)
        self.writer = SimpleNamespace(close=lambda reason, text: None)
        self._batch: TrainBatch | None = None
        self._pending: Pending | None = None

    def run(self, producer: Any) -> str:
        """Follow orders until the run ends; returns how it did in process 0."""
        self.producer = producer
        orders: dict[str, Callable[[Message], None]] = {
            "sync": self._sync,
            "batch": self._take,
            "train": self._train,
            "save": self._save,
            "gather": self._gather,
        }
        while (order := self.crew.next())["do"] != "end":
            orders[order["do"]](order)
        self._settle()
        return str(order["reason"])

    def _sync(self, order: Message) -> None:
        self.version = int(order["version"])
        options = {**self.config.sync_options, "progress": False}
        send = lambda: self.link.sync(self.state.params, self.version, **options)
        # process 0, where it failed too, decides what comes next
        with suppress(SyncError):
            self.crew.together(send)
        self._settle()

    def _take(self, order: Message) -> None:
        batch = self.crew.batch(order)
        self._settle()
        self.version = int(order["version"])
        if self.algorithm.needs_reference and batch.reference_logprobs is None:
            score = lambda: self.train.score(self.reference, batch)
            batch = batch.with_logprobs(reference=self.crew.together(score))
        self._batch = batch

    def _train(self, order: Message) -> None:
        batch = self._batch
        assert batch is not None, "process 0 hands it out before"
        launch = lambda: self.train.launch(self.state, batch, self.version)
        pending: Pending = self.crew.together(launch)
        self.state = pending.state
        self.keep(self.state.params)
        self._pending = pending
        # as long as the computation takes
        self.crew.together(pending.wait)

    def _settle(self) -> None:
        """Take the counts of the step before; done late, since process 0 syncs first."""
        if self._pending is not None:
            self.state, _ = self.crew.together(self._pending.finish)
            self._pending = None
            self.step += 1
            for told in self.on_step:
                told(None)

    def _save(self, order: Message) -> None:
        self._settle()
        path = Path(order["path"])
        write = lambda: self.checkpoints.write_arrays(self.state, path)
        self.crew.together(write)

    def _gather(self, order: Message) -> None:
        self.crew.together(lambda: whole(self.state.params))

    def waiting(self) -> str:
        """Nothing: process 0 says what the run waits for."""
        return ""

    def ended(self, reason: str, error: BaseException | None) -> None:
        """How the run ended here."""
        self.crew.end(reason, error)

    def close(self) -> None:
        """Release the checkpoints' threads and the stream."""
        self.checkpoints.close()
        self.crew.close()
