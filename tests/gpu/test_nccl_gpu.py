"""nccl and nixl, from GPU memory to GPU memory, on one GPU: any M → N bit-exact, as fast as NCCL alone, their ends."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jvlab.transport._nixl import installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
SECONDS = 20.0


class Team:
    """Processes that are kept for all tests: starting one takes seconds."""

    def __init__(self, wire: str) -> None:
        self.wire = wire
        self.made = 0
        self.trainers: list[Any] = []
        self.ranks: list[Any] = []

    def need(self, m: int, n: int) -> tuple[list[Any], list[Any]]:
        """So many trainers and ranks; what is missing is started, all at once."""
        new = []
        for kind, members, count in (
            ("trainer", self.trainers, m),
            ("rank", self.ranks, n),
        ):
            for unfit in [member for member in members if not member.fit]:
                members.remove(unfit)
                unfit.end()
            while len(members) < count:
                members.append(self._member(kind))
                new.append(members[-1])
        for member in new:
            member.wait(60)
        return self.trainers[:m], self.ranks[:n]

    def _member(self, kind: str) -> Any:
        from tests.gpu.nccl_team import Member

        self.made += 1
        return Member(kind, f"host{self.made}")

    def lose_rank(self, number: int) -> None:
        self.ranks.pop(number).end()

    def connect(
        self, which: str, m: int, n: int, kill: Any = None
    ) -> tuple[list[Any], list[Any]]:
        trainers, ranks = self.need(m, n)
        for k, t in enumerate(trainers):
            last = kill if k == m - 1 else None
            t.start("listen", which, m, n, k, last, self.wire)
        endpoints = [t.wait() for t in trainers]  # by trainer, then rank
        for t in trainers:
            t.start("ready", SECONDS)
        for k, r in enumerate(ranks):
            r.start(
                "open", which, m, n, k, [per_rank[k] for per_rank in endpoints], SECONDS
            )
        said = [member.answer() for member in (*ranks, *trainers)]
        wrong = [what for kind, what in said if kind == "error"]
        assert not wrong, "\n".join(wrong)
        return trainers, ranks

    def sync(
        self,
        trainers: list[Any],
        ranks: list[Any],
        version: int,
        mode: str,
        digest: bool = True,
    ) -> Any:
        """What the trainers say they sent, and the digests that the ranks found."""
        for r in ranks:
            r("move", version, mode, SECONDS, digest)
        for t in trainers:
            t.start("send", version, SECONDS, digest)
        sent = [t.wait() for t in trainers]
        found: dict[int, int] = {}
        for r in ranks:
            found |= r("finish", SECONDS)
        return sent, found


@pytest.fixture(scope="module", params=["nccl", "nixl"])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    if request.param == "nixl" and not installed():
        pytest.skip("nixl is not installed here")
    made = Team(request.param)
    yield made
    for member in (*made.trainers, *made.ranks):
        member.end()


def close(trainers: list[Any], ranks: list[Any]) -> None:
    for member in (*trainers, *ranks):
        member.start("close")
    for member in (*trainers, *ranks):
        member.answer()


def summed(sent: list[Any]) -> dict[int, int]:
    out: dict[int, int] = {}
    for part in sent:
        for t, value in part["digests"].items():
            out[t] = (out.get(t, 0) + value) % 2**64
    return out


@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 2), (2, 3), (4, 1)])
def test_bit_exact(team: Team, m: int, n: int) -> None:
    from tests.gpu.nccl_team import small, wanted

    trainers, ranks = team.connect("small", m, n)
    addresses = [r("addresses") for r in ranks]
    blank = before = [r("memory") for r in ranks]
    for version, mode in ((1, "direct"), (2, "staged")):
        sent, found = team.sync(trainers, ranks, version, mode)
        assert found == summed(sent)
        if mode == "staged":
            assert [r("memory") for r in ranks] == before, (
                "live memory is untouched until the commit"
            )
        for r in ranks:
            r("commit")
        before = [r("memory") for r in ranks]
        assert before != blank
        for k, held in enumerate(before):
            world, plan = small(m, n)
            assert held == wanted(world, plan, k, version)
    assert [r("addresses") for r in ranks] == addresses
    close(trainers, ranks)


def test_as_fast_as_nccl_alone(team: Team) -> None:
    from tests.gpu.nccl_team import large

    _, plan = large(1, 1)
    sizes = plan.link(0, 0, 0).bucket_sizes.tolist()
    trainers, ranks = team.connect("large", 1, 1)
    team.sync(trainers, ranks, 1, "direct")  # compiles the kernels
    alone, ours, verified = [], [], []
    for round_ in range(2):
        identity = trainers[0]("bare_id")
        trainers[0].start("bare", identity, sizes)
        alone.append(ranks[0]("bare", identity, sizes))
        trainers[0].wait()
        for member in (trainers[0], ranks[0]):
            member("bare_end")
        sent, _ = team.sync(trainers, ranks, 2 + 2 * round_, "direct", digest=False)
        ours.append(sent[0]["seconds"]["move"])
        sent, found = team.sync(trainers, ranks, 3 + 2 * round_, "direct")
        assert found == summed(sent)
        verified.append(sent[0]["seconds"]["sent"])
    close(trainers, ranks)
    nbytes = sum(sizes)
    rates = {
        k: nbytes / min(v) / 1e9
        for k, v in (("nccl", alone), ("jvlab", ours), ("jvlab verified", verified))
    }
    print(team.wire)
    print(
        json.dumps(
            {
                "bytes": nbytes,
                "buckets": len(sizes),
                "gb_per_s": rates,
                "seconds": [alone, ours, verified],
            }
        )
    )
    assert rates["jvlab"] >= 0.9 * rates["nccl"]


def test_a_killed_receiver_ends_the_others_and_a_fresh_connect_works(
    team: Team,
) -> None:
    _, ranks = team.need(2, 2)
    trainers, ranks = team.connect("many", 2, 2, kill=(3, ranks[1].pid))
    for r in ranks:
        r("move", 1, "direct", SECONDS)
    start = time.monotonic()
    for t in trainers:
        t.start("send", 1, SECONDS)
    said = [t.answer(SECONDS) for t in trainers]
    took = time.monotonic() - start
    kind, _ = ranks[0].start("finish", SECONDS).answer(SECONDS)
    others = time.monotonic() - start
    print(
        json.dumps(
            {
                "trainers_s": took,
                "other_rank_s": others,
                "said": [str(s[1]).split("\n")[0] for s in said],
            }
        )
    )
    assert "error" in [s[0] for s in said], (
        "who had sent all its bytes by then is done; nobody waits for ever"
    )
    assert any("rank 1" in str(s[1]) for s in said)
    assert kind in ("error", "ok"), (
        "it had all of its own buckets, or it was told; it does not wait for ever"
    )
    assert took < 15
    assert others < 15
    close(trainers, ranks[:1])
    team.lose_rank(1)
    trainers, ranks = team.connect("many", 2, 2)
    sent, found = team.sync(trainers, ranks, 2, "direct")
    assert found == summed(sent)
    close(trainers, ranks)


def test_a_receiver_killed_while_it_joins_is_noticed(team: Team) -> None:
    if team.wire != "nccl":
        pytest.skip("its handshake is that of nccl")
    (trainer,), (_, other) = team.need(1, 2)
    (endpoint,) = trainer("listen", "small", 1, 1, 0)
    trainer.start("ready", SECONDS)
    other("half_open", endpoint)  # it says hello, is welcomed, and never joins
    start = time.monotonic()
    team.lose_rank(1)
    kind, what = trainer.answer(SECONDS)
    took = time.monotonic() - start
    print(json.dumps({"half_open_s": took, "said": what.split("\n")[0]}))
    assert kind == "error", what
    assert took < 8
    trainer("close")
    trainers, ranks = team.connect("small", 1, 1)
    sent, found = team.sync(trainers, ranks, 1, "direct")
    assert found == summed(sent)
    close(trainers, ranks)


def test_connecting_again_and_again_leaks_nothing(team: Team) -> None:
    standing = []
    for _ in range(6):
        trainers, ranks = team.connect("small", 1, 1)
        sent, found = team.sync(trainers, ranks, 1, "direct")
        assert found == summed(sent)
        close(trainers, ranks)
        standing.append(ranks[0]("standing"))
    print(json.dumps({"standing": standing}))
    assert standing[-1]["threads"] <= standing[1]["threads"]
    assert standing[-1]["files"] <= standing[1]["files"] + 1, (
        "a leak would add one with each connection"
    )
    assert standing[-1]["used"] <= standing[1]["used"] + (64 << 20)
