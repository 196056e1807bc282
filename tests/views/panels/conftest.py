"""These tests use a gateway with fake replicas: its `pool` replaces the session's real engine."""

from tests.gateway.fixtures import client, fake_lab, pool

__all__ = ["client", "fake_lab", "pool"]
