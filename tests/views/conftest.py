"""Panels are tested over the control plane's own test lab."""

from tests.control.conftest import client, fake_lab, pool

__all__ = ["client", "fake_lab", "pool"]
