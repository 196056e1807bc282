"""Which replica takes a prompt: the policies in tables, and through the gateway over real gRPC with fake replicas."""

from __future__ import annotations

from collections import Counter

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jvlab as jv
from jvlab import errors
from jvlab.gateway import _routing as routing
from jvlab.gateway._routing import Board, Loads, RouteRequest
from jvlab.wire import _security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from tests.gateway.fake_lab import FakeLab
from tests.gateway.test_link_service import Trainer, machine, until


@pytest.mark.parametrize(
    ("in_flight", "avoid", "chosen"),
    [
        ({"p/0": 0, "p/1": 0}, (), "p/0"),
        ({"p/0": 3, "p/1": 2}, (), "p/1"),
        ({"p/10": 1, "p/9": 1}, (), "p/9"),  # the smaller number among equals
        ({"p/0": 0, "p/1": 5}, ("p/0",), "p/1"),
        ({"p/0": 0}, ("p/0",), None),
        ({}, (), None),
    ],
)
def test_least_in_flight(
    in_flight: dict[str, int], avoid: tuple[str, ...], chosen: str | None
):
    board = Board(in_flight)
    for _ in range(2):  # asking changes nothing
        assert (
            routing.least_in_flight(board, RouteRequest(avoid=frozenset(avoid)))
            == chosen
        )


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 5), st.booleans()), max_size=300
    ),
    st.integers(1, 7),
)
def test_the_board_agrees_with_a_search(moves: list[tuple[int, int, bool]], size: int):
    """However counts move, the least is what a search through all of them finds."""
    truth = {f"p/{i}": 0 for i in range(size)}
    board = Board(truth)
    for which, parts, avoid_first in moves:
        name = f"p/{which}"
        change = parts if which % 2 else -min(parts, truth.get(name, 0))
        board.count(name, change)
        if name in truth:
            truth[name] += change
        avoid = frozenset({"p/0"}) if avoid_first else frozenset()
        left = sorted(
            (count, name) for name, count in truth.items() if name not in avoid
        )
        assert board.least(avoid) == (left[0][1] if left else None)
        assert board.total == sum(truth.values())


KEY = routing.prefix_key("You are a helpful assistant.")
HOME, NEXT, *_ = Board(dict.fromkeys([f"p/{i}" for i in range(4)], 0)).walk(KEY)


@pytest.mark.parametrize(
    ("loads", "parts", "avoid", "chosen"),
    [
        ({}, 1, (), HOME),  # idle: always home
        ({HOME: routing.MIN_BOUND - 1}, 1, (), HOME),  # not busy yet
        ({HOME: routing.MIN_BOUND}, 1, (), NEXT),  # full, and the others are idle
        # one prompt with more samples than the room is still placed whole
        ({}, 100, (), HOME),
        ({HOME: 4}, 1, (HOME,), NEXT),
        # all busy alike: a fair share is free
        (dict.fromkeys(("p/0", "p/1", "p/2", "p/3"), 100), 1, (), HOME),
        (
            {
                name: 100 if name != HOME else 130
                for name in ("p/0", "p/1", "p/2", "p/3")
            },
            1,
            (),
            HOME,
        ),
        (
            {
                name: 100 if name != HOME else 150
                for name in ("p/0", "p/1", "p/2", "p/3")
            },
            1,
            (),
            NEXT,
        ),
    ],
)
def test_prefix_affinity(
    loads: dict[str, int], parts: int, avoid: tuple[str, ...], chosen: str
):
    board = Board({f"p/{i}": loads.get(f"p/{i}", 0) for i in range(4)})
    assert (
        routing.prefix_affinity(board, RouteRequest(parts, KEY, frozenset(avoid)))
        == chosen
    )


def test_where_nobody_is_below_the_bound_the_least_busy_takes_it():
    board = Board({"p/0": 30, "p/1": 20})
    # 60 is over 1.25 times (50 + 40) / 2
    assert routing.prefix_affinity(board, RouteRequest(40, KEY)) == "p/1"
    assert (
        routing.prefix_affinity(board, RouteRequest(40, KEY, frozenset({"p/0", "p/1"})))
        is None
    )
    assert routing.prefix_affinity(Board({}), RouteRequest(1, KEY)) is None


def test_imbalance_is_bounded_when_all_prompts_begin_alike():
    board = Board({f"p/{i}": 0 for i in range(5)})
    for _ in range(1000):
        name = routing.prefix_affinity(board, RouteRequest(1, KEY))
        assert name is not None
        board.count(name, 1)
        fair = board.total / 5
        assert all(
            board.load(f"p/{i}") <= max(routing.MIN_BOUND, routing.IMBALANCE * fair) + 1
            for i in range(5)
        )


def test_sessions_take_replicas_in_turn():
    board = Board({f"p/{i}": 0 for i in range(3)})
    begun = [routing.in_turn(k)(board, RouteRequest()) for k in range(6)]
    assert begun == ["p/0", "p/1", "p/2"] * 2
    avoid = RouteRequest(avoid=frozenset({"p/1"}))
    assert routing.in_turn(1)(board, avoid) == "p/2"
    board.count("p/1", 50)
    assert routing.in_turn(1)(board, RouteRequest()) == "p/2", "busier than others may"
    assert routing.in_turn(7)(Board({}), RouteRequest()) is None


def test_only_a_lost_replicas_prompts_move():
    keys = [routing.prefix_key(str(i)) for i in range(2000)]
    names = [f"p/{i}" for i in range(8)]
    before = {key: next(iter(Board(dict.fromkeys(names, 0)).walk(key))) for key in keys}
    less = Board(dict.fromkeys(names[:-1], 0))
    after = {key: next(iter(less.walk(key))) for key in keys}
    assert all(after[key] == home for key, home in before.items() if home != names[-1])
    shares = Counter(before.values())
    assert max(shares.values()) < 2 * len(keys) / 8, shares
    assert min(shares.values()) > len(keys) / 8 / 2, shares


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a" * 300 + "x", "a" * 300 + "y", True),
        ("short", "short", True),
        ("short", "shorter", False),
        (range(100), [*range(64), 7], True),
        (range(64), range(1, 65), False),
        ([1, 2], [1, 2], True),
    ],
)
def test_the_key_is_that_of_the_beginning(one, other, same: bool):
    assert (routing.prefix_key(one) == routing.prefix_key(other)) is same


def test_loads_keep_every_board_right_and_forget():
    loads = Loads()
    every = loads.board("p", 0, lambda: ["p/0", "p/1"])
    some = loads.board("p", 3, lambda: ["p/1"])
    loads.count("p", "p/1", 2)
    assert (every.load("p/1"), some.load("p/1"), loads.of("p/1")) == (2, 2, 2)
    assert loads.board("p", 0, list) is every
    loads.changed("p")
    assert loads.board("p", 0, lambda: ["p/1"]).load("p/1") == 2
    loads.forget("p/1")
    assert loads.of("p/1") == 2, "work that is still counted will be counted back"
    loads.count("p", "p/1", -2)
    loads.forget("p/1")
    assert loads.of("p/1") == 0
    for version in range(100):
        loads.board("q", version, list)
    assert len(loads._boards["q"]) <= Loads.MAX_BOARDS


# Through the gateway ------------------------------------------------------------------------------------------------


def homes(batch: jv.RolloutBatch) -> list[str]:
    return [sample.replica for sample in batch]


def test_prompts_that_begin_alike_go_to_one_replica(pool: jv.Pool):
    story, song = list(range(64)), list(range(1, 65))
    first = {
        tuple(p[:64]): r
        for p in (story, song)
        for r in homes(pool.generate([p], routing="prefix"))
    }
    for prompt in ([*story, 1], [*song, 1], [*story, 2, 3], [*song, 4]):
        assert (
            homes(pool.generate([prompt], n=2, routing="prefix"))
            == [first[tuple(prompt[:64])]] * 2
        )
    long = "once upon a time " * 20
    assert (
        len(
            {
                r
                for end in "abcdef"
                for r in homes(pool.generate(long + end, routing="prefix"))
            }
        )
        == 1
    )
    chat = [{"role": "system", "content": "rule " * 60}]
    turns = [
        [*chat, {"role": "user", "content": word}] for word in ("one", "two", "three")
    ]
    assert (
        len(
            {
                r
                for turn in turns
                for r in homes(pool.generate([turn], routing="prefix"))
            }
        )
        == 1
    )
    spread = homes(pool.generate([[*story, i] for i in range(64)], routing="prefix"))
    assert max(Counter(spread).values()) <= 1.25 * 32 + 1, (
        "many at once do not all wait for one replica"
    )
    assert set(
        homes(pool.generate([[*story, i] for i in range(4)], routing="least"))
    ) == {"p/0", "p/1"}


def test_a_pools_own_policy(client: jv.Lab, llama: str):
    pool = client.launch(llama, replicas=2, name="q", routing="prefix").wait(60)
    assert pool.status()["routing"] == "prefix"
    story = list(range(64))
    assert len(set(homes(pool.generate([[*story, i] for i in range(8)])))) == 1
    assert (
        len(set(homes(pool.generate([[*story, i] for i in range(8)], routing="least"))))
        == 2
    )
    assert len({s.replica for s in pool.stream([[*story, i] for i in range(8)])}) == 1


def test_names_that_are_no_policy(
    pool: jv.Pool, client: jv.Lab, fake_lab: FakeLab, llama: str
):
    for call in (pool.generate, pool.stream):
        with pytest.raises(
            errors.ConfigError, match="routing='fastest' is not known"
        ) as caught:
            call([[1]], routing="fastest")
        assert caught.value.remedy == "one of 'least', 'prefix'"
    with pytest.raises(errors.ConfigError, match="routing='' is not known"):
        client.launch(llama, routing="")
    assert list(client.pools) == ["p"]
    # callers that are not ours are told as well
    with grpc.insecure_channel(fake_lab.address) as channel:
        stub, metadata = rpc.LabStub(channel), _security.authorization(fake_lab.token)
        start = pb.GenerateStart(
            pool="p", prompts=[pb.Prompt(text="x")], n=1, routing="fastest"
        )
        with pytest.raises(grpc.RpcError) as refused:
            list(
                stub.Generate(
                    iter([pb.GenerateCall(start=start)]), timeout=30, metadata=metadata
                )
            )
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "one of 'least', 'prefix'" in (refused.value.details() or "")
        with pytest.raises(grpc.RpcError, match="is not known"):
            stub.Launch(
                pb.LaunchRequest(pool="r", routing="fastest"),
                timeout=30,
                metadata=metadata,
            )
        start = pb.GenerateStart(pool="nobody", prompts=[pb.Prompt(text="x")], n=1)
        with pytest.raises(grpc.RpcError, match="no pool is called 'nobody'"):
            list(
                stub.Generate(
                    iter([pb.GenerateCall(start=start)]), timeout=30, metadata=metadata
                )
            )


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "3", True])
def test_versions_that_make_no_sense(pool: jv.Pool, wrong):
    with pytest.raises(
        errors.ConfigError, match="min_version must be a whole number of at least 1"
    ):
        pool.generate([[1]], min_version=wrong)


def test_at_least_this_version(pool: jv.Pool, fake_lab: FakeLab):
    """A replica that a commit left behind serves those who can do with its version, and nobody else."""
    trainer = Trainer(fake_lab.address)
    try:
        trainer.open()
        assert trainer.sync(1).code == ""
        fake_lab.fakes["p/1"].corrupt = True  # staged: it keeps version 1
        assert trainer.sync(2, mode="staged", require="any").code == ""
        assert {name: m.version for name, m in machine(fake_lab).members.items()} == {
            "p/0": 2,
            "p/1": 1,
        }
        prompts = [[i + 1] for i in range(6)]
        assert set(homes(pool.generate(prompts))) == {"p/0"}, (
            "without a word only the pool's version counts"
        )
        assert set(homes(pool.generate(prompts, min_version=2))) == {"p/0"}
        both = pool.generate(prompts, min_version=1)
        assert set(homes(both)) == {"p/0", "p/1"}
        assert {(s.replica, s.versions[0]) for s in both} == {("p/0", 2), ("p/1", 1)}
        with pytest.raises(
            errors.EngineDirty, match="holds version 3 or a later one"
        ) as caught:
            pool.generate(prompts, min_version=3)
        assert "p/0 holds 2, p/1 holds 1" in str(caught.value)
        assert caught.value.remedy == "sync that version first, or ask for less"
    finally:
        trainer.close()


def test_a_call_waits_for_the_version_that_a_sync_is_bringing(
    pool: jv.Pool, fake_lab: FakeLab
):
    trainer = Trainer(fake_lab.address)
    try:
        trainer.open()
        assert trainer.do([pb.PREPARE], version=1).code == ""
        early = pool.client.loop.submit(
            pool.agenerate([[1], [2]], min_version=1, timeout=60)
        )
        with pytest.raises(errors.EngineDirty, match="version 2 or a later one"):
            pool.generate([[1]], min_version=2)  # this sync does not bring it
        assert not early.done()
        assert trainer.do([pb.HALT, pb.MOVE]).code == ""
        assert trainer.do([pb.VERIFY, pb.COMMIT, pb.GO_ON]).code == ""
        until(early.done)
        assert {v for s in early.result() for v in s.versions} == {1}
    finally:
        trainer.close()
