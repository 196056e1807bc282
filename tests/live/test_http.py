"""HTTP on real vLLM: the openai client against a replica and against the gateway, and every route of the bridge."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

import jvlab as jv
from tests.conftest import process_tree, wait_for_exit
from tests.waiting import until

pytestmark = pytest.mark.engine
GREEDY = {"max_tokens": 12, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
CHAT: Any = [{"role": "user", "content": "Tell me a story"}]


def port_of(url: str) -> int:
    return int(url.split(":")[2].split("/")[0])


def replica_urls(pool: jv.Pool) -> list[str]:
    return [replica["http_url"] for replica in pool.status()["replicas"]]


def connect(url: str, pool: jv.Pool) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=url, api_key=pool.http_token, max_retries=0, timeout=120
    )


@pytest.fixture(scope="module")
def web(lab: jv.Lab, llama: str) -> Iterator[jv.Pool]:
    """Two replicas with HTTP; when it is closed no port and no process is left."""
    pool = lab.launch(
        llama,
        replicas=2,
        name="web",
        http=True,
        env={"JVLAB_LIVE_WEIGHTS": "1"},
        restarts=0,
    ).wait()
    yield pool
    ports = [port_of(url) for url in (pool.http_url, *replica_urls(pool))]
    pids = {
        pid
        for replica in pool.status()["replicas"]
        for pid in process_tree(replica["pid"])
    }
    pool.close()
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
    assert not wait_for_exit(pids, 60), "processes were left"


@pytest.fixture(scope="module")
def gateway(web: jv.Pool) -> Iterator[openai.OpenAI]:
    with connect(web.http_url, web) as made:
        yield made


@pytest.fixture(scope="module")
def bridge(web: jv.Pool) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {web.http_token}"}
    with httpx.Client(
        base_url=web.http_url.removesuffix("/v1"), headers=headers, timeout=300
    ) as made:
        yield made


@pytest.fixture(scope="module")
def schemas(bridge: httpx.Client) -> dict[str, Any]:
    """What each route says it answers."""
    document = bridge.get("/bridge/openapi.json").json()
    found = {}
    for path, methods in document["paths"].items():
        answer = next(iter(methods.values()))["responses"]["200"]
        found[path] = document | answer["content"]["application/json"]["schema"]
    return found


def greedy(pool: jv.Pool) -> str:
    return pool.generate(
        ["Once upon a time"], max_tokens=12, temperature=0.0, ignore_eos=True
    )[0].text


def test_openai_client_against_one_replica(web: jv.Pool, llama: str):
    with connect(replica_urls(web)[1], web) as one:
        names = [model.id for model in one.models.list()]
        assert names == [llama, Path(llama).name]
        for name in names:
            raw = one.completions.with_raw_response.create(
                model=name, prompt="Once upon a time", **GREEDY
            )
            assert (
                raw.headers["x-jvlab-version"] == raw.headers["x-jvlab-versions"] == "0"
            )
            assert raw.headers["x-jvlab-replica"] == "web/1"
            assert raw.parse().choices[0].text == greedy(web), (
                "the same engine as over gRPC"
            )
        chat = one.chat.completions.create(
            model=names[0], messages=CHAT, max_tokens=8, temperature=0.0
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens > 0
        with pytest.raises(openai.NotFoundError):
            one.completions.create(model="no such model", prompt="x")


def test_a_replica_wants_the_token_everywhere(web: jv.Pool):
    base = replica_urls(web)[0].removesuffix("/v1")
    with httpx.Client(base_url=base, timeout=300) as client:
        wants_the_token_everywhere(web, client)


def wants_the_token_everywhere(web: jv.Pool, client: httpx.Client) -> None:
    body = {"model": web.model, "prompt": "x", "max_tokens": 1}
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/invocations",
        "/tokenize",
        "/scale_elastic_ep",
    ):
        assert client.post(path, json=body).status_code == 401, path
        wrong = {"Authorization": "Bearer wrong"}
        refused = client.post(path, json=body, headers=wrong)
        assert refused.status_code == 401, path
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        assert client.get(path).status_code == 401, path
    assert client.get("/health").status_code == 200
    headers = {"Authorization": f"Bearer {web.http_token}"}
    metrics = client.get("/metrics", headers=headers)
    assert "vllm:num_requests_running" in metrics.text
    old = {**headers, "x-jvlab-epoch": "999"}
    stale = client.post("/v1/completions", json=body, headers=old)
    assert (stale.status_code, stale.headers["x-jvlab-refused"]) == (503, "fenced")


def test_openai_client_against_the_gateway(web: jv.Pool, gateway: openai.OpenAI):
    def ask(_: int) -> str:
        raw = gateway.completions.with_raw_response.create(
            model=web.model, prompt="Once upon a time", **GREEDY
        )
        assert raw.parse().choices[0].text == greedy_text
        return raw.headers["x-jvlab-replica"]

    greedy_text = greedy(web)
    before = {r["replica"]: r["served"] for r in web.status()["replicas"]}
    seen: list[str] = []
    deadline = time.monotonic() + 60
    with ThreadPoolExecutor(4) as threads:
        while set(seen) != {"web/0", "web/1"}:
            assert time.monotonic() < deadline, f"only {set(seen)} served"
            seen += threads.map(ask, range(4))
    served = {
        r["replica"]: r["served"] - before[r["replica"]]
        for r in web.status()["replicas"]
    }
    assert served == {name: seen.count(name) for name in ("web/0", "web/1")}
    assert web.status()["in_flight"] == 0


def test_streams_of_the_gateway_are_whole(web: jv.Pool, gateway: openai.OpenAI):
    with gateway.completions.create(
        model=web.model, prompt="Once upon a time", stream=True, **GREEDY
    ) as stream:
        events = [event.choices[0].text for event in stream]
    assert len(events) > 1
    assert "".join(events) == greedy(web)
    with gateway.chat.completions.create(
        model=web.model, messages=CHAT, stream=True, max_tokens=8
    ) as chat:
        assert list(chat)
    raw = gateway.chat.completions.with_raw_response.create(
        model=web.model, messages=CHAT, max_tokens=4, stream=True
    )
    assert raw.headers["x-jvlab-version"] == "0"
    text = raw.http_response.read().decode()
    assert text.rstrip().endswith(": x-jvlab-versions 0"), (
        "which versions made it, after the last event"
    )
    with (
        pytest.raises(openai.AuthenticationError),
        openai.OpenAI(base_url=web.http_url, api_key="wrong") as wrong,
    ):
        wrong.models.list()


def test_tokens_in_tokens_out(web: jv.Pool, bridge: httpx.Client):
    """vLLM's own route, as verifiers and prime-rl speak it."""
    path = "/inference/v1/generate"
    prompt = [5, 6, 7, 8]
    sampling = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    sampling |= {"logprobs": 1, "n": 2}
    body = {"model": web.model, "token_ids": prompt, "sampling_params": sampling}
    reply = bridge.post(path, json={**body, "return_token_ids": True})
    assert reply.status_code == 200, reply.text
    version = web.status()["version"]
    assert reply.headers["x-jvlab-version"] == str(version)
    answer = reply.json()
    assert answer["prompt_token_ids"] == prompt
    for choice in answer["choices"]:
        tokens = choice["token_ids"]
        content = choice["logprobs"]["content"]
        assert len(tokens) == 6
        assert [entry["token_id"] for entry in content] == tokens
        assert [entry["token"] for entry in content] == [
            f"token_id:{token}" for token in tokens
        ]
        spans = choice["weight_versions"]
        assert [(s["version"], s["start"], s["end"]) for s in spans] == [
            (str(version), 0, 6)
        ]
        scored = web.score([prompt + tokens])[0][len(prompt) :]
        sampled = [entry["logprob"] for entry in content]
        np.testing.assert_allclose(scored, sampled, atol=1e-4)
    # the same, event by event
    # many tokens: while this process waits for a core, several become one event
    one = {**body, "sampling_params": {**sampling, "n": 1, "max_tokens": 200}}
    one |= {"stream": True}
    with bridge.stream("POST", path, json=one) as stream:
        lines = [line for line in stream.iter_lines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: "))["choices"] for line in lines]
    parts = [choice for choices in events for choice in choices]
    assert len([part for part in parts if part["token_ids"]]) > 1
    joined = [token for part in parts for token in part["token_ids"] or ()]
    assert len(joined) == 200
    entries = [e for p in parts if p["logprobs"] for e in p["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [f"token_id:{t}" for t in joined]
    base = web.http_url.removesuffix("/v1")
    assert httpx.post(f"{base}{path}", json=body, timeout=300).status_code == 401
    for wrong, word in (
        ({**body, "token_ids": [10**7]}, "the vocabulary has"),
        ({**body, "token_ids": [1] * 10**6}, ""),
        ({**body, "sampling_params": {"n": 10**7}}, "samples of one prompt"),
    ):
        refused = bridge.post(path, json=wrong)
        assert refused.status_code == 400, refused.text
        assert word in refused.json()["error"]["message"]


VERIFIERS = """
import asyncio, json, os, sys
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

model, url = sys.argv[1:]

async def main():
    client = TrainClient(TrainClientConfig(base_url=url, api_key_var="LAB_TOKEN", renderer_model_name=model))
    body = {"model": model, "messages": [{"role": "user", "content": "Tell me a story"}]}
    sampling = SamplingConfig(max_tokens=8, temperature=1.0)
    found = await client.get_response(ChatDialect(), body, sampling)
    tokens = found.tokens
    print(json.dumps([tokens.prompt_ids, tokens.completion_ids, tokens.completion_logprobs, found.finish_reason]))

asyncio.run(main())
"""


def test_a_client_of_verifiers(web: jv.Pool):
    """verifiers 0.4 moves openai and mcp: it is installed elsewhere, `pip install --target DIR verifiers==0.4.0`."""
    folder = os.environ.get("JVLAB_VERIFIERS")
    if not folder:
        pytest.skip("JVLAB_VERIFIERS names no folder with verifiers in it")
    done = subprocess.run(
        [sys.executable, "-c", VERIFIERS, web.model, web.http_url],
        env={**os.environ, "PYTHONPATH": folder, "LAB_TOKEN": web.http_token},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    prompt, tokens, logprobs, finish = json.loads(done.stdout.splitlines()[-1])
    assert finish in ("length", "stop")
    assert len(logprobs) == len(tokens) > 0
    scored = web.score([prompt + tokens])[0][len(prompt) :]
    np.testing.assert_allclose(scored, logprobs, atol=1e-4)


def test_a_client_that_leaves_ends_its_request_in_the_engine(
    web: jv.Pool, gateway: openai.OpenAI
):
    def generated() -> int:
        return sum(replica["generated_tokens"] for replica in web.status()["replicas"])

    before = generated()
    body = {"ignore_eos": True}
    with gateway.completions.create(
        model=web.model, prompt="x", stream=True, max_tokens=1900, extra_body=body
    ) as left:
        next(iter(left))
    deadline, last = time.monotonic() + 60, -1
    while (now := generated()) != last:
        assert time.monotonic() < deadline, "it generates on"
        last = now
        time.sleep(1.0)
    assert now - before < 1500, "it was ended long before its last token"
    until(lambda: web.status()["in_flight"] == 0, "the end of the request")


HOSTILE = [
    b"[" * 100_000,
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "n": 200000}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "n": "4000000"}',
    b'{"prompt": "x", "seed": 1%s}' % (b"0" * 40),
    b'{"prompt": [99999999]}',
    b'{"prompt": [-5]}',
    b'{"prompt": []}',
    b'{"prompt": [[]]}',
    b'{"prompt": {"a": 1}}',
    b"\xff",
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "stop": [""]}',
    b'{"prompt": "x", "logit_bias": {"a": 1}}',
    b'{"prompt": "x", "logprobs": 100000}',
    b'{"prompt": "x", "top_k": -7}',
    b'{"prompt": "x", "stream": "maybe"}',
    b"{}",
    b'{"prompt": "x", "prompt_logprobs": -9}',
    b'{"prompt": "x", "allowed_token_ids": []}',
    b'{"prompt": "x", "model": "no"}',
    b'{"prompt": "x", "logit_bias": {"99999999": 1}}',
    b'{"prompt": "x", "min_tokens": 99999, "max_tokens": 1}',
    b"null",
]


HOSTILE_TOKENS = [
    b"{}",
    b"[]",
    b'{"token_ids": [1]}',
    b'{"token_ids": [], "sampling_params": {}}',
    b'{"token_ids": [-5], "sampling_params": {}}',
    b'{"token_ids": [99999999], "sampling_params": {}}',
    b'{"prompt": "x", "token_ids": [99999999], "sampling_params": {}}',
    b'{"token_ids": [[1]], "sampling_params": {}}',
    b'{"token_ids": "x", "sampling_params": {}}',
    b'{"token_ids": [1], "sampling_params": []}',
    b'{"token_ids": [1], "sampling_params": {"n": 200000}}',
    b'{"token_ids": [1], "sampling_params": {"n": 0}}',
    b'{"token_ids": [1], "sampling_params": {"temperature": NaN}}',
    b'{"token_ids": [1], "sampling_params": {"temperature": -1}}',
    b'{"token_ids": [1], "sampling_params": {"max_tokens": -1}}',
    b'{"token_ids": [1], "sampling_params": {"logprobs": 100000}}',
    b'{"token_ids": [1], "sampling_params": {"logit_bias": {"99999999": 1}}}',
    b'{"token_ids": [1], "sampling_params": {"allowed_token_ids": [99999999]}}',
    b'{"token_ids": [1], "sampling_params": {"stop_token_ids": ["a"]}}',
    b'{"token_ids": [1], "sampling_params": {"no_such_field": 1}}',
    b'{"token_ids": [1], "sampling_params": {}, "model": "no"}',
    b'{"token_ids": [1], "sampling_params": {}, "priority": 1%s}' % (b"0" * 40),
]


def test_hostile_requests_are_refused_and_harmless(web: jv.Pool):
    """By the gateway and by a replica itself: never a 500, and the engine lives on."""
    headers = {
        "Authorization": f"Bearer {web.http_token}",
        "Content-Type": "application/json",
    }
    wrong = []
    with httpx.Client(headers=headers, timeout=120) as client:
        for url in (web.http_url, replica_urls(web)[0]):
            for body in HOSTILE:
                reply = client.post(f"{url}/completions", content=body)
                if reply.status_code >= 500:
                    wrong.append(
                        (
                            url == web.http_url,
                            body[:60],
                            reply.status_code,
                            reply.text[:200],
                        )
                    )
            for body in HOSTILE_TOKENS:
                path = f"{url.removesuffix('/v1')}/inference/v1/generate"
                reply = client.post(path, content=body)
                if reply.status_code >= 500:
                    wrong.append((path, body[:60], reply.status_code, reply.text[:200]))
            assert (
                client.post(
                    f"{url}/chat/completions", content=b'{"messages":' + b"[" * 100_000
                ).status_code
                == 400
            )
    assert not wrong, wrong
    assert greedy(web)
    assert web.status()["healthy"] == 2


def test_bridge_looks_and_steers(
    web: jv.Pool, bridge: httpx.Client, schemas: dict[str, Any], gateway: openai.OpenAI
):
    import jsonschema  # takes seconds

    for path in ("/bridge/status", "/bridge/version"):
        reply = bridge.get(path)
        assert reply.status_code == 200, reply.text
        jsonschema.validate(reply.json(), schemas[path])
    assert bridge.get("/bridge/version").json()["replicas"] == {"web/0": 0, "web/1": 0}
    paused = bridge.post("/bridge/pause", json={"mode": "wait"})
    jsonschema.validate(paused.json(), schemas["/bridge/pause"])
    assert all(replica["paused"] for replica in web.status()["replicas"])
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(
            gateway.completions.create, model=web.model, prompt="x", max_tokens=2
        )
        assert web.status()["in_flight"] == 0, "held back"
        jsonschema.validate(
            bridge.post("/bridge/resume").json(), schemas["/bridge/resume"]
        )
        assert answer.result().choices


def with_tensor(model: str, folder: Path, name: str, value: float) -> str:
    """A copy of a checkpoint in which the first element of a tensor, perhaps a new one, is this; poison or not."""
    from safetensors.numpy import load_file, save_file

    folder.mkdir()
    for file in Path(model).glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors or "more" in name:
            tensors[name] = tensors.get(name, np.ones(4, np.float32)).copy()
            tensors[name].reshape(-1)[0] = value
        save_file(tensors, folder / file.name)
    return str(folder)


def test_bridge_takes_checkpoints(
    web: jv.Pool,
    bridge: httpx.Client,
    schemas: dict[str, Any],
    gateway: openai.OpenAI,
    llama: str,
    tmp_path: Path,
):
    import jsonschema  # takes seconds

    before, other = greedy(web), jv.models.tiny("llama", seed=1)

    def update(path: str, **more: Any) -> httpx.Response:
        return bridge.post("/bridge/notify_update", json={"path": path, **more})

    taken = update(other)
    assert taken.status_code == 200, taken.text
    report = taken.json()
    jsonschema.validate(report, schemas["/bridge/notify_update"])
    assert (report["version"], report["verified"]) == (1, True)
    assert [outcome["state"] for outcome in report["outcomes"]] == ["committed"] * 2
    assert report["digests"]
    assert greedy(web) != before
    raw = gateway.completions.with_raw_response.create(
        model=web.model, prompt="Once upon a time", **GREEDY
    )
    assert raw.headers["x-jvlab-version"] == "1"
    assert raw.parse().choices[0].text == greedy(web)
    for path, status, word in (
        (str(tmp_path / "nowhere"), 400, "is not a folder"),
        (str(tmp_path), 400, "no safetensors"),
        (jv.models.tiny("qwen3"), 422, "→"),
        (
            with_tensor(other, tmp_path / "nan", "model.norm.weight", np.nan),
            422,
            "model.norm.weight: 1 NaN of",
        ),
        (
            with_tensor(other, tmp_path / "more", "model.more.weight", 0.0),
            422,
            "model.more.weight",
        ),
    ):
        refused = update(path, mode="staged")
        assert refused.status_code == status, refused.text
        assert word in refused.json()["error"]["message"]
        assert refused.json()["error"]["remedy"]
    assert update(other, version=1).status_code == 400, (
        "not larger than what the pool holds"
    )
    assert bridge.get("/bridge/version").json()["replicas"] == {"web/0": 1, "web/1": 1}
    back = update(llama, transport="disk", version=7)
    assert back.status_code == 200, back.text
    assert (back.json()["version"], back.json()["transport"]) == (7, "disk")
    assert greedy(web) == before, "the first checkpoint's weights again"
    assert web.status()["trainer"] is None, "the pool is free for another trainer"


def test_a_request_goes_on_through_an_update(
    web: jv.Pool, bridge: httpx.Client, gateway: openai.OpenAI
):
    """Frozen in the engine, the weights exchanged, and on: its end says which versions made it."""
    held = bridge.get("/bridge/version").json()["version"]
    body = {
        "model": web.model,
        "prompt": "Once",
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }
    with bridge.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        assert reply.headers["x-jvlab-version"] == str(held)
        until(lambda: web.status()["in_flight"] == 1, "a request in flight")
        bridge.post("/bridge/pause", json={"mode": "keep"}).raise_for_status()
        path = jv.models.tiny("llama", seed=2)
        bridge.post(
            "/bridge/notify_update", json={"path": path, "version": held + 1}
        ).raise_for_status()
        assert all(replica["paused"] for replica in web.status()["replicas"]), (
            "an update ends no user's pause"
        )
        bridge.post("/bridge/resume").raise_for_status()
        rest = list(lines)
    assert "data: [DONE]" in rest
    assert f": x-jvlab-versions {held},{held + 1}" in rest


def test_a_replica_killed_in_a_stream(web: jv.Pool, gateway: openai.OpenAI):
    """The last test: it leaves one replica."""
    with gateway.completions.create(
        model=web.model,
        prompt="Once",
        stream=True,
        max_tokens=1500,
        extra_body={"ignore_eos": True},
    ) as stream:
        events = iter(stream)
        next(events)
        name, pid = next(
            (r["replica"], r["pid"]) for r in web.status()["replicas"] if r["in_flight"]
        )
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            openai.APIError, match=r"was lost.*the answer is not complete"
        ):
            list(events)
    left = ({"web/0", "web/1"} - {name}).pop()
    for _ in range(3):
        raw = gateway.completions.with_raw_response.create(
            model=web.model, prompt="x", max_tokens=2
        )
        assert raw.headers["x-jvlab-replica"] == left
    assert web.status()["in_flight"] == 0
