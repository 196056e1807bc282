"""The parts of `bench topology` that need no engine: the HTTP client, turns, arithmetic, on ways that are faked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from jvlab import errors
from jvlab.bench import _topology as bench


class Server(BaseHTTPRequestHandler):
    """Answers completions: token k of a prompt is its first token plus k."""

    protocol_version = "HTTP/1.1"
    connections: ClassVar[set[Any]] = set()
    requests: ClassVar[list[dict[str, Any]]] = []
    status = 200

    def do_POST(self) -> None:
        cls = type(self)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cls.connections.add(self.client_address)
        cls.requests.append(
            {**body, "path": self.path, "authorization": self.headers["Authorization"]}
        )
        choices = [
            {"index": i, "token_ids": [ids[0] + k for k in range(body["max_tokens"])]}
            for i, ids in enumerate(body["prompt"])
        ]
        text = json.dumps({"choices": choices[::-1]}).encode()
        self.send_response(cls.status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("x-jvlab-version", "7")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    Server.connections, Server.requests, Server.status = set(), [], 200
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("keep", "connections"), [(True, 1), (False, 3)])
def test_keep_alive_means_one_connection(url: str, keep: bool, connections: int):
    way = bench.HttpWay("http", url, "secret", "model", keep)
    for _ in range(3):
        assert way.ask([[5, 6], [9]], 2) == ([[5, 6], [9, 10]], 7), (
            "in the order of the prompts"
        )
    way.close()
    assert len(Server.connections) == connections
    asked = Server.requests[0]
    assert (asked["path"], asked["authorization"]) == (
        "/v1/completions",
        "Bearer secret",
    )
    assert (asked["model"], asked["temperature"], asked["ignore_eos"]) == (
        "model",
        0.0,
        True,
    )


def test_a_refusal_is_told(url: str):
    Server.status = 503
    way = bench.HttpWay("http", url, "secret", "model", True)
    with pytest.raises(errors.ControlError, match="http: HTTP 503"):
        way.ask([[5]], 1)
    way.close()


class FakePool:
    """A pool whose engine takes a hundredth of a second."""

    def generate(self, prompts: list[list[int]], **options: Any) -> Any:
        import numpy as np

        from jvlab.record._batch import RolloutBatch
        from jvlab.record._sample import Sample

        count = options["max_tokens"]
        samples = tuple(
            Sample(
                prompt_index=i,
                sample_index=0,
                prompt=None,
                prompt_token_ids=np.array(ids, np.int32),
                text="",
                token_ids=np.arange(count, dtype=np.int32),
                logprobs=np.zeros(count, np.float32),
                finish_reason="length",
                versions=((3, 0, count),),
                replica="p/0",
                retried=0,
                seconds={"queued": 0.0, "first_token": 0.01, "total": 0.01},
                error=None,
            )
            for i, ids in enumerate(prompts)
        )
        return RolloutBatch(
            samples,
            logprobs_mode="processed_logprobs",
            model="m",
            notes=(),
            seconds=0.01,
        )


class Scripted:
    def __init__(self, name: str, first: int) -> None:
        self.name, self.first = name, first

    def ask(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], int]:
        return [list(range(self.first, self.first + tokens)) for _ in prompts], 3


def ways(first: int = 0) -> list[Any]:
    pools = [bench.PoolWay(name, FakePool()) for name in ("in_process", "grpc")]  # type: ignore[arg-type]
    return [*pools, Scripted("http_keep_alive", first), Scripted("http", first)]


def test_ways_that_disagree_are_no_benchmark():
    bench._check_alike(ways())
    with pytest.raises(
        errors.ControlError,
        match="http_keep_alive gave different greedy tokens than in_process",
    ):
        bench._check_alike(ways(first=1))


def test_everybody_comes_first_once():
    turns = [way.name for way in bench._turns(ways(), 4)]
    assert turns[::4] == ["in_process", "grpc", "http_keep_alive", "http"]
    assert all(len(set(turns[k : k + 4])) == 4 for k in range(0, 16, 4))


def test_the_numbers_are_the_ratios_of_medians():
    found = bench._requests(ways(), 2)
    ms, engine = found["request_ms"], found["engine_ms"]
    assert engine == {"in_process": pytest.approx(10.0), "grpc": pytest.approx(10.0)}
    assert found["grpc_vs_inprocess_ratio"] == ms["grpc"] / ms["in_process"]
    assert found["http_vs_inprocess_ratio"] == ms["http_keep_alive"] / ms["in_process"]
    assert found["overhead_ms"]["http"] == pytest.approx(ms["http"] - 10.0)


class FakeHandle:
    def result(self, timeout: float) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(verified=True)


class FakeLink:
    def __init__(self) -> None:
        self.version = 0

    def sync_async(self, params: Any, version: int) -> FakeHandle:
        self.version = version
        return FakeHandle()


class Later:
    """Serves the new version at the second request after a sync."""

    def __init__(self, name: str, link: FakeLink) -> None:
        self.name, self._link, self.asked = name, link, 0

    def ask(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], int]:
        self.asked += 1
        return [[0]], self._link.version - self.asked % 2


def test_freshness_waits_for_the_new_version():
    link = FakeLink()
    later: list[Any] = [Later(name, link) for name in ("in_process", "grpc")]
    links: dict[str, Any] = {"in_process": link, "grpc": link}
    found = bench._freshness(later, links, None, 3)
    assert set(found) == {"in_process", "grpc"}
    assert [way.asked for way in later] == [6, 6]
    assert link.version == 6
