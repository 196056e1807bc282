"""The policies of this process, by which a link finds its trainer. Imports no JAX: those who ask may not need it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jvlab.trainer._policy import Policy

_alive: weakref.WeakSet[Policy] = weakref.WeakSet()


def remember_policy(policy: Policy) -> None:
    """Until it is garbage-collected."""
    _alive.add(policy)


def live_policies() -> list[Policy]:
    """Every `jv.Policy` that somebody still holds."""
    return list(_alive)
