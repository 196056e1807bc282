"""Links to a pool's model and to its draft model: they take turns, and drafts alone make no replica one that serves."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from jvlab import errors
from jvlab._deadline import Deadline
from jvlab.sync import _connections
from jvlab.sync._coordinator import DRAFT, MODEL, Coordinator
from jvlab.sync._meaning import MeaningCheck
from jvlab.wire import jvlab_pb2 as pb


class FakeCoordinator(Coordinator):
    """Opens nothing; says in `told` when channels are opened and closed."""

    def __init__(self, pool: Any, part: str, told: list[str]) -> None:
        agreed: Any = SimpleNamespace(
            part=part, folder="", meaning=None, plan=SimpleNamespace(replicas=1)
        )
        super().__init__(pool, agreed, None)
        self._told = told
        self._part = part

    def _ready_now(self, only: Any, deadline: Deadline) -> Any:
        return {"p/0": (0, 1)}

    def _is_open_to(self, ready: Any) -> bool:
        return self.senders is not None

    def _check_replicas(self, ready: Any, deadline: Deadline) -> None:
        return

    def _make_senders(self, replicas: Any, process: int | None = None) -> Any:
        self._told.append(f"open {self._part}")
        return SimpleNamespace(
            replicas={}, close=lambda: self._told.append(f"close {self._part}")
        )

    def _take_pool(self, *_: Any) -> None:
        return


@pytest.fixture
def pool() -> Any:
    replicas = [
        pb.ReplicaStatus(replica=f"p/{i}", state=pb.READY, version=4) for i in range(2)
    ]
    stream = SimpleNamespace(close=lambda: None)
    return SimpleNamespace(
        client=SimpleNamespace(link=lambda: stream),
        snapshot=pb.PoolStatus(pool="p", version=4, replicas=replicas),
        status=lambda timeout: None,
    )


def test_an_engine_has_one_of_them_open(pool: Any):
    told: list[str] = []
    model, draft, later = (
        FakeCoordinator(pool, part, told) for part in (MODEL, DRAFT, MODEL)
    )
    model.ensure_open(Deadline(5))
    draft.take_turns(model)
    draft.ensure_open(Deadline(5))
    draft.ensure_open(Deadline(5))
    model.ensure_open(Deadline(5))
    taken = ["close model", "open draft", "close draft", "open model"]
    assert told == ["open model", *taken]
    told.clear()
    model.close()
    later.take_turns(draft)
    later.ensure_open(Deadline(5))
    draft.ensure_open(Deadline(5))
    assert told == ["close model", "open model", "close model", "open draft"], (
        "a link that was replaced is left alone"
    )


def test_a_sync_of_one_is_waited_for_by_the_other(pool: Any):
    model, draft = (FakeCoordinator(pool, part, []) for part in (MODEL, DRAFT))
    draft.take_turns(model)
    found: list[BaseException] = []

    def other() -> None:
        try:
            with draft.exclusive(Deadline(0.05)):
                pass
        except errors.SyncDeadline as error:
            found.append(error)

    with model.exclusive(Deadline(5)):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
    assert len(found) == 1


@pytest.mark.parametrize("wrong", ["dirty", "behind"])
def test_drafts_do_not_make_a_replica_serve_old_weights(pool: Any, wrong: str):
    draft = FakeCoordinator(pool, DRAFT, [])
    draft._refuse_old_model(Deadline(5))  # all hold the pool's version
    replica = pool.snapshot.replicas[1]
    if wrong == "dirty":
        replica.dirty = True
    else:
        replica.version = 3
    with pytest.raises(errors.SyncError, match="p/1 does not hold") as caught:
        draft._refuse_old_model(Deadline(5))
    assert "lab.connect(params, pool).sync(params)" in caught.value.remedy
    with pytest.raises(errors.Unsupported, match="behind"):
        draft.catch_up({}, "direct", Deadline(5))


@pytest.mark.parametrize(
    ("facts", "adapter", "word"),
    [
        (pb.EngineFacts(), False, "does not draft tokens"),
        (pb.EngineFacts(speculative="ngram"), False, "drafts by ngram"),
        (pb.EngineFacts(draft_model="d", speculative="draft_model"), True, "adapter"),
    ],
)
def test_what_has_no_draft_model_says_so(
    facts: pb.EngineFacts, adapter: bool, word: str
):
    pool: Any = SimpleNamespace(name="p", model="m", facts=lambda deadline: facts)
    assert _connections._folder_of(MODEL, adapter, pool, Deadline(5)) == "m"
    with pytest.raises(errors.Unsupported, match=word) as caught:
        _connections._folder_of(DRAFT, adapter, pool, Deadline(5))
    assert caught.value.remedy
    if facts.draft_model:
        assert _connections._folder_of(DRAFT, False, pool, Deadline(5)) == "d"


def test_scores_of_the_model_say_nothing_of_its_drafts():
    """`pool.score` computes with the model: asked about drafts, it would call every right mapping wrong."""
    agreed: Any = SimpleNamespace(
        part=DRAFT, mapping=SimpleNamespace(bindings=(), stacked={})
    )
    check = MeaningCheck(agreed)
    with pytest.raises(errors.ConfigError, match="returns none of its draft"):
        check.configure("function", None, None)
    check.way = "auto"
    pool: Any = None  # nobody is asked
    check.after_sync(pool, 1, {}, 1.0, lambda: pytest.fail("marked dirty"))
    assert check.meaning.state == "unchecked"
