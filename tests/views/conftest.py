"""Panels are tested over the control plane's own test lab."""

from tests.gateway.fixtures import client, fake_lab, pool

__all__ = ["client", "fake_lab", "pool"]
