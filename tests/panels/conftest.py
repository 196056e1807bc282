"""These tests run over a gateway with fake replicas: its `pool` in place of the session's real engine."""

from tests.gateway.fixtures import client, fake_lab, pool

__all__ = ["client", "fake_lab", "pool"]
