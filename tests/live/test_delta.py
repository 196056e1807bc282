"""Sparse syncs on real vLLM: bit for bit what a whole sync leaves, and every way in which peers' deltas went wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jvlab as jv
from jvlab import errors
from jvlab._deadline import Deadline
from jvlab.bench._delta import run_bench_adam
from jvlab.layout import _sparse
from jvlab.sync._connections import Connections
from jvlab.sync._pack import LinkPack
from jvlab.wire._client import LinkStream
from jvlab.wire._sync_words import Phase

pytestmark = pytest.mark.engine
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8}
BUCKET = 0.25  # MiB: several buckets


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("delta") / "fault.json"


@pytest.fixture(scope="module")
def packed(lab: jv.Lab, llama: str, fault_file: Path) -> Iterator[jv.Pool]:
    """Two replicas of vLLM's default on a CPU, which packs linear weights."""
    env = {"JVLAB_FAULT": str(fault_file)}
    pool = lab.launch(llama, name="packed", replicas=2, env=env)
    yield pool
    pool.close(300)


@pytest.fixture(scope="module")
def live(lab: jv.Lab, llama: str, packed: jv.Pool) -> Iterator[jv.Pool]:
    """Live weights on two ranks, and slots for adapters."""
    pool = lab.launch(
        llama,
        name="live",
        tensor_parallel=2,
        engine={"enable_lora": True, "max_lora_rank": 8},
        env={"JVLAB_LIVE_WEIGHTS": "1"},
    )
    packed.wait()
    pool.wait()
    yield pool
    pool.close(300)


@pytest.fixture(scope="module")
def policy(llama: str) -> jv.Policy:
    return jv.Policy.from_pretrained(llama, mesh=jv.mesh(fsdp=2))


def trained(params: Any, seed: int, share: float = 0.01) -> Any:
    """The parameters with a share of their values changed."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def step(leaf: Any, key: Any) -> Any:
        return jnp.where(
            jax.random.uniform(key, leaf.shape) < share, leaf * 1.25 + 0.01, leaf
        )

    new = [
        jax.device_put(step(x, k), x.sharding)
        for x, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, new)


def connect(lab: jv.Lab, pool: jv.Pool, params: Any, **options: Any) -> jv.Link:
    return lab.connect(params, pool, rules="policy", bucket_mib=BUCKET, **options)


def held_exactly(link: jv.Link, params: Any) -> bool:
    """By digests of live memory, and by bytes of what has live memory."""
    names = ("embed", "final_norm")
    paths = [leaf.path for leaf in link.plan.leaves]
    leaves = [p for p in paths if any(n in p for n in names)]
    exact = [d for p in leaves for d in link.diff(p, params)]
    assert exact
    return bool(link.verify(params)) and not any(d.share_changed for d in exact)


def check(link: jv.Link, params: Any, report: Any, low: float = 0.005) -> None:
    assert report.delta, report.why_full
    assert report.verified
    assert report.bytes < report.full_bytes / 5
    assert low < report.changed < 0.02
    assert "changed" in repr(report)
    assert held_exactly(link, params)


@pytest.mark.parametrize(
    ("transport", "mode"),
    [
        ("shm", "direct"),
        ("shm", "staged"),
        ("tcp", "staged"),
        pytest.param("tcp", "direct", marks=pytest.mark.soak),
        pytest.param("disk", "direct", marks=pytest.mark.soak),
        pytest.param("disk", "staged", marks=pytest.mark.soak),
    ],
)
def test_changes_leave_what_a_whole_sync_leaves(
    lab: jv.Lab, packed: jv.Pool, live: jv.Pool, policy: Any, transport: str, mode: str
) -> None:
    # every transport on packed weights, and the first on live ones too
    for pool in (packed, live) if transport == "shm" else (packed,):
        params = policy.params
        with connect(lab, pool, params, transport=transport) as link:
            first = link.sync(params, mode=mode, delta="auto")
            assert not first.delta
            assert "no earlier sync" in first.why_full
            for seed in (1, 2):
                params = trained(params, seed)
                report = link.sync(params, mode=mode, delta="auto")
                check(link, params, report)
                assert report.why_full == ""
            tokens = pool.generate([[5, 6, 7]], **GREEDY)[0].token_ids.tolist()
            whole = link.sync(params, mode=mode)
            assert (whole.delta, whole.why_full) == (False, 'delta="never"')
            assert whole.digests == report.digests
            again = pool.generate([[5, 6, 7]], **GREEDY)[0].token_ids.tolist()
            assert again == tokens


def test_modes_and_lengths_of_changes_mix(
    lab: jv.Lab, packed: jv.Pool, policy: Any
) -> None:
    params = policy.params
    with connect(lab, packed, params) as link:
        link.sync(params, delta="always")
        for seed, (mode, share) in enumerate(
            [("staged", 0.3), ("direct", 0.0), ("staged", 0.01), ("direct", 1.0)]
        ):
            params = trained(params, seed, share)
            report = link.sync(params, mode=mode, delta="always")
            assert report.verified
            assert report.delta == (share < 1), report.why_full
            assert report.changed is not None
            assert abs(report.changed - share) < 0.05
            assert held_exactly(link, params)
        assert "smaller" in report.why_full
        with pytest.raises(errors.ConfigError, match='verify="off" does not prove'):
            link.sync(params, delta="always", verify="off")
        assert 'verify="off"' in link.sync(params, delta="auto", verify="off").why_full
        assert not link.sync(params, delta="auto").delta, "that left nothing known"
        with pytest.raises(errors.ConfigError, match="delta="):
            link.sync(params, delta="sometimes")


# What went wrong elsewhere --------------------------------------------------------------------------------------------


def test_a_commit_that_failed_or_was_not_heard_of(
    lab: jv.Lab, live: jv.Pool, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's copy never runs ahead of an engine."""
    params = policy.params
    steps = LinkStream.steps

    def failing(before: bool) -> Any:
        def order(self: Any, phases: Any, *args: Any, **more: Any) -> Any:
            if Phase.COMMIT not in phases:
                return steps(self, phases, *args, **more)
            if not before:
                steps(self, phases, *args, **more)
            self.close()
            raise errors.SyncError("the connection broke", remedy="sync again")

        return order

    with connect(lab, live, params) as link:
        for mode in ("staged", "direct"):
            for before in (True, False):
                link.sync(params, mode=mode, delta="auto")
                lost = trained(params, 3)
                with monkeypatch.context() as patched:
                    patched.setattr(LinkStream, "steps", failing(before))
                    with pytest.raises(errors.SyncError, match="connection broke"):
                        link.sync(lost, mode=mode, delta="auto")
                params = trained(lost, 4)
                report = link.sync(params, mode=mode, delta="auto")
                # only a staged sync that never committed left the base as it was
                assert report.delta == (mode == "staged" and before), report.why_full
                if not report.delta:
                    assert "live/0 did not hold the base" in report.why_full
                assert report.verified
                assert held_exactly(link, params)


def test_a_base_that_is_not_what_the_engine_holds(
    lab: jv.Lab, packed: jv.Pool, policy: Any
) -> None:
    """One bit of the copy differs: the element is thought to be there already, and missing is found by digest."""
    params = policy.params
    with connect(lab, packed, params) as link:
        for mode in ("direct", "staged"):
            link.sync(params, mode=mode, delta="auto")
            new = trained(params, 5)
            held = link._coordinator._held
            senders = link._coordinator.senders
            assert senders is not None
            pack = senders.channels[0].jobs[0].pack
            box = pack.buckets[0][0][1]
            source = senders.source(new)
            values = np.ascontiguousarray(pack.values(0, source)[0]).reshape(-1)
            part = held.buckets[pack.fingerprint, 0][box.at : box.at + box.nbytes]
            where = _sparse.changed(values, part)[0]
            part.view(values.dtype)[where] = values[where]
            report = link.sync(new, mode=mode, delta="auto")
            assert not report.delta
            assert "a sparse sync was not proven" in report.why_full
            assert report.why_full in report.notes
            assert held_exactly(link, new)
            params = trained(new, 6)
            check(link, params, link.sync(params, mode=mode, delta="auto"))


@pytest.mark.parametrize(
    "fault",
    [
        "missed",
        "elsewhere",
        pytest.param("doubled", marks=pytest.mark.soak),
        pytest.param("moved", marks=pytest.mark.soak),
    ],
)
def test_a_wrong_element_is_found(
    lab: jv.Lab,
    packed: jv.Pool,
    policy: Any,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """An element is left out, sent twice instead of another, sent to its neighbour, or into the next fused tensor."""
    params = policy.params
    encode = LinkPack.encode
    planted = []

    def wrong(self: Any, bucket: int, values: Any, held: Any) -> Any:
        encoded = encode(self, bucket, values, held)
        if planted or not encoded.sparse:
            return encoded
        boxes = [box for _, box in self.buckets[bucket]]
        sizes = [int(np.prod(box.shape)) for box in boxes]
        items = [box.nbytes // n for box, n in zip(boxes, sizes, strict=True)]
        data = encoded.payload.copy()
        parts = _sparse.read_sections(data, len(data), sizes, items)
        part = next((p for p in parts if p.count > 1 and not p.masked), None)
        if part is None or part.whole:
            return encoded
        positions = data[part.at : part.at + part.index_bytes].view(np.uint32)
        if fault in ("missed", "doubled"):  # as many as counted: another comes twice
            first, second = (0, 1) if fault == "missed" else (1, 0)
            positions[first] = positions[second]
            of = data[part.values_at :].view(f"u{part.item}")
            of[first] = of[second]
        elif fault == "moved":
            positions[0] += 1 if positions[0] + 1 < positions[1] else -1
        else:
            positions[0] = (int(positions[0]) + part.elements // 2) % part.elements
        planted.append(part)
        return dataclasses.replace(encoded, payload=data)

    with connect(lab, packed, params) as link:
        link.sync(params, mode="staged", delta="auto")
        params = trained(params, 7)
        monkeypatch.setattr(LinkPack, "encode", wrong)
        report = link.sync(params, mode="staged", delta="auto")
        assert planted
        assert not report.delta
        assert "a sparse sync was not proven" in report.why_full
        assert held_exactly(link, params)


def test_changes_are_not_added_twice(lab: jv.Lab, packed: jv.Pool, policy: Any) -> None:
    params = policy.params
    faults = jv.transport.Faults(twice=1)
    faults._left["twice"] = 0
    with connect(lab, packed, params, faults=faults.wrap) as link:
        link.sync(params, delta="auto")
        params = trained(params, 8)
        faults._left["twice"] = 1
        with pytest.raises(errors.TransportError, match="arrived twice"):
            link.sync(params, delta="auto")
        assert [fired.fault for fired in faults.fired] == ["twice"]
        assert faults.fired[0].header.nbytes < 2**18 / 2, "a sparse one"
        report = link.sync(params, delta="auto")
        assert not report.delta, "they are dirty"
        assert held_exactly(link, params)
        params = trained(params, 24)
        check(link, params, link.sync(params, delta="auto"))


def test_memory_that_changed_under_the_base(
    lab: jv.Lab, packed: jv.Pool, policy: Any, fault_file: Path
) -> None:
    """A bit of an engine flips after the commit, in a parameter that the next sync does not touch."""
    params = policy.params
    with connect(lab, packed, params) as link:
        flip = {"who": "worker", "phase": "committed", "do": "flip"}
        fault_file.write_text(json.dumps({**flip, "parameter": "model.norm.weight"}))
        link.sync(params, delta="auto")
        assert not fault_file.exists()
        assert not link.verify(params)
        report = link.sync(params, delta="auto")
        assert report.bytes == report.full_bytes
        assert "a sparse sync was not proven" in report.why_full
        assert "model.norm.weight" in report.why_full
        assert held_exactly(link, params)


def test_a_newcomer(lab: jv.Lab, packed: jv.Pool, policy: Any) -> None:
    params = policy.params
    with connect(lab, packed, params) as link:
        link.sync(params, delta="auto")
        packed.scale(1)
        packed.scale(2)
        params = trained(params, 9)
        report = link.sync(params, mode="staged", delta="auto")
        assert "did not hold the base" in report.why_full
        assert held_exactly(link, params)
        params = trained(params, 10)
        report = link.sync(params, mode="staged", delta="auto")
        assert report.why_full == ""
        check(link, params, report)


class Flips:
    """Once armed, the next sparse bucket has a bit flipped in its last value that is not zero."""

    def __init__(self) -> None:
        self.armed = False

    def wrap(self, sender: Any) -> Any:
        send = sender.send

        def flipping(header: Any, fill: Any, deadline: float) -> None:
            flips = self.armed
            self.armed = False

            def wrong(view: memoryview) -> None:
                fill(view)
                last = int(np.flatnonzero(np.frombuffer(view, np.uint8))[-1])
                view[last] ^= 1

            send(header, wrong if flips else fill, deadline)

        sender.send = flipping
        return sender


def test_a_replica_left_behind(lab: jv.Lab, packed: jv.Pool, policy: Any) -> None:
    """One replica gets a flipped bit, and stays on its version; the other's next sync is sparse, its own whole."""
    params = policy.params
    faults = Flips()
    with connect(lab, packed, params, faults=faults.wrap, mode="staged") as link:
        link.sync(params, delta="auto")
        params = trained(params, 21)
        faults.armed = True
        report = link.sync(params, delta="auto", require="any")
        assert sorted(o.state for o in report.outcomes) == ["committed", "stale"]
        late = next(o.replica for o in report.outcomes if o.state == "stale")
        params = trained(params, 22)
        report = link.sync(params, delta="auto")
        assert report.delta
        assert report.why_full.startswith(f"{late} did not hold the base")
        assert report.full_bytes / 2 < report.bytes < report.full_bytes
        assert held_exactly(link, params)
        params = trained(params, 23)
        check(link, params, link.sync(params, delta="auto"))


@pytest.mark.parametrize("bucket", [BUCKET, 1.0])
def test_another_link_in_between(
    lab: jv.Lab, live: jv.Pool, policy: Any, bucket: float
) -> None:
    """By an equal plan, and by another."""
    params = policy.params
    other = trained(params, 11)
    with connect(lab, live, params) as one:
        one.sync(params, delta="auto")
        one.let_go(Deadline(120))
        two = Connections().connect(other, live, "policy", bucket_mib=bucket)
        two.sync(other, delta="auto")
        two.close()
        params = trained(params, 12)
        report = one.sync(params, delta="auto")
        assert not report.delta
        assert "did not hold the base" in report.why_full
        assert held_exactly(one, params)
        # closed and opened again, with nothing in between: the base is still known
        one.let_go(Deadline(120))
        params = trained(params, 13)
        check(one, params, one.sync(params, delta="auto"))


def test_adapters(lab: jv.Lab, live: jv.Pool, policy: Any) -> None:
    adapted = policy.with_lora(rank=8, alpha=12)
    params = trained(adapted.lora, 14, 1.0)
    with lab.connect(params, live) as link:
        assert not link.sync(params, delta="auto").delta
        for seed, mode in enumerate(("direct", "staged", "staged"), 15):
            params = trained(params, seed)
            report = link.sync(params, mode=mode, delta="auto")
            assert report.delta, report.why_full
            assert report.verified
            assert report.bytes < report.full_bytes
            assert link.verify(params).ok
        # the slot is cleared when it opens again
        link.let_go(Deadline(120))
        params = trained(params, 20)
        report = link.sync(params, delta="auto")
        assert not report.delta
        assert link.verify(params).ok


@pytest.mark.soak
def test_real_steps_of_adam(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`jvlab bench sync --delta --adam`: the first step moves every value, later ones fewer that round to others."""
    facts = run_bench_adam(2, llama, "cpu")
    assert "step 2" in capsys.readouterr().out
    slow, slower, fast, faster = (row["changed"] for row in facts["rows"])
    assert 0 < slower < slow < fast < 0.5
    assert slower < faster
    assert all(r["delta_bytes"] < r["full_bytes"] for r in facts["rows"])
