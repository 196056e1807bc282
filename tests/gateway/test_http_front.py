"""The gateway's HTTP front over fake replicas: routing, counting, streams, losses, pauses."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import requests

import jvlab as jv
from jvlab import errors
from jvlab.gateway import _http_front
from jvlab.wire import _security
from tests.gateway.cluster.test_join import own_address
from tests.gateway.fake_http import HttpFakeReplica
from tests.gateway.fake_lab import FakeLab
from tests.waiting import until


@pytest.fixture
def ask(http_pool: jv.Pool) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=http_pool.http_url,
        api_key=http_pool.http_token,
        max_retries=0,
        timeout=60,
    ) as made:
        yield made


# httpx gives up after 5 seconds
patient_get = partial(httpx.get, timeout=60)
patient_post = partial(httpx.post, timeout=60)


def fakes(lab: FakeLab) -> list[HttpFakeReplica]:
    return [
        replica
        for replica in lab.fakes.values()
        if isinstance(replica, HttpFakeReplica)
    ]


def in_flight(lab: FakeLab) -> list[int]:
    return [lab.gateway.loads.of(fake.name) for fake in fakes(lab)]


def test_requests_spread_and_are_counted(fake_lab: FakeLab, ask: openai.OpenAI):
    for fake in fakes(fake_lab):
        fake.hold = True
    with ThreadPoolExecutor(4) as threads:
        answers = [
            threads.submit(ask.completions.create, model="fake", prompt="x")
            for _ in range(4)
        ]
        until(lambda: in_flight(fake_lab) == [2, 2], "two in flight on each")
        for fake in fakes(fake_lab):
            fake.hold = False
        texts = sorted(answer.result().choices[0].text for answer in answers)
    assert texts == ["p/0", "p/0", "p/1", "p/1"]
    until(lambda: in_flight(fake_lab) == [0, 0], "none in flight")
    assert [fake_lab.served(fake.name) for fake in fakes(fake_lab)] == [2, 2]


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ({"prompt": "x"}, 1),
        ({"prompt": "x", "n": 3}, 3),
        ({"prompt": ["x", "y"], "n": 2}, 4),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, 2),
        ({"token_ids": [1, 2, 3], "sampling_params": {"n": 3}}, 3),
    ],
)
def test_samples_of_a_request(
    fake_lab: FakeLab, raw: httpx.Client, body: dict[str, Any], parts: int
):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if "token_ids" in body:
        path = "/inference/v1/generate"
    # the fake has no chat: what it does not know comes back as it is
    if "messages" in body:
        assert raw.post(path, json=body).status_code == 404
        return
    fakes(fake_lab)[0].hold = True
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(raw.post, path, json=body)
        until(lambda: in_flight(fake_lab) == [parts, 0], f"{parts} in flight")
        fakes(fake_lab)[0].hold = False
        assert answer.result().status_code == 200
    until(lambda: in_flight(fake_lab) == [0, 0], "none in flight")
    assert fake_lab.served("p/0") == parts


def test_a_close_that_times_out_leaves_no_front(
    fake_lab: FakeLab, http_pool: jv.Pool, client: jv.Lab, raw: httpx.Client, llama: str
):
    """A process that does not end in time kept the port of a pool that was closed."""

    class Stuck:
        replica = "p/0"
        run = 0

        def __init__(self) -> None:
            self.ended = asyncio.Event()

        async def end(self, deadline: float) -> None:
            self.ended.set()

    def listens() -> bool:
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    port = raw.base_url.port
    assert port is not None
    stuck = Stuck()
    fake_lab.do(lambda: fake_lab.gateway.processes.update({"p/0": stuck}))  # type: ignore[dict-item]
    with pytest.raises(errors.DeadlineExceeded, match="waited for p/0 to end"):
        http_pool.close(timeout=1.0)
    until(lambda: not listens(), "the port is free", seconds=20.0)
    client.launch(llama, name="p", http=port)
    assert listens(), "the next pool of its name can have the port"


def test_labels_and_models(fake_lab: FakeLab, ask: openai.OpenAI):
    reply = ask.completions.with_raw_response.create(model="fake", prompt="x")
    assert reply.headers["x-jvlab-version"] == "0"
    assert reply.headers["x-jvlab-replica"] == reply.parse().choices[0].text
    assert [model.id for model in ask.models.list()] == ["fake"]
    assert sum(fake_lab.served(fake.name) for fake in fakes(fake_lab)) == 1, (
        "looking is no sample"
    )


def test_token_and_routes(http_pool: jv.Pool, raw: httpx.Client):
    base = http_pool.http_url.removesuffix("/v1")
    for token in ("", "Bearer wrong", f"Basic {http_pool.http_token}"):
        for path in ("/v1/models", "/bridge/status", "/metrics", "/nowhere"):
            reply = patient_get(
                f"{base}{path}", headers={"Authorization": token} if token else {}
            )
            assert reply.status_code == 401
            assert "Authorization: Bearer" in reply.json()["error"]["remedy"]
    assert patient_get(f"{base}/health").status_code == 200, (
        "whether somebody is there is no secret"
    )
    assert raw.get("/nowhere").status_code == 404
    assert raw.get("/v1/completions").status_code == 405
    assert 'jvlab_pool_healthy_replicas{pool="p"} 2' in raw.get("/metrics").text
    assert raw.post("/v1/completions", content=b"{").status_code == 400
    assert raw.post("/v1/completions", content=b"[]").status_code == 400


@pytest.fixture
def keyed(
    fake_lab: FakeLab, client: jv.Lab, llama: str, monkeypatch: pytest.MonkeyPatch
) -> jv.Pool:
    monkeypatch.setattr("tests.gateway.fake_lab.FakeReplica", HttpFakeReplica)
    return client.launch(llama, name="k", http=True, http_key=True).wait(60)


def key_of(pool: jv.Pool) -> str:
    """What the key would be, whether or not the pool takes one."""
    return _security.pool_key(pool.http_token, pool.http_url.removesuffix("/v1"))


def test_a_key_in_the_url_is_off_unless_asked_for(
    http_pool: jv.Pool, client: jv.Lab, llama: str
):
    with pytest.raises(errors.ConfigError, match="takes no key") as caught:
        _ = http_pool.http_key_url
    assert "http_key=True" in caught.value.remedy
    with pytest.raises(errors.ConfigError, match="no HTTP is served"):
        client.launch(llama, http_key=True)
    base = http_pool.http_url.removesuffix("/v1")
    for key in (key_of(http_pool), http_pool.http_token, ""):
        reply = patient_get(f"{base}/v1/models", auth=("jvlab", key))
        assert reply.status_code == 401


def test_a_key_in_the_url_generates_and_does_nothing_else(
    fake_lab: FakeLab, keyed: jv.Pool
):
    url = keyed.http_key_url
    base = keyed.http_url.removesuffix("/v1")
    body = {"model": "fake", "prompt": "x"}
    tokens = {"token_ids": [1], "sampling_params": {}}
    # clients as trainers use them: a base URL, and no header of ours
    assert requests.get(f"{url}/health", timeout=60).status_code == 200
    assert requests.get(f"{url}/v1/models", timeout=60).json()["data"]
    assert patient_post(f"{url}/v1/completions", json=body).json()["choices"]
    assert patient_post(f"{url}/inference/v1/generate", json=tokens).json()["choices"]

    async def post() -> Any:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", json=body) as reply,
        ):
            return await reply.json()

    assert asyncio.run(post())["choices"][0]["text"] == "k/0"
    assert len(fakes(fake_lab)[0].asked) == 3
    key = key_of(keyed)
    assert httpx.URL(url).password == key
    for path in ("/bridge/status", "/bridge/openapi.json", "/metrics", "/nowhere"):
        assert patient_get(f"{url}{path}").status_code == 401, path
    assert patient_post(f"{url}/bridge/pause", json={}).status_code == 401
    wrong: list[Any] = [None, ("jvlab", ""), ("jvlab", key[:-1]), ("root", key)]
    wrong += [("jvlab", keyed.http_token), ("jvlab", key.upper())]
    for auth in wrong:
        reply = patient_post(f"{base}/v1/completions", json=body, auth=auth)
        assert reply.status_code == 401, auth
    for given in (f"Bearer {key}", f"Basic {key}", key, "Basic", "Basic \xff"):
        reply = patient_post(
            f"{base}/v1/completions",
            json=body,
            headers=[(b"Authorization", given.encode("latin-1"))],
        )
        assert reply.status_code == 401, given
    assert len(fakes(fake_lab)[0].asked) == 3, "nothing of that reached a replica"


def test_a_key_is_seen_by_those_who_ask_for_it_only(
    keyed: jv.Pool, client: jv.Lab, capfd: pytest.CaptureFixture[str]
):
    key = key_of(keyed)
    patient_get(f"{keyed.http_key_url}/v1/models")
    shown = [repr(keyed), keyed._repr_html_(), json.dumps(keyed.status()), str(client)]
    shown += [json.dumps(client.status()), *capfd.readouterr()]
    assert not [text for text in shown if key in text]
    # another client of the lab can ask too; another pool has another key
    other = client.launch(keyed.model, name="l", http=True, http_key=True).wait(60)
    assert key not in other.http_key_url
    other.close()
    with pytest.raises(errors.ConfigError, match="takes no key"):
        _ = other.http_key_url


def test_a_stream_arrives_event_by_event(fake_lab: FakeLab, ask: openai.OpenAI):
    for fake in fakes(fake_lab):
        fake.hold = True
    with ask.completions.create(model="fake", prompt="x", stream=True) as stream:
        events = iter(stream)
        assert next(events).choices[0].text == "one", (
            "the first is here while the second is held back"
        )
        assert sum(in_flight(fake_lab)) == 1
        for fake in fakes(fake_lab):
            fake.hold = False
        assert [event.choices[0].text for event in events] == ["two"]
    until(lambda: in_flight(fake_lab) == [0, 0], "none in flight")


def test_a_replica_that_dies_before_its_first_byte_is_replaced(
    fake_lab: FakeLab, ask: openai.OpenAI
):
    first, second = fakes(fake_lab)
    first.engine_death = "before"
    assert ask.completions.create(model="fake", prompt="x").choices[0].text == "p/1"
    assert len(first.asked) == 1
    second.engine_death = "before"
    with pytest.raises(openai.InternalServerError, match="lost twice") as caught:
        ask.completions.create(model="fake", prompt="x")
    assert caught.value.status_code == 502
    assert caught.value.body["remedy"].startswith("ask again")  # type: ignore[index]
    assert in_flight(fake_lab) == [0, 0]


def test_a_replica_that_dies_in_a_stream_ends_it_with_an_error(
    fake_lab: FakeLab, ask: openai.OpenAI
):
    for fake in fakes(fake_lab):
        fake.engine_death = "middle"
    with ask.completions.create(model="fake", prompt="x", stream=True) as stream:
        events = iter(stream)
        assert next(events).choices[0].text == "one"
        # and no half event before it
        with pytest.raises(openai.APIError, match="the answer is not complete"):
            next(events)
    assert in_flight(fake_lab) == [0, 0]
    assert sum(fake_lab.served(fake.name) for fake in fakes(fake_lab)) == 0, (
        "it is no sample"
    )


def test_a_fenced_replica_loses_its_requests_and_gets_none(
    fake_lab: FakeLab, ask: openai.OpenAI
):
    first = fakes(fake_lab)[0]
    first.hold = True
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask.completions.create, model="fake", prompt="x")
        until(lambda: first.asked, "the request reached the first replica")
        fake_lab.silence("p/0")
        assert answer.result().choices[0].text == "p/1"
    until(lambda: first.left == 1, "the lost replica's request was given up")
    for _ in range(3):
        assert ask.completions.create(model="fake", prompt="x").choices[0].text == "p/1"
    assert len(first.asked) == 1


def test_what_a_replica_refuses_is_tried_again(fake_lab: FakeLab, ask: openai.OpenAI):
    first, second = fakes(fake_lab)
    first.refuses = ["dirty", "dirty"]
    assert ask.completions.create(model="fake", prompt="x").choices[0].text == "p/0", (
        "a sync had it for a moment"
    )
    first.refuses = ["fenced"]
    assert ask.completions.create(model="fake", prompt="x").choices[0].text == "p/1"
    first.refuses, second.refuses = ["dirty"] * 100, ["dirty"] * 100
    with pytest.raises(openai.InternalServerError, match="not now") as caught:
        ask.completions.create(model="fake", prompt="x")
    assert caught.value.status_code == 503


def test_a_paused_pool_gets_no_request_until_it_resumes(
    fake_lab: FakeLab, ask: openai.OpenAI, raw: httpx.Client
):
    assert raw.post("/bridge/pause", json={"mode": "keep"}).json()["paused"] is True
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask.completions.create, model="fake", prompt="x")
        assert raw.get("/bridge/status").status_code == 200, (
            "the bridge answers meanwhile"
        )
        time.sleep(0.2)
        assert not answer.done()
        assert not any(fake.asked for fake in fakes(fake_lab))
        assert raw.post("/bridge/resume").json()["paused"] is False
        assert answer.result().choices[0].text.startswith("p/")


def test_a_pool_paused_for_long_says_so(
    ask: openai.OpenAI, http_pool: jv.Pool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_http_front, "HOLD_SECONDS", 0.2)
    http_pool.pause()
    with pytest.raises(openai.InternalServerError, match="is paused") as caught:
        ask.completions.create(model="fake", prompt="x")
    assert caught.value.status_code == 503
    assert caught.value.response.headers["Retry-After"] == "5"
    http_pool.resume()
    assert ask.completions.create(model="fake", prompt="x").choices


def test_a_version_that_nobody_holds(raw: httpx.Client):
    body = {"model": "fake", "prompt": "x"}
    reply = raw.post("/v1/completions", json=body, headers={"x-jvlab-min-version": "3"})
    assert reply.status_code == 503
    assert "no replica of pool 'p' holds version 3" in reply.json()["error"]["message"]
    assert (
        raw.post(
            "/v1/completions", json=body, headers={"x-jvlab-min-version": "x"}
        ).status_code
        == 400
    )


def test_a_client_that_leaves_ends_its_request(fake_lab: FakeLab, http_pool: jv.Pool):
    first = fakes(fake_lab)[0]
    first.hold = True
    body = json.dumps({"model": "fake", "prompt": "x"}).encode()
    port = int(http_pool.http_url.split(":")[2].split("/")[0])
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {http_pool.http_token}\r\n"
    with socket.create_connection(("127.0.0.1", port)) as leaving:
        leaving.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: first.asked, "the request reached the replica")
    until(lambda: first.left == 1, "the replica was told")
    until(lambda: in_flight(fake_lab) == [0, 0], "none in flight")


def test_prompts_that_begin_alike_go_to_one_replica(
    fake_lab: FakeLab, client: jv.Lab, llama: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tests.gateway.fake_lab.FakeReplica", HttpFakeReplica)
    pool = client.launch(llama, replicas=2, name="q", http=True, routing="prefix").wait(
        60
    )
    with openai.OpenAI(
        base_url=pool.http_url, api_key=pool.http_token, max_retries=0, timeout=60
    ) as ask:
        homes = [
            {
                ask.completions.create(model="fake", prompt=f"{k} {'y' * 300}{i}")
                .choices[0]
                .text
                for i in range(3)
            }
            for k in range(8)
        ]
    assert all(len(home) == 1 for home in homes)
    assert set().union(*homes) == {"q/0", "q/1"}


def test_closing_leaves_no_port(client: jv.Lab, http_pool: jv.Pool, llama: str):
    port = int(http_pool.http_url.split(":")[2].split("/")[0])
    with pytest.raises(errors.ControlError, match="cannot serve HTTP"):
        client.launch(llama, name="other", http=port)
    assert "other" not in client.pools
    client.client.call("ClosePool", _pool_request("p"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    again = client.launch(llama, name="again", http=port).wait(60)
    assert again.http_url == f"http://127.0.0.1:{port}/v1"


def _pool_request(name: str) -> Any:
    from jvlab.wire import jvlab_pb2 as pb

    return pb.PoolRequest(pool=name)


def test_pools_without_http(pool: jv.Pool, client: jv.Lab, llama: str):
    with pytest.raises(errors.ConfigError, match="http=True"):
        _ = pool.http_url
    assert pool.status()["replicas"][0]["http_url"] is None
    with pytest.raises(errors.ConfigError, match="True, False or a port"):
        client.launch(llama, http=70000)


def test_nothing_of_it_runs_after_the_lab(
    http_pool: jv.Pool, ask: openai.OpenAI, fake_lab: FakeLab, client: jv.Lab
):
    assert ask.completions.create(model="fake", prompt="x").choices
    port = int(http_pool.http_url.split(":")[2].split("/")[0])
    client._leave()
    fake_lab.end()  # asserts that the gateway's thread ends
    assert not [t for t in threading.enumerate() if t is fake_lab.thread]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize("wildcard", [False, True])
def test_from_another_host_it_is_over_tls(
    tmp_path: Path, llama: str, monkeypatch: pytest.MonkeyPatch, wildcard: bool
):
    """With the lab's certificate and its token; in clear text only on loopback."""
    address = own_address()
    monkeypatch.setattr("tests.gateway.fake_lab.FakeReplica", HttpFakeReplica)
    monkeypatch.setattr(
        "jvlab.lab._launch_settings.resolve_device", lambda device: "cpu"
    )
    lab = FakeLab(tmp_path, host="0.0.0.0" if wildcard else address)
    try:
        port = lab.gateway.public_address.rpartition(":")[2]
        certificate = tmp_path / "cert.pem"
        far = jv.Lab.attach(
            f"{address}:{port}", lab.token, fingerprint=lab.gateway.fingerprint
        )
        near = jv.Lab.attach(lab.address, lab.token)
        pool = far.launch(llama, name="p", http=True, http_key=True).wait(60)
        url = pool.http_url
        assert url.startswith(f"https://{address}:")
        here = near.pools["p"].http_url
        assert here.startswith("http://127.0.0.1:")
        # a client that cannot know the certificate's name checks the certificate itself
        context = ssl.create_default_context(cafile=str(certificate))
        context.check_hostname = not wildcard
        token = {"Authorization": f"Bearer {lab.token}"}
        body = {"model": "fake", "prompt": "x"}
        for base, verify in ((url, context), (here, True)):
            with httpx.Client(verify=verify, timeout=60) as http:
                ask = partial(http.post, f"{base}/completions", json=body)
                assert ask().status_code == 401
                assert ask(headers=token).json()["choices"][0]["text"] == "p/0"
        # a key in a URL generates on this machine only
        keyed = httpx.BasicAuth(
            *httpx.URL(near.pools["p"].http_key_url).userinfo.decode().split(":")
        )
        with httpx.Client(verify=context, auth=keyed, timeout=60) as http:
            assert http.post(f"{here}/completions", json=body).status_code == 200
            assert http.post(f"{url}/completions", json=body).status_code == 401
        with pytest.raises(httpx.ConnectError, match="certificate"):
            patient_post(f"{url}/completions", json=body, headers=token)
        with pytest.raises(httpx.TransportError):
            patient_get(url.replace("https", "http"), headers=token)
        if not wildcard:  # loopback's port is not open there in clear text
            assert url.rpartition(":")[2] == here.rpartition(":")[2]
        pool.close()
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, headers=token, verify=context, timeout=60)
        for client in (near, far):
            client._leave()
    finally:
        lab.end()
