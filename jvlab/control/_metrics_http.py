"""`/metrics` of a gateway for Prometheus: one read-only page over HTTP on loopback, with the lab's token."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

from jvlab.control import jvlab_pb2 as pb
from jvlab.record._prometheus import CONTENT_TYPE, pool_metrics, prometheus_text
from jvlab.views._cards import pool_summary

READ_SECONDS = 5.0
MAX_HEAD = 16 << 10


async def serve_metrics(status: Callable[[], pb.LabStatus], token: str, port: int) -> asyncio.Server:
    """Listen on 127.0.0.1; a scrape sends `Authorization: Bearer <token>`, as every other call does."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), READ_SECONDS)
            writer.write(_reply(head.decode("latin-1"), status, token))
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # whoever asked has gone, or sends no HTTP
        finally:
            writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", port, limit=MAX_HEAD)


def _reply(head: str, status: Callable[[], pb.LabStatus], token: str) -> bytes:
    request, *lines = head.split("\r\n")
    fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    method, _, rest = request.partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if not hmac.compare_digest(fields.get("authorization", "").encode(), f"Bearer {token}".encode()):
        return _page("401 Unauthorized", "the lab's token is missing: Authorization: Bearer <token>\n")
    if path != "/metrics":
        return _page("404 Not Found", "only /metrics is served here\n")
    if method != "GET":
        return _page("405 Method Not Allowed", "GET only\n")
    return _page("200 OK", prometheus_text(pool_metrics(pool_summary(p) for p in status().pools)), CONTENT_TYPE)


def _page(status: str, text: str, kind: str = "text/plain; charset=utf-8") -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
