"""The processes of one trainer: who is one team, who hears what, and what becomes of the rest when one goes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import jvlab as jv
from jvlab import errors
from jvlab.gateway._link_service import TeamMember, Teams
from jvlab.sync._team import Team, together
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import TeamStream
from jvlab.wire._rpc_errors import CallFailed
from tests.gateway.fake_lab import FakeLab

LONG = 60.0


# The table -----------------------------------------------------------------------------------------------------------


Delivery = tuple[TeamMember, pb.TeamEvent]


class Table(Teams):
    """Teams that keep what they tell, and to whom."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Delivery] = []

    def tell(self, members: list[TeamMember], event: pb.TeamEvent) -> None:
        self.told += [(member, event) for member in members]

    def after(self, work: Callable[..., Any], *args: Any) -> list[Delivery]:
        self.told = []
        work(*args)
        return self.told


def join(
    table: Table, member: int, size: int = 3, team: str = "t", name: str = ""
) -> tuple[TeamMember, list[Delivery]]:
    table.told = []
    joined = table.join(
        pb.TeamJoin(
            pool="p", team=team, member=member, size=size, name=name or f"m{member}"
        )
    )
    return joined, table.told


def delivered(deliveries: list[Delivery]) -> list[tuple[str, str]]:
    """(to whom, what) in words."""
    words = []
    for member, event in deliveries:
        kind = event.WhichOneof("kind")
        text = {
            "over": event.over,
            "delivery": f"{event.delivery.member}: {event.delivery.payload.decode()}",
        }.get(str(kind))
        words.append(
            (
                member.name,
                text
                or ("complete" if event.roll.complete else ",".join(event.roll.names)),
            )
        )
    return words


def full(table: Table, size: int = 3) -> list[TeamMember]:
    return [join(table, k, size)[0] for k in range(size)]


def test_a_team_is_complete_when_every_member_is_there():
    table = Table()
    assert delivered(join(table, 2)[1]) == []
    assert delivered(join(table, 0)[1]) == [("m0", "m0,,m2")], (
        "the leader says whom it waits for"
    )
    other, deliveries = join(table, 1, team="another trainer")
    assert delivered(deliveries) == [], "two trainers are never mixed"
    assert delivered(join(table, 1)[1]) == [
        ("m2", "complete"),
        ("m0", "complete"),
        ("m1", "complete"),
    ]
    assert delivered(join(table, 0)[1]) == [("m0", "m0,,")], "the next one forms anew"
    assert table.after(table.leave, other) == []


def test_the_leader_speaks_to_all_and_all_to_the_leader():
    table = Table()
    members = full(table)
    assert delivered(table.after(table.deliver, members[0], b"go")) == [
        ("m1", "0: go"),
        ("m2", "0: go"),
    ]
    assert delivered(table.after(table.deliver, members[2], b"done")) == [
        ("m0", "2: done")
    ]
    assert delivered(table.after(table.deliver, members[2], b"bad", True)) == [
        ("m0", "2: bad"),
        ("m1", "2: bad"),
    ]


def test_one_that_leaves_ends_the_team_once():
    table = Table()
    members = full(table)
    over = "member 1 of 3 (m1) has gone"
    assert delivered(table.after(table.leave, members[1])) == [
        ("m0", over),
        ("m2", over),
    ]
    assert table.after(table.leave, members[0]) == []
    assert table.after(table.leave, members[2]) == []
    assert delivered(join(table, 0)[1]) == [("m0", "m0,,")]


def test_one_that_leaves_while_the_team_forms_may_come_back():
    table = Table()
    member, _ = join(table, 1)
    join(table, 0)
    assert delivered(table.after(table.leave, member)) == [("m0", "m0,,")]
    join(table, 1, name="back")
    assert [text for _, text in delivered(join(table, 2)[1])] == ["complete"] * 3


def test_a_replaced_member_leaves_quietly():
    table = Table()
    old, _ = join(table, 1, name="old")
    _, deliveries = join(table, 1, name="new")
    assert delivered(deliveries)[0] == ("old", "new joined as member 1 too, after old")
    assert table.after(table.leave, old) == [], (
        "and its end says nothing about the new one"
    )
    join(table, 0)
    assert [text for _, text in delivered(join(table, 2)[1])] == ["complete"] * 3


def test_what_is_refused():
    table = Table()
    for member, size in ((0, 1), (3, 3), (0, 0)):
        with pytest.raises(CallFailed):
            join(table, member, size)
    member, _ = join(table, 0)
    with pytest.raises(CallFailed, match="before all members"):
        table.deliver(member, b"early")


# Over a real gateway -------------------------------------------------------------------------------------------------


@pytest.fixture
def labs(fake_lab: FakeLab) -> Iterator[list[jv.Lab]]:
    """Three processes' labs, here in one."""
    made = [jv.Lab.attach(fake_lab.address, fake_lab.token) for _ in range(3)]
    yield made
    for lab in made:
        lab._leave()


def run(labs: list[jv.Lab], work: Callable[[Team], Any], size: int = 3) -> list[Any]:
    """The same in every member; results or errors, in their order. Teams are closed afterwards."""

    def one(member: int) -> Any:
        team = Team(
            labs[member].client, "p", list(range(10, 10 + size)), 10 + member, "job"
        )
        try:
            team.assemble(LONG)
            return work(team)
        except errors.JvlabError as error:
            return error
        finally:
            team.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def exchange(team: Team) -> Any:
    if team.leads:
        heard = [message["value"] for message in team.gather("begin", LONG)]
        team.send("go", total=sum(heard))
        return sum(heard)
    team.send("begin", value=team.process)
    return team.receive("go", LONG)["total"]


def test_rounds(labs: list[jv.Lab]):
    def work(team: Team) -> list[int]:
        out = []
        for _ in range(3):
            with team.round("sync"):
                out.append(exchange(team))
        return out

    assert run(labs, work) == [[23, 23, 23]] * 3


@pytest.mark.parametrize("who", [0, 1, 2])
def test_whoever_fails_fails_all_and_the_next_round_is_well(
    labs: list[jv.Lab], who: int
):
    def work(team: Team) -> Any:
        closed = threading.Event()
        try:
            with team.round("sync"), team.watching(closed.set):
                if team.member == who:
                    raise errors.VerifyError("bits differ", remedy="look at them")
                assert closed.wait(LONG), "its own work is ended from outside"
                # as an outlet would
                raise errors.TransportError("this end is closed", reason="closed here")
        except errors.VerifyError as error:
            said = error.message, error.remedy
        with team.round("sync"):
            return said, exchange(team)

    found = run(labs, work)
    assert [total for _, total in found] == [23] * 3
    for member, (said, _) in enumerate(found):
        text = "bits differ" if member == who else f"trainer process {10 + who} ("
        assert said[0].startswith(text)
        assert said[0].endswith("bits differ")
        assert said[1] == "look at them"


def test_what_was_said_counts_even_if_who_said_it_has_left(labs: list[jv.Lab]):
    def work(team: Team) -> Any:
        with team.round("sync"):
            if team.leads:
                return exchange(team)
            team.send("begin", value=team.process)
            assert team._stream.wait(lambda: team.over, LONG), (
                "the leader has its part, and goes"
            )
            return team.receive("go", LONG)["total"]

    assert run(labs, work) == [23] * 3


def test_one_that_goes_ends_the_waits_of_the_others(labs: list[jv.Lab]):
    def work(team: Team) -> Any:
        with team.round("sync"):
            if team.member == 1:
                team.close()
                return None
            return exchange(team)

    found = run(labs, work)
    assert found[1] is None
    for error in (found[0], found[2]):
        assert isinstance(error, errors.SyncError)
        assert "member 1 of 3 (python" in error.message
        assert "every one" in error.remedy


def test_one_that_is_late_is_named(labs: list[jv.Lab]):
    def work(team: Team) -> Any:
        with team.round("sync"):
            if team.member == 1:
                return team.receive("go", LONG)
            if team.leads:
                return team.gather("begin", 0.5)
            team.send("begin")
            return team.receive("go", LONG)

    found = run(labs, work)
    assert all(isinstance(error, errors.DeadlineExceeded) for error in found)
    assert "trainer process 11" in str(found[0])
    assert "trainer process 12" not in str(found[0])


def test_different_things_at_once(labs: list[jv.Lab]):
    def work(team: Team) -> Any:
        with team.round("verify" if team.member == 2 else "sync"):
            return exchange(team)

    for error in run(labs, work):
        assert isinstance(error, errors.SyncError)
        assert "is at verify" in error.message


def test_one_that_does_not_come(labs: list[jv.Lab]):
    team = Team(labs[0].client, "p", [0, 1], 0, "job")
    with pytest.raises(
        errors.DeadlineExceeded, match="2 trainer processes; 1 did not connect"
    ):
        team.assemble(0.3)
    team.close()


class Device:
    """As jax describes one."""

    def __init__(self, id: int, process: int) -> None:
        self.id, self.process_index, self.platform = id, process, "cpu"


class Array:
    """As much of a sharded array as `together` looks at."""

    def __init__(self, processes: list[int], own: int) -> None:
        devices = {Device(p, p) for p in processes}
        mine = {d for d in devices if d.process_index == own}
        self.sharding = SimpleNamespace(device_set=devices, addressable_devices=mine)


def test_who_is_a_team_is_read_from_the_shardings(labs: list[jv.Lab]):
    with together(labs[0].client, {"w": Array([4], 4)}, "p") as team:
        assert team is None
    nowhere = together(labs[0].client, {"w": Array([1, 2], 0)}, "p")
    with (
        pytest.raises(errors.ConfigError, match=r"holds none.*processes \[1, 2\]"),
        nowhere,
    ):
        pass

    def one(member: int) -> Any:
        try:
            with together(
                labs[member].client, {"w": Array([3, 5, 7], (3, 5, 7)[member])}, "p"
            ) as team:
                assert team is not None
                if member == 1:
                    raise errors.LayoutError("a leaf is missing")
                team.gather("plan", LONG) if team.leads else team.receive(
                    "agreed", LONG
                )
        except errors.LayoutError as error:
            return error.message

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(one, range(3)))
    assert found[1] == "a leaf is missing"
    assert all(
        text.startswith("trainer process 5 (python") for text in (found[0], found[2])
    )


def test_signs_of_life_beside_a_long_message_lose_none(labs: list[jv.Lab]):
    """Threads share a stream: a batch of a run takes a while, and beats do not wait for it."""
    streams = [
        TeamStream(labs[k].client, pb.TeamJoin(pool="p", team="t", member=k, size=2))
        for k in range(2)
    ]
    for stream in streams:
        assert stream.wait(lambda of=stream: of.complete, LONG)

    def send_long() -> None:
        for _ in range(8):
            streams[0].send({"kind": "order", "data": "x" * (8 << 20)})

    count = 8
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(send_long)
        while not long.done():
            streams[0].send({"kind": "alive"})
            count += 1
            time.sleep(0.005)
        long.result(0)
    arrived = lambda: len(streams[1].messages(0)) == count
    assert streams[1].wait(arrived, LONG)
    for stream in streams:
        stream.close()


def test_nothing_stays_when_teams_are_over(labs: list[jv.Lab], fake_lab: FakeLab):
    run(labs, lambda team: None)
    until = time.monotonic() + LONG
    open_ones = lambda: [
        t for t in asyncio.all_tasks(fake_lab._loop) if "_listen" in repr(t.get_coro())
    ]
    while fake_lab.do(open_ones):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not fake_lab.gateway.teams._forming
