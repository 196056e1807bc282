"""`/metrics` of a gateway for Prometheus: one read-only page over HTTP on loopback, with the lab's token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jvlab.gateway._http_server import Handler, Listener, listen
from jvlab.record._prometheus import CONTENT_TYPE, prometheus_text
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._pool_summary import pool_summary

if TYPE_CHECKING:
    from aiohttp import web


def metrics_page(status: Callable[[], list[pb.PoolStatus]]) -> Handler:
    """The page of these pools."""

    async def page(_: web.Request) -> web.Response:
        from aiohttp import web

        text = prometheus_text(pool_summary(pool) for pool in status())
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    return page


async def serve_metrics(status: Callable[[], pb.LabStatus], token: str, port: int) -> Listener:
    """Listen on 127.0.0.1; a scrape sends `Authorization: Bearer <token>`, as every other call does."""
    return await listen([("GET", "/metrics", metrics_page(lambda: list(status().pools)))], token, port)
