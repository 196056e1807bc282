"""Hostile HTTP: whatever is sent to the gateway's front and bridge, the answer is theirs and never a 500."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import zlib
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jvlab as jv
from jvlab.gateway._http_bridge import ROUTES
from tests.fuzzing import examples
from tests.gateway.fake_http import HttpFakeReplica
from tests.gateway.fake_lab import FakeLab

DEEP = b"[" * 200_000
DEEP_OBJECT = b'{"a":' * 200_000
POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
POSTS += [route.path for route in ROUTES if route.method == "POST"]


class Front:
    """Speaks bytes: what no HTTP library would send."""

    def __init__(self, url: str, token: str) -> None:
        self.address, self.token = ("127.0.0.1", httpx.URL(url).port), token

    def ask(
        self,
        path: str,
        body: bytes = b"",
        headers: list[tuple[bytes, bytes]] | None = None,
        method: str = "POST",
        token: bytes | None = None,
        promised: int | None = None,
    ) -> tuple[int, bytes]:
        bearer = b"Bearer " + (self.token.encode() if token is None else token)
        lines = [
            (b"Host", b"x"),
            (b"Authorization", bearer),
            (b"Content-Length", str(promised or len(body)).encode()),
        ]
        lines += [(b"Connection", b"close"), *(headers or [])]
        head = f"{method} {path} HTTP/1.1\r\n".encode() + b"".join(
            k + b": " + v + b"\r\n" for k, v in lines
        )
        with socket.create_connection(self.address, timeout=60) as end:
            with contextlib.suppress(ConnectionError):  # it may have answered already
                end.sendall(head + b"\r\n" + body)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while part := end.recv(1 << 16):
                    answer += part
        assert answer, "hung up without an answer"
        top, _, rest = answer.partition(b"\r\n\r\n")
        return int(top.split(b" ", 2)[1]), rest


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, llama: str) -> Iterator[Front]:
    """One front over fake replicas for all that is thrown at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.gateway.fake_lab.FakeReplica", HttpFakeReplica)
        patch.setattr("jvlab.lab._launch_settings.resolve_device", lambda device: "cpu")
        fake = FakeLab(tmp_path_factory.mktemp("hostile"))
        lab = jv.Lab.attach(fake.address, fake.token)
        pool = lab.launch(llama, name="p", http=True).wait(60)
        yield Front(pool.http_url, pool.http_token)
        lab._leave()
        fake.end()


def refused(status: int, body: bytes) -> None:
    assert 400 <= status < 500, (status, body[:300])
    assert json.loads(body)["error"]["message"], body


@pytest.mark.parametrize(
    "token", [b"\xff\xfe", b"caf\xc3\xa9", b"\xed\xa0\x80", b"", b"\x80" * 5000]
)
def test_hostile_authorization(front: Front, token: bytes):
    for path in ("/v1/models", "/bridge/status", "/metrics"):
        status, body = front.ask(path, method="GET", token=token)
        assert status == 401, body
        refused(status, body)


@pytest.mark.parametrize(
    "body",
    [
        DEEP,
        DEEP_OBJECT,
        b'{"messages":' + DEEP,
        b'{"prompt":' + DEEP,
        b'{"model_path":' + DEEP,
    ],
)
@pytest.mark.parametrize("path", [path for path in POSTS if "token" not in path])
def test_hostile_deep_json(front: Front, path: str, body: bytes):
    refused(*front.ask(path, body))
    closed = b"[" * 500 + b"]" * 500  # whole, and deeper than anybody means it
    refused(
        *front.ask(
            path, b'{"messages":' + closed + b',"mode":' + closed + b',"prompt":"x"}'
        )
    )


@pytest.mark.parametrize(
    "content",
    [
        {"prompt": "\ud800"},
        {"prompt": ["fine", "\udfff"]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"prompt": "x", "stop": ["\ud800"]},
        {"prompt": "x", "\ud800": 1},
    ],
)
def test_hostile_lone_surrogates(front: Front, content: dict[str, object]):
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/bridge/pause",
        "/bridge/notify_update",
    ):
        refused(*front.ask(path, json.dumps(content).encode()))


@pytest.mark.parametrize(
    "version", [b"9" * 5000, b"-1", b"1e3", b"\xd9\xa3", b"\xff", b"1" * 30, b"", b" "]
)
def test_hostile_version(front: Front, version: bytes):
    for path in ("/v1/completions", "/v1/models"):
        method = "GET" if path.endswith("models") else "POST"
        status, body = front.ask(
            path, b'{"prompt":"x"}', [(b"x-jvlab-min-version", version)], method
        )
        if version.strip():
            refused(status, body)
        assert status < 500 or json.loads(body)["error"]["type"] != "internal", body


@pytest.mark.parametrize(
    "name",
    [
        b"x-request-id",
        b"traceparent",
        b"accept",
        b"content-type",
        b"tracestate",
        b"cookie",
    ],
)
def test_hostile_headers_are_passed_on_or_refused(front: Front, name: bytes):
    for value in (b"\xff", b"caf\xc3\xa9", b"a" * 7000, b"\x01"):
        status, body = front.ask("/v1/completions", b'{"prompt":"x"}', [(name, value)])
        assert status == 200 or 400 <= status < 500, (status, body[:200])


def test_hostile_encodings(front: Front):
    good = b'{"prompt":"x"}'
    for encoding, body in (
        (b"gzip", good),
        (b"deflate", good),
        (b"br", good),
        (b"gzip", gzip.compress(good)[:-9]),
        (b"zstd", good),
        (b"gzip", gzip.compress(b"[" + b" " * (65 << 20), 1)),
        (b"deflate", zlib.compress(b"\xff" * 100)),
        (b"\xff", good),
    ):
        for path in ("/v1/completions", "/bridge/pause", "/tokenize"):
            status, said = front.ask(path, body, [(b"Content-Encoding", encoding)])
            assert status < 500, (encoding, status, said[:200])


@pytest.mark.parametrize(
    "body",
    [
        b'{"timeout": 1e999, "path": "/x"}',
        b'{"timeout": NaN, "path": "/x"}',
        b"\xff\xfe",
        b'"\\ud800"',
        b"nul",
        b'{"timeout": 1' + b"0" * 400 + b', "path": "/x"}',
        b'{"path": "/x\\u0000"}',
        b'{"version": 1' + b"0" * 30 + b"}",
        b'{"version": -1, "path": "/nowhere"}',
        b'{"mode": "keep", "clear_cache": 1}',
        b'{"path": "' + b"x" * 10**6 + b'"}',
    ],
)
def test_hostile_fields_of_the_bridge(front: Front, body: bytes):
    for route in ROUTES:
        if route.method == "POST" and b"keep" not in body:
            refused(*front.ask(route.path, body))


def test_hostile_paths(front: Front):
    for path in (
        "/%00",
        "/%ff",
        "/v1/%2e%2e/x",
        "//",
        "/v1/completions/../../x",
        "/bridge/\\ud800",
        "/v1/completions?" + "a" * 5000,
    ):
        for method in ("GET", "POST", "PUT", "OPTIONS", "TRACE"):
            status, body = front.ask(path, b"{}", method=method)
            assert status < 500, (method, path, body[:200])


def test_hostile_samples_of_a_request(front: Front):
    """What one request may ask is bounded here too: no replica ever hears of it."""
    for content in (
        {"prompt": "x", "n": 200_000},
        {"prompt": "x", "n": 10**30},
        {"prompt": "x", "best_of": 4_000_000},
        {"prompt": ["x"] * 100_000},
        {"prompt": [[1]] * 5000, "n": 1000},
        {"prompt": "x", "n": "2000"},
    ):
        status, body = front.ask("/v1/completions", json.dumps(content).encode())
        refused(status, body)
        error = json.loads(body)["error"]
        assert "limits" in error["remedy"], error
        assert error["type"] == "LimitExceeded"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(st.characters(codec=None), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "prompt",
        "messages",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "best_of",
        "stream",
        "model",
        "mode",
        "clear_cache",
        "timeout",
        "path",
        "version",
        "rules",
        "stop",
        "sampling_params",
        "prompts",
        "input",
    ]
)
LINE = st.binary(min_size=1, max_size=12).map(
    lambda raw: raw.replace(b"\r", b"").replace(b"\n", b"").replace(b"\0", b"") or b"x"
)


@settings(
    max_examples=examples(120),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    path=st.sampled_from([path for path in POSTS if "notify" not in path]),
    body=st.dictionaries(FIELDS, JSON, max_size=5).map(lambda d: json.dumps(d).encode())
    | JSON.map(lambda v: json.dumps(v).encode())
    | st.binary(max_size=60),
    headers=st.lists(
        st.tuples(
            st.sampled_from(
                [
                    b"x-jvlab-min-version",
                    b"content-type",
                    b"x-request-id",
                    b"accept",
                    b"traceparent",
                ]
            ),
            LINE,
        ),
        max_size=2,
    ),
)
def test_hostile_requests_at_random(
    front: Front, path: str, body: bytes, headers: list[tuple[bytes, bytes]]
):
    status, said = front.ask(path, body, headers)
    assert status < 500 or (status == 503 and b"remedy" in said), (
        path,
        body,
        headers,
        status,
        said[:300],
    )
    front.ask("/bridge/resume")  # what it may have paused


@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    token=LINE,
    method=st.sampled_from(["GET", "POST", "DELETE"]),
    path=st.sampled_from([*POSTS, "/v1/models", "/metrics"]),
)
def test_hostile_tokens_at_random(front: Front, token: bytes, method: str, path: str):
    status, _ = front.ask(path, b"{}", method=method, token=token)
    assert status in (400, 401)


def test_a_body_that_does_not_come_is_not_waited_for(
    front: Front, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jvlab.gateway._http_server.BODY_SECONDS", 0.3, raising=False)
    status, body = front.ask(POSTS[0], b"{", headers=[(b"X", b"y")], promised=100)
    assert status == 408
    refused(status, body)
    assert b"did not arrive within 0.3 s" in body
