"""HTTP, client side: the fields of `launch(http=...)`, and a pool's URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError

if TYPE_CHECKING:
    from jvlab.wire import jvlab_pb2 as pb


def launch_fields(http: bool | int) -> dict[str, Any]:
    """`launch(http=...)` as request fields: True takes a free port, a number that port."""
    if isinstance(http, bool):
        return {"http": http}
    if not isinstance(http, int) or not 0 < http < 2**16:
        raise ConfigError(f"http must be True, False or a port, not {http!r}", remedy="True takes a free port")
    return {"http": True, "http_port": http}


def http_url(snapshot: pb.PoolStatus) -> str:
    """Where the pool's HTTP front listens."""
    if not snapshot.http_url:
        raise ConfigError(
            f"pool {snapshot.pool!r} serves no HTTP: it was launched without it, or is closed",
            remedy="pool = lab.launch(..., http=True)",
        )
    return snapshot.http_url
