"""The gateway's one kind of HTTP server: loopback, the lab's token on every request, errors as JSON with a remedy."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import grpc

from jvlab._errors import ConfigError, JvlabError, LayoutError, MissingDependency, Unsupported
from jvlab.control import _registry as reg
from jvlab.control._dispatch import Fatal
from jvlab.control._security import MAX_MESSAGE

if TYPE_CHECKING:
    from aiohttp import web

HOST = "127.0.0.1"
END_SECONDS = 1.0  # for answers under way when the server ends
FROM_GRPC = {
    grpc.StatusCode.INVALID_ARGUMENT: 400, grpc.StatusCode.FAILED_PRECONDITION: 409, grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNAVAILABLE: 503, grpc.StatusCode.DEADLINE_EXCEEDED: 504, grpc.StatusCode.UNIMPLEMENTED: 501,
}  # fmt: skip
Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


class Refusal(Exception):
    """An answer that is an error: its status, what is wrong, and what to do."""

    def __init__(self, status: int, message: str, remedy: str, kind: str = "refused", **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.remedy, self.kind = status, message, remedy, kind
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def error_body(status: int, message: str, remedy: str = "", kind: str = "refused", **more: Any) -> dict[str, Any]:
    """An error as OpenAI's clients read it, with our remedy."""
    text = f"{message}\n  → {remedy}" if remedy else message
    return {"error": {"message": text, "type": kind, "param": None, "code": status, "remedy": remedy, **more}}


def refusal_of(error: Exception) -> Refusal:
    """What an error of the control plane is in HTTP; raises it again if it is none of ours."""
    match error:
        case Refusal():
            return error
        case Fatal():
            message, _, remedy = error.details.partition("\n  → ")
            return Refusal(
                FROM_GRPC.get(error.code, 500), message, remedy or "GET /bridge/status", error.code.name.lower()
            )
        case reg.Refused():
            message, _, remedy = str(error).partition("\n  → ")
            return Refusal(409, message, remedy or "GET /bridge/status")
        case MissingDependency() | Unsupported():
            return Refusal(501, error.message, error.remedy, type(error).__name__)
        case ConfigError():
            return Refusal(400, error.message, error.remedy, type(error).__name__)
        case LayoutError():
            return Refusal(422, error.message, error.remedy, type(error).__name__)
        case JvlabError():
            return Refusal(500, error.message, error.remedy, type(error).__name__)
        case _:
            raise error


def _guard(token: str, unguarded: frozenset[str]) -> Any:
    """Middleware: the token, and errors as JSON."""
    from aiohttp import web

    expected = token.encode()

    def fits(given: str) -> bool:
        scheme, _, word = given.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(word.strip().encode(), expected)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in unguarded and not fits(request.headers.get("Authorization", "")):
            body = error_body(
                401, "the lab's token is missing or wrong", "Authorization: Bearer <token>", "unauthorized"
            )
            return web.json_response(body, status=401)
        try:
            return await handler(request)
        except web.HTTPException as error:  # aiohttp's own: no such route, another method, too large a body
            body = error_body(error.status, f"{request.method} {request.path}: {error.reason}", "", "http")
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            return web.json_response(body, status=error.status, headers=allowed)
        except (Refusal, Fatal, reg.Refused, JvlabError) as error:
            said = refusal_of(error)
            body = error_body(said.status, said.message, said.remedy, said.kind)
            return web.json_response(body, status=said.status, headers=said.headers)

    return guard


class Listener:
    """A server that listens; `close()` leaves neither its port nor a request."""

    def __init__(self, runner: web.AppRunner, port: int, endings: tuple[Callable[[], Awaitable[None]], ...]) -> None:
        self._runner, self.port, self._endings = runner, port, endings
        self.url = f"http://{HOST}:{port}"

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            await self._runner.cleanup()
        for end in self._endings:
            await end()


async def listen(
    routes: Iterable[tuple[str, str, Handler]],
    token: str,
    port: int,
    unguarded: Iterable[str] = (),
    endings: tuple[Callable[[], Awaitable[None]], ...] = (),
) -> Listener:
    """Serve (method, path, handler) on a loopback port, 0 for a free one. `endings` are done after the last request."""
    try:
        from aiohttp import web
    except ImportError as error:
        raise MissingDependency(
            f"HTTP needs aiohttp, which is not installed: {error}", remedy="pip install aiohttp"
        ) from error
    app = web.Application(middlewares=[_guard(token, frozenset(unguarded))], client_max_size=MAX_MESSAGE)
    for method, path, handler in routes:
        app.router.add_route(method, path, handler)
    # A client that leaves cancels its request, and with it the request in the engine.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=END_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, port).start()
    except (OSError, OverflowError) as error:
        await runner.cleanup()
        raise ConfigError(
            f"cannot serve HTTP on {HOST}:{port}: {error}", remedy="is the port taken? http=True takes a free one"
        ) from error
    return Listener(runner, runner.addresses[0][1], endings)
