"""A gateway with fake replicas, and a pool of two. The conftest.py of each folder that uses them imports them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import jvlab as jv
from tests.gateway.fake_lab import FakeLab

if TYPE_CHECKING:
    import httpx


@pytest.fixture
def fake_lab(tmp_path: Path) -> Iterator[FakeLab]:
    lab = FakeLab(tmp_path)
    yield lab
    lab.end()


@pytest.fixture
def client(fake_lab: FakeLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[jv.Lab]:
    monkeypatch.setattr(
        "jvlab.lab._launch_settings.resolve_device", lambda device: "cpu"
    )
    lab = jv.Lab.attach(fake_lab.address, fake_lab.token)
    yield lab
    lab._leave()


@pytest.fixture
def pool(client: jv.Lab, llama: str) -> jv.Pool:
    """Its replicas stay dead, as most tests of a death want it; test_scale.py has those that come back."""
    return client.launch(llama, replicas=2, name="p", restarts=0).wait(60)


@pytest.fixture
def http_pool(
    fake_lab: FakeLab, client: jv.Lab, llama: str, monkeypatch: pytest.MonkeyPatch
) -> jv.Pool:
    """Two fake replicas that serve HTTP too."""
    from tests.gateway.fake_http import HttpFakeReplica

    monkeypatch.setattr("tests.gateway.fake_lab.FakeReplica", HttpFakeReplica)
    made = client.launch(llama, replicas=2, name="p", http=True, restarts=0)
    return made.wait(60)


@pytest.fixture
def raw(http_pool: jv.Pool) -> Iterator[httpx.Client]:
    """A plain HTTP client for the pool's HTTP front end."""
    import httpx

    base, token = http_pool.http_url.removesuffix("/v1"), http_pool.http_token
    with httpx.Client(
        base_url=base, headers={"Authorization": f"Bearer {token}"}, timeout=60
    ) as http:
        yield http
