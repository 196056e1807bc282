"""Fake replicas that answer over HTTP too, and a pool of two behind a real gateway's HTTP front."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from jvlab.wire import _security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from tests.gateway.fake_lab import FACTS, FakeReplica


class HttpFakeReplica(FakeReplica):
    """Answers every completion with its own name; `hold` keeps answers back, `dies` breaks the connection."""

    def __init__(self, name: str, gateway: str, token: str) -> None:
        super().__init__(name, gateway, token)
        self.hold = False
        # "before" the first byte, or in the "middle" of an event
        self.engine_death = ""
        self.refuses: list[str] = []  # one reason a request, taken from the front
        self.asked: list[dict[str, Any]] = []
        self.left = 0  # clients that did not wait for their answer

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/inference/v1/generate", self.complete)
        app.router.add_get("/v1/models", self.models)
        self.web = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self.web.setup()
        await web.TCPSite(self.web, "127.0.0.1", 0).start()
        await super().start()

    async def register(self) -> None:
        facts = pb.EngineFacts()
        facts.CopyFrom(FACTS)
        facts.http_url = f"http://127.0.0.1:{self.web.addresses[0][1]}/v1"
        request = pb.RegisterRequest(
            replica=self.name,
            address=f"127.0.0.1:{self.port}",
            facts=facts,
            stats=self.stats(),
            run=self.run,
        )
        stub = rpc.RegistryStub(self.channel)
        reply = await stub.Register(
            request, timeout=60, metadata=_security.authorization(self.token)
        )
        self.epoch, self.every = reply.epoch, reply.beat_seconds

    async def stop(self) -> None:
        await self.web.cleanup()
        await super().stop()

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {
                "object": "list",
                "data": [{"id": "fake", "object": "model", "owned_by": self.name}],
            }
        )

    async def complete(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == f"Bearer {self.token}"
        assert request.headers["x-jvlab-epoch"] == str(self.epoch)
        if self.refuses:
            body = {"error": {"message": "not now\n  → later"}}
            return web.json_response(
                body, status=503, headers={"x-jvlab-refused": self.refuses.pop(0)}
            )
        self.asked.append(await request.json())
        if self.engine_death == "before":
            assert request.transport is not None
            request.transport.abort()
        headers = {"x-jvlab-version": "0", "x-jvlab-replica": self.name}
        if self.asked[-1].get("stream"):
            return await self.stream(request, headers)
        await self.held()
        choice = {
            "index": 0,
            "text": self.name,
            "finish_reason": "stop",
            "logprobs": None,
        }
        body = {
            "id": "1",
            "object": "text_completion",
            "created": 0,
            "model": "fake",
            "choices": [choice],
        }
        return web.json_response(body, headers=headers)

    async def held(self) -> None:
        try:
            while self.hold:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.left += 1
            raise

    async def stream(
        self, request: web.Request, headers: dict[str, str]
    ) -> web.StreamResponse:
        answer = web.StreamResponse(
            headers={**headers, "Content-Type": "text/event-stream; charset=utf-8"}
        )
        await answer.prepare(request)
        for word in ("one", "two"):
            choice = {"index": 0, "text": word, "finish_reason": None, "logprobs": None}
            event = {
                "id": "1",
                "object": "text_completion",
                "created": 0,
                "model": "fake",
                "choices": [choice],
            }
            data = f"data: {json.dumps(event)}\n\n".encode()
            await answer.write(data[:20])  # in two pieces, as a network may cut it
            if word == "two":
                await self.held()
                if self.engine_death == "middle":
                    assert request.transport is not None
                    request.transport.abort()
                    return answer
            await answer.write(data[20:])
        await answer.write(b"data: [DONE]\n\n")
        return answer
