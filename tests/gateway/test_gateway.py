"""The gateway over real gRPC with fake replicas: auth, limits, routing, retries, fencing, back-pressure, endings."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import jvlab as jv
from jvlab import errors
from jvlab._names import LostNote
from jvlab.gateway import _registry as reg
from jvlab.wire import _security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from tests.gateway.fake_lab import FakeLab
from tests.waiting import until


def test_every_call_needs_the_token(fake_lab: FakeLab):
    methods = {
        m: getattr(pb, r)
        for m, r in [
            ("Describe", "DescribeRequest"),
            ("Detach", "DetachRequest"),
            ("Close", "CloseRequest"),
            ("Launch", "LaunchRequest"),
            ("Status", "PoolRequest"),
            ("ClosePool", "PoolRequest"),
            ("Steer", "SteerCall"),
            ("Logs", "LogsRequest"),
            ("Watch", "PoolRequest"),
            ("Score", "ScoreCall"),
            ("Trace", "TraceCall"),
            ("Hold", "HoldRequest"),
        ]
    }
    with grpc.insecure_channel(fake_lab.address) as channel:
        for metadata in (
            (),
            _security.authorization("wrong"),
            (("authorization", "secret"),),
        ):
            for name, request in methods.items():
                answer = getattr(rpc.LabStub(channel), name)
                with pytest.raises(grpc.RpcError) as caught:
                    # streams fail when read
                    list(answer(request(), timeout=30, metadata=metadata))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
            with pytest.raises(grpc.RpcError) as caught:
                list(
                    rpc.LabStub(channel).Generate(
                        iter([pb.GenerateCall()]), timeout=30, metadata=metadata
                    )
                )
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            for name, request in (
                ("Register", pb.RegisterRequest),
                ("Beat", pb.BeatRequest),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    getattr(rpc.RegistryStub(channel), name)(
                        request(), timeout=30, metadata=metadata
                    )
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert fake_lab.thread.is_alive()
    with pytest.raises(errors.AuthError, match="refuses this token"):
        jv.Lab.attach(fake_lab.address, "wrong")


def test_health_is_served(fake_lab: FakeLab):
    with grpc.insecure_channel(fake_lab.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(  # type: ignore[attr-defined]
            health_pb2.HealthCheckRequest(),
            timeout=30,
            metadata=_security.authorization("secret"),
        )
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_lab_file_is_the_owners_alone(fake_lab: FakeLab):
    assert stat.S_IMODE((fake_lab.folder / "lab.json").stat().st_mode) == 0o600


def scrape(url: str, token: str, path: str = "/metrics") -> tuple[int, str]:
    request = urllib.request.Request(
        url.removesuffix("/metrics") + path,
        headers={"Authorization": f"Bearer {token}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_prometheus_metrics_over_http_with_the_token(
    tmp_path: Path, llama: str, monkeypatch
):
    monkeypatch.setattr(
        "jvlab.lab._launch_settings.resolve_device", lambda device: "cpu"
    )
    fake = FakeLab(tmp_path, metrics_port=0)
    url = json.loads((fake.folder / "lab.json").read_text())["metrics_url"]
    lab = jv.Lab.attach(fake.address, fake.token)
    try:
        assert lab.metrics_url == url, "whoever attaches can scrape too"
        lab.launch(llama, name="p", replicas=2).wait(60)
        status, text = scrape(url, fake.token)
        assert status == 200
        assert 'jvlab_pool_healthy_replicas{pool="p"} 2' in text
        assert 'jvlab_replica_weight_version{pool="p",replica="p/0"}' in text
        assert scrape(url, "wrong")[0] == 401
        assert scrape(url, fake.token, "/etc/passwd")[0] == 404
        with socket.create_connection(
            ("127.0.0.1", int(url.split(":")[2].split("/")[0]))
        ) as plain:
            # no HTTP: dropped, and the page is served on
            plain.sendall(b"x" * (64 << 10) + b"\r\n\r\n")
        assert scrape(url, fake.token)[0] == 200
    finally:
        lab._leave()
        fake.end()


def test_oversized_message_is_refused_and_the_lab_goes_on(
    tmp_path: Path, llama: str, monkeypatch
):
    monkeypatch.setattr(_security, "MAX_MESSAGE", 2**20)
    fake = FakeLab(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(
        "jvlab.lab._launch_settings.resolve_device", lambda device: "cpu"
    )
    lab = jv.Lab.attach(fake.address, fake.token)
    try:
        pool = lab.launch(llama, name="p").wait(60)
        with pytest.raises(
            errors.MessageTooLarge,
            match=r"a message of \d+ bytes is over the limit of 1048576",
        ):
            pool.generate(["x" * 2**21])
        assert len(pool.generate(["x"], n=2)) == 2
    finally:
        lab._leave()
        fake.end()


def test_an_unnamed_pool_gets_a_name_that_nobody_has(
    fake_lab: FakeLab, client: jv.Lab, llama: str
):
    assert client.launch(llama, name="pool-2").wait(60).name == "pool-2"
    unnamed = [client.launch(llama).wait(60) for _ in range(2)]
    assert [pool.name for pool in unnamed] == ["pool-1", "pool-3"]
    assert len(unnamed[1].generate(["a"])) == 1
    unnamed[1].close()
    assert client.launch(llama).name == "pool-4"
    assert client.metrics_url is None, "none are served"


def test_a_pool_relaunched_under_its_name_is_another(
    fake_lab: FakeLab, client: jv.Lab, llama: str
):
    old = client.launch(llama, name="p").wait(60)
    somebody = jv.Lab.attach(fake_lab.address, fake_lab.token)
    try:
        theirs = somebody.pools["p"].wait(60)
        epoch = old.status()["replicas"][0]["epoch"]
        old.generate(["a"], n=3)
        old.close()
        new = client.launch(llama, name="p").wait(60)
        row = new.status()["replicas"][0]
        assert row["epoch"] > epoch, (
            "an order to the old one would be obeyed by the new one"
        )
        assert row["served"] == 0, "that is what the old one did"
        until(
            lambda: theirs.snapshot.closed,
            "the holder of the old pool hears that it is closed",
        )
        with pytest.raises(errors.ControlError, match="p is closed"):
            theirs.generate(["a"])
        old.close()
        theirs.close()
        assert len(new.generate(["a"])) == 1, "nobody closed the new one"
        assert somebody.pools["p"] is not theirs
        assert len(somebody.pools["p"].generate(["a"])) == 1
    finally:
        somebody._leave()


def test_closed_pools_are_forgotten_but_for_the_last(
    fake_lab: FakeLab, client: jv.Lab, llama: str, monkeypatch: pytest.MonkeyPatch
):
    gateway = fake_lab.gateway
    stays = client.launch(llama, name="stays").wait(60)
    stays.generate(["a"])
    rest = client.launch(llama).wait(60)
    rest.pause()
    rest.close()
    monkeypatch.setattr(
        "tests.gateway.fake_lab.FakeGateway._start_process", lambda *_: asyncio.sleep(0)
    )
    for _ in range(3 * reg.KEPT_CLOSED):
        client.launch(llama).close()
    listed = [pool["pool"] for pool in client.status()["pools"]]
    assert listed[0] == "stays"
    assert len(listed) == 1 + reg.KEPT_CLOSED
    known = (
        gateway.links._pools,
        gateway.steering._states,
        gateway.adapters._known,
        gateway.steering._orders,
    )
    assert all(set(table) <= set(listed) for table in known)
    for table in (
        gateway.facts,
        gateway.stats,
        gateway.calls._trust,
        gateway._served,
        gateway.calls._open,
        gateway.calls._stubs,
    ):
        assert {reg.pool_of(name) for name in table} <= set(listed)
    assert gateway.loads._in_flight == {}
    assert list(client.pools) == ["stays"]
    assert len(stays.generate(["a"])) == 1


def test_a_dirty_replica_is_not_counted_as_ready(fake_lab: FakeLab, pool: jv.Pool):
    from jvlab.wire.processes._labs import LabInfo, _queried

    info = LabInfo("fake", "running", fake_lab.address, token=fake_lab.token)
    assert "2 × ready" in _queried(info).words
    fake_lab.fakes["p/1"].memory.dirty = True
    until(lambda: pool.status()["replicas"][1]["dirty"])
    status = pool.status()
    assert (status["healthy"], status["state"]) == (1, "1 of 2 dirty: sync again")
    assert "1 of 2 dirty: sync again" in repr(pool)
    assert _queried(info).pools == {"p": ["ready", "dirty"]}
    assert "1 × dirty, 1 × ready" in _queried(info).words, "the worst first"


def test_samples_of_a_prompt_stay_together_and_prompts_spread(
    pool: jv.Pool, fake_lab: FakeLab
):
    batch = pool.generate([[i + 1] for i in range(6)], n=3)
    assert [s.text for s in batch] == [f"{i}.{k}" for i in range(6) for k in range(3)]
    homes = [{s.replica for s in group} for group in batch.groups()]
    assert all(len(home) == 1 for home in homes)
    assert sorted(fake.finished for fake in fake_lab.fakes.values()) == [9, 9]
    assert pool.status()["in_flight"] == 0


def test_a_dead_replicas_work_is_retried_once_and_told(
    pool: jv.Pool, fake_lab: FakeLab
):
    fake_lab.fakes["p/0"].limit = 2  # the other six are in flight when it dies

    def kill() -> None:
        until(lambda: fake_lab.served("p/0") == 2)
        fake_lab.do(
            lambda: fake_lab.gateway.handle(
                reg.ProcessExited("p/0", "killed by the test", "")
            )
        )

    killer = threading.Thread(target=kill)
    killer.start()
    batch = pool.generate([[i + 1] for i in range(8)], n=2)
    killer.join()
    assert [s.text for s in batch] == [f"{i}.{k}" for i in range(8) for k in range(2)]
    assert {s.retried for s in batch} == {0, 1}
    assert all(s.replica == "p/1" for s in batch if s.retried)
    assert any("p/0 was lost (killed by the test)" in note for note in batch.notes)
    lost = [note.replica for note in batch.notes if isinstance(note, LostNote)]
    assert set(lost) == {"p/0"}
    assert [s for s in batch if s.replica == "p/0"], (
        "samples finished before the death are kept"
    )
    assert pool.status()["in_flight"] == 0


def test_when_no_replica_is_left_the_finished_samples_come_with_the_error(
    pool: jv.Pool, fake_lab: FakeLab
):
    for fake in fake_lab.fakes.values():
        fake.limit = 2

    def kill() -> None:
        until(lambda: all(fake_lab.served(name) == 2 for name in fake_lab.fakes))
        for name in ("p/0", "p/1"):
            fake_lab.do(
                lambda name=name: fake_lab.gateway.handle(
                    reg.ProcessExited(name, "killed", "")
                )
            )

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(errors.ReplicaLost, match="of 40 samples were lost") as caught:
        pool.generate([[i + 1] for i in range(20)], n=2)
    killer.join()
    kept = caught.value.fields["batch"]
    assert isinstance(kept, jv.RolloutBatch)
    assert len(kept) == 4
    assert all(s.error is None for s in kept)
    with pytest.raises(errors.LaunchError):
        pool.generate("again")


def test_a_silent_replica_is_fenced_and_comes_back_with_a_new_epoch(
    pool: jv.Pool, fake_lab: FakeLab
):
    quiet = fake_lab.fakes["p/0"]
    old = quiet.epoch
    fake_lab.silence("p/0")
    assert {s.replica for s in pool.generate([[1], [2], [3]])} == {"p/1"}
    quiet.silent = False
    until(lambda: fake_lab.registry.replica("p/0").state is reg.ReplicaState.READY)
    until(lambda: quiet.epoch > old)
    assert quiet.fenced == 1
    assert "p/0" in {s.replica for s in pool.generate([[1], [2], [3], [4]])}
    # An order that was given to the replica it used to be is refused.
    with grpc.insecure_channel(f"127.0.0.1:{quiet.port}") as channel:
        order = pb.RolloutSteerRequest(epoch=old, order=pb.SteerCall(what=pb.PAUSE))
        with pytest.raises(grpc.RpcError) as caught:
            rpc.RolloutStub(channel).Steer(
                order, timeout=30, metadata=_security.authorization("secret")
            )
        assert caught.value.code() is grpc.StatusCode.ABORTED
    assert quiet.steered == []


def test_stream_holds_back_until_samples_are_read(pool: jv.Pool, fake_lab: FakeLab):
    stream = iter(pool.stream([[i + 1] for i in range(30)], n=2, window=4))
    first = next(stream)
    time.sleep(0.4)  # the reader is slow; the pool must not run ahead
    assert sum(fake.finished for fake in fake_lab.fakes.values()) <= 6
    rest = list(stream)
    assert sorted(s.text for s in [first, *rest]) == sorted(
        f"{i}.{k}" for i in range(30) for k in range(2)
    )
    assert all(fake.max_running <= 4 for fake in fake_lab.fakes.values())


def test_leaving_a_stream_cancels_the_rest(pool: jv.Pool, fake_lab: FakeLab):
    fakes = fake_lab.fakes.values()
    for fake in fakes:
        fake.limit = 10
    with pool.stream([[i + 1] for i in range(200)], window=100) as stream:
        samples = iter(stream)  # held: dropping it ends the stream, too
        for _ in range(4):
            next(samples)
        until(lambda: sum(fake.running for fake in fakes) > 50)
    until(lambda: all(fake.running == 0 for fake in fakes))
    assert sum(fake.cancelled for fake in fakes) > 50
    assert sum(fake.finished for fake in fakes) <= 20
    assert pool.status()["in_flight"] == 0


def test_async_calls(pool: jv.Pool):
    async def work() -> tuple[int, int, int]:
        seen = 0
        async for _ in pool.stream([[1], [2]], n=3):
            seen += 1
        batch, scores = await asyncio.gather(
            pool.agenerate([[1]], n=2), pool.ascore([[1, 2, 3]])
        )
        return seen, len(batch), len(scores)

    assert asyncio.run(work()) == (6, 2, 1)


def test_samples_are_handed_over_as_they_end(pool: jv.Pool, fake_lab: FakeLab):
    for fake in fake_lab.fakes.values():
        fake.delay = 0.05
    seen: list[tuple[int, bool]] = []

    async def work() -> jv.RolloutBatch:
        call = asyncio.ensure_future(
            pool.agenerate(
                [[1]],
                n=3,
                on_sample=lambda sample: seen.append(
                    (sample.sample_index, call.done())
                ),
            )
        )
        return await call

    batch = asyncio.run(work())
    assert sorted(seen) == [(i, False) for i in range(3)]
    assert len(batch) == 3


def test_cancelling_an_awaited_call_ends_its_work(pool: jv.Pool, fake_lab: FakeLab):
    for fake in fake_lab.fakes.values():
        fake.delay = 0.05

    async def work() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.agenerate([[i + 1] for i in range(400)]), 0.5)

    asyncio.run(work())
    until(lambda: all(fake.running == 0 for fake in fake_lab.fakes.values()))


def test_a_refusal_of_the_engine_ends_the_call_with_its_words(
    pool: jv.Pool, fake_lab: FakeLab
):
    fake_lab.fakes["p/0"].refusal = fake_lab.fakes["p/1"].refusal = (
        errors.SamplingError("prompt 0 is odd", remedy="make it even")
    )
    with pytest.raises(errors.SamplingError, match="prompt 0 is odd") as caught:
        pool.generate([[1]])
    assert caught.value.remedy == "make it even"


def test_a_deadline_names_who_was_waited_for(pool: jv.Pool, fake_lab: FakeLab):
    for fake in fake_lab.fakes.values():
        fake.delay = 5.0
    with pytest.raises(errors.DeadlineExceeded, match="waited for replica p/0"):
        pool.generate([[1]], timeout=0.5)


def test_steering_reaches_every_replica(pool: jv.Pool, fake_lab: FakeLab):
    pool.pause("keep")
    pool.resume()
    assert [fake.steered for fake in fake_lab.fakes.values()] == [
        [pb.PAUSE, pb.RESUME]
    ] * 2
    with pytest.raises(errors.ConfigError, match="'keep', 'wait' or 'abort'"):
        pool.pause("maybe")


def test_a_pause_that_one_replica_cannot_take_is_taken_back(
    pool: jv.Pool, fake_lab: FakeLab
):
    hung = fake_lab.fakes["p/1"]
    hung.steer_delay, hung.silent = 600.0, True
    # no deadline: that ends it
    with pytest.raises(errors.ReplicaLost, match="replica p/1 was lost: no heartbeat"):
        pool.pause("keep", timeout=300)
    assert fake_lab.fakes["p/0"].steered == [pb.PAUSE, pb.RESUME]


def test_a_closed_pools_name_can_be_used_again(
    pool: jv.Pool, client: jv.Lab, fake_lab: FakeLab, llama: str
):
    fake_lab.gateway.processes.clear()
    pool.close()
    assert len(client.launch(llama, name="p").wait(60).generate([[1]])) == 1


def test_a_broken_connection_is_mended(
    pool: jv.Pool, client: jv.Lab, fake_lab: FakeLab
):
    """Streams that end with UNAVAILABLE are opened again: neither the hold nor the pool's picture is lost."""
    seen: list[int] = []

    class Broken:
        def __init__(self) -> None:
            self.turn = 0

        def __call__(self):
            self.turn += 1
            return self.read(self.turn)

        async def read(self, turn: int):
            yield turn
            if turn == 1:
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.aio.Metadata(),
                    grpc.aio.Metadata(),
                )

    why = client.client.loop.run(client.client.follow(Broken(), seen.append))
    assert seen == [1, 2]
    assert why == "", "by the gateway itself"


def test_a_gateway_is_never_mistaken_for_another_process(client: jv.Lab):
    from dataclasses import replace

    from jvlab.wire.processes._identity import Identity

    me = Identity.own()
    assert me.process() is not None
    assert replace(me, started=me.started - 100).process() is None, (
        "the same id, started at another time"
    )
    assert replace(me, host="elsewhere").process() is None, (
        "the same id on another machine"
    )


def test_a_failed_start_carries_cause_and_log(client: jv.Lab, llama: str):
    pool = client.launch(llama, engine={"broken": True}, name="q")
    with pytest.raises(errors.LaunchError, match="ValueError: broken") as caught:
        pool.wait(60)
    assert caught.value.fields["log"] == "last lines"
    assert "1 failed" in repr(pool)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"replicas": 0}, "replicas"),
        ({"tensor_parallel": 1.5}, "tensor_parallel"),
        ({"load": "magic"}, "'auto' or 'dummy'"),
        ({"engine": {"x": object()}}, "plain value"),
    ],
)
def test_bad_launch_arguments_start_nothing(
    client: jv.Lab, llama: str, wrong: dict, word: str
):
    with pytest.raises(errors.ConfigError, match=word):
        client.launch(llama, **wrong)
    assert client.pools == {}


def test_bad_model_path_starts_nothing(client: jv.Lab):
    with pytest.raises(errors.ModelError, match="no model at"):
        client.launch("./no/such/folder")
    assert client.pools == {}


def test_reprs_are_stable_and_escaped(pool: jv.Pool, client: jv.Lab):
    assert repr(pool).startswith("Pool('p', 'llama',")
    assert repr(pool).endswith("2 replicas × TP 1 on cpu, ready)")
    assert repr(client) == "Lab(open, 1 pool)"
    pool.snapshot.replicas[0].cause = "<script>alert(1)</script>"
    html = pool._repr_html_() + client._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_closing_a_pool_closes_it_for_everybody(
    pool: jv.Pool, client: jv.Lab, fake_lab: FakeLab
):
    other = jv.Lab.attach(fake_lab.address, fake_lab.token)
    try:
        same = other.pools["p"]
        fake_lab.gateway.processes.clear()
        pool.close()
        pool.close()
        until(lambda: same.snapshot.closed)
        with pytest.raises(errors.ControlError, match="closed"):
            same.generate("x")
    finally:
        other._leave()


def test_the_lease_ends_a_lab_that_nobody_holds(tmp_path: Path):
    fake = FakeLab(tmp_path)
    lab = jv.Lab.attach(fake.address, fake.token)
    until(lambda: fake.registry.holders)
    fake.registry.lease = 0.3  # only now: to attach may take longer than that
    time.sleep(1.0)
    assert fake.thread.is_alive(), "a held lab lives on"
    lab._leave()
    fake.thread.join(60)
    assert not fake.thread.is_alive()
    assert not (tmp_path / "lab.json").exists()
    fake.end()


def test_detach_keeps_a_lab(tmp_path: Path):
    fake = FakeLab(tmp_path)
    jv.Lab.attach(fake.address, fake.token).detach()
    until(lambda: not fake.registry.holders)
    fake.registry.lease = 0.3
    time.sleep(1.0)
    assert fake.thread.is_alive()
    fake.end()


def test_a_gateway_that_went_away_is_named(pool: jv.Pool, fake_lab: FakeLab):
    fake_lab.end()
    with pytest.raises(errors.ControlError):
        pool.generate([[1]], timeout=5)


def test_connect_refuses_another_lab_s_pool_at_once(
    client: jv.Lab, pool: jv.Pool, tmp_path: Path
):
    """It waited half a minute, and then named this very process as the one in the way."""
    folder = tmp_path / "other"
    folder.mkdir()
    other = FakeLab(folder)
    try:
        second = jv.Lab.attach(other.address, other.token)
        with pytest.raises(
            errors.ConfigError,
            match=f"'p' is not of this lab, {second.name}, but of {client.name}",
        ):
            second.connect({"w": np.zeros(2)}, pool)
        gone = jv.Lab.attach(other.address, other.token)
        foreign = gone.launch(pool.model, name="q")
        gone._leave()
        with pytest.raises(errors.ConfigError, match="one that was closed"):
            client.connect({"w": np.zeros(2)}, foreign)
        second._leave()
    finally:
        other.end()
