"""A trainer of three processes (threads here) into a replica with real channels: exact, and all or nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.layout._compile import compile_plan
from jvlab.layout._tree import (
    Boxes,
    MeshSpec,
    TorchDevice,
    device_processes,
    leaves_of,
    mesh_boxes,
)
from jvlab.sync._connections import Agreement
from jvlab.sync._link import Link
from jvlab.sync._pack import Source
from jvlab.sync._team import Team, together
from tests.gateway.fake_lab import FakeLab
from tests.layout.plan_interpreter import execute
from tests.sync.channel_replica import ChannelReplica
from tests.waiting import until

sys.path.insert(0, str(Path(__file__).parents[1] / "layout"))
from tests.layout.plan_world import Size, World, transformer

pytestmark = pytest.mark.slow
SIZE, RANKS = 3, 2
Values = dict[str, np.ndarray]


class Cut:
    """An array over the processes of a trainer, as one of them holds it."""

    def __init__(self, value: np.ndarray, dim: int | None, own: int) -> None:
        self.shape, self.dtype = value.shape, value.dtype
        boxes = mesh_boxes(value.shape, (SIZE,), (None if dim is None else (dim, 0),))
        held = {k: box for k, box in enumerate(boxes) if all(b > a for a, b in box)}
        self.sharding = Boxes(
            tuple(TorchDevice(k, k, "cpu") for k in held), tuple(held.values()), own
        )
        where = self.sharding.devices_indices_map(value.shape)
        self.addressable_shards = [
            SimpleNamespace(device=p, data=np.ascontiguousarray(value[index]))
            for p, index in where.items()
            if p.process_index == own
        ]


def cut(values: Values, own: int) -> dict[str, Cut]:
    """Each leaf along another dimension; vectors are copies everywhere."""
    return {
        p: Cut(v, k % v.ndim if v.ndim > 1 else None, own)
        for k, (p, v) in enumerate(values.items())
    }


class TrainerProcesses:
    """Three processes, their links, and the replica they sync."""

    def __init__(self, fake_lab: FakeLab, model: str) -> None:
        self.fake_lab = fake_lab
        self.world = transformer(
            World(MeshSpec.parse("fsdp=1"), RANKS), Size(), layout="einsum", rotary=True
        )
        rng = np.random.default_rng(5)
        self.old = self.world.values
        self.new = {
            p: (v + rng.integers(1, 9, v.shape)).astype(v.dtype)
            for p, v in self.old.items()
        }
        self.labs = [
            jv.Lab.attach(fake_lab.address, fake_lab.token) for _ in range(SIZE)
        ]
        self.labs[0].launch(model, tensor_parallel=RANKS, name="p").wait(60)
        self.pools = [lab.pools["p"] for lab in self.labs]
        self.teams: list[Team | None] = [None] * SIZE
        self.links: list[Any] = [None] * SIZE

    @property
    def replica(self) -> Any:
        return self.fake_lab.fakes["p/0"]

    def all(self, work: Callable[[int], Any]) -> list[Any]:
        """The same in every process; what it returned or raised."""

        def one(k: int) -> Any:
            try:
                return work(k)
            except Exception as error:
                return error

        with ThreadPoolExecutor(SIZE) as threads:
            return list(threads.map(one, range(SIZE)))

    def connect(
        self, mode: str = "staged", wraps: dict[int, Any] | None = None
    ) -> list[Any]:
        self.links = self.all(lambda k: self._connect(k, mode, (wraps or {}).get(k)))
        return self.links

    def _connect(self, k: int, mode: str, wrap: Any) -> Link:
        arrays, world, pool = cut(self.old, k), self.world, self.pools[k]
        with together(self.labs[k].client, arrays, "p") as team:
            assert team is not None
            self.teams[k] = team
            plan = compile_plan(
                leaves_of(arrays),
                world.bindings,
                world.layouts,
                device_process=device_processes(arrays),
                bucket_mib=0.002,
            )
            mapping: Any = SimpleNamespace(
                bindings=world.bindings, _origin=None, stacked={}
            )
            pool.facts()
            epochs = {r.replica: r.epoch for r in pool.snapshot.replicas}
            agreed = Agreement(plan, mapping, "shm", "", b"", {}, {}, epochs)
            agreed.meaning.configure("off", None, None)  # this mapping is a stand-in
            team.agree(agreed)
            return Link(pool, agreed, mode, wrap, lambda _: None, team)

    def sync(self, values: Values, **options: Any) -> list[Any]:
        return self.all(
            lambda k: self.links[k].sync(cut(values, k), progress=False, **options)
        )

    def expected(self, values: Values) -> dict[tuple[str, int], bytes]:
        """By the interpreter, from whole arrays."""
        plan = compile_plan(self.world.leaves, self.world.bindings, self.world.layouts)
        params = {
            key: np.zeros_like(value)
            for key, value in self.world.blank_params(plan).items()
        }
        execute(plan, {(p, 0): v for p, v in values.items()}, params)
        return {(name, rank): value.tobytes() for (rank, name), value in params.items()}

    def live(self) -> dict[tuple[str, int], bytes]:
        return {key: value.tobytes() for key, value in self.replica.live.items()}

    def close(self) -> None:
        for link in self.links:
            if isinstance(link, Link):
                link.close()


@pytest.fixture
def trainer(
    fake_lab: FakeLab, llama: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TrainerProcesses]:
    monkeypatch.setattr(
        "jvlab.lab._launch_settings.resolve_device", lambda device: "cpu"
    )
    monkeypatch.setattr("tests.gateway.fake_lab.FakeReplica", ChannelReplica)
    found = TrainerProcesses(fake_lab, llama)
    yield found
    found.close()
    for lab in found.labs:
        lab._leave()
    fake_lab.do(found.replica.close_ranks)


@pytest.fixture
def fake_lab(tmp_path: Path) -> Iterator[FakeLab]:
    lab = FakeLab(tmp_path)
    yield lab
    lab.end()


def well(answers: list[Any]) -> Any:
    assert not [a for a in answers if isinstance(a, BaseException)], answers
    return answers[0]


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_each_process_sends_its_shards_and_all_agree(
    trainer: TrainerProcesses, mode: str
):
    well(trainer.connect(mode))
    assert {link.plan.digest for link in trainer.links} == {
        trainer.links[0].plan.digest
    }
    for version, values in ((1, trainer.old), (2, trainer.new), (5, trainer.old)):
        reports = trainer.sync(values, version=None if version < 3 else version)
        assert well(reports).verified
        assert (
            {r.version for r in reports}
            == {version}
            == {link.version for link in trainer.links}
        )
        assert all(r == reports[0] for r in reports), "one report, wherever it is read"
        assert reports[0].bytes == trainer.links[0].plan.total_bytes
        assert trainer.live() == trainer.expected(values)
    sent = [
        sum(c.sent for c in link._coordinator.senders.channels)
        for link in trainer.links
    ]
    assert all(count > 3 for count in sent), "each has sent some of it"


def test_verify_adds_the_parts_up(trainer: TrainerProcesses):
    well(trainer.connect())
    well(trainer.sync(trainer.new))
    verify = lambda values: trainer.all(
        lambda k: trainer.links[k].verify(None if values is None else cut(values, k))
    )
    for values, ok in ((trainer.new, True), (trainer.old, False), (None, True)):
        reports = verify(values)
        assert [r.ok for r in reports] == [ok] * SIZE, reports


def test_different_arguments_are_one_error_everywhere(trainer: TrainerProcesses):
    well(trainer.connect())
    answers = trainer.all(
        lambda k: trainer.links[k].sync(
            cut(trainer.old, k), verify="off" if k == 1 else "full"
        )
    )
    assert all(isinstance(a, errors.ConfigError) for a in answers), answers
    assert all("verify='off' and 'full'" in str(a) for a in answers)
    answers = trainer.all(
        lambda k: trainer.links[k].sync(
            cut(trainer.old, k), mode="quick" if k == 2 else "staged"
        )
    )
    assert all(isinstance(a, errors.ConfigError) for a in answers), answers
    short = lambda k: {
        p: v for p, v in cut(trainer.old, k).items() if k != 2 or "norm" not in p
    }
    answers = trainer.all(lambda k: trainer.links[k].sync(short(k)))
    assert all(isinstance(a, errors.LayoutError) for a in answers), answers
    assert well(trainer.sync(trainer.new)).verified, "nothing was harmed"


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_failure_in_one_is_a_failure_in_all_and_the_next_sync_is_well(
    trainer: TrainerProcesses, who: int
):
    faults = jv.transport.Faults(fail=1)
    well(trainer.connect(wraps={who: faults.wrap}))
    answers = trainer.sync(trainer.new, timeout=60.0)
    assert faults.fired
    assert all(isinstance(a, errors.SyncError) for a in answers), answers
    assert all("injected fault" in str(a) for a in answers), answers
    assert not hasattr(trainer.replica, "live")
    assert trainer.replica.memory.version == 0
    assert well(trainer.sync(trainer.new)).verified
    assert trainer.live() == trainer.expected(trainer.new)


def test_poison_in_one_process_is_refused_in_all(trainer: TrainerProcesses):
    """Of a leaf that is cut over the processes one holds the NaN; all raise, and name it."""
    well(trainer.connect())
    well(trainer.sync(trainer.old))
    before = trainer.live()
    path = next(p for p, v in trainer.new.items() if v.ndim > 1)
    for corner in (0, -1):
        value = trainer.new[path].copy()
        value[(corner,) * value.ndim] = np.nan
        bad = {**trainer.new, path: value}
        answers = trainer.sync(bad, timeout=60.0)
        assert all(isinstance(a, errors.NonFiniteError) for a in answers), answers
        assert all(f"{path}: 1 NaN of" in str(a) for a in answers), answers
        assert trainer.live() == before
    reports = trainer.sync(bad, nonfinite="allow")
    assert well(reports).verified
    assert all(
        len(r.nonfinite) == 1 and r.nonfinite[0].startswith(f"{path}: 1 NaN of")
        for r in reports
    )
    assert trainer.replica.nonfinite, "the leader informed the replica"
    more = lambda k: (
        {**cut(trainer.new, k), "more": cut(trainer.new, k)[path]}
        if k == 1
        else cut(trainer.new, k)
    )
    answers = trainer.all(lambda k: trainer.links[k].sync(more(k)))
    assert all(isinstance(a, errors.LayoutError) for a in answers), answers
    assert not well(trainer.sync(trainer.new)).nonfinite
    assert not trainer.replica.nonfinite


def test_a_stream_closed_before_its_next_order_does_not_hide_the_cause(
    trainer: TrainerProcesses, monkeypatch: pytest.MonkeyPatch
):
    """The leader is about to send an order when it hears of a failure elsewhere and closes its stream."""
    well(trainer.connect())
    well(trainer.sync(trainer.old))
    path = next(iter(trainer.new))
    leader = trainer.links[0]._coordinator
    settle, source_of, inside = leader.senders.settle, Source.of, threading.Event()

    def late_settle(*args: Any) -> None:
        settle(*args)
        inside.set()
        until(lambda: not leader.stream.is_open, "the stream to be closed")

    def late_source(plan: Any, params: Any) -> Source:
        if "more" in params:
            assert inside.wait(60)
        return source_of(plan, params)

    monkeypatch.setattr(leader.senders, "settle", late_settle)
    monkeypatch.setattr(Source, "of", late_source)
    more = lambda k: {
        **cut(trainer.new, k),
        **({"more": cut(trainer.new, k)[path]} if k == 1 else {}),
    }
    answers = trainer.all(lambda k: trainer.links[k].sync(more(k), timeout=60.0))
    assert all(isinstance(a, errors.LayoutError) for a in answers), answers
    assert well(trainer.sync(trainer.new)).verified


@pytest.mark.parametrize("phase", ["prepare", "move", "verify", "commit"])
def test_the_replica_fails(trainer: TrainerProcesses, phase: str):
    well(trainer.connect())
    trainer.replica.broken = phase
    answers = trainer.sync(trainer.new, timeout=60.0)
    assert all(isinstance(a, errors.SyncError) for a in answers), answers
    assert all(f"{phase} is broken" in str(a) for a in answers), answers
    trainer.replica.broken = ""
    assert well(trainer.sync(trainer.new)).verified
    assert trainer.live() == trainer.expected(trainer.new)


@pytest.mark.parametrize("who", [0, 1, 2])
def test_one_that_is_gone_ends_the_sync_and_the_next_connect_works(
    trainer: TrainerProcesses, who: int
):
    gone = threading.Event()

    def vanish(_: object) -> None:
        """As a kill does: its streams and channels end without a word."""
        link, lab = trainer.links[who], trainer.labs[who]
        lab.client.loop.loop.call_soon_threadsafe(
            link._coordinator.team._stream._call.cancel
        )
        if link._coordinator.stream._call is not None:
            lab.client.loop.loop.call_soon_threadsafe(
                link._coordinator.stream._call.cancel
            )
        link._coordinator.senders.close()
        gone.set()

    well(trainer.connect(wraps={who: jv.transport.Faults(hook=(1, vanish)).wrap}))
    answers = trainer.sync(trainer.new, timeout=60.0)
    assert gone.is_set()
    for k in {0, 1, 2} - {who}:
        assert isinstance(answers[k], errors.SyncError), answers
        assert (
            f"member {who} of 3" in str(answers[k])
            or "lost" in str(answers[k])
            or "closed" in str(answers[k])
        )
    assert trainer.replica.memory.version == 0, "the old version goes on"
    assert not trainer.replica.memory.dirty
    again = trainer.sync(trainer.new)
    assert all(
        isinstance(a, errors.SyncError) and "every one" in a.remedy for a in again
    ), again
    trainer.close()
    well(trainer.connect())
    assert well(trainer.sync(trainer.new)).verified
    assert trainer.live() == trainer.expected(trainer.new)


def test_what_one_process_cannot_do_alone(trainer: TrainerProcesses):
    well(trainer.connect())
    link = trainer.links[1]
    calls = (
        lambda: link.stepper({}),
        lambda: link.diff("w", {}),
        lambda: link.bisect("x"),
        lambda: link.catch_up({}),
    )
    for call in calls:
        with pytest.raises(
            errors.Unsupported, match="these are spread over 3"
        ) as caught:
            call()
        assert caught.value.remedy
