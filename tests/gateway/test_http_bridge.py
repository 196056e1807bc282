"""The bridge over fake replicas: its document and its routes, what it refuses, and its helper process."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.gateway import _http_bridge
from jvlab.lab._checkpoint_trainer import read_checkpoint
from tests.gateway.fake_lab import FakeLab

HELPER = """
import json, os, sys
for line in sys.stdin:
    said = json.loads(line)
    if said["path"] == "dies":
        sys.exit(3)
    if said["path"] == "falls silent":
        os.close(1)
    if said["path"] in ("hangs", "falls silent"):
        sys.stdin.read()
        break
    kinds = {"busy": "LinkBusy", "late": "DeadlineExceeded", "shape": "CoverageError", "dirty": "VerifyError"}
    status = {"shape": 422}.get(said["path"], 500)
    error = {"kind": kinds.get(said["path"]), "status": status, "message": "why", "remedy": "what to do"}
    print(json.dumps({"error": error} if said["path"] in kinds else {"version": 4, "said": said}), flush=True)
"""


@pytest.fixture
def pool(http_pool: jv.Pool) -> jv.Pool:
    return http_pool


@pytest.fixture
def bridge(raw: httpx.Client) -> httpx.Client:
    return raw


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A stand-in for the helper process; the list takes the process ids of those that were started."""
    started: list[int] = []

    async def start(self: Any) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HELPER, stdin=pipe, stdout=pipe
        )
        started.append(process.pid)
        return process

    monkeypatch.setattr(_http_bridge.Updates, "_start", start)
    return started


def test_the_document_is_what_is_served(fake_lab: FakeLab, bridge: httpx.Client):
    import jsonschema  # takes seconds

    document = bridge.get("/bridge/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    front: Any = fake_lab.gateway.fronts._open["p"]
    served = {
        (route.method, route.resource.canonical)
        for route in front._listener._runner.app.router.routes()
    }
    documented = {
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method in methods
    }
    of_bridge = {
        (method, path) for method, path in served if path.startswith("/bridge")
    }
    assert of_bridge - documented == {("GET", "/bridge/openapi.json")}
    assert documented <= of_bridge
    asked = {"status", "version", "notify_update", "pause", "resume"}
    assert {path.removeprefix("/bridge/") for _, path in documented} == asked
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for methods in document["paths"].values():
        for operation in methods.values():
            told = [*operation["responses"].values()]
            if "requestBody" in operation:
                told.append(operation["requestBody"])
            for each in told:
                name = each["content"]["application/json"]["schema"]["$ref"]
                assert name.removeprefix("#/components/schemas/") in schemas


def test_answers_are_what_the_document_says(bridge: httpx.Client):
    import jsonschema  # takes seconds

    document = bridge.get("/bridge/openapi.json").json()
    for path in ("/bridge/status", "/bridge/version"):
        answer = document["paths"][path]["get"]["responses"]["200"]
        schema = answer["content"]["application/json"]["schema"]
        jsonschema.validate(bridge.get(path).json(), document | schema)
    refused = bridge.post("/bridge/pause", json={"mode": "stop"})
    assert refused.status_code == 400
    jsonschema.validate(
        refused.json(), document | {"$ref": "#/components/schemas/Error"}
    )


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("notify_update", b"{", "not valid JSON"),
        ("notify_update", b"[]", "not an object"),
        ("notify_update", b"{}", "needs path"),
        ("notify_update", b'{"path": 3}', "path must be a valid string"),
        ("notify_update", b'{"path": "x", "pathh": 3}', "takes no pathh"),
        (
            "notify_update",
            b'{"path": "x", "version": true}',
            "version must be a valid integer",
        ),
        (
            "notify_update",
            b'{"path": "x", "timeout": 0}',
            "timeout must be greater than 0",
        ),
        ("pause", b'{"mode": "stop"}', "'keep', 'wait' or 'abort'"),
        ("pause", b'{"clear_cache": "yes"}', "a valid boolean"),
        ("resume", b'{"mode": "keep"}', "takes no mode"),
    ],
)
def test_what_is_wrong_is_refused_with_a_remedy(
    bridge: httpx.Client, path: str, body: bytes, word: str
):
    reply = bridge.post(f"/bridge/{path}", content=body)
    assert reply.status_code == 400
    assert word in reply.json()["error"]["message"]
    assert reply.json()["error"]["remedy"]


def test_pause_and_resume_are_the_pools_own(
    fake_lab: FakeLab, pool: jv.Pool, bridge: httpx.Client
):
    bridge.post(
        "/bridge/pause", json={"mode": "wait", "clear_cache": True}
    ).raise_for_status()
    bridge.post("/bridge/resume").raise_for_status()
    assert all(len(fake.steered) == 2 for fake in fake_lab.fakes.values())
    pool.pause()
    assert fake_lab.gateway.steering.why("p") == "paused"
    bridge.post("/bridge/resume").raise_for_status()
    assert fake_lab.gateway.steering.why("p") == ""


def test_updates_one_after_another(bridge: httpx.Client, helper: list[int]):
    def update(path: str) -> httpx.Response:
        return bridge.post("/bridge/notify_update", json={"path": path, "timeout": 50})

    reply = update("fine").json()
    assert (reply["pool"], reply["version"], reply["said"]) == (
        "p",
        4,
        {"path": "fine", "timeout": 50},
    )
    for path, status in (("busy", 409), ("late", 504), ("shape", 422), ("dirty", 500)):
        refused = update(path)
        assert (refused.status_code, refused.json()["error"]["remedy"]) == (
            status,
            "what to do",
        )
    assert len(helper) == 1, "one process for all of them"
    died = update("dies")
    assert died.status_code == 500
    assert "ended with code 3" in died.json()["error"]["message"]
    assert update("fine").status_code == 200, "a new one takes its place"
    assert len(helper) == 2


def test_a_helper_that_closes_its_output_and_stays_is_ended(
    bridge: httpx.Client, helper: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_http_bridge, "START_SECONDS", 0.5)
    body = {"path": "falls silent", "timeout": 0.5}
    answer = bridge.post("/bridge/notify_update", json=body, timeout=60)
    assert answer.status_code == 500
    assert "did not answer in time" in answer.json()["error"]["message"]
    assert not psutil.pid_exists(helper[0])


def test_only_one_update_at_a_time_and_none_after_the_pool(
    pool: jv.Pool, bridge: httpx.Client, helper: list[int]
):
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(
            bridge.post, "/bridge/notify_update", json={"path": "hangs"}
        )
        deadline = time.monotonic() + 60
        while not helper:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        second = bridge.post("/bridge/notify_update", json={"path": "fine"})
        assert second.status_code == 409
        assert "under way" in second.json()["error"]["message"]
        from jvlab.wire import jvlab_pb2 as pb

        pool.client.call("ClosePool", pb.PoolRequest(pool="p"))
        with pytest.raises(httpx.HTTPError):
            first.result().raise_for_status()
    assert not psutil.pid_exists(helper[0]), "the helper ended with its pool"


def write(file: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_checkpoint_is_read_as_it_is(tmp_path: Path):
    numbers = np.arange(6, dtype="<f4")
    half = (numbers.view("<u4") >> 16).astype("<u2")
    write(tmp_path / "a.safetensors", {"x": ("F32", [2, 3], numbers.tobytes())})
    write(
        tmp_path / "b.safetensors",
        {"y": ("BF16", [6], half.tobytes()), "z": ("I64", [], b"\7" + bytes(7))},
    )
    found = read_checkpoint(str(tmp_path))
    assert sorted(found) == ["x", "y", "z"]
    assert np.array_equal(found["x"], numbers.reshape(2, 3))
    assert str(found["y"].dtype) == "bfloat16"
    assert np.array_equal(found["y"].astype("f4"), numbers)
    assert found["z"].shape == ()
    assert int(found["z"]) == 7


def test_a_checkpoint_that_is_none(tmp_path: Path):
    with pytest.raises(errors.ModelError, match="relative"):
        read_checkpoint("here")
    with pytest.raises(errors.ModelError, match="not a folder"):
        read_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(errors.ModelError, match="no safetensors"):
        read_checkpoint(str(tmp_path))
    write(tmp_path / "a.safetensors", {"x": ("F32", [2], bytes(8))})
    write(tmp_path / "b.safetensors", {"x": ("F32", [2], bytes(8))})
    with pytest.raises(errors.ModelError, match="in two files"):
        read_checkpoint(str(tmp_path))
    for content in (
        b"",
        b"short",
        (tmp_path / "a.safetensors").read_bytes()[:-3],
        b"\xff" * 100,
    ):
        (tmp_path / "b.safetensors").write_bytes(content)
        with pytest.raises(errors.ModelError, match="not a complete safetensors file"):
            read_checkpoint(str(tmp_path))
