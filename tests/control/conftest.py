"""A gateway with fake replicas, and a pool of two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import jvlab as jv
from tests.control.fake_lab import FakeLab


@pytest.fixture
def fake_lab(tmp_path: Path) -> Iterator[FakeLab]:
    lab = FakeLab(tmp_path)
    yield lab
    lab.end()


@pytest.fixture
def client(fake_lab: FakeLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[jv.Lab]:
    monkeypatch.setattr("jvlab._lab.resolve_device", lambda device: "cpu")
    lab = jv.Lab.attach(fake_lab.address, fake_lab.token)
    yield lab
    lab._leave()


@pytest.fixture
def pool(client: jv.Lab, llama: str) -> jv.Pool:
    return client.launch(llama, replicas=2, name="p").wait(60)
